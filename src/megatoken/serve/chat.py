"""/v1/chat/completions."""

from __future__ import annotations

from array import array
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from megatoken.engine.request import Grammar, GrammarKind, Request, Thought
from megatoken.serve import frames
from megatoken.serve.answer import Answer, Choice, ChunkStream, Delta, FullAnswer, Prompt, answer_head
from megatoken.serve.chat_prompt import chat_text
from megatoken.serve.context import ENGINE_NAMES, ApiContext, cache_salt, ending, engine_requests, grammar_of
from megatoken.serve.exchange import Exchange
from megatoken.serve.logprobs import TokenNames, chat_logprobs, ranked_logprobs
from megatoken.serve.reasoning import (
    THOUGHT_BEGIN,
    THOUGHT_END,
    HarmonyParser,
    PromptEnd,
    ReasoningFormat,
    ThinkParser,
    prompt_end,
)
from megatoken.serve.request_errors import ApiError
from megatoken.serve.schema_chat import ChatBody, NamedTool, Tool
from megatoken.serve.schema_common import parse_body, schema_grammar
from megatoken.serve.server import api_route
from megatoken.serve.tool_calls import (
    Call,
    CallArguments,
    CallParser,
    CallStart,
    NamedParser,
    Piece,
    ThoughtText,
    call_parser,
    first_call_only,
    forced_parser,
    forced_schema,
    whole_parts,
)


@dataclass(frozen=True, slots=True)
class Chat:
    """A checked chat, ready for the engine."""

    body: ChatBody
    prompt: Prompt
    requests: list[Request]
    # makes what separates thoughts and calls from text in one answer; None: nothing does
    make_parser: Callable[[], CallParser] | None
    names: TokenNames
    engine_names: Mapping[str, str]  # fields of the body by those of the engine's requests, where they differ
    keep_special: bool = False  # the parser needs the special tokens in the text
    thinks: bool = False  # the model marks its thoughts

    def choices(self, answer: Answer, api: ApiContext) -> list[Choice]:
        """Where the events of the requests go."""
        end = ending(self.body, keep_special=self.keep_special)
        return [Choice(answer, at, one, end, api.tokenizer) for at, one in enumerate(self.requests)]

    def parts(self, text: str) -> list[str | ThoughtText | Call]:
        """Thoughts, text and calls of a whole answer, in their order."""
        if self.make_parser is None:
            return [text] if text else []
        parser = self.make_parser()
        return whole_parts(self.allowed([*parser.add(text), *parser.end()]))

    def allowed(self, pieces: list[Piece]) -> list[Piece]:
        """Those that the body allows; thoughts too, even where they are not shown."""
        return pieces if self.body.parallel_tool_calls else first_call_only(pieces)

    def count_thoughts(self, thoughts: Iterable[str]) -> int | None:
        """Tokens of the thoughts of an answer, each of which is a whole one; None of a model without any."""
        return sum(map(self.names.count, thoughts)) if self.thinks else None


async def prepare_chat(api: ApiContext, exchange: Exchange, body: ChatBody) -> Chat:
    """Render and encode the messages, and make the engine's requests.

    Raises:
        ApiError: a field has a value that cannot be used.
    """
    make_parser = tool_parser(api, body)
    grammar, grammar_field = _grammar(body)
    tools = () if body.tool_choice == "none" else body.tools
    variables = _variables(api, body)
    text = await chat_text(api, body, body.messages, exchange.tenant_name, tools=tools, variables=variables)
    if api.reasoning_format is ReasoningFormat.THINK:
        end = prompt_end(text, (body.messages[-1].text or "") if body.continue_final_message else "")
        thought = _thought(api, body, end, held=grammar is not None)
        if thought is not None:
            grammar_field = grammar_field if grammar is not None else "thinking_token_budget"
            grammar = replace(grammar or Grammar(GrammarKind.ANY), thought=thought)
        if grammar is None or thought is not None:
            make_parser = partial(_think_parser, make_parser, end)
    elif body.thinking_token_budget is not None:
        raise ApiError(
            "thinking_token_budget: only for models that think between <think> and </think>",
            param="thinking_token_budget",
        )
    harmony = api.reasoning_format is ReasoningFormat.HARMONY and grammar is None
    if harmony:
        make_parser = partial(HarmonyParser, frozenset(tool.function.name for tool in tools))
    token_ids = await api.encode(text, add_special=body.add_special_tokens, param="messages")
    max_tokens = body.max_completion_tokens or body.max_tokens
    token_ids = api.fit(token_ids, body, max_tokens, "messages")
    fields = {
        "max_tokens": max_tokens or api.model.max_length - len(token_ids),
        "logprobs": body.top_logprobs if body.logprobs else None,
        "prompt_logprobs": body.prompt_logprobs,
        "grammar": grammar,
        "cache_salt": cache_salt(exchange, body),
    }
    prompt = Prompt(array("i", token_ids))
    requests = engine_requests(api, body, [prompt], fields)
    names = TokenNames(api.tokenizer, body.return_tokens_as_token_ids)
    engine_names = {**ENGINE_NAMES, "prompt": "messages", "grammar": grammar_field}
    thinks = api.reasoning_format is not ReasoningFormat.OFF
    return Chat(body, prompt, requests, make_parser, names, engine_names, keep_special=harmony, thinks=thinks)


