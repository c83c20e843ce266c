"""Charts of sweeps: latency against throughput, throughput of the system against that of a user, figures against load.

Every chart takes one sweep, with a curve for each percentile, or several, with a curve for each sweep.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from megatoken.report.blocks import Column, Figure, Table
from megatoken.report.curves import line_chart
from megatoken.report.documents import Document
from megatoken.report.plots import Label, Line
from megatoken.report.scales import top_of
from megatoken.text import precise

Value = Callable[[Document], float | None]


@dataclass(frozen=True, slots=True)
class Sweep:
    """The points of a sweep by rising load, and what to call it."""

    name: str
    unit: str
    points: list[Document]

    @classmethod
    def of(cls, document: Document) -> Sweep:
        """The sweep of a document."""
        points = sorted(document.parts("points"), key=lambda point: point.number("value") or 0.0)
        return cls(document.text("name"), document.text("load_unit"), points)


def percentile(of: str, name: str, scale: float = 1.0) -> Value:
    """Takes a percentile of a point, in units of ``scale``."""

    def value(point: Document) -> float | None:
        found = point.part(of).number(name)
        return None if found is None else found * scale

    return value


def per_machine(point: Document) -> float | None:
    """Output tokens per second for each GPU; of the whole system where no GPU computes."""
    rate = point.number("output_tokens_per_second_per_gpu")
    return point.number("output_tokens_per_second") if rate is None else rate


def rate_unit(sweeps: Sequence[Sweep]) -> str:
    """The unit of ``per_machine``."""
    per_gpu = any("output_tokens_per_second_per_gpu" in point for sweep in sweeps for point in sweep.points)
    return "output tokens/s per GPU" if per_gpu else "output tokens/s"


def load_figures(sweeps: Sequence[Sweep], marked: Sequence[float]) -> Iterator[Figure]:
    """All charts; ``marked`` loads have their number next to the first curve of each sweep."""
    if not sweeps:
        return
    rate, unit = per_machine, rate_unit(sweeps)
    yield from _against(
        "Latency against throughput", "s", unit, sweeps, rate, _percentiles("latency_seconds"), marked=marked
    )
    user = percentile("user_tokens_per_second", "p50")
    yield from _against(
        "Throughput of the system against that of a user",
        unit,
        "tokens/s of the median user",
        sweeps,
        user,
        {"": rate},
        marked=marked,
    )
    load_unit = sweeps[0].unit
    charts: tuple[tuple[str, str, dict[str, Value]], ...] = (
        ("Throughput against load", unit, {"": rate}),
        ("Time to first token against load", "ms", _percentiles("ttft_seconds", 1000)),
        ("Time per output token against load", "ms", _percentiles("tpot_seconds", 1000)),
        ("Time between tokens against load", "ms", _percentiles("itl_seconds", 1000)),
        ("Requests within the limits", "%", {"": _good}),
    )
    for title, of_unit, curves in charts:
        yield from _against(title, of_unit, load_unit, sweeps, _load, curves)
    if len(sweeps) == 1:
        lag = {
            "p99 from the time due": percentile("ttft_seconds", "p99", 1000),
            "p99 from the time sent": percentile("ttft_from_send_seconds", "p99", 1000),
        }
        yield from _against("First token, from due and from sent", "ms", load_unit, sweeps, _load, lag)


def _load(point: Document) -> float | None:
    return point.number("value")


def _good(point: Document) -> float | None:
    share = point.part("goodput").number("share")
    return None if share is None else 100 * share


def _percentiles(of: str, scale: float = 1.0) -> dict[str, Value]:
    return {name: percentile(of, name, scale) for name in ("p50", "p90", "p99")}


def _against(
    title: str,
    unit: str,
    x_label: str,
    sweeps: Sequence[Sweep],
    x: Value,
    curves: dict[str, Value],
    *,
    marked: Sequence[float] = (),
) -> Iterator[Figure]:
    """One chart, if a curve has points at two places. Of several sweeps only the first curve of each is drawn.

    A point in whose window no request ended is left out: its rate may be that of a ramp.
    """
    lines, labels, rows = [], [], []
    for sweep in sweeps:
        shown = dict(curves) if len(sweeps) == 1 else {sweep.name: next(iter(curves.values()))}
        for number, (name, y) in enumerate(shown.items()):
            found = [
                (across, up, point.number("value") or 0.0)
                for point in sweep.points
                if "unjudged" not in point and (across := x(point)) is not None and (up := y(point)) is not None
            ]
            if len({across for across, _, _ in found}) < 2:  # one load, however often
                continue
            lines.append(Line(name or title, *(np.array(column) for column in list(zip(*found, strict=True))[:2])))
            rows += [(name or sweep.name, precise(load), precise(across), precise(up)) for across, up, load in found]
            if not number:
                labels += [Label(across, up, precise(load)) for across, up, load in found if load in marked]
    if not lines:
        return
    doubling = x is _load and sweeps[0].unit != "requests/s"
    if doubling:
        lines = [Line(line.name, np.log2(line.x), line.y) for line in lines]
    x_top = top_of([line.x for line in lines])
    first = next(iter(curves)) if len(sweeps) > 1 else ""
    heads = (("Load", sweeps[0].unit), ("Across", x_label), ("Up", unit))
    columns = (Column("Curve"), *(Column(name, of, numeric=True) for name, of in heads))
    yield line_chart(
        f"{title}, {first}" if first else title,
        unit,
        x_label,
        lines,
        Table(title, columns, tuple(rows)),
        x_range=(min(float(line.x.min()) for line in lines), math.ceil(x_top)) if doubling else (0.0, x_top),
        labels=labels,
        dots=True,
        doubling=doubling,
    )
