"""Tests of the CPU: memory as STREAM counts it, matrix products, and the engine's own kernels.

Memory is read, written, copied and added on all cores, and on one core in its cache. Products are large squares and the
engine's own shapes with packed weights.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from megatoken.engine.cache import LayerCache
from megatoken.engine.config import SHAPES
from megatoken.engine.ops import cpu
from megatoken.engine.schemes import find_scheme
from megatoken.hardware.inventory import multiplies_bf16, shares_matrix_units
from megatoken.hardware.qualify.processor import (
    buffer_bytes,
    cores_within_quota,
    engine_precision,
    last_level_cache_bytes,
    note_on_kernels,
    peak,
)
from megatoken.hardware.qualify.shapes import CPU_LOAD, CPU_TOKENS, products_of
from megatoken.hardware.qualify.timing import call_seconds, rates
from megatoken.hardware.qualify.values import Bound, NotRun, Outcomes, Setting, Value

CACHED_BYTES = 96 * 2**10
"""Of each buffer of the bound: three of them stay in the second-level cache of a core."""
CACHED_SHARE = 0.25
"""Of the time of other values: rates in the cache only give a bound, by the fastest window, and are not judged."""
PATTERNS: dict[str, tuple[str, int, Callable[[Tensor, Tensor, Tensor], object]]] = {
    "read": ("Memory read", 1, lambda a, b, c: a.sum()),
    "write": ("Memory write", 1, lambda a, b, c: a.fill_(1.0)),
    "copy": ("Memory copy", 2, lambda a, b, c: a.copy_(b)),
    "triad": ("Memory triad", 3, lambda a, b, c: torch.add(b, c, alpha=3.0, out=a)),
}
"""Title, buffers that are read or written, and the work on three buffers."""
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
MATRIX_SIDE = 2048
"""With bf16 instructions: oneDNN multiplies squares of 1,024 on one of two cores."""
SHARED_UNITS = "recorded only: on a virtual machine with AMX this rate was seen to fall by 60 % for minutes"
LAYERS = 8
"""Distinct layers of weights, so that they come from memory and not from a cache."""
SHAPE, PAGE_SIZE, CONTEXT = "125m", 64, 512
TOKENS = 512
PROMPTS, PROMPT_TOKENS = 4, 128


@torch.inference_mode()
def memory(setting: Setting) -> Outcomes:
    """Four patterns on buffers larger than all caches. Bytes that a write reads first do not count, as in STREAM."""
    cores = cores_within_quota()
    size, note = buffer_bytes(setting, last_level_cache_bytes(), 3)
    large, cached = (tuple(torch.ones(count // 4) for _ in range(3)) for count in (size, CACHED_BYTES))
    shorter = replace(
        setting, seconds=CACHED_SHARE * setting.seconds, warm_up_seconds=CACHED_SHARE * setting.warm_up_seconds
    )
    for name, (title, buffers, run) in PATTERNS.items():
        torch.set_num_threads(1)
        of_core = rates(buffers * CACHED_BYTES / 1e9, call_seconds(lambda run=run: run(*cached), shorter))  # type: ignore[misc]
        torch.set_num_threads(cores)
        rate = rates(buffers * size / 1e9, call_seconds(lambda run=run: run(*large), setting))  # type: ignore[misc]
        formula = f"{cores} cores x {max(of_core):.0f} GB/s, the same in a core's cache, measured"
        bound = Bound(cores * max(of_core), formula, certain=False)
        yield Value(f"memory_{name}", title, "GB/s", rate, bound=bound, note=note)
        yield Value(f"cache_{name}", f"{title.replace('Memory', 'Cache')}, one core", "GB/s", of_core, "")


@torch.inference_mode()
def gemm(setting: Setting) -> Outcomes:
    """fp32 and bf16: squares of random values on one core and on all."""
    cores = cores_within_quota()
    for name, dtype in DTYPES.items():
        if not cpu.can_pack(dtype):
            title = f"{name} product on the CPU"
            yield NotRun(f"gemm_{name}", title, f"oneDNN has no {name} on this processor", "take another processor")
            continue
        sides = setting.sides
        if dtype is torch.bfloat16:
            # A processor that widens bf16 takes several times as long, whatever the side.
            sides = (MATRIX_SIDE,) if multiplies_bf16() else (min(sides),)
        for side in sides:
            left, right = torch.randn(side, side).to(dtype), torch.randn(side, side).to(dtype)
            for threads in sorted({1, cores}):
                torch.set_num_threads(threads)
                rate = rates(2e-9 * side**3, call_seconds(lambda a=left, b=right: torch.mm(a, b), setting))  # type: ignore[misc]
                of = "one core" if threads == 1 else f"{threads} cores"
                title = f"{name} product of side {side:,}, {of}"
                where = "one_core" if threads == 1 else "all_cores"
                bound, key = peak(name, threads, setting), f"gemm_{name}_{side}_{where}"
                if dtype is torch.bfloat16 and shares_matrix_units():
                    yield Value(key, title, "GFLOP/s", rate, "", bound, note=SHARED_UNITS)
                else:
                    yield Value(key, title, "GFLOP/s", rate, bound=bound)


@torch.inference_mode()
def layer_products(setting: Setting) -> Outcomes:
    """The four products of a layer in the engine's fastest format, back to back over distinct layers, as in a step."""
    torch.set_num_threads(cores_within_quota())
    precision = engine_precision(setting)
    dtype, scheme, products = DTYPES[precision], find_scheme(precision), products_of(SHAPES[CPU_LOAD.shape])
    layers = [
        [cpu.pack_linear(torch.randn(one.outputs, one.inputs, dtype=dtype), None, scheme) for one in products]
        for _ in range(LAYERS)
    ]
    for tokens in CPU_TOKENS:
        inputs = [torch.randn(tokens, one.inputs, dtype=dtype) for one in products]

        def step(inputs: list[torch.Tensor] = inputs) -> None:
            for layer in layers:
                for x_TD, weight in zip(inputs, layer, strict=True):
                    cpu.linear(x_TD, weight)

        seconds = call_seconds(step, setting)
        operations = LAYERS * sum(one.operations(tokens) for one in products)
        title = f"Layers of {CPU_LOAD.shape} {precision}, {tokens} tokens"
        unit = "GFLOP/s"
        work = operations
        bound = None
        if tokens == 1:
            title, unit = f"Layers of {CPU_LOAD.shape} {precision}, 1 token", "GB/s"
            work = LAYERS * sum(one.moved_bytes(tokens, dtype.itemsize) for one in products)
            if (read := setting.measured.get("memory_read")) is not None:
                bound = Bound(read, "reading of memory, measured", certain=False)
        else:
            bound = peak(precision, cores_within_quota(), setting)
        yield Value(f"layer_products_{precision}_{tokens}", title, unit, rates(work / 1e9, seconds), bound=bound)


