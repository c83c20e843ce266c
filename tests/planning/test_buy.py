"""``plan buy``: each number recomputed, the range, and what a buyer reads first."""

import json
import math
import re
from dataclasses import replace

import pytest
from hypothesis import event, given, settings
from hypothesis import strategies as st

from megatoken.errors import UsageError
from megatoken.planning.assumptions import load_assumptions
from megatoken.planning.buy import Order, answer
from megatoken.planning.commands import buy, capacity, cost, energy, fleet
from megatoken.planning.cost import System
from megatoken.planning.energy import power_of
from megatoken.planning.flags import Common, FleetFlags, PowerFlags, Rate
from megatoken.planning.fleet_plan import Supply
from megatoken.planning.throughput import from_number
from megatoken.planning.workloads import load_profiles
from megatoken.report.blocks import Cards, Figure, Table, text_of
from megatoken.report.documents import checked
from megatoken.report.views import document_view
from megatoken.report.words import WEAK

GB300 = Rate(accelerator="GB300", tokens_per_second=1_100_948.3, per="rack", accelerators=72)
RAG = Common(profile=("rag",))
PUBLISHED = "Published rates over power, recomputed"  # a chart that keeps the digits of what it is compared with


def test_the_answer_recomputed_from_its_formulas():
    plan = buy(GB300, RAG, FleetFlags(), seats=500_000)
    values = {one.name: one.value for one in plan.results}
    inputs = {one.name: one.value for one in plan.inputs}
    bounds = plan.table("bounds").rows[0]
    assert values["Peak demand"] == pytest.approx(500_000 * 10 * 0.15 / 3600)
    needed = values["Peak demand"] / (bounds["planning_interactions_per_second"] / 72)
    assert values["Accelerators needed"] == pytest.approx(needed)
    assert values["Racks"] == math.ceil((math.ceil(needed / 4) + 1) / 18)
    assert (values["Nodes"], values["Accelerators"]) == (18 * values["Racks"], 72 * values["Racks"])
    tokens = 500_000 * 200 * 1200 / 1e6
    variable = 500_000 * 200 * (1200 * 250 * 0.087e-9 + 2500 * 4 * 3 * 0.023e-9 + 5e-6)
    month = values["Accelerators"] * inputs["accelerator_hour"] * 730 + variable
    assert values["Cost per month"] == pytest.approx(month)
    assert values["Cost per million output tokens"] == pytest.approx(month / tokens)
    served = bounds["planning_interactions_per_second"] / 0.7 * values["Racks"] * 730 * 3600
    assert values["Mean utilisation"] == pytest.approx(500_000 * 200 / served)
    kilowatts = values["Accelerators"] * 1.4 * 1.3 * (0.3 + 0.7 * values["Mean utilisation"])
    assert values["Energy per month"] == pytest.approx(kilowatts * 1.54 * 730 / 1e3)
    assert values["Energy per million output tokens"] == pytest.approx(values["Energy per month"] * 1e3 / tokens)


@pytest.mark.parametrize(("name", "of_a_day"), [("simple_qa", 10), ("rag", 10), ("summarisation", 3), ("agent", 3)])
def test_the_busiest_hour_has_a_share_of_the_working_day(name, of_a_day):
    """Neither at the ends of the assumptions' ranges does an hour ask for more than a day has."""
    plan = buy(Rate(accelerator="H200"), Common(profile=(name,)), FleetFlags(), seats=200_000)
    peak = plan.result("Peak demand")
    assert peak.value * 3600 / 200_000 == pytest.approx(0.15 * of_a_day)
    assert peak.high * 3600 / 200_000 < of_a_day
    inputs = {one.name: (one.low, one.value, one.high) for one in plan.inputs}
    assert inputs["busiest_hour_share"] == (0.083, 0.15, 0.3)
    assert inputs["working_days_per_month"] == (19, 20, 22)


def test_a_profile_without_interactions_is_refused(tmp_path):
    own = tmp_path / "own.yaml"
    own.write_text("profiles: {idle: {input_tokens: 1, output_tokens: 1, interactions_per_user_month: 0}}")
    with pytest.raises(UsageError, match="profile idle: interactions_per_user_month is 0"):
        buy(GB300, Common(profiles=own), FleetFlags(), seats=10)