def _think_parser(make_inner: Callable[[], CallParser] | None, end: PromptEnd) -> ThinkParser:
    return ThinkParser(None if make_inner is None else make_inner(), end)


def _thought(api: ApiContext, body: ChatBody, end: PromptEnd, *, held: bool) -> Thought | None:
    """What the engine must know of the thought; None: nothing.

    ``held``: the answer is held to a form, which then begins after the thought.

    Raises:
        ApiError: the thought has a budget, and the tokenizer no tokens for its beginning and end.
    """
    if end is PromptEnd.ANSWERING or not (held or body.thinking_token_budget is not None) or api.tokenizer is None:
        return None
    ids = [api.tokenizer.single_id(text) for text in (THOUGHT_BEGIN, THOUGHT_END)]
    begin, last = (None, ids[1]) if end is PromptEnd.THINKING else ids
    if last is None or (begin is None and end is PromptEnd.OPEN):
        if body.thinking_token_budget is None:
            return None
        raise ApiError(
            f"thinking_token_budget: {THOUGHT_BEGIN} and {THOUGHT_END} are no tokens of this model",
            param="thinking_token_budget",
        )
    return Thought(last, begin, body.thinking_token_budget)


@api_route
async def chat_completions(api: ApiContext, exchange: Exchange) -> None:
    """Answer a chat."""
    body = parse_body(ChatBody, exchange.take_body())
    api.check_body(body)
    chat = await prepare_chat(api, exchange, body)
    kind = "chat.completion.chunk" if body.stream else "chat.completion"
    head = answer_head(api.model.name, exchange, body, "chatcmpl", kind)
    answer: Answer
    if body.stream:
        answer = ChatStream(exchange, api, chat, head)
    else:
        answer = FullAnswer(exchange, api.client, [chat.prompt], lambda full: _completion(full, head, chat))
    answer.choices = chat.choices(answer, api)
    answer.names, answer.priority = chat.engine_names, body.priority
    answer.begin()


def tool_parser(api: ApiContext, body: ChatBody) -> Callable[[], CallParser] | None:
    """What separates calls from text in an answer; None: nothing does.

    Raises:
        ApiError: the form of the model's calls is unknown.
    """
    if not body.tools or body.tool_choice == "none":
        return None
    if isinstance(body.tool_choice, NamedTool):
        name = body.tool_choice.function.name
        return lambda: NamedParser(name)
    if body.tool_choice == "required":
        return forced_parser
    tool_format = api.tool_format
    if api.reasoning_format is ReasoningFormat.HARMONY:
        return None  # calls are messages of the format
    if tool_format is None:
        raise ApiError(
            "tools: how this model calls tools is unknown from its chat template; start the server with "
            "--tool-format llama3 or hermes, or send tool_choice required",
            param="tools",
        )
    names = frozenset(tool.function.name for tool in body.tools)
    return lambda: call_parser(tool_format, names)


