"""The rules of an MLPerf round: which of them a run's log does not meet, other doubts, and the verdict."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from megatoken.mlperf.benchmarks import SCENARIOS, Benchmark, LatencyLimits
from megatoken.mlperf.constraints import LIMIT_OF_P99
from megatoken.mlperf.detail_log import DetailLog
from megatoken.mlperf.latencies import Latencies
from megatoken.mlperf.rounds import Seeds, round_of_seeds, round_seeds, rules
from megatoken.runs.reasons import Reason, Shortfall, reason, shortfall
from megatoken.runs.run import Verdict

CLIENT_SHARE = 0.5  # of the client's capacity; beyond it, the client is part of what is measured
SHORTEST_SEND_LAG_LIMIT_SECONDS = 0.01
SEND_LAG_SHARE = 0.05  # of the limit on the time to first token
WALL_CLOCK_STEP_SECONDS = 0.01
AGREEMENT_SHARE = 0.05  # of the limit on TTFT, and of a percentile, by which LoadGen's and our own may differ
SINGLE_STREAM_QUERIES = 64  # early stopping needs as many for a 90th percentile
EQUAL_ISSUE = "effective_sample_concatenate_permutation"
P99, LIMITS_GIVEN = tuple(LIMIT_OF_P99), tuple(LIMIT_OF_P99.values())  # keys of LoadGen's log, TTFT and then TPOT
# As LoadGen's summary names them.
_CONSTRAINTS = {
    "result_perf_constraints_met": "Performance constraints satisfied",
    "result_min_duration_met": "Min duration satisfied",
    "result_min_queries_met": "Min queries satisfied",
    "early_stopping_met": "Early stopping satisfied",
}
_EARLY_STOPPING = {
    "early_stopping_ttft_result": "TTFT Early Stopping Result",
    "early_stopping_tpot_result": "TPOT Early Stopping Result",
    "early_stopping_result": "Early Stopping Result",
}
_STOPPED_WELL = "Run successful."


@dataclass(frozen=True, slots=True)
class Round:
    """The numbers of one MLPerf Inference round for one benchmark of the closed division (submission checker)."""

    name: str
    seeds: Seeds
    min_duration_seconds: float
    benchmark: Benchmark


def round_of(name: str, benchmark: Benchmark) -> Round:
    """The numbers of the round ``name`` for a benchmark that it has."""
    return Round(name, round_seeds()[name], rules()["min_duration_ms"] / 1000, benchmark.in_round(name))


@dataclass(frozen=True, slots=True)
class ClientCapacity:
    """What the client can send on the answers of a data set, with one event per token and no model."""

    samples_per_second: float
    output_tokens_per_second: float


@dataclass(frozen=True, slots=True)
class Observed:
    """What is known of a finished run in addition to LoadGen's log."""

    scenario: str  # as configurations spell it
    mode: str  # performance, accuracy, or compliance: a test that measures no speed
    # LoadGen's library repeats some of them if it has more rows, and leaves some out if it has fewer
    data_set_rows: int
    last_due_seconds: float = 0.0  # when the last sample was due
    limits: LatencyLimits | None = None  # of the benchmark in this scenario; None if it has none
    latencies: Latencies | None = None  # from our own records, if the scenario has limits
    send_lag_p99_seconds: float | None = None  # from when a sample was due until LoadGen issued it
    client: ClientCapacity | None = None  # capacity of the client, if it was measured
    samples_per_second: float | None = None  # the rate offered, to compare with that capacity
    wall_clock_step_seconds: float = 0.0  # the largest step by which the wall clock was set during the run
    failed_samples: int = 0  # samples that ended with an error


class Ruling(NamedTuple):
    """A rule applied to one run; ``holds`` is None if the run does not state what the rule is about."""

    holds: bool | None
    found: Any
    required: Any


def at_least(found: float | None, required: float) -> Ruling:
    """A rule that bounds a figure from below."""
    return Ruling(None if found is None else found >= required, found, required)


def long_enough(seconds: float | None) -> Ruling:
    """The rule on the duration that was requested, and on the one that the run took."""
    return at_least(seconds, rules()["min_duration_ms"] / 1000)


def official_seeds(found: str | None, required: str | None) -> bool:
    """The rule on seeds, which must be those of the round, or of any round if none is claimed."""
    return found is not None and required in (None, found)


def complete_data_set(rows: int | None, of: Benchmark, *, accuracy: bool = False) -> Ruling:
    """The rule on the rows of the data set."""
    required = of.accuracy_rows if accuracy else of.rows
    return Ruling(rows == required, rows, required)


def were_given(limits: LatencyLimits, log: DetailLog) -> bool:
    """Whether LoadGen judged by these limits."""
    return tuple(map(log.number, LIMITS_GIVEN)) == (limits.ttft_ns, limits.tpot_ns)


