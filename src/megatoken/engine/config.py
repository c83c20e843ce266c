"""What the model is (``ModelConfig``, from its files or by name) and what the user wants (``EngineConfig``)."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal

from megatoken.engine.json_keys import LARGEST_INTEGER, Keys, is_integer
from megatoken.errors import CapacityError, CheckpointError

Precision = Literal["fp32", "bf16", "fp8", "fp4"]
"""Number format of weights and linear inputs, see ``schemes``."""
Fp8Scales = Literal["tensor", "row"]
"""What shares one scale in fp8: a whole weight and all inputs of a linear, or each row of the weight and each token."""

ARCHITECTURES = (
    *("LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM"),
    *("MixtralForCausalLM", "Qwen3MoeForCausalLM"),
)
LINEAR_SUFFIXES = ("proj.weight", ".w1.weight", ".w2.weight", ".w3.weight")
"""How the names of the layers' linears end, those of experts included; a router is not one of them."""

_LARGEST_LAYERS = 10_000
_DEFAULT_KV_HEADS = {
    **{"MistralForCausalLM": 8, "Qwen2ForCausalLM": 32, "Qwen3ForCausalLM": 32},
    **{"MixtralForCausalLM": 8, "Qwen3MoeForCausalLM": 4},
}
_DEFAULT_HEAD_DIM = {"Qwen3ForCausalLM": 128}


@dataclass(frozen=True, slots=True)
class RopeConfig:
    """Rotary position embedding: base and context scaling (``linear`` or ``llama3``, as Hugging Face defines them)."""

    theta: float = 10_000.0
    scaling: Literal["none", "linear", "llama3"] = "none"
    factor: float = 1.0
    low_frequency_factor: float = 1.0
    high_frequency_factor: float = 4.0
    original_max_positions: int = 8192


