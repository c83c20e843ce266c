"""Bodies of every shape, near the schemas and far from them: never an answer of 500, and a healthy server after."""

from __future__ import annotations

import json
import os
import re
from typing import Any

import hypothesis.strategies as st
import pytest
from hypothesis import HealthCheck, given, settings
from serving import Served, no_fault

from examples import examples
from megatoken.serve.context import grammar_of
from megatoken.serve.request_errors import ApiError
from megatoken.serve.schema_chat import ChatBody
from megatoken.serve.schema_common import UNSUPPORTED, GenerationFields, SamplingDefaults, parse_body
from megatoken.serve.schema_completions import CompletionBody, DetokenizeBody, TokenizeBody
from megatoken.serve.schema_responses import ResponsesBody

EXAMPLES = int(os.environ.get("MEGATOKEN_FUZZ_EXAMPLES", examples(500)))
PATHS = {
    "/v1/chat/completions": ChatBody,
    "/v1/completions": CompletionBody,
    "/v1/responses": ResponsesBody,
    "/tokenize": TokenizeBody,
    "/detokenize": DetokenizeBody,
}
NUMBERS = st.one_of(
    st.integers(-3, 30),
    st.sampled_from([10**400, -(10**20), 2**63, 2**31, 1e308, -1e308, 5e-324, 0.5, float("nan"), float("inf")]),
)
WORDS = st.one_of(
    st.text(max_size=8),
    st.sampled_from(["user", "assistant", "auto", "required", "none", "json_object", "{{ 1 }}", "a" * 3000, "\ud800"]),
)
VALUES = st.recursive(
    st.one_of(st.none(), st.booleans(), NUMBERS, WORDS),
    lambda inner: st.one_of(st.lists(inner, max_size=4), st.dictionaries(WORDS, inner, max_size=3)),
    max_leaves=12,
)
MESSAGES = st.lists(
    st.fixed_dictionaries(
        {"role": st.sampled_from(["user", "system", "assistant", "tool", "developer", "x"])},
        optional={"content": st.one_of(WORDS, VALUES), "tool_calls": VALUES, "name": WORDS},
    ),
    min_size=1,
    max_size=3,
)
GOOD: dict[str, st.SearchStrategy[Any]] = {
    "messages": MESSAGES,
    "prompt": st.one_of(WORDS, st.lists(st.integers(0, 3100), max_size=5), st.lists(WORDS, max_size=3)),
    "input": st.one_of(WORDS, MESSAGES),
    "tokens": st.lists(st.integers(-1, 5000), max_size=5),
    "stream": st.booleans(),
    "stream_options": st.just({"include_usage": True}),
    "n": st.integers(1, 3),
    "temperature": st.floats(0, 3),
    "top_p": st.floats(0.1, 1),
    "top_k": st.integers(-1, 5),
    "seed": st.integers(-(2**63), 2**63 - 1),
    "stop": st.one_of(WORDS, st.lists(WORDS, max_size=3)),
    "logprobs": st.one_of(st.booleans(), st.integers(0, 5)),
    "logit_bias": st.dictionaries(st.integers(0, 3100).map(str), st.floats(-100, 100), max_size=3),
    "echo": st.booleans(),
    "prompt_logprobs": st.integers(0, 5),
    "bad_words": st.lists(WORDS, max_size=3),
    "tools": st.just([{"type": "function", "function": {"name": "f", "parameters": {}}}]),
    "chat_template": st.sampled_from(["{{ messages }}", "{% for %}", "{{ messages[9].content }}"]),
}


@st.composite
def requests(draw: st.DrawFn) -> tuple[str, bytes]:
    path = draw(st.sampled_from(sorted(PATHS)))
    fields = PATHS[path].model_fields
    required = [name for name, one in fields.items() if one.is_required()]
    some = draw(st.lists(st.sampled_from(sorted({*fields, *draw(st.just(UNSUPPORTED))})), max_size=5))
    body = {}
    for name in {*required, *some}:
        good = GOOD.get(name)
        wild = good is None or draw(st.integers(0, 4)) == 0
        body[name] = draw(VALUES if wild or good is None else good)
    limit = "max_output_tokens" if path == "/v1/responses" else "max_tokens"
    if draw(st.integers(0, 9)):
        body[limit] = draw(st.integers(1, 3))
    data = json.dumps(body).encode()
    if draw(st.integers(0, 9)) == 0:
        at = draw(st.integers(0, len(data)))
        data = data[:at] + draw(st.binary(max_size=4)) + data[at + draw(st.integers(0, 3)) :]
    return path, data


@settings(max_examples=examples(1500), suppress_health_check=list(HealthCheck))
@given(request=requests())
def test_a_body_is_read_or_refused_in_one_line_that_a_user_understands(request: tuple[str, bytes]) -> None:
    error = refusal(*request)
    if error is None:
        return
    message = str(error)
    assert error.status == 400 and len(message) < 1000
    assert not re.search(r"\n|pydantic|Input should|value_error|found using|_kind|Traceback", message), message
    assert error.param is not None or message.startswith("the body") or "JSON schema" in message, message


def refusal(path: str, data: bytes) -> ApiError | None:
    """Why a body is refused, as far as it can be said without a model."""
    try:
        body = parse_body(PATHS[path], data)
        if isinstance(body, GenerationFields):
            body.sampling(SamplingDefaults(), 0)
            grammar_of(body)
    except ApiError as error:
        return error
    return None


@pytest.mark.filterwarnings("ignore:Generating overly large repr")  # or it would be the failure that is shown
@settings(max_examples=EXAMPLES, suppress_health_check=list(HealthCheck))
@given(request=requests())
def test_no_body_is_answered_with_500(server: Served, request: tuple[str, bytes]) -> None:
    path, data = request
    reply = server.request("POST", path, data)
    assert reply.status in (200, 400, 404), (reply.status, reply.body)
    if reply.status != 200:
        assert reply.error["message"]
    elif b"data: " not in reply.body[:300]:
        reply.json()
    else:
        assert not re.search(rb'"error": ?\{', reply.body), reply.body  # events of /v1/responses say "error": null


def test_the_server_is_healthy_after_all(server: Served) -> None:
    assert server.get("/health").status == 200
    assert no_fault(server.log), server.log[-20:]
    metrics = server.get("/metrics").body.decode()
    running = [
        line
        for line in metrics.splitlines()
        if line.startswith(("vllm:num_requests_running", "vllm:num_requests_waiting"))
    ]
    assert running and all(line.endswith((" 0", " 0.0")) for line in running), running
