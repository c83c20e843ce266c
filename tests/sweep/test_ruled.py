"""A short sweep by the rules of MLPerf Endpoints: its verdicts, and files whose figures follow from its rows."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

from cli_support import call_here, make_checkpoint
from megatoken.datasets.lengths import load_lengths
from megatoken.datasets.salt import salted
from megatoken.errors import ConfigError, UsageError
from megatoken.files import plain
from megatoken.harness.result import concluded_point
from megatoken.harness.sweep.loads import Arrival
from megatoken.harness.sweep.ruled import WholePasses, read_disclosures
from megatoken.runs.run import Run, read_run

ROWS = 12
SECOND = 10**9


@pytest.fixture(scope="module")
def swept(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two points and the Offline run, on a tiny engine in this process; the windows are far too short."""
    folder = tmp_path_factory.mktemp("ruled")
    prompts = folder / "prompts.jsonl"
    lines = [{"prompt": "a b c", "max_tokens": 4 + i % 3, "ignore_end_token": True} for i in range(ROWS)]
    prompts.write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    (folder / "stated.yaml").write_text("division: RDI\nshared_src: src/own\n")
    model = make_checkpoint(folder / "model")
    flags = ("--engine.threads", 1, "--warm-up", 0.1, "--window", 1, "--concurrency", "1,40")
    more = ("--rules", "endpoints-v1.0", "--disclosures", folder / "stated.yaml", "--out", folder / "out")
    code, _, err = call_here("sweep", "--model", model, "--prompts", prompts, *flags, *more)
    assert code == 3, err
    return next((folder / "out").iterdir())


@pytest.fixture(scope="module")
def runs(swept: Path) -> list[Run]:
    return [read_run(folder) for folder in sorted(swept.iterdir()) if folder.is_dir()]


def codes(reasons: list[Any]) -> set[str]:
    return {reason["code"] for reason in reasons}


def test_every_point_and_the_curve_have_their_reasons(swept: Path, runs: list[Run]) -> None:
    document = json.loads((swept / "sweep.json").read_text())
    assert [run.path.name for run in runs] == ["01-concurrency-1-1", "02-concurrency-40-1", f"03-offline-{ROWS}-1"]
    assert document["verdict"] == "INVALID"
    assert [point["value"] for point in document["points"]] == [1, 40]
    of_curve = [reason for reason in document["reasons"] if reason["run"] == "the curve"]
    assert {"FEW_POINTS", "REGION_EMPTY", "OFFLINE_CONCURRENCY"} <= codes(of_curve)
    for run in runs:
        assert {"NOT_AN_ENDPOINT", "NOT_A_BENCHMARK"} <= codes(run.reasons)
        assert not codes(run.reasons) & {"PARTIAL_PASS", "NOT_SALTED", "TOKENS_NOT_COUNTED", "SEED_SET"}
    assert "MIN_DURATION" in codes(runs[2].reasons)
    assert codes(runs[0].reasons) & {"SHORT_WINDOW", "NO_STEADY_STATE"}
    page = (swept / "sweep.html").read_text()
    assert "MLPerf Endpoints" in page and "User p10 is 1 / TPOT p90" in page
    assert "the data set has 12 rows, which the rules take as the concurrency of the Offline run: fewer" in page


def test_requests_come_in_whole_passes_and_the_verdict_follows_from_the_rows(runs: list[Run]) -> None:
    for run in runs:
        assert len(run.requests) % ROWS == 0
        again = plain(concluded_point(run.result, run.requests))
        assert again["ruled"] == run.result["ruled"]
        assert again["reasons"] == run.reasons
    issued = [row["sample_index"] for row in runs[2].requests.sort_by("sample_id").to_pylist()]
    assert all(sorted(issued[at : at + ROWS]) == list(range(ROWS)) for at in range(0, len(issued), ROWS))


def test_the_summary_follows_from_the_rows(runs: list[Run]) -> None:
    run = runs[1]
    rows = run.requests.to_pylist()
    summary = json.loads((run.path / "mlperf/performance/result_summary.json").read_text())
    start, end = min(row["sent_seconds"] for row in rows), max(row["last_token_seconds"] for row in rows)
    tokens = sum(row["output_tokens"] for row in rows)
    assert summary["n_samples_issued"] == summary["n_samples_completed"] == len(rows)
    assert summary["duration_ns"] == pytest.approx(1e9 * (end - start), abs=1)
    assert summary["tps"] == pytest.approx(tokens / (end - start))
    assert summary["output_sequence_lengths"]["total"] == tokens
    ttft = sorted(1e9 * (row["first_token_seconds"] - row["sent_seconds"]) for row in rows)
    assert summary["ttft"]["percentiles"]["90.0"] == pytest.approx(ttft[int(0.9 * (len(ttft) - 1))])
    assert sum(summary["ttft"]["histogram"]["counts"]) == len(rows)
    gaps = [row["output_tokens"] - row["first_tokens"] for row in rows]
    tpot = sorted(
        1e3 * (row["last_token_seconds"] - row["first_token_seconds"]) / gap
        for row, gap in zip(rows, gaps, strict=True)
        if gap > 0
    )
    total = run.result["ruled"]["total"]
    assert total["tps_per_user"] == pytest.approx(1000 / tpot[int(0.9 * (len(tpot) - 1))])
    assert f"TPS: {summary['tps']:.2f}" in (run.path / "mlperf/report.txt").read_text()


