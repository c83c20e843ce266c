"""How long a step of decodes takes on a GPU, launched kernel by kernel and replayed as a CUDA graph.

Two engines of one model with the same seed, in turn (eager, graph, graph, eager); each answers as many equal requests
at a time as the step is to have rows. Times are the host's, between one step's ids and the next's: what a user waits
for a token. The bound is the bytes of weights and cache over the rate of a large copy.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import sys
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch

from gpu_measuring import copy_gigabytes_per_second, report, require_gpu, write_report
from megatoken.engine import Engine, EngineConfig, Request
from megatoken.engine.config import SHAPES
from megatoken.engine.memory import bytes_per_token
from megatoken.engine.schemes import find_scheme
from megatoken.errors import MegatokenError

ROWS = (1, 4, 16, 64, 128, 256)
ANSWER_TOKENS = 96
WARM_STEPS = 32
"""Of each answer, not timed: graphs are recorded in them."""


def milliseconds_per_step(engine: Engine, rows: int, prompt_tokens: int) -> float:
    """Median over the steps after the warm ones, in all of which every request has a row."""
    vocabulary = engine.model_config.vocabulary_size
    for number in range(rows):
        prompt = [(number * 7919 + place * 31) % vocabulary for place in range(prompt_tokens)]
        engine.submit(Request(prompt, ANSWER_TOKENS, ignore_end_token=True))
    moments = []
    while engine.busy:
        events = engine.step()
        if len(events) == rows:
            moments.append(time.perf_counter())
    steps = moments[WARM_STEPS:-2]
    return statistics.median(second - first for first, second in pairwise(steps)) * 1e3


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shape", choices=list(SHAPES), default="llama3.1-8b")
    parser.add_argument("--precision", choices=["fp8", "bf16"], default="fp8")
    parser.add_argument("--packed", action="store_true", help="four-bit weights that stay packed in memory (fp8)")
    parser.add_argument("--rows", type=int, nargs="+", default=ROWS, help="decodes in a step")
    parser.add_argument("--prompt-tokens", type=int, default=256)
    parser.add_argument("--tensor-parallel", type=int, default=1)
    parser.add_argument("--out", type=Path, required=True, help="JSON file to write")
    options = parser.parse_args()
    try:
        require_gpu()
        figures = measure(options)
    except MegatokenError as error:
        print(f"decodes.py: {error}", file=sys.stderr)
        return int(error.exit_code)
    facts = {
        name: getattr(options, name) for name in ("shape", "precision", "packed", "prompt_tokens", "tensor_parallel")
    }
    write_report(options.out, report("decodes.py", {**facts, "answer_tokens": ANSWER_TOKENS, "steps": figures}))
    return 0


def measure(options: argparse.Namespace) -> list[dict[str, Any]]:
    """One engine after the other, so that large models fit: each is loaded twice."""
    copy_rate = copy_gigabytes_per_second()
    torch.cuda.empty_cache()
    times: dict[bool, dict[int, list[float]]] = {
        graphs: {rows: [] for rows in options.rows} for graphs in (False, True)
    }
    for graphs in (False, True, True, False):
        tokens = options.prompt_tokens + ANSWER_TOKENS
        config = EngineConfig(
            precision=options.precision, tensor_parallel=options.tensor_parallel, cuda_graphs=graphs,
            packed_weights=options.packed or None,
            max_length=tokens, max_sequences=max(options.rows), cache_tokens=max(options.rows) * (tokens + 64),
        )  # fmt: skip
        engine = Engine(options.shape, config, random_weights=True)
        for rows in options.rows:
            times[graphs][rows].append(milliseconds_per_step(engine, rows, options.prompt_tokens))
        weights_bytes = engine.memory_plan.weights_bytes
        del engine
        gc.collect()
        torch.cuda.empty_cache()
    token_bytes = (
        bytes_per_token(SHAPES[options.shape], find_scheme(options.precision), "cuda") / options.tensor_parallel
    )
    figures = []
    for rows in options.rows:
        eager, graph = (statistics.mean(times[graphs][rows]) for graphs in (False, True))
        read = weights_bytes + rows * (options.prompt_tokens + ANSWER_TOKENS / 2) * token_bytes
        bound = read / copy_rate / 1e6
        figures.append(
            {
                "rows": rows,
                "eager_milliseconds": times[False][rows],
                "graph_milliseconds": times[True][rows],
                "ratio": eager / graph,
                "bound_milliseconds": bound,
            }
        )
        print(
            f"{rows:4} rows: eager {eager:6.2f} ms, graph {graph:6.2f} ms, {eager / graph:.2f} times; bound {bound:.2f}"
        )
    return figures


if __name__ == "__main__":
    sys.exit(main())
