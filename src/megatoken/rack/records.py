"""Records of a rack: places, what workers compute, states of replicas, losses, and the events of every target."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True, slots=True)
class Place:
    """A replica's place in the rack: its node, and its number there."""

    node: str
    replica: int


@dataclass(frozen=True, slots=True)
class WorkerSpec:
    """What the processes of a rack compute and how they talk; the same for all of them, plain values only."""

    model: str  # checkpoint directory, named shape, or the model that ships
    random_weights: bool  # take only the model's shape
    seed: int  # of random weights
    engine: dict[str, Any]  # fields of ``EngineConfig``
    simulated_gpu: str | None  # the GPU that engines simulate; None: they compute
    streams: bool  # whether first tokens are reported at once
    keep_ids: bool  # whether the ids of answers are reported
    dead_after_seconds: float  # silence after which the other side counts as gone
    reconnect_seconds: float  # how long a worker tries to reconnect to the driver
    driver_host: str  # name of the driver's machine
    server: str = ""  # settings of a server whose replicas these are, as JSON


class SampleEvent(NamedTuple):
    """New tokens of one sample; ``time_ns`` is ``time.monotonic_ns()`` when they were seen.

    ``finish_reason`` is set on the last event of a sample and only there. ``started_ns``, on the first event, is when
    the target began to compute the sample; None if the target does not know.

    A target that reports a sample only at its end, or its first token and its end, sets ``output_tokens`` on the last
    event: the number of all tokens of the sample. ``token_ids`` are then all of them, or none if the run does not need
    them, and ``first_ns`` is when the first was seen, unless an earlier event reported it. ``node`` and ``replica`` are
    where the sample was computed; None is this machine. ``error``, on the last event, says why the sample failed.

    A target that answers in text sets ``text``, the new text, and leaves ``token_ids`` empty. It sets ``first_ns`` on
    the first event, and ``output_tokens`` on the last. ``input_tokens``, on the last event, is the length of a prompt
    that the data set has not counted, where the target knows it. ``first_characters``, on the last event, are those of
    the text that came first; 0 where they are unknown.

    ``sent_ns``, on the first event that has it, is when the first byte of the request was handed to the kernel.
    ``token_times_ns``, on the last event of a sample whose tokens were not reported one by one, is when each token was
    seen, int64 [tokens]; tokens that came together share a time. Where only the number of pieces of text is known, it
    has one time for each piece.
    """

    sample_id: int
    token_ids: tuple[int, ...]
    finish_reason: str | None
    time_ns: int
    started_ns: int | None = None
    first_ns: int | None = None
    output_tokens: int | None = None
    node: str | None = None
    replica: int = 0
    error: str | None = None
    text: str = ""
    input_tokens: int | None = None
    sent_ns: int | None = None
    token_times_ns: NDArray[np.int64] | None = None
    first_characters: int = 0


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
