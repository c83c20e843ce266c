"""The network between nodes: one TCP stream, several at once, and round trips of a small message."""

from __future__ import annotations

import secrets
import socket
import threading
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from typing import Any, Literal

from megatoken.hardware.qualify.catalog import HardwareTest
from megatoken.hardware.qualify.fleet import Isolated, Pair
from megatoken.hardware.qualify.processes import Ended, Returned
from megatoken.hardware.qualify.session import entry_of_test
from megatoken.hardware.qualify.values import NotRun, Outcome, Value
from megatoken.text import count_of, number

LINKS = HardwareTest("links", "Network between nodes", "")
STREAMS = 8
STREAM_SECONDS, STREAMS_SECONDS, ROUND_TRIP_SECONDS = 1.0, 0.8, 0.4
"""Of one stream in each direction, of several, and of round trips: together a pair of nodes stays below 4 s."""
CHUNK_BYTES, MESSAGE_BYTES = 2**20, 64
WARM_UP_MESSAGES = 20
NONCE_BYTES = 16
ANSWER_SECONDS = 30.0
PAIR_SECONDS = 5 * ANSWER_SECONDS
"""For all that ``measure`` does: round trips and streams that fail must not cost the rate of one stream."""
FURTHER: Sequence[tuple[str, str, str, Literal["higher", "lower"]]] = (
    ("rate_of_streams", f"{STREAMS} TCP streams at once", "GB/s", "higher"),
    ("round_trip_p50", f"Round trip of {MESSAGE_BYTES} bytes over TCP, median", "us", "lower"),
    ("round_trip_p99", f"Round trip of {MESSAGE_BYTES} bytes over TCP, 99th percentile", "us", "lower"),
)
"""What ``measure`` finds next to the rate of one stream, which alone decides which nodes and links are bad."""
DROP, ECHO, SEND = b"d", b"e", b"s"
"""What the node that listens does after the nonce: with what comes, or that it sends for a time."""


def listen(host: str, nonce: bytes) -> int:
    """Answer in threads the connections of a ``measure`` that knows ``nonce``; returns the port."""
    server = socket.create_server((host, 0), backlog=STREAMS)
    server.settimeout(ANSWER_SECONDS)
    threading.Thread(target=_accept, args=(server, nonce), daemon=True).start()
    return int(server.getsockname()[1])


def measure(host: str, port: int, nonce: bytes) -> dict[str, float]:
    """Of the link to a node that listens: GB/s of one stream in its slower direction (``rate``).

    Also of several streams to that node (``rate_of_streams``), and the median and the 99th percentile of round trips in
    microseconds (``round_trip_p50``, ``round_trip_p99``).
    What fails is left out, except for the first, which raises OSError.
    """
    found = {"rate": min(_stream(host, port, nonce, 1, STREAM_SECONDS), _stream_back(host, port, nonce))}
    with suppress(OSError):
        found |= _round_trips(host, port, nonce)
    with suppress(OSError):
        found["rate_of_streams"] = _stream(host, port, nonce, STREAMS, STREAMS_SECONDS)
    return found


def measured(
    ray: Any, actors: Mapping[str, Any], addresses: Mapping[str, str], pairs: Sequence[Pair]
) -> dict[Pair, dict[str, float] | None]:
    """What ``measure`` finds between the nodes of each pair, all pairs at the same time; None where it fails."""
    sending = {}
    for pair in pairs:
        receiver, sender = pair
        nonce = secrets.token_bytes(NONCE_BYTES)
        try:
            port = ray.get(actors[receiver].listen.remote(addresses[receiver], nonce), timeout=ANSWER_SECONDS)
        except Exception:  # the node is gone
            continue
        sending[pair] = actors[sender].measure.remote(addresses[receiver], port, nonce)
    found: dict[Pair, dict[str, float] | None] = dict.fromkeys(pairs)
    for pair, answer in sending.items():
        with suppress(Exception):  # unreachable, or too slow to end
            found[pair] = ray.get(answer, timeout=PAIR_SECONDS)
    return found


def links_entry(
    found: Isolated, nodes: int, links: Mapping[Pair, Mapping[str, float]], more: Sequence[Outcome] = ()
) -> dict[str, Any]:
    """The test ``links`` of a document: rates and round trips of all pairs, and the bad nodes and links by name.

    ``links``: what ``measure`` found between each pair that worked. ``more``: outcomes that follow its own.
    """
    outcomes: list[Outcome] = []
    working = [rate for rate in found.rates.values() if rate is not None]
    if working:
        title = f"One TCP stream between nodes, slower direction, {count_of(len(found.rates), 'pair')}"
        outcomes.append(Value("link_rate", title, "GB/s", working, note=f"slow below {found.limit or 0:.3g} GB/s"))
    for name, title, unit, better in FURTHER:
        known = {pair: one[name] for pair, one in links.items() if name in one}
        if known:
            outcomes.append(value_of_pairs(f"link_{name}", title, unit, better, known))
        if missing := [pair_name(pair) for pair in links if pair not in known]:
            key = f"link_{name}_missing" if known else f"link_{name}"
            reason = f"failed where one stream works, in {len(missing)} of {count_of(len(links), 'pair')}: "
            enable = f"let nodes open {STREAMS} TCP connections to each other at once, on any port"
            outcomes.append(NotRun(key, title, f"{reason}{', '.join(missing)}", enable))
    if nodes < 2:
        outcomes.append(NotRun(LINKS.name, LINKS.title, "fewer than two nodes are left", "add nodes to the cluster"))
    else:
        slow = [*found.bad_nodes, *found.undecided]
        outcomes.append(
            Value("bad_nodes", "Nodes with a slow network", "nodes", [len(slow)], "zero", note=", ".join(slow))
        )
        note = ", ".join(map(pair_name, found.bad_links))
        title = "Slow or missing links between nodes"
        outcomes.append(Value("bad_links", title, "links", [len(found.bad_links)], "zero", note=note))
    outcomes += more
    return entry_of_test(LINKS, [Ended(tuple(Returned(one, None) for one in outcomes), 0.0, None)], "", {}, 0.0)


