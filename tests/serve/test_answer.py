"""Answers without a server: an engine whose events the test makes, an exchange on a transport that keeps its bytes."""

from __future__ import annotations

import json
from array import array
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, cast

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings
from serving import REFERENCE_MODEL

from megatoken.engine.request import FinishReason, Request, TokenEvent
from megatoken.engine.tokenizer import Tokenizer
from megatoken.errors import CapacityError, MegatokenError
from megatoken.serve import frames
from megatoken.serve.answer import Answer, FullAnswer, Prompt
from megatoken.serve.chat import Chat, ChatStream
from megatoken.serve.context import ApiContext
from megatoken.serve.engine_client import EngineClient, Refused, Sink
from megatoken.serve.exchange import Exchange, HttpRequest
from megatoken.serve.logprobs import TokenNames
from megatoken.serve.messages import Busy, ServedModel
from megatoken.serve.options import ServeConfig
from megatoken.serve.responses import ResponseStream, whole_response
from megatoken.serve.schema_chat import ChatBody
from megatoken.serve.tenants import Tenant
from megatoken.serve.tool_calls import CallParser, ToolFormat, call_parser

TOKENIZER = Tokenizer(REFERENCE_MODEL / "tokenizer.json")


@dataclass
class Engine:
    """Keeps what is submitted; the test sends events."""

    sinks: dict[int, Sink] = field(default_factory=dict)
    cancelled: list[int] = field(default_factory=list)
    places: int = 8

    def submit(
        self,
        request: Request,
        sink: Sink,
        tenant: Tenant,
        priority: int,
        *,
        whole: bool = False,
        answers: int = 1,
    ) -> int:
        if len(self.sinks) == self.places:
            raise Refused(503, "full", 5)
        self.sinks[len(self.sinks)] = sink
        return len(self.sinks) - 1

    def cancel(self, request_id: int, *, stopped: bool = False) -> None:
        self.cancelled.append(request_id)

    def send(self, request_id: int, text: str, reason: FinishReason | None = None, **more: Any) -> None:
        ids = tuple(TOKENIZER.encode(text, add_special=False))
        self.sinks[request_id](TokenEvent(request_id, ids, reason, **more))


@dataclass
class Connection:
    """Where an exchange writes."""

    data: bytes = b""

    def write(self, data: bytes) -> None:
        self.data += data

    def extra_headers(self, request: HttpRequest) -> list[tuple[str, str]]:
        return []

    def flush_soon(self, exchange: Exchange) -> None:
        pass

    def answered(self, exchange: Exchange) -> None:
        pass

    def release_body(self, count: int) -> None:
        pass


@dataclass
class Started:
    """A stream that has begun."""

    answer: Answer
    engine: Engine
    exchange: Exchange
    connection: Connection

    def events(self) -> list[Any]:
        """Data of the events so far."""
        self.exchange.flush()
        body = self.connection.data.partition(b"\r\n\r\n")[2]
        lines = [line for line in body.decode().replace("\r", "").split("\n") if line.startswith("data: ")]
        return [line[6:] if line.endswith("[DONE]") else json.loads(line[6:]) for line in lines]

    @property
    def status(self) -> int:
        return int(self.connection.data.split(b" ")[1])


Made = Callable[[Exchange, ApiContext, Chat], Answer]


def chat_stream(exchange: Exchange, api: ApiContext, chat: Chat) -> Answer:
    return ChatStream(exchange, api, chat, {"id": "chatcmpl-id", "model": "m"})


def start(
    places: int = 8, make_parser: Callable[[], CallParser] | None = None, made: Made = chat_stream, **fields: Any
) -> Started:
    body = ChatBody.model_validate({"messages": [{"role": "user", "content": "?"}], "stream": True, **fields})
    engine, connection = Engine(places=places), Connection()
    request = HttpRequest("POST", "/v1/chat/completions", "", {}, b"", "id", 0, http_1_0=True)
    exchange = Exchange(request, cast(Any, connection))
    model = ServedModel("m", 2048, 3072, REFERENCE_MODEL, 0)
    api = ApiContext.open(cast(EngineClient, engine), model, TOKENIZER, ServeConfig(), lambda line: None)
    names = TokenNames(TOKENIZER, as_ids=False)
    chat = Chat(body, Prompt(array("i", [1])), [Request([1])] * body.n, make_parser, names, {})
    answer = made(exchange, api, chat)
    answer.choices = chat.choices(answer, api)
    answer.begin()
    return Started(answer, engine, exchange, connection)


def test_an_error_before_the_first_token_has_its_status() -> None:
    for error, status in (
        (CapacityError("too long"), 400),
        (Busy("later", 3), 429),
        (MegatokenError("broken"), 500),
    ):
        stream = start()
        stream.engine.send(0, "", FinishReason.ERROR, error=error)
        assert stream.status == status
        assert (b"retry-after: 3" in stream.connection.data) == (status == 429)


def test_an_error_in_a_stream_is_an_event_and_the_end() -> None:
    stream = start(n=2)
    stream.engine.send(0, "Ann")
    stream.engine.send(1, "Bob")
    stream.engine.send(0, "", FinishReason.ERROR, error=MegatokenError("the engine stopped"))
    *_, error, done = stream.events()
    assert error["error"]["message"] == "the engine stopped" and error["error"]["type"] == "server_error"
    assert done == "[DONE]" and stream.exchange.ended
    assert stream.engine.cancelled == [1]
    stream.engine.send(1, "more")
    assert stream.events()[-1] == "[DONE]"


def test_a_client_that_leaves_cancels_every_choice() -> None:
    stream = start(n=3)
    stream.engine.send(1, "Ann", FinishReason.STOP)
    stream.exchange.abandon()
    assert stream.engine.cancelled == [0, 2]