def test_a_small_order_on_another_part():
    """The mean utilisation is what the order asks for, however little; a price of another part is said to be one."""
    plan = buy(GB300, RAG, FleetFlags(), seats=5000)
    other = buy(replace(GB300, accelerator="MI300X"), RAG, FleetFlags(), seats=5000)
    served = plan.table("bounds").rows[0]["planning_interactions_per_second"] / 0.7 * 730 * 3600
    racks = plan.result("Accelerators").value / 72
    assert plan.result("Mean utilisation").value == pytest.approx(5000 * 200 / (served * racks))
    assert plan.result("Mean utilisation").value < 0.001
    assert any("price is that of a GB300, this is a MI300X" in note for note in other.notes)


def test_the_range_is_the_root_of_the_sum_of_squares():
    plan = buy(GB300, RAG, FleetFlags(), seats=5000)
    cost = plan.result("Cost per month")
    above = [max(0.0, *(math.log(end / cost.value) for end in (one.result_low, one.result_high)))
             for one in plan.sensitivities]  # fmt: skip
    assert cost.high == pytest.approx(cost.value * math.exp(math.hypot(*above)))
    assert all(one.low <= one.value <= one.high for one in plan.results)
    assert [row["assumption"].replace(" ", "_") for row in plan.table("top_cost_per_month").rows] == [
        one.input for one in plan.sensitivities[:3]
    ]


@pytest.mark.parametrize("seats", [5000, 500_000, 2_000_000])
@pytest.mark.parametrize(("accelerator", "per_node"), [("GB300", 4), ("H200", 8)])
def test_both_ends_of_the_hardware_are_one_purchase(seats, accelerator, per_node):
    plan = buy(Rate(accelerator=accelerator), RAG, FleetFlags(), seats=seats)
    nodes, accelerators, needed = (plan.result(name) for name in ("Nodes", "Accelerators", "Accelerators needed"))
    for end in ("low", "value", "high"):
        bought = math.ceil(getattr(needed, end) / per_node) + 1
        if accelerator == "GB300":
            assert getattr(plan.result("Racks"), end) == math.ceil(bought / 18)
            bought = math.ceil(bought / 18) * 18
        assert (getattr(nodes, end), getattr(accelerators, end)) == (bought, per_node * bought)


def test_the_title_is_the_answer():
    plan = buy(Rate(accelerator="GB300"), RAG, FleetFlags(), seats=5000)
    assert (
        plan.title.startswith("5,000 seats of rag: 1 rack (18 nodes, 72 x GB300)") and "dollars a month" in plan.title
    )
    assert buy(Rate(accelerator="H200"), RAG, FleetFlags(), seats=5000).results[0].name == "Nodes"


@settings(max_examples=12, deadline=None)
@given(
    st.integers(1, 3_000_000),
    st.integers(0, 3_000_000),
    st.floats(0.3, 5),
    st.floats(0.08, 0.5),
    st.floats(0.5, 1),
    st.floats(0.5, 1),
)
def test_more_seats_or_tighter_limits_never_need_less(seats, more, ttft, tpot, less_ttft, less_tpot):
    def needed(count: int, ttft_limit: float, tpot_limit: float) -> tuple[float, float]:
        profile = load_profiles(names=["rag"])[0]
        limits = [f"ttft_limit_seconds={10 * ttft_limit!r}", f"tpot_limit_seconds={tpot_limit!r}"]

        def supply(assumptions):
            rack = from_number(1_100_948.3, scope="rack", accelerators=72, accelerator="GB300", assumptions=assumptions)
            return Supply.of(System(rack, power_of(rack)), None, None)

        values = answer(Order(count, profile, supply, [], 1, "node"), load_assumptions(settings=limits)).values
        return values["Accelerators needed"], values["Racks"]

    few = needed(seats, ttft, tpot)
    assert all(a <= b for a, b in zip(few, needed(seats + more, ttft, tpot), strict=True))
    try:
        tight = needed(seats, ttft * less_ttft, tpot * less_tpot)
    except UsageError:
        event("one request alone breaks a limit")
    else:
        assert all(a <= b * (1 + 1e-9) for a, b in zip(few, tight, strict=True))


def digits(text: str) -> int:
    """Significant digits of a number that is printed."""
    return len(re.sub(r"[^0-9]", "", text).lstrip("0").rstrip("0"))


