"""The official client: answers held to a form, and calls of tools that a request demands."""

from __future__ import annotations

import json
import re

import pytest
from openai import OpenAI

MODEL = "reference"
DATES = "Write the dates like 14/03/2021.\nSeptember 27, 2027\nOctober 17, 2043\n"
WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "parameters": {
            "type": "object",
            "properties": {
                "city": {"type": "string", "enum": ["Rome", "Oslo"]},
                "days": {"type": "integer", "enum": [1]},
            },
            "required": ["city", "days"],
            "additionalProperties": False,
        },
    },
}


def ask() -> list[dict[str, str]]:
    return [{"role": "user", "content": DATES}]


def test_structured_output(client: OpenAI) -> None:
    schema = {"type": "object", "properties": {"x": {"enum": [1, 2]}}, "required": ["x"], "additionalProperties": False}
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema, "strict": True}}
    answer = client.chat.completions.create(model=MODEL, messages=ask(), response_format=form, max_tokens=256)
    assert json.loads(answer.choices[0].message.content or "")["x"] in (1, 2)
    text = {"format": {"type": "json_schema", "name": "x", "schema": schema}}
    response = client.responses.create(model=MODEL, input=DATES, text=text, max_output_tokens=256)
    assert json.loads(response.output_text)["x"] in (1, 2)
    extra = {"structured_outputs": {"choice": ["yes (1)", "no [2]"]}}
    chosen = client.completions.create(model=MODEL, prompt="?", extra_body=extra, max_tokens=64)
    assert chosen.choices[0].text in ("yes (1)", "no [2]")
    extra = {"structured_outputs": {"regex": "[a-c]{3}"}}
    matched = client.chat.completions.create(model=MODEL, messages=ask(), extra_body=extra, max_tokens=64)
    assert set(matched.choices[0].message.content or "") <= set("abc")


@pytest.mark.parametrize(
    "form", [{"type": "regex", "regex": "[a-c]{3}"}, {"type": "grammar", "grammar": "root ::= [a-c] [a-c] [a-c]"}]
)
def test_a_form_of_text(client: OpenAI, form: dict[str, str]) -> None:
    extra = {"response_format": form}
    answer = client.chat.completions.create(model=MODEL, messages=ask(), extra_body=extra, max_tokens=64)
    assert re.fullmatch("[a-c]{3}", answer.choices[0].message.content or "")


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "weather"}}])
def test_forced_tools(client: OpenAI, choice: object) -> None:
    settings = {"model": MODEL, "messages": ask(), "tools": [WEATHER], "tool_choice": choice, "max_tokens": 512}
    answer = client.chat.completions.create(**settings, seed=1, parallel_tool_calls=False)
    assert answer.choices[0].finish_reason == ("tool_calls" if choice == "required" else "stop")
    (call,) = answer.choices[0].message.tool_calls or []
    assert call.function.name == "weather"
    assert json.loads(call.function.arguments) in [{"city": city, "days": 1} for city in ("Rome", "Oslo")]
    name, arguments = "", ""
    for chunk in client.chat.completions.create(**settings, seed=1, parallel_tool_calls=False, stream=True):
        for part in chunk.choices[0].delta.tool_calls or []:
            assert part.function is not None and part.index == 0
            name += part.function.name or ""
            arguments += part.function.arguments or ""
    assert (name, arguments) == ("weather", call.function.arguments)


def test_a_forced_tool_of_a_response(client: OpenAI) -> None:
    tool = {"type": "function", "name": "weather", "parameters": WEATHER["function"]["parameters"]}
    choice = {"type": "function", "name": "weather"}
    events = list(client.responses.create(model=MODEL, input=DATES, tools=[tool], tool_choice=choice, stream=True))
    arguments = "".join(event.delta for event in events if event.type == "response.function_call_arguments.delta")
    assert json.loads(arguments)["city"] in ("Rome", "Oslo")
    assert events[-1].type == "response.completed"
    (item,) = events[-1].response.output
    assert item.type == "function_call" and item.name == "weather" and item.arguments == arguments
