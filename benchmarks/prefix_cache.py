"""What the prefix cache saves: conversations on a shared system prompt, without the cache and with it.

All users ask at once; when the last answer has ended they ask again, with everything that was said before. Prompts are
random ids and answers are forced to their length, so both engines serve the same tokens. In fp32 the answers are equal.
"""

from __future__ import annotations

import argparse
import gc
import json
import shlex
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np

from megatoken.engine import Engine, EngineConfig, Request
from megatoken.errors import MegatokenError
from megatoken.hardware.inventory import take_inventory

COUNTS = ("users", "turns", "system_tokens", "question_tokens", "answer_tokens")


@dataclass(frozen=True, slots=True)
class Run:
    """All conversations once."""

    seconds: float
    prompt_tokens: int
    computed_prompt_tokens: int
    ttft_seconds: list[list[float]]  # by turn and user, from the moment when all ask
    answers: list[list[int]]


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="tiny", help="checkpoint directory, reference, or the name of a shape")
    parser.add_argument("--precision", choices=["fp32", "bf16", "fp8"], default="fp32")
    parser.add_argument("--device", choices=["auto", "cpu", "cuda"], default="auto")
    parser.add_argument("--users", type=int, default=64)
    parser.add_argument("--turns", type=int, default=8)
    parser.add_argument("--system-tokens", type=int, default=2000, help="tokens that all conversations begin with")
    parser.add_argument("--question-tokens", type=int, default=4, help="new tokens of each turn")
    parser.add_argument("--answer-tokens", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=2, help="runs of each engine; with the cache each starts cold")
    parser.add_argument("--out", type=Path, required=True, help="JSON file to write")
    options = parser.parse_args(arguments)
    if any(getattr(options, name) < 1 for name in (*COUNTS, "repeats")):
        parser.error("every count must be at least 1")
    return options


def converse(engine: Engine, options: argparse.Namespace, salt: str) -> Run:
    """Every conversation to its end; ``salt`` keeps runs apart."""
    draw = np.random.default_rng(0)
    vocabulary = engine.model_config.vocabulary_size
    system = draw.integers(3, vocabulary, options.system_tokens).tolist()
    conversations = [list(system) for _ in range(options.users)]
    before, began = engine.state(), time.monotonic()
    prompt_tokens, ttft_seconds, answers = 0, [], []
    for _ in range(options.turns):
        for said in conversations:
            said += draw.integers(3, vocabulary, options.question_tokens).tolist()
        prompt_tokens += sum(map(len, conversations))
        asked = time.monotonic()
        users = {
            engine.submit(Request(list(said), options.answer_tokens, ignore_end_token=True, cache_salt=salt)): said
            for said in conversations
        }
        answered: dict[int, list[int]] = {request_id: [] for request_id in users}
        first: dict[int, float] = {}
        while engine.busy:
            for event in engine.step():
                if event.error is not None:
                    raise event.error
                first.setdefault(event.request_id, time.monotonic() - asked)
                answered[event.request_id] += event.token_ids
        for request_id, said in users.items():
            said += answered[request_id]
            answers.append(answered[request_id])
        ttft_seconds.append([first[request_id] for request_id in users])
    after = engine.state()
    # Every answer's tokens but the first are decodes.
    computed = after.processed_tokens - after.decoded_tokens - before.processed_tokens + before.decoded_tokens
    return Run(time.monotonic() - began, prompt_tokens, computed, ttft_seconds, answers)


def measure(options: argparse.Namespace, *, prefix_cache: bool) -> list[Run]:
    """Runs of one engine, after one conversation that loads and compiles what it needs."""
    config = EngineConfig(precision=options.precision, device=options.device, prefix_cache=prefix_cache)
    with Engine(options.model, config) as engine:
        warm_up = argparse.Namespace(**{**vars(options), "turns": 1})
        converse(engine, warm_up, "warm-up")
        return [converse(engine, options, str(number)) for number in range(options.repeats)]


def summarise(runs: Sequence[Run]) -> dict[str, Any]:
    """Tokens and times of one engine's runs together."""
    ttft = np.array([run.ttft_seconds for run in runs])  # [repeats, turns, users]
    return {
        "seconds": [round(run.seconds, 4) for run in runs],
        "prompt_tokens": runs[0].prompt_tokens,
        "computed_prompt_tokens": [run.computed_prompt_tokens for run in runs],
        "ttft_p50_seconds": float(np.percentile(ttft, 50)),
        "ttft_p99_seconds": float(np.percentile(ttft, 99)),
        "ttft_p50_seconds_by_turn": np.percentile(ttft, 50, axis=(0, 2)).tolist(),
    }


def compare(off: Sequence[Run], on: Sequence[Run]) -> dict[str, Any]:
    """Both engines and what the cache changes."""
    without, cached = summarise(off), summarise(on)
    same = [one == other for run in on for one, other in zip(run.answers, off[0].answers, strict=True)]
    return {
        "off": without,
        "on": cached,
        "prompt_tokens_saved_share": 1 - max(cached["computed_prompt_tokens"]) / without["prompt_tokens"],
        "ttft_p50_ratio": cached["ttft_p50_seconds"] / without["ttft_p50_seconds"],
        "ttft_p99_ratio": cached["ttft_p99_seconds"] / without["ttft_p99_seconds"],
        "equal_answers_share": sum(same) / len(same),
    }


def main() -> int:
    options = parse(sys.argv[1:])
    try:
        off = measure(options, prefix_cache=False)
        gc.collect()  # the first engine's memory is free for the second
        on = measure(options, prefix_cache=True)
    except MegatokenError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    inventory = take_inventory()
    report = {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": shlex.join(["benchmarks/prefix_cache.py", *sys.argv[1:]]),
        "model": options.model,
        "precision": options.precision,
        **{name: getattr(options, name) for name in COUNTS},
        **compare(off, on),
        "machine": inventory,
    }
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(json.dumps(report, indent=1) + "\n")
    print(
        f"{report['prompt_tokens_saved_share']:.1%} of prompt tokens saved; "
        f"TTFT p50 {report['off']['ttft_p50_seconds']:.3f} -> {report['on']['ttft_p50_seconds']:.3f} s, "
        f"p99 {report['off']['ttft_p99_seconds']:.3f} -> {report['on']['ttft_p99_seconds']:.3f} s; "
        f"{report['equal_answers_share']:.1%} of answers equal\nwrote {options.out}"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
