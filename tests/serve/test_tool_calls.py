"""Calls in a model's text, however it arrives in pieces."""

from __future__ import annotations

import json
from collections.abc import Callable

import hypothesis.strategies as st
import pytest
from hypothesis import example, given, settings

from examples import examples
from megatoken.serve.tool_calls import (
    Call,
    CallParser,
    CallStart,
    NamedParser,
    ToolFormat,
    call_parser,
    first_call_only,
    forced_parser,
    forced_schema,
    whole_parts,
)
from megatoken.serve.tool_calls import format_of as format_of_templates

NAMES = frozenset({"weather", "add"})
Result = tuple[str, list[tuple[str, str]]]


def hermes() -> CallParser:
    return call_parser(ToolFormat.HERMES, NAMES)


def llama3() -> CallParser:
    return call_parser(ToolFormat.LLAMA3, NAMES)


def parsed(make: Callable[[], CallParser], pieces: list[str]) -> Result:
    parser = make()
    found = [piece for text in pieces for piece in parser.add(text)] + parser.end()
    assert [piece.index for piece in found if isinstance(piece, CallStart)] == list(
        range(sum(isinstance(piece, CallStart) for piece in found))
    )
    parts = whole_parts(found)
    calls = [part for part in parts if isinstance(part, Call)]
    assert all(call.call_id.startswith("call_") for call in calls)
    text = "".join(part for part in parts if isinstance(part, str))
    return text, [(call.name, call.arguments) for call in calls]


TRICKY = '{"city": "Zürich } ] \\" \\\\", "deep": [{"a": {"b": []}}], "tag": "</tool_call>"}'
CASES: list[tuple[Callable[[], CallParser], str, Result]] = [
    (hermes, "It is sunny.", ("It is sunny.", [])),
    (hermes, '<tool_call>\n{"name": "weather", "arguments": {}}\n</tool_call>', ("", [("weather", "{}")])),
    (
        hermes,
        f'Let me see.<tool_call>{{"name": "weather", "arguments": {TRICKY}}}</tool_call>\n'
        '<tool_call>{"arguments": {"a": 1}, "name": "add"}</tool_call>',
        ("Let me see.", [("weather", TRICKY), ("add", '{"a": 1}')]),
    ),
    (hermes, "1 < 2 and <tool", ("1 < 2 and <tool", [])),
    (hermes, "<tool_call>no object</tool_call>", ("<tool_call>no object</tool_call>", [])),
    (hermes, '<tool_call>{"no": "name"}</tool_call>', ('<tool_call>{"no": "name"}</tool_call>', [])),
    (hermes, '<tool_call>{"name": "add", "arguments": {"a": [1, 2', ("", [("add", '{"a": [1, 2')])),
    (hermes, '<tool_call>{"name": "ad', ("", [])),
    (
        hermes,
        '<tool_call>{"name": "unknown", "arguments": {"a": 1}}</tool_call><tool_call>{"name": "add", "arguments": {}}',
        ('<tool_call>{"name": "unknown", "arguments": {"a": 1}}</tool_call>', [("add", "{}")]),
    ),
    (hermes, '<tool_call>{"name": "add", "arguments": "{\\"a\\": 1}"}</tool_call>', ("", [("add", '{"a": 1}')])),
    (hermes, '<tool_call>{"name": "add", "arguments": "a"}</tool_call>', ("", [("add", '"a"')])),
    (llama3, '{"name": "add", "parameters": "{\\"a\\": 1}"}', ("", [("add", '{"a": 1}')])),
    (llama3, '{"name": "weather", "parameters": {"city": "Rome"}}', ("", [("weather", '{"city": "Rome"}')])),
    (llama3, '\n<|python_tag|>{"name": "add", "parameters": {}}', ("", [("add", "{}")])),
    (
        llama3,
        '{"name": "add", "parameters": {"a": 1}}; {"name": "weather", "parameters": {"city": "{"}}',
        ("", [("add", '{"a": 1}'), ("weather", '{"city": "{"}')]),
    ),
    (llama3, '{"name": "unknown", "parameters": {"a": 1}}', ('{"name": "unknown", "parameters": {"a": 1}}', [])),
    (llama3, '{"answer": 42}', ('{"answer": 42}', [])),
    (llama3, '{"answer": 42', ('{"answer": 42', [])),
    (
        llama3,
        'The answer is {"name": "add", "parameters": {}}',
        ('The answer is {"name": "add", "parameters": {}}', []),
    ),
    (llama3, "{" + '"a": "' + "x" * 5000 + '"} and more', ("{" + '"a": "' + "x" * 5000 + '"} and more', [])),
    (forced_parser, '[{"name": "f", "parameters": {"a": 1}}]', ("", [("f", '{"a": 1}')])),
    (
        forced_parser,
        '[ {"name": "f", "parameters": {}} , {"name":"g","parameters":{"x":[]}} ]',
        ("", [("f", "{}"), ("g", '{"x":[]}')]),
    ),
    (lambda: NamedParser("f"), '{"a": 1}', ("", [("f", '{"a": 1}')])),
]


