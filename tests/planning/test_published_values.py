"""Every figure of the source documents that a plan recomputes, with the published value beside it."""

import csv
from importlib.resources import files

import pytest

from megatoken.planning.capacity import plan_capacity
from megatoken.planning.energy import efficiency_table, plan_energy, power_given, power_of, uplift_table
from megatoken.planning.fleet_plan import Supply, load_demand, plan_fleet, plan_replacement
from megatoken.planning.pricing import derating
from megatoken.planning.throughput import from_number
from megatoken.planning.workloads import load_profiles


def rows(table):
    return {row[next(iter(row))]: row for row in table.rows}


def published(identifier, scenario, benchmark="llama2-70b-99"):
    text = (files("megatoken") / "data" / "mlperf_v5.1_llm_results.csv").read_text()
    table = csv.DictReader(line for line in text.splitlines() if not line.startswith("#"))
    [row] = [
        row
        for row in table
        if (row["id"], row["scenario"], row["benchmark"], row["division"])
        == (identifier, scenario, benchmark, "closed")
    ]
    return row


@pytest.mark.parametrize(
    ("profile", "tokens", "rounded"),
    [("simple_qa", 650, 1690), ("rag", 2500, 440), ("summarisation", 2500, 440), ("agent", 10_000, 110)],
)
def test_capacity_table_of_the_gb300_paper(rack, assumptions, profile, tokens, rounded):
    plan = plan_capacity(rack, load_profiles(), assumptions)
    row = rows(plan.table("interactions"))[profile]
    assert row["counted_tokens"] == tokens
    assert row["document_rounded_interactions_per_second"] == rounded
    assert row["document_interactions_per_second"] == pytest.approx(1_100_948.3 / tokens)


def test_a_rate_is_not_a_number_of_users(rack, assumptions):
    """1,690 interactions a second are no 1,690 users, and requests in flight fit in KV memory."""
    plan = plan_capacity(rack, load_profiles(names=["simple_qa"]), assumptions)
    [row] = plan.table("concurrency").rows
    assert row["in_flight_requests"] < row["memory_holds_requests"]
    assert row["users"] == pytest.approx(row["planning_interactions_per_second"] * 95)


@pytest.mark.parametrize(
    ("name", "efficiency", "as_printed"),
    [
        ("published_h100", 4.375, 4.39),
        ("published_gb200", 10.01, 10.01),
        ("published_gb300", 10.92, 10.92),
        ("verified_h100", 5.57, None),
        ("verified_gb200", 10.85, None),
        ("verified_b200_measured", 9.89, None),
        ("verified_b200_nameplate", 12.86, None),
    ],
)
def test_efficiency_table(name, efficiency, as_printed):
    row = rows(efficiency_table())[name]
    assert row["output_tokens_per_joule"] == pytest.approx(efficiency, abs=0.006)
    assert row["published_output_tokens_per_joule"] == as_printed
    assert row["power_state"] == ("measured" if name == "verified_b200_measured" else "nameplate")


@pytest.mark.parametrize(
    ("of", "over", "ratio"),
    [
        ("72x GB300, published", "32x H100, MLPerf", 1.96),
        ("72x GB300, published", "72x GB200, MLPerf", 1.007),
        ("72x GB300, published", "72x GB200, published", 1.090),
        ("72x GB300, published", "32x H100, published", 2.50),
        ("8x B200 at GPUs x TDP", "8x B200 at the wall", 1.30),
        ("8x B200 at the wall, Server", "8x B200 at the wall, MLPerf", 0.96),
    ],
)
def test_uplifts(of, over, ratio):
    [row] = [row for row in uplift_table().rows if row["of"].startswith(of) and row["over"].startswith(over)]
    assert row["ratio"] == pytest.approx(ratio, abs=0.005)


def test_verified_rows_are_those_of_the_mlperf_table():
    table = rows(efficiency_table())
    assert table["verified_h100"]["output_tokens_per_second"] == float(published("5.1-0016", "Offline")["result"])
    assert table["verified_gb200"]["output_tokens_per_second"] == pytest.approx(
        18 * float(published("5.1-0008", "Offline")["result"])
    )
    for name, scenario in (("verified_b200_measured", "Offline"), ("verified_b200_server", "Server")):
        row = published("5.1-0061", scenario)
        assert table[name]["output_tokens_per_second"] == float(row["result"])
        assert table[name]["power_watts"] == pytest.approx(float(row["power_result"]))


def test_the_share_that_latencies_leave_is_that_of_the_mlperf_table(assumptions):
    entry = assumptions.entries["server_to_offline_share"]
    for value, identifier, benchmark in (
        (entry.value, "5.1-0008", "llama2-70b-99"),
        (entry.high, "5.1-0016", "llama2-70b-99"),
    ):
        server, offline = (float(published(identifier, s, benchmark)["result"]) for s in ("Server", "Offline"))
        assert value == pytest.approx(server / offline, abs=0.002)


def test_energy_of_the_rack_is_labelled_nameplate(rack, assumptions):
    plan = plan_energy(rack, power_of(rack), assumptions)
    assert plan.results[0].value == pytest.approx(10.92, abs=0.005)
    assert plan.results[0].state == "nameplate"
    assert any("nameplate" in note for note in plan.notes)


def test_nameplate_claims_1_30_times_what_was_measured(assumptions):
    lenovo = from_number(
        102_909, scope="node", accelerators=8, accelerator="NVIDIA B200-SXM-180GB", state="verified",
        assumptions=assumptions,
    )  # fmt: skip
    nameplate = plan_energy(lenovo, power_of(lenovo), assumptions).results[0]
    measured = plan_energy(lenovo, power_given(10_401, "wall", "measured"), assumptions).results[0]
    assert measured.value == pytest.approx(9.89, abs=0.005) and measured.state == "measured"
    assert nameplate.value / measured.value == pytest.approx(1.30, abs=0.001)


def test_twelve_nodes_stay_twelve(assumptions):
    new = from_number(52_061.6, scope="node", accelerators=4, state="verified", assumptions=assumptions)
    plan = plan_replacement(12, 865_584 / 18, Supply(new), state="unverified")
    assert plan.results[0].value == 12
    assert plan.result("Nodes saved").value == 0
    assert plan.result("Before rounding up").value == pytest.approx(11.08, abs=0.005)
    assert plan.result("New rate over old").value == pytest.approx(1.0826, abs=0.0001)
    assert plan.result("Ratio at which 11 nodes suffice").value == pytest.approx(12 / 11)
    assert plan.results[0].state == "unverified"


def test_losing_one_of_18_nodes_leaves_68_of_72(rack, assumptions):
    per_node = derating(rack, assumptions).planning / 18
    demand = load_demand("output-tokens", per_node * 17)
    plan = plan_fleet(Supply(rack, accelerators_per_node=4, nodes_per_rack=18), demand, assumptions)
    assert plan.results[0].value == 18
    assert plan.result("Racks").value == 1
    assert plan.result("Headroom at the peak").value == pytest.approx(0.3)
    assert plan.result("Accelerators").value == 72
    assert plan.result("Capacity left after losing a node").value == pytest.approx(68 / 72)
