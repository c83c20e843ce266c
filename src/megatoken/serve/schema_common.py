"""Fields that several routes share, and what is done with fields that no route has."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, Self, TypeVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, model_validator

from megatoken.engine.request import Grammar, GrammarKind, Sampling
from megatoken.serve.request_errors import ApiError, field_error, wrong_field

LONGEST_STOP = 1024  # characters
MOST_STOPS = 16
MOST_CHOICES = 128
MOST_BAD_WORDS = 256
LONGEST_BAD_WORD = 128  # characters
MOST_BIASES = 1024
LARGEST_GRAMMAR = 1 << 18  # characters

MOST_TOKEN_IDS = 1 << 20
MOST_MESSAGES = 8192
MOST_PARTS = 4096  # of a message's content, and of its tool calls

_T = TypeVar("_T")
# A list whose first bad item ends the check: an error for each of a million bad items would take seconds.
Items = Annotated[list[_T], Field(fail_fast=True)]
TokenId = Annotated[int, Field(ge=0, lt=2**31)]
StopString = Annotated[str, Field(min_length=1, max_length=LONGEST_STOP)]
BadWord = Annotated[str, Field(min_length=1, max_length=LONGEST_BAD_WORD)]

_FIELDS = json.loads((Path(__file__).parents[1] / "data" / "api_fields.json").read_text(encoding="utf-8"))
# Fields that OpenAI's API or other servers have, and this one, or some of its routes, do not: the values, besides null,
# that change nothing. A route whose schema has the field takes it.
UNSUPPORTED: Mapping[str, list[Any]] = _FIELDS["unsupported"]
# Fields that say who asks, or where to keep the answer's records; an answer is the same without them.
WITHOUT_EFFECT = frozenset(_FIELDS["without_effect"])


class Part(BaseModel):
    """A part of a body. Null is the same as a field that is left out."""

    model_config = ConfigDict(extra="allow", strict=True, allow_inf_nan=False, populate_by_name=True)

    @model_validator(mode="before")
    @classmethod
    def _without_nulls(cls, value: Any) -> Any:
        if isinstance(value, dict):
            return {name: one for name, one in value.items() if one is not None}
        return value


class Body(Part):
    """A body; names of fields that no route knows are in ``unknown`` after ``parse_body``."""

    model: str | None = None

    @property
    def unknown(self) -> list[str]:
        """Fields that are ignored."""
        return [name for name in self.model_extra or () if name not in UNSUPPORTED and name not in WITHOUT_EFFECT]


_Body = TypeVar("_Body", bound=Body)


def parse_body(kind: type[_Body], data: bytes) -> _Body:
    """The body of a request.

    Raises:
        ApiError: it is not JSON, a field has a wrong value, or asks for what this server cannot do.
    """
    try:
        body = kind.model_validate_json(data)
    except ValidationError as error:
        raise field_error(error) from None
    for name, value in (body.model_extra or {}).items():
        if name in UNSUPPORTED and not any(value == one and type(value) is type(one) for one in UNSUPPORTED[name]):
            allowed = " or ".join(json.dumps(one) for one in UNSUPPORTED[name])
            instead = f"leave it out or send {allowed}" if allowed else "leave it out"
            raise ApiError(f"{name}: not supported here; {instead}", param=name, code="unsupported_value")
    return body


class StreamOptions(Part):
    """What a stream reports of the tokens used."""

    include_usage: bool = False
    continuous_usage_stats: bool = False


class NamedSchema(Part):
    """A JSON schema as ``response_format`` brings it."""

    name: str = ""
    schema_: dict[str, Any] = Field(default_factory=dict, alias="schema")
    strict: bool | None = None


class ResponseFormat(Part):
    """The form of an answer: any text, any JSON object, or what a schema, a regular expression or an EBNF allows."""

    type: Literal["text", "json_object", "json_schema", "regex", "grammar"]
    json_schema: NamedSchema | None = None
    regex: str | None = Field(default=None, min_length=1, max_length=LARGEST_GRAMMAR)
    grammar: str | None = Field(default=None, min_length=1, max_length=LARGEST_GRAMMAR)

    @model_validator(mode="after")
    def _has_its_field(self) -> Self:
        if self.type in ("json_schema", "regex", "grammar") and getattr(self, self.type) is None:
            raise ValueError(f"the type {self.type} needs the field {self.type}")
        return self

    def to_grammar(self) -> Grammar | None:
        """What the engine holds the answer to; None: any text."""
        if self.type == "json_object":
            return Grammar(GrammarKind.JSON_OBJECT)
        if self.type == "json_schema" and self.json_schema is not None:
            return schema_grammar(self.json_schema.schema_)
        if self.type == "regex" and self.regex is not None:
            return Grammar(GrammarKind.REGEX, self.regex)
        if self.type == "grammar" and self.grammar is not None:
            return Grammar(GrammarKind.EBNF, self.grammar)
        return None


class StructuredOutputs(Part):
    """The form of an answer in the fields of vLLM: exactly one of them."""

    json_schema: dict[str, Any] | str | None = Field(default=None, alias="json")
    regex: str | None = Field(default=None, min_length=1, max_length=LARGEST_GRAMMAR)
    grammar: str | None = Field(default=None, min_length=1, max_length=LARGEST_GRAMMAR)
    choice: Items[Annotated[str, Field(min_length=1)]] | None = Field(default=None, min_length=1, max_length=1024)
    json_object: bool | None = None

    @model_validator(mode="after")
    def _is_one(self) -> Self:
        given = [self.json_schema, self.regex, self.grammar, self.choice, self.json_object or None]
        if sum(one is not None for one in given) != 1:
            raise ValueError("give exactly one of json, regex, grammar, choice and json_object")
        return self

    def to_grammar(self) -> Grammar:
        """What the engine holds the answer to."""
        if self.json_schema is not None:
            return schema_grammar(self.json_schema)
        if self.regex is not None:
            return Grammar(GrammarKind.REGEX, self.regex)
        if self.grammar is not None:
            return Grammar(GrammarKind.EBNF, self.grammar)
        if self.choice is not None:
            return Grammar(GrammarKind.REGEX, "|".join(f"({_literal(one)})" for one in self.choice))
        return Grammar(GrammarKind.JSON_OBJECT)


def schema_grammar(schema: Mapping[str, Any] | str) -> Grammar:
    """The grammar of a JSON schema.

    Raises:
        ApiError: it is too large, or text that is not JSON.
    """
    if isinstance(schema, str):
        try:
            schema = json.loads(schema)
        except (ValueError, RecursionError):
            raise ApiError("structured_outputs.json: not JSON", param="structured_outputs.json") from None
    text = json.dumps(schema)
    if len(text) > LARGEST_GRAMMAR:
        raise ApiError(f"the JSON schema has {len(text):,} characters; at most {LARGEST_GRAMMAR:,} are allowed")
    return Grammar(GrammarKind.JSON_SCHEMA, text)


def _literal(text: str) -> str:
    return re.sub(r"[.^$*+?{}\[\]\\|()]", r"\\\g<0>", text)


class SamplingDefaults(BaseModel):
    """What a request without these fields gets: the model's ``generation_config.json``, else OpenAI's defaults."""

    temperature: float = Field(default=1.0, ge=0, allow_inf_nan=False)
    top_p: float = Field(default=1.0, gt=0, le=1)
    top_k: int = Field(default=0, ge=0)
    min_p: float = Field(default=0.0, ge=0, le=1)
    repetition_penalty: float = Field(default=1.0, gt=0, allow_inf_nan=False)


Bias = Annotated[float, Field(ge=-100, le=100)]


def _few_biases(value: Any) -> Any:
    """Counted before they are looked at, because a dictionary gets an error for each bad value."""
    if isinstance(value, dict) and len(value) > MOST_BIASES:
        raise ValueError(f"must have at most {MOST_BIASES:,} token ids")
    return value


class SamplingFields(Body):
    """How to continue a prompt: the fields that all routes share."""

    temperature: float | None = Field(default=None, ge=0)
    top_p: float | None = Field(default=None, gt=0, le=1)
    top_k: int | None = Field(default=None, ge=-1, lt=2**31)
    seed: int | None = Field(default=None, ge=-(2**63), lt=2**63)
    stop: StopString | Annotated[Items[StopString], Field(max_length=MOST_STOPS)] = Field(default_factory=list)
    stop_token_ids: Items[TokenId] = Field(default_factory=list, max_length=1024)
    ignore_eos: bool = False
    cache_salt: str = Field(default="", max_length=1024)
    stream: bool = False


class GenerationFields(SamplingFields):
    """Those that only the routes of chats and completions have."""

    min_p: float | None = Field(default=None, ge=0, le=1)
    presence_penalty: float = Field(default=0.0, ge=-2, le=2)
    frequency_penalty: float = Field(default=0.0, ge=-2, le=2)
    repetition_penalty: float | None = Field(default=None, gt=0)
    logit_bias: Annotated[dict[str, Bias], BeforeValidator(_few_biases)] = Field(default_factory=dict)
    allowed_token_ids: Items[TokenId] | None = Field(default=None, min_length=1, max_length=MOST_TOKEN_IDS)
    bad_words: Items[BadWord] = Field(default_factory=list, max_length=MOST_BAD_WORDS)
    n: int = Field(default=1, ge=1, le=MOST_CHOICES)
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True
    min_tokens: int = Field(default=0, ge=0)
    truncate_prompt_tokens: int | None = Field(default=None, ge=-1)
    prompt_logprobs: int | None = Field(default=None, ge=0, le=20)
    stream_options: StreamOptions | None = None
    return_token_ids: bool = False
    return_tokens_as_token_ids: bool = False
    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    priority: int = Field(default=0, ge=-(2**31), lt=2**31)
    request_id: str | None = Field(default=None, pattern=r"^[A-Za-z0-9._:-]{1,128}$")

    @model_validator(mode="after")
    def _options_agree(self) -> Self:
        if self.stream_options is not None and not self.stream:
            raise wrong_field("stream_options", "only allowed when stream is true")
        if self.prompt_logprobs is not None and self.stream:
            raise wrong_field("prompt_logprobs", "not in streams; leave stream out")
        if self.response_format is not None and self.response_format.type != "text" and self.structured_outputs:
            raise wrong_field("structured_outputs", "give it or response_format, not both")
        return self

    @property
    def stops(self) -> tuple[str, ...]:
        """Strings that end the answer."""
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)

    def sampling(self, defaults: SamplingDefaults, choice: int) -> Sampling:
        """How tokens of one of the ``n`` answers are drawn.

        Raises:
            ApiError: ``logit_bias`` names something else than token ids.
        """
        bias = {}
        for name, value in self.logit_bias.items():
            if re.fullmatch(r"[0-9]{1,10}", name) is None:
                raise ApiError("logit_bias: its names must be token ids", param="logit_bias")
            bias[int(name)] = value
        seed = self.seed
        if seed is not None and choice:
            seed = (seed + choice + 2**63) % 2**64 - 2**63  # wraps as an integer of 64 bits does
        top_k = defaults.top_k if self.top_k is None else self.top_k
        return Sampling(
            temperature=_given(self.temperature, defaults.temperature),
            top_k=max(top_k, 0),
            top_p=_given(self.top_p, defaults.top_p),
            seed=seed,
            min_p=_given(self.min_p, defaults.min_p),
            repetition_penalty=_given(self.repetition_penalty, defaults.repetition_penalty),
            presence_penalty=self.presence_penalty,
            frequency_penalty=self.frequency_penalty,
            logit_bias=bias,
        )


def _given(value: float | None, default: float) -> float:
    return default if value is None else value
