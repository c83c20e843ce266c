"""What MLPerf Endpoints' rules say of a sweep: the curve as they draw it, and the verdict of each point."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from megatoken.mlperf.endpoints import REGION_TITLES
from megatoken.report.blocks import Badge, Block, Cell, Column, Table
from megatoken.report.curves import line_chart
from megatoken.report.documents import Document
from megatoken.report.plots import Label, Line, Mark
from megatoken.report.scales import top_of
from megatoken.report.views.common import Field, table_of
from megatoken.text import ABSENT, precise

STATUSES = {
    "windowable": "steady state",
    "insufficient_duration": "window too short",
    "insufficient_passes": "too few passes",
    "partial_dataset": "less than a pass",
}


def endpoints_blocks(curve: Document) -> Iterator[Block]:
    """Chart and table; nothing for a sweep without rules."""
    points = curve.parts("points")
    if not points:
        return
    closed = sorted((one for one in points if not one.flag("offline")), key=lambda one: one.number("concurrency") or 0)
    offline = [one for one in points if one.flag("offline")]
    known = [one for one in closed if None not in _place(one)]
    if len(known) > 1:
        yield _chart(known, offline)
    yield _points_table([*closed, *offline], curve)


def _place(point: Document) -> tuple[float | None, float | None]:
    official = point.part("official")
    return official.number("tps_per_user"), official.number("system_tps")


def _chart(known: Sequence[Document], offline: Sequence[Document]) -> Block:
    """Steps between the points, as the rules ask: the last measured value holds until the next point."""
    places = [(across or 0.0, up or 0.0) for across, up in map(_place, known)]
    steps = [places[0]]
    for (across, up), before in zip(places[1:], places, strict=False):
        steps += [(across, before[1]), (across, up)]
    line = Line("points", *(np.array(column) for column in zip(*steps, strict=True)))
    rates = [rate for one in offline if (rate := one.part("official").number("system_tps")) is not None]
    labels = [
        Label(across, up, precise(one.number("concurrency"))) for one, (across, up) in zip(known, places, strict=True)
    ]
    rows = tuple(
        (precise(one.number("concurrency")), precise(across), precise(up))
        for one, (across, up) in zip(known, places, strict=True)
    )
    heads = (("Concurrency", ""), ("Per user", "tokens/s"), ("System", "tokens/s"))
    title = "System tokens/s against tokens/s per user"
    return line_chart(
        title,
        "tokens/s",
        "tokens/s per user, 1000 / TPOT p90 in ms",
        [line],
        Table(title, tuple(Column(name, unit, numeric=True) for name, unit in heads), rows),
        x_range=(0.0, top_of([line.x])),
        labels=labels,
        marks=[Mark("Offline", rate) for rate in rates],
    )


def _points_table(points: Sequence[Document], curve: Document) -> Table:
    def official(name: str, key: str, unit: str) -> Field:
        return Field(name, lambda one: one.part("official").number(key), unit, numeric=True)

    fields = (
        Field("Concurrency", lambda one: "Offline" if one.flag("offline") else one.number("concurrency"), numeric=True),
        Field("Region", lambda one: REGION_TITLES.get(one.text("region"), ABSENT)),
        official("System", "system_tps", "tokens/s"),
        official("User p10", "tps_per_user", "tokens/s"),
        official("TTFT p90", "ttft_p90_ms", "ms"),
        Field("Window", _window, "s", numeric=True),
        Field("Window is", lambda one: STATUSES.get(one.text("status"), ABSENT)),
        Field("Verdict", lambda one: _verdict(one.text("verdict"))),
    )
    share = curve.number("offline_share_of_c_max")
    note = (
        "Figures of the steady-state window where there is one, else of the whole run. User p10 is 1 / TPOT p90, by"
        " which the rules judge; in the other tables User is the median user's."
    )
    if share is not None:
        note += f" The Offline run gives {precise(100 * share)} % of the output at C_max."
    return table_of("Points by the rules", points, fields, note=note)


def _window(point: Document) -> str:
    seconds, needed = point.part("window").number("seconds"), point.number("min_seconds")
    if seconds is None:
        seconds = point.part("official").number("seconds")
    return f"{precise(seconds)} of {precise(needed)}"


def _verdict(verdict: str) -> Cell:
    return Badge(verdict, "good" if verdict == "VALID" else "bad")
