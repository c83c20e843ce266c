"""Nodes to one result: the published figures recomputed, the three rates on clocks that are known, and refusals."""

import json
import math
from dataclasses import replace

import numpy as np
import pytest
from azure import azure_rows
from hypothesis import given
from hypothesis import strategies as st

from megatoken.analysis.aggregation import aggregate, spreads
from megatoken.analysis.nodes import NodeRow, progress, run_node_rows
from megatoken.errors import UsageError
from megatoken.files import plain
from run_folders import run_folder

SPREADS = {
    "(max - min) / min": 0.0904,
    "(max - min) / max": 0.0829,
    "(max - min) / mean": 0.0851,
    "(max - min) / median": 0.0838,
}


def node(name: str, start: float | None = 0.0, seconds: float = 100.0, rate: float = 10.0, **more) -> NodeRow:
    line = ((0.0, 0.0), (seconds, rate * seconds))
    return NodeRow(name, rate, seconds, started_seconds=start, progress=more.pop("progress", line), **more)


def test_the_published_rack_total_extremes_mean_and_true_median():
    result = aggregate(azure_rows())
    assert round(result.sum_of_rates_tokens_per_second, 1) == 1_100_948.3
    assert (result.max.node, result.max.output_tokens_per_second) == ("18", 62_803.9)
    assert (result.min.node, result.min.output_tokens_per_second) == ("16", 57_599.1)
    assert round(result.mean_tokens_per_second, 1) == 61_163.8
    assert round(result.median_tokens_per_second, 1) == 62_111.7
    assert round(result.output_tokens_per_second_per_accelerator, 1) == 15_290.9


def test_the_published_spread_is_no_definition_of_spread():
    result = aggregate(azure_rows())
    assert {spread.formula: round(spread.value, 4) for spread in result.spread} == SPREADS
    assert 0.089 not in {round(spread.value, 3) for spread in result.spread}
    assert round(result.coefficient_of_variation, 4) == 0.0305


def test_the_slow_group():
    stragglers = aggregate(azure_rows()).stragglers
    assert stragglers.nodes == ("4", "8", "13", "14", "16")
    assert stragglers.separate
    assert round(stragglers.gap_tokens_per_second, 1) == 1881.7
    assert aggregate(azure_rows(), straggler_threshold=0.06).stragglers.nodes == ("13", "14", "16")


def test_the_sum_is_a_makespan_rate_of_1_030_087_if_simultaneous():
    result = aggregate(azure_rows())
    assert result.makespan.conditional
    assert int(result.makespan.output_tokens_per_second) == 1_030_087
    assert round(result.makespan.output_tokens / 1e9, 3) == 5.154
    assert round(result.makespan.output_tokens_per_second / result.sum_of_rates_tokens_per_second, 3) == 0.936
    assert result.common_window.output_tokens_per_second is None
    assert "have no completion times" in result.common_window.reason
    assert result.overlap_share is None
    assert round(result.overlap_share_at_most, 3) == 0.897
    assert not result.evidence_of_simultaneity.shown
    assert result.sum_label == "sum of 18 node rates, not shown to be simultaneous"


def test_one_node_did_not_run_together_with_itself():
    assert aggregate([node("a")]).evidence_of_simultaneity.statement == "one node"


def test_a_lost_node_leaves_68_of_72_accelerators():
    losses = aggregate(azure_rows()).without_fault_domain
    assert len(losses) == 18
    assert {loss.accelerators_left for loss in losses} == {68}
    assert round(losses[0].accelerators_left_share, 3) == 0.944
    worst = min(losses, key=lambda loss: loss.sum_of_rates_tokens_per_second)
    assert worst.fault_domain == "18"
    assert round(worst.sum_of_rates_tokens_per_second, 1) == 1_038_144.4


def test_a_fault_domain_may_hold_several_nodes():
    rows = [replace(row, fault_domain=f"tray {index // 9}") for index, row in enumerate(azure_rows())]
    losses = aggregate(rows).without_fault_domain
    assert [loss.accelerators_left for loss in losses] == [36, 36]
    assert losses[1].nodes_lost[0] == "10"


def test_scaling_efficiency_against_one_node_alone():
    assert aggregate(azure_rows()).scaling_efficiency is None
    result = aggregate(azure_rows(), baseline_tokens_per_second=62_803.9)
    assert round(result.scaling_efficiency, 4) == 0.9739


def test_the_document_is_plain_json():
    document = aggregate(azure_rows(), title="rack", inputs=["here"]).to_document()
    again = json.loads(json.dumps(plain(document), allow_nan=False))
    assert again["kind"] == "aggregate"
    assert again["schema_version"] == 1
    assert [row["group"] for row in again["nodes"]].count("slow") == 5
    assert again["evidence_of_simultaneity"]["shown"] is False


