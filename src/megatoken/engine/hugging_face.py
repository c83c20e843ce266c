"""``config.json`` of Hugging Face as a ``ModelConfig``: which architectures there are, and what absent keys mean."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path

from megatoken.engine.config import (
    ClampedSwiglu,
    ExpertsConfig,
    ModelConfig,
    RopeConfig,
    end_token_ids,
    gpt_oss_experts,
    model_name,
)
from megatoken.engine.json_keys import LARGEST_INTEGER, Keys, is_integer

ARCHITECTURES = (
    *("LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM"),
    *("MixtralForCausalLM", "Qwen3MoeForCausalLM", "GptOssForCausalLM"),
)

_LARGEST_LAYERS = 10_000
_DEFAULT_EXPERTS = {"MixtralForCausalLM": (8, 2), "Qwen3MoeForCausalLM": (128, 8), "GptOssForCausalLM": (128, 4)}
"""Of a layer, and of these the ones that compute a token."""
_DEFAULT_KV_HEADS = {
    **{"MistralForCausalLM": 8, "Qwen2ForCausalLM": 32, "Qwen3ForCausalLM": 32},
    **{"MixtralForCausalLM": 8, "Qwen3MoeForCausalLM": 4, "GptOssForCausalLM": 8},
}
_DEFAULT_EPSILON = {"MixtralForCausalLM": 1e-5, "GptOssForCausalLM": 1e-5}
_DEFAULT_THETA = {"MixtralForCausalLM": 1e6, "GptOssForCausalLM": 150_000.0}
_DEFAULT_HEAD_DIM = {"Qwen3ForCausalLM": 128, "GptOssForCausalLM": 64}


def model_config(values: Mapping[str, object], source: Path) -> ModelConfig:
    """Map a Hugging Face ``config.json`` to a model shape.

    A sliding attention window equals full attention only while the context fits into it, so it caps
    ``max_positions``. Absent keys have the defaults of transformers 5, some of which depend on the architecture.

    Args:
        values: The parsed file. Rotary keys are read as transformers 5 writes them (``rope_parameters``) and as
            older releases did (``rope_theta`` with ``rope_scaling``).
        source: Path of the file, for messages; its folder names the model, except that of ``reference``.

    Raises:
        CheckpointError: A key is missing, of the wrong type, contradicts another or asks for something this
            engine does not compute. The message names file and key.
    """
    keys = Keys(values, source)
    architecture = _architecture(keys)
    if keys.get("hidden_act", "silu") != "silu":
        raise keys.refuse("hidden_act", "only silu is supported")

    hidden_size = keys.integer("hidden_size")
    heads = keys.integer("num_attention_heads")
    default_kv_heads = _DEFAULT_KV_HEADS.get(architecture, heads) if keys.absent("num_key_value_heads") else heads
    kv_heads = keys.integer("num_key_value_heads", default_kv_heads)
    if heads % kv_heads:
        raise keys.refuse("num_key_value_heads", f"it must divide num_attention_heads ({heads})")
    default_head_dim = _DEFAULT_HEAD_DIM.get(architecture, hidden_size // heads)
    if keys.get("head_dim") is None and architecture not in _DEFAULT_HEAD_DIM and hidden_size % heads:
        raise keys.refuse("num_attention_heads", f"without head_dim it must divide hidden_size ({hidden_size})")
    head_dim = keys.integer("head_dim", default_head_dim)
    if head_dim % 2:
        raise keys.refuse("head_dim", f"rotary positions need an even head size, not {head_dim}")

    max_positions, vocabulary_size = keys.integer("max_position_embeddings"), keys.integer("vocab_size")
    llama, qwen3 = architecture == "LlamaForCausalLM", architecture.startswith("Qwen3")
    gpt_oss = architecture == "GptOssForCausalLM"
    window = _attention_window(keys, architecture)
    layers = keys.integer("num_hidden_layers", largest=_LARGEST_LAYERS)
    attention_bias = (llama or qwen3 or gpt_oss) and keys.boolean("attention_bias", gpt_oss)
    return ModelConfig(
        name=model_name(source.parent.resolve()),
        hidden_size=hidden_size,
        intermediate_size=keys.integer("intermediate_size"),
        layers=layers,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        vocabulary_size=vocabulary_size,
        max_positions=min(max_positions, window),
        rms_norm_epsilon=keys.number("rms_norm_eps", _DEFAULT_EPSILON.get(architecture, 1e-6)),
        rope=_rope(keys, max_positions, architecture),
        tied_embeddings=keys.boolean("tie_word_embeddings"),
        qkv_bias=attention_bias or architecture == "Qwen2ForCausalLM",
        output_bias=attention_bias,
        mlp_bias=llama and keys.boolean("mlp_bias"),
        qk_norm=qwen3,
        end_token_ids=end_token_ids(values, source, vocabulary_size),
        sliding_window=window if window < max_positions else None,
        experts=_experts(keys, architecture, layers),
        windows=_windows(keys, layers) if gpt_oss else (),
        sinks=gpt_oss,
    )


def _architecture(keys: Keys) -> str:
    """The first of ``ARCHITECTURES`` that the file names."""
    named = keys.get("architectures")
    if isinstance(named, list):
        for architecture in ARCHITECTURES:
            if architecture in named:
                return architecture
    raise keys.refuse("architectures", f"supported are {', '.join(ARCHITECTURES)}")


def _experts(keys: Keys, architecture: str, layers: int) -> ExpertsConfig | None:
    """The mixtures of experts; None if every layer is dense."""
    if architecture not in _DEFAULT_EXPERTS:
        return None
    default_count, default_active = _DEFAULT_EXPERTS[architecture]
    count = keys.integer("num_local_experts", keys.integer("num_experts", default_count))
    active = keys.integer("num_experts_per_tok", keys.integer("experts_per_token", default_active))
    if active > count:
        raise keys.refuse("num_experts_per_tok", f"the model has {count} experts")
    if architecture == "GptOssForCausalLM":
        activation = ClampedSwiglu(keys.number("swiglu_alpha", 1.702), keys.number("swiglu_limit", 7.0))
        return gpt_oss_experts(count, active, keys.integer("intermediate_size"), layers, activation)
    if architecture == "MixtralForCausalLM":
        width = keys.integer("intermediate_size")
        return ExpertsConfig(count, active, width, True, tuple(range(layers)), "block_sparse_moe", ("w1", "w3", "w2"))
    dense = keys.get("mlp_only_layers") or []
    if not isinstance(dense, list) or not all(is_integer(number, 0, layers - 1) for number in dense):
        raise keys.refuse("mlp_only_layers", f"expected a list of layers, 0 to {layers - 1}")
    step = keys.integer("decoder_sparse_step", 1)
    sparse = tuple(number for number in range(step - 1, layers, step) if number not in dense)
    if not sparse:
        return None
    width = keys.integer("moe_intermediate_size", 768)
    return ExpertsConfig(count, active, width, keys.boolean("norm_topk_prob"), sparse)


def _attention_window(keys: Keys, architecture: str) -> int:
    """Positions up to which the model's attention is full attention."""
    if architecture in ("LlamaForCausalLM", "GptOssForCausalLM") or (
        architecture.startswith("Qwen") and not keys.boolean("use_sliding_window")
    ):
        return LARGEST_INTEGER
    if keys.get("sliding_window", None if architecture == "MixtralForCausalLM" else 4096) is None:
        return LARGEST_INTEGER
    return keys.integer("sliding_window", 4096)


