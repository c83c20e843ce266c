"""Findings about a server over HTTP: what its answers show, and answers whose counts cannot be true."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from endpoint_support import answered, connected, prompts
from scripted_server import ITL_SECONDS, Server, scripted_server

from cli_support import call_here, write_lines
from megatoken.audit import Severity, audit


@pytest.fixture
def server() -> Iterator[Server]:
    with scripted_server() as one:
        yield one


FOUND = {
    "ok": None,
    "ends": None,
    "empty": "EMPTY_FIRST_FRAME",
    "several": "SEVERAL_TOKENS_A_FRAME",
    "nodone": "NO_DONE",
    "early": "EARLY_DONE",
    "inflated": "OVER_MAX_TOKENS",
    "bloated": "PROMPT_TOKENS_LEFT_OUT",
    "cut": "CUT_ANSWERS",
    "padded": "PADDED_ANSWERS",
    "dummy": "DUMMY_FIRST_TOKEN",
}


def test_what_a_server_does_is_found(server: Server) -> None:
    with connected(server.url) as target:
        for word, code in FOUND.items():
            since_ns = time.monotonic_ns()
            last = answered(target, prompts(*(f"{word} {number}" for number in range(10)), tokens=12))
            read = None if word in ("inflated", "bloated") else 3
            assert {event.input_tokens for event in last.values()} == {read}
            found = {one["code"]: dict(one) for one in target.findings(since_ns)}
            if code is None:
                assert found == {}
            else:
                assert code in found, (word, found)
                assert found[code].get("answers", 10) == 10


def test_an_end_token_that_is_counted_has_the_time_of_the_finish_reason(server: Server) -> None:
    with connected(server.url) as target:
        (ended,) = answered(target, prompts("ends", tokens=3)).values()
    times = ended.token_times_ns
    assert times is not None and ended.output_tokens == len(times) == 3
    assert ended.time_ns == times[-1] and (times[-1] - times[0]) / 1e9 > 1.8 * ITL_SECONDS


def test_a_sweep_tells_what_its_answers_show_of_the_server(server: Server, tmp_path: Path) -> None:
    lines = write_lines(
        tmp_path / "prompts.jsonl", *({"prompt": f"several {at}", "max_tokens": 12} for at in range(40))
    )
    load = ("--concurrency", 2, "--window", 1.5, "--repeat", 1, "--settle", 0.1)
    _, out, err = call_here("sweep", "--endpoint", server.url, "--prompts", lines, *load, "--out", tmp_path / "runs")
    results = [*(tmp_path / "runs").rglob("result.json")]
    assert len(results) == 1, out + err
    notes = {one["code"]: one for one in json.loads(results[0].read_text())["notes"]}
    assert notes["SEVERAL_TOKENS_A_FRAME"]["tokens_per_frame"] == pytest.approx(4), out + err


@pytest.mark.parametrize(
    ("word", "failure"), [("error", " x HTTP 500: the engine has failed\n"), ("textless", "has an output token\n")]
)
def test_a_search_for_the_rate_of_a_server_that_serves_nothing_names_the_failure(
    word: str, failure: str, server: Server, tmp_path: Path
) -> None:
    lines = write_lines(tmp_path / "prompts.jsonl", {"prompt": word, "max_tokens": 12})
    load = ("--scenario", "server", "--find-rate", "--rate", 100, "--min-duration", 10, "--warm-up", 0)
    code, out, err = call_here("run", "--endpoint", server.url, "--prompts", lines, *load, "--out", tmp_path / "runs")
    assert code == 3 and "NO_VALID_RATE" in out and failure in out, out + err
    assert "--min-duration" not in out and "too high" not in out + err
    assert len([*(tmp_path / "runs").glob("*/probes/*")]) == 1


@pytest.mark.parametrize(
    ("words", "failure"),
    [(("error", "quick"), "HTTP 500: the engine has failed"), (("close",), "the connection was closed in the middle")],
)
def test_a_search_for_the_rate_of_a_server_that_fails_a_part_names_the_failure(
    words: tuple[str, ...], failure: str, server: Server, tmp_path: Path
) -> None:
    """Of a stream that ends early, the first token came; others of its kind are in flight as the probe ends."""
    lines = write_lines(tmp_path / "prompts.jsonl", *({"prompt": word, "max_tokens": 4} for word in words))
    load = ("--scenario", "server", "--find-rate", "--rate", 80, "--min-duration", 10, "--warm-up", 0)
    code, out, err = call_here("run", "--endpoint", server.url, "--prompts", lines, *load, "--out", tmp_path / "runs")
    (verdict,) = (line for line in out.splitlines() if "NO_VALID_RATE" in line)
    assert code == 3 and " samples failed: " in verdict and f" x {failure}" in verdict, out + err
    first = next(line for line in err.splitlines() if line.startswith("80 samples/s"))
    assert first.startswith("80 samples/s too high: ") and f" x {failure}" in first
    for wrong in ("--min-duration", "over the TTFT", "the client"):
        assert wrong not in out + err.split("probe at", 1)[1]


def test_a_search_ends_soon_where_as_many_requests_fail_at_half_the_rate(server: Server, tmp_path: Path) -> None:
    lines = write_lines(
        tmp_path / "prompts.jsonl", *({"prompt": word, "max_tokens": 4} for word in ["quick"] * 19 + ["error"])
    )
    load = ("--scenario", "server", "--find-rate", "--rate", 160, "--min-duration", 20, "--warm-up", 0)
    code, out, err = call_here("run", "--endpoint", server.url, "--prompts", lines, *load, "--out", tmp_path / "runs")
    (verdict,) = (line for line in out.splitlines() if "NO_VALID_RATE" in line)
    assert code == 3 and " x HTTP 500: the engine has failed; at 1" in verdict, out + err
    assert verdict.endswith(" % failed too, so load is not the cause: look at the server")
    assert 4 <= len([*(tmp_path / "runs").glob("*/probes/*")]) <= 7


def test_a_search_with_a_limit_that_nothing_keeps_says_what_it_measured_at_the_lowest_rate(
    server: Server, tmp_path: Path
) -> None:
    lines = write_lines(tmp_path / "prompts.jsonl", {"prompt": "quick", "max_tokens": 4})
    load = ("--scenario", "server", "--find-rate", "--rate", 80, "--min-duration", 10, "--warm-up", 0)
    command = ("run", "--endpoint", server.url, "--prompts", lines, *load, "--ttft-limit", 0.001)
    code, out, err = call_here(*command, "--out", tmp_path / "runs")
    (verdict,) = (line for line in out.splitlines() if "NO_VALID_RATE" in line)
    measured = r"even at [0-9.]+ samples/s, the lowest rate tried, the p99 of TTFT was [0-9.]+ ms; the limit is 1 ms; "
    assert code == 3 and re.search(measured, verdict), out + err


@pytest.mark.parametrize(
    ("load", "exit_code", "said"),
    [
        (("--warm-up", 1), 2, " of the warm-up had no answer, and the server sent nothing in its last "),
        (("--warm-up", 0, "--rate", 80), 3, r"of full length: at [0-9.]+ samples/s, none of \d+ samples had an answer"),
    ],
)
def test_a_search_for_the_rate_of_a_server_that_stops_answering_says_so(
    load: tuple[object, ...], exit_code: int, said: str, server: Server, tmp_path: Path
) -> None:
    """It stops in the warm-up, or in the first probe."""
    lines = write_lines(tmp_path / "prompts.jsonl", {"prompt": "stops", "max_tokens": 4})
    common = ("--scenario", "server", "--find-rate", "--min-duration", 8, "--ttft-limit", 0.5, "--tpot-limit", 0.5)
    command = ("run", "--endpoint", server.url, "--prompts", lines, *common, *load, "--out", tmp_path / "runs")
    code, out, err = call_here(*command)
    assert code == exit_code and re.search(said, out + err), out + err
    assert "--min-duration" not in out + err


def test_a_server_that_fails_before_the_first_stage_is_over_is_named(server: Server, tmp_path: Path) -> None:
    lines = write_lines(tmp_path / "prompts.jsonl", {"prompt": "error", "max_tokens": 12})
    load = ("--concurrency", "8@20,16@20", "--warm-up", 0)
    code, out, err = call_here("sweep", "--endpoint", server.url, "--prompts", lines, *load, "--out", tmp_path / "runs")
    assert code == 1 and "HTTP 500: the engine has failed" in err and "Check that the target" in err, out + err


def test_a_server_that_fails_every_query_of_singlestream_is_named(server: Server, tmp_path: Path) -> None:
    lines = write_lines(tmp_path / "prompts.jsonl", *({"prompt": f"error {at}"} for at in range(8)))
    load = ("--scenario", "singlestream", "--min-duration", 0, "--samples", 70, "--warm-up", 0)
    code, out, err = call_here("run", "--endpoint", server.url, "--prompts", lines, *load, "--out", tmp_path / "runs")
    assert code == 3 and "FAILED_SAMPLES" in out and "HTTP 500: the engine has failed" in out, out + err
    (folder,) = (path for path in (tmp_path / "runs").iterdir() if path.is_dir())
    assert [item.id for item in audit(folder).findings if item.severity is Severity.FAIL] == []


def test_answers_without_any_text_make_a_run_invalid(server: Server, tmp_path: Path) -> None:
    prompts = write_lines(tmp_path / "prompts.jsonl", *({"prompt": f"textless {at}"} for at in range(4)))
    common = ("--endpoint", server.url, "--prompts", prompts, "--warm-up", 0, "--out", tmp_path / "runs")
    code, out, err = call_here("run", "--min-duration", 0, "--endpoint.stream", "true", *common)
    assert code == 3 and "NO_OUTPUT none of 4 answers has an output token" in out, out + err
    load = ("--concurrency", 4, "--window", 20, "--settle", 20)
    code, out, err = call_here("sweep", *load, *common)
    assert code == 1 and " requests failed; none of " in err and " has an output token. " in err, out + err


def test_an_answer_of_more_tokens_than_max_tokens_allows_fails_unless_only_its_end_token_is_counted_too(
    server: Server,
) -> None:
    with connected(server.url) as target:
        last = answered(target, prompts("inflated", "several", "rounded", tokens=60))
        tokens = target.state().output_tokens
        found = {one["code"]: dict(one) for one in target.findings(0)}
    assert last[0].error == "the answer has 120 tokens by its usage, but max_tokens allows 60"
    assert [last[at].output_tokens for at in (1, 2)] == [60, 61] and tokens == 121
    assert found["OVER_MAX_TOKENS"]["answers"] == 2
    assert found["SEVERAL_TOKENS_A_FRAME"]["tokens_per_frame"] == 121 / 75  # without the tokens that it only states


@pytest.mark.parametrize("tokens", [4, 16, 49])
def test_an_end_token_that_is_counted_too_fails_no_short_answer(server: Server, tokens: int) -> None:
    with connected(server.url) as target:
        last = answered(target, prompts("rounded", "inflated", tokens=tokens))
    assert (last[0].error, last[0].output_tokens) == (None, tokens + 1)
    assert last[1].error is not None and "max_tokens allows" in last[1].error


@pytest.mark.parametrize(("words", "whole"), [(("whole",), 1.0), (("whole", "ok"), 0.5)])
def test_answers_in_one_piece_have_no_time_per_output_token_and_a_note(
    words: tuple[str, ...], whole: float, server: Server, tmp_path: Path
) -> None:
    """The times of the others count."""
    prompts = write_lines(tmp_path / "prompts.jsonl", *({"prompt": word, "max_tokens": 5} for word in words))
    common = ("--endpoint", server.url, "--prompts", prompts, "--warm-up", 0, "--out", tmp_path / "runs")
    load = ("--scenario", "server", "--rate", 40, "--samples", 40, "--min-duration", 0)
    _, out, err = call_here("run", *load, *common)
    assert f" of 40 answers of several tokens ({100 * whole:.0f} %) came in one piece" in out, out + err
    (path,) = (tmp_path / "runs").glob("*/result.json")
    result = json.loads(path.read_text())
    (note,) = (one for one in result["notes"] if one["code"] == "IN_ONE_PIECE")
    assert (note["answers"], note["of"], note["share"]) == (40 * whole, 40, whole)
    paces = [result["tpot_seconds"]]
    assert [item.id for item in audit(path.parent).findings if item.severity is Severity.FAIL] == []
    _, out, err = call_here("sweep", "--concurrency", len(words), "--window", 1.5, "--settle", 0.1, *common)
    (path,) = (tmp_path / "runs").glob("*/sweep.json")
    (point,) = json.loads(path.read_text())["points"]
    paces += [point["tpot_seconds"], point["itl_seconds"]]
    assert "came in one piece" in (path.parent / "sweep.html").read_text(), out + err
    for pace in paces:
        assert pace["p50"] is None if whole == 1 else pace["p50"] > 0.8 * ITL_SECONDS
    assert (point["user_tokens_per_second"]["p50"] is None) is (whole == 1)


@pytest.mark.parametrize("processes", [1, 2])
def test_answers_from_a_cache_are_found(server: Server, processes: int) -> None:
    with connected(server.url, max_in_flight=processes, processes=processes) as target:
        texts = [f"memory {number}" for number in range(10)]
        answered(target, prompts(*texts, *texts[1:], *texts[:1], tokens=12))  # most go to another process than before
        found = {one["code"]: dict(one) for one in target.findings(0)}
    assert found["CACHED_ANSWERS"]["answers"] == 10
