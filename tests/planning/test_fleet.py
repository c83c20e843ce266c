"""Fleets: ceilings, spares, two classes, wrong sizes, demand from files."""

import dataclasses
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatoken.errors import ConfigError, UsageError
from megatoken.planning.assumptions import load_assumptions
from megatoken.planning.capacity import plan_capacity
from megatoken.planning.cost import System, plan_cost
from megatoken.planning.energy import power_of
from megatoken.planning.fleet import SupplyClass, fit, nodes_for, policies, size
from megatoken.planning.fleet_plan import Supply, load_demand, plan_fleet, plan_replacement
from megatoken.planning.pricing import derating, parse_factor
from megatoken.planning.throughput import from_number
from megatoken.planning.workloads import load_profiles

BASE = SupplyClass("base", 100.0, 4, 12.0, 18)
BURST = SupplyClass("burst", 80.0, 8, 40.0)
LEVELS = st.lists(st.just(0.0) | st.floats(1e-3, 1e5), min_size=1, max_size=30).filter(any)
RATES = st.floats(1, 1e4)


@given(st.just(0.0) | st.floats(1e-6, 1e5), RATES)
def test_the_ceiling_is_enough_and_one_less_is_not(demand, rate):
    nodes = nodes_for(demand, rate)
    assert nodes * rate >= demand * (1 - 1e-8)
    assert nodes == 0 or (nodes - 1) * rate < demand


@given(st.floats(0, 1e4), st.floats(0, 1e4), RATES)
def test_more_demand_never_needs_fewer_nodes(one, other, rate):
    assert nodes_for(max(one, other), rate) >= nodes_for(min(one, other), rate)


@given(st.integers(1, 100_000), st.floats(1e-3, 1e6))
def test_rounding_errors_buy_no_node(nodes, rate):
    assert nodes_for(rate * nodes, rate) == nodes
    assert nodes_for(sum([rate] * min(nodes, 50)), rate) == min(nodes, 50)


def test_a_mistyped_unit_is_noticed():
    with pytest.raises(UsageError, match="check the units"):
        nodes_for(1e12, 1.0)


@given(st.floats(1, 1e5), st.integers(0, 5), st.sampled_from(["node", "rack"]))
def test_spares_cover_the_loss_of_their_domains(demand, spares, domain):
    found = size(demand, BASE, spare_domains=spares, domain=domain)
    lost = spares * (1 if domain == "node" else BASE.nodes_per_rack)
    assert (found.nodes - lost) * BASE.rate_per_node >= demand * (1 - 1e-8)
    assert found.nodes == found.serving_nodes + found.spare_nodes
    assert found.racks == math.ceil(found.nodes / 18) and found.accelerators == 4 * found.nodes
    assert size(demand, BASE, spare_domains=spares + 1, domain=domain).nodes > found.nodes


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        ({"spare_domains": -1}, "-1"),
        ({"domain": "tray"}, "tray"),
        ({"domain": "rack", "supply": BURST}, "nodes per rack"),
    ],
)
def test_spares_that_make_no_sense(arguments, why):
    with pytest.raises(UsageError, match=why):
        size(1000.0, **{"supply": BASE, **arguments})


@given(st.integers(1, 1000), st.floats(1, 100), st.floats(1, 100))
def test_replacements_serve_what_was_served(before, old, new):
    newer = from_number(new, scope="node", accelerators=4, assumptions=load_assumptions())
    plan = plan_replacement(before, old, Supply(newer))
    nodes = plan.results[0].value
    assert nodes * new >= before * old * (1 - 1e-8)
    assert nodes >= plan.result("Before rounding up").value * (1 - 1e-8)
    if nodes > 1:
        enough = plan.result(f"Ratio at which {nodes - 1} nodes suffice").value
        assert nodes_for(before * old, old * enough) == nodes - 1


