"""megatoken: run large language models, measure them under MLPerf rules, and say what the number is worth.

Names are loaded on first use, so that commands which need no engine start without PyTorch.
"""

from __future__ import annotations

TYPE_CHECKING = False  # from typing, it would take a third of the time until a command handles signals
if TYPE_CHECKING:
    from typing import Any

    from megatoken.engine import (
        Completion,
        Engine,
        EngineConfig,
        EngineThread,
        FinishReason,
        Grammar,
        GrammarKind,
        Request,
        Sampling,
        Thought,
        TokenEvent,
        TokenLogprobs,
    )
    from megatoken.engine.async_engine import AsyncEngine
    from megatoken.serve.python_chat import ChatTemplate

__version__ = "0.2.0"
__all__ = [
    "AsyncEngine",
    "ChatTemplate",
    "Completion",
    "Engine",
    "EngineConfig",
    "EngineThread",
    "FinishReason",
    "Grammar",
    "GrammarKind",
    "Request",
    "Sampling",
    "Thought",
    "TokenEvent",
    "TokenLogprobs",
    "__version__",
]


def __getattr__(name: str) -> Any:
    if name == "AsyncEngine":  # loads asyncio, which commands do without
        from megatoken.engine.async_engine import AsyncEngine

        return AsyncEngine
    if name == "ChatTemplate":
        from megatoken.serve.python_chat import ChatTemplate

        return ChatTemplate
    if name in __all__:
        from megatoken import engine

        return getattr(engine, name)
    raise AttributeError(f"module 'megatoken' has no attribute {name!r}")
