"""A run on the terminal: one table, the verdict with its reasons, the rules it does not meet, where the evidence is."""

from __future__ import annotations

from typing import TYPE_CHECKING

from megatoken.report.metrics import MEANING, PERCENTILES, UNRELIABLE_NOTE, MetricRow, has_unreliable, metric_rows
from megatoken.results import Run, Verdict

if TYPE_CHECKING:
    from collections.abc import Iterator

    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

WIDTH_OF_FULL_TABLE = 80
STYLES = {Verdict.VALID: "bold green", Verdict.INVALID: "bold red", Verdict.MEASURED: "bold cyan"}


def show(run: Run, console: Console | None = None) -> None:
    """Print ``run`` on ``console``, by default on standard output; without colour where that is no terminal."""
    from rich.console import Console

    console = console or Console(highlight=False)
    rows = metric_rows(run)
    console.print(table(rows, console.width))
    for line in lines(run, starred=has_unreliable(rows)):
        console.print(line, soft_wrap=True)  # a path or a message stays one line when the output goes to a file


def lines(run: Run, *, starred: bool) -> Iterator[Text]:
    """What stands below the table; ``starred`` adds what a star in it means."""
    from rich.text import Text

    if starred:
        yield Text(UNRELIABLE_NOTE, style="dim")
    yield Text.assemble((run.verdict, STYLES.get(run.verdict, "bold yellow")), f": {MEANING[run.verdict]}")
    for reason in run.reasons:
        yield Text.assemble("  ", (reason["code"], "bold"), f" {reason['message']}")
    if run.rules_unmet:
        yield Text("MLPerf rules not met:")
    for rule in run.rules_unmet:
        yield Text.assemble("  ", (rule["code"], "bold"), f" {rule['message']}")
    for note in run.result.get("notes") or ():
        yield Text(f"Note: {note}")
    yield Text(f"Run folder: {run.path}")


def table(rows: list[MetricRow], width: int) -> Table:
    """One line per metric; on a narrow terminal one line per percentile."""
    from rich import box
    from rich.table import Table

    wide = width >= WIDTH_OF_FULL_TABLE
    metrics = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False)
    metrics.add_column("Metric", overflow="fold")
    metrics.add_column("Unit", style="dim", no_wrap=True)
    metrics.add_column("Value", justify="right", no_wrap=True)
    for percentile in PERCENTILES if wide else ():
        metrics.add_column(percentile, justify="right", no_wrap=True)
    for row in rows:
        if wide or not row.percentiles:
            metrics.add_row(row.label, row.unit, row.value, *(row.percentiles if wide else ()))
        else:
            for percentile, value in zip(PERCENTILES, row.percentiles, strict=True):
                metrics.add_row(f"{row.label} {percentile}", row.unit, value)
    return metrics
