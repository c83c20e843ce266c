"""What the API's routes need of a ready model: its tokenizer, templates, defaults and limits."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from http import HTTPStatus
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from megatoken.engine.request import Grammar, Request
from megatoken.engine.tensor_files import read_json
from megatoken.engine.tokenizer import LONG_TEXT, Tokenizer
from megatoken.errors import CheckpointError, RequestError
from megatoken.serve.answer import Ending, Prompt
from megatoken.serve.chat_template import ModelTemplates, TemplateRenderer
from megatoken.serve.engine_client import EngineClient
from megatoken.serve.exchange import Exchange
from megatoken.serve.messages import ServedModel
from megatoken.serve.options import ServeConfig
from megatoken.serve.reasoning import ReasoningFormat, reasoning_format_of
from megatoken.serve.request_errors import ApiError
from megatoken.serve.schema_common import Body, GenerationFields, SamplingDefaults
from megatoken.serve.tool_calls import ToolFormat, format_of

ENCODERS = 2  # threads that encode long texts; others wait, so that streams do not
LONGEST_PROMPT = 64  # characters for each token of the model's context; a text that is longer can never fit
MOST_UNKNOWN = 1000  # names of unknown fields that are remembered
MOST_REQUESTS = 1024  # of one body: prompts times n
MOST_PROMPT_LOGPROBS = 1 << 16  # of one body; more would hold up the answers of others while they are written
ENGINE_NAMES = {"ignore_end_token": "ignore_eos"}  # fields of the API by those of the engine's requests


@dataclass(slots=True)
class ApiContext:
    """What routes need, made when an engine is ready."""

    client: EngineClient
    model: ServedModel
    tokenizer: Tokenizer | None  # None if the model has none; then prompts are token ids, and so is the text of answers
    templates: ModelTemplates
    renderer: TemplateRenderer
    foreign: TemplateRenderer | None  # renders the templates that requests bring; None where that is not allowed
    defaults: SamplingDefaults
    tool_format: ToolFormat | None
    reasoning_format: ReasoningFormat
    note: Callable[[str], None]
    _unknown: set[str] = field(default_factory=set)
    _encoders: ThreadPoolExecutor = field(default_factory=lambda: ThreadPoolExecutor(ENCODERS, "encode"))

    @classmethod
    def open(
        cls,
        client: EngineClient,  # where requests go
        model: ServedModel,  # that is served
        tokenizer: Tokenizer | None,  # of the model
        options: ServeConfig,  # of the operator
        note: Callable[[str], None],  # takes a line for the log
    ) -> ApiContext:
        """Read the model's templates and defaults. Raises CheckpointError or UsageError: a file cannot be used."""
        templates, defaults = model_files(model.folder, options)
        tool_format, reasoning = options.tool_format, options.reasoning_format
        return cls(
            client,
            model,
            tokenizer,
            templates,
            TemplateRenderer(templates, model.max_length),
            TemplateRenderer(templates, model.max_length) if options.trust_request_chat_template else None,
            defaults,
            format_of(templates.by_name.values()) if tool_format is ToolFormat.AUTO else tool_format,
            reasoning_format_of(templates.by_name.values()) if reasoning is ReasoningFormat.AUTO else reasoning,
            note,
        )

    async def start(self) -> None:
        """Prepare for the first request."""
        if self.templates.by_name:
            await self.renderer.start()

    async def close(self) -> None:
        """End the renderers."""
        await self.renderer.close()
        if self.foreign is not None:
            await self.foreign.close()

    def check_body(self, body: Body) -> None:
        """Refuse another model's name; note fields that are ignored, each once.

        Raises:
            ApiError: the model is not served here.
        """
        if body.model is not None and body.model != self.model.name:
            raise ApiError(
                f"the model {body.model[:200]!r} is not served here; use {self.model.name!r}",
                HTTPStatus.NOT_FOUND,
                param="model",
                code="model_not_found",
            )
        new = [repr(name)[:80] for name in body.unknown if name not in self._unknown]
        if new and len(self._unknown) < MOST_UNKNOWN:
            self._unknown.update(body.unknown)
            self.note(f"ignored unknown fields of requests: {', '.join(new)[:500]}")

    async def encode(self, text: str, *, add_special: bool, param: str) -> list[int]:
        """As ``encode_now``, but a long text is encoded on another thread, so that it does not hold up the streams."""
        encode = partial(self.encode_now, text, add_special=add_special, param=param)
        if len(text) < LONG_TEXT:
            return encode()
        self.check_length(len(text), param)
        return await asyncio.get_running_loop().run_in_executor(self._encoders, encode)

    def encode_now(self, text: str, *, add_special: bool, param: str) -> list[int]:
        """Token ids of a prompt. Raises ApiError: there is no tokenizer, or the text cannot be encoded."""
        if self.tokenizer is None:
            raise ApiError("the model has no tokenizer; give the prompt as token ids", param=param)
        self.check_length(len(text), param)
        try:
            return self.tokenizer.encode(text, add_special=add_special)
        except RequestError as error:
            raise ApiError(str(error), param=param) from None

    def check_length(self, characters: int, param: str) -> None:
        """Refuse a text that can never fit, before any work is done on it. Raises ApiError: it is too long."""
        longest = max(LONG_TEXT, LONGEST_PROMPT * self.model.max_length)
        if characters > longest:
            raise ApiError(
                f"the prompt has {characters:,} characters, more than the {longest:,} that can ever fit",
                param=param,
                code="context_length_exceeded",
            )

    def fit(self, token_ids: list[int], body: GenerationFields, max_tokens: int | None, param: str) -> list[int]:
        """The prompt, cut to ``truncate_prompt_tokens``; of the model, and with room for an answer.

        Raises:
            ApiError: it is empty, outside the vocabulary or too long, or no prompt has room for such an answer.
        """
        longest = self.model.max_length
        if max_tokens is not None and max_tokens >= longest:
            name = "max_completion_tokens" if getattr(body, "max_completion_tokens", None) else "max_tokens"
            raise ApiError(
                f"{name}: an answer of {max_tokens:,} tokens leaves no room for a prompt in the model's context of "
                f"{longest:,}; give at most {longest - 1:,}",
                param=name,
                code="context_length_exceeded",
            )
        keep = body.truncate_prompt_tokens
        if keep is not None:
            keep = longest - min(max_tokens or 1, longest - 1) if keep < 0 else keep
            if keep < 1:
                raise ApiError("truncate_prompt_tokens: must be at least 1, or -1", param="truncate_prompt_tokens")
            token_ids = token_ids[-keep:]
        if not token_ids:
            raise ApiError("the prompt is empty; give at least one token", param=param)
        self.check_known(token_ids, param)
        room = max_tokens or 1
        if len(token_ids) + room > longest:
            answer = "one token" if max_tokens is None else f"max_tokens of {max_tokens:,}"
            raise ApiError(
                f"the prompt has {len(token_ids):,} tokens, and with {answer} for the answer that is more than the "
                f"model's context of {longest:,}; shorten one of them",
                param=param,
                code="context_length_exceeded",
            )
        return token_ids

    def check_known(self, token_ids: Iterable[int], param: str) -> None:
        """Refuses ids that the model does not have. Raises ApiError, which names the largest and the field."""
        largest = max(token_ids, default=-1)
        if largest >= self.model.vocabulary_size:
            size = self.model.vocabulary_size
            raise ApiError(f"{param}: token id {largest} is outside the vocabulary of {size:,}", param=param)