@given(LEVELS, st.integers(0, 5000))
def test_what_a_size_leaves_unserved(levels, nodes):
    found, larger = fit(levels, BASE, nodes), fit(levels, BASE, nodes + 1)
    for name in ("unserved_share", "short_time_share", "idle_share"):
        assert 0 <= found[name] <= 1
    assert larger["unserved_share"] <= found["unserved_share"] + 1e-12
    assert larger["price_dollars_per_hour"] > found["price_dollars_per_hour"]
    enough = nodes >= nodes_for(max(levels), BASE.rate_per_node)
    assert (found["unserved_share"] == 0) == enough or found["unserved_share"] < 1e-8


@given(LEVELS, st.floats(0.1, 100), st.integers(0, 3))
def test_the_cheapest_mix_is_cheapest_and_every_mix_serves_all(levels, burst_price, spares):
    burst = dataclasses.replace(BURST, dollars_per_node_hour=burst_price)
    found = {row["policy"]: row for row in policies(levels, BASE, burst, spare_domains=spares)}
    cheapest = found["cheapest mix"]["price_dollars_per_hour"]
    assert all(cheapest <= row["price_dollars_per_hour"] * (1 + 1e-9) for row in found.values())
    assert found["burst only"]["base_nodes"] == 0
    assert found["burst only"]["burst_demand_share"] == pytest.approx(1)
    assert found["base only"]["most_burst_nodes"] == found["base only"]["burst_demand_share"] == 0
    for row in found.values():
        serving = row["base_nodes"] - (spares if row["base_nodes"] else 0)
        served = serving * BASE.rate_per_node + row["most_burst_nodes"] * burst.rate_per_node
        assert served >= max(levels) * (1 - 1e-8)
        assert 0 <= row["burst_demand_share"] <= 1 + 1e-9


def test_a_mix_by_hand():
    """Ten hours at 100, two at 300: one base node, and for two hours three of the other class."""
    found = {row["policy"]: row for row in policies((100.0,) * 10 + (300.0,) * 2, BASE, BURST)}
    assert found["base only"]["price_dollars_per_hour"] == 36
    mix = found["cheapest mix"]
    assert (mix["base_nodes"], mix["most_burst_nodes"]) == (1, 3)
    assert mix["price_dollars_per_hour"] == pytest.approx(12 + 3 * 40 * 2 / 12)
    assert mix["burst_demand_share"] == pytest.approx(400 / 1600)


def test_a_huge_mix_is_searched_in_bounded_time():
    levels = tuple(float(hour % 24 + 1) * 3e6 for hour in range(8760))
    prices = {row["policy"]: row["price_dollars_per_hour"] for row in policies(levels, BASE, BURST)}
    assert prices["cheapest mix"] <= min(prices.values())


def test_a_plan_counts_racks_of_thousands(rack, assumptions):
    profile = load_profiles(names=["rag"])[0]
    plan = plan_fleet(
        Supply(rack, 4, 18), load_demand("interactions", 40_000), assumptions, profile=profile, domain="rack"
    )
    per_rack = (
        plan_capacity(rack, [profile], assumptions).table("concurrency").rows[0]["planning_interactions_per_second"]
    )
    assert plan.result("Before rounding up").value == pytest.approx(40_000 / per_rack * 18, rel=1e-4)
    assert plan.results[0].value == plan.result("Racks").value * 18
    assert plan.result("Racks").value == math.ceil(math.ceil(40_000 / per_rack * 18) / 18) + 1
    assert plan.result("Accelerators").value == plan.results[0].value * 4 > 4600


def test_users_become_interactions_by_their_pause(rack, assumptions):
    profile = load_profiles(names=["simple_qa"])[0]
    by_users = plan_fleet(Supply(rack, 4), load_demand("users", 95_000), assumptions, profile=profile)
    by_rate = plan_fleet(Supply(rack, 4), load_demand("interactions", 1000), assumptions, profile=profile)
    exact = "Before rounding up"
    assert by_users.result(exact).value == pytest.approx(by_rate.result(exact).value)
    assert any("95 s" in note for note in by_users.notes)


