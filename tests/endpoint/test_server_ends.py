"""Servers that a run starts: what it says of one that cannot start, ends in the middle, or is slowed by its client."""

from __future__ import annotations

import json
import os
import re
import shlex
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from cli_support import TIMEOUT_SECONDS, call, call_here, started, write_lines
from megatoken.audit import Severity, audit
from megatoken.harness.result import CORE_WAIT_SHARE
from megatoken.runs.run import Verdict, read_run
from megatoken.targets.endpoint.server_process import started_server

ANSWERS = 40
SERVER = """
import http.server, json, os, signal, sys, threading, time

class Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    answered = 0
    lock = threading.Lock()

    def do_GET(self):
        self.reply({"data": [{"id": "m"}]} if self.path == "/v1/models" else {"version": "1"})

    def do_POST(self):
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        with Handler.lock:
            if Handler.answered >= %d:
                print("out of blocks", "giving up", sep="\\n", flush=True)
                %s
            Handler.answered += 1
        time.sleep(0.01)
        choice = {"text": "yes", "finish_reason": "stop", "index": 0}
        usage = {"prompt_tokens": 2, "completion_tokens": 2}
        if not asked.get("stream"):
            return self.reply({"choices": [choice], "usage": usage})
        begun = {"choices": [{"text": "y", "finish_reason": None, "index": 0}]}
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.send_header("Connection", "close")
        self.end_headers()
        for event in (begun, {"choices": [choice]}, {"choices": [], "usage": usage}):
            self.wfile.write(b"data: " + json.dumps(event).encode() + b"\\n\\n")
            time.sleep(0.005)
        self.wfile.write(b"data: [DONE]\\n\\n")

    def reply(self, document, status=200):
        data = json.dumps(document).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *_):
        pass

http.server.ThreadingHTTPServer(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()
"""


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as one:
        return int(one.getsockname()[1])


def measure(
    tmp_path: Path, then: str, run: Callable[..., Any] = call_here, load: Sequence[object] = ("--min-duration", 0)
) -> tuple[int, str, Path, dict[str, Any]]:
    """Runs 120 requests against a server that does ``then`` after 40 answers: exit code, output, folder, result."""
    script, port = tmp_path / "server.py", free_port()
    script.write_text(SERVER % (ANSWERS, then))
    prompts = write_lines(tmp_path / "prompts.jsonl", {"prompt": "ready?", "max_tokens": 8})
    code, out, _ = run(
        *("run", "--endpoint", f"http://127.0.0.1:{port}/v1", "--start-server"),
        shlex.join([sys.executable, str(script), str(port)]),
        *("--prompts", prompts, "--samples", 120, *load, "--warm-up", 0, "--out", tmp_path / "runs"),
        *("--endpoint.max_in_flight", 4, "--endpoint.processes", 1),
    )
    [folder] = [path for path in (tmp_path / "runs").iterdir() if path.is_dir()]
    return code, out, folder, json.loads((folder / "result.json").read_text())


@pytest.mark.parametrize(
    ("ending", "how"),
    [("os._exit(7)", "ended with exit status 7"), ("os.kill(os.getpid(), signal.SIGKILL)", "was ended by SIGKILL")],
)
def test_a_server_that_ends_is_named_with_its_last_words(tmp_path: Path, ending: str, how: str) -> None:
    code, out, folder, result = measure(tmp_path, ending)
    failed = result["endpoints"]["failed"]
    assert code == 3 and result["verdict"] == "INVALID"
    (server,) = set(read_run(folder).requests["node"].to_pylist())  # of answered, failed and unsent samples
    assert server.startswith("127.0.0.1:") and [one["node"] for one in result["nodes"]] == [server]
    assert sum(one["samples"] for one in failed["messages"]) <= result["samples_failed"]
    assert failed["answers_before"] <= result["samples_completed"] < ANSWERS and failed["at_seconds"] > 0
    line = next(line for line in out.splitlines() if line.startswith("  SERVER_FAILED"))
    for words in (how, "out of blocks / giving up", "connection refused", f"after {failed['answers_before']} answer"):
        assert words in line
    assert out.index("FAILED_SAMPLES") < out.index("SERVER_FAILED") < out.index("Note:")
    assert how in (folder / "report.html").read_text() and "replicas" not in out
    assert [item.id for item in audit(folder).findings if item.severity is Severity.FAIL] == []


