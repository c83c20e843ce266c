"""How an operator sets up chats and tool calls."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path


class ToolFormat(StrEnum):
    """How a model writes its calls."""

    AUTO = "auto"  # found in its chat template
    LLAMA3 = "llama3"  # {"name": ..., "parameters": {...}}; {...}
    HERMES = "hermes"  # <tool_call>{"name": ..., "arguments": {...}}</tool_call>; Qwen's too


@dataclass(frozen=True, slots=True)
class ApiSettings:
    """How chats become prompts, and answers tool calls."""

    chat_template: Path | None = None  # file to use in place of the model's own template
    tool_format: ToolFormat = ToolFormat.AUTO  # how the model writes tool calls
    trust_request_chat_template: bool = False  # requests may bring templates
