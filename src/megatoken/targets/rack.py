"""A rack as a target: samples go to one queue, from which the replicas of all nodes pull."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

import numpy as np

from megatoken.engine.request import Request
from megatoken.engine.state import ReplicaState
from megatoken.hardware.telemetry import COUNTS, FIELDS, Telemetry
from megatoken.rack.hub import Hub
from megatoken.rack.records import SampleEvent
from megatoken.rack.wire import STATE, STATE_FIELDS, pack_request
from megatoken.targets import ReplicaReading


class RackTarget:
    """Drives the replicas that are connected to ``hub``."""

    def __init__(self, hub: Hub, facts: Mapping[str, Any]) -> None:
        """Takes a hub whose replicas are connected, for itself alone. ``facts``: fields of ``result.json``."""
        self._hub = hub
        self._facts = facts
        self._planned = len(hub.live())

    def facts(self) -> Mapping[str, Any]:
        """The facts about the replicas and their nodes."""
        return self._facts

    def submit(self, sample_id: int, request: Request) -> None:
        """Queues a sample. Raises RequestError if its prompt is text."""
        self._hub.submit(sample_id, pack_request(request))

    def poll(self, timeout_seconds: float) -> list[SampleEvent]:
        """Gives queued samples to replicas, waits for events. Raises MegatokenError without replicas for too long."""
        self._hub.dispatch()
        return self._hub.take(timeout_seconds)

    def state(self) -> ReplicaState:
        """All replicas together; ``waiting`` counts what is in the shared queue."""
        # One array, because this runs after every report, of which a large rack sends hundreds a second.
        states = np.frombuffer(b"".join(state.tobytes() for _, state in self._hub.states()), STATE)
        own = {
            "in_flight": self._hub.unended,
            "waiting": self._hub.waiting,
            "replicas": max(1, len(self._hub.live())),
        }
        return ReplicaState(**{name: states[name].sum().item() for name in STATE_FIELDS} | own)

    def replicas(self) -> list[ReplicaReading]:
        """The last report of every replica."""
        return [
            ReplicaReading(
                place.node,
                place.replica,
                ReplicaState(**{name: state[name].item() for name in STATE_FIELDS}),
                Telemetry(**{name: _known(name, state[name]) for name in FIELDS}),  # type: ignore[arg-type]
            )
            for place, state in self._hub.states()
        ]

    def outcome(self, since_ns: int) -> dict[str, Any]:
        """Losses and joins since then, and the clock offsets of all nodes."""
        hub = self._hub
        losses = [loss for loss in hub.losses if loss.time_ns >= since_ns]
        joins = [(place, time_ns) for place, time_ns in hub.joins if time_ns >= since_ns]
        serving = len(hub.live())
        least = min([loss.left for loss in losses] + [serving])
        facts = {
            "replicas": self._planned,
            "replicas_least": least,
            "replicas_at_end": serving,
            "share_left": least / self._planned,
            "lost": [
                {
                    **asdict(loss.place),
                    "at_seconds": (loss.time_ns - since_ns) / 1e9,
                    "cause": loss.cause,
                    "samples_returned": loss.samples_returned,
                    "output_tokens_dropped": loss.output_tokens_dropped,
                }
                for loss in losses
            ],
            "joined": [{**asdict(place), "at_seconds": (time_ns - since_ns) / 1e9} for place, time_ns in joins],
            "late_answers": hub.late_answers,
            "clock_offsets": [{"node": node, **asdict(offset)} for node, offset in sorted(hub.clocks.items())],
        }
        return {"rack": facts}

    def withdraw(self) -> list[int]:
        """Drops the samples that no replica holds; returns their ids."""
        return self._hub.withdraw()

    def cancel_all(self) -> list[SampleEvent]:
        """Drops every sample, here and on the replicas."""
        self._hub.cancel_all()
        return []  # replicas report tokens with the end of a sample

    def close(self) -> None:
        """Ends the replicas."""
        self._hub.close()


def _known(name: str, value: Any) -> float | None:
    number = float(value)
    if math.isnan(number):
        return None
    return int(number) if name in COUNTS else number
