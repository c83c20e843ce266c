"""Text of answers in the Python API: whole, in streams, cut at stop strings, and awaited in an event loop."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence
from contextlib import aclosing
from pathlib import Path

import pytest
from engines import assert_idle, drain

from megatoken import AsyncEngine
from megatoken.engine import Completion, Engine, EngineConfig, EngineThread, FinishReason, Request, Sampling, TokenEvent
from megatoken.errors import MegatokenError, RequestError, ThreadError

OVERLAP = pytest.mark.parametrize("overlap", [False, True])
PROMPTS = ["What is water made of?", "Name a colour.", "Where does the sun rise?", "Count to five."]


@pytest.fixture(scope="module", params=[False, True], ids=["synchronous", "overlapped"])
def engine(request: pytest.FixtureRequest) -> Engine:
    return Engine("reference", EngineConfig(precision="fp32", threads=1, overlap=request.param))


def asked(prompt: str, **options: object) -> Request:
    return Request(prompt, 24, **options)


def test_completions_have_the_text_of_their_tokens(engine: Engine) -> None:
    for completion in engine.generate([asked(prompt) for prompt in PROMPTS]):
        assert completion.text == engine.tokenizer.decode(completion.token_ids)
        assert len(completion.text) > 3


def test_streams_carry_the_same_text_in_pieces(engine: Engine) -> None:
    for prompt, whole in zip(PROMPTS[:2], engine.generate([asked(prompt) for prompt in PROMPTS[:2]]), strict=True):
        events = list(engine.stream(asked(prompt)))
        assert "".join(event.text for event in events) == whole.text
        assert [token for event in events for token in event.token_ids] == whole.token_ids
    assert_idle(engine)


def test_answers_end_at_a_stop_string_wherever_it_begins(engine: Engine) -> None:
    """Strings from every place of the free answer, across tokens: the shortest prefix of tokens that holds one."""
    draws = random.Random(0)
    cases: list[tuple[Completion, str, Request]] = []
    for prompt, free in zip(PROMPTS, engine.generate([asked(prompt) for prompt in PROMPTS]), strict=True):
        begins = [draws.randrange(len(free.text) - 2) for _ in range(6)]
        stops = [free.text[begin : begin + draws.randint(1, 9)] for begin in begins]
        cases += [(free, stop, asked(prompt, stop=(stop, "never in it"))) for stop in stops]
    for (free, stop, _), found in zip(cases, engine.generate([request for *_, request in cases]), strict=True):
        assert found.text == free.text[: free.text.index(stop)]
        assert found.finish_reason is FinishReason.STOP
        assert found.token_ids == free.token_ids[: len(found.token_ids)]
        assert stop in engine.tokenizer.decode(found.token_ids)
        assert stop not in engine.tokenizer.decode(found.token_ids[:-1])
    for free, stop, request in cases[::12]:
        streamed = "".join(event.text for event in engine.stream(request))
        assert streamed == free.text[: free.text.index(stop)]
    drain(engine)
    assert_idle(engine)


def test_submitted_requests_with_stop_strings_report_text(engine: Engine) -> None:
    [free] = engine.generate([asked(PROMPTS[0])])
    stop = free.text[6:9]
    with_stop, without = engine.submit(asked(PROMPTS[0], stop=(stop,))), engine.submit(asked(PROMPTS[0]))
    events = drain(engine)
    assert "".join(one.text for one in events if one.request_id == with_stop) == free.text[: free.text.index(stop)]
    assert not any(one.text for one in events if one.request_id == without)
    cancelled = engine.submit(asked(PROMPTS[0], stop=("never",)))
    engine.step()
    engine.cancel(cancelled)
    drain(engine)
    assert not engine._texts
    assert_idle(engine)


def test_stop_strings_need_a_tokenizer() -> None:
    with pytest.raises(RequestError, match=r"125m has no tokenizer.json, so stop must be empty"):
        Engine.simulated("125m").submit(Request([1], stop=("end",)))


def test_threads_stream_text(engine: Engine) -> None:
    [free] = engine.generate([asked(PROMPTS[1])])
    with EngineThread(engine) as shared:
        assert "<EngineThread open, 0 in flight, of <Engine" in repr(shared)
        assert "".join(event.text for event in shared.stream(asked(PROMPTS[1]))) == free.text
    assert "<EngineThread closed" in repr(shared)


def new_engine(directory: str | Path = "reference", **options: object) -> Engine:
    return Engine(directory, EngineConfig(precision="fp32", threads=1, **options))


@OVERLAP
def test_tasks_share_an_engine(overlap: bool) -> None:
    requests = [asked(prompt, sampling=Sampling(seed % 2, seed=seed)) for seed, prompt in enumerate(PROMPTS * 2)]
    requests[3] = asked(PROMPTS[3], logprobs=2)
    expected = new_engine().generate(requests)

    async def use() -> None:
        async with AsyncEngine(new_engine(overlap=overlap)) as engine:
            found = await asyncio.gather(*(engine.generate(request) for request in requests))
            assert [one.token_ids for one in found] == [one.token_ids for one in expected]
            assert [one.text for one in found] == [one.text for one in expected]
            assert [one.finish_reason for one in found] == [one.finish_reason for one in expected]
            assert len(found[3].logprobs) == len(found[3].token_ids)
            pieces = [event.text async for event in engine.stream(requests[0])]
            assert "".join(pieces) == expected[0].text
            assert "<AsyncEngine of <EngineThread open, 0 in flight" in repr(engine)

    asyncio.run(use())


def test_consumers_that_leave_cancel_their_requests() -> None:
    [expected] = new_engine().generate([asked(PROMPTS[0])])
    long = Request(PROMPTS[2], 400, ignore_end_token=True)

    async def use() -> None:
        inner = new_engine()
        async with AsyncEngine(inner) as engine:
            task = asyncio.create_task(engine.generate(long))
            async with aclosing(engine.stream(long)) as events:
                async for _ in events:
                    break
            await asyncio.sleep(0.05)
            assert task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            assert (await engine.generate(asked(PROMPTS[0]))).text == expected.text
            assert inner.state().in_flight == 0
            assert inner.state().pages_free == inner.state().pages
            assert not engine._queues

    asyncio.run(use())


def test_errors_reach_the_task_that_asked() -> None:
    async def use() -> None:
        async with AsyncEngine(new_engine()) as engine:
            with pytest.raises(RequestError, match="max_tokens is 0"):
                await engine.generate(Request(PROMPTS[0], 0))
            nothing = Request(PROMPTS[0], 5, stop_token_ids=tuple(range(100_000)), min_tokens=2)
            other = asyncio.create_task(engine.generate(asked(PROMPTS[1])))
            with pytest.raises(RequestError, match="no token is left to choose"):
                await engine.generate(nothing)
            assert (await other).text
        with pytest.raises(MegatokenError, match="closed"):
            await engine.generate(asked(PROMPTS[0]))

    asyncio.run(use())


def test_closing_ends_what_is_running_and_one_loop_owns_it() -> None:
    engine = AsyncEngine(new_engine())

    async def use() -> None:
        task = asyncio.create_task(engine.generate(Request(PROMPTS[0], 500, ignore_end_token=True)))
        async for _ in engine.stream(Request(PROMPTS[1], 5, ignore_end_token=True)):
            pass
        await engine.close()
        assert (await task).finish_reason is FinishReason.CANCELLED

    async def use_again() -> None:
        with pytest.raises(ThreadError, match="belongs to one event loop"):
            await engine.generate(asked(PROMPTS[0]))

    asyncio.run(use())
    asyncio.run(use_again())


def test_a_step_costs_an_event_loop_one_call(monkeypatch: pytest.MonkeyPatch) -> None:
    async def use() -> None:
        async with AsyncEngine(new_engine()) as engine:
            delivered: list[int] = []
            deliver = engine._deliver

            def counted(events: Sequence[TokenEvent]) -> None:
                delivered.append(len(events))
                deliver(events)

            monkeypatch.setattr(engine, "_deliver", counted)
            await asyncio.gather(*(engine.generate(Request([5], 9, ignore_end_token=True)) for _ in range(20)))
            assert sum(delivered) == 180 and len(delivered) < 60

    asyncio.run(use())
