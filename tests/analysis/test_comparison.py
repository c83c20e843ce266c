"""Results side by side: the published rows that put the documents' claims in context, and what is not like for like."""

import json
import statistics
from collections import Counter
from dataclasses import replace
from datetime import UTC, datetime, timedelta

import pytest
from azure import azure_rows
from hypothesis import given
from hypothesis import strategies as st

from megatoken.analysis.aggregation import aggregate
from megatoken.analysis.comparison import (
    Entry,
    compare,
    differences,
    ratio_interval,
    ratios,
    software_differences,
    student_t,
)
from megatoken.analysis.entries import accelerator_entry, aggregate_entry, published_entry, run_entry
from megatoken.analysis.machine import Occupation
from megatoken.analysis.published import (
    accelerator_facts,
    model_architectures,
    published_result,
    published_results,
    results_of,
    split_benchmark,
)
from megatoken.analysis.repeats import summarise_repeats
from megatoken.analysis.standing import answer_length, verified_standing
from megatoken.errors import UsageError
from megatoken.files import plain
from megatoken.planning.assumptions import load_assumptions
from megatoken.planning.throughput import from_runs
from megatoken.runs.reasons import reason
from megatoken.runs.run import Verdict, read_run
from run_folders import run_folder


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
    assert rack.to_row()["per_rack_measured"] is True
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
    assert (row["per_rack_measured"], row["accelerators"]) == (False, 4)


def test_open_rows_are_not_compared_with_closed_ones_unmarked():
    assert accelerator_entry("MI355X", "llama2-70b", "Offline").division == "closed"  # since v6.0
    per_gpu = by_basis(entry("5.1-0098"), entry("5.1-0061"))["per_gpu"]
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
    assert "fastest per accelerator of 4 closed rows" in best.note
    assert {row.accelerator for row in results_of("B200", "llama2-70b-99", "Offline")} == {"NVIDIA B200-SXM-180GB"}


def test_the_fastest_row_of_an_accelerator_in_each_round():
    rounds = [accelerator_entry(f"H100@{name}", "llama2-70b-99.9", "Offline") for name in ("v4.1", "v5.0", "v5.1")]
    rates = [round(one.rate("per_gpu"), 1) for one in rounds]
    assert rates == [3065.6, 3913.3, 3902.5]
    assert accelerator_entry("H100@v6.1", "llama2-70b-99.9", "Offline").state == "no data"
    with pytest.raises(UsageError, match="shipped results are of v4"):
        accelerator_entry("H100@v3.1", "llama2-70b-99.9", "Offline")


def test_no_data_is_no_sign_of_being_worse():
    absent = accelerator_entry("Rubin", "llama2-70b", "Offline")
    assert absent.state == "no data"
    document = compare([entry("5.1-0008"), absent]).to_document()
    assert document["ratios"] == []
    assert any("no data does not mean slower" in note for note in document["notes"])


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: accelerator_entry("TPU9", "llama2-70b-99", "Offline"), "not a folder"),
        (lambda: published_result("5.1-9999", "llama2-70b-99", "Offline"), "says nothing about"),
        (lambda: published_result("5.1-0072", "llama2-70b-99", "Offline"), "it has llama3.1-405b:Offline"),
        (lambda: compare([entry("5.1-0008")]), "at least two results"),
    ],
)
def test_what_cannot_be_compared(call, words):
    with pytest.raises(UsageError, match=words):
        call()


def test_the_tables_are_whole():
    rows = published_results()
    counts = Counter(row.round for row in rows)
    assert counts == {"v4.1": 197, "v5.0": 36, "v5.1": 373, "v6.0": 399, "v6.1": 400}
    assert len({row.name + row.used_model for row in rows}) == len(rows)
    in_samples = {row.benchmark for row in rows if row.output_tokens_per_second is None}
    assert in_samples == {"qwen3-vl-235b-a22b", "llama2-70b-99.9"}  # the latter: five open rows of v4.1
    assert Counter(row.round for row in rows if row.measured_watts) == {"v5.1": 8, "v4.1": 6}
    assert sum(row.output_tokens_per_sample is not None for row in rows) > 800
    assert model_architectures()["llama3.1-405b"] == "dense"
    assert accelerator_facts("NVIDIA GB300").tdp_watts == 1400
    assert accelerator_facts("NVIDIA H200-NVL-141GB") is None


