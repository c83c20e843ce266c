"""Bodies that the official client does not send: fields of other servers, wrong values, streams with details."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from serving import REFERENCE_MODEL, Reply, Served, serving

from megatoken import ChatTemplate, Engine, EngineConfig
from megatoken.engine.tokenizer import Tokenizer
from megatoken.errors import RequestError
from megatoken.serve.schema_chat import ChatBody
from megatoken.serve.schema_common import UNSUPPORTED, WITHOUT_EFFECT
from megatoken.serve.schema_completions import CompletionBody, DetokenizeBody, TokenizeBody
from megatoken.serve.schema_responses import ResponsesBody

DATES = "Write the dates like 14/03/2021.\nSeptember 27, 2027\n"
CHAT: dict[str, Any] = {"messages": [{"role": "user", "content": DATES}], "temperature": 0}
TEXT: dict[str, Any] = {"prompt": f"{DATES}Answer:\n", "temperature": 0}


def chat(server: Served, **fields: Any) -> Reply:
    return server.post("/v1/chat/completions", CHAT | fields)


def text(server: Served, **fields: Any) -> Reply:
    return server.post("/v1/completions", TEXT | fields)


CALL = {"type": "function_call", "call_id": "c", "name": "f"}
WRONG: list[tuple[dict[str, Any], str | None, str]] = [
    ({"messages": []}, "messages", "must not be empty"),
    ({"messages": None}, "messages", "required"),
    ({"messages": "hello"}, "messages", "must be a list"),
    (
        {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]},
        "messages.0.content.0.type",
        "'text'",
    ),
    ({"messages": [{"role": "user", "content": 5}]}, "messages.0.content", "must be a string or a list"),
    ({"temperature": "0.5"}, "temperature", "number"),
    ({"temperature": 10**400}, "temperature", "number"),
    ({"top_p": 0}, "top_p", "must be more than 0"),
    ({"max_tokens": 0}, "max_tokens", "must be at least 1"),
    ({"max_tokens": 10**9}, "max_tokens", "no room for a prompt in the model's context of 2,048; give at most 2,047"),
    ({"max_completion_tokens": 2048}, "max_completion_tokens", "an answer of 2,048 tokens leaves no room"),
    ({"max_tokens": 2047}, "messages", "more than the model's context of 2,048"),
    ({"max_tokens": 2.5}, "max_tokens", "integer"),
    ({"n": 129}, "n", "must be at most 128"),
    ({"n": True}, "n", "integer"),
    ({"stop": ["a"] * 17}, "stop", "at most 16"),
    ({"stop": [""]}, "stop.0", "must not be empty"),
    ({"logit_bias": {"x": 1}}, "logit_bias", "token ids"),
    ({"logit_bias": {"5": 1000}}, "logit_bias.5", "must be at most 100"),
    ({"top_logprobs": 3}, "top_logprobs", "needs logprobs"),
    ({"logprobs": True, "top_logprobs": 21}, "top_logprobs", "must be at most 20"),
    ({"stream_options": {"include_usage": True}}, "stream_options", "only allowed when stream is true"),
    ({"response_format": {"type": "xml"}}, "response_format.type", "json_schema"),
    ({"response_format": {"type": "json_schema"}}, "response_format", "needs the field json_schema"),
    ({"response_format": {"type": "grammar"}}, "response_format", "needs the field grammar"),
    ({"structured_outputs": {}}, "structured_outputs", "exactly one"),
    ({"tool_choice": "required"}, "tool_choice", "needs tools"),
    ({"tools": [{"type": "browser"}]}, "tools.0.type", "'function'"),
    ({"tools": [{"type": "function", "function": {"name": "f"}}]}, "tools", "how this model calls tools is unknown"),
    ({"add_generation_prompt": True, "continue_final_message": True}, "continue_final_message", "together"),
    ({"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs", "messages is a separate field"),
    ({"reasoning_effort": "low"}, "reasoning_effort", "does not have it"),
    ({"truncate_prompt_tokens": 0}, "truncate_prompt_tokens", "at least 1"),
    ({"stop_token_ids": [-1]}, "stop_token_ids.0", "must be at least 0"),
    ({"stop_token_ids": [3072]}, "stop_token_ids", "outside the vocabulary of 3,072"),
    ({"seed": 2**63}, "seed", "less than"),
    # found by the engine process:
    ({"logit_bias": {"3072": 1}}, "logit_bias", "outside the vocabulary"),
    ({"min_tokens": 9, "max_tokens": 8}, "min_tokens", "must be at most 8"),
    ({"structured_outputs": {"regex": "("}}, "structured_outputs", "is refused"),
    ({"structured_outputs": {"json": {"$ref": "#"}}}, "structured_outputs", "to itself alone"),
    ({"response_format": {"type": "json_object"}, "ignore_eos": True}, "response_format", "ignore_eos"),
    ({"request_id": "a b"}, "request_id", "match"),
    ({"prompt_logprobs": 21}, "prompt_logprobs", "must be at most 20"),
    ({"prompt_logprobs": 1, "stream": True}, "prompt_logprobs", "not in streams"),
    ({"prompt_logprobs": 20, "n": 128}, "prompt_logprobs", "at most 65,536"),
    ({"allowed_token_ids": []}, "allowed_token_ids", "must not be empty"),
    ({"allowed_token_ids": [5, 3072]}, "allowed_token_ids", "outside the vocabulary of 3,072"),
    ({"bad_words": [""]}, "bad_words.0", "must not be empty"),
    ({"bad_words": ["a"], "response_format": {"type": "json_object"}}, "bad_words", "of a given form"),
]


@pytest.mark.parametrize(("fields", "param", "message"), WRONG, ids=[json.dumps(one)[:60] for one, _, _ in WRONG])
def test_wrong_values_are_refused_by_name(
    server: Served, fields: dict[str, Any], param: str | None, message: str
) -> None:
    reply = chat(server, **fields)
    assert reply.status == 400, reply.body
    assert reply.error["param"] == param
    assert message in reply.error["message"]
    assert reply.error["type"] == "invalid_request_error"


@pytest.mark.parametrize("name", sorted(set(UNSUPPORTED) - {"suffix"} - set(ChatBody.model_fields)))
def test_a_field_that_is_known_and_not_supported_is_refused(server: Served, name: str) -> None:
    reply = chat(server, max_tokens=1, **{name: ["something"]})
    assert (reply.status, reply.error["param"]) == (400, name)
    assert "not supported here; leave it out" in reply.error["message"]
    for harmless in (None, *UNSUPPORTED[name]):
        assert chat(server, max_tokens=1, **{name: harmless}).status == 200


@pytest.mark.parametrize(
    ("fields", "param", "message"),
    [
        ({"max_output_tokens": 10**9}, "max_output_tokens", "max_output_tokens: an answer of 1,000,000,000 tokens"),
        ({"max_output_tokens": 2047}, "input", "max_output_tokens of 2,047"),
        (
            {"input": [{"type": "function_call", "call_id": "c", "name": "f", "arguments": "["}]},
            "input",
            "must be JSON",
        ),
        ({"input": [{"role": "user", "content": 5}]}, "input.0.content", "must be a string or a list"),
        ({"input": [{"type": "reasoning", "content": 5}]}, "input.0.content", "must be a list"),
        ({"reasoning": 5}, "reasoning", "must be an object"),
        ({"input": [{"type": "shell"}]}, "input.0", "its type must be one of 'message'"),
        ({"reasoning": {"effort": "low"}}, "reasoning.effort", "does not have it"),
        ({"stop": ["a"] * 17}, "stop", "at most 16"),
        ({"text": {"format": {"type": "json_schema"}}}, "text.format", "needs a schema"),
        ({"text": {"format": {"type": "json_schema", "schema": {"enum": []}}}}, "text.format", "is refused"),
        ({"tools": [{"type": "web_search"}]}, "tools.0.type", "runs no tools itself, such as 'web_search'"),
        ({"tools": [{"type": "function", "name": "f"}]}, "tools", "how this model calls tools is unknown"),
    ],
)
def test_responses_names_its_own_fields(server: Served, fields: dict[str, Any], param: str, message: str) -> None:
    reply = server.post("/v1/responses", {"input": "?", **fields})
    assert (reply.status, reply.error["param"]) == (400, param)
    assert message in reply.error["message"] and "messages" not in reply.error["message"]


def test_a_list_of_tokens_beyond_the_context_is_refused(server: Served) -> None:
    assert server.post("/detokenize", {"tokens": [5] * 2048}).status == 200
    error = server.post("/detokenize", {"tokens": [5] * 2049}).error
    assert (error["param"], error["code"]) == ("tokens", "context_length_exceeded")


def test_a_token_that_the_model_does_not_have_is_refused(server: Served) -> None:
    reply = server.post("/detokenize", {"tokens": [5, 99_999_999, 6]})
    assert (reply.status, reply.error["param"]) == (400, "tokens")
    assert reply.error["message"].startswith("tokens: token id 99999999 is outside the vocabulary of ")


def test_other_fields_that_are_refused_or_accepted(server: Served) -> None:
    assert text(server, suffix="end").error["param"] == "suffix"
    assert server.post("/v1/responses", {"input": "?", "max_tokens": 3}).error["param"] == "max_tokens"
    assert text(server, suffix="", best_of=1, user="me", max_tokens=1).status == 200
    assert chat(server, user="me", metadata={"a": "b"}, safety_identifier="x", max_tokens=1).status == 200
    nulls = (
        "model",
        "max_tokens",
        "stop",
        "seed",
        "n",
        "tools",
        "tool_choice",
        "stream_options",
        "logit_bias",
        "top_k",
    )
    assert chat(server, **dict.fromkeys(nulls), max_completion_tokens=1).status == 200


def test_unknown_fields_are_ignored_and_listed_once(server: Served) -> None:
    for _ in range(3):
        assert chat(server, max_tokens=1, no_such_field=1, another={"a": 1}).status == 200
    assert sum("no_such_field" in line for line in server.log) == 1
    (line,) = [line for line in server.log if "no_such_field" in line]
    assert "ignored unknown fields" in line and "another" in line


@pytest.mark.parametrize(
    "body", [b"", b"{", b"[]", b"null", b'"x"', b"\xff", b"[" * 100_000, b'{"messages": NaN}', b'{"prompt": "\\ud800"}']
)
def test_bodies_that_are_no_json_objects(server: Served, body: bytes) -> None:
    for path in ("/v1/chat/completions", "/v1/completions", "/v1/responses", "/tokenize", "/detokenize"):
        reply = server.request("POST", path, body)
        assert reply.status == 400, (path, reply.body)
        assert reply.error["message"]


def test_tokenize_and_detokenize(server: Served) -> None:
    tokenizer = Tokenizer(REFERENCE_MODEL / "tokenizer.json")
    reply = server.post("/tokenize", {"prompt": "Add 3 é", "return_token_strs": True}).json()
    assert reply["tokens"] == tokenizer.encode("Add 3 é") and reply["count"] == len(reply["tokens"])
    assert reply["max_model_len"] == 2048 and reply["token_strs"][0] == "<s>"
    plain = server.post("/tokenize", {"prompt": "Add 3 é", "add_special_tokens": False}).json()
    assert plain["tokens"] == reply["tokens"][1:]
    assert server.post("/detokenize", {"tokens": reply["tokens"]}).json() == {"prompt": "<s>Add 3 é"}
    assert server.post("/tokenize", {}).error["message"] == "prompt: give either prompt or messages"
    long = "word " * 20_000
    assert server.post("/tokenize", {"prompt": long}).json()["tokens"] == tokenizer.encode(long)
    assert "more than the 131,072 that can ever fit" in server.post("/tokenize", {"prompt": long * 2}).error["message"]
    reply = chat(server, messages=[{"role": "user", "content": long}, {"role": "user", "content": long}])
    assert (reply.status, reply.error["code"]) == (400, "context_length_exceeded")
    assert server.post("/tokenize", {"prompt": long, "return_token_strs": True}).error["param"] == "return_token_strs"
    many = list(range(256, 512)) * 8
    assert server.post("/detokenize", {"tokens": many}).json()["prompt"] == tokenizer.decode(many, keep_special=True)


def test_special_tokens_of_a_template_are_not_added_again(server: Served) -> None:
    tokens = server.post("/tokenize", {"messages": CHAT["messages"]}).json()["tokens"]
    assert tokens.count(1) == 1 and tokens[0] == 1
    assert server.post("/detokenize", {"tokens": tokens}).json()["prompt"] == f"<s>{DATES}Answer:\n"
    reply = chat(server, return_token_ids=True, max_tokens=1).json()
    assert reply["prompt_token_ids"] == tokens and len(reply["choices"][0]["token_ids"]) == 1


def test_templates_of_requests(server: Served) -> None:
    template = "{{ bos_token }}{{ greeting }} {{ messages[0].content }}"
    fields = {"chat_template": template, "chat_template_kwargs": {"greeting": "Hi"}}
    tokens = server.post("/tokenize", {**CHAT, **fields}).json()["tokens"]
    assert server.post("/detokenize", {"tokens": tokens}).json()["prompt"] == f"<s>Hi {DATES}"
    assert chat(server, max_tokens=1, **fields).status == 200
    hostile = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
    reply = chat(server, chat_template=hostile)
    assert reply.status == 400 and "did not end within 1 s" in reply.error["message"]
    assert chat(server, max_tokens=1, **fields).status == 200


def test_continue_a_message(server: Served) -> None:
    messages = [*CHAT["messages"], {"role": "assistant", "content": "27/0"}]
    reply = chat(server, messages=messages, continue_final_message=True).json()
    assert reply["choices"][0]["message"]["content"] == "9/2027"


@pytest.mark.parametrize(
    "message", [{"role": "user"}, {"role": "user", "content": None}, {"role": "assistant", "content": None}]
)
def test_a_message_without_content_is_refused(server: Served, message: dict[str, Any]) -> None:
    for reply in (
        chat(server, messages=[*CHAT["messages"], message]),
        server.post("/tokenize", {"messages": [*CHAT["messages"], message]}),
    ):
        assert reply.status == 400 and reply.error["param"] == "messages.1.content"
        assert reply.error["message"].startswith("messages.1.content: is required; only a message of the assistant")


def test_a_message_of_the_assistant_that_calls_or_thinks_needs_no_content(server: Served) -> None:
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    for brings in ({"tool_calls": [call]}, {"reasoning": "Hm."}):
        messages = [*CHAT["messages"], {"role": "assistant", "content": None, **brings}, *CHAT["messages"]]
        assert chat(server, messages=messages, max_tokens=1).status == 200


def test_truncated_prompts(server: Served) -> None:
    ids = list(range(10, 60))
    whole = text(server, prompt=ids[-7:], max_tokens=4, return_token_ids=True).json()["choices"][0]
    cut = text(server, prompt=ids, truncate_prompt_tokens=7, max_tokens=4, return_token_ids=True).json()["choices"][0]
    assert cut == whole and cut["prompt_token_ids"] == ids[-7:]
    long = text(server, prompt=[10] * 5000, truncate_prompt_tokens=-1, max_tokens=4).json()
    assert long["usage"]["prompt_tokens"] == 2044


def test_prompts_that_are_empty_or_outside_the_vocabulary(server: Served) -> None:
    assert text(server, prompt=[3072]).error["param"] == "prompt"
    assert "prompt: token id 3072 is outside the vocabulary of 3,072" in text(server, prompt=[3072]).error["message"]
    assert text(server, prompt="", add_special_tokens=False).error["message"].startswith("the prompt is empty")
    assert text(server, prompt=[]).status == 400
    assert text(server, prompt=["a"] * 9, n=128).error["param"] == "n"


def test_echo_of_a_prompt_alone(server: Served) -> None:
    reply = text(server, echo=True, max_tokens=0).json()
    assert reply["choices"][0]["text"] == TEXT["prompt"] and reply["choices"][0]["finish_reason"] == "length"
    events = text(server, echo=True, max_tokens=0, stream=True).events()
    assert "".join(event["choices"][0]["text"] for event in events) == TEXT["prompt"]
    details = {"echo": True, "max_tokens": 0, "return_token_ids": True, "n": 2}
    reply = text(server, **details).json()
    assert [choice["token_ids"] for choice in reply["choices"]] == [[], []]
    usage = reply["usage"]
    assert usage["completion_tokens"] == 0 and usage["total_tokens"] == usage["prompt_tokens"] > 0
    *events, last = text(server, **details, stream=True, stream_options={"include_usage": True}).events()
    assert [event["choices"][0]["token_ids"] for event in events] == [[], []] and last["usage"] == usage


def test_bad_words_are_not_in_the_answer(server: Served) -> None:
    free = text(server).json()["choices"][0]["text"]
    year = free.split("/")[-1].strip()
    for fields in ({}, {"n": 2, "temperature": 1, "seed": 1}):
        choices = text(server, bad_words=[year, free[:2]], max_tokens=30, **fields).json()["choices"]
        assert all(free[:2] not in one["text"] and year not in one["text"] for one in choices)
    assert chat(server, bad_words=[free[:2]]).status == 200


def test_the_python_api_makes_the_same_prompt_of_a_chat(server: Served) -> None:
    messages = [{"role": "system", "content": "Sort."}, {"role": "user", "content": "b a"}]
    served = server.post("/tokenize", {"messages": messages}).json()["tokens"]
    with Engine("reference", EngineConfig(precision="fp32", cache_tokens=64)) as engine:
        assert ChatTemplate("reference").prompt(engine, messages) == served
        with pytest.raises(RequestError, match="cannot render these messages"):
            ChatTemplate("reference").prompt(engine, [{"role": "user"}], continue_final_message=True)
        with pytest.raises(RequestError, match="no chat template"):
            ChatTemplate("tiny").prompt(engine, messages)


def test_an_answer_has_allowed_tokens_alone(server: Served) -> None:
    allowed = server.post("/tokenize", {"prompt": " 7/", "add_special_tokens": False}).json()["tokens"]
    for fields in ({}, {"n": 2, "temperature": 2, "seed": 1}):
        wanted = {"allowed_token_ids": allowed, "return_token_ids": True, "max_tokens": 8, **fields}
        choices = text(server, **wanted).json()["choices"]
        assert all(one["token_ids"] and set(one["token_ids"]) <= set(allowed) for one in choices)
    assert chat(server, allowed_token_ids=allowed, max_tokens=2).status == 200


def test_logprobs_of_prompts_in_the_form_of_vllm(server: Served) -> None:
    fields = {"prompt_logprobs": 2, "max_tokens": 2, "return_token_ids": True}
    [choice] = text(server, **fields).json()["choices"]
    whole = chat(server, **fields).json()
    for ids, entries in (
        (choice["prompt_token_ids"], choice["prompt_logprobs"]),
        (whole["prompt_token_ids"], whole["prompt_logprobs"]),
    ):
        assert len(entries) == len(ids) and entries[0] is None
        for token_id, entry in zip(ids[1:], entries[1:], strict=True):
            ranks = {one["rank"] for one in entry.values()}
            assert str(token_id) in entry and {1, 2} <= ranks and len(entry) <= 3
            best = max(entry.values(), key=lambda one: one["logprob"])
            assert best["rank"] == 1
    # What the model says of an answer is the same after it has become a part of the prompt.
    answer = text(server, max_tokens=6, logprobs=0, return_token_ids=True).json()["choices"][0]
    prompt = choice["prompt_token_ids"] + answer["token_ids"]
    [again] = text(server, prompt=prompt, prompt_logprobs=0, max_tokens=1).json()["choices"]
    found = [entry[str(one)] for one, entry in zip(answer["token_ids"], again["prompt_logprobs"][-6:], strict=True)]
    assert [one["logprob"] for one in found] == pytest.approx(answer["logprobs"]["token_logprobs"], abs=1e-4)
    assert all(one["rank"] == 1 for one in found)


@pytest.mark.parametrize("tokens", [0, 3])
def test_echoed_prompts_have_logprobs(server: Served, tokens: int) -> None:
    fields = {"echo": True, "logprobs": 2, "max_tokens": tokens, "return_token_ids": True}
    reply = text(server, **fields, n=2).json()
    assert reply["usage"]["completion_tokens"] == 2 * tokens
    for choice in reply["choices"]:
        ids = choice["prompt_token_ids"] + choice["token_ids"]
        logprobs = choice["logprobs"]
        assert len(choice["token_ids"]) == tokens and choice["text"].startswith(TEXT["prompt"])
        assert {len(one) for one in logprobs.values()} == {len(ids)}
        assert logprobs["token_logprobs"][0] is None and logprobs["top_logprobs"][0] is None
        assert all(value <= 0 for value in logprobs["token_logprobs"][1:])
        for token, offset in zip(logprobs["tokens"], logprobs["text_offset"], strict=True):
            if token not in ("<s>", "</s>"):
                assert choice["text"].startswith(token, offset)
    [alone] = text(server, prompt_logprobs=2, max_tokens=1).json()["choices"]
    for entry, top in zip(alone["prompt_logprobs"][1:], logprobs["top_logprobs"][1:], strict=False):
        assert top == pytest.approx({one["decoded_token"]: one["logprob"] for one in entry.values()}, abs=1e-4)
    events = [one["choices"][0] for one in text(server, **fields, stream=True).events()]
    for name in ("tokens", "text_offset"):
        assert [one for event in events for one in event["logprobs"][name]] == logprobs[name]
    assert "".join(event["text"] for event in events) == choice["text"]
    assert [one for event in events for one in event["token_ids"]] == choice["token_ids"]


def test_endings(server: Served) -> None:
    answer = chat(server).json()["choices"][0]
    assert answer["message"]["content"] == "27/09/2027"
    ids = chat(server, return_token_ids=True).json()["choices"][0]["token_ids"]
    assert ids[-1] == 2  # the model's end token
    slash = ids[2]
    stopped = chat(server, stop_token_ids=[slash]).json()["choices"][0]
    assert (stopped["message"]["content"], stopped["stop_reason"]) == ("27", slash)
    kept = chat(server, stop_token_ids=[slash], include_stop_str_in_output=True).json()["choices"][0]
    assert kept["message"]["content"] == "27/"
    later = chat(server, stop="/", min_tokens=4).json()["choices"][0]
    assert later["message"]["content"] == "27/09"
    longer = chat(server, ignore_eos=True, max_tokens=15, skip_special_tokens=False).json()
    assert longer["usage"]["completion_tokens"] == 15
    assert longer["choices"][0]["message"]["content"].startswith("27/09/2027</s>")
    assert longer["choices"][0]["finish_reason"] == "length"


def test_details_in_streams(server: Served) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    events = chat(server, stream=True, stream_options=options, return_token_ids=True).events()
    assert events[0]["prompt_token_ids"][0] == 1
    ids = [one for event in events[1:-1] for one in event["choices"][0].get("token_ids", [])]
    assert ids == chat(server, return_token_ids=True).json()["choices"][0]["token_ids"]
    counts = [event["usage"]["completion_tokens"] for event in events]
    assert counts == sorted(counts) and counts[-1] == len(ids)
    assert events[-1]["choices"] == []
    assert "cached_tokens" in events[-1]["usage"]["prompt_tokens_details"]
    named = chat(server, logprobs=True, return_tokens_as_token_ids=True).json()["choices"][0]["logprobs"]["content"]
    assert [one["token"] for one in named] == [f"token_id:{one}" for one in ids]


def test_a_request_id_of_the_client(server: Served) -> None:
    assert chat(server, request_id="mine-1", max_tokens=1).json()["id"] == "chatcmpl-mine-1"
    head = {"x-request-id": "from-header"}
    reply = server.request("POST", "/v1/completions", json.dumps(TEXT | {"max_tokens": 1}).encode(), head)
    assert reply.json()["id"] == "cmpl-from-header" and reply.headers["x-request-id"] == "from-header"


def test_the_openapi_document(server: Served) -> None:
    document = server.get("/openapi.json").json()
    assert set(document["paths"]) >= {
        "/v1/chat/completions",
        "/v1/completions",
        "/v1/responses",
        "/v1/models",
        "/health",
    }
    fields = document["components"]["schemas"]["ChatBody"]["properties"]
    assert {"messages", "temperature", "stream", "tools", "cache_salt"} <= set(fields)


def test_every_field_is_documented() -> None:
    page = (Path(__file__).parents[2] / "docs/serve.md").read_text()
    bodies = (ChatBody, CompletionBody, ResponsesBody, TokenizeBody, DetokenizeBody)
    fields = {name for body in bodies for name in body.model_fields}
    assert {name for name in {*fields, *UNSUPPORTED, *WITHOUT_EFFECT} if f"`{name}`" not in page} == set()


def test_nothing_of_prompts_or_answers_is_logged(server: Served) -> None:
    text(server, prompt="a secret called Xyzzy", max_tokens=2)
    chat(server, messages=[{"role": "user", "content": "Xyzzy"}], temperature=-1)
    assert not any("Xyzzy" in line for line in server.log)


def test_a_named_shape_has_neither_tokenizer_nor_template() -> None:
    """The mock engine with a shape alone: token ids in, token ids as text out."""
    with serving("--engine", "mock", "--model", "125m", "--tokens-per-second", "500") as server:
        body = {"prompt": [1, 2, 3], "max_tokens": 4, "return_token_ids": True}
        choice = server.post("/v1/completions", body).json()["choices"][0]
        assert choice["text"] == "".join(f"{one} " for one in choice["token_ids"]) and len(choice["token_ids"]) == 4
        assert "has no tokenizer" in server.post("/v1/completions", {"prompt": "text"}).error["message"]
        assert server.post("/v1/completions", {**body, "stop": "5"}).error["param"] == "stop"
        reply = server.post("/v1/chat/completions", CHAT)
        assert reply.status == 400 and "start the server with --chat-template FILE" in reply.error["message"]
