"""A rack is qualified: real Ray nodes, and a really slow network between network namespaces of this machine."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import psutil
import pytest
from rack_drivers import PATIENCE_SECONDS, RayNodes, environment

from megatoken.hardware.qualify.fleet import Isolated, Pair, isolate, rounds
from megatoken.rack import all_reduces, links
from megatoken.rack.all_reduces import Reduced
from megatoken.rack.links import links_entry

NODES = 4
SLOW = 2
NODE = """
import json, sys
from megatoken.rack import all_reduces, links
links.ANSWER_SECONDS = 5.0
links.STREAM_SECONDS = links.STREAMS_SECONDS = links.ROUND_TRIP_SECONDS = 0.4
for line in sys.stdin:
    name, *arguments = json.loads(line)
    if name in ("listen", "measure"):
        answer = getattr(links, name)(*arguments, b"n" * links.NONCE_BYTES)
    else:
        answer = getattr(all_reduces, name)(*arguments)
    print(json.dumps(answer), flush=True)
"""
DRIVER = """
import json, os, sys
import ray
from megatoken.errors import MegatokenError
from megatoken.rack import qualify

class Refusing(qualify.NodeActor):
    def qualify(self, names, full):
        own = ray.get_runtime_context().get_node_id()
        if any(node["NodeID"] == own and node["NodeName"] in REFUSING for node in ray.nodes()):
            raise KeyError("no such sensor")
        yield from super().qualify(names, full)

    def all_reduce(self, backend, rank, rendezvous, address):
        if rank == 1:
            os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [FAULT, os.environ["PYTHONPATH"]]))
        return super().all_reduce(backend, rank, rendezvous, address)

address, tests, REFUSING, limit_seconds, FAULT = json.loads(sys.argv[1])
qualify.silent_seconds = lambda full: limit_seconds
qualify.NodeActor = Refusing
try:
    *_, document = qualify.qualify_rack(address, tests, full=False, note=print, progress=None)
except MegatokenError as error:
    document = {"error": f"{type(error).__name__}: {error}"}
print(json.dumps(document))
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

    def answer(node: str) -> Any:
        stdout = processes[int(node)].stdout
        assert stdout is not None
        return json.loads(stdout.readline())

    links: dict[Pair, dict[str, float]] = {}

    def measure(pairs: Sequence[Pair]) -> Mapping[Pair, float | None]:
        for receiver, sender in pairs:
            host = f"10.77.0.{int(receiver) + 1}"
            ask(receiver, "listen", host)
            ask(sender, "measure", host, answer(receiver))
        links.update({pair: answer(pair[1]) for pair in pairs})
        return {pair: links[pair]["rate"] for pair in pairs}

    def all_reduced(pairs: Sequence[Pair]) -> dict[Pair, Reduced | str]:
        for pair in pairs:
            for node in pair:
                ask(node, "device_and_port", f"10.77.0.{int(node) + 1}")
            (_, port), _ = [answer(node) for node in pair]
            for rank, node in enumerate(pair):
                own = f"10.77.0.{int(node) + 1}"
                ask(node, "all_reduce", "gloo", rank, f"tcp://10.77.0.{int(pair[0]) + 1}:{port}", own)
        results = {pair: [answer(node) for node in pair] for pair in pairs}
        return {pair: all_reduces._reduced("gloo", results[pair][0]) for pair in pairs}

    names = [str(number) for number in range(NODES)]
    try:
        found = isolate(names, measure)
        *_, reduced = all_reduces.of_all(names, next(rounds(names)), all_reduced)
    finally:
        for process in processes:
            process.kill()
            process.communicate()
    assert (found.bad_nodes, found.bad_links, found.undecided) == ((str(SLOW),), (), ())
    entry = links_entry(found, NODES, links, all_reduces.outcomes_of(reduced))
    values = {value["name"]: value for value in entry["values"]}
    # The host's name is that of 127.0.0.1 in all of them, or of an address that none has.
    rate = values["link_all_reduce_gloo"]
    assert len(rate["windows"]) == len(reduced) == 2 and str(SLOW) in rate["note"].rpartition(",")[2]
    assert 0 < min(rate["windows"]) < 0.005 < max(rate["windows"])
    assert values["link_all_reduce_gloo_errors"]["verdict"] == "PASS"
    bad, round_trip = values["bad_nodes"], values["link_round_trip_p50"]
    assert 0 < round_trip["median"] < 10_000 and len(round_trip["windows"]) == len(links)
    assert (bad["verdict"], bad["note"], entry["verdict"]) == ("FAIL", str(SLOW), "FAIL")


