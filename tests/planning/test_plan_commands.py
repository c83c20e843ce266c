"""What is typed after ``megatoken plan``: run folders and numbers, and what they may not be together."""

import json

import pytest

from megatoken.errors import UsageError
from megatoken.planning.commands import capacity, cost, energy, fleet
from megatoken.planning.flags import Common, FleetFlags, PowerFlags, Rate

RACK = Rate(tokens_per_second=1_100_948.3, per="rack", accelerators=72, accelerator="GB300")
ONE = Common(profile=["simple_qa"])


def test_a_number_through_all_four():
    documents = [
        capacity(RACK, Common()).to_document(),
        fleet(RACK, ONE, FleetFlags(demand=5000, accelerators_per_node=4, nodes_per_rack=18)).to_document(),
        energy(RACK, Common(), PowerFlags()).to_document(),
        cost(RACK, Common(), PowerFlags()).to_document(),
    ]
    assert [one["kind"] for one in documents] == ["plan_capacity", "plan_fleet", "plan_energy", "plan_cost"]


def test_a_run_through_all_four(make_run):
    rate = Rate(run=make_run(watts=300.0, gpus=("NVIDIA H200",)).path)
    assert capacity(rate, Common()).result("Peak rate").state == "measured"
    assert fleet(rate, ONE, FleetFlags(demand=100, unit="users")).results[0].value > 1
    assert energy(rate, Common(), PowerFlags()).results[0].value == pytest.approx(500 / 300)
    power = {one.name: one for one in cost(rate, Common(), PowerFlags()).inputs}["power"]
    assert (power.value, power.state) == (300.0, "measured")


def test_a_rate_of_simulated_gpus_is_an_estimate(make_run):
    plan = capacity(Rate(run=make_run(simulated_gpu="GB300").path), Common())
    assert plan.title.endswith("(estimate)")
    states = {one.name: one.state for one in (*plan.inputs, *plan.results)}
    assert "The number of accelerators is unknown" in "".join(plan.notes)  # a folder without the nodes
    of_the_run = ("rate", "service_level_kept", "tpot_mean_seconds", "Peak rate", "Goodput")
    assert [states[name] for name in of_the_run] == ["estimate"] * len(of_the_run)


def test_the_gpus_of_a_simulated_rack_are_counted(make_run):
    run = make_run(simulated_gpu="GB300")
    machine = {"gpus": [], "cpu": {"model": "m"}, "memory": {}}
    nodes = [{"node": f"node-{number}", "replicas": 2, "gpus": 0, "machine": machine} for number in (1, 2)]
    result = {**run.result, "rack_nodes": nodes, "target": {"tensor_parallel": 2}}
    (run.path / "result.json").write_text(json.dumps(result))
    plan = capacity(Rate(run=run.path), Common())
    assert "8 accelerators" in plan.title
    assert not any("accelerator" in note for note in plan.notes)
    with pytest.raises(UsageError, match="expected 4 accelerators, the run used 8"):
        capacity(Rate(run=run.path, accelerators=4), Common())
    watts = {one.name: one.value for one in cost(Rate(run=run.path), Common(), PowerFlags()).inputs}
    assert watts


def test_a_run_on_a_cpu(make_run):
    run = make_run().path
    assert capacity(Rate(run=run), Common()).results[0].value > 0
    with pytest.raises(UsageError, match="pass --watts"):
        energy(Rate(run=run), Common(), PowerFlags())
    assert energy(Rate(run=run), Common(), PowerFlags(watts=65)).results[0].state == "given"
    assert cost(Rate(run=run, accelerators=1), Common(), PowerFlags(watts=65)).results[0].value > 0
    assert cost(Rate(run=run, accelerators=1), Common(), PowerFlags(), rent=0.5).results[0].value > 0


def test_the_twelve_nodes():
    new = Rate(tokens_per_second=52_061.6, per="node", accelerators=4, state="verified")
    plan = fleet(new, Common(), FleetFlags(replace_nodes=12, replace_rate=48_088))
    assert plan.results[0].value == 12


def test_two_classes():
    flags = FleetFlags(
        demand=1e6,
        unit="output-tokens",
        curve="office_day",
        accelerators_per_node=4,
        burst_tokens_per_second=31_000,
        burst_accelerators_per_node=8,
    )
    assert fleet(RACK, Common(), flags).table("policies").rows


def test_two_runs_of_one_system(make_run):
    first = make_run(name="first", input_tokens=2000)
    second = make_run(name="second", output_tokens=201)
    plan = capacity(Rate(run=first.path), Common(second_run=second.path))
    assert plan.result("System time per input token").state == "measured"
    cost(Rate(run=first.path, accelerators=1), Common(second_run=second.path), PowerFlags(watts=65))


@pytest.mark.parametrize(
    ("rate", "why"),
    [
        (Rate(), "no rate to plan with"),
        (Rate(tokens_per_second=5), "the scope of the rate is unknown"),
    ],
)
def test_nothing_to_plan_with(rate, why):
    with pytest.raises(UsageError, match=why):
        capacity(rate, Common())


def test_what_may_not_stand_together(make_run, tmp_path):
    run = make_run(gpus=("NVIDIA H200",)).path
    for rate, why in (
        (Rate(run=run, tokens_per_second=5), "--tokens-per-second comes from the run"),
        (Rate(run=run, input_per_output=5), "--input-per-output comes from the run"),
        (Rate(run=run, accelerators=8), "expected 8 accelerators, the run used 1"),
        (Rate(run=tmp_path / "absent"), "no such folder"),
    ):
        with pytest.raises(UsageError, match=why):
            capacity(rate, Common())
    with pytest.raises(UsageError, match="needs a first run, not a number"):
        capacity(RACK, Common(second_run=run))
    with pytest.raises(UsageError, match="choose with --profile: simple_qa, rag"):
        fleet(RACK, Common(), FleetFlags(demand=5, accelerators_per_node=4))
    with pytest.raises(UsageError, match="--replace-nodes, --replace-rate"):
        fleet(RACK, Common(), FleetFlags(replace_nodes=12))
