"""Many nodes as one result: three rates, how the nodes differ, what the loss of one fault domain costs.

Pure functions of node rows from any kind of log; and the part of a saved result that plans start from.
"""

from __future__ import annotations

import json
import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np

from megatoken.analysis.nodes import WORKLOAD, NodeRow, check_rows, clock, distinct, took_turns
from megatoken.errors import UsageError
from megatoken.files import UnreadableError, new_document, plain, read_text
from megatoken.text import count_of, is_number, natural

STRAGGLER_THRESHOLD = 0.03
ONE_NODE = "one node"
SIMULTANEOUS_SHARE = 0.95
Spans = list[tuple[float, float]]  # start and end of each node on one clock
OWN_CLOCKS = "the clocks of the nodes, whose offsets are unknown"
LARGEST_BYTES = 64 * 2**20


@dataclass(frozen=True, slots=True)
class Window:
    """A rate over one stretch of time; ``conditional`` when it assumes that all nodes started together."""

    output_tokens_per_second: float | None
    output_tokens: float | None
    seconds: float | None
    conditional: bool
    basis: str
    reason: str | None = None


@dataclass(frozen=True, slots=True)
class Extreme:
    """The fastest or the slowest node."""

    node: str
    output_tokens_per_second: float


@dataclass(frozen=True, slots=True)
class Spread:
    """One definition of spread and the share it gives."""

    formula: str
    value: float


@dataclass(frozen=True, slots=True)
class Stragglers:
    """Nodes that far below the median; ``separate`` when the gap above them is wider than the range of either side."""

    formula: str
    threshold: float
    nodes: tuple[str, ...]
    gap_tokens_per_second: float | None
    separate: bool


@dataclass(frozen=True, slots=True)
class Simultaneity:
    """Whether the nodes are shown to have run at the same time, and what shows it."""

    shown: bool
    statement: str
    observations: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Loss:
    """What remains when one fault domain is lost and the others continue as before."""

    fault_domain: str
    nodes_lost: tuple[str, ...]
    accelerators_left: int | None
    accelerators_left_share: float | None
    sum_of_rates_tokens_per_second: float
    left_share: float


@dataclass(frozen=True, slots=True)
class Aggregate:
    """Nodes as one result; shares are fractions of one."""

    title: str
    inputs: tuple[str, ...]
    notes: tuple[str, ...]
    workload: dict[str, str | None]
    nodes: tuple[dict[str, Any], ...]
    accelerators: int | None
    output_tokens: int
    sum_of_rates_tokens_per_second: float
    sum_label: str
    output_tokens_per_second_per_accelerator: float | None
    makespan: Window
    common_window: Window
    max: Extreme
    min: Extreme
    mean_tokens_per_second: float
    median_tokens_per_second: float
    spread: tuple[Spread, ...]
    coefficient_of_variation: float | None
    coefficient_of_variation_formula: str
    stragglers: Stragglers
    overlap_share: float | None
    overlap_share_at_most: float
    evidence_of_simultaneity: Simultaneity
    without_fault_domain: tuple[Loss, ...]
    baseline_tokens_per_second: float | None
    scaling_efficiency: float | None

    def to_document(self) -> dict[str, Any]:
        """Plain JSON of the kind ``aggregate``."""
        return new_document("aggregate", **asdict(self))


