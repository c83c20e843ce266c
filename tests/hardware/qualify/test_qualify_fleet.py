"""Slow parts among like ones, and bad nodes and links of simulated racks: found, named, and no others."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence

from hypothesis import given
from hypothesis import strategies as st

from megatoken.hardware.qualify.fleet import Pair, graded_parts, isolate, rounds
from megatoken.hardware.qualify.judge import Verdict

FAST, SLOW = 48.0, 30.0


class SimulatedRack:
    """Links of 48 GB/s with 1 % of noise; those of bad nodes and bad links have 30, or fail."""

    def __init__(self, nodes: int, bad_nodes: set[str], bad_links: set[Pair], seed: int, *, fails: bool) -> None:
        self.names = [f"n{number:02}" for number in range(nodes)]
        self.bad_nodes, self.bad_links, self.fails = bad_nodes, bad_links, fails
        self._random = random.Random(seed)
        self.measured = 0

    def measure(self, pairs: Sequence[Pair]) -> Mapping[Pair, float | None]:
        busy = [name for pair in pairs for name in pair]
        assert len(busy) == len(set(busy)), "pairs that run together are disjoint"
        self.measured += len(pairs)
        found: dict[Pair, float | None] = {}
        for pair in pairs:
            bad = self.bad_nodes & set(pair) or tuple(sorted(pair)) in self.bad_links
            rate = (SLOW if bad else FAST) * self._random.gauss(1, 0.01)
            found[pair] = None if bad and self.fails else rate
        return found


@given(st.integers(2, 40))
def test_every_two_meet_once_in_disjoint_pairs(count: int) -> None:
    names = [str(number) for number in range(count)]
    made = list(rounds(names))
    assert len(made) == count - 1 + count % 2
    met = [frozenset(pair) for pairs in made for pair in pairs]
    assert len(met) == len(set(met)) == count * (count - 1) // 2
    assert all(len({name for pair in pairs for name in pair}) == 2 * len(pairs) for pairs in made)


@given(st.data(), st.integers(8, 24), st.booleans(), st.integers(0, 10**6))
def test_the_bad_node_and_the_bad_link_of_a_rack_are_named(
    data: st.DataObject, nodes: int, fails: bool, seed: int
) -> None:
    names = [f"n{number:02}" for number in range(nodes)]
    bad = set(data.draw(st.lists(st.sampled_from(names), max_size=2, unique=True)))
    others = [name for name in names if name not in bad]
    link = data.draw(st.sampled_from([(a, b) for a in others for b in others if a < b]))
    links = {link} if data.draw(st.booleans()) else set()
    rack = SimulatedRack(nodes, bad, links, seed, fails=fails)
    found = isolate(rack.names, rack.measure, all_pairs=True)
    assert set(found.bad_nodes) == bad
    assert set(found.bad_links) == links
    assert not found.undecided


def test_two_rounds_and_trials_of_suspects_name_a_bad_node_of_72() -> None:
    rack = SimulatedRack(72, {"n17"}, set(), 1, fails=False)
    found = isolate(rack.names, rack.measure)
    assert (found.bad_nodes, found.bad_links) == (("n17",), ())
    assert rack.measured < 2 * 36 + 12


def test_a_healthy_rack_has_no_bad_part_in_20_repetitions() -> None:
    for seed in range(20):
        rack = SimulatedRack(18, set(), set(), seed, fails=False)
        found = isolate(rack.names, rack.measure)
        assert not found.bad_nodes and not found.bad_links and not found.undecided


def test_two_nodes_have_no_majority() -> None:
    rack = SimulatedRack(2, {"n01"}, set(), 1, fails=True)
    found = isolate(rack.names, rack.measure)
    assert (found.bad_nodes, found.bad_links) == ((), (("n00", "n01"),))


def test_a_gpu_that_is_slower_than_its_neighbours_is_named_and_one_far_behind_fails() -> None:
    rates = {"0": 1260.0, "1": 1262.0, "2": 1180.0, "3": 1100.0, "4": 1255.0, "5": 1258.0}
    graded = {"3": Verdict.FAIL, "2": Verdict.MARGINAL}
    assert list(graded_parts(rates, "higher").items()) == list(graded.items())
    assert graded_parts({name: 1e6 / rate for name, rate in rates.items()}, "lower") == graded
    assert graded_parts(rates | {"2": 1245.0, "3": 1245.0}, "higher") == {}  # cards of one host differ by 2 %
    assert graded_parts({"0": 1260.0, "1": 800.0}, "higher") == {}
    assert graded_parts(rates, "") == {}


def test_one_pair_of_gpus_just_below_the_limit_does_not_fail() -> None:
    pairs = {f"pair {number}": 397.0 for number in range(27)} | {"0-5": 383.0}
    assert graded_parts(pairs, "higher") == {"0-5": Verdict.MARGINAL}
