"""Run folders of megatoken: what the harness leaves passes; what was changed afterwards is found."""

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
import yaml

from cli_support import ENVIRONMENT, TIMEOUT_SECONDS, call_here
from forks import forked
from megatoken.analysis.stability import judge_soak
from megatoken.analysis.statistics import percentiles
from megatoken.analysis.summary import summarise_run
from megatoken.audit import Severity, audit
from megatoken.harness.result import lost_replicas
from megatoken.runs.tables import SampleRow, SeriesRow
from megatoken.runs.writer import RunFolder

CHILD = Path(__file__).parents[1] / "harness" / "loadgen_children.py"


def made(folder: Path, **options: Any) -> Path:
    lengths = folder / "lengths.csv"
    lengths.write_text("input_tokens,output_tokens\n" + "".join(f"{20 + i},{2 + i % 5}\n" for i in range(40)))
    arguments = {"out": str(folder / "runs"), "lengths": str(lengths), **options}
    with forked(CHILD, "scenario", json.dumps(arguments), environment=ENVIRONMENT) as process:
        out, err = process.communicate(timeout=TIMEOUT_SECONDS)
    assert process.returncode == 0, err
    return Path(json.loads(out)["path"])


@pytest.fixture(scope="module")
def finished(tmp_path_factory) -> Path:
    return made(tmp_path_factory.mktemp("run"), config={"samples": 400, "model": "paced"})


@pytest.fixture
def run_folder(finished, tmp_path) -> Path:
    return Path(shutil.copytree(finished, tmp_path / finished.name))


def grave(folder: Path) -> dict[str, str]:
    severities = (Severity.FAIL, Severity.WARN, Severity.UNKNOWN)
    return {item.id: item.found for item in audit(folder).findings if item.severity in severities}


def test_a_whole_run_folder_passes(run_folder):
    result = audit(run_folder)
    assert grave(run_folder) == {}
    assert result.evidence.kind == "megatoken_run"
    assert result.evidence.runs[0].node == run_folder.name
    passed = {item.id for item in result.findings if item.severity is Severity.PASS}
    checks = ("whole", "metrics", "configuration", "verdict", "counts", "notes", "memory", "times")
    assert {f"run_folder.{name}" for name in checks} <= passed


def test_claims_are_held_against_the_rate_that_leads_the_page_of_the_run(tmp_path):
    folder = made(tmp_path, config={"samples": 40, "scenario": "server", "rate": 100.0, "model": "paced"})
    result = json.loads((folder / "result.json").read_text())
    led, logged = (result[f"{of}_output_tokens_per_second"] for of in ("whole_run", "loadgen"))
    claim = {"id": "rate", "text": "its rate", "value": led, "unit": "tokens/s", "scope": "rack"}
    claims = tmp_path / "claims.yaml"
    claims.write_text(yaml.safe_dump({"schema_version": 1, "title": "t", "source": "s", "claims": [claim]}))
    document = json.loads(call_here("audit", folder, "--claims", claims, "--json")[1])
    (answer,), (artefact,) = document["claims"], document["artefacts"]
    assert answer["answer"] == "holds", answer["why"]
    assert artefact["output_tokens_per_second"] == pytest.approx(led)
    of = "rates over the whole time, drain included, as on the run's page; LoadGen: "
    for said in (answer["why"], artefact["rates_of"]):
        assert float(said.partition(of)[2].split()[0].replace(",", "")) == pytest.approx(logged, rel=1e-5)
    shown = call_here("audit", folder, "--full")[1]
    assert (
        of in shown and "s until the last query was due" in shown and "Duration: until the last sample ended" in shown
    )


def test_simulated_gpus_are_told(run_folder):
    path = run_folder / "config.yaml"
    config = yaml.safe_load(path.read_text())
    path.write_text(yaml.safe_dump({**config, "rack": {**config["rack"], "simulated_gpu": "GB300"}}))
    (found,) = [item for item in audit(run_folder).findings if item.id == "run_folder.simulated"]
    assert found.severity is Severity.NOTE
    assert found.found.startswith("simulated GB300")


