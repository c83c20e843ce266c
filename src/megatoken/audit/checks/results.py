"""Whether the results of a performance log follow from each other, from its clock and by LoadGen's early stopping."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping

from megatoken.audit.finding import Outcome, Severity, check, free_of, listed, outcome, shown
from megatoken.audit.view import MEANINGLESS, RunView, has_result
from megatoken.mlperf.constraints import FLAGS, SIX_DIGITS, constraints_met
from megatoken.mlperf.draws import MOST_ARRIVALS, PoissonSchedule
from megatoken.mlperf.early_stopping import STOPPING_KEYS, EarlyStopping
from megatoken.mlperf.latencies import disorder, impossible_mean
from megatoken.mlperf.run_figures import (
    beyond_time_zone,
    completion_seconds,
    elapsed,
    logged_start,
    power_times,
    whole,
)
from megatoken.text import count_of

PRODUCT = 3e-5  # and of a product of two or three
UNLIKE = 4.0  # largest ratio between the mean over samples and the mean over tokens
LATE_SECONDS = 60.0  # LoadGen may take so long to write what it has measured


@check("result.error_count", "Errors are counted", "Another count shows that error lines were removed.")
def error_count(run: RunView) -> Outcome:
    count, logged = run.detail.error_count, whole(run.detail, "num_errors")
    where = (*(run.lines(run.detail.errors[:10]) if run.detail.errors else ()), *run.at("num_errors"))
    if logged is None:
        return outcome(True, "no num_errors in this kind of log", count_of(count, "error"), where)
    expected = f"num_errors {count}, the number of lines marked as errors"
    return outcome(logged == count, expected, f"num_errors {logged}", where)


@check("result.rate", "The rate follows from samples and time", "That is the definition of the rate.", has_result)
def rate(run: RunView) -> Outcome | None:
    kind = {"Offline": _offline_rate, "Server": _server_rate, "SingleStream": _stream_rate}.get(run.scenario or "")
    return None if kind is None else kind(run)


def _offline_rate(run: RunView) -> Outcome:
    keys = ("result_samples_per_second", "result_max_latency_ns", "generated_samples_per_query")
    found, latency_ns = (run.detail.number(key) for key in keys[:2])
    samples = run.figures.samples_issued
    if samples is None or found is None or not latency_ns:
        return outcome(None, "samples / largest latency", "figures missing", run.at(*keys))
    rate = samples / (latency_ns / 1e9)
    expected = f"{rate:.6g} samples/s: {count_of(samples, 'sample')} in {latency_ns / 1e9:.3f} s"
    return outcome(math.isclose(found, rate, rel_tol=SIX_DIGITS), expected, f"{found:g} samples/s", run.at(*keys))


def _stream_rate(run: RunView) -> Outcome:
    """One query per mean latency; with LoadGen's own time between queries a little less, as the clocks confirm."""
    log = run.detail
    keys = ("result_qps_without_loadgen_overhead", "result_qps_with_loadgen_overhead", "result_mean_latency_ns")
    alone, with_overhead, mean_ns = (log.number(key) for key in keys)
    queries, longest_ns = whole(log, "result_query_count"), log.number("result_max_latency_ns")
    if not alone or not with_overhead or not mean_ns or not queries or longest_ns is None:
        return outcome(None, "one query per mean latency", "figures missing", run.at(*keys))
    problems = []
    if not math.isclose(alone, 1e9 / mean_ns, rel_tol=SIX_DIGITS):
        problems.append(f"{1e9 / mean_ns:.6g} queries/s without overhead, one per mean latency")
    issued = (queries - 1) / with_overhead  # when the last query was issued, after all others were answered
    least = (queries * mean_ns - longest_ns) / 1e9
    if issued * (1 + SIX_DIGITS) < least:
        problems.append(f"the last query issued after {least:.6g} s, not {issued:.6g}")
    begin, end = power_times(log)
    window, most = elapsed(begin, end) if begin and end else issued, issued + longest_ns / 1e9 + LATE_SECONDS
    if not issued * (1 - SIX_DIGITS) - 0.01 <= window <= most:
        problems.append(f"a power window of {window:.3f} s, not {issued:.3f} s")
    return run.computed(problems, "rates that follow from the mean latency and the clocks", *keys)


def _server_rate(run: RunView) -> Outcome:
    """The scheduled rate follows from seed and target; the last query cannot complete before it is due."""
    log = run.detail
    keys = ("result_scheduled_samples_per_sec", "result_completed_samples_per_sec", "result_query_count")
    queries, scheduled, done = whole(log, keys[2]), log.number(keys[0]), completion_seconds(log)
    if not queries or queries < 2 or not scheduled or done is None:
        return outcome(None, "rates that follow from the queries", "figures missing", run.at(*keys))
    problems = []
    seed, target = whole(log, "effective_schedule_rng_seed"), log.number("effective_target_qps")
    if whole(log, "generated_query_count") == queries <= MOST_ARRIVALS and seed is not None and target:
        due_ns = PoissonSchedule(seed, target).due_ns(queries - 1)
        expected = (queries - 1) / due_ns * 1e9 if due_ns else scheduled
        if not math.isclose(scheduled, expected, rel_tol=2 * SIX_DIGITS):
            problems.append(f"a scheduled rate of {expected:.6g}/s, not {scheduled:g}")
    due = (queries - 1) / scheduled
    if done < due * (1 - 2 * SIX_DIGITS):
        problems.append(f"the last query done after it was due at {due:.3f} s, not at {done:.3f} s")
    return run.computed(problems, "rates that follow from the queries and the schedule's seed", *keys)


