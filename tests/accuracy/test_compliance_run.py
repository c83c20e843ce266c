"""``megatoken run --compliance TEST06``: the whole way, with the model that ships and the real LoadGen."""

import functools
import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from accuracy_files import write_log
from cli_support import call_here, write_lines
from examples import every
from megatoken.audit import Severity, audit
from megatoken.datasets.references import HELD_OUT
from megatoken.mlperf.compliance import TEST06_RECORDS

DETAIL = """:::MLLOG {"key": "effective_scenario", "value": "Offline", "time_ms": 0.1, "namespace": "mlperf::logging", \
"event_type": "POINT_IN_TIME", "metadata": {"is_error": false, "is_warning": false, "file": "a.cc", "line_no": 1, \
"pid": 1, "tid": 1}}
"""


def compliance_run(tmp_path: Path, *flags: object) -> tuple[int, Path]:
    code, out, err = call_here(
        *("run", "--compliance", "TEST06", "--warm-up", 0.3, "--json", "--engine.threads", 1),
        *("--out", tmp_path / "runs", *flags),
    )
    assert err == ""
    return code, Path(json.loads(out)["run_folder"])


# In fp32, because most processors multiply bf16 three times as slowly; the test asks for no precision.
OF_THE_MODEL = {"offline": "v6.0", "server": None, "singlestream": None}
"""Scenarios, and the round whose rules a run of each claims."""


@pytest.fixture(scope="module")
def originals(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], tuple[int, Path]]:
    """Exit code and folder of a run of the model that ships in a scenario, each made once."""

    @functools.cache
    def made(scenario: str) -> tuple[int, Path]:
        folder, round_ = tmp_path_factory.mktemp(scenario), OF_THE_MODEL[scenario]
        flags = ("--scenario", scenario, "--precision", "fp32", *(("--rules", round_) if round_ else ()))
        if scenario != "offline":  # one answer after the other, or at a rate that this takes, so short ones
            rows = [line for line in HELD_OUT.read_text().splitlines() if 4 <= len(json.loads(line)["reference"]) <= 14]
            flags = (*flags, "--prompts", write_lines(folder / "short.jsonl", *rows[:TEST06_RECORDS]))
        return compliance_run(folder, *flags)

    return made


@pytest.fixture
def offline_run(originals: Callable[[str], tuple[int, Path]], tmp_path: Path) -> Path:
    """A copy that a test may change."""
    _, run = originals("offline")
    return Path(shutil.copytree(run, tmp_path / run.name))


@pytest.mark.parametrize("scenario", ["offline", "server", *every("singlestream")])
def test_the_model_that_ships_passes(
    originals: Callable[[str], tuple[int, Path]], tmp_path: Path, scenario: str
) -> None:
    code, original = originals(scenario)
    run, round_ = Path(shutil.copytree(original, tmp_path / original.name)), OF_THE_MODEL[scenario]
    result = json.loads((run / "result.json").read_text())
    assert result["compliance"] == {
        **{"test": "TEST06", "passed": True, "sound": True, "findings": []},
        "end_token_ids": [2],
    }
    assert result["samples_completed"] == TEST06_RECORDS
    against = result["reasons"] if round_ else result["rules_unmet"]
    of_the_benchmark = ["SCENARIO"] if scenario == "singlestream" else []
    assert [rule["code"] for rule in against] == [*of_the_benchmark, "DATA_SET_SIZE"]  # nothing about speed
    assert (code, result["verdict"]) == ((3, "INVALID") if round_ else (0, "MEASURED"))
    answers = json.loads((run / "mlperf/mlperf_log_accuracy.json").read_text())
    assert len(answers) == TEST06_RECORDS
    assert all(len(answer["data"]) == 8 * answer["token_count"] for answer in answers)
    assert all(("token_data" in answer) is (scenario != "offline") for answer in answers)
    file = run / "compliance/TEST06/verify_accuracy.txt"
    first = "Skipped" if scenario == "offline" else "True"
    lines = [f"First token check pass: {first}", "EOS check pass: True", "Sample length check pass: True"]
    assert file.read_text().splitlines() == [*lines, "TEST06 verification complete"]
    grave = [finding.id for finding in audit(run).findings if finding.severity in (Severity.FAIL, Severity.WARN)]
    assert grave == []
    before = file.read_text()
    file.unlink()
    assert call_here("verify", "TEST06", run)[0] == 0
    assert file.read_text() == before


def test_a_run_that_was_verified_by_other_end_tokens_is_no_forgery(offline_run: Path) -> None:
    """Both files then name those end tokens, which the audit notes; it still recomputes what the files state."""
    run = offline_run
    assert call_here("verify", "TEST06", run, "--end-tokens", "7")[0] == 3
    found = {item.id: item for item in audit(run).findings}
    assert {item.id for item in found.values() if item.severity in (Severity.FAIL, Severity.WARN)} == set()
    noted = found["compliance.end_tokens"]
    assert (noted.severity, noted.found) == (
        Severity.NOTE,
        "compliance/TEST06/compliance.json looked for 7, the run for 2",
    )
    own = run / "compliance/TEST06/compliance.json"
    own.write_text(json.dumps({**json.loads(own.read_text()), "sound": True}))
    assert (
        "compliance.json sound True, recomputed False"
        in {item.id: item.found for item in audit(run).findings if item.severity is Severity.FAIL}[
            "compliance.recomputed"
        ]
    )


