"""Many nodes of one kind of run: did they run at once, are they alike, is one log there twice."""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Iterator, Sequence

from megatoken.analysis.aggregation import SIMULTANEOUS_SHARE, Aggregate
from megatoken.audit.evidence import Evidence, Run
from megatoken.audit.finding import Observation, Severity, shown
from megatoken.audit.view import observe
from megatoken.text import count_of

TOKENS_TOLERANCE = 0.01


def check_nodes(evidence: Evidence, runs: Sequence[Run], result: Aggregate | None) -> Iterator[Observation]:
    """Runs of one benchmark and scenario on several nodes.

    Args:
        evidence: all that was found.
        runs: the nodes, two or more.
        result: their aggregate; None where some have no rate.
    """
    yield from _copies(runs)
    claimed_as_one = any((system.nodes or 1) > 1 for system in evidence.systems)
    if result is not None:
        yield _simultaneous(runs, result, claimed_as_one)
        yield from _spread(runs, result)
    yield from _alike(runs)
    if claimed_as_one:
        found = f"{count_of(len(runs), 'set')} of logs, each of one node"
        yield Observation(
            "nodes.one_log",
            Severity.WARN,
            "one set of logs for a system of several nodes, which one LoadGen drove",
            found,
            tuple(system.where("number_of_nodes") for system in evidence.systems if (system.nodes or 1) > 1),
        )


def process_steps(runs: Sequence[Run]) -> list[str]:
    """Equal steps between the process ids of neighbouring nodes, as repeated launches in one container give."""
    steps: dict[int, list[str]] = defaultdict(list)
    for one, other in itertools.pairwise(runs):
        first, second = one.figures.process_id, other.figures.process_id
        if first is None or second is None or second <= first:
            continue
        step = second - first
        near = next((known for known in steps if abs(known - step) <= 1), step)
        steps[near].append(f"{one.node} to {other.node}")
    return [
        f"process ids rise by {step:,} (within 1) from {', '.join(pairs)}: what runs started one after another in one "
        "container would show"
        for step, pairs in sorted(steps.items(), key=lambda item: -len(item[1]))
        if len(pairs) > 1 and step > 1
    ]


def _simultaneous(runs: Sequence[Run], result: Aggregate, claimed_as_one: bool) -> Observation:
    together = f"all nodes running together for {100 * SIMULTANEOUS_SHARE:.0f} % of the time"
    expected = f"{together}, if their rates are to be added"
    where = tuple(run.where("power_begin" if "power_begin" in run.source_lines else None) for run in runs)
    evidence = result.evidence_of_simultaneity
    if result.overlap_share is None:
        found = "; ".join((evidence.statement, *process_steps(runs)))
        return observe("nodes.simultaneous", None, expected, found, where)
    return observe(
        "nodes.simultaneous",
        evidence.shown,
        expected,
        evidence.statement,
        where,
        Severity.WARN if claimed_as_one else Severity.NOTE,
    )


def _spread(runs: Sequence[Run], result: Aggregate) -> Iterator[Observation]:
    spreads = ", ".join(f"{item.formula} {100 * item.value:.2f} %" for item in result.spread)
    variation = result.coefficient_of_variation or 0.0
    found = (
        f"sum {result.sum_of_rates_tokens_per_second:,.1f}, max {result.max.output_tokens_per_second:,.1f}, "
        f"min {result.min.output_tokens_per_second:,.1f}, mean {result.mean_tokens_per_second:,.1f}, "
        f"median {result.median_tokens_per_second:,.1f} tokens/s; {spreads}; CV {100 * variation:.2f} %"
    )
    yield Observation("nodes.spread", Severity.NOTE, "how far the nodes differ, by each definition", found)
    makespan = result.makespan.output_tokens_per_second
    if makespan is not None:
        found = f"{makespan:,.1f} tokens/s: {result.makespan.basis}"
        yield Observation("nodes.makespan", Severity.NOTE, "the rate of all nodes as one run", found)
    slow = result.stragglers.nodes
    by_name = {run.node: run for run in runs}
    yield observe(
        "nodes.slow_group",
        not slow,
        f"no node more than {100 * result.stragglers.threshold:.0f} % below the median",
        f"{', '.join(slow)}" + ("; set apart from all others" if result.stragglers.separate else "")
        if slow
        else "none",
        tuple(by_name[name].where() for name in slow if name in by_name),
        Severity.NOTE,
    )


