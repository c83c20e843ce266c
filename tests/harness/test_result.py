"""What a reader of a speed is told about what held it down."""

from __future__ import annotations

import pytest

from megatoken.harness.result import core_wait_notes, engine_notes


@pytest.mark.parametrize("share", [None, 0.0, 0.05])
def test_a_quiet_machine_is_not_worth_a_note(share: float | None) -> None:
    assert core_wait_notes(share, {}) == []


def test_a_busy_machine_is() -> None:
    (note,) = core_wait_notes(0.051, {})
    assert note.startswith("a busy machine, so slower than it could be: 5 % of the time")


def test_threads_of_a_racks_engines_are_not_the_drivers_affair() -> None:
    (note,) = core_wait_notes(0.051, {"rack_nodes": []})
    assert note.startswith("the driver's machine was busy")
    assert "threads" not in note


def test_an_engine_that_has_all_it_wants_needs_no_note() -> None:
    assert engine_notes({"device": "cpu", "kernels": "compiled kernels", "why_no_gpu": None}, "bf16") == []
    assert engine_notes({"device": "NVIDIA H200", "kernels": "Triton", "why_no_gpu": None}, "bf16") == []
    assert engine_notes({}, "bf16") == []


def test_an_engine_on_the_cpu_although_there_is_a_gpu() -> None:
    why = "runs on the CPU: the GPU back end has no fp32; take bf16 or fp8"
    assert engine_notes({"device": "cpu", "kernels": "compiled kernels", "why_no_gpu": why}, "fp32") == [why]


def test_an_engine_without_kernels() -> None:
    (note,) = engine_notes({"device": "cpu", "kernels": "PyTorch only: no compiler g++", "why_no_gpu": None}, "bf16")
    assert note.startswith("without compiled kernels, so slower than it could be: no compiler g++; ")


def test_a_processor_that_widens_bf16() -> None:
    engine = {"device": "cpu", "kernels": "compiled kernels, bf16 widened", "why_no_gpu": None}
    for precision in ("bf16", "fp8"):
        (note,) = engine_notes(engine, precision)
        assert note.startswith("this processor has no AVX-512 BF16, so the compiled kernels widen each bf16 value")
    assert engine_notes(engine, "fp32") == []
