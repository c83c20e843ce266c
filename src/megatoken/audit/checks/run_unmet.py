"""What LoadGen's log and the raw rows of a megatoken run folder do not meet of the rules, with the numbers.

The numbers of the rules are those of ``data/loadgen_rules.json``. Nothing here is the harness's own code: an audit that
asked the harness would only hear it twice.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from megatoken.analysis.statistics import Samples
from megatoken.audit.checks.run_latencies import disagreements, latencies_of, limits_of
from megatoken.files import mapping
from megatoken.mlperf.benchmarks import SCENARIOS, Benchmark, benchmark_of
from megatoken.mlperf.detail_log import DetailLog
from megatoken.mlperf.rounds import DEFAULT_ROUND, rules
from megatoken.mlperf.run_figures import round_of, samples_answers, whole
from megatoken.runs.run import Run

SHORTEST_SEND_LAG_LIMIT_SECONDS, SEND_LAG_SHARE = 0.01, 0.05  # of the limit on the time to first token
CLIENT_SHARE = 0.5
WALL_CLOCK_STEP_SECONDS = 0.01
EARLY_STOPPING_QUERIES = 64  # fewest for a p90
SIX_DIGITS = 1e-5  # relative, of numbers that LoadGen prints
FOUR_DIGITS = 1e-3  # relative, of numbers in messages
_PERCENTILES = {
    "TTFT": "result_first_token_99.00_percentile_latency_ns",
    "TPOT": "result_time_per_output_token_99.00_percentile_ns",
}
_NUMBER = re.compile(r"\d[\d,]*(?:\.\d+)?(?:e[-+]?\d+)?")


class Unmet(NamedTuple):
    """A rule that is not met, or a doubt: what was found and required; None where words are told, or not these."""

    code: str
    found: float | str | None = None
    required: float | None = None


def unmet_rules(folder: Run, log: DetailLog, benchmark: Benchmark) -> list[Unmet]:
    """Rules not met, and doubts; what the log does not say is left to the checks of the log."""
    return [*_unmet(folder, log, benchmark)]


def told_otherwise(stated: Sequence[Mapping[str, Any]], unmet: Sequence[Unmet]) -> Iterator[str]:
    """Numbers that shortfalls of result.json have and log and rows do not, and messages that name others.

    Args:
        stated: ``rules_unmet``, ``doubts`` and ``reasons``.
        unmet: what log and rows give.
    """
    for one in stated:
        alike = [other for other in unmet if other.code == one["code"]]
        if not alike:
            continue
        if not any(
            _same(one.get("found"), other.found) and _same(one.get("required"), other.required) for other in alike
        ):
            given = ", or ".join(_numbers(other) for other in alike)
            yield f"{one['code']} found {one.get('found')}, required {one.get('required')}; log and rows give {given}"
        elif not _named(one):
            yield f"{one['code']} found {one['found']}, its message says: {one['message']}"


def _numbers(of: Unmet) -> str:
    return " of ".join(str(value) for value in (of.found, of.required) if value is not None)


def _same(told: object, value: float | str | None) -> bool:
    if value is None or isinstance(value, str):
        return value is None or told == value
    return isinstance(told, int | float) and math.isclose(told, value, rel_tol=SIX_DIGITS, abs_tol=1e-12)


def _named(shortfall: Mapping[str, Any]) -> bool:
    """Whether a message names the number that was found, in its unit or in thousandths of it."""
    found = shortfall.get("found")
    if not isinstance(found, int | float):
        return True
    named = [float(text.replace(",", "")) for text in _NUMBER.findall(str(shortfall.get("message")))]
    wanted = (abs(found), 1e3 * abs(found))
    return any(math.isclose(one, value, rel_tol=FOUR_DIGITS) for one in named for value in wanted)


def benchmark_judged_by(result: Mapping[str, Any]) -> Benchmark | None:
    """The benchmark that a run is held against, if it is known."""
    name = result.get("benchmark") or "llama2-70b"  # the yardstick of models that are named after none
    return benchmark_of(name, None) if isinstance(name, str) else None


def _unmet(folder: Run, log: DetailLog, benchmark: Benchmark) -> Iterator[Unmet]:
    scenario = str(folder.result.get("scenario"))
    named = isinstance(folder.result.get("benchmark"), str)  # else it is a yardstick, which says nothing of scenarios
    round_ = folder.result.get("rules") or DEFAULT_ROUND
    if named and scenario in SCENARIOS and not benchmark.in_round(round_).has(SCENARIOS[scenario]):
        yield Unmet("SCENARIO", scenario)
    total = whole(log, "qsl_reported_total_count")
    data_set_rows = folder.result.get("data_set_rows")
    rows = total if total is None or not isinstance(data_set_rows, int) else min(total, data_set_rows)
    if samples_answers(log):  # a compliance test, whose few samples show no speed
        if round_of(log) is None:
            yield Unmet("SEEDS")
    elif folder.result.get("mode") == "performance":
        yield from _duration_and_samples(folder, log, scenario, benchmark)
        if round_of(log) is None:  # whether they are of the round that somebody claims is rules.seeds' question
            yield Unmet("SEEDS")
        yield from _equal_issue(log, scenario, data_set_rows)
        yield from _latencies(folder, log, scenario, benchmark)
        if log.text("result_validity") != "VALID":
            yield Unmet("LOADGEN_INVALID", log.text("result_validity"))
        if scenario in ("server", "interactive"):
            yield from (Unmet("LOADGEN_DISAGREES", ours, theirs) for ours, theirs in disagreements(folder, log))
        yield from _client(folder, scenario)
    if rows is not None and rows != benchmark.rows:
        yield Unmet("DATA_SET_SIZE", rows if isinstance(data_set_rows, int) else None, benchmark.rows)
    if log.error_count:
        yield Unmet("LOADGEN_ERRORS", log.error_count, 0)


def _duration_and_samples(folder: Run, log: DetailLog, scenario: str, benchmark: Benchmark) -> Iterator[Unmet]:
    required = rules()["min_duration_ms"] / 1e3
    asked = (log.number("effective_min_duration_ms") or 0.0) / 1e3
    if scenario == "offline":
        ran = (log.number("result_max_latency_ns") or 0.0) / 1e9
    else:
        due = Samples.of(folder.requests).scheduled
        ran = float(due.max()) if len(due) else 0.0
    waited = scenario != "offline" and asked >= required and log.get("result_min_duration_met") is True
    if ran < required and not waited:
        yield Unmet("MIN_DURATION", ran, required)
    elif asked < required:
        yield Unmet("MIN_DURATION", asked, required)
    samples = whole(log, "effective_samples_per_query")
    if scenario == "offline" and samples is not None and samples < benchmark.rows:
        yield Unmet("MIN_SAMPLES", samples, benchmark.rows)


def _equal_issue(log: DetailLog, scenario: str, data_set_rows: object) -> Iterator[Unmet]:
    rows, each = whole(log, "qsl_reported_performance_count"), whole(log, "generated_samples_per_query")
    queries = whole(log, "generated_query_count")
    if not rows or each is None:
        return
    if isinstance(data_set_rows, int) and data_set_rows > 0:
        rows = min(rows, data_set_rows)
    issued = each * (1 if queries is None else queries)
    in_passes = scenario == "singlestream" or issued % rows == 0
    if log.get("effective_sample_concatenate_permutation") is not True or not in_passes:
        known = isinstance(data_set_rows, int)
        yield Unmet("EQUAL_ISSUE", issued, -(-issued // rows) * rows if known else None)


def _latencies(folder: Run, log: DetailLog, scenario: str, benchmark: Benchmark) -> Iterator[Unmet]:
    limits = benchmark.limits.get(SCENARIOS.get(scenario, scenario))
    if scenario in ("server", "interactive") and limits is not None:
        for name, limit_ns in (("TTFT", limits.ttft_ns), ("TPOT", limits.tpot_ns)):
            found = log.number(_PERCENTILES[name])
            if found is not None and found >= limit_ns:
                yield Unmet(f"{name}_LIMIT", found / 1e9, limit_ns / 1e9)
            asked = log.number(f"requested_server_{name.lower()}_latency")
            if asked is not None and asked > limit_ns:
                yield Unmet("LATENCY_LIMITS", asked / 1e9, limit_ns / 1e9)
    if scenario != "offline" and log.get("early_stopping_met") is not True:
        yield _early_stopping(folder, log)


def _early_stopping(folder: Run, log: DetailLog) -> Unmet:
    """Queries of those that it takes, or queries over a limit of those that it allows."""
    queries, limits = log.number("result_query_count"), limits_of(folder.result)
    own = None if limits is None else latencies_of(folder, limits)
    if own is None:
        return Unmet("EARLY_STOPPING", queries, EARLY_STOPPING_QUERIES)
    if own["allowed_over"] < 0:
        return Unmet("EARLY_STOPPING", queries, own["needed"])
    return Unmet("EARLY_STOPPING", max(own["ttft_over"], own["tpot_over"]), own["allowed_over"])


def _client(folder: Run, scenario: str) -> Iterator[Unmet]:
    """What the client took part in: samples sent late, a rate near its own, a wall clock that was set."""
    result = folder.result
    if scenario != "offline":
        samples = Samples.of(folder.requests)
        lags = np.sort(samples.sent - samples.scheduled)
        lags = lags[np.isfinite(lags)]
        benchmark = benchmark_judged_by(result)
        limits = benchmark.limits.get(SCENARIOS.get(scenario, scenario)) if benchmark else None
        most = max(SHORTEST_SEND_LAG_LIMIT_SECONDS, SEND_LAG_SHARE * limits.ttft_ns / 1e9 if limits else 0.0)
        if len(lags) and lags[int(0.99 * len(lags))] > most:
            yield Unmet("SEND_LAG", float(lags[int(0.99 * len(lags))]) if len(lags) == len(samples) else None, most)
    offered = result.get("offered_samples_per_second")
    alone = mapping(result.get("client_capacity")).get("samples_per_second")
    if isinstance(offered, int | float) and isinstance(alone, int | float) and offered > CLIENT_SHARE * alone:
        yield Unmet("CLIENT_LIMIT", offered, CLIENT_SHARE * alone)
    step = result.get("wall_clock_step_seconds")
    if isinstance(step, int | float) and abs(step) > WALL_CLOCK_STEP_SECONDS:
        yield Unmet("WALL_CLOCK", step, WALL_CLOCK_STEP_SECONDS)
