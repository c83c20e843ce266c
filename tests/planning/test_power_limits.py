"""Power limits: the model follows its constants, every output says that it is a model, and other cards are refused."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatoken.analysis.energy import RunEnergy
from megatoken.errors import UsageError
from megatoken.planning.assumptions import load_assumptions
from megatoken.planning.energy import plan_energy, power_given, power_of
from megatoken.planning.power_limits import _curves, limited, plan_power_limit
from megatoken.planning.throughput import from_number

H200 = _curves()["H200"]


def h200(rate=4476.0, count=1, **given):
    return from_number(
        rate, scope="system", accelerators=count, accelerator="NVIDIA H200", assumptions=load_assumptions(), **given
    )


@pytest.fixture
def full():
    return power_given(693.0, "accelerators", "measured")


@given(st.sampled_from(sorted(H200.workloads)), st.floats(500, 700), st.floats(500, 700))
def test_a_lower_limit_is_slower_and_saves_energy(name, one, other):
    low, high = (limited(H200, H200.workloads[name], watts) for watts in sorted((one, other)))
    assert low.rate_share <= high.rate_share and low.clock_mhz <= high.clock_mhz
    assert low.rate_share / low.watts >= high.rate_share / high.watts * (1 - 1e-9)
    for found in (low, high):
        assert found.watts / 700 - 1e-9 <= found.rate_share_low <= found.rate_share <= found.rate_share_high <= 1


@pytest.mark.parametrize("name", sorted(H200.workloads))
def test_a_layer_draws_what_the_limit_allows(name):
    layer = H200.workloads[name]
    found = limited(H200, layer, 600)
    speed = found.clock_mhz / layer.clock_mhz
    first = layer.forms[0]
    watts = [
        H200.static_watts
        + (first.constant_joules + first.clock_joules * one**2)
        / (layer.product_microseconds / one + layer.attention_microseconds * one**-layer.attention_exponent)
        * 1e6
        for one in (speed, 1.0)
    ]
    assert first.exponent == 2
    assert watts[0] / watts[1] == pytest.approx(600 / 700)
    assert watts[1] == pytest.approx(692, rel=0.02)  # as measured at the limit; the fit of 8B is 1.8 % below it there


def test_the_curve_of_70b(full, assumptions):
    plan = plan_power_limit(h200(), full, 600, assumptions)
    own, asked, least = plan.table("power_limits").rows
    assert [row["power_limit_watts"] for row in (own, asked, least)] == [700, 600, 500]
    assert own["output_tokens_per_second"] == pytest.approx(4476)
    assert own["energy_joules_per_output_token"] == pytest.approx(693 / 4476)
    assert asked["output_tokens_per_second"] == pytest.approx(4101, abs=3)
    assert asked["output_tokens_per_joule"] / own["output_tokens_per_joule"] == pytest.approx(1.069, abs=0.001)
    assert least["low_output_tokens_per_second"] < least["output_tokens_per_second"] == pytest.approx(3659, abs=3)
    assert plan.results[0].value == pytest.approx(asked["output_tokens_per_joule"])
    dollars = plan.result("Electricity per million output tokens").value
    assert dollars == pytest.approx(asked["electricity_dollars_per_million_output_tokens"])


def test_every_output_is_that_of_a_model(full, assumptions):
    plan = plan_power_limit(h200(state="measured"), full, 550, assumptions)
    assert "by a model, not measured" in plan.title
    assert {one.state for one in plan.results} <= {"estimate", "assumed"}
    assert all("model" in one.formula for one in plan.results)
    assert [row["power_limit_watts"] for row in plan.table("power_limits").rows] == [700, 600, 550, 500]
    assert "no card ran at a lower limit" in plan.notes[0]
    factor = plan.inputs[-1]
    assert factor.low < factor.value < factor.high < 1 and "extrapolated" in factor.source


def test_the_own_limit_changes_nothing(full, assumptions):
    plan, same = plan_power_limit(h200(), full, 700, assumptions), plan_energy(h200(), full, assumptions)
    assert [one.value for one in plan.results] == pytest.approx([one.value for one in same.results])


def test_eight_cards_and_the_energy_of_a_run(assumptions):
    power = power_given(8 * 690.0, "accelerators", "measured")
    run = RunEnergy(joules=5520.0 * 10, output_tokens=400_000, seconds=10.0, why="")
    plan = plan_power_limit(h200(35_000, 8), power, 500, assumptions, energy=run)
    own, *_ = plan.table("power_limits").rows
    assert own["output_tokens_per_second"] == pytest.approx(40_000)  # while its power was measured
    assert own["energy_joules_per_output_token"] == pytest.approx(5520 / 40_000)


def test_each_shape_has_its_curve_and_others_say_whose_they_use(full, assumptions):
    def found(model, rate, precision="fp8"):
        throughput = h200(rate, model=model, precision=precision)
        plan = plan_power_limit(throughput, full, 600, assumptions)
        return plan.inputs[-1].value, [note for note in plan.notes if "curve is that of" in note]

    big, small, other, wide = (
        found("llama2-70b", 4476),
        found("llama3.1-8b", 30_000),
        found("mixtral-8x7b", 9_000),
        found("llama3.1-8b", 17_000, "bf16"),
    )
    assert big[0] < small[0] and not big[1] and not small[1]
    assert other[0] == big[0] and "mixtral-8x7b in fp8" in other[1][0]
    assert wide[0] == small[0] and "llama3.1-8b in bf16" in wide[1][0]


def test_what_it_is_not_of_is_refused(full, assumptions, rack):
    def refusal(throughput, power, watts):
        with pytest.raises(UsageError) as error:
            plan_power_limit(throughput, power, watts, assumptions)
        return str(error.value)

    assert "NVIDIA GB300 is not known; it is of H200 only" in refusal(rack, power_of(rack), 600)
    assert "an unknown accelerator" in refusal(replace(h200(), accelerator=None), full, 600)
    for watts in (499.0, 701.0, float("nan")):
        assert "expected 500 to 700 W" in refusal(h200(), full, watts)
    assert "--boundary accelerators" in refusal(h200(), power_given(900, "wall", "given"), 600)
    assert "not held back by its limit of 700 W" in refusal(h200(), power_given(400, "accelerators", "given"), 600)
