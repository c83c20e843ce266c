"""Load tools as they are published, against the reference model: none may find a fault or miss a field.

Each is installed once, into a virtual environment of its own under ``.cache/``, which sees the packages of the suite
and so needs few more. Without a package index the tests skip.
"""

from __future__ import annotations

import csv
import json
import os
import subprocess
import sys
import sysconfig
from collections.abc import Callable
from pathlib import Path

import pytest
from serving import REFERENCE_MODEL, Served

from cli_support import call_here, write_lines

pytestmark = pytest.mark.timing  # what these tools wait for, and for how long, is their own

ROOT = Path(__file__).parents[2]
INSTALL_SECONDS = 240
RUN_SECONDS = 240
REQUESTS = 4
Run = Callable[..., subprocess.CompletedProcess[str]]

LOCUSTFILE = """
from locust import HttpUser, task


class Chat(HttpUser):
    @task
    def ask(self):
        body = {"messages": [{"role": "user", "content": "Name a colour."}], "max_tokens": 8, "stream": True}
        with self.client.post("/v1/chat/completions", json=body, stream=True, catch_response=True) as answer:
            lines = [line for line in answer.iter_lines() if line]
            if not lines or lines[-1] != b"data: [DONE]":
                answer.failure("the stream has no end")
"""


@pytest.fixture
def tool(request: pytest.FixtureRequest, tmp_path: Path) -> Run:
    """Runs a program of the environment of the package that the test names, in an empty folder."""
    package = request.param
    folder = ROOT / ".cache/load-tools" / package.replace("==", "-")
    done = folder / "installed"
    if not done.is_file() or str(folder) not in (folder / "pyvenv.cfg").read_text():  # of a checkout that was copied
        install(package, folder)
        done.touch()
    # The suite is offline, but for one tool this means that a folder is not looked at.
    environment = {name: value for name, value in os.environ.items() if name not in ("HF_HUB_OFFLINE", "PYTHONPATH")}

    def run(program: str, *arguments: str) -> subprocess.CompletedProcess[str]:
        command = [str(folder / "bin" / program), *arguments]
        ended = subprocess.run(
            command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=RUN_SECONDS, check=False
        )
        assert ended.returncode == 0, (ended.stdout + ended.stderr)[-3000:]
        return ended

    return run


def install(package: str, folder: Path) -> None:
    """A virtual environment with a package, and the packages of the suite behind it."""
    subprocess.run([sys.executable, "-m", "venv", "--clear", "--without-pip", folder], check=True)
    own = sysconfig.get_path("purelib", vars={"base": str(folder), "platbase": str(folder)})
    (Path(own) / "suite.pth").write_text(sysconfig.get_path("purelib") + "\n")
    command = [sys.executable, "-m", "pip", "--python", str(folder / "bin/python"), "install", "-q", "--no-compile"]
    options = ["--disable-pip-version-check", "--retries", "0", "--timeout", "10"]
    try:
        ended = subprocess.run(
            [*command, *options, package], capture_output=True, text=True, timeout=INSTALL_SECONDS, check=False
        )
    except subprocess.TimeoutExpired:
        pytest.skip(f"{package} could not be installed within {INSTALL_SECONDS} s")
    if ended.returncode:
        pytest.skip(f"{package} could not be installed: {ended.stderr.strip().splitlines()[-1]}")


def needs(package: str) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("tool", [package], indirect=True, ids=[package])


@needs("guidellm==0.8.1")
def test_guidellm(tool: Run, server: Served, tmp_path: Path) -> None:
    tool(
        *(
            "guidellm",
            "run",
            "--disable-progress",
            "--backend",
            f"kind=openai_http,target={server.url},model=reference",
        ),
        *("--profile", "kind=concurrent,streams=2", "--constraint", f"kind=max_requests,count={REQUESTS}"),
        *("--tokenizer", f"kind=huggingface_auto,model={REFERENCE_MODEL}"),
        *("--data", "kind=synthetic_text,prompt_tokens=32,output_tokens=8"),
        *("--output", "kind=json,path=out.json"),
    )
    (benchmark,) = json.loads((tmp_path / "out.json").read_text())["benchmarks"]
    requests = benchmark["requests"]
    assert not requests["errored"] and not requests["incomplete"]
    assert len(requests["successful"]) == REQUESTS
    assert all(one["output_tokens"] == 8 for one in requests["successful"])


@needs("aiperf==0.13.0")
def test_aiperf(tool: Run, server: Served, tmp_path: Path) -> None:
    tool(
        *("aiperf", "profile", "--model", "reference", "--url", server.url, "--endpoint-type", "chat", "--streaming"),
        *("--tokenizer", str(REFERENCE_MODEL), "--concurrency", "2", "--request-count", str(REQUESTS)),
        *("--synthetic-input-tokens-mean", "32", "--output-tokens-mean", "8"),
        *("--extra-inputs", "ignore_eos:true", "--output-artifact-dir", "out", "--ui", "none", "--no-gpu-telemetry"),
    )
    (file,) = (tmp_path / "out").rglob("profile_export_aiperf.json")
    report = json.loads(file.read_text())
    assert report["request_count"]["avg"] == REQUESTS
    assert report["time_to_first_token"]["avg"] > 0
    assert not report.get("error_summary")


@needs("locust==2.47.0")
def test_locust(tool: Run, server: Served, tmp_path: Path) -> None:
    (tmp_path / "locustfile.py").write_text(LOCUSTFILE)
    tool("locust", "--headless", "--users", "2", "--run-time", "4s", "--host", server.url, "--csv", "out")
    [*_, total] = csv.DictReader((tmp_path / "out_stats.csv").read_text().splitlines())
    assert total["Name"] == "Aggregated" and int(total["Request Count"]) > 0 and total["Failure Count"] == "0"


def test_our_own_replays_a_trace_on_a_server_of_a_known_model(server: Served, tmp_path: Path) -> None:
    lines = ({"timestamp": 40 * at, "input_length": 30, "output_length": 2, "hash_ids": [0]} for at in range(30))
    trace = write_lines(tmp_path / "trace.jsonl", *lines)
    flags = ("sweep", "--endpoint", f"{server.url}/v1", "--trace", trace, "--endpoint.processes", 1)
    code, out, err = call_here(*flags, "--warm-up", 0.3, "--settle", 0.2, "--out", tmp_path, "--json")
    assert code == 0, out + err
    [point] = json.loads(out)["points"]
    assert point["kind"] == "speed" and point["requests_completed"] == point["requests"] > 20
    assert point["input_tokens_per_request"] == 30 and point["output_tokens_per_request"] == 2
