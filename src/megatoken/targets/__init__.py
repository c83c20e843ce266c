"""What the harness can drive: a target takes requests and reports their tokens with the times they were seen."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

from megatoken.engine.request import Request
from megatoken.engine.state import ReplicaState
from megatoken.hardware.telemetry import Telemetry
from megatoken.rack.records import SampleEvent
from megatoken.runs.reasons import Reason

__all__ = ["HasFileno", "RemoteTarget", "ReplicaReading", "SampleEvent", "Target"]


@dataclass(frozen=True, slots=True)
class ReplicaReading:
    """One replica at one moment: its engine's state and the sensors of its GPUs."""

    node: str | None  # None: this machine
    replica: int
    state: ReplicaState
    telemetry: Telemetry
    known: frozenset[str] | None = None  # fields of ``state`` that the source reports; None: all


@runtime_checkable
class HasFileno(Protocol):
    """What the kernel can wait for."""

    def fileno(self) -> int:
        """Its file descriptor."""


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

    def cancel_all(self) -> list[SampleEvent]:
        """Drops every sample in flight; no event follows for any of them.

        Returns what was not reported of them yet: ends that came meanwhile, and when the tokens of others were seen.
        """

    def close(self) -> None:
        """Frees what the target holds."""


@runtime_checkable
class RemoteTarget(Target, Protocol):
    """A target that others run: it is observed from outside."""

    def submit(self, sample_id: int, request: Request, due_ns: int = 0) -> None:
        """Queues a sample, which leaves at ``due_ns`` (``time.monotonic_ns()``), or at once if that has passed."""

    def wake_on(self, source: HasFileno) -> None:
        """From now on ``poll`` also returns when ``source`` can be read."""

    def keep_every_text(self) -> None:
        """From now on every answer comes with its text; before, only where the target needs it."""

    def begin(self) -> None:
        """A test begins; what was observed of the client before does not count."""

    def findings(self, since_ns: int) -> list[Reason]:
        """What the answers since that moment (``time.monotonic_ns()``) showed of the server; for the end of a test."""
