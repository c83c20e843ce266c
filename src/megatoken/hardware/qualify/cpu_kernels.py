"""The engine's own kernels on the CPU: decode attention over a paged cache, norm, and activation."""

from __future__ import annotations

import torch
from torch.nn.functional import silu

from megatoken.engine.cache import LayerCache
from megatoken.engine.config import SHAPES
from megatoken.engine.ops import cpu
from megatoken.engine.schemes import find_scheme
from megatoken.hardware.qualify.processor import engine_precision, peak, usable_cores
from megatoken.hardware.qualify.timing import call_seconds, rates
from megatoken.hardware.qualify.values import Bound, Outcomes, Setting, Value

SHAPE, PAGE_SIZE, CONTEXT = "125m", 64, 512
TOKENS = 512
PROMPTS, PROMPT_TOKENS = 4, 128


@torch.inference_mode()
def kernels(setting: Setting) -> Outcomes:
    """Bytes that each must move over the time that it takes, next to the measured read of memory."""
    torch.set_num_threads(usable_cores())
    read = setting.measured.get("memory_read")
    bound = None if read is None else Bound(read, "reading of memory, measured", certain=False)
    compiled = cpu.kernels()
    note = "" if compiled["why_no_kernels"] is None else f"PyTorch only: {compiled['why_no_kernels']}"
    model, precision = SHAPES[SHAPE], engine_precision()
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
    most = peak(precision, usable_cores(), setting)
    yield Value("prompt_attention", title, "GFLOP/s", rates(operations / 1e9, seconds), bound=most, note=note)

    x_TD = torch.randn(TOKENS, model.hidden_size, dtype=dtype)
    weight_D = torch.ones(model.hidden_size, dtype=dtype)
    seconds = call_seconds(lambda: cpu.rms_norm(x_TD, weight_D, 1e-5), setting)
    title = f"RMS norm of {TOKENS} tokens, {precision}"
    yield Value("rms_norm", title, "GB/s", rates(2 * x_TD.nbytes / 1e9, seconds), note=note)
    gate, up = (torch.randn(TOKENS, model.intermediate_size, dtype=dtype) for _ in range(2))
    seconds = call_seconds(lambda: silu(gate) * up, setting)
    yield Value(
        "silu_mul", f"SiLU and product of {TOKENS} tokens, {precision}", "GB/s", rates(5 * gate.nbytes / 1e9, seconds)
    )
