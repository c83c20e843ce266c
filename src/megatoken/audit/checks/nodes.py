"""Several nodes of one kind of run: whether they ran together, are alike, and are not copies of one log."""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence

from megatoken.analysis.aggregation import SIMULTANEOUS_SHARE, Aggregate
from megatoken.audit.evidence import Evidence, Role, Run
from megatoken.audit.finding import Observation, Outcome, Severity, check, free_of, outcome, shown
from megatoken.text import count_of

TOKENS_TOLERANCE = 0.01


def check_nodes(evidence: Evidence, runs: Sequence[Run], result: Aggregate | None) -> Iterator[Observation]:
    """Two or more runs of one benchmark and scenario, and their aggregate; None where some have no rate."""
    for one in (copies, same_settings, same_tokens):
        yield from one(runs)
    claimed_as_one = any((system.nodes or 1) > 1 for system in evidence.systems)
    if result is not None:
        yield from simultaneous(runs, result, claimed_as_one)
        yield from slow_group(runs, result)
    if claimed_as_one:
        yield from one_log(evidence, runs)


def process_steps(runs: Sequence[Run]) -> list[str]:
    """Equal steps between the process ids of neighbouring nodes, as repeated launches in one container cause."""
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


@check("nodes.simultaneous", "The nodes ran at the same time", "Only then is a sum of rates the rate of a rack.")
def simultaneous(runs: Sequence[Run], result: Aggregate, claimed_as_one: bool) -> Outcome:
    share = f"{100 * SIMULTANEOUS_SHARE:.0f} %"
    expected = f"all nodes running together for {share} of the time, if their rates are to be added"
    where = tuple(run.where("power_begin" if "power_begin" in run.source_lines else None) for run in runs)
    evidence = result.evidence_of_simultaneity
    if result.overlap_share is None:
        return outcome(None, expected, "; ".join((evidence.statement, *process_steps(runs))), where)
    otherwise = Severity.WARN if claimed_as_one else Severity.NOTE
    return outcome(evidence.shown, expected, evidence.statement, where, otherwise)


@check("nodes.one_log", "One set of logs for the complete system", "MLPerf measures a system of many nodes as one.")
def one_log(evidence: Evidence, runs: Sequence[Run]) -> Outcome:
    where = tuple(system.where("number_of_nodes") for system in evidence.systems if (system.nodes or 1) > 1)
    expected = "one set of logs for a system of several nodes, which one LoadGen drove"
    return Outcome(Severity.WARN, expected, f"{count_of(len(runs), 'set')} of logs, each of one node", where)


@check("nodes.copies", "No node's log is a copy", "One measurement was counted several times.")
def copies(runs: Sequence[Run]) -> Outcome:
    """Two runs never agree to the nanosecond in their longest and mean latency, nor in when their logs began."""
    alike = _groups(runs, _longest_and_mean)
    copied = [group for group in alike if len(group) > 1]
    begun = [group for group in same_beginnings(runs) if group not in copied]
    problems = [f"{_names(group)} have the same latencies to the nanosecond" for group in copied]
    problems += [f"{_names(group)} have logs of one run, and other results" for group in begun]
    compared, expected = sum(map(len, alike)), "every node with its own results"
    if not problems and compared < len(runs):
        return outcome(None, expected, f"{compared} of {len(runs)} say latencies")
    where = tuple(run.where("result_max_latency_ns") for group in (*copied, *begun) for run in group)
    return free_of(problems, expected, f"{compared} different results", where)


def _longest_and_mean(run: Run) -> Hashable:
    times = run.figures.latency_seconds
    known = "max" in times and "mean" in times
    return (run.figures.scenario, times["max"], times["mean"], times.get("p50")) if known else None


def _groups(runs: Iterable[Run], key: Callable[[Run], Hashable]) -> list[list[Run]]:
    """Runs with the same key; those whose key is None are left out."""
    seen: dict[Hashable, list[Run]] = defaultdict(list)
    for run in runs:
        seen[key(run)].append(run)
    return [group for value, group in seen.items() if value is not None]


