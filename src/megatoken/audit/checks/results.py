"""Whether the results of a performance log follow from each other, and from the clock of the log itself."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence

from megatoken.audit.checks.stopping import RANKS, check_early_stopping
from megatoken.audit.evidence import Where
from megatoken.audit.finding import Observation, Severity, shown
from megatoken.audit.view import RunView, observe
from megatoken.mlperf.detail_log import DetailLog
from megatoken.mlperf.draws import MOST_ARRIVALS, PoissonSchedule
from megatoken.mlperf.run_figures import completion_seconds, elapsed, logged_start, power_times, whole
from megatoken.text import count_of

# Products of two or three numbers of six digits each.
DIGITS = 6e-6
PRODUCT = 3e-5
UNLIKE = 4.0  # times that the mean of the samples may differ from the mean of the tokens
LATE_SECONDS = 60.0  # LoadGen may take so long to write what it has measured
_ORDERED = ("min", *RANKS, "max")
_FLAGS = ("result_perf_constraints_met", "result_min_duration_met", "result_min_queries_met", "early_stopping_met")


def check_results(run: RunView) -> Iterator[Observation]:
    """All of it; nothing for a log without results."""
    log = run.detail
    yield _errors(run)
    if run.is_performance and "result_validity" in log.first:
        yield from _rates(run)
        yield from _latencies(run)
        yield from _first_tokens(run)
        yield from _clock(run)
        yield from _flags(run)
        yield from check_early_stopping(run)
    elif run.is_accuracy:
        yield from _clock(run)


def _errors(run: RunView) -> Observation:
    """num_errors counts the lines marked as errors before it."""
    log = run.detail
    logged = whole(log, "num_errors")
    where = (*(Where(run.detail_path, entry.line) for entry in log.errors[:10]), *run.at("num_errors"))
    if logged is None:
        return observe(
            "result.error_count", True, "no num_errors in this kind of log", count_of(log.error_count, "error"), where
        )
    return observe(
        "result.error_count",
        logged == log.error_count,
        f"num_errors {log.error_count}: so many lines are marked as errors",
        f"num_errors {logged}",
        where,
    )


def _rates(run: RunView) -> Iterator[Observation]:
    log, scenario = run.detail, run.figures.scenario
    samples = run.figures.samples_issued
    if scenario == "Offline":
        rate, latency_ns = log.number("result_samples_per_second"), log.number("result_max_latency_ns")
        keys = ("result_samples_per_second", "result_max_latency_ns", "generated_samples_per_query")
        if samples is None or rate is None or not latency_ns:
            yield observe("result.rate", None, "samples / largest latency", "figures missing", run.at(*keys))
            return
        expected = samples / (latency_ns / 1e9)
        yield observe(
            "result.rate",
            _close(rate, expected, DIGITS),
            f"{expected:.6g} samples/s: {count_of(samples, 'sample')} in {latency_ns / 1e9:.3f} s",
            f"{rate:g} samples/s",
            run.at(*keys),
        )
    elif scenario == "Server":
        yield from _server_rates(run)
    elif scenario == "SingleStream":
        yield from _stream_rates(run)
    yield from _token_counts(run)


def _stream_rates(run: RunView) -> Iterator[Observation]:
    """One query in the mean latency; with LoadGen's own time between queries a little less, and as the clocks say."""
    log = run.detail
    keys = ("result_qps_without_loadgen_overhead", "result_qps_with_loadgen_overhead", "result_mean_latency_ns")
    alone, with_overhead, mean_ns = (log.number(key) for key in keys)
    queries, longest_ns = whole(log, "result_query_count"), log.number("result_max_latency_ns")
    if not alone or not with_overhead or not mean_ns or not queries or longest_ns is None:
        yield observe("result.rate", None, "a query in the mean latency", "figures missing", run.at(*keys))
        return
    problems = []
    if not _close(alone, 1e9 / mean_ns, DIGITS):
        problems.append(f"{1e9 / mean_ns:.6g} queries/s without overhead, one in the mean latency")
    issued = (queries - 1) / with_overhead  # when the last query was issued, after all before it were answered
    if issued * (1 + DIGITS) < (queries * mean_ns - longest_ns) / 1e9:
        problems.append(f"the last query issued after {(queries * mean_ns - longest_ns) / 1e9:.6g} s, not {issued:.6g}")
    begin, end = power_times(log)
    window = elapsed(begin, end) if begin and end else None
    if window is not None and not issued * (1 - DIGITS) - 0.01 <= window <= issued + longest_ns / 1e9 + LATE_SECONDS:
        problems.append(f"a power window of {window:.3f} s, not {issued:.3f} s")
    yield _rate(run, problems, "rates that follow from the mean latency and the clocks", keys)


