"""What LoadGen is asked for in the scenarios with latencies, held against LoadGen's own rules of counting."""

import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from megatoken.config import RunConfig
from megatoken.harness.loadgen import TestSettings
from megatoken.harness.loadgen_plan import (
    full_length,
    learning_seconds,
    plan_test,
    resolve_test,
    run_limits,
    run_round,
    samples_drawn,
    with_target_step,
)
from megatoken.mlperf.benchmarks import BENCHMARKS, benchmark, benchmark_of_model
from megatoken.mlperf.draws import PoissonSchedule

servers = st.sampled_from(["server", "interactive"])
rows_of_data = st.integers(1, 30_000)
rates = st.floats(0.01, 500)


def server_samples(settings: TestSettings) -> int:
    """LoadGen: whole passes over its library until the fewest samples are there and the last is due at the duration."""
    schedule = PoissonSchedule(settings.seeds.schedule, settings.offered_rate)
    minimum = settings.samples or 100
    count = -(-minimum // settings.library_rows) * settings.library_rows
    while schedule.due_ns(count - 1) < (settings.min_duration_seconds or 0) * 1e9:
        count += settings.library_rows
    return count


def stream_samples(settings: TestSettings) -> int:
    """LoadGen 6.0.17: the fewest, or twice duration times rate, and then to the next whole pass, never none."""
    latency_seconds = math.ceil(1000 / settings.rate) / 1000
    fewest = max(settings.samples or 0, math.floor(2 * (settings.min_duration_seconds or 0) / latency_seconds))
    return fewest + settings.library_rows - fewest % settings.library_rows


@hypothesis_settings(deadline=None)
@given(servers, rows_of_data, rates, st.floats(0.1, 900))
def test_a_duration_is_filled_and_not_more(scenario: str, rows: int, rate: float, seconds: float) -> None:
    settings = plan_test(RunConfig(scenario=scenario, min_duration_seconds=seconds), rows, rate)
    samples = server_samples(settings)
    assert samples == settings.library_rows
    schedule = PoissonSchedule(settings.seeds.schedule, settings.offered_rate)
    assert samples == 1 or schedule.due_ns(samples - 2) < seconds * 1e9
    assert full_length(settings)[0] == samples


@given(servers, st.integers(500, 30_000), st.floats(1, 100), st.sampled_from(["v5.1", None]))
def test_whole_passes_are_known_beforehand(scenario: str, rows: int, rate: float, rules: str | None) -> None:
    settings = plan_test(RunConfig(scenario=scenario, rules=rules), rows, rate)
    at_length = settings if settings.min_duration_seconds else replace(settings, min_duration_seconds=600.0)
    assert samples_drawn(settings) == server_samples(at_length)


@given(rows_of_data, rates, st.sampled_from(["v5.1", None]))
def test_what_is_drawn_for_one_sample_after_another_is_known(rows: int, rate: float, rules: str | None) -> None:
    settings = plan_test(RunConfig(scenario="singlestream", rules=rules), rows, rate)
    at_length = settings if settings.min_duration_seconds else replace(settings, min_duration_seconds=600.0)
    assert samples_drawn(settings) == stream_samples(at_length)


def test_tests_of_every_row_or_of_a_hundred() -> None:
    def drawn(**changes: object) -> int:
        return samples_drawn(plan_test(RunConfig(**changes), 2048, 3.0))

    for scenario in ("server", "singlestream"):
        assert drawn(scenario=scenario, mode="accuracy", rules="v5.1") == 2048
        assert drawn(scenario=scenario, compliance="TEST06", rules="v5.1") == 100


@given(servers, rows_of_data, rates, st.integers(1, 50_000))
def test_exactly_the_samples_asked_for(scenario: str, rows: int, rate: float, samples: int) -> None:
    assert server_samples(plan_test(RunConfig(scenario=scenario, samples=samples), rows, rate)) == samples
    assert stream_samples(plan_test(RunConfig(scenario="singlestream", samples=samples), rows, rate)) == samples


@given(rows_of_data, st.floats(0.05, 900), st.floats(1, 900))
def test_a_stream_has_samples_for_the_duration_and_not_many_more(rows: int, rate: float, seconds: float) -> None:
    settings = plan_test(RunConfig(scenario="singlestream", min_duration_seconds=seconds), rows, rate)
    samples = stream_samples(settings)
    expected = seconds * rate
    assert 1.2 * expected <= samples <= 1.2 * expected + 2 * math.sqrt(expected) + 2
    assert samples == settings.library_rows


def test_claimed_rules_leave_the_counting_to_loadgen() -> None:
    settings = plan_test(RunConfig(scenario="server", rules="v5.1"), 24_576, 12.0)
    assert (settings.library_rows, settings.samples, settings.min_duration_seconds) == (24_576, None, None)
    assert settings.rate == 12.0
    stream = plan_test(RunConfig(scenario="singlestream", rules="v5.1"), 24_576, 1.0)
    assert stream.samples is None
    assert stream.rate == pytest.approx(0.6)  # LoadGen doubles it
    assert plan_test(RunConfig(scenario="server", rules="v5.1", samples=7), 24_576, 1.0).samples == 7


configurations = st.fixed_dictionaries(
    {"scenario": st.sampled_from(["offline", "server", "interactive", "singlestream"])},
    optional={
        "samples": st.integers(1, 40_000),
        "min_duration_seconds": st.floats(0, 900).map(lambda seconds: round(seconds, 3)),
        "mode": st.sampled_from(["performance", "accuracy"]),
        "rules": st.sampled_from(["v5.1", "v6.0", "v6.1"]),
        "compliance": st.just("TEST06"),
    },
)


@hypothesis_settings(deadline=None)
@given(configurations, rows_of_data, rates)
def test_what_a_run_folder_says_was_run_asks_for_the_same_again(
    given: dict[str, object], rows: int, rate: float
) -> None:
    if "compliance" in given:
        given = {key: given[key] for key in given.keys() - {"samples", "min_duration_seconds", "mode"}}
    config = RunConfig(**given)
    settings = plan_test(config, rows, rate)
    resolved = resolve_test(config, settings)
    again = plan_test(resolved, rows, resolved.rate or rate)
    assert again.user_conf() == (
        settings.user_conf()
        if settings.min_duration_seconds is not None or config.compliance
        else replace(settings, min_duration_seconds=600.0).user_conf()  # which is what LoadGen takes by itself
    )
    assert (again.library_rows, again.seeds) == (settings.library_rows, settings.seeds)
    arrives = config.scenario in ("server", "interactive")
    assert (resolved.rate is not None) is arrives
    assert (resolved.min_duration_seconds is None) is (config.compliance is not None)
    assert resolve_test(resolved, again) == resolved


def test_no_duration_is_one_pass() -> None:
    for scenario in ("server", "singlestream"):
        settings = plan_test(RunConfig(scenario=scenario, min_duration_seconds=0), 50, 3.0)
        assert settings.library_rows == 50
        assert (server_samples if scenario == "server" else stream_samples)(settings) == 50


def test_accuracy_takes_every_row_once() -> None:
    for scenario in ("server", "singlestream"):
        assert plan_test(RunConfig(scenario=scenario, mode="accuracy"), 50, 3.0).library_rows == 50


@pytest.mark.parametrize(
    ("model", "scenario", "name", "limits"),
    [
        ("tiny", "server", "llama2-70b", (2.0, 0.2)),
        ("/models/Llama2-70b-chat", "interactive", "llama2-70b", (0.45, 0.04)),
        ("llama3.1-8b", "server", "llama3.1-8b", (2.0, 0.1)),
        ("llama3.1-8b", "interactive", "llama3.1-8b", (0.5, 0.03)),
        ("llama3.1-405b", "server", "llama3.1-405b", (6.0, 0.175)),
        ("llama3.1-405b", "interactive", "llama3.1-405b", (4.5, 0.08)),
        ("llama3.1-8b", "singlestream", "llama3.1-8b-edge", None),
        ("tiny", "offline", "llama2-70b", None),
    ],
)
def test_limits_are_those_of_the_benchmark_that_the_model_is_named_after(
    model: str, scenario: str, name: str, limits: tuple[float, float] | None
) -> None:
    config = RunConfig(model=model, scenario=scenario)
    assert benchmark_of_model(model, scenario).name == name
    found = run_limits(config)
    assert (found and (found.ttft_seconds, found.tpot_seconds)) == limits
    assert run_round(config).benchmark.rows == benchmark(name).rows


def test_what_loadgen_calls_them() -> None:
    assert benchmark("llama3.1-8b").loadgen_model("interactive") == "llama3_1-8b-interactive"
    assert benchmark("llama2-70b").loadgen_model("server") == "llama2-70b"
    assert benchmark("llama3.1-8b-edge").loadgen_model("singlestream") == "llama3_1-8b-edge"
    assert all(benchmark(name).rows > 1000 for name in BENCHMARKS)


def test_a_step_takes_most_of_the_limit_on_the_time_per_token() -> None:
    assert with_target_step(RunConfig(scenario="offline")).engine.target_step_seconds is None
    assert with_target_step(RunConfig(scenario="singlestream")).engine.target_step_seconds is None
    assert with_target_step(RunConfig(scenario="server")).engine.target_step_seconds == pytest.approx(0.19)
    given = RunConfig(scenario="interactive", tpot_limit_seconds=0.1)
    assert with_target_step(given).engine.target_step_seconds == pytest.approx(0.095)
    stated = RunConfig(scenario="server", engine={"target_step_seconds": 3.0})
    assert with_target_step(stated).engine.target_step_seconds == 3.0


def test_a_warm_up_learns_as_long_as_what_it_learns_for() -> None:
    assert learning_seconds(RunConfig(scenario="server", rate=5.0), 100) == 0
    assert learning_seconds(RunConfig(scenario="server", min_duration_seconds=40), 100) == 40
    assert learning_seconds(RunConfig(scenario="server", find_rate=True), 100) == 600
    assert learning_seconds(RunConfig(scenario="singlestream"), 100) == 0
