"""A target on scripted servers, and its events by sample."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from megatoken.config import RunConfig
from megatoken.engine.request import Request
from megatoken.harness.progress import Progress
from megatoken.targets import SampleEvent
from megatoken.targets.endpoint.backend import EndpointBackend
from megatoken.targets.endpoint.target import EndpointTarget

TIMEOUT_SECONDS = 6.0
LONGEST_SECONDS = 60.0


@contextmanager
def connected(*urls: str, **settings: Any) -> Iterator[EndpointTarget]:
    endpoint = {"urls": ",".join(urls), "timeout_seconds": TIMEOUT_SECONDS, "processes": 1} | settings
    config = RunConfig(scenario="server", endpoint=endpoint)
    with EndpointBackend(config, Progress(quiet=True)).open() as backend, backend.load() as target:
        yield target


def ends(target: EndpointTarget) -> dict[int, list[SampleEvent]]:
    """All events by sample, until nothing is in flight."""
    events: dict[int, list[SampleEvent]] = {}
    deadline = time.monotonic() + LONGEST_SECONDS
    while target.state().in_flight or not events:
        assert time.monotonic() < deadline, "a sample hangs"
        for event in target.poll(0.1):
            events.setdefault(event.sample_id, []).append(event)
    return events


def prompts(*texts: str, tokens: int = 8) -> list[Request]:
    return [Request(text, max_tokens=tokens) for text in texts]


def answered(target: EndpointTarget, requests: list[Request]) -> dict[int, SampleEvent]:
    """The last event of each sample; each has exactly one end."""
    for at, request in enumerate(requests):
        target.submit(at, request)
    last = {}
    for sample, events in ends(target).items():
        ended = [event for event in events if event.finish_reason is not None or event.error is not None]
        assert len(ended) == 1 and events[-1] is ended[0]
        last[sample] = ended[0]
    assert sorted(last) == list(range(len(requests)))
    return last
