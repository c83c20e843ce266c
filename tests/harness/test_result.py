"""What the result says of what held a speed down."""

from __future__ import annotations

from typing import Any

import pytest

from megatoken.harness.result import core_wait_notes, engine_notes
from megatoken.runs.reasons import reason


@pytest.mark.parametrize("share", [None, 0.0, 0.05])
def test_a_quiet_machine_is_not_worth_a_note(share: float | None) -> None:
    assert core_wait_notes(share, {}) == []


def test_a_busy_machine_is() -> None:
    (note,) = core_wait_notes(0.051, {})
    assert (note["code"], note["share"]) == ("CORE_WAIT", 0.051)  # type: ignore[typeddict-item]


@pytest.mark.parametrize("facts", [{"rack_nodes": []}, {"target": {"kind": "endpoint"}}])
def test_threads_of_a_racks_engines_and_of_servers_are_not_the_drivers_affair(facts: dict[str, Any]) -> None:
    (note,) = core_wait_notes(0.051, facts)
    assert note["code"] == "DRIVER_CORE_WAIT"
    assert "threads" not in note["message"]


@pytest.mark.parametrize(
    ("late", "codes"), [(0.0049, []), (0.0051, ["DRIVER_CORE_WAIT"]), (None, ["DRIVER_CORE_WAIT"])]
)
def test_a_driver_that_waited_is_judged_by_how_late_it_was(late: float | None, codes: list[str]) -> None:
    facts: dict[str, Any] = {"scenario": "server", "target": {"kind": "endpoint"}}
    facts |= {"send_lag_seconds": {"p99": 0.0}, "request_lag_seconds": {"p99": late}} if late else {}
    notes = core_wait_notes(0.47, facts)
    assert [note["code"] for note in notes] == codes
    assert all("over the whole run" in note["message"] for note in notes)
    assert all("of the time that it wanted one, and sent them 5.1 ms" in note["message"] for note in notes if late)


def test_an_engine_that_has_all_it_wants_needs_no_note() -> None:
    assert (
        engine_notes({"device": "cpu", "kernels": "compiled", "why_no_kernels": None, "bf16_widened": False}, "bf16")
        == []
    )
    assert engine_notes({"device": "NVIDIA H200", "kernels": "Triton", "why_no_gpu": None}, "bf16") == []
    assert engine_notes({}, "bf16") == []


def test_an_engine_on_the_cpu_although_there_is_a_gpu() -> None:
    why = "runs on the CPU: the GPU back end has no fp32; take bf16 or fp8"
    (note,) = engine_notes({"device": "cpu", "kernels": "compiled", "why_no_gpu": why}, "fp32")
    assert note == reason("NO_GPU", why=why)


def test_a_saturated_client_is_described_without_contradictions() -> None:
    client = {"processes": 1, "processes_needed": 2, "busy_share": 0.996, "core_wait_share": 0.998}
    said = reason("CLIENT_SATURATED", late_share=0.0504, **client)["message"]
    assert said.startswith("5.0 % of the looks")
    assert "the busiest used 99.6 % of a core in its worst second, and one waited for 99.8 % of the time in" in said


def test_an_engine_without_kernels() -> None:
    (note,) = engine_notes({"device": "cpu", "kernels": "PyTorch only", "why_no_kernels": "no compiler g++"}, "bf16")
    assert note == reason("NO_KERNELS", why="no compiler g++")


def test_a_processor_that_widens_bf16() -> None:
    engine = {"device": "cpu", "kernels": "compiled", "bf16_widened": True}
    for precision in ("bf16", "fp8"):
        (note,) = engine_notes(engine, precision)
        assert note == reason("BF16_WIDENED")
    assert engine_notes(engine, "fp32") == []
