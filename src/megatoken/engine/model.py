"""The Llama family. Everything arrives as an argument; shape letters as in ``ops``.

Llama 1 to 3.3, Mistral, Qwen2 and Qwen3 differ here only in their optional tensors; Mixtral and Qwen3-MoE have mixtures
of experts where the others have one feed-forward network, and gpt-oss also windows and sinks in its attention.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from megatoken.engine.cache import LayerCache
from megatoken.engine.config import ExpertsConfig, ModelConfig, RopeConfig
from megatoken.engine.ops import Batch, Ops, Ranks
from megatoken.engine.process_memory import return_freed_memory
from megatoken.engine.quantized_source import QuantizedSource
from megatoken.engine.schemes import LinearScheme


class WeightSource(Protocol):
    """A source of tensors: a checkpoint or a random generator. Names are Hugging Face's."""

    config: ModelConfig

    @property
    def quantized(self) -> QuantizedSource | None:
        """The quantised linears; None if there are none."""

    def read(self, name: str, dtype: torch.dtype, device: torch.device) -> Tensor:
        """A fresh tensor on ``device``; a quantised one is multiplied out."""


@dataclass(frozen=True, slots=True)
class LayerWeights:
    """One decoder layer; the linears are in the back end's packed form. ``cache_scales``: of fp8 keys and of values.

    A layer has ``experts``, or ``gate_up`` and ``down``; the others are None.
    """

    input_norm_D: Tensor
    qkv: Any
    qk_norms_E: tuple[Tensor, Tensor] | None
    sinks_H: Tensor | None
    output: Any
    post_norm_D: Tensor
    gate_up: Any
    down: Any
    experts: Any
    cache_scales: tuple[float, float]


@dataclass(frozen=True, slots=True)
class Weights:
    """The whole model. ``rotary_LE``: cosine and sine for every position.

    A rank that shares them has columns of the embedding, [V, D / ranks], and rows of the head, [V / ranks, D].
    """

    embedding_VD: Tensor
    layers: list[LayerWeights]
    norm_D: Tensor
    head: Any
    rotary_LE: tuple[Tensor, Tensor]


def load_weights(
    source: WeightSource, ops: Ops, scheme: LinearScheme, max_length: int, device: torch.device
) -> Weights:
    """Read and pack tensor by tensor, so that the peak is the packed model and one matrix.

    The layers' linears are quantised unless the scheme keeps the form that they are stored in; embedding, norms and
    head are plain.
    """
    config = source.config
    stored = source.quantized
    dtype = scheme.activation_dtype

    def tensor(name: str) -> Tensor:
        return source.read(name, dtype, device)

    def weight(part: str) -> Any:
        name = f"{part}.weight"
        if stored is not None:
            if (kept := stored.read(name, scheme, device)) is not None:
                return kept
            if ops.keeps_packed(dtype) and (packed := stored.four_bit(name)) is not None:
                return packed
        return tensor(name)

    def read(part: str, bias: bool) -> tuple[Any, Tensor | None]:
        return weight(part), tensor(f"{part}.bias") if bias else None

    def linear(part: str, bias: bool) -> Any:
        return ops.pack_linear(*read(part, bias), scheme)

    def qkv(attention: str) -> Any:
        parts = [f"{attention}.{part}_proj" for part in "qkv"]
        bias = torch.cat([tensor(f"{part}.bias") for part in parts]) if config.qkv_bias else None
        return ops.pack_linear(scheme.stack([weight(part) for part in parts]), bias, scheme)

    def experts(layer: int, mixture: ExpertsConfig) -> Any:
        names = (mixture.names(layer, expert) for expert in range(mixture.count))
        each = ([read(part, mixture.biases) for part in parts] for parts in names)
        router_XD = tensor(f"{mixture.router(layer)}.weight")
        bias_X = tensor(f"{mixture.router(layer)}.bias") if mixture.biases else None
        return ops.pack_experts((router_XD, bias_X), each, mixture, scheme)

    def layer(number: int) -> LayerWeights:
        prefix = f"model.layers.{number}"
        attention, mlp = f"{prefix}.self_attn", f"{prefix}.mlp"
        mixture = config.experts if config.experts is not None and number in config.experts.layers else None
        return LayerWeights(
            input_norm_D=tensor(f"{prefix}.input_layernorm.weight"),
            qkv=qkv(attention),
            qk_norms_E=(
                tensor(f"{attention}.q_norm.weight"),
                tensor(f"{attention}.k_norm.weight"),
            )
            if config.qk_norm
            else None,
            sinks_H=tensor(f"{attention}.sinks").float() if config.sinks else None,
            output=linear(f"{attention}.o_proj", config.output_bias),
            post_norm_D=tensor(f"{prefix}.post_attention_layernorm.weight"),
            gate_up=ops.pack_gated([read(f"{mlp}.{part}_proj", config.mlp_bias) for part in ("gate", "up")], scheme)
            if mixture is None
            else None,
            down=linear(f"{mlp}.down_proj", config.mlp_bias) if mixture is None else None,
            experts=None if mixture is None else experts(number, mixture),
            cache_scales=stored.cache_scales(number) if stored is not None and scheme.fp8_cache else (1.0, 1.0),
        )

    embedding_VD = tensor("model.embed_tokens.weight")
    head_VD = embedding_VD if config.tied_embeddings else tensor("lm_head.weight")
    head = ops.pack_linear(head_VD, None, scheme.head)
    layers = []
    for number in range(config.layers):
        layers.append(layer(number))
        return_freed_memory()
    cos_LE, sin_LE = rotary_tables(config.rope, config.head_dim, max_length)
    return Weights(
        embedding_VD=embedding_VD,
        layers=layers,
        norm_D=tensor("model.norm.weight"),
        head=head,
        rotary_LE=(cos_LE.to(device, dtype), sin_LE.to(device, dtype)),
    )


