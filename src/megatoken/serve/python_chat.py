"""Chats for the Python API: the prompt of some messages, by the model's chat template."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from megatoken.engine import Engine
from megatoken.engine.config import model_folder
from megatoken.errors import RequestError
from megatoken.serve.chat_template import DEFAULT, TOOL_USE, ModelTemplates


class ChatTemplate:
    """The chat template of a model, or of a file.

    It is code of its author, and is rendered in jinja2's sandbox in this process, without limits on time and memory;
    ``megatoken serve`` has these limits.
    """

    def __init__(self, model: str | Path, file: Path | None = None) -> None:
        """``model``: as for ``Engine``. ``file``: in jinja2, in place of the model's own template.

        Raises:
            CheckpointError, UsageError: a file cannot be read.
        """
        folder = model_folder(model)
        self._templates = ModelTemplates(folder if folder.is_dir() else None, file)

    def prompt(
        self,
        engine: Engine,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        continue_final_message: bool = False,
        **variables: Any,
    ) -> list[int]:
        """The token ids of a chat's prompt, for ``Request``.

        Args:
            engine: that has the model's tokenizer.
            messages: with ``role``, ``content`` and what else the template reads.
            tools: functions that the model may call, as in OpenAI's API.
            continue_final_message: leave the last message open, so that the answer goes on with it.
            variables: further names that the template reads.

        Raises:
            RequestError: the model has no template or no tokenizer, or the template cannot render this.
        """
        text = self.text(messages, tools=tools, continue_final_message=continue_final_message, **variables)
        if engine.tokenizer is None:
            raise RequestError("the model has no tokenizer.json, so its chats cannot be encoded", "messages")
        return engine.tokenizer.encode(text, add_special=False)

    @property
    def known(self) -> bool:
        """Whether there is a template for chats without tools."""
        return DEFAULT in self._templates.by_name

    def text(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        continue_final_message: bool = False,
        **variables: Any,
    ) -> str:
        """The prompt before it is encoded, special tokens included; arguments and errors as of ``prompt``."""
        from megatoken.serve.template_process import render  # loads jinja2

        by_name = self._templates.by_name
        template = by_name.get(TOOL_USE if tools and TOOL_USE in by_name else DEFAULT)
        if template is None:
            raise RequestError("the model has no chat template; give ChatTemplate a file", "messages")
        chat = {
            **self._templates.tokens,
            "documents": None,
            **variables,
            "messages": [dict(one) for one in messages],
            "tools": list(tools) if tools else None,
            "add_generation_prompt": not continue_final_message,
            "continue_final_message": continue_final_message,
        }
        try:
            return render(template, chat)
        except Exception as error:  # a template can raise anything
            why = f"{error or type(error).__name__}"
            raise RequestError(f"the chat template cannot render these messages: {why}", "messages") from error
