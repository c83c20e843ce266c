"""Run folders of schema version 1 stay readable; ``tests/data`` has one that version 1 wrote."""

from pathlib import Path

import pytest

from megatoken.analysis.lookup import read_consistent_run
from megatoken.analysis.statistics import summarise
from megatoken.runs.run import Verdict
from megatoken.runs.version_1 import upgrade_result

FOLDER = Path(__file__).parents[1] / "data" / "run_folder_version_1"


def test_a_folder_of_version_1_reads_as_version_2() -> None:
    run = read_consistent_run(FOLDER)
    assert run.verdict is Verdict.MEASURED
    assert [note["code"] for note in run.result["notes"]] == [
        *("RANDOM_PROMPTS", "RANDOM_WEIGHTS", "BF16_WIDENED", "CORE_WAIT")
    ]
    assert run.result["notes"][3]["share"] == 0.65
    assert run.result["random_weights"] is True
    target, plan = run.result["target"], run.result["memory_plan"]
    assert (target["simulated_gpu"], target["why_no_kernels"], target["bf16_widened"]) == (None, None, True)
    assert plan["max_batched_tokens"] == run.config["engine"]["max_batched_tokens"] == 256
    assert set(run.series["max_batched_tokens"].to_pylist()) == {256}


def test_the_tables_of_version_1_give_the_numbers_that_it_states() -> None:
    run = read_consistent_run(FOLDER)
    expected = summarise(run.requests, run.series, scenario="offline")
    for name in ("output_tokens", "output_tokens_per_second", "tpot_seconds", "stages"):
        assert run.result[name] == expected[name]


@pytest.mark.parametrize(
    ("note", "code", "fields"),
    [
        (
            "every GPU is a simulated H200: speed and text are made up",
            "SIMULATED_GPU",
            {"gpu": "H200"},
        ),
        ("node-1: random weights: the speed is real, the text is not", "RANDOM_WEIGHTS", {"node": "node-1"}),
        (
            "without compiled kernels, so slower than it could be: no compiler g++; on Linux, GCC (g++) makes them",
            "NO_KERNELS",
            {"why": "no compiler g++"},
        ),
        (
            "n0: the driver's machine was busy, so replicas may have waited for samples: 48 % of the time that the"
            " driver wanted a core, it had to wait for one; end other work there",
            "DRIVER_CORE_WAIT",
            {"share": 0.48, "node": "n0"},
        ),
        ("something else: of a data set", "NOTE", {"text": "something else: of a data set"}),
    ],
)
def test_notes_of_version_1_get_codes(note: str, code: str, fields: dict[str, object]) -> None:
    assert upgrade_result({"notes": [note]})["notes"] == [{"code": code, "message": note, **fields}]


def test_the_target_of_version_1_gets_typed_fields() -> None:
    target = {"device": "simulated H200", "kernels": "PyTorch only: no compiler g++"}
    upgraded = upgrade_result({"target": target, "weights": "5f3c"})
    assert upgraded["random_weights"] is False
    assert upgraded["target"] == {
        **target,
        "simulated_gpu": "H200",
        "why_no_kernels": "no compiler g++",
        "bf16_widened": False,
    }


def test_fields_of_other_types_stay_for_the_checks_of_the_reader() -> None:
    odd = {"notes": "text", "target": [], "weights": 3, "memory_plan": None}
    assert upgrade_result(odd) == odd


def test_an_audit_finds_nothing_wrong_with_a_folder_of_version_1() -> None:
    from megatoken.audit.audit import audit

    assert not [item for item in audit(FOLDER).findings if item.severity == "fail"]
