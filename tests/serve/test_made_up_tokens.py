"""Runs against our own server without a model: that its tokens are made up stands wherever its figures do."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from serving import serving

from cli_support import call_here
from megatoken.audit import Severity, audit

SIMULATED = ("--model", "llama3.1-8b", "--served-model-name", "reference", "--precision", "fp8", "--simulated-gpu")


@pytest.mark.parametrize(
    ("flags", "stand_in", "said"),
    [
        (
            ("--engine", "mock", "--tokens-per-second", "5000"),
            "mock",
            "the server is megatoken's mock engine: its tokens are made up",
        ),
        ((*SIMULATED, "H200"), "simulated.H200", "the GPU of the server is a simulated H200"),
    ],
)
def test_a_run_and_a_sweep_say_that_the_tokens_of_the_server_are_made_up(
    tmp_path: Path, flags: tuple[str, ...], stand_in: str, said: str
) -> None:
    with serving(*flags) as server:
        common = ("--endpoint", server.url + "/v1", "--endpoint.processes", 1, "--warm-up", 0, "--out", tmp_path)
        _, out, _ = call_here("run", *common, "--samples", 8)
        _, out_of_sweep, _ = call_here("sweep", *common, "--concurrency", 16, "--settle", 0.2, "--window", 2)
    model = SIMULATED[1] if "--simulated-gpu" in flags else "reference"
    assert server.log[0] == f"megatoken: loading {model}, to serve it on {server.url}"
    [sweep] = tmp_path.glob("*-sweep-*")
    [run] = set(tmp_path.iterdir()) - {sweep}
    result = json.loads((run / "result.json").read_text())
    assert result["target"]["stand_in"] == stand_in
    codes = [note["code"] for note in result["notes"]]
    assert codes.count("MADE_UP_TOKENS") == 1 and "REFERENCE_MODEL" not in codes
    assert sum(said in note for note in json.loads((sweep / "sweep.json").read_text())["notes"]) == 1
    for shown in (out, out_of_sweep):
        assert said in " ".join(shown.split()) and "answers only short tasks" not in shown
    for page in (run / "report.html", sweep / "sweep.html"):
        assert said.split("'")[0] in page.read_text()
    capacity = ("plan", "capacity", "--accelerators", 1, "--set", "ttft_limit_seconds=60")
    for place, asked in enumerate(
        (("compare", run, run), ("compare", sweep, sweep), (*capacity, run), (*capacity, sweep, "--percentile", "p50"))
    ):
        _, shown, err = call_here(*asked, "--out", tmp_path / str(place))
        assert not err
        [document] = (tmp_path / str(place)).glob("*.json")
        [page] = (tmp_path / str(place)).glob("*.html")
        assert any(said in note for note in json.loads(document.read_text())["notes"])
        assert said in " ".join(shown.split()) and said.split("'")[0] in page.read_text()
    assert [item.id for item in audit(run).findings if item.severity is Severity.FAIL] == []


@pytest.mark.timing
def test_tokens_of_answers_that_outlast_a_sweep_count(tmp_path: Path) -> None:
    lengths = tmp_path / "lengths.csv"
    lengths.write_text("input_tokens,output_tokens\n" + "8,10\n8,500\n" * 10)
    with serving("--engine", "mock", "--tokens-per-second", "50") as server:
        common = ("--endpoint", server.url + "/v1", "--endpoint.processes", 1, "--warm-up", 0, "--out", tmp_path)
        more = ("--concurrency", 8, "--settle", 0.5, "--window", 2, "--lengths", lengths)
        more = (*more, "--ttft-limit", 1, "--tpot-limit", 0.1)
        assert call_here("sweep", *common, *more)[0] == 0
    [sweep] = tmp_path.glob("*-sweep-*")
    [point] = json.loads((sweep / "sweep.json").read_text())["points"]
    assert point["requests_unended"] > 0
    assert point["output_tokens_per_second"] == pytest.approx(8 * 50, rel=0.05)  # without them about 50
    assert point["goodput"]["output_tokens_per_second"] == point["output_tokens_per_second"]
    assert point["goodput"]["share"] == 1
    assert {one["answer"] for one in point["limits"]} == {"CANNOT TELL"}  # of so few requests, but none is over
    assert {one["over"] for one in point["limits"]} == {0}
    first = next(one for one in point["limits"] if one["key"] == "ttft_seconds.p99")
    shown = [point["ttft_seconds"][name] for name in ("p99", "samples")]  # also of those that were cut off
    assert shown == [first["found"], first["samples"]] == [first["found"], point["requests"]]
    assert [item.id for item in audit(sweep / point["run"]).findings if item.severity is Severity.FAIL] == []
