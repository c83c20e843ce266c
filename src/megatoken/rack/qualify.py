"""Qualification of a rack through Ray: every node at once, then the network between nodes in disjoint pairs."""

from __future__ import annotations

import json
import secrets
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any

from megatoken.errors import MegatokenError, UsageError
from megatoken.hardware.qualify.catalog import SETTINGS, TESTS, HardwareTest, choose, device_here
from megatoken.hardware.qualify.fleet import Isolated, Pair, isolate
from megatoken.hardware.qualify.parts import gpus_here, joined, qualify_gpus
from megatoken.hardware.qualify.processes import Ended, Returned
from megatoken.hardware.qualify.session import qualify, test_entry
from megatoken.hardware.qualify.values import Value
from megatoken.rack.cluster import Cluster

LINKS = HardwareTest("links", "Network between nodes", "")
LINK_SECONDS = 1.0
CHUNK_BYTES = 2**20
NONCE_BYTES = 16
ANSWER_SECONDS = 30.0


class NodeActor:
    """The process on a node that tests it, and the ends of its connections. Answers are JSON text."""

    def qualify(self, names: Sequence[str], full: bool) -> str:  # Ray passes arguments by position
        """Test this node: its processor, or every GPU at the same time."""
        try:
            device = device_here()
            tests, setting = choose(TESTS[device], names, full=full), SETTINGS[device][full]
            gpus = gpus_here() if device == "gpu" else []
            if len(gpus) > 1:
                *_, document = qualify_gpus(tests, setting, device, gpus, together=True, full=full)
            else:
                *_, document = qualify(tests, setting, device, full=full)
        except MegatokenError as error:
            return json.dumps({"error": str(error)})
        return json.dumps(document)

    def listen(self, host: str, nonce: bytes) -> int:
        """Wait in a thread for one sender that knows ``nonce``, and drop what it sends; returns the port."""
        server = socket.create_server((host, 0))
        server.settimeout(ANSWER_SECONDS)
        threading.Thread(target=_drain, args=(server, nonce), daemon=True).start()
        return int(server.getsockname()[1])

    def send(self, host: str, port: int, nonce: bytes, seconds: float) -> float:
        """GB/s of one TCP stream to a node that listens, as the receiver confirms them."""
        with socket.create_connection((host, port), ANSWER_SECONDS) as connection:
            connection.sendall(nonce)
            chunk, sent, began = bytes(CHUNK_BYTES), 0, time.monotonic()
            while time.monotonic() - began < seconds:
                connection.sendall(chunk)
                sent += len(chunk)
            connection.shutdown(socket.SHUT_WR)
            connection.recv(1)  # the receiver has read everything
            return sent / (time.monotonic() - began) / 1e9


def _drain(server: socket.socket, nonce: bytes) -> None:
    with server, suppress(OSError):
        connection, _ = server.accept()
        with connection:
            connection.settimeout(ANSWER_SECONDS)
            buffer = bytearray(CHUNK_BYTES)
            if connection.recv(NONCE_BYTES, socket.MSG_WAITALL) != nonce:
                return
            while connection.recv_into(buffer):
                pass
            connection.sendall(b"\0")


def qualify_rack(
    address: str,
    names: Sequence[str],
    *,
    full: bool,
    note: Callable[[str], None],
    progress: Callable[[int, int], None] | None,
) -> Iterator[dict[str, Any]]:
    """Test every node of a Ray cluster, then its network; yields the document of all nodes after each node's end.

    ``address``: as for ``Cluster``. ``names``: of tests; none: the set. ``progress``: nodes that have ended, all nodes.

    Raises:
        UsageError: the cluster cannot be used.
        MegatokenError: a node ended before its tests did.
    """
    cluster = Cluster(address, note)
    try:
        import ray

        nodes = {node.name: node for node in cluster.nodes()}
        actors = {name: cluster.start_unplaced(NodeActor, node) for name, node in nodes.items()}
        began = time.monotonic()
        waiting = {actor.qualify.remote(list(names), full): name for name, actor in actors.items()}
        documents: dict[str, dict[str, Any]] = {}
        while waiting:
            if progress:
                progress(len(documents), len(nodes))
            (ready, *_), _ = ray.wait(list(waiting), num_returns=1)
            name = waiting.pop(ready)
            try:
                document = json.loads(ray.get(ready))
            except Exception as error:
                raise MegatokenError(f"{name}: its process ended during the tests ({type(error).__name__})") from None
            if "error" in document:
                raise UsageError(f"{name}: {document['error']}")
            documents[name] = document
            ordered = {one: documents[one] for one in nodes if one in documents}
            complete = joined(ordered, "node", expected=len(nodes), seconds=time.monotonic() - began)
            yield complete | {"complete": False}

        def measure(pairs: Sequence[Pair]) -> Mapping[Pair, float | None]:
            return _measured(ray, actors, {name: node.address for name, node in nodes.items()}, pairs)

        entry = links_entry(isolate(list(nodes), measure), len(nodes))
        seconds = time.monotonic() - began
        ordered = {name: documents[name] for name in nodes}
        yield joined(ordered, "node", expected=len(nodes), seconds=seconds, more=[entry])
    finally:
        cluster.close()


def _measured(
    ray: Any, actors: Mapping[str, Any], addresses: Mapping[str, str], pairs: Sequence[Pair]
) -> dict[Pair, float | None]:
    """All pairs at the same time."""
    sending = {}
    for pair in pairs:
        receiver, sender = pair
        nonce = secrets.token_bytes(NONCE_BYTES)
        try:
            port = ray.get(actors[receiver].listen.remote(addresses[receiver], nonce), timeout=ANSWER_SECONDS)
        except Exception:  # the node is gone
            continue
        sending[pair] = actors[sender].send.remote(addresses[receiver], port, nonce, LINK_SECONDS)
    rates: dict[Pair, float | None] = dict.fromkeys(pairs)
    for pair, answer in sending.items():
        try:
            rates[pair] = float(ray.get(answer, timeout=2 * ANSWER_SECONDS))
        except Exception:  # unreachable, or too slow to end
            rates[pair] = None
    return rates


def links_entry(found: Isolated, nodes: int) -> dict[str, Any]:
    """The test ``links`` of a document: rates of all pairs, and the bad nodes and links by name."""
    outcomes: list[Value] = []
    working = [rate for rate in found.rates.values() if rate is not None]
    if working:
        title = f"One TCP stream between nodes, {len(found.rates)} pairs"
        outcomes.append(Value("link_rate", title, "GB/s", working, note=f"slow below {found.limit or 0:.3g} GB/s"))
    if nodes > 1:
        slow = [*found.bad_nodes, *found.undecided]
        outcomes.append(
            Value("bad_nodes", "Nodes with a slow network", "nodes", [len(slow)], "zero", note=", ".join(slow))
        )
        links = [" - ".join(pair) for pair in found.bad_links]
        note = ", ".join(links)
        outcomes.append(
            Value("bad_links", "Slow or missing links between nodes", "links", [len(links)], "zero", note=note)
        )
    return test_entry(LINKS, [Ended(tuple(Returned(one, None) for one in outcomes), 0.0, None)], "", {}, 0.0)