def _server_rates(run: RunView) -> Iterator[Observation]:
    """The scheduled rate follows from seed and target; the last query cannot be done before it is due."""
    log = run.detail
    queries, scheduled = whole(log, "result_query_count"), log.number("result_scheduled_samples_per_sec")
    done = completion_seconds(log)
    count = whole(log, "generated_query_count")
    keys = ("result_scheduled_samples_per_sec", "result_completed_samples_per_sec", "result_query_count")
    if not queries or queries < 2 or not scheduled or done is None:
        yield observe("result.rate", None, "rates that follow from the queries", "figures missing", run.at(*keys))
        return
    problems = []
    due = (queries - 1) / scheduled
    if count == queries:
        seed, target = whole(log, "effective_schedule_rng_seed"), log.number("effective_target_qps")
        if seed is not None and target and queries <= MOST_ARRIVALS:
            last = PoissonSchedule(seed, target).due_ns(queries - 1) / 1e9
            expected = (queries - 1) / last if last else scheduled
            if not _close(scheduled, expected, 2 * DIGITS):
                problems.append(f"a scheduled rate of {expected:.6g}/s, not {scheduled:g}")
    if done < due * (1 - 2 * DIGITS):
        problems.append(f"the last query done after it was due at {due:.3f} s, not at {done:.3f} s")
    yield _rate(run, problems, "rates that follow from the queries and the schedule's seed", keys)


def _rate(run: RunView, problems: Sequence[str], follows: str, keys: tuple[str, ...]) -> Observation:
    return observe(
        "result.rate",
        not problems,
        shown("; ".join(problems)) or follows,
        "; ".join(run.text(key) for key in keys),
        run.at(*keys),
    )


def _token_counts(run: RunView) -> Iterator[Observation]:
    """Server and SingleStream logs hold the tokens three times, divided by three times."""
    log = run.detail
    mean_ns, samples = log.number("result_mean_latency_ns"), run.figures.samples_issued
    per_latency = log.number("result_token_throughput")
    issued_rate = log.number("result_token_throughput_with_loadgen_overhead")
    done_rate = log.number("result_completed_tokens_per_second")
    if per_latency is None or done_rate is None or issued_rate is None or not mean_ns or not samples:
        return
    keys = (
        "result_token_throughput",
        "result_token_throughput_with_loadgen_overhead",
        "result_completed_tokens_per_second",
        "result_mean_latency_ns",
    )
    tokens = per_latency * mean_ns * samples
    problems = []
    done = completion_seconds(log)
    if done and not _close(done_rate * done, tokens, PRODUCT):
        problems.append(f"{tokens / done:.6g} completed tokens/s, not {done_rate:g}")
    issued = tokens / issued_rate if issued_rate else 0.0
    if run.figures.scenario == "SingleStream":
        queries_rate = log.number("result_qps_with_loadgen_overhead")
        told = bool(tokens or issued_rate)  # else every answer was of one token, which LoadGen takes for none
        if told and queries_rate and samples > 1 and not _close(issued * queries_rate, samples - 1, PRODUCT):
            problems.append(f"{tokens * queries_rate / (samples - 1):.6g} tokens/s with overhead, not {issued_rate:g}")
        if done_rate and tokens / done_rate < issued * (1 - PRODUCT):
            problems.append("the last query completed after it was issued")
    elif done is not None and issued > done * (1 + PRODUCT):
        problems.append(f"the last query issued at {issued:.3f} s before it was done at {done:.3f} s")
    yield observe(
        "result.tokens",
        not problems,
        shown("; ".join(problems)) or f"about {tokens:,.0f} tokens by each of three figures",
        "; ".join(run.text(key) for key in keys),
        run.at(*keys),
    )


