"""A qualification: the answer, then every value with its bound, reference and verdict."""

from __future__ import annotations

from collections.abc import Iterator

from megatoken.report.bars import Bar, bar_chart
from megatoken.report.blocks import Badge, Cell, Column, Facts, Figure, Points, Table, Terms, Verdict, View, section
from megatoken.report.documents import Document
from megatoken.report.views.common import view
from megatoken.text import count_of, number, precise

TONES = {"PASS": "good", "MARGINAL": "warn", "FAIL": "bad", "NO REFERENCE": "plain", "NOT RUN": "quiet"}
MEANING = {
    "PASS": "no value failed",
    "MARGINAL": "a value is slightly worse than its reference, or worse but noisy",
    "FAIL": "a fault was found",
    "NO REFERENCE": "no value failed; nothing is published about this machine, so keep this file as its --baseline",
    "NOT RUN": "a whole test did not run",
}
KNOWN = ("answer", "verdict", "tests", "complete", "set", "device", "seconds", "machine")
LEAST_SHARE_DRAWN = 0.001


def qualify_view(document: Document) -> View:
    """The report on ``megatoken qualify``."""
    verdict, seconds = document.text("verdict"), document.number("seconds") or 0.0
    tests = document.parts("tests")
    unfinished = "" if document.flag("complete") else "interrupted; "
    meaning = f"{unfinished}{document.text('set')} set, {count_of(len(tests), 'test')} in {number(seconds)} s: "
    summary = (
        Verdict((_badge(verdict),), meaning + MEANING.get(verdict, "nothing known here")),
        Points("", tuple(("", sentence) for sentence in document.texts("answer"))),
    )
    sections = (
        section("Values", _values(tests)),
        section("Reasons and notes", *_reasons(tests)),
        section("Share of the bound", *_shares(tests)),
        section("Bounds and sources", _bounds(tests)),
        section("Tests", _tests(tests)),
        section("Machine", Facts("Hardware and software", document.part("machine").values)),
    )
    return view(document, verdict, summary, sections, KNOWN)


def _badge(verdict: str) -> Badge:
    return Badge(verdict, TONES.get(verdict, "quiet"))


def _values(tests: list[Document]) -> Table:
    rows: list[tuple[Cell, ...]] = []
    for test in tests:
        for value in test.parts("values"):
            median, spread, share = (value.number(key) for key in ("median", "spread", "share"))
            spread_text = "" if spread is None or value.text("better") == "zero" else f"{100 * spread:.1f}"
            cells = (
                value.text("title"),
                "" if median is None else f"{number(median)} {value.text('unit')}",
                spread_text + (" !" if value.flag("noisy") else "  "),
                "" if share is None else f"{100 * share:.0f}",
                _normal(value),
                _badge(value.text("verdict")),
            )
            rows.append(cells)
    columns: tuple[Column, ...] = (
        Column("Value"),
        Column("Median", numeric=True),
        Column("Spread", "%", numeric=True),
        Column("Bound", "%", numeric=True),
        Column("Normal", numeric=True),
        Column("Verdict"),
    )
    note = "!: noisy, may differ by over 5 % next time. Bound: share of it. Normal: published, or own: the baseline."
    if not any(row[4] for row in rows):
        columns, rows = (*columns[:4], columns[5]), [(*row[:4], row[5]) for row in rows]
        note = note.partition(" Normal")[0]
    return Table("Values", columns, tuple(rows), note=note)


def _normal(value: Document) -> str:
    """The limit of the published values, or the baseline."""
    band, baseline = value.part("band"), value.number("baseline")
    if value.text("better") not in ("higher", "lower"):
        return ""
    if band.values:
        lower = value.text("better") == "lower"
        return f"≤ {number(band.number('highest'))}" if lower else f"≥ {number(band.number('lowest'))}"
    return "" if baseline is None else f"own {number(baseline)}"


def _reasons(tests: list[Document]) -> Iterator[Points]:
    points = [
        *((test.text("verdict"), f"{test.text('title')}: {test.text('fault')}") for test in tests if "fault" in test),
        *(
            (value.text("verdict"), f"{value.text('title')}: {value.text('reason')}")
            for test in tests
            for value in test.parts("values")
            if value.text("reason")
        ),
        *(
            ("", f"{value.text('title')}: {value.text('note')}")
            for test in tests
            for value in test.parts("values")
            if value.text("note")
        ),
    ]
    if points:
        yield Points("", tuple(points))


def _shares(tests: list[Document]) -> Iterator[Figure]:
    bars = [
        Bar(value.text("title"), 100 * share, "" if value.part("bound").flag("certain") else "measured")
        for test in tests
        for value in test.parts("values")
        if (share := value.number("share")) is not None and share >= LEAST_SHARE_DRAWN
    ]
    if bars:
        yield bar_chart("Share of the bound", "%", bars)


def _bounds(tests: list[Document]) -> Terms:
    """Each bound with its formula, and the sources of each band."""
    terms = {}
    for test in tests:
        for value in test.parts("values"):
            bound, sources = value.part("bound"), value.part("band").texts("sources")
            words = []
            if bound.values:
                words.append(f"bound {precise(bound.number('value'))} {value.text('unit')}: {bound.text('formula')}")
            if sources:
                lowest, highest = (number(value.part("band").number(key)) for key in ("lowest", "highest"))
                words.append(f"normal {lowest} to {highest} {value.text('unit')}: {'; '.join(sources)}")
            if words:
                terms[value.text("title")] = ". ".join(words)
    return Terms(terms)


def _tests(tests: list[Document]) -> Table:
    rows: list[tuple[Cell, ...]] = [
        (test.text("title"), number(test.number("seconds")), _badge(test.text("verdict"))) for test in tests
    ]
    return Table("Tests", (Column("Test"), Column("Time", "s", numeric=True), Column("Verdict")), tuple(rows))
