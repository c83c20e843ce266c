"""One HTTP request's answer: the engine requests behind it, their text, and how it ends."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from array import array
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from io import StringIO
from typing import Any, ClassVar

from megatoken.engine.request import FinishReason, Request, TokenEvent, TokenLogprobs
from megatoken.engine.text_stream import TextStream
from megatoken.engine.tokenizer import Tokenizer
from megatoken.errors import MegatokenError
from megatoken.serve import frames
from megatoken.serve.engine_client import EngineClient, Refused
from megatoken.serve.exchange import Exchange
from megatoken.serve.messages import StartedOver
from megatoken.serve.request_errors import ApiError, as_api_error
from megatoken.serve.schema_common import GenerationFields, StreamOptions
from megatoken.serve.tenants import DEFAULT_TENANT

_NOTHING_MORE = StreamOptions()


@dataclass(frozen=True, slots=True)
class Ending:
    """What ends an answer's text, and what the text shows.

    ``stop``: strings; ``stop_token_ids``: tokens that end it in the engine, and are shown with ``include_stop`` only.
    ``keep_special``: special tokens are shown. ``min_tokens``: stop strings do not count before so many tokens.
    ``prompt_only``: the answer has no tokens; the one that the engine makes at least is left out.
    """

    stop: tuple[str, ...] = ()
    stop_token_ids: frozenset[int] = frozenset()
    include_stop: bool = False
    keep_special: bool = False
    min_tokens: int = 0
    prompt_only: bool = False


class _IdText:
    """The text of a model without a tokenizer: its token ids."""

    stopped = None

    def add(self, token_ids: Sequence[int]) -> str:
        return "".join(f"{one} " for one in token_ids)

    def flush(self) -> str:
        return ""


@dataclass(slots=True)
class Delta:
    """What one event adds to a choice. The last one has a finish reason: of OpenAI's API, stop or length."""

    text: str
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprobs, ...] = ()
    finish_reason: str | None = None
    stop_reason: str | int | None = None
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()


class Choice:
    """One of the answers to a prompt: the sink of one engine request."""

    __slots__ = (
        *("_answer", "_can_stop", "_ending", "_text", "_tokenizer", "cached_tokens", "ended", "index", "request"),
        *("request_id", "write_text"),
    )

    def __init__(
        self, answer: Answer, index: int, request: Request, ending: Ending, tokenizer: Tokenizer | None
    ) -> None:
        self._answer = answer
        self._ending = ending
        self._can_stop = bool(ending.stop)
        self._tokenizer = tokenizer
        self._text = self._new_text()
        self.index = index
        self.request = request
        self.request_id: int | None = None
        self.ended = False
        self.cached_tokens = 0
        # set by a stream to take pieces of text, in place of ``Answer.add``, between the first event and the last
        self.write_text: Callable[[str], None] | None = None

    def on_event(self, event: TokenEvent) -> None:
        """Take new tokens from the engine."""
        try:
            if self.write_text is None or event.finish_reason is not None:
                self._take(event)
                return
            token_ids = event.token_ids
            self._answer.completion_tokens += len(token_ids)
            text = self._text.add(token_ids)
            if self._can_stop and self._text.stopped is not None:
                self._end(Delta(text, token_ids))
            elif text:
                self.write_text(text)
        except Exception:
            self._answer.fail(ApiError("the server failed to write this answer; its log says more", 500))
            raise

    def _take(self, event: TokenEvent) -> None:
        if self.ended:
            return
        if isinstance(event.error, StartedOver) and isinstance(self._answer, FullAnswer):
            self._text = self._new_text()
            self._answer.start_over(self)
            return
        if event.error is not None or event.finish_reason in (FinishReason.ERROR, FinishReason.CANCELLED):
            self.ended = True
            self._answer.fail(as_api_error(event.error or MegatokenError("the engine cancelled this request")))
            return
        if self._ending.prompt_only:
            event = event._replace(token_ids=(), logprobs=(), finish_reason=FinishReason.LENGTH)
        self._answer.count(self, event)
        shown, stop_id = event.token_ids, None
        if event.finish_reason is FinishReason.STOP and shown:
            stop_id = shown[-1] if shown[-1] in self._ending.stop_token_ids else None
            if stop_id is not None and not self._ending.include_stop:
                shown = shown[:-1]
        text = self._text.add(shown)
        delta = Delta(text, event.token_ids, event.logprobs, None, stop_id, event.prompt_logprobs)
        if event.finish_reason is None and self._text.stopped is None:
            self._answer.add(self, delta)
        else:
            if self._text.stopped is None:
                delta.finish_reason = str(event.finish_reason)
                delta.text += self._text.flush()
            self._end(delta)

    def _new_text(self) -> TextStream | _IdText:
        if self._tokenizer is None:
            return _IdText()
        ending = self._ending
        return TextStream(
            self._tokenizer, ending.stop, ending.include_stop, ending.keep_special, min_tokens=ending.min_tokens
        )

    def _end(self, delta: Delta) -> None:
        if self._text.stopped is not None:
            delta.finish_reason, delta.stop_reason = "stop", self._text.stopped
            self._answer.cancel_choice(self, stopped=True)
        self.ended = True
        self._answer.add(self, delta)
        self._answer.choice_ended()


