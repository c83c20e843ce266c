"""What an MLPerf round demands of a run's log, what a log does not meet of it, other doubts, and the verdict."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import get_args

from megatoken.config import RoundName
from megatoken.harness.loadgen import Seeds
from megatoken.mlperf.benchmarks import DEFAULT_BENCHMARK, Benchmark, LatencyLimits, benchmark
from megatoken.mlperf.latencies import Latencies
from megatoken.mlperf.loadgen_log import LoadGenLog
from megatoken.mlperf.rounds import rules as rules_table
from megatoken.runs.reasons import Reason
from megatoken.runs.run import Verdict
from megatoken.text import count_of, precise

CLIENT_SHARE = 0.5  # of what the client can do alone; beyond it, the client is part of what is measured
SHORTEST_SEND_LAG_LIMIT_SECONDS = 0.01
SEND_LAG_SHARE = 0.05  # of the limit on the time to first token
WALL_CLOCK_STEP_SECONDS = 0.01
AGREEMENT_SHARE = 0.05  # of the limit on TTFT, and of a percentile, by which LoadGen's and our own may differ
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

    @property
    def data_set_rows(self) -> int:
        """Of the benchmark's data set."""
        return self.benchmark.rows

    @property
    def min_samples(self) -> int:
        """Fewest of an Offline run."""
        return self.benchmark.rows


def round_of(name: str, of: Benchmark) -> Round:
    """What the round ``name``, one of ``ROUNDS``, demands of a benchmark that it has."""
    return replace(ROUNDS[name], benchmark=of.in_round(name))


def _round(name: str) -> Round:
    table = rules_table()
    seeds = Seeds(**table["rounds"][name]["seeds"])
    return Round(name, seeds, table["min_duration_ms"] / 1000, benchmark(DEFAULT_BENCHMARK))


ROUNDS = {name: _round(name) for name in get_args(RoundName)}
DEFAULT_ROUND: RoundName = "v5.1"  # its seeds are used, and its rules listed, when none are claimed


class Shortfall(Reason):
    """A rule that is not met, or a doubt about the measurement, with the number found and the number required."""

    found: float | str
    required: float | str


@dataclass(frozen=True, slots=True)
class ClientLimit:
    """What the client can do on the answers of a data set, each token an event of its own."""

    samples_per_second: float
    output_tokens_per_second: float


@dataclass(frozen=True, slots=True)
class Observed:
    """What is known of a finished run beside LoadGen's log.

    Attributes:
        scenario: of the run.
        mode: performance, accuracy, or compliance: a test that measures no speed.
        data_set_rows: of which LoadGen's library repeats some if it has more rows, and leaves some out if fewer.
        last_due_seconds: when the last sample was due.
        limits: of the benchmark in this scenario; None where it has none.
        latencies: by our own records, where the scenario has limits.
        send_lag_p99_seconds: from when a sample was due until LoadGen issued it.
        client: what the client can do alone, where it was measured.
        samples_per_second: offered, to hold against that.
        wall_clock_step_seconds: farthest that the wall clock was set meanwhile.
    """

    scenario: str
    mode: str
    data_set_rows: int
    last_due_seconds: float = 0.0
    limits: LatencyLimits | None = None
    latencies: Latencies | None = None
    send_lag_p99_seconds: float | None = None
    client: ClientLimit | None = None
    samples_per_second: float | None = None
    wall_clock_step_seconds: float = 0.0


def unmet_rules(round_: Round, log: LoadGenLog, observed: Observed) -> list[Shortfall]:
    """Every rule of ``round_`` that a complete LoadGen log fails, judged by what it says, not by what was asked for."""
    return list(_unmet(round_, log, observed))


def doubts(log: LoadGenLog, observed: Observed) -> list[Shortfall]:
    """What no round asks for and yet makes the numbers doubtful: a client in the way, a clock that was set, LoadGen's
    percentiles and ours apart."""
    return list(_doubts(log, observed))


def judge(
    claimed: bool,
    unmet: Sequence[Shortfall],
    failed_samples: int,
    samples: int,
    inaccurate: Sequence[Reason] = (),
    doubts: Sequence[Shortfall] = (),
) -> tuple[Verdict, list[Reason]]:
    """The verdict on a run that came to its end, and its reasons.

    Args:
        claimed: whether the run claims the rules.
        unmet: the rules its log does not meet.
        failed_samples: samples that ended with an error; no run with one is healthy.
        samples: samples issued.
        inaccurate: what a gate holds against the answers; no run with a reason of it is healthy either.
        doubts: about the measurement; a number that claims rules must be free of them.
    """
    reasons: list[Reason] = []
    if failed_samples:
        reasons.append(
            Reason(code="FAILED_SAMPLES", message=f"{failed_samples:,} of {count_of(samples, 'sample')} failed")
        )
    reasons.extend(inaccurate)
    if claimed:
        reasons.extend((*unmet, *doubts))
    if reasons:
        return Verdict.INVALID, reasons
    return (Verdict.VALID if claimed else Verdict.MEASURED), []


