"""Finding a cluster, and refusing nodes that would not compute the same."""

from __future__ import annotations

import json
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import asdict, replace
from pathlib import Path

import psutil
import pytest
from rack_drivers import PATIENCE_SECONDS, RayNodes, environment, ray_nodes

from megatoken import __version__
from megatoken.errors import UsageError
from megatoken.rack import actor, address
from megatoken.rack import cluster as clusters
from megatoken.rack.actor import WorkerActor
from megatoken.rack.cluster import Cluster, Process
from megatoken.rack.placement import Node, Place, Slot
from megatoken.rack.records import WorkerSpec


@pytest.fixture
def silent() -> Iterator[str]:
    """The address of a listener that never answers."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        yield f"127.0.0.1:{listener.getsockname()[1]}"


@pytest.fixture
def left_behind(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """The file in which `ray start` leaves the address."""
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setenv("RAY_TMPDIR", str(tmp_path))
    (tmp_path / "ray").mkdir()
    return tmp_path / "ray" / "ray_current_cluster"


def test_a_cluster_that_runs_is_found(cluster: RayNodes, left_behind: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    notes: list[str] = []
    assert address.find_cluster("auto", notes.append) is None
    left_behind.write_text(cluster.address)
    assert address.find_cluster("auto", notes.append) == cluster.address
    left_behind.unlink()
    monkeypatch.setenv("RAY_ADDRESS", cluster.address)
    assert address.find_cluster("auto", notes.append) == cluster.address
    assert address.find_cluster("local", notes.append) is None
    assert notes == []


def test_a_head_that_is_stopped_is_no_cluster(cluster: RayNodes) -> None:
    """It takes connections all the same."""
    (head,) = (one for one in psutil.Process(cluster.process_id).children(True) if one.name() == "gcs_server")
    head.send_signal(signal.SIGSTOP)
    try:
        while head.status() != psutil.STATUS_STOPPED:
            time.sleep(0.01)
        assert not address.answers(cluster.address)
    finally:
        head.send_signal(signal.SIGCONT)
    assert address.answers(cluster.address)


def test_an_address_that_is_stale_costs_seconds(
    silent: str, left_behind: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(address, "ANSWER_SECONDS", 0.2)
    notes: list[str] = []
    left_behind.write_text(silent)
    assert address.find_cluster("auto", notes.append) is None
    assert notes == [f"no Ray cluster answers at {silent} (from {left_behind}); using this machine alone"]
    with pytest.raises(UsageError) as caught:
        address.find_cluster(silent, notes.append)
    start = f"no Ray cluster answers at {silent}"
    assert (
        str(caught.value)
        == f"{start}; start one with: RAY_AUTH_MODE=token ray start --head, or give auto as the address"
    )
    monkeypatch.setenv("RAY_ADDRESS", silent)
    with pytest.raises(UsageError) as caught:
        address.find_cluster("auto", notes.append)
    mend = "start one with: RAY_AUTH_MODE=token ray start --head, or unset RAY_ADDRESS"
    assert str(caught.value) == f"{start} (RAY_ADDRESS); {mend}"
    assert len(notes) == 1


def test_nodes_of_a_head_that_answers_stop_and_die(left_behind: Path) -> None:
    """Ray itself would wait for a minute."""
    with ray_nodes() as nodes:
        head, other = (one for one in psutil.Process(nodes.process_id).children(True) if one.name() == "raylet")
        assert any("--head" in word for word in head.cmdline())
        assert address.find_cluster(nodes.address, print) == nodes.address
        left_behind.write_text(nodes.address)
        for raylet in (head, other):
            raylet.send_signal(signal.SIGSTOP)
        no_node_is_found([head, other], psutil.STATUS_STOPPED, nodes.address, left_behind)
        other.send_signal(signal.SIGCONT)
        head.kill()
        no_run_starts(nodes)
        other.kill()
        no_node_is_found([head, other], psutil.STATUS_ZOMBIE, nodes.address, left_behind)


def no_node_is_found(raylets: list[psutil.Process], state: str, at: str, left_behind: Path) -> None:
    """A command refuses the head at once when its nodes are in that state."""
    while {one.status() for one in raylets} != {state}:
        time.sleep(0.01)
    assert address.answers(at)
    gone = f"no node of the Ray cluster at {at}"
    how = f"start one with: RAY_AUTH_MODE=token ray start --address={at}, or give auto as the address"
    with pytest.raises(UsageError) as caught:
        Cluster(at, note=print)
    assert str(caught.value) == f"{gone} runs on this machine; {how}"
    notes: list[str] = []
    assert address.find_cluster("auto", notes.append) is None
    assert notes == [f"{gone} (from {left_behind}) runs here; using this machine alone"]


def no_run_starts(nodes: RayNodes) -> None:
    """The head's node is dead, another on this machine lives, Ray has most likely not noticed: that is no traceback."""
    with subprocess.Popen(
        [sys.executable, "-m", "megatoken", "run", "--rack", nodes.address, "--samples", "1", "--warm-up", "0"],
        stderr=subprocess.PIPE,
        text=True,
        cwd=nodes.folder,
        env=environment(nodes.folder),
    ) as driver:
        _, messages = driver.communicate(timeout=PATIENCE_SECONDS)
    assert "Traceback" not in messages
    last = messages.splitlines()[-1]
    if driver.returncode == 1:  # the death was noticed between looking for room and taking it
        assert last.startswith("megatoken: ") and ": no room for " in last, messages
    elif driver.returncode:
        assert driver.returncode == 2, messages
        assert last.startswith("megatoken: the Ray cluster starts nothing, so a node seems dead; ")


