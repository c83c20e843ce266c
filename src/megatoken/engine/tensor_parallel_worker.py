"""The process of one tensor-parallel rank: loads its share of the weights and runs rank 0's commands.

``python -m megatoken.engine.tensor_parallel_worker FOLDER RANK``, with ``parallel.worker_specification`` on its input.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import sys
from pathlib import Path

import torch

from megatoken.engine.checkpoint import open_model
from megatoken.engine.config import EngineConfig
from megatoken.engine.device import operations
from megatoken.engine.memory import MemoryPlan
from megatoken.engine.parallel import RankWeights, join_group
from megatoken.engine.runner import ModelRunner
from megatoken.errors import MegatokenError

PR_SET_PDEATHSIG = 1  # linux/prctl.h


def main() -> None:
    """Runs until rank 0 exits."""
    folder, rank = Path(sys.argv[1]), int(sys.argv[2])
    specification = json.load(sys.stdin)
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != specification["parent"]:
        return
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # from the terminal: rank 0 decides when this process ends
    torch.set_num_threads(specification["threads"])
    config, memory = EngineConfig(**specification["config"]), MemoryPlan(**specification["memory"])
    device = torch.device("cpu") if memory.device == "cpu" else torch.device("cuda", rank)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    source = open_model(
        specification["model"], random_weights=specification["random_weights"], seed=specification["seed"]
    )
    weights = RankWeights(source, rank, config.tensor_parallel)
    runner = ModelRunner(weights, config, memory, operations(device), device)
    runner.follow(join_group(folder, rank, config.tensor_parallel, device))


if __name__ == "__main__":
    try:
        main()
    except MegatokenError as error:
        sys.exit(str(error))
