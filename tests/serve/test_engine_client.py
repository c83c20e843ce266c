"""How an HTTP process hands out what its engine sends: first tokens at once, large steps in parts, each in order."""

from __future__ import annotations

import asyncio
from array import array
from collections.abc import Callable
from typing import Any

from megatoken.engine.request import FinishReason, Request, TokenEvent
from megatoken.serve.engine_client import HANDED_OUT_AT_ONCE, EngineClient
from megatoken.serve.messages import Health, Kind, Status, pickled, step_frame
from megatoken.serve.tenants import Tenant

STREAMS = 5 * HANDED_OUT_AT_ONCE


class Sent:
    """A transport that keeps what is written."""

    def __init__(self) -> None:
        self.data = b""

    def write(self, data: bytes) -> None:
        self.data += data


def connected() -> EngineClient:
    client = EngineClient("/nowhere", lambda model: None, print, restarts=False)
    transport: Any = Sent()
    client.connection_made(transport)
    client.data_received(pickled(Kind.STATUS, Status(Health.READY, "ready", None)))
    return client


def submitted(client: EngineClient, got: list[TokenEvent]) -> int:
    return client.submit(Request(array("i", [1, 2]), max_tokens=8), got.append, Tenant("", 1.0))


def one_token_each(ids: list[int], token_id: int) -> bytes:
    return step_frame(ids, [token_id] * len(ids), [])


def run(check: Callable[[], Any]) -> None:
    asyncio.run(check())


async def turns(count: int) -> None:
    for _ in range(count):
        await asyncio.sleep(0)


def test_a_first_token_does_not_wait_for_those_of_a_large_step() -> None:
    async def check() -> None:
        client, got = connected(), []
        ids = [submitted(client, got) for _ in range(STREAMS)]
        client.data_received(one_token_each(ids, 1))
        assert len(got) == STREAMS  # all of them are first ones
        got.clear()
        client.data_received(one_token_each(ids, 2))
        assert [event.request_id for event in got] == ids[:HANDED_OUT_AT_ONCE]
        new = submitted(client, got)
        client.data_received(one_token_each([*ids, new], 3))
        assert got[HANDED_OUT_AT_ONCE] == TokenEvent(new, (3,), None)
        await turns(2 * STREAMS)
        others = [event for event in got if event.request_id != new]
        assert [event.request_id for event in others] == 2 * ids
        assert [event.token_ids[0] for event in others] == [2] * STREAMS + [3] * STREAMS

    run(check)


def test_what_waits_is_dropped_for_a_cancelled_request_and_comes_before_the_engines_end() -> None:
    async def check() -> None:
        client, got = connected(), []
        ids = [submitted(client, got) for _ in range(STREAMS)]
        client.data_received(one_token_each(ids, 1))
        got.clear()
        client.data_received(one_token_each(ids, 2))
        client.cancel(ids[-1])
        client.connection_lost(None)
        assert [event.request_id for event in got] == ids[:-1] + ids[:-1]
        assert {event.finish_reason for event in got[: STREAMS - 1]} == {None}
        assert {event.finish_reason for event in got[STREAMS - 1 :]} == {FinishReason.ERROR}
        await turns(STREAMS)
        assert len(got) == 2 * (STREAMS - 1)

    run(check)


def test_a_process_that_is_behind_hands_out_more_at_once() -> None:
    async def check() -> None:
        client, got = connected(), []
        ids = [submitted(client, got) for _ in range(STREAMS)]
        for token_id in range(101):
            client.data_received(one_token_each(ids, token_id))
        await turns(60)  # of 8 each, 500 would be needed
        assert len(got) == 101 * STREAMS

    run(check)
