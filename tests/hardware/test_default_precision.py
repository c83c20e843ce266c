"""Which precision an engine takes on this processor when the user names none."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from cli_support import call_here
from megatoken.engine.checkpoint import open_model
from megatoken.engine.config import EngineConfig
from megatoken.engine.device import settle
from megatoken.hardware import doctor, precision
from megatoken.hardware.inventory import BF16_INSTRUCTIONS, cpu, multiplies_bf16
from megatoken.hardware.precision import settle_fastest
from megatoken.harness import prepare
from megatoken.runs.run import read_run
from megatoken.serve.opened_engine import open_engine
from megatoken.serve.options import ServeConfig, ServeEngineSection

CPU = EngineConfig(device="cpu", threads=1)


def chosen(config: EngineConfig) -> str:
    return settle_fastest(open_model("tiny", random_weights=True, seed=0), config)[0].precision


@pytest.fixture(params=[False, True], ids=["without", "with"])
def has_bf16(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    for module in (precision, doctor, prepare):
        monkeypatch.setattr(module, "multiplies_bf16", lambda: request.param)
    return bool(request.param)


def test_fp32_where_the_processor_widens_bf16(has_bf16: bool) -> None:
    assert chosen(CPU) == ("bf16" if has_bf16 else "fp32")


def test_detection_is_of_this_processor() -> None:
    assert multiplies_bf16() is bool(set(BF16_INSTRUCTIONS) & set(cpu()["instruction_sets"]))


@pytest.mark.parametrize("cache_tokens", [2048, None], ids=["no room", "a shorter context"])
def test_bf16_where_fp32_does_not_fit(cache_tokens: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(precision, "multiplies_bf16", lambda: False)
    source = open_model("tiny", random_weights=True, seed=0)
    _, plan = settle(source, replace(CPU, cache_tokens=2048))
    scarce = replace(CPU, memory_bytes=plan.total_bytes, cache_tokens=cache_tokens)
    assert settle(source, scarce)[1].max_length == plan.max_length
    assert chosen(scarce) == "bf16"
    more = replace(scarce, memory_bytes=2 * plan.total_bytes)
    assert chosen(more) == ("fp32" if cache_tokens else "bf16")  # else bf16 would hold more tokens
    assert chosen(replace(scarce, memory_bytes=None)) == "fp32"


def test_the_run_says_what_was_chosen_and_a_named_precision_stays(has_bf16: bool, tmp_path: Path) -> None:
    (tmp_path / "lengths.csv").write_text("input_tokens,output_tokens\n4,4\n")
    shared = ("--model", "tiny", "--random-weights", "--lengths", tmp_path / "lengths.csv", "--samples", 2)
    shared += ("--warm-up", 0, "--engine.threads", 1, "--engine.device", "cpu")

    def run(name: str, *options: Any) -> tuple[str, str, bool]:
        code, _, err = call_here("run", *shared, "--out", tmp_path / name, *options)
        assert code == 0, err
        (folder,) = (tmp_path / name).iterdir()
        result = read_run(folder).result
        noted = any(note["code"] == "PRECISION_CHOSEN" for note in result["notes"])
        return result["precision"], yaml.safe_load((folder / "config.yaml").read_text())["precision"], noted

    default = "bf16" if has_bf16 else "fp32"
    assert run("default") == (default, default, not has_bf16)
    assert run("named", "--precision", "bf16") == ("bf16", "bf16", False)


@pytest.mark.parametrize("named", ["bf16", "fp32", None])
def test_a_dry_run_warns_of_a_named_precision_that_the_processor_widens(has_bf16: bool, named: str | None) -> None:
    flags = ("--precision", named) if named else ()
    code, out, _ = call_here("run", "--dry-run", "--model", "tiny", "--engine.device", "cpu", *flags)
    assert code == 0
    assert ("widen each bf16 value" in out) is (named == "bf16" and not has_bf16)


def test_the_server_knows_what_was_chosen(has_bf16: bool) -> None:
    engine = ServeEngineSection(device="cpu", threads=1, max_sequences=4)
    opened = open_engine(ServeConfig(model="tiny", random_weights=True, engine=engine), lambda step: None)
    opened.close()
    assert opened.chosen_precision == (None if has_bf16 else "fp32")


def test_the_doctor_says_it(has_bf16: bool, tmp_path: Path) -> None:
    (finding,) = (one for one in doctor.check_system(tmp_path) if one.code == "cpu_precision")
    assert finding.state == doctor.State.OK
    assert ("run on it in bf16" if has_bf16 else "run on it in fp32") in finding.message
