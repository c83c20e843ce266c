"""No false alarm: what LoadGen itself wrote raises nothing above a note."""

import itertools
import tarfile
from pathlib import Path

import pytest
from tampering import DETAIL, drop, edit, in_detail, number, put

from megatoken.audit import Audit, Severity, audit
from megatoken.mlperf.detail_log import read_detail_log
from megatoken.mlperf.loadgen_builds import is_known_version
from megatoken.mlperf.run_figures import run_figures

SCENARIOS = ("Offline", "Server", "SingleStream")
MODES = ("PerformanceOnly", "AccuracyOnly")
MODELS = ("llama2-70b", "bert")  # with and without token latencies
LOGS = Path(__file__).with_name("logs") / "genuine.tar.xz"


def above_note(result: Audit) -> list[str]:
    """Findings graver than a note, without what a LoadGen newer than the known ones leaves open."""
    version = result.evidence.runs[0].figures.loadgen_version
    harmless = {Severity.NOTE, Severity.PASS} | (set() if is_known_version(version) else {Severity.UNKNOWN})
    return [f"{item.severity} {item.id}: {item.found}" for item in result.findings if item.severity not in harmless]


@pytest.mark.parametrize(("scenario", "mode", "model"), list(itertools.product(SCENARIOS, MODES, MODELS)))
def test_installed_loadgen(originals, scenario, mode, model):
    result = audit(originals(scenario, mode, model))
    assert above_note(result) == []
    assert result.exit_code == 0
    figures = result.evidence.runs[0].figures
    assert (figures.scenario, figures.mode, figures.errors) == (scenario, mode, 0)
    if mode == "PerformanceOnly":
        assert figures.validity == "VALID"
        assert 0.1 < figures.duration_seconds < 60
        assert figures.samples_issued >= 700
    if model == "llama2-70b" and mode == "PerformanceOnly":
        assert figures.tokens_per_sample == pytest.approx(53, abs=0.5)  # 50 to 56 tokens, by row
        assert figures.output_tokens == pytest.approx(figures.tokens_per_sample * figures.samples_issued)


def test_multistream_and_part_of_a_library(originals):
    assert above_note(audit(originals("MultiStream"))) == []
    part = "*.*.performance_sample_count_override = 40\n"
    for scenario in SCENARIOS:
        for mode in MODES:
            assert above_note(audit(originals(scenario, mode, "llama2-70b", part))) == [], (scenario, mode)


def test_other_releases(tmp_path):
    with tarfile.open(LOGS) as archive:
        archive.extractall(tmp_path, filter="data")
    folders = sorted(tmp_path.glob("*/*"))
    assert len(folders) == 8 * len(SCENARIOS) * len(MODES) * len(MODELS)
    alarms = {str(folder.relative_to(tmp_path)): above_note(audit(folder)) for folder in folders}
    assert {name: found for name, found in alarms.items() if found} == {}


@pytest.mark.parametrize("padded", [True, False])
def test_a_loadgen_that_logs_neither_padding_nor_permutation(twin, padded: bool):
    """LoadGen 4.1: Offline, only the rate says whether the query was padded to whole passes over its 64 rows."""
    folder = twin("Offline")
    issued = int(number(folder, "generated_samples_per_query"))
    assert issued % 64 == 0
    edit(
        folder, DETAIL, lambda log: log.replace('"loadgen_version", "value": "', '"loadgen_version", "value": "4.1 @ ')
    )
    drop(folder, "requested_sample_concatenate_permutation", "effective_sample_concatenate_permutation")
    put(folder, "generated_samples_per_query", str(issued - 10))
    if not padded:
        in_detail("result_samples_per_second", lambda rate: f"{float(rate) * (issued - 10) / issued:g}")(folder)
    assert run_figures(read_detail_log(folder / DETAIL)).samples_issued == (issued if padded else issued - 10)
    put(folder, "result_samples_per_second", "9999")
    assert "result.rate" in {item.id for item in audit(folder).findings if item.severity is Severity.FAIL}


def test_all_at_once_in_processes(tmp_path):
    result = audit(LOGS, workers=2)  # the archive itself, unpacked within bounds
    assert above_note(result) == []
    assert len(result.evidence.runs) == 96
    alone = audit(LOGS, workers=1)
    assert [run.path for run in alone.evidence.runs] == [run.path for run in result.evidence.runs]
    assert alone.findings == result.findings
    assert alone.evidence.runs == result.evidence.runs


def test_nodes_that_did_run_together_are_told_apart_from_those_that_did_not(twin):
    first = twin(name="system_1")
    twin("Offline", "PerformanceOnly", "llama2-70b", "*.*.max_query_count = 0\n", name="system_2")
    result = audit(first.parent)
    assert result.evidence.kind == "nodes"
    assert above_note(result) == []
    found = next(item for item in result.findings if item.id == "nodes.simultaneous")
    assert found.severity is Severity.NOTE  # one after the other, and nothing claims more
    assert "0.0 %" in found.found
