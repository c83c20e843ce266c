"""When requests are due: a closed loop and an open loop.

A load decides, given the time and the ends of its requests, which rows of the data set are due. It knows no target.
The driver of a point (``point.py``) numbers the requests from 0 in the order in which the load gives them, sends them,
and reports each end once. All times are ``time.monotonic_ns()``.

``OpenLoop`` takes any iterator of due times and rows, so constant, Poisson and gamma arrivals and a trace are the same
load. Whatever waits for answers (a user who reads one and asks again) implements ``Load`` directly.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import accumulate, repeat
from typing import Literal, NamedTuple, Protocol

import numpy as np

ArrivalKind = Literal["constant", "poisson", "gamma"]
GAPS_DRAWN = 1024  # at once


class Arrival(NamedTuple):
    """A request: when it is due, and its row of the data set."""

    due_ns: int
    row: int


class Load(Protocol):
    """Decides which requests are due."""

    waits: bool  # whether new requests wait for the ends of others (a closed loop); an open loop can be overloaded

    def start(self, now_ns: int) -> None:
        """Begins; called once, before any other method."""

    def take_due(self, now_ns: int) -> list[Arrival]:
        """The requests that became due since the last call, in the order of their due times."""

    def ended(self, request: int, now_ns: int) -> None:
        """Notes that a request has ended, by completion or failure."""

    def next_due_ns(self) -> int | None:
        """When the next request is due; None: not before another one ends, or no more come."""


class ClosedLoop:
    """Keeps ``concurrency`` requests under way: a new one is due at the moment at which another ends."""

    waits = True

    def __init__(self, rows: Iterator[int], concurrency: int) -> None:
        self._rows = rows
        self._free_ns = [0] * concurrency

    def start(self, now_ns: int) -> None:
        """All are due at once."""
        self._free_ns = [now_ns] * len(self._free_ns)

    def take_due(self, now_ns: int) -> list[Arrival]:
        """One request for each that has ended since the last call."""
        due, self._free_ns = [Arrival(free_ns, next(self._rows)) for free_ns in self._free_ns], []
        return due

    def ended(self, request: int, now_ns: int) -> None:
        """Makes room for another request."""
        self._free_ns.append(now_ns)

    def next_due_ns(self) -> int | None:
        """The end of the request whose place is free."""
        return self._free_ns[0] if self._free_ns else None


class OpenLoop:
    """Requests that are due at given times, whatever the target does."""

    waits = False

    def __init__(self, arrivals: Iterable[tuple[float, int]]) -> None:
        """Takes pairs of seconds since the start, never falling, and rows of the data set; they may be endless."""
        self._arrivals = iter(arrivals)
        self._start_ns = 0
        self._next: Arrival | None = None

    def start(self, now_ns: int) -> None:
        """Times count from now."""
        self._start_ns = now_ns
        self._advance()

    def take_due(self, now_ns: int) -> list[Arrival]:
        """The requests whose time has come."""
        due = []
        while self._next is not None and self._next.due_ns <= now_ns:
            due.append(self._next)
            self._advance()
        return due

    def ended(self, request: int, now_ns: int) -> None:
        """Does nothing: arrivals do not depend on answers."""

    def next_due_ns(self) -> int | None:
        """The time of the next arrival."""
        return self._next.due_ns if self._next is not None else None

    def _advance(self) -> None:
        arrival = next(self._arrivals, None)
        self._next = None if arrival is None else Arrival(self._start_ns + round(arrival[0] * 1e9), arrival[1])


def arrival_seconds(kind: ArrivalKind, rate: float, burstiness: float, seed: Sequence[int]) -> Iterator[float]:
    """Endless due times in seconds at a mean of ``rate`` a second; the first is one gap after the start.

    Args:
        kind: equal gaps, exponential gaps (Poisson), or gaps of a gamma distribution.
        rate: requests per second.
        burstiness: shape of the gamma distribution: 1 is Poisson, less is burstier; the squared coefficient of
            variation of the gaps is 1 / burstiness.
        seed: of the draws.
    """
    return accumulate(repeat(1 / rate) if kind == "constant" else _drawn_gaps(kind, rate, burstiness, seed))


def _drawn_gaps(kind: ArrivalKind, rate: float, burstiness: float, seed: Sequence[int]) -> Iterator[float]:
    shape = 1.0 if kind == "poisson" else burstiness
    draws = np.random.default_rng(seed)
    while True:
        yield from draws.gamma(shape, 1 / (rate * shape), GAPS_DRAWN).tolist()


def passes(rows: int, seed: Sequence[int]) -> Iterator[int]:
    """Endless passes over the rows of a data set, each in its own order."""
    draws = np.random.default_rng(seed)
    while True:
        yield from draws.permutation(rows).tolist()
