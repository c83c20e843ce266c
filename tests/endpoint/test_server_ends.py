"""A server that ends in the middle of a run: the console and the result say when, how, and its last words."""

from __future__ import annotations

import json
import shlex
import socket
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from cli_support import call, call_here, write_lines
from megatoken.audit import Severity, audit

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
        self.rfile.read(int(self.headers["Content-Length"]))
        with Handler.lock:
            if Handler.answered >= %d:
                print("out of blocks", "giving up", sep="\\n", flush=True)
                %s
            Handler.answered += 1
        time.sleep(0.01)
        choice = {"text": "yes", "finish_reason": "stop", "index": 0}
        self.reply({"choices": [choice], "usage": {"prompt_tokens": 2, "completion_tokens": 2}})

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


def measure(tmp_path: Path, then: str, run: Callable[..., Any] = call_here) -> tuple[int, str, Path, dict[str, Any]]:
    """Runs 120 requests against a server that does ``then`` after 40 answers: exit code, output, folder, result."""
    script, port = tmp_path / "server.py", free_port()
    script.write_text(SERVER % (ANSWERS, then))
    prompts = write_lines(tmp_path / "prompts.jsonl", {"prompt": "ready?", "max_tokens": 8})
    code, out, _ = run(
        *("run", "--endpoint", f"http://127.0.0.1:{port}/v1", "--start-server"),
        shlex.join([sys.executable, str(script), str(port)]),
        *("--prompts", prompts, "--samples", 120, "--min-duration", 0, "--warm-up", 0, "--out", tmp_path / "runs"),
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
    assert [item.id for item in audit(folder).findings if item.severity is Severity.FAIL] == []


def test_a_run_that_a_signal_ends_says_why_requests_failed(tmp_path: Path) -> None:
    late = "time.sleep(0.5), os.kill(os.getppid(), signal.SIGINT), time.sleep(1)"  # when the client knows of failures
    refuse = 'return self.reply({"error": {"message": "no room"}}, 400)'
    then = f"Handler.answered += 1; Handler.answered == {ANSWERS + 9} and ({late}); {refuse}"
    code, out, folder, result = measure(tmp_path, then, call)
    assert code == 130 and result["verdict"] == "INTERRUPTED"
    assert "no room" in next(line for line in out.splitlines() if line.startswith("  REQUESTS_FAILED"))
    assert "REQUESTS_FAILED" in [note["code"] for note in result["notes"]]
    assert [item.id for item in audit(folder).findings if item.severity is Severity.FAIL] == []
