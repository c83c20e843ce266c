"""All-reduces between nodes: which pairs are tried, what the document says of them, and real ranks that fail."""

from __future__ import annotations

import os
import random
import socket
import threading
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import pytest

from megatoken.hardware.qualify.document import check_document
from megatoken.hardware.qualify.fleet import Isolated, Pair, rounds
from megatoken.hardware.qualify.judge import overall
from megatoken.hardware.qualify.values import NotRun, Value
from megatoken.rack import all_reduces
from megatoken.rack.all_reduces import MOST_FAILURES, Reduced, all_reduce, device_and_port, of_all, outcomes_of
from megatoken.rack.links import links_entry

HOST = "127.0.0.1"


@pytest.mark.parametrize("seed", range(12))
def test_pairs_are_tried_once_and_nodes_that_always_fail_soon_left_alone(seed: int) -> None:
    chance = random.Random(seed)
    names = [f"n{number}" for number in range(chance.randrange(2, 20))]
    broken = set(chance.sample(names, chance.randrange(len(names) // 3 + 1)))
    every = [(min(pair), max(pair)) for one in rounds(names) for pair in one]
    pairs = {pair for pair in every if chance.random() < 0.8}
    tried: list[Pair] = []

    def measure(now: Sequence[Pair]) -> dict[Pair, Reduced | str]:
        assert len({name for pair in now for name in pair}) == 2 * len(now)
        tried.extend(now)
        good = Reduced("gloo", 1.0, 50.0, 0)
        return {pair: "a reason" if broken & set(pair) else good for pair in now}

    *_, found = of_all(names, pairs, measure)
    assert found.keys() == pairs
    assert len(set(tried)) == len(tried)
    tries = Counter(name for pair in tried for name in pair)
    assert all(tries[name] <= MOST_FAILURES for name in broken)
    # A node whose first partners were all broken may be left alone, too.
    assert all(isinstance(one, str) for pair, one in found.items() if broken & set(pair) or pair not in tried)
    assert all(isinstance(found[pair], Reduced) for pair in tried if not broken & set(pair))


def test_the_document_names_the_worst_pairs_and_those_that_failed() -> None:
    reduced: dict[Pair, Reduced | str] = {
        ("a", "b"): Reduced("nccl", 40.0, 20.0, 0),
        ("a", "c"): Reduced("nccl", 30.0, 25.0, 0),
        ("a", "d"): Reduced("gloo", 1.0, 90.0, 0),
        ("b", "c"): "c: rank 1 was ended by SIGSEGV: no message",
        ("b", "d"): "d: another",
    }
    outcomes = {one.name: one for one in outcomes_of(reduced)}
    rate, latency = outcomes["link_all_reduce_nccl"], outcomes["link_all_reduce_nccl_latency"]
    assert isinstance(rate, Value) and isinstance(latency, Value)
    assert (rate.windows, rate.better, rate.note) == ([40.0, 30.0], "higher", "lowest: 30.0 GB/s, a - c")
    assert rate.title == "All-reduce of 134,217,728 bytes between one GPU of each node (NCCL), bus, 2 pairs"
    assert (latency.windows, latency.better, latency.note) == ([20.0, 25.0], "lower", "highest: 25.0 us, a - c")
    other, failed = outcomes["link_all_reduce_gloo"], outcomes["link_all_reduce"]
    assert isinstance(other, Value) and other.windows == [1.0] and other.title.endswith("(gloo), bus, 1 pair")
    assert isinstance(failed, NotRun)
    assert failed.reason == (
        "failed where TCP works, in 2 of 5 pairs: b - c, b - d; of b - c: c: rank 1 was ended by SIGSEGV: no message"
    )


@pytest.mark.parametrize(("wrong", "verdict"), [(0, "PASS"), (3, "FAIL")])
def test_wrong_elements_fail_and_no_rate_of_an_all_reduce_makes_a_node_bad(wrong: int, verdict: str) -> None:
    found = Isolated({("a", "b"): 1.0, ("a", "c"): 1.0}, 0.9, (), (), ())
    reduced = {("a", "b"): Reduced("gloo", 1.0, 50.0, 0), ("a", "c"): Reduced("gloo", 0.001, 5e6, wrong)}
    links = {
        pair: {"rate": 1.0, "rate_of_streams": 1.0, "round_trip_p50": 1.0, "round_trip_p99": 1.0} for pair in reduced
    }
    entry = links_entry(found, 3, links, outcomes_of(reduced))
    values = {value["name"]: value for value in entry["values"]}
    assert (values["link_all_reduce_gloo_errors"]["verdict"], entry["verdict"]) == (verdict, verdict)
    assert values["link_all_reduce_gloo_errors"]["note"] == ("a - c: 3" if wrong else "")
    assert values["bad_nodes"]["median"] == values["bad_links"]["median"] == 0
    document = {"schema_version": 1, "device": "x", "machine": {}, "tests": [entry], "verdict": overall([entry])}
    check_document(document, "document")


def test_without_pairs_nothing_is_said() -> None:
    assert outcomes_of({}) == []


def test_two_nodes_of_one_address_reduce() -> None:
    _, port = device_and_port(HOST)
    answers: dict[int, object] = {}

    def run(rank: int) -> None:
        answers[rank] = all_reduce("gloo", rank, f"tcp://{HOST}:{port}", HOST)

    threads = [threading.Thread(target=run, args=(rank,)) for rank in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    results, nothing = answers[0], answers[1]
    assert isinstance(results, list) and nothing == []
    assert [(one["operation"], one["bytes"], one["wrong"]) for one in results] == [
        ("all_reduce", size, 0) for size in all_reduces.SIZES["gloo"]
    ]
    reduced = all_reduces._reduced("gloo", results)
    assert reduced.rate > 0.01 and 1 < reduced.microseconds < 1e6 and reduced.wrong == 0


def test_a_rank_whose_port_is_closed_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(all_reduces, "RENDEZVOUS_SECONDS", 1.0)
    _, port = device_and_port(HOST)
    answer = all_reduce("gloo", 1, f"tcp://{HOST}:{port}", HOST)
    assert isinstance(answer, str)
    assert answer.startswith("rank 1 ended with exit code 1: torch.distributed.DistNetworkError: ")
    assert f"({HOST}, {port})" in answer


def test_a_rank_that_does_not_end_is_stopped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(all_reduces, "LIMIT_SECONDS", 1.0)
    with socket.create_server((HOST, 0)) as silent:
        rendezvous = f"tcp://{HOST}:{silent.getsockname()[1]}"
        answer = all_reduce("gloo", 1, rendezvous, HOST)
    assert answer == "1 rank did not end within 1 s and had to be stopped"


def test_a_node_without_pytorch_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "sitecustomize.py").write_text("import sys\nsys.modules['torch'] = None\n")
    before = os.environ.get("PYTHONPATH", "")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, [str(tmp_path), before])))
    answer = all_reduce("gloo", 1, f"tcp://{HOST}:1", HOST)
    assert answer == "rank 1 ended with exit code 1: ModuleNotFoundError: import of torch halted; None in sys.modules"


