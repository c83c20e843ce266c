"""Results side by side: bars per GPU, node and rack that say how sure each figure is, and which ratios hold."""

from __future__ import annotations

from collections.abc import Iterator

from megatoken.analysis.comparison import FILES, UNSTATED, Difference
from megatoken.report.bars import Bar, bar_chart
from megatoken.report.blocks import Badge, Cell, Column, Figure, Points, Table, View, Words, section
from megatoken.report.documents import Document
from megatoken.report.views.common import records_table, state_cell, view
from megatoken.report.words import aligned, plain_text
from megatoken.text import precise

BASES = {
    "per_gpu": ("Per GPU", "per_gpu_tokens_per_second"),
    "per_node": ("Per node", "per_node_tokens_per_second"),
    "per_rack": ("Per rack", "per_rack_tokens_per_second"),
    "total": ("Whole system", "output_tokens_per_second"),
}
SHOWN_DIFFERENCES = 3  # in the sentence of a pair; the table of ratios has all
POWER = ("measured_watts", "nameplate_watts", "measured_over_nameplate")
EFFICIENCY = {"tokens_per_joule_measured": "measured", "tokens_per_joule_nameplate": "nameplate"}
LONG = (*FILES, "rows_sha256", "data_set_sha256", "shared_with")  # with every ratio where they matter
IN_OTHER_TABLES = ("per_rack_measured", "software", "repeats", "note", "tokens")
TWICE = (*(key for _, key in BASES.values()), *IN_OTHER_TABLES, *POWER, *EFFICIENCY, *LONG)


def comparison_view(document: Document) -> View:
    """The report on ``megatoken compare``."""
    rows = document.parts("rows")
    sections = (
        section("Side by side", *_figures(rows)),
        section("Ratios", _ratios(document)),
        section("Figures", *_tables(rows)),
        section("Software", _software(document, rows)),
    )
    without = [row for row in rows if row.text("state") == "no data"]
    answers = tuple(
        ("", answer)
        for answer in (
            *_answers(document, [row.text("name") for row in rows]),
            *(f"{row.text('name')}: {row.text('note')}" for row in without),
            *_rounds(rows),
        )
    )
    summary = [Points("", answers)] if answers else []
    return view(document, "comparison", summary, sections, notes_last=True)


def _rounds(rows: list[Document]) -> Iterator[str]:
    """Says that published rows are of different rounds of MLPerf."""
    rounds = {row.text("name").partition(":")[0]: row.text("round") for row in rows if "round" in row}
    if len(set(rounds.values())) > 1:
        of = "; ".join(f"{name} is of {round_}" for name, round_ in rounds.items())
        yield f"Rows of different rounds of MLPerf: {of}. For one round give, for example, GB200@v5.1"


def _answers(document: Document, names: list[str]) -> Iterator[str]:
    """Each pair as one sentence: a ratio that is like for like, else the first and why it is not."""
    heads = [name.partition(":")[0] for name in names]
    short = dict(zip(names, heads if len(set(heads)) == len(heads) else names, strict=True))
    for (of, to), found in _pairs(document).items():
        known = [found[basis] for basis in (*BASES, *found) if basis in found]
        alike = [ratio for ratio in known if ratio.flag("like_for_like")]
        best = (alike or known)[0]
        basis = best.text("basis")
        where = "as a whole system" if basis == "total" else BASES.get(basis, (basis, ""))[0].replace("Per", "per")
        interval = f" ({_interval(best)})" if _interval(best) else ""
        sentence = (
            f"{short.get(of, of)} serves {precise(best.number('value'))} times what {short.get(to, to)}"
            f" does {where}{interval}"
        )
        lines = _difference_lines(short.get(of, of), short.get(to, to), _differences(best))
        why = "; ".join([*lines][:SHOWN_DIFFERENCES])
        yield f"{sentence}: like for like" if alike else f"{sentence}, but not like for like: {why}"


def _figures(rows: list[Document]) -> Iterator[Figure]:
    for basis, (title, key) in BASES.items():
        bars = [Bar(_label(row), value, _state(row, basis)) for row in rows if (value := row.number(key)) is not None]
        if bars:
            yield bar_chart(title, "output tokens/s", bars)
    efficiency = [
        Bar(_label(row), value, state)
        for row in rows
        for key, state in EFFICIENCY.items()
        if (value := row.number(key)) is not None
    ]
    if efficiency:
        yield bar_chart("Tokens per joule, by measured power or by GPU nameplate power", "tokens/J", efficiency)


def _label(row: Document) -> str:
    """The generation first: it is what a reader looks for, and a bar has room for few letters."""
    count, accelerator = row.number("accelerators"), row.text("accelerator")
    size = f"{precise(count)} × " if count and accelerator else ""
    return " · ".join(filter(None, (size + accelerator, row.text("name"))))


