"""Results side by side: bars per GPU, node and rack that say how sure each figure is, and which ratios hold."""

from __future__ import annotations

from collections.abc import Iterator

from megatoken.report.bars import Bar, bar_chart
from megatoken.report.blocks import Badge, Column, Figure, Section, Table, View, Words
from megatoken.report.documents import Document
from megatoken.report.views.common import records_table, state_cell, view
from megatoken.report.words import aligned, plain_text, precise

KNOWN = ("rows", "ratios", "software_differences", "interval_method")
BASES = {
    "per_gpu": ("Per GPU", "per_gpu_tokens_per_second"),
    "per_node": ("Per node", "per_node_tokens_per_second"),
    "per_rack": ("Per rack", "per_rack_tokens_per_second"),
    "total": ("Whole system", "output_tokens_per_second"),
}
POWER = ("measured_watts", "nameplate_watts", "measured_over_nameplate")
EFFICIENCY = {"tokens_per_joule_measured": "measured", "tokens_per_joule_nameplate": "nameplate"}
TWICE = (*(key for _, key in BASES.values()), "per_rack_state", *POWER, *EFFICIENCY, "software", "repeats", "note")


def comparison_view(document: Document) -> View:
    """The report on ``megatoken compare``."""
    ratios = document.parts("ratios")
    sections = (
        Section("Ratios", tuple(_ratios(document, ratios))),
        Section("Side by side", tuple(_figures(document.parts("rows")))),
        Section("Figures", tuple(_tables(document.parts("rows")))),
        Section("Software", tuple(_software(document))),
    )
    return view(document, "comparison", (), sections, KNOWN)


def _figures(rows: list[Document]) -> Iterator[Figure]:
    for basis, (title, key) in BASES.items():
        bars = [
            Bar(row.text("name"), value, _state(row, basis)) for row in rows if (value := row.number(key)) is not None
        ]
        if bars:
            yield bar_chart(title, "output tokens/s", bars)
    efficiency = [
        Bar(row.text("name"), value, state)
        for row in rows
        for key, state in EFFICIENCY.items()
        if (value := row.number(key)) is not None
    ]
    if efficiency:
        yield bar_chart("Per joule, by measured power or by nameplate of the GPUs alone", "tokens/J", efficiency)


def _state(row: Document, basis: str) -> str:
    per_rack = row.text("per_rack_state")
    return "projection" if basis == "per_rack" and per_rack.startswith("projection") else row.text("state")


def _tables(rows: list[Document]) -> Iterator[Table]:
    if rows:
        yield records_table("What is compared", [row.values for row in rows], without=TWICE)
    keys = [key for _, key in BASES.values() if any(key in row for row in rows)]
    if keys:
        heads = (Column(title, "tokens/s", numeric=True) for title, key in BASES.values() if key in keys)
        names = [(row.text("name"), state_cell(row.text("state"))) for row in rows]
        rates = zip(*(aligned([precise(row.number(key)) for row in rows]) for key in keys), strict=True)
        cells = tuple((*name, *rate) for name, rate in zip(names, rates, strict=True))
        yield Table("Output tokens per second", (Column("Name"), Column("State"), *heads), cells)
    powered = [row for row in rows if any(key in row for key in (*POWER, *EFFICIENCY))]
    if powered:
        values = [{key: row.values.get(key) for key in ("name", *POWER, *EFFICIENCY)} for row in powered]
        yield records_table("Power", values)


def _ratios(document: Document, ratios: list[Document]) -> Iterator[Table]:
    if not ratios:
        return
    rows = []
    for ratio in ratios:
        alike = ratio.flag("like_for_like")
        basis = ratio.text("basis")
        rows.append(
            (
                Badge("like for like", "good") if alike else Badge("not like for like", "bad"),
                f"{ratio.text('of')} over {ratio.text('to')}",
                BASES.get(basis, (basis, ""))[0],
                f"{precise(ratio.number('value'))}×",
                _interval(ratio),
                tuple(Words(words) for words in _differences(ratio)),
            )
        )
    columns = (
        Column("Comparable"),
        Column("Ratio of"),
        Column("Basis"),
        Column("Value", numeric=True),
        Column("Interval", numeric=True),
        Column("What differs"),
    )
    yield Table("Ratios to the first", columns, tuple(rows), stacked=True, note=_method(document, ratios))


def _interval(ratio: Document) -> str:
    interval = ratio.values.get("interval")
    return " … ".join(plain_text(end) for end in interval) if isinstance(interval, list) else ""


def _method(document: Document, ratios: list[Document]) -> str:
    if any("interval" in ratio for ratio in ratios):
        return f"Intervals: {document.text('interval_method', 'method not stated')}."
    return "No intervals: that takes two repeats or more of both."


def _differences(ratio: Document) -> Iterator[str]:
    listed = ratio.values.get("differences")
    for item in listed if isinstance(listed, list) else ():
        if isinstance(item, dict) and "field" in item:
            one, other = plain_text(item.get("of")), plain_text(item.get("to"))
            yield f"{plain_text(item['field'])}: {one} against {other}"
        else:
            yield plain_text(item)


def _software(document: Document) -> Iterator[Table]:
    differences = document.parts("software_differences")
    if differences:
        yield records_table("What differs in software and settings", [item.values for item in differences])