def _latencies(run: RunView) -> Iterator[Observation]:
    figures = run.figures
    tables: list[tuple[str, Mapping[str, float], str]] = [
        ("latency", figures.latency_seconds, "result_50.00_percentile_latency_ns"),
        ("TTFT", figures.ttft_seconds, "result_first_token_50.00_percentile_latency_ns"),
        ("TPOT", figures.tpot_seconds, "result_time_per_output_token_50.00_percentile_ns"),
    ]
    problems, keys = [], []
    compared = sum(len(values) for _, values, _ in tables)
    for name, values, key in tables:
        found = disorder(values) or impossible_mean(values, figures.samples_issued)
        if found:
            problems.append(f"{name}: {found}")
            keys.append(key)
    for percent, ttft in figures.ttft_seconds.items():
        whole_latency = figures.latency_seconds.get(percent)
        if whole_latency is not None and ttft > whole_latency:
            problems.append(f"{percent} of TTFT is {ttft:g} s, above that of the latency, {whole_latency:g} s")
            keys.append("result_first_token_50.00_percentile_latency_ns")
            break
    yield observe(
        "result.latencies",
        False if problems else True if compared else None,
        "percentiles that rise, a mean that fits them, first tokens no later than last ones",
        shown("; ".join(problems)) or (f"{compared} such latencies" if compared else "no latencies"),
        run.at(*keys) if keys else run.at("result_mean_latency_ns"),
    )


def _first_tokens(run: RunView) -> Iterator[Observation]:
    """What comes after the first tokens is the tokens after them times what each took, between least and most."""
    log, figures = run.detail, run.figures
    samples, tokens = figures.samples_issued, figures.output_tokens
    if figures.scenario not in ("Server", "SingleStream") or not samples or not tokens or not figures.tpot_seconds:
        return
    tables = (figures.latency_seconds, figures.ttft_seconds, figures.tpot_seconds)
    ends = [figures.tpot_seconds.get(name) for name in ("min", "max")]
    known = [value for value in (*(table.get("mean") for table in tables), *ends) if value is not None]
    if len(known) < 5 or tokens <= samples or log.error_count:
        return
    latency, ttft, tpot, least, most = known
    after = (latency - ttft) * samples / (tokens - samples)
    slack = 2e-9 + PRODUCT * abs(after)  # whole nanoseconds
    possible = least - slack <= after <= most + slack
    yield observe(
        "result.first_tokens",
        possible and after <= UNLIKE * (tpot + slack) and tpot <= UNLIKE * (after + slack),
        f"{after * 1e3:.6g} ms a token after the first, by mean latency, mean TTFT and the number of tokens",
        f"time per output token {tpot * 1e3:.6g} ms on average, from {least * 1e3:.6g} to {most * 1e3:.6g} ms",
        run.at("result_first_token_mean_latency_ns", "result_mean_latency_ns", "result_time_to_output_token_mean"),
        Severity.WARN if possible else Severity.FAIL,  # answers of many tokens may be the fast or the slow ones
    )


def disorder(values: Mapping[str, float], unit: str = " s") -> str:
    """The first two of minimum, percentiles and maximum that stand in the wrong order; empty if none do."""
    known = [(name, values[name]) for name in _ORDERED if name in values]
    for (lower, low), (upper, high) in itertools.pairwise(known):
        if low > high:
            return f"{lower} is {low:.9g}{unit}, {upper} is {high:.9g}{unit}"
    return ""


