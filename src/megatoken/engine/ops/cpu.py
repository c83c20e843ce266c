"""The CPU back end: weights packed once for oneDNN, elementwise work fused into the products, compiled paged attention.

Without compiled kernels, attention copies the keys and values of one sequence at a time out of their pages.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.functional import linear as plain_linear
from torch.nn.functional import rms_norm as fused_rms_norm
from torch.nn.functional import scaled_dot_product_attention, silu

from megatoken.engine.batch import StepArrays
from megatoken.engine.cache import DUMP_PAGE, LayerCache
from megatoken.engine.config import ClampedSwiglu, ExpertsConfig, ModelConfig
from megatoken.engine.memory import WINDOWED_QUERIES_ON_CPU
from megatoken.engine.ops import NO_TOKEN, Ranks, cpu_packed, native, reference
from megatoken.engine.ops.cpu_packed import PackedLinear
from megatoken.engine.ops.routing import choose_experts
from megatoken.engine.schemes import LinearScheme
from megatoken.engine.schemes.fp8_weight import Fp8Weight, quantise_rows
from megatoken.engine.schemes.packed4 import Packed4

EXACT_TOKENS_FROM_BYTES = 1_000_000_000
WIDENED_FROM_TOKENS = 3  # with fewer, widening a weight costs more than its products in bf16
WIDENED_TOKENS = 256  # at once, so that the widened inputs of a long prompt take little memory
WIDENED_WEIGHTS = 2**17  # 512 KiB in fp32, which a core's cache holds

TORCH_CHUNK_TOKENS = 8
"""Tokens of a chunk from which PyTorch's attention is the faster one on a processor without AVX-512. With AVX2, 64
tokens after 1,000 keys take a fifth to an eighth of the time."""

_pointwise: Any = torch.ops.mkldnn._linear_pointwise


@dataclass(frozen=True, slots=True)
class Linear:
    """A packed weight; with e4m3 values (stored as bf16, in which they are exact) also fp32 ``scale``, [N] or [1]."""

    packed: Tensor
    bias: Tensor | None
    scale: Tensor | None


AnyLinear: TypeAlias = "Linear | PackedLinear | Experts"


@dataclass(frozen=True, slots=True)
class Experts:
    """A mixture, a linear to the operations: gate, up and down projection of each expert, and what chooses."""

    router: tuple[Tensor, Tensor | None]  # fp32
    each: list[tuple[tuple[AnyLinear, AnyLinear], AnyLinear]]
    config: ExpertsConfig


@dataclass(frozen=True, slots=True)
class PageTable:
    """Sequences and the tokens of each that attend, see ``native.attention``; int32."""

    pages_RP: Tensor
    lengths_R: Tensor
    starts: Tensor


@dataclass(frozen=True, slots=True)
class Batch:
    """One step's tensors, see ``StepArrays``."""

    token_ids: Tensor
    positions: Tensor
    cache_slots: Tensor
    page_table: PageTable
    samples: int
    sample_indices: Tensor
    sample_slots: Tensor
    sample_page_table: PageTable
    windowed: Batch | None = None  # the step in layers with windows, if these have pages of their own


def kernels() -> dict[str, Any]:
    """Whether kernels were compiled, and why if not."""
    return native.status()


def can_pack(dtype: torch.dtype) -> bool:
    """Whether this machine's oneDNN takes packed weights of ``dtype``."""
    if not torch.backends.mkldnn.is_available():  # type: ignore[no-untyped-call]
        return False
    return dtype == torch.float32 or torch.ops.mkldnn._is_mkldnn_bf16_supported()


def keeps_packed(dtype: torch.dtype) -> bool:
    """In bf16, where the kernels were compiled."""
    return dtype == torch.bfloat16 and native.has_packed()


def pack_linear(weight: Tensor | Fp8Weight | Packed4, bias_N: Tensor | None, scheme: LinearScheme) -> AnyLinear:
    """Reorder into oneDNN's blocked layout, which suits any number of tokens.

    An fp8 weight is held exactly. Its input scale is not needed: the input of each token gets its own.
    """
    if isinstance(weight, Packed4):
        if cpu_packed.fits(weight):
            return cpu_packed.pack(weight, bias_N)
        weight = weight.decode(scheme.activation_dtype)
    plain = scheme.quantise(weight) if isinstance(weight, Tensor) else weight
    if isinstance(plain, Tensor):
        packed, scale = plain, None
    else:
        packed, scale = plain.values_ND.to(torch.bfloat16), plain.scale_N1.view(-1)
    if can_pack(packed.dtype):
        packed = torch.ops.mkldnn._reorder_linear_weight(packed, 32)
    return Linear(packed, bias_N, scale)


