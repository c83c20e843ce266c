"""What the model is (``ModelConfig``, from its files) and what the user wants (``EngineConfig``)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Precision = Literal["fp32", "bf16", "fp8"]


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
    begin_token_id: int | None = None


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """What the user wants of the engine; every ``None`` is derived from model and machine and shown in the plan."""

    precision: Precision = "bf16"
    device: Literal["auto", "cpu", "cuda"] = "auto"
    max_rows: int | None = None
    max_sequences: int | None = None
    max_length: int | None = None
    page_size: int | None = None
    cache_tokens: int | None = None
    memory_bytes: int | None = None
    threads: int | None = None
    overlap: bool | None = None
