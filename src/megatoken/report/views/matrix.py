"""What ran where: a row for each model, a column for each target."""

from __future__ import annotations

from megatoken.analysis.history import Cell as Place
from megatoken.analysis.history import Matrix
from megatoken.report.blocks import Badge, Cell, Column, Table, View, Words, section
from megatoken.report.metrics import verdict_badge
from megatoken.text import count_of, precise

FOOTER = "Made by megatoken from the run folders; megatoken report --matrix rebuilds the page from them."
NOTE = (
    "Output tokens/s of the fastest run that finished. Rates of different prompts or settings are not like for like:"
    " megatoken compare says which are."
)


def matrix_view(matrix: Matrix, name: str) -> View:
    """The matrix of the runs in the folder ``name``."""
    title = f"What ran where: {count_of(len(matrix.works), 'model')} on {count_of(len(matrix.targets), 'target')}"
    return View(f"{title} in {name}", "matrix", (), (section("What ran where", matrix_table(matrix)),), FOOTER)


def matrix_table(matrix: Matrix) -> Table:
    """A cell for each model on each target: rate and verdict, or that it was not run."""
    rows = tuple(
        (
            (Words(work[0], "strong"), Words(" ".join(filter(None, work[1:])), "quiet")),
            *(_cell(matrix.cells.get((work, target))) for target in matrix.targets),
        )
        for work in matrix.works
    )
    return Table("What ran where", (Column("Model"), *map(Column, matrix.targets)), rows, note=NOTE)


def _cell(place: Place | None) -> Cell:
    if place is None:
        return (Badge("not run", "quiet"),)
    more = (Words(f"of {place.runs:,} runs", "quiet"),) if place.runs > 1 else ()
    rate = place.best.output_tokens_per_second
    shown = f"{precise(rate)} tokens/s" if rate is not None else "no rate"
    return (Words(shown), verdict_badge(place.best.verdict), *more)