def test_a_benchmark_without_accuracy_target_means_both():
    assert published_result("6.0-0078", "llama2-70b", "offline").benchmark == "llama2-70b-99"
    both, strict = (results_of("GB300", name, "Offline") for name in ("llama2-70b", "llama2-70b-99.9"))
    assert {row.benchmark for row in both} == {"llama2-70b-99", "llama2-70b-99.9"}
    assert len(both) > len(strict) and both[0].name == strict[0].name


def test_verified_rows_stand_above_the_unverified_rack():
    (note,) = [note for note in compare([azure_rack(), entry("5.1-0008")]).notes if "same work" in note]
    assert "2 verified closed rows for the same work (llama2-70b Offline on 72 GB300)" in note
    assert "1,136,100 tokens/s (v6.1, CoreWeave), 1,126,850 tokens/s (v6.0, NVIDIA)" in note
    assert "3.193 % above these 1,100,948.3, which is no longer a record" in note
    assert "1,197,710 tokens/s (v6.1, CoreWeave) of gpt-oss-120b" in note
    below = verified_standing("llama2-70b-99", "Offline", "GB300", 72, 1.2e6)
    assert "below these 1,200,000, which no verified row reaches" in below
    assert "no verified closed row" in verified_standing("llama2-70b", "Offline", "GB300", 36, 1.0)
    assert verified_standing("llama2-70b", "Offline", None, 72, 1.0) is None


def test_short_answers_are_reported_with_each_row_and_ratio():
    short, long = entry("5.1-0008"), entry("4.1-0043")
    comparison = compare([long, short])
    assert "answers 7.1 % shorter than the reference's (273.4 of 294.45 tokens a sample)" in " ".join(comparison.notes)
    (pair,) = [note for note in comparison.notes if "in samples/s (answers" in note]
    assert pair.endswith("2.123 in tokens/s, 2.254 in samples/s (answers of 273.4 vs 290.3 tokens)")
    per_gpu = next(ratio for ratio in comparison.ratios if ratio.basis == "per_gpu")
    assert "output tokens per sample" in fields(per_gpu)
    assert answer_length("llama2-70b-99", 294.45) is None and answer_length("qwen3-vl-235b-a22b", 1.0) is None
    assert answer_length("gpt-oss-120b", 1278.2) is None  # only an upper bound, of accuracy runs
    assert "9.0 % longer" in answer_length("llama2-70b-99", 321.0)


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


@pytest.mark.parametrize(("tokens", "alike"), [(104.9, True), (105.1, False)])
def test_lengths_differ_by_a_share_of_the_smaller(tokens, alike):
    one = replace(entry("5.1-0008"), name="one", output_tokens_per_sample=100.0)
    other = replace(one, name="other", output_tokens_per_sample=tokens)
    for of, to in ((one, other), (other, one)):
        assert ("output tokens per sample" not in fields(by_basis(of, to)["per_gpu"])) is alike


def test_the_interval_of_a_ratio():
    low, high = ratio_interval([10.0, 11.0, 9.0], [5.0, 5.5, 4.5])
    assert low == pytest.approx(1.595, abs=0.01)
    assert low * high == pytest.approx(4)
    assert ratio_interval([10.0], [5.0, 5.1]) is None
    assert ratio_interval([10.0, 10.0], [5.0, 5.0]) == pytest.approx((2, 2))
    # By hand: logarithms 0, ln 4 against 0, 0, so ln 2 + t(0.975; 1 degree of freedom) ln 2, that is 2 * 2 ** 12.7062.
    low, high = ratio_interval([1.0, 4.0], [1.0, 1.0])
    assert high == pytest.approx(2 ** (1 + 12.7062), rel=1e-3)
    assert low == pytest.approx(2 ** (1 - 12.7062), rel=1e-3)


