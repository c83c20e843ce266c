"""``megatoken aggregate``, ``megatoken compare`` and ``megatoken check``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from megatoken.cli.flags import FLAGS, Slo, flag, key_command, place
from megatoken.cli.output import Json, Out, deliver
from megatoken.cli.streams import complain_of
from megatoken.errors import ExitCode, UsageError

CheckCommand = key_command(
    {"dollars-per-hour": ("DOLLARS", "Price of the machine for an hour, for a limit on the price of a request.")},
    prefix="limits.",
)


def aggregate(
    paths: Annotated[list[Path], place("PATH", "Run folders, folders of run folders, folders of LoadGen logs.")],
    straggler_threshold: Annotated[
        float, flag("SHARE", "A node is a straggler if its rate is this share below the median.")
    ] = 0.03,
    baseline: Annotated[float | None, flag("N", "Rate of one node running alone, tokens/s.")] = None,
    out: Out = None,
    json_only: Json = False,
) -> int:
    """Combine the results of several nodes. Reports the total rate three ways, spread, stragglers and overlap."""
    from megatoken.analysis.aggregation import aggregate as aggregated
    from megatoken.analysis.lookup import readable
    from megatoken.audit import read_evidence
    from megatoken.claims.references import aggregation_folders, aggregation_rows

    found, damaged = readable(aggregation_folders(paths), lambda path: aggregation_rows([path], read_evidence))
    result = aggregated(
        [row for rows in found for row in rows],
        inputs=[str(path) for path in paths],
        straggler_threshold=straggler_threshold,
        baseline_tokens_per_second=baseline,
    )
    return _deliver(result.to_document(), damaged, json_only=json_only, out=out)


def compare(
    references: Annotated[
        list[str],
        place(
            "RESULT",
            "Run folder, repeats, sweep, folder of LoadGen logs, published id, accelerator, or CLAIMS.yaml#id.",
        ),
    ],
    benchmark: Annotated[
        str, flag("NAME", "Benchmark of published results, if RESULT does not name it.")
    ] = "llama2-70b",
    scenario: Annotated[str, flag("NAME", "Scenario of published results, if RESULT does not name it.")] = "Offline",
    slo: Slo = None,
    out: Out = None,
    json_only: Json = False,
) -> int:
    """Compare results per accelerator, node and rack. Reports which ratios compare like with like."""
    from megatoken.analysis.comparison import compare as compared
    from megatoken.analysis.lookup import readable
    from megatoken.analysis.sweep import compare_sweeps, read_sweep
    from megatoken.audit import read_evidence
    from megatoken.claims.references import comparison_entry
    from megatoken.config import load_limits
    from megatoken.planning.run_price import judged_entry

    sweeps = [found for reference in references if (found := read_sweep(Path(reference))) is not None]
    if sweeps:
        if len(sweeps) < max(2, len(references)):
            for reference in references:
                if "/" in reference and not Path(reference).exists():
                    raise UsageError(f"{reference}: no such file or folder")
            raise UsageError("a sweep can be compared with sweeps only; give two folders of megatoken sweep")
        deliver(compare_sweeps(sweeps), json_only=json_only, out=out)
        return ExitCode.OK
    asked = load_limits(slo, {}) if slo is not None else None
    entries, damaged = readable(
        references,
        lambda reference: judged_entry(
            comparison_entry(reference, read_evidence, benchmark=benchmark, scenario=scenario), asked
        ),
    )
    if damaged and len(entries) < 2:
        raise UsageError("; ".join(damaged))
    return _deliver(compared(entries).to_document(), damaged, json_only=json_only, out=out)


def _deliver(document: dict[str, Any], damaged: list[str], *, json_only: bool, out: Path | None) -> ExitCode:
    """Deliver a document with a note on each run folder that is left out, because it is damaged."""
    notes = [*(f"left out: {why}" for why in damaged), *document["notes"]]
    deliver({**document, "notes": notes}, json_only=json_only, out=out)
    return complain_of(damaged)


def check(
    ctx: typer.Context,
    paths: Annotated[list[Path], place("RUN", "Run folders, or folders of run folders.")],
    slo: Slo = None,
    out: Out = None,
    json_only: Json = False,
) -> int:
    """Judge runs by your limits. Reports MET, NOT MET or CANNOT TELL for each limit."""
    from megatoken.analysis.lookup import Unreadable, read_each
    from megatoken.config import load_limits
    from megatoken.planning.run_price import check_runs, exit_code_of

    asked = load_limits(slo, ctx.meta[FLAGS])
    runs = read_each(paths)
    document = check_runs(runs, asked)
    deliver(document, json_only=json_only, out=out)
    damaged = [run.why for run in runs if isinstance(run, Unreadable)]
    return complain_of(damaged) or exit_code_of(document["answer"])
