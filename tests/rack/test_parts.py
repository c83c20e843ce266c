"""Parts of the rack that need no Ray: frames, clocks, placement, and a hub with real workers."""

from __future__ import annotations

import socket
import struct
import threading
import time
from collections.abc import Iterator
from contextlib import closing
from typing import Any

import numpy as np
import pytest

from megatoken.engine import Engine, EngineConfig
from megatoken.engine.request import Request, Sampling
from megatoken.errors import CapacityError, MegatokenError, RequestError
from megatoken.framing import WireError
from megatoken.hardware.telemetry import FIELDS as TELEMETRY_FIELDS
from megatoken.harness.result import lost_replicas
from megatoken.rack.clock import OffsetEstimate
from megatoken.rack.hub import Hub
from megatoken.rack.placement import Node, Wanted, name_nodes, place_replicas
from megatoken.rack.records import Place, WorkerSpec
from megatoken.rack.wire import (
    STATE,
    Channel,
    Done,
    First,
    Kind,
    Report,
    authenticate,
    dial,
    pack_report,
    pack_request,
    pack_submit,
    unpack_report,
    unpack_submit,
)
from megatoken.rack.worker import Worker
from megatoken.targets.rack import RackTarget

KEY = bytes(range(32))
CONFIG = EngineConfig(precision="fp32", device="cpu", max_length=64, cache_tokens=1024)


def test_requests_survive_the_wire() -> None:
    requests = [
        Request([1, 2, 3], 7),
        Request([5], 2, Sampling(0.5, 3, 0.25, 2**40), (9, 8), ignore_end_token=True),
    ]
    body = pack_submit(3, [10**12, 4], [pack_request(request) for request in requests])
    assert unpack_submit(body) == (3, [(10**12, requests[0]), (4, requests[1])])
    with pytest.raises(RequestError, match="not text"):
        pack_request(Request("words"))


def test_reports_survive_the_wire() -> None:
    states = np.zeros(2, STATE)
    states["wanted"], states[TELEMETRY_FIELDS[0]] = (5, 6), 0.5
    done = [Done(2**40, 2, 2, "stop", 1, 2**60, 3), Done(5, 0, 1, "length", 0, 0, 0)]
    failures = [(3, "too long: ä"), (4, "")]
    report = Report(states, np.array([7, 8, 9], np.int32), [First(2**40, 3, 2**60)], done, failures)
    back = unpack_report(pack_report(report))
    for one, other in zip(report[:2], back[:2], strict=True):
        np.testing.assert_array_equal(one, other)
    assert [[tuple(one) for one in part] for part in back[2:]] == list(report[2:])


def test_frames_come_whole_however_they_are_cut() -> None:
    left, right = socket.socketpair()
    one, other = Channel(left), Channel(right)
    large = bytes(3_000_000)  # more than the connection takes at once
    one.send(Kind.PING, b"abc")
    one.send(Kind.SUBMIT, large)
    assert one.pending
    frames = []
    while len(frames) < 2:
        one.flush()
        frames += other.receive()
    assert frames == [(Kind.PING, b"abc"), (Kind.SUBMIT, large)]
    assert not one.pending
    left.close()
    with pytest.raises(WireError, match="closed"):
        other.receive()
    right.close()


def test_a_frame_of_nobody_is_refused() -> None:
    left, right = socket.socketpair()
    left.sendall(b"\xff\xff\xff\xff\x02")
    with pytest.raises(WireError, match="a frame of kind 2 with 4,294,967,295 bytes"):
        Channel(right).receive()
    left.close()
    right.close()


@pytest.mark.parametrize("key", [KEY, bytes(32)])
def test_only_who_knows_the_key_is_let_in(key: bytes) -> None:
    left, right = socket.socketpair()
    outcomes: list[Any] = []

    def answer() -> None:
        try:
            authenticate(right, key, 2, driver=False)
            outcomes.append(None)
        except WireError as error:
            outcomes.append(error)

    thread = threading.Thread(target=answer)
    thread.start()
    try:
        if key == KEY:
            authenticate(left, KEY, 2, driver=True)
        else:
            with pytest.raises(WireError, match="does not know this run's key"):
                authenticate(left, KEY, 2, driver=True)
    finally:
        left.close()
        thread.join()
        right.close()
    assert (outcomes == [None]) == (key == KEY)


