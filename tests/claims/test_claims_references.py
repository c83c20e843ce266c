"""What aggregate and compare are given, resolved: run folders and their repeats, logs, ids, accelerators, claims."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from claims_support import EXAMPLES, azure_evidence
from megatoken.analysis.aggregation import aggregate
from megatoken.analysis.comparison import compare
from megatoken.analysis.summary import summarise_run
from megatoken.claims.references import aggregation_rows, comparison_entry
from megatoken.errors import UsageError
from megatoken.runs.tables import SampleRow
from megatoken.runs.writer import RunFolder

WHICH = {"benchmark": "llama2-70b-99", "scenario": "Offline"}


def read(path: Path):
    return replace(azure_evidence(), root=str(path))


def runs_of_two_hosts(tmp_path: Path) -> Path:
    facts = {"model": "tiny", "precision": "bf16", "started_at": "2026-11-20T09:12:33+00:00"}
    for host in ("a", "b"):
        folder = RunFolder.create(
            tmp_path / "runs", f"run-{host}", {}, {}, scenario="offline", summarise=summarise_run, facts=facts
        )
        folder.add_samples([SampleRow(i, i, 0.0, 0.0, 1.0, 10.0, 5, 11, "length", host) for i in range(10)])
        folder.finish({"verdict": "MEASURED", "reasons": []})
    return tmp_path / "runs"


def test_rows_of_run_folders_and_of_logs(tmp_path):
    runs = runs_of_two_hosts(tmp_path)
    assert [row.node for row in aggregation_rows([runs], read)] == ["a", "b"]
    assert [row.node for row in aggregation_rows([runs / "run-b", runs / "run-a"], read)] == ["b", "a"]
    (tmp_path / "logs").mkdir()
    rows = aggregation_rows([tmp_path / "logs"], read)
    assert round(aggregate(rows).sum_of_rates_tokens_per_second, 1) == 1_100_948.3
    assert rows[0].source == str(tmp_path / "logs" / "results/ND_GB300_v6_1/llama2-70b-99/Offline")


def test_rows_that_are_no_one_result(tmp_path):
    for path, reader, words in [
        (tmp_path / "no", read, "no such folder"),
        (tmp_path, lambda path: replace(read(path), runs=()), "neither run folders nor LoadGen logs"),
        (tmp_path, lambda path: replace(read(path), kind="submission"), "contains 18 results"),
    ]:
        with pytest.raises(UsageError, match=words):
            aggregation_rows([path], reader)


def test_every_kind_of_entry_side_by_side(tmp_path):
    runs = runs_of_two_hosts(tmp_path)
    (tmp_path / "logs").mkdir()
    references = [
        str(tmp_path / "logs"),
        "5.1-0008",
        "5.1-0008:llama3.1-405b:Server",
        "B200",
        "Rubin",
        f"{EXAMPLES / 'vendor-blog.yaml'}#total",
        str(runs / "run-a"),
    ]
    entries = [comparison_entry(reference, read, **WHICH) for reference in references]
    comparison = compare(entries)
    states = [row["state"] for row in comparison.rows]
    assert states == ["unverified", "verified", "verified", "verified", "no data", "claimed", "measured"]
    logs = entries[0]
    assert (logs.accelerators, logs.precision, logs.accelerator) == (72, "fp4", "NVIDIA GB300")
    assert entries[2].output_tokens_per_second == 584.008
    assert entries[3].name == "6.0-0048:llama2-70b-99:Offline"
    claimed = [ratio for ratio in comparison.ratios if ratio.of == "vendor-blog.yaml#total"]
    assert [ratio.basis for ratio in claimed] == ["total", "per_rack"]
    assert [round(ratio.value, 6) for ratio in claimed] == [1, 1]  # the logs are those of the claim
    assert not any(ratio.like_for_like for ratio in claimed)


def test_a_claim_in_millions_of_tokens_per_second_is_a_rate(tmp_path):
    file = tmp_path / "claims.yaml"
    claim = "{id: total, text: t, value: 1.1, unit: M tokens/s, scope: rack}"
    file.write_text(f"title: t\nsource: s\nclaims:\n  - {claim}\n")
    entry = comparison_entry(f"{file}#total", read, **WHICH)
    assert entry.output_tokens_per_second == pytest.approx(1_100_000)


def test_a_folder_of_runs_is_repeats(tmp_path):
    entry = comparison_entry(str(runs_of_two_hosts(tmp_path)), read, **WHICH)
    assert entry.repeats == pytest.approx((11, 11))


@pytest.mark.parametrize(
    ("reference", "words"),
    [
        ("runs/typo", "no such folder"),
        ("Gb9000", "not a folder, a published id"),
        ("5.1-9999", "not among the shipped language model results of MLPerf Inference v5.1; that"),
        ("6.1-CoreWeave/GB300_x72", "whose rows have no ids; write 6.1-"),
        ("3.1-0001", "the shipped results are of v4.1, v5.0, v5.1, v6.0, v6.1, not of v3.1"),
        (f"{EXAMPLES / 'vendor-blog.yaml'}#totl", "has no claim totl; it has system, memory"),
        (f"{EXAMPLES / 'vendor-blog.yaml'}#memory", "only a claim in tokens/s"),
        (str(EXAMPLES / "vendor-blog.yaml"), "give the folder, or CLAIMS.yaml#id"),
        ("no.yaml#a", "No such file"),
    ],
)
def test_references_that_are_none(reference, words):
    with pytest.raises(UsageError, match=words):
        comparison_entry(reference, read, **WHICH)


@pytest.mark.parametrize(("folder", "accelerators"), [("rack", 72), ("rack_1", 4), ("rack2", None)])
def test_logs_have_the_description_next_to_the_results(tmp_path, folder, accelerators):
    logs = tmp_path / "results" / folder / "llama2-70b-99" / "Offline"
    logs.mkdir(parents=True)
    (tmp_path / "systems").mkdir()
    values = {"accelerator_model_name": "GB300", "accelerators_per_node": 4, "number_of_nodes": 18}
    (tmp_path / "systems" / "rack.json").write_text(json.dumps(values))
    (tmp_path / "systems" / "no.json").write_text("{")
    of_all = azure_evidence()
    found = comparison_entry(
        str(logs), lambda path: replace(of_all, root=str(path), runs=of_all.runs[:1], systems=()), **WHICH
    )
    assert found.accelerators == accelerators
    assert found.accelerator == ("GB300" if accelerators else None)
