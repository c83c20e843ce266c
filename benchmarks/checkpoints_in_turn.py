"""How fast two checkpoints decode on this machine, in turn: python benchmarks/checkpoints_in_turn.py FIRST SECOND

For instance the same weights in bf16 and in four bits. Answers have forced lengths; the first turn is not counted.
"""

from __future__ import annotations

import argparse
import statistics
import time
from pathlib import Path

from cpu_report import write_cpu_report
from megatoken.engine import Engine, EngineConfig, Request

PROMPT_TOKENS, ANSWER_TOKENS = 16, 32


def main() -> None:
    """Print and write the tokens per second of each, and the ratio of the medians."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("checkpoints", type=Path, nargs=2)
    parser.add_argument("--precision", default="bf16")
    parser.add_argument("--sequences", type=int, nargs="+", default=[1, 4])
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--out", type=Path, help="JSON file to write")
    options = parser.parse_args()
    config = EngineConfig(precision=options.precision, cache_tokens=4096)
    engines = [Engine(path, config) for path in options.checkpoints]
    figures = []
    for sequences in options.sequences:
        rates: list[list[float]] = [[], []]
        for turn in range(options.turns + 1):
            for one in (0, 1) if turn % 2 else (1, 0):
                prompts = [[5 + number] * PROMPT_TOKENS for number in range(sequences)]
                began = time.perf_counter()
                engines[one].generate([Request(prompt, ANSWER_TOKENS, ignore_end_token=True) for prompt in prompts])
                if turn:
                    rates[one].append(sequences * ANSWER_TOKENS / (time.perf_counter() - began))
        first, second = (statistics.median(of) for of in rates)
        figures.append({"sequences": sequences, "output_tokens_per_second": rates, "second_over_first": second / first})
        print(f"{sequences} sequences: {first:.2f} and {second:.2f} tokens/s, {second / first:.2f} times", flush=True)
    if options.out:
        write_cpu_report(options.out, "checkpoints_in_turn.py", {"figures": figures})


if __name__ == "__main__":
    main()