def grammar_of(body: GenerationFields) -> tuple[Grammar | None, str]:
    """What the engine holds the answer to, and the field that says so."""
    if body.structured_outputs is not None:
        return body.structured_outputs.to_grammar(), "structured_outputs"
    return body.response_format.to_grammar() if body.response_format is not None else None, "response_format"


def ending(body: GenerationFields, *, prompt_only: bool = False, keep_special: bool = False) -> Ending:
    """What ends the answers to a body.

    ``prompt_only``: they have no tokens. ``keep_special``: their text has special tokens, whatever the body says.
    """
    return Ending(
        body.stops,
        frozenset(body.stop_token_ids),
        body.include_stop_str_in_output,
        keep_special or not body.skip_special_tokens,
        body.min_tokens,
        prompt_only,
    )


def engine_requests(
    api: ApiContext, body: GenerationFields, prompts: Sequence[Prompt], fields: dict[str, Any]
) -> list[Request]:
    """The engine's requests: ``n`` for each prompt, with seeds one after the other.

    Raises:
        ApiError: there are too many, a field has a wrong value, or two fields exclude each other.
    """
    if api.tokenizer is None and body.stops:
        raise ApiError("stop: the model has no tokenizer; use stop_token_ids", param="stop")
    for name in ("bad_words", "allowed_token_ids") if fields["grammar"] is not None else ():
        if getattr(body, name):
            raise ApiError(
                f"{name}: not possible for an answer of a given form (response_format, structured_outputs, a demanded "
                "tool call, thinking_token_budget); leave one of them out",
                param=name,
            )
    api.check_known(body.stop_token_ids, "stop_token_ids")
    if len(prompts) * body.n > MOST_REQUESTS:
        raise ApiError(
            f"prompts times n is {len(prompts) * body.n:,}; at most {MOST_REQUESTS:,} are allowed", param="n"
        )
    most = fields["prompt_logprobs"]
    count = 0 if most is None else sum(len(prompt.token_ids) for prompt in prompts) * body.n * (most + 1)
    if count > MOST_PROMPT_LOGPROBS:
        name = "logprobs" if body.prompt_logprobs is None else "prompt_logprobs"
        raise ApiError(
            f"{name}: tokens of all prompts times n times one more than {name} is {count:,}; at most "
            f"{MOST_PROMPT_LOGPROBS:,} are allowed; ask for fewer, or in several requests",
            param=name,
        )
    tenant_salt = fields.pop("cache_salt")
    return [
        Request(
            prompt.token_ids,
            sampling=body.sampling(api.defaults, choice),
            stop_token_ids=tuple(body.stop_token_ids),
            ignore_end_token=body.ignore_eos,
            min_tokens=body.min_tokens,
            bad_words=tuple(body.bad_words),
            allowed_token_ids=tuple(body.allowed_token_ids or ()),
            cache_salt=tenant_salt,
            **fields,
        )
        for prompt in prompts
        for choice in range(body.n)
    ]


