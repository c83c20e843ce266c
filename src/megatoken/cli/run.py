"""``megatoken run`` and ``megatoken rerun``."""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from megatoken.cli.flags import (
    ENDPOINT_KEYS,
    FLAGS,
    MODEL_KEYS,
    OUT_KEYS,
    PROMPT_KEYS,
    ConfigFile,
    DryRun,
    Rack,
    Slo,
    flag,
    key_command,
    place,
)
from megatoken.cli.output import Json, deliver
from megatoken.cli.streams import complain, standard_output
from megatoken.errors import ExitCode, StorageError

if TYPE_CHECKING:
    from megatoken.config import RunConfig
    from megatoken.harness.command import Check, Test


RunCommand = key_command(
    {
        **MODEL_KEYS,
        **ENDPOINT_KEYS,
        "scenario": ("offline|server|interactive|singlestream", "How requests arrive."),
        "mode": ("performance|accuracy", "Measure speed, or log all answers."),
        **PROMPT_KEYS,
        "samples": ("N", "Number of samples; with --rack.count per_node, per node."),
        "min-duration": ("SECONDS", "Minimum duration of the run."),
        "rate": ("SAMPLES/S", "Request rate of the server and interactive scenarios."),
        "find-rate": ("", "Find the highest valid rate and confirm it."),
        "compliance": ("TEST06", "Run an MLPerf compliance test."),
        "repeat": ("N", "Number of repeated runs."),
        "rules": ("v5.1|v6.0|v6.1", "MLPerf round whose rules the run claims; ends VALID or INVALID."),
        **OUT_KEYS,
    }
)


def run(
    ctx: typer.Context,
    config_file: ConfigFile = None,
    rack: Rack = None,
    slo: Slo = None,
    dry_run: DryRun = False,
    json_only: Json = False,
) -> int:
    """Measure how fast this machine, or a server, serves a model. Uses MLPerf LoadGen; writes a run folder."""
    from megatoken.config import load_run_config
    from megatoken.harness.run import run_prepared

    config = load_run_config(config_file, ctx.meta[FLAGS], rack, slo)

    return measure_and_show(config, run_prepared, dry_run=dry_run, json_only=json_only)


def measure_and_show(
    config: RunConfig,
    test: Test,
    *,
    dry_run: bool,
    json_only: bool,
    check: Check | None = None,
    brings_requests: bool = False,
) -> int:
    """Run ``test``, write its report pages and print the result; returns the exit code.

    ``check`` may refuse the run before the weights are loaded; it gets the fields of ``result.json`` known by then.
    With ``brings_requests`` the test has requests of its own, and no data set is read.
    """
    from megatoken.harness.command import measure
    from megatoken.harness.progress import Progress

    try:
        prepared, path = measure(
            config, test, Progress(json_only), check=check, dry_run=dry_run, brings_requests=brings_requests
        )
    except KeyboardInterrupt as interruption:
        words = str(interruption) or "interrupted before the measurement began; nothing was written"
        raise KeyboardInterrupt(words) from None
    if path is None:
        with standard_output():
            print(json.dumps(prepared.plan(), indent=2) if json_only else prepared.describe())
        return ExitCode.OK

    from megatoken.analysis.limits import limit_documents
    from megatoken.planning.run_price import broken_limits, judge_run
    from megatoken.report import read_subject
    from megatoken.report.console import show
    from megatoken.runs.run import Run, Verdict

    kept = f"the run is in {path}"
    with standard_output(kept):
        unwritten = _make_pages(path)
        finished = read_subject(path)
        result = finished.result if isinstance(finished, Run) else finished.values
        code = Verdict(result["verdict"]).exit_code
        if code is ExitCode.OK and broken_limits(path):
            code = ExitCode.INVALID
        # A closed terminal cannot show the report, but that did not end the run.
        with standard_output(kept, ExitCode.INTERRUPTED if code == ExitCode.INTERRUPTED else ExitCode.ERROR):
            if json_only:
                judged = limit_documents(judge_run(finished)) if isinstance(finished, Run) else []
                limits = {"limits": judged} if judged else {}
                print(json.dumps({**result, **limits, "run_folder": str(path)}, indent=2))
            else:
                show(finished)
                if not isinstance(finished, Run):
                    print(f"Run folders: {path}")
    if unwritten is not None:
        complain(f"{unwritten}; megatoken report {shlex.quote(str(path))} writes the page later", code)
    return code


def _make_pages(path: Path) -> StorageError | None:
    """Write the report pages; returns the error if it cannot, because pages can be rebuilt later and a run cannot."""
    from megatoken.report import write_reports

    try:
        for _ in write_reports(path, movable=False):
            pass
    except StorageError as error:
        return error
    return None


def rerun(
    path: Annotated[Path, place("RUN", "Run folder of megatoken run.")],
    check: Annotated[bool, typer.Option("--check", help="Only compare what would run now; measure nothing.")] = False,
    out: Annotated[Path | None, flag("DIR", "Folder to create the new run folder in. Default: that of RUN.")] = None,
    json_only: Json = False,
) -> int:
    """Make a run again. Names each difference in model, rows, seeds, packages and machine; compares the rates."""
    from megatoken.harness.progress import Progress
    from megatoken.harness.rerun import check_plan
    from megatoken.harness.rerun import rerun as made_again

    progress = Progress(json_only)
    document = check_plan(path, progress) if check else made_again(path, progress, out)[0]
    deliver(document, json_only=json_only, out=None)
    rates = document["rates"]
    differs = not document["equal"] or (rates is not None and rates["agree"] is False)
    return ExitCode.INVALID if differs else ExitCode.OK
