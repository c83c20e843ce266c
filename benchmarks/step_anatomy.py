"""Where a step's time goes: kernels of a trace -> parts of a step, and what each part has to compute or to move.

Kernels of this project are known by name; products are recognised by their neighbours.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from gpu_trace import Kernel, busy_microseconds
from megatoken.engine.config import ModelConfig
from megatoken.engine.step_plan import StepPlan

QKV, OUTPUT, GATE_UP, DOWN, HEAD = "qkv", "output", "gate and up", "down", "head"
DECODE, CHUNK = "decode attention", "chunk attention"
NORMS, ACTIVATION, ROTATION, ARGMAX = "norms", "activation", "rotation", "argmax"
OTHER_PRODUCTS, REST, GAPS = "other products", "ids and copies", "gaps"
LAYER_PRODUCTS = (QKV, OUTPUT, GATE_UP, DOWN)
OPERATIONS = (*LAYER_PRODUCTS, HEAD, CHUNK)
"""Parts whose work is floating-point operations; that of the others is bytes."""
PARTS = (*LAYER_PRODUCTS, OTHER_PRODUCTS, HEAD, DECODE, CHUNK, NORMS, ACTIVATION, ROTATION, ARGMAX, REST)

STEP_BEGINS = "_gather_tokens"
_PRODUCT = "product"
_NAMES = (
    (DECODE, re.compile(r"^_decode_kernel|^_merge_kernel|kernel_mha|xqa")),
    (CHUNK, re.compile(r"^_chunk_kernel")),
    (NORMS, re.compile(r"^_add_rms_norm")),
    (GATE_UP, re.compile(r"^gated_product")),  # with the activation
    (ACTIVATION, re.compile(r"^_silu_mul")),
    (ROTATION, re.compile(r"^_rotate_and_write")),
    (ARGMAX, re.compile(r"^_argmax|^_highest_of_blocks|^_decide")),
    (_PRODUCT, re.compile(r"gemm|nvjet|cutlass|cublas|splitk|matmul", re.IGNORECASE)),
)


@dataclass(frozen=True, slots=True)
class TracedStep:
    """From the first kernel of a step to the first of the next one, microseconds."""

    kernels: list[Kernel]
    begin: float
    end: float


def split_steps(kernels: Sequence[Kernel]) -> list[TracedStep]:
    """All steps but the last, whose end is not known."""
    first = [number for number, kernel in enumerate(kernels) if kernel.name.startswith(STEP_BEGINS)]
    return [
        TracedStep(list(kernels[here:there]), kernels[here].begin, kernels[there].begin)
        for here, there in pairwise(first)
    ]


def parts_of(kernels: Sequence[Kernel]) -> list[str]:
    """The part that each kernel of a step belongs to."""
    marks = [next((part for part, name in _NAMES if name.search(kernel.name)), REST) for kernel in kernels]
    parts = list(marks)
    before = REST
    for number, mark in enumerate(marks):
        if mark == _PRODUCT:
            after = next((mark for mark in marks[number:] if mark not in (_PRODUCT, REST)), REST)
            parts[number] = _product(before, after)
        elif mark != REST:
            before = mark
    return parts


def _product(before: str, after: str) -> str:
    """Which product stands between two parts."""
    if after in (ROTATION, ACTIVATION, ARGMAX):
        return {ROTATION: QKV, ACTIVATION: GATE_UP, ARGMAX: HEAD}[after]
    return {ACTIVATION: DOWN, GATE_UP: DOWN, DECODE: OUTPUT, CHUNK: OUTPUT}.get(before, OTHER_PRODUCTS)


def step_work(plan: StepPlan, model: ModelConfig, fp8: bool) -> dict[str, float]:
    """Operations (``OPERATIONS``) or bytes read and written of every part that has any.

    The last layer has T rows in its qkv product and rotation only; the rest of it and the head have S, those that
    sample. Weights of norms, tables of positions and page tables are left out.
    """
    count, start = plan.count.astype(np.int64), plan.start.astype(np.int64)
    lengths, decodes, layers = start + count, plan.decodes, model.layers
    T, S = int(count.sum()), int(plan.sample.sum())
    D, F, E, V = model.hidden_size, model.intermediate_size, model.head_dim, model.vocabulary_size
    queries, keys = model.heads * E, model.kv_heads * E
    item = 1 if fp8 else 2  # of the inputs of linears, and of the cache
    rows = (layers - 1) * T + S
    chunk_rows, chunk_start = count[decodes:], start[decodes:]
    pairs = int((chunk_rows * chunk_start + chunk_rows * (chunk_rows + 1) // 2).sum())
    attended = (layers - 1) * int(lengths[:decodes].sum()) + int(lengths[plan.sample].sum())
    attending = (layers - 1) * decodes + S
    add_norm = D * (6 + item)
    return {
        QKV: 2.0 * layers * T * D * (queries + 2 * keys),
        OUTPUT: 2.0 * rows * queries * D,
        GATE_UP: 4.0 * rows * D * F,
        DOWN: 2.0 * rows * D * F,
        HEAD: 2.0 * S * D * V,
        DECODE: 2.0 * attended * keys * item + attending * queries * (2.0 + item),
        CHUNK: 4.0 * (layers - 1) * queries * pairs,
        NORMS: T * D * (2.0 + item) + (2 * (layers - 1) * T + S) * add_norm + S * D * 8,
        ACTIVATION: rows * F * (4.0 + item),
        ROTATION: layers * T * (2.0 * (queries + 2 * keys) + 2 * queries + 2 * keys * item),
        ARGMAX: 2.0 * S * V,
    }


@dataclass(frozen=True, slots=True)
class Ceilings:
    """What the machine does when it does nothing else, measured in the same process."""

    products_teraflops: float
    bf16_teraflops: float
    copy_gigabytes_per_second: float

    def of(self, part: str) -> float:
        """In TFLOP/s or GB/s."""
        if part in LAYER_PRODUCTS:
            return self.products_teraflops
        return self.bf16_teraflops if part in OPERATIONS else self.copy_gigabytes_per_second


@dataclass(frozen=True, slots=True)
class PartOfStep:
    """One part of the mean step; rates in ``unit``, None where nothing is counted."""

    part: str
    milliseconds: float
    share: float
    launches: float
    unit: str | None = None
    achieved: float | None = None
    bound: float | None = None
    bound_share: float | None = None

    def line(self) -> str:
        """For a table."""
        text = f"{self.part:17}{self.milliseconds:9.3f} ms{self.share:7.1%}{self.launches:8.0f}"
        if self.achieved is None or self.bound is None or self.bound_share is None:
            return text
        return f"{text}{self.achieved:9,.0f} of {self.bound:6,.0f} {self.unit:7}{self.bound_share:7.1%}"


def anatomy(
    steps: Sequence[TracedStep], plans: Sequence[StepPlan], model: ModelConfig, fp8: bool, ceilings: Ceilings
) -> list[PartOfStep]:
    """The mean of several steps: the layers' products together, every part, and the gaps between kernels."""
    microseconds: defaultdict[str, float] = defaultdict(float)
    launches: defaultdict[str, int] = defaultdict(int)
    work: defaultdict[str, float] = defaultdict(float)
    for step, plan in zip(steps, plans, strict=True):
        for kernel, part in zip(step.kernels, parts_of(step.kernels), strict=True):
            microseconds[part] += kernel.end - kernel.begin
            launches[part] += 1
        microseconds[GAPS] += step.end - step.begin - busy_microseconds(step.kernels)
        for part, amount in step_work(plan, model, fp8).items():
            work[part] += amount
    span = sum(step.end - step.begin for step in steps)

    def row(name: str, *parts: str) -> PartOfStep:
        time, amount = (sum(of[part] for part in parts) for of in (microseconds, work))
        mean, share, often = time / len(steps) / 1e3, time / span, sum(launches[part] for part in parts) / len(steps)
        if not (time and amount):
            return PartOfStep(name, mean, share, often)
        unit, scale = ("TFLOP/s", 1e6) if parts[0] in OPERATIONS else ("GB/s", 1e3)
        achieved, bound = amount / time / scale, ceilings.of(parts[0])
        return PartOfStep(name, mean, share, often, unit, achieved, bound, achieved / bound)

    return [row("layers' products", *LAYER_PRODUCTS), *(row(part, part) for part in (*PARTS, GAPS))]


def costliest(steps: Sequence[TracedStep], most: int = 24) -> list[dict[str, float | str]]:
    """Kernels by name: milliseconds and launches of the mean step, and the part they serve."""
    microseconds: defaultdict[tuple[str, str], list[float]] = defaultdict(list)
    for step in steps:
        for kernel, part in zip(step.kernels, parts_of(step.kernels), strict=True):
            microseconds[kernel.name, part].append(kernel.end - kernel.begin)
    ordered = sorted(microseconds.items(), key=lambda item: -sum(item[1]))[:most]
    return [
        {
            "kernel": name,
            "part": part,
            "milliseconds": sum(times) / len(steps) / 1e3,
            "launches": len(times) / len(steps),
        }
        for (name, part), times in ordered
    ]
