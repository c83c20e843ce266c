"""Energy: at every boundary, by data sheet when nothing was measured."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatoken.analysis.published import accelerator_facts
from megatoken.errors import UsageError
from megatoken.planning import commands
from megatoken.planning.assumptions import load_assumptions
from megatoken.planning.capacity import plan_capacity
from megatoken.planning.energy import energy_of, plan_energy, power_at, power_given, power_of
from megatoken.planning.flags import Common, PowerFlags, Rate
from megatoken.planning.throughput import from_number, from_runs
from megatoken.planning.workloads import load_profiles

POSITIVE = st.floats(1e-3, 1e9)


@given(POSITIVE, POSITIVE)
def test_tokens_per_joule_and_back(rate, watts):
    assumptions = load_assumptions()
    given_rate = from_number(rate, scope="system", assumptions=assumptions)
    for row in plan_energy(given_rate, power_given(watts, "wall", "given"), assumptions).table("boundaries").rows:
        joules = row["energy_joules_per_output_token"]
        assert row["output_tokens_per_joule"] * joules == pytest.approx(1)
        assert row["energy_kwh_per_million_output_tokens"] * 3.6e6 == pytest.approx(joules * 1e6)


@given(st.floats(0, 1), st.floats(0, 1), POSITIVE, st.floats(0, 1))
def test_power_rises_with_use_between_idle_and_full(one, other, full, idle):
    low, high = (power_at(share, full, idle) for share in sorted((one, other)))
    assert low <= high * (1 + 1e-12)
    assert full * idle * (1 - 1e-12) <= low and high <= full * (1 + 1e-12)


@pytest.mark.parametrize(
    ("name", "watts"),
    [
        ("NVIDIA GB300", 1400), ("NVIDIA GB200 NVL72", 1200), ("B200", 1000), ("NVIDIA H100-SXM-80GB", 700),
        ("NVIDIA H100 80GB HBM3", 700), ("NVIDIA H200", 700), ("h200", 700), ("NVIDIA H100 PCIe", None),
        ("NVIDIA H100 NVL", None), ("NVIDIA GH200 480GB", None), ("CPU", None), ("", None), ("H100 and H200", None),
    ],
)  # fmt: skip
def test_tdp_by_any_usual_name(name, watts):
    facts = accelerator_facts(name)
    assert (facts and facts.tdp_watts) == watts


def test_a_measured_run_is_set_against_its_own_tokens(make_run, assumptions):
    run = make_run(watts=400.0, gpus=("NVIDIA H200",))
    energy = energy_of([run])
    throughput = from_runs([run], assumptions)
    power = power_of(throughput, energy)
    plan = plan_energy(throughput, power, assumptions, energy=energy)
    assert (power.watts, power.state, power.boundary) == (400.0, "measured", "accelerators")
    assert plan.results[0].value == pytest.approx(500 / 400)  # tokens of the series, not of the whole run
    assert plan.results[0].state == "measured"
    assert any("relative to nameplate" in note for note in plan.notes)


@pytest.mark.parametrize("watts", [None, 200.0])
def test_a_power_meter_measured_the_whole_system(make_run, assumptions, watts):
    run = make_run(watts=watts, metered_watts=250.0, gpus=("NVIDIA H200",))
    energy, throughput = energy_of([run]), from_runs([run], assumptions)
    power = power_of(throughput, energy)
    assert (power.watts, power.boundary, power.state) == (250.0, "wall", "measured")
    plan = plan_energy(throughput, power, assumptions, energy=energy)
    rows = plan.table("boundaries").rows
    assert [row["power_watts"] for row in rows] == pytest.approx([250, 250 * 1.54])
    assert rows[0]["output_tokens_per_joule"] == pytest.approx(500 / 250)
    [source] = [one.source for one in plan.inputs if one.name == "power"]
    assert source.startswith("power meter of the run: ") and not any("nameplate" in note for note in plan.notes)


@pytest.mark.parametrize("metered", [0.0, 399.0])
def test_a_power_meter_that_does_not_see_the_accelerators_is_left_out(make_run, assumptions, metered):
    run = make_run(watts=400.0, metered_watts=metered, gpus=("NVIDIA H200",))
    power = power_of(from_runs([run], assumptions), energy_of([run]))
    assert (power.watts, power.boundary) == (400.0, "accelerators")
    assert power.source.startswith("power that the accelerators report: ")
    assert ("the power meter is left out: it read 399 W" in power.source) is bool(metered)


def test_the_curve_of_a_power_limit_takes_the_accelerators_of_a_run_with_a_meter(make_run):
    run = make_run(watts=690.0, metered_watts=1000.0, gpus=("NVIDIA H200",))
    plan = commands.energy(Rate(run=run.path), Common(), PowerFlags(), power_limit=600)
    joules = plan.table("power_limits").rows[0]["energy_joules_per_output_token"]
    assert joules == pytest.approx(690 / 500, rel=1e-3)


def test_a_run_without_power_falls_back_to_the_data_sheet_and_says_so(make_run, assumptions):
    run = make_run(gpus=("NVIDIA H200",))
    energy, throughput = energy_of([run]), from_runs([run], assumptions)
    plan = plan_energy(throughput, power_of(throughput, energy), assumptions, energy=energy)
    assert plan.results[0].value == pytest.approx(run.result["output_tokens_per_second"] / 700)
    assert plan.results[0].state == "nameplate"
    assert any("recorded no power" in note for note in plan.notes)


def test_every_gpu_that_shares_the_model_counts(make_run, assumptions):
    alone = make_run(gpus=("NVIDIA H200",) * 4)
    shared = replace(alone, result={**alone.result, "target": {"tensor_parallel": 4}})
    for run, gpus in ((alone, 1), (shared, 4)):
        throughput = from_runs([run], assumptions)
        assert throughput.accelerators == gpus
        assert power_of(throughput, energy_of([run])).watts == gpus * 700


def test_boundaries_only_get_worse_outwards(rack, assumptions):
    rows = plan_energy(rack, power_of(rack), assumptions).table("boundaries").rows
    assert [row["power_watts"] for row in rows] == pytest.approx([100_800, 131_040, 131_040 * 1.54])
    efficiencies = [row["output_tokens_per_joule"] for row in rows]
    assert efficiencies == sorted(efficiencies, reverse=True)
    for row in rows:
        assert row["co2_grams_per_million_output_tokens"] == pytest.approx(
            row["energy_kwh_per_million_output_tokens"] * 390
        )


def test_power_at_the_wall_needs_no_factor_to_the_wall(rack, assumptions):
    plan = plan_energy(rack, power_given(120_000, "wall", "measured"), assumptions)
    assert [row["power_watts"] for row in plan.table("boundaries").rows] == pytest.approx([120_000, 184_800])
    assert "wall_to_nameplate_power" not in [one.name for one in plan.inputs]
    assert plan.results[0].state == "unverified"  # the power is measured, the rate is not verified


def test_energy_of_interactions(rack, assumptions):
    """At the highest rate of ``plan capacity``, which is its planning rate over the ceiling of 0.7."""
    profiles = load_profiles()
    rows = plan_energy(rack, power_of(rack), assumptions, profiles=profiles).table("interactions").rows
    capacity = plan_capacity(rack, profiles, assumptions).table("concurrency").rows
    for row, one in zip(rows, capacity, strict=True):
        highest = one["planning_interactions_per_second"] / 0.7
        assert row["site_energy_kwh_per_thousand_interactions"] == pytest.approx(201.8016 / highest / 3.6)
    assert rows[1]["site_energy_kwh_per_thousand_interactions"] == pytest.approx(0.104, abs=5e-4)


def test_pue_moves_the_site_only(rack, assumptions):
    liquid = load_assumptions(settings=["pue=1.1"])
    before, after = (plan_energy(rack, power_of(rack), one) for one in (assumptions, liquid))
    assert after.results[0] == before.results[0]
    assert after.result("Power of the site").value == pytest.approx(131.04 * 1.1)


def test_power_that_nobody_knows(assumptions):
    for arguments in ({"scope": "node"}, {"scope": "node", "accelerators": 8}):
        assert power_of(from_number(100, assumptions=assumptions, **arguments)) is None
    with pytest.raises(UsageError, match="TDP of 'TPU' unknown"):
        power_of(from_number(100, assumptions=assumptions, scope="node", accelerators=8, accelerator="TPU"))
    for watts, boundary, state, why in (
        (0, "wall", "measured", "--watts: expected .*, got 0"),
        (5, "plug", "measured", "--boundary: .* got 'plug'"),
        (5, "wall", "sure", "--watts-state: .* got 'sure'"),
    ):
        with pytest.raises(UsageError, match=why):
            power_given(watts, boundary, state)