@torch.inference_mode()
def kernels(setting: Setting) -> Outcomes:
    """Bytes that each must move over the time that it takes, next to the measured read of memory."""
    torch.set_num_threads(cores_within_quota())
    read = setting.measured.get("memory_read")
    bound = None if read is None else Bound(read, "reading of memory, measured", certain=False)
    note = note_on_kernels(cpu.kernels())
    model, precision = SHAPES[SHAPE], engine_precision(setting)
    dtype = find_scheme(precision).activation_dtype
    pages = max(CONTEXT // PAGE_SIZE, setting.buffer_bytes // (4 * model.kv_heads * model.head_dim * PAGE_SIZE))
    side = torch.randn(pages, model.kv_heads, PAGE_SIZE, model.head_dim, dtype=dtype)
    cache = LayerCache(side, side.flip(0), round_to_fp8=False)
    sequences = pages * PAGE_SIZE // CONTEXT
    used = sequences * CONTEXT // PAGE_SIZE
    table = cpu.PageTable(
        torch.randperm(pages)[:used].int().view(sequences, -1),
        torch.full((sequences,), CONTEXT, dtype=torch.int32),
        torch.arange(sequences + 1, dtype=torch.int32),
    )
    queries = torch.randn(sequences, model.heads, model.head_dim, dtype=dtype)
    moved = 2 * side[:used].nbytes
    seconds = call_seconds(lambda: cpu.paged_attention(queries, cache, table), setting)
    title = f"Decode attention, {sequences} sequences of {CONTEXT} tokens, {precision}"
    yield Value("decode_attention", title, "GB/s", rates(moved / 1e9, seconds), bound=bound, note=note)

    prompts = min(PROMPTS, sequences)
    starts = torch.arange(0, (prompts + 1) * PROMPT_TOKENS, PROMPT_TOKENS, dtype=torch.int32)
    lengths = torch.full((prompts,), PROMPT_TOKENS, dtype=torch.int32)
    prompt_table = cpu.PageTable(table.pages_RP[:prompts], lengths, starts)
    prompt_queries = torch.randn(prompts * PROMPT_TOKENS, model.heads, model.head_dim, dtype=dtype)
    operations = 4 * prompts * PROMPT_TOKENS * (PROMPT_TOKENS + 1) / 2 * model.heads * model.head_dim
    seconds = call_seconds(lambda: cpu.paged_attention(prompt_queries, cache, prompt_table), setting)
    title = f"Prompt attention, {prompts} prompts of {PROMPT_TOKENS} tokens, {precision}"
    most = peak(precision, cores_within_quota(), setting)
    yield Value("prompt_attention", title, "GFLOP/s", rates(operations / 1e9, seconds), bound=most, note=note)

    x_TD = torch.randn(TOKENS, model.hidden_size, dtype=dtype)
    weight_D = torch.ones(model.hidden_size, dtype=dtype)
    seconds = call_seconds(lambda: cpu.rms_norm(x_TD, weight_D, 1e-5), setting)
    title = f"RMS norm of {TOKENS} tokens, {precision}"
    yield Value("rms_norm", title, "GB/s", rates(2 * x_TD.nbytes / 1e9, seconds), note=note)
    gate, up = (torch.randn(TOKENS, model.intermediate_size, dtype=dtype) for _ in range(2))
    # Into the same memory: the allocator may give new memory back after each call, and the page faults of the next one
    # then take five times as long as the kernel, in some runs of the test and not in others.
    activated, product = torch.empty_like(gate), torch.empty_like(gate)
    seconds = call_seconds(lambda: torch.mul(torch.ops.aten.silu.out(gate, out=activated), up, out=product), setting)
    yield Value(
        "silu_mul", f"SiLU and product of {TOKENS} tokens, {precision}", "GB/s", rates(5 * gate.nbytes / 1e9, seconds)
    )