def unmet_rules(round_: Round, log: DetailLog, observed: Observed) -> list[Shortfall]:
    """Every rule of ``round_`` that a complete log does not meet, by its effective values."""
    return list(_unmet(round_, log, observed))


def doubts(log: DetailLog, observed: Observed) -> list[Shortfall]:
    """What makes the numbers doubtful although no round rules it out.

    The client limits the rate, a clock was set, or LoadGen's percentiles differ from ours.
    """
    return list(_doubts(log, observed))


def judge(
    claimed: bool,  # whether the run claims the rules
    unmet: Sequence[Shortfall],  # the rules that its log does not meet
    failed_samples: int,  # samples that ended with an error; they make any run INVALID
    samples: int,  # samples issued
    inaccurate: Sequence[Reason] = (),  # what a gate found wrong with the answers; it makes any run INVALID
    doubts: Sequence[Shortfall] = (),  # about the measurement; they make a run INVALID that claims rules
) -> tuple[Verdict, list[Reason]]:
    """The verdict on a finished run, and its reasons."""
    reasons: list[Reason] = []
    if failed_samples:
        reasons.append(reason("FAILED_SAMPLES", failed=failed_samples, samples=samples))
    reasons.extend(inaccurate)
    if claimed:
        reasons.extend((*unmet, *doubts))
    if reasons:
        return Verdict.INVALID, reasons
    return (Verdict.VALID if claimed else Verdict.MEASURED), []


def send_lag_limit_seconds(limits: LatencyLimits | None) -> float:
    """The largest 99th percentile of the lag between due and sent: samples that are sent late arrive in bunches."""
    return max(SHORTEST_SEND_LAG_LIMIT_SECONDS, SEND_LAG_SHARE * limits.ttft_seconds if limits else 0.0)


def missing_scenario(benchmark: Benchmark, scenario: str) -> Shortfall | None:
    """A shortfall if the benchmark does not have the scenario, which is spelled as in configurations."""
    if benchmark.has(SCENARIOS[scenario]):
        return None
    *others, last = (name.lower() for name in benchmark.scenarios)
    return shortfall("SCENARIO", scenario, f"{', '.join(others)} and {last}", benchmark=benchmark.name)


def _unmet(round_: Round, log: DetailLog, observed: Observed) -> Iterator[Shortfall]:
    if (missing := missing_scenario(round_.benchmark, observed.scenario)) is not None:
        yield missing
    if observed.mode == "performance":
        yield from _duration_and_samples(round_, log, observed)
        yield from _seeds(round_, log)
        yield from _equal_issue(log, observed)
        yield from _latencies(log, observed)
        if (validity := log.get("result_validity")) != "VALID":
            yield shortfall("LOADGEN_INVALID", validity, "VALID", why=why_invalid(log))
    elif observed.mode == "compliance":
        yield from _seeds(round_, log)
    rows = min(log.get("qsl_reported_total_count"), observed.data_set_rows)
    data_set = complete_data_set(rows, round_.benchmark)
    if not data_set.holds:
        yield shortfall("DATA_SET_SIZE", rows, data_set.required)
    if log.error_count:
        yield shortfall("LOADGEN_ERRORS", log.error_count, 0, first=str(log.errors[0].value))


def _duration_and_samples(round_: Round, log: DetailLog, observed: Observed) -> Iterator[Shortfall]:
    offline = observed.scenario == "offline"
    ran = long_enough(log.get("result_max_latency_ns") / 1e9 if offline else observed.last_due_seconds)
    requested = long_enough(log.get("effective_min_duration_ms") / 1e3)
    if not ran.holds and (offline or not (requested.holds and log.get("result_min_duration_met"))):
        yield shortfall("MIN_DURATION", ran.found, ran.required)
    elif not requested.holds:
        yield shortfall("MIN_DURATION", requested.found, requested.required, requested_seconds=requested.found)
    samples = at_least(log.get("effective_samples_per_query"), round_.benchmark.rows)
    if offline and not samples.holds:
        yield shortfall("MIN_SAMPLES", samples.found, samples.required)


def _seeds(round_: Round, log: DetailLog) -> Iterator[Shortfall]:
    if not official_seeds(round_of_seeds(log.seeds), round_.name):
        yield shortfall("SEEDS", str(log.seeds), str(round_.seeds), round=round_.name)


