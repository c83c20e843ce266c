"""Checks of the compiler, of packages and of variables in the environment."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from importlib import metadata
from importlib.util import find_spec

from megatoken.errors import how_to_install
from megatoken.hardware.doctor.finding import Finding, fix, ok

EXTRAS = {
    "serve": (("httptools", "llguidance", "uvloop"), "a slower server without grammars"),
    "report": (("duckdb",), "no SQL over runs"),
    "rack": (("ray",), "no runs on several machines"),
    "accuracy": (("rouge_score", "nltk"), "no ROUGE scores"),
    "hf": (("transformers",), "no comparison with transformers"),
}
"""Modules of each extra and what is missing without them; those of ``gpu`` are only looked for next to a GPU."""
GPU_EXTRA = (("pynvml", "triton"), "the GPU is not used, or its sensors are not read")
HARMFUL = {
    "CUDA_LAUNCH_BLOCKING": ("1", "makes every kernel wait for the one before"),
    "NCCL_P2P_DISABLE": ("1", "keeps GPUs from copying to each other directly"),
    "NCCL_SHM_DISABLE": ("1", "keeps processes from sharing memory"),
    "NCCL_DEBUG": ("TRACE", "writes a line for each call"),
    "PYTORCH_NO_CUDA_MEMORY_CACHING": ("1", "makes every allocation a call of the driver"),
    "RAY_memory_monitor_refresh_ms": ("0", "lets a node run out of memory without a message"),
    "OMP_NUM_THREADS": ("1", "leaves all cores but one idle in products"),
}
"""Variables with the value that costs speed or hides a fault, and what it does."""


def check_software(has_gpu: bool) -> Iterator[Finding]:
    """All of them; ``has_gpu``: whether the machine has an NVIDIA GPU."""
    name = os.environ.get("CXX", "g++")
    if shutil.which(name) is None:
        message = f"no compiler {name}, so the processor's kernels are replaced by slower PyTorch operations"
        yield fix("compiler", message, "sudo apt-get install g++")
    else:
        yield ok("compiler", f"{name} can compile the processor's kernels")
    extras = EXTRAS | ({"gpu": GPU_EXTRA} if has_gpu else {})
    for extra, (modules, cost) in extras.items():
        missing = [module for module in modules if find_spec(module) is None]
        if missing:
            command = how_to_install(extra).removeprefix("install it with: ")
            yield fix(f"extra_{extra}", f"{', '.join(missing)} not installed: {cost}", command)
        else:
            yield ok(f"extra_{extra}", f"the extra {extra} is installed")
    version = metadata.version("torch")
    if has_gpu and version.endswith("+cpu"):
        message = f"PyTorch {version} cannot use the GPU"
        yield fix("torch_build", message, "pip install --force-reinstall torch")
    found = [variable for variable, (value, _) in HARMFUL.items() if os.environ.get(variable) == value]
    for variable in found:
        yield fix(
            f"variable_{variable}", f"{variable}={HARMFUL[variable][0]} {HARMFUL[variable][1]}", f"unset {variable}"
        )
    if not found:
        yield ok("variables", "no variable of the environment slows PyTorch, NCCL or Ray")
