"""Qualification of a rack through Ray: every node at once, then the network between nodes in disjoint pairs."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from megatoken.errors import MegatokenError, UsageError
from megatoken.hardware.qualify.catalog import FULL_LIMIT_FACTOR, SETTINGS, TESTS, HardwareTest, choose, device_here
from megatoken.hardware.qualify.document import MARK
from megatoken.hardware.qualify.fleet import Pair, isolate
from megatoken.hardware.qualify.parts import gpus_here, joined, qualify_gpus
from megatoken.hardware.qualify.processes import Ended, Returned
from megatoken.hardware.qualify.session import entry_of_test, qualify
from megatoken.hardware.qualify.values import NotRun, Outcome
from megatoken.rack import all_reduces
from megatoken.rack.cluster import Cluster
from megatoken.rack.links import links_entry, listen, measure, measured

START_SECONDS = 120.0
"""For a node to start the process of its tests and to load PyTorch, which may come from a slow disk."""


@dataclass(frozen=True, slots=True)
class Problem:
    """Why the tests of a node did not end."""

    reason: str
    is_fault: bool  # of the node, so that it fails; else its tests could not begin, and did not run


class NodeActor:
    """The process on a node that tests it, and the ends of its connections. Answers are JSON text."""

    def qualify(self, names: Sequence[str], full: bool) -> Iterator[str]:  # Ray passes arguments by position
        """Test this node, its processor or every GPU at the same time, and yield its document after each test."""
        try:
            device = device_here()
            tests, setting = choose(TESTS[device], names, full=full), SETTINGS[device][full]
            gpus = gpus_here() if device == "gpu" else []
            if len(gpus) > 1:
                documents = qualify_gpus(tests, setting, device, gpus, together=True, full=full)
            else:
                documents = qualify(tests, setting, device, full=full)
            for document in documents:
                yield json.dumps(document)
        except MegatokenError as error:
            yield json.dumps({"error": str(error)})

    def listen(self, host: str, nonce: bytes) -> int:
        """See ``links.listen``."""
        return listen(host, nonce)

    def measure(self, host: str, port: int, nonce: bytes) -> dict[str, float]:
        """See ``links.measure``."""
        return measure(host, port, nonce)

    def device_and_port(self, host: str) -> tuple[str, int]:
        """See ``all_reduces.device_and_port``."""
        return all_reduces.device_and_port(host)

    def all_reduce(self, backend: str, rank: int, rendezvous: str, address: str) -> list[dict[str, Any]] | str:
        """See ``all_reduces.all_reduce``."""
        return all_reduces.all_reduce(backend, rank, rendezvous, address)


def qualify_rack(
    address: str,
    names: Sequence[str],
    *,
    full: bool,
    note: Callable[[str], None],
    progress: Callable[[int, int], None] | None,
) -> Iterator[dict[str, Any]]:
    """Test every node of a Ray cluster, then its network; yields the document of all nodes after each node's end.

    A node that is lost during its tests is named and fails; one whose tests could not begin did not run. The values of
    all tests that ended count, and the network is measured between the other nodes.

    ``address``: as for ``Cluster``. ``names``: of tests; none: the set. ``progress``: nodes that have ended, all nodes.

    Raises:
        UsageError: the cluster cannot be used, or every node gave this reason why it tests nothing.
        MegatokenError: no test of any node ended.
    """
    cluster = Cluster(address, note)
    try:
        import ray

        nodes = {node.name: node for node in cluster.nodes()}
        actors = {name: cluster.start_unplaced(NodeActor, node) for name, node in nodes.items()}
        began = time.monotonic()
        streams = {actor.qualify.remote(list(names), full): name for name, actor in actors.items()}
        documents: dict[str, dict[str, Any]] = {}
        problems: dict[str, Problem] = {}

        def all_of_them(links: Sequence[dict[str, Any]] = ()) -> dict[str, Any]:
            ordered = {name: documents[name] for name in nodes if name in documents}
            more = [_problem_entry(name, problems[name]) for name in nodes if name in problems]
            seconds = time.monotonic() - began
            return joined(ordered, "node", expected=len(ordered), seconds=seconds, more=[*more, *links])

        if progress:
            progress(0, len(nodes))
        for number, (name, document, problem) in enumerate(_ends(ray, streams, silent_seconds(full)), 1):
            if progress:
                progress(number, len(nodes))
            if problem is not None:
                problems[name] = problem
            if document is not None:
                documents[name] = document | {"complete": True}  # nothing more comes of it
            if documents:
                yield all_of_them() | {"complete": False}
        if not documents:
            raise _nothing({name: problems[name] for name in nodes})

        addresses = {name: node.address for name, node in nodes.items()}
        links: dict[Pair, dict[str, float]] = {}

        def rates(pairs: Sequence[Pair]) -> Mapping[Pair, float | None]:
            found = measured(ray, actors, addresses, pairs)
            links.update({(min(pair), max(pair)): one for pair, one in found.items() if one is not None})
            return {pair: None if one is None else one["rate"] for pair, one in found.items()}

        rest = [name for name in nodes if name not in problems or not problems[name].is_fault]
        isolated = isolate(rest, rates, all_pairs=full)
        yield all_of_them([links_entry(isolated, len(rest), links)]) | {"complete": False}
        measure_pairs = partial(all_reduces.between_nodes, ray, actors, addresses)
        reduced: Sequence[Outcome] = ()
        for found in all_reduces.of_all(rest, links, measure_pairs):
            reduced = all_reduces.outcomes_of(found)
            yield all_of_them([links_entry(isolated, len(rest), links, reduced)]) | {"complete": False}
        yield all_of_them([links_entry(isolated, len(rest), links, reduced)])
    finally:
        cluster.close()


def silent_seconds(full: bool) -> float:
    """The longest that a healthy node can be silent: its longest test, or the start."""
    longest = max(test.limit_seconds for tests in TESTS.values() for test in tests)
    return START_SECONDS + longest * (FULL_LIMIT_FACTOR if full else 1)


def _ends(
    ray: Any, streams: Mapping[Any, str], limit_seconds: float
) -> Iterator[tuple[str, dict[str, Any] | None, Problem | None]]:
    """Each node when its tests have ended: its name, its last document, and what went wrong.

    ``streams``: what Ray returns for each node's ``qualify``. ``limit_seconds``: after which a node that has sent
    nothing is given up.
    """
    last: dict[str, dict[str, Any]] = {}
    heard = dict.fromkeys(streams.values(), time.monotonic())
    waiting = dict(streams)
    while waiting:
        until = min(heard[name] for name in waiting.values()) + limit_seconds
        ready, _ = ray.wait(list(waiting), num_returns=1, timeout=max(0.0, until - time.monotonic()))
        now = time.monotonic()
        for stream in ready or [one for one, name in waiting.items() if heard[name] + limit_seconds <= now]:
            name = waiting[stream]
            problem: Problem | None = None
            try:
                if not ready:
                    raise ray.exceptions.GetTimeoutError
                document = json.loads(ray.get(next(stream), timeout=limit_seconds))
                if "error" not in document:
                    last[name], heard[name] = document, now
                    continue
                problem = Problem(document["error"], is_fault=False)
            except StopIteration:
                pass
            except ray.exceptions.GetTimeoutError:
                problem = Problem(f"did not answer for {limit_seconds:.0f} s during the tests", is_fault=True)
            except ray.exceptions.RayTaskError as error:
                reason = f"{type(error.cause).__name__}: {error.cause}".splitlines()[0]
                problem = Problem(reason, is_fault=False)
            except ray.exceptions.RayError as error:
                reason = f"its process ended during the tests ({type(error).__name__})"
                problem = Problem(reason, is_fault=True)
            del waiting[stream]
            yield name, last.get(name), problem


def _problem_entry(name: str, problem: Problem) -> dict[str, Any]:
    """The test of a document that names a node whose tests did not end."""
    test = HardwareTest(f"node{MARK}{name}", f"Tests of node {name}", "")
    if problem.is_fault:
        return entry_of_test(test, [Ended((), 0.0, problem.reason)], "", {}, 0.0)
    not_run = NotRun(test.name, test.title, problem.reason, "run megatoken qualify on that node")
    return entry_of_test(test, [Ended((Returned(not_run, None),), 0.0, None)], "", {}, 0.0)


def _nothing(problems: Mapping[str, Problem]) -> MegatokenError:
    """Why no node has a test that ended: the reason that all nodes give, or that of each."""
    (first, problem), *others = problems.items()
    if all(one == problem for _, one in others):
        return (MegatokenError if problem.is_fault else UsageError)(f"{first}: {problem.reason}")
    return MegatokenError("; ".join(f"{name}: {one.reason}" for name, one in problems.items()))