@check("result.tokens", "Token rates agree", "LoadGen divides one count of tokens by three times.", has_result)
def token_counts(run: RunView) -> Outcome | None:
    log = run.detail
    keys = (
        "result_token_throughput",
        "result_token_throughput_with_loadgen_overhead",
        "result_completed_tokens_per_second",
        "result_mean_latency_ns",
    )
    per_latency, issued_rate, done_rate, mean_ns = (log.number(key) for key in keys)
    samples, done = run.figures.samples_issued, completion_seconds(log)
    if per_latency is None or done_rate is None or issued_rate is None or not mean_ns or not samples:
        return None
    tokens = per_latency * mean_ns * samples
    problems = []
    if done and not math.isclose(done_rate * done, tokens, rel_tol=PRODUCT):
        problems.append(f"{tokens / done:.6g} completed tokens/s, not {done_rate:g}")
    issued = tokens / issued_rate if issued_rate else 0.0
    if run.figures.scenario == "SingleStream":
        queries_rate = log.number("result_qps_with_loadgen_overhead")
        counted = bool(tokens or issued_rate)  # LoadGen counts no token of answers of one token
        later = samples - 1
        if counted and queries_rate and later and not math.isclose(issued * queries_rate, later, rel_tol=PRODUCT):
            problems.append(f"{tokens * queries_rate / later:.6g} tokens/s with overhead, not {issued_rate:g}")
        if done_rate and tokens / done_rate < issued * (1 - PRODUCT):
            problems.append("the last query completed after it was issued")
    elif done is not None and issued > done * (1 + PRODUCT):
        problems.append(f"the last query issued at {issued:.3f} s before it was done at {done:.3f} s")
    return run.computed(problems, f"about {tokens:,.0f} tokens by each of three figures", *keys)


@check("result.first_tokens", "First and later tokens add up", "A latency is TTFT and all later tokens.", has_result)
def first_tokens(run: RunView) -> Outcome | None:
    """The time after the first tokens is the number of later tokens times what each took, within its bounds."""
    figures = run.figures
    samples, tokens = figures.samples_issued, figures.output_tokens
    tables = (figures.latency_seconds, figures.ttft_seconds, figures.tpot_seconds)
    known = [table.get("mean") for table in tables] + [figures.tpot_seconds.get(name) for name in ("min", "max")]
    latency, ttft, tpot, least, most = (math.nan if value is None else value for value in known)
    if figures.scenario not in ("Server", "SingleStream") or run.detail.error_count:
        return None
    if None in known or not samples or not tokens or tokens <= samples:
        return None
    after = (latency - ttft) * samples / (tokens - samples)
    slack = 2e-9 + PRODUCT * abs(after)  # whole nanoseconds
    possible = least - slack <= after <= most + slack
    holds = possible and after <= UNLIKE * (tpot + slack) and tpot <= UNLIKE * (after + slack)
    expected = f"{after * 1e3:.6g} ms a token after the first, by mean latency, mean TTFT and the number of tokens"
    found = f"time per output token {tpot * 1e3:.6g} ms on average, from {least * 1e3:.6g} to {most * 1e3:.6g} ms"
    where = run.at("result_first_token_mean_latency_ns", "result_mean_latency_ns", "result_time_to_output_token_mean")
    # Answers of many tokens may be the fast or the slow ones.
    return outcome(holds, expected, found, where, Severity.WARN if possible else Severity.FAIL)


@check("result.latencies", "Latencies can be of one set", "Percentiles rise, and they bound the mean.", has_result)
def latencies(run: RunView) -> Outcome | None:
    figures = run.figures
    ttfts, tpots = ({}, {}) if run.samples_failed else (figures.ttft_seconds, figures.tpot_seconds)
    tables: tuple[tuple[str, Mapping[str, float], str], ...] = (
        ("latency", figures.latency_seconds, "result_50.00_percentile_latency_ns"),
        ("TTFT", ttfts, "result_first_token_50.00_percentile_latency_ns"),
        ("TPOT", tpots, "result_time_per_output_token_50.00_percentile_ns"),
    )
    problems = {}
    for name, values, key in tables:
        if found := disorder(values) or impossible_mean(values, figures.samples_issued):
            problems[f"{name}: {found}"] = key
    for name, ttft in ttfts.items():
        latency = figures.latency_seconds.get(name, math.inf)
        if ttft > latency:
            problems[f"{name} of TTFT is {ttft:g} s, above that of the latency, {latency:g} s"] = tables[1][2]
            break
    expected = "percentiles that rise, a mean that fits them, first tokens no later than last ones"
    where = run.at(*(problems.values() or ["result_mean_latency_ns"]))
    compared = sum(len(values) for _, values, _ in tables)
    if not compared or (run.samples_failed and figures.ttft_seconds and not problems):
        return outcome(None, expected, MEANINGLESS if compared else "no latencies", where)
    return free_of(problems, expected, f"{compared} such latencies", where)


