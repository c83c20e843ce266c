"""Results side by side: the published rows that put the documents' claims in context, and what is not like for like."""

import json

import pytest
from azure import azure_rows
from hypothesis import given
from hypothesis import strategies as st
from test_aggregation import run_folder

from megatoken.errors import UsageError
from megatoken.results.aggregation import aggregate
from megatoken.results.comparison import Entry, compare, ratio_interval, ratios, software_differences, student_t
from megatoken.results.entries import accelerator_entry, aggregate_entry, published_entry, run_entry, split_benchmark
from megatoken.results.files import plain
from megatoken.results.reference import (
    accelerator_facts,
    model_architectures,
    published_result,
    published_results,
    results_of,
)


def entry(submission: str, benchmark: str = "llama2-70b-99", scenario: str = "Offline") -> Entry:
    return published_entry(published_result(submission, benchmark, scenario))


def by_basis(of: Entry, to: Entry):
    return {ratio.basis: ratio for ratio in ratios(of, to)}


def azure_rack() -> Entry:
    return aggregate_entry(aggregate(azure_rows()), "ND GB300 v6", state="unverified", accelerator="NVIDIA GB300")


def fields(ratio) -> set[str]:
    return {difference.field for difference in ratio.differences}


def test_measured_power_of_eight_b200_and_what_the_nameplate_would_claim():
    row = entry("5.1-0061").to_row()
    assert round(row["measured_watts"]) == 10_401
    assert row["nameplate_watts"] == 8_000
    assert round(row["tokens_per_joule_measured"], 2) == 9.89
    assert round(row["tokens_per_joule_nameplate"], 2) == 12.86
    assert round(row["measured_over_nameplate"], 2) == 1.30


def test_server_costs_four_percent_at_equal_power():
    offline, server = entry("5.1-0061"), entry("5.1-0061", scenario="Server")
    assert round(server.measured_watts) == 10_442
    ratio = by_basis(server, offline)["total"]
    assert round(ratio.value, 2) == 0.96
    assert fields(ratio) == {"scenario"}


def test_server_over_offline_in_the_azure_submission():
    assert round(by_basis(entry("5.1-0008", scenario="Server"), entry("5.1-0008"))["total"].value, 3) == 0.884


def test_the_verified_gb300_rack_is_of_another_model():
    rack, server = (entry("5.1-0072", "llama3.1-405b", scenario) for scenario in ("Offline", "Server"))
    assert rack.output_tokens_per_second == 16_104.1
    assert round(rack.rate("per_gpu"), 1) == 223.7
    assert rack.to_row()["per_rack_state"] == "as measured"
    assert round(by_basis(server, rack)["total"].value, 2) == 0.76
    virtual_machine = entry("5.1-0008", "llama3.1-405b")
    assert virtual_machine.output_tokens_per_second == 847.233
    assert round(virtual_machine.rate("per_gpu"), 2) == 211.81
    per_gpu = by_basis(rack, virtual_machine)["per_gpu"]
    assert round(per_gpu.value, 3) == 1.056
    assert per_gpu.like_for_like


def test_replicas_of_h100_scale_linearly():
    sixteen, thirty_two = entry("5.1-0015"), entry("5.1-0016")
    assert (round(sixteen.rate("per_gpu")), round(thirty_two.rate("per_gpu"))) == (3_897, 3_902)
    assert by_basis(thirty_two, sixteen)["per_gpu"].like_for_like
    total = by_basis(thirty_two, sixteen)["total"]
    assert not total.like_for_like
    assert fields(total) == {"accelerators"}


def test_per_vm_per_gpu_and_per_rack_of_the_azure_submission():
    row = entry("5.1-0008").to_row()
    assert row["per_node_tokens_per_second"] == 52_061.6
    assert row["per_gpu_tokens_per_second"] == 13_015.4
    assert round(row["per_rack_tokens_per_second"]) == 937_109
    assert row["per_rack_state"] == "projection from 4 accelerators"


def test_open_rows_are_not_compared_with_closed_ones_unmarked():
    result = accelerator_entry("MI355X", "llama2-70b-99", "Offline")
    assert result.division == "open"
    per_gpu = by_basis(result, entry("5.1-0061"))["per_gpu"]
    assert {"division", "precision"} <= fields(per_gpu)


def test_72_against_8_gpus_is_10_8_in_total_and_1_2_per_gpu():
    for submission, total, per_gpu in (("5.1-0028", 10.8, 1.20), ("5.1-0061", 10.7, 1.19)):
        found = by_basis(azure_rack(), entry(submission))
        assert round(found["total"].value, 1) == total
        assert round(found["per_gpu"].value, 2) == per_gpu
        assert {"state", "division", "accelerators"} <= fields(found["total"])


def test_the_published_rack_against_the_verified_projection():
    found = by_basis(azure_rack(), entry("5.1-0008"))
    assert round(found["per_rack"].value, 4) == 1.1748
    assert "rack" in fields(found["per_rack"])


def test_the_fastest_row_of_an_accelerator():
    best = accelerator_entry("GB200", "llama2-70b-99", "offline")
    assert best.name == "5.1-0008:llama2-70b-99:Offline"
    assert "fastest per accelerator of 3 closed rows" in best.note
    assert {row.accelerator for row in results_of("B200", "llama2-70b-99", "Offline")} == {"NVIDIA B200-SXM-180GB"}


