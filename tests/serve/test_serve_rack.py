"""Several replicas behind one address: where requests go, and what is left of them when replicas are killed."""

from __future__ import annotations

import json
import os
import re
import signal
import threading
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from servers import Answer, Running, answers, completion, read_until_closed, request, running, wait_until

RACK = ("--rack", "auto", "--rack.replicas")
MOCK = ("--engine", "mock", "--tokens-per-second", "50")


def replicas_of(server: Running) -> list[int]:
    """Process ids of the replicas, by number."""
    return [
        one.pid
        for one in sorted(psutil.Process(server.process.pid).children(), key=lambda one: one.create_time())
        if "megatoken.serve.engine_process" in one.cmdline()
    ]


def by_engine(server: Running, name: str) -> dict[str, float]:
    """Values of a metric by its label of the engine."""
    text = server.ask("GET", "/metrics").body.decode()
    return {
        found[1]: float(found[2])
        for found in re.finditer(rf'^{re.escape(name)}\{{.*engine="(\w+)".*\}} (\S+)$', text, re.MULTILINE)
    }


def health(server: Running) -> dict[str, object]:
    answer = server.ask("GET", "/health")
    return {"http": answer.status, **json.loads(answer.body)}


def pid_of_engine(server: Running, engine: str) -> int:
    """The process of the replica with that label."""
    return replicas_of(server)[int(engine)]


def idle(server: Running) -> bool:
    names = ("vllm:num_requests_running", "vllm:num_requests_waiting", "megatoken:key_requests_running")
    return all(server.metric(name) == 0 for name in names)


@pytest.fixture(scope="module")
def pair() -> Iterator[Running]:
    with running(*MOCK, *RACK, "2", "--restart", "true") as server:
        yield server


class Client(threading.Thread):
    """One request, answered or not."""

    def __init__(self, server: Running, tokens: int, *, stream: bool) -> None:
        super().__init__()
        self.server, self.tokens, self.streams = server, tokens, stream
        self.data = b""
        self.start()

    def run(self) -> None:
        with self.server.connect() as connection:
            sent = completion(self.tokens, stream=self.streams)
            connection.sendall(sent.replace(b"Host", b"Connection: close\r\nHost", 1))
            while piece := connection.recv(1 << 16):
                self.data += piece

    def answer(self) -> Answer:
        self.join(60)
        assert not self.is_alive()
        (answer,) = answers(self.data)
        return answer


def tokens_of(answer: Answer) -> int:
    """Tokens of a stream that ended as it should."""
    frames = [line[6:] for line in answer.body.decode().splitlines() if line.startswith("data: ")]
    assert frames[-1] == "[DONE]", frames[-3:]
    return sum(1 for one in frames[:-1] if json.loads(one)["choices"][0]["text"])


def test_a_killed_replica_ends_its_streams_with_an_error_and_nothing_else(pair: Running) -> None:
    wait_until(lambda: health(pair)["replicas_serving"] == 2, "both serve")
    streams = [Client(pair, 150, stream=True) for _ in range(12)]
    whole = [Client(pair, 100, stream=False) for _ in range(12)]
    wait_until(lambda: pair.metric("vllm:num_requests_running") == 24, "all run")
    wait_until(lambda: all(b"data: " in one.data for one in streams), "all stream")
    assert by_engine(pair, "vllm:num_requests_running") == {"0": 12, "1": 12}
    os.kill(pid_of_engine(pair, "0"), signal.SIGKILL)
    wait_until(lambda: health(pair)["status"] == "degraded", "health says so")
    found = health(pair)
    assert (found["http"], found["share_left"], found["replicas_serving"]) == (200, 0.5, 1), found
    assert "was lost" in str(found["message"])
    assert pair.metric("megatoken:replicas_share") == 0.5
    ended = Counter(b'"error"' in one.answer().body for one in streams)
    assert ended == {True: 6, False: 6}
    for one in streams:
        if b'"error"' in one.data:
            (error,) = (json.loads(line[6:]) for line in one.answer().body.splitlines() if b'"error"' in line)
            assert set(error["error"]) == {"message", "type", "param", "code"}
            assert "the replica that computed this answer was lost" in error["error"]["message"]
        else:
            assert tokens_of(one.answer()) == 150
    for one in whole:  # their clients have seen nothing, so they are computed again
        answer = one.answer()
        assert answer.status == 200 and json.loads(answer.body)["usage"]["completion_tokens"] == 100
    wait_until(lambda: health(pair)["status"] == "ready", "it is started again", 60)
    wait_until(lambda: idle(pair), "gauges are 0")
    first = by_engine(pair, "vllm:generation_tokens_total")
    for _ in range(4):
        assert tokens_of(Client(pair, 3, stream=True).answer()) == 3
    assert by_engine(pair, "vllm:generation_tokens_total")["0"] > first["0"], "it gets requests again"