def aggregate(
    rows: Sequence[NodeRow],
    *,
    title: str = "Nodes as one result",
    inputs: Sequence[str] = (),
    observations: Sequence[str] = (),
    clocks: str | None = None,
    straggler_threshold: float = STRAGGLER_THRESHOLD,
    baseline_tokens_per_second: float | None = None,
) -> Aggregate:
    """Nodes of one scenario, model and precision as one result.

    ``inputs`` say where the rows came from, ``observations`` are further sentences about simultaneity, ``clocks`` names
    the clock of the rows' starts (None: that of the rows, if they are from one source). A node is a straggler from
    ``straggler_threshold`` below the median on; the rate of one node alone gives the scaling efficiency.

    Raises:
        UsageError: no rows, a node twice without overlapping times, rows that did not do the same work, or a threshold
            or baseline out of range.
    """
    if not 0 < straggler_threshold < 1:
        raise UsageError(f"the straggler threshold is {straggler_threshold}; it must be a share such as 0.03")
    if baseline_tokens_per_second is not None and not baseline_tokens_per_second > 0:
        raise UsageError(f"the baseline is {baseline_tokens_per_second} tokens/s; give the rate of one node alone")
    check_rows(rows)
    rows = distinct(rows)
    rates = [row.output_tokens_per_second for row in rows]
    total, mean, median = sum(rates), statistics.fmean(rates), statistics.median(rates)
    fastest, slowest = (choose(rows, key=lambda row: row.output_tokens_per_second) for choose in (max, min))
    variation = statistics.stdev(rates) / mean if len(rows) > 1 else None
    stragglers = _stragglers(rows, median, straggler_threshold)
    timed = all(row.started_seconds is not None for row in rows)
    spans = _spans(rows, timed)
    overlap = _overlap_share(spans) if timed else None
    accelerators = _accelerators(rows)
    return Aggregate(
        title=title,
        inputs=tuple(inputs),
        notes=tuple(_notes(rows)),
        workload={name: getattr(rows[0], name) for name in WORKLOAD},
        nodes=tuple(_node_document(row, median, stragglers) for row in rows),
        accelerators=accelerators,
        output_tokens=round(sum(row.tokens for row in rows)),
        sum_of_rates_tokens_per_second=total,
        sum_label=_sum_label(rows, overlap),
        output_tokens_per_second_per_accelerator=total / accelerators if accelerators else None,
        makespan=_makespan(rows, spans, timed),
        common_window=_common_window(rows, spans, timed),
        max=Extreme(fastest.node, fastest.output_tokens_per_second),
        min=Extreme(slowest.node, slowest.output_tokens_per_second),
        mean_tokens_per_second=mean,
        median_tokens_per_second=median,
        spread=spreads(rates),
        coefficient_of_variation=variation,
        coefficient_of_variation_formula="sample standard deviation (n - 1) / mean",
        stragglers=stragglers,
        overlap_share=overlap,
        overlap_share_at_most=min(row.duration_seconds for row in rows) / max(row.duration_seconds for row in rows),
        evidence_of_simultaneity=_simultaneity(rows, overlap, observations, clocks or _clock_words(rows)),
        without_fault_domain=tuple(_losses(rows, total, accelerators)),
        baseline_tokens_per_second=baseline_tokens_per_second,
        scaling_efficiency=total / len(rows) / baseline_tokens_per_second if baseline_tokens_per_second else None,
    )


def aggregate_fields(result: Aggregate) -> dict[str, Any]:
    """The part of an aggregate that stands in a run's own ``result.json``, which says the rest itself."""
    document = plain(asdict(result))
    return {name: value for name, value in document.items() if name not in ("title", "inputs", "workload", "nodes")}


def spreads(rates: Sequence[float]) -> tuple[Spread, ...]:
    """The distance from slowest to fastest by each definition in use, as shares."""
    low, high = min(rates), max(rates)
    divisors = {"min": low, "max": high, "mean": statistics.fmean(rates), "median": statistics.median(rates)}
    return tuple(Spread(f"(max - min) / {name}", (high - low) / divisor) for name, divisor in divisors.items())


def _spans(rows: Sequence[NodeRow], timed: bool) -> Spans:
    """Start and end of each node on one clock; of untimed nodes as if all had started at zero."""
    starts = [row.started_seconds or 0.0 if timed else 0.0 for row in rows]
    return [(start, start + row.duration_seconds) for start, row in zip(starts, rows, strict=True)]


def _makespan(rows: Sequence[NodeRow], spans: Spans, timed: bool) -> Window:
    seconds = max(end for _, end in spans) - min(start for start, _ in spans)
    tokens = sum(row.tokens for row in rows)
    basis = "all output tokens over the time from the first start to the last end"
    if not timed:
        basis = "all output tokens over the longest duration: the rate if all nodes had started together"
    return Window(tokens / seconds, tokens, seconds, conditional=not timed, basis=basis)


