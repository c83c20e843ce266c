"""Cost: lines that add up, a million tokens by hand, and what moves the price in which direction."""

import dataclasses
import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatoken.errors import UsageError
from megatoken.planning.assumptions import load_assumptions
from megatoken.planning.cost import (
    OWNED_ONLY,
    CostInputs,
    System,
    dollars_per_million_output_tokens,
    hourly_lines,
    interaction_dollars,
    million_token_lines,
    plan_cost,
)
from megatoken.planning.energy import power_given, power_of
from megatoken.planning.pricing import price
from megatoken.planning.throughput import from_number, from_runs
from megatoken.planning.workloads import load_profiles

ASSUMED = CostInputs.assumption_names()
PLAIN = CostInputs(
    output_tokens_per_second=1000.0,
    accelerators=8,
    full_watts=10_000.0,
    input_tokens_per_output_token=1.0,
    output_tokens_per_request=500.0,
    rent_dollars_per_accelerator_hour=None,
    system_price_dollars_per_accelerator=43_800.0,
    system_life_years=5.0,
    residual_value_share=0.2,
    cost_of_capital_share_per_year=0.1,
    idle_power_share=0.2,
    pue=1.5,
    electricity_dollars_per_kwh=0.1,
    space_dollars_per_kilowatt_month=73.0,
    egress_bytes_per_output_token=200.0,
    egress_dollars_per_gigabyte=0.1,
    storage_bytes_per_token=4.0,
    storage_months=10.0,
    storage_dollars_per_gigabyte_month=0.025,
    storage_operations_per_request=1.0,
    storage_dollars_per_million_operations=5.0,
    staff_people_per_thousand_accelerators=10.0,
    staff_dollars_per_person_year=219_000.0,
    utilisation_share=0.5,
)


@st.composite
def inputs(draw):
    """Any cost within the range of each assumption."""
    entries = load_assumptions().entries
    drawn = {name: draw(st.floats(entries[name].low, entries[name].high)) for name in ASSUMED}
    return dataclasses.replace(
        PLAIN,
        output_tokens_per_second=draw(st.floats(1, 1e7)),
        accelerators=draw(st.integers(1, 10_000)),
        full_watts=draw(st.floats(10, 1e7)),
        rent_dollars_per_accelerator_hour=draw(st.none() | st.floats(0.1, 20)),
        **drawn,
    )


def test_an_hour_by_hand():
    assert hourly_lines(PLAIN) == pytest.approx(
        {
            "amortisation": 8 * 43_800 * 0.8 / (5 * 8760),
            "capital": 8 * 43_800 * 0.6 * 0.1 / 8760,
            "power": 10 * (0.2 + 0.8 * 0.5) * 0.1,
            "cooling_and_losses": 10 * 0.6 * 0.5 * 0.1,
            "space": 10 * 73 / 730,
            "staff": 0.08 * 219_000 / 8760,
        }
    )


def test_a_million_tokens_by_hand():
    million = million_token_lines(PLAIN)
    assert million["amortisation"] == pytest.approx(6.4 / (1000 * 3600 * 0.5 / 1e6))
    assert million["network_egress"] == pytest.approx(0.2 * 0.1)
    assert million["storage"] == pytest.approx(2 * 4e-3 * 10 * 0.025 + 1e6 / 500 * 5 / 1e6)


@given(inputs())
def test_lines_add_up(one):
    lines = million_token_lines(one)
    assert math.fsum(lines.values()) == pytest.approx(dollars_per_million_output_tokens(one))
    assert all(value >= 0 for value in lines.values())


@given(inputs(), st.sampled_from(ASSUMED), st.floats(1.01, 2))
def test_dearer_inputs_never_make_tokens_cheaper(one, name, factor):
    falls = name in ("system_life_years", "residual_value_share", "utilisation_share")
    entry = load_assumptions().entries[name]
    more = min(getattr(one, name) * factor, entry.maximum or math.inf)
    before, after = (
        dollars_per_million_output_tokens(which) for which in (one, dataclasses.replace(one, **{name: more}))
    )
    if name == "residual_value_share":
        return  # lowers what is written off, raises the capital that is tied up
    assert after <= before * (1 + 1e-9) if falls else after >= before * (1 - 1e-9)


