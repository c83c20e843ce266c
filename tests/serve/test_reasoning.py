"""What a model thinks before it answers: in its text however it arrives, and over HTTP with the official client."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings
from openai import BadRequestError, OpenAI
from serving import REFERENCE_MODEL, Served, no_fault, serving

from megatoken.serve.reasoning import (
    HarmonyParser,
    PromptEnd,
    ReasoningFormat,
    ThinkParser,
    prompt_end,
    reasoning_format_of,
)
from megatoken.serve.tool_calls import Call, CallParser, ThoughtText, ToolFormat, call_parser, whole_parts

NAMES = frozenset({"add"})
CALL = '<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>'


def think(end: PromptEnd, *, calls: bool = False) -> Callable[[], CallParser]:
    return lambda: ThinkParser(call_parser(ToolFormat.HERMES, NAMES) if calls else None, end)


def harmony() -> CallParser:
    return HarmonyParser(NAMES)


def parsed(make: Callable[[], CallParser], pieces: list[str]) -> list[tuple[str, str]]:
    parser = make()
    found = [piece for text in pieces for piece in parser.add(text)] + parser.end()
    shown = []
    for part in whole_parts(found):
        if isinstance(part, Call):
            shown.append((part.name, part.arguments))
        else:
            shown.append(("thought", part.text) if isinstance(part, ThoughtText) else ("text", part))
    return shown


OPEN, THINKING = think(PromptEnd.OPEN), think(PromptEnd.THINKING)
FINAL = "<|start|>assistant<|channel|>final<|message|>"
ANALYSIS = "<|channel|>analysis<|message|>"
CASES: list[tuple[Callable[[], CallParser], str, list[tuple[str, str]]]] = [
    (OPEN, "<think>\nwhy < not\n</think>\n\nYes.", [("thought", "why < not"), ("text", "Yes.")]),
    (OPEN, " <thin ice", [("text", " <thin ice")]),
    (OPEN, "Yes <think>no</think>", [("text", "Yes <think>no</think>")]),
    (OPEN, "<think></think>\nYes.\n", [("text", "Yes.\n")]),
    (OPEN, "<think>cut </th", [("thought", "cut </th")]),
    (OPEN, "<thi", [("text", "<thi")]),
    (THINKING, "so </ it </think> is </think>", [("thought", "so </ it"), ("text", "is </think>")]),
    (THINKING, "cut off\n", [("thought", "cut off")]),
    (think(PromptEnd.ANSWERING), "\nYes </think>", [("text", "\nYes </think>")]),
    (
        think(PromptEnd.THINKING, calls=True),
        f"{CALL}\n</think>\n\nWell. {CALL}",
        [("thought", CALL), ("text", "Well. "), ("add", '{"a": 1}')],
    ),
    (harmony, f"{ANALYSIS}hm <|no<|end|>{FINAL}Yes.<|return|>", [("thought", "hm <|no"), ("text", "Yes.")]),
    (
        harmony,
        f"{ANALYSIS}add<|end|><|start|>assistant<|channel|>commentary to=functions.add <|constrain|>json<|message|>"
        '{"a": 1}<|call|>',
        [("thought", "add"), ("add", '{"a": 1}')],
    ),
    (harmony, " to=functions.add<|channel|>commentary json<|message|>{}<|call|>", [("add", "{}")]),
    (harmony, "<|channel|>commentary to=functions.sub<|message|>{}<|call|>", [("text", "{}")]),
    (harmony, f"<|channel|>commentary<|message|>Wait.<|end|>{FINAL}Yes.", [("text", "Wait.\n\nYes.")]),
    (harmony, "plain <b> text", [("text", "plain <b> text")]),
    (harmony, f"{ANALYSIS}cut", [("thought", "cut")]),
    (harmony, "<|channel|>ana", []),
]


@pytest.mark.parametrize(("make", "text", "expected"), CASES)
@settings(max_examples=60, derandomize=True)
@given(data=st.data())
def test_thoughts_are_found_however_the_text_is_cut(
    make: Callable[[], CallParser], text: str, expected: list[tuple[str, str]], data: st.DataObject
) -> None:
    assert parsed(make, [text]) == expected
    assert parsed(make, list(text)) == expected
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=8)))
    assert parsed(make, [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]) == expected


@pytest.mark.parametrize("make", [OPEN, THINKING, harmony])
@settings(max_examples=200, derandomize=True)
@given(
    text=st.lists(
        st.sampled_from(["<think>", "</think>", "<", "a", " ", "\n", "|>", "<|end|>", "<|message|>", ANALYSIS, FINAL])
    ).map("".join)
)
def test_no_text_is_too_odd(make: Callable[[], CallParser], text: str) -> None:
    assert parsed(make, list(text)) == parsed(make, [text])


@pytest.mark.parametrize(
    ("prompt", "continued", "expected"),
    [
        ("<|im_start|>assistant\n", "", PromptEnd.OPEN),
        ("<think>\n", "", PromptEnd.THINKING),
        ("<think>\n\n</think>\n\n", "", PromptEnd.ANSWERING),
        ("What is <think>?\nAnswer:", "", PromptEnd.OPEN),
        ("x", "<think>so", PromptEnd.THINKING),
        ("x", "<think>so</think>Well", PromptEnd.ANSWERING),
        ("x", "Well", PromptEnd.ANSWERING),
    ],
)
def test_where_a_prompt_ends(prompt: str, continued: str, expected: PromptEnd) -> None:
    assert prompt_end(prompt, continued) is expected


def test_formats_are_found_in_templates() -> None:
    assert reasoning_format_of(["a", "... </think> ..."]) is ReasoningFormat.THINK
    assert reasoning_format_of(["<|channel|>analysis<|message|>"]) is ReasoningFormat.HARMONY
    assert reasoning_format_of(["{{ messages }}"]) is ReasoningFormat.OFF


# Over HTTP: the reference model, two of whose special tokens are called as those of models that think.

TEMPLATE = """{% for message in messages %}{% if message.reasoning_content %}<think>
{{ message.reasoning_content }}
</think>{% endif %}{{ message.content or '' }}
{% endfor %}{% if add_generation_prompt %}Answer:
{% if thinking %}<think>
{% endif %}{% if thinking == false %}<think>