def _equal_issue(log: DetailLog, observed: Observed) -> Iterator[Shortfall]:
    """Whole passes over the data set; SingleStream ends with its duration, in the middle of a pass."""
    rows = min(log.get("qsl_reported_performance_count"), observed.data_set_rows)
    issued = log.get("generated_samples_per_query") * (log.get("generated_query_count") or 1)
    whole = observed.scenario == "singlestream" or issued % rows == 0
    if not log.get(EQUAL_ISSUE) or not whole:
        yield shortfall("EQUAL_ISSUE", issued, -(-issued // rows) * rows, rows=rows)


def _latencies(log: DetailLog, observed: Observed) -> Iterator[Shortfall]:
    if observed.limits is not None:
        limits = (observed.limits.ttft_seconds, observed.limits.tpot_seconds)
        p99s = [log.get(key) / 1e9 for key in LIMIT_OF_P99]
        if observed.failed_samples:  # LoadGen's percentiles then hold memory that it never set
            own = observed.latencies
            p99s = [math.nan, math.nan] if own is None else [own.ttft_p99_seconds, own.tpot_p99_seconds]
        for metric, found, given, limit in zip(("TTFT", "TPOT"), p99s, LIMIT_OF_P99.values(), limits, strict=True):
            requested = log.get(given) / 1e9
            if found >= limit:
                yield shortfall(f"{metric}_LIMIT", found, limit)
            if requested > limit:
                yield shortfall("LATENCY_LIMITS", requested, limit, metric=metric)
    if observed.scenario != "offline" and not log.get("early_stopping_met"):
        yield _early_stopping(log.get("result_query_count"), observed.latencies)


def _early_stopping(queries: int, own: Latencies | None) -> Shortfall:
    if own is None:
        return shortfall("EARLY_STOPPING", queries, SINGLE_STREAM_QUERIES, percentile=90)
    if own.allowed_over < 0:
        return shortfall("EARLY_STOPPING", queries, own.needed, percentile=99)
    return shortfall("EARLY_STOPPING", max(own.ttft_over, own.tpot_over), own.allowed_over, queries=queries)


def why_invalid(log: DetailLog) -> str:
    """The ``invalid_reasons`` as one text."""
    return "; ".join(invalid_reasons(log)) or "no reason given"


def invalid_reasons(log: DetailLog) -> tuple[str, ...]:
    """Why LoadGen calls a run INVALID, as its summary prints it: constraints not met, its reason, its early stopping.

    If early stopping alone fails, LoadGen leaves its reason empty and explains it in the text of early stopping.
    """
    parts = [f"{label}: NO" for key, label in _CONSTRAINTS.items() if log.get(key) is False]
    parts.append(_one_line(log.get("result_invalid_reason")))
    if log.get("early_stopping_met") is False:
        for key, name in _EARLY_STOPPING.items():
            text = _one_line(log.get(key))
            if text and text != _STOPPED_WELL:
                parts.append(f"{name}: {text}")
    return tuple(filter(None, parts))


def _one_line(text: object) -> str:
    return " ".join(str(text or "").replace("*", " ").split())


def _doubts(log: DetailLog, observed: Observed) -> Iterator[Shortfall]:
    if observed.mode == "performance":
        # Of samples without a first token LoadGen's percentiles hold memory that it never set.
        if observed.latencies is not None and observed.limits is not None and not observed.failed_samples:
            yield from _disagreement(log, observed.latencies, observed.limits)
        yield from _client(observed)


def _disagreement(log: DetailLog, own: Latencies, limits: LatencyLimits) -> Iterator[Shortfall]:
    """LoadGen's 99th percentiles and ours are of the same samples, but LoadGen hears of tokens a little later."""
    later = AGREEMENT_SHARE * limits.ttft_seconds
    per_token = later / max(1.0, own.tokens_after_first)
    for metric, key, found, tolerance in (
        ("TTFT", P99[0], own.ttft_p99_seconds, later),
        ("TPOT", P99[1], own.tpot_p99_seconds, per_token),
    ):
        theirs = log.get(key) / 1e9
        if abs(theirs - found) > tolerance + AGREEMENT_SHARE * theirs:
            yield shortfall("LOADGEN_DISAGREES", found, theirs, metric=metric)


def _client(observed: Observed) -> Iterator[Shortfall]:
    lag, limit = observed.send_lag_p99_seconds, send_lag_limit_seconds(observed.limits)
    if lag is not None and lag > limit:
        yield shortfall("SEND_LAG", lag, limit)
    if observed.client is not None and observed.samples_per_second is not None:
        capacity = observed.client.samples_per_second
        if observed.samples_per_second > CLIENT_SHARE * capacity:
            yield shortfall(
                "CLIENT_LIMIT",
                observed.samples_per_second,
                CLIENT_SHARE * capacity,
                share=CLIENT_SHARE,
                capacity_samples_per_second=capacity,
            )
    step = observed.wall_clock_step_seconds
    if abs(step) > WALL_CLOCK_STEP_SECONDS:
        yield shortfall("WALL_CLOCK", step, WALL_CLOCK_STEP_SECONDS)