def test_requests_that_a_living_server_refuses_are_no_failure_of_the_server(tmp_path: Path) -> None:
    code, out, folder, result = measure(tmp_path, 'return self.reply({"error": {"message": "no room"}}, 400)')
    failed = result["endpoints"]["failed"]
    assert code == 3 and failed["answered"] and failed["server"] is None
    line = next(line for line in out.splitlines() if line.startswith("  REQUESTS_FAILED"))
    assert "no room" in line and "SERVER_FAILED" not in out
    assert "LoadGen result: VALID (LoadGen counts a failed sample as answered)" in out
    assert [item.id for item in audit(folder).findings if item.severity is Severity.FAIL] == []


@pytest.mark.parametrize(
    ("stated", "said"),
    [
        ("None", "add --endpoint.stream true"),
        ("-5", "the answer's usage has -5 output tokens, which is no count"),
        ("10**30", "the answer's usage has 1000000000000000000000000000000 output tokens, which is no count"),
        ("10**9", "the answer has 1,000,000,000 tokens by its usage, but max_tokens allows 8"),
    ],
)
def test_answers_whose_tokens_cannot_be_counted_fail(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stated: str, said: str
) -> None:
    without = SERVER.replace('"completion_tokens": 2', f'"completion_tokens": {stated}')
    monkeypatch.setattr(sys.modules[__name__], "SERVER", without)
    code, out, folder, result = measure(tmp_path, "pass")
    assert code == 3 and (result["samples_completed"], result["samples_failed"]) == (0, 120)
    line = next(line for line in out.splitlines() if line.startswith("  REQUESTS_FAILED"))
    assert said in line
    assert {note["code"] for note in result["notes"]} & {"NO_USAGE", "CUT_ANSWERS"} == set()
    assert call_here("report", folder)[0] == 0 and call_here("audit", folder)[0] == 0


def test_a_run_that_a_signal_ends_says_why_requests_failed(tmp_path: Path) -> None:
    late = "time.sleep(0.5), os.kill(os.getppid(), signal.SIGINT), time.sleep(1)"  # when the client knows of failures
    refuse = 'return self.reply({"error": {"message": "no room"}}, 400)'
    then = f"Handler.answered += 1; Handler.answered == {ANSWERS + 9} and ({late}); {refuse}"
    code, out, folder, result = measure(tmp_path, then, call)
    assert code == 130 and result["verdict"] == "INTERRUPTED"
    assert "no room" in next(line for line in out.splitlines() if line.startswith("  REQUESTS_FAILED"))
    assert "REQUESTS_FAILED" in [note["code"] for note in result["notes"]]
    assert [item.id for item in audit(folder).findings if item.severity is Severity.FAIL] == []


@pytest.mark.skipif(not Path("/proc/self/schedstat").exists(), reason="this kernel does not count")
@pytest.mark.timing
def test_a_client_that_waits_for_a_core_is_not_asked_to_lower_an_engines_threads(tmp_path: Path) -> None:
    cores = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(cores)})
    try:
        with subprocess.Popen([sys.executable, "-c", "while True: pass"]) as other:
            try:
                _, out, folder, result = measure(tmp_path, "pass", call)
            finally:
                other.kill()
    finally:
        os.sched_setaffinity(0, cores)
    assert result["core_wait_share"] > CORE_WAIT_SHARE, out
    waits = [note for note in result["notes"] if note["code"].endswith("CORE_WAIT")]
    assert [note["code"] for note in waits] == ["DRIVER_CORE_WAIT"]
    assert "lower engine.threads" not in out + (folder / "report.html").read_text()
    assert [item.id for item in audit(folder).findings if item.severity is Severity.FAIL] == []


