"""Results of load tools: whether their numbers add up."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from megatoken.analysis.early_stopping import RANKS
from megatoken.analysis.load_tools import ToolFigures
from megatoken.audit.finding import Observation, Outcome, Severity, check, free_of, outcome
from megatoken.audit.stated import ToolResult
from megatoken.mlperf.latencies import disorder

RATE_TOLERANCE = 0.005  # relative: tools measure their duration once for all, or for each rate apart
SUM_TOLERANCE = 0.001
LITTLE_TOLERANCE = 0.05  # a request counts as under way a little longer than its latency
MADE_TOLERANCE, MADE_CERTAIN = 0.25, 2.0  # of a mean latency that TTFT and time per token give
ROWS_TOLERANCE = 1e-6
APART_SECONDS = 1e-3  # of a request's last token and its end
TITLES = {"latency": "end-to-end latency", "ttft": "TTFT", "tpot": "TPOT", "itl": "time between tokens"}


def check_tool_result(result: ToolResult) -> Iterator[Observation]:
    """One result."""
    for one in (complete, rates, percentiles, latencies, in_flight):
        yield from one(result)


@check("tool.complete", "The load tool ended, with every request", "Requests that failed are missing from every rate.")
def complete(result: ToolResult) -> Outcome:
    stated, problems = result.stated, []
    if stated.ended is False:
        problems.append("it was cancelled")
    if stated.failed:
        problems.append(f"{stated.failed:,.0f} requests failed or did not end")
    if stated.completed == 0:
        problems.append("no request was completed")
    expected = "a run that came to its end, without failed requests"
    if stated.failed is None and not problems:
        return outcome(None, expected, "does not say how many failed", result.at("completed"))
    return free_of(problems, expected, "such a run", result.at("failed", "error_summary"), Severity.WARN)


@check("tool.rates", "Rates times time are what was counted", "A rate over another time or of other tokens is larger.")
def rates(result: ToolResult) -> Outcome:
    """Requests and tokens over the time of the run."""
    stated, both = result.stated, None
    if stated.input_tokens is not None and stated.output_tokens is not None:
        both = stated.input_tokens + stated.output_tokens
    rated = (
        ("requests/s", stated.request_rate, stated.completed),
        ("output tokens/s", stated.output_rate, stated.output_tokens),
        ("input and output tokens/s", stated.total_rate, both),
    )
    known = [
        (unit, rate, count) for unit, rate, count in rated if rate is not None and count is not None and stated.seconds
    ]
    problems = [
        f"{rate:,.6g} {unit}, though {count:,.0f} in {stated.seconds:,.4g} s are {count / seconds:,.6g}"
        for unit, rate, count in known
        if (seconds := stated.seconds or 0.0) and abs(rate - count / seconds) > RATE_TOLERANCE * count / seconds
    ]
    expected, where = "rates that follow from counts and time", result.at("duration", "benchmark_duration")
    return free_of(problems, expected, "they do", where) if known else outcome(None, expected, "no rates", where)


@check("tool.percentiles", "Percentiles are in order", "A percentile above a higher one was written, not measured.")
def percentiles(result: ToolResult) -> Outcome:
    """Minimum, percentiles and maximum rise; the mean lies between them; rows, where stored, give the same."""
    stated, problems = result.stated, []
    for measure, values in stated.distributions.items():
        problems += [f"{TITLES[measure]}: {name} of {value:,.6g} s" for name, value in values.items() if value < 0]
        if found := disorder(values):
            problems.append(f"{TITLES[measure]}: {found}")
        low, high, mean = values.get("min"), values.get("max", values.get("p99.9")), values.get("mean")
        if mean is not None and ((low is not None and mean < low) or ("max" in values and mean > (high or 0.0))):
            problems.append(f"{TITLES[measure]}: a mean of {mean:,.6g} s outside of its bounds")
    problems += _against_rows(stated)
    expected = "minimum, percentiles and maximum that rise, and a mean between them"
    return free_of(problems, expected, "they do", result.at(*(f"mean_{name}_ms" for name in ("ttft", "tpot"))))


def _against_rows(stated: ToolFigures) -> Iterator[str]:
    rows = stated.rows
    if rows is None or not len(rows.latency):
        return
    for measure, values in (("latency", rows.latency), ("ttft", rows.ttft), ("tpot", rows.tpot)):
        points = stated.distributions.get(measure, {})
        for name, rank in RANKS.items():
            if name in points and len(values):
                own = float(np.quantile(values, rank))
                if abs(own - points[name]) > ROWS_TOLERANCE * max(own, 1e-9):
                    yield f"{TITLES[measure]}: {name} of {points[name]:,.6g} s, though its requests give {own:,.6g} s"
    tokens = float(rows.output_tokens.sum())
    if stated.output_tokens is not None and stated.output_tokens != tokens:
        yield f"{stated.output_tokens:,.0f} output tokens, though its requests have {tokens:,.0f}"


@check("tool.latencies", "TTFT and later tokens make up the latency", "Else tokens are counted, or times taken, twice.")
def latencies(result: ToolResult) -> Outcome:
    """End-to-end latency is TTFT and all gaps together: by request, by sums, or by means."""
    stated = result.stated
    problems = list(_latency_problems(stated))
    spread = {name: values["mean"] for name, values in stated.distributions.items() if "mean" in values}
    known = stated.rows is not None or stated.sums or {"latency", "ttft", "tpot"} <= spread.keys()
    expected = "a latency of TTFT plus the time per token of all later tokens"
    where = result.at("mean_tpot_ms", "mean_e2el_ms", "inter_token_latency")
    return free_of(problems, expected, "it is", where) if known else outcome(None, expected, "no such figures", where)


def _latency_problems(stated: ToolFigures) -> Iterator[str]:
    rows, sums = stated.rows, stated.sums
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
    means = {name: values["mean"] for name, values in stated.distributions.items() if "mean" in values}
    if not {"latency", "ttft", "tpot"} <= means.keys():
        return
    if means["ttft"] > means["latency"]:
        yield f"a mean TTFT of {means['ttft']:,.4g} s, longer than the mean latency of {means['latency']:,.4g} s"
    if stated.output_tokens and stated.completed and (per_answer := stated.output_tokens / stated.completed) > 1:
        implied, mean = (means["latency"] - means["ttft"]) / (per_answer - 1), means["tpot"]
        # Means of ratios and ratios of means differ with the lengths; by so much only where something is wrong.
        if implied > 0 and not 0.5 <= mean / implied <= 2:
            yield (
                f"a mean TPOT of {mean * 1e3:,.4g} ms, though latency less TTFT over a mean answer's later tokens"
                f" is {implied * 1e3:,.4g} ms"
            )


@check("tool.in_flight", "Requests under way fit the concurrency", "Little's law: else more would have been open.")
def in_flight(result: ToolResult) -> Outcome | None:
    """Without a mean latency, one of TTFT and later tokens, which is exact only if all answers are of one length."""
    stated = result.stated
    mean = stated.distributions.get("latency", {}).get("mean")
    made = mean is None
    mean = _made_latency(stated) if made else mean
    if stated.most_in_flight is None or mean is None or stated.request_rate is None:
        return None
    under_way = stated.request_rate * mean
    times = f"{mean:,.4g} s each" + (", by TTFT and time per output token" if made else "")
    found = f"{under_way:,.4g} on average: {stated.request_rate:,.4g} requests/s of {times}"
    holds = under_way <= (1 + (MADE_TOLERANCE if made else LITTLE_TOLERANCE)) * stated.most_in_flight
    certain = not made or under_way > MADE_CERTAIN * stated.most_in_flight
    severity = Severity.FAIL if certain else Severity.WARN
    return outcome(
        holds, f"at most {stated.most_in_flight:,.0f} under way", found, result.at("max_concurrency"), severity
    )


def _made_latency(stated: ToolFigures) -> float | None:
    """By the smaller of mean TPOT and ITL: the former weighs short answers more, the latter counts chunks of tokens."""
    means = {name: values["mean"] for name, values in stated.distributions.items() if "mean" in values}
    per_token = [means[name] for name in ("tpot", "itl") if name in means]
    if "ttft" not in means or not per_token or not stated.output_tokens or not stated.completed:
        return None
    return means["ttft"] + min(per_token) * max(0.0, stated.output_tokens / stated.completed - 1)