def pack_gated(
    gate_up: list[tuple[Tensor | Fp8Weight | Packed4, Tensor | None]], scheme: LinearScheme
) -> tuple[AnyLinear, AnyLinear]:
    """Two matrices, so that each product can fuse its part of the elementwise work."""
    gate, up = (pack_linear(weight, bias, scheme) for weight, bias in gate_up)
    return gate, up


def pack_experts(
    router: tuple[Tensor, Tensor | None],
    experts: Iterable[list[tuple[Tensor | Fp8Weight | Packed4, Tensor | None]]],
    config: ExpertsConfig,
    scheme: LinearScheme,
) -> Experts:
    """Linears of their own for each expert."""
    router_XD, bias_X = router
    each = [(pack_gated([gate, up], scheme), pack_linear(*down, scheme)) for gate, up, down in experts]
    return Experts((router_XD.float(), None if bias_X is None else bias_X.float()), each, config)


def linear(x_TD: Tensor, linear: AnyLinear, activation: str = "none") -> Tensor:
    """``activation(x W^T + b)``, activation "none" or "swish", which mixtures do not have."""
    if isinstance(linear, Experts):
        return experts(x_TD, linear)
    if isinstance(linear, PackedLinear):
        y_TN = cpu_packed.product(x_TD, linear)
        return silu(y_TN) if activation == "swish" else y_TN
    if linear.scale is not None:
        return _linear_fp8(x_TD, linear, linear.scale, activation)
    if linear.packed.is_mkldnn:
        return _product(x_TD, linear.packed, linear.bias, activation)
    y_TN = _unpacked_product(x_TD, linear.packed, linear.bias)
    return silu(y_TN) if activation == "swish" else y_TN


def _product(x_TD: Tensor, packed: Tensor, bias_N: Tensor | None, activation: str) -> Tensor:
    y_TN: Tensor = _pointwise(x_TD, packed, bias_N, activation, [], "")
    return y_TN


