"""The GPU back end: products through cuBLASLt, everything between them in Triton kernels, and on Hopper one in CUDA.

Linears know their number formats (``cuda_linear``, ``cuda_fp8``). An operation that computes the input of a linear gets
that linear as its consumer and writes the format that it takes, so that quantising needs no pass of its own.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any

import numpy as np
import torch
import triton
from numpy.typing import NDArray
from torch import Tensor

from megatoken.engine.batch import StepArrays
from megatoken.engine.cache import LayerCache
from megatoken.engine.config import ModelConfig
from megatoken.engine.ops import NO_TOKEN, Ranks, fused, paged_attention, prompt_attention, tokens
from megatoken.engine.ops.cuda_experts import Experts
from megatoken.engine.ops.cuda_linear import Linear
from megatoken.engine.schemes import LinearScheme

_ALIGNMENT = 4
"""In int32 elements: every part of the step's buffer starts at a multiple of 16 bytes."""


@dataclass(frozen=True, slots=True)
class Batch:
    """One step's tensors, see ``StepArrays``; int32 on the device unless said otherwise.

    ``lengths`` are of all sequences; the host keeps a copy, because launches depend on their maximum and sum.
    """

    token_ids: Tensor  # int64 [T]
    positions: Tensor
    cache_slots: Tensor
    decodes: int
    pages: Tensor
    lengths: Tensor
    host_lengths: NDArray[np.int32]
    chunk_starts: Tensor
    longest_chunk: int  # 0 without chunks
    longest_context: int  # of the chunks
    samples: int
    sample_indices: Tensor
    sample_slots: Tensor
    sample_pages: Tensor
    sample_lengths: Tensor
    sample_host_lengths: NDArray[np.int32]
    windowed: Batch | None  # the step in layers with windows, if these have pages of their own


def kernels() -> dict[str, Any]:
    """Versions of the compilers and libraries behind the operations."""
    versions = f"Triton {triton.__version__}, products of PyTorch {torch.__version__}"
    return {"kernels": versions, "why_no_kernels": None, "bf16_widened": False}


def padded_tokens(tokens: int, weights_bytes: int) -> int:
    """No padding: no kernel is compiled for a number of tokens."""
    return tokens


def keeps_packed(dtype: torch.dtype) -> bool:
    """Never: the weight is expanded when it is loaded."""
    return False


def pack_linear(weight: Any, bias_N: Tensor | None, scheme: LinearScheme) -> Linear:
    """The weight in the scheme's format. Raises CapacityError: the scheme's products cannot have these sides."""
    return scheme.cuda_linear(scheme.quantise(weight) if isinstance(weight, Tensor) else weight, bias_N)


def pack_gated(gate_up: list[tuple[Any, Tensor | None]], scheme: LinearScheme) -> Linear:
    """One matrix [2 F, D], gate first: one product reads the input once."""
    weights, biases = zip(*gate_up, strict=True)
    bias = None if biases[0] is None else torch.cat(biases)
    return pack_linear(scheme.stack(weights), bias, scheme).as_gated()


pack_experts = Experts.pack


def fix_input_scales(linears: Iterable[Linear]) -> int:
    """Set every input scale that is missing from the inputs of the steps so far; returns how many were missing."""
    return sum(linear.fix_input_scale() for linear in linears)


def prepare(arrays: StepArrays, last_tokens: Tensor) -> Batch:
    """All indices through one pinned buffer and one asynchronous copy."""
    parts = index_parts(arrays)
    return unpack(arrays, parts, pack(parts).to(last_tokens.device, non_blocking=True), last_tokens)


def index_parts(arrays: StepArrays) -> dict[str, NDArray[np.int32]]:
    """The arrays of a step that the device needs: two for the token ids, the others by their names in ``Batch``."""
    sampled = arrays.sampled
    parts = {
        "host_ids": arrays.token_ids,
        "table_slots": arrays.table_slots,
        "positions": arrays.positions,
        "cache_slots": arrays.cache_slots,
        "lengths": arrays.lengths,
        "chunk_starts": arrays.chunk_starts,
        "sample_lengths": arrays.lengths[sampled],
        "sample_indices": arrays.sample_indices,
        "sample_slots": arrays.sample_slots,
        "pages": arrays.pages,
        "sample_pages": arrays.pages[sampled],
    }
    if arrays.windowed:
        parts |= {
            "window_slots": arrays.window_slots,
            "window_pages": arrays.window_pages,
            "window_sample_pages": arrays.window_pages[sampled],
        }
    return parts


def pack(parts: Mapping[str, NDArray[np.int32]]) -> Tensor:
    """``index_parts`` in one buffer of pinned memory, int32."""
    starts = _part_starts(parts)
    host = torch.empty(starts[-1], dtype=torch.int32, pin_memory=True)
    view = host.numpy()
    for part, start in zip(parts.values(), starts, strict=False):
        view[start : start + part.size] = part.reshape(-1)
    return host


def unpack(arrays: StepArrays, parts: Mapping[str, NDArray[np.int32]], indices: Tensor, last_tokens: Tensor) -> Batch:
    """The step whose ``parts`` are packed in ``indices`` on the device."""
    views = {
        name: indices[start : start + part.size].view(part.shape)
        for (name, part), start in zip(parts.items(), _part_starts(parts), strict=False)
    }
    own = [views.pop(name) for name in ("window_slots", "window_pages", "window_sample_pages") if arrays.windowed]
    batch = Batch(
        token_ids=tokens.gather_tokens(views.pop("host_ids"), views.pop("table_slots"), last_tokens),
        decodes=arrays.decodes,
        host_lengths=arrays.lengths,
        longest_chunk=int(np.diff(arrays.chunk_starts).max(initial=0)),
        longest_context=int(arrays.lengths[arrays.decodes :].max(initial=0)),
        samples=arrays.samples,
        sample_host_lengths=arrays.lengths[arrays.sampled],
        windowed=None,
        **views,
    )
    if not own:
        return batch
    cache_slots, pages, sample_pages = own
    return replace(batch, windowed=replace(batch, cache_slots=cache_slots, pages=pages, sample_pages=sample_pages))


