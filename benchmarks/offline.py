"""A model on one GPU, end to end: MLPerf Offline through LoadGen, with GEMM bound and power of the same process.

Random weights and prompts of random ids, answers forced to their lengths: unofficial, nothing is verified by MLCommons.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Sequence
from itertools import cycle, islice
from pathlib import Path
from typing import Any

import numpy as np
import psutil

from gpu_measuring import (
    expert_imbalance,
    gemm_bound_teraflops,
    operations_per_row,
    report,
    require_gpu,
    write_report,
)
from megatoken.analysis.series import totals_over_time
from megatoken.config import load_run_config
from megatoken.datasets.lengths import load_lengths
from megatoken.engine import Engine, Request
from megatoken.engine.config import SHAPES
from megatoken.errors import MegatokenError
from megatoken.harness.prepare import prepare
from megatoken.harness.progress import Progress
from megatoken.harness.run import run_scenario
from megatoken.runs.run import Run, read_run
from megatoken.targets.in_process import InProcessBackend

NOTE = "unofficial: random weights, prompts of random ids, answers forced to their lengths; not verified by MLCommons"


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shape", choices=list(SHAPES), default="llama2-70b")
    parser.add_argument("--model", type=Path, help="a checkpoint of that shape (default: random weights)")
    parser.add_argument("--precision", choices=["bf16", "fp8"], default="fp8")
    parser.add_argument("--lengths", default="csv", help="IN/OUT tokens of every sample; default: the shipped lengths")
    parser.add_argument("--temperature", type=float, default=0.0, help="of every sample (default: 0, greedy)")
    parser.add_argument("--samples", type=int, default=6144)
    parser.add_argument("--bound-seconds", type=float, default=10.0, help="of products before and after (default: 10)")
    parser.add_argument("--runs", type=Path, default=Path("runs"), help="folder that receives the run folder")
    parser.add_argument("--out", type=Path, required=True, help="JSON file to write")
    options, rest = parser.parse_known_args(arguments)
    if any(not argument.startswith("--engine.") or "=" not in argument for argument in rest):
        parser.error(f"unknown arguments {rest}; settings of the engine are --engine.KEY=VALUE")
    options.engine = dict(argument.removeprefix("--").split("=", 1) for argument in rest)
    return options


def fixed_lengths(lengths: str, samples: int, folder: Path) -> Path:
    """A table of ``samples`` equal rows."""
    input_tokens, output_tokens = (int(part) for part in lengths.split("/"))
    path = folder / f"{input_tokens}-{output_tokens}.csv"
    path.write_text("input_tokens,output_tokens\n" + f"{input_tokens},{output_tokens}\n" * samples)
    return path


def drawn_answers(lengths: Path | None, options: argparse.Namespace, folder: Path) -> Path:
    """The prompts of a table of lengths as JSON lines, whose answers are drawn at ``options.temperature``."""
    data_set = load_lengths(lengths, vocabulary_size=SHAPES[options.shape].vocabulary_size, max_length=2**20)
    path = folder / "prompts.jsonl"
    with path.open("w") as file:
        for request in islice(cycle(data_set.requests), options.samples):
            line = {
                "prompt_token_ids": request.prompt,
                "max_tokens": request.max_tokens,
                "temperature": options.temperature,
                "ignore_end_token": True,
            }
            file.write(json.dumps(line) + "\n")
    return path


def seconds_since_start() -> float:
    return time.time() - psutil.Process().create_time()


def start(engine: Engine) -> float:
    """Seconds from the start of the process to the first token."""
    engine.generate([Request([1], 1)])
    return seconds_since_start()


def steady_figures(run: Run, engine: Engine, bound_teraflops: float) -> dict[str, Any]:
    """Rates, power and energy inside the steady window of the run; nothing where there is none."""
    if run.result["steady_window_seconds"] is None:
        return {}
    begin, end = run.result["steady_window_seconds"]
    times, processed = totals_over_time(run.series, ["processed_tokens"])
    first, last = np.interp([begin, end], times, processed)
    rate = (last - first) / (end - begin)
    inside = (times > begin) & (times <= end)
    watts, clock, in_flight, waiting = (
        run.series[name].to_numpy()[inside] for name in ("power_watts", "clock_mhz", "in_flight", "waiting")
    )
    output_rate = run.result["steady_output_tokens_per_second"]
    teraflops = rate * operations_per_row(engine) / 1e12
    return {
        "steady_window_seconds": [begin, end],
        "steady_output_tokens_per_second": output_rate,
        "processed_tokens_per_second": rate,
        "model_teraflops_per_second": teraflops,
        "gemm_bound_teraflops_per_second": bound_teraflops,
        "gemm_bound_share": teraflops / bound_teraflops,
        "power_watts": float(watts.mean()),
        "clock_mhz": float(clock.mean()),
        "energy_joules_per_output_token": float(watts.mean()) / output_rate,
        "resident_sequences_mean": float((in_flight - waiting).mean()),
    }


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Run once; the JSON fields."""
    with tempfile.TemporaryDirectory() as folder:
        flags: dict[str, Any] = {
            "model": str(options.model or options.shape),
            "precision": options.precision,
            "samples": str(options.samples),
            "min-duration": "0",
            "out": str(options.runs),
            "engine.device": "cuda",
            **options.engine,
        }
        lengths = None
        if options.lengths != "csv":
            lengths = fixed_lengths(options.lengths, options.samples, Path(folder))
        if options.temperature > 0:
            flags["prompts"] = str(drawn_answers(lengths, options, Path(folder)))
        elif lengths is not None:
            flags["lengths"] = str(lengths)
        config = load_run_config(None, flags)
        progress = Progress()
        backend = InProcessBackend(config, progress)
        prepared = prepare(config, backend)
        with backend.load() as target:
            engine = target.engine
            assert isinstance(engine, Engine)
            first_token_seconds = start(engine)
            imbalance = expert_imbalance(engine)
            before = gemm_bound_teraflops(engine, engine.memory_plan.max_batched_tokens, options.bound_seconds)
            path = run_scenario(config, prepared.data_set, target, prepared.facts(), progress)
            after = gemm_bound_teraflops(engine, engine.memory_plan.max_batched_tokens, options.bound_seconds)
    run = read_run(path)
    whole = ("output_tokens_per_second", "duration_seconds", "samples_completed", "samples_failed", "output_tokens")
    return {
        "note": NOTE,
        "shape": options.shape,
        "precision": options.precision,
        "lengths": options.lengths,
        "temperature": options.temperature,
        "samples": options.samples,
        "largest_to_mean_rows_of_an_expert": imbalance,
        "verdict": run.verdict,
        "loadgen_output_tokens_per_second": run.result["loadgen_output_tokens_per_second"],
        **{name: run.result[name] for name in whole},
        **steady_figures(run, engine, (before + after) / 2),
        "gemm_bound_before_and_after": [before, after],
        "process_start_to_first_token_seconds": first_token_seconds,
        "resident_sequences_highest": (run.series["in_flight"].to_numpy() - run.series["waiting"].to_numpy())
        .max()
        .item(),
        "preemptions": run.series["preemptions"].to_numpy().max().item(),
        "recomputed_tokens": engine.state().recomputed_tokens,
        "target": run.result["target"],
        "memory_plan": run.result["memory_plan"],
    }


def main() -> int:
    options = parse(sys.argv[1:])
    try:
        require_gpu()
        fields = measure(options)
    except MegatokenError as error:
        print(f"offline.py: {error}", file=sys.stderr)
        return int(error.exit_code)
    finished = report("offline.py", fields)
    for name, value in fields.items():
        print(f"{name:40} {value}")
    write_report(options.out, finished)
    return 0


if __name__ == "__main__":
    sys.exit(main())
