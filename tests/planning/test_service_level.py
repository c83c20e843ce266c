"""Runs against a service level: who was served in time, and whether the rate may be called bound by it."""

from dataclasses import replace

import pytest

from megatoken.errors import UsageError
from megatoken.planning.assumptions import load_assumptions
from megatoken.planning.capacity import plan_capacity
from megatoken.planning.cost import System, accelerator_hour
from megatoken.planning.energy import Power
from megatoken.planning.service_level import ServiceLevel, judge_run
from megatoken.planning.throughput import from_runs
from megatoken.planning.workloads import load_profiles

LEVEL = ServiceLevel(ttft_seconds=2.0, tpot_seconds=0.2)


def test_a_run_that_keeps_the_level_bounds_its_own_rate(make_run):
    run = make_run()
    verdict = judge_run(run, LEVEL)
    assert verdict.kept is True
    assert verdict.bound_output_tokens_per_second == pytest.approx(run.result["output_tokens_per_second"])
    assert verdict.good_share == 1.0
    assert verdict.ttft_p99_seconds == pytest.approx(0.5) and verdict.tpot_p99_seconds == pytest.approx(0.05)


def test_ten_of_a_thousand_may_be_late_eleven_may_not(make_run):
    assert judge_run(make_run(slow=10, name="ten"), LEVEL).kept is True
    verdict = judge_run(make_run(slow=11, name="eleven"), LEVEL)
    assert verdict.kept is False and verdict.bound_output_tokens_per_second is None
    assert verdict.good_share == pytest.approx(0.989)
    assert "98.90 %" in verdict.why


def test_failures_count_as_late(make_run):
    verdict = judge_run(make_run(failed=20), LEVEL)
    assert verdict.kept is False and verdict.good_share == pytest.approx(0.98)


def test_few_requests_say_nothing_about_99_percent(make_run):
    verdict = judge_run(make_run(samples=661), LEVEL)
    assert verdict.kept is None and "662" in verdict.why
    assert judge_run(make_run(samples=662, name="enough"), LEVEL).kept is True


def test_offline_has_no_time_to_first_token(make_run):
    verdict = judge_run(make_run(scenario="offline"), LEVEL)
    assert verdict.kept is None and verdict.ttft_p99_seconds is None and verdict.good_requests_per_second is None
    assert "Server" in verdict.why
    assert judge_run(make_run(scenario="offline", name="slow"), ServiceLevel(2.0, 0.049)).kept is False


@pytest.mark.parametrize("scenario", ["server", "offline"])
def test_answers_in_one_piece_do_not_show_whether_the_level_was_kept(make_run, scenario):
    verdict = judge_run(make_run(token_seconds=1e-9, scenario=scenario), LEVEL)
    assert verdict.kept is None and "came in one piece" in verdict.why
    assert (verdict.good_share, verdict.bound_output_tokens_per_second, verdict.tpot_p99_seconds) == (None, None, None)
    late = judge_run(make_run(token_seconds=1e-9, scenario=scenario, slow=11, name="late"), LEVEL)
    assert late.kept is (False if scenario == "server" else None) and "came in one piece" in late.why


def test_plan_of_a_run_that_kept_the_level(make_run, assumptions):
    run = make_run()
    plan = plan_capacity(from_runs([run], assumptions), load_profiles(), assumptions)
    rate = run.result["output_tokens_per_second"]
    assert plan.result("Latency-bound rate").value == pytest.approx(rate)
    assert plan.result("Latency-bound rate").state == "measured"
    assert plan.result("Rate within the service level").value == pytest.approx(rate)
    assert plan.result("Planning rate").value == pytest.approx(rate * 0.7)
    inputs = {one.name: one for one in plan.inputs}
    assert inputs["ttft_mean_seconds"].value == pytest.approx(0.5)
    assert inputs["tpot_mean_seconds"].state == "measured"
    assert "run: random weights" in " ".join(plan.notes)


@pytest.mark.parametrize("token_seconds", [1e-9, 0.05])
def test_a_plan_says_that_the_time_of_answers_in_one_piece_counts_twice(make_run, assumptions, token_seconds):
    plan = plan_capacity(from_runs([make_run(token_seconds=token_seconds)], assumptions), load_profiles(), assumptions)
    assert any("requests in flight are too high" in note for note in plan.notes) is (token_seconds < 1e-6)


def test_plan_of_a_run_that_broke_it_uses_its_goodput(make_run, assumptions):
    run = make_run(slow=100)
    plan = plan_capacity(from_runs([run], assumptions), load_profiles(), assumptions)
    assert plan.result("Rate within the service level").value is None
    assert plan.result("Latency-bound rate").value == pytest.approx(run.result["output_tokens_per_second"] * 0.9)
    assert plan.result("Goodput").value == pytest.approx(900 / run.result["rated_seconds"])
    assert plan.result("Latency-bound rate").state == "estimate"
    share = next(one for one in plan.inputs if one.name == "goodput_share")
    assert "not a measured bound" in share.source
    assert any("must" in note for note in plan.notes)


def test_plan_of_an_offline_run_takes_the_published_share(make_run, assumptions):
    run = make_run(scenario="offline")
    plan = plan_capacity(from_runs([run], assumptions), load_profiles(), assumptions)
    assert plan.result("Latency-bound rate").value == pytest.approx(run.result["output_tokens_per_second"] * 0.884)
    assert plan.result("Latency-bound rate").state == "estimate"
    inputs = {one.name: one for one in plan.inputs}
    assert inputs["ttft_limit_seconds"].state == "assumed" and inputs["tpot_mean_seconds"].state == "measured"


def test_a_level_that_nobody_kept_leaves_nothing_to_plan(make_run):
    strict = load_assumptions(settings=["ttft_limit_seconds=0.1"])
    throughput = from_runs([make_run()], strict)
    with pytest.raises(UsageError, match="no request kept the service level"):
        plan_capacity(throughput, load_profiles(), strict)
    # An hour of the machine costs the same: the page of such a run shows it.
    system = System(replace(throughput, accelerators=1), Power(700.0, "accelerators", "measured", "here"))
    assert accelerator_hour(system, strict)


def test_what_a_run_says_of_itself(make_run, assumptions):
    run = make_run(gpus=("NVIDIA H200",), verdict="INVALID")
    throughput = from_runs([run], assumptions)
    assert (throughput.accelerators, throughput.accelerator) == (1, "NVIDIA H200")
    assert throughput.input_tokens_per_output_token == pytest.approx(200 / 101)
    assert throughput.output_tokens_per_request == pytest.approx(101)
    assert any("INVALID" in note for note in throughput.notes)
    assert from_runs([make_run(name="cpu")], assumptions).accelerators is None


def test_a_run_without_a_completed_sample(make_run, assumptions):
    with pytest.raises(UsageError, match="no sample was completed"):
        from_runs([make_run(samples=5, failed=5)], assumptions)


@pytest.mark.parametrize("verdict", ["MEASURED", "INVALID"])
def test_too_few_requests_are_not_taken_for_a_level_that_was_kept(make_run, assumptions, verdict):
    run = make_run(samples=300, verdict=verdict)
    plan = plan_capacity(from_runs([run], assumptions), load_profiles(), assumptions)
    bound = plan.result("Latency-bound rate")
    assert bound.value == pytest.approx(run.result["output_tokens_per_second"] * 0.884)
    assert bound.state == ("invalid run" if verdict == "INVALID" else "estimate")
    share = next(one for one in plan.inputs if one.name == "server_to_offline_share")
    assert "300 requests are too few" in share.source
    assert not any(one.name == "latencies_already_kept" for one in plan.inputs)