def test_offsets_come_from_the_quickest_round() -> None:
    estimate = OffsetEstimate()
    assert estimate.offset() is None
    ahead = 3_000_000_000  # of their wall clock
    for sent, there, back in ((0, 200_000_000, 10_000_000), (10**9, 1_000_000, 3_000_000), (2 * 10**9, 10**8, 10**8)):
        their_monotonic = sent + there + 500
        received = sent + there + back
        estimate.note(sent, received, 10**18 + received, their_monotonic, 10**18 + sent + there + ahead)
    offset = estimate.offset()
    assert offset is not None and offset.rounds == 3
    assert offset.uncertainty_seconds == 0.002
    assert offset.wall_seconds == pytest.approx(3.0, abs=0.002)
    assert abs(offset.monotonic_seconds) <= 0.002


def node(name: str, gpus: int = 0, cpus: float = 4, is_driver: bool = False) -> Node:
    return Node(name, f"id-{name}-{gpus}-{cpus}", "10.0.0.1", gpus, cpus, is_driver)


def test_replicas_fill_the_nodes_evenly() -> None:
    nodes = [node("a", 4), node("b", 4), node("c", 0)]
    slots = place_replicas(nodes, Wanted(None, 1, on_gpus=True))
    assert [place for slot in slots for place in slot.places] == [Place(n, i) for n in "ab" for i in range(4)]
    assert all(slot.bundle == {"CPU": 1.0, "GPU": 1.0} for slot in slots)
    three = place_replicas(nodes, Wanted(3, 1, on_gpus=True))
    assert [slot.places[0] for slot in three] == [Place("a", 0), Place("a", 1), Place("b", 0)]
    (pair,) = place_replicas([node("a", 3)], Wanted(None, 2, on_gpus=True))
    assert pair.bundle == {"CPU": 2.0, "GPU": 2.0}
    with pytest.raises(CapacityError, match=r"9 replicas need 9 GPUs; the cluster has 8 \(a 4, b 4, c 0\)"):
        place_replicas(nodes, Wanted(9, 1, on_gpus=True))


def test_the_driver_keeps_a_core() -> None:
    slots = place_replicas([node("a", cpus=4, is_driver=True), node("b", cpus=4)], Wanted(None, 1, on_gpus=False))
    assert [(slot.places[0].node, slot.threads) for slot in slots] == [("a", 3), ("b", 4)]
    (alone,) = place_replicas([node("a", cpus=1, is_driver=True)], Wanted(None, 1, on_gpus=False))
    assert alone.threads == 1


def test_nodes_of_one_name_are_told_apart() -> None:
    known: dict[str, str] = {}
    first, second, other = node("a", 1), node("a", 2), node("b")
    assert [one.name for one in name_nodes([first, second, other], known)] == ["a", "a-2", "b"]
    assert [one.name for one in name_nodes([second, other], known)] == ["a-2", "b"]
    assert [one.name for one in name_nodes([second, node("a", 3)], known)] == ["a", "a-2"]


class Rig:
    """A hub and workers in threads of this process, each with a real engine."""

    def __init__(self, streams: bool) -> None:
        self.hub = Hub("127.0.0.1", KEY, streams=streams, dead_after_seconds=10.0, wait_seconds=2.0)
        self.streams = streams
        self.threads: list[threading.Thread] = []
        self.workers: list[Worker] = []

    def add(self, number: int) -> Worker:
        spec = WorkerSpec("tiny", True, 0, {}, None, self.streams, True, 10.0, 2.0, "")
        worker = Worker([Engine("tiny", CONFIG)], number, spec)
        self.hub.register(number, [Place(f"n{number}", 0)])
        thread = threading.Thread(target=worker.serve, args=(self.hub.address, KEY), daemon=True)
        thread.start()
        self.threads.append(thread)
        self.workers.append(worker)
        deadline = time.monotonic() + 60
        while number not in self.hub.connected():
            assert time.monotonic() < deadline
            time.sleep(0.01)
        return worker

    def close(self) -> None:
        self.hub.close()
        for worker, thread in zip(self.workers, self.threads, strict=True):
            thread.join(30)
            worker.close()


