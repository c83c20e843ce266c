"""A sweep: latency against throughput, what a user gets, percentiles against load, and every figure of each point."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace

import numpy as np

from megatoken.analysis.sweep import UNITS, shows_median
from megatoken.report.blocks import (
    Badge,
    Block,
    Cell,
    Column,
    Figure,
    Headline,
    Points,
    Table,
    Terms,
    Verdict,
    View,
    section,
)
from megatoken.report.curves import stairs, time_chart
from megatoken.report.documents import Document
from megatoken.report.metrics import ISSUED_LATE, MEANING, PERCENTILES, UNRELIABLE_NOTE, of_simulated, verdict_badge
from megatoken.report.plots import Line
from megatoken.report.views.common import Field, figure, table_of, view, word
from megatoken.report.views.endpoints import endpoints_blocks
from megatoken.report.views.limits import limits_table
from megatoken.report.views.load_charts import Sweep, load_figures, per_machine, rate_unit
from megatoken.report.words import as_sentence
from megatoken.text import ABSENT, precise

STAGE = "stage"  # unit of a load that changes within one run
OPEN_LOOPS = (UNITS["rate"], UNITS["speed"])  # units of loads whose requests come due by chance or by a trace
CHANCE_SHARE = 0.1  # of a rate, by which that of the requests in a window may differ without a word
LATENCIES = {
    "TTFT": ("ms", "ttft_seconds", 1000.0),
    "TTFT from send": ("ms", "ttft_from_send_seconds", 1000.0),
    "Time per output token": ("ms", "tpot_seconds", 1000.0),
    "Time between tokens": ("ms", "itl_seconds", 1000.0),
    "Latency": ("s", "latency_seconds", 1.0),
    "Latency from send": ("s", "latency_from_send_seconds", 1.0),
    ISSUED_LATE: ("ms", "send_lag_seconds", 1000.0),
}
_JUDGED = (figure("Judged", "requests_judged"), figure("Cut off", "requests_cut_off"))
TITLES = {
    "steady": "Steady",
    "overloaded": "Overloaded",
    "knee": "Knee",
    "within_limits": "Within the limits",
    "stall": "Stall",
    "isolation": "Isolation score",
    "percentiles": "Percentiles",
}


def sweep_view(document: Document) -> View:
    """The report on ``megatoken sweep``."""
    sweep, found = Sweep.of(document), document.part("found")
    marked = [value for key in ("knee", "highest_within_limits", "peak") if (value := found.number(key)) is not None]
    verdict, simulated = document.text("verdict"), document.text("simulated_gpu")
    meaning = next((words for known, words in MEANING.items() if known == verdict), "nothing known here")
    if simulated:
        meaning = f"{of_simulated(simulated)}; {meaning}"
    reasons = list(_reasons(document))
    summary: tuple[Block, ...] = (
        *_headline(document, sweep),
        Verdict((verdict_badge(verdict),), meaning),
        *([Points("", tuple(reasons))] if reasons else []),
        Points("", tuple(("", words) for words in _findings(document, sweep))),
    )
    sections = (
        section("MLPerf Endpoints", *endpoints_blocks(document.part("endpoints"))),
        section("Stages", *_stages(document, sweep)),
        section("Curves", *(load_figures([sweep], marked) if sweep.unit != STAGE else ())),
        section("Points", _points_table(document, sweep)),
        section("Next to a neighbour", *_isolation(document, sweep)),
        section("Your limits", *_limits(sweep)),
        section("Latencies", _latencies(sweep)),
        section("First token by prompt length", _by_input(sweep)),
        section("Stalls and late sends", _stalls(sweep)),
        section("Repeats", _repeats(document, sweep)),
        section("Over time", *_over_time([sweep])),
        section("Definitions", Terms(_definitions(document.part("rules")))),
    )
    derived = ("shared_points", "accelerator", "load_kind", "made_up")
    return view(document, "sweep", summary, sections, derived=derived)


def sweep_comparison_view(document: Document) -> View:
    """The report on ``megatoken compare`` of sweeps."""
    sweeps = [Sweep.of(part) for part in document.parts("sweeps")]
    staged = any(sweep.unit == STAGE for sweep in sweeps)
    sections = (
        section("Over time", *(_over_time(sweeps) if staged else ())),
        section("Curves", *(() if staged else load_figures(sweeps, ()))),
        section("Found", _found_table(document, staged=staged)),
        section("Ratios at equal load", _ratios_table(document, sweeps)),
    )
    return view(document, "sweeps", (), sections)


def _ratios_table(document: Document, sweeps: Sequence[Sweep]) -> Table:
    ratios = document.parts("ratios")
    of, to = ([*dict.fromkeys(one.text(side) for one in ratios)] for side in ("of", "to"))
    fields = (
        figure(_load_title(sweeps[0]) if sweeps else "", "value"),
        *([word("Sweep", "of")] if len(of) > 1 else []),
        figure("Output", "output"),
        _ratio("TTFT p50", "ttft_p50"),
        _ratio("p99", "ttft_p99"),
        _ratio("TPOT p99", "tpot_p99"),
        _ratio("Latency p50", "latency_p50"),
    )
    note = f"{'Each sweep' if len(of) > 1 else of[0]} over {to[0]}" if ratios else ""
    table = table_of("Ratios", ratios, fields, note=note)
    return replace(table, note=f"{note}. {UNRELIABLE_NOTE}") if _has_star(table.rows) else table


def _ratio(title: str, key: str) -> Field:
    return Field(title, lambda row: _cell(row, key, 1), numeric=True)


def _found_table(document: Document, *, staged: bool) -> Table:
    sweeps = document.parts("sweeps")
    unit = sweeps[0].text("load_unit") if sweeps else ""

    def found(name: str, key: str, unit: str) -> Field:
        return Field(name, lambda part: part.part("found").number(key), unit, numeric=True)

    fields = (
        word("Sweep", "name"),
        *([] if staged else [found("Knee", "knee", unit), found("Within limits", "highest_within_limits", unit)]),
        found("Peak", "peak", unit),
        found("Output at peak", "peak_output_tokens_per_second", "tokens/s"),
    )
    return table_of("What the sweeps found", sweeps, fields, stacked=True)


def _reasons(document: Document) -> Iterator[tuple[str, str]]:
    """Each reason once, with the runs that it is about."""
    about: dict[tuple[str, str], list[str]] = {}
    for reason in document.parts("reasons"):
        about.setdefault((reason.text("code"), reason.text("message")), []).append(reason.text("run"))
    for (code, message), runs in about.items():
        yield code, f"{runs[0] if len(runs) == 1 else f'{len(runs)} points'}: {message}"


def _headline(document: Document, sweep: Sweep) -> Iterator[Headline]:
    found = document.part("found")
    rate, peak = found.number("peak_output_tokens_per_second"), found.number("peak")
    if rate is not None:
        of = [document.text(name) for name in ("model", "precision", "hostname")]
        at = f"highest, {'in ' if sweep.unit == STAGE else 'at '}{_load(peak, sweep)}{_came_due(peak, sweep)}"
        yield Headline(precise(rate), "output tokens/s", " · ".join(filter(None, (at, *of))))


def _came_due(rate: float | None, sweep: Sweep) -> str:
    """How many requests a second came due at a rate, where chance made that another rate; empty elsewhere."""
    points = [point.number("offered_requests_per_second") for point in sweep.points if point.number("value") == rate]
    known = [offered for offered in points if offered is not None]
    if sweep.unit != UNITS["rate"] or not rate or not known:
        return ""
    offered = sum(known) / len(known)
    return f", of which {precise(offered)} came due" if abs(offered - rate) > CHANCE_SHARE * rate else ""


def _load(load: float | None, sweep: Sweep) -> str:
    return f"{STAGE} {precise(load)}" if sweep.unit == STAGE else f"{precise(load)} {sweep.unit}"


def _stages(document: Document, sweep: Sweep) -> Iterator[Block]:
    """What each stage asked for, and how latencies followed."""
    load = document.part("load")
    if sweep.unit != STAGE or not sweep.points:
        return
    unit = "requests/s" if load.text("of") == "rate" else "requests at once"
    asked = [point.part("stage") for point in sweep.points]
    rows = tuple(
        (precise(number), *(precise(stage.number(key)) for key in ("first", "last", "seconds")))
        for number, stage in enumerate(asked, 1)
    )
    heads = (Column("From", unit, numeric=True), Column("To", unit, numeric=True), Column("Time", "s", numeric=True))
    yield Table("Stages", (Column("Stage", numeric=True), *heads), rows)
    first = [point for point in sweep.points if point.text("run") == sweep.points[0].text("run")]
    ends = np.cumsum([0.0, *(point.part("stage").number("seconds") or 0.0 for point in first)])
    levels = [point.part("stage").number(key) or 0.0 for point in first for key in ("first", "last")]
    yield time_chart("Load asked for", unit, [Line("asked for", np.repeat(ends, 2)[1:-1], np.array(levels))])


def _findings(document: Document, sweep: Sweep) -> Iterator[str]:
    found = document.part("found")
    if (knee := found.number("knee")) is not None:
        yield f"Knee: {precise(knee)} {sweep.unit}"
    elif sweep.unit != STAGE and len(values := set(_with_latencies(sweep))) > 2:
        yield f"No knee up to {precise(max(values))} {sweep.unit}"
    if sweep.unit != STAGE:  # they do not rise; the points say which share kept the limits
        yield from _within_limits(document, sweep)
    if rows := [row for row in document.parts("isolation") if "score" in row]:
        worst = min(rows, key=lambda row: row.number("score") or 0.0)
        few = f"; {UNRELIABLE_NOTE}" if _starred(worst, worst.text("worst")) else ""
        yield f"Isolation score next to the neighbour: {_score(worst)} at the worst (1: it costs nothing){few}"
    if (early := found.part("ended_early_by")).values:
        yield f"The sweep ended early: {early.text('message')}"
    elif found.flag("saturated"):
        yield "Saturated: the last loads gave no more output than those before them"


def _with_latencies(sweep: Sweep) -> Iterator[float]:
    """The loads whose latencies are known, of each point."""
    for point in sweep.points:
        requests, unended = (point.number(key) or 0.0 for key in ("requests", "requests_unended"))
        if point.part("latency_seconds").number("p50") is not None and shows_median(requests, unended):
            yield point.number("value") or 0.0


def _within_limits(document: Document, sweep: Sweep) -> Iterator[str]:
    found = document.part("found")
    ttft, tpot = document.number("ttft_limit_seconds"), document.number("tpot_limit_seconds")
    kept, met = (_up_to(found.number(name), sweep, found) for name in ("highest_within_limits", "highest_limits_met"))
    unknown = ", ".join(map(precise, found.numbers("limits_unknown")))
    few = f"; too few requests to judge {unknown}" if unknown else ""
    if any(point.parts("limits") for point in sweep.points):
        yield f"Within your limits: {kept}; shown with 99 % confidence: {met}{few}"
    elif ttft is not None and tpot is not None:
        yield f"Within TTFT {precise(ttft)} s and {precise(1000 * tpot)} ms per output token: {kept}{few}"


def _isolation(document: Document, sweep: Sweep) -> Iterator[Table]:
    """What the neighbour costs at each load: the score and the figures behind it."""
    shown = (
        ("output", "Output", "tokens/s", 1.0),
        ("ttft_p99", "TTFT p99", "ms", 1000.0),
        ("tpot_p99", "TPOT p99", "ms", 1000.0),
    )
    rows = []
    for row in document.parts("isolation"):
        pairs = []
        for name, _, _, scale in shown:
            values = (row.number(f"{name}_{of}") for of in ("alone", "shared"))
            pair = " to ".join(ABSENT if value is None else precise(scale * value) for value in values)
            pairs.append(f"{pair}{_starred(row, name)}")
        rows.append((precise(row.number("value")), _score(row), *pairs))
    if rows:
        columns = (
            Column(_load_title(sweep), numeric=True),
            Column("Isolation score", numeric=True),
            *(Column(f"{title}, alone to shared", unit, numeric=True) for _, title, unit, _ in shown),
        )
        note = f"{_load_note(sweep, '. ')}Score: {document.part('rules').text('isolation')}. The neighbour: "
        few = f". {UNRELIABLE_NOTE}" if _has_star(tuple(rows)) else ""
        yield Table("Isolation", columns, tuple(rows), note=f"{note}megatoken sweep {document.text('neighbour')}{few}")


def _score(row: Document) -> str:
    return f"{precise(row.number('score'))}{_starred(row, row.text('worst'))}"


def _definitions(rules: Document) -> dict[str, str]:
    return {title: as_sentence(rules.text(key)) for key, title in TITLES.items() if key in rules}


def _up_to(load: float | None, sweep: Sweep, found: Document) -> str:
    if load is not None:
        return f"up to {precise(load)} {sweep.unit}"
    unjudged = any("unjudged" in point or point.text("verdict") == "INTERRUPTED" for point in sweep.points)
    return "not known" if unjudged or found.numbers("limits_unknown") else "at no load"


def _limits(sweep: Sweep) -> Iterator[Table]:
    """Each of the user's limits at each load."""
    for point in sweep.points:
        if limits := point.parts("limits"):
            yield limits_table(limits, f"{precise(point.number('value'))} {sweep.unit}")


