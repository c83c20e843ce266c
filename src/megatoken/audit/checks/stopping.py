"""LoadGen's early stopping, recomputed from the queries and percentiles that the log holds."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping

from megatoken.analysis import early_stopping
from megatoken.audit.finding import Outcome, check
from megatoken.audit.view import RunView, has_result
from megatoken.mlperf.run_figures import whole
from megatoken.text import count_of

# In the order in which LoadGen judges them; it writes the second only if the first is successful.
TEXTS = ("early_stopping_result", "early_stopping_tpot_result", "early_stopping_ttft_result")
SUCCESS = "Run successful."
_ESTIMATE = re.compile(r"Early stopping (\d{1,2}(?:\.\d)?)th percentile estimate: (\d{1,18})")
_NEEDED = re.compile(r"Processed (\d{1,12}) queries\. Would need to run at least (\d{1,12}) more queries")
_DISCARDED = re.compile(r"Processed at least (\d{1,12}) queries \((\d{1,12})\).*Would discard (\d{1,12})")
_ESTIMATES = ("early_stopping_latency_ss", "early_stopping_latency_ms")
_MULTI_STREAM_PERCENTILE = 0.99  # SingleStream estimates it too


@check("result.early_stopping", "Early stopping, recomputed", "It decides whether a percentile is shown.", has_result)
def check_early_stopping(run: RunView) -> Outcome | None:
    """Server: whether few enough queries were over the limits. The streams: how many the estimate discards."""
    log, scenario = run.detail, run.figures.scenario
    queries, percentile = whole(log, "result_query_count"), log.number("effective_target_latency_percentile")
    if scenario not in ("Server", "SingleStream", "MultiStream") or percentile is None:
        return None
    if not queries or queries > early_stopping.MOST_QUERIES or not 0.5 <= percentile < 1:
        return None
    met = log.get("early_stopping_met")
    if scenario == "Server":
        expected = _server_stopping(run, queries, percentile)
        problems = [*_server_texts(run, queries, percentile), *_overlatency(run, queries)]
    else:
        expected = queries >= early_stopping.queries_needed(1, percentile)
        problems = list(_stream_texts(run, queries, percentile)) if met is True else []
    keys = ["early_stopping_met", *TEXTS, "result_overlatency_query_count", *_ESTIMATES]
    if expected is not None and met is not expected:
        problems.insert(0, f"early_stopping_met {expected}")
    follows = f"the rule, recomputed for {count_of(queries, 'query', 'queries')}"
    return run.computed(problems, follows, *(key for key in keys if key in log.first))


def _limits(run: RunView) -> dict[str, tuple[Mapping[str, float], float | None]]:
    """Latencies in seconds and their limit in ns, by the key of LoadGen's text about them."""
    log, figures = run.detail, run.figures
    if log.get("requested_use_token_latencies") is not True:
        return {TEXTS[0]: (figures.latency_seconds, log.number("effective_target_latency_ns"))}
    return {
        TEXTS[1]: (figures.tpot_seconds, log.number("requested_server_tpot_latency")),
        TEXTS[2]: (figures.ttft_seconds, log.number("requested_server_ttft_latency")),
    }


def _server_stopping(run: RunView, queries: int, percentile: float) -> bool | None:
    """Whether few enough queries were over the limits; None where the percentiles leave it open."""
    allowed = early_stopping.most_over(queries, percentile)
    met: list[bool | None] = []
    for values, limit_ns in _limits(run).values():
        at_least, at_most = (
            (0, queries) if limit_ns is None else early_stopping.places_over(values, limit_ns / 1e9, queries)
        )
        met.append(True if at_most <= allowed else False if at_least > allowed else None)
    return False if False in met else None if None in met else True


def _server_texts(run: RunView, queries: int, percentile: float) -> Iterator[str]:
    """LoadGen's text on each limit, compared with its own verdict, the count of queries and the percentiles."""
    failed = False
    for key, (values, limit_ns) in _limits(run).items():
        text = " ".join((run.detail.text(key) or "").replace("*", " ").split())
        if failed:
            if text:
                yield f"no {key} after another limit was not kept"
            continue
        failed = text != SUCCESS
        if not failed or limit_ns is None:
            continue
        numbers = _NEEDED.search(text)
        at_least, at_most = early_stopping.places_over(values, limit_ns / 1e9, queries)
        fewest, most = (early_stopping.queries_needed(over, percentile) - queries for over in (at_least, at_most))
        if numbers is None:
            yield f"{key} {SUCCESS} or how many queries it would need"
        elif int(numbers.group(1)) != queries:
            yield f"{key} of {queries} queries, not {numbers.group(1)}"
        elif not max(1, fewest) <= int(numbers.group(2)) <= most:
            yield f"{key} with {max(1, fewest)} to {most} more queries, not {numbers.group(2)}"
    if failed is run.detail.get("early_stopping_met"):
        yield f"early_stopping_met {not failed}, as the text says"


def _overlatency(run: RunView, queries: int) -> Iterator[str]:
    count = whole(run.detail, "result_overlatency_query_count")
    limit_ns = whole(run.detail, "effective_target_latency_ns")
    if count is not None and limit_ns is not None:
        at_least, at_most = early_stopping.places_over(run.figures.latency_seconds, limit_ns / 1e9, queries)
        if not at_least <= count <= at_most:
            yield f"{at_least} to {at_most} queries over {limit_ns} ns, not {count}"


def _stream_texts(run: RunView, queries: int, percentile: float) -> Iterator[str]:
    """The estimates are latencies of one query each, whose rank is known."""
    log, scenario = run.detail, run.figures.scenario
    estimates: list[int] = []
    for key, (values, _) in _limits(run).items():
        text = log.text(key) or ""
        numbers = _DISCARDED.search(text)
        if numbers is None:
            continue
        needed, discarded = early_stopping.queries_needed(1, percentile), early_stopping.discarded(queries, percentile)
        if tuple(map(int, numbers.groups())) != (needed, queries, discarded):
            yield f"{key} with at least {needed} of {queries} queries, {discarded} discarded"
        estimates = []
        for at, (name, number) in zip((percentile, _MULTI_STREAM_PERCENTILE), _ESTIMATE.findall(text), strict=False):
            estimates.append(int(number))
            low, high = early_stopping.bounds(values, queries - 1 - early_stopping.discarded(queries, at), queries)
            # MultiStream's text is about queries, whose latencies are not those of samples.
            if scenario == "SingleStream" and not low - 1e-9 <= int(number) / 1e9 <= high + 1e-9:
                yield f"an estimate of {name} % in {key} between {low:.9g} and {high:.9g} s, not {number} ns"
    kept = _ESTIMATES if scenario == "SingleStream" else _ESTIMATES[1:]
    for key, estimate in zip(kept, estimates, strict=False):
        if whole(log, key) != estimate:  # LoadGen keeps the last: that of the first token
            yield f"{key} {estimate}"