def same_beginnings(runs: Iterable[Run]) -> list[list[Run]]:
    """Groups of runs whose logs began at the same moments after the start of their process: copies of one run."""
    groups = _groups(runs, lambda run: (run.figures.process_id, *run.beginnings) if run.beginnings else None)
    return [group for group in groups if len(group) > 1]


def copied_runs(runs: Sequence[Run]) -> list[list[Run]]:
    """Groups of runs whose logs are copies: of the same latencies to the nanosecond, or begun at the same moments."""
    alike = [group for group in _groups(runs, _longest_and_mean) if len(group) > 1]
    return [*alike, *(group for group in same_beginnings(runs) if group not in alike)]


@check("submission.copies", "No run is submitted for two systems", "One measurement was submitted for two systems.")
def check_systems_apart(runs: Sequence[Run]) -> Iterator[Outcome]:
    """One run may be submitted for two benchmarks that differ in their accuracy, but not for two systems.

    Logs of one run begin at the same moments, and have the same latencies where process ids were changed.
    """
    timed = [run for run in runs if run.role is Role.PERFORMANCE]
    alike = [group for group in _groups(timed, _longest_and_mean) if len(group) > 1]
    begun = same_beginnings(run for run in runs if run.role in (Role.PERFORMANCE, Role.ACCURACY))
    groups = {frozenset(run.path for run in group): group for group in (*begun, *alike)}
    for group in groups.values():
        systems = {f"{run.submitter or ''} {run.node}".strip(): run for run in group}
        if len(systems) > 1:
            found = shown(f"{', '.join(systems) if len(systems) <= 6 else len(systems)} have logs of one run")
            yield outcome(False, "every system with its own runs", found, tuple(map(Run.where, systems.values())))


@check("nodes.settings", "All nodes ran with the same settings", "Different settings are different experiments.")
def same_settings(runs: Sequence[Run]) -> Outcome:
    groups: dict[str, list[Run]] = defaultdict(list)
    for run in runs:
        figures = run.figures
        rate = "not said" if figures.target_qps is None else f"{figures.target_qps:g} samples/s"
        version = (figures.loadgen_version or "?").partition(" ")[0]
        groups[f"target rate {rate}, LoadGen {version}, round {figures.round}"].append(run)
    where = tuple(run.where("effective_target_qps") for run in runs) if len(groups) > 1 else ()
    found = shown("; ".join(f"{text} on {_names(group)}" for text, group in groups.items()))
    return outcome(len(groups) == 1, "one set of settings", found, where, Severity.NOTE)


@check("nodes.tokens_per_sample", "All nodes answered alike", "Other lengths mean another model or other data.")
def same_tokens(runs: Sequence[Run]) -> Outcome | None:
    known = [run for run in runs if run.figures.tokens_per_sample]
    values = [run.figures.tokens_per_sample or 0.0 for run in known]
    if len(values) < 2:
        return None
    middle = sorted(values)[len(values) // 2]
    odd = [run for run, value in zip(known, values, strict=True) if abs(value / middle - 1) > TOKENS_TOLERANCE]
    expected = f"about {middle:.2f} tokens per sample on every node: they ran one model over one data set"
    where = tuple(run.where() for run in odd or known[:1])
    return outcome(not odd, expected, f"{min(values):.2f} to {max(values):.2f}", where, Severity.WARN)


@check("nodes.slow_group", "Slow nodes", "They set the time of any job that waits for all.")
def slow_group(runs: Sequence[Run], result: Aggregate) -> Outcome:
    slow = result.stragglers.nodes
    by_name = {run.node: run for run in runs}
    found = ", ".join(slow) + ("; set apart from all others" if slow and result.stragglers.separate else "")
    expected = f"no node more than {100 * result.stragglers.threshold:.0f} % below the median"
    where = tuple(by_name[name].where() for name in slow if name in by_name)
    return outcome(not slow, expected, found or "none", where, Severity.NOTE)


def _names(runs: Sequence[Run]) -> str:
    names = [run.node for run in runs]
    return ", ".join(names) if len(names) <= 6 else f"{len(names)} nodes ({names[0]}, ..., {names[-1]})"
