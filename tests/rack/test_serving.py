"""A server whose replicas are processes of a Ray cluster: one on each of two nodes, and one of them is killed."""

from __future__ import annotations

import json
import os
import re
import signal
import sys
from pathlib import Path

import psutil
from rack_drivers import PATIENCE_SECONDS, RayNodes, environment

sys.path.insert(0, str(Path(__file__).parents[1] / "serve"))

from servers import Running, answers, completion, read_until_closed, running, wait_until


def replica_processes(cluster: RayNodes) -> list[psutil.Process]:
    """Ray names the process of an actor after its class."""
    return [
        one
        for one in psutil.Process(cluster.process_id).children(recursive=True)
        if "ReplicaActor" in " ".join(one.cmdline())
    ]


def serving(server: Running) -> dict[str, object]:
    found: dict[str, object] = json.loads(server.ask("GET", "/health").body)
    return found


def test_replicas_on_two_nodes_answer_and_a_killed_one_is_replaced(cluster: RayNodes) -> None:
    flags = ("--precision", "fp32", "--rack", cluster.address, "--restart", "true", "--rack.dead-after-seconds", "60")
    with running(*flags, environment=environment(cluster.folder)) as server:
        assert serving(server)["replicas_serving"] == 2
        streams = [server.connect() for _ in range(4)]
        for one in streams:
            one.settimeout(PATIENCE_SECONDS)
            one.sendall(completion(1500).replace(b"Host", b"Connection: close\r\nHost", 1))
        wait_until(lambda: server.metric("vllm:num_requests_running") == 4, "all run", PATIENCE_SECONDS)
        text = server.ask("GET", "/metrics").body.decode()
        assert set(re.findall(r'replica_serving.*node="(\w+)".* 1', text)) == {"alpha", "beta"}
        wait_until(lambda: server.metric("vllm:generation_tokens_total") > 100, "all stream", PATIENCE_SECONDS)
        os.kill(replica_processes(cluster)[0].pid, signal.SIGKILL)
        wait_until(lambda: serving(server)["status"] == "degraded", "one is lost", PATIENCE_SECONDS)
        bodies = []
        for one in streams:
            bodies.append(answers(read_until_closed(one))[0].body)
            one.close()
        assert sum(b"was lost" in body for body in bodies) == 2
        assert all(body.rstrip().endswith(b"data: [DONE]") for body in bodies)
        wait_until(lambda: serving(server)["status"] == "ready", "it is replaced", PATIENCE_SECONDS)
        server.process.send_signal(signal.SIGTERM)
        assert server.process.wait(PATIENCE_SECONDS) == 0
    wait_until(lambda: not replica_processes(cluster), "replicas end with the server", PATIENCE_SECONDS)