def test_what_else_a_run_of_the_test_is_no_good_for(offline_run: Path, tmp_path: Path) -> None:
    """Each refusal names the command that makes the run which is wanted, and no command sends back to another."""
    run = offline_run
    for arguments in (("verify", "TEST07", run), ("verify", "TEST09", run), ("accuracy", run)):
        code, out, err = call_here(*arguments)
        assert (code, out, err.count("\n")) == (2, "", 1)
        assert f"{run}: a run of compliance test TEST06 logs only some answers; " in err
        assert "megatoken run --mode accuracy" in err
    assert call_here("accuracy", run, "--partial")[0] == 0
    code, _, err = call_here("accuracy", run, "--baseline", run)
    assert (code, "--partial" in err) == (2, True)
    code, _, err = call_here("accuracy", run, "--baseline", run, "--partial")
    assert (code, err.count("\n"), "scored from the same log" in err) == (2, 1, True)
    whole = tmp_path / "whole"
    whole.mkdir()
    (whole / "mlperf_log_accuracy.json").write_bytes(b"\n" + (run / "mlperf/mlperf_log_accuracy.json").read_bytes())
    of_the_model = ("--references", HELD_OUT, "--model", "reference")
    code, _, err = call_here("accuracy", whole, *of_the_model, "--baseline", run)
    assert (code, err.count("\n")) == (2, 1)
    assert f"--baseline {run}: scores 100 of 2,048 rows, like a compliance test" in err


def test_answers_without_an_end_prove_nothing(tmp_path: Path) -> None:
    """Random weights whose answers are forced to their lengths: MLPerf's own check passes, ours does not."""
    lengths = tmp_path / "lengths.csv"
    lengths.write_text("input_tokens,output_tokens\n" + "".join(f"{20 + i},{2 + i % 3}\n" for i in range(40)))
    code, run = compliance_run(tmp_path, "--model", "tiny", "--lengths", lengths)
    result = json.loads((run / "result.json").read_text())
    assert (code, result["verdict"]) == (3, "INVALID")
    [reason] = result["reasons"]
    assert reason["code"] == "COMPLIANCE"
    assert "no answer has an end token of the model" in reason["message"]
    assert (result["compliance"]["passed"], result["compliance"]["sound"]) == (True, False)
    assert "verification complete" in (run / "compliance/TEST06/verify_accuracy.txt").read_text()
    own = run / "compliance/TEST06/compliance.json"
    assert json.loads(own.read_text()) == result["compliance"]
    own.unlink()
    for flags in ((), ("--model", "tiny"), ("--end-tokens", "2")):
        code, out, _ = call_here("verify", "TEST06", run, *flags, "--json")
        assert (code, json.loads(out)) == (
            3,
            result["compliance"] | {"file": str(own.with_name("verify_accuracy.txt"))},
        )
    assert json.loads(own.read_text()) == result["compliance"]
    code, out, _ = call_here("audit", run)
    assert code == 0 and "No check fails, but the run itself is INVALID: COMPLIANCE" in " ".join(out.split()), out
    found = {item.id: item for item in audit(run).findings}["run_folder.healthy"]
    assert (found.severity, found.found.startswith("INVALID: COMPLIANCE no answer has an end token")) == (
        Severity.WARN,
        True,
    )


@pytest.mark.parametrize(
    ("test", "flags", "problem"),
    [
        ("TEST08", (), "TEST08: unknown compliance test; give TEST06, TEST07, TEST09\n"),
        ("TEST06", ("--model", "absent"), "--model absent: the model's end tokens are unknown; give --model DIR or "),
    ],
)
def test_what_cannot_be_verified(tmp_path: Path, test: str, flags: tuple[str, ...], problem: str) -> None:
    write_log(tmp_path / "mlperf_log_accuracy.json", [[5, 2]] * TEST06_RECORDS)
    (tmp_path / "mlperf_log_detail.txt").write_text(DETAIL)
    code, _, err = call_here("verify", test, tmp_path, *flags)
    assert (code, err.count("\n")) == (2, 1)
    assert err.startswith(f"megatoken: {problem}")


@pytest.mark.parametrize(("model", "code"), [("reference", 0), ("tiny", 0), ("llama3.1-8b", 3)])
def test_end_tokens_of_models_that_ship(tmp_path: Path, model: str, code: int) -> None:
    write_log(tmp_path / "mlperf_log_accuracy.json", [[5, 2]] * TEST06_RECORDS)
    (tmp_path / "mlperf_log_detail.txt").write_text(DETAIL)
    assert call_here("verify", "TEST06", tmp_path, "--model", model)[0] == code


@pytest.mark.parametrize(
    "flags",
    [
        ("--mode", "accuracy"),
        ("--samples", 5),
        ("--min-duration", 5),
        ("--repeat", 2),
        ("--scenario", "server", "--find-rate"),
    ],
)
def test_what_the_test_decides_itself_is_refused(tmp_path: Path, flags: tuple[object, ...]) -> None:
    code, _, err = call_here("run", "--compliance", "TEST06", *flags, "--out", tmp_path / "runs")
    assert code == 2
    flag = next(flag for flag in reversed(flags) if str(flag).startswith("--"))
    assert f"{flag}: not supported with compliance: TEST06 defines it" in err
    assert not (tmp_path / "runs").exists()


def test_no_other_test_is_run(tmp_path: Path) -> None:
    code, _, err = call_here("run", "--compliance", "TEST07", "--out", tmp_path / "runs")
    assert code == 2
    assert err.startswith("megatoken: --compliance: must be 'TEST06' (TEST07 checks the answers to all rows: ")
    assert err.endswith(" megatoken run --mode accuracy, then megatoken verify TEST07), got 'TEST07'\n")
    code, _, err = call_here("run", "--compliance", "TEST01", "--out", tmp_path / "runs")
    assert (code, err) == (2, "megatoken: --compliance: must be 'TEST06', got 'TEST01'\n")
