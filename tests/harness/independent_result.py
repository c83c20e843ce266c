"""Rules, doubts, latencies and the verdict of a run in plain Python, written apart from megatoken's own code."""

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

ROWS = 24_576  # of llama2-70b
SECONDS = 600.0
LIMITS = {"server": (2.0, 0.2), "interactive": (0.45, 0.04)}  # of llama2-70b: TTFT, TPOT
SEEDS = (1780908523862526354, 14771362308971278857, 18209322760996052031)  # of v5.1

Found = tuple[str, Any, Any]


def verdict_of(result: Mapping[str, Any], log: Mapping[str, Any], rows: Sequence[Mapping[str, Any]]) -> str:
    against = any(row["error"] for row in rows) or (result["rules"] and [*unmet(result, log, rows)])
    return "INVALID" if against else "VALID" if result["rules"] else "MEASURED"


def unmet(result: Mapping[str, Any], log: Mapping[str, Any], rows: Sequence[Mapping[str, Any]]) -> Iterator[Found]:
    """Code, value found and value required of every rule that is not met and of every doubt."""
    scenario, drawn = result["scenario"], min(log["qsl_reported_total_count"], result["data_set_rows"])
    if scenario == "singlestream":
        yield "SCENARIO", "singlestream", "offline, server and interactive"
    if result["mode"] == "performance":
        yield from _performance(result, log, rows)
    if drawn != ROWS:
        yield "DATA_SET_SIZE", drawn, ROWS


def _performance(
    result: Mapping[str, Any], log: Mapping[str, Any], rows: Sequence[Mapping[str, Any]]
) -> Iterator[Found]:
    scenario, asked = result["scenario"], log["effective_min_duration_ms"] / 1000
    ran = log["result_max_latency_ns"] / 1e9 if scenario == "offline" else max(row["scheduled_seconds"] for row in rows)
    filled = scenario != "offline" and asked >= SECONDS and log["result_min_duration_met"]
    if ran < SECONDS and not filled:
        yield "MIN_DURATION", ran, SECONDS
    elif asked < SECONDS:
        yield "MIN_DURATION", asked, SECONDS
    if scenario == "offline" and log["effective_samples_per_query"] < ROWS:
        yield "MIN_SAMPLES", log["effective_samples_per_query"], ROWS
    if tuple(log[f"effective_{name}_rng_seed"] for name in ("qsl", "sample_index", "schedule")) != SEEDS:
        yield "SEEDS", None, None
    library = min(log["qsl_reported_performance_count"], result["data_set_rows"])
    issued = log["generated_samples_per_query"] * log.get("generated_query_count", 1)
    passes = scenario == "singlestream" or issued % library == 0
    if not passes or not log["effective_sample_concatenate_permutation"]:
        yield "EQUAL_ISSUE", issued, math.ceil(issued / library) * library
    own = latencies(result, rows)
    for place, name in enumerate(("TTFT", "TPOT") if scenario in LIMITS else ()):
        key = ("result_first_token_99.00_percentile_latency_ns", "result_time_per_output_token_99.00_percentile_ns")
        limit, theirs = LIMITS[scenario][place], log[key[place]] / 1e9
        judged = theirs
        if any(row["error"] for row in rows):  # LoadGen's percentiles have times that were never set
            judged = math.nan if own is None else own[f"{name.lower()}_p99_seconds"]
        if judged >= limit:
            yield f"{name}_LIMIT", judged, limit
        if log[f"requested_server_{name.lower()}_latency"] / 1e9 > limit:
            yield "LATENCY_LIMITS", log[f"requested_server_{name.lower()}_latency"] / 1e9, limit
        if own is not None and not any(row["error"] for row in rows):
            late = 0.05 * LIMITS[scenario][0] / (1 if name == "TTFT" else max(1.0, own["tokens_after_first"]))
            ours = own[f"{name.lower()}_p99_seconds"]
            if abs(theirs - ours) > late + 0.05 * theirs:
                yield "LOADGEN_DISAGREES", ours, theirs
    if scenario != "offline" and not log["early_stopping_met"]:
        if own is None:
            yield "EARLY_STOPPING", log["result_query_count"], 64
        elif own["allowed_over"] < 0:
            yield "EARLY_STOPPING", log["result_query_count"], 459
        else:
            yield "EARLY_STOPPING", max(own["ttft_over"], own["tpot_over"]), own["allowed_over"]
    if log["result_validity"] != "VALID":
        yield "LOADGEN_INVALID", log["result_validity"], "VALID"
    yield from _client(result, rows)


def _client(result: Mapping[str, Any], rows: Sequence[Mapping[str, Any]]) -> Iterator[Found]:
    scenario = result["scenario"]
    if scenario != "offline":
        lags = sorted(row["sent_seconds"] - row["scheduled_seconds"] for row in rows)
        most = max(0.01, 0.05 * LIMITS[scenario][0] if scenario in LIMITS else 0.0)
        if lags[math.floor(0.99 * len(lags))] > most:
            yield "SEND_LAG", lags[math.floor(0.99 * len(lags))], most
    if result["client_capacity"] and result["offered_samples_per_second"]:
        capacity = result["client_capacity"]["samples_per_second"] / 2
        if result["offered_samples_per_second"] > capacity:
            yield "CLIENT_LIMIT", result["offered_samples_per_second"], capacity
    if abs(result["wall_clock_step_seconds"]) > 0.01:
        yield "WALL_CLOCK", result["wall_clock_step_seconds"], 0.01


def latencies(result: Mapping[str, Any], rows: Sequence[Mapping[str, Any]]) -> dict[str, Any] | None:
    """``latency_verdict`` without LoadGen's part: the percentile of n sorted values is the one at floor(0.99 n)."""
    done = [row for row in rows if row["finish_reason"] in ("stop", "length") and not row["error"]]
    if result["ttft_limit_seconds"] is None or not done:
        return None
    after = [row["output_tokens"] - 1 for row in done]
    values = {
        "ttft": [row["first_token_seconds"] - row["scheduled_seconds"] for row in done],
        "tpot": [
            (row["last_token_seconds"] - row["first_token_seconds"]) / tokens if tokens else 0.0
            for row, tokens in zip(done, after, strict=True)
        ],
    }
    limits = {name: result[f"{name}_limit_seconds"] for name in values}
    p99 = {name: sorted(ones)[math.floor(0.99 * len(done))] for name, ones in values.items()}
    over = {name: sum(one > limits[name] for one in ones) for name, ones in values.items()}
    allowed = _allowed(len(done))
    return {
        "queries": len(done),
        **{f"{name}_p99_seconds": value for name, value in p99.items()},
        **{f"{name}_over": count for name, count in over.items()},
        "allowed_over": allowed,
        "needed": 459,
        "tokens_after_first": sum(after) / len(done),
        "met": all(p99[name] < limits[name] for name in p99) and max(over.values()) <= allowed,
    }


def _allowed(queries: int) -> int:
    """Most queries over a limit that bound the 99th percentile with 99 % confidence; -1: too few queries for any.

    If 1 % of all queries were over, the chance of so few is below 1 %: LoadGen's early stopping.
    """
    over, term = -1, 0.99**queries
    chance = term
    while chance < 0.01:
        over += 1
        term *= (queries - over) / (over + 1) * 0.01 / 0.99
        chance += term
    return over
