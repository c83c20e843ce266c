"""Measures what a token of a stream costs between the engine and the socket: its text, and its frame.

    python benchmarks/stream_text.py [--model DIR]

Times are CPU time per token, the best of several rounds. The window decode is what tokenizers without a table of tokens
use; the frame from whole JSON is what each chunk with details costs.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from megatoken.engine.config import REFERENCE, model_folder
from megatoken.engine.text_stream import TextStream
from megatoken.engine.tokenizer import Tokenizer
from megatoken.serve.frames import event, text_writer

ROUNDS = 7
STOPS = ("\nUser:", "</s>", "Question", "\n\n")
TEXT = "Sort the numbers, then write the sum of all of them: 17, 25, 3 and 99 make 144.\nAnswer: the fox; " * 200


def chunk(piece: str) -> dict[str, Any]:
    """A chunk of a chat."""
    choice = {"index": 0, "delta": {"content": piece}, "logprobs": None, "finish_reason": None}
    head = {"id": f"chatcmpl-{'a' * 32}", "object": "chat.completion.chunk", "created": 1795461275}
    return {**head, "model": "reference", "choices": [choice]}


def best_nanoseconds(work: Callable[[], None], count: int) -> float:
    """CPU time of ``work`` divided by ``count``."""
    times = []
    for _ in range(ROUNDS):
        began_ns = time.process_time_ns()
        work()
        times.append((time.process_time_ns() - began_ns) / count)
    return min(times)


def main() -> None:
    """Print one line per way."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, default=model_folder(REFERENCE))
    tokenizer = Tokenizer(parser.parse_args().model / "tokenizer.json")
    token_ids = tokenizer.encode(TEXT, add_special=False)
    pieces = [tokenizer.decode([token_id]) for token_id in token_ids]
    frame = text_writer(lambda data: None, chunk)

    def stream(stops: tuple[str, ...]) -> None:
        text = TextStream(tokenizer, stops)
        for token_id in token_ids:
            text.add((token_id,))

    ways: dict[str, Callable[[], object]] = {
        "text of a token": lambda: stream(()),
        f"text of a token, {len(STOPS)} stop strings": lambda: stream(STOPS),
        "text of a token, window of 8 tokens": lambda: [
            tokenizer.decode(token_ids[at : at + 8]) for at in range(len(token_ids))
        ],
        "frame from a template": lambda: [frame(piece) for piece in pieces],
        "frame from whole JSON": lambda: [event(chunk(piece)) for piece in pieces],
    }
    for name, work in ways.items():
        print(f"{name:40} {best_nanoseconds(lambda work=work: work() and None, len(token_ids)):8,.0f} ns")  # type: ignore[misc]


if __name__ == "__main__":
    main()
