"""Compile a model's Triton kernels in parallel while its weights load; one after the other they take eleven seconds.

Dtypes, sizes of the model and absent arguments decide what is compiled, so every kernel is launched once on a few
tokens of zeros. A kernel that is missing here is compiled in the first step: slower, but correct.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from megatoken.engine.config import EngineConfig, ExpertsConfig, ModelConfig
from megatoken.engine.device import why_no_fused_gate
from megatoken.engine.memory import screens_head
from megatoken.engine.ops import fused, nvrtc, paged_attention, prompt_attention, tokens
from megatoken.engine.ops.cuda_linear import Linear
from megatoken.engine.ops.fused_all_reduce import FusedAllReduce
from megatoken.engine.ops.gated_product import CLUSTERS, ORDER, compiled
from megatoken.engine.ops.grouped_product import FEW_ROWS, MANY_ROWS, SOME_ROWS, TileConfig, grouped_product
from megatoken.engine.ops.launchers import make_loading_safe
from megatoken.engine.ops.paged_attention import FEW_PROGRAMS, MANY_PROGRAMS, DecodeConfig
from megatoken.engine.ops.prompt_attention import ChunkConfig
from megatoken.engine.ops.routing_kernels import route
from megatoken.engine.ops.screened_head import decide
from megatoken.engine.schemes import LinearScheme, scheme_of

TOKENS = 16


def start_compiling(
    config: ModelConfig, engine: EngineConfig, page_size: int, device: torch.device
) -> list[Future[None]]:
    """Begin; each future is done when its kernel can run."""
    make_loading_safe()
    kernels = launches(config, scheme_of(engine), page_size, device, engine.tensor_parallel)
    pool = ThreadPoolExecutor(max_workers=len(kernels), thread_name_prefix="compile")

    def launch(kernel: Callable[[], object]) -> None:
        with torch.cuda.device(device), torch.inference_mode():
            # A thread has the device's context after its first call, and kernels that describe tensors need it before.
            torch.cuda.synchronize()
            kernel()

    futures = [pool.submit(launch, kernel) for kernel in kernels]
    pool.shutdown(wait=False)
    return futures


def launches(
    config: ModelConfig,
    scheme: LinearScheme,
    page_size: int,
    device: torch.device,
    ranks: int = 1,
) -> list[Callable[[], object]]:
    """Every kernel that steps of a model launch, in every form. Longest to compile first.

    ``config``: of one of the ``ranks``.
    """
    heads, kv_heads, head_dim = config.heads, config.kv_heads, config.head_dim
    epsilon = config.rms_norm_epsilon

    def zeros(*shape: int, dtype: torch.dtype = scheme.activation_dtype) -> Tensor:
        return torch.zeros(shape, dtype=dtype, device=device)

    def int32(*values: int) -> Tensor:
        return torch.tensor(values, dtype=torch.int32, device=device)

    x_TD, norm_D = zeros(TOKENS, config.hidden_size), zeros(config.hidden_size)
    gate_up_T2F, logits_TV = zeros(TOKENS, 2 * config.intermediate_size), zeros(TOKENS, config.vocabulary_size)
    qkv_TN, q_THE = zeros(TOKENS, (heads + 2 * kv_heads) * head_dim), zeros(TOKENS, heads, head_dim)
    cos_LE = zeros(TOKENS, head_dim)
    head_norm_E = zeros(head_dim) if config.qk_norm else None
    split = max(FEW_PROGRAMS.block_tokens, MANY_PROGRAMS.block_tokens)
    pages_TW = torch.zeros(TOKENS, -(-2 * split // page_size), dtype=torch.int32, device=device)
    lengths_T = int32(*[2 * split] * TOKENS)
    indices_T, ones_T = int32(*[0] * TOKENS), torch.ones(TOKENS, dtype=torch.float64, device=device)
    cache = zeros(1, kv_heads, page_size, head_dim, dtype=scheme.cache_dtype(device))

    windows = sorted({config.window(layer) for layer in range(config.layers)}, key=lambda window: window or 0)
    sinks_H = zeros(heads, dtype=torch.float32) if config.sinks else None

    # Kernels of few tokens have another form where they let the next one start.
    counts = [TOKENS, 1] if nvrtc.overlaps(device, 1) else [TOKENS]

    def decode(window: int | None, way: DecodeConfig, count: int, out_THE: Tensor, out_scale: float | None) -> None:
        paged_attention.decode_attention(
            q_THE[:count], cache, cache, pages_TW[:count], lengths_T[:count], out_THE[:count],
            softmax_scale=1.0, max_length=2 * split, total_tokens=2 * split * count, out_scale=out_scale,
            window=window, sinks_H=sinks_H, config=replace(way, split_tokens=split),
        )  # fmt: skip

    def chunk(window: int | None, way: ChunkConfig, out_THE: Tensor, out_scale: float | None) -> None:
        prompt_attention.chunk_attention(
            q_THE, cache, cache, pages_TW[:1], int32(0, TOKENS), int32(TOKENS), out_THE,
            softmax_scale=1.0, longest_chunk=TOKENS, max_context=TOKENS, out_scale=out_scale,
            window=window, sinks_H=sinks_H, config=way,
        )  # fmt: skip

    def normed(consumer: Linear, count: int) -> None:
        consumer.normed(x_TD[:count], x_TD[:count].clone(), norm_D, epsilon)

    def of_input(consumer: Linear) -> list[Callable[[], object]]:
        return [
            *(partial(consumer.normed, None, x_TD[:count], norm_D, epsilon) for count in counts),
            *(partial(normed, consumer, count) for count in counts),
            lambda: consumer.activated(gate_up_T2F),
            lambda: consumer.attended(q_THE.view(TOKENS, -1)),
        ]

    def of_experts(mixture: ExpertsConfig) -> list[Callable[[], object]]:
        # Kernels do not depend on the number of weights: one expert's are enough, and none has rows.
        hidden, width, choices = config.hidden_size, mixture.intermediate_size, mixture.active
        quantised = scheme.fp8_scales is not None
        dtype = torch.float8_e4m3fn if quantised else scheme.activation_dtype
        starts = zeros(mixture.count + 1, dtype=torch.int32)
        order_R = zeros(TOKENS * choices, dtype=torch.int32)
        logits_TX = zeros(TOKENS, mixture.count, dtype=torch.float32)
        factors_R, scale = zeros(len(order_R), dtype=torch.float32), None
        if quantised:
            scale = zeros(max(len(order_R), 2 * width, hidden), dtype=torch.float32)
        gate_up, down = zeros(1, 2 * width, hidden, dtype=dtype), zeros(1, hidden, width, dtype=dtype)
        x_TD, x_RF = zeros(TOKENS, hidden, dtype=dtype), zeros(len(order_R), width, dtype=dtype)
        h_T2F, activation = zeros(TOKENS, 2 * width), mixture.activation
        biases = [zeros(rows) if mixture.biases else None for rows in (mixture.count, 2 * width, hidden)]
        between: list[Callable[[], object]] = []
        if quantised:
            between.append(lambda: fused.quantise_rows(zeros(TOKENS, hidden)))
        if activation is None:
            between.append(lambda: (fused.silu_mul_rows if quantised else fused.silu_mul)(h_T2F))

        def both(tile: TileConfig) -> None:
            grouped_product(
                x_TD, scale, gate_up, scale, order_R, starts,
                bias_XN=biases[1], choices=choices, activation=activation, config=tile,
            )  # fmt: skip
            grouped_product(
                x_RF, scale if activation is None else None, down, scale, order_R, starts,
                bias_XN=biases[2], factors_R=factors_R, config=tile,
            )  # fmt: skip

        between.append(lambda: route(logits_TX, mixture, biases[0]))
        return [*(lambda tile=tile: both(tile) for tile in (MANY_ROWS, SOME_ROWS, FEW_ROWS)), *between]

    ways = prompt_attention.ways(head_dim, device)
    consumers = scheme.cuda_consumers(device)
    outputs = [consumer.attention_output(q_THE) for consumer in consumers]
    inputs = [launch for consumer in consumers for launch in of_input(consumer)]
    if why_no_fused_gate(config, scheme, device) is None:
        inputs += [partial(compiled, x_TD.device.index, cluster) for cluster in CLUSTERS]
        inputs += [
            partial(fused.silu_mul, gate_up_T2F[:count], consumer.device_scale, interleaved=ORDER)
            for consumer in consumers
            for count in counts
        ]
    if not any(consumer.takes_bf16 for consumer in consumers):
        inputs += [partial(normed, Linear(norm_D, None), count) for count in counts]
    if screens_head(config, scheme, device.type, ranks):
        margin_D = zeros(config.hidden_size, dtype=torch.float32)
        inputs.append(lambda: decide(logits_TV[:0], x_TD[:0], x_TD, margin_D))
    if ranks > 1 and scheme.fused_all_reduce and FusedAllReduce.reachable(ranks):
        inputs += shared_launches(config, consumers, device, ranks)
    return [
        *(
            lambda window=window, way=way, output=output: chunk(window, way, *output)
            for window in windows
            for way in (ways if window is None else ways[:1])
            for output in outputs
        ),
        *(
            partial(decode, window, way, count, *output)
            for window in windows
            for way, count in (*((FEW_PROGRAMS, count) for count in counts), (MANY_PROGRAMS, TOKENS))
            for output in outputs
        ),
        *(of_experts(config.experts) if config.experts is not None else ()),
        lambda: tokens.gather_tokens(indices_T, indices_T, zeros(TOKENS, dtype=torch.int64)),
        *inputs,
        lambda: fused.rotate_and_write(
            qkv_TN, cos_LE, cos_LE, indices_T, indices_T, cache, cache,
            q_norm_E=head_norm_E, k_norm_E=head_norm_E, epsilon=epsilon,
        ),
        lambda: tokens.argmax_rows(logits_TV),
        lambda: tokens.argmax_rows(logits_TV, programs=1),
        lambda: tokens.draw_rows(logits_TV, indices_T.long(), ones_T, ones_T),
    ]  # fmt: skip


def shared_launches(
    config: ModelConfig, consumers: Sequence[Linear], device: torch.device, ranks: int
) -> list[Callable[[], object]]:
    """Kernels of the fused all-reduce, launched by one rank that waits for no other."""
    hidden = config.hidden_size
    norm_D = torch.zeros(hidden, dtype=torch.bfloat16, device=device)
    tokens_S = torch.zeros(TOKENS, dtype=torch.int32, device=device)

    def add_rms_norm(scale: Tensor | None) -> Callable[[], object]:
        shared = FusedAllReduce.alone(ranks, TOKENS, hidden, device)
        return lambda: shared.add_rms_norm(TOKENS, shared.products(TOKENS), norm_D, config.rms_norm_epsilon, scale)

    scales = [consumer.device_scale for consumer in consumers]
    shared = FusedAllReduce.alone(ranks, TOKENS, hidden, device)
    return [*map(add_rms_norm, scales), lambda: shared.select(tokens_S, TOKENS)]