def test_no_assumed_number_is_shown_with_more_than_three_digits():
    plans = [
        buy(GB300, RAG, FleetFlags(), seats=500_000),
        cost(GB300, Common(), PowerFlags()),
        capacity(GB300, Common()),
        fleet(GB300, RAG, FleetFlags(demand=3_333_333.0, unit="users", curve="office_day")),
        energy(GB300, RAG, PowerFlags()),
    ]
    for plan in plans:
        weak = {one.name for one in plan.results if one.state in WEAK and isinstance(one.value, float)}
        view = document_view(checked(plan.to_document()))
        cards = [card for block in view.summary if isinstance(block, Cards) for card in block.cards]
        shown = [(name, value) for name, value, _ in cards if name in weak]
        for section in view.sections:
            for block in section.blocks:
                if isinstance(block, Figure) and block.title.startswith("Sensitivity"):
                    shown += [(row[0], cell) for row in block.data.rows for cell in row[-2:]]
                elif isinstance(block, Figure) and block.data.columns[-1].name == "State" and block.title != PUBLISHED:
                    shown += [(row[0], row[1]) for row in block.data.rows if row[-1] in WEAK]
                elif isinstance(block, Table) and block.caption == "Results":
                    shown += [(text_of(row[0]), cell) for row in block.rows if text_of(row[0]) in weak
                              for cell in row[1:-1] if isinstance(cell, str) and digits(cell)]  # fmt: skip
        assert shown
        assert [one for one in shown if digits(one[1].split(" ")[0]) > 3] == [], plan.kind


def test_one_price_in_buy_and_fleet():
    flags = FleetFlags(demand=1000.0, unit="users")
    hour = next(one.value for one in fleet(GB300, RAG, flags).inputs if one.name == "base_price")
    rented = buy(GB300, RAG, FleetFlags(rent=4.0), seats=1000)
    assert next(one.value for one in rented.inputs if one.name == "rent") == 4.0
    found = next(
        one.value for one in buy(GB300, RAG, FleetFlags(), seats=1000).inputs if one.name == "accelerator_hour"
    )
    assert found == pytest.approx(hour, rel=0.05)  # the power of a fleet that is hardly used is lower


@pytest.mark.parametrize("name", ["H100", "H200", "B200", "GB200", "GB300"])
def test_only_an_accelerator_without_a_price_is_said_to_have_that_of_another(name):
    rate = Rate(accelerator=name, tokens_per_second=30_000.0, per="system", accelerators=8)
    for plan in (buy(rate, RAG, FleetFlags(), seats=5000), cost(rate, RAG, PowerFlags())):
        assert not [note for note in plan.notes if "price is that of" in note]
    notes = cost(replace(rate, accelerator="MI300X"), RAG, PowerFlags()).notes
    assert any("price is that of a GB300, this is a MI300X" in note for note in notes)


def test_prices_are_those_of_the_part_and_dated():
    assumptions = load_assumptions()
    prices = [
        assumptions.priced_for(name).entries["system_price_dollars_per_accelerator"] for name in ("H200", "GB300")
    ]
    assert prices[0].value != prices[1].value
    own = load_assumptions(settings=["system_price_dollars_per_accelerator=1"])
    assert own.priced_for("H200")["system_price_dollars_per_accelerator"] == 1
    for name in (None, "H100", "H200", "B200", "GB200", "GB300"):
        for one in assumptions.priced_for(name).entries.values():
            if one.unit.startswith("$"):
                assert "20" in one.source and any(f"20{year}" in one.source for year in range(18, 30)), one


def test_an_aggregate_is_a_rate(tmp_path):
    path = tmp_path / "aggregate.json"
    document = {
        "kind": "aggregate",
        "sum_of_rates_tokens_per_second": 1_100_948.3,
        "sum_label": "sum",
        "accelerators": 72,
        "workload": {"scenario": "offline", "model": "llama2-70b", "precision": "fp4"},
    }
    path.write_text(json.dumps(document))
    flags = FleetFlags(demand=5000.0, unit="users")
    saved, typed = (fleet(rate, RAG, flags) for rate in (Rate(run=path, accelerator="GB300"), GB300))
    assert [one.value for one in saved.results] == [one.value for one in typed.results]
    path.write_text("{}")
    with pytest.raises(UsageError, match=r"aggregate\.json"):
        fleet(Rate(run=path), RAG, flags)


def test_hardware_that_is_not_named():
    with pytest.raises(UsageError, match="--accelerator"):
        buy(Rate(), RAG, FleetFlags(), seats=10)
    with pytest.raises(UsageError, match="one workload profile"):
        buy(GB300, Common(), FleetFlags(), seats=10)