def rotary_tables(rope: RopeConfig, head_dim: int, max_length: int) -> tuple[Tensor, Tensor]:
    """Cosine and signed sine, fp32 [max_length, head_dim], in Hugging Face's half-split layout.

    ``llama3`` scaling keeps short wavelengths, divides the frequency of long ones by ``factor`` and blends between, by
    turns within the original context (Llama 3.1 release); ``yarn`` blends by dimension (Peng et al., 2023).
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
    elif rope.scaling == "yarn":
        fastest, slowest = (
            head_dim * math.log(rope.original_max_positions / (turns * 2 * math.pi)) / (2 * math.log(rope.theta))
            for turns in (rope.high_frequency_factor, rope.low_frequency_factor)
        )
        if rope.truncated:
            fastest, slowest = math.floor(fastest), math.ceil(slowest)
        fastest, slowest = max(fastest, 0), min(slowest, head_dim - 1)
        width = slowest - fastest or 0.001
        blend = 1 - ((torch.arange(head_dim // 2).float() - fastest) / width).clamp(0.0, 1.0)
        frequency = (1 - blend) * frequency / rope.factor + blend * frequency
    angle = torch.outer(torch.arange(max_length).float(), frequency)
    cos, sin = angle.cos() * rope.attention_factor, angle.sin() * rope.attention_factor
    return torch.cat((cos, cos), dim=-1), torch.cat((-sin, sin), dim=-1)


def forward(
    weights: Weights,
    config: ModelConfig,
    ops: Ops,
    cache: list[LayerCache],
    batch: Batch,
    ranks: Ranks | None = None,
) -> Tensor:
    """One step: logits [S, V] of the tokens that sample, in the activations' dtype. Writes the cache.

    ``ranks``: the ranks that share the model. With shared memory each keeps its part of the residual stream's tokens.
    """
    h_SD = hidden_states(weights, config, ops, cache, batch, ranks)
    return logits(weights, config, ops, h_SD, batch.samples, ranks)


def logits(
    weights: Weights, config: ModelConfig, ops: Ops, h_SD: Tensor, samples: int, ranks: Ranks | None = None
) -> Tensor:
    """Logits [``samples``, V] of the first inputs of the head, which may be padded."""
    if not samples:
        return h_SD.new_empty(0, config.vocabulary_size)
    return _whole(ops.linear(h_SD, weights.head)[:samples], config, ranks)


def _whole(x_TN: Tensor, config: ModelConfig, ranks: Ranks | None) -> Tensor:
    return x_TN if ranks is None or config.vocabulary_ranks == 1 else ranks.all_columns(x_TN)


def hidden_states(
    weights: Weights,
    config: ModelConfig,
    ops: Ops,
    cache: list[LayerCache],
    batch: Batch,
    ranks: Ranks | None = None,
    *,
    every_token: bool = False,
) -> Tensor:
    """One step without the head: its inputs [S, D], padded, of the tokens that sample. Writes the cache.

    With ``every_token`` inputs [T, D] of all tokens; in shared memory they are valid until the next step.
    """
    epsilon, shared = config.rms_norm_epsilon, None if ranks is None else ranks.shared
    x_TD = _whole(weights.embedding_VD.index_select(0, batch.token_ids), config, ranks)
    h_TD = ops.rms_norm(x_TD, weights.layers[0].input_norm_D, epsilon, weights.layers[0].qkv)
    if shared is not None:
        x_TD = shared.keep(x_TD)
    following = [(layer.input_norm_D, layer.qkv) for layer in weights.layers[1:]] + [(weights.norm_D, weights.head)]
    for layer, layer_cache, (next_norm_D, consumer) in zip(weights.layers, cache, following, strict=True):
        paged = batch if layer_cache.window is None else batch.windowed or batch
        qkv_TN = ops.linear(h_TD, layer.qkv)
        q_THE = ops.rotate_and_write(qkv_TN, layer.qk_norms_E, weights.rotary_LE, layer_cache, paged, config)
        if every_token or consumer is not weights.head:
            a_TD = ops.attention(q_THE, layer_cache, paged, layer.output, layer.sinks_H)
        elif batch.samples:
            # After its keys and values, the last layer matters only for tokens that sample.
            if shared is not None:
                x_TD = shared.select(batch.sample_indices, len(batch.token_ids))
            else:
                x_TD = x_TD.index_select(0, batch.sample_indices)
            q_SHE = q_THE.index_select(0, batch.sample_indices)
            a_TD = ops.sample_attention(q_SHE, layer_cache, paged, layer.output, layer.sinks_H)
        else:
            return x_TD.new_empty(0, config.hidden_size)
        first, last = layer.gate_up or layer.experts, layer.down or layer.experts
        x_TD, h_TD = ops.linear_add_norm(a_TD, layer.output, x_TD, layer.post_norm_D, epsilon, first, ranks)
        if layer.gate_up is not None:
            h_TD = ops.gated(h_TD, layer.gate_up, layer.down)
        x_TD, h_TD = ops.linear_add_norm(h_TD, last, x_TD, next_norm_D, epsilon, consumer, ranks)
    assert isinstance(h_TD, Tensor)  # the head's inputs are not quantised
    return h_TD
