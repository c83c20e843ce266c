"""A rack is qualified: real Ray nodes, and a really slow network between network namespaces of this machine."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import pytest
from rack_drivers import RayNodes, environment

from megatoken.hardware.qualify.fleet import Pair, isolate
from megatoken.rack.qualify import links_entry

NODES = 4
SLOW = 2
NODE = """
import json, sys
from megatoken.rack import qualify
qualify.ANSWER_SECONDS = 5.0
actor = qualify.NodeActor()
for line in sys.stdin:
    name, *arguments = json.loads(line)
    nonce = b"n" * qualify.NONCE_BYTES
    if name == "listen":
        answer = actor.listen(arguments[0], nonce)
    else:
        answer = actor.send(arguments[0], arguments[1], nonce, 0.4)
    print(json.dumps(answer), flush=True)
"""


def run(*command: str) -> None:
    subprocess.run(command, check=True, capture_output=True, timeout=30)


@pytest.fixture
def namespaces() -> Iterator[list[str]]:
    """Hosts 10.77.0.1 and on, each a network namespace on one bridge; that of ``SLOW`` sends at 40 Mbit/s."""
    if os.geteuid() or not shutil.which("ip") or not shutil.which("tc"):
        pytest.skip("network namespaces need root and iproute2")
    tag = f"mt{os.getpid() % 10_000}"
    names = [f"{tag}n{number}" for number in range(NODES)]
    bridge = f"{tag}b"
    try:
        try:
            run("ip", "link", "add", bridge, "type", "bridge")
            run("ip", "link", "set", bridge, "up")
            for number, name in enumerate(names):
                run("ip", "netns", "add", name)
                run("ip", "link", "add", f"{name}o", "type", "veth", "peer", "name", "eth0", "netns", name)
                run("ip", "link", "set", f"{name}o", "master", bridge, "up")
                run("ip", "-n", name, "addr", "add", f"10.77.0.{number + 1}/24", "dev", "eth0")
                for device in ("lo", "eth0"):
                    run("ip", "-n", name, "link", "set", device, "up")
            for device in (["-n", names[SLOW]], []):  # both directions
                target = "eth0" if device else f"{names[SLOW]}o"
                run(
                    "tc",
                    *device,
                    "qdisc",
                    "add",
                    "dev",
                    target,
                    "root",
                    *["tbf", "rate", "40mbit", "burst", "32kb", "latency", "50ms"],
                )
        except subprocess.CalledProcessError as error:
            pytest.skip(f"this system has no bridges, namespaces or tbf: {error.stderr.decode().strip()[:80]}")
        yield names
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "del", name], check=False, capture_output=True)
        subprocess.run(["ip", "link", "del", bridge], check=False, capture_output=True)


def test_a_node_with_a_slow_network_is_named(namespaces: list[str]) -> None:
    processes = [
        subprocess.Popen(
            ["ip", "netns", "exec", name, sys.executable, "-c", NODE],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            bufsize=1,
        )
        for name in namespaces
    ]

    def ask(node: str, *question: object) -> None:
        stdin = processes[int(node)].stdin
        assert stdin is not None
        stdin.write(json.dumps(question) + "\n")

    def answer(node: str) -> float:
        stdout = processes[int(node)].stdout
        assert stdout is not None
        return float(stdout.readline())

    def measure(pairs: Sequence[Pair]) -> Mapping[Pair, float | None]:
        for receiver, sender in pairs:
            host = f"10.77.0.{int(receiver) + 1}"
            ask(receiver, "listen", host)
            ask(sender, "send", host, int(answer(receiver)))
        return {pair: answer(pair[1]) for pair in pairs}

    try:
        found = isolate([str(number) for number in range(NODES)], measure)
    finally:
        for process in processes:
            process.kill()
            process.communicate()
    assert (found.bad_nodes, found.bad_links, found.undecided) == ((str(SLOW),), (), ())
    entry = links_entry(found, NODES)
    (bad,) = [value for value in entry["values"] if value["name"] == "bad_nodes"]
    assert (bad["verdict"], bad["note"], entry["verdict"]) == ("FAIL", str(SLOW), "FAIL")


def test_every_node_of_a_ray_cluster_is_tested_and_their_network(cluster: RayNodes, tmp_path: Path) -> None:
    file = tmp_path / "qualify.json"
    command = [sys.executable, "-m", "megatoken", "qualify", "--rack", cluster.address, "--tests", "facts"]
    done = subprocess.run(
        [*command, "--out", str(file), "--json"],
        check=False,
        capture_output=True,
        text=True,
        timeout=150,
        env=environment(cluster.folder),
    )
    assert done.returncode in (0, 4), done.stderr
    document = json.loads(file.read_text())
    assert document["parts"] == {"kind": "node", "names": ["alpha", "beta"], "first": "alpha"}
    tests = {test["name"]: test for test in document["tests"]}
    assert {"facts", "facts@beta", "spread", "links"} <= set(tests)
    rate, *counts = tests["links"]["values"]
    assert rate["name"] == "link_rate" and rate["median"] > 0.01
    assert [value["median"] for value in counts] == [0, 0]
    assert document["complete"]