def test_no_data_is_no_sign_of_being_worse():
    absent = accelerator_entry("GB300", "llama2-70b-99", "Offline")
    assert absent.state == "no data"
    document = compare([entry("5.1-0008"), absent]).to_document()
    assert document["ratios"] == []
    assert any("no sign of being worse" in note for note in document["notes"])


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: accelerator_entry("TPU9", "llama2-70b-99", "Offline"), "neither a folder"),
        (lambda: published_result("5.1-9999", "llama2-70b-99", "Offline"), "says nothing about"),
        (lambda: published_result("5.1-0072", "llama2-70b-99", "Offline"), "it has llama3.1-405b:Offline"),
        (lambda: compare([entry("5.1-0008")]), "two results or more"),
        (lambda: compare([entry("5.1-0008"), entry("5.1-0008")]), "given twice"),
    ],
)
def test_what_cannot_be_compared(call, words):
    with pytest.raises(UsageError, match=words):
        call()


def test_the_table_is_whole():
    rows = published_results()
    assert len(rows) == 373
    assert len({row.name + row.used_model for row in rows}) == 373
    assert all(row.output_tokens_per_second > 0 for row in rows)
    assert sum(row.measured_watts is not None for row in rows) == 8
    assert model_architectures()["llama3.1-405b"] == "dense"
    assert accelerator_facts("NVIDIA GB300").tdp_watts == 1400
    assert accelerator_facts("NVIDIA H200-NVL-141GB") is None


def test_a_table_line_is_where_it_says():
    row = published_result("5.1-0008", "llama2-70b-99", "Offline")
    import megatoken

    path = megatoken.__path__[0] + "/data/mlperf_v5.1_llm_results.csv"
    with open(path) as file:  # noqa: PTH123
        assert file.readlines()[row.line - 1].startswith("5.1-0008,Azure,closed,available,ND_GB200_v6")


def test_split_benchmark():
    assert split_benchmark("llama2-70b-99.9") == ("llama2-70b", "99.9")
    assert split_benchmark("llama3.1-405b") == ("llama3.1-405b", None)


def test_students_t():
    table = {1: 12.7062, 2: 4.3027, 5: 2.5706, 30: 2.0423}
    assert {freedom: round(student_t(0.975, freedom), 4) for freedom in table} == table


def test_the_interval_of_a_ratio():
    low, high = ratio_interval([10.0, 11.0, 9.0], [5.0, 5.5, 4.5])
    assert low == pytest.approx(1.595, abs=0.01)
    assert low * high == pytest.approx(4)
    assert ratio_interval([10.0], [5.0, 5.1]) is None
    assert ratio_interval([10.0, 10.0], [5.0, 5.0]) == (2, 2)


def test_the_interval_covers_as_often_as_it_says():
    import numpy as np

    random = np.random.default_rng(7)
    hits = 0
    for _ in range(400):
        of, to = random.normal(110, 3, 4), random.normal(100, 6, 5)
        low, high = ratio_interval(of.tolist(), to.tolist())
        hits += low <= 1.1 <= high
    assert 0.92 <= hits / 400 <= 0.98


def test_two_sets_of_repeats_with_their_interval_and_software(tmp_path):
    slow = [
        run_folder(tmp_path, f"a{i}", "host", "2026-11-20T09:00:00+00:00", tokens) for i, tokens in enumerate((10, 11))
    ]
    fast = [
        run_folder(tmp_path, f"b{i}", "host", "2026-11-20T09:00:00+00:00", tokens) for i, tokens in enumerate((20, 22))
    ]
    for run in fast:
        run.environment["packages"] = {"torch": "2.14"}
    for run in slow:
        run.environment["packages"] = {"torch": "2.13"}
    comparison = compare([run_entry(slow, "before"), run_entry(fast, "after")])
    ratio = next(ratio for ratio in comparison.ratios if ratio.basis == "total")
    assert ratio.value == pytest.approx(2)
    assert ratio.interval[0] < 2 < ratio.interval[1]
    assert ratio.like_for_like
    (difference,) = comparison.software_differences
    assert (difference.key, difference.of_value, difference.to_value) == ("packages.torch", "2.14", "2.13")
    json.dumps(plain(comparison.to_document()), allow_nan=False)


def test_runs_that_are_no_repeats(tmp_path):
    one, two = (run_folder(tmp_path, name, "host", "2026-11-20T09:00:00+00:00") for name in ("a", "b"))
    two.result["precision"] = "fp8"
    with pytest.raises(UsageError, match="no repeat of a: precision is fp8, not bf16"):
        run_entry([one, two], "folder")
    with pytest.raises(UsageError, match="no run folder"):
        run_entry([], "folder")


def test_software_of_published_rows():
    found = software_differences(entry("5.1-0061"), entry("5.1-0008"))
    assert {(one.key, one.of_value, one.to_value) for one in found} == {
        ("TensorRT", "10.8", "10.11"),
        ("CUDA", "12.8", "12.9"),
    }


@given(st.lists(st.floats(0.5, 1e6), min_size=2, max_size=8), st.lists(st.floats(0.5, 1e6), min_size=2, max_size=8))
def test_the_interval_turns_around_with_its_ratio(of, to):
    (low, high), (back_low, back_high) = ratio_interval(of, to), ratio_interval(to, of)
    assert low <= sum(of) / len(of) / (sum(to) / len(to)) * (1 + 1e-9)
    if high < 1e12:
        assert low * back_high == pytest.approx(1)
        assert high * back_low == pytest.approx(1)