@pytest.fixture(params=[False, True], ids=["offline", "streams"])
def rig(request: pytest.FixtureRequest) -> Iterator[Rig]:
    rig = Rig(request.param)
    yield rig
    rig.close()


def run_to_the_end(target: RackTarget, samples: int, at: dict[int, Any] | None = None) -> dict[int, Any]:
    """The last event of every sample; calls ``at[n]`` once n samples have ended."""
    last: dict[int, Any] = {}
    deadline = time.monotonic() + 60
    while len(last) < samples:
        assert time.monotonic() < deadline
        for event in target.poll(0.1):
            assert event.sample_id not in last, "ended twice"
            if event.finish_reason is not None or event.error is not None:
                last[event.sample_id] = event
        for count in [count for count in (at or {}) if len(last) >= count]:
            at.pop(count)()  # type: ignore[union-attr]
    return last


def test_answers_are_those_of_the_engine(rig: Rig) -> None:
    rig.add(0)
    rig.add(1)
    target = RackTarget(rig.hub, {})
    requests = [Request([3 + n, 5, 7], 4 + n % 5, ignore_end_token=True) for n in range(40)]
    for number, request in enumerate(requests):
        target.submit(number, request)
    assert target.state().in_flight == 40
    last = run_to_the_end(target, 40)
    expected = [tuple(completion.token_ids) for completion in Engine("tiny", CONFIG).generate(requests)]
    assert [last[number].token_ids for number in range(40)] == expected
    assert [last[number].output_tokens for number in range(40)] == [len(ids) for ids in expected]
    assert {event.node for event in last.values()} == {"n0", "n1"}
    counters = target.state()
    assert (counters.in_flight, counters.waiting) == (0, 0)
    refused = Request([10**6], 4)
    target.submit(99, refused)
    assert "vocabulary" in run_to_the_end(target, 1)[99].error


def test_what_a_lost_worker_held_is_done_by_others(rig: Rig) -> None:
    rig.add(0)
    rig.add(1)
    target = RackTarget(rig.hub, {})
    began_ns = time.monotonic_ns()
    for number in range(120):
        target.submit(number, Request([3, 5, number], 10 + number % 21, ignore_end_token=True))
    last = run_to_the_end(target, 120, {5: lambda: rig.hub.unregister(1, "taken out")})
    lengths = [10 + number % 21 for number in range(120)]
    assert [last[number].output_tokens for number in range(120)] == lengths
    outcome = target.outcome(began_ns)
    (reason,) = lost_replicas(outcome)
    assert reason["message"] == "1 of 2 replicas left at the lowest (50.0 %), 1 at the end; lost: 1 on n1 (taken out)"
    (lost,) = outcome["rack"]["lost"]
    assert (lost["node"], lost["cause"]) == ("n1", "taken out") and lost["samples_returned"] > 0
    deadline = time.monotonic() + 60
    while sum(one.state.output_tokens for one in target.replicas()) != sum(lengths):  # no token counts twice
        assert time.monotonic() < deadline, target.replicas()
        target.poll(0.1)
    assert lost_replicas(target.outcome(time.monotonic_ns()))  # still one short


def worker_of_hand(hub: Hub, replicas: int) -> Channel:
    """A worker's connection, whose frames the test sends; every replica has asked for four samples."""
    hub.register(0, [Place("n0", replica) for replica in range(replicas)])
    worker = Channel(dial(hub.address, KEY, 0, 5))
    worker.send(Kind.REPORT, report_of(replicas, wanted=4))
    deadline = time.monotonic() + 60
    while not any(state["wanted"] for _, state in hub.states()):
        assert time.monotonic() < deadline
        time.sleep(0.01)
    return worker


def report_of(replicas: int, wanted: int = 0, ended: int = 0, **counts: int) -> bytes:
    states, done = np.zeros(replicas, STATE), [Done(ticket, 0, 0, "stop", 0, 0, 0) for ticket in range(ended)]
    states["wanted"] = wanted
    for name, count in counts.items():
        states[name] = count
    return pack_report(Report(states, np.zeros(0, np.int32), [], done, []))


