"""``megatoken run``."""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from megatoken.cli.flags import (
    FLAGS,
    ConfigFile,
    DryRun,
    Lengths,
    Model,
    Precision,
    Prompts,
    Rack,
    RandomWeights,
    RunsOut,
)
from megatoken.cli.output import Json
from megatoken.cli.streams import complain, standard_output
from megatoken.errors import ExitCode, StorageError

if TYPE_CHECKING:
    from megatoken.config import RunConfig
    from megatoken.harness.command import Check, Test
    from megatoken.harness.prepare import Prepared
    from megatoken.harness.progress import Progress
    from megatoken.targets import Target


def run(
    ctx: typer.Context,
    config_file: ConfigFile = None,
    model: Model = None,
    random_weights: RandomWeights = False,
    precision: Precision = None,
    scenario: Annotated[str | None, typer.Option(metavar="offline|server|interactive|singlestream")] = None,
    mode: Annotated[str | None, typer.Option(metavar="performance|accuracy")] = None,
    prompts: Prompts = None,
    lengths: Lengths = None,
    samples: Annotated[str | None, typer.Option(metavar="N", help="Samples to issue; per_node: on each.")] = None,
    min_duration: Annotated[str | None, typer.Option(metavar="SECONDS", help="Shortest duration of the run.")] = None,
    rate: Annotated[str | None, typer.Option(metavar="SAMPLES/S", help="Rate offered in server, interactive.")] = None,
    find_rate: Annotated[bool, typer.Option("--find-rate", help="Search the highest valid rate, confirm it.")] = False,
    compliance: Annotated[str | None, typer.Option(metavar="TEST06", help="Run MLPerf's compliance test.")] = None,
    repeat: Annotated[str | None, typer.Option(metavar="N", help="Runs of the same.")] = None,
    rules: Annotated[
        str | None, typer.Option(metavar="v5.1|v6.0|v6.1", help="MLPerf round whose rules are claimed.")
    ] = None,
    rack: Rack = None,
    out: RunsOut = None,
    dry_run: DryRun = False,
    json_only: Json = False,
) -> int:
    """Measure how fast this machine serves a model. Under MLPerf LoadGen; leaves a folder of evidence."""
    from megatoken.config import load_run_config

    declared = {
        "model": model,
        "random-weights": random_weights or None,
        "precision": precision,
        "scenario": scenario,
        "mode": mode,
        "prompts": prompts,
        "lengths": lengths,
        "samples": samples,
        "min-duration": min_duration,
        "rate": rate,
        "find-rate": find_rate or None,
        "compliance": compliance,
        "repeat": repeat,
        "rules": rules,
        "out": out,
    }
    config = load_run_config(config_file, declared | ctx.meta[FLAGS], rack)

    def test(prepared: Prepared, config: RunConfig, target: Target, progress: Progress) -> Path:
        from megatoken.harness.run import run_scenario

        facts, tokenizer = prepared.facts(), prepared.tokenizer
        return run_scenario(config, prepared.data_set, target, facts, progress, tokenizer, prepared.gate)

    return measure_and_show(config, test, dry_run=dry_run, json_only=json_only)


def measure_and_show(
    config: RunConfig, test: Test, *, dry_run: bool, json_only: bool, check: Check | None = None
) -> int:
    """Prepares, has ``test`` leave a run folder, makes its pages and prints what is in it; the exit code.

    ``check`` may refuse what is known before the weights are loaded: fields of ``result.json``, with a rack's nodes.
    """
    from megatoken.harness.command import measure
    from megatoken.harness.progress import Progress

    try:
        prepared, path = measure(config, test, Progress(json_only), check=check, dry_run=dry_run)
    except KeyboardInterrupt:
        raise KeyboardInterrupt("interrupted before the measurement began; nothing was written") from None
    if path is None:
        with standard_output():
            print(json.dumps(prepared.plan(), indent=2) if json_only else prepared.describe())
        return ExitCode.OK

    from megatoken.report import read_subject, show
    from megatoken.runs.run import Run, Verdict

    kept = f"the run is in {path}"
    with standard_output(kept):
        unwritten = _make_pages(path)
        finished = read_subject(path)
        result = finished.result if isinstance(finished, Run) else finished.values
        code = Verdict(result["verdict"]).exit_code
        # A terminal that has closed takes no report, but that is not why the run ended.
        with standard_output(kept, ExitCode.INTERRUPTED if code == ExitCode.INTERRUPTED else ExitCode.ERROR):
            if json_only:
                print(json.dumps({**result, "run_folder": str(path)}, indent=2))
            else:
                show(finished)
                if not isinstance(finished, Run):
                    print(f"Run folders: {path}")
    if unwritten is not None:
        complain(f"{unwritten}; megatoken report {shlex.quote(str(path))} makes the page then", code)
    return code


def _make_pages(path: Path) -> StorageError | None:
    """Makes the pages on what was measured, or returns why it cannot: they can be made at any time, the run cannot."""
    from megatoken.report import write_reports

    try:
        for _ in write_reports(path, movable=False):
            pass
    except StorageError as error:
        return error
    return None
