"""What LoadGen draws from its seeds, and its early stopping, against LoadGen itself and published values."""

import math
from statistics import NormalDist

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatoken.analysis.early_stopping import most_over, odds, queries_needed
from megatoken.audit import Severity, audit
from megatoken.mlperf.accuracy_log import read_accuracy_log
from megatoken.mlperf.detail_log import read_detail_log
from megatoken.mlperf.draws import Load, PoissonSchedule, Twister, issued_rows, library_order, shuffle
from megatoken.mlperf.rounds import round_seeds


def test_mersenne_twister_is_the_standard_one():
    """The C++ standard: the 10,000th word of std::mt19937 seeded with 5489 is 4123659995."""
    assert int(Twister(5489).words(10_000)[-1]) == 4_123_659_995


def test_first_rows_of_round_v51():
    assert library_order(round_seeds()["v5.1"][0], 24_576)[:3] == (20404, 23872, 22533)


@given(st.integers(0, 2**64 - 1), st.integers(0, 200), st.booleans())
@settings(deadline=None, max_examples=50)
def test_every_order_is_a_permutation(seed, rows, before_gcc_11):
    assert sorted(library_order(seed, rows, before_gcc_11)) == list(range(rows))


def test_sets_too_large_for_two_positions_a_draw():
    rows = list(range(70_000))
    shuffle(rows, Twister(1).below)
    assert sorted(rows) == list(range(70_000))


@pytest.mark.parametrize("scenario", ["Offline", "Server", "SingleStream"])
@pytest.mark.parametrize("model", ["llama2-70b", "bert"])
def test_accuracy_order_is_loadgens(originals, scenario, model):
    folder = originals(scenario, "AccuracyOnly", model)
    detail = read_detail_log(folder / "mlperf_log_detail.txt")
    answers = read_accuracy_log(folder / "mlperf_log_accuracy.json")
    load = Load(scenario, True, detail.get("effective_sample_concatenate_permutation"), 1)
    seed = detail.get("effective_sample_index_rng_seed")
    order = issued_rows(seed, tuple(detail.library_set().tolist()), load, 64)
    assert tuple(answers.rows[np.argsort(answers.sequence_ids)].tolist()) == order


def test_arrivals_are_loadgens(originals):
    detail = read_detail_log(originals("Server") / "mlperf_log_detail.txt")
    seed, count = detail.get("effective_schedule_rng_seed"), detail.get("generated_query_count")
    schedule = PoissonSchedule(seed, detail.get("effective_target_qps"))
    assert schedule.due_ns(count) == detail.get("generated_query_duration")
    assert schedule.mean_rate(count) == pytest.approx(detail.get("result_scheduled_samples_per_sec"), rel=1e-5)


def test_a_schedule_of_any_rate_ends():
    assert PoissonSchedule(1, 1e-300).due_ns(5_000) == 2**61
    assert PoissonSchedule(1, 1e300).due_ns(5_000) == 0


@pytest.mark.parametrize(
    ("queries", "over"), [(458, -1), (459, 0), (662, 1), (24_576, 209), (122_880, 1147), (270_336, 2583)]
)
def test_early_stopping_at_the_99th_percentile(queries, over):
    assert most_over(queries, 0.99) == over
    assert queries_needed(max(0, over), 0.99) <= max(queries, 459)


def test_early_stopping_at_the_90th_percentile():
    assert queries_needed(1, 0.9) == 64
    assert most_over(2048, 0.9) == 173  # LoadGen: "Would discard 172 highest latency queries."


@given(st.integers(1, 2000), st.integers(0, 60), st.sampled_from((0.9, 0.97, 0.99)))
@settings(deadline=None, max_examples=100)
def test_odds_are_the_cumulative_binomial(passing, over, percentile):
    total = passing + over
    exact = math.fsum(
        math.comb(total, count) * (1 - percentile) ** count * percentile ** (total - count) for count in range(over + 1)
    )
    assert odds(passing, over, percentile) == pytest.approx(min(1.0, exact), rel=1e-9)


def test_odds_approach_the_normal_distribution():
    queries, over = 1_000_000, 9_770
    z = (over + 0.5 - queries * 0.01) / math.sqrt(queries * 0.01 * 0.99)
    assert odds(queries - over, over, 0.99) == pytest.approx(NormalDist().cdf(z), rel=0.05)


@pytest.mark.parametrize("scenario", ["Offline", "Server", "SingleStream"])
@pytest.mark.parametrize("permuted", [0, 1])
def test_rows_of_performance_runs_that_log_samples(originals, scenario, permuted):
    """As compliance tests do: the sample that each sequence id asks for is checked without the data set."""
    more = f"*.*.accuracy_log_sampling_target = 300\n*.*.sample_concatenate_permutation = {permuted}\n"
    result = audit(originals(scenario, "PerformanceOnly", "llama2-70b", more))
    assert result.evidence.runs[0].accuracy_records > 50
    (found,) = [item for item in result.findings if item.id == "accuracy.order"]
    assert found.severity is Severity.PASS
    assert {item.severity for item in result.findings} <= {Severity.PASS, Severity.NOTE}