def test_a_worker_found_dead_while_it_is_served_keeps_no_sample() -> None:
    """It has two replicas, and the first frame that cannot be sent is for one of them."""
    with closing(Hub("127.0.0.1", KEY, streams=False, dead_after_seconds=30.0, wait_seconds=30.0)) as hub:
        worker = worker_of_hand(hub, replicas=2)
        with hub._lock:  # the hub's thread does not look before the samples are handed out
            worker.socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))  # a reset, at once
            worker.close()
            for sample in range(6):
                hub.submit(sample, pack_request(Request([3], 2)))
            hub.dispatch()
            assert (hub.connected(), hub.waiting, hub.unended) == (set(), 6, 6)


def test_what_a_lost_worker_had_of_answers_under_way_is_taken_back() -> None:
    with closing(Hub("127.0.0.1", KEY, streams=False, dead_after_seconds=30.0, wait_seconds=30.0)) as hub:
        for _ in range(2):  # it connects again
            worker = worker_of_hand(hub, replicas=1)
            worker.send(Kind.REPORT, report_of(1, output_tokens=50, unended_tokens=30, processed_tokens=90))
            deadline = time.monotonic() + 60
            while not any(state["unended_tokens"] for _, state in hub.states()):
                assert time.monotonic() < deadline
                time.sleep(0.01)
            hub.unregister(0, "taken out")
            worker.close()
        ((_, state),) = hub.states()
        assert (state["output_tokens"], state["processed_tokens"]) == (2 * 20, 2 * 90)
        assert [loss.output_tokens_dropped for loss in hub.losses] == [30, 30]


def test_answers_that_crossed_a_cancellation_are_not_late() -> None:
    with closing(Hub("127.0.0.1", KEY, streams=False, dead_after_seconds=30.0, wait_seconds=30.0)) as hub:
        worker = worker_of_hand(hub, replicas=1)
        for sample in range(2):
            hub.submit(sample, pack_request(Request([3], 2)))
        hub.dispatch()
        cancelling = threading.Thread(target=hub.cancel_all)
        cancelling.start()
        deadline, cancelled = time.monotonic() + 60, None
        while cancelled is None:
            assert time.monotonic() < deadline
            cancelled = dict(worker.receive()).get(Kind.CANCEL)
        worker.send(Kind.REPORT, report_of(1, ended=2))
        worker.send(Kind.CANCELLED, cancelled)
        cancelling.join()
        assert (hub.unended, hub.late_answers) == (0, 0)
        worker.close()


def test_cancelled_samples_never_answer(rig: Rig) -> None:
    rig.add(0)
    target = RackTarget(rig.hub, {})
    for number in range(30):
        target.submit(number, Request([3, 5], 30, ignore_end_token=True))
    target.poll(0.1)
    target.cancel_all()
    assert target.state().in_flight == 0
    target.submit(7, Request([3], 3, ignore_end_token=True))
    assert set(run_to_the_end(target, 1)) == {7}


def test_what_no_replica_holds_is_withdrawn(rig: Rig) -> None:
    rig.add(0)
    target = RackTarget(rig.hub, {})
    for number in range(300):
        target.submit(number, Request([3, 5], 10, ignore_end_token=True))
    target.poll(0.1)
    withdrawn = target.withdraw()
    held = 300 - len(withdrawn)
    assert 0 < held < 300 and withdrawn == list(range(held, 300))
    assert target.state().waiting == 0
    assert set(run_to_the_end(target, held)) == set(range(held))
    assert (target.state().in_flight, target.poll(0.1)) == (0, [])


def test_a_rack_without_replicas_gives_up(rig: Rig) -> None:
    rig.add(0)
    target = RackTarget(rig.hub, {})
    target.submit(0, Request([3], 50, ignore_end_token=True))
    rig.hub.unregister(0, "taken out")
    with pytest.raises(MegatokenError, match=r"no replica has served for 2 s, waiting: 1; .* taken out"):
        run_to_the_end(target, 1)