def test_simulated_gpus_are_told_where_only_the_target_says_so(run_folder):
    path = run_folder / "result.json"
    result = json.loads(path.read_text())
    path.write_text(json.dumps({**result, "target": {"simulated_gpu": "H200"}}))
    (found,) = [item for item in audit(run_folder).findings if item.id == "run_folder.simulated"]
    assert found.found.startswith("simulated H200")


@pytest.mark.parametrize(
    ("key", "change", "expected"),
    [
        ("output_tokens_per_second", lambda value: value * 1.01, "run_folder.metrics"),
        ("output_tokens", lambda value: value + 1000, "run_folder.counts"),
        ("samples_completed", lambda value: value - 1, "run_folder.metrics"),
        ("ttft_seconds", lambda value: {**value, "p99": value["p99"] / 2}, "run_folder.metrics"),
        ("steady_window_seconds", lambda _: [0.0, 1.0], "run_folder.metrics"),
        ("nodes", lambda value: value * 2, "run_folder.metrics"),
        ("loadgen_output_tokens_per_second", lambda value: value * 2, "run_folder.verdict"),
        ("loadgen_version", lambda _: "9.9.9", "run_folder.verdict"),
        ("loadgen_validity", lambda _: "INVALID", "run_folder.verdict"),
        ("loadgen_samples_per_second", lambda _: None, "run_folder.verdict"),
        ("verdict", lambda _: "VALID", "run_folder.verdict"),
        ("verdict", lambda _: "INVALID", "run_folder.verdict"),
        ("verdict", lambda _: "DEGRADED", "run_folder.verdict"),
        ("rules_unmet", lambda _: [], "run_folder.verdict"),
        ("rules_unmet", lambda rules: rules[1:], "run_folder.verdict"),
        ("rules", lambda _: "v5.1", "run_folder.configuration"),
        ("model", lambda _: "llama2-70b", "run_folder.configuration"),
        ("precision", lambda _: "fp4", "run_folder.configuration"),
        ("weights", lambda _: "random, seed 7", "run_folder.configuration"),
        ("verdict", lambda _: "SPLENDID", "run_folder.whole"),
        ("scenario", lambda _: 7, "run_folder.whole"),
    ],
)
def test_a_changed_result(run_folder, key, change, expected):
    path = run_folder / "result.json"
    result = json.loads(path.read_text())
    path.write_text(json.dumps({**result, key: change(result[key])}))
    assert expected in {item.id for item in audit(run_folder).findings if item.severity is Severity.FAIL}


def test_a_run_that_breaks_the_rules_it_claims_is_not_made_valid(tmp_path):
    config = {"samples": 400, "model": "paced", "rules": "v5.1"}
    folder = made(tmp_path, config=config)
    unclaimed = {name: found for name, found in grave(folder).items() if name.startswith("run_folder")}
    assert unclaimed == {}
    path = folder / "result.json"
    result = json.loads(path.read_text())
    assert result["verdict"] == "INVALID"
    path.write_text(json.dumps({**result, "verdict": "VALID", "reasons": []}))
    found = grave(folder)
    assert found["run_folder.verdict"].startswith("verdict VALID, recomputed INVALID; reasons none, recomputed ")
    assert "MIN_DURATION" in found["run_folder.verdict"]
    path.write_text(json.dumps({**result, "reasons": []}))
    assert "run_folder.verdict" in grave(folder)


@pytest.mark.parametrize(("rows", "found"), [(40, False), (50, True), (39, True)])
def test_rows_of_a_data_set_that_a_larger_library_repeats(run_folder, rows, found):
    path = run_folder / "result.json"
    result = json.loads(path.read_text())
    path.write_text(json.dumps({**result, "data_set_rows": rows}))
    assert ("run_folder.configuration" in grave(run_folder)) is found


