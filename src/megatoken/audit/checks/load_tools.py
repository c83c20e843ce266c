"""Results of load tools: whether their numbers add up."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from megatoken.audit.finding import Observation, Outcome, Severity, check, free_of, outcome
from megatoken.audit.load_tools import ToolResult
from megatoken.mlperf.latencies import disorder

RATE_TOLERANCE = 0.005  # relative: tools measure their duration once for all, or for each rate apart
SUM_TOLERANCE = 0.001
LITTLE_TOLERANCE = 0.05  # a request counts as under way a little longer than its latency
ROWS_TOLERANCE = 1e-6
APART_SECONDS = 1e-3  # of a request's last token and its end
TITLES = {"latency": "end-to-end latency", "ttft": "TTFT", "tpot": "TPOT", "itl": "time between tokens"}
SHARES = {"p50": 50, "p90": 90, "p95": 95, "p99": 99, "p99.9": 99.9}


def check_tool_result(result: ToolResult) -> Iterator[Observation]:
    """One result."""
    for one in (complete, rates, percentiles, latencies, in_flight):
        yield from one(result)


@check("tool.complete", "The load tool ended, with every request", "Requests that failed are missing from every rate.")
def complete(result: ToolResult) -> Outcome:
    problems = []
    if result.ended is False:
        problems.append("it was cancelled")
    if result.failed:
        problems.append(f"{result.failed:,.0f} requests failed or did not end")
    if result.completed == 0:
        problems.append("no request was completed")
    expected = "a run that came to its end, without failed requests"
    if result.failed is None and not problems:
        return outcome(None, expected, "does not say how many failed", result.at("completed"))
    return free_of(problems, expected, "such a run", result.at("failed", "error_summary"), Severity.WARN)


@check("tool.rates", "Rates times time are what was counted", "A rate over another time or of other tokens is larger.")
def rates(result: ToolResult) -> Outcome:
    """Requests and tokens over the time of the run."""
    both = None
    if result.input_tokens is not None and result.output_tokens is not None:
        both = result.input_tokens + result.output_tokens
    stated = (
        ("requests/s", result.request_rate, result.completed),
        ("output tokens/s", result.output_rate, result.output_tokens),
        ("input and output tokens/s", result.total_rate, both),
    )
    known = [
        (unit, rate, count) for unit, rate, count in stated if rate is not None and count is not None and result.seconds
    ]
    problems = [
        f"{rate:,.6g} {unit}, though {count:,.0f} in {result.seconds:,.4g} s are {count / seconds:,.6g}"
        for unit, rate, count in known
        if (seconds := result.seconds or 0.0) and abs(rate - count / seconds) > RATE_TOLERANCE * count / seconds
    ]
    expected, where = "rates that follow from counts and time", result.at("duration", "benchmark_duration")
    return free_of(problems, expected, "they do", where) if known else outcome(None, expected, "no rates", where)


@check("tool.percentiles", "Percentiles are in order", "A percentile above a higher one was written, not measured.")
def percentiles(result: ToolResult) -> Outcome:
    """Minimum, percentiles and maximum rise; the mean lies between them; rows, where stored, give the same."""
    problems = []
    for measure, values in result.distributions.items():
        if found := disorder(values):
            problems.append(f"{TITLES[measure]}: {found}")
        low, high, mean = values.get("min"), values.get("max", values.get("p99.9")), values.get("mean")
        if mean is not None and ((low is not None and mean < low) or ("max" in values and mean > (high or 0.0))):
            problems.append(f"{TITLES[measure]}: a mean of {mean:,.6g} s outside of its bounds")
    problems += _against_rows(result)
    expected = "minimum, percentiles and maximum that rise, and a mean between them"
    return free_of(problems, expected, "they do", result.at(*(f"mean_{name}_ms" for name in ("ttft", "tpot"))))


def _against_rows(result: ToolResult) -> Iterator[str]:
    rows = result.rows
    if rows is None or not len(rows.latency):
        return
    for measure, values in (("latency", rows.latency), ("ttft", rows.ttft), ("tpot", rows.tpot)):
        stated = result.distributions.get(measure, {})
        for name, share in SHARES.items():
            if name in stated and len(values):
                own = float(np.percentile(values, share))
                if abs(own - stated[name]) > ROWS_TOLERANCE * max(own, 1e-9):
                    yield f"{TITLES[measure]}: {name} of {stated[name]:,.6g} s, though its requests give {own:,.6g} s"
    tokens = float(rows.output_tokens.sum())
    if result.output_tokens is not None and result.output_tokens != tokens:
        yield f"{result.output_tokens:,.0f} output tokens, though its requests have {tokens:,.0f}"


@check("tool.latencies", "TTFT and later tokens make up the latency", "Else tokens are counted, or times taken, twice.")
def latencies(result: ToolResult) -> Outcome:
    """End-to-end latency is TTFT and all gaps together: by request, by sums, or by means."""
    problems = list(_latency_problems(result))
    spread = {name: values["mean"] for name, values in result.distributions.items() if "mean" in values}
    known = result.rows is not None or result.sums or {"latency", "ttft", "tpot"} <= spread.keys()
    expected = "a latency of TTFT plus the time per token of all later tokens"
    where = result.at("mean_tpot_ms", "mean_e2el_ms", "inter_token_latency")
    return free_of(problems, expected, "it is", where) if known else outcome(None, expected, "no such figures", where)


def _latency_problems(result: ToolResult) -> Iterator[str]:
    rows, sums = result.rows, result.sums
    if rows is not None and len(rows.latency):
        more = int((rows.ttft + rows.gaps > rows.latency + APART_SECONDS).sum())
        if more:
            yield f"TTFT and gaps of {more:,} of {len(rows.latency):,} requests exceed their latency"
        return
    if {"latency", "ttft", "tpot"} <= sums.keys():
        made = sums["ttft"] + sums["tpot"]
        if made > (1 + SUM_TOLERANCE) * sums["latency"]:
            yield f"TTFT and gaps of all requests are {made:,.4g} s, their latencies {sums['latency']:,.4g} s"
        return
    means = {name: values["mean"] for name, values in result.distributions.items() if "mean" in values}
    if not {"latency", "ttft", "tpot"} <= means.keys():
        return
    if means["ttft"] > means["latency"]:
        yield f"a mean TTFT of {means['ttft']:,.4g} s, longer than the mean latency of {means['latency']:,.4g} s"
    if result.output_tokens and result.completed and (per_answer := result.output_tokens / result.completed) > 1:
        implied, stated = (means["latency"] - means["ttft"]) / (per_answer - 1), means["tpot"]
        # Means of ratios and ratios of means differ with the lengths; by so much only where something is wrong.
        if implied > 0 and not 0.5 <= stated / implied <= 2:
            yield (
                f"a mean TPOT of {stated * 1e3:,.4g} ms, though latency less TTFT over a mean answer's later tokens"
                f" is {implied * 1e3:,.4g} ms"
            )


@check("tool.in_flight", "Requests under way fit the concurrency", "Little's law: else more would have been open.")
def in_flight(result: ToolResult) -> Outcome | None:
    mean = result.distributions.get("latency", {}).get("mean")
    if result.most_in_flight is None or mean is None or result.request_rate is None:
        return None
    under_way = result.request_rate * mean
    found = f"{under_way:,.4g} on average: {result.request_rate:,.4g} requests/s of {mean:,.4g} s each"
    holds = under_way <= (1 + LITTLE_TOLERANCE) * result.most_in_flight
    return outcome(holds, f"at most {result.most_in_flight:,.0f} under way", found, result.at("max_concurrency"))