def test_events_are_in_order_and_hold_the_answers(runs: list[Run]) -> None:
    run = runs[0]
    events = [json.loads(line) for line in (run.path / "mlperf/events.jsonl").read_text().splitlines()]
    moments = [event["timestamp_ns"] for event in events]
    assert moments == sorted(moments)
    kinds = [event["event_type"] for event in events]
    assert kinds[:2] == ["session.started", "session.start_performance_tracking"]
    for kind in ("issued", "recv_first", "complete"):
        assert kinds.count(f"sample.{kind}") == len(run.requests)
    complete = next(event for event in events if event["event_type"] == "sample.complete")
    assert complete["data"][0] == "TextModelOutput"
    assert "".join(complete["data"][1])
    index = json.loads((run.path / "mlperf/sample_idx_map.json").read_text())["prompts.jsonl"]
    by_id = {row["sample_id"]: row["sample_index"] for row in run.requests.to_pylist()}
    assert index[complete["sample_uuid"]] == by_id[int(complete["sample_uuid"], 16)]


def test_the_point_file_has_seeds_regions_and_disclosures(runs: list[Run]) -> None:
    points = [yaml.safe_load((run.path / "mlperf/point.yaml").read_text()) for run in runs]
    assert [point["region"] for point in points] == ["low_latency", "high_concurrency", "submitters_choice"]
    assert [point["offline"] for point in points] == ["none", "none", "dedicated"]
    assert {point["division"] for point in points} == {"RDI"}
    assert {point["runtime_settings"]["runtime"]["model_seed"] for point in points} == {9315206023656308754}
    configuration = yaml.safe_load((runs[2].path / "mlperf/config.yaml").read_text())
    assert configuration["settings"]["load_pattern"]["type"] == "max_throughput"


def test_disclosures_that_state_nothing_are_refused(tmp_path: Path) -> None:
    (tmp_path / "stated.yaml").write_text("{}")
    with pytest.raises(ConfigError, match=r"stated\.yaml: states nothing; write KEY: VALUE with any of division, "):
        read_disclosures(tmp_path / "stated.yaml")


def test_an_audit_finds_nothing_wrong_with_a_point(runs: list[Run]) -> None:
    code, out, _ = call_here("audit", runs[1].path)
    assert code == 0, out


def test_a_loop_ends_with_a_pass_after_its_time() -> None:
    """One request a second, 5 rows: the first pass does not count, so 12 s end with the fourth pass at 20 s."""
    load = WholePasses(iter(range(1000)), 1, 5, 2, 12.0)
    load.start(0)
    now, issued = 0, 0
    while due := load.take_due(now):
        assert due == [Arrival(now, issued)]
        issued, now = issued + 1, now + SECOND
        load.ended(issued, now)
    assert issued == 20
    assert load.next_due_ns() is None


def test_salts_differ_repeat_with_the_seed_and_need_room(tmp_path: Path) -> None:
    file = tmp_path / "lengths.csv"
    file.write_text("input_tokens,output_tokens\n8,4\n")
    data_set = load_lengths(file, vocabulary_size=1000, max_length=64)
    one, other = (salted(data_set, 7, vocabulary_size=1000, max_length=64) for _ in range(2))
    prompts = [list(one.requests[0].prompt) for _ in range(3)]
    assert len({tuple(prompt) for prompt in prompts}) == 3
    assert prompts[0] == list(other.requests[0].prompt)
    plain_prompt = list(data_set.requests[0].prompt)
    assert prompts[0][:1] + prompts[0][8:] == plain_prompt
    assert np.log2(1000) * (len(prompts[0]) - len(plain_prompt)) >= 64
    assert one.input_tokens.tolist() == [15]
    with pytest.raises(UsageError, match="salt"):
        salted(data_set, 7, vocabulary_size=1000, max_length=16)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (("--rules", "v5.1"), "endpoints-v1.0"),
        (("--rules", "endpoints-v1.0", "--rates", "1"), "fixed concurrency"),
        (("--rules", "endpoints-v1.0", "--seed-set", "Z"), "published are A"),
        (("--rules", "endpoints-v1.0", "--repeat", "2"), "--repeat"),
        (("--rules", "endpoints-v1.0", "--concurrency", "1,2"), "above 32"),
        (("--rules", "endpoints-v1.0", "--concurrency", "64,128"), "1 to 32"),
    ],
)
def test_what_rules_refuse(wrong: tuple[str, ...], message: str, tmp_path: Path) -> None:
    code, _, err = call_here("sweep", *wrong, "--out", tmp_path / "none")
    assert code == 2
    assert message in err