def _load_title(sweep: Sweep) -> str:
    return "Stage" if sweep.unit == STAGE else "Load"


def _load_note(sweep: Sweep, end: str) -> str:
    return "" if sweep.unit == STAGE else f"Load in {sweep.unit}{end}"


def _points_table(document: Document, sweep: Sweep) -> Table:
    """What a reader compares first; narrow enough for a terminal."""
    fields = (
        figure(_load_title(sweep), "value"),
        *([figure("Due", "offered_requests_per_second", "1/s")] if sweep.unit in OPEN_LOOPS else []),
        Field("Output", per_machine, "tokens/s", numeric=True),
        figure("Done", "requests_per_second", "1/s"),
        Field("User", lambda point: point.part("user_tokens_per_second").number("p50"), "tokens/s", numeric=True),
        _latency("TTFT p50", "ttft_seconds", "p50"),
        _latency("p99", "ttft_seconds", "p99"),
        _latency("TPOT p99", "tpot_seconds", "p99"),
        Field("Good", lambda point: _percent(point.part("goodput").number("share")), "%", numeric=True),
        *(_JUDGED if any(point.number("requests_cut_off") for point in sweep.points) else ()),
        Field("State", _state),
    )
    note = f"{_load_note(sweep, '; ')}Output is {rate_unit([sweep])}; User is the rate of the median user's answer."
    if sweep.unit in OPEN_LOOPS:
        note += " Due: requests that came due within the window, a second."
    table = table_of("Points", sweep.points, fields, stacked=True, note=note)
    return replace(table, note=f"{note} {UNRELIABLE_NOTE}") if _has_star(table.rows) else table