def impossible_mean(values: Mapping[str, float], samples: int | None, unit: str = " s", slack: float = 0.0) -> str:
    """Percentiles bound the mean: between two of them no value is below the one or above the other.

    Empty if they do, or if some of them are not known; ``slack`` is for percentiles that lie between samples.
    """
    if not samples or any(name not in values for name in (*_ORDERED, "mean")):
        return ""
    points = [values[name] for name in _ORDERED]
    ranks = [0, *(math.floor(samples * rank) for rank in RANKS.values()), samples]
    shares = [(b - a) / samples for a, b in itertools.pairwise(ranks)]
    low = sum(share * point for share, point in zip(shares, points, strict=False))
    high = sum(share * point for share, point in zip(shares, points[1:], strict=False))
    mean = values["mean"]
    # LoadGen's sum of nanoseconds overflows, or is below zero, as of answers of one token: its mean means nothing.
    if high * samples * 1e9 >= 2.0**63 or low < 0:
        return ""
    if low * (1 - 1e-9) - 1e-8 - slack <= mean <= high * (1 + 1e-9) + 1e-8 + slack:
        return ""
    return f"a mean of {mean:.9g}{unit}, though its percentiles put it between {low:.9g} and {high:.9g}{unit}"


def _clock(run: RunView) -> Iterator[Observation]:
    """The log's own time stamps, the power window and the test's date tell how long the run took."""
    log = run.detail
    duration = run.figures.duration_seconds
    begin, end = power_times(log)
    problems: list[str] = []
    keys: list[str] = []
    started = log.first.get("generated_query_duration")
    ended = log.first.get("power_end") or log.first.get("result_validity")
    one_part = log.counts.get("generated_query_duration") == 1
    offline = run.figures.scenario == "Offline" and run.is_performance
    if one_part and started and ended and duration is not None:
        between = (ended.time_ms - started.time_ms) / 1e3
        if duration > between + 0.01:
            problems.append(f"a duration of {duration:.3f} s, though only {between:.3f} s passed between its lines")
            keys += ["result_max_latency_ns" if offline else "power_end", started.key, ended.key]
        elif between - duration > LATE_SECONDS + 0.02 * duration:
            problems.append(f"a duration of {duration:.3f} s, though {between:.3f} s passed between its lines")
            keys += ["result_max_latency_ns" if offline else "power_end", started.key, ended.key]
    if begin and end:
        window = elapsed(begin, end)
        longest_ns = log.number("result_max_latency_ns")
        if offline and longest_ns is not None and abs(window - longest_ns / 1e9) > 0.01:
            problems.append(f"power_begin to power_end {window:.3f} s, the largest latency {longest_ns / 1e9:.3f} s")
            keys += ["power_begin", "power_end", "result_max_latency_ns"]
        done = completion_seconds(log) if run.figures.scenario == "Server" else None
        if done is not None and done > window + 0.01 + PRODUCT * done:
            problems.append(f"the last query done after {done:.3f} s, the power window {window:.3f} s long")
            keys += ["power_begin", "power_end", "result_completed_samples_per_sec"]
        if started and one_part and (text := _start_problem(log, started.time_ms)):
            problems.append(text)
            keys += ["test_datetime", "power_begin"]
    yield observe(
        "result.clock",
        not problems if duration is not None else None,
        "a duration that the log's times, its power window and its date agree on",
        shown("; ".join(problems)) or (f"{duration:.3f} s" if duration is not None else "no duration"),
        run.at(*keys) if keys else run.at("result_max_latency_ns"),
    )


