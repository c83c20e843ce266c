"""From the messages of a chat to the text of its prompt."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from megatoken.serve.context import ApiContext
from megatoken.serve.request_errors import ApiError
from megatoken.serve.schema_chat import Message, PromptFields, Tool

_OWN_NAMES = frozenset({"messages", "tools", "add_generation_prompt", "continue_final_message"})


async def chat_text(
    api: ApiContext,  # the model
    body: PromptFields,  # how the messages become a prompt
    messages: Sequence[Message],  # of the chat
    tenant: str,  # whose chat it is
    *,
    tools: Sequence[Tool],  # that the template may list
    variables: dict[str, Any],  # further names that the template sees
) -> str:
    """The text of the prompt, with the special tokens. Raises ApiError: the template cannot render this."""
    if taken := _OWN_NAMES & variables.keys():
        name = min(taken)
        raise ApiError(f"chat_template_kwargs: {name} is a separate field", param="chat_template_kwargs")
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
        return await api.renderer.render(api.templates.choose(bool(tools)), chat, tenant)
    if api.foreign is not None:
        return await api.foreign.render(body.chat_template, chat, tenant)
    raise ApiError(
        "chat_template: this server does not take templates from requests; start it with "
        "--trust-request-chat-template true",
        param="chat_template",
    )


def _plain_message(api: ApiContext, place: int, message: Message) -> dict[str, Any]:
    """A message as templates expect it: content as one string, arguments of calls as objects."""
    if message.content is None and not (message.role == "assistant" and (message.tool_calls or message.reasoning)):
        where = f"messages.{place}.content"
        unless = "only a message of the assistant with tool_calls or reasoning may leave it out"
        raise ApiError(f"{where}: is required; {unless}", param=where)
    plain = _plain(message)
    if message.role == "developer" and not api.templates.mentions("developer"):
        plain["role"] = "system"
    text = message.text
    if text is not None:
        plain["content"] = text
    if message.reasoning is not None:  # under the names that Qwen's and gpt-oss's templates read
        plain.setdefault("reasoning_content", message.reasoning)
        if not text:  # gpt-oss's template takes one or the other
            plain.setdefault("thinking", message.reasoning)
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
