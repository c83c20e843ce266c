"""What a harness can drive. A target takes samples, reports tokens with the time they were seen, and counts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from megatoken.engine.request import Request
from megatoken.engine.state import ReplicaState
from megatoken.hardware.telemetry import Telemetry


@dataclass(frozen=True, slots=True)
class SampleEvent:
    """New tokens of one sample; ``time_ns`` is ``time.monotonic_ns()`` when they were seen.

    ``finish_reason`` is set on the last event of a sample and only there. ``started_ns`` is when the target began to
    compute the sample, on its first event; None from a target that cannot tell.

    A target that tells of a sample only at its end, or of its first token and its end, sets ``output_tokens`` on the
    last event: all tokens of the sample. ``token_ids`` are then all of them, or none if nobody wants them, and
    ``first_ns`` is when the first was seen, if no event said so. ``node`` and ``replica`` say where it was computed;
    None is this machine. ``error`` is set on the last event of a sample that failed, in place of ``finish_reason``.

    A target that answers in text sets ``text``, the new text, and leaves ``token_ids`` empty. It sets ``first_ns`` on
    the first event, and ``output_tokens`` on the last. ``input_tokens``, on the last event, is the length of a prompt
    that the data set has not counted, where the target knows it.
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

        Raises MegatokenError when nothing is left that could serve.
        """

    def state(self) -> ReplicaState:
        """All replicas together after the last poll.

        A target that does not count steps, whose events then come as the work is done, leaves ``steps`` at 0.
        """

    def replicas(self) -> list[ReplicaReading]:
        """Each replica on its own, with power since the last call; asked about once a second."""

    def outcome(self, since_ns: int) -> Mapping[str, Any]:
        """Fields of ``result.json``: what became of the target since that moment (``time.monotonic_ns()``)."""

    def withdraw(self) -> list[int]:
        """Drops every sample that no engine has been given to begin with; their ids, of which no event follows."""

    def cancel_all(self) -> None:
        """Drops every sample in flight; no event follows for any of them."""

    def close(self) -> None:
        """Frees what the target holds."""