def _part_starts(parts: Mapping[str, NDArray[np.int32]]) -> list[int]:
    """Offset of each part in the packed step, in elements, and the end of the last."""
    return list(accumulate((-(-part.size // _ALIGNMENT) * _ALIGNMENT for part in parts.values()), initial=0))


def rms_norm(x_TD: Tensor, weight_D: Tensor, epsilon: float, consumer: Linear) -> Any:
    """One pass."""
    return consumer.normed(None, x_TD, weight_D, epsilon)


def linear(x_TD: Any, linear: Linear) -> Tensor:
    """bf16 [T, N]."""
    return linear.product(x_TD)


def linear_add_norm(
    x_TD: Any,
    linear: Linear,
    residual_TN: Tensor,
    weight_N: Tensor,
    epsilon: float,
    consumer: Linear,
    ranks: Ranks | None = None,
) -> tuple[Tensor, Any]:
    """A product, then sum, norm and quantisation in one pass; the residual is written in place."""
    if ranks is not None and ranks.shared is not None:
        shared, count = ranks.shared, len(x_TD)
        linear.product(x_TD, shared.products(count))
        return residual_TN, shared.add_rms_norm(count, residual_TN, weight_N, epsilon, consumer.device_scale)
    delta_TN = linear.product(x_TD)
    if ranks is not None:
        ranks.add(delta_TN)
    return residual_TN, consumer.normed(delta_TN, residual_TN, weight_N, epsilon)


def gated(x_TD: Any, gate_up: Linear, consumer: Linear) -> Any:
    """One product, then activation, product and quantisation in one pass, or all in one kernel."""
    return gate_up.gated(x_TD, consumer)


def rotate_and_write(
    qkv_TN: Tensor,
    norms: tuple[Tensor, Tensor] | None,
    tables_LE: tuple[Tensor, Tensor],
    cache: LayerCache,
    batch: Batch,
    config: ModelConfig,
) -> Tensor:
    """Rotation, norms and cache writes in one pass."""
    q_norm_E, k_norm_E = norms or (None, None)
    return fused.rotate_and_write(
        qkv_TN,
        *tables_LE,
        batch.positions,
        batch.cache_slots,
        cache.k,
        cache.v,
        q_norm_E=q_norm_E,
        k_norm_E=k_norm_E,
        epsilon=config.rms_norm_epsilon,
        k_scale=cache.k_scale,
        v_scale=cache.v_scale,
    )


def attention(q_THE: Tensor, cache: LayerCache, batch: Batch, consumer: Linear, sinks_H: Tensor | None = None) -> Any:
    """All decodes at once, then all prompt chunks at once, which may be empty decodes (``pad_step``)."""
    out_THE, out_scale = consumer.attention_output(q_THE)
    decodes = batch.decodes
    if decodes:
        _decode(
            q_THE[:decodes],
            cache,
            batch.pages[:decodes],
            batch.lengths[:decodes],
            batch.host_lengths[:decodes],
            out_THE[:decodes],
            out_scale,
            sinks_H,
        )
    if batch.longest_chunk:
        prompt_attention.chunk_attention(
            q_THE,
            cache.k,
            cache.v,
            batch.pages[decodes:],
            batch.chunk_starts,
            batch.lengths[decodes:],
            out_THE,
            softmax_scale=q_THE.shape[2] ** -0.5,
            longest_chunk=batch.longest_chunk,
            max_context=batch.longest_context,
            k_scale=cache.k_scale,
            v_scale=cache.v_scale,
            out_scale=out_scale,
            window=cache.window,
            sinks_H=sinks_H,
        )
    return consumer.attended(out_THE.view(len(out_THE), -1))


def sample_attention(
    q_SHE: Tensor, cache: LayerCache, batch: Batch, consumer: Linear, sinks_H: Tensor | None = None
) -> Any:
    """Each token sees its whole sequence, so all are decodes."""
    out_SHE, out_scale = consumer.attention_output(q_SHE)
    lengths = batch.sample_lengths
    _decode(q_SHE, cache, batch.sample_pages, lengths, batch.sample_host_lengths, out_SHE, out_scale, sinks_H)
    return consumer.attended(out_SHE.view(len(out_SHE), -1))


def _decode(
    q_BHE: Tensor,
    cache: LayerCache,
    pages_BW: Tensor,
    lengths_B: Tensor,
    host_lengths_B: NDArray[np.int32],
    out_BHE: Tensor,
    out_scale: float | None,
    sinks_H: Tensor | None,
) -> None:
    paged_attention.decode_attention(
        q_BHE,
        cache.k,
        cache.v,
        pages_BW,
        lengths_B,
        out_BHE,
        softmax_scale=q_BHE.shape[2] ** -0.5,
        max_length=int(host_lengths_B.max()),
        total_tokens=int(host_lengths_B.sum()),
        k_scale=cache.k_scale,
        v_scale=cache.v_scale,
        out_scale=out_scale,
        window=cache.window,
        sinks_H=sinks_H,
    )


draw = tokens.draw_rows


def greedy(logits_SV: Tensor) -> Tensor:
    """A NaN counts as the highest logit in ``argmax_rows``, so it is found too."""
    ids_S = tokens.argmax_rows(logits_SV)
    return torch.where(logits_SV.gather(1, ids_S[:, None])[:, 0].isfinite(), ids_S, NO_TOKEN)