def value_of_pairs(
    name: str, title: str, unit: str, better: Literal["higher", "lower"], known: Mapping[Pair, float]
) -> Value:
    """One figure of each pair of nodes; the note names the worst pair."""
    worst = (min if better == "higher" else max)(known, key=known.__getitem__)
    note = f"{'lowest' if better == 'higher' else 'highest'}: {number(known[worst])} {unit}, {pair_name(worst)}"
    return Value(name, f"{title}, {count_of(len(known), 'pair')}", unit, list(known.values()), better, note=note)


def pair_name(pair: Pair) -> str:
    """As values and reasons name two nodes."""
    return " - ".join(pair)


def _accept(server: socket.socket, nonce: bytes) -> None:
    with server, suppress(OSError):
        while True:  # until none comes for a time: some may be of other programs, such as port scans
            connection, _ = server.accept()
            threading.Thread(target=_answer, args=(connection, nonce), daemon=True).start()


def _answer(connection: socket.socket, nonce: bytes) -> None:
    with connection, suppress(OSError):
        connection.settimeout(ANSWER_SECONDS)
        start = _read(connection, NONCE_BYTES + 1)
        if start[:-1] != nonce:
            return
        if start[-1:] == ECHO:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            while message := connection.recv(MESSAGE_BYTES):
                connection.sendall(message)
            return
        if start[-1:] == SEND:
            _send(connection, time.monotonic() + STREAM_SECONDS)
            return
        _received(connection)
        connection.sendall(DROP)


def _connected(host: str, port: int, nonce: bytes, kind: bytes) -> socket.socket:
    connection = socket.create_connection((host, port), ANSWER_SECONDS)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.sendall(nonce + kind)
    return connection


def _stream(host: str, port: int, nonce: bytes, streams: int, seconds: float) -> float:
    """GB/s of so many TCP streams together, as the receiver confirms them."""
    with ThreadPoolExecutor(streams) as pool, ExitStack() as connections:
        opened = [connections.enter_context(_connected(host, port, nonce, DROP)) for _ in range(streams)]
        began = time.monotonic()
        sent = sum(pool.map(_fill, opened, [began + seconds] * streams))
        return sent / (time.monotonic() - began) / 1e9


def _stream_back(host: str, port: int, nonce: bytes) -> float:
    """GB/s of one TCP stream from the node that listens, as this one receives it."""
    with _connected(host, port, nonce, SEND) as connection:
        began = time.monotonic()
        found = _received(connection)
        if not found:
            raise ConnectionError
        return found / (time.monotonic() - began) / 1e9


def _fill(connection: socket.socket, until: float) -> int:
    """Send for a time, and wait until the receiver has read everything; returns the bytes."""
    sent = _send(connection, until)
    _read(connection, 1)
    return sent


def _send(connection: socket.socket, until: float) -> int:
    """Send for a time, and say that nothing more comes; returns the bytes."""
    chunk, sent = bytes(CHUNK_BYTES), 0
    while time.monotonic() < until:
        connection.sendall(chunk)
        sent += len(chunk)
    connection.shutdown(socket.SHUT_WR)
    return sent


def _received(connection: socket.socket) -> int:
    """Bytes until the other end has sent everything."""
    buffer, found = bytearray(CHUNK_BYTES), 0
    while count := connection.recv_into(buffer):
        found += count
    return found


def _round_trips(host: str, port: int, nonce: bytes) -> dict[str, float]:
    message = bytes(MESSAGE_BYTES)
    microseconds: list[float] = []
    with _connected(host, port, nonce, ECHO) as connection:
        until = time.monotonic() + ROUND_TRIP_SECONDS
        while time.monotonic() < until or len(microseconds) <= WARM_UP_MESSAGES:
            began = time.perf_counter()
            connection.sendall(message)
            _read(connection, MESSAGE_BYTES)
            microseconds.append(1e6 * (time.perf_counter() - began))
    ordered = sorted(microseconds[WARM_UP_MESSAGES:])
    return {f"round_trip_p{share}": ordered[len(ordered) * share // 100] for share in (50, 99)}


def _read(connection: socket.socket, count: int) -> bytes:
    """So many bytes. Raises ConnectionError: the other end closed the connection before."""
    found = b""
    while len(found) < count:
        part = connection.recv(count - len(found))
        if not part:
            raise ConnectionError
        found += part
    return found