def test_three_rates_of_two_nodes_that_overlap_by_half():
    result = aggregate([node("a", 0.0), node("b", 50.0)])
    assert result.sum_of_rates_tokens_per_second == 20
    assert result.makespan.output_tokens_per_second == pytest.approx(2000 / 150)
    assert result.common_window.output_tokens_per_second == pytest.approx(20)
    assert result.common_window.seconds == 50
    assert result.overlap_share == pytest.approx(1 / 3)
    assert "not simultaneous: all ran together for 33.3 %" in result.sum_label
    assert not result.makespan.conditional
    assert not any("add up" in note for note in result.notes)


def test_nodes_in_turn_have_no_common_window():
    result = aggregate([node("a", 0.0), node("b", 100.0)])
    assert result.common_window.output_tokens_per_second is None
    assert result.common_window.reason == "the nodes never all ran at once"
    assert result.overlap_share == 0
    assert result.sum_label == "sum of 2 rates of runs that took turns: no two ran at the same time"
    assert "their rates do not add up" in result.notes[0]


def test_the_common_window_counts_what_was_done_in_it():
    early = ((0.0, 0.0), (50.0, 900.0), (100.0, 1000.0))
    result = aggregate([node("a", 0.0, progress=early), node("b", 50.0)])
    assert result.common_window.output_tokens == pytest.approx(100 + 500)


def test_shown_to_be_simultaneous():
    result = aggregate([node("a", 0.0), node("b", 2.0)], observations=["one job started both"])
    assert result.evidence_of_simultaneity.shown
    assert result.evidence_of_simultaneity.observations[-1] == "one job started both"
    assert result.evidence_of_simultaneity.statement.startswith("by the clocks of the nodes, whose offsets are unknown")
    assert "1970-01-01T00:00:02.000Z" in result.evidence_of_simultaneity.observations[1]


def test_one_log_under_two_names_is_named():
    (note,) = [
        note for note in aggregate([node("a"), node("b"), node("c", rate=9.0)]).notes if "exactly the same" in note
    ]
    assert note.startswith("a, b have exactly the same")


@pytest.mark.parametrize(
    ("rows", "words"),
    [
        ([], "no node to aggregate"),
        ([node("a", rate=0.0)], "no output tokens"),
        ([node("a", seconds=math.inf)], "no output tokens"),
        ([node("a"), node("a", 200.0, source="second")], "2 runs of node a did not all run at the same time"),
        ([node("a", source="one"), node("a", source="one")], "node a is given twice .one."),
        ([node("a", None), node("a", None, source="second")], "are not shown to have run at the same time"),
        ([node("a", scenario="Offline"), node("b", scenario="Server")], "differ in scenario: Offline"),
    ],
)
def test_rows_that_are_no_one_result(rows, words):
    with pytest.raises(UsageError, match=words):
        aggregate(rows)


def test_thresholds_out_of_range():
    with pytest.raises(UsageError, match="threshold"):
        aggregate([node("a")], straggler_threshold=1.5)
    with pytest.raises(UsageError, match="baseline"):
        aggregate([node("a")], baseline_tokens_per_second=-1.0)


def test_two_replicas_on_one_machine_at_once_are_two_rows_of_one_fault_domain():
    result = aggregate([node("a", source="one"), node("a", 1.0, source="two")])
    assert [row["node"] for row in result.nodes] == ["a (one)", "a (two)"]
    assert [loss.sum_of_rates_tokens_per_second for loss in result.without_fault_domain] == [0]


@given(st.lists(st.floats(1.0, 1e6), min_size=1, max_size=30), st.randoms(use_true_random=False))
def test_the_sum_bounds_the_makespan_whatever_the_order(rates, random):
    rows = [node(str(index), float(index), 10.0 + rate / 1e5, rate) for index, rate in enumerate(rates)]
    shuffled = random.sample(rows, len(rows))
    result, other = aggregate(rows), aggregate(shuffled)
    assert replace_times(result.to_document()) == replace_times(other.to_document())
    assert result.makespan.output_tokens_per_second <= result.sum_of_rates_tokens_per_second * (1 + 1e-12)
    assert result.min.output_tokens_per_second <= result.median_tokens_per_second <= result.max.output_tokens_per_second
    assert all(spread.value >= 0 for spread in spreads(rates))
    assert len(result.stragglers.nodes) < max(2, len(rows))


def replace_times(document):
    return {key: value for key, value in document.items() if key != "created_at"}