def tool_grammar(tools: list[Tool], choice: str | NamedTool | None, several: bool) -> Grammar | None:
    """What holds an answer to a call, where the request demands one."""
    functions = [tool.function.model_dump(exclude_none=True) for tool in tools]
    if choice == "required":
        return schema_grammar(forced_schema(functions, several=several))
    if isinstance(choice, NamedTool):
        found = next(one for one in functions if one["name"] == choice.function.name)
        return schema_grammar(found.get("parameters") or {"type": "object"})
    return None


def _grammar(body: ChatBody) -> tuple[Grammar | None, str]:
    """What the engine holds the answer to, and the field that says so."""
    forced = tool_grammar(body.tools, body.tool_choice, body.parallel_tool_calls)
    stated, field = grammar_of(body)
    if forced is not None and stated is not None:
        raise ApiError("tool_choice: an answer cannot be a call and have another form", param="tool_choice")
    return (forced, "tools") if forced is not None else (stated, field)


def _variables(api: ApiContext, body: ChatBody) -> dict[str, Any]:
    if body.reasoning_effort is None:
        return body.chat_template_kwargs
    if not api.templates.mentions("reasoning_effort"):
        raise ApiError("reasoning_effort: this model's chat template does not have it", param="reasoning_effort")
    return {"reasoning_effort": body.reasoning_effort} | body.chat_template_kwargs


def finish_reason(reason: str | None, body_choice: object, called: bool) -> str | None:
    """OpenAI's reason: an answer that calls a tool, without being held to a certain one, ends for its calls."""
    return "tool_calls" if called and reason == "stop" and not isinstance(body_choice, NamedTool) else reason


def _completion(answer: FullAnswer, head: Mapping[str, Any], chat: Chat) -> dict[str, Any]:
    body, choices, all_thoughts = chat.body, [], []
    for choice in answer.choices:
        whole = answer.all_of(choice)
        parts = chat.parts(whole.text)
        text = "".join(part for part in parts if isinstance(part, str))
        thoughts = "".join(part.text for part in parts if isinstance(part, ThoughtText))
        all_thoughts.append(thoughts)
        calls = [_call(part) for part in parts if isinstance(part, Call)]
        text = _echoed(body) + text
        content = text if text or chat.make_parser is None else None
        message: dict[str, Any] = {"role": "assistant", "content": content, "refusal": None}
        if thoughts and body.include_reasoning:
            message["reasoning"] = thoughts
        if calls:
            message["tool_calls"] = calls
        entry: dict[str, Any] = {
            "index": choice.index,
            "message": message,
            "logprobs": chat_logprobs(whole.logprobs, chat.names) if body.logprobs else None,
            "finish_reason": finish_reason(whole.finish_reason, body.tool_choice, bool(calls)),
            "stop_reason": whole.stop_reason,
        }
        if body.return_token_ids:
            entry["token_ids"] = whole.token_ids
        choices.append(entry)
    answer.reasoning_tokens = chat.count_thoughts(all_thoughts)
    completion = {**head, "choices": choices, "usage": answer.usage(), "system_fingerprint": None}
    if body.prompt_logprobs is not None:
        prompt_logprobs = answer.all_of(answer.choices[0]).prompt_logprobs
        completion["prompt_logprobs"] = ranked_logprobs(prompt_logprobs, chat.names, body.prompt_logprobs)
    if body.return_token_ids:
        completion["prompt_token_ids"] = answer.prompts[0].token_ids.tolist()
    return completion


def _echoed(body: ChatBody) -> str:
    """What the answer's text begins with: the last message, if it is the assistant's and the body asks for it."""
    last = body.messages[-1]
    return (last.text or "") if body.echo and last.role == "assistant" else ""


def _call(call: Call) -> dict[str, Any]:
    return {"id": call.call_id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}


