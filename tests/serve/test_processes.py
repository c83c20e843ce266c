"""What happens to open streams when a process of the server is stopped, killed, overloaded or left by its client."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import socket
import ssl
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from servers import (
    ANSWER_SECONDS,
    Answer,
    Running,
    answers,
    completion,
    read_until_closed,
    request,
    running,
    wait_until,
)

from cli_support import call, call_here
from megatoken import __version__
from megatoken.serve.options import HttpProcessSettings, load_serve_config
from megatoken.serve.supervisor import _Supervisor
from megatoken.serve.tenants import Keys

MOCK = ("--engine", "mock", "--tokens-per-second", "50")
SECRET = "a-key-that-must-never-be-shown"


@pytest.fixture(scope="module")
def reference() -> Iterator[Running]:
    """The reference model, one request at a time; the engine holds one more ahead, and one may wait in front of it."""
    with running("--precision", "fp32", "--engine.max-sequences", "1", "--max-queued", "1") as server:
        yield server


def idle(server: Running) -> bool:
    return server.metric("vllm:num_requests_running") + server.metric("vllm:num_requests_waiting") == 0


def test_a_client_that_leaves_frees_the_pages_within_a_step(reference: Running) -> None:
    connection = reference.stream(1500)
    assert reference.metric("vllm:num_requests_running") == 1
    connection.close()
    wait_until(lambda: idle(reference), "the request ends")
    made = reference.metric("vllm:generation_tokens_total")
    assert reference.metric("vllm:kv_cache_usage_perc") == 0
    time.sleep(0.3)
    assert reference.metric("vllm:generation_tokens_total") == made < 1500


def test_a_client_that_leaves_the_queue_never_reaches_the_engine(reference: Running) -> None:
    first = reference.stream(1500)
    with reference.connect() as ahead, reference.connect() as waiting:
        for connection, count in ((ahead, 1), (waiting, 2)):
            connection.sendall(completion(5))
            wait_until(lambda count=count: reference.metric("vllm:num_requests_waiting") == count, "it waits")
    wait_until(lambda: reference.metric("vllm:num_requests_waiting") == 0, "both have left")
    assert reference.metric("vllm:num_requests_running") == 1
    first.close()
    wait_until(lambda: idle(reference), "the first ends")


def test_a_full_queue_answers_429_at_once_and_the_others_go_on(reference: Running) -> None:
    with reference.stream(1500) as first, reference.connect() as ahead, reference.connect() as waiting:
        for connection, count in ((ahead, 1), (waiting, 2)):
            connection.sendall(completion(3))
            wait_until(lambda count=count: reference.metric("vllm:num_requests_waiting") == count, "it waits")
        closing = completion(3, stream=False).replace(b"Host", b"Connection: close\r\nHost", 1)
        (answer,) = answers(reference.raw(closing))
        assert (answer.status, answer.error["type"]) == (429, "rate_limit_error")
        assert int(answer.headers["retry-after"]) >= 1
        first.close()
        for connection in (ahead, waiting):
            assert read_until_closed_or_ended(connection).startswith(b"HTTP/1.1 200")
    wait_until(lambda: idle(reference), "all have ended")


def test_a_request_that_the_engine_refuses_is_the_clients_error(reference: Running) -> None:
    answer = reference.ask("POST", "/v1/completions", {"model": "reference", "prompt": [5, 999_999], "max_tokens": 3})
    assert answer.status == 400 and "vocabulary" in answer.error["message"]
    answer = reference.ask("POST", "/v1/completions", {"model": "reference", "prompt": [5], "max_tokens": 1_000_000})
    assert answer.status == 400


def test_a_stop_signal_lets_streams_finish_and_refuses_new_ones() -> None:
    with running(*MOCK) as server, server.stream(100) as stream, server.connect() as waiting:
        server.process.send_signal(signal.SIGTERM)
        server.wait_for_line("stopping")
        wait_until(lambda: server.ask("GET", "/health").status == 503, "health says no")
        health = json.loads(server.ask("GET", "/health").body)
        assert health == {"status": "draining", "message": "the server is stopping"}
        waiting.sendall(completion(5))
        (answer,) = answers(waiting.recv(65536))
        assert answer.status == 503 and int(answer.headers["retry-after"]) >= 1
        assert read_until_closed(stream).endswith(b"data: [DONE]\n\n\r\n0\r\n\r\n")
        assert server.process.wait(ANSWER_SECONDS) == 0


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGALRM])  # by which the command raises one it put off
def test_a_server_stopped_before_it_is_ready_ends_with_one_code_and_in_its_own_words(number: signal.Signals) -> None:
    command = [sys.executable, "-m", "megatoken", "serve", "--port", "0", *MOCK]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, start_new_session=True) as process:
        assert process.stderr is not None
        lines = [process.stderr.readline()]
        children = psutil.Process(process.pid).children
        wait_until(lambda: len(children()) == 2, "both processes have started")
        started = children()
        os.killpg(process.pid, number)  # as a terminal does
        lines += process.stderr.readlines()
        assert process.wait(ANSWER_SECONDS) == 130
        assert not [child for child in started if child.is_running()]
    assert [line.partition(",")[0].strip() for line in lines] == [
        "megatoken: loading reference",
        "megatoken: stopping: another signal ends at once",
    ]


def test_a_second_signal_ends_the_server_at_once() -> None:
    with running(*MOCK) as server, server.stream(1000) as stream:
        server.process.send_signal(signal.SIGTERM)
        server.wait_for_line("stopping")
        server.process.send_signal(signal.SIGTERM)
        assert server.process.wait(ANSWER_SECONDS) == 130
        assert b"[DONE]" not in read_until_closed(stream)
        server.wait_for_line("ended at once; any answer still open was cut off")


def test_answers_that_take_longer_than_the_server_waits_for_end_with_the_cause() -> None:
    with running(*MOCK, "--drain-seconds", "0.5") as server, server.stream(1000) as stream:
        server.process.send_signal(signal.SIGTERM)
        data = read_until_closed(stream)
        assert b"the server is stopping, and its engine ended before this answer was complete" in data
        server.wait_for_line("any answer still open after 0.5 s (--drain-seconds) was cut off")
        assert server.process.wait(ANSWER_SECONDS) == 0


def test_children_end_with_a_parent_that_was_killed() -> None:
    with running(*MOCK) as server:
        children = psutil.Process(server.process.pid).children(recursive=True)
        assert len(children) >= 2
        server.process.kill()
        _, alive = psutil.wait_procs(children, timeout=ANSWER_SECONDS)
        assert not alive


def test_a_dead_engine_ends_every_stream_with_an_error_and_the_server() -> None:
    with running("--precision", "fp32") as server:
        streams = [server.stream(1500) for _ in range(3)]
        os.kill(server.child("engine_process"), signal.SIGKILL)
        for stream in streams:
            data = read_until_closed(stream)
            assert b"error" in data and b"the engine stopped" in data
            stream.close()
        assert server.process.wait(ANSWER_SECONDS) == 1
        assert any("the engine process was ended by SIGKILL" in line for line in server.log)


@pytest.fixture
def temporary() -> Iterator[Path]:
    """A folder for TMPDIR; the path of ``tmp_path`` is too long for a socket."""
    with tempfile.TemporaryDirectory(prefix="tests-") as folder:
        yield Path(folder)


def test_what_a_killed_server_left_is_removed_by_the_next_and_what_others_use_is_not(temporary: Path) -> None:
    environment = {"TMPDIR": str(temporary)}
    (temporary / "megatoken-serve-unlocked").mkdir()  # of a version that did not lock its folder
    (temporary / "megatoken-serve-link").symlink_to(temporary)
    others = set(temporary.iterdir())
    with running(*MOCK, environment=environment) as first:
        of_first = set(temporary.iterdir()) - others
        with running(*MOCK, environment=environment) as killed:
            killed.process.kill()
        left = set(temporary.iterdir()) - others - of_first
        assert len(left) == 1
        with running(*MOCK, environment=environment) as server:
            there = set(temporary.iterdir())
            assert not left & there and others | of_first < there
            assert first.ask("GET", "/health").status == 200
            server.process.send_signal(signal.SIGTERM)
            assert server.process.wait(ANSWER_SECONDS) == 0
        first.process.send_signal(signal.SIGINT)
        assert first.process.wait(ANSWER_SECONDS) == 0
    assert set(temporary.iterdir()) == others


def test_a_dead_engine_of_several_ranks_leaves_no_files(temporary: Path) -> None:
    flags = ("--precision", "fp32", "--engine.tensor_parallel", "2")
    with running(*flags, environment={"TMPDIR": str(temporary)}) as server:
        assert list(temporary.glob("megatoken-serve-*/megatoken-ranks-*"))
        os.kill(server.child("engine_process"), signal.SIGKILL)
        assert server.process.wait(ANSWER_SECONDS) == 1
    assert not list(temporary.iterdir())


def noticed(server: Running, deaths: int) -> bool:
    return server.process.poll() is not None or sum("started again" in line for line in server.log) == deaths


def test_a_dead_engine_is_started_again_and_one_that_keeps_dying_is_given_up() -> None:
    with running(*MOCK, "--restart", "true") as server:
        with server.stream(1500) as stream:
            os.kill(server.child("engine_process"), signal.SIGKILL)
            assert b"the engine stopped" in read_until_closed_or_ended(stream)
        server.wait_for_line("the engine is started again")
        health = server.ask("GET", "/health")
        if health.status == 503:  # else it is ready already
            assert json.loads(health.body)["status"] == "starting"
        wait_until(lambda: server.ask("GET", "/health").status == 200, "it serves again")
        server.stream(3).close()
        assert server.process.poll() is None
        for count in range(2, 13):  # more than five: one that has lived for long begins a new row
            wait_until(lambda: server.ask("GET", "/health").status == 200, "it serves")
            os.kill(server.child("engine_process"), signal.SIGKILL)
            wait_until(lambda count=count: noticed(server, count), "it is noticed")
            if server.process.poll() is not None:
                break
        assert server.process.wait(ANSWER_SECONDS) == 1
        server.wait_for_line("ended by SIGKILL, 5 times in a row; the server gives up")


def read_until_closed_or_ended(stream: socket.socket) -> bytes:
    data = b""
    while not data.endswith(b"0\r\n\r\n"):
        piece = stream.recv(65536)
        if not piece:
            break
        data += piece
    return data


def test_an_http_process_that_dies_is_started_again_and_its_requests_end() -> None:
    with running(*MOCK) as server:
        with server.stream(1500) as stream:
            os.kill(server.child("http_process"), signal.SIGKILL)
            assert b"[DONE]" not in read_until_closed(stream)
        server.wait_for_line("it is started again")
        wait_until(lambda: idle(server), "the request was cancelled")
        server.stream(3).close()


def test_several_http_processes_share_one_port_and_stop_at_once_when_idle() -> None:
    with running(*MOCK, "--http-processes", "3") as server:
        for _ in range(12):
            server.stream(2).close()
        wait_until(lambda: idle(server), "all have ended")
        assert server.metric("vllm:generation_tokens_total") >= 12
        children = psutil.Process(server.process.pid).children(recursive=True)
        assert len(children) >= 4
        server.process.send_signal(signal.SIGINT)
        assert server.process.wait(ANSWER_SECONDS) == 0
        assert not [one for one in children if one.is_running() and one.status() != psutil.STATUS_ZOMBIE]


def test_keys_open_the_server_and_are_never_shown(tmp_path: Path) -> None:
    file = tmp_path / "keys.yaml"
    file.write_text(f"keys:\n- name: chat\n  key: {SECRET}\n- name: batch\n  key: other\n  requests_per_minute: 2\n")
    with running(*MOCK, "--api-keys", str(file), "--host", "0.0.0.0") as server:
        assert not any("WARNING" in line for line in server.log)
        assert server.ask("GET", "/health").status == 200
        assert server.ask("GET", "/v1/models", key=SECRET).status == 200
        for key in (None, "wrong", SECRET + "x", SECRET[:-1], ""):
            answer = server.ask("GET", "/v1/models", key=key)
            assert (answer.status, answer.error["type"]) == (401, "authentication_error")
        server.stream(3, key=SECRET).close()
        statuses = [answers(server.raw(limited()))[0].status for _ in range(3)]
        assert statuses == [200, 200, 429]
        metrics = server.ask("GET", "/metrics", key=SECRET).body.decode()
        assert 'key="batch"' in metrics and 'key="chat"' in metrics
        open_metrics = server.ask("GET", "/metrics").body.decode()
        assert "vllm:num_requests_running" in open_metrics and "megatoken:key_" not in open_metrics
        assert SECRET not in metrics + "".join(server.log)
        command_lines = [" ".join(one.cmdline()) for one in psutil.Process(server.process.pid).children(recursive=True)]
        assert not any(SECRET in line for line in command_lines)


def limited() -> bytes:
    body = {"model": "reference", "prompt": [5], "max_tokens": 2}
    return request("POST", "/v1/completions", body, key="other", headers={"Connection": "close"})


@pytest.mark.timing
def test_a_key_that_floods_waits_for_itself(tmp_path: Path) -> None:
    file = tmp_path / "keys.yaml"
    file.write_text("keys:\n- name: flood\n  key: flood\n- name: other\n  key: other\n")
    with running("--precision", "fp32", "--engine.max-sequences", "8", "--api-keys", str(file)) as server:

        def waiting() -> int:
            metrics = server.ask("GET", "/metrics", key="other").body.decode()
            found = re.search(r'megatoken:key_requests_waiting\{.*key="flood"\} (\d+)', metrics)
            return int(found[1]) if found else 0

        flood = [server.connect() for _ in range(60)]
        for number, connection in enumerate(flood):
            connection.sendall(completion(400, key="flood", prompt=[5 + number, *range(6, 600)]))
        wait_until(lambda: waiting() > 40, "the flood waits")
        for _ in range(5):
            before = waiting()
            server.stream(3, key="other").close()
            assert before - waiting() <= 2  # it was served before those that came first
        assert waiting() > 30
        for connection in flood:
            connection.close()
        wait_until(lambda: idle(server), "the flood is over")


SIMULATED = ("--model", "llama3.1-8b", "--served-model-name", "reference", "--precision", "fp8", "--simulated-gpu")


@pytest.mark.timing
def test_a_key_that_floods_makes_short_steps_next_to_one_that_asks_for_little(tmp_path: Path) -> None:
    file = tmp_path / "keys.yaml"
    file.write_text("keys:\n- name: flood\n  key: flood\n- name: other\n  key: other\n")
    with running(*SIMULATED, "H200", "--api-keys", str(file)) as server:
        assert json.loads(server.ask("GET", "/version").body) == {"version": f"{__version__}+simulated.H200"}
        assert any("tokens are made up: simulated.H200" in line for line in server.log)
        server.stream(1, key="other").close()
        flood = [server.connect() for _ in range(120)]
        for number, connection in enumerate(flood):
            connection.sendall(completion(8, key="flood", prompt=[5 + number, *range(6, 1500)]))
        name = "vllm:iteration_tokens_total"
        streams = [server.stream(100, key="other")]
        steps, tokens = server.metric(f"{name}_count"), server.metric(f"{name}_sum")
        ends = time.monotonic() + 1.5
        while time.monotonic() < ends:
            streams.append(server.stream(100, key="other"))
        steps, tokens = server.metric(f"{name}_count") - steps, server.metric(f"{name}_sum") - tokens
        assert 10 < tokens / steps < 700, (tokens, steps)  # a step of the flood alone has up to 2,048
        for connection in [*flood, *streams]:
            connection.close()
        wait_until(lambda: idle(server), "all are gone")


@pytest.mark.parametrize("more", [("--engine", "mock"), ("--rack", "auto")])
def test_a_simulated_gpu_is_for_one_engine_that_plans(more: tuple[str, str]) -> None:
    words = "megatoken: --simulated-gpu: not supported with --rack or --engine mock; leave one of them out\n"
    assert call_here("serve", *SIMULATED, "H200", *more) == (2, "", words)


def test_a_silent_engine_is_not_healthy_until_it_speaks_again() -> None:
    with running(*MOCK) as server:
        engine = server.child("engine_process")
        os.kill(engine, signal.SIGSTOP)
        wait_until(lambda: server.ask("GET", "/health").status == 503, "the engine is silent")
        assert json.loads(server.ask("GET", "/health").body)["status"] == "stuck"
        assert server.ask("POST", "/v1/completions", {"model": "reference", "prompt": [5]}).status == 503
        os.kill(engine, signal.SIGCONT)
        wait_until(lambda: server.ask("GET", "/health").status == 200, "it speaks again")
        server.stream(3).close()


def test_a_switch_with_another_value_is_refused_by_name() -> None:
    words = "megatoken: --restart: must be true or false, got 'maybe'\n"
    assert call_here("serve", "--restart", "maybe", "--port", 0) == (2, "", words)


def test_a_key_from_the_environment() -> None:
    with running(*MOCK, environment={"MEGATOKEN_API_KEY": SECRET}) as server:
        assert server.ask("GET", "/v1/models").status == 401
        assert server.ask("GET", "/v1/models", key=SECRET).status == 200
        children = psutil.Process(server.process.pid).children(recursive=True)
        assert children and not any("MEGATOKEN_API_KEY" in one.environ() for one in children)


def test_tls_by_files(tmp_path: Path) -> None:
    certificate, key = tmp_path / "cert.pem", tmp_path / "key.pem"
    subprocess.run(
        [
            *("openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-subj", "/CN=localhost"),
            *("-keyout", str(key), "-out", str(certificate)),
        ],
        check=True,
        capture_output=True,
    )
    flags = ["--tls-certificate", str(certificate), "--tls-key", str(key)]
    with running(*MOCK, *flags, scheme="https") as server:
        context = ssl.create_default_context(cafile=str(certificate))
        context.check_hostname = False
        with context.wrap_socket(server.connect()) as connection:
            connection.sendall(request("GET", "/version", headers={"Connection": "close"}))
            assert answers(read_until_closed(connection))[0].status == 200  # type: ignore[arg-type]
        with server.connect() as plain:
            plain.sendall(request("GET", "/version"))
            assert not read_until_closed(plain).startswith(b"HTTP/1.1 200")


def test_a_process_that_starts_while_the_server_stops_is_stopped(tmp_path: Path) -> None:
    async def start() -> int:
        options = load_serve_config({})
        with socket.create_server(("127.0.0.1", 0)) as listener:
            supervisor = _Supervisor(options, Keys(), [listener], tmp_path / "engine.sock")
            supervisor._stopping.set()
            settings = HttpProcessSettings(options, Keys(), str(tmp_path / "engine.sock"), listener.fileno())
            child = await supervisor._start("http_process", settings, [listener.fileno()])
            try:
                return await asyncio.wait_for(child.process.wait(), 60)
            finally:
                child.kill()
                child.writer.close()
                await child.writer.wait_closed()
                supervisor._engine_listener.close()

    assert asyncio.run(start()) == 0


def test_browsers_may_call_a_name_may_have_slashes_and_json_logs_never_hold_text() -> None:
    name, origin = "meta-llama/Llama-3.1-8B", "https://a.example"
    with running(*MOCK, "--json", "--cors-origins", origin, "--served-model-name", name) as server:
        for path in (name, name.replace("/", "%2F")):
            answer = server.ask("GET", f"/v1/models/{path}")
            assert (answer.status, json.loads(answer.body)["id"]) == (200, name)
        assert server.ask("GET", "/v1/models/").status == 404
        asked = "authorization, content-type, x-stainless-arch, x-stainless-retry-count"
        for wanted, allowed in ((asked, asked), ("a b", "authorization, content-type, x-request-id")):
            headers = {"Origin": origin, "Access-Control-Request-Headers": wanted, "Connection": "close"}
            (answer,) = answers(server.raw(request("OPTIONS", "/v1/completions", headers=headers)))
            assert answer.headers["access-control-allow-headers"] == allowed
            assert answer.headers["access-control-expose-headers"] == "x-request-id, retry-after"
        head = b"POST /v1/completions HTTP/1.1\r\nHost: a\r\nConnection: close\r\nTransfer-Encoding: chunked\r\n\r\n"
        (answer,) = answers(server.raw(head + b"2\r\n{}\r\n0\r\nOrigin: https://a.example\r\n\r\n"))
        assert answer.status == 400 and "access-control-allow-origin" not in answer.headers
        body = {"model": name, "prompt": "the quick brown secret", "max_tokens": 2}
        headers = {"Origin": "https://a.example", "X-Request-Id": "mine", "Connection": "close"}
        (answer,) = answers(server.raw(request("POST", "/v1/completions", body, headers=headers)))
        assert answer.headers["access-control-allow-origin"] == "https://a.example"
        (other,) = answers(server.raw(request("GET", "/version", headers=headers | {"Origin": "https://b.example"})))
        assert "access-control-allow-origin" not in other.headers
        wait_until(lambda: any('"mine"' in line for line in server.log), "the log names it")
        lines = [json.loads(line) for line in server.log if line.startswith("{")]
        assert lines[0]["message"] == f"loading reference, to serve it on http://127.0.0.1:{server.port}"
        (line,) = [one for one in lines if one.get("request_id") == "mine" and one["path"] == "/v1/completions"]
        assert (line["request_id"], line["status"], line["method"]) == ("mine", 200, "POST")
        assert "quick" not in "".join(server.log)


def test_all_bodies_together_are_limited_and_other_machines_without_a_key_are_a_loud_warning() -> None:
    with running(*MOCK, "--max-body-bytes", "100000", "--host", "0.0.0.0") as server:
        assert any("WARNING" in line and "--api-key" in line for line in server.log)
        body = request("POST", "/v1/completions", b" " * 100_000)
        senders = [server.connect() for _ in range(16)]
        for connection in senders:
            connection.sendall(body[:-1])
        refused = wait_for_refusal(server)
        assert (refused.status, refused.headers["retry-after"]) == (503, "1")
        for connection in senders:
            connection.close()
        wait_until(lambda: answers(server.raw(completion_that_closes()))[0].status == 200, "they are released")


def wait_for_refusal(server: Running) -> Answer:
    """The answer once the server has read what was sent before."""
    while (answer := answers(server.raw(completion_that_closes()))[0]).status == 200:
        time.sleep(0.05)
    return answer


def completion_that_closes() -> bytes:
    return completion(2).replace(b"Host", b"Connection: close\r\nHost", 1)


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--port", "PORT"], "--port: cannot listen on"),
        (["--host", "no.such.host.example"], "--host"),
        (["--api-key", ""], "API key is empty"),
        (["--tls-key", "x.pem"], "--tls-certificate and --tls-key go together"),
        (["--tokens-per-second", "5"], "--tokens-per-second: only the mock engine has a pace"),
        (["--http-processes", "0"], "--http-processes: must be at least 1"),
        (["--prot", "1"], "did you mean --port"),
        (["--engine", "foo"], "--engine: 'foo' is not one of 'real', 'mock'\n"),
        (["--tool-format", "x"], "--tool-format: must be 'auto', 'llama3' or 'hermes'"),
        (["--model", "no-such-model"], "no such directory"),
    ],
)
def test_what_cannot_be_served_is_one_line(flags: list[str], words: str) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        flags = [flag.replace("PORT", port) for flag in flags]
        command = ("serve", *([] if "--port" in flags else ["--port", "0"]), *flags)
        # A process that was started ends as one, so the model that is missing has one of its own.
        code, _, err = (call if "--model" in flags else call_here)(*command)
    assert code == 2 and words in err, err
    *before, line = err.splitlines()
    assert line.startswith("megatoken: ")
    assert [one for one in before if not one.startswith(f"megatoken: loading {flags[-1]}, to serve it on")] == []