def send_lag_limit_seconds(limits: LatencyLimits | None) -> float:
    """Most that the 99th percentile of the lag between due and sent may be: a sender that is late bunches the load."""
    return max(SHORTEST_SEND_LAG_LIMIT_SECONDS, SEND_LAG_SHARE * limits.ttft_seconds if limits else 0.0)


def _unmet(round_: Round, log: LoadGenLog, observed: Observed) -> Iterator[Shortfall]:
    if (message := foreign_scenario(round_.benchmark, observed.scenario)) is not None:
        yield _shortfall("SCENARIO", observed.scenario, ", ".join(round_.benchmark.scenarios), message)
    if observed.mode == "performance":
        yield from _duration_and_samples(round_, log, observed)
        yield from _seeds(round_, log)
        yield from _equal_issue(log, observed)
        yield from _latencies(log, observed)
        if log.values["result_validity"] != "VALID":
            message = f"LoadGen says {_loadgens_words(log)}"
            yield _shortfall("LOADGEN_INVALID", log.values["result_validity"], "VALID", message)
    elif observed.mode == "compliance":
        yield from _seeds(round_, log)
    rows = min(log.values["qsl_reported_total_count"], observed.data_set_rows)
    if rows != round_.data_set_rows:
        message = f"drew from {count_of(rows, 'row')}; MLPerf's data set has {round_.data_set_rows:,}"
        yield _shortfall("DATA_SET_SIZE", rows, round_.data_set_rows, message)
    if log.errors:
        message = f"LoadGen logged {count_of(len(log.errors), 'error')}, the first: {log.errors[0]}"
        yield _shortfall("LOADGEN_ERRORS", len(log.errors), 0, message)


def foreign_scenario(of: Benchmark, scenario: str) -> str | None:
    """Says so where a benchmark does not have a scenario."""
    if scenario in of.scenarios:
        return None
    *others, last = of.scenarios
    return f"{of.name} has no scenario {scenario}, only {', '.join(others)} and {last}"


def _duration_and_samples(round_: Round, log: LoadGenLog, observed: Observed) -> Iterator[Shortfall]:
    values, required = log.values, round_.min_duration_seconds
    offline = observed.scenario == "offline"
    ran = values["result_max_latency_ns"] / 1e9 if offline else observed.last_due_seconds
    asked = values["effective_min_duration_ms"] / 1e3
    if ran < required and (offline or not (asked >= required and values["result_min_duration_met"])):
        yield _shortfall("MIN_DURATION", ran, required, f"ran {precise(ran)} s of {required:g} s")
    elif asked < required:
        message = f"LoadGen was asked to run for {asked:g} s of {required:g} s"
        yield _shortfall("MIN_DURATION", asked, required, message)
    if offline and (samples := values["effective_samples_per_query"]) < round_.min_samples:
        message = f"issued {samples:,} of {round_.min_samples:,} samples"
        yield _shortfall("MIN_SAMPLES", samples, round_.min_samples, message)


def _seeds(round_: Round, log: LoadGenLog) -> Iterator[Shortfall]:
    seeds = Seeds(*(log.values[f"effective_{name}_rng_seed"] for name in ("qsl", "sample_index", "schedule")))
    if seeds != round_.seeds:
        yield _shortfall("SEEDS", str(seeds), str(round_.seeds), f"the seeds are not those of round {round_.name}")


