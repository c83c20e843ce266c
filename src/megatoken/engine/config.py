"""What the model is (``ModelConfig``, from its files or by name) and what the user wants (``EngineConfig``)."""

from __future__ import annotations

import math
import reprlib
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal, TypeGuard

from megatoken.errors import CapacityError, CheckpointError

Precision = Literal["fp32", "bf16", "fp8", "fp4"]
"""Number format of weights and linear inputs, see ``schemes``."""
Fp8Scales = Literal["tensor", "row"]
"""What shares one scale in fp8: a whole weight and all inputs of a linear, or each row of the weight and each token."""

ARCHITECTURES = ("LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM")

_LARGEST_INTEGER = 2**31 - 1  # positions, token ids and tensor sides live in int32 on the device
_LARGEST_LAYERS = 10_000
_DEFAULT_KV_HEADS = {"MistralForCausalLM": 8, "Qwen2ForCausalLM": 32, "Qwen3ForCausalLM": 32}
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
        llama, qwen3 = architecture == "LlamaForCausalLM", architecture == "Qwen3ForCausalLM"
        window = _attention_window(keys, architecture)
        attention_bias = (llama or qwen3) and keys.boolean("attention_bias")
        return cls(
            name=_name(source.parent.resolve()),
            hidden_size=hidden_size,
            intermediate_size=keys.integer("intermediate_size"),
            layers=keys.integer("num_hidden_layers", largest=_LARGEST_LAYERS),
            heads=heads,
            kv_heads=kv_heads,
            head_dim=head_dim,
            vocabulary_size=vocabulary_size,
            max_positions=min(max_positions, window),
            rms_norm_epsilon=keys.number("rms_norm_eps", 1e-6),
            rope=_rope(keys, max_positions),
            tied_embeddings=keys.boolean("tie_word_embeddings"),
            qkv_bias=attention_bias or architecture == "Qwen2ForCausalLM",
            output_bias=attention_bias,
            mlp_bias=llama and keys.boolean("mlp_bias"),
            qk_norm=qwen3,
            end_token_ids=end_token_ids(values, source, vocabulary_size),
            sliding_window=window if window < max_positions else None,
        )

    def tensor_shapes(self) -> dict[str, tuple[int, ...]]:
        """Every weight of the model: Hugging Face's tensor name -> shape, linear weights as [out, in].

        With tied embeddings there is no ``lm_head.weight``: the head is ``model.embed_tokens.weight``.
        """
        hidden, ffn = self.hidden_size, self.intermediate_size
        queries, keys = self.heads * self.head_dim, self.kv_heads * self.head_dim
        linears = {
            "self_attn.q_proj": (queries, hidden, self.qkv_bias),
            "self_attn.k_proj": (keys, hidden, self.qkv_bias),
            "self_attn.v_proj": (keys, hidden, self.qkv_bias),
            "self_attn.o_proj": (hidden, queries, self.output_bias),
            "mlp.gate_proj": (ffn, hidden, self.mlp_bias),
            "mlp.up_proj": (ffn, hidden, self.mlp_bias),
            "mlp.down_proj": (hidden, ffn, self.mlp_bias),
        }
        layer: dict[str, tuple[int, ...]] = {"input_layernorm.weight": (hidden,)}
        for name, (rows, columns, bias) in linears.items():
            layer[f"{name}.weight"] = (rows, columns)
            if bias:
                layer[f"{name}.bias"] = (rows,)
        if self.qk_norm:
            layer |= {"self_attn.q_norm.weight": (self.head_dim,), "self_attn.k_norm.weight": (self.head_dim,)}
        layer["post_attention_layernorm.weight"] = (hidden,)

        vocabulary, ranks = self.vocabulary_size, self.vocabulary_ranks
        shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (vocabulary, hidden // ranks)}
        for index in range(self.layers):
            shapes |= {f"model.layers.{index}.{name}": shape for name, shape in layer.items()}
        shapes["model.norm.weight"] = (hidden,)
        if not self.tied_embeddings:
            shapes["lm_head.weight"] = (vocabulary // ranks, hidden)
        return shapes

    @property
    def parameters(self) -> int:
        """Number of weights, embeddings included (tied ones once)."""
        return sum(math.prod(shape) for shape in self.tensor_shapes().values())

    @property
    def linear_outputs(self) -> int:
        """Rows of the matrices inside the layers."""
        return sum(shape[0] for name, shape in self.tensor_shapes().items() if name.endswith("proj.weight"))

    @property
    def linear_parameters(self) -> int:
        """Weights of the matrices inside the layers, which every token is multiplied by."""
        return sum(math.prod(shape) for name, shape in self.tensor_shapes().items() if name.endswith("proj.weight"))


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
    for name in ("heads", "kv_heads", "intermediate_size"):
        count = getattr(model, name)
        if count % ranks:
            raise CapacityError(
                f"tensor_parallel {ranks} does not divide the {count:,} {name} of {model.name}; "
                f"take a divisor of {math.gcd(model.heads, model.kv_heads, model.intermediate_size)}"
            )
    vocabulary_ranks = 1 if model.vocabulary_size % ranks or model.hidden_size % ranks else ranks
    return replace(
        model,
        heads=model.heads // ranks,
        kv_heads=model.kv_heads // ranks,
        intermediate_size=model.intermediate_size // ranks,
        vocabulary_ranks=vocabulary_ranks,
        tied_embeddings=model.tied_embeddings and vocabulary_ranks == 1,
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
    values: Mapping[str, object], source: Path, vocabulary_size: int = _LARGEST_INTEGER
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
    found = tuple(item for item in each if _is_integer(item, 0, _LARGEST_INTEGER))
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


def _attention_window(keys: Keys, architecture: str) -> int:
    """Positions up to which the model's attention is full attention."""
    if architecture == "LlamaForCausalLM" or (
        architecture.startswith("Qwen") and not keys.boolean("use_sliding_window")
    ):
        return _LARGEST_INTEGER
    if keys.get("sliding_window", 4096) is None:
        return _LARGEST_INTEGER
    return keys.integer("sliding_window", 4096)


def _rope(keys: Keys, max_positions: int) -> RopeConfig:
    """Rotary settings. As in transformers, keys of the scaling section win over those at the top level, but for
    ``original_max_position_embeddings``.
    """
    name = "rope_scaling" if keys.get("rope_scaling") else "rope_parameters"
    rope = keys.section(name)
    if rope.has_sections():
        raise keys.refuse(name, "layers with rotary settings of their own are not supported")
    if rope.number("partial_rotary_factor", keys.number("partial_rotary_factor", 1.0)) != 1.0:
        raise keys.refuse(name, "only rotation of the whole head is supported (partial_rotary_factor 1)")
    theta = rope.number("rope_theta", keys.number("rope_theta", 10_000.0))
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


def _is_integer(value: object, smallest: int, largest: int) -> TypeGuard[int]:
    return type(value) is int and smallest <= value <= largest  # JSON's true and false are int to isinstance


class Keys:
    """Typed access to one JSON object. A key that is null counts as absent; a refusal names file, key and value."""

    def __init__(self, values: Mapping[str, object], source: Path, prefix: str = "") -> None:
        self._values = values
        self._source = source
        self._prefix = prefix

    def refuse(self, key: str, problem: str) -> CheckpointError:
        """The error to raise over a key."""
        state = f"is {reprlib.repr(self._values[key])}" if key in self._values else "is missing"
        return CheckpointError(f"{self._source}: {self._prefix}{key} {state}; {problem}")

    def get(self, key: str, default: object = None) -> object:
        """The value, null included."""
        return self._values.get(key, default)

    def absent(self, key: str) -> bool:
        """Whether the key is missing, rather than null."""
        return key not in self._values

    def has_sections(self) -> bool:
        """Whether any value is an object."""
        return any(isinstance(value, dict) for value in self._values.values())

    def section(self, key: str) -> Keys:
        """An object inside; empty if absent."""
        value = self.get(key)
        if value is None:
            value = {}
        if not isinstance(value, dict):
            raise self.refuse(key, "expected an object")
        return Keys(value, self._source, f"{self._prefix}{key}.")

    def boolean(self, key: str) -> bool:
        """True or false; false if absent."""
        value = self.get(key)
        if value is None:
            return False
        if not isinstance(value, bool):
            raise self.refuse(key, "expected true or false")
        return value

    def integer(self, key: str, default: int | None = None, *, largest: int = _LARGEST_INTEGER) -> int:
        """At least 1; required without a default."""
        value = self.get(key)
        if value is None and default is not None:
            return default
        if not _is_integer(value, 1, largest):
            raise self.refuse(key, f"expected an integer from 1 to {largest}")
        return value

    def number(self, key: str, default: float | None = None) -> float:
        """Above 0; required without a default."""
        value = self.get(key)
        if value is None and default is not None:
            return default
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < 1e12:  # also refuses NaN
            raise self.refuse(key, "expected a positive number")
        return float(value)
