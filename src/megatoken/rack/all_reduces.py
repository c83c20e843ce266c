"""An all-reduce between two nodes: NCCL on the first GPU of each, or gloo on nodes without GPUs; results checked.

It decides nothing about nodes and links: what fails here is named, and the rates of TCP stay.
"""

from __future__ import annotations

import os
import socket
import statistics
import textwrap
import time
from collections import Counter
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import psutil

from megatoken.errors import MegatokenError
from megatoken.hardware.qualify.catalog import Device, device_here
from megatoken.hardware.qualify.collectives import Task, bus_share, run_tasks
from megatoken.hardware.qualify.fleet import Pair, rounds
from megatoken.hardware.qualify.values import NotRun, Outcome, Value
from megatoken.rack.links import ANSWER_SECONDS, pair_name, value_of_pairs
from megatoken.text import count_of

OPERATION = "all_reduce"
SIZES = {"nccl": (2**14, 2**27), "gloo": (2**14, 2**22)}
"""Bytes of a small all-reduce, for its latency, and of a large one, for its rate."""
BETWEEN = {"nccl": "one GPU of each node (NCCL)", "gloo": "one process of each node (gloo)"}
WINDOWS, WINDOWS_SECONDS = 3, 0.3
RENDEZVOUS_SECONDS, LIMIT_SECONDS = 30.0, 60.0
"""How long a rank waits for the other one, and how long all of it may take."""
MOST_FAILURES = 2
"""Pairs of a node that may fail before it is left alone, if none worked: each may take all of its time."""
MOST_CHARACTERS = 240
"""Of a reason: that of Gloo goes on about what may be the cause."""


@dataclass(frozen=True, slots=True)
class Reduced:
    """What the all-reduces between two nodes showed."""

    backend: str  # nccl or gloo
    rate: float  # GB/s of the large one, on the bus
    microseconds: float  # of the small one
    wrong: int  # elements of the results


def device_and_port(host: str) -> tuple[Device, int]:
    """What this node computes on, and a port that is free at ``host``, an address of it."""
    with socket.create_server((host, 0)) as server:
        return device_here(), int(server.getsockname()[1])


def all_reduce(backend: str, rank: int, rendezvous: str, address: str) -> list[dict[str, Any]] | str:
    """Run one of the two ranks on this node, whose address is given; what rank 0 measured, or why it failed."""
    task = Task(
        backend, 2, rank, 0, rendezvous, SIZES[backend], WINDOWS, WINDOWS_SECONDS, [OPERATION], RENDEZVOUS_SECONDS
    )
    try:
        return list(run_tasks([task], LIMIT_SECONDS, _interface(address) | os.environ))
    except (MegatokenError, OSError) as error:
        return textwrap.shorten(str(error), MOST_CHARACTERS, placeholder=" ...")


def between_nodes(
    ray: Any, actors: Mapping[str, Any], addresses: Mapping[str, str], pairs: Sequence[Pair]
) -> dict[Pair, Reduced | str]:
    """What ``all_reduce`` finds between the nodes of each pair, all pairs at the same time; a reason where it fails."""
    found: dict[Pair, Reduced | str] = {}
    running: dict[Pair, tuple[str, list[Any]]] = {}
    for pair in pairs:
        until = time.monotonic() + ANSWER_SECONDS
        asked = [actors[name].device_and_port.remote(addresses[name]) for name in pair]
        offered = [_answer(ray, one, until) for one in asked]
        if reasons := _reasons(pair, offered):
            found[pair] = reasons
            continue
        (device, port), (other, _) = offered
        backend = "nccl" if device == other == "gpu" else "gloo"
        rendezvous = f"tcp://{addresses[pair[0]]}:{port}"
        ranks = [
            actors[name].all_reduce.remote(backend, rank, rendezvous, addresses[name]) for rank, name in enumerate(pair)
        ]
        running[pair] = backend, ranks
    until = time.monotonic() + LIMIT_SECONDS + ANSWER_SECONDS
    for pair, (backend, ranks) in running.items():
        answers = [_answer(ray, one, until) for one in ranks]
        found[pair] = _reasons(pair, answers) or _reduced(backend, answers[0])
    return found