def test_repeats_have_one_rate_wherever_they_are_asked_for(tmp_path):
    runs = [equal_run(tmp_path, f"a{i}", i, seconds) for i, seconds in enumerate((10.0, 40.0))]
    rate = summarise_repeats(runs, 2)["metrics"]["output_tokens_per_second"]["geometric_mean"]
    assert run_entry(runs, "both").output_tokens_per_second == pytest.approx(rate)
    assert rate == pytest.approx(from_runs(runs, load_assumptions()).output_tokens_per_second)
    assert run_entry(runs[:1], "one").output_tokens_per_second == runs[0].result["output_tokens_per_second"]


def test_the_interval_covers_as_often_as_it_says():
    import numpy as np

    random = np.random.default_rng(7)
    hits = 0
    for _ in range(400):
        of, to = random.normal(110, 3, 4), random.normal(100, 6, 5)
        low, high = ratio_interval(of.tolist(), to.tolist())
        hits += low <= 1.1 <= high
    assert 0.92 <= hits / 400 <= 0.98


def equal_run(tmp_path, name: str, minute: float, seconds: float = 10.0, **facts):
    """A run that began so many minutes after nine, with all that tells one test from another."""
    began = (datetime(2026, 11, 20, 9, tzinfo=UTC) + timedelta(minutes=minute)).isoformat()
    known = {"mode": "performance", "weights": "w", "data_set": "d.csv", "data_set_sha256": "0" * 64, **facts}
    return run_folder(tmp_path, name, "host", began, seconds=seconds, **known)


def test_two_sets_of_repeats_with_their_interval_and_software(tmp_path):
    slow = [equal_run(tmp_path, f"a{i}", i, seconds) for i, seconds in enumerate((10.0, 11.0))]
    fast = [equal_run(tmp_path, f"b{i}", 5 + i, seconds) for i, seconds in enumerate((5.0, 5.5))]
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


@pytest.mark.parametrize(
    ("facts", "field", "of", "to"),
    [
        ({"data_set_sha256": "1" * 64}, "data set", "d.csv (SHA-256 111111111111)", "d.csv (SHA-256 000000000000)"),
        ({"data_set": "e.csv", "data_set_sha256": None}, "data set", "e.csv", "d.csv (SHA-256 000000000000)"),
        ({"mode": "accuracy"}, "mode", "accuracy", "performance"),
        ({"weights": "random, seed 0"}, "weights", "random, seed 0", "w"),
        ({"scenario": "server"}, "scenario", "server", "offline"),
        ({"precision": "fp8"}, "precision", "fp8", "bf16"),
        ({"model": "125m"}, "model", "125m", "tiny"),
        ({"verdict": "VALID"}, "verdict", "VALID", "MEASURED"),
        ({"verdict": "INTERRUPTED"}, "verdict", "INTERRUPTED", "MEASURED"),
        ({"tokens": 12}, "output tokens per sample", "12", "11"),
    ],
)
def test_what_differs_is_not_like_for_like_and_says_why(tmp_path, facts, field, of, to):
    verdict = facts.pop("verdict", None)
    one, other = equal_run(tmp_path, "one", 0), equal_run(tmp_path, "other", 1, **facts)
    if verdict:
        other = replace(other, verdict=Verdict(verdict))
    (ratio,) = [found for found in ratios(run_entry([other], "b"), run_entry([one], "a")) if found.basis == "total"]
    assert not ratio.like_for_like
    assert [(found.field, found.of, found.to) for found in ratio.differences] == [(field, of, to)]


def test_what_is_the_same_under_other_names_is_like_for_like(tmp_path):
    one, other = equal_run(tmp_path, "one", 0), equal_run(tmp_path, "other", 1, data_set="copy of d.csv")
    comparison = compare([run_entry([one], "a"), run_entry([other], "b")])
    assert all(ratio.like_for_like for ratio in comparison.ratios)


@pytest.mark.parametrize("verdict", ["INTERRUPTED", "INVALID", "DEGRADED"])
def test_two_rates_that_are_no_results_are_never_like_for_like(tmp_path, verdict):
    runs = [replace(equal_run(tmp_path, f"{i}", i), verdict=Verdict(verdict)) for i in range(2)]
    comparison = compare([run_entry([run], run.path.name) for run in runs])
    assert {difference.field for ratio in comparison.ratios for difference in ratio.differences} == {"verdict"}
    assert f"0: {verdict}, so its rate is not a result" in comparison.notes


