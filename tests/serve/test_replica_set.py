"""The replicas of a rack, with replicas that the test plays: whatever dies when, every request ends exactly once."""

from __future__ import annotations

import asyncio
from typing import Any, cast

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from examples import examples
from megatoken.config import ReplicasSection
from megatoken.engine.request import FinishReason, Request, TokenEvent
from megatoken.engine.state import ReplicaState
from megatoken.errors import RequestError
from megatoken.framing import FrameReader
from megatoken.rack.records import Place
from megatoken.serve.hub import Hub
from megatoken.serve.link import Link
from megatoken.serve.messages import (
    EngineSizes,
    Health,
    Kind,
    ServedModel,
    StartedOver,
    Status,
    Submission,
    Unavailable,
    pickled,
    step_events,
    step_frame,
    submission_of,
    unpickled,
)
from megatoken.serve.options import ServeConfig
from megatoken.serve.replica_set import MOST_RUNS, ReplicaLink, ReplicaSet
from megatoken.serve.tenants import DEFAULT_TENANT

SIZES = EngineSizes(4, 1000, 4096, 16)
MODEL = ServedModel("m", 1000, 1000, None, 0)


class Pipe:
    """What a protocol writes to."""

    def __init__(self, take: Any) -> None:
        self.reader = FrameReader()
        self.take = take
        self.closed = False

    def is_closing(self) -> bool:
        return self.closed

    def get_write_buffer_size(self) -> int:
        return 0

    def write(self, data: bytes) -> None:
        for kind, payload in self.reader.feed(data):
            self.take(kind, payload)

    def abort(self) -> None:
        self.closed = True


class Replica:
    """A replica as the router sees it: what it was asked, and what it says."""

    def __init__(self, replicas: ReplicaSet, number: int) -> None:
        self.open: list[int] = []
        self.link: ReplicaLink = replicas.admit(number)
        self.pipe = Pipe(self.take)
        self.link.connection_made(cast(Any, self.pipe))
        self.say_status(Health.READY)

    def take(self, kind: int, payload: bytes) -> None:
        if kind == Kind.SUBMIT:
            self.open.append(submission_of(payload).request_id)
        elif kind == Kind.CANCEL:
            self.open.remove(unpickled(payload)[0])

    def say_status(self, health: Health) -> None:
        status = Status(health, str(health), MODEL, SIZES, ReplicaState())
        self.link.data_received(pickled(Kind.STATUS, tuple(status)))

    def say(self, *events: TokenEvent) -> None:
        plain = [event for event in events if event.is_one_token]
        others = [event for event in events if not event.is_one_token]
        ids = [event.request_id for event in plain]
        self.link.data_received(step_frame(ids, [event.token_ids[0] for event in plain], others))

    def die(self) -> None:
        self.link.connection_lost(None)


class Rack:
    """A hub, its replicas and one HTTP process."""

    def __init__(self, expected: int, *, restarts: bool = True, without: float = 60.0) -> None:
        self.failures: list[str] = []
        self.notes: list[str] = []
        self.given_up: list[int] = []
        self.hub = Hub(1000, several_tenants=False, restarts=restarts, fail=self.failures.append, rack=True)
        patience = ReplicasSection(dead_after_seconds=8.0, reconnect_seconds=0.0, wait_seconds=without)
        self.set = ReplicaSet(
            self.hub,
            ServeConfig(model="tiny", restart=restarts, rack=patience),
            note=self.notes.append,
            give_up=self.given_up.append,
            on_change=lambda serving, expected: None,
        )
        for number in range(expected):
            self.set.register(number, [Place("n", number)])
        self.live: dict[int, Replica] = {}
        self.link = Link(self.hub)
        self.events: dict[int, list[TokenEvent]] = {}
        self.health: Status | None = None
        self.link.connection_made(cast(Any, Pipe(self._take)))

    def _take(self, kind: int, payload: bytes) -> None:
        if kind == Kind.STEP:
            for event in step_events(payload):
                self.events[event.request_id].append(event)
        elif kind == Kind.STATUS:
            self.health = Status(*unpickled(payload))

    def join(self, number: int) -> None:
        if number not in self.live:
            self.live[number] = Replica(self.set, number)

    def kill(self, number: int) -> None:
        if (replica := self.live.pop(number, None)) is not None:
            replica.die()

    def submit(self, *, whole: bool, prompt: int = 5) -> int:
        client_id = len(self.events)
        self.events[client_id] = []
        request = Request([prompt] * 40, 8)
        self.hub.submit(self.link, Submission(client_id, request, DEFAULT_TENANT, 0, 0, whole), 100)
        return client_id

    def text(self, client_id: int) -> list[int]:
        """The tokens that a client was given, without those of runs that were started over."""
        tokens: list[int] = []
        for event in self.events[client_id]:
            tokens = [] if isinstance(event.error, StartedOver) else [*tokens, *event.token_ids]
        return tokens

    def ends(self, client_id: int) -> list[TokenEvent]:
        return [event for event in self.events[client_id] if event.finish_reason is not None]


async def settle() -> None:
    for _ in range(3):
        await asyncio.sleep(0)


ACTIONS = st.lists(
    st.tuples(
        st.sampled_from(["submit", "whole", "token", "token", "end", "kill", "join", "cancel"]), st.integers(0, 5)
    ),
    max_size=120,
)