def _windows(keys: Keys, layers: int) -> tuple[int | None, ...]:
    """Of each layer: by default every other one has a window, the first among them."""
    kinds = keys.get("layer_types")
    if kinds is None:
        kinds = ["full_attention" if layer % 2 else "sliding_attention" for layer in range(layers)]
    if not isinstance(kinds, list) or len(kinds) != layers:
        raise keys.refuse("layer_types", f"expected a list of {layers} kinds of attention")
    if unknown := [kind for kind in kinds if kind not in ("full_attention", "sliding_attention")]:
        raise keys.refuse("layer_types", f"{unknown[0]!r} is not full_attention or sliding_attention")
    window = None if keys.get("sliding_window", 128) is None else keys.integer("sliding_window", 128)
    return tuple(window if kind == "sliding_attention" else None for kind in kinds)


def _rope(keys: Keys, max_positions: int, architecture: str) -> RopeConfig:
    """Rotary settings. As in transformers, keys of the scaling section win over those at the top level, but for
    ``original_max_position_embeddings``.
    """
    name = "rope_scaling" if keys.get("rope_scaling") else "rope_parameters"
    rope = keys.section(name)
    if rope.has_sections():
        raise keys.refuse(name, "layers with different rotary settings are not supported")
    if rope.number("partial_rotary_factor", keys.number("partial_rotary_factor", 1.0)) != 1.0:
        raise keys.refuse(name, "only rotation of the whole head is supported (partial_rotary_factor 1)")
    theta = rope.number("rope_theta", keys.number("rope_theta", _DEFAULT_THETA.get(architecture, 1e4)))
    match rope.get("rope_type", rope.get("type", "default")):
        case "default":
            return RopeConfig(theta=theta)
        case "linear":
            return RopeConfig(theta=theta, scaling="linear", factor=rope.number("factor"))
        case "llama3":
            low, high = rope.number("low_freq_factor"), rope.number("high_freq_factor")
            if high <= low:
                raise keys.refuse(name, f"high_freq_factor ({high}) must be above low_freq_factor ({low})")
            original = rope.integer("original_max_position_embeddings", max_positions)
            return RopeConfig(
                theta=theta,
                scaling="llama3",
                factor=rope.number("factor"),
                low_frequency_factor=low,
                high_frequency_factor=high,
                original_max_positions=keys.integer("original_max_position_embeddings", original),
            )
        case "yarn":
            return _yarn(rope, theta, max_positions)
    raise keys.refuse(name, "supported rope types are default, linear, llama3 and yarn")


def _yarn(rope: Keys, theta: float, max_positions: int) -> RopeConfig:
    """Peng et al., 2023; the keys and their defaults are those of transformers."""
    original = rope.integer("original_max_position_embeddings")
    factor = rope.number("factor", max_positions / original)

    def attention(scale: float) -> float:
        return 0.1 * scale * math.log(factor) + 1.0 if factor > 1 else 1.0

    attention_factor = attention(1.0)
    if rope.get("mscale") and rope.get("mscale_all_dim"):
        attention_factor = attention(rope.number("mscale")) / attention(rope.number("mscale_all_dim"))
    return RopeConfig(
        theta=theta,
        scaling="yarn",
        factor=factor,
        low_frequency_factor=rope.number("beta_slow", 1.0),
        high_frequency_factor=rope.number("beta_fast", 32.0),
        original_max_positions=original,
        truncated=rope.boolean("truncate", True),
        attention_factor=rope.number("attention_factor", attention_factor),
    )