def test_runs_at_the_same_time_on_one_machine_are_neither_averaged_nor_compared_in_silence(tmp_path):
    alone = equal_run(tmp_path, "alone", 5)
    both = [equal_run(tmp_path, "one", 0), equal_run(tmp_path, "other", 0.05)]
    comparison = compare([run_entry([alone], "a"), run_entry(both, "b")])
    (ratio,) = [ratio for ratio in comparison.ratios if ratio.basis == "total"]
    (found,) = ratio.differences
    assert (found.field, found.to) == ("machine", "not shared")
    assert found.of.startswith("shared with ") and found.of.endswith("/other for 7 s and 1 more")
    assert any("measure runs one after the other" in note for note in comparison.notes)
    against_each_other = compare([run_entry([run], run.path.name) for run in both])
    assert {one.field for ratio in against_each_other.ratios for one in ratio.differences} == {"machine"}


def test_a_run_does_not_disturb_itself_nor_another_machine_or_gpu(tmp_path):
    one, same = equal_run(tmp_path, "one", 0), Occupation.of(read_run(tmp_path / "one"))
    first = Occupation.of(one)
    assert first.seconds_shared_with(same) == 0
    there = Occupation.of(run_folder(tmp_path, "there", "other host", "2026-11-20T09:00:01+00:00"))
    assert first.seconds_shared_with(there) == 0
    later = replace(first, began_seconds=first.began_seconds + 1)
    cards = [replace(one, gpu=gpu) for one, gpu in ((first, "0"), (later, "1"))]
    assert cards[0].seconds_shared_with(cards[1]) == 0
    assert cards[0].seconds_shared_with(replace(later, gpu="0")) == 9
    assert cards[0].seconds_shared_with(later) == 9  # the CPUs feed the card


def test_which_gpu_a_run_had(tmp_path):
    run = equal_run(tmp_path, "one", 0)
    gpu = replace(run, config={"engine": {"device": "auto"}}, environment={"hostname": "h", "gpus": [{"name": "H200"}]})
    assert Occupation.of(gpu).gpu == "0"
    gpu.environment["variables"] = {"CUDA_VISIBLE_DEVICES": "3,4"}
    assert Occupation.of(gpu).gpu == "3"
    assert Occupation.of(run).gpu is None
    assert Occupation.of(replace(run, environment={})) is None


def test_interrupted_repeats_are_left_out_and_said_to_be(tmp_path):
    runs = [equal_run(tmp_path, f"{i}", i, 10.0 + i) for i in range(3)]
    runs[2] = replace(runs[2], verdict=Verdict.INTERRUPTED)
    entry = run_entry(runs, "folder")
    assert entry.repeats == (11.0, 10.0)
    assert entry.note == "without 2, which did not finish"
    assert (entry.verdict, entry.paths) == ("MEASURED", tuple(str(run.path) for run in runs[:2]))


def test_a_server_runs_rate_is_what_it_was_offered(tmp_path):
    run = equal_run(tmp_path, "one", 0, scenario="server", ttft_limit_seconds=2.0)
    entry = run_entry([run], "a")
    assert "--find-rate finds" in entry.note
    stricter = replace(entry, name="b", ttft_limit_seconds=0.45)
    assert {one.field for ratio in ratios(stricter, entry) for one in ratio.differences} == {"ttft limit seconds"}


def test_a_run_of_simulated_gpus_is_an_estimate(tmp_path):
    run = equal_run(tmp_path, "one", 0)
    real = run_entry([run], "b")
    run.config["rack"] = {"simulated_gpu": "GB300"}
    note = reason("SIMULATED_GPU", gpu="GB300")
    run.result["notes"] = [note]
    entry = run_entry([run], "a")
    assert (entry.state, entry.note) == ("estimate", note["message"])
    assert {"state", "tokens"} <= {one.field for one in differences(entry, real, "per_gpu")}


