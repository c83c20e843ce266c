"""What a client may send to an HTTP process, and how long it may take."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class HttpLimits:
    """What a client may send and how long it may take. Sizes in bytes."""

    line_bytes: int = 8 << 10
    head_bytes: int = 64 << 10
    body_bytes: int = 8 << 20
    held_body_bytes: int = 128 << 20  # of all requests of a process whose bodies are still being sent, or wait
    head_seconds: float = 10.0
    body_seconds: float = 60.0
    idle_seconds: float = 75.0
    stalled_seconds: float = 30.0  # without the client reading anything of what waits for it
    buffered_bytes: int = 4 << 20  # waiting for a slow reader
    connections: int = 16_384
