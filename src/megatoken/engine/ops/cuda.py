"""The CUDA back end: fp8 or bf16 products through cuBLASLt, everything between them in Triton kernels.

In fp8 a linear has one scale for its weight and one, fixed beforehand, for its input. Whatever computes that input is
told its consumer and writes e4m3 values, so no pass over memory is spent on quantising.

An input scale comes from the checkpoint or from ``fix_input_scales`` after some steps without: those measure.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate

import numpy as np
import torch
import triton
from numpy.typing import NDArray
from torch import Tensor

from megatoken.engine.batch import StepArrays
from megatoken.engine.cache import LayerCache
from megatoken.engine.config import ModelConfig, Precision
from megatoken.engine.ops import NO_TOKEN, Ranks, fused, paged_attention, prompt_attention, tokens
from megatoken.engine.quant import E4M3_MAX, Fp8Weight, quantise_tensor, stack, with_one_scale
from megatoken.errors import CapacityError

DECODE = paged_attention.DecodeConfig(e4m3_scores=True)
INPUT_MARGIN = 2.0
"""Room above the largest input that was measured. It costs nothing: e4m3 is as exact over 15 powers of two."""
_ALIGNMENT = 4
"""int32 elements: every part of the step's buffer starts at a multiple of 16 bytes."""


@dataclass(frozen=True, slots=True)
class InputScale:
    """Input of a linear is e4m3 of ``x / scale``: on the device for products, on the host for attention's launches."""

    device: Tensor  # fp32, one element
    value: float


@dataclass(slots=True)
class Linear:
    """Weight [N, D] in bf16, or in e4m3 with its scale; bias bf16 [N] or None.

    An fp8 linear without input scale takes bf16 and keeps ``largest_input``.
    """

    weight: Tensor
    bias: Tensor | None
    weight_scale: Tensor | None = None  # fp32, one element
    input_scale: InputScale | None = None
    largest_input: Tensor | None = None  # fp32, one element


@dataclass(frozen=True, slots=True)
class Batch:
    """One step's tensors, see ``StepArrays``; int32 on the device unless said otherwise.

    ``lengths`` are of all sequences; the host keeps a copy, because launches depend on the longest and on the sum.
    """

    token_ids: Tensor  # int64 [T]
    positions: Tensor
    cache_slots: Tensor
    decodes: int
    pages: Tensor
    lengths: Tensor
    host_lengths: NDArray[np.int32]
    chunk_rows: Tensor
    longest_chunk_rows: int  # 0 without chunks
    longest_context: int  # of the chunks
    samples: int
    sample_rows: Tensor
    sample_slots: Tensor
    sample_pages: Tensor
    sample_lengths: Tensor
    sample_host_lengths: NDArray[np.int32]


def kernels() -> str:
    """Versions of the compilers and libraries behind the operations."""
    return f"Triton {triton.__version__}, products of PyTorch {torch.__version__}"


def padded_rows(rows: int, weights_bytes: int) -> int:
    """As many: no kernel here is compiled for a number of rows, and ``attention`` leaves padding unwritten."""
    return rows


def pack_linear(weight_ND: Tensor | Fp8Weight, bias_N: Tensor | None, precision: Precision) -> Linear:
    """The weight as it is, or in e4m3 with one scale.

    Raises:
        CapacityError: an fp8 product cannot have these sides.
    """
    if precision == "fp8" and isinstance(weight_ND, Tensor):
        weight_ND = quantise_tensor(weight_ND)
    if isinstance(weight_ND, Tensor):
        return Linear(weight_ND, bias_N)
    check_sides(weight_ND.values_ND)
    weight_ND = with_one_scale(weight_ND)
    return fp8_linear(weight_ND.values_ND, weight_ND.scale_N1.item(), weight_ND.input_scale, bias_N)


def check_sides(values_ND: Tensor) -> None:
    """Raise CapacityError if no fp8 product has them."""
    if any(side % 16 for side in values_ND.shape):
        sides = " x ".join(map(str, values_ND.shape))
        raise CapacityError(f"a linear of {sides}: fp8 on a GPU needs multiples of 16; take bf16")


def pack_gated(gate_up: list[tuple[Tensor | Fp8Weight, Tensor | None]], precision: Precision) -> Linear:
    """One matrix [2 F, D], gate first: one product reads the input once."""
    weights, biases = zip(*gate_up, strict=True)
    bias = None if biases[0] is None else torch.cat(biases)
    return pack_linear(stack(weights), bias, precision)


def fp8_linear(
    values_ND: Tensor, weight_scale: float, input_scale: float | None, bias_N: Tensor | None = None
) -> Linear:
    """A linear of e4m3 values [N, D] that stand for ``values * weight_scale``; N and D multiples of 16.

    ``input_scale``: positive; inputs are e4m3 of ``x / input_scale``, so the largest is ``input_scale * 448``.
    """
    device = values_ND.device
    linear = Linear(values_ND, bias_N, torch.tensor(weight_scale, dtype=torch.float32, device=device))
    if input_scale is not None:
        linear.input_scale = _input_scale_of(input_scale, device)
    return linear


