"""LoadGen's Server scenario through an endpoint against the same engine in the measuring process.

    python benchmarks/endpoint_in_process.py --rate 20 --samples 600 --repeat 3
    python benchmarks/endpoint_in_process.py --shape llama3.1-8b --precision fp8 --rate 12 --samples 720 --repeat 2 \\
        --engine-flags "--engine.max_length 2304" --out in-process.json

In turn, so that what else the machine does meets both: `megatoken run` with the engine in its process, and `megatoken
serve` measured by `megatoken run --endpoint`, with the same model, settings, rows, seeds and rate, both without a cache
of prefixes and with the same limit on a step (else only the engine in process would know the scenario's). It prints
what each found and how far they are apart: p99 of the time to first token in ms, time per output token in percent,
medians of the repeats. With ``--simulated-gpu`` both engines take the time of a cost model, so that a busy machine
spoils less; the one without HTTP is then a rack of one replica, as only a rack simulates.
"""

from __future__ import annotations

import argparse
import json
import shlex
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from megatoken.engine.config import REFERENCE, SHAPES
from megatoken.hardware.inventory import take_inventory
from own_server import own_server, save
from peers.random_model import make_model_folder

SIDES = ("in_process", "endpoint")
FIGURES = ("ttft_seconds", "tpot_seconds", "latency_seconds")
PERCENTILES = ("p50", "p99")
LONGEST_SECONDS = 1800.0


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    """The options."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=list(SHAPES), help="random weights of that shape; without it: the reference")
    parser.add_argument("--precision", choices=["fp32", "bf16", "fp8"], default="fp32")
    parser.add_argument("--simulated-gpu", help="with --shape: simulate this GPU")
    parser.add_argument("--rate", type=float, required=True, help="requests/s")
    parser.add_argument("--samples", type=int, required=True)
    parser.add_argument("--repeat", type=int, default=3, help="turns of each side")
    parser.add_argument("--warm-up", type=float, default=5.0, help="seconds")
    parser.add_argument("--step-seconds", type=float, default=0.19, help="longest mean step of both engines")
    parser.add_argument("--engine-flags", default="", help="more flags of engine and server, separated by spaces")
    parser.add_argument("--out", type=Path, help="JSON file to write")
    return parser.parse_args(arguments)


def measured(flags: Sequence[str], options: argparse.Namespace) -> dict[str, Any]:
    """One run of the scenario: its verdict, rates and latencies."""
    command = [sys.executable, "-m", "megatoken", "run", "--scenario", "server", "--rate", str(options.rate)]
    command += ["--samples", str(options.samples), "--min-duration", "0", "--warm-up", str(options.warm_up), "--json"]
    with tempfile.TemporaryDirectory() as out:
        end = subprocess.run(
            [*command, "--out", out, *flags], stdout=subprocess.PIPE, timeout=LONGEST_SECONDS, check=False
        )
        [folder] = [path for path in Path(out).iterdir() if path.is_dir()]
        result = json.loads((folder / "result.json").read_text())
    if end.returncode not in (0, 3):
        raise RuntimeError(f"megatoken run ended with {end.returncode}")
    return {
        "verdict": result["verdict"],
        "reasons": [one["code"] for one in result["reasons"]],
        "samples_completed": result["samples_completed"],
        "samples_per_second": result["samples_per_second"],
        "core_wait_share": result["core_wait_share"],
        **{name: {one: result[name][one] for one in PERCENTILES} for name in FIGURES},
    }


def apart(turns: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Medians of each side over the turns, and the endpoint's minus those in process."""
    medians = {
        side: {
            name: {one: statistics.median(turn[side][name][one] for turn in turns) for one in PERCENTILES}
            for name in FIGURES
        }
        for side in SIDES
    }
    own, other = (medians[side] for side in SIDES)
    return {
        "medians": medians,
        "ttft_p99_difference_ms": 1e3 * (other["ttft_seconds"]["p99"] - own["ttft_seconds"]["p99"]),
        "ttft_p50_difference_ms": 1e3 * (other["ttft_seconds"]["p50"] - own["ttft_seconds"]["p50"]),
        **{
            f"tpot_{one}_difference_percent": 100 * (other["tpot_seconds"][one] / own["tpot_seconds"][one] - 1)
            for one in PERCENTILES
        },
    }


def main(arguments: Sequence[str]) -> int:
    """Entry point."""
    options = parse(arguments)
    turns = []
    with tempfile.TemporaryDirectory() as name:
        engine = ["--precision", options.precision, "--engine.target_step_seconds", str(options.step_seconds)]
        model, engine = [], [*engine, *shlex.split(options.engine_flags)]
        if options.shape is not None:
            folder = Path(name) / options.shape
            make_model_folder(SHAPES[options.shape], folder)
            model, engine = ["--model", str(folder)], [*engine, "--random-weights"]
        own, served = [*model, *engine], [*(model or ["--model", REFERENCE]), *engine]
        if options.simulated_gpu is not None:
            simulated = ["--model", options.shape, *[one for one in engine if one != "--random-weights"]]
            own = [*simulated, "--rack", "auto", "--rack.simulated_gpu", options.simulated_gpu]
            own += ["--rack.simulated_nodes", "1", "--rack.simulated_gpus", "1"]
            served = [*simulated, "--simulated-gpu", options.simulated_gpu]
        served += ["--engine.prefix_cache", "false"]
        for _ in range(options.repeat):
            turn = {"in_process": measured(own, options)}
            with own_server(served) as server:
                url = f"http://127.0.0.1:{server.port}/v1"
                turn["endpoint"] = measured(["--endpoint", url, *model], options)
            turns.append(turn)
            print(json.dumps(turn), flush=True)
    found = apart(turns)
    print(json.dumps(found, indent=1))
    settings = {**vars(options), "out": str(options.out)}
    save({"options": settings, **found, "turns": turns, "environment": take_inventory()}, options.out)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