@dataclass(frozen=True, slots=True)
class ExpertsConfig:
    """Mixtures of experts: layers whose feed-forward network is one of ``count`` for each of a token's choices.

    Attributes:
        count: experts of a layer.
        active: experts that compute each token.
        intermediate_size: of one expert.
        normalized: the weights of a token's choices are divided by their sum.
        layers: numbers of the layers that have experts; the others are dense.
        module: name of a layer's mixture in Hugging Face's files.
        parts: names of an expert's gate, up and down projection there.
    """

    count: int
    active: int
    intermediate_size: int
    normalized: bool
    layers: tuple[int, ...]
    module: str = "mlp"
    parts: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj")

    def names(self, layer: int, expert: int) -> list[str]:
        """The linears of one expert: gate, up and down."""
        return [f"model.layers.{layer}.{self.module}.experts.{expert}.{part}" for part in self.parts]

    def router(self, layer: int) -> str:
        """The linear that scores a layer's experts."""
        return f"model.layers.{layer}.{self.module}.gate"


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """Shape of a Llama-family decoder. Sizes are element counts; nothing here depends on the machine."""

    name: str
    hidden_size: int
    intermediate_size: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    vocabulary_size: int
    max_positions: int
    rms_norm_epsilon: float = 1e-5
    rope: RopeConfig = RopeConfig()
    tied_embeddings: bool = False
    qkv_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    end_token_ids: tuple[int, ...] = ()
    # The attention window, if it limits max_positions. Left out of repr, and so of the hash of random weights.
    sliding_window: int | None = field(default=None, repr=False)
    # Ranks that share embedding and head: each has columns of the embedding and rows of the head, see ``sharded``.
    vocabulary_ranks: int = field(default=1, repr=False)
    experts: ExpertsConfig | None = field(default=None, repr=False)

    @classmethod
    def from_hugging_face(cls, values: Mapping[str, object], source: Path) -> ModelConfig:
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
        window = _attention_window(keys, architecture)
        layers = keys.integer("num_hidden_layers", largest=_LARGEST_LAYERS)
        attention_bias = (llama or qwen3) and keys.boolean("attention_bias")
        return cls(
            name=_name(source.parent.resolve()),
            hidden_size=hidden_size,
            intermediate_size=keys.integer("intermediate_size"),
            layers=layers,
            heads=heads,
            kv_heads=kv_heads,
            head_dim=head_dim,
            vocabulary_size=vocabulary_size,
            max_positions=min(max_positions, window),
            rms_norm_epsilon=keys.number("rms_norm_eps", 1e-5 if architecture == "MixtralForCausalLM" else 1e-6),
            rope=_rope(keys, max_positions, 1e6 if architecture == "MixtralForCausalLM" else 1e4),
            tied_embeddings=keys.boolean("tie_word_embeddings"),
            qkv_bias=attention_bias or architecture == "Qwen2ForCausalLM",
            output_bias=attention_bias,
            mlp_bias=llama and keys.boolean("mlp_bias"),
            qk_norm=qwen3,
            end_token_ids=end_token_ids(values, source, vocabulary_size),
            sliding_window=window if window < max_positions else None,
            experts=_experts(keys, architecture, layers),
        )

    def tensor_shapes(self) -> dict[str, tuple[int, ...]]:
        """Every weight of the model: Hugging Face's tensor name -> shape, linear weights as [out, in].

        With tied embeddings there is no ``lm_head.weight``: the head is ``model.embed_tokens.weight``.
        """
        hidden, ffn = self.hidden_size, self.intermediate_size
        queries, keys = self.heads * self.head_dim, self.kv_heads * self.head_dim
        attention = {
            "self_attn.q_proj": (queries, hidden, self.qkv_bias),
            "self_attn.k_proj": (keys, hidden, self.qkv_bias),
            "self_attn.v_proj": (keys, hidden, self.qkv_bias),
            "self_attn.o_proj": (hidden, queries, self.output_bias),
        }
        dense = {
            "mlp.gate_proj": (ffn, hidden, self.mlp_bias),
            "mlp.up_proj": (ffn, hidden, self.mlp_bias),
            "mlp.down_proj": (hidden, ffn, self.mlp_bias),
        }

        def layer(number: int) -> dict[str, tuple[int, ...]]:
            experts = self.experts if self.experts is not None and number in self.experts.layers else None
            shapes: dict[str, tuple[int, ...]] = {"input_layernorm.weight": (hidden,)}
            for name, (rows, columns, bias) in (attention if experts else attention | dense).items():
                shapes[f"{name}.weight"] = (rows, columns)
                if bias:
                    shapes[f"{name}.bias"] = (rows,)
            if self.qk_norm:
                shapes |= {"self_attn.q_norm.weight": (self.head_dim,), "self_attn.k_norm.weight": (self.head_dim,)}
            shapes["post_attention_layernorm.weight"] = (hidden,)
            shapes = {f"model.layers.{number}.{name}": shape for name, shape in shapes.items()}
            if experts:
                width = experts.intermediate_size
                shapes[f"{experts.router(number)}.weight"] = (experts.count, hidden)
                for expert in range(experts.count):
                    names = [f"{name}.weight" for name in experts.names(number, expert)]
                    shapes |= dict(zip(names, ((width, hidden), (width, hidden), (hidden, width)), strict=True))
            return shapes

        vocabulary, ranks = self.vocabulary_size, self.vocabulary_ranks
        shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (vocabulary, hidden // ranks)}
        for number in range(self.layers):
            shapes |= layer(number)
        shapes["model.norm.weight"] = (hidden,)
        if not self.tied_embeddings:
            shapes["lm_head.weight"] = (vocabulary // ranks, hidden)
        return shapes

    @property
    def parameters(self) -> int:
        """Number of weights, embeddings included (tied ones once)."""
        return sum(math.prod(shape) for shape in self.tensor_shapes().values())

    @property
    def active_parameters(self) -> int:
        """Weights that compute a token, embeddings included: ``parameters`` without the experts it does not choose."""
        return self.parameters - self.linear_parameters + self.active_linear_parameters

    @property
    def linear_shapes(self) -> dict[str, tuple[int, ...]]:
        """Those of ``tensor_shapes`` that are matrices inside the layers, other than routers."""
        return {name: shape for name, shape in self.tensor_shapes().items() if name.endswith(LINEAR_SUFFIXES)}

    @property
    def linear_outputs(self) -> int:
        """Rows of the matrices inside the layers."""
        return sum(shape[0] for shape in self.linear_shapes.values())

    @property
    def linear_parameters(self) -> int:
        """Weights of the matrices inside the layers."""
        return sum(math.prod(shape) for shape in self.linear_shapes.values())

    @property
    def expert_parameters(self) -> int:
        """Weights of one expert."""
        return 0 if self.experts is None else 3 * self.hidden_size * self.experts.intermediate_size

    @property
    def active_linear_parameters(self) -> int:
        """Weights of the matrices inside the layers that a token is multiplied by."""
        if self.experts is None:
            return self.linear_parameters
        idle = (self.experts.count - self.experts.active) * len(self.experts.layers)
        return self.linear_parameters - idle * self.expert_parameters


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """What the user asks of the engine; every ``None`` is derived from model and machine and shown in the plan."""

    precision: Precision = "bf16"
    device: Literal["auto", "cpu", "cuda"] = "auto"
    max_batched_tokens: int | None = None
    max_sequences: int | None = None
    max_length: int | None = None
    page_size: int | None = None
    cache_tokens: int | None = None
    memory_bytes: int | None = None
    threads: int | None = None
    tensor_parallel: int = 1
    overlap: bool | None = None
    cuda_graphs: bool = True
    fp8_scales: Fp8Scales = "tensor"
    target_step_seconds: float | None = None
    prefix_cache: bool = False


def _llama31(name: str, hidden_size: int, intermediate_size: int, layers: int, heads: int) -> ModelConfig:
    """One of the Llama 3.1 Instruct family: all sizes share heads, vocabulary, context and rotary scaling."""
    return ModelConfig(
        name,
        hidden_size,
        intermediate_size,
        layers,
        heads,
        kv_heads=8,
        head_dim=128,
        vocabulary_size=128_256,
        max_positions=131_072,
        rope=RopeConfig(theta=500_000.0, scaling="llama3", factor=8.0),
        end_token_ids=(128_001, 128_008, 128_009),
    )


# Published shapes, and three small ones for machines without a GPU. Columns: hidden, feed-forward, layers, heads,
# kv heads, head dim, vocabulary, positions.
SHAPES: dict[str, ModelConfig] = {
    shape.name: shape
    for shape in (
        ModelConfig("tiny", 256, 896, 6, 8, 4, 32, 8192, 2048, end_token_ids=(2,)),
        ModelConfig("125m", 768, 2048, 12, 12, 4, 64, 32_000, 2048, end_token_ids=(2,)),
        ModelConfig("1.1b", 2048, 5632, 22, 32, 4, 64, 32_000, 2048, end_token_ids=(2,)),
        _llama31("llama3.1-8b", 4096, 14_336, 32, 32),
        ModelConfig("llama2-70b", 8192, 28_672, 80, 64, 8, 128, 32_000, 4096, end_token_ids=(2,)),
        _llama31("llama3.1-405b", 16_384, 53_248, 126, 128),
        ModelConfig(
            "qwen3-30b-a3b",
            2048,
            6144,
            48,
            32,
            4,
            128,
            151_936,
            40_960,
            rms_norm_epsilon=1e-6,
            rope=RopeConfig(theta=1e6),
            qk_norm=True,
            end_token_ids=(151_645, 151_643),
            experts=ExpertsConfig(128, 8, 768, normalized=True, layers=tuple(range(48))),
        ),
        ModelConfig(
            "mixtral-8x7b",
            4096,
            14_336,
            32,
            32,
            8,
            128,
            32_000,
            32_768,
            rope=RopeConfig(theta=1e6),
            end_token_ids=(2,),
            experts=ExpertsConfig(
                8,
                2,
                14_336,
                normalized=True,
                layers=tuple(range(32)),
                module="block_sparse_moe",
                parts=("w1", "w3", "w2"),
            ),
        ),
    )
}


def find_shape(name: str) -> ModelConfig:
    """The shape of that name in ``SHAPES``.

    Raises:
        CheckpointError: no such shape.
    """
    if name not in SHAPES:
        raise CheckpointError(f"{name}: not one of the named shapes; give --model, one of {', '.join(SHAPES)}")
    return SHAPES[name]


def sharded(model: ModelConfig, ranks: int) -> ModelConfig:
    """The part of a model that one of ``ranks`` holds and computes.

    Embedding and head stay whole if ``ranks`` does not divide vocabulary and hidden size. If it does, a tied pair
    becomes two tensors: columns and rows of the same matrix.

    Raises:
        CapacityError: heads or features cannot be shared evenly.
    """
    experts = model.experts
    shared = {name: getattr(model, name) for name in ("heads", "kv_heads", "intermediate_size")}
    if experts is not None:
        shared["intermediate_size of an expert"] = experts.intermediate_size
    for name, count in shared.items():
        if count % ranks:
            raise CapacityError(
                f"tensor_parallel {ranks} does not divide the {count:,} {name} of {model.name}; "
                f"take a divisor of {math.gcd(*shared.values())}"
            )
    vocabulary_ranks = 1 if model.vocabulary_size % ranks or model.hidden_size % ranks else ranks
    return replace(
        model,
        heads=model.heads // ranks,
        kv_heads=model.kv_heads // ranks,
        intermediate_size=model.intermediate_size // ranks,
        vocabulary_ranks=vocabulary_ranks,
        tied_embeddings=model.tied_embeddings and vocabulary_ranks == 1,
        experts=None if experts is None else replace(experts, intermediate_size=experts.intermediate_size // ranks),
    )


REFERENCE = "reference"  # the trained model that ships with the package
_REFERENCE_FOLDER = Path(__file__).resolve().parents[1] / "data" / "reference_model"


def model_folder(model: str | Path) -> Path:
    """The folder of a model's files; ``reference`` is in the package, ``./reference`` is a folder of that name."""
    return _REFERENCE_FOLDER if model == REFERENCE else Path(model)


def _name(folder: Path) -> str:
    """Name of the model in a folder."""
    return REFERENCE if folder == _REFERENCE_FOLDER else folder.name


def end_token_ids(
    values: Mapping[str, object], source: Path, vocabulary_size: int = LARGEST_INTEGER
) -> tuple[int, ...]:
    """``eos_token_id`` of a ``config.json`` or ``generation_config.json``: absent, one id or a list of ids.

    Raises:
        CheckpointError: It is none of these.
    """
    keys = Keys(values, source)
    ids = keys.get("eos_token_id")
    if ids is None:
        return ()
    each = ids if isinstance(ids, list) else [ids]
    found = tuple(item for item in each if is_integer(item, 0, LARGEST_INTEGER))
    if len(found) != len(each):
        raise keys.refuse("eos_token_id", "expected a token id or a list of them")
    if max(found, default=0) >= vocabulary_size:
        raise keys.refuse("eos_token_id", f"expected ids of the vocabulary, 0 to {vocabulary_size - 1}")
    return found


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
    if architecture not in ("MixtralForCausalLM", "Qwen3MoeForCausalLM"):
        return None
    mixtral = architecture == "MixtralForCausalLM"
    default_count, default_active = (8, 2) if mixtral else (128, 8)
    count = keys.integer("num_local_experts", keys.integer("num_experts", default_count))
    active = keys.integer("num_experts_per_tok", default_active)
    if active > count:
        raise keys.refuse("num_experts_per_tok", f"the model has {count} experts")
    if mixtral:
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
    if architecture == "LlamaForCausalLM" or (
        architecture.startswith("Qwen") and not keys.boolean("use_sliding_window")
    ):
        return LARGEST_INTEGER
    if keys.get("sliding_window", None if architecture == "MixtralForCausalLM" else 4096) is None:
        return LARGEST_INTEGER
    return keys.integer("sliding_window", 4096)


def _rope(keys: Keys, max_positions: int, default_theta: float) -> RopeConfig:
    """Rotary settings. As in transformers, keys of the scaling section win over those at the top level, but for
    ``original_max_position_embeddings``.
    """
    name = "rope_scaling" if keys.get("rope_scaling") else "rope_parameters"
    rope = keys.section(name)
    if rope.has_sections():
        raise keys.refuse(name, "layers with rotary settings of their own are not supported")
    if rope.number("partial_rotary_factor", keys.number("partial_rotary_factor", 1.0)) != 1.0:
        raise keys.refuse(name, "only rotation of the whole head is supported (partial_rotary_factor 1)")
    theta = rope.number("rope_theta", keys.number("rope_theta", default_theta))
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
    raise keys.refuse(name, "supported rope types are default, linear and llama3")