def test_a_server_that_makes_its_tokens_up_is_not_like_one_with_a_model(tmp_path):
    run = equal_run(tmp_path, "one", 0)
    real = run_entry([run], "real")
    note = reason("MADE_UP_TOKENS", gpu=None)
    run.result["notes"] = [note]
    mock = run_entry([run], "mock")
    assert mock.note == note["message"]
    assert [(one.field, one.of, one.to) for one in differences(mock, real, "total")] == [
        ("tokens", "made up", "of a model")
    ]
    assert not list(differences(mock, mock, "total"))


def test_a_short_run_beside_a_long_one_is_noted(tmp_path):
    short, long = (run_entry([equal_run(tmp_path, f"{s}", s, float(s))], f"{s} s") for s in (3, 30))
    (note,) = [note for note in compare([short, long]).notes if note.startswith("durations")]
    assert note.startswith("durations: 3 s 3 s vs 30 s 30 s")


def test_published_rows_are_of_mlperfs_data_sets_and_valid():
    row = entry("5.1-0008").to_row()
    assert row["data_set"] == "open_orca_gpt4_tokenized_llama.sampled_24576.pkl"
    assert (row["verdict"], row["mode"]) == ("VALID", "performance")
    assert {published_entry(one).verdict for one in published_results()} == {"VALID"}


def test_runs_that_are_no_repeats(tmp_path):
    one, two = (run_folder(tmp_path, name, "host", "2026-11-20T09:00:00+00:00") for name in ("a", "b"))
    two.result["precision"] = "fp8"
    with pytest.raises(UsageError, match="not a repeat of a: precision is fp8, not bf16"):
        run_entry([one, two], "folder")
    with pytest.raises(UsageError, match="no run folder"):
        run_entry([], "folder")


def test_a_run_and_a_published_row_state_different_software(tmp_path):
    run = run_entry([equal_run(tmp_path, "one", 0)], "a")
    assert run.software
    assert compare([run, entry("5.1-0061")]).software_differences == ()


def test_software_of_published_rows():
    found = software_differences(entry("5.1-0061"), entry("5.1-0008"))
    assert {(one.key, one.of_value, one.to_value) for one in found} == {
        ("TensorRT", "10.8", "10.11"),
        ("CUDA", "12.8", "12.9"),
    }


@given(st.lists(st.floats(0.5, 1e6), min_size=2, max_size=8), st.lists(st.floats(0.5, 1e6), min_size=2, max_size=8))
def test_the_interval_turns_around_with_its_ratio(of, to):
    (low, high), (back_low, back_high) = ratio_interval(of, to), ratio_interval(to, of)
    ratio = statistics.geometric_mean(of) / statistics.geometric_mean(to)
    assert low * (1 - 1e-9) <= ratio <= high * (1 + 1e-9)
    if high < 1e12:
        assert low * back_high == pytest.approx(1)
        assert high * back_low == pytest.approx(1)


def test_a_row_that_occurs_twice_is_compared_with_itself():
    rows = compare([entry("5.1-0008"), accelerator_entry("GB200", "llama2-70b-99", "Offline"), entry("5.1-0008")])
    assert [row["name"] for row in rows.rows] == [
        f"5.1-0008:llama2-70b-99:Offline{end}" for end in ("", " (2)", " (3)")
    ]
    assert all(ratio.value == 1 and ratio.like_for_like for ratio in rows.ratios)


@pytest.mark.parametrize(
    ("name", "values", "field"),
    [
        ("offered_samples_per_second", (23.4, 29.3), "offered rate"),
        ("cpu_wait_share", (0.08, 0.48), "CPU contention"),
    ],
)
def test_other_loads_and_contention_are_not_like_for_like(name, values, field):
    first, second = (replace(entry("5.1-0008"), **{name: value}) for value in values)
    unlike = [one.field for ratio in ratios(first, second) for one in ratio.differences]
    assert set(unlike) == {field}
    assert all(ratio.like_for_like for ratio in ratios(first, first))
    unknown = replace(second, offered_samples_per_second=None, cpu_wait_share=None)
    assert all(ratio.like_for_like for ratio in ratios(first, unknown))  # as where a search found the rate