def _common_window(rows: Sequence[NodeRow], spans: Spans, timed: bool) -> Window:
    start, end = max(start for start, _ in spans), min(end for _, end in spans)
    seconds = end - start
    basis = "output tokens done while every node was running, by the times at which samples completed"
    if not timed:
        basis += ", if all nodes had started together"
    if seconds <= 0:
        return Window(None, None, 0.0, not timed, basis, reason="the nodes never all ran at once")
    if not all(row.progress for row in rows):
        reason = "the logs of some nodes have no completion times"
        return Window(None, None, seconds if timed else None, not timed, basis, reason)
    tokens = sum(
        _tokens_done(row, end - own_start) - _tokens_done(row, start - own_start)
        for row, (own_start, _) in zip(rows, spans, strict=True)
    )
    return Window(tokens / seconds, tokens, seconds, conditional=not timed, basis=basis)


def _tokens_done(row: NodeRow, seconds: float) -> float:
    times, tokens = zip(*row.progress, strict=True)
    return float(np.interp(seconds, times, tokens))


def _overlap_share(spans: Spans) -> float:
    common = min(end for _, end in spans) - max(start for start, _ in spans)
    whole = max(end for _, end in spans) - min(start for start, _ in spans)
    return max(0.0, common) / whole


def _sum_label(rows: Sequence[NodeRow], overlap: float | None) -> str:
    nodes = len(rows)
    if nodes == 1:
        return "rate of one node"
    if took_turns(rows):
        return f"sum of {nodes} rates of runs that took turns: no two ran at the same time"
    if overlap is None:
        return f"sum of {nodes} node rates, not shown to be simultaneous"
    if overlap < SIMULTANEOUS_SHARE:
        return f"sum of {nodes} node rates, not simultaneous: all ran together for {100 * overlap:.1f} % of the time"
    return f"sum of {count_of(nodes, 'simultaneous node rate')}"


def _simultaneity(
    rows: Sequence[NodeRow], overlap: float | None, observations: Sequence[str], clocks: str
) -> Simultaneity:
    if overlap is None:
        missing = [row.node for row in rows if row.started_seconds is None]
        statement = f"not shown: no wall-clock start of {len(missing)} of {count_of(len(rows), 'node')}"
        return Simultaneity(len(rows) == 1, statement if len(rows) > 1 else ONE_NODE, tuple(observations))
    statement = (
        f"by {clocks}, all {len(rows)} ran together for {100 * overlap:.1f} % of the time from the first start to"
        f" the last end; {100 * SIMULTANEOUS_SHARE:.0f} % count as simultaneous"
    )
    if len(rows) == 1:
        statement = ONE_NODE
    times = [
        f"{row.node}: {clock(start)} to {clock(end)}"
        for row, (start, end) in zip(rows, _spans(rows, True), strict=True)
    ]
    return Simultaneity(overlap >= SIMULTANEOUS_SHARE, statement, (*times, *observations))


def _clock_words(rows: Sequence[NodeRow]) -> str:
    one_source = len({row.source for row in rows}) == 1
    return (rows[0].clock if one_source else None) or OWN_CLOCKS


def _stragglers(rows: Sequence[NodeRow], median: float, threshold: float) -> Stragglers:
    limit = median * (1 - threshold)
    slow = [row for row in rows if row.output_tokens_per_second < limit]
    formula = f"slower than the median by more than {100 * threshold:.1f} %"
    if not slow:
        return Stragglers(formula, threshold, (), None, separate=False)
    slow_rates = [row.output_tokens_per_second for row in slow]
    rest = [row.output_tokens_per_second for row in rows if row not in slow]
    gap = min(rest) - max(slow_rates)
    widest = max(max(slow_rates) - min(slow_rates), max(rest) - min(rest))
    return Stragglers(formula, threshold, tuple(row.node for row in slow), gap, separate=gap > widest)