def _start_problem(log: DetailLog, generated_ms: float) -> str:
    """power_begin comes when the queries are generated; test_datetime is local, so whole quarter hours may differ."""
    test, (begin, _) = logged_start(log), power_times(log)
    if test is None or begin is None:
        return ""
    late = elapsed(test, begin) - generated_ms / 1e3
    zone = round(late / 900) * 900
    if abs(zone) <= 14 * 3600 and -2.0 <= late - zone <= LATE_SECONDS:
        return ""
    return f"test_datetime {log.text('test_datetime')} and power_begin {log.text('power_begin')}, {late:.0f} s apart"


def _flags(run: RunView) -> Iterator[Observation]:
    """VALID exactly if every constraint is met; and each constraint, judged again."""
    log = run.detail
    problems: list[str] = []
    keys: list[str] = ["result_validity"]
    flags = {key: log.get(key) for key in _FLAGS if key in log.first}
    valid = log.get("result_validity")
    if valid != ("VALID" if all(flag is True for flag in flags.values()) else "INVALID"):
        problems.append(f"{shown(valid)} with {', '.join(f'{key} {shown(flag)}' for key, flag in flags.items())}")
        keys += flags
    unmet = any(flags.get(key) is False for key in _FLAGS if key != "early_stopping_met")
    if "result_invalid_reason" in log.first and bool((log.text("result_invalid_reason") or "").strip()) is not unmet:
        problems.append(f"a reason {shown(log.get('result_invalid_reason'))!r} with those constraints")
        keys.append("result_invalid_reason")
    for key, expected in (
        ("result_min_duration_met", _min_duration_met(run)),
        ("result_min_queries_met", _min_queries_met(run)),
        ("result_perf_constraints_met", _constraints_met(run)),
    ):
        if key in flags and expected is not None and flags[key] is not expected:
            problems.append(f"{key} {shown(flags[key])}, though its figures say {expected}")
            keys.append(key)
    yield observe(
        "result.validity",
        not problems,
        "a verdict that follows from the figures",
        shown("; ".join(problems)) or shown(valid),
        run.at(*keys),
    )


def _min_duration_met(run: RunView) -> bool | None:
    log = run.detail
    least_ms = log.number("effective_min_duration_ms")
    scenario, ran = run.figures.scenario, None
    if scenario == "Offline":
        longest = log.number("result_max_latency_ns")
        ran = None if longest is None else longest / 1e9
    else:
        queries = whole(log, "result_query_count")
        rate = log.number(
            "result_scheduled_samples_per_sec" if scenario == "Server" else "result_qps_with_loadgen_overhead"
        )
        ran = (queries - 1) / rate if queries and rate else None
    if ran is None or least_ms is None or _close(ran, least_ms / 1e3, DIGITS):
        return None
    return ran >= least_ms / 1e3


def _min_queries_met(run: RunView) -> bool | None:
    log = run.detail
    queries, least = whole(log, "result_query_count"), whole(log, "effective_min_query_count")
    samples, least_samples = run.figures.samples_issued, whole(log, "effective_min_sample_count")
    if queries is None or least is None or samples is None or least_samples is None:
        return None
    return queries >= least and samples >= least_samples


def _constraints_met(run: RunView) -> bool | None:
    log = run.detail
    if run.figures.scenario != "Server" or log.number("effective_target_latency_percentile") != 0.99:
        return None
    if log.get("requested_use_token_latencies") is not True:
        latency, limit = log.number("result_99.00_percentile_latency_ns"), log.number("effective_target_latency_ns")
        return None if latency is None or limit is None else latency <= limit
    values = [
        (log.number("result_first_token_99.00_percentile_latency_ns"), log.number("requested_server_ttft_latency")),
        (log.number("result_time_per_output_token_99.00_percentile_ns"), log.number("requested_server_tpot_latency")),
    ]
    if any(value is None or limit is None for value, limit in values):
        return None
    return all(value <= limit for value, limit in values if value is not None and limit is not None)


def _close(a: float, b: float, relative: float) -> bool:
    return abs(a - b) <= relative * max(abs(a), abs(b))
