"""The end of a run, against formulas that were written apart: on random runs and logs."""

import random
from typing import Any

import pytest
from independent_result import SEEDS, latencies, unmet, verdict_of

from detail_logs import detail_log_of
from megatoken.accuracy.gate import Judgement
from megatoken.harness.result import concluded
from megatoken.runs.tables import SampleRow, to_table

LIMITS = {"server": (2.0, 0.2), "interactive": (0.45, 0.04)}


def random_rows(draw: random.Random, count: int) -> list[SampleRow]:
    rows, due = [], 0.0
    for number in range(count):
        due += draw.expovariate(draw.choice((0.5, 20.0)))
        tokens = draw.choice((1, 2, 7, 300))
        first = due + draw.choice((0.01, 0.3, 3.0)) * draw.random()
        last = first + (tokens - 1) * draw.choice((0.01, 0.1)) * draw.random()
        sent, error = due + draw.choice((0.0, 0.2)) * draw.random(), "lost" if draw.random() < 0.005 else None
        reason = None if error else draw.choice(("stop", "length"))
        rows.append(SampleRow(number, number, due, sent, first, last, 5, tokens, reason, "here", 0, error))
    return rows


def random_log(draw: random.Random, count: int) -> dict[str, Any]:
    seeds = SEEDS if draw.random() < 0.7 else (1, 2, 3)
    return {
        "effective_min_duration_ms": draw.choice((0, 1500, 600_000)),
        **{f"effective_{n}_rng_seed": s for n, s in zip(("qsl", "sample_index", "schedule"), seeds, strict=True)},
        "effective_sample_concatenate_permutation": draw.random() < 0.9,
        "effective_samples_per_query": draw.choice((count, 24_576)),
        "generated_samples_per_query": draw.choice((1, count, 49_152)),
        **({"generated_query_count": draw.choice((1, count))} if draw.random() < 0.5 else {}),
        "qsl_reported_total_count": draw.choice((count, 24_576, 30_000)),
        "qsl_reported_performance_count": draw.choice((count, 24_576)),
        "result_max_latency_ns": draw.choice((20_000_000_000, 601_000_000_000)),
        "result_min_duration_met": draw.random() < 0.5,
        "result_perf_constraints_met": draw.random() < 0.5,
        "early_stopping_met": draw.random() < 0.5,
        "result_query_count": count,
        "result_validity": draw.choice(("VALID", "INVALID")),
        "requested_server_ttft_latency": draw.choice((450_000_000, 2_000_000_000, 5_000_000_000)),
        "requested_server_tpot_latency": draw.choice((40_000_000, 200_000_000, 900_000_000)),
        "result_first_token_99.00_percentile_latency_ns": draw.randrange(1, 4_000_000_000),
        "result_time_per_output_token_99.00_percentile_ns": draw.randrange(1, 400_000_000),
    }


@pytest.mark.parametrize("seed", range(120))
def test_random_runs_end_as_independent_formulas_say(seed: int) -> None:
    draw = random.Random(seed)
    scenario = draw.choice(("offline", "server", "interactive", "singlestream"))
    count = draw.choice((1, 40, 458, 459, 700, 1500))
    ttft, tpot = LIMITS.get(scenario, (None, None))
    result = {
        "scenario": scenario,
        "mode": draw.choice(("performance", "performance", "accuracy")),
        "rules": draw.choice((None, "v5.1")),
        "benchmark": "llama2-70b",
        "data_set_rows": draw.choice((count, 24_576)),
        "ttft_limit_seconds": ttft,
        "tpot_limit_seconds": tpot,
        "offered_samples_per_second": draw.choice((3.0, 900.0)) if ttft else None,
        "client_capacity": {"samples_per_second": 1000.0, "output_tokens_per_second": 1e5} if ttft else None,
        "wall_clock_step_seconds": draw.choice((0.0, 0.009, -0.02)),
    }
    rows, values = random_rows(draw, count), random_log(draw, count)
    again = concluded(result, detail_log_of(values), to_table(SampleRow, rows), Judgement({}, ()), compliance=False)
    plain = [row._asdict() for row in rows]
    codes = [one for one in again["reasons"] if one["code"] != "FAILED_SAMPLES"] if result["rules"] else []
    stated = [*codes, *again["rules_unmet"], *again["doubts"]]
    expected = sorted(unmet(result, values, plain), key=str)
    found = sorted(((one["code"], one["found"], one["required"]) for one in stated), key=str)
    assert [one[0] for one in found] == [one[0] for one in expected]
    for mine, theirs in zip(found, expected, strict=True):
        if mine[0] != "SEEDS":  # texts of all three
            assert mine[1:] == pytest.approx(theirs[1:]), mine[0]
    assert again["verdict"] == verdict_of(result, values, plain)
    own = latencies(result, plain)
    met = values["result_perf_constraints_met"] and values["early_stopping_met"]
    assert again.get("latency_verdict") == (None if own is None else pytest.approx(own | {"loadgen_met": met}))
