"""Plans of repeats: their mean with its interval, all their energy, the service level of the worst."""

import pytest

from megatoken.analysis.repeats import interval, read_repeats_in
from megatoken.errors import UsageError
from megatoken.planning import commands, flags
from megatoken.planning.capacity import plan_capacity
from megatoken.planning.energy import energy_of, plan_energy, power_of
from megatoken.planning.throughput import from_runs
from megatoken.planning.workloads import load_profiles
from megatoken.text import precise

GPU = {"gpus": ("NVIDIA H200",), "watts": 400.0}


@pytest.fixture
def repeats(make_run, tmp_path):
    """Three equal runs but for the second, in which eleven of a thousand were late, and the third, which was longer."""
    make_run(name="001", **GPU)
    make_run(name="002", slow=11, **GPU)
    make_run(name="003", output_tokens=111, **GPU)
    return read_repeats_in(tmp_path)


def test_the_rate_is_the_mean_and_its_interval_is_told(repeats, assumptions):
    throughput = from_runs(repeats, assumptions)
    rates = interval([run.result["output_tokens_per_second"] for run in repeats])
    rate = throughput.inputs[0]
    assert (rate.value, rate.low, rate.high) == (rates["geometric_mean"], rates["low"], rates["high"])
    assert throughput.output_tokens_per_second == rates["geometric_mean"]
    assert throughput.output_tokens_per_request == pytest.approx((101 + 101 + 111) / 3)
    assert "mean of 3 repeats" in throughput.source and "(MEASURED)" in throughput.source
    (note,) = [note for note in throughput.notes if "95 % confidence" in note]
    assert f"{precise(rates['low'])} to {precise(rates['high'])} output tokens/s" in note
    assert sum("random weights" in note for note in throughput.notes) == 1
    plan = plan_capacity(throughput, load_profiles(), assumptions)
    assert plan.result("Peak rate").value == rates["geometric_mean"]


def test_the_service_level_is_that_of_the_run_that_kept_it_least(repeats, assumptions):
    assert from_runs(repeats[:1], assumptions).service.kept is True
    service = from_runs(repeats, assumptions).service
    assert service.kept is False and service.good_share == pytest.approx(0.989)


def test_energy_is_that_of_all_over_the_tokens_of_all(repeats, assumptions):
    energy = energy_of(repeats)
    assert (energy.joules, energy.output_tokens, energy.seconds) == (3 * 4000, 3 * 5000, 30)
    throughput = from_runs(repeats, assumptions)
    plan = plan_energy(throughput, power_of(throughput, energy), assumptions, energy=energy)
    assert plan.results[0].value == pytest.approx(5000 / 4000)


def test_a_folder_of_repeats_is_planned_with_by_every_command(repeats, tmp_path):
    rate = flags.Rate(run=tmp_path)
    mean = interval([run.result["output_tokens_per_second"] for run in repeats])["geometric_mean"]
    assert commands.capacity(rate, flags.Common()).result("Peak rate").value == mean
    assert commands.energy(rate, flags.Common(), flags.PowerFlags()).inputs[0].value == mean
    assert commands.cost(rate, flags.Common(), flags.PowerFlags(watts=900.0)).inputs[0].value == mean
    demand = flags.FleetFlags(demand=5.0)
    assert commands.fleet(rate, flags.Common(profile=["rag"]), demand).inputs[1].value == mean


def test_runs_that_are_no_repeats_are_not_averaged(make_run, tmp_path):
    make_run(name="001")
    make_run(name="002", scenario="offline")
    match = "002 is not a repeat of 001: scenario is offline, not server; give one of them"
    with pytest.raises(UsageError, match=match):
        commands.capacity(flags.Rate(run=tmp_path), flags.Common())
    (tmp_path / "empty").mkdir()
    with pytest.raises(UsageError, match="no run folder and none below it"):
        commands.capacity(flags.Rate(run=tmp_path / "empty"), flags.Common())


def test_a_server_run_says_that_its_rate_was_offered(make_run, assumptions):
    assert any("with --find-rate" in note for note in from_runs([make_run()], assumptions).notes)
    offline = from_runs([make_run(name="offline", scenario="offline")], assumptions)
    assert not any("--find-rate" in note for note in offline.notes)
