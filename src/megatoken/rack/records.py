"""The driver's records of a rack: places, events of samples, the state of every replica, losses."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from numpy.typing import NDArray


@dataclass(frozen=True, slots=True)
class Place:
    """A replica's place in the rack: its node, and its number there."""

    node: str
    replica: int


@dataclass(frozen=True, slots=True)
class Event:
    """An event of one sample, as in ``targets.SampleEvent``; times are this process's monotonic clock's."""

    sample_id: int
    token_ids: tuple[int, ...]
    finish_reason: str | None
    time_ns: int
    first_ns: int | None
    started_ns: int | None
    output_tokens: int
    place: Place


@dataclass(frozen=True, slots=True)
class Loss:
    """A replica that was lost: when, why, how many samples went back to the queue, and how many tokens they had."""

    place: Place
    time_ns: int
    cause: str
    samples_returned: int
    output_tokens_dropped: int
    left: int  # replicas that served then


@dataclass(slots=True)
class ReplicaRecord:
    """A replica as the driver knows it."""

    place: Place
    channel_place: int
    state: NDArray[Any]
    tickets: dict[int, int] = field(default_factory=dict)  # ticket -> sample, oldest first
    wanted: int = 0
