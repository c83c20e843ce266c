"""The Llama family, once. Everything arrives as an argument; shape letters as in ``ops``.

Llama 1 to 3.3, Mistral, Qwen2 and Qwen3 differ here only by which of the optional tensors are present.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from megatoken.engine.batch import Batch
from megatoken.engine.cache import ACTIVATION_DTYPE, LayerCache
from megatoken.engine.config import ModelConfig, Precision, RopeConfig
from megatoken.engine.memory import return_freed_memory
from megatoken.engine.ops import Ops


class WeightSource(Protocol):
    """Where tensors come from: a checkpoint or a random generator. Names are Hugging Face's."""

    config: ModelConfig

    def read(self, name: str, dtype: torch.dtype) -> Tensor:
        """A fresh tensor."""


@dataclass(frozen=True, slots=True)
class LayerWeights:
    """One decoder layer; the linears in the back end's packed form."""

    input_norm_D: Tensor
    qkv: Any
    q_norm_E: Tensor | None
    k_norm_E: Tensor | None
    output: Any
    post_norm_D: Tensor
    gate: Any
    up: Any
    down: Any


@dataclass(frozen=True, slots=True)
class Weights:
    """The whole model. ``cos_LE`` and ``sin_LE`` are the rotary tables for every position."""

    embedding_VD: Tensor
    layers: list[LayerWeights]
    norm_D: Tensor
    head: Any
    cos_LE: Tensor
    sin_LE: Tensor


def load_weights(source: WeightSource, ops: Ops, precision: Precision, max_length: int) -> Weights:
    """Read and pack tensor by tensor, so that the peak is the packed model and one matrix.

    In fp8 the layers' linears are quantised; embedding, norms and head stay bf16.
    """
    config = source.config
    dtype = ACTIVATION_DTYPE[precision]

    def linear(parts: list[str], bias: bool, kind: Precision = precision) -> Any:
        weights = [source.read(f"{part}.weight", dtype) for part in parts]
        biases = [source.read(f"{part}.bias", dtype) for part in parts] if bias else None
        weight = weights[0] if len(weights) == 1 else torch.cat(weights)
        del weights
        return ops.pack_linear(weight, torch.cat(biases) if biases else None, kind)

    def layer(prefix: str) -> LayerWeights:
        attention, mlp = f"{prefix}.self_attn", f"{prefix}.mlp"
        return_freed_memory()
        return LayerWeights(
            input_norm_D=source.read(f"{prefix}.input_layernorm.weight", dtype),
            qkv=linear([f"{attention}.{part}_proj" for part in "qkv"], config.qkv_bias),
            q_norm_E=source.read(f"{attention}.q_norm.weight", dtype) if config.qk_norm else None,
            k_norm_E=source.read(f"{attention}.k_norm.weight", dtype) if config.qk_norm else None,
            output=linear([f"{attention}.o_proj"], config.output_bias),
            post_norm_D=source.read(f"{prefix}.post_attention_layernorm.weight", dtype),
            gate=linear([f"{mlp}.gate_proj"], config.mlp_bias),
            up=linear([f"{mlp}.up_proj"], config.mlp_bias),
            down=linear([f"{mlp}.down_proj"], config.mlp_bias),
        )

    embedding_VD = source.read("model.embed_tokens.weight", dtype)
    head_precision: Precision = "bf16" if precision == "fp8" else precision
    if config.tied_embeddings:
        head = ops.pack_linear(embedding_VD, None, head_precision)
    else:
        head = linear(["lm_head"], False, head_precision)
    cos_LE, sin_LE = rotary_tables(config.rope, config.head_dim, max_length)
    return Weights(
        embedding_VD=embedding_VD,
        layers=[layer(f"model.layers.{number}") for number in range(config.layers)],
        norm_D=source.read("model.norm.weight", dtype),
        head=head,
        cos_LE=cos_LE.to(dtype),
        sin_LE=sin_LE.to(dtype),
    )