@dataclass(slots=True)
class Prompt:
    """Token ids to continue, and their text where the answer repeats it.

    As an array, because an open request holds its prompt: a list of integers takes nine times the memory.
    """

    token_ids: array[int]
    text: str = ""


@dataclass
class Answer(ABC):
    """The answer to one HTTP request: one choice or several, all of which must succeed."""

    exchange: Exchange
    client: EngineClient
    prompts: list[Prompt]
    choices: list[Choice] = field(default_factory=list)
    # of the route's fields, by those of the engine's requests, where they differ
    names: Mapping[str, str] = field(default_factory=dict)
    priority: int = 0  # of its requests, lowest first, among those of one tenant that wait
    failed: bool = False
    whole: ClassVar[bool] = False  # whether the client sees nothing before the end
    completion_tokens: int = 0  # generated so far, for all choices
    cached_tokens: int = 0  # of the prompts, taken from the prefix cache by the first choice of each
    reasoning_tokens: int | None = None  # of the generated ones, thoughts; None: unknown, or the model has none

    def __post_init__(self) -> None:
        self._prompt_tokens = sum(len(one.token_ids) for one in self.prompts)

    @abstractmethod
    def add(self, choice: Choice, delta: Delta) -> None:
        """Take what an event adds."""

    @abstractmethod
    def complete(self) -> None:
        """Every choice has ended."""

    @abstractmethod
    def report_failure(self, error: ApiError) -> None:
        """Say that there will be no answer, or no more of it."""

    def begin(self) -> None:
        """Send every choice to the engine. Raises Refused: the engine takes no requests."""
        self.exchange.on_disconnect(self.cancel)
        tenant = self.exchange.request.tenant or DEFAULT_TENANT
        each = len(self.choices) // len(self.prompts)
        for number, choice in enumerate(self.choices):
            try:
                choice.request_id = self.client.submit(
                    choice.request,
                    choice.on_event,
                    tenant,
                    self.priority,
                    whole=self.whole,
                    answers=0 if number % each else each,
                )
            except Refused:
                self.cancel()
                raise

    def end_without_tokens(self) -> None:
        """Complete the answer without the engine, which makes at least one token."""
        for choice in self.choices:
            choice.ended = True
            self.add(choice, Delta("", finish_reason="length"))
        self.choice_ended()

    def cancel(self) -> None:
        """End every choice in the engine."""
        for choice in self.choices:
            if not choice.ended:
                choice.ended = True
                self.cancel_choice(choice)

    def cancel_choice(self, choice: Choice, *, stopped: bool = False) -> None:
        """End one choice in the engine; ``stopped``: by a stop string."""
        if choice.request_id is not None:
            self.client.cancel(choice.request_id, stopped=stopped)

    def choice_ended(self) -> None:
        """Complete the answer if it was the last."""
        if not self.failed and all(choice.ended for choice in self.choices):
            self._note_tokens()
            self.complete()

    def fail(self, error: ApiError) -> None:
        """End all choices because of one."""
        if self.failed:
            return
        self.failed = True
        self.cancel()
        self._note_tokens()
        self.report_failure(error.renamed(self.names))

    def usage(self) -> dict[str, Any]:
        """Tokens of the prompts and answers so far."""
        thoughts = self.reasoning_tokens
        return {
            "prompt_tokens": self._prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "total_tokens": self._prompt_tokens + self.completion_tokens,
            "prompt_tokens_details": {"cached_tokens": self.cached_tokens},
            **({} if thoughts is None else {"completion_tokens_details": {"reasoning_tokens": thoughts}}),
        }

    def count(self, choice: Choice, event: TokenEvent) -> None:
        """Add an event's tokens to the usage."""
        self.completion_tokens += len(event.token_ids)
        if event.cached_tokens and choice.index % (len(self.choices) // len(self.prompts)) == 0:
            choice.cached_tokens = event.cached_tokens
            self.cached_tokens += event.cached_tokens

    def _note_tokens(self) -> None:
        usage = self.usage()
        self.exchange.notes |= {name: usage[name] for name in ("prompt_tokens", "completion_tokens")}


@dataclass(slots=True)
class _Collected:
    """What has come of a choice, with few bytes for each token."""

    text: StringIO = field(default_factory=StringIO)
    token_ids: array[int] = field(default_factory=lambda: array("q"))
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()
    last: Delta = field(default_factory=lambda: Delta(""))


class FullAnswer(Answer):
    """An answer in one body."""

    whole = True

    def __init__(
        self, exchange: Exchange, client: EngineClient, prompts: list[Prompt], render: Callable[[FullAnswer], Any]
    ) -> None:
        """``render`` makes the body when all choices have ended."""
        super().__init__(exchange, client, prompts)
        self._render = render
        self._collected: dict[int, _Collected] = {}

    def add(self, choice: Choice, delta: Delta) -> None:
        """Keep it."""
        collected = self._collected.setdefault(choice.index, _Collected())
        collected.text.write(delta.text)
        collected.token_ids.extend(delta.token_ids)
        collected.logprobs.extend(delta.logprobs)
        collected.prompt_logprobs += delta.prompt_logprobs
        collected.last = delta

    def start_over(self, choice: Choice) -> None:
        """Drop what was kept of a choice, which is computed again."""
        self.completion_tokens -= len(self._collected.pop(choice.index, _Collected()).token_ids)
        self.cached_tokens -= choice.cached_tokens
        choice.cached_tokens = 0

    def all_of(self, choice: Choice) -> Delta:
        """All of a choice in one."""
        collected = self._collected[choice.index]
        return Delta(
            collected.text.getvalue(),
            tuple(collected.token_ids),
            tuple(collected.logprobs),
            collected.last.finish_reason,
            collected.last.stop_reason,
            collected.prompt_logprobs,
        )

    def complete(self) -> None:
        """Reply."""
        self.exchange.reply(200, frames.json_text(self._render(self)).encode())

    def report_failure(self, error: ApiError) -> None:
        """Reply with the error."""
        reply_error(self.exchange, error)


class StreamedAnswer(Answer):
    """An answer in server-sent events. The first one waits for the engine's first event, so that what the engine
    refuses gets its status.
    """

    started = False

    def start(self) -> None:
        """Begin the stream, once."""
        if not self.started:
            self.started = True
            self.exchange.start_events()

    def report_failure(self, error: ApiError) -> None:
        """Reply with the error, or end the stream with an event of it."""
        if not self.started:
            reply_error(self.exchange, error)
            return
        self.exchange.write(b"data: " + error.body() + b"\n\n" + frames.DONE)
        self.exchange.end()


class ChunkStream(StreamedAnswer):
    """A stream of chunks, which all have the same head; after them the usage, if it was asked for."""

    def __init__(
        self,
        exchange: Exchange,
        client: EngineClient,
        prompts: list[Prompt],
        head: Mapping[str, Any],
        body: GenerationFields,
        *,
        logprobs: bool,
    ) -> None:
        super().__init__(exchange, client, prompts)
        options = body.stream_options or _NOTHING_MORE
        self._head, self._usage, self._continuous = head, options.include_usage, options.continuous_usage_stats
        self._detailed = logprobs or body.return_token_ids or self._continuous  # events bring more than text

    def chunk(self, choice: Choice, **content: Any) -> dict[str, Any]:
        """The data of a chunk of one choice."""
        entry = {"index": choice.index, **content, "logprobs": None, "finish_reason": None}
        chunk = {**self._head, "choices": [entry]}
        return {**chunk, "usage": None} if self._usage else chunk

    def write_chunk(self, chunk: dict[str, Any]) -> None:
        """Write a chunk."""
        if self._continuous:
            chunk["usage"] = self.usage()
        self.exchange.write(frames.event(chunk))

    def complete(self) -> None:
        """Write the usage, if it was asked for, and the end."""
        if self._usage:
            self.exchange.write(frames.event({**self._head, "choices": [], "usage": self.usage()}))
        self.exchange.write(frames.DONE)
        self.exchange.end()


def answer_head(model: str, exchange: Exchange, body: GenerationFields, prefix: str, kind: str) -> dict[str, Any]:
    """The fields that an answer and all its chunks begin with."""
    answer_id = f"{prefix}-{body.request_id or exchange.request.request_id}"
    return {"id": answer_id, "object": kind, "created": int(time.time()), "model": model}


def reply_error(exchange: Exchange, error: ApiError) -> None:
    """Answer with an error in OpenAI's shape."""
    headers = [] if error.retry_after is None else [("retry-after", str(error.retry_after))]
    exchange.reply(error.status, error.body(), headers=headers)
