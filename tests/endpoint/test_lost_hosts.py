"""Hosts of client processes: what is done when one is lost, or its clock is vague. This process plays the hosts."""

from __future__ import annotations

import marshal
import socket
import time
from typing import Any

import pytest

from megatoken.engine.request import Request
from megatoken.errors import MegatokenError, UsageError
from megatoken.framing import FrameReader, frame
from megatoken.rack.placement import Node
from megatoken.targets import SampleEvent
from megatoken.targets.endpoint.address import Address
from megatoken.targets.endpoint.bodies import Asking
from megatoken.targets.endpoint.clients import ClientProcess, Clients, Host
from megatoken.targets.endpoint.hosts import check_loopback
from megatoken.targets.endpoint.observations import Observations
from megatoken.targets.endpoint.target import EndpointTarget
from megatoken.targets.endpoint.wire import Asked, ClientSettings, News

SETTINGS = ClientSettings(
    (Address.parse("http://10.0.0.9/v1"),), "completions", None, None, True, 60.0, 10.0, watch_metrics=False
)


class Played:
    """The other end of a client process."""

    def __init__(self, name: str) -> None:
        self.socket, ours = socket.socketpair()
        self.socket.settimeout(5)
        self.reader = FrameReader()
        self.host = Host(name, "10.0.0.1", 4, {"requests_per_second": 100.0}, [1])
        self.process = ClientProcess(ours, self.host)

    def asked(self) -> list[tuple[int, Any]]:
        """What has come but for questions for the time."""
        found = [(kind, marshal.loads(body)) for kind, body in self.reader.feed(self.socket.recv(1 << 20))]
        return [one for one in found if one[0] != Asked.PING]

    def tell(self, kind: News, value: object) -> None:
        """Says something to the run."""
        self.socket.sendall(frame(kind, marshal.dumps(value)))


def target_of(*played: Played) -> EndpointTarget:
    clients = Clients([one.process for one in played])
    asking = Asking("m", False, False)
    return EndpointTarget(SETTINGS, asking, {}, clients=clients, max_in_flight=8, observations=Observations(None))


def test_a_sample_is_sent_again_once_and_hosts_are_lost_until_none_is_left() -> None:
    played = [Played(name) for name in ("one", "two", "three")]
    target = target_of(*played)
    target.submit(7, Request("ok", max_tokens=4))
    events: list[SampleEvent] = []
    for at, one in enumerate(played[:2]):
        events += target.poll(0.01)
        [(kind, [task])] = one.asked()
        assert kind == Asked.SEND and task[0] == at, "a ticket of its own"
        assert events == [] and target.state().in_flight == 1
        one.socket.close()
        events += target.poll(1)
    [ended] = events
    assert ended.sample_id == 7 and ended.error is not None
    assert ended.error.startswith("lost with the client host two: the other side closed the connection")
    assert target.state().in_flight == 0
    client = target.outcome(time.monotonic_ns())["client"]
    assert [(one["host"], one["samples_moved"]) for one in client["lost"]] == [("one", 1), ("two", 0)]
    played[2].socket.close()
    with pytest.raises(MegatokenError, match=r"no client host is left; the last lost was three \(.*connection"):
        target.poll(1)


def test_a_host_that_says_nothing_is_lost_but_not_while_nobody_listens(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [100.0]
    monkeypatch.setattr("megatoken.targets.endpoint.clients.time.monotonic", lambda: clock[0])
    quiet, other = Played("quiet"), Played("other")
    clients = Clients([quiet.process, other.process])
    clock[0] += 60  # the run did something else
    assert clients.silent() == []
    for _ in range(9):
        clock[0] += 0.9
        other.process.heard = clock[0]
        assert clients.silent() == ([] if clock[0] <= 168 else [quiet.process])
    clients.close()
    quiet.socket.close()
    other.socket.close()


def test_times_are_by_our_clock_within_what_messages_allow() -> None:
    ahead_ns = 5_000_000_000
    one = Played("one")
    now_ns = time.monotonic_ns()
    one.host.clock.note(now_ns, now_ns + 6_000_000, 0, now_ns + ahead_ns, 0)  # 3 ms too small at most
    target = target_of(one)
    [vague] = map(dict, target.findings(0))
    assert vague["code"] == "CLIENT_CLOCKS" and vague["hosts"] == ["one"] and vague["uncertainty_seconds"] == 0.003
    target.submit(0, Request("ok", max_tokens=2))
    given_ns = time.monotonic_ns()
    target.poll(0.01)
    [(_, [task])] = one.asked()
    sent_ns = time.monotonic_ns()
    one.tell(News.EVENTS, [(0, task[0], sent_ns + ahead_ns, sent_ns + ahead_ns + 1_000)])
    [event] = target.poll(1)
    assert event.sent_ns is not None and event.first_ns is not None
    assert given_ns - 1_000_000 <= event.sent_ns <= event.first_ns == event.sent_ns + 1_000 <= time.monotonic_ns()
    one.host.clock.note(now_ns, now_ns + 2_000_000, 0, now_ns + ahead_ns, 0)
    assert target.findings(0) == []
    target.close()
    one.socket.close()


def test_an_address_that_is_another_machine_on_each_host_is_refused() -> None:
    here, there = (Node(name, name, f"10.0.0.{at}", 0, 4, at == 1) for at, name in enumerate(("a", "b"), 1))
    for url in ("http://127.0.0.1:8000/v1", "http://localhost:8000/v1", "http://[::1]:8000/v1"):
        address = Address.parse(url)
        check_loopback([here], [address])
        with pytest.raises(UsageError, match="on b that is another machine"):
            check_loopback([here, there], [address])
    check_loopback([here, there], [Address.parse("http://10.0.0.9:8000/v1")])
