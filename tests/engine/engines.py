"""Small engines, requests for them, and what their events must add up to."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from pathlib import Path

import pytest
import torch
from torch import Tensor

from megatoken.engine import Completion, Engine, EngineConfig, FinishReason, Request, TokenEvent, runner

SIZES = {"precision": "fp32", "page_size": 4, "cache_tokens": 80, "max_batched_tokens": 24, "max_sequences": 6}


def make_engine(directory: Path, **changes: object) -> Engine:
    return Engine(directory, EngineConfig(**{**SIZES, **changes}))


def request(seed: int = 0, tokens: int = 12, prompt_tokens: int = 6, **others: object) -> Request:
    prompt = [(seed * 31 + place * 17) % 301 for place in range(prompt_tokens)]
    return Request(prompt, tokens, ignore_end_token=True, **others)


_alone: dict[tuple[Path, str], Completion] = {}


def answer_alone(directory: Path, asked: Request) -> Completion:
    """By an engine of its own; of equal requests to one checkpoint, which no test changes, the first is computed."""
    key = directory, repr(asked)
    if key not in _alone:
        (_alone[key],) = make_engine(directory).generate([asked])
    return _alone[key]


def answer_and_logits(
    engine: Engine, prompt: Sequence[int], tokens: int, monkeypatch: pytest.MonkeyPatch
) -> tuple[list[int], Tensor]:
    """One request alone: its answer, and the logits [tokens, vocabulary] it was chosen from."""
    rows: list[Tensor] = []
    forward = runner.forward

    def recording(*arguments: object) -> Tensor:
        logits = forward(*arguments)
        rows.extend(logits.float().cpu())
        return logits

    with monkeypatch.context() as patch:
        patch.setattr(runner, "forward", recording)
        patch.setattr(engine._runner, "_graphs", None)  # nobody can look into a graph
        [completion] = engine.generate([Request(prompt, tokens, ignore_end_token=True)])
    return completion.token_ids, torch.stack(rows)[:tokens]


def run_next_to(
    engine: Engine, flood: Iterable[Request], light: Iterable[Request]
) -> tuple[dict[int, Request], list[TokenEvent], int]:
    """All ``flood`` requests at once and, after eight steps, the ``light`` ones one after the other.

    Returns:
        The requests by id, the events so far, and in how many steps fewer than half of the running requests decoded.
    """
    asked = {engine.submit(one): one for one in flood}
    events = [event for _ in range(8) for event in engine.step()]
    rested_steps = 0
    for one in light:
        asked[last := engine.submit(one)] = one
        while last in engine._active:
            before = engine.state()
            events += engine.step()
            rested_steps += engine.state().decoded_tokens - before.decoded_tokens < before.running // 2
    return asked, events, rested_steps


def drain(engine: Engine) -> list[TokenEvent]:
    events = []
    while engine.busy:
        events += engine.step()
    return events


def answers(events: Iterable[TokenEvent]) -> dict[int, tuple[list[int], FinishReason]]:
    """Tokens and finish reason of each request_id, checking that a reason comes exactly once, and last."""
    tokens: dict[int, list[int]] = defaultdict(list)
    reasons: dict[int, FinishReason] = {}
    for event in events:
        assert event.request_id not in reasons
        tokens[event.request_id] += event.token_ids
        if event.finish_reason is not None:
            reasons[event.request_id] = event.finish_reason
    assert tokens.keys() == reasons.keys()
    return {request_id: (tokens[request_id], reasons[request_id]) for request_id in reasons}


def assert_idle(engine: Engine) -> None:
    state = engine.state()
    assert not engine.busy
    assert engine.step() == []
    assert (state.in_flight, state.waiting, state.running) == (0, 0, 0)
    assert state.pages_free == state.pages