@given(inputs())
def test_the_benchmarks_own_request_costs_what_its_tokens_cost(one):
    """Two ways to the same money: the price of a million output tokens, and that of the requests they come in."""
    request = interaction_dollars(
        one,
        system_seconds=one.output_tokens_per_request / one.output_tokens_per_second,
        read_tokens=one.output_tokens_per_request * one.input_tokens_per_output_token,
        written_tokens=one.output_tokens_per_request,
        requests=1,
    )
    assert request / one.output_tokens_per_request * 1e6 == pytest.approx(dollars_per_million_output_tokens(one))


@given(inputs())
def test_rent_takes_the_place_of_price_power_and_space(one):
    rented = dataclasses.replace(one, rent_dollars_per_accelerator_hour=3.0)
    assert set(hourly_lines(rented)) == {"rent", "staff"}
    for name in OWNED_ONLY:
        dearer = dataclasses.replace(rented, **{name: getattr(rented, name) + 1})
        assert dollars_per_million_output_tokens(dearer) == dollars_per_million_output_tokens(rented)


def test_plan_of_the_rack(rack, assumptions):
    plan = plan_cost(System(rack, power_of(rack)), load_profiles(), assumptions)
    headline = plan.results[0]
    assert headline.name == "Cost per million output tokens" and headline.state == "assumed"
    assert sum(row["cost_dollars_per_million_output_tokens"] for row in plan.table("lines").rows) == pytest.approx(
        headline.value
    )
    assert sum(step["value"] for step in plan.waterfall["steps"]) == pytest.approx(headline.value)
    assert sum(row["cost_share"] for row in plan.table("lines").rows) == pytest.approx(1)
    assert {"amortisation", "power", "space", "staff", "network egress", "storage"} <= {
        row["line"] for row in plan.table("lines").rows
    }
    assert [row["profile"] for row in plan.table("interactions").rows] == ["simple_qa", "rag", "summarisation", "agent"]


def test_a_plan_by_hand_at_half_use_and_at_full():
    """8 accelerators, 1,000 output tokens/s, 10 kW at the wall; every number worked out on paper."""
    own = [f"{name}={getattr(PLAIN, name)}" for name in ASSUMED]
    assumptions = load_assumptions(settings=[*own, "benchmark_output_tokens_per_request=500"])
    node = from_number(
        1000.0, scope="node", accelerators=8, scenario="server", input_tokens_per_output_token=1.0,
        assumptions=assumptions,
    )  # fmt: skip
    plan = plan_cost(System(node, power_given(10_000, "wall", "given")), [], assumptions)
    # Half use: 6.4 + 2.4 + 0.6 + 0.3 + 1 + 2 = 12.7 $/h over 1.8 million tokens; egress 0.02, storage 0.012.
    assert plan.result("Cost of the system").value == pytest.approx(12.7)
    assert plan.result("Output tokens per hour").value == pytest.approx(1.8)
    assert plan.result("Cost per million output tokens").value == pytest.approx(12.7 / 1.8 + 0.032)
    # Full use: power 1 and cooling 0.5, so 13.3 $/h over 3.6 million tokens; egress and storage as before.
    full = plan.result("Cost per million output tokens at full utilisation").value
    assert full == pytest.approx(13.3 / 3.6 + 0.032)
    assert full == pytest.approx(3.726444, abs=1e-6)


