"""The priority of client processes, real ones: what the system permits, what is given back, and what is recorded."""

from __future__ import annotations

import os
import select
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace

import psutil
import pytest

from megatoken.processes import usable_cores
from megatoken.targets.endpoint.clients import ClientProcess, Clients, LocalProcess
from megatoken.targets.endpoint.priority import BUSY_SHARE, NICENESS, OwnPriority, Priority
from megatoken.targets.endpoint.self_test import SETTINGS, frame_server
from megatoken.targets.endpoint.wire import Asked, News, Task, pack
from megatoken.targets.endpoint.worker import IDLE_SECONDS

UNPRIVILEGED = 65534
EARLY_NS = 200_000_000
LONGEST_SECONDS = 20.0
PERMITTED = """
import os
os.sched_setscheduler(0, os.SCHED_RR | os.SCHED_RESET_ON_FORK, os.sched_param(1))
"""

needs_permission = pytest.mark.skipif(
    subprocess.run([sys.executable, "-c", PERMITTED], capture_output=True, check=False).returncode != 0,
    reason="this system does not permit SCHED_RR",
)
needs_cores = pytest.mark.skipif(usable_cores() < 2, reason="one core")


@pytest.fixture
def client(request: pytest.FixtureRequest) -> Iterator[LocalProcess]:
    """A client process, one of as many of its machine as the parameter says, and a server for it."""
    with frame_server(4) as address:
        process = LocalProcess(replace(SETTINGS, addresses=(address,), stream=False, processes=request.param))
        process.wait_until_ready()
        yield process
        process.close()


def asks(client: LocalProcess, due_ns: int) -> None:
    """Sends a request, and waits for its answer."""
    client.send(Asked.SEND, [tuple(Task(1, 0, b"{}", 4, False, False, due_ns))])
    while not any(kind == News.EVENTS for kind, _ in client.receive()):
        assert select.select([client.channel.socket], [], [], LONGEST_SECONDS)[0], "no answer"


def policy(client: LocalProcess) -> int:
    """What it runs at, but for the flag that its children do not."""
    return os.sched_getscheduler(client.process.pid) & ~os.SCHED_RESET_ON_FORK


def in_thread(work: Callable[[], None]) -> None:
    """Runs it in a thread of its own, whose priority ends with it."""
    errors: list[BaseException] = []

    def run() -> None:
        try:
            work()
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    if errors:
        raise errors[0]


@needs_permission
@needs_cores
@pytest.mark.parametrize("client", [1], indirect=True)
def test_a_client_process_runs_in_real_time_while_requests_come_before_their_time(client: LocalProcess) -> None:
    clients = Clients([client])
    clients.begin()
    asks(client, 0)
    assert policy(client) == os.SCHED_OTHER
    assert clients.to_document(0)["priority"] is None
    asks(client, time.monotonic_ns() + EARLY_NS)
    assert clients.to_document(0)["priority"] == "real_time"
    assert policy(client) == os.SCHED_RR
    assert os.sched_getparam(client.process.pid).sched_priority == os.sched_get_priority_min(os.SCHED_RR)
    deadline = time.monotonic() + IDLE_SECONDS + LONGEST_SECONDS
    while policy(client) == os.SCHED_RR:
        assert time.monotonic() < deadline, "it is not given back"
        time.sleep(0.1)


@needs_permission
@pytest.mark.parametrize("client", [usable_cores() // 2 + 1], indirect=True)
def test_more_processes_than_half_the_cores_take_a_niceness(client: LocalProcess) -> None:
    clients = Clients([client])
    clients.begin()
    asks(client, time.monotonic_ns() + EARLY_NS)
    assert clients.to_document(0)["priority"] == "raised"
    assert policy(client) == os.SCHED_OTHER
    assert psutil.Process(client.process.pid).nice() == NICENESS


@needs_permission
@needs_cores
def test_what_a_process_starts_has_the_usual_priority() -> None:
    def work() -> None:
        assert OwnPriority(1).hold(0.0) is Priority.REAL_TIME
        found: list[int] = []
        other = threading.Thread(target=lambda: found.append(os.sched_getscheduler(0)))
        other.start()
        other.join()
        said = subprocess.run(
            [sys.executable, "-c", "import os; print(os.sched_getscheduler(0), os.getpriority(os.PRIO_PROCESS, 0))"],
            capture_output=True,
            text=True,
            check=True,
        )
        assert found == [os.SCHED_OTHER]
        assert said.stdout.split() == [str(os.SCHED_OTHER), "0"]  # it would inherit a niceness above that

    in_thread(work)


@needs_permission
@needs_cores
def test_a_busy_process_gives_it_back_and_takes_it_again() -> None:
    def work() -> None:
        usual = os.getpriority(os.PRIO_PROCESS, 0)
        for processes, high in ((1, Priority.REAL_TIME), (usable_cores(), Priority.RAISED)):
            own = OwnPriority(processes)
            assert own.hold(BUSY_SHARE) is high
            assert own.hold(BUSY_SHARE + 0.01) is Priority.USUAL
            assert (
                os.sched_getscheduler(0) == os.SCHED_OTHER | os.SCHED_RESET_ON_FORK
                and os.getpriority(os.PRIO_PROCESS, 0) == usual
            )
            assert own.hold(0.1) is high
            own.hold(1.0)

    in_thread(work)


def test_the_lowest_priority_of_any_process_within_a_test_is_recorded() -> None:
    pairs = [socket.socketpair() for _ in range(2)]
    processes = [ClientProcess(ours) for ours, _ in pairs]
    clients = Clients(processes)

    def says(at: int, priority: Priority) -> None:
        pairs[at][1].sendall(pack(News.PRIORITY, int(priority)))
        assert processes[at].receive() == []

    clients.begin()
    for at in range(2):
        says(at, Priority.REAL_TIME)
    assert clients.to_document(0)["priority"] == "real_time"
    says(1, Priority.USUAL)
    says(1, Priority.REAL_TIME)
    assert clients.to_document(0)["priority"] == "usual"
    clients.begin()
    assert clients.to_document(0)["priority"] is None
    for _, theirs in pairs:
        theirs.close()
    clients.close()


@pytest.mark.skipif(os.getuid() != 0, reason="only root can become another user")
def test_without_permission_it_runs_as_usual() -> None:
    program = (
        "import os, resource\n"
        "from megatoken.targets.endpoint.priority import OwnPriority\n"
        "resource.setrlimit(resource.RLIMIT_RTPRIO, (0, 0)); resource.setrlimit(resource.RLIMIT_NICE, (0, 0))\n"
        f"os.setresuid({UNPRIVILEGED}, {UNPRIVILEGED}, {UNPRIVILEGED})\n"
        "own, usual = OwnPriority(1), os.getpriority(os.PRIO_PROCESS, 0)\n"
        "print(*(int(own.hold(share)) for share in (0.0, 1.0, 0.1)), os.getpriority(os.PRIO_PROCESS, 0) - usual)\n"
        "print(os.sched_getscheduler(0) & ~os.SCHED_RESET_ON_FORK)\n"
    )
    said = subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
    )
    assert said.stdout.split() == ["0", "0", "0", "0", str(os.SCHED_OTHER)], said.stderr