def _state(row: Document, basis: str) -> str:
    projected = basis == "per_rack" and row.flag("per_rack_measured") is False
    return "projection" if projected else row.text("state")


def _tables(rows: list[Document]) -> Iterator[Table]:
    yield records_table("Compared results", rows, without=TWICE)
    keys = [key for _, key in BASES.values() if any(key in row for row in rows)]
    if keys:
        heads = (Column(title, "tokens/s", numeric=True) for title, key in BASES.values() if key in keys)
        names = [(row.text("name"), state_cell(row.text("state"))) for row in rows]
        rates = zip(*(aligned([precise(row.number(key)) for row in rows]) for key in keys), strict=True)
        cells = tuple((*name, *rate) for name, rate in zip(names, rates, strict=True))
        yield Table("Output tokens per second", (Column("Name"), Column("State"), *heads), cells)
    powered = [row.values for row in rows if any(key in row for key in (*POWER, *EFFICIENCY))]
    yield records_table("Power", [{key: row.get(key) for key in ("name", *POWER, *EFFICIENCY)} for row in powered])


def _ratios(document: Document) -> Table:
    """A row for each pair and a column for each basis."""
    pairs = _pairs(document)
    used = dict.fromkeys(basis for found in pairs.values() for basis in found)
    bases = [*(basis for basis in BASES if basis in used), *(basis for basis in used if basis not in BASES)]
    rows = tuple(_pair(of, to, [found.get(basis) for basis in bases]) for (of, to), found in pairs.items())
    columns = (Column("Ratio of"), *(Column(BASES.get(basis, (basis, ""))[0]) for basis in bases))
    return Table("Ratios", columns, rows, stacked=True, note=_method(document))


def _pairs(document: Document) -> dict[tuple[str, str], dict[str, Document]]:
    """The ratios of each pair, by basis."""
    pairs: dict[tuple[str, str], dict[str, Document]] = {}
    for ratio in document.parts("ratios"):
        pairs.setdefault((ratio.text("of"), ratio.text("to")), {})[ratio.text("basis")] = ratio
    return pairs


def _pair(of: str, to: str, ratios: list[Document | None]) -> tuple[Cell, ...]:
    """Differences on every basis are next to the names; those on one basis are below its ratio."""
    differing = [_differences(ratio) for ratio in ratios if ratio is not None]
    everywhere = [one for one in differing[0] if all(one in others for others in differing)]
    first = (
        Words(of),
        Words(f"over {to}", "quiet"),
        *(Words(line, "quiet") for line in _difference_lines(of, to, everywhere)),
    )
    return (first, *(_ratio(ratio, of, to, everywhere) for ratio in ratios))


def _ratio(ratio: Document | None, of: str, to: str, shared: list[Difference]) -> Cell:
    if ratio is None:
        return ""
    alike = Badge("like for like", "good") if ratio.flag("like_for_like") else Badge("not like for like", "bad")
    interval = _interval(ratio)
    value = Words(f"{precise(ratio.number('value'))}×{f' ({interval})' if interval else ''}", "strong")
    rest = [one for one in _differences(ratio) if one not in shared]
    return (value, alike, *(Words(line, "quiet") for line in _difference_lines(of, to, rest)))


def _difference_lines(of: str, to: str, differences: list[Difference]) -> Iterator[str]:
    """A line for each difference; one line for all that only one side states."""
    for one in differences:
        if UNSTATED not in (one.of, one.to):
            yield f"{one.field}: {one.of} vs {one.to}"
    for name, side in ((of, "of"), (to, "to")):
        if fields := [one.field for one in differences if getattr(one, side) == UNSTATED]:
            yield f"{name} does not state: {', '.join(fields)}"


def _interval(ratio: Document) -> str:
    interval = ratio.values.get("interval")
    return " … ".join(plain_text(end) for end in interval) if isinstance(interval, list) else ""


def _method(document: Document) -> str:
    if any("interval" in ratio for ratio in document.parts("ratios")):
        return f"Intervals: {document.text('interval_method', 'method not stated')}."
    return "No intervals: they need at least two repeats of both."


def _differences(ratio: Document) -> list[Difference]:
    return [Difference(one.text("field"), one.text("of"), one.text("to")) for one in ratio.parts("differences")]


def _software(document: Document, rows: list[Document]) -> Table | None:
    """Versions and settings that differ, a column for each result."""
    differing = dict.fromkeys(difference.text("key") for difference in document.parts("software_differences"))
    stated = [row for row in rows if row.part("software").values]
    columns = (Column("Key"), *(Column(row.text("name")) for row in stated))
    cells = tuple((key, *(plain_text(row.part("software").values.get(key)) for row in stated)) for key in differing)
    return Table("Software and settings that differ", columns, cells) if stated else None
