"""``megatoken aggregate``."""

import json
import shutil
from pathlib import Path

import pytest

from cli_results import document_of, hostile_paths, refused, two_runs
from cli_support import call, redirected
from published import published_logs


def test_eighteen_published_nodes(tmp_path: Path) -> None:
    logs = published_logs() / "results"
    code, stdout, err = call("aggregate", logs, "--baseline", 62_000, "--out", tmp_path)
    assert (code, err) == (0, "")
    for words in ("1,100,948.3", "1,030,087", "62,803.9", "57,599.1", "61,163.8", "62,111.7", "not shown"):
        assert words in stdout
    document = json.loads((tmp_path / "aggregate.json").read_text())
    assert document["scaling_efficiency"] == pytest.approx(1_100_948.3 / 18 / 62_000)
    assert len(document["stragglers"]["nodes"]) == 5
    assert "1,100,948" in (tmp_path / "aggregate.html").read_text()
    strict = document_of("aggregate", logs, "--straggler-threshold", 0.08)
    assert strict["stragglers"]["nodes"] == []


def test_a_real_run_is_one_node(tmp_path_factory: pytest.TempPathFactory) -> None:
    run = two_runs(tmp_path_factory)[0]
    result = json.loads((run / "result.json").read_text())
    document = document_of("aggregate", run)
    assert document["kind"] == "aggregate"
    assert len(document["nodes"]) == 1
    assert document["sum_of_rates_tokens_per_second"] == pytest.approx(result["output_tokens_per_second"])


def test_repeats_are_no_nodes(tmp_path_factory: pytest.TempPathFactory) -> None:
    runs = two_runs(tmp_path_factory)
    for given in (runs, [runs[0].parent], [runs[0].parent.parent]):
        why = refused("aggregate", *given)
        for words in ("2 runs of node", "did not all run at the same time", "megatoken compare", "megatoken report"):
            assert words in why


def test_what_cannot_be_aggregated(tmp_path_factory: pytest.TempPathFactory, tmp_path: Path) -> None:
    run = two_runs(tmp_path_factory)[0]
    for name, path in hostile_paths(tmp_path).items():
        if name == "damaged":  # see test_cli_damaged_folders
            continue
        assert str(path) in refused("aggregate", run, path)
    for flags, why in (
        (("--straggler-threshold", 3), "must be a share such as 0.03"),
        (("--baseline", "nan"), "give the rate of one node alone"),
        (("--baseline", "fast"), "--baseline: must be a number, got 'fast'"),
        (("--base-line", 3), "--base-line: unknown flag; did you mean --baseline?"),
    ):
        assert why in refused("aggregate", run, *flags)
    truncated = Path(shutil.copytree(run, tmp_path / "truncated"))
    (truncated / "requests.parquet").write_bytes(b"PAR1")
    assert "truncated" in refused("aggregate", truncated)
    assert "Missing argument" in refused("aggregate")


def test_a_closed_output(tmp_path_factory: pytest.TempPathFactory) -> None:
    code, _, err = redirected(">&-", "aggregate", two_runs(tmp_path_factory)[0])
    assert (code, err) == (1, "megatoken: cannot write to standard output: Bad file descriptor\n")