@pytest.mark.timing
def test_a_sweep_whose_server_is_killed_keeps_its_loads(tmp_path: Path) -> None:
    """It dies in the second load, before the window of that."""
    script, port, out = tmp_path / "server.py", free_port(), tmp_path / "out"
    script.write_text(SERVER % (10**9, "pass"))
    prompts = write_lines(tmp_path / "prompts.jsonl", {"prompt": "ready?", "max_tokens": 8})
    load = ("--concurrency", "2,4", "--settle", 2, "--window", 1, "--warm-up", 0, "--endpoint.processes", 1)
    with subprocess.Popen([sys.executable, str(script), str(port)]) as server:
        url = f"http://127.0.0.1:{port}/v1"
        with started("sweep", "--endpoint", url, "--prompts", prompts, *load, "--out", out) as process:
            while not list(out.glob("*/02-*")):
                assert process.poll() is None, process.communicate()
                time.sleep(0.05)
            server.kill()
            said, err = process.communicate(timeout=TIMEOUT_SECONDS)
    [folder] = out.iterdir()
    document = json.loads((folder / "sweep.json").read_text())
    assert process.returncode == 3, err
    assert document["verdict"] == "INVALID"
    assert [point["value"] for point in document["points"]] == [2]
    [why] = [reason["message"] for reason in document["reasons"] if reason["code"] == "NO_WINDOW"]
    assert "failed" in why and "connection refused" in why and why in err and "NO_WINDOW" in said
    assert "connection refused" in (folder / "sweep.html").read_text()
    [left_out] = [note for note in document["notes"] if "is left out: " in note]
    assert left_out.startswith("02-concurrency-4-1 is left out: ") and left_out.endswith(why)


def test_a_server_that_does_not_say_what_it_read_is_measured(tmp_path: Path) -> None:
    """Without its usage the tokens of prompts are unknown, and those of answers are the frames."""
    script, port, out = tmp_path / "server.py", free_port(), tmp_path / "runs"
    script.write_text((SERVER % (10**9, "pass")).replace(', {"choices": [], "usage": usage}', ""))
    prompts = write_lines(tmp_path / "prompts.jsonl", {"prompt": "ready?", "max_tokens": 8})
    load = ("--scenario", "server", "--rate", 40, "--samples", 40, "--min-duration", 0, "--warm-up", 0)
    server = ("--endpoint", f"http://127.0.0.1:{port}/v1", "--start-server")
    code, said, err = call_here(
        *("run", *server, shlex.join([sys.executable, str(script), str(port)]), "--prompts", prompts, *load),
        *("--endpoint.processes", 1, "--out", out),
    )
    assert code in (0, 3), said + err  # INVALID where other work keeps the client from a core
    [folder] = [path for path in out.iterdir() if path.is_dir()]
    result = json.loads((folder / "result.json").read_text())
    assert result["input_tokens"] is None and result["output_tokens_per_second"] > 0
    assert [item.id for item in audit(folder).findings if item.severity is Severity.FAIL] == []
    assert call_here("compare", folder, "GB300@v6.1")[0] == 0
    code, said, err = call_here("plan", "capacity", folder, "--json")
    assert code == 0, err
    assert any("Input tokens per output token are assumed" in note for note in json.loads(said)["notes"])


def test_a_started_server_ends_with_a_run_that_was_killed(tmp_path: Path) -> None:
    script, port = tmp_path / "server.py", free_port()
    script.write_text(SERVER % (10**9, "pass"))
    server = shlex.join([sys.executable, str(script), str(port)])

    def wait_until(listening: bool) -> None:
        deadline = time.monotonic() + TIMEOUT_SECONDS
        while time.monotonic() < deadline:
            with socket.socket() as one:
                if (one.connect_ex(("127.0.0.1", port)) == 0) is listening:
                    return
            time.sleep(0.1)
        raise AssertionError(f"listening is not {listening}")

    with started(
        *("run", "--endpoint", f"http://127.0.0.1:{port}/v1", "--warm-up", 1000, "--out", tmp_path / "runs"),
        *("--start-server", f"sh -c {shlex.quote(f'{server}; true')}"),  # a shell that does not become the server
        *("--prompts", write_lines(tmp_path / "prompts.jsonl", {"prompt": "ready?", "max_tokens": 8})),
    ) as process:
        wait_until(listening=True)
        process.kill()
    wait_until(listening=False)