def _latency(title: str, key: str, of: str, scale: float = 1000, unit: str = "ms") -> Field:
    return Field(title, lambda point: _cell(point.part(key), of, scale), unit, numeric=True)


def _state(point: Document) -> Cell:
    if point.text("verdict") == "INVALID":
        return Badge("INVALID", "bad")
    if point.text("verdict") == "INTERRUPTED":
        return Badge("interrupted", "warn")
    if point.flag("overloaded") or "ended_by" in point:
        return Badge("overloaded", "bad")
    if "unjudged" in point:
        return Badge("unknown", "warn")
    return Badge("steady", "good") if point.flag("steady") else Badge("not steady", "warn")


def _latencies(sweep: Sweep) -> Table:
    rows = tuple(
        (name, precise(point.number("value")), unit, *(_cell(point.part(key), of, scale) for of in PERCENTILES))
        for name, (unit, key, scale) in LATENCIES.items()
        for point in sweep.points
        if key in point
    )
    heads = (Column("Latency"), Column(_load_title(sweep), numeric=True), Column("Unit"))
    return Table("Latencies", (*heads, *(Column(of, numeric=True) for of in PERCENTILES)), rows, stacked=True)


def _by_input(sweep: Sweep) -> Table:
    groups = [(point, part) for point in sweep.points for part in point.parts("ttft_by_input_tokens")]

    def tokens(group: tuple[Document, Document]) -> str:
        return " to ".join(precise(group[1].number(key)) for key in ("from_tokens", "to_tokens"))

    def ttft(name: str) -> Field:
        return Field(name, lambda group: _cell(group[1].part("ttft_seconds"), name, 1000), "ms", numeric=True)

    fields = (
        Field(_load_title(sweep), lambda group: group[0].number("value"), numeric=True),
        Field("Prompt", tokens, "tokens"),
        Field("Requests", lambda group: group[1].part("ttft_seconds").number("samples"), numeric=True),
        *map(ttft, PERCENTILES),
    )
    return table_of("Time to first token by prompt length", groups, fields, stacked=True)


