"""The bodies of /v1/completions, /tokenize and /detokenize."""

from __future__ import annotations

from typing import Annotated, Any, Self

from pydantic import Discriminator, Field, Tag, model_validator

from megatoken.serve.request_errors import wrong_field
from megatoken.serve.schema_chat import Message, PromptFields
from megatoken.serve.schema_common import (
    MOST_MESSAGES,
    MOST_TOKEN_IDS,
    Body,
    GenerationFields,
    Items,
    TokenId,
)

MOST_PROMPTS = 1024

Ids = Annotated[Items[TokenId], Field(min_length=1, max_length=MOST_TOKEN_IDS)]


def _kind(prompt: Any) -> str | None:
    """Which form of prompt it is, by its first item, so that only one form is checked and reported."""
    if not isinstance(prompt, list):
        return "str" if isinstance(prompt, str) else None
    first = prompt[0] if prompt else ""
    return "list[list[int]]" if isinstance(first, list) else "list[str]" if isinstance(first, str) else "list[int]"


AnyPrompt = Annotated[
    Annotated[str, Tag("str")]
    | Annotated[Ids, Tag("list[int]")]
    | Annotated[Items[str], Field(min_length=1, max_length=MOST_PROMPTS), Tag("list[str]")]
    | Annotated[Items[Ids], Field(min_length=1, max_length=MOST_PROMPTS), Tag("list[list[int]]")],
    Discriminator(_kind, "prompt_type", "must be a string, a list of token ids, or a list of either"),
]


class CompletionBody(GenerationFields):
    """A prompt, or a batch of them, to continue: text or token ids."""

    prompt: AnyPrompt
    max_tokens: int = Field(default=16, ge=0)
    logprobs: int | None = Field(default=None, ge=0, le=20)
    echo: bool = False
    add_special_tokens: bool = True

    @model_validator(mode="after")
    def _fields_agree(self) -> Self:
        if self.max_tokens == 0 and not self.echo:
            raise wrong_field("max_tokens", "must be at least 1, or 0 with echo")
        return self

    @property
    def most_prompt_logprobs(self) -> int | None:
        """How many alternatives to compute for each token of the prompt, for ``prompt_logprobs`` and the echo."""
        echoed = self.logprobs if self.echo else None
        return max((one for one in (self.prompt_logprobs, echoed) if one is not None), default=None)

    @property
    def prompts(self) -> list[str | list[int]]:
        """Every prompt of the batch."""
        if isinstance(self.prompt, str):
            return [self.prompt]
        return [self.prompt] if isinstance(self.prompt[0], int) else list(self.prompt)


class TokenizeBody(PromptFields):
    """A text or a chat to encode."""

    prompt: str | None = None
    messages: Items[Message] | None = Field(default=None, min_length=1, max_length=MOST_MESSAGES)
    add_special_tokens: bool | None = None
    return_token_strs: bool = False

    @model_validator(mode="after")
    def _is_one(self) -> Self:
        if (self.prompt is None) == (self.messages is None):
            raise wrong_field("prompt", "give either prompt or messages")
        return self


class DetokenizeBody(Body):
    """Token ids to decode."""

    tokens: Items[TokenId] = Field(max_length=MOST_TOKEN_IDS)