def fix_input_scales(linears: Iterable[Linear]) -> int:
    """Give every fp8 linear that has none its input scale, from what it has met so far; returns how many had none."""
    fixed = 0
    for linear in linears:
        if linear.weight_scale is not None and linear.input_scale is None and linear.largest_input is not None:
            largest = max(linear.largest_input.item(), 1e-6)
            linear.input_scale = _input_scale_of(INPUT_MARGIN * largest / E4M3_MAX, linear.weight.device)
            linear.largest_input = None
            fixed += 1
    return fixed


def _input_scale_of(value: float, device: torch.device) -> InputScale:
    return InputScale(torch.tensor([value], dtype=torch.float32, device=device), value)


def prepare(arrays: StepArrays, last_tokens: Tensor, cache: LayerCache, config: ModelConfig) -> Batch:
    """All indices through one pinned buffer and one copy that nobody waits for."""
    parts = index_parts(arrays)
    return unpack(arrays, parts, pack(parts).to(last_tokens.device, non_blocking=True), last_tokens)


def index_parts(arrays: StepArrays) -> list[NDArray[np.int32]]:
    """What of a step the device needs."""
    sampled = arrays.sampled
    return [
        arrays.token_ids,
        arrays.table_slots,
        arrays.positions,
        arrays.cache_slots,
        arrays.lengths,
        arrays.chunk_rows,
        arrays.lengths[sampled],
        arrays.sample_rows,
        arrays.sample_slots,
        arrays.pages,
        arrays.pages[sampled],
    ]


def pack(parts: Sequence[NDArray[np.int32]]) -> Tensor:
    """``index_parts`` in one buffer of pinned memory, int32."""
    starts = part_starts(parts)
    host = torch.empty(starts[-1], dtype=torch.int32, pin_memory=True)
    view = host.numpy()
    for part, start in zip(parts, starts, strict=False):
        view[start : start + part.size] = part.reshape(-1)
    return host


def unpack(arrays: StepArrays, parts: Sequence[NDArray[np.int32]], indices: Tensor, last_tokens: Tensor) -> Batch:
    """The step whose ``parts`` lie packed in ``indices`` on the device."""
    (
        host_ids,
        table_slots,
        positions,
        cache_slots,
        lengths,
        chunk_rows,
        sample_lengths,
        sample_rows,
        sample_slots,
        pages,
        sample_pages,
    ) = (
        indices[start : start + part.size].view(part.shape)
        for part, start in zip(parts, part_starts(parts), strict=False)
    )
    return Batch(
        token_ids=tokens.gather_tokens(host_ids, table_slots, last_tokens),
        positions=positions,
        cache_slots=cache_slots,
        decodes=arrays.decodes,
        pages=pages,
        lengths=lengths,
        host_lengths=arrays.lengths,
        chunk_rows=chunk_rows,
        longest_chunk_rows=int(np.diff(arrays.chunk_rows).max(initial=0)),
        longest_context=int(arrays.lengths[arrays.decodes :].max(initial=0)),
        samples=arrays.samples,
        sample_rows=sample_rows,
        sample_slots=sample_slots,
        sample_pages=sample_pages,
        sample_lengths=sample_lengths,
        sample_host_lengths=arrays.lengths[arrays.sampled],
    )


