"""The device a model runs on: a GPU if there is one that can, otherwise the CPU; its back end and its free memory."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

import psutil
import torch

from megatoken.engine.checkpoint import Checkpoint, RandomWeights
from megatoken.engine.config import EngineConfig, ModelConfig, sharded
from megatoken.engine.memory import MemoryPlan, check_sizes, plan_memory_of
from megatoken.engine.ops import Ops
from megatoken.engine.ops.cpu_packed import saved_bytes
from megatoken.engine.quantized_checkpoint import QuantizedTensors
from megatoken.engine.quantized_layouts import Groups, stacked_with
from megatoken.engine.schemes import FP8, FP8_PACKED, LinearScheme, scheme_of, unknown_precision
from megatoken.errors import CapacityError, ConfigError, how_to_install

# Loading leaves holes between tensors of different sizes, 3.5 GB in a 70B model; expandable segments leave none.
# PyTorch reads this when it first allocates.
os.environ.setdefault("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")

DEVICES = ("auto", "cpu", "cuda")


def choose_device(config: EngineConfig) -> tuple[torch.device, str | None]:
    """The device of ``config``, and the reason if a present GPU is not used.

    Raises:
        ConfigError: no such device.
        CapacityError: ``cuda`` was asked for and is not available; the message says what is missing.
    """
    if config.device not in DEVICES:
        raise ConfigError(f"device is {config.device}; take one of {', '.join(DEVICES)}")
    obstacle = None if config.device == "cpu" else gpu_obstacle(scheme_of(config))
    if config.device == "cuda" and obstacle is not None:
        raise CapacityError(f"device cuda: {obstacle}; or leave device on auto")
    if config.device == "cpu" or obstacle is not None:
        return torch.device("cpu"), f"runs on the CPU: {obstacle}" if obstacle and torch.cuda.is_available() else None
    return torch.device("cuda", torch.cuda.current_device()), None


def why_no_fused_gate(model: ModelConfig, scheme: LinearScheme, device: torch.device) -> str | None:
    """Why gate, up and activation of a rank's layers are not one kernel (``ops/gated_product.py``); None: they are."""
    dense = model.experts is None or len(model.experts.layers) < model.layers
    if device.type != "cuda" or scheme.fp8_scales != "tensor" or model.mlp_bias or not dense:
        return "it is for dense layers without biases, in fp8 with one scale, on a GPU"
    from megatoken.engine.ops.gated_product import obstacle

    return obstacle(model.intermediate_size, model.hidden_size, device)


def gpu_obstacle(scheme: LinearScheme) -> str | None:
    """Why the current GPU cannot run a scheme, and what to do; None when it can."""
    if not torch.cuda.is_available():
        return "no NVIDIA GPU that this PyTorch can use; check nvidia-smi and install a CUDA build of torch"
    if find_spec("triton") is None:
        return f"Triton is not installed; {how_to_install('gpu')}"
    lowest, capability = scheme.lowest_capability, torch.cuda.get_device_capability()
    if lowest is None:
        return f"the GPU back end has no {scheme.precision}; take bf16 or fp8"
    if capability < lowest:
        return (
            f"{torch.cuda.get_device_name()} has compute capability {capability[0]}.{capability[1]}, "
            f"{scheme.precision} needs {lowest[0]}.{lowest[1]}; take another precision or GPU"
        )
    return None


def operations(device: torch.device) -> Ops:
    """The back end of ``device``."""
    if device.type == "cuda":
        from megatoken.engine.ops import cuda

        return cuda
    from megatoken.engine.ops import cpu

    return cpu


def available_memory_bytes(device: torch.device) -> int:
    """Free memory of the GPU, or of the system or its container, whichever is less."""
    if device.type == "cuda":
        held_and_free = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return int(torch.cuda.mem_get_info(device)[0]) + held_and_free
    available = int(psutil.virtual_memory().available)
    group = Path("/sys/fs/cgroup")
    try:
        limit, used = (int((group / name).read_text()) for name in ("memory.max", "memory.current"))
        statistics = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
    except (OSError, ValueError):  # no control group, or no limit ("max")
        return available
    # Inactive file pages count as used, but the kernel reclaims them when memory is needed.
    return min(available, limit - used + int(statistics.get("inactive_file", 0)))