@check("result.clock", "The log's clocks fit the duration", "Time stamps, power window and date bound it.")
def clock(run: RunView) -> Outcome | None:
    if not has_result(run) and not run.is_accuracy:
        return None
    problems, duration = dict(_clock_problems(run)), run.figures.duration_seconds
    where = run.at(*(itertools.chain(*problems.values()) if problems else ("result_max_latency_ns",)))
    expected = "a duration that the log's times, its power window and its date agree on"
    if duration is None:
        return outcome(None, expected, listed(problems, "no duration"), where)
    return free_of(problems, expected, f"{duration:.3f} s", where)


def _clock_problems(run: RunView) -> Iterator[tuple[str, tuple[str, ...]]]:
    """Each with the keys of its lines."""
    log, duration = run.detail, run.figures.duration_seconds
    started = log.first.get("generated_query_duration") if log.counts.get("generated_query_duration") == 1 else None
    ended = log.first.get("power_end") or log.first.get("result_validity")
    offline = run.figures.scenario == "Offline" and run.is_performance
    if started and ended and duration is not None:
        between = (ended.time_ms - started.time_ms) / 1e3
        keys = ("result_max_latency_ns" if offline else "power_end", started.key, ended.key)
        if duration > between + 0.01:
            yield f"a duration of {duration:.3f} s, though only {between:.3f} s passed between its lines", keys
        elif between - duration > LATE_SECONDS + 0.02 * duration:
            yield f"a duration of {duration:.3f} s, though {between:.3f} s passed between its lines", keys
    begin, end = power_times(log)
    if begin is None or end is None:
        return
    window, longest_ns = elapsed(begin, end), log.number("result_max_latency_ns")
    if offline and longest_ns is not None and abs(window - longest_ns / 1e9) > 0.01:
        text = f"power_begin to power_end {window:.3f} s, the largest latency {longest_ns / 1e9:.3f} s"
        yield text, ("power_begin", "power_end", "result_max_latency_ns")
    done = completion_seconds(log) if run.figures.scenario == "Server" else None
    if done is not None and done > window + 0.01 + PRODUCT * done:
        text = f"the last query done after {done:.3f} s, the power window {window:.3f} s long"
        yield text, ("power_begin", "power_end", "result_completed_samples_per_sec")
    test = logged_start(log)
    if started and test:  # power_begin follows when the queries are generated; test_datetime is local time
        late = elapsed(test, begin) - started.time_ms / 1e3
        if not -2.0 <= beyond_time_zone(late) <= LATE_SECONDS:
            text = f"test_datetime {log.text('test_datetime')} and power_begin {log.text('power_begin')}"
            yield f"{text}, {late:.0f} s apart", ("test_datetime", "power_begin")


@check("result.validity", "The verdict follows from its constraints", "Each can be computed again.", has_result)
def validity(run: RunView) -> Outcome | None:
    log = run.detail
    problems, keys = [], ["result_validity"]
    flags = {key: log.get(key) for key in FLAGS if key in log.first}
    valid = log.get("result_validity")
    if valid != ("VALID" if all(flag is True for flag in flags.values()) else "INVALID"):
        problems.append(f"{shown(valid)} with {', '.join(f'{key} {shown(flag)}' for key, flag in flags.items())}")
        keys += flags
    unmet = any(flags.get(key) is False for key in FLAGS if key != "early_stopping_met")
    if "result_invalid_reason" in log.first and bool((log.text("result_invalid_reason") or "").strip()) is not unmet:
        problems.append(f"a reason {shown(log.get('result_invalid_reason'))!r} with those constraints")
        keys.append("result_invalid_reason")
    for key, expected in constraints_met(log).items():
        if key in flags and expected is not None and flags[key] is not expected:
            problems.append(f"{key} {shown(flags[key])}, though its figures say {expected}")
            keys.append(key)
    return free_of(problems, "a verdict that follows from the figures", shown(valid), run.at(*keys))


@check("result.early_stopping", "Early stopping, recomputed", "It decides whether a percentile is shown.", has_result)
def check_early_stopping(run: RunView) -> Outcome | None:
    """Server: whether few enough queries were over the limits. The streams: how many the estimate discards."""
    stopping = EarlyStopping.of(run.detail, run.figures)
    if stopping is None:
        return None
    follows = f"the rule, recomputed for {count_of(stopping.queries, 'query', 'queries')}"
    keys = (key for key in STOPPING_KEYS if key in run.detail.first)
    return run.computed(stopping.problems(), follows, *keys)
