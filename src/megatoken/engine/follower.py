"""The process of one rank: loads its share of the weights and does what rank 0 says.

``python -m megatoken.engine.follower FOLDER RANK``; standard input says of what, see ``specification``.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import sys
from dataclasses import asdict
from pathlib import Path

import torch

from megatoken.engine.checkpoint import open_model
from megatoken.engine.config import EngineConfig, model_folder
from megatoken.engine.device import operations
from megatoken.engine.memory import MemoryPlan
from megatoken.engine.parallel import RankWeights, join
from megatoken.engine.runner import Runner
from megatoken.errors import MegatokenError

PR_SET_PDEATHSIG = 1  # linux/prctl.h


def specification(
    model: str | Path, random_weights: bool, seed: int, config: EngineConfig, memory: MemoryPlan, threads: int
) -> bytes:
    """What every rank is told: the model, what the engine is asked for, and the sizes that rank 0 takes."""
    folder = model_folder(model)
    return json.dumps(
        {
            "model": str(folder.resolve()) if folder.is_dir() else str(model),
            "random_weights": random_weights,
            "seed": seed,
            "config": asdict(config),
            "memory": asdict(memory),
            "threads": threads,
            "parent": os.getpid(),
        }
    ).encode()


def main() -> None:
    """Follows until rank 0 is gone."""
    folder, rank = Path(sys.argv[1]), int(sys.argv[2])
    told = json.load(sys.stdin)
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != told["parent"]:
        return
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # of the terminal: rank 0 decides when this ends
    torch.set_num_threads(told["threads"])
    config, memory = EngineConfig(**told["config"]), MemoryPlan(**told["memory"])
    device = torch.device("cpu") if memory.device == "cpu" else torch.device("cuda", rank)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    source = open_model(told["model"], random_weights=told["random_weights"], seed=told["seed"])
    weights = RankWeights(source, rank, config.tensor_parallel)
    runner = Runner(weights, config, memory, operations(device), device)
    runner.follow(join(folder, rank, config.tensor_parallel, device))


if __name__ == "__main__":
    try:
        main()
    except MegatokenError as error:
        sys.exit(str(error))