def test_metrics_that_were_taken_out(run_folder):
    path = run_folder / "result.json"
    result = json.loads(path.read_text())
    kept = {"schema_version", "verdict", "reasons", "rules_unmet", "scenario", "mode", "rules", "model", "precision"}
    path.write_text(json.dumps({key: value for key, value in result.items() if key in kept}))
    found = grave(run_folder)
    assert "output_tokens_per_second none, recomputed " in found["run_folder.metrics"]
    assert found["run_folder.verdict"] == "cannot be computed: benchmark is missing"


def test_a_log_that_was_taken_out(finished, tmp_path):
    for name in ("one", "two"):
        shutil.copytree(finished, tmp_path / name)
    shutil.rmtree(tmp_path / "two" / "mlperf")
    assert grave(tmp_path)["run_folder.loadgen"] == "no log that can be read"


def test_changed_rows(run_folder):
    path = run_folder / "requests.parquet"
    table = pq.read_table(path)
    pq.write_table(table.slice(0, table.num_rows - 5), path)
    assert {"run_folder.metrics"} <= grave(run_folder).keys()
    path.write_bytes(b"PAR1 junk")
    assert "requests.parquet is damaged" in grave(run_folder)["run_folder.whole"]


def test_a_cut_off_table_is_where_the_audit_points_to(run_folder):
    (run_folder / "series.parquet").write_bytes((run_folder / "series.parquet").read_bytes()[:900])
    (finding,) = [one for one in audit(run_folder).findings if one.id == "run_folder.whole"]
    assert [one.file for one in finding.where] == ["series.parquet"] and finding.severity is Severity.FAIL


@pytest.mark.parametrize("name", ["series.parquet", "requests.parquet"])
def test_checks_that_lack_a_table_are_counted_and_named(run_folder, name):
    made = {one.id for one in audit(run_folder).findings}
    (run_folder / name).unlink()
    result = audit(run_folder)
    unknown = {one.id: one for one in result.findings if one.severity is Severity.UNKNOWN}
    assert made == {one.id for one in result.findings} and "run_folder.metrics" in unknown
    assert {one.found for one in unknown.values()} == {f"not checked, because files are missing or damaged: {name}"}
    (line,) = [line for line in call_here("audit", run_folder)[1].splitlines() if "cannot answer" in line]
    assert "the check “Metrics follow from the tables”" in line


def test_several_run_folders_are_several_runs(finished, tmp_path):
    for name in ("one", "two"):
        shutil.copytree(finished, tmp_path / name)
    path = tmp_path / "two" / "result.json"
    path.write_text(path.read_text().replace('"output_tokens": ', '"output_tokens": 1', 1))
    result = audit(tmp_path)
    assert result.evidence.kind == "runs"
    found = next(item for item in result.findings if item.id == "run_folder.metrics" and item.severity is Severity.FAIL)
    assert [place.file for place in found.where] == [
        f"two/{name}" for name in ("result.json", "requests.parquet", "series.parquet")
    ]


def test_logs_of_several_nodes(finished, tmp_path):
    for name in ("one", "two"):
        shutil.copytree(finished / "mlperf", tmp_path / "nodes" / name / "mlperf")
    result = audit(tmp_path)
    assert [run.node for run in result.evidence.runs] == ["one", "two"]
    assert "nodes.copies" in grave(tmp_path)


