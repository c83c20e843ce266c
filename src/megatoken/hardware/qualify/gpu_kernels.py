"""The kernels of the engine on the GPU: attention over an fp8 cache, norm, activation; and what a launch costs."""

from __future__ import annotations

import torch
from torch import Tensor

from megatoken.engine.config import SHAPES
from megatoken.engine.gpus import Gpu
from megatoken.engine.ops import fused, paged_attention, prompt_attention
from megatoken.hardware.qualify.gpu_timing import BF16, DEVICE, E4M3, gpu_seconds, limited_by_power, start
from megatoken.hardware.qualify.shapes import GPU_ATTENTION
from megatoken.hardware.qualify.timing import on_the_best_core, rates
from megatoken.hardware.qualify.values import Bound, Outcomes, Setting, Value

MODEL = SHAPES[GPU_ATTENTION.shape]
SEQUENCES, CONTEXT, PAGE_SIZE = GPU_ATTENTION.sequences, GPU_ATTENTION.prompt_tokens, 32
HEADS, KV_HEADS, HEAD_DIM = MODEL.heads, MODEL.kv_heads, MODEL.head_dim
PROMPTS, PROMPT_TOKENS = 8, 4096
TOKENS, HIDDEN, FEED_FORWARD = 4096, MODEL.hidden_size, MODEL.intermediate_size
BATCH = 100