</think>

{% endif %}{% endif %}"""
MESSAGES = [{"role": "user", "content": "Write the dates like 14/03/2021.\nSeptember 27, 2027\n"}]
FORM = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"enum": ["yes"]}}}


def extra(**fields: Any) -> dict[str, Any]:
    return {"extra_body": {"chat_template_kwargs": {"thinking": True}, **fields}}


@pytest.fixture(scope="module")
def thinker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    folder = tmp_path_factory.mktemp("thinker") / "model"
    shutil.copytree(REFERENCE_MODEL, folder)
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    tokenizer = (folder / "tokenizer.json").read_text()
    config = json.loads(tokenizer.replace('"<pad>"', '"</think>"').replace('"<s>"', '"<think>"'))
    for token in config["added_tokens"][:2]:
        token["special"] = False
    (folder / "tokenizer.json").write_text(json.dumps(config))
    with serving("--model", str(folder), "--precision", "fp32", "--served-model-name", "m") as served:
        yield served
    assert no_fault(served.log), served.log


@pytest.fixture(scope="module")
def asked(thinker: Served) -> Iterator[OpenAI]:
    with OpenAI(base_url=f"{thinker.url}/v1", api_key="none", max_retries=0) as opened:
        yield opened


def test_a_thought_has_a_budget(asked: OpenAI, thinker: Served) -> None:
    def count(text: str) -> int:
        return thinker.post("/tokenize", {"prompt": text, "add_special_tokens": False}).json()["count"]

    settings = {"model": "m", "messages": MESSAGES, "max_tokens": 24, "seed": 5}
    for budget in (1, 4):
        body = extra(thinking_token_budget=budget, return_token_ids=True)
        choice = asked.chat.completions.create(**settings, **body).choices[0]
        assert choice.token_ids[budget] == 0 and 0 not in choice.token_ids[:budget]
        assert 0 < count(choice.message.reasoning) <= budget and choice.message.content
        streamed = {"reasoning": "", "content": ""}
        for chunk in asked.chat.completions.create(**settings, **body, stream=True):
            for name, text in chunk.choices[0].delta.model_dump(exclude_none=True).items():
                if name in streamed:
                    streamed[name] += text
        assert streamed == {"reasoning": choice.message.reasoning, "content": choice.message.content}
    none = asked.chat.completions.create(**settings, **extra(thinking_token_budget=0)).choices[0].message
    assert not hasattr(none, "reasoning") and none.content
    hidden = asked.chat.completions.create(**settings, **extra(thinking_token_budget=4, include_reasoning=False))
    assert not hasattr(hidden.choices[0].message, "reasoning")
    assert hidden.choices[0].message.content == choice.message.content
    assert hidden.usage is not None and hidden.usage.completion_tokens == len(choice.token_ids)
    thoughts = count(choice.message.reasoning)
    assert hidden.usage.completion_tokens_details.reasoning_tokens == thoughts  # type: ignore[union-attr]
    for shown in (True, False):
        body = extra(thinking_token_budget=4, include_reasoning=shown)
        *chunks, last = asked.chat.completions.create(
            **settings, **body, stream=True, stream_options={"include_usage": True}
        )
        assert last.usage == hidden.usage
        deltas = [chunk.choices[0].delta for chunk in chunks]
        assert "".join(getattr(delta, "reasoning", "") for delta in deltas) == choice.message.reasoning * shown
        assert {chunk.usage for chunk in chunks} == {None}
    closed = extra(thinking_token_budget=4, chat_template_kwargs={"thinking": False})
    assert not hasattr(asked.chat.completions.create(**settings, **closed).choices[0].message, "reasoning")


def test_a_form_begins_after_the_thought(asked: OpenAI) -> None:
    settings = {"model": "m", "messages": MESSAGES, "max_tokens": 512, "seed": 1}
    choice = asked.chat.completions.create(
        **settings, response_format=FORM, **extra(thinking_token_budget=3, return_token_ids=True)
    ).choices[0]
    assert (choice.message.content, choice.finish_reason) == ('"yes"', "stop") and choice.message.reasoning
    tool = {"type": "function", "function": {"name": "f", "parameters": {"enum": [{}]}}}
    for demanded in ("required", {"type": "function", "function": {"name": "f"}}):
        message = (
            asked.chat.completions.create(
                **settings,
                tools=[tool],
                tool_choice=demanded,
                parallel_tool_calls=False,
                **extra(thinking_token_budget=3),
            )
            .choices[0]
            .message
        )
        (call,) = message.tool_calls or []
        assert (call.function.name, json.loads(call.function.arguments)) == ("f", {}) and message.reasoning
    # The same where the prompt has not begun the thought.
    body = {"thinking_token_budget": 3}
    own = asked.chat.completions.create(**settings, response_format=FORM, extra_body=body).choices[0].message
    assert own.content == '"yes"'


def test_a_response_has_items_of_reasoning(asked: OpenAI) -> None:
    kwargs = {"extra_body": {"chat_template_kwargs": {"thinking": True}}}
    settings = {"model": "m", "input": MESSAGES[0]["content"], "max_output_tokens": 64, "temperature": 0}
    form = {"format": {"type": "json_schema", "name": "x", "schema": {"enum": ["yes"]}}}
    whole = asked.responses.create(**settings, text=form, include=["reasoning.encrypted_content"], **kwargs)
    events = list(asked.responses.create(**settings, text=form, stream=True, **kwargs))
    last = events[-1].response  # type: ignore[union-attr]
    assert [item.type for item in last.output] == [item.type for item in whole.output]
    assert last.output[0].content[0].text == whole.output[0].content[0].text  # type: ignore[union-attr, index]
    deltas = [event.delta for event in events if event.type == "response.reasoning_text.delta"]
    assert "".join(deltas) == last.output[0].content[0].text  # type: ignore[union-attr, index]
    assert whole.usage is not None and 0 < whole.usage.output_tokens_details.reasoning_tokens <= 64
    assert [event.sequence_number for event in events] == list(range(len(events)))
    again = [*MESSAGES, *(item.model_dump(exclude_none=True) for item in whole.output), *MESSAGES]
    assert asked.responses.create(model="m", input=again, max_output_tokens=1, **kwargs).status == "incomplete"


def test_earlier_reasoning_reaches_the_template(thinker: Served) -> None:
    def text(**fields: str) -> str:
        body = {"messages": [*MESSAGES, {"role": "assistant", "content": "yes", **fields}, *MESSAGES]}
        tokens = thinker.post("/tokenize", body).json()["tokens"]
        return str(thinker.post("/detokenize", {"tokens": tokens}).json()["prompt"])

    assert text(reasoning="hm") == text(reasoning_content="hm") and "<think>\nhm\n</think>yes" in text(reasoning="hm")
    assert "<think>" not in text()


def test_a_model_that_does_not_think_has_no_budget(client: OpenAI) -> None:
    with pytest.raises(BadRequestError, match="only for models that think") as error:
        client.chat.completions.create(
            model="reference", messages=MESSAGES, extra_body={"thinking_token_budget": 5}, max_tokens=1
        )
    assert error.value.param == "thinking_token_budget"


def test_a_template_of_thoughts_without_tokens_for_their_ends(tmp_path: Path) -> None:
    file = tmp_path / "template.jinja"
    file.write_text(TEMPLATE)
    with serving("--chat-template", str(file)) as server:
        body = {"messages": MESSAGES, "max_tokens": 8, "chat_template_kwargs": {"thinking": True}}
        error = server.post("/v1/chat/completions", {**body, "thinking_token_budget": 1}).error
        assert error["param"] == "thinking_token_budget" and "are no tokens of this model" in error["message"]
        message = server.post("/v1/chat/completions", body).json()["choices"][0]["message"]
        assert message["content"] is None and message["reasoning"]
    with serving("--chat-template", str(file), "--reasoning-format", "off") as server:
        answer = server.post("/v1/chat/completions", body).json()
        message = answer["choices"][0]["message"]
        assert message["content"] and "reasoning" not in message
        assert "completion_tokens_details" not in answer["usage"]
