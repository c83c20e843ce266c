"""Answers of another form than the API's fail their own request, and no other."""

from __future__ import annotations

import json
import zlib
from typing import Any

import pytest
from endpoint_support import answered, connected, prompts
from scripted_server import scripted_server

from megatoken.targets.endpoint.answers import Answer, BrokenAnswerError
from megatoken.targets.endpoint.bodies import Api

CHOICE = {"text": "a", "finish_reason": "stop"}


@pytest.mark.parametrize(
    ("api", "document"),
    [
        ("completions", {"choices": [{**CHOICE, "token_ids": 7}]}),
        ("completions", {"choices": [CHOICE], "usage": {"prompt_tokens_details": [1]}}),
        ("chat", {"choices": [{**CHOICE, "message": "a", "delta": "a"}]}),
        ("responses", {"output": ["a"], "status": "completed"}),
    ],
)
def test_an_answer_of_another_form_is_said_to_be_none_of_the_api(api: Api, document: dict[str, Any]) -> None:
    data = json.dumps(document).encode()
    with pytest.raises(BrokenAnswerError, match=r"not an answer of the API: \{"):
        Answer(api, keep_text=True).take_body(data)
    if api != "responses":
        with pytest.raises(BrokenAnswerError, match="not an answer of the API: data"):
            Answer(api, keep_text=True).feed(b"data: " + data + b"\n\n", 0)


def test_half_of_a_pair_of_escapes_is_text() -> None:
    answer = Answer("completions", keep_text=True)
    answer.take_body(rb'{"choices": [{"text": "\ud83d", "finish_reason": "stop"}]}')
    assert answer.text_hash == zlib.crc32("\ud83d".encode("utf-8", "surrogatepass"))


def test_an_answer_of_another_form_that_ends_with_its_connection_fails_alone() -> None:
    with scripted_server() as server, connected(server.url, stream=False) as target:
        last = answered(target, prompts("unlike", "ok"))
    assert "not an answer of the API" in str(last[0].error) and last[1].error is None