@torch.inference_mode()
def kernels(setting: Setting) -> Outcomes:
    """One layer of a 70B model; bytes that must be moved over the time."""
    sheet = start()
    bound = _memory_bound(sheet)
    k, v, table = _cache(E4M3)
    yield _decode_attention("decode_attention", "fp8 cache", k, v, table, bound, setting)

    starts = torch.arange(0, (PROMPTS + 1) * PROMPT_TOKENS, PROMPT_TOKENS, dtype=torch.int32, device=DEVICE)
    contexts = torch.full((PROMPTS,), PROMPT_TOKENS, dtype=torch.int32, device=DEVICE)
    prompt_pages = table.view(-1)[: PROMPTS * PROMPT_TOKENS // PAGE_SIZE].view(PROMPTS, -1)
    prompt_queries = torch.randn(PROMPTS * PROMPT_TOKENS, HEADS, HEAD_DIM, dtype=BF16, device=DEVICE)
    prompt_out = torch.empty_like(prompt_queries)

    def prompts() -> None:
        prompt_attention.chunk_attention(
            prompt_queries,
            k,
            v,
            prompt_pages,
            starts,
            contexts,
            prompt_out,
            softmax_scale=HEAD_DIM**-0.5,
            longest_chunk=PROMPT_TOKENS,
            max_context=PROMPT_TOKENS,
        )

    operations = 4 * PROMPTS * PROMPT_TOKENS * (PROMPT_TOKENS + 1) / 2 * HEADS * HEAD_DIM
    title = f"Prompt attention, {PROMPTS} prompts of {PROMPT_TOKENS:,} tokens, fp8 cache"
    rate = rates(operations / 1e12, gpu_seconds(prompts, limited_by_power(setting)))
    most = None if sheet is None else Bound(sheet.operations_per_second["bf16"] / 1e12, "data sheet, dense bf16")
    yield Value("prompt_attention", title, "TFLOP/s", rate, bound=most)

    scale = torch.ones(1, device=DEVICE)
    delta = torch.zeros(TOKENS, HIDDEN, dtype=BF16, device=DEVICE)
    residual = torch.randn(TOKENS, HIDDEN, dtype=BF16, device=DEVICE)
    weight = torch.ones(HIDDEN, dtype=BF16, device=DEVICE)
    seconds = gpu_seconds(lambda: fused.add_rms_norm(delta, residual, weight, 1e-5, scale), setting)
    moved = 7 * TOKENS * HIDDEN  # read twice and written once in bf16, written once in fp8
    title = f"Sum, norm and fp8 rounding of {TOKENS:,} tokens"
    # Buffers of this size stay in part in the cache, so memory is no limit.
    yield Value("add_rms_norm", title, "GB/s", rates(moved / 1e9, seconds))
    gate_up = torch.randn(TOKENS, 2 * FEED_FORWARD, dtype=BF16, device=DEVICE)
    seconds = gpu_seconds(lambda: fused.silu_mul(gate_up, scale), setting)
    moved = 5 * TOKENS * FEED_FORWARD
    title = f"SiLU, product and fp8 rounding of {TOKENS:,} tokens"
    yield Value("silu_mul", title, "GB/s", rates(moved / 1e9, seconds), bound=bound)


@torch.inference_mode()
def bf16_cache(setting: Setting) -> Outcomes:
    """Decode attention over a cache of bf16, as the engine has it for weights in bf16."""
    bound = _memory_bound(start())
    k, v, table = _cache(BF16)
    yield _decode_attention("decode_attention_bf16", "bf16 cache", k, v, table, bound, setting)


def _memory_bound(sheet: Gpu | None) -> Bound | None:
    return None if sheet is None else Bound(sheet.memory_bytes_per_second / 1e9, "data sheet of the memory")


def _cache(dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """Random keys and values of all sequences, and the pages of each, in a random order."""
    pages = SEQUENCES * CONTEXT // PAGE_SIZE
    k, v = (torch.randn(pages, KV_HEADS, PAGE_SIZE, HEAD_DIM, dtype=BF16, device=DEVICE).to(dtype) for _ in range(2))
    return k, v, torch.randperm(pages, device=DEVICE).int().view(SEQUENCES, -1)


def _decode_attention(
    name: str, cache: str, k: Tensor, v: Tensor, table: Tensor, bound: Bound | None, setting: Setting
) -> Value:
    """One query of each sequence against all of its keys."""
    lengths = torch.full((SEQUENCES,), CONTEXT, dtype=torch.int32, device=DEVICE)
    queries = torch.randn(SEQUENCES, HEADS, HEAD_DIM, dtype=BF16, device=DEVICE)
    out = torch.empty_like(queries)

    def attention() -> None:
        paged_attention.decode_attention(
            queries,
            k,
            v,
            table,
            lengths,
            out,
            softmax_scale=HEAD_DIM**-0.5,
            max_length=CONTEXT,
            total_tokens=SEQUENCES * CONTEXT,
        )

    title = f"Decode attention, {SEQUENCES} sequences of {CONTEXT} tokens, {cache}"
    rate = rates((k.nbytes + v.nbytes) / 1e9, gpu_seconds(attention, limited_by_power(setting)))
    return Value(name, title, "GB/s", rate, bound=bound)


@torch.inference_mode()
def launch(setting: Setting) -> Outcomes:
    """A kernel that adds 1 to one number, launched from several cores of the host."""
    torch.cuda.set_device(DEVICE)
    one = torch.zeros(1, device=DEVICE)
    one.add_(1.0)
    torch.cuda.synchronize()

    def batch() -> None:
        for _ in range(BATCH):
            one.add_(1.0)
        torch.cuda.synchronize()

    def round_trip() -> None:
        one.add_(1.0)
        torch.cuda.synchronize()

    seconds, note = on_the_best_core(batch, setting)
    title = "Launch of a small kernel, fastest core"
    yield Value("kernel_launch", title, "us", [1e6 * each / BATCH for each in seconds], "lower", note=note)
    seconds, note = on_the_best_core(round_trip, setting)
    title = "Launch of a small kernel and wait for it, fastest core"
    yield Value("kernel_round_trip", title, "us", [1e6 * each for each in seconds], "lower", note=note)
    seconds = gpu_seconds(lambda: one.add_(1.0), setting)
    yield Value("graph_kernel", "Small kernel in a CUDA graph", "us", [1e6 * each for each in seconds], "lower")