def test_a_profile_like_the_benchmark_costs_what_the_headline_says(rack, assumptions):
    like = load_profiles(names=["simple_qa"])[0].model_copy(update={"input_tokens": 815, "output_tokens": 1000})
    per_request = dataclasses.replace(rack, output_tokens_per_request=1000.0)
    plan = plan_cost(System(per_request, power_of(rack)), [like], assumptions)
    [row] = plan.table("interactions").rows
    assert row["cost_dollars_per_million_output_tokens"] == pytest.approx(plan.results[0].value)


def test_users_pay_by_the_month(rack, assumptions):
    [qa] = load_profiles(names=["simple_qa"])
    plan = plan_cost(System(rack, power_of(rack)), [qa], assumptions)
    [row] = plan.table("interactions").rows
    assert row["cost_dollars_per_user_month"] == pytest.approx(row["cost_dollars_per_request"] * 200)
    assert row["cost_dollars_per_million_output_tokens"] == pytest.approx(row["cost_dollars_per_request"] / 500 * 1e6)


def test_shorter_prompts_are_cheaper_where_prompts_are_long(rack, assumptions):
    plan = plan_cost(System(rack, power_of(rack)), load_profiles(), assumptions)
    saved = {
        row["profile"]: 1
        - row["cost_with_prompts_30_percent_shorter_dollars_per_thousand_interactions"]
        / row["cost_dollars_per_thousand_interactions"]
        for row in plan.table("interactions").rows
    }
    [summary] = load_profiles(names=["summarisation"])
    shorter = summary.model_copy(update={"input_tokens": 1400})
    [row] = plan_cost(System(rack, power_of(rack)), [shorter], assumptions).table("interactions").rows
    [whole] = [one for one in plan.table("interactions").rows if one["profile"] == "summarisation"]
    assert whole["cost_with_prompts_30_percent_shorter_dollars_per_thousand_interactions"] == pytest.approx(
        row["cost_dollars_per_thousand_interactions"]
    )
    assert 0 < saved["simple_qa"] < saved["rag"] < saved["summarisation"] < 0.3


def test_the_tornado_is_sorted_and_true(rack, assumptions):
    system = System(rack, power_of(rack))
    plan = plan_cost(system, [], assumptions)
    swings = [one.swing for one in plan.sensitivities]
    assert swings == sorted(swings, reverse=True) and min(swings) > 0
    found = {one.input: one for one in plan.sensitivities}
    assert {"utilisation_share", "system_price_dollars_per_accelerator", "pue", "wall_to_nameplate_power"} <= set(found)
    assert {"benchmark_output_tokens_per_request", "benchmark_input_tokens_per_output_token"} <= set(found)
    for one in plan.sensitivities:
        changed = load_assumptions(settings=[f"{one.input}={one.low!r}"])
        same = from_number(1_100_948.3, scope="rack", accelerators=72, accelerator="NVIDIA GB300", assumptions=changed)
        again = plan_cost(System(same, power_of(same)), [], changed)
        assert again.results[0].value == pytest.approx(one.result_low)
        assert min(one.result_low, one.result_high) <= plan.results[0].value <= max(one.result_low, one.result_high)


def test_every_default_is_printed_as_assumed_with_its_source(rack, assumptions):
    plan = plan_cost(System(rack, power_of(rack)), load_profiles(), assumptions)
    printed = {one.name: one for one in plan.inputs}
    for name in ASSUMED:
        assert printed[name].state == "assumed" and len(printed[name].source) > 10
        assert printed[name].value == assumptions[name]
    own = load_assumptions(settings=["pue=1.2"])
    changed = {one.name: one for one in plan_cost(System(rack, power_of(rack)), [], own).inputs}
    assert (changed["pue"].state, changed["pue"].source) == ("given", "--set")


def test_rented_plans_print_no_price_of_ownership(rack, assumptions):
    plan = plan_cost(System(rack, None, 3.0), load_profiles(), assumptions)
    names = {one.name for one in plan.inputs}
    assert not names & set(OWNED_ONLY) and "rent" in names
    assert not {one.input for one in plan.sensitivities} & set(OWNED_ONLY)
    assert plan.result("Cost of the system").value == pytest.approx(72 * 3 + 0.36 * 250_000 / 8760)


