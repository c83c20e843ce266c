"""/v1/responses, stateless: an input, given whole, to output items, in one body or as events."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from json.encoder import encode_basestring
from typing import Any

from pydantic import ValidationError

from megatoken.serve import frames
from megatoken.serve.answer import Answer, Choice, Delta, FullAnswer, StreamedAnswer
from megatoken.serve.chat import Chat, prepare_chat
from megatoken.serve.context import ApiContext
from megatoken.serve.exchange import Exchange
from megatoken.serve.request_errors import ApiError, field_error
from megatoken.serve.schema_chat import ChatBody
from megatoken.serve.schema_common import SamplingFields, parse_body
from megatoken.serve.schema_responses import (
    FunctionCall,
    FunctionCallOutput,
    InputText,
    NamedTool,
    ReasoningItem,
    ReasoningText,
    ResponsesBody,
)
from megatoken.serve.server import api_route
from megatoken.serve.tool_calls import CallArguments, CallParser, CallStart, Piece, ThoughtText

_NAMES = {  # of this route's fields, by those of a chat
    "max_completion_tokens": "max_output_tokens",
    "max_tokens": "max_output_tokens",
    "messages": "input",
    "reasoning_effort": "reasoning.effort",
    "response_format": "text.format",
}


@api_route
async def responses(api: ApiContext, exchange: Exchange) -> None:
    """Answer an input."""
    body = parse_body(ResponsesBody, exchange.take_body())
    api.check_body(body)
    try:
        chat = await prepare_chat(api, exchange, ChatBody.model_validate(_chat_fields(body)))
    except ValidationError as error:
        raise field_error(error).renamed(_NAMES) from None
    except ApiError as error:
        raise error.renamed(_NAMES) from None
    head = _response_head(api, exchange, body)
    answer: Answer
    if body.stream:
        answer = ResponseStream(exchange, api, chat, head)
    else:
        answer = FullAnswer(exchange, api.client, [chat.prompt], lambda full: whole_response(full, head, chat))
    answer.choices = chat.choices(answer, api)
    answer.names = {name: _NAMES.get(field, field) for name, field in chat.engine_names.items()} | _NAMES
    answer.begin()


def _chat_fields(body: ResponsesBody) -> dict[str, Any]:
    """The chat that an input stands for."""
    shared = SamplingFields.model_fields.keys() - {"model", "stream"}
    fields = {name: getattr(body, name) for name in (*shared, "parallel_tool_calls", "chat_template_kwargs")}
    form = body.text.format
    if form.type == "json_schema":
        fields["response_format"] = {"type": "json_schema", "json_schema": {"schema": form.schema_}}
    elif form.type == "json_object":
        fields["response_format"] = {"type": "json_object"}
    choice: Any = body.tool_choice
    if isinstance(choice, NamedTool):
        choice = {"type": "function", "function": {"name": choice.name}}
    functions = [tool.model_dump(exclude_none=True, exclude={"type"}) for tool in body.tools]
    return fields | {
        "messages": _messages(body),
        "max_completion_tokens": body.max_output_tokens,
        "tools": [{"type": "function", "function": function} for function in functions],
        "tool_choice": choice,
        "reasoning_effort": body.reasoning.effort,
    }


def _messages(body: ResponsesBody) -> list[dict[str, Any]]:
    messages: list[dict[str, Any]] = []
    if body.instructions is not None:
        messages.append({"role": "system", "content": body.instructions})
    if isinstance(body.input, str):
        return [*messages, {"role": "user", "content": body.input}]
    thought: dict[str, Any] = {}  # of the assistant's next message
    for item in body.input:
        if isinstance(item, ReasoningItem):
            thought = {"reasoning": _joined(item.content)} if item.content else {}
            continue
        if isinstance(item, FunctionCall):
            call = {"id": item.call_id, "function": {"name": item.name, "arguments": item.arguments}}
            if messages and "tool_calls" in messages[-1]:
                messages[-1]["tool_calls"].append(call)
            else:
                messages.append({"role": "assistant", "tool_calls": [call], **thought})
        elif isinstance(item, FunctionCallOutput):
            messages.append({"role": "tool", "tool_call_id": item.call_id, "content": _joined(item.output)})
        else:
            own = thought if item.role == "assistant" else {}
            messages.append({"role": item.role, "content": _joined(item.content), **own})
        thought = {}
    return messages


def _joined(content: str | Sequence[InputText | ReasoningText]) -> str:
    return content if isinstance(content, str) else "\n".join(part.text for part in content)


def _response_head(api: ApiContext, exchange: Exchange, body: ResponsesBody) -> dict[str, Any]:
    """The fields of a response that do not change."""
    choice, form = body.tool_choice or "auto", body.text.format
    return {
        "id": f"resp_{exchange.request.request_id}",
        "object": "response",
        "created_at": int(time.time()),
        "status": "in_progress",
        "error": None,
        "incomplete_details": None,
        "instructions": body.instructions,
        "max_output_tokens": body.max_output_tokens,
        "metadata": {},
        "model": api.model.name,
        "output": [],
        "parallel_tool_calls": body.parallel_tool_calls,
        "previous_response_id": None,
        "reasoning": {"effort": body.reasoning.effort, "summary": None},
        "store": False,
        "temperature": api.defaults.temperature if body.temperature is None else body.temperature,
        "text": {"format": {"type": form.type, **form.model_dump(by_alias=True, exclude_unset=True)}},
        "tool_choice": choice if isinstance(choice, str) else choice.model_dump(),
        "tools": [tool.model_dump() for tool in body.tools],
        "top_p": api.defaults.top_p if body.top_p is None else body.top_p,
        "truncation": "disabled",
        "usage": None,
    }


def _ended(
    head: dict[str, Any], reason: str | None, output: list[dict[str, Any]], answer: Answer, chat: Chat
) -> dict[str, Any]:
    status = _status(reason)
    usage = answer.usage()
    thoughts = [item["content"][0]["text"] for item in output if item["type"] == "reasoning"]
    return {
        **head,
        "status": status,
        "incomplete_details": {"reason": "max_output_tokens"} if status == "incomplete" else None,
        "output": output,
        "usage": {
            "input_tokens": usage["prompt_tokens"],
            "input_tokens_details": usage["prompt_tokens_details"],
            "output_tokens": usage["completion_tokens"],
            "output_tokens_details": {"reasoning_tokens": chat.names.count("".join(thoughts))},
            "total_tokens": usage["total_tokens"],
        },
    }


def _text_item(head: dict[str, Any], place: int, text: str, status: str) -> dict[str, Any]:
    item_id = f"{head['id'].replace('resp_', 'msg_')}_{place}"
    return {"id": item_id, "type": "message", "role": "assistant", "status": status, "content": [_text_part(text)]}


def _text_part(text: str) -> dict[str, Any]:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}


def _thought_item(head: dict[str, Any], place: int, text: str, status: str) -> dict[str, Any]:
    item_id = f"{head['id'].replace('resp_', 'rs_')}_{place}"
    return {"id": item_id, "type": "reasoning", "summary": [], "status": status, "content": [_thought_part(text)]}


def _thought_part(text: str) -> dict[str, Any]:
    return {"type": "reasoning_text", "text": text}


def _call_item(call_id: str, name: str, arguments: str, status: str) -> dict[str, Any]:
    return {
        "id": f"fc_{call_id.removeprefix('call_')}",
        "type": "function_call",
        "call_id": call_id,
        "name": name,
        "arguments": arguments,
        "status": status,
    }


def whole_response(answer: FullAnswer, head: dict[str, Any], chat: Chat) -> dict[str, Any]:
    """The body of an answer that is not streamed."""
    whole = answer.all_of(answer.choices[0])
    output: list[dict[str, Any]] = []
    for part in chat.parts(whole.text) or [""]:  # an empty answer has an empty message
        if isinstance(part, str):
            output.append(_text_item(head, len(output), part, "completed"))
        elif isinstance(part, ThoughtText):
            output.append(_thought_item(head, len(output), part.text, "completed"))
        else:
            output.append(_call_item(part.call_id, part.name, part.arguments, "completed"))
    output[-1]["status"] = _status(whole.finish_reason)
    return _ended(head, whole.finish_reason, output, answer, chat)


def _status(reason: str | None) -> str:
    """Of an answer and its last item."""
    return "incomplete" if reason == "length" else "completed"


class ResponseStream(StreamedAnswer):
    """A response in typed events, numbered from 0."""

    def __init__(self, exchange: Exchange, api: ApiContext, chat: Chat, head: dict[str, Any]) -> None:
        super().__init__(exchange, api.client, [chat.prompt])
        self._head = head
        self._chat = chat
        self._parser: CallParser | None = chat.make_parser() if chat.make_parser is not None else None
        self._number = 0
        self._output: list[dict[str, Any]] = []
        self._text: list[str] | None = None  # of the message or thought that is open
        self._item: dict[str, Any] | None = None  # the item that is open
        self._reason: str | None = None

    def add(self, choice: Choice, delta: Delta) -> None:
        """Write the events of what is new."""
        if not self.started:
            self.start()
            self._event("response.created", response=self._head)
            self._event("response.in_progress", response=self._head)
        self._reason = delta.finish_reason
        pieces: list[Piece] = [delta.text] if delta.text else []
        if self._parser is not None:
            pieces = self._parser.add(delta.text)
            if delta.finish_reason is not None:
                pieces += self._parser.end()
            pieces = self._chat.allowed(pieces)
        if delta.finish_reason is not None and not pieces and not self._output and self._item is None:
            pieces = [""]  # an empty answer has an empty message
        choice.write_text = None
        for piece in pieces:
            self._piece(piece)
        if self._parser is None and self._text is not None:
            choice.write_text = self._text_writer()

    def complete(self) -> None:
        """Close the last item and report the whole response."""
        self._close_item(_status(self._reason))
        response = _ended(self._head, self._reason, self._output, self, self._chat)
        self._event(f"response.{response['status']}", response=response)
        self.exchange.end()

    def report_failure(self, error: ApiError) -> None:
        """Reply with the error, or end the stream with an event of it."""
        if not self.started:
            super().report_failure(error)
            return
        failure = {"code": "server_error", "message": str(error)}
        self._event("response.failed", response=self._head | {"status": "failed", "error": failure})
        self.exchange.end()

    def _piece(self, piece: Piece) -> None:
        if isinstance(piece, str):
            self._open_text("message").append(piece)
            self._event("response.output_text.delta", **self._place(), content_index=0, delta=piece, logprobs=[])
        elif isinstance(piece, ThoughtText):
            self._open_text("reasoning").append(piece.text)
            self._event("response.reasoning_text.delta", **self._place(), content_index=0, delta=piece.text)
        elif isinstance(piece, CallStart):
            self._close_item()
            self._open(_call_item(piece.call_id, piece.name, "", "in_progress"))
        elif isinstance(piece, CallArguments) and self._item is not None:
            self._item["arguments"] += piece.text
            self._event("response.function_call_arguments.delta", **self._place(), delta=piece.text)

    def _open_text(self, kind: str) -> list[str]:
        """The text of the open item, which is of this kind from now on."""
        if self._text is None or self._item is None or self._item["type"] != kind:
            self._close_item()
            make = _text_item if kind == "message" else _thought_item
            item = make(self._head, len(self._output), "", "in_progress")
            self._open(item | {"content": []})
            self._text = []
            self._event("response.content_part.added", **self._place(), content_index=0, part=item["content"][0])
        return self._text

    def _open(self, item: dict[str, Any]) -> None:
        self._item = item
        self._event("response.output_item.added", output_index=len(self._output), item=item)

    def _close_item(self, status: str = "completed") -> None:
        item = self._item
        if item is None:
            return
        if self._text is not None:
            text = "".join(self._text)
            if item["type"] == "message":
                part = _text_part(text)
                self._event("response.output_text.done", **self._place(), content_index=0, text=text, logprobs=[])
            else:
                part = _thought_part(text)
                self._event("response.reasoning_text.done", **self._place(), content_index=0, text=text)
            self._event("response.content_part.done", **self._place(), content_index=0, part=part)
            item["content"] = [part]
        else:
            named = {"name": item["name"], "arguments": item["arguments"]}
            self._event("response.function_call_arguments.done", **self._place(), **named)
        item["status"] = status
        self._event("response.output_item.done", output_index=len(self._output), item=item)
        self._output.append(item)
        self._item = self._text = None

    def _place(self) -> dict[str, Any]:
        assert self._item is not None
        return {"item_id": self._item["id"], "output_index": len(self._output)}

    def _text_writer(self) -> Callable[[str], None]:
        """What writes a piece of text the fast way: the event but for its text and its number."""
        kind = "response.output_text.delta"
        place = {**self._place(), "content_index": 0, "logprobs": []}
        head, tail = frames.text_frame(lambda piece: {"type": kind, **place, "delta": piece}, kind)
        tail, texts, write = tail.removesuffix(b"}\n\n"), self._text, self.exchange.write
        assert texts is not None

        def write_text(text: str) -> None:
            texts.append(text)
            write(b'%b%b%b,"sequence_number":%d}\n\n' % (head, encode_basestring(text).encode(), tail, self._number))
            self._number += 1

        return write_text

    def _event(self, kind: str, **fields: Any) -> None:
        self.exchange.write(frames.event({"type": kind, **fields, "sequence_number": self._number}, kind))
        self._number += 1
