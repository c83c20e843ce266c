"""All GPUs of a machine as one qualification, in turn and at once, and collectives between real processes."""

from __future__ import annotations

from typing import Any

import pytest

from megatoken.hardware.qualify import collectives, rank_process
from megatoken.hardware.qualify.catalog import HardwareTest
from megatoken.hardware.qualify.judge import Verdict
from megatoken.hardware.qualify.parts import gpus_here, joined, qualify_gpus
from megatoken.hardware.qualify.rank_process import bus_share
from megatoken.hardware.qualify.values import NotRun, Setting, Value

TESTS = (
    HardwareTest("rate", "Rate", "qualify_faults:by_gpu"),
    HardwareTest("all", "All GPUs", "qualify_faults:together", whole=True),
)


@pytest.mark.parametrize("together", [False, True])
def test_every_gpu_is_tested_and_the_slow_one_is_named(
    together: bool, tiny: Setting, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1,2,3")
    assert gpus_here() == ["0", "1", "2", "3"]
    counts: list[tuple[int, int]] = []
    *before, document = qualify_gpus(
        TESTS, tiny, "cpu", gpus_here(), together=together, progress=lambda *done: counts.append(done)
    )
    names = {test["name"]: test for test in document["tests"]}
    assert set(names) == {"rate", "all", "rate@1", "rate@2", "rate@3", "spread"}
    (slow,) = [value for value in names["spread"]["values"] if value["name"] == "slow_rate"]
    assert (slow["verdict"], slow["note"]) == (Verdict.FAIL, "GPU 2: 80 GB/s")
    assert document["verdict"] == Verdict.FAIL
    assert "Rate: slow GPUs" in document["answer"][0]
    assert document["complete"] and not before[0]["complete"]
    assert max(counts)[1] == 5


def test_of_two_parts_only_the_ratio_is_stated() -> None:
    def document(rate: float) -> dict[str, Any]:
        value = {"name": "rate", "title": "Rate", "unit": "GB/s", "better": "higher", "median": rate}
        value |= {"verdict": "PASS", "windows": [rate], "noisy": False, "core_wait_share": None, "reason": ""}
        test = {"name": "t", "title": "T", "verdict": "PASS", "fault": None, "seconds": 1.0, "values": [value]}
        return {"tests": [test], "complete": True, "verdict": "PASS", "notes": [f"rated {rate:.0f}"]}

    both = joined({"a": document(50.0), "b": document(100.0)}, "node", expected=2, seconds=1.0)
    (value,) = both["tests"][-1]["values"]
    assert (value["name"], value["median"], value["verdict"]) == ("ratio_rate", 0.5, "NO REFERENCE")
    assert both["notes"] == ["rated 50", "node b: rated 100"]


def test_collectives_between_processes_have_the_right_results(tiny: Setting, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(collectives, "CPU_SIZES", (2**12,))
    monkeypatch.setattr(collectives, "cores_within_quota", lambda: 3)
    found = {one.name: one for one in collectives.on_cpu(tiny)}
    assert list(found) == [f"{name}_4096" for name in rank_process.OPERATIONS] + ["collective_errors"]
    errors = found["collective_errors"]
    assert isinstance(errors, Value) and errors.windows == [0]
    assert all(isinstance(one, Value) and one.median > 0 for one in list(found.values())[:4])
    assert (bus_share("all_reduce", 4), bus_share("all_to_all", 4)) == (1.5, 0.75)


def test_a_rank_that_fails_is_named_and_leaves_no_process(tiny: Setting) -> None:
    (why,) = [one for one in collectives.run_ranks("no-such-backend", 2, (64,), 1, 0.01) if isinstance(one, str)]
    assert why.startswith("rank 0 failed: ") and "no-such-backend" in why.lower()


def test_a_wrong_sum_is_counted() -> None:
    run, check = rank_process.prepared("all_reduce", 64, 4, 1, rank_process.torch.device("cpu"))
    assert callable(run)
    assert check() == 16  # nothing was added up: all elements are wrong


def test_on_one_gpu_collectives_say_what_they_need(tiny: Setting) -> None:
    (outcome,) = collectives.on_gpus(tiny)
    assert isinstance(outcome, NotRun) and "two GPUs" in outcome.enable