def test_a_silent_replica_is_lost_and_comes_back() -> None:
    with running(*MOCK, *RACK, "2", "--rack.dead-after-seconds", "1") as server:
        streams = [Client(server, 200, stream=True) for _ in range(4)]
        wait_until(lambda: all(b"data: " in one.data for one in streams), "all stream")
        silent = pid_of_engine(server, "1")
        os.kill(silent, signal.SIGSTOP)
        server.wait_for_line("was silent for")
        assert health(server)["status"] == "degraded"
        os.kill(silent, signal.SIGCONT)
        assert Counter(b'"error"' in one.answer().body for one in streams) == {True: 2, False: 2}
        wait_until(lambda: health(server)["status"] == "ready", "it has connected again")
        wait_until(lambda: idle(server), "gauges are 0")


def test_requests_wait_for_a_replica_and_the_last_death_without_restart_ends_the_server() -> None:
    with running(*MOCK, *RACK, "2") as server:
        first, second = replicas_of(server)
        os.kill(first, signal.SIGSTOP)  # takes requests, and answers none
        waiting = [Client(server, 5, stream=True) for _ in range(4)]
        wait_until(lambda: server.metric("vllm:num_requests_running") >= 2, "two are there")
        os.kill(first, signal.SIGKILL)
        assert [tokens_of(one.answer()) for one in waiting] == [5] * 4, "those without a token ran elsewhere"
        server.wait_for_line("it is not started again")
        assert health(server)["share_left"] == 0.5
        last = [Client(server, 500, stream=stream) for stream in (True, False)]
        wait_until(lambda: b"data: " in last[0].data, "it streams")
        wait_until(lambda: server.metric("vllm:num_requests_running") == 2, "the other one has come too")
        os.kill(second, signal.SIGKILL)
        assert b'"error"' in last[0].answer().body
        assert last[1].answer().status == 503
        assert server.process.wait(20) == 1
        assert any("no replica is left" in line for line in server.log)


def test_a_stop_signal_lets_the_streams_of_all_replicas_finish() -> None:
    with running(*MOCK, *RACK, "3", "--http-processes", "2") as server:
        children = psutil.Process(server.process.pid).children(recursive=True)
        streams = [Client(server, 60, stream=True) for _ in range(9)]
        wait_until(lambda: all(b"data: " in one.data for one in streams), "all stream")
        server.process.send_signal(signal.SIGTERM)
        assert [tokens_of(one.answer()) for one in streams] == [60] * 9
        assert server.process.wait(20) == 0
        assert not [one for one in children if one.is_running() and one.status() != psutil.STATUS_ZOMBIE]


def test_conversations_find_their_pages_and_limits_of_keys_hold_over_all_replicas() -> None:
    flags = ("--precision", "fp32", *RACK, "2", "--engine.threads", "1", "--api-key", "alpha,beta")
    with running(*flags) as server:
        history = {talk: [5 + talk] * 40 for talk in range(4)}
        cached: Counter[int] = Counter()
        for turn in range(4):
            for prompt in history.values():
                body = {"model": "reference", "prompt": prompt, "max_tokens": 4, "ignore_eos": True}
                answer = server.ask("POST", "/v1/completions", {**body, "return_token_ids": True}, key="alpha")
                assert answer.status == 200, answer.body
                found = json.loads(answer.body)
                usage = found["usage"]
                cached[turn] += usage["prompt_tokens_details"]["cached_tokens"] > 0
                prompt += [*found["choices"][0]["token_ids"], 7, 8]
        assert cached == {0: 0, 1: 4, 2: 4, 3: 4}
        used = by_engine(server, "vllm:prompt_tokens_total")
        assert used["0"] and used["1"], used


def test_a_limit_of_a_key_is_one_limit_for_the_whole_rack(tmp_path: Path) -> None:
    keys = tmp_path / "keys.yaml"
    keys.write_text("keys:\n  - {name: few, key: few, max_running: 2, requests_per_minute: 5}\n")
    with running(*MOCK, *RACK, "2", "--api-keys", str(keys)) as server:
        body = {"model": "reference", "prompt": [5, 6], "max_tokens": 40, "ignore_eos": True}
        connections = [server.connect() for _ in range(6)]
        for connection in connections:
            sent = request("POST", "/v1/completions", body, key="few", headers={"Connection": "close"})
            connection.sendall(sent)
        most = 0.0
        began = time.monotonic()
        while time.monotonic() - began < 1:
            most = max(most, server.metric("vllm:num_requests_running"))
        statuses = Counter(answers(read_until_closed(connection))[0].status for connection in connections)
        for connection in connections:
            connection.close()
        assert most == 2
        assert statuses == {200: 5, 429: 1}


def test_a_hung_replica_and_the_router_are_started_again() -> None:
    patience = ("--rack.dead-after-seconds", "1", "--rack.reconnect-seconds", "2")
    with running(*MOCK, *RACK, "2", "--restart", "true", *patience) as server:
        os.kill(pid_of_engine(server, "0"), signal.SIGSTOP)
        server.wait_for_line("replica 0: ended by SIGKILL; it is started again")
        wait_until(lambda: health(server)["status"] == "ready", "another is in its place", 60)
        stream = Client(server, 500, stream=True)
        wait_until(lambda: b"data: " in stream.data, "it streams")
        os.kill(server.child("router_process"), signal.SIGKILL)
        assert b"the engine stopped" in stream.answer().body
        server.wait_for_line("the router process was ended by SIGKILL")
        wait_until(lambda: health(server)["status"] == "ready", "all are there again", 60)
        assert tokens_of(Client(server, 3, stream=True).answer()) == 3
