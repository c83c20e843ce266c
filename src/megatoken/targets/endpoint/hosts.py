"""Client processes on the nodes of a Ray cluster: Ray starts them, and each has one connection to the run."""

from __future__ import annotations

import select
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from megatoken import __version__
from megatoken.addresses import is_loopback
from megatoken.errors import MegatokenError, UsageError, need_packages
from megatoken.framing import WireError
from megatoken.processes import usable_cores
from megatoken.rack.actor import json_answer
from megatoken.rack.cluster import Cluster, checked, new_key, unheard
from megatoken.rack.hub import FIRST_PINGS, HANDSHAKE_SECONDS
from megatoken.rack.placement import Node
from megatoken.rack.wire import handshake
from megatoken.targets.endpoint.address import Address, AnswerError, ask, trust
from megatoken.targets.endpoint.clients import ClientProcess, Clients, Host, default_processes, start_process
from megatoken.targets.endpoint.self_test import process_capacity
from megatoken.targets.endpoint.wire import ClientSettings, Run

START_SECONDS = 120.0  # for Ray to start a process on every node, which may measure what it can hold first
CONNECT_SECONDS = 60.0
ANSWER_SECONDS = 5.0


class ClientActor:
    """The process that Ray starts on a node: it says what that node can do, and starts client processes there."""

    def look(self, settings: ClientSettings) -> str:
        """Version, cores, and what one client process can hold; an error if a server is out of reach. JSON."""
        return json_answer(lambda: _look(settings))

    def start(self, settings: Sequence[ClientSettings]) -> list[int]:
        """Starts client processes, which end with this one; their ids."""
        self._started = [start_process(one) for one in settings]
        return [process.pid for process, _ in self._started]


def _look(settings: ClientSettings) -> dict[str, Any]:
    need_packages("--endpoint", "serve", "httptools", "uvloop")
    for address in settings.addresses:
        tls = trust(address.secure, Path(settings.ca_file) if settings.ca_file else None)
        try:
            ask(address, f"{address.path}/models", key=settings.key, tls=tls, seconds=settings.connect_seconds)
        except AnswerError as error:
            if error.status is None:
                raise UsageError(f"--endpoint {error}") from None
    facts = {"version": __version__, "cores": usable_cores(), "processes": default_processes()}
    return facts | {"self_test": asdict(process_capacity())}


@contextmanager
def client_hosts(
    address: str, settings: ClientSettings, processes: int | None, note: Callable[[str], None]
) -> Iterator[Clients]:
    """Client processes on all nodes, whose clocks are known; all end with the context.

    Args:
        address: of the Ray cluster, as for ``Cluster``.
        settings: of each process.
        processes: how many, on all nodes together; None: as many on each node as it would start for itself.
        note: called with messages about the cluster.

    Raises:
        UsageError: the cluster cannot be used, or a node cannot reach a server.
        MegatokenError: a process did not start.
    """
    with unheard():
        cluster = Cluster(address, note)
        try:
            nodes = sorted(cluster.nodes(), key=lambda node: node.is_driver)  # this machine has the run to do too
            check_loopback(nodes, settings.addresses)
            actors = [cluster.start_unplaced(ClientActor, node) for node in nodes]
            looks = [actor.look.remote(settings) for actor in actors]
            facts = [checked(_asked(cluster, look, node), node.name) for look, node in zip(looks, nodes, strict=True)]
            _check_alike(nodes, facts)
            shares = _shares([one["processes"] for one in facts], processes)
            expected: dict[int, Host] = {}
            with socket.create_server((cluster.host, 0), backlog=sum(shares)) as listener:
                secret, at = new_key(), listener.getsockname()[:2]
                for node, one, share, actor in zip(nodes, facts, shares, actors, strict=True):
                    numbers = range(len(expected), len(expected) + share)
                    own = [replace(settings.of(number, share), run=Run(at, secret, number)) for number in numbers]
                    ids = _asked(cluster, actor.start.remote(own), node)
                    host = Host(node.name, node.address, one["cores"], one["self_test"], ids)
                    expected |= dict.fromkeys(numbers, host)
                started = _connected(listener, secret, expected)
            for process in started:
                _measure_clock(process)
            tests = [host.self_test for host in expected.values()]
            yield Clients(started, {name: min(test[name] for test in tests) for name in tests[0]})
        finally:
            cluster.close()


def check_loopback(nodes: Sequence[Node], addresses: Sequence[Address]) -> None:
    """Refuses an address that is another machine on each node. Raises UsageError."""
    here = next(node.address for node in nodes if node.is_driver)
    elsewhere = [node.name for node in nodes if node.address != here]
    for address in addresses:
        if is_loopback(address.host) and elsewhere:
            raise UsageError(
                f"--endpoint {address.url}: on {elsewhere[0]} that is another machine; give the address at which the "
                "hosts reach the server"
            )


def _check_alike(nodes: Sequence[Node], facts: Sequence[dict[str, Any]]) -> None:
    for node, one in zip(nodes, facts, strict=True):
        if one["version"] != __version__:
            raise UsageError(
                f"{node.name} has megatoken {one['version']}, and this machine {__version__}; install the same version"
                " everywhere"
            )


def _asked(cluster: Cluster, reference: Any, node: Node) -> Any:
    try:
        return cluster.ask(reference, START_SECONDS)
    except TimeoutError:
        raise MegatokenError(f"{node.name}: Ray started no process within {START_SECONDS:g} s") from None
    except MegatokenError as error:
        raise MegatokenError(f"{node.name}: no client process can start there ({error})") from None


def _shares(own: Sequence[int], processes: int | None) -> list[int]:
    """Processes of each node: its own number, or ``processes`` dealt out one by one."""
    if processes is None:
        return list(own)
    return [len(range(at, processes, len(own))) for at in range(len(own))]


def _connected(listener: socket.socket, secret: bytes, expected: dict[int, Host]) -> list[ClientProcess]:
    """The processes that were started, in the order of their numbers. Raises MegatokenError if some do not connect."""
    found: dict[int, ClientProcess] = {}
    deadline = time.monotonic() + CONNECT_SECONDS
    while len(found) < len(expected):
        listener.settimeout(max(0.01, deadline - time.monotonic()))
        try:
            connection, _ = listener.accept()
        except TimeoutError:
            names = sorted({host.name for number, host in expected.items() if number not in found})
            raise MegatokenError(
                f"{len(expected) - len(found)} of {len(expected)} client processes did not reach this machine within "
                f"{CONNECT_SECONDS:g} s ({', '.join(names)}); is there a firewall?"
            ) from None
        try:
            number = handshake(connection, secret, HANDSHAKE_SECONDS)
        except (OSError, WireError):
            connection.close()
            continue
        if number in found or number not in expected:
            connection.close()
            continue
        found[number] = ClientProcess(connection, expected[number])
    return [found[number] for number in sorted(found)]


def _measure_clock(process: ClientProcess) -> None:
    """Round trips one after the other, so that the host's clocks are known. Raises MegatokenError: no answer."""
    assert process.host is not None
    name, clock = process.host.name, process.host.clock
    for rounds in range(clock.rounds, clock.rounds + FIRST_PINGS):
        process.ping()
        while clock.rounds == rounds:
            if not select.select([process.channel.socket], [], [], ANSWER_SECONDS)[0]:
                raise MegatokenError(f"{name}: a client process was silent for {ANSWER_SECONDS:g} s")
            try:
                process.receive()  # what comes next to a clock's time comes again every second
            except WireError as error:
                raise MegatokenError(f"{name}: a client process ended ({error})") from None
