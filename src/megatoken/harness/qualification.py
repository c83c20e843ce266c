"""``run --qualify``: the machine is tested before the weights are loaded; its document goes into the run folder."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from megatoken.analysis.qualified import Prediction, machine_of, predict_run
from megatoken.config import RunConfig
from megatoken.errors import UsageError
from megatoken.hardware.qualify.catalog import SETTINGS, TESTS, choose, device_here
from megatoken.hardware.qualify.session import qualify
from megatoken.harness.progress import Progress
from megatoken.runs.run import QUALIFICATION

if TYPE_CHECKING:
    import pyarrow as pa


def qualify_first(config: RunConfig, progress: Progress) -> dict[str, Any]:
    """Run the quick set and return its document. Raises UsageError: the model does not run in this process."""
    if config.rack.cluster is not None or config.endpoint.urls is not None:
        raise UsageError("qualify: tests the machine of an engine in this process; run megatoken qualify on each node")
    device = "cpu" if config.engine.device == "cpu" else device_here()
    folder = next(parent for parent in (config.out, *config.out.absolute().parents) if parent.is_dir())
    precision = config.precision if config.precision in ("fp32", "bf16") else None  # what the run will be predicted in
    setting = replace(SETTINGS[device][False], folder=folder, precision=precision)

    def report(done: int, tests: int) -> None:
        progress.stage(f"qualifying the machine: test {done + 1} of {tests}")

    *_, document = qualify(choose(TESTS[device], (), full=False), setting, device, progress=report)
    return document


def prediction_facts(
    document: Mapping[str, Any], result: Mapping[str, Any], config: Mapping[str, Any], requests: pa.Table
) -> dict[str, Any]:
    """The field ``prediction``: what the machine of a qualification should have reached, or why that is unknown."""
    found = predict_run(machine_of(document, QUALIFICATION), result, config, requests)
    if not isinstance(found, Prediction):
        return {"output_tokens_per_second": None, "why": found}
    return {
        "output_tokens_per_second": found.output_tokens_per_second,
        "steps": found.steps,
        "part_seconds": found.part_seconds,
    }
