"""The official client, unmodified, against a real server: sync, async, streams, structured output, tools."""

from __future__ import annotations

import asyncio

import openai
import pytest
from openai import AsyncOpenAI, OpenAI
from serving import Served

DATES = "Write the dates like 14/03/2021.\nSeptember 27, 2027\nOctober 17, 2043\n"
ANSWER = "27/09/2027\n17/10/2043"
MODEL = "reference"


def ask(content: str = DATES) -> list[dict[str, str]]:
    return [{"role": "user", "content": content}]


def test_models(client: OpenAI) -> None:
    (model,) = client.models.list().data
    assert (model.id, model.owned_by) == (MODEL, "megatoken")
    assert client.models.retrieve(MODEL) == model
    with pytest.raises(openai.NotFoundError, match="'other' is not served here"):
        client.models.retrieve("other")


def test_chat(client: OpenAI) -> None:
    """The model answers as it was trained to, so the template fits it."""
    answer = client.chat.completions.create(model=MODEL, messages=ask(), temperature=0)
    (choice,) = answer.choices
    assert (choice.message.role, choice.message.content, choice.finish_reason) == ("assistant", ANSWER, "stop")
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 22 and answer.usage.prompt_tokens_details is not None
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + 22
    assert answer.id.startswith("chatcmpl-") and answer.object == "chat.completion"


def test_chat_in_turns_and_parts(client: OpenAI) -> None:
    parts = [{"type": "text", "text": DATES}]
    messages = [
        {"role": "developer", "content": ""},
        *ask(),
        {"role": "assistant", "content": ANSWER},
        {"role": "user", "content": parts},
    ]
    answer = client.chat.completions.create(model=MODEL, messages=messages, max_completion_tokens=5)
    assert answer.usage is not None and answer.usage.completion_tokens <= 5
    assert answer.choices[0].finish_reason == "length"


def test_streams_say_the_same(client: OpenAI) -> None:
    chunks = list(
        client.chat.completions.create(
            model=MODEL, messages=ask(), temperature=0, stream=True, stream_options={"include_usage": True}
        )
    )
    assert chunks[0].choices[0].delta.role == "assistant"
    assert all(chunk.choices[0].delta.role is None for chunk in chunks[1:-1])
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks[:-1]) == ANSWER
    assert [chunk.choices[0].finish_reason for chunk in chunks[:-1]] == [None] * (len(chunks) - 2) + ["stop"]
    assert all(chunk.usage is None for chunk in chunks[:-1])
    assert chunks[-1].choices == [] and chunks[-1].usage is not None and chunks[-1].usage.completion_tokens == 22
    assert len({chunk.id for chunk in chunks}) == 1
    plain = list(client.chat.completions.create(model=MODEL, messages=ask(), stream=True))
    assert all(chunk.choices for chunk in plain)


def test_many_at_once_from_an_event_loop(server: Served) -> None:
    async def ask_all() -> list[str]:
        async with AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:

            async def one() -> str:
                stream = await client.chat.completions.create(model=MODEL, messages=ask(), temperature=0, stream=True)
                return "".join([chunk.choices[0].delta.content or "" async for chunk in stream])

            return await asyncio.gather(*(one() for _ in range(16)))

    assert asyncio.run(ask_all()) == [ANSWER] * 16


def test_n_choices_have_seeds_one_after_the_other(client: OpenAI) -> None:
    settings = {"model": MODEL, "messages": ask("Say something"), "temperature": 2.0, "max_tokens": 12}
    both = client.chat.completions.create(**settings, n=3, seed=7)
    texts = [choice.message.content for choice in both.choices]
    assert [choice.index for choice in both.choices] == [0, 1, 2] and len(set(texts)) == 3
    for offset, text in enumerate(texts):
        assert client.chat.completions.create(**settings, seed=7 + offset).choices[0].message.content == text
    streamed = ["", "", ""]
    for chunk in client.chat.completions.create(**settings, n=3, seed=7, stream=True):
        streamed[chunk.choices[0].index] += chunk.choices[0].delta.content or ""
    assert streamed == texts


def test_stop_strings(client: OpenAI) -> None:
    answer = client.chat.completions.create(model=MODEL, messages=ask(), temperature=0, stop=["\n17/1"])
    assert answer.choices[0].message.content == "27/09/2027"
    assert answer.choices[0].finish_reason == "stop"
    assert answer.choices[0].stop_reason == "\n17/1"
    chunks = client.chat.completions.create(
        model=MODEL,
        messages=ask(),
        temperature=0,
        stream=True,
        stop="/2043",
        extra_body={"include_stop_str_in_output": True},
    )
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == ANSWER


def test_logprobs(client: OpenAI) -> None:
    settings = {"model": MODEL, "messages": ask(), "temperature": 0, "logprobs": True, "top_logprobs": 2}
    whole = client.chat.completions.create(**settings).choices[0].logprobs
    assert whole is not None and whole.content is not None
    assert "".join(entry.token for entry in whole.content) == f"{ANSWER}</s>"
    for entry in whole.content:
        assert entry.bytes == list(entry.token.encode())
        assert entry.logprob <= 0 and len(entry.top_logprobs) == 2
        assert entry.top_logprobs[0].logprob == entry.logprob >= entry.top_logprobs[1].logprob
    streamed = []
    for chunk in client.chat.completions.create(**settings, stream=True):
        if (found := chunk.choices[0].logprobs) is not None and found.content is not None:
            streamed += found.content
    assert [entry.token for entry in streamed] == [entry.token for entry in whole.content]


