"""What a harness can drive. A target takes samples, reports tokens with the time they were seen, and counts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from megatoken.engine.request import Request
from megatoken.hardware.telemetry import Telemetry


@dataclass(frozen=True, slots=True)
class SampleEvent:
    """New tokens of one sample; ``time_ns`` is ``time.monotonic_ns()`` when they were seen.

    ``finish_reason`` is set on the last event of a sample and only there. ``started_ns`` is when the target began to
    compute the sample, on its first event; None from a target that cannot tell.
    """

    sample_id: int
    token_ids: tuple[int, ...]
    finish_reason: str | None
    time_ns: int
    started_ns: int | None = None


@dataclass(frozen=True, slots=True)
class TargetCounters:
    """State of a target now; ``preemptions`` and ``processed_tokens`` only ever grow."""

    in_flight: int
    waiting: int
    rows: int
    row_budget: int
    pages_free: int
    pages: int
    preemptions: int
    processed_tokens: int


class Target(Protocol):
    """Anything that turns requests into tokens. Sample ids are the caller's; each may be in flight once."""

    def facts(self) -> Mapping[str, Any]:
        """Fields of ``result.json`` that only the target knows; they stay the same from its start to its end."""

    def submit(self, sample_id: int, request: Request) -> None:
        """Queues a sample. Raises RequestError or CapacityError if it can never be served."""

    def poll(self, timeout_seconds: float) -> list[SampleEvent]:
        """Waits for tokens, at most about this long; an in-process engine runs one step instead."""

    def counters(self) -> TargetCounters:
        """The state after the last poll."""

    def telemetry(self) -> Telemetry:
        """Power, clock and temperature of what serves, since the last call; asked about once a second."""

    def cancel_all(self) -> None:
        """Drops every sample in flight; no event follows for any of them."""

    def close(self) -> None:
        """Frees what the target holds."""