@pytest.mark.parametrize("lost", [0, 1])
@pytest.mark.parametrize("verdict", ["MEASURED", "DEGRADED"])
def test_a_stable_soak_is_degraded_where_replicas_were_lost_and_nowhere_else(tmp_path, lost, verdict):
    soak = {"duration_seconds": 60.0, "population": 12, "interruptions": []}
    soak["segments"] = [{"begins_seconds": 0.0, "started_at": "2026-11-20T09:12:33Z"}]
    rack = {"replicas": 4, "replicas_least": 4 - lost, "replicas_at_end": 4 - lost, "share_left": 1 - lost / 4}
    facts = {"soak": soak, "rack": rack | {"lost": [], "joined": [], "clock_offsets": []}, "notes": []}
    folder = RunFolder.create(
        tmp_path, "run", {}, {"hostname": "here", "gpus": []}, scenario="soak", summarise=summarise_run, facts=facts
    )
    folder.add_samples([SampleRow(n, n, 0.0, 0.0, float(n), n + 4.0, 4, 4, "length", "here") for n in range(50)])
    for second in range(61):
        levels = (8, 8, 1, 9, 12, 4, 0)  # full from the first row on
        folder.add_series(SeriesRow(second + 1.0, "here", 0, 1000 * second, 1000 * second, *levels))
    stability = judge_soak(folder.facts, {"gpus": []}, *folder.end_recording())
    assert stability["verdict"] == "STABLE", stability["reasons"]
    reasons = lost_replicas(folder.facts)
    folder.finish({"verdict": verdict, "reasons": reasons, "stability": stability})
    (found,) = [item for item in audit(folder.path).findings if item.id == "run_folder.verdict"]
    assert (found.severity is Severity.PASS) == (lost == (verdict == "DEGRADED")), found


def test_a_run_that_lost_replicas_has_the_numbers_of_a_finished_one(tmp_path):
    folder = RunFolder.create(
        tmp_path, "run", {}, {"hostname": "here"}, scenario="offline", summarise=summarise_run, facts={}
    )
    rows = [SampleRow(n, n, 0.0, 0.0, n / 10, 1 + n / 10, 4, 4, "length", "here") for n in range(500)]
    folder.add_samples(rows)
    for second in range(60):
        folder.add_series(SeriesRow(second + 1.0, "here", 0, 40 * second, 40 * second, 8, 8, 1, 9, 12, 4, 0))
    folder.finish({"verdict": "DEGRADED", "reasons": [{"code": "LOST_REPLICAS", "message": "one"}]})
    assert json.loads((folder.path / "result.json").read_text())["steady_window_seconds"] is not None
    assert "run_folder.metrics" not in grave(folder.path)


@pytest.mark.parametrize(("noted", "wrong"), [(False, 1.0), (False, 1.01), (True, 1.0)])
def test_earlier_versions_counted_answers_in_one_piece(tmp_path, noted, wrong):
    facts = {"notes": [{"code": "IN_ONE_PIECE", "message": "all", "answers": 9, "of": 9, "share": 1.0}] * noted}
    folder = RunFolder.create(
        tmp_path, "run", {}, {"hostname": "here"}, scenario="offline", summarise=summarise_run, facts=facts
    )
    folder.add_samples([SampleRow(n, n, 0.0, 0.0, 1.0, 1.0 + 4e-9, 4, 5, "length", "here") for n in range(9)])
    folder.finish({"verdict": "MEASURED", "reasons": []})
    path = folder.path / "result.json"
    result = json.loads(path.read_text())
    assert result["tpot_seconds"]["p50"] is None and "run_folder.metrics" not in grave(folder.path)
    earlier = percentiles(np.full(9, wrong * 1e-9))
    path.write_text(json.dumps({**result, "tpot_seconds": earlier}))
    assert ("run_folder.metrics" in grave(folder.path)) is (noted or wrong != 1)


def test_files_that_other_programs_write_too_make_no_run_folder(run_folder):
    for name in ("requests.parquet", "series.parquet", "environment.json"):
        (run_folder / name).unlink()
    assert not [item for item in audit(run_folder).findings if item.id == "run_folder.whole"]


@pytest.mark.parametrize(
    "names",
    [("result.json", "requests.parquet", "series.parquet"), ("result.json", "environment.json"), ("requests.parquet",)],
)
def test_a_run_folder_whose_files_are_missing_is_not_taken_for_a_plain_folder_of_logs(run_folder, names):
    for name in names:
        (run_folder / name).unlink()
    result = audit(run_folder)
    [found] = [item.found for item in result.findings if item.id == "run_folder.whole"]
    assert found == result.notes[0] and "a run folder of megatoken whose files are missing" in found
    assert all(name in found for name in names) and result.exit_code == 3