@pytest.fixture
def briefly(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("STREAM_SECONDS", "STREAMS_SECONDS", "ROUND_TRIP_SECONDS"):
        monkeypatch.setattr(links, name, 0.05)
    monkeypatch.setattr(links, "ANSWER_SECONDS", 3.0)


@pytest.mark.usefixtures("briefly")
def test_connections_of_other_programs_take_no_place_of_a_measurement() -> None:
    nonce = b"n" * links.NONCE_BYTES
    port = links.listen("127.0.0.1", nonce)
    with ExitStack() as strays:
        for _ in range(links.STREAMS):
            strays.enter_context(socket.create_connection(("127.0.0.1", port)))
        found = links.measure("127.0.0.1", port, nonce)
    assert set(found) == {"rate", *(name for name, *_ in links.FURTHER)}


@pytest.mark.usefixtures("briefly")
def test_streams_are_measured_where_round_trips_fail(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: object) -> dict[str, float]:
        raise ConnectionResetError

    monkeypatch.setattr(links, "_round_trips", fails)
    nonce = b"n" * links.NONCE_BYTES
    found = links.measure("127.0.0.1", links.listen("127.0.0.1", nonce), nonce)
    assert set(found) == {"rate", "rate_of_streams"}


@pytest.mark.usefixtures("briefly")
@pytest.mark.parametrize("slow", ["_stream", "_stream_back"])
def test_the_rate_of_a_link_is_that_of_its_slower_direction(slow: str, monkeypatch: pytest.MonkeyPatch) -> None:
    real = getattr(links, slow)
    monkeypatch.setattr(links, slow, lambda *arguments: real(*arguments) / 1000)
    nonce = b"n" * links.NONCE_BYTES
    found = links.measure("127.0.0.1", links.listen("127.0.0.1", nonce), nonce)
    assert 0 < found["rate"] < 0.02


@pytest.mark.usefixtures("briefly")
def test_a_node_that_sends_nothing_back_has_a_link_that_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(links, "_send", lambda connection, until: 0)
    nonce = b"n" * links.NONCE_BYTES
    with pytest.raises(ConnectionError):
        links._stream_back("127.0.0.1", links.listen("127.0.0.1", nonce), nonce)


def test_what_failed_between_two_nodes_did_not_run() -> None:
    rates = {("a", "b"): 1.0, ("a", "c"): 1.0}
    found = Isolated(rates, 0.9, (), (), ())
    entry = links_entry(found, 3, {("a", "b"): {"rate": 1.0, "round_trip_p50": 50.0}, ("a", "c"): {"rate": 1.0}})
    values = {value["name"]: value for value in entry["values"]}
    assert values["link_round_trip_p50"]["median"] == 50.0
    missing = values["link_round_trip_p50_missing"]
    assert missing["verdict"] == values["link_rate_of_streams"]["verdict"] == "NOT RUN"
    assert missing["reason"].startswith("failed where one stream works, in 1 of 2 pairs: a - c; let nodes open 8 ")
    assert "in 2 of 2 pairs: a - b, a - c; " in values["link_rate_of_streams"]["reason"]
    assert entry["verdict"] == "PASS"


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
    links = {value["name"]: value for value in tests["links"]["values"]}
    assert links["link_rate"]["median"] > 0.01 < links["link_rate_of_streams"]["median"]
    assert 0 < links["link_round_trip_p50"]["median"] <= links["link_round_trip_p99"]["median"]
    assert links["link_round_trip_p99"]["note"].endswith(", alpha - beta")
    assert links["bad_nodes"]["median"] == links["bad_links"]["median"] == 0
    assert links["link_all_reduce_gloo"]["note"].endswith(" GB/s, alpha - beta")
    assert links["link_all_reduce_gloo"]["median"] > 0.01 and links["link_all_reduce_gloo_latency"]["median"] > 1
    assert links["link_all_reduce_gloo_errors"]["median"] == 0
    assert document["complete"]


def process_of(node: str, driver: subprocess.Popen[str], cluster: RayNodes) -> psutil.Process:
    """The process that tests a node of the cluster, once it does; only the head's raylet has ``alpha``'s resource."""
    deadline = time.monotonic() + PATIENCE_SECONDS
    while time.monotonic() < deadline:
        assert driver.poll() is None, driver.communicate()
        for process in psutil.Process(cluster.process_id).children(recursive=True):
            with suppress(psutil.NoSuchProcess):  # it has just ended
                words, raylet = " ".join(process.cmdline()), process.parent()
                if raylet and "qualify" in words and words.startswith("ray::") and process.children():
                    is_alpha = "__internal_head__" in " ".join(raylet.cmdline())
                    if is_alpha == (node == "alpha"):
                        return process
        time.sleep(0.05)
    raise AssertionError(f"no process tests {node}")


def qualified(
    cluster: RayNodes,
    tests: Sequence[str],
    *,
    refusing: Sequence[str] = (),
    limit_seconds: float = PATIENCE_SECONDS,
    sent: tuple[str, signal.Signals] | None = None,
    fault: Path | None = None,
) -> dict[str, Any]:
    """The last document.

    ``refusing``: nodes that raise. ``sent``: to a node while it tests. ``fault``: where beta's rank of an all-reduce
    finds modules first.
    """
    argument = json.dumps([cluster.address, tests, refusing, limit_seconds, str(fault or "")])
    with subprocess.Popen(
        [sys.executable, "-c", DRIVER, argument],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment(cluster.folder),
    ) as driver:
        try:
            if sent is not None:
                process = process_of(sent[0], driver, cluster)
                process.send_signal(sent[1])
            output, messages = driver.communicate(timeout=PATIENCE_SECONDS)
        finally:
            driver.kill()
            if sent is not None:
                with suppress(psutil.NoSuchProcess):
                    process.kill()
    assert output, messages
    document: dict[str, Any] = json.loads(output.splitlines()[-1])
    return document


@pytest.mark.parametrize(
    ("node", "other", "number", "fault"),
    [
        ("beta", "alpha", signal.SIGKILL, "its process ended during the tests (ActorDiedError)"),
        ("alpha", "beta", signal.SIGSTOP, "did not answer for 35 s during the tests"),
    ],
)
def test_a_node_that_is_lost_during_the_tests_fails_and_the_other_keeps_its_values(
    node: str, other: str, number: signal.Signals, fault: str, cluster: RayNodes
) -> None:
    document = qualified(cluster, ["memory"], sent=(node, number), limit_seconds=35.0)
    tests = {test["title"].partition(",")[0]: test for test in document["tests"]}
    lost = tests[f"Tests of node {node}"]
    assert (lost["verdict"], lost["fault"]) == ("FAIL", fault)
    assert document["answer"][0].startswith(f"1 fault found: Tests of node {node} ({fault})")
    assert other in document["parts"]["names"] and document["complete"]
    assert tests["Memory"]["values"][0]["median"] > 0
    assert tests["Network between nodes"]["verdict"] == "NOT RUN"  # one node is left


def test_a_node_whose_tests_cannot_begin_did_not_run(cluster: RayNodes) -> None:
    document = qualified(cluster, ["facts"], refusing=["beta"])
    (refused,) = [test for test in document["tests"] if test["name"] == "node@beta"]
    assert (refused["verdict"], refused["fault"]) == ("NOT RUN", None)
    assert "no such sensor" in refused["values"][0]["reason"]
    assert document["parts"]["names"] == ["alpha"]
    (links,) = [test for test in document["tests"] if test["name"] == "links"]
    assert links["values"][0]["median"] > 0.01  # its process still answers


def test_a_rank_that_is_killed_between_two_nodes_is_named_and_their_tcp_rate_stays(
    cluster: RayNodes, tmp_path: Path
) -> None:
    (tmp_path / "sitecustomize.py").write_text(
        "import os\nimport torch.distributed as dist\nready = dist.init_process_group\n"
        "def init(*arguments, **options):\n    ready(*arguments, **options)\n    os.kill(os.getpid(), 9)\n"
        "dist.init_process_group = init\n"
    )
    document = qualified(cluster, ["facts"], fault=tmp_path)
    (entry,) = [test for test in document["tests"] if test["name"] == "links"]
    values = {value["name"]: value for value in entry["values"]}
    assert [name for name in values if "all_reduce" in name] == ["link_all_reduce"]
    failed = values["link_all_reduce"]
    assert (failed["verdict"], entry["verdict"], document["complete"]) == ("NOT RUN", "PASS", True)
    assert failed["reason"].startswith("failed where TCP works, in 1 of 1 pair: alpha - beta; of alpha - beta: ")
    assert "; beta: rank 1 was ended by SIGKILL (out of memory?): no message; let nodes open " in failed["reason"]
    assert values["link_rate"]["median"] > 0.01 and values["bad_nodes"]["median"] == 0


def test_a_reason_that_all_nodes_give_is_an_error_of_the_user(cluster: RayNodes) -> None:
    document = qualified(cluster, ["fact"])
    assert document["error"].startswith("UsageError: alpha: --tests fact: unknown test; did you mean facts?")
