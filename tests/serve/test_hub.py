"""The hub: what one bad request or step leaves of the others. The engine is one that the test makes go wrong."""

from __future__ import annotations

import asyncio
from typing import Any, cast

import pytest

from megatoken.engine.request import FinishReason, Request, TokenEvent
from megatoken.engine.state import ReplicaState
from megatoken.engine.thread import Step
from megatoken.errors import CapacityError, MegatokenError
from megatoken.framing import FrameReader
from megatoken.serve.hub import MOST_WAITING_BYTES, Hub
from megatoken.serve.link import Link
from megatoken.serve.messages import (
    Busy,
    EngineSizes,
    Health,
    Kind,
    ServedModel,
    Submission,
    Unavailable,
    step_events,
)
from megatoken.serve.request_errors import as_api_error
from megatoken.serve.tenants import DEFAULT_TENANT, Tenant


class Engine:
    """Takes every request but those whose first token is 13."""

    failure: BaseException | None = None
    step_began_ns = 0
    dead = False

    def __init__(self) -> None:
        self.requests: list[Request] = []
        self.cancelled: list[int] = []

    def submit(self, request: Request) -> int:
        if 13 in request.prompt:
            raise ZeroDivisionError("a fault")
        self.requests.append(request)
        return len(self.requests) - 1

    def cancel(self, request_id: int) -> None:
        self.cancelled.append(request_id)

    def state(self) -> ReplicaState:
        return ReplicaState()


class Client:
    """The other end of a link."""

    def __init__(self, hub: Hub) -> None:
        self.link = Link(hub)
        self.reader = FrameReader()
        self.events: list[TokenEvent] = []
        self.link.connection_made(cast(Any, self))

    def is_closing(self) -> bool:
        return False

    def get_write_buffer_size(self) -> int:
        return 0

    def write(self, data: bytes) -> None:
        for kind, payload in self.reader.feed(data):
            if kind == Kind.STEP:
                self.events += step_events(payload)


def setting(*, several_tenants: bool = False) -> tuple[Hub, Engine, Client, list[str]]:
    failures: list[str] = []
    hub = Hub(10, several_tenants=several_tenants, restarts=True, fail=failures.append)
    engine = Engine()
    hub.start(engine, ServedModel("m", 100, 100, None, 0), EngineSizes(2, 100, 1000, 16), lambda request: None)
    return hub, engine, Client(hub), failures


def submit(hub: Hub, client: Client, number: int, token: int = 5) -> None:
    hub.submit(client.link, Submission(number, Request([token], 4), DEFAULT_TENANT, 0), 100)


def test_a_fault_of_one_request_ends_it_alone() -> None:
    async def main() -> None:
        hub, engine, client, failures = setting()
        for number in range(6):
            submit(hub, client, number, 13)
        submit(hub, client, 6)
        assert len(engine.requests) == 1, "the places of the others are free again"
        assert [event.request_id for event in client.events] == list(range(6))
        assert all("ZeroDivisionError" in str(event.error) for event in client.events)
        assert not failures

    asyncio.run(main())


def test_a_step_that_cannot_be_delivered_ends_every_request_and_later_ones_get_503() -> None:
    async def main() -> None:
        hub, _, client, failures = setting()
        for number in range(4):  # two run, one waits in the engine, one in front of it
            submit(hub, client, number)
        hub.take_step(Step([TokenEvent(99, (1,), None)], 0, 1))  # no such request
        await asyncio.sleep(0)
        assert len(failures) == 1 and "KeyError" in failures[0]
        submit(hub, client, 4)
        assert [event.request_id for event in client.events] == list(range(5))
        for event in client.events:
            assert isinstance(event.error, Unavailable)
            assert as_api_error(event.error).status == 503
        hub.take_step(Step([TokenEvent(0, (1,), FinishReason.LENGTH)], 0, 1))
        await asyncio.sleep(0)
        assert len(failures) == 1 and len(client.events) == 5

    asyncio.run(main())


def test_a_failed_engine_ends_its_requests_with_503_and_the_reason() -> None:
    async def main() -> None:
        hub, engine, client, failures = setting()
        for number in range(4):
            submit(hub, client, number)
        engine.failure = CapacityError("the GPU ran out of memory")
        hub.take_step(Step([TokenEvent(one, (), FinishReason.ERROR, engine.failure) for one in range(3)], 0, 1))
        await asyncio.sleep(0)
        assert failures == ["the engine has failed: the GPU ran out of memory"]
        assert sorted(event.request_id for event in client.events) == list(range(4))
        for event in client.events:
            assert isinstance(event.error, Unavailable)
            error = as_api_error(event.error)
            assert (error.status, error.retry_after) == (503, 5)
            assert str(error) == f"{failures[0]}; it is started again; send the request again"

    asyncio.run(main())


@pytest.mark.parametrize("several_tenants", [False, True])
def test_keys_are_groups_of_the_engine(several_tenants: bool) -> None:
    async def main() -> None:
        hub, engine, client, _ = setting(several_tenants=several_tenants)
        hub.submit(client.link, Submission(0, Request([5], 4), Tenant("chat", 3.0), 0), 100)
        assert engine.requests[0].share == (("chat", 3.0) if several_tenants else ("", 1.0))

    asyncio.run(main())


def test_the_bytes_of_what_waits_are_bounded_and_free_again_afterwards() -> None:
    async def main() -> None:
        hub, engine, client, _ = setting()
        size = MOST_WAITING_BYTES // 2

        def refused() -> list[int]:
            return [event.request_id for event in client.events if isinstance(event.error, Busy)]

        for number in range(6):  # two run, one waits in the engine, two in front of it
            hub.submit(client.link, Submission(number, Request([5], 4), DEFAULT_TENANT, 0), size)
        assert refused() == [5] and len(engine.requests) == 3
        hub.cancel(client.link, 4, stopped=False)
        hub.submit(client.link, Submission(6, Request([5], 4), DEFAULT_TENANT, 0), size)
        assert refused() == [5]
        hub.take_step(Step([TokenEvent(0, (1,), FinishReason.LENGTH)], 0, 1))
        await asyncio.sleep(0)
        hub.submit(client.link, Submission(7, Request([5], 4), DEFAULT_TENANT, 0), size)
        assert refused() == [5] and len(engine.requests) == 4

    asyncio.run(main())


@pytest.mark.parametrize(("health", "status"), [(Health.STUCK, 503), (Health.DEAD, 503)])
def test_requests_while_the_engine_does_not_serve_get_503(health: Health, status: int) -> None:
    async def main() -> None:
        hub, _, client, _ = setting()
        hub._health = health
        submit(hub, client, 0)
        error = client.events[0].error
        assert isinstance(error, MegatokenError) and as_api_error(error).status == status

    asyncio.run(main())


@pytest.mark.parametrize(("stopped", "reason"), [(True, "stop"), (False, "abort")])
def test_an_answer_that_came_to_a_stop_string_counts_as_stopped(stopped: bool, reason: str) -> None:
    async def main() -> None:
        hub, engine, client, _ = setting()
        submit(hub, client, 0)
        hub.cancel(client.link, 0, stopped=stopped)
        assert engine.cancelled == [0]
        hub.take_step(Step([TokenEvent(0, (), FinishReason.CANCELLED)], 0, 1))
        await asyncio.sleep(0)
        assert hub.metrics.engine("0").ended == {reason: 1}

    asyncio.run(main())