def test_cost_of_a_run_without_accelerators(make_run, assumptions):
    run = make_run()
    with pytest.raises(UsageError, match="1 for a machine without"):
        plan_cost(System(from_runs([run], assumptions), None), [], assumptions)
    throughput = from_runs([run], assumptions, accelerators=1)
    with pytest.raises(UsageError, match="power unknown"):
        plan_cost(System(throughput, None), [], assumptions)
    plan = plan_cost(System(throughput, power_given(250, "wall", "measured")), load_profiles(), assumptions)
    assert plan.results[0].value > 0


def test_the_default_price_is_that_of_one_accelerator(rack, assumptions):
    other = from_number(10_000, scope="node", accelerators=8, accelerator="H100", assumptions=assumptions)
    own = load_assumptions(settings=["system_price_dollars_per_accelerator=30000"])
    for throughput, given_prices, warned in ((rack, assumptions, 0), (other, assumptions, 1), (other, own, 0)):
        plan = plan_cost(System(throughput, power_of(throughput)), [], given_prices)
        assert sum("assumed price is that of a GB300, this is a H100" in note for note in plan.notes) == warned


def test_a_rent_that_is_no_price(rack, assumptions):
    with pytest.raises(UsageError, match="--rent: expected"):
        plan_cost(System(rack, None, -1.0), [], assumptions)


def test_measured_prices_of_tokens_move_requests_not_the_headline(assumptions):
    common = {"scope": "node", "accelerators": 8, "assumptions": assumptions}
    first = from_number(10_000, input_tokens_per_output_token=1.0, **common)
    second = from_number(4_000, input_tokens_per_output_token=8.0, **common)
    system = System(first, power_given(5600, "accelerators", "given"))
    by_ratio, by_two = (plan_cost(system, load_profiles(), assumptions, second=other) for other in (None, second))
    assert by_two.results == by_ratio.results
    cheap_reading = price(first, assumptions, second).prices
    assert cheap_reading.prefill_seconds_per_token < 0.3 * cheap_reading.decode_seconds_per_token
    costs = [
        {row["profile"]: row["cost_dollars_per_thousand_interactions"] for row in plan.table("interactions").rows}
        for plan in (by_ratio, by_two)
    ]
    assert costs[1]["summarisation"] < costs[0]["summarisation"]


@settings(max_examples=20, deadline=None)
@given(st.floats(0.1, 1.0), st.floats(0.1, 1.0))
def test_busier_systems_have_cheaper_tokens(one, other):
    assumptions = load_assumptions()
    throughput = from_number(1000, scope="node", accelerators=8, accelerator="H100", assumptions=assumptions)
    costs = [
        plan_cost(
            System(throughput, power_of(throughput)), [], load_assumptions(settings=[f"utilisation_share={share!r}"])
        )
        .results[0]
        .value
        for share in sorted((one, other))
    ]
    assert costs[0] >= costs[1] * (1 - 1e-9)


def test_a_total_rate_is_divided_again_in_the_tornado(assumptions):
    total = from_number(2_000_000, scope="rack", counted="total", accelerators=72, assumptions=assumptions)
    plan = plan_cost(System(total, power_given(131_000, "wall", "given")), [], assumptions)
    [mix] = [one for one in plan.sensitivities if one.input == "benchmark_input_tokens_per_output_token"]
    assert mix.result_high > 1.05 * mix.result_low  # more input tokens leave fewer output tokens


def test_a_run_states_the_length_of_its_own_answers(make_run, assumptions):
    run = from_runs([make_run()], assumptions, accelerators=1)
    plan = plan_cost(System(run, power_given(65, "wall", "given")), [], assumptions)
    [length] = [one for one in plan.inputs if one.name == "benchmark_output_tokens_per_request"]
    assert (length.state, length.value) == ("measured", run.output_tokens_per_request)