def test_factors_of_the_user_need_more_nodes(rack, assumptions):
    demand = load_demand("output-tokens", 1e6)
    plain, derated = (
        plan_fleet(Supply(rack, 4), demand, assumptions, factors=own).result("Before rounding up").value
        for own in ((), (parse_factor("makespan=0.936"),))
    )
    assert derated == pytest.approx(plain / 0.936)


def test_burst_and_loss_of_the_base(rack, assumptions):
    slow = from_number(12_000, scope="node", accelerators=8, accelerator="H100", assumptions=assumptions)
    demand = load_demand("output-tokens", 1e6, "office_day")
    plan = plan_fleet(Supply.of(System(rack, power_of(rack)), 4, 18), demand, assumptions, burst=Supply(slow))
    table = {row["policy"]: row for row in plan.table("policies").rows}
    assert plan.result("Burst nodes without any base").value == math.ceil(1e6 / derating(slow, assumptions).planning)
    assert table["burst only"]["most_burst_nodes"] == plan.result("Burst nodes without any base").value
    assert table["cheapest mix"]["price_dollars_per_hour"] == min(
        row["price_dollars_per_hour"] for row in table.values()
    )
    assert [row["hour"] for row in plan.table("curve").rows] == list(range(24))
    assert "short time: share of the" in plan.table("sizes").note
    names = [one.name for one in plan.inputs]
    assert len(names) == len(set(names)) and {"rate", "burst_rate"} <= set(names)


@pytest.mark.parametrize(
    ("unit", "level", "curve", "why"),
    [
        ("tokens", 5, None, "--unit: .* got 'tokens'"),
        ("users", None, None, "no demand: pass --demand"),
        ("users", -1, None, "--demand: expected .*, got -1"),
        ("users", None, "office_day", "pass its peak"),
        ("users", 5, "ofice_day", "did you mean office_day"),
        ("users", 5, "/", "cannot be read as CSV: is not a regular file"),
    ],
)
def test_demands_that_are_none(unit, level, curve, why):
    with pytest.raises(UsageError, match=why):
        load_demand(unit, level, curve)


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("", "no demand"),
        ("hour,demand\n", "no demand"),
        ("0,0\n1,0\n", "no demand"),
        ("0,1\n1,x\n", "row 2"),
        ("0,1\n1\n", "row 2"),
        ("0,1\n1,-2\n", "row 2"),
        ("0,1\n1,nan\n", "row 2"),
        ("0,1\n1,2\n3,2\n", "equal steps"),
        ("1,1\n0,2\n", "equal steps"),
        ("0,1\n" + "x" * 200_000, "cannot be read as CSV|row 2"),
        ("\0", "row 1|CSV"),
    ],
)
def test_curves_that_are_none(tmp_path, text, why):
    path = tmp_path / "curve é.csv"
    path.write_text(text)
    with pytest.raises(UsageError, match=why):
        load_demand("users", None, str(path))


def test_a_curve_of_a_file_is_absolute_unless_given_a_peak(tmp_path):
    path = tmp_path / "curve.csv"
    path.write_text("# measured last week\nhour,demand\n0,10\n1,20\n2,5\n")
    assert load_demand("users", None, str(path)).levels == (10, 20, 5)
    assert load_demand("users", 40, str(path)).levels == (20, 40, 10)


def test_what_a_fleet_must_know(rack, assumptions):
    demand = load_demand("interactions", 10)
    with pytest.raises(UsageError, match="needs a workload profile"):
        plan_fleet(Supply(rack, 4), demand, assumptions)
    with pytest.raises(UsageError, match="for one node pass"):
        plan_fleet(Supply(rack), load_demand("output-tokens", 10), assumptions)
    nameless = from_number(5, scope="node", assumptions=assumptions)
    with pytest.raises(UsageError, match="accelerators per node of the base class unknown"):
        plan_fleet(Supply(nameless), load_demand("output-tokens", 10), assumptions)