def test_completions(client: OpenAI) -> None:
    prompt = f"{DATES}Answer:\n"
    answer = client.completions.create(model=MODEL, prompt=prompt, max_tokens=40, temperature=0, logprobs=1)
    assert (answer.choices[0].text, answer.choices[0].finish_reason) == (ANSWER, "stop")
    logprobs = answer.choices[0].logprobs
    assert logprobs is not None and logprobs.tokens is not None and logprobs.text_offset is not None
    assert "".join(logprobs.tokens) == f"{ANSWER}</s>" and logprobs.text_offset[:3] == [0, 1, 2]
    chunks = client.completions.create(model=MODEL, prompt=prompt, max_tokens=40, temperature=0, stream=True, echo=True)
    assert "".join(chunk.choices[0].text for chunk in chunks) == prompt + ANSWER


def test_batches_of_text_and_ids(client: OpenAI, server: Served) -> None:
    prompts = [f"{DATES}Answer:\n", "Add 3 and 4.\nAnswer:\n"]
    ids = [server.post("/tokenize", {"prompt": prompt}).json()["tokens"] for prompt in prompts]
    by_text = client.completions.create(model=MODEL, prompt=prompts, max_tokens=8, temperature=0, n=2)
    by_ids = client.completions.create(model=MODEL, prompt=ids, max_tokens=8, temperature=0, n=2)
    assert [choice.text for choice in by_text.choices] == [choice.text for choice in by_ids.choices]
    assert [choice.index for choice in by_text.choices] == [0, 1, 2, 3]
    assert by_text.choices[0].text == by_text.choices[1].text == ANSWER[: len(by_text.choices[0].text)]
    assert by_ids.usage is not None and by_ids.usage.prompt_tokens == sum(map(len, ids))


def test_responses(client: OpenAI) -> None:
    answer = client.responses.create(model=MODEL, input=DATES, temperature=0)
    assert (answer.output_text, answer.status) == (ANSWER, "completed")
    assert answer.usage is not None and answer.usage.output_tokens == 22
    items = [{"role": "user", "content": [{"type": "input_text", "text": DATES}]}]
    cut = client.responses.create(model=MODEL, input=items, instructions="", temperature=0, max_output_tokens=5)
    assert cut.status == "incomplete" and cut.incomplete_details is not None
    assert cut.incomplete_details.reason == "max_output_tokens"
    assert cut.output_text == ANSWER[: len(cut.output_text)]


def test_responses_in_events(client: OpenAI) -> None:
    events = list(client.responses.create(model=MODEL, input=DATES, temperature=0, stream=True))
    kinds = [event.type for event in events]
    assert kinds[:4] == [
        "response.created",
        "response.in_progress",
        "response.output_item.added",
        "response.content_part.added",
    ]
    assert kinds[-4:] == [
        "response.output_text.done",
        "response.content_part.done",
        "response.output_item.done",
        "response.completed",
    ]
    assert set(kinds[4:-4]) == {"response.output_text.delta"}
    assert "".join(event.delta for event in events if event.type == "response.output_text.delta") == ANSWER
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert events[-1].type == "response.completed" and events[-1].response.output_text == ANSWER
    with client.responses.stream(model=MODEL, input=DATES, temperature=0) as stream:
        assert stream.get_final_response().output_text == ANSWER


def test_errors_are_typed(client: OpenAI) -> None:
    with pytest.raises(openai.NotFoundError) as missing:
        client.chat.completions.create(model="gpt", messages=ask())
    assert missing.value.code == "model_not_found" and missing.value.param == "model"
    with pytest.raises(openai.BadRequestError) as wrong:
        client.chat.completions.create(model=MODEL, messages=ask(), temperature=-1)
    assert wrong.value.param == "temperature"
    with pytest.raises(openai.BadRequestError) as long:
        client.completions.create(model=MODEL, prompt=[5] * 3000)
    assert long.value.code == "context_length_exceeded"
    with pytest.raises(openai.BadRequestError, match="previous_response_id: not supported"):
        client.responses.create(model=MODEL, input=DATES, previous_response_id="resp_1")
    with pytest.raises(openai.BadRequestError, match="store: not supported"):
        client.responses.create(model=MODEL, input=DATES, store=True)


def test_a_continued_message_is_echoed(client: OpenAI) -> None:
    begun = [*ask(), {"role": "assistant", "content": ANSWER[:4]}]
    body = {"continue_final_message": True, "add_generation_prompt": False}
    settings = {"model": MODEL, "messages": begun, "temperature": 0}
    plain = client.chat.completions.create(**settings, extra_body=body).choices[0].message.content
    assert plain == ANSWER[4:]
    echoed = client.chat.completions.create(**settings, extra_body={**body, "echo": True})
    assert echoed.choices[0].message.content == ANSWER
    chunks = client.chat.completions.create(**settings, extra_body={**body, "echo": True}, stream=True)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == ANSWER
    new = client.chat.completions.create(model=MODEL, messages=ask(), temperature=0, extra_body={"echo": True})
    assert new.choices[0].message.content == ANSWER
