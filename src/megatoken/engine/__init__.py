"""Prompts in, tokens out. Nothing here loads PyTorch until an engine computes on this machine."""

from megatoken.engine.config import EngineConfig, ModelConfig
from megatoken.engine.loop import Engine
from megatoken.engine.request import (
    Completion,
    FinishReason,
    Grammar,
    GrammarKind,
    Request,
    Sampling,
    Thought,
    TokenEvent,
    TokenLogprobs,
)
from megatoken.engine.state import ReplicaState
from megatoken.engine.thread import EngineThread

__all__ = [
    "Completion",
    "Engine",
    "EngineConfig",
    "EngineThread",
    "FinishReason",
    "Grammar",
    "GrammarKind",
    "ModelConfig",
    "ReplicaState",
    "Request",
    "Sampling",
    "Thought",
    "TokenEvent",
    "TokenLogprobs",
]
