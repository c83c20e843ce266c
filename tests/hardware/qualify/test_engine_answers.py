"""Answers of the reference model: those in the package, and what a wrong bit of its weights does to them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from megatoken.hardware.qualify import engine_answers
from megatoken.hardware.qualify.catalog import HardwareTest
from megatoken.hardware.qualify.session import qualify
from megatoken.hardware.qualify.values import NotRun, Setting, Value


@pytest.fixture(autouse=True)
def few(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_answers, "CPU_SIZES", (24, 8, 256))


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_answers_are_those_of_the_package(precision: str, tiny: Setting) -> None:
    repeated, kept = engine_answers.on_cpu(replace(tiny, precision=precision))  # type: ignore[arg-type]
    assert isinstance(repeated, Value) and isinstance(kept, Value)
    assert (repeated.windows, kept.windows) == ([0], [0])
    assert repeated.title == f"24 answers of the reference model in {precision}, computed twice"


def test_the_package_has_a_checksum_for_each_prompt_and_precision() -> None:
    for precision in ("fp32", "bf16", "fp8"):
        weights, sums = engine_answers.stored(precision)  # type: ignore[arg-type]
        assert (len(weights), len(sums)) == (64, engine_answers.GPU_SIZES[0])


def test_few_other_answers_are_rounding_and_many_are_wrong(tiny: Setting, monkeypatch: pytest.MonkeyPatch) -> None:
    weights, right = engine_answers.stored("fp32")
    for different, wrong in ((0, 0), (2, 0), (3, 3)):
        known = [one ^ (number < different) for number, one in enumerate(right)]
        monkeypatch.setattr(engine_answers, "stored", lambda precision, known=known: (weights, known))
        _, kept, _ = engine_answers._compared("fp32", 100, 32, 1024)
        assert isinstance(kept, Value) and kept.windows == [wrong]
        assert kept.note == (f"{different} answers of other tokens; rounding may change 2" if different else "")


@pytest.mark.parametrize(
    ("name", "text"),
    [
        *(("STORED", text) for text in (None, "{", "[]", "{}", '{"checksums": {"fp32": ""}, "weights_sha256": "a"}')),
        *(("PROMPTS", text) for text in (None, "{", "[]", '{"prompt": "one"}')),
        ("STORED", "other weights"),
    ],
)
def test_a_damaged_package_is_no_fault_of_the_machine(
    name: str, text: str | None, tiny: Setting, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "file"
    if text == "other weights":
        text = engine_answers.STORED.read_text().replace(engine_answers.stored("fp32")[0], "0" * 64)
    if text is not None:
        file.write_text(text)
    monkeypatch.setattr(engine_answers, name, file)
    (not_run,) = engine_answers.on_cpu(replace(tiny, precision="fp32"))
    assert isinstance(not_run, NotRun) and not_run.enable == "install megatoken again"
    assert "is damaged in" in not_run.reason


def test_a_wrong_bit_of_a_weight_is_found_and_named(tiny: Setting) -> None:
    *_, document = qualify(
        [HardwareTest("answers", "Answers", "qualify_faults:flipped_weight")], replace(tiny, precision="fp32"), "cpu"
    )
    failed = {value["name"] for test in document["tests"] for value in test["values"] if value["verdict"] == "FAIL"}
    assert failed == {"repeat_answers_fp32"}
    assert document["answer"][0].startswith("1 fault found: ")