def of_all(
    names: Sequence[str], pairs: Container[Pair], measure: Callable[[Sequence[Pair]], Mapping[Pair, Reduced | str]]
) -> Iterator[dict[Pair, Reduced | str]]:
    """What ``measure`` finds of each of ``pairs`` of these nodes, in rounds of disjoint ones; all of it after each.

    A node that works with no other is left alone after two failures, and its other pairs fail without a try.
    """
    found: dict[Pair, Reduced | str] = {}
    failures: Counter[str] = Counter()
    worked: set[str] = set()
    for in_turn in rounds(names):
        left_alone = {name for name, count in failures.items() if count >= MOST_FAILURES} - worked
        chosen = [pair for pair in ((min(two), max(two)) for two in in_turn) if pair in pairs]
        tried = [pair for pair in chosen if left_alone.isdisjoint(pair)]
        for pair, one in (measure(tried) if tried else {}).items():
            found[pair] = one
            if isinstance(one, Reduced):
                worked.update(pair)
            else:
                failures.update(pair)
        not_tried = [pair for pair in chosen if pair not in tried]
        found |= dict.fromkeys(not_tried, f"not tried after {MOST_FAILURES} failures of a node")
        yield found


def outcomes_of(found: Mapping[Pair, Reduced | str]) -> list[Outcome]:
    """Rates, latencies and wrong elements of all pairs, and by name those in which the all-reduce failed."""
    outcomes: list[Outcome] = []
    for backend, (small, large) in SIZES.items():
        of = {pair: one for pair, one in found.items() if isinstance(one, Reduced) and one.backend == backend}
        if not of:
            continue
        name, between = f"link_{OPERATION}_{backend}", BETWEEN[backend]
        rates = {pair: one.rate for pair, one in of.items()}
        outcomes.append(
            value_of_pairs(name, f"All-reduce of {large:,} bytes between {between}, bus", "GB/s", "higher", rates)
        )
        latencies = {pair: one.microseconds for pair, one in of.items()}
        title = f"All-reduce of {small:,} bytes between {between}"
        outcomes.append(value_of_pairs(f"{name}_latency", title, "us", "lower", latencies))
        note = ", ".join(f"{pair_name(pair)}: {one.wrong:,}" for pair, one in of.items() if one.wrong)
        title = f"Results of all-reduces between {between}, {count_of(len(of), 'pair')}"
        wrong = sum(one.wrong for one in of.values())
        outcomes.append(Value(f"{name}_errors", title, "wrong", [wrong], "zero", note=note))
    if reasons := {pair: one for pair, one in found.items() if isinstance(one, str)}:
        first = next(iter(reasons))
        failed = f"failed where TCP works, in {len(reasons)} of {count_of(len(found), 'pair')}"
        reason = f"{failed}: {', '.join(map(pair_name, reasons))}; of {pair_name(first)}: {reasons[first]}"
        enable = (
            "let nodes open TCP connections to each other on any port; the variable NCCL_SOCKET_IFNAME of Ray names "
            "the network interface for NCCL"
        )
        outcomes.append(NotRun(f"link_{OPERATION}", "All-reduce between nodes", reason, enable))
    return outcomes


def _interface(address: str) -> dict[str, str]:
    """Gloo would take the address of the host's name, which often is that of the loopback interface."""
    for name, addresses in psutil.net_if_addrs().items():
        if any(one.address == address for one in addresses):
            return {"GLOO_SOCKET_IFNAME": name}
    return {}


def _answer(ray: Any, reference: Any, until: float) -> Any:
    try:
        return ray.get(reference, timeout=max(0.0, until - time.monotonic()))
    except Exception as error:  # the node is gone, or is of another version
        return f"no answer ({type(error).__name__})"


def _reasons(pair: Pair, answers: Sequence[Any]) -> str:
    """Why nodes of a pair failed; empty if they did not."""
    reasons = zip(pair, answers, strict=True)
    return "; ".join(f"{name}: {answer}" for name, answer in reasons if isinstance(answer, str))


def _reduced(backend: str, results: Sequence[Mapping[str, Any]]) -> Reduced:
    small, large = (statistics.median(result["seconds"]) for result in results)
    bytes_moved = results[1]["bytes"] * bus_share(OPERATION, 2)
    return Reduced(backend, bytes_moved / large / 1e9, 1e6 * small, sum(result["wrong"] for result in results))