def settle(source: Checkpoint | RandomWeights, config: EngineConfig) -> tuple[EngineConfig, MemoryPlan]:
    """``config`` with what the plan decided, and the plan. Random weights that are to stay packed become four-bit.

    Raises:
        ConfigError: as ``plan_memory``, or the checkpoint has no weights to keep packed.
        CapacityError: as ``plan_memory``.
    """
    memory = plan_memory(source.config, config, source.quantized)
    if memory.packed_weights:
        source.keep_packed()
    return replace(config, packed_weights=memory.packed_weights), memory


def plan_memory(model: ModelConfig, config: EngineConfig, stored: object = None) -> MemoryPlan:
    """Derive every size of an engine on this machine.

    ``stored``: the source's quantized linears. If four-bit weights stay packed here, they count as such; to know
    whether they do, kernels are built.

    Raises:
        ConfigError: an unknown precision, scales that the precision does not have, or a size below 1.
        CapacityError: model, context and cache do not fit; the message has the numbers.
    """
    if scheme_of(config).simulated_only:
        raise unknown_precision(config.precision)
    check_sizes(config)
    sharded(model, config.tensor_parallel)
    device, _ = choose_device(config)
    if device.type == "cuda" and config.tensor_parallel > torch.cuda.device_count():
        raise CapacityError(
            f"tensor_parallel {config.tensor_parallel} needs as many GPUs; this machine has {torch.cuda.device_count()}"
        )
    scheme, packed_saves, available = scheme_of(config), 0, available_memory_bytes(device)
    groups = stored.groups() if isinstance(stored, QuantizedTensors) and config.tensor_parallel == 1 else {}
    if groups and scheme.fp8_scales is None and operations(device).keeps_packed(scheme.activation_dtype):
        packed_saves = saved_bytes(model, groups, scheme.activation_bytes)
    if config.packed_weights:
        if obstacle := _packing_obstacle(device):
            raise CapacityError(f"packed_weights: {obstacle}; leave it on null")
        packed_saves = _packed_saves(model, groups) if stored is not None else 0
    try:
        return plan_memory_of(model, config, device.type, available, packed_saves)
    except CapacityError as error:
        undecided = config.packed_weights is None and scheme is FP8 and model.experts is None
        if not (undecided and groups and device.type == "cuda"):
            raise
        if obstacle := _packing_obstacle(device):
            raise CapacityError(f"{error}; its four-bit weights cannot stay packed: {obstacle}") from error
        packed = replace(config, packed_weights=True)
        return plan_memory_of(model, packed, device.type, available, _packed_saves(model, groups))


def _packing_obstacle(device: torch.device) -> str | None:
    if device.type != "cuda":
        return "the engine computes on the CPU, and only a GPU keeps weights packed in fp8"
    from megatoken.engine.ops import packed_product

    return packed_product.obstacle(device)


def _packed_saves(model: ModelConfig, groups: Mapping[str, Groups]) -> int:
    """What weights on a GPU take less than NVFP4 would: more where they are expanded, in fp8.

    Linears that are stacked to one stay packed if all of them can, with the same groups.
    """
    from megatoken.engine.ops import packed_product

    shapes = model.linear_shapes
    fitting = {
        name: one
        for name, one in groups.items()
        if one.kind == "e2m1" and one.columns in packed_product.GROUPS and packed_product.fit(*shapes[name])
    }
    saved = 0.0
    for name, (rows, columns) in shapes.items():
        whole = stacked_with(name, ("q", "k", "v"), ("gate", "up"))
        packed = all(one in fitting and fitting[one] == fitting.get(name) for one in whole)
        taken = 0.5 + 1 / fitting[name].columns if packed else FP8.weight_bytes
        saved += rows * columns * (FP8_PACKED.weight_bytes - taken)
    return round(saved)