def _alike(runs: Sequence[Run]) -> Iterator[Observation]:
    """The same work on every node: settings, LoadGen, tokens per sample."""
    settings: dict[str, list[str]] = defaultdict(list)
    for run in runs:
        figures = run.figures
        version = (figures.loadgen_version or "?").partition(" ")[0]
        settings[f"target rate {_rate(figures.target_qps)}, LoadGen {version}, round {figures.round}"].append(run.node)
    found = "; ".join(f"{text} on {_names(nodes)}" for text, nodes in settings.items())
    yield observe(
        "nodes.settings",
        len(settings) == 1,
        "one set of settings",
        shown(found),
        tuple(run.where("effective_target_qps") for run in runs) if len(settings) > 1 else (),
        Severity.NOTE,
    )
    known = [run for run in runs if run.figures.tokens_per_sample]
    values = [run.figures.tokens_per_sample or 0.0 for run in known]
    if len(values) > 1:
        middle = sorted(values)[len(values) // 2]
        odd = [run for run, value in zip(known, values, strict=True) if abs(value / middle - 1) > TOKENS_TOLERANCE]
        yield observe(
            "nodes.tokens_per_sample",
            not odd,
            f"about {middle:.2f} tokens per sample on every node: they ran one model over one data set",
            f"{min(values):.2f} to {max(values):.2f}",
            tuple(run.where() for run in odd or known[:1]),
            Severity.WARN,
        )


def _rate(samples_per_second: float | None) -> str:
    return "not said" if samples_per_second is None else f"{samples_per_second:g} samples/s"


def _copies(runs: Sequence[Run]) -> Iterator[Observation]:
    """Two runs never agree to the nanosecond in their longest and mean latency, nor in when their logs began."""
    seen: dict[tuple[object, ...], list[Run]] = defaultdict(list)
    for run in runs:
        latencies = run.figures.latency_seconds
        if "max" in latencies and "mean" in latencies:
            seen[run.figures.scenario, latencies["max"], latencies["mean"], latencies.get("p50")].append(run)
    copies = [group for group in seen.values() if len(group) > 1]
    begun = [group for group in same_beginnings(runs) if group not in copies]
    compared = sum(map(len, seen.values()))
    problems = [f"{_names([run.node for run in group])} have the same to the nanosecond" for group in copies]
    problems += [f"{_names([run.node for run in group])} have logs of one run, and other results" for group in begun]
    yield observe(
        "nodes.copies",
        False if problems else True if compared == len(runs) else None,
        "every node with results of its own",
        "; ".join(problems)
        or (f"{compared} different results" if compared == len(runs) else f"{compared} of {len(runs)} say latencies"),
        tuple(run.where("result_max_latency_ns") for group in (*copies, *begun) for run in group),
    )


def same_beginnings(runs: Sequence[Run]) -> list[list[Run]]:
    """Groups of runs whose logs began at the same moments after the start of their process: one run, several times."""
    seen: dict[tuple[object, ...], list[Run]] = defaultdict(list)
    for run in runs:
        if run.beginnings:
            seen[(run.figures.process_id, *run.beginnings)].append(run)
    return [group for group in seen.values() if len(group) > 1]


def check_systems_apart(runs: Sequence[Run]) -> Iterator[Observation]:
    """In a submission one run may stand for two benchmarks that differ in their accuracy; for two systems it cannot."""
    for group in same_beginnings(runs):
        systems = {f"{run.submitter or ''} {run.node}".strip(): run for run in group}
        if len(systems) > 1:
            yield observe(
                "submission.copies",
                False,
                "every system with runs of its own",
                shown(f"{_names(list(systems))} have logs of one run"),
                tuple(run.where() for run in systems.values()),
            )


def _names(nodes: Sequence[str]) -> str:
    return ", ".join(nodes) if len(nodes) <= 6 else f"{len(nodes)} nodes ({nodes[0]}, ..., {nodes[-1]})"
