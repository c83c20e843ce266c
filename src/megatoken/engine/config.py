"""What the model is (``ModelConfig``, read by ``hugging_face``) and what the user wants (``EngineConfig``)."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from megatoken.engine.json_keys import LARGEST_INTEGER, Keys, is_integer
from megatoken.errors import CapacityError, CheckpointError

Precision = Literal["fp32", "bf16", "fp8", "fp4"]
"""Number format of weights and linear inputs, see ``schemes``."""
DEFAULT_PRECISION: Precision = "bf16"
"""What an engine computes in unless the user names another, or ``hardware.precision`` finds fp32 faster."""
Fp8Scales = Literal["tensor", "row"]
"""What shares one scale in fp8: a whole weight and all inputs of a linear, or each row of the weight and each token."""

LINEAR_SUFFIXES = ("proj.weight", ".w1.weight", ".w2.weight", ".w3.weight")
"""How the names of the layers' linears end, those of experts included; a router is not one of them."""


@dataclass(frozen=True, slots=True)
class RopeConfig:
    """Rotary position embedding: base and context scaling (``linear``, ``llama3``, ``yarn``, as Hugging Face has them).

    Of YaRN, the factors are the turns within the original positions below which a frequency is divided by ``factor``
    and above which it stays; the dimensions where that is are ``truncated`` to whole ones, or not.
    ``attention_factor`` multiplies cosine and sine.
    """

    theta: float = 10_000.0
    scaling: Literal["none", "linear", "llama3", "yarn"] = "none"
    factor: float = 1.0
    low_frequency_factor: float = 1.0
    high_frequency_factor: float = 4.0
    original_max_positions: int = 8192
    # Left out of repr, and so of the hash of random weights.
    truncated: bool = field(default=True, repr=False)
    attention_factor: float = field(default=1.0, repr=False)


@dataclass(frozen=True, slots=True)
class ClampedSwiglu:
    """``gate * sigmoid(alpha * gate) * (up + 1)``: the gate at most ``limit``, ``up`` at most that far from 0."""

    alpha: float
    limit: float

    @property
    def largest(self) -> float:
        """No output is further from 0."""
        return self.limit * (self.limit + 1)


