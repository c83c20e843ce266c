"""``run --qualify``: the machine is tested first, and the run folder says what it should have reached."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

from cli_support import call_here
from megatoken.analysis.qualified import TOKEN_STEP, Prediction, machine_of, predict_run
from megatoken.analysis.summary import utilisation
from megatoken.hardware.qualify.judge import answer, overall
from megatoken.hardware.qualify.shapes import CPU_TOKENS
from megatoken.harness import qualification
from megatoken.runs.run import read_run
from megatoken.runs.tables import SeriesRow, to_table

KEPT = ("facts", "memory")
KERNELS = {
    "gemm_fp32_128_all_cores": 90.0,
    **{f"layer_products_fp32_{tokens}": 10.0 + tokens / 4 for tokens in CPU_TOKENS},
    "decode_attention": 5.0,
    "prompt_attention": 20.0,
    "rms_norm": 10.0,
    "decode_step_tiny": 60.0,
    "mixed_step_tiny": 110.0,
    "decode_step": 300.0,
}


@pytest.fixture
def brief(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tests of milliseconds, and known rates in place of those that take longer."""
    cpu, _ = qualification.SETTINGS["cpu"]
    small = replace(cpu, seconds=0.02, warm_up_seconds=0.0, windows=3, buffer_bytes=2**20)
    tests = tuple(replace(test, twice=False) for test in qualification.TESTS["cpu"] if test.name in KEPT)
    real = qualification.qualify
    common = {"title": "Known", "unit": "", "better": "", "reason": "", "noisy": False, "verdict": "NO REFERENCE"}
    known = [common | {"name": name, "median": one, "windows": [one]} for name, one in KERNELS.items()]

    def extended(*arguments: Any, **more: Any) -> Iterator[dict[str, Any]]:
        for document in real(*arguments, **more):
            test = {"name": "known", "title": "Known", "fault": None, "verdict": "NO REFERENCE", "values": known}
            document |= {"tests": [*document["tests"], test]}
            document |= {"verdict": overall(document["tests"])}
            yield document | {"answer": answer(document)}

    monkeypatch.setattr(qualification, "SETTINGS", {"cpu": (small, small)})
    monkeypatch.setattr(qualification, "TESTS", {"cpu": tests})
    monkeypatch.setattr(qualification, "qualify", extended)


@pytest.mark.usefixtures("brief")
def test_the_run_folder_keeps_the_qualification_and_the_rate_that_it_predicts(tmp_path: Path) -> None:
    prompts = tmp_path / "lengths.csv"
    prompts.write_text("input_tokens,output_tokens\n" + "40,20\n" * 8)
    flags = ("--model", "tiny", "--random-weights", "--precision", "fp32", "--lengths", prompts, "--samples", 16)
    meter = tmp_path / "watts"
    meter.write_text("123.5")
    more = ("--warm-up", 0.1, "--qualify", "--power-meter", meter, "--engine.threads", 1)
    code, out, err = call_here("run", *flags, *more, "--out", tmp_path / "runs")
    assert code == 0, err
    assert "Predicted by qualify" in out
    assert "that qualify predicts: " in out
    (folder,) = (tmp_path / "runs").iterdir()
    run, document = read_run(folder), json.loads((folder / "qualify.json").read_text())
    result = run.result
    assert "that qualify predicts: " in (folder / "report.html").read_text()
    assert [test["name"] for test in document["tests"]] == [*KEPT, "known"]
    assert result["qualification"]["device"] == document["device"]
    assert result["prediction"]["output_tokens_per_second"] > 0
    assert result["prediction"]["steps"] == run.series["steps"].to_pylist()[-1]
    assert result["peaks"]["operations_per_second"] == 90e9
    assert 0 < result["mfu_share"] < 1
    assert result["peaks"]["memory_bytes_per_second"] > 0
    assert result["mbu_share"] > 0
    assert result["system_power_watts"] == pytest.approx(123.5)
    assert result["sensors_core_share"] < 0.1
    assert set(run.series["system_power_watts"].to_pylist()) == {123.5}

    severity, _ = _audited(tmp_path)
    assert severity in ("pass", "warn")  # a busy machine is slower than it should be
    other_cpu = document["machine"] | {"cpu": document["machine"]["cpu"] | {"model": "Other"}}
    tests = document["tests"]
    memory = tests[1]
    faster = [memory["values"][0] | {"median": 1e3, "spread": 0.0, "drift": 0.0, "windows": [1e3], "bound": None}]
    twice = [tests[0], memory | {"values": [*faster, *memory["values"][1:]]}, tests[2]]
    for edit, words in (
        ({"device": "another"}, "qualification.device "),
        ({"created_at": "2020-01-01T00:00:00Z"}, "s before the run"),
        ({"machine": other_cpu}, "is of another machine: cpu "),
        ({"tests": None}, "tests is not a list"),
        ({"tests": twice}, "peaks.memory_bytes_per_second "),
        ({"tests": tests[::2]}, "peaks.memory_bytes_per_second "),
    ):
        (folder / "qualify.json").write_text(json.dumps(document | edit))
        severity, found = _audited(tmp_path)
        assert severity == "fail", edit
        assert words in found
    (folder / "qualify.json").unlink()
    assert _audited(tmp_path)[0] == "fail"
    faulty = [test | ({"fault": "it crashed", "verdict": "FAIL"} if test["name"] == "memory" else {}) for test in tests]
    failed = {"tests": faulty, "verdict": "FAIL"}
    failed["answer"] = answer(document | failed)
    for of_result, of_file, expected, words in (
        ({"prediction": {}}, {}, "fail", "prediction.output_tokens_per_second None"),
        ({}, {"answer": ["All is well."]}, "warn", "says 'All is well.', and its values give another sentence"),
        ({}, failed, "warn", "the machine failed its qualification: 1 fault found: Memory (it crashed)"),
    ):
        stored = document | of_file
        said = {name: stored[name] for name in result["qualification"]}
        (folder / "result.json").write_text(json.dumps(result | {"qualification": said} | of_result))
        (folder / "qualify.json").write_text(json.dumps(stored))
        severity, found = _audited(tmp_path)
        assert severity == expected
        assert words in found

    # A folder of an earlier version, whose prediction knew no step of tiny with a prompt.
    known = tests[2] | {"values": [value for value in tests[2]["values"] if value["name"] != TOKEN_STEP]}
    older = document | {"tests": [*tests[:2], known]}
    older |= {"answer": answer(older)}
    predicted = predict_run(machine_of(older, "qualify.json"), result, run.config, run.requests)
    assert isinstance(predicted, Prediction)
    assert predicted.output_tokens_per_second > result["prediction"]["output_tokens_per_second"]
    (folder / "qualify.json").write_text(json.dumps(older))
    said = {name: older[name] for name in result["qualification"]}
    for prediction, severities in ((result["prediction"], ["fail"]), (asdict(predicted), ["pass", "warn"])):
        (folder / "result.json").write_text(json.dumps(result | {"qualification": said, "prediction": prediction}))
        assert _audited(tmp_path)[0] in severities


