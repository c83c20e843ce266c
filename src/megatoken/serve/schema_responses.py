"""The body of /v1/responses, without what needs a store of earlier answers."""

from __future__ import annotations

from typing import Annotated, Any, Literal, Self

from pydantic import Discriminator, Field, Tag, model_validator

from megatoken.serve.request_errors import wrong_field
from megatoken.serve.schema_chat import MOST_TOOLS, ClientTool, Function, NamedFunction
from megatoken.serve.schema_common import MOST_MESSAGES, MOST_PARTS, Items, NamedSchema, Part, SamplingFields


class InputText(Part):
    """A piece of a message's content."""

    type: Literal["input_text", "output_text", "text"]
    text: str


class InputMessage(Part):
    """A message."""

    type: Literal["message"] = "message"
    role: Literal["user", "assistant", "system", "developer"]
    content: str | Annotated[Items[InputText], Field(max_length=MOST_PARTS)]


class FunctionCall(Part):
    """A call that an earlier answer made."""

    type: Literal["function_call"]
    call_id: str
    name: str
    arguments: str


class FunctionCallOutput(Part):
    """What the function returned."""

    type: Literal["function_call_output"]
    call_id: str
    output: str | Annotated[Items[InputText], Field(max_length=MOST_PARTS)]


class ReasoningText(Part):
    """A piece of a thought."""

    type: Literal["reasoning_text"]
    text: str


class ReasoningItem(Part):
    """What the model thought before an earlier answer. Summaries are not read."""

    type: Literal["reasoning"]
    content: Annotated[Items[ReasoningText], Field(max_length=MOST_PARTS)] = Field(default_factory=list)


class ResponsesTool(Function, ClientTool):  # the type is checked first, as another one has other fields
    """A function that the model may call; ``parameters`` is a JSON schema."""


class NamedTool(NamedFunction):
    """The one tool to call."""

    type: Literal["function"]


class TextFormat(NamedSchema):
    """The form of an answer: any text, any JSON object, or what a JSON schema allows."""

    type: Literal["text", "json_object", "json_schema"] = "text"


class TextOptions(Part):
    """The form of an answer."""

    format: TextFormat = Field(default_factory=TextFormat)


class Reasoning(Part):
    """How much a model thinks that can be asked to."""

    effort: str | None = None


def _kind(item: Any) -> str:
    kind = item.get("type", "message") if isinstance(item, dict) else item
    return kind if isinstance(kind, str) else "message"


Item = Annotated[
    Annotated[InputMessage, Tag("message")]
    | Annotated[FunctionCall, Tag("function_call")]
    | Annotated[FunctionCallOutput, Tag("function_call_output")]
    | Annotated[ReasoningItem, Tag("reasoning")],
    Discriminator(_kind),
]


class ResponsesBody(SamplingFields):
    """An input to answer."""

    input: str | Annotated[Items[Item], Field(min_length=1, max_length=MOST_MESSAGES)]
    instructions: str | None = None
    max_output_tokens: int | None = Field(default=None, ge=1)
    tools: Items[ResponsesTool] = Field(default_factory=list, max_length=MOST_TOOLS)
    tool_choice: Literal["none", "auto", "required"] | NamedTool | None = None
    parallel_tool_calls: bool = True
    text: TextOptions = Field(default_factory=TextOptions)
    reasoning: Reasoning = Field(default_factory=Reasoning)
    chat_template_kwargs: dict[str, Any] = Field(default_factory=dict)
    # Thoughts come in the open, so that they can be sent back without the encrypted ones that agents ask for.
    include: Items[Literal["reasoning.encrypted_content"]] = Field(default_factory=list, max_length=1)
    top_logprobs: int = Field(default=0, ge=0, le=0)

    @model_validator(mode="after")
    def _fields_agree(self) -> Self:
        if self.text.format.type == "json_schema" and "schema_" not in self.text.format.model_fields_set:
            raise wrong_field("text.format", "type json_schema needs a schema")
        return self
