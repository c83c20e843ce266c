"""The child's side of a measurement: read a specification, load, warm up, time, answer with one JSON line.

Runs under every engine's own interpreter, so it needs the standard library only.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypedDict


class Specification(TypedDict):
    """What a child process receives: the model, how to run it, and the requests."""

    model: str
    precision: str
    threads: int
    prompts: list[list[int]]
    output_lengths: list[int]
    warm_up_prompts: list[list[int]]
    warm_up_output_lengths: list[int]


class Answer(TypedDict):
    """What a child answers; times are of the monotonic clock, which all processes of a machine share."""

    version: str
    settings: dict[str, str | int | float | bool]
    ready_seconds: float
    start_seconds: float
    end_seconds: float
    token_ids: list[list[int]]


@dataclass(frozen=True, slots=True)
class LoadedEngine:
    """An engine ready for requests.

    ``generate(prompts, output_lengths)`` submits all requests at once and returns the generated ids in their order.
    """

    generate: Callable[[Sequence[list[int]], Sequence[int]], list[list[int]]]
    version: str
    settings: Mapping[str, str | int | float | bool]


def serve(load: Callable[[Specification], LoadedEngine]) -> None:
    """Measure the engine that ``load`` makes, on the specification whose path is the first argument."""
    # Engines and their children print on standard output: keep it for the answer, send them to standard error.
    answer_line = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    specification: Specification = json.loads(Path(sys.argv[1]).read_text())
    engine = load(specification)
    ready = time.monotonic()
    engine.generate(specification["warm_up_prompts"], specification["warm_up_output_lengths"])
    start = time.monotonic()
    token_ids = engine.generate(specification["prompts"], specification["output_lengths"])
    end = time.monotonic()
    answer: Answer = {
        "version": engine.version,
        "settings": dict(engine.settings),
        "ready_seconds": ready,
        "start_seconds": start,
        "end_seconds": end,
        "token_ids": token_ids,
    }
    with answer_line:
        print(json.dumps(answer), file=answer_line)