def refused(tmp_path: Path, port: int, command: str, seconds: float = 20) -> str:
    """The one line with which a run that is to start ``command`` is refused."""
    code, out, err = call_here(
        *("run", "--endpoint", f"http://localhost:{port}/v1", "--start-server", command),
        *("--out", tmp_path / "runs", "--endpoint.start_seconds", seconds),
    )
    assert (code, out) == (2, "")
    return str(err.strip().splitlines()[-1])


def test_a_server_is_not_started_where_another_one_answers(tmp_path: Path) -> None:
    mark = tmp_path / "started"
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = int(other.getsockname()[1])
        line = refused(tmp_path, port, shlex.join(["touch", str(mark)]))
    assert f"http://localhost:{port}/v1 answers already: stop that server, or leave out --start-server" in line
    assert not mark.exists()


def test_a_server_that_ends_before_it_is_ready_is_named_with_its_last_words(tmp_path: Path) -> None:
    line = refused(tmp_path, free_port(), "sh -c 'echo no such model; exit 3'")
    assert "--start-server: it ended with code 3: no such model; all of it is in " in line


def test_a_server_at_another_port_is_said_not_to_answer_at_the_one_that_was_asked(tmp_path: Path) -> None:
    port = free_port()
    line = refused(tmp_path, port, "sleep 1000", seconds=1)
    assert f"--start-server: not ready after 1 s: http://localhost:{port}/v1: no answer (connection refused" in line


@pytest.mark.parametrize(
    ("command", "why"),
    [
        ("nosuchprog -x", ": nosuchprog cannot be started (No such file or directory)"),
        (" ", ": no command"),
        ("'", " ': No closing quotation; quote it as for a shell"),
    ],
)
def test_a_server_that_cannot_be_started_is_named(tmp_path: Path, command: str, why: str) -> None:
    assert f"--start-server{why}" in refused(tmp_path, free_port(), command)
    assert list(tmp_path.iterdir()) == []


def said_after(number: signal.Signals, sign: Path, process: subprocess.Popen[str]) -> str:
    """What a process writes to standard error until it ends, after a signal as soon as ``sign`` exists."""
    while not sign.exists():
        assert process.poll() is None, process.communicate()
        time.sleep(0.05)
    process.send_signal(number)
    return process.communicate(timeout=TIMEOUT_SECONDS)[1]


def test_ctrl_c_before_the_measurement_leaves_no_log_of_the_server(tmp_path: Path) -> None:
    begun = tmp_path / "begun"
    with started(
        *("run", "--endpoint", f"http://127.0.0.1:{free_port()}/v1", "--out", tmp_path / "runs"),
        *("--start-server", f"sh -c {shlex.quote(f'echo loading; touch {begun}; sleep 1000')}"),
    ) as process:
        err = said_after(signal.SIGTERM, begun, process)
    assert err.endswith("megatoken: interrupted before the measurement began; nothing was written\n")
    assert list(tmp_path.iterdir()) == [begun]


