"""The body of /v1/chat/completions."""

from __future__ import annotations

from typing import Annotated, Any, Literal, Self

from pydantic import BeforeValidator, Field, model_validator

from megatoken.serve.request_errors import wrong_field
from megatoken.serve.schema_common import MOST_MESSAGES, MOST_PARTS, MOST_TOKEN_IDS, Body, GenerationFields, Items, Part

FUNCTION_NAME = r"^[a-zA-Z0-9_.-]{1,64}$"
MOST_TOOLS = 128


class TextPart(Part):
    """A piece of a message's content."""

    type: Literal["text"]
    text: str


class CalledFunction(Part):
    """The function that a message calls, and its arguments as JSON."""

    name: str
    arguments: str = "{}"


class ToolCall(Part):
    """A call that an earlier answer made."""

    id: str = ""
    type: Literal["function"] = "function"
    function: CalledFunction


class Message(Part):
    """One message. Further fields are passed to the chat template."""

    role: str = Field(min_length=1, max_length=64)
    content: str | Annotated[Items[TextPart], Field(max_length=MOST_PARTS)] | None = None
    tool_calls: Annotated[Items[ToolCall], Field(max_length=MOST_PARTS)] | None = None
    tool_call_id: str | None = None
    name: str | None = None
    reasoning: str | None = None

    @property
    def text(self) -> str | None:
        """The content as one string."""
        if isinstance(self.content, list):
            return "\n".join(part.text for part in self.content)
        return self.content


class Function(Part):
    """A function that the model may call; ``parameters`` is a JSON schema."""

    name: str = Field(pattern=FUNCTION_NAME)
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


def _run_by_the_client(kind: Any) -> Any:
    if isinstance(kind, str) and kind != "function":
        raise ValueError(
            f"this server runs no tools itself, such as {kind[:64]!r}; leave it out, or give one of the type 'function'"
        )
    return kind


class ClientTool(Part):
    """A tool; only functions, which the client runs, are supported."""

    type: Annotated[Literal["function"], BeforeValidator(_run_by_the_client)]


class Tool(ClientTool):
    """A function that the model may call."""

    function: Function


class NamedFunction(Part):
    """The name of a function."""

    name: str


class NamedTool(Part):
    """The one tool to call."""

    type: Literal["function"]
    function: NamedFunction


class PromptFields(Body):
    """How messages become a prompt."""

    tools: Items[Tool] = Field(default_factory=list, max_length=MOST_TOOLS)
    chat_template: str | None = Field(default=None, min_length=1, max_length=1 << 18)
    chat_template_kwargs: dict[str, Any] = Field(default_factory=dict)
    add_generation_prompt: bool = True
    continue_final_message: bool = False


class ChatBody(PromptFields, GenerationFields):
    """A chat to continue."""

    messages: Items[Message] = Field(min_length=1, max_length=MOST_MESSAGES)
    max_tokens: int | None = Field(default=None, ge=1)
    max_completion_tokens: int | None = Field(default=None, ge=1)
    logprobs: bool = False
    top_logprobs: int = Field(default=0, ge=0, le=20)
    tool_choice: Literal["none", "auto", "required"] | NamedTool | None = None
    parallel_tool_calls: bool = True
    add_special_tokens: bool = False
    reasoning_effort: str | None = None
    include_reasoning: bool = True
    thinking_token_budget: int | None = Field(default=None, ge=0, le=MOST_TOKEN_IDS)
    echo: bool = False

    @model_validator(mode="after")
    def _fields_agree(self) -> Self:
        if (
            self.continue_final_message
            and "add_generation_prompt" in self.model_fields_set
            and self.add_generation_prompt
        ):
            raise wrong_field("continue_final_message", "cannot be true together with add_generation_prompt")
        if self.top_logprobs and not self.logprobs:
            raise wrong_field("top_logprobs", "needs logprobs to be true")
        if self.tool_choice not in (None, "none") and not self.tools:
            raise wrong_field("tool_choice", "needs tools")
        if isinstance(self.tool_choice, NamedTool):
            wanted = self.tool_choice.function.name
            if wanted not in {tool.function.name for tool in self.tools}:
                raise wrong_field("tool_choice", f"{wanted[:64]!r} is not one of the tools")
        return self