def _audited(folder: Path) -> tuple[str, str]:
    """The severity of what an audit finds in a qualification, and its words."""
    _, out, _ = call_here("audit", folder / "runs", "--json", "--out", folder / "audit")
    (one,) = [one for one in json.loads(out)["findings"] if one["id"] == "run_folder.qualification"]
    return one["severity"], json.dumps(one, ensure_ascii=False)


@pytest.mark.usefixtures("brief")
def test_a_model_that_is_not_a_named_shape_has_no_prediction_and_the_run_says_why(tmp_path: Path) -> None:
    flags = ("--samples", 8, "--warm-up", 0.1, "--qualify", "--engine.threads", 1)
    code, out, err = call_here("run", *flags, "--out", tmp_path / "runs")
    assert code == 0, err
    assert "No rate predicted by qualify: it predicts named shapes only" in out
    (folder,) = (tmp_path / "runs").iterdir()
    assert "No rate predicted by qualify" in (folder / "report.html").read_text()


def test_a_model_on_other_machines_is_refused(tmp_path: Path) -> None:
    code, _, err = call_here("run", "--endpoint", "http://127.0.0.1:9/v1", "--qualify", "--out", tmp_path)
    assert code != 0
    assert len(err.splitlines()) == 1


def test_utilisation_is_work_over_what_the_hardware_can_do() -> None:
    totals = {"steps": 50, "output_tokens": 200, "processed_tokens": 1100, "decoded_tokens": 100}
    totals["context_tokens"] = 4000
    levels = dict.fromkeys(SeriesRow._fields[3:12], 0)
    rows = [SeriesRow(10.0, "here", 0, **levels | {"recomputed_tokens": 100} | totals)]
    work = {
        "token_operations": 2e9,
        "sample_operations": 1e8,
        "pair_operations": 1e5,
        "weights_bytes": 1e9,
        "cached_token_bytes": 1e4,
    }
    peaks = {"operations_per_second": 1e12, "memory_bytes_per_second": 1e11}
    found = utilisation({"work": work, "peaks": peaks}, to_table(SeriesRow, rows))
    assert found["mfu_share"] == pytest.approx((1000 * 2e9 + 200 * 1e8 + 4000 * 1e5) / 10 / 1e12)
    assert found["mbu_share"] == pytest.approx((50 * 1e9 + 4000 * 1e4) / 10 / 1e11)
    assert utilisation({"work": work}, to_table(SeriesRow, rows)) == {}
    mixture = utilisation({"work": work | {"weights_bytes": None}, "peaks": peaks}, to_table(SeriesRow, rows))
    assert mixture["mbu_share"] is None
    windows = [{"keys": 10, "layers_share": 0.5}]  # half of the layers see 1000 of the keys, not 4000
    windowed = utilisation({"work": work | {"windows": windows}, "peaks": peaks}, to_table(SeriesRow, rows))
    assert windowed["mfu_share"] == pytest.approx((1000 * 2e9 + 200 * 1e8 + 2500 * 1e5) / 10 / 1e12)
    assert windowed["mbu_share"] == pytest.approx((50 * 1e9 + 2500 * 1e4) / 10 / 1e11)