def _stalls(sweep: Sweep) -> Table:
    fields = (
        figure(_load_title(sweep), "value"),
        Field("Stalls", lambda point: point.part("stalls").number("count"), numeric=True),
        Field("Answers with one", lambda p: _percent(p.part("stalls").number("requests_share")), "%", numeric=True),
        Field("Longest gap", lambda point: point.part("stalls").number("longest_seconds"), "s", numeric=True),
        figure("Tokens per frame", "tokens_per_frame"),
        figure("Mean under way", "in_flight"),
        figure("Failed", "requests_failed"),
        figure("Without end", "requests_unended"),
    )
    known = [point for point in sweep.points if point.part("stalls").values]
    return table_of("Stalls and requests without an end", known, fields, stacked=True)


def _repeats(document: Document, sweep: Sweep) -> Table:
    rows = tuple(
        (
            precise(part.number("value")),
            key.replace("_", " "),
            *(precise(part.part(key).number(name)) for name in ("geometric_mean", "low", "high")),
        )
        for part in document.parts("repeats")
        for key in part.without(("value", "runs"))
    )
    heads = ("Geometric mean", "Low", "High")
    columns = (
        Column(_load_title(sweep), numeric=True),
        Column("Metric"),
        *(Column(head, numeric=True) for head in heads),
    )
    return Table("Repeats of each load, with 95 % confidence", columns, rows, stacked=True)


