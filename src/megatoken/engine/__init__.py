"""Prompts in, tokens out."""

from megatoken.engine.config import EngineConfig, ModelConfig
from megatoken.engine.loop import Engine
from megatoken.engine.request import Completion, FinishReason, Request, Sampling, TokenEvent

__all__ = ["Completion", "Engine", "EngineConfig", "FinishReason", "ModelConfig", "Request", "Sampling", "TokenEvent"]
