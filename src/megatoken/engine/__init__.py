"""Prompts in, tokens out. ``Engine`` is loaded on first use: the rest of the room's face needs no PyTorch."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from megatoken.engine.config import EngineConfig, ModelConfig
from megatoken.engine.request import Completion, FinishReason, Request, Sampling, TokenEvent

if TYPE_CHECKING:
    from megatoken.engine.loop import Engine

__all__ = ["Completion", "Engine", "EngineConfig", "FinishReason", "ModelConfig", "Request", "Sampling", "TokenEvent"]


def __getattr__(name: str) -> Any:
    if name == "Engine":
        from megatoken.engine.loop import Engine

        return Engine
    raise AttributeError(f"module 'megatoken.engine' has no attribute {name!r}")
