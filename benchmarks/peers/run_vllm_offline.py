"""vLLM's offline API on one GPU, to compare with ``benchmarks/offline.py``: the same samples, random weights as costly.

    PYTHONPATH=src:benchmarks python -m peers.run_vllm_offline FOLDER --load csv:4096 --load 128/128:9000 --out FILE

Each load is LENGTHS:SAMPLES, with LENGTHS as in ``offline.py``. One engine runs all of them, one after the other.
Settings of vLLM.LLM are ``--set KEY=VALUE`` (JSON). Runs under vLLM's interpreter.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from itertools import cycle, islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from peers.vllm_random_weights import environment

if TYPE_CHECKING:
    from vllm import LLM

NOTE = "unofficial: random weights, prompts of random ids, answers forced to their lengths; not verified by MLCommons"
SETTINGS: dict[str, Any] = {
    "load_format": "dummy",
    "skip_tokenizer_init": True,
    "kv_cache_dtype": "fp8",
    "max_num_seqs": 1152,
    "max_num_batched_tokens": 1536,
    "gpu_memory_utilization": 0.94,
    "enable_prefix_caching": False,
    "enable_flashinfer_autotune": False,
}
WARM_UP_SAMPLES = 64


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="of the model, with config.json alone")
    parser.add_argument("--load", action="append", required=True, metavar="LENGTHS:SAMPLES")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="setting of vllm.LLM, as JSON")
    parser.add_argument("--out", type=Path, required=True, help="JSON file to write")
    options = parser.parse_args()
    options.settings = SETTINGS | {
        name: json.loads(value) for name, _, value in (one.partition("=") for one in options.set)
    }
    graphs = {"max_cudagraph_capture_size": options.settings["max_num_seqs"]}  # vLLM's default is 512 tokens
    options.settings.setdefault("compilation_config", graphs)
    return options


def samples_of(load: str, vocabulary_size: int, max_length: int) -> list[tuple[list[int], int]]:
    """Prompts, and how many tokens to answer with."""
    from megatoken.datasets.lengths import load_lengths  # not in vLLM's processes, which import this file too

    lengths, _, samples = load.partition(":")
    with tempfile.NamedTemporaryFile("w", suffix=".csv") as file:
        table = None
        if lengths != "csv":
            file.write("input_tokens,output_tokens\n" + f"{lengths.replace('/', ',')}\n" * int(samples))
            file.flush()
            table = Path(file.name)
        data_set = load_lengths(table, vocabulary_size=vocabulary_size, max_length=max_length)
        return [(list(map(int, one.prompt)), one.max_tokens) for one in islice(cycle(data_set.requests), int(samples))]


def steady_rate(finished: list[tuple[float, int]], seconds: float) -> float | None:
    """Output tokens/s of the answers that ended in the middle half of the time; None if too few did."""
    times, tokens = np.asarray(finished).T
    begin, end = seconds / 4, seconds * 3 / 4
    if np.count_nonzero((times > begin) & (times < end)) < 100:
        return None
    first, last = np.interp([begin, end], times, tokens)
    return float(last - first) / (end - begin)


def measure(engine: LLM, samples: list[tuple[list[int], int]]) -> dict[str, Any]:
    """Runs all samples at once; rates in output tokens/s."""
    from vllm import SamplingParams, TokensPrompt

    finished: list[tuple[float, int]] = []
    step, begun, total = engine.llm_engine.step, time.monotonic(), 0

    def watched_step() -> Any:
        nonlocal total
        outputs = step()
        for output in outputs:
            if output.finished:
                total += len(output.outputs[0].token_ids)
                finished.append((time.monotonic() - begun, total))
        return outputs

    engine.llm_engine.step = watched_step
    try:
        engine.generate(
            [TokensPrompt(prompt_token_ids=prompt) for prompt, _ in samples],
            [
                SamplingParams(temperature=0.0, max_tokens=most, ignore_eos=True, detokenize=False)
                for _, most in samples
            ],
            use_tqdm=False,
        )
    finally:
        engine.llm_engine.step = step
    seconds = time.monotonic() - begun
    wanted = sum(most for _, most in samples)
    if total != wanted:
        raise SystemExit(f"vLLM answered with {total:,} tokens, not {wanted:,}")
    return {
        "samples": len(samples),
        "input_tokens": sum(len(prompt) for prompt, _ in samples),
        "output_tokens": total,
        "duration_seconds": seconds,
        "output_tokens_per_second": total / seconds,
        "middle_output_tokens_per_second": steady_rate(finished, seconds),
        "finished_seconds_and_tokens": [
            (round(at, 3), count) for at, count in finished[:: max(len(finished) // 200, 1)]
        ],
    }


def main() -> int:
    options = parse()
    if "vllm-random-weights" not in os.environ["PYTHONPATH"]:
        os.execve(sys.executable, [sys.executable, "-m", "peers.run_vllm_offline", *sys.argv[1:]], environment())
    import vllm

    model = json.loads((options.folder / "config.json").read_text())
    max_length = options.settings.setdefault("max_model_len", min(model["max_position_embeddings"], 8192))
    begun = time.monotonic()
    engine = vllm.LLM(model=str(options.folder), **options.settings)
    start_seconds = time.monotonic() - begun
    print(f"vLLM {vllm.__version__} ready after {start_seconds:.0f} s", flush=True)
    report = {
        "note": NOTE,
        "command": sys.argv,
        "vllm": vllm.__version__,
        "settings": options.settings,
        "model": model,
        "start_seconds": start_seconds,
        "loads": {},
    }
    for load in options.load:
        samples = samples_of(load, model["vocab_size"], max_length)
        measure(engine, samples[:WARM_UP_SAMPLES])
        report["loads"][load] = measure(engine, samples)
        options.out.write_text(json.dumps(report, indent=1) + "\n")
        figures = {
            name: value for name, value in report["loads"][load].items() if name != "finished_seconds_and_tokens"
        }
        print(load, json.dumps(figures), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