def cache_salt(exchange: Exchange, body: GenerationFields) -> str:
    """The request's salt, apart from those of other tenants, so that two keys never share cached prefixes."""
    return f"{exchange.tenant_name}\n{body.cache_salt}"


def model_files(folder: Path | None, options: ServeConfig) -> tuple[ModelTemplates, SamplingDefaults]:
    """The chat templates of a model, and its defaults of sampling; ``folder`` is None for a named shape.

    Raises:
        CheckpointError, UsageError: a file cannot be used.
    """
    templates = ModelTemplates(folder, options.chat_template)
    return templates, SamplingDefaults() if folder is None else _defaults(folder / "generation_config.json")


def _defaults(file: Path) -> SamplingDefaults:
    if not file.is_file():
        return SamplingDefaults()
    try:
        config: dict[str, Any] = read_json(file)
        known = {name: config[name] for name in SamplingDefaults.model_fields if config.get(name) is not None}
        defaults = SamplingDefaults(**known)
    except (OSError, ValueError, AttributeError, ValidationError) as error:
        what = " ".join(str(error).split())[:200]
        raise CheckpointError(f"{file}: not a generation config that can be used ({what}); export it again") from error
    if config.get("do_sample") is False:
        return defaults.model_copy(update={"temperature": 0.0})
    return defaults
