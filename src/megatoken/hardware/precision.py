"""The precision of an engine for which the user named none: the fastest of bf16 and fp32 on this machine."""

from __future__ import annotations

from dataclasses import replace

from megatoken.engine.checkpoint import Checkpoint, RandomWeights
from megatoken.engine.config import EngineConfig
from megatoken.engine.device import settle
from megatoken.engine.memory import MemoryPlan
from megatoken.errors import CapacityError
from megatoken.hardware.inventory import multiplies_bf16


def settle_fastest(source: Checkpoint | RandomWeights, config: EngineConfig) -> tuple[EngineConfig, MemoryPlan]:
    """``settle``, in fp32 in place of ``config.precision``, bf16, where fp32 is faster and memory allows it.

    It is faster on a processor without instructions for bf16, which widens each value before it multiplies. Quantized
    weights stay as they are: they are smaller in bf16. Weights and cache in fp32 take twice the memory; where that
    would shorten the context or make the cache hold fewer tokens, bf16 stays.

    Raises:
        ConfigError, CapacityError: as ``settle``.
    """
    settled, memory = settle(source, config)
    if memory.device != "cpu" or multiplies_bf16() or source.quantized is not None:
        return settled, memory
    try:
        in_fp32, larger = settle(source, replace(config, precision="fp32"))
    except CapacityError:
        return settled, memory
    if larger.max_length < memory.max_length or larger.cache_tokens < memory.cache_tokens:
        return settled, memory
    return in_fp32, larger
