"""``megatoken run``."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from megatoken.cli.flags import FLAGS
from megatoken.cli.streams import standard_output
from megatoken.errors import ExitCode, UsageError

if TYPE_CHECKING:
    from megatoken.harness.prepare import Prepared


def run(
    ctx: typer.Context,
    config_file: Annotated[Path | None, typer.Argument(metavar="CONFIG.yaml", help="Settings; flags win.")] = None,
    model: Annotated[str | None, typer.Option(metavar="DIR|SHAPE", help="Default: the model that ships.")] = None,
    random_weights: Annotated[bool, typer.Option("--random-weights", help="Take only DIR's shape.")] = False,
    precision: Annotated[str | None, typer.Option(metavar="fp32|bf16|fp8")] = None,
    scenario: Annotated[str | None, typer.Option(metavar="offline|server|interactive|singlestream")] = None,
    mode: Annotated[str | None, typer.Option(metavar="performance|accuracy")] = None,
    prompts: Annotated[str | None, typer.Option(metavar="FILE", help="Prompts: JSON lines or OpenOrca pickle.")] = None,
    lengths: Annotated[str | None, typer.Option(metavar="FILE", help="CSV of token lengths.")] = None,
    samples: Annotated[str | None, typer.Option(metavar="N", help="Samples to issue.")] = None,
    min_duration: Annotated[str | None, typer.Option(metavar="SECONDS", help="Shortest duration of the run.")] = None,
    rate: Annotated[str | None, typer.Option(metavar="SAMPLES/S", help="Rate offered in server, interactive.")] = None,
    find_rate: Annotated[bool, typer.Option("--find-rate", help="Search the highest valid rate, confirm it.")] = False,
    repeat: Annotated[str | None, typer.Option(metavar="N", help="Runs of the same.")] = None,
    rules: Annotated[str | None, typer.Option(metavar="v5.1", help="MLPerf round whose rules the run claims.")] = None,
    out: Annotated[str | None, typer.Option(metavar="DIR", help="Folder that receives the run folder.")] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print the resolved plan and write nothing.")] = False,
    json_only: Annotated[bool, typer.Option("--json", help="Print one JSON document and nothing else.")] = False,
) -> int:
    """Measure how fast this machine serves a model, under MLPerf LoadGen, and leave a folder of evidence."""
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
        "repeat": repeat,
        "rules": rules,
        "out": out,
    }
    config = load_run_config(config_file, declared | ctx.meta[FLAGS])
    try:
        from megatoken.harness.prepare import prepare  # PyTorch with it, which takes a while

        prepared = prepare(config)
        path = None if dry_run else _measure(prepared, quiet=json_only)
    except KeyboardInterrupt:
        raise KeyboardInterrupt("interrupted before the measurement began; nothing was written") from None
    if path is None:
        with standard_output():
            print(json.dumps(prepared.plan(), indent=2) if json_only else prepared.describe())
        return ExitCode.OK

    from megatoken.report import read_subject, show, write_reports
    from megatoken.results import Run, Verdict

    kept = f"the run is in {path}"
    with standard_output(kept):
        for _ in write_reports(path):
            pass
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
    return code


def _measure(prepared: Prepared, quiet: bool) -> Path:
    """Loads the weights and runs the measurement; returns the run folder."""
    from megatoken.harness.prepare import build_engine, resolve
    from megatoken.harness.progress import Progress
    from megatoken.harness.run import run_scenario
    from megatoken.targets.in_process import InProcessTarget

    progress = Progress(quiet)
    for warning in prepared.warnings:
        progress.note(f"warning: {warning}")
    progress.stage(f"loading {prepared.model.name} in {prepared.config.precision}")
    try:
        engine = build_engine(prepared.config)
        if prepared.config.text and engine.tokenizer is None:
            raise UsageError(f"text: {prepared.model.name} has no tokenizer.json; add it to the model's folder")
        config, target = resolve(prepared.config, engine.memory_plan), InProcessTarget(engine)
        facts, tokenizer = prepared.facts(), engine.tokenizer
        return run_scenario(config, prepared.data_set, target, facts, progress, tokenizer, prepared.gate)
    finally:
        progress.clear()
