"""How an operator sets up chats and tool calls."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Literal


class ToolFormat(StrEnum):
    """How a model writes its calls."""

    LLAMA3 = "llama3"  # {"name": ..., "parameters": {...}}; {...}
    HERMES = "hermes"  # <tool_call>{"name": ..., "arguments": {...}}</tool_call>; Qwen's too


@dataclass(frozen=True, slots=True)
class ApiSettings:
    """How chats become prompts, and answers tool calls."""

    chat_template: Path | None = None  # file to use in place of the model's own template
    tool_format: Literal["auto"] | ToolFormat = "auto"  # how the model writes tool calls; auto: found in its template
    trust_request_chat_template: bool = False  # requests may bring templates