def _unpacked_product(x_TD: Tensor, weight_ND: Tensor, bias_N: Tensor | None = None) -> Tensor:
    """Where oneDNN has no bf16, torch multiplies it without vectors: widened products are up to 15 times as fast."""
    if x_TD.dtype != torch.bfloat16 or len(x_TD) < WIDENED_FROM_TOKENS:
        return plain_linear(x_TD, weight_ND, bias_N)
    outputs, inputs = weight_ND.shape
    rows = max(1, WIDENED_WEIGHTS // inputs)
    biases = [None] * -(-outputs // rows) if bias_N is None else torch.split(bias_N.float(), rows)
    y_TN = x_TD.new_empty(len(x_TD), outputs)
    for x, y in zip(torch.split(x_TD, WIDENED_TOKENS), torch.split(y_TN, WIDENED_TOKENS), strict=True):
        wide = x.float()
        for weight, bias, part in zip(torch.split(weight_ND, rows), biases, torch.split(y, rows, dim=1), strict=True):
            part.copy_(plain_linear(wide, weight.float(), bias))
    return y_TN


def _product_and(x_TD: Tensor, other_TN: Tensor, linear: Linear, operation: str) -> Tensor:
    y_TN: Tensor = _pointwise.binary(x_TD, other_TN, linear.packed, linear.bias, operation)
    return y_TN


def _linear_fp8(x_TD: Tensor, linear: Linear, scale: Tensor, activation: str) -> Tensor:
    # e4m3 values are exact in bf16 and oneDNN accumulates in fp32, so this is the fp8 product, not an approximation.
    values, scale_T1 = quantise_rows(x_TD)
    x = values.to(torch.bfloat16)
    y = _product(x, linear.packed, None, "none") if linear.packed.is_mkldnn else _unpacked_product(x, linear.packed)
    y_TN = y.float() * (scale_T1 * scale)
    if linear.bias is not None:
        y_TN += linear.bias
    return (silu(y_TN) if activation == "swish" else y_TN).to(x_TD.dtype)


def linear_add(x_TD: Tensor, linear_: AnyLinear, residual_TN: Tensor) -> Tensor:
    """``residual + x W^T + b`` in one product."""
    if isinstance(linear_, Linear) and linear_.scale is None and linear_.packed.is_mkldnn:
        return _product_and(x_TD, residual_TN, linear_, "add")
    return residual_TN + linear(x_TD, linear_)


def linear_add_norm(
    x_TD: Tensor,
    linear_: AnyLinear,
    residual_TN: Tensor,
    weight_N: Tensor,
    epsilon: float,
    consumer: AnyLinear,
    ranks: Ranks | None = None,
) -> tuple[Tensor, Tensor]:
    """The product and the sum in one pass, then the norm."""
    if ranks is None:
        residual_TN = linear_add(x_TD, linear_, residual_TN)
    else:
        residual_TN = residual_TN + ranks.add(linear(x_TD, linear_))
    return residual_TN, rms_norm(residual_TN, weight_N, epsilon)


def gated(
    x_TD: Tensor,
    gate_up: tuple[AnyLinear, AnyLinear],
    consumer: AnyLinear | None = None,
    clamped: ClampedSwiglu | None = None,
) -> Tensor:
    """``silu(gate(x)) * up(x)`` in two products, or ``clamped`` of both."""
    gate, up = gate_up
    if clamped is not None:
        return reference.clamped_swiglu(linear(x_TD, gate), linear(x_TD, up), clamped)
    gate_TN = linear(x_TD, gate, "swish")
    if isinstance(up, Linear) and up.scale is None and up.packed.is_mkldnn:
        return _product_and(x_TD, gate_TN, up, "mul")
    return gate_TN * linear(x_TD, up)


def experts(x_TD: Tensor, experts: Experts) -> Tensor:
    """Tokens are sorted by expert, so each expert that any token chose computes once, for all of its tokens.

    Their number is padded as that of a step is, since every new one would cost oneDNN time and memory.
    """
    weights_TC, chosen_TC = choose_experts(plain_linear(x_TD.float(), *experts.router), experts.config)
    chosen = chosen_TC.numpy().reshape(-1)
    order = chosen.argsort(kind="stable")
    counts = np.bincount(chosen, minlength=experts.config.count)
    padded = np.array([padded_tokens(count, 0) if count else 0 for count in counts.tolist()])
    ends = padded.cumsum()
    # A choice's row: the first of its expert, plus the choices of that expert before it.
    own = chosen[order]
    rows = (ends - padded)[own] + np.arange(len(order)) - (counts.cumsum() - counts)[own]
    tokens, places = np.zeros(ends[-1], dtype=np.int64), np.empty_like(order)
    tokens[rows], places[order] = order // experts.config.active, rows
    x_PD = x_TD.index_select(0, torch.from_numpy(tokens))
    y_PD = torch.empty_like(x_PD)
    for number in counts.nonzero()[0].tolist():
        gate_up, down = experts.each[number]
        part = slice(ends[number] - padded[number], ends[number])
        y_PD[part] = linear(gated(x_PD[part], gate_up, clamped=experts.config.activation), down)
    y_TCD = y_PD.index_select(0, torch.from_numpy(places)).view(*chosen_TC.shape, -1)
    return (y_TCD.float() * weights_TC[..., None]).sum(1).to(x_TD.dtype)


def rms_norm(x_TD: Tensor, weight_D: Tensor, epsilon: float, consumer: AnyLinear | None = None) -> Tensor:
    """One pass if kernels were compiled, otherwise torch's."""
    h_TD = native.rms_norm(x_TD, weight_D, epsilon)
    return fused_rms_norm(x_TD, weight_D.shape, weight_D, epsilon) if h_TD is None else h_TD


def rotate(x_THE: Tensor, cos_TE: Tensor, sin_TE: Tensor) -> Tensor:
    """Three passes: swap halves, multiply, multiply-add."""
    half = x_THE.shape[-1] // 2
    swapped = torch.cat((x_THE[..., half:], x_THE[..., :half]), dim=-1)
    return torch.addcmul(x_THE * cos_TE[:, None], swapped, sin_TE[:, None])


draw = None


def greedy(logits_SV: Tensor) -> Tensor:
    """Argmax in three vectorised passes; torch's own is scalar for bf16 and eight times slower."""
    highest_S1 = logits_SV.amax(-1, keepdim=True)
    ids_S = torch.from_numpy((logits_SV == highest_S1).numpy().argmax(-1))
    return torch.where(highest_S1[:, 0].isfinite(), ids_S, NO_TOKEN)


def padded_tokens(tokens: int, weights_bytes: int) -> int:
    """The next of 1, 2, 4, 8, 16, ... 64, 96, 128, ...: oneDNN compiles kernels of some MB for each new number.

    Decodes of large weights are not padded: padding would cost more time, and the kernels are small in comparison.
    """
    if weights_bytes >= EXACT_TOKENS_FROM_BYTES and tokens <= 64:
        return tokens
    if tokens <= 8:
        return 1 << (tokens - 1).bit_length()
    step = 8 if tokens <= 64 else 32
    return -(-tokens // step) * step


def prepare(arrays: StepArrays, last_tokens: Tensor) -> Batch:
    """Views of the arrays, and the tables of the paged attention."""
    token_ids = torch.from_numpy(arrays.token_ids.astype(np.int64))
    decodes = arrays.decodes
    token_ids[:decodes] = last_tokens.index_select(0, torch.from_numpy(arrays.table_slots[:decodes]))
    page_table, sample_page_table = page_tables(arrays, arrays.pages)
    batch = Batch(
        token_ids=token_ids,
        positions=torch.from_numpy(arrays.positions),
        cache_slots=torch.from_numpy(arrays.cache_slots),
        page_table=page_table,
        samples=arrays.samples,
        sample_indices=torch.from_numpy(arrays.sample_indices),
        sample_slots=torch.from_numpy(arrays.sample_slots),
        sample_page_table=sample_page_table,
    )
    if not arrays.windowed:
        return batch
    page_table, sample_page_table = page_tables(arrays, arrays.window_pages)
    windowed = replace(
        batch,
        cache_slots=torch.from_numpy(arrays.window_slots),
        page_table=page_table,
        sample_page_table=sample_page_table,
    )
    return replace(batch, windowed=windowed)


def page_tables(arrays: StepArrays, pages: NDArray[np.int32]) -> tuple[PageTable, PageTable]:
    """Of all tokens, and of those that sample; ``pages``: those of ``arrays``, or those of layers with windows."""

    def table(pages_RP: NDArray[np.int32], lengths_R: NDArray[np.int32], starts: NDArray[np.int64]) -> PageTable:
        return PageTable(*map(torch.from_numpy, (pages_RP, lengths_R, starts.astype(np.int32))))

    # A token of padding is a sequence of one key in the dump page.
    tokens, sampled = int(arrays.chunk_starts[-1]), arrays.sampled
    padding = len(arrays.positions) - tokens
    dump_pages = np.full((padding, pages.shape[1]), DUMP_PAGE, dtype=np.int32)
    every = table(
        np.concatenate((pages, dump_pages)),
        np.concatenate((arrays.lengths, np.ones(padding, dtype=np.int32))),
        np.concatenate((np.arange(arrays.decodes), arrays.chunk_starts, tokens + 1 + np.arange(padding))),
    )
    return every, table(pages[sampled], arrays.lengths[sampled], np.arange(arrays.samples + 1))


def rotate_and_write(
    qkv_TN: Tensor,
    norms: tuple[Tensor, Tensor] | None,
    tables_LE: tuple[Tensor, Tensor],
    cache: LayerCache,
    batch: Batch,
    config: ModelConfig,
) -> Tensor:
    """One pass if kernels were compiled and keys are not rounded, otherwise several of torch."""
    if norms is None and not cache.round_to_fp8:
        q = native.rotate_and_write(
            qkv_TN, *tables_LE, batch.positions, batch.cache_slots, cache.k, cache.v, config.heads
        )
        if q is not None:
            return q
    heads, kv_heads = config.heads, config.kv_heads
    qkv = qkv_TN.view(len(qkv_TN), heads + 2 * kv_heads, config.head_dim)
    qk, v_TKE = torch.split(qkv, [heads + kv_heads, kv_heads], dim=1)
    if norms is not None:
        both = zip(torch.split(qk, [heads, kv_heads], dim=1), norms, strict=True)
        qk = torch.cat([rms_norm(x, weight_E, config.rms_norm_epsilon) for x, weight_E in both], dim=1)
    cos_TE, sin_TE = (table.index_select(0, batch.positions) for table in tables_LE)
    q_THE, k_TKE = torch.split(rotate(qk, cos_TE, sin_TE), [heads, kv_heads], dim=1)
    page_T, offset_T = batch.cache_slots.long() // cache.page_size, batch.cache_slots.long() % cache.page_size
    rows_TK = (page_T[:, None] * kv_heads + torch.arange(kv_heads)) * cache.page_size + offset_T[:, None]
    cache.write(cache.rounded(k_TKE, cache.k_scale), cache.rounded(v_TKE, cache.v_scale), rows_TK)
    return q_THE


def attention(
    q_THE: Tensor, cache: LayerCache, batch: Batch, consumer: AnyLinear, sinks_H: Tensor | None = None
) -> Tensor:
    """All tokens, each over the keys of its sequence up to its own."""
    return paged_attention(q_THE, cache, batch.page_table, sinks_H).view(len(q_THE), -1)


def sample_attention(
    q_SHE: Tensor, cache: LayerCache, batch: Batch, consumer: AnyLinear, sinks_H: Tensor | None = None
) -> Tensor:
    """The last token of each sequence that samples, over all its keys."""
    a_SHE = torch.zeros_like(q_SHE)
    a_SHE[: batch.samples] = paged_attention(q_SHE[: batch.samples], cache, batch.sample_page_table, sinks_H)
    return a_SHE.view(len(q_SHE), -1)


def paged_attention(q_THE: Tensor, cache: LayerCache, table: PageTable, sinks_H: Tensor | None = None) -> Tensor:
    """Compiled where there is a kernel that is faster, otherwise sequence by sequence.

    With a window or sinks as it is defined, a few queries at a time, without the pages before their windows.
    """
    plain = cache.window is None and sinks_H is None
    tokens_R = [slice(*bounds) for bounds in pairwise(table.starts.tolist())]
    others = list(range(len(tokens_R)))
    if plain and native.has_attention(q_THE.shape[1], cache.k):
        others, lengths_R = [], table.lengths_R
        if len(tokens_R) < len(q_THE) and not native.has_avx512():
            others = [at for at, one in enumerate(tokens_R) if one.stop - one.start >= TORCH_CHUNK_TOKENS]
            lengths_R = lengths_R.index_fill(0, torch.tensor(others, dtype=torch.int64), 0)  # no key, so no work
        out_THE = native.attention(q_THE, cache.k, cache.v, table.pages_RP, lengths_R, table.starts)
    else:
        out_THE = torch.empty_like(q_THE, memory_format=torch.contiguous_format)
    for at in others:
        pages, length, tokens = table.pages_RP[at], int(table.lengths_R[at]), tokens_R[at]
        if plain:
            own_pages = pages[: -(-length // cache.page_size)]
            out_THE[tokens] = chunk_attention(q_THE[tokens], *cache.read(own_pages, length))
            continue
        for start in range(tokens.start, tokens.stop, WINDOWED_QUERIES_ON_CPU):
            end = min(start + WINDOWED_QUERIES_ON_CPU, tokens.stop)
            seen = length - (tokens.stop - end)
            first = 0 if cache.window is None else max(0, seen - (end - start) - cache.window + 1) // cache.page_size
            k_CKE, v_CKE = cache.read(pages[first : -(-seen // cache.page_size)], seen - first * cache.page_size)
            out_THE[start:end] = reference.chunk_attention(q_THE[start:end], k_CKE, v_CKE, cache.window, sinks_H)
    return out_THE


def chunk_attention(q_THE: Tensor, k_CKE: Tensor, v_CKE: Tensor) -> Tensor:
    """Torch's flash attention: query t sees keys 0 .. C - T + t."""
    tokens, heads, head_dim = q_THE.shape
    keys, kv_heads, _ = k_CKE.shape
    group = heads // kv_heads
    q_KGTE = q_THE.view(tokens, kv_heads, group, head_dim).permute(1, 2, 0, 3)
    k_K1CE, v_K1CE = (side.transpose(0, 1)[:, None] for side in (k_CKE, v_CKE))
    if tokens == 1:  # the group as rows of one product reads each key once: up to ten times as fast in bf16
        out_KGTE = scaled_dot_product_attention(q_KGTE.transpose(1, 2), k_K1CE, v_K1CE).transpose(1, 2)
    else:
        k_KGCE, v_KGCE = (side.expand(-1, group, -1, -1) for side in (k_K1CE, v_K1CE))
        visible_TC = None if tokens == keys else torch.ones(tokens, keys, dtype=torch.bool).tril(keys - tokens)
        out_KGTE = scaled_dot_product_attention(
            q_KGTE, k_KGCE, v_KGCE, attn_mask=visible_TC, is_causal=visible_TC is None
        )
    return out_KGTE.permute(2, 0, 1, 3).reshape(tokens, heads, head_dim)
