"""The work that is timed: matrix products of a decoder layer, attention and steps of named models."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from megatoken.engine.config import ModelConfig


@dataclass(frozen=True, slots=True)
class Load:
    """A named shape, its running sequences and the length of each prompt; ``suffix``: of the names of its values."""

    shape: str
    sequences: int
    prompt_tokens: int
    suffix: str = ""


@dataclass(frozen=True, slots=True)
class Layers:
    """Named shapes whose layers' products are timed at so many tokens."""

    shapes: tuple[str, ...]
    tokens: tuple[int, ...]


CPU_LOAD, GPU_LOAD = Load("125m", 16, 128), Load("llama3.1-8b", 256, 512)
SMALL_LOAD = Load("tiny", 16, 128, "_tiny")
"""Its steps show what a step and each token of it cost beyond the kernels."""
WARM_UP_STEPS = 3
CPU_TOKENS = (1, 16, 64, 256)
GPU_LAYERS = Layers(("llama2-70b", "llama3.1-8b"), (64, 1536))
GPU_ATTENTION = Load("llama2-70b", 900, 512)


@dataclass(frozen=True, slots=True)
class Product:
    """``y [M, outputs] = x [M, inputs] W^T``."""

    name: str
    outputs: int
    inputs: int

    def operations(self, tokens: int) -> int:
        """Floating-point, of ``tokens`` tokens."""
        return 2 * tokens * self.outputs * self.inputs

    def moved_bytes(self, tokens: int, item: int) -> int:
        """Weight and input of ``item`` bytes an element, output in bf16."""
        return (self.outputs + tokens) * self.inputs * item + 2 * tokens * self.outputs


def products_of(model: ModelConfig) -> list[Product]:
    """A layer's, in their order."""
    queries, keys = model.heads * model.head_dim, model.kv_heads * model.head_dim
    hidden, feed_forward = model.hidden_size, model.intermediate_size
    return [
        Product("qkv", queries + 2 * keys, hidden),
        Product("output", hidden, queries),
        Product("gate_up", 2 * feed_forward, hidden),
        Product("down", hidden, feed_forward),
    ]


def bound_seconds(product: Product, tokens: int, item: int, operations_rate: float, bytes_rate: float) -> float:
    """The least time: operations or bytes at the given rates (per second), whichever takes longer."""
    return max(product.operations(tokens) / operations_rate, product.moved_bytes(tokens, item) / bytes_rate)


def is_large_product(name: str, precision: str) -> bool:
    """Whether the value of this name is a rate of products on all cores or the GPU that shows what work can reach.

    One core, one token, and equal values, which draw less power, do not.
    """
    others = ("_one_core", "_1", "_zeros", "_ones")
    return name.startswith((f"gemm_{precision}_", f"layer_products_{precision}_")) and not name.endswith(others)


def fastest_products(rates: Mapping[str, float], precision: str) -> float | None:
    """Of the measured ``rates``, by name: of the large products in this format; None if there are none."""
    return max((rate for name, rate in rates.items() if is_large_product(name, precision)), default=None)