def test_progress_is_exact_where_tokens_are_evenly_spaced():
    first, last = np.array([1.0, np.nan, 2.0]), np.array([5.0, 4.0, 2.0])
    points = progress(first, last, np.array([9.0, 3.0, 1.0]))
    times, tokens = (np.array(column) for column in zip(*points, strict=True))
    assert times[0] == 0.0 and times[-1] == 5.0
    at = dict(zip(times.round(6), tokens, strict=True))
    assert at[0.5] == 0
    assert at[3.0] == pytest.approx(1 + 4 + 1)
    assert at[4.5] == pytest.approx(1 + 7 + 1 + 3)
    assert at[5.0] == pytest.approx(13)
    assert (np.diff(tokens) >= 0).all()


def test_slow_nodes_are_a_group_only_if_the_gap_is_wider_than_either_side():
    def slow_group(*rates: float):
        return aggregate([node(str(at), rate=rate) for at, rate in enumerate(rates)]).stragglers

    apart = slow_group(100.0, 101.0, 102.0, 90.0)
    assert (apart.separate, apart.gap_tokens_per_second) == (True, pytest.approx(10))
    assert not slow_group(100.0, 103.0, 106.0, 95.0).separate  # a gap of 5, and 6 from first to last above it
    assert not slow_group(100.0, 100.0, 100.0, 100.0, 96.0, 90.0).separate  # a gap of 4, and 6 below it


def test_loadgen_and_run_folders_spell_a_scenario_differently():
    together = aggregate([node("a", scenario="Offline"), node("b", scenario="offline")])
    assert len(together.nodes) == 2


def test_nodes_on_different_data_sets_are_no_one_result(tmp_path):
    rows = [
        row
        for host in ("a", "b")
        for row in run_node_rows(
            run_folder(tmp_path, host, host, "2026-11-20T09:12:33+00:00", data_set="d.csv", data_set_sha256=host * 64)
        )
    ]
    with pytest.raises(UsageError, match=r"differ in data_set: d\.csv \(SHA-256 aaaaaaaaaaaa\)"):
        aggregate(rows)


def test_run_folders_of_two_hosts(tmp_path):
    one = run_folder(tmp_path, "one", "a", "2026-11-20T09:12:33.250000+00:00")
    two = run_folder(tmp_path, "two", "b", "2026-11-20T09:12:34.250000+00:00", tokens=21)
    result = aggregate([*run_node_rows(one), *run_node_rows(two)])
    assert result.sum_of_rates_tokens_per_second == pytest.approx(11 + 21)
    assert result.output_tokens == 320
    assert result.makespan.output_tokens_per_second == pytest.approx(320 / 11)
    assert result.overlap_share == pytest.approx(9 / 11)
    # a from 1 s of its time, when the first tokens are out, to 10 s; b from 0 s to 9 s
    expected = 10 * 10 + 10 * (1 + 20 * 8 / 9)
    assert result.common_window.output_tokens == pytest.approx(expected, rel=0.01)
    assert result.accelerators is None
    known = {"scenario": "offline", "model": "tiny", "precision": "bf16"}
    assert result.workload == {**known, "mode": None, "data_set": None}
    assert result.notes == ()


def test_nodes_of_one_folder_share_its_clock(tmp_path):
    run = run_folder(tmp_path, "one", "a", "2026-11-20T09:12:33+00:00")
    result = {**run.result, "nodes": [{**run.result["nodes"][0], "node": name} for name in "ab"]}

    def statement(rack: dict[str, object], *others: NodeRow) -> str:
        rows = run_node_rows(replace(run, result={**result, "rack": rack}))
        return aggregate([*rows, *others]).evidence_of_simultaneity.statement

    assert statement({"clock_offsets": []}).startswith("by the clock of the one driver, all 2")
    offsets = [{"node": "a", "uncertainty_seconds": 2e-4}, {"node": "b", "uncertainty_seconds": 5e-4}]
    each = statement({"clock_offsets": offsets, "start_spread_seconds": 0.1})
    assert each.startswith("by the driver's clock (offsets of the nodes known within 0.5 ms), all 2")
    [other] = run_node_rows(run_folder(tmp_path, "two", "c", "2026-11-20T09:12:33+00:00"))
    assert statement({}, other).startswith("by the clocks of the nodes, whose offsets are unknown, all 3")


def test_an_unfinished_node_is_noted(tmp_path):
    run = run_folder(tmp_path, "one", "a", "2026-11-20T09:12:33+00:00")
    rows = run_node_rows(run)
    assert "1 INTERRUPTED" in aggregate([replace(rows[0], verdict="INTERRUPTED")]).notes[0]