def test_choices_that_were_sent_are_cancelled_if_one_is_refused() -> None:
    with pytest.raises(Refused, match="full") as refused:
        start(places=2, n=3)
    assert (refused.value.status, refused.value.retry_after_seconds) == (503, 5)


def test_calls_in_a_stream() -> None:
    stream = start(make_parser=lambda: call_parser(ToolFormat.HERMES, {"add"}))
    for piece in ("Well. ", "<tool", '_call>{"name": "add", "arguments"', ': {"a": ', "1}}", "</tool_call>"):
        stream.engine.send(0, piece)
    stream.engine.send(0, "", FinishReason.STOP)
    *chunks, done = stream.events()
    deltas = [chunk["choices"][0]["delta"] for chunk in chunks]
    assert "".join(delta.get("content") or "" for delta in deltas) == "Well. "
    calls = [call for delta in deltas for call in delta.get("tool_calls", [])]
    assert calls[0]["id"].startswith("call_") and calls[0]["type"] == "function"
    assert calls[0]["function"] == {"name": "add", "arguments": ""}
    assert "".join(call["function"]["arguments"] for call in calls) == '{"a": 1}'
    assert chunks[-1]["choices"][0]["finish_reason"] == "tool_calls" and done == "[DONE]"


def test_items_of_a_response_are_distinct_and_the_same_in_a_stream() -> None:
    head = {"id": "resp_1"}
    text = 'One. <tool_call>{"name": "add", "arguments": {}}</tool_call> Two. <tool_call>{"name": "add", "arguments": {'
    outputs = []
    for made in (
        lambda exchange, api, chat: FullAnswer(
            exchange, api.client, [chat.prompt], lambda full: whole_response(full, head, chat)
        ),
        lambda exchange, api, chat: ResponseStream(exchange, api, chat, head),
    ):
        begun = start(make_parser=lambda: call_parser(ToolFormat.HERMES, {"add"}), made=made)
        for at in range(0, len(text), 7):
            begun.engine.send(0, text[at : at + 7])
        begun.engine.send(0, "", FinishReason.LENGTH)
        body = begun.connection.data.partition(b"\r\n\r\n")[2]
        response = json.loads(body) if body.startswith(b"{") else begun.events()[-1]["response"]
        output = response["output"]
        assert len({item["id"] for item in output}) == 4
        assert [item["status"] for item in output] == ["completed"] * 3 + ["incomplete"]
        outputs.append([(item["type"], item.get("arguments", item.get("content"))) for item in output])
    assert outputs[0] == outputs[1]
    assert [kind for kind, _ in outputs[0]] == ["message", "function_call"] * 2


def test_usage_is_that_of_all_choices() -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    stream = start(n=2, stream_options=options)
    for sent in (0, 1, 1):
        stream.engine.send(sent, "a", cached_tokens=1 if sent == 0 else 0)
    assert stream.events()[-1]["usage"]["completion_tokens"] == 3
    stream.engine.send(0, "b", FinishReason.STOP)
    stream.engine.send(1, "c", FinishReason.STOP, cached_tokens=1)
    *_, last, _ = stream.events()
    assert last["usage"] == {
        "prompt_tokens": 1,
        "completion_tokens": 5,
        "total_tokens": 6,
        "prompt_tokens_details": {"cached_tokens": 1},
    }


def test_a_fault_of_ours_ends_the_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    stream = start()
    stream.engine.send(0, "Ann")
    monkeypatch.setattr(stream.answer, "add", lambda choice, delta: 1 // 0)
    with pytest.raises(ZeroDivisionError):
        stream.engine.send(0, "", FinishReason.STOP)
    assert stream.events()[-2]["error"]["type"] == "server_error" and stream.exchange.ended


PIECES = st.lists(
    st.text(alphabet=st.sampled_from('ab "\\\n\u2028é東😀/\x00\x7f'), max_size=6), min_size=1, max_size=12
)


@settings(max_examples=100, derandomize=True)
@given(pieces=PIECES, stop=st.sampled_from([None, ["ab"], ["é", "\n\n"]]))
def test_frames_of_a_template_say_what_whole_events_say(pieces: list[str], stop: list[str] | None) -> None:
    """With details in every chunk no template is used; the text must be the same."""
    texts = []
    for options in ({}, {"return_token_ids": True}):
        stream = start(stop=stop, **options)
        for at, piece in enumerate(pieces):
            stream.engine.send(0, piece, FinishReason.LENGTH if at == len(pieces) - 1 else None)
            if stream.engine.cancelled:
                break
        *chunks, done = stream.events()
        assert done == "[DONE]" and chunks[-1]["choices"][0]["finish_reason"] in ("length", "stop")
        texts.append("".join(chunk["choices"][0]["delta"].get("content", "") for chunk in chunks))
    whole = TOKENIZER.decode(TOKENIZER.encode("".join(pieces), add_special=False))
    assert texts[0] == texts[1] and (stop is not None or texts[0] == whole)


def test_text_frames() -> None:
    written: list[bytes] = []
    write_text = frames.text_writer(written.append, lambda piece: {"a": [piece], "b": 'x"y'})
    for piece in ("", '"\\\n', "é\u2028\N{GRINNING FACE}"):
        write_text(piece)
        assert written.pop() == frames.event({"a": [piece], "b": 'x"y'})
    head, tail = frames.text_frame(lambda piece: {"a": piece}, "kind")
    assert head + b'"z"' + tail == frames.event({"a": "z"}, "kind")
    assert frames.event({"half": "\ud800"}) == b'data: {"half":"\\ud800"}\n\n'
