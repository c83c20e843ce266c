"""Goodput of a run: the work within the latency limits that users are promised."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from megatoken.analysis.goodput import Span, counted_span, goodput, within_limits
from megatoken.analysis.limits import SHORTCUTS, WHY_TPOT_UNKNOWN, asked_limits
from megatoken.analysis.statistics import Samples
from megatoken.report.blocks import Block, Column, Figure, Table
from megatoken.report.curves import MAX_POINTS, line_chart
from megatoken.report.plots import Line, Mark
from megatoken.report.words import as_sentence
from megatoken.runs.run import Run
from megatoken.text import ABSENT, precise


@dataclass(frozen=True, slots=True)
class Limits:
    """Longest time to first token and time per output token that a user is promised, in seconds."""

    name: str
    ttft_seconds: float | None
    tpot_seconds: float | None


# 99th-percentile limits of MLPerf Inference for llama2-70b (loadgen/mlperf.conf), of runs that claim its rules.
YARDSTICKS = (Limits("MLPerf Server, llama2-70b", 2.0, 0.2), Limits("MLPerf Interactive, llama2-70b", 0.45, 0.04))


def limits_of(run: Run) -> tuple[Limits, ...]:
    """The limits that the run was given, the user's own p99 limits if they differ, and MLPerf's if it claims them."""
    names = ("ttft_limit_seconds", "tpot_limit_seconds")
    asked = {limit.key: limit.value for limit in asked_limits(run.config)}
    given = tuple(run.result.get(name) for name in names)
    users = tuple(asked.get(SHORTCUTS[name]) for name in names)
    known = [Limits("This run's limits", *given)] if any(given) else []
    known += [Limits("Your limits", *users)] if any(users) and users != given else []
    return (*known, *(YARDSTICKS if run.result.get("rules") else ()))


def goodput_blocks(run: Run, samples: Samples) -> Iterator[Block]:
    """The work of a run within its limits, and within any limit."""
    span = counted_span(run, samples, run.result.get("duration_seconds"))
    if span is None or not len(samples):
        return
    offline = run.result.get("scenario") == "offline"
    rows = []
    known = limits_of(run)
    for limits in known:
        ttft = None if offline else limits.ttft_seconds
        unknown = span.tpot_unknown and limits.tpot_seconds is not None
        good = None if unknown else goodput(span, ttft_seconds=ttft, tpot_seconds=limits.tpot_seconds)
        first = "does not apply" if offline else _shown(limits.ttft_seconds, 1, "s")
        figures: tuple[str, ...] = (ABSENT,) * 5
        if good:
            counts, rates = (good.judged, good.cut_off), (good.samples_per_second, good.output_tokens_per_second)
            figures = tuple(map(precise, (100 * good.share, *counts, *rates)))
        rows.append((limits.name, first, _shown(limits.tpot_seconds, 1000, "ms"), *figures))
    numbers = {"Good": "%", "Judged": "", "Cut off": "", "Goodput": "samples/s", "Output": "tokens/s"}
    heads = (Column("Limits"), Column("First token"), Column("Per token"))
    columns = (*heads, *(Column(name, unit, numeric=True) for name, unit in numbers.items()))
    notes = ["Time to first token does not apply to Offline, where all samples are due at once."] if offline else []
    notes += [as_sentence(WHY_TPOT_UNKNOWN)] if span.tpot_unknown else []
    yield Table("Work within limits", columns, tuple(rows), stacked=True, note=" ".join(notes))
    if not span.tpot_unknown:
        yield from _goodput_figure(span, known, offline=offline)


def _shown(seconds: float | None, scale: int, unit: str) -> str:
    return "none" if seconds is None else f"{scale * seconds:g} {unit}"


def _goodput_figure(span: Span, known: tuple[Limits, ...], *, offline: bool) -> Iterator[Figure]:
    """How much work is within a limit on the time per output token, for every limit."""
    waits: list[tuple[str, float | None]] = [("any time to first token", None)]
    if not offline:
        firsts = dict.fromkeys(limits.ttft_seconds for limits in known if limits.ttft_seconds is not None)
        waits += [(f"first token within {seconds:g} s", seconds) for seconds in firsts]
    lines = [goodput_curve(name, span, wait) for name, wait in waits]
    longest = float(max(line.x[-1] for line in lines))
    if longest <= 0:
        return
    title, unit = "Goodput by limit", "output tokens/s"
    limits_shown = np.linspace(0, longest, 11)[1:]
    columns = (Column("Limit", "ms", numeric=True), *(Column(line.name, unit, numeric=True) for line in lines))
    rows = tuple(
        (
            precise(float(limit)),
            *(precise(float(line.y[np.searchsorted(line.x, limit, side="right") - 1])) for line in lines),
        )
        for limit in limits_shown
    )
    yield line_chart(
        title,
        unit,
        "limit on the time per output token, ms",
        lines,
        Table(f"{title} on the time per output token", columns, rows),
        x_range=(0.0, longest),
        marks=[
            Mark(f"{limits.name}, {1000 * limits.tpot_seconds:g} ms", 1000 * limits.tpot_seconds, upright=True)
            for limits in known
            if limits.tpot_seconds is not None and 1000 * limits.tpot_seconds <= longest
        ],
    )


def goodput_curve(name: str, span: Span, ttft_seconds: float | None) -> Line:
    """Output tokens per second of the samples within each limit on the time per output token, in milliseconds.

    ``ttft_seconds`` is a limit on the time to first token as well, None: no limit.
    """
    paces = 1000 * span.samples.tpot
    kept = within_limits(span.samples, ttft_seconds, None) & np.isfinite(paces) & (span.output_tokens > 0)
    milliseconds = paces[kept]
    order = np.argsort(milliseconds)
    rates = np.cumsum(span.output_tokens[kept][order]) / span.seconds
    picked = np.unique(np.linspace(0, max(len(order) - 1, 0), MAX_POINTS).round().astype(int))[: len(order)]
    return Line(name, np.append(0.0, milliseconds[order][picked]), np.append(0.0, rates[picked]))