class ChatStream(ChunkStream):
    """A chat's answer in chunks."""

    def __init__(self, exchange: Exchange, api: ApiContext, chat: Chat, head: Mapping[str, Any]) -> None:
        super().__init__(exchange, api.client, [chat.prompt], head, chat.body, logprobs=chat.body.logprobs)
        self._chat, self._body = chat, chat.body
        self._names = chat.names
        self._make_parser = chat.make_parser
        self._parsers: dict[int, CallParser] = {}
        self._begun: set[int] = set()
        self._called: set[int] = set()
        self._writers: dict[int, dict[str, Callable[[str], None]]] = {}  # of text and of thoughts, without details
        self._thoughts: defaultdict[int, list[str]] = defaultdict(list)

    def add(self, choice: Choice, delta: Delta) -> None:
        """Write the chunks of an event."""
        self.start()
        if choice.index not in self._begun:
            self._begun.add(choice.index)
            if self._make_parser is not None:
                self._parsers[choice.index] = self._make_parser()
            first: dict[str, Any] = {"role": "assistant", "content": _echoed(self._body)}
            prompt = {"prompt_token_ids": self.prompts[0].token_ids.tolist()} if self._body.return_token_ids else {}
            self._write(choice, first, more=prompt)
            if not self._detailed:  # else an event brings more than text
                names = ("content",) if self._make_parser is None else ("content", "reasoning")
                self._writers[choice.index] = {name: self._text_writer(choice, name) for name in names}
                if self._make_parser is None:
                    choice.write_text = self._writers[choice.index]["content"]
        ended = delta.finish_reason is not None
        pieces = self._pieces(choice, delta)
        if not (ended or self._detailed):
            writers = self._writers[choice.index]
            for piece in pieces:
                if isinstance(piece, str):
                    writers["content"](piece)
                elif isinstance(piece, ThoughtText):
                    writers["reasoning"](piece.text)
                else:
                    self._write(choice, _piece_delta(piece))
            return
        contents = [_piece_delta(piece) for piece in pieces] or [{}]
        for at, content in enumerate(contents):
            last = ended and at == len(contents) - 1
            self._write(choice, content, delta if at == 0 else None, delta if last else None)

    def complete(self) -> None:
        """Write the usage, if it was asked for, and the end."""
        if self._usage:
            self.reasoning_tokens = self._chat.count_thoughts(map("".join, self._thoughts.values()))
        super().complete()

    def _text_writer(self, choice: Choice, name: str) -> Callable[[str], None]:
        return frames.text_writer(self.exchange.write, lambda piece: self.chunk(choice, delta={name: piece}))

    def _pieces(self, choice: Choice, delta: Delta) -> list[Piece]:
        if self._make_parser is None:
            return [delta.text] if delta.text else []
        parser = self._parsers[choice.index]
        pieces = parser.add(delta.text)
        if delta.finish_reason is not None:
            pieces += parser.end()
        pieces = self._chat.allowed(pieces)
        if any(isinstance(piece, CallStart) for piece in pieces):
            self._called.add(choice.index)
        if self._usage:
            self._thoughts[choice.index] += [piece.text for piece in pieces if isinstance(piece, ThoughtText)]
        if not self._body.include_reasoning:
            pieces = [piece for piece in pieces if not isinstance(piece, ThoughtText)]
        return pieces

    def _write(
        self,
        choice: Choice,
        content: dict[str, Any],
        delta: Delta | None = None,
        end: Delta | None = None,
        more: Mapping[str, Any] | None = None,
    ) -> None:
        chunk = self.chunk(choice, delta=content)
        entry = chunk["choices"][0]
        if delta is not None:
            if self._body.logprobs:
                entry["logprobs"] = chat_logprobs(delta.logprobs, self._names)
            if self._body.return_token_ids:
                entry["token_ids"] = delta.token_ids
        if end is not None:
            called = choice.index in self._called
            entry["finish_reason"] = finish_reason(end.finish_reason, self._body.tool_choice, called)
            entry["stop_reason"] = end.stop_reason
        self.write_chunk({**chunk, **(more or {})})


def _piece_delta(piece: Piece) -> dict[str, Any]:
    if isinstance(piece, str):
        return {"content": piece}
    if isinstance(piece, ThoughtText):
        return {"reasoning": piece.text}
    if isinstance(piece, CallArguments):
        return {"tool_calls": [{"index": piece.index, "function": {"arguments": piece.text}}]}
    function = {"name": piece.name, "arguments": ""}
    return {"tool_calls": [{"index": piece.index, "id": piece.call_id, "type": "function", "function": function}]}