@pytest.mark.parametrize(("make", "text", "expected"), CASES)
@settings(max_examples=60, derandomize=True)
@given(data=st.data())
def test_calls_are_found_however_the_text_is_cut(
    make: Callable[[], CallParser], text: str, expected: Result, data: st.DataObject
) -> None:
    assert parsed(make, [text]) == expected
    assert parsed(make, list(text)) == expected
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=8)))
    assert parsed(make, [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]) == expected


@settings(max_examples=examples(300), derandomize=True)
@given(
    text=st.lists(
        st.sampled_from(
            [
                "<tool_call>",
                "</tool_call>",
                '{"name": "add", ',
                '"arguments": {',
                "}",
                '"',
                "a",
                " ",
                "[",
                "]",
                ";",
                "\\",
            ]
        )
    ).map("".join)
)
@example(text="<tool_call>{}")
@pytest.mark.parametrize("make", [hermes, llama3, forced_parser])
def test_no_text_is_too_odd(make: Callable[[], CallParser], text: str) -> None:
    assert parsed(make, list(text)) == parsed(make, [text])


def test_texts_and_calls_keep_their_order() -> None:
    parser = hermes()
    found = parser.add('one <tool_call>{"name": "add", "arguments": {}}</tool_call> two <tool_call>{"name": "add"}')
    parts = [part if isinstance(part, str) else part.name for part in whole_parts([*found, *parser.end()])]
    assert parts == ["one ", "add", "two ", "add"]


def test_arguments_are_reported_as_they_arrive() -> None:
    parser = hermes()
    shown = ""
    for piece in ['<tool_call>{"name": "add", "arg', 'uments": {"a": ', "1", "2", "}}"]:
        for part in parser.add(piece):
            shown += f"[{part.name}]" if isinstance(part, CallStart) else f"({part.text})"  # type: ignore[union-attr]
    assert shown == '[add]({"a": )(1)(2)(})'


@pytest.mark.parametrize(
    ("make", "text", "shown"),
    [
        (forced_parser, '[{"name": "ad', ""),
        (llama3, '{"name": "ad', ""),
        (llama3, '{"colour": "re', '{"colour": "re'),
        (hermes, 'Well, <tool_call>\n{"name": "ad', "Well, "),
    ],
)
def test_a_call_that_was_cut_off_before_it_began_is_not_shown(
    make: Callable[[], CallParser], text: str, shown: str
) -> None:
    assert parsed(make, [text]) == (shown, [])


def test_formats_are_found_in_templates() -> None:
    assert format_of_templates(["... <tool_call> ..."]) is ToolFormat.HERMES
    assert format_of_templates(["x", 'respond with {"name": function name, "parameters": dictionary of ...}']) is (
        ToolFormat.LLAMA3
    )
    assert format_of_templates(["{{ messages }}"]) is None


def test_the_schema_of_forced_calls() -> None:
    inner = {"type": "object", "properties": {"x": {"$ref": "#/$defs/t"}}, "$defs": {"t": {"type": "string"}}}
    schema = forced_schema([{"name": "f", "parameters": inner}, {"name": "g"}], several=False)
    assert schema["maxItems"] == 1
    first, second = schema["items"]["anyOf"]
    assert first["properties"]["name"] == {"type": "string", "enum": ["f"]}
    assert first["properties"]["parameters"] == {"$ref": "#/$defs/0"}
    moved = {"type": "object", "properties": {"x": {"$ref": "#/$defs/0/$defs/t"}}, "$defs": {"t": {"type": "string"}}}
    assert schema["$defs"] == {"0": moved, "1": {"type": "object"}}
    assert second["properties"]["parameters"] == {"$ref": "#/$defs/1"}
    json.dumps(schema)


def test_one_call_at_most_where_a_request_says_so() -> None:
    parser = hermes()
    calls = '<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>' * 2
    parts = whole_parts(first_call_only([*parser.add(f"one {calls} two"), *parser.end()]))
    assert [part if isinstance(part, str) else part.arguments for part in parts] == ["one ", '{"a": 1}', "two"]  # type: ignore[union-attr]