@pytest.mark.parametrize(
    ("per_node", "per_rack", "why"),
    [
        (0, None, "--accelerators-per-node: expected .*, got 0"),
        (4, 0, "--nodes-per-rack: expected .*, got 0"),
        (4, -18, "--nodes-per-rack: expected .*, got -18"),
        (144, None, "--accelerators-per-node 144: the rate is of a rack of 72"),
    ],
)
def test_shapes_that_are_none(rack, assumptions, per_node, per_rack, why):
    with pytest.raises(UsageError, match=why):
        plan_fleet(Supply(rack, per_node, per_rack), load_demand("output-tokens", 10), assumptions)


def test_a_node_has_the_accelerators_of_its_rate(assumptions):
    node = from_number(5000, scope="node", accelerators=4, assumptions=assumptions)
    with pytest.raises(UsageError, match="--accelerators-per-node 8: the rate is of a node of 4"):
        plan_fleet(Supply(node, 8), load_demand("output-tokens", 10), assumptions)
    single = from_number(1250, scope="accelerator", assumptions=assumptions)
    of_four, of_node = (
        plan_fleet(supply, load_demand("output-tokens", 1e5), assumptions)
        for supply in (Supply(single, 4), Supply(node))
    )
    assert of_four.results == of_node.results


def test_prices_can_be_set(rack):
    no_staff = load_assumptions(settings=["staff_people_per_thousand_accelerators=0"])
    rented = Supply.of(System(rack, None, 1.5), 4, 18)
    plan = plan_fleet(rented, load_demand("output-tokens", 1e6), no_staff)
    assert plan.result("Price").value == pytest.approx(plan.results[0].value * 4 * 1.5)
    with pytest.raises(ConfigError, match="must be at least 0"):
        load_assumptions(settings=["burst_dollars_per_accelerator_hour=-1"])


def test_fleet_and_cost_have_one_price(rack, assumptions):
    system = System(rack, power_of(rack))
    fleet = plan_fleet(Supply.of(system, 4, 18), load_demand("output-tokens", 1e6), assumptions)
    hourly = plan_cost(system, [], assumptions).result("Cost of the system").value
    assert fleet.result("Price").value == pytest.approx(fleet.result("Accelerators").value * hourly / 72)
    unknown = plan_fleet(Supply(rack, 4), load_demand("output-tokens", 1e6), assumptions).result("Price")
    assert unknown.value is None and "--accelerator" in unknown.formula


def test_a_rack_is_bought_whole(rack, assumptions):
    supply = Supply.of(System(rack, power_of(rack)))
    assert (supply.accelerators_per_node, supply.nodes_per_rack, supply.whole_racks) == (4, 18, True)
    plan = plan_fleet(supply, load_demand("output-tokens", 1e6), assumptions)
    assert plan.results[0].name == "Racks" and plan.results[0].value == 2
    assert plan.result("Accelerators").value == 144
    assert plan.result("Spare nodes").value == 36 - plan.result("Serving nodes").value


def test_every_policy_pays_for_spare_racks(rack, assumptions):
    slow = from_number(12_000, scope="node", accelerators=8, accelerator="H100", assumptions=assumptions)
    demand = load_demand("output-tokens", 3e6, "office_day")
    base = Supply.of(System(rack, power_of(rack)), 4, 18)
    plan = plan_fleet(base, demand, assumptions, domain="rack", burst=Supply(slow))
    table = {row["policy"]: row for row in plan.table("policies").rows}
    assert table["base only"]["base_nodes"] == plan.result("Nodes").value
    assert table["base only"]["price_dollars_per_hour"] == pytest.approx(plan.result("Price").value)
    assert table["base for the mean"]["base_nodes"] % 18 == 0