def _over_time(sweeps: Sequence[Sweep]) -> Iterator[Figure]:
    """Output, requests under way and latencies of all points, one after the other; of several sweeps the medians."""
    alone = len(sweeps) == 1
    for title, unit, key in (
        ("Output over the sweep", "tokens/s", "output_tokens_per_second"),
        ("Requests under way over the sweep", "requests", "in_flight"),
    ):
        if lines := [line for sweep in sweeps for line in _steps(sweep, key, title if alone else sweep.name)]:
            yield time_chart(title, unit, lines)
    for title, names in (
        ("First token over the sweep, by the time due", {"p50": "ttft_p50_seconds", "p99": "ttft_p99_seconds"}),
        ("Time per output token over the sweep", {"p50": "tpot_p50_seconds"}),
    ):
        shown = names if alone else {"p50": names["p50"]}
        lines = [
            line
            for sweep in sweeps
            for name, key in shown.items()
            for line in _medians(sweep, key, name if alone else sweep.name)
        ]
        if lines:
            yield time_chart(title if alone else f"{title}, p50", "ms", lines)


def _timelines(sweep: Sweep) -> list[Document]:
    return [point.part("timeline") for point in sweep.points if "timeline" in point]


def _steps(sweep: Sweep, key: str, name: str) -> Iterator[Line]:
    parts = _timelines(sweep)
    heights = [part.numbers(key) for part in parts]
    spans = [part.number("span_seconds") or 0.0 for part, row in zip(parts, heights, strict=True) for _ in row]
    if len(spans) > 1:
        yield stairs(name, np.cumsum([0.0, *spans]), np.array([one for row in heights for one in row]))


def _medians(sweep: Sweep, key: str, name: str) -> Iterator[Line]:
    parts = _timelines(sweep)
    totals = [(part.number("span_seconds") or 0.0) * len(part.numbers("in_flight")) for part in parts]
    found = [
        (start + (row.number("at_seconds") or 0.0), 1000 * value)
        for start, part in zip(np.cumsum([0.0, *totals]).tolist(), parts, strict=False)
        for row in part.parts("latencies")
        if (value := row.number(key)) is not None
    ]
    if len(found) > 1:
        yield Line(name, *(np.array(column) for column in zip(*found, strict=True)))


def _cell(part: Document, name: str, scale: float) -> str:
    value = part.number(name)
    return ABSENT if value is None else f"{precise(scale * value)}{_starred(part, name)}"


def _starred(part: Document, name: str) -> str:
    """The mark of a figure that too few requests show; empty for any other."""
    return "*" if name in part.texts("unreliable") else ""


def _percent(share: float | None) -> str:
    return ABSENT if share is None else precise(100 * share)


def _has_star(rows: Iterable[tuple[Cell, ...]]) -> bool:
    return any(isinstance(cell, str) and cell.endswith("*") for row in rows for cell in row)