@pytest.mark.parametrize(
    ("theirs", "ours", "message"),
    [
        ("token", None, "requires its token; set RAY_AUTH_MODE=token for this command too, and RAY_AUTH_TOKEN unless "),
        ("disabled", "token", "uses no token, but RAY_AUTH_MODE is token here; start it with: RAY_AUTH_MODE=token "),
    ],
)
def test_a_token_that_one_side_alone_has_is_refused_at_once(
    theirs: str, ours: str | None, message: str, cluster: RayNodes, monkeypatch: pytest.MonkeyPatch
) -> None:
    with nullcontext(cluster) if theirs == "token" else ray_nodes(RAY_AUTH_MODE=theirs) as nodes:
        monkeypatch.setenv("RAY_AUTH_MODE", theirs)
        address.check_token(nodes.address)
        monkeypatch.delenv("RAY_AUTH_MODE")
        if ours is not None:
            monkeypatch.setenv("RAY_AUTH_MODE", ours)
        with pytest.raises(UsageError) as caught:
            Cluster(nodes.address, note=print)
        assert str(caught.value).startswith(f"the Ray cluster at {nodes.address} {message}")


SPEC = WorkerSpec("tiny", True, 0, {"precision": "bf16"}, None, False, False, 1.0, 1.0, "")


def opened(node: str, model: str = "tiny") -> Process:
    """What a worker that has opened a model says of it, on a node of that name."""
    facts = json.loads(WorkerActor(json.dumps(asdict(replace(SPEC, model=model))), 1, None, 1).inspect())
    where = Node(node, node, "127.0.0.1", 0, 1.0, False)
    return Process(0, Slot(where, (Place(node, 0),), 0, 1.0, None, 1), None, None, "opening", None, facts)


def test_nodes_that_would_not_compute_the_same_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    alpha, beta = opened("alpha"), opened("beta")
    ours = {"version": __version__, "content_hash": None}
    clusters._check_alike([alpha, beta], ours)
    other = opened("gamma", "125m")
    hashes = [process.facts["content_hash"][:12] for process in (alpha, other)]
    with pytest.raises(UsageError) as caught:
        clusters._check_alike([alpha, beta, other], ours)
    assert str(caught.value) == (
        f"nodes differ in checkpoint: {hashes[0]} on alpha, {hashes[1]} on gamma; copy the same files to every node"
    )
    with pytest.raises(
        UsageError, match=f"nodes differ in checkpoint: {hashes[0]} on alpha, {hashes[1]} on the driver"
    ):
        clusters._check_alike([alpha, beta], ours | {"content_hash": other.facts["content_hash"]})
    monkeypatch.setattr(actor, "__version__", "0.0.9")
    delta = opened("delta")
    own = f"{__version__} on"
    for processes, difference in (
        ([alpha, delta], f"{own} alpha, 0.0.9 on delta"),
        ([delta], f"0.0.9 on delta, {own} the driver"),
    ):
        with pytest.raises(UsageError) as caught:
            clusters._check_alike(processes, ours)
        assert str(caught.value) == f"nodes differ in megatoken: {difference}; install the same version everywhere"