@dataclass(frozen=True, slots=True)
class ExpertsConfig:
    """Mixtures of experts: layers whose feed-forward network is one of ``count`` for each of a token's choices."""

    count: int  # experts of a layer
    active: int  # experts that compute each token
    intermediate_size: int  # of one expert
    normalized: bool  # the weights of a token's choices are divided by their sum
    layers: tuple[int, ...]  # numbers of the layers that have experts; the others are dense
    module: str = "mlp"  # name of a layer's mixture in Hugging Face's files
    # names of an expert's gate, up and down projection there
    parts: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj")
    router_part: str = "gate"  # name of the linear that scores the experts
    biases: bool = False  # router and experts have them
    activation: ClampedSwiglu | None = None  # of gate and up projection; None: ``silu(gate) * up``

    def names(self, layer: int, expert: int) -> list[str]:
        """The linears of one expert: gate, up and down."""
        return [f"model.layers.{layer}.{self.module}.experts.{expert}.{part}" for part in self.parts]

    def router(self, layer: int) -> str:
        """The linear that scores a layer's experts."""
        return f"model.layers.{layer}.{self.module}.{self.router_part}"


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
    # See ``window``; empty: None in every layer.
    windows: tuple[int | None, ...] = field(default=(), repr=False)
    # One logit for each query head, which takes part in the softmax over its keys and has no value.
    sinks: bool = field(default=False, repr=False)

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
            if self.sinks:
                shapes["self_attn.sinks"] = (self.heads,)
            shapes["post_attention_layernorm.weight"] = (hidden,)
            shapes = {f"model.layers.{number}.{name}": shape for name, shape in shapes.items()}
            if experts:
                width = experts.intermediate_size
                linears = {experts.router(number): (experts.count, hidden)}
                sides = (width, hidden), (width, hidden), (hidden, width)
                for expert in range(experts.count):
                    linears |= dict(zip(experts.names(number, expert), sides, strict=True))
                for name, (rows, columns) in linears.items():
                    shapes[f"{name}.weight"] = (rows, columns)
                    if experts.biases:
                        shapes[f"{name}.bias"] = (rows,)
            return shapes

        vocabulary, ranks = self.vocabulary_size, self.vocabulary_ranks
        shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (vocabulary, hidden // ranks)}
        for number in range(self.layers):
            shapes |= layer(number)
        shapes["model.norm.weight"] = (hidden,)
        if not self.tied_embeddings:
            shapes["lm_head.weight"] = (vocabulary // ranks, hidden)
        return shapes

    def window(self, layer: int) -> int | None:
        """Keys that a query sees in a layer, itself included; None for all."""
        return self.windows[layer] if self.windows else None

    @property
    def parameters(self) -> int:
        """Number of weights, embeddings included (tied ones once)."""
        return sum(math.prod(shape) for shape in self.tensor_shapes().values())

    @property
    def active_parameters(self) -> int:
        """Weights that compute a token, embeddings included: ``parameters`` without the experts it does not choose."""
        if self.experts is None:
            return self.parameters
        biases = (2 * self.experts.intermediate_size + self.hidden_size) * self.experts.biases
        idle = (self.experts.count - self.experts.active) * len(self.experts.layers)
        return self.parameters - idle * (self.expert_parameters + biases)

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


FAIR_SLOWDOWN = 1.15
"""How many times as long prompts of other groups may make a step while a group asks for less than its share."""
RECORD_SECONDS = 20.0
"""Most time for recording steps before the first request, where its latency counts."""
PACKED_TOKENS = 64
"""Most tokens whose products read packed weights on a GPU; for more, each weight is expanded to e4m3 first."""


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """What the user asks of the engine; every ``None`` is derived from model and machine and shown in the plan."""

    precision: Precision = DEFAULT_PRECISION
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
    packed_weights: bool | None = None
    target_step_seconds: float | None = None
    prefix_cache: bool = False
    fair_slowdown: float | None = FAIR_SLOWDOWN
    record_seconds: float | None = None
    throughput_only: bool = False  # no answer is waited for, so steps may be long

    @property
    def recording_seconds(self) -> float:
        """How long a GPU engine records steps when it is opened: none, unless steps have a target for their time."""
        if self.record_seconds is None:
            return 0.0 if self.target_step_seconds is None else RECORD_SECONDS
        return self.record_seconds


def gpt_oss_experts(count: int, active: int, width: int, layers: int, activation: ClampedSwiglu) -> ExpertsConfig:
    """In every layer."""
    return ExpertsConfig(
        count,
        active,
        width,
        normalized=True,
        layers=tuple(range(layers)),
        router_part="router",
        biases=True,
        activation=activation,
    )


def _shape(name: str, values: dict[str, Any]) -> ModelConfig:
    """A row of ``model_shapes.json``: fields of ``ModelConfig``; experts in every layer, windows in every other one."""
    layers = values["layers"]
    if "rope" in values:
        values["rope"] = RopeConfig(**values["rope"])
    if "experts" in values:
        experts = values["experts"]
        parts, activation = experts.pop("parts", None), experts.pop("activation", None)
        experts |= {} if parts is None else {"parts": tuple(parts)}
        experts |= {} if activation is None else {"activation": ClampedSwiglu(**activation)}
        values["experts"] = ExpertsConfig(**experts, layers=tuple(range(layers)))
    if (window := values.pop("every_other_window", None)) is not None:
        values["windows"] = tuple(None if layer % 2 else window for layer in range(layers))
    return ModelConfig(name, **values | {"end_token_ids": tuple(values["end_token_ids"])})


_DATA = Path(__file__).resolve().parents[1] / "data"
SHAPES: dict[str, ModelConfig] = {
    name: _shape(name, values)
    for name, values in json.loads((_DATA / "model_shapes.json").read_text(encoding="utf-8")).items()
}
"""Published shapes, and three small ones for machines without a GPU."""


def find_shape(name: str) -> ModelConfig:
    """The shape of that name in ``SHAPES``. Raises CheckpointError: no such shape."""
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
_REFERENCE_FOLDER = _DATA / "reference_model"


def model_folder(model: str | Path) -> Path:
    """The folder of a model's files; ``reference`` is in the package, ``./reference`` is a folder of that name."""
    return _REFERENCE_FOLDER if model == REFERENCE else Path(model)


def absolute_model(model: str) -> str:
    """The model as a process with another working directory finds it."""
    folder = Path(model)
    return str(folder.absolute()) if model != REFERENCE and folder.is_dir() else model


def model_name(folder: Path) -> str:
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