@settings(max_examples=examples(200))
@given(ACTIONS)
def test_every_request_ends_once_and_no_client_gets_the_tokens_of_two_runs(actions: list[tuple[str, int]]) -> None:
    asyncio.run(play(actions))


async def play(actions: list[tuple[str, int]]) -> None:
    rack = Rack(3)
    made: dict[int, list[int]] = {}  # tokens of each run of a request in the router's numbering
    cancelled: set[int] = set()
    rack.join(0)

    def speak(number: int, *, end: bool) -> None:
        replica = rack.live.get(number % 3)
        if replica is None or not replica.open:
            return
        request_id = replica.open[number % len(replica.open)]
        tokens = made.setdefault(request_id, [])
        tokens.append(len(tokens))
        reason = FinishReason.LENGTH if end else None
        if end:
            replica.open.remove(request_id)
        replica.say(TokenEvent(request_id, (tokens[-1],), reason))

    for what, number in actions:
        if what in ("submit", "whole"):
            rack.submit(whole=what == "whole", prompt=number)
        elif what in ("token", "end"):
            speak(number, end=what == "end")
        elif what == "kill":
            if (replica := rack.live.get(number % 3)) is not None:
                for request_id in replica.open:
                    made.pop(request_id, None)  # the next run counts from 0
            rack.kill(number % 3)
        elif what == "join":
            rack.join(number % 3)
        elif rack.events:
            client_id = number % len(rack.events)
            if not rack.ends(client_id):
                cancelled.add(client_id)
                rack.hub.cancel(rack.link, client_id, stopped=False)
        await settle()
    for number in range(3):
        rack.join(number)
    for _ in range(10_000):
        held = [number for number, replica in rack.live.items() if replica.open]
        if not held:
            break
        speak(held[0], end=True)
        await settle()
    for client_id, events in rack.events.items():
        assert len(rack.ends(client_id)) == (0 if client_id in cancelled and not rack.ends(client_id) else 1), events
        tokens = rack.text(client_id)
        assert tokens == list(range(len(tokens))), "one run, from its first token on, nothing twice"
        if rack.ends(client_id):
            assert events[-1].finish_reason is not None
    assert not rack.set._open and not rack.hub._entries and not rack.hub._queue.waiting
    reports = rack.set.reports().values()
    assert all(one.state.running == one.state.waiting == 0 for one in reports)
    assert rack.health is not None and rack.health.health is Health.READY


def test_a_request_that_ends_every_replica_is_given_up() -> None:
    async def main() -> None:
        rack = Rack(5)
        for number in range(5):
            rack.join(number)
        poison = rack.submit(whole=True)
        for run in range(MOST_RUNS):
            assert not rack.ends(poison), run
            (number,) = (number for number, replica in rack.live.items() if replica.open)
            rack.kill(number)
            await settle()
        (end,) = rack.ends(poison)
        assert isinstance(end.error, Unavailable)
        assert len(rack.live) == 5 - MOST_RUNS

    asyncio.run(main())


def test_a_replica_whose_engine_has_failed_or_is_stuck_loses_its_requests_but_not_those_of_the_client() -> None:
    async def main() -> None:
        rack = Rack(2)
        rack.join(0)
        rack.join(1)
        wanted = [rack.submit(whole=False, prompt=prompt) for prompt in range(4)]
        failing = rack.live[0]
        mine = list(failing.open)
        assert mine
        failing.say(*(TokenEvent(one, (), FinishReason.ERROR, Unavailable("the engine has failed")) for one in mine))
        assert not any(rack.ends(one) for one in wanted)
        dead = pickled(Kind.STATUS, tuple(Status(Health.DEAD, "dead", MODEL, SIZES)))
        failing.link.data_received(dead + step_frame(mine, [7] * len(mine), []))  # what comes too late is dropped
        assert not any(rack.text(one) for one in wanted)
        assert sorted(rack.live[1].open) == sorted(rack.set._open)
        refused = rack.live[1].open[0]
        rack.live[1].say(TokenEvent(refused, (), FinishReason.ERROR, RequestError("too long", "prompt")))
        await settle()
        (ended,) = (rack.ends(one)[0] for one in wanted if rack.ends(one))
        assert isinstance(ended.error, RequestError), "an error of the request itself reaches its client"

    asyncio.run(main())


@pytest.mark.parametrize("restarts", [True, False])
def test_without_a_replica_requests_wait_and_then_end_with_an_error(restarts: bool) -> None:
    async def main() -> None:
        rack = Rack(1, restarts=restarts, without=0.3)
        rack.join(0)
        accepted = [rack.submit(whole=False) for _ in range(12)]  # four run, one waits behind them, others in front
        rack.kill(0)
        assert rack.health is not None and rack.health.health is Health.STARTING
        late = rack.submit(whole=False)
        assert isinstance(rack.ends(late)[0].error, Unavailable)
        assert not any(rack.ends(one) for one in accepted)
        rack.hub.cancel(rack.link, accepted.pop(0), stopped=False)
        watching = asyncio.create_task(rack.set.watch())
        await asyncio.sleep(1)
        watching.cancel()
        assert rack.given_up == [0], "its process has had its time"
        assert all(isinstance(rack.ends(one)[0].error, Unavailable) for one in accepted)
        assert not rack.set._open and not rack.hub._entries
        if not restarts:
            rack.set._unregister(0, "its process ended")
            assert rack.failures and "no replica is left" in rack.failures[0]

    asyncio.run(main())
