"""LoadGen's early stopping, computed again from what the log says."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping

from megatoken.audit.figures import whole
from megatoken.audit.finding import Observation, shown
from megatoken.audit.view import RunView, observe
from megatoken.results import early_stopping

RANKS = {"p50": 0.5, "p90": 0.9, "p95": 0.95, "p97": 0.97, "p99": 0.99, "p99.9": 0.999}


def check_early_stopping(run: RunView) -> Iterator[Observation]:
    """Server: whether few enough queries were over the limits; SingleStream: how many the estimate discards."""
    log, scenario = run.detail, run.figures.scenario
    queries = whole(log, "result_query_count")
    percentile = log.number("effective_target_latency_percentile")
    if scenario not in ("Server", "SingleStream") or not queries or percentile is None or not 0.5 <= percentile < 1:
        return
    if queries > early_stopping.MOST_QUERIES:
        return
    keys = ("early_stopping_met", "early_stopping_ttft_result", "early_stopping_tpot_result", "early_stopping_result")
    met = log.get("early_stopping_met")
    expected = (
        _server_stopping(run, queries, percentile) if scenario == "Server" else _stream_stopping(queries, percentile)
    )
    problems = []
    if expected is not None and met is not expected:
        problems.append(f"early_stopping_met {expected}")
    if scenario == "SingleStream" and met is True:
        discarded = max(0, early_stopping.most_over(queries, percentile) - 1)
        for key in keys[1:]:
            told = re.search(r"Would discard (\d{1,12})", log.text(key) or "")
            if told and int(told.group(1)) != discarded:
                problems.append(f"{discarded} queries discarded, not {told.group(1)}")
    yield observe(
        "result.early_stopping",
        not problems,
        shown("; ".join(problems)) or f"the rule, computed again for {queries:,} queries",
        "; ".join(run.text(key) for key in keys if key in log.first),
        run.at(*keys),
    )


def _stream_stopping(queries: int, percentile: float) -> bool:
    return queries >= early_stopping.queries_needed(1, percentile)


def _server_stopping(run: RunView, queries: int, percentile: float) -> bool | None:
    """Whether few enough were over the limits, where the percentiles tell; None where they leave it open."""
    log = run.detail
    allowed = early_stopping.most_over(queries, percentile)
    if log.get("requested_use_token_latencies") is True:
        limits = [
            (run.figures.tpot_seconds, log.number("requested_server_tpot_latency")),
            (run.figures.ttft_seconds, log.number("requested_server_ttft_latency")),
        ]
    else:
        limits = [(run.figures.latency_seconds, log.number("effective_target_latency_ns"))]
    answers = [_few_over(values, limit, queries, allowed) for values, limit in limits]
    if any(answer is False for answer in answers):
        return False
    return None if any(answer is None for answer in answers) else True


def _few_over(values: Mapping[str, float], limit_ns: float | None, queries: int, allowed: int) -> bool | None:
    if limit_ns is None:
        return None
    limit = limit_ns / 1e9
    at_most, at_least = queries, 0
    for name, rank in RANKS.items():
        if name in values:
            place = math.floor(queries * rank)
            if values[name] <= limit:
                at_most = min(at_most, queries - place - 1)
            else:
                at_least = max(at_least, queries - place)
    if "max" in values and values["max"] <= limit:
        at_most = 0
    if at_most <= allowed:
        return True
    return False if at_least > allowed else None
