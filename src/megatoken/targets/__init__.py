"""What the harness can drive: a target takes requests and reports their tokens with the times they were seen."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from megatoken.engine.request import Request
from megatoken.engine.state import ReplicaState
from megatoken.hardware.telemetry import Telemetry


@dataclass(frozen=True, slots=True)
class SampleEvent:
    """New tokens of one sample; ``time_ns`` is ``time.monotonic_ns()`` when they were seen.

    ``finish_reason`` is set on the last event of a sample and only there. ``started_ns``, on the first event, is when
    the target began to compute the sample; None if the target does not know.

    A target that reports a sample only at its end, or its first token and its end, sets ``output_tokens`` on the last
    event: the number of all tokens of the sample. ``token_ids`` are then all of them, or none if the run does not need
    them, and ``first_ns`` is when the first was seen, unless an earlier event reported it. ``node`` and ``replica`` are
    where the sample was computed; None is this machine. ``error``, on the last event, says why the sample failed.

    A target that answers in text sets ``text``, the new text, and leaves ``token_ids`` empty. It sets ``first_ns`` on
    the first event, and ``output_tokens`` on the last. ``input_tokens``, on the last event, is the length of a prompt
    that the data set has not counted, where the target knows it.

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


@dataclass(frozen=True, slots=True)
class ReplicaReading:
    """One replica at one moment: its engine's state and the sensors of its GPUs."""

    node: str | None  # None: this machine
    replica: int
    state: ReplicaState
    telemetry: Telemetry


class Target(Protocol):
    """Anything that turns requests into tokens. Sample ids are the caller's; each may be in flight once."""

    def facts(self) -> Mapping[str, Any]:
        """Fields of ``result.json`` that only the target knows; they stay the same from its start to its end."""

    def submit(self, sample_id: int, request: Request) -> None:
        """Queues a sample. Raises RequestError or CapacityError if it can never be served."""

    def poll(self, timeout_seconds: float) -> list[SampleEvent]:
        """Waits for tokens, at most about this long; an in-process engine runs one step instead.

        Raises MegatokenError when the target can serve no more.
        """

    def state(self) -> ReplicaState:
        """The sum over all replicas after the last poll.

        ``waiting`` must be the samples that no replica runs: the harness submits more only when it falls. A target that
        does not count steps leaves ``steps`` at 0; its events then have to come as the work is done.
        """

    def replicas(self) -> list[ReplicaReading]:
        """Each replica, with mean power since the last call; called about once a second. Empty if unknown."""

    def outcome(self, since_ns: int) -> Mapping[str, Any]:
        """Fields of ``result.json`` about losses and joins since that moment (``time.monotonic_ns()``)."""

    def withdraw(self) -> list[int]:
        """Drops every sample that no replica has begun and returns their ids; no event follows for them."""

    def cancel_all(self) -> None:
        """Drops every sample in flight; no event follows for any of them."""

    def close(self) -> None:
        """Frees what the target holds."""