def rotary_tables(rope: RopeConfig, head_dim: int, max_length: int) -> tuple[Tensor, Tensor]:
    """Cosine and signed sine, fp32 [max_length, head_dim], by Hugging Face's half-split layout.

    ``llama3`` scaling keeps short wavelengths, divides long ones by ``factor`` and blends between (Llama 3.1 release).
    """
    exponent = torch.arange(0, head_dim, 2, dtype=torch.int64).float() / head_dim
    frequency = 1.0 / (rope.theta**exponent)
    if rope.scaling == "linear":
        frequency = frequency / rope.factor
    elif rope.scaling == "llama3":
        wavelength = 2 * math.pi / frequency
        turns = rope.original_max_positions / wavelength
        blend = (turns - rope.low_frequency_factor) / (rope.high_frequency_factor - rope.low_frequency_factor)
        blend = blend.clamp(0.0, 1.0)
        frequency = (1 - blend) * frequency / rope.factor + blend * frequency
    angle = torch.outer(torch.arange(max_length).float(), frequency)
    cos, sin = angle.cos(), angle.sin()
    return torch.cat((cos, cos), dim=-1), torch.cat((-sin, sin), dim=-1)


def forward(weights: Weights, config: ModelConfig, ops: Ops, cache: list[LayerCache], batch: Batch) -> Tensor:
    """One step: logits [S, V] of the rows that sample, in the activations' dtype. Writes the cache."""
    heads, kv_heads, head_dim, epsilon = config.heads, config.kv_heads, config.head_dim, config.rms_norm_epsilon
    x_TD = weights.embedding_VD.index_select(0, batch.token_ids)
    cos_TE = weights.cos_LE.index_select(0, batch.positions)
    sin_TE = weights.sin_LE.index_select(0, batch.positions)
    for layer, layer_cache in zip(weights.layers, cache, strict=True):
        h_TD = ops.rms_norm(x_TD, layer.input_norm_D, epsilon)
        qkv = ops.linear(h_TD, layer.qkv).view(len(x_TD), heads + 2 * kv_heads, head_dim)
        qk, v_TKE = torch.split(qkv, [heads + kv_heads, kv_heads], dim=1)
        if layer.q_norm_E is not None and layer.k_norm_E is not None:
            q, k = torch.split(qk, [heads, kv_heads], dim=1)
            q = ops.rms_norm(q, layer.q_norm_E, epsilon)
            qk = torch.cat((q, ops.rms_norm(k, layer.k_norm_E, epsilon)), dim=1)
        q_THE, k_TKE = torch.split(ops.rotate(qk, cos_TE, sin_TE), [heads, kv_heads], dim=1)
        k_TKE, v_TKE = layer_cache.rounded(k_TKE), layer_cache.rounded(v_TKE)
        layer_cache.write(k_TKE, v_TKE, batch.cache_rows_TK)

        if layer is weights.layers[-1]:
            # Beyond the cache, only rows that sample matter now, and each sees its whole sequence: all decode.
            if not batch.samples:
                return x_TD.new_empty(0, config.vocabulary_size)
            x_TD = x_TD.index_select(0, batch.sample_rows)
            a_THE = q_THE.new_zeros(len(x_TD), heads, head_dim)
            sampled_q = q_THE.index_select(0, batch.sample_rows[: batch.samples])
            a_THE[: batch.samples] = ops.decode_attention(sampled_q, layer_cache, batch.sample_index)
        else:
            a_THE = attend(q_THE, k_TKE, v_TKE, ops, layer_cache, batch)
        x_TD = ops.linear_add(a_THE.reshape(len(x_TD), heads * head_dim), layer.output, x_TD)
        h_TD = ops.rms_norm(x_TD, layer.post_norm_D, epsilon)
        x_TD = ops.linear_add(ops.gated(h_TD, layer.gate, layer.up), layer.down, x_TD)
    return ops.linear(ops.rms_norm(x_TD, weights.norm_D, epsilon), weights.head)[: batch.samples]


def attend(q_THE: Tensor, k_TKE: Tensor, v_TKE: Tensor, ops: Ops, cache: LayerCache, batch: Batch) -> Tensor:
    """Decode rows together, prompt chunks one by one; a prompt's first chunk finds its keys in the step itself."""
    if batch.decodes == len(q_THE):
        return ops.decode_attention(q_THE, cache, batch.decode_index)
    a_THE = torch.zeros_like(q_THE, memory_format=torch.contiguous_format)
    if batch.decodes:
        a_THE[: batch.decodes] = ops.decode_attention(q_THE[: batch.decodes], cache, batch.decode_index)
    for chunk in batch.chunks:
        rows = slice(chunk.first_row, chunk.first_row + chunk.rows)
        if chunk.pages is None:
            k, v = k_TKE[rows], v_TKE[rows]
        else:
            k, v = cache.read(chunk.pages, chunk.context)
        a_THE[rows] = ops.chunk_attention(q_THE[rows], k, v)
    return a_THE
