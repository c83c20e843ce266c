"""What client processes report while they cancel, from a stand-in that reports what a real one can, at that moment."""

from __future__ import annotations

import marshal
import socket
import threading

from megatoken.engine.request import Request
from megatoken.framing import FrameReader
from megatoken.targets.endpoint.address import Address
from megatoken.targets.endpoint.bodies import Asking
from megatoken.targets.endpoint.clients import ClientProcess, Clients
from megatoken.targets.endpoint.observations import Observations
from megatoken.targets.endpoint.target import EndpointTarget
from megatoken.targets.endpoint.wire import FAILURE, Asked, ClientSettings, Failed, News, pack


def test_samples_of_an_endpoint_lost_while_all_are_cancelled_are_not_sent_to_the_other() -> None:
    ours, theirs = socket.socketpair()
    ours.setblocking(False)
    sent: list[int] = []

    def report() -> None:
        reader = FrameReader()
        while data := theirs.recv(1 << 20):
            for kind, body in reader.feed(data):
                value = marshal.loads(body)
                if kind == Asked.SEND:
                    sent.extend(task[0] for task in value)
                elif kind == Asked.CANCEL and len(value) > 1:
                    gone = Failed(FAILURE, value[0], "gone", "its server has gone", 0)
                    theirs.sendall(pack(News.EVENTS, [tuple(gone)]) + pack(News.CANCELLED, value))

    thread = threading.Thread(target=report)
    thread.start()
    addresses = tuple(Address.parse(f"http://127.0.0.1:{port}/v1") for port in (1, 2))
    settings = ClientSettings(addresses, "completions", None, None, True, 5.0, 5.0, False)
    target = EndpointTarget(
        settings,
        Asking("model", forces=False, ids=False),
        {},
        clients=Clients([ClientProcess(ours)]),
        max_in_flight=100,
        observations=Observations(None),
    )
    for sample in range(4):
        target.submit(sample, Request((1, 2), max_tokens=8))
    target.poll(0.0)
    assert target.cancel_all() == []
    assert target.state().in_flight == 0
    target.poll(0.2)
    ours.close()
    thread.join()
    theirs.close()
    assert sent == [0, 1, 2, 3]