def part_starts(parts: Sequence[NDArray[np.int32]]) -> list[int]:
    """Of each part in the packed step, in elements, and the end of the last."""
    return list(accumulate((-(-part.size // _ALIGNMENT) * _ALIGNMENT for part in parts), initial=0))


def _input_scale(consumer: Linear | None) -> Tensor | None:
    return None if consumer is None or consumer.input_scale is None else consumer.input_scale.device


def rms_norm(x_TD: Tensor, weight_D: Tensor, epsilon: float, consumer: Linear | None = None) -> Tensor:
    """One pass, quantised for the consumer."""
    return fused.add_rms_norm(None, x_TD, weight_D, epsilon, _input_scale(consumer))


def linear(x_TD: Tensor, linear: Linear, out_TN: Tensor | None = None) -> Tensor:
    """bf16 [T, N], in ``out`` if there is one; ``x`` is in the linear's input format."""
    if linear.weight_scale is None:
        weight_DN = linear.weight.t()
        if linear.bias is None:
            return torch.mm(x_TD, weight_DN, out=out_TN)
        return torch.addmm(linear.bias, x_TD, weight_DN, out=out_TN)
    if linear.input_scale is None:
        x_TD, input_scale = _measured(x_TD, linear)
    else:
        input_scale = linear.input_scale.device
    return torch._scaled_mm(
        x_TD,
        linear.weight.t(),
        input_scale,
        linear.weight_scale,
        bias=linear.bias,
        out_dtype=torch.bfloat16,
        use_fast_accum=True,
        out=out_TN,
    )


def _measured(x_TD: Tensor, linear: Linear) -> tuple[Tensor, Tensor]:
    """e4m3 values and their scale by the largest of this step, which the linear remembers."""
    largest = x_TD.abs().amax().float()
    linear.largest_input = largest if linear.largest_input is None else torch.maximum(linear.largest_input, largest)
    scale = (largest / E4M3_MAX).clamp_min(1e-12).view(1)
    return (x_TD.float() / scale).to(torch.float8_e4m3fn), scale


def linear_add_norm(
    x_TD: Tensor,
    linear_: Linear,
    residual_TN: Tensor,
    weight_N: Tensor,
    epsilon: float,
    consumer: Linear,
    ranks: Ranks | None = None,
) -> tuple[Tensor, Tensor]:
    """A product, then sum, norm and quantisation in one pass; the residual is written in place."""
    scale = _input_scale(consumer)
    if ranks is not None and ranks.shared is not None:
        linear(x_TD, linear_, ranks.shared.products(len(x_TD)))
        return residual_TN, ranks.shared.add_rms_norm(len(x_TD), residual_TN, weight_N, epsilon, scale)
    delta_TN = linear(x_TD, linear_)
    if ranks is not None:
        ranks.add(delta_TN)
    return residual_TN, fused.add_rms_norm(delta_TN, residual_TN, weight_N, epsilon, scale)


def gated(x_TD: Tensor, gate_up: Linear, consumer: Linear) -> Tensor:
    """One product, then activation, product and quantisation in one pass."""
    return fused.silu_mul(linear(x_TD, gate_up), _input_scale(consumer))


def rotate_and_write(
    qkv_TN: Tensor,
    norms: tuple[Tensor, Tensor] | None,
    tables_LE: tuple[Tensor, Tensor],
    cache: LayerCache,
    batch: Batch,
    config: ModelConfig,
) -> Tensor:
    """One pass."""
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


def _empty_output(q_THE: Tensor, consumer: Linear) -> tuple[Tensor, float | None]:
    scale = consumer.input_scale
    dtype = q_THE.dtype if scale is None else torch.float8_e4m3fn
    return torch.empty(q_THE.shape, dtype=dtype, device=q_THE.device), None if scale is None else scale.value


def attention(q_THE: Tensor, cache: LayerCache, batch: Batch, consumer: Linear) -> Tensor:
    """The decode rows at once, then all prompt chunks at once, which may be empty decodes (``pad_step``)."""
    out_THE, out_scale = _empty_output(q_THE, consumer)
    decodes, softmax_scale = batch.decodes, q_THE.shape[2] ** -0.5
    if decodes:
        lengths = batch.host_lengths[:decodes]
        paged_attention.decode_attention(
            q_THE[:decodes],
            cache.k,
            cache.v,
            batch.pages[:decodes],
            batch.lengths[:decodes],
            out_THE[:decodes],
            softmax_scale=softmax_scale,
            max_length=int(lengths.max()),
            total_tokens=int(lengths.sum()),
            k_scale=cache.k_scale,
            v_scale=cache.v_scale,
            out_scale=out_scale,
            config=DECODE,
        )
    if batch.longest_chunk_rows:
        prompt_attention.chunk_attention(
            q_THE,
            cache.k,
            cache.v,
            batch.pages[decodes:],
            batch.chunk_rows,
            batch.lengths[decodes:],
            out_THE,
            softmax_scale=softmax_scale,
            max_rows=batch.longest_chunk_rows,
            max_context=batch.longest_context,
            k_scale=cache.k_scale,
            v_scale=cache.v_scale,
            out_scale=out_scale,
        )
    return out_THE.view(len(out_THE), -1)


def sample_attention(q_SHE: Tensor, cache: LayerCache, batch: Batch, consumer: Linear) -> Tensor:
    """Each row sees its whole sequence, so all are decodes."""
    out_SHE, out_scale = _empty_output(q_SHE, consumer)
    lengths = batch.sample_host_lengths
    paged_attention.decode_attention(
        q_SHE,
        cache.k,
        cache.v,
        batch.sample_pages,
        batch.sample_lengths,
        out_SHE,
        softmax_scale=q_SHE.shape[2] ** -0.5,
        max_length=int(lengths.max()),
        total_tokens=int(lengths.sum()),
        k_scale=cache.k_scale,
        v_scale=cache.v_scale,
        out_scale=out_scale,
        config=DECODE,
    )
    return out_SHE.view(len(out_SHE), -1)


def greedy(logits_SV: Tensor) -> Tensor:
    """Where a logit is NaN, ``argmax_rows`` finds that one."""
    ids_S = tokens.argmax_rows(logits_SV)
    return torch.where(logits_SV.gather(1, ids_S[:, None])[:, 0].isfinite(), ids_S, NO_TOKEN)