def test_gloo_takes_the_interface_of_the_address() -> None:
    assert all_reduces._interface(HOST) == {"GLOO_SOCKET_IFNAME": "lo"}
    assert all_reduces._interface("203.0.113.1") == {}


class LostError(Exception):
    """As Ray raises it of a node that is gone."""


def test_a_node_that_is_gone_is_named() -> None:
    class Ray:
        @staticmethod
        def get(reference: object, timeout: float) -> object:
            if reference is None:
                raise LostError
            return reference

    class Method:
        def __init__(self, answer: object) -> None:
            self.remote = lambda *_: answer

    class Actor:
        def __init__(self, meeting: object, answer: object) -> None:
            self.device_and_port, self.all_reduce = Method(meeting), Method(answer)

    results = [{"bytes": 2**14, "seconds": [1e-4], "wrong": 0}, {"bytes": 10**6, "seconds": [1e-3], "wrong": 1}]
    gone, works, dies = Actor(None, None), Actor(("cpu", 1), results), Actor(("gpu", 1), None)
    actors = {"a": works, "b": gone, "c": works, "d": works, "e": works, "f": dies}
    found = all_reduces.between_nodes(Ray, actors, dict.fromkeys(actors, HOST), [("a", "b"), ("c", "d"), ("e", "f")])
    assert found == {
        ("a", "b"): "b: no answer (LostError)",
        ("c", "d"): Reduced("gloo", 1.0, 100.0, 1),
        ("e", "f"): "f: no answer (LostError)",
    }
