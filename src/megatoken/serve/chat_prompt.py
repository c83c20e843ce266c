"""From the messages of a chat to the token ids of its prompt."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from megatoken.serve.context import ApiContext
from megatoken.serve.request_errors import ApiError
from megatoken.serve.schema_chat import Message, PromptFields, Tool

_OWN_NAMES = frozenset({"messages", "tools", "add_generation_prompt", "continue_final_message"})


async def chat_prompt(
    api: ApiContext,  # the model
    body: PromptFields,  # how the messages become a prompt
    messages: Sequence[Message],  # of the chat
    tenant: str,  # whose chat it is
    *,
    tools: Sequence[Tool],  # that the template may list
    variables: dict[str, Any],  # further names that the template sees
    add_special_tokens: bool,  # let the tokenizer add its own, too
) -> list[int]:
    """The token ids of the prompt. The template writes the special tokens.

    Raises:
        ApiError: the template cannot render this, or the text cannot be encoded.
    """
    if taken := _OWN_NAMES & variables.keys():
        name = min(taken)
        raise ApiError(f"chat_template_kwargs: {name} is a field of its own", param="chat_template_kwargs")
    api.check_length(sum(len(message.text or "") for message in messages), "messages")
    if body.continue_final_message and not messages[-1].text:
        raise ApiError("continue_final_message: the last message has no text to continue", param="messages")
    chat = {
        **variables,
        "messages": [_plain_message(api, place, message) for place, message in enumerate(messages)],
        "tools": [_plain(tool) for tool in tools] or None,
        "documents": None,
        "add_generation_prompt": body.add_generation_prompt and not body.continue_final_message,
        "continue_final_message": body.continue_final_message,
    }
    if body.chat_template is None:
        text = await api.renderer.render(api.templates.choose(bool(tools)), chat, tenant)
    elif api.foreign is not None:
        text = await api.foreign.render(body.chat_template, chat, tenant)
    else:
        raise ApiError(
            "chat_template: this server does not take templates from requests; start it with "
            "--trust-request-chat-template true",
            param="chat_template",
        )
    return await api.encode(text, add_special=add_special_tokens, param="messages")


def _plain_message(api: ApiContext, place: int, message: Message) -> dict[str, Any]:
    """A message as templates expect it: content as one string, arguments of calls as objects."""
    plain = _plain(message)
    if message.role == "developer" and not api.templates.mentions("developer"):
        plain["role"] = "system"
    text = message.text
    if text is not None:
        plain["content"] = text
    if not message.tool_calls:
        plain.pop("tool_calls", None)
    for at, call in enumerate(plain.get("tool_calls", ())):
        where = f"messages.{place}.tool_calls.{at}.function.arguments"
        try:
            arguments = json.loads(call["function"]["arguments"] or "{}")
        except (ValueError, RecursionError):
            raise ApiError(f"{where}: must be JSON", param=where) from None
        if not isinstance(arguments, dict):
            raise ApiError(f"{where}: must be a JSON object", param=where)
        call["function"]["arguments"] = arguments
    return plain


def _plain(part: Message | Tool) -> dict[str, Any]:
    return part.model_dump(mode="json", exclude_none=True, exclude_unset=True)