def test_ctrl_c_while_the_server_of_a_written_run_stops_says_where_the_run_is(tmp_path: Path) -> None:
    script, port, asked_to_stop, out = tmp_path / "server.py", free_port(), tmp_path / "asked", tmp_path / "runs"
    goes_on = f"import signal\nsignal.signal(signal.SIGINT, lambda *_: open({str(asked_to_stop)!r}, 'w').close())\n"
    script.write_text(goes_on + SERVER % (10**9, "pass"))
    with started(
        *("run", "--endpoint", f"http://127.0.0.1:{port}/v1", "--warm-up", 0, "--samples", 20, "--min-duration", 0),
        *("--start-server", shlex.join([sys.executable, str(script), str(port)]), "--endpoint.processes", 1),
        *("--prompts", write_lines(tmp_path / "prompts.jsonl", {"prompt": "ready?", "max_tokens": 8}), "--out", out),
    ) as process:
        err = said_after(signal.SIGINT, asked_to_stop, process)
    [log, folder] = sorted(out.iterdir(), key=Path.is_dir)
    assert process.returncode == 130
    assert err.endswith(
        f"megatoken: interrupted after the measurement; the run is in {folder}; megatoken report {folder} writes its"
        " page\n"
    )
    assert read_run(folder).verdict is Verdict.MEASURED
    assert log.is_file()


def test_an_interruption_that_names_a_run_leaves_the_log_of_its_server(tmp_path: Path) -> None:
    def interrupted(*words: str) -> bool:
        wanted = tmp_path / "server.log"
        with pytest.raises(KeyboardInterrupt), started_server("sleep 1000", wanted, lambda: None, 9):
            raise KeyboardInterrupt(*words)
        return wanted.exists()

    assert not interrupted()
    assert interrupted("the run is in runs/one")


def test_two_servers_that_start_in_one_second_have_a_log_each(tmp_path: Path) -> None:
    wanted = tmp_path / "20261120T091233Z-server.log"
    with ExitStack() as servers:
        commands = [f"sh -c 'echo {word}; exec sleep 1000'" for word in ("one", "two")]
        logs = [servers.enter_context(started_server(one, wanted, lambda: None, 9))[1] for one in commands]
        assert logs == [wanted, tmp_path / "20261120T091233Z-server-2.log"]
        while (said := [log.read_text() for log in logs]) != ["one\n", "two\n"]:
            assert "".join(said) in ("", "one\n", "two\n")
            time.sleep(0.05)


def test_first_tokens_of_failed_samples_are_not_held_against_a_run(tmp_path: Path) -> None:
    """LoadGen's percentiles of TTFT and TPOT are then of memory that it never set; its other fields still count."""
    load = ("--scenario", "server", "--rate", 60, "--min-duration", 2)
    code, out, folder, result = measure(tmp_path, "os._exit(7)", load=load)
    assert code == 3 and result["samples_failed"] > result["samples_completed"] > 0
    assert "LOADGEN_DISAGREES" not in out + json.dumps(result)
    found = {item.id: item for item in audit(folder).findings}
    assert [item.id for item in found.values() if item.severity is Severity.FAIL] == []
    assert found["result.latencies"].severity is Severity.UNKNOWN
    assert "samples failed" in found["result.latencies"].found
    summary = folder / "mlperf" / "mlperf_log_summary.txt"
    said = summary.read_text()
    summary.write_text(re.sub("(99.00 percentile first token latency .*: ).*", r"\g<1>7", said))
    changed = {item.id: item for item in audit(folder).findings}["summary.fields"]
    assert changed.severity is Severity.UNKNOWN and changed.found == found["result.latencies"].found
    other = "NO" if "constraints satisfied : Yes" in said else "Yes"  # LoadGen works it out once for each log
    reason = "Recommendations:\n * TTFT constrain not met: Reduce target QPS to improve latency.\n"
    summary.write_text(
        re.sub("(Performance constraints satisfied : ).*", rf"\g<1>{other}", said).replace("Recommendations:\n", reason)
    )
    changed_by = {item.id: item for item in audit(folder).findings}
    assert {changed_by[name].severity for name in ("summary.fields", "summary.reason")} == {Severity.UNKNOWN}
    summary.write_text(re.sub("(Completed samples per second *: ).*", r"\g<1>999.00", said))
    _, text, _ = call_here("audit", folder)
    assert "1 check of" in text and "fails; the run itself is INVALID: FAILED_SAMPLES" in " ".join(text.split())
    assert "Summary and detail log agree" in text
