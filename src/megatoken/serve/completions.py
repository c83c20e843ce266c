"""/v1/completions: prompts as text or token ids, one or a batch."""

from __future__ import annotations

import asyncio
from array import array
from collections.abc import Awaitable, Mapping
from typing import Any

from megatoken.engine.tokenizer import LONG_TEXT
from megatoken.serve import frames
from megatoken.serve.answer import Answer, Choice, ChunkStream, Delta, FullAnswer, Prompt, answer_head
from megatoken.serve.context import ENGINE_NAMES, ApiContext, cache_salt, ending, engine_requests, grammar_of
from megatoken.serve.exchange import Exchange
from megatoken.serve.logprobs import TokenNames, completion_logprobs, echoed_logprobs, ranked_logprobs
from megatoken.serve.schema_common import parse_body
from megatoken.serve.schema_completions import CompletionBody
from megatoken.serve.server import api_route


@api_route
def completions(api: ApiContext, exchange: Exchange) -> Awaitable[None] | None:
    """Continue prompts."""
    body = parse_body(CompletionBody, exchange.take_body())
    api.check_body(body)
    first, *others = body.prompts
    if others or len(first) >= LONG_TEXT:
        return _answer_later(api, exchange, body)
    if isinstance(first, str):
        token_ids = api.encode_now(first, add_special=body.add_special_tokens, param="prompt")
    else:
        token_ids = first
    _answer(api, exchange, body, [_prompt(api, body, first, token_ids)])
    return None


async def _answer_later(api: ApiContext, exchange: Exchange, body: CompletionBody) -> None:
    """Continue prompts that take a while to prepare, with turns of the loop for the streams."""
    prompts: list[Prompt] = []
    for prompt in body.prompts:
        if prompts:
            await asyncio.sleep(0)
        if isinstance(prompt, str):
            token_ids = await api.encode(prompt, add_special=body.add_special_tokens, param="prompt")
        else:
            token_ids = prompt
        prompts.append(_prompt(api, body, prompt, token_ids))
    _answer(api, exchange, body, prompts)


def _answer(api: ApiContext, exchange: Exchange, body: CompletionBody, prompts: list[Prompt]) -> None:
    grammar, grammar_field = grammar_of(body)
    fields = {
        "max_tokens": max(body.max_tokens, 1),
        "logprobs": body.logprobs,
        "prompt_logprobs": body.most_prompt_logprobs,
        "grammar": grammar,
        "cache_salt": cache_salt(exchange, body),
    }
    requests = engine_requests(api, body, prompts, fields)
    names = TokenNames(api.tokenizer, body.return_tokens_as_token_ids)
    head = answer_head(api.model.name, exchange, body, "cmpl", "text_completion")
    answer: Answer
    if body.stream:
        answer = CompletionStream(exchange, api, prompts, head, body, names)
    else:
        answer = FullAnswer(exchange, api.client, prompts, lambda full: _completion(full, head, body, names))
    end = ending(body, prompt_only=body.max_tokens == 0)
    answer.choices = [Choice(answer, at, one, end, api.tokenizer) for at, one in enumerate(requests)]
    answer.names, answer.priority = {**ENGINE_NAMES, "grammar": grammar_field}, body.priority
    if body.prompt_logprobs is None:
        answer.names = {**answer.names, "prompt_logprobs": "logprobs"}
    if body.max_tokens or body.most_prompt_logprobs is not None:
        answer.begin()
    else:
        answer.end_without_tokens()


def _prompt(api: ApiContext, body: CompletionBody, prompt: str | list[int], token_ids: list[int]) -> Prompt:
    token_ids = api.fit(token_ids, body, body.max_tokens, "prompt")
    text = ""
    if body.echo:
        cut = body.truncate_prompt_tokens is not None
        text = prompt if isinstance(prompt, str) and not cut else _text(api, token_ids)
    return Prompt(array("i", token_ids), text)


def _text(api: ApiContext, token_ids: list[int]) -> str:
    return api.tokenizer.decode(token_ids) if api.tokenizer is not None else "".join(f"{one} " for one in token_ids)


def _completion(answer: FullAnswer, head: Mapping[str, Any], body: CompletionBody, names: TokenNames) -> dict[str, Any]:
    choices = []
    for choice in answer.choices:
        prompt = answer.prompts[choice.index // body.n]
        whole = answer.all_of(choice)
        entry = {
            "index": choice.index,
            "text": prompt.text + whole.text,
            "logprobs": _logprobs(body, whole, names, 0, prompt if body.echo else None),
            "finish_reason": whole.finish_reason,
            "stop_reason": whole.stop_reason,
        }
        if body.prompt_logprobs is not None:
            entry["prompt_logprobs"] = ranked_logprobs(whole.prompt_logprobs, names, body.prompt_logprobs)
        if body.return_token_ids:
            entry |= {"token_ids": whole.token_ids, "prompt_token_ids": prompt.token_ids.tolist()}
        choices.append(entry)
    return {**head, "choices": choices, "usage": answer.usage(), "system_fingerprint": None}


def _logprobs(
    body: CompletionBody, delta: Delta, names: TokenNames, offset: int, echoed: Prompt | None
) -> dict[str, list[Any]] | None:
    """The field of a choice or chunk whose text begins at ``offset``, or with the prompt that it has ``echoed``."""
    if body.logprobs is None:
        return None
    if echoed is None:
        return completion_logprobs(delta.logprobs, names, offset)
    before = echoed_logprobs(echoed.token_ids, delta.prompt_logprobs, names, body.logprobs)
    after = completion_logprobs(delta.logprobs, names, len(echoed.text))
    return {name: before[name] + after[name] for name in after}


class CompletionStream(ChunkStream):
    """A completion in chunks."""

    def __init__(
        self,
        exchange: Exchange,
        api: ApiContext,
        prompts: list[Prompt],
        head: Mapping[str, Any],
        body: CompletionBody,
        names: TokenNames,
    ) -> None:
        super().__init__(exchange, api.client, prompts, head, body, logprobs=body.logprobs is not None)
        self._body = body
        self._names = names
        self._offsets: dict[int, int] = {}  # characters written of each choice

    def add(self, choice: Choice, delta: Delta) -> None:
        """Write the chunk of an event; the first one brings the prompt if it is echoed."""
        self.start()
        first = choice.index not in self._offsets
        offset = self._offsets.setdefault(choice.index, 0)
        prompt = self.prompts[choice.index // self._body.n]
        text = prompt.text + delta.text if first else delta.text
        self._offsets[choice.index] += len(text)
        if first and not self._detailed:
            choice.write_text = frames.text_writer(self.exchange.write, lambda piece: self.chunk(choice, text=piece))
        if choice.write_text is not None and delta.finish_reason is None:
            choice.write_text(text)
        elif text or first or self._detailed or delta.finish_reason is not None:
            chunk = self.chunk(choice, text=text)
            entry = chunk["choices"][0]
            entry["logprobs"] = _logprobs(
                self._body, delta, self._names, offset, prompt if first and self._body.echo else None
            )
            if self._body.return_token_ids:
                entry["token_ids"] = delta.token_ids
                entry |= {"prompt_token_ids": prompt.token_ids.tolist()} if first else {}
            entry |= {"finish_reason": delta.finish_reason, "stop_reason": delta.stop_reason}
            self.write_chunk(chunk)