def _equal_issue(log: LoadGenLog, observed: Observed) -> Iterator[Shortfall]:
    """Whole passes over the data set; SingleStream ends when its time is over, in the middle of one."""
    values = log.values
    rows = min(values["qsl_reported_performance_count"], observed.data_set_rows)
    issued = values["generated_samples_per_query"] * values.get("generated_query_count", 1)
    whole = observed.scenario == "singlestream" or issued % rows == 0
    if not values["effective_sample_concatenate_permutation"] or not whole:
        message = f"issued {count_of(issued, 'sample')} of {count_of(rows, 'row')}, not every row equally often"
        yield _shortfall("EQUAL_ISSUE", issued, -(-issued // rows) * rows, message)


def _latencies(log: LoadGenLog, observed: Observed) -> Iterator[Shortfall]:
    values = log.values
    if observed.limits is not None:
        for name, key, limit in (
            ("TTFT", "result_first_token_99.00_percentile_latency_ns", observed.limits.ttft_seconds),
            ("TPOT", "result_time_per_output_token_99.00_percentile_ns", observed.limits.tpot_seconds),
        ):
            found = values[key] / 1e9
            if found >= limit:
                yield _shortfall(
                    f"{name}_LIMIT",
                    found,
                    limit,
                    f"p99 {name} is {_milliseconds(found)}, the limit {_milliseconds(limit)}",
                )
            asked = values[f"requested_server_{name.lower()}_latency"] / 1e9
            if asked > limit:
                message = (
                    f"LoadGen was asked for a {name} of {_milliseconds(asked)}, the limit is {_milliseconds(limit)}"
                )
                yield _shortfall("LATENCY_LIMITS", asked, limit, message)
    if observed.scenario != "offline" and not values["early_stopping_met"]:
        yield _early_stopping(values["result_query_count"], observed)


def _early_stopping(queries: int, observed: Observed) -> Shortfall:
    own = observed.latencies
    if own is None:
        return _shortfall("EARLY_STOPPING", queries, 64, f"{count_of(queries, 'query', 'queries')}; a p90 needs 64")
    if own.allowed_over < 0:
        return _shortfall(
            "EARLY_STOPPING", queries, own.needed, f"{count_of(queries, 'query', 'queries')}; a p99 needs {own.needed}"
        )
    over = max(own.ttft_over, own.tpot_over)
    message = (
        f"{over:,} of {count_of(queries, 'query', 'queries')} over a limit; early stopping allows {own.allowed_over:,}"
    )
    return _shortfall("EARLY_STOPPING", over, own.allowed_over, message)


def _loadgens_words(log: LoadGenLog) -> str:
    """Why it calls a run INVALID, as its summary prints it: what is not satisfied, its reason, its early stopping.

    Where early stopping alone fails, LoadGen leaves its reason empty and says all in the text of early stopping.
    """
    values = log.values
    words = [f"{label}: NO" for key, label in _CONSTRAINTS.items() if values.get(key) is False]
    words.append(_one_line(values.get("result_invalid_reason")))
    if values.get("early_stopping_met") is False:
        for key, name in _EARLY_STOPPING.items():
            text = _one_line(values.get(key))
            if text and text != _STOPPED_WELL:
                words.append(f"{name}: {text}")
    return "; ".join(filter(None, words)) or "no reason"


def _one_line(text: object) -> str:
    return " ".join(str(text or "").replace("*", " ").split())


def _doubts(log: LoadGenLog, observed: Observed) -> Iterator[Shortfall]:
    if observed.mode == "performance":
        if observed.latencies is not None and observed.limits is not None:
            yield from _disagreement(log, observed.latencies, observed.limits)
        yield from _client(observed)


def _disagreement(log: LoadGenLog, own: Latencies, limits: LatencyLimits) -> Iterator[Shortfall]:
    """LoadGen's 99th percentiles and ours are of the same samples; it is told of tokens after they were seen."""
    later = AGREEMENT_SHARE * limits.ttft_seconds
    per_token = later / max(1.0, own.tokens_after_first)
    for name, key, found, tolerance in (
        ("TTFT", "result_first_token_99.00_percentile_latency_ns", own.ttft_p99_seconds, later),
        ("TPOT", "result_time_per_output_token_99.00_percentile_ns", own.tpot_p99_seconds, per_token),
    ):
        theirs = log.values[key] / 1e9
        if abs(theirs - found) > tolerance + AGREEMENT_SHARE * theirs:
            message = f"p99 {name} is {_milliseconds(theirs)} to LoadGen, {_milliseconds(found)} by our records"
            yield _shortfall("LOADGEN_DISAGREES", found, theirs, message)


def _milliseconds(seconds: float) -> str:
    return f"{precise(seconds * 1e3)} ms"


def _client(observed: Observed) -> Iterator[Shortfall]:
    lag, most = observed.send_lag_p99_seconds, send_lag_limit_seconds(observed.limits)
    if lag is not None and lag > most:
        message = (
            f"samples were sent late: p99 {_milliseconds(lag)} after they were due, the limit is {_milliseconds(most)}"
        )
        yield _shortfall("SEND_LAG", lag, most, message)
    if observed.client is not None and observed.samples_per_second is not None:
        alone = observed.client.samples_per_second
        if observed.samples_per_second > CLIENT_SHARE * alone:
            message = (
                f"{precise(observed.samples_per_second)} samples/s is more than {100 * CLIENT_SHARE:.0f} % of the"
                f" {precise(alone)} that the client can do alone"
            )
            yield _shortfall("CLIENT_LIMIT", observed.samples_per_second, CLIENT_SHARE * alone, message)
    step = observed.wall_clock_step_seconds
    if abs(step) > WALL_CLOCK_STEP_SECONDS:
        message = f"the wall clock, by which LoadGen times, was set by {step:+.4g} s during the run"
        yield _shortfall("WALL_CLOCK", step, WALL_CLOCK_STEP_SECONDS, message)


def _shortfall(code: str, found: float | str, required: float | str, message: str) -> Shortfall:
    return Shortfall(code=code, message=message, found=found, required=required)