def _losses(rows: Sequence[NodeRow], total: float, accelerators: int | None) -> list[Loss]:
    by_domain = sorted(rows, key=lambda row: natural(row.domain))
    losses = []
    for domain, members in groupby(by_domain, key=lambda row: row.domain):
        lost = list(members)
        left = total - sum(row.output_tokens_per_second for row in lost)
        left_accelerators = accelerators - sum(row.accelerators or 0 for row in lost) if accelerators else None
        share = left_accelerators / accelerators if accelerators and left_accelerators is not None else None
        names = tuple(row.node for row in lost)
        losses.append(Loss(domain, names, left_accelerators, share, left, left / total))
    return losses


def _accelerators(rows: Sequence[NodeRow]) -> int | None:
    counts = [row.accelerators for row in rows]
    return None if None in counts else sum(count or 0 for count in counts)


def _notes(rows: Sequence[NodeRow]) -> list[str]:
    notes = []
    if took_turns(rows):
        notes.append(
            "no two nodes ran at the same time, so their rates do not add up; repeats on one machine under several"
            " names look the same (megatoken compare takes repeats)"
        )
    verdicts = Counter(row.verdict for row in rows if row.verdict)
    if set(verdicts) - {"VALID", "MEASURED"}:
        notes.append("verdicts: " + ", ".join(f"{count} {verdict}" for verdict, count in verdicts.items()))
    figures: dict[tuple[float, float], list[str]] = {}
    for row in rows:
        figures.setdefault((row.output_tokens_per_second, row.duration_seconds), []).append(row.node)
    notes += [
        f"{', '.join(names)} have exactly the same rate and duration; check for one log under several names"
        for names in figures.values()
        if len(names) > 1
    ]
    if any(row.output_tokens is None for row in rows):
        notes.append("output tokens are rate x duration where the log states no count")
    return notes


def _node_document(row: NodeRow, median: float, stragglers: Stragglers) -> dict[str, Any]:
    rate = row.output_tokens_per_second
    return {
        "node": row.node,
        "output_tokens_per_second": rate,
        "output_tokens_per_second_per_accelerator": rate / row.accelerators if row.accelerators else None,
        "output_tokens": round(row.tokens),
        "samples": row.samples,
        "duration_seconds": row.duration_seconds,
        "accelerators": row.accelerators,
        "started_at": None if row.started_seconds is None else clock(row.started_seconds),
        "from_median_share": rate / median - 1,
        "group": "slow" if row.node in stragglers.nodes else "rest",
        "fault_domain": row.domain,
        "verdict": row.verdict,
        "source": row.source,
    }


@dataclass(frozen=True, slots=True)
class SavedAggregate:
    """Rate, size and workload of several nodes; the workload has ``scenario``, ``model`` and ``precision``."""

    sum_of_rates_tokens_per_second: float
    sum_label: str
    accelerators: int | None
    workload: dict[str, str | None]


def read_aggregate(path: Path) -> SavedAggregate:
    """``aggregate.json`` of ``megatoken aggregate --out``. Raises UsageError: the file cannot be read or is none."""
    try:
        document = json.loads(read_text(path, LARGEST_BYTES)[0])
    except (UnreadableError, ValueError) as error:
        raise UsageError(f"{path}: expected a run folder or aggregate.json: {error}") from None
    found = aggregate_in(document) if isinstance(document, dict) else None
    if found is None:
        raise UsageError(f"{path}: expected a run folder, or aggregate.json of megatoken aggregate --out")
    return found


def aggregate_in(document: Mapping[str, Any]) -> SavedAggregate | None:
    """The same of a document, such as the part ``aggregate`` of an audit; None where it is none, or has no rate."""
    rate = document.get("sum_of_rates_tokens_per_second")
    if document.get("kind") != "aggregate" or not is_number(rate) or rate <= 0:
        return None
    workload, accelerators = document.get("workload"), document.get("accelerators")
    stated = workload if isinstance(workload, dict) else {}
    return SavedAggregate(
        sum_of_rates_tokens_per_second=float(rate),
        sum_label=str(document.get("sum_label") or "sum of the rates"),
        accelerators=accelerators if isinstance(accelerators, int) and accelerators > 0 else None,
        workload={name: str(stated[name]) if stated.get(name) else None for name in ("scenario", "model", "precision")},
    )
