"""Bodies that would cost much to check: one error ends the check of a list."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from megatoken.serve.schema_chat import ChatBody
from megatoken.serve.schema_common import MOST_MESSAGES, MOST_PARTS, Body, parse_body
from megatoken.serve.schema_completions import MOST_PROMPTS, CompletionBody, DetokenizeBody
from megatoken.serve.schema_responses import ResponsesBody

COUNT = 20_000
COSTLY: list[tuple[type[Body], dict[str, Any]]] = [
    (CompletionBody, {"prompt": [*["", []] * COUNT, 1]}),
    (CompletionBody, {"prompt": [[]] * COUNT}),
    (CompletionBody, {"prompt": [-1] * COUNT}),
    (CompletionBody, {"prompt": [""] * (MOST_PROMPTS + 1)}),
    (CompletionBody, {"prompt": {}}),
    (ChatBody, {"messages": [{"role": "user"}] * (MOST_MESSAGES + 1)}),
    (ChatBody, {"messages": [{}] * COUNT}),
    (ChatBody, {"messages": [{"role": "user", "tool_calls": [{}] * COUNT}]}),
    (ChatBody, {"messages": [{"role": "user"}], "tools": [1] * COUNT}),
    (ChatBody, {"messages": [{"role": "user"}], "logit_bias": {str(at): "" for at in range(COUNT)}}),
    (ResponsesBody, {"input": [{"role": "user", "content": ""}] * (MOST_MESSAGES + 1)}),
    (DetokenizeBody, {"tokens": [-1] * COUNT}),
]


@pytest.mark.parametrize(("kind", "body"), COSTLY, ids=range(len(COSTLY)))
def test_a_long_list_gets_few_errors(kind: type[Body], body: dict[str, Any]) -> None:
    with pytest.raises(ValidationError) as error:
        kind.model_validate(body)
    assert error.value.error_count() <= 2  # a union of text and list gets one for each


def test_a_long_content_is_refused() -> None:
    parts = [{"type": "text", "text": ""}] * (MOST_PARTS + 1)
    with pytest.raises(ValidationError) as error:
        ChatBody.model_validate({"messages": [{"role": "user", "content": parts}]})
    assert error.value.error_count() <= 2


@pytest.mark.parametrize("prompt", ["a", "", [1, 2], ["a", "b"], [[1], [2, 3]]])
def test_every_form_of_prompt_is_taken(prompt: Any) -> None:
    body = parse_body(CompletionBody, CompletionBody(prompt=prompt).model_dump_json().encode())
    assert body.prompts == (prompt if isinstance(prompt, list) and not isinstance(prompt[0], int) else [prompt])
