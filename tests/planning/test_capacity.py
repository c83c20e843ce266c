"""Prices of tokens, Little's law, derating: the arithmetic, and what must hold for any numbers."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatoken.errors import UsageError
from megatoken.planning.assumptions import load_assumptions
from megatoken.planning.capacity import plan_capacity
from megatoken.planning.pricing import (
    Prices,
    derating,
    interactions_of_users,
    parse_factor,
    price,
    prices_from_ratio,
    prices_from_two_rates,
    residence_seconds,
    service_seconds,
)
from megatoken.planning.throughput import from_number, from_runs
from megatoken.planning.workloads import load_profiles

AGENT, QA = (load_profiles(names=[name])[0] for name in ("agent", "simple_qa"))
RATES = st.floats(1e-3, 1e9)
MIXES = st.floats(0, 1000)
RATIOS = st.floats(0, 10)


@given(RATES, MIXES, RATIOS)
def test_prices_give_back_the_rate_they_came_from(rate, mix, ratio):
    prices = prices_from_ratio(rate, mix, ratio)
    assert 1 / (prices.decode_seconds_per_token + mix * prices.prefill_seconds_per_token) == pytest.approx(rate)
    assert prices.prefill_seconds_per_token == pytest.approx(ratio * prices.decode_seconds_per_token)


@given(st.floats(1e-7, 1e-3), st.floats(1e-7, 1e-3), st.floats(0.1, 10), st.floats(1.3, 20))
def test_two_mixes_reveal_both_prices(prefill, decode, mix, factor):
    mixes = (mix, mix * factor)
    rates = [1 / (decode + one * prefill) for one in mixes]
    for order in ((0, 1), (1, 0)):
        first, second = order
        prices = prices_from_two_rates(rates[first], mixes[first], rates[second], mixes[second])
        assert prices.prefill_seconds_per_token == pytest.approx(prefill, rel=1e-6)
        assert prices.decode_seconds_per_token == pytest.approx(decode, rel=1e-4)


@pytest.mark.parametrize(
    ("second", "why"),
    [
        ((1000.0, 1.1), "too similar"),
        ((1000.0, 1.0), "too similar"),
        ((2000.0, 5.0), "no positive price"),
        ((1.0, 2.0), "no positive"),
    ],
)
def test_two_rates_that_cannot_be_one_system(second, why):
    with pytest.raises(UsageError, match=why):
        prices_from_two_rates(1000.0, 1.0, *second)


@given(RATES, MIXES, RATIOS, st.floats(0, 1))
def test_a_better_prefix_cache_never_costs(rate, mix, ratio, share):
    prices = prices_from_ratio(rate, mix, ratio)
    without, with_cache, whole = (
        prices.interactions_per_second(AGENT.model_copy(update={"prefix_cache_share": one}))
        for one in (0.0, share, 1.0)
    )
    assert without * (1 - 1e-12) <= with_cache <= whole * (1 + 1e-12)


@given(st.integers(0, 5000), st.integers(0, 5000), st.integers(1, 5000))
def test_more_tokens_are_fewer_interactions(input_tokens, context_tokens, output_tokens):
    prices = Prices(1e-6, 2e-6)
    lengths = {"input_tokens": input_tokens, "context_tokens": context_tokens, "output_tokens": output_tokens}
    smaller = QA.model_copy(update=lengths)
    for name in ("input_tokens", "context_tokens", "output_tokens"):
        larger = smaller.model_copy(update={name: getattr(smaller, name) + 1})
        assert prices.interactions_per_second(larger) < prices.interactions_per_second(smaller)


def test_an_agent_sends_its_past_again():
    assert AGENT.repeated_tokens == sum([0, 2500, 5000, 7500])
    assert AGENT.counted_tokens == 10_000
    assert AGENT.read_tokens() == 23_000 and AGENT.read_tokens(1.0) == 8_000


def test_waiting_for_tools_is_waiting_but_not_in_flight():
    assert service_seconds(AGENT, 0.5, 0.02) == pytest.approx(4 * (0.5 + 499 * 0.02))
    assert residence_seconds(AGENT, 0.5, 0.02) == pytest.approx(service_seconds(AGENT, 0.5, 0.02) + 3 * 2)


@given(st.floats(0, 1e6), st.floats(1e-3, 1e5))
def test_users_over_their_pause(rate, pause):
    assert interactions_of_users(rate * pause, pause) == pytest.approx(rate)


def test_users_who_never_pause_are_refused():
    with pytest.raises(UsageError, match="think_seconds"):
        interactions_of_users(10, 0.0)


@given(st.lists(st.floats(0.01, 1), max_size=4), RATES)
def test_derating_multiplies_and_only_falls(shares, rate):
    assumptions = load_assumptions()
    throughput = from_number(rate, scope="system", assumptions=assumptions)
    derated = derating(throughput, assumptions, [parse_factor(f"own={share}") for share in shares])
    rates = [rate, *derated.rates]
    assert rates == sorted(rates, reverse=True)
    product = 0.884 * 0.7
    for share in shares:
        product *= share
    assert derated.planning == pytest.approx(rate * product)
    assert derated.latency_bound * 0.7 == pytest.approx(derated.planning)


@pytest.mark.parametrize("text", ["makespan", "makespan=", "=0.9", "makespan=1.1", "makespan=0", "makespan=nan", "a=b"])
def test_factors_that_are_none(text):
    with pytest.raises(UsageError, match="--factor"):
        parse_factor(text)


def test_output_only_total_and_priced_rates_are_in_order(rack, assumptions):
    """Summaries read four times what they write: their output alone flatters most, counting all tokens alike least."""
    plan = plan_capacity(rack, load_profiles(names=["summarisation"]), assumptions)
    [row] = plan.table("interactions").rows
    assert row["output_only_interactions_per_second"] == pytest.approx(1_100_948.3 / 500)
    assert row["all_tokens_alike_interactions_per_second"] == pytest.approx(1_100_948.3 * 1.815 / 2500)
    low, priced, high = (row[f"{name}_interactions_per_second"] for name in ("priced_low", "priced", "priced_high"))
    assert low <= priced <= high < row["output_only_interactions_per_second"]
    assert row["planning_interactions_per_second"] < priced * 0.7  # KV memory and latency bound it


def test_a_rate_that_counted_input_is_taken_apart(assumptions):
    total = from_number(1815.0, scope="node", counted="total", assumptions=assumptions)
    assert total.output_tokens_per_second == pytest.approx(1000.0)
    assert total.total_tokens_per_second == pytest.approx(1815.0)


def test_the_mix_of_another_benchmark_says_so(assumptions):
    default = from_number(1000, scope="node", assumptions=assumptions)
    own = from_number(1000, scope="node", input_tokens_per_output_token=3.0, assumptions=assumptions)
    assert any("llama2-70b" in note for note in default.notes) and default.mix_state == "unverified"
    assert not any("llama2-70b" in note for note in own.notes) and own.mix_state == "given"


def test_server_rates_are_not_derated_for_latency_twice(assumptions):
    server = from_number(46_016.5, scope="node", scenario="server", state="verified", assumptions=assumptions)
    derated = derating(server, assumptions)
    assert derated.latency_bound == 46_016.5 and derated.planning == pytest.approx(46_016.5 * 0.7)


def test_two_runs_price_by_measurement(assumptions, make_run):
    reader = from_runs([make_run(name="reader", input_tokens=2000, output_tokens=101)], assumptions)
    faster = from_runs([make_run(name="writer", input_tokens=200, output_tokens=201)], assumptions)
    priced = price(reader, assumptions, faster)
    assert priced.state == "measured" and priced.range == (priced.prices,)
    assert [one.name for one in priced.inputs] == ["second_rate", "second_benchmark_input_tokens_per_output_token"]


def test_two_runs_must_be_of_one_system(assumptions, rack):
    other = from_number(100, scope="node", accelerators=4, input_tokens_per_output_token=9, assumptions=assumptions)
    with pytest.raises(UsageError, match="72 and 4 accelerators"):
        price(rack, assumptions, other)


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        ({"tokens_per_second": 0, "scope": "rack"}, "--tokens-per-second: expected a number .*, got 0"),
        ({"tokens_per_second": float("nan"), "scope": "rack"}, "--tokens-per-second: expected .*, got nan"),
        ({"tokens_per_second": 1e300, "scope": "rack"}, "--tokens-per-second: expected .*, got 1e"),
        ({"tokens_per_second": 5, "scope": "vm"}, "--per: expected one of accelerator, node, rack, system, got 'vm'"),
        ({"tokens_per_second": 5, "scope": "rack", "counted": "input"}, "--counted: .* got 'input'"),
        ({"tokens_per_second": 5, "scope": "rack", "state": "true"}, "--state: .* got 'true'"),
        ({"tokens_per_second": 5, "scope": "rack", "scenario": "online"}, "--scenario: .* got 'online'"),
        ({"tokens_per_second": 5, "scope": "rack", "accelerators": 0}, "accelerators: expected 1 to .*, got 0"),
        ({"tokens_per_second": 5, "scope": "accelerator", "accelerators": 72}, "the rate of 1 accelerator, got 72"),
        (
            {"tokens_per_second": 5, "scope": "rack", "input_tokens_per_output_token": -1},
            "input tokens per output token: expected .*, got -1",
        ),
    ],
)
def test_numbers_that_are_no_rate(arguments, why, assumptions):
    with pytest.raises(UsageError, match=why):
        from_number(**arguments, assumptions=assumptions)
