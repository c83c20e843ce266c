"""Checks that had nothing to compare say so; what lies beside one benchmark speaks for no other."""

from dataclasses import replace
from pathlib import Path

import pytest

from claims_support import azure_evidence
from megatoken.audit import Severity, audit
from megatoken.audit.checks.cross import check_layout
from megatoken.audit.checks.nodes import check_nodes
from megatoken.audit.discovery import Tree
from megatoken.mlperf.benchmarks import benchmark_of
from megatoken.mlperf.rounds import round_seeds, ruled_rounds


def copies(runs):
    return next(item for item in check_nodes(azure_evidence(), runs, None) if item.id == "nodes.copies")


def test_nodes_without_latencies_are_not_called_different():
    runs = azure_evidence().performance_runs[:3]
    blank = [replace(run, figures=replace(run.figures, latency_seconds={})) for run in runs]
    assert copies(blank).severity is Severity.UNKNOWN
    assert copies(blank).found == "0 of 3 say latencies"


@pytest.mark.parametrize("id_", ["settings.effective", "result.latencies"])
def test_a_log_without_the_lines(twin, id_):
    folder = twin()
    path = folder / "mlperf_log_detail.txt"
    lines = path.read_text().splitlines(keepends=True)
    whole = {item.id: item for item in audit(folder).findings}
    assert whole[id_].severity is Severity.PASS
    kept = [line for line in lines if '"requested_' not in line and "latency_ns" not in line and "qsl_rep" not in line]
    kept = [line for line in kept if '"effective_' not in line or "scenario" in line or "test_mode" in line]
    path.write_text("".join(kept))
    assert next(item for item in audit(folder).findings if item.id == id_).severity is Severity.UNKNOWN


def layouts(runs, paths):
    evidence = replace(azure_evidence(), runs=tuple(runs))
    return [(item.severity, item.found) for item in check_layout(Tree(Path(), dict.fromkeys(paths, 1)), evidence)]


def test_files_beside_one_benchmark_speak_for_no_other():
    run = azure_evidence().performance_runs[0]
    one = replace(run, path="a/llama2-70b-99/Offline", benchmark="llama2-70b-99")
    other = replace(run, path="a/llama3.1-405b/Offline", benchmark="llama3.1-405b")
    mine = ["a/llama2-70b-99/Offline/user.conf", "a/compliance/llama2-70b-99/Offline/TEST06/verify_accuracy.txt"]
    for paths in (mine, [*mine, "a/user.conf"]):
        (_, first), (_, second) = layouts([one, other], paths)
        assert "user.conf" not in first and "TEST06" not in first
        assert "user.conf" in second and "TEST06" in second
    assert "user.conf" not in layouts([one], ["a/user.conf"])[0][1]


def test_an_unknown_benchmark_is_told():
    run = replace(azure_evidence().performance_runs[0], benchmark="bert-99")
    assert layouts([run], [])[0][0] is Severity.UNKNOWN


@pytest.mark.parametrize(
    ("benchmark", "round_", "severity"),
    [
        ("llama2-70b-99", "v5.1", Severity.PASS),
        ("llama2-70b-99", "v6.1", Severity.FAIL),  # from v6.1 on only -99.9
        ("llama3.1-8b", "v5.0", Severity.FAIL),
        ("llama2-70b", "v6.1", Severity.PASS),  # LoadGen's name of both
        ("bert-99", "v5.1", Severity.UNKNOWN),
    ],
)
def test_a_round_is_asked_whether_it_has_the_benchmark(twin, benchmark, round_, severity):
    folder = twin(name=f"{benchmark}/Offline")
    result = audit(folder.parents[1], round=round_)
    (found,) = [item for item in result.findings if item.id == "rules.benchmark"]
    assert (found.severity, benchmark in found.found) == (severity, True)
    assert "rules.benchmark" not in {item.id for item in audit(folder.parents[1]).findings}


def test_a_benchmark_guessed_from_its_rows_is_one_of_the_round():
    assert benchmark_of(None, 24_576, "v5.1").name == "llama2-70b-99"
    assert benchmark_of(None, 24_576, "v6.1").name == "llama2-70b-99.9"
    assert benchmark_of(None, 5, "v6.1") is None
    assert set(round_seeds()) - set(ruled_rounds()) == {"v4.1"}
