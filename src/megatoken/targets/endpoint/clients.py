"""The run's side of its client processes: what it knows of each, which are lost, and how one is started."""

from __future__ import annotations

import marshal
import os
import select
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from typing import Any

import psutil

from megatoken.errors import MegatokenError
from megatoken.framing import WireError, first_message
from megatoken.processes import usable_cores
from megatoken.rack.clock import OffsetEstimate
from megatoken.rack.wire import Channel
from megatoken.runs.reasons import Reason, reason
from megatoken.targets.endpoint.priority import Priority
from megatoken.targets.endpoint.wire import Asked, ClientSettings, News

MOST_PROCESSES = 4  # of one machine, unless the user wants more
START_SECONDS = 60.0
END_SECONDS = 2.0
PING_SECONDS = 1.0
SILENT_SECONDS = 8.0  # after which a client process of another host counts as lost; each says something every second
LONGEST_ROUND_SECONDS = 1.0
CLOCK_SECONDS = 0.001  # how well the clock of another host must be known
FEWEST_LOOKS = 20  # of a second: in a shorter run one late look at the clock would be a large share


@dataclass(slots=True)
class Host:
    """Another machine with client processes."""

    name: str
    address: str
    cores: int
    self_test: Mapping[str, float]  # what one client process can hold there
    process_ids: Sequence[int]
    clock: OffsetEstimate = field(default_factory=OffsetEstimate)


class ClientProcess:
    """A client process of this machine, or of ``host``."""

    def __init__(self, connection: socket.socket, host: Host | None = None) -> None:
        self.host = host
        self.channel = Channel(connection, News)
        self.heard = time.monotonic()
        self.pinged = 0.0
        self.in_flight = 0
        self.tasks: list[tuple[Any, ...]] = []
        self.core_wait_share: float | None = None
        self.reset_load()

    def reset_load(self) -> None:
        """Sets back how busy the process was."""
        self.busy_share = self.loop_lag_seconds = 0.0  # the worst second
        self.looks = self.late_looks = 0  # at the clock of its loop
        self.priority: Priority | None = None  # the lowest

    def note_load(
        self, busy_share: float, loop_lag_seconds: float, looks: int, late_looks: int, waited: float | None
    ) -> None:
        """Takes a report of about a second."""
        self.busy_share = max(self.busy_share, busy_share)
        self.loop_lag_seconds = max(self.loop_lag_seconds, loop_lag_seconds)
        self.looks, self.late_looks = self.looks + looks, self.late_looks + late_looks
        self.core_wait_share = waited

    def flush(self) -> None:
        """Sends the tasks that were collected, and what the connection did not take before."""
        if self.tasks:
            self.send(Asked.SEND, self.tasks)
            self.tasks = []
        elif self.channel.pending:
            with suppress(WireError):  # noticed when the connection is read
                self.channel.flush()

    def send(self, kind: Asked, value: Any) -> None:
        """Sends a message, now or with later ``flush``es."""
        with suppress(WireError):
            self.channel.send(kind, marshal.dumps(value))

    def ping(self) -> None:
        """Asks for the clocks of its machine."""
        self.pinged = time.monotonic()
        self.send(Asked.PING, time.monotonic_ns())

    def receive(self) -> list[tuple[int, Any]]:
        """The messages that have arrived but for clocks and priorities, which are noted.

        Raises:
            WireError: the process is gone.
        """
        frames = self.channel.receive()
        now_ns = time.monotonic_ns()
        self.heard = now_ns / 1e9
        messages = []
        for kind, body in frames:
            value = marshal.loads(body)
            if kind == News.PONG and self.host is not None:
                sent_ns, monotonic_ns, wall_ns = value
                self.host.clock.note(sent_ns, now_ns, time.time_ns(), monotonic_ns, wall_ns)
            elif kind == News.PRIORITY:
                self.priority = Priority(value if self.priority is None else min(value, self.priority))
            else:
                messages.append((kind, value))
        return messages

    def close(self) -> None:
        """Ends the process."""
        self.channel.close()


class LocalProcess(ClientProcess):
    """A client process that this one starts."""

    def __init__(self, settings: ClientSettings) -> None:
        self.process, connection = start_process(settings)
        super().__init__(connection)

    def wait_until_ready(self) -> None:
        """Waits until the process works; requests given before that would all leave at once. Raises MegatokenError."""
        self.ping()
        deadline = time.monotonic() + START_SECONDS
        try:
            while not any(kind == News.PONG for kind, _ in self.receive()):
                if not select.select([self.channel.socket], [], [], max(0.0, deadline - time.monotonic()))[0]:
                    raise MegatokenError(f"a client process did not start within {START_SECONDS:g} s")
        except WireError:
            raise self.ended() from None

    def ended(self) -> MegatokenError:
        """The error that it has ended."""
        return MegatokenError(f"a client process ended with code {self.process.wait()}; its messages above say why")

    def cpu_seconds(self) -> float:
        """User and system time so far."""
        return sum(psutil.Process(self.process.pid).cpu_times()[:2])

    def close(self) -> None:
        """Ends the process and waits for it."""
        super().close()
        try:
            self.process.wait(END_SECONDS)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()


@dataclass(slots=True)
class LostHost:
    """A host whose client processes were lost: with one of them it counts as lost, since the others go with it."""

    host: Host
    lost_ns: int
    cause: str
    moved: int = 0  # samples that other hosts sent again


class Clients:
    """The client processes of a run: all of this machine, or all of hosts."""

    def __init__(self, processes: Sequence[ClientProcess], self_test: Mapping[str, float] | None = None) -> None:
        """``self_test``: what the slowest of them can hold by a test of itself."""
        self._self_test = self_test
        self._all, self._left = list(processes), list(processes)
        self._hosts = list({id(one.host): one.host for one in processes if one.host is not None}.values())
        self._lost: list[LostHost] = []
        self._looked = time.monotonic()

    def left(self) -> list[ClientProcess]:
        """Those that are not lost."""
        return list(self._left)

    def first(self) -> ClientProcess:
        """The one that asks what one alone asks: whether lost endpoints are back."""
        return self._left[0]

    def least_busy(self) -> ClientProcess:
        """The one with the fewest requests."""
        return min(self._left, key=_in_flight)

    def silent(self) -> list[ClientProcess]:
        """One for each host that says nothing; asks for the clocks of the others once a second."""
        now, before = time.monotonic(), self._looked
        self._looked = now
        found: list[ClientProcess] = []
        for one in self._left if self._hosts else ():
            if now - before > LONGEST_ROUND_SECONDS:  # the run did not listen
                one.heard += now - before
            if now - one.heard > SILENT_SECONDS:
                if not any(other.host is one.host for other in found):
                    found.append(one)
            elif now - one.pinged >= PING_SECONDS:
                one.ping()
        return found

    def lose(self, process: ClientProcess, cause: str) -> LostHost:
        """Drops all processes of the host of a lost one. Raises MegatokenError: it is this machine, or the last one."""
        if isinstance(process, LocalProcess):
            raise process.ended()
        assert process.host is not None
        for one in self.left():
            if one.host is process.host:
                one.close()
                self._left.remove(one)
        self._lost.append(LostHost(process.host, time.monotonic_ns(), cause))
        if not self._left:
            raise MegatokenError(f"no client host is left; the last lost was {process.host.name} ({cause})")
        return self._lost[-1]

    def begin(self) -> None:
        """A test begins: what was observed before does not count, but lost hosts stay lost."""
        for one in self._all:
            one.reset_load()
        for loss in self._lost:
            loss.moved = 0

    def findings(self) -> list[Reason]:
        """Whether clocks of hosts are not known well enough."""
        offsets = [(one.name, offset) for one in self._hosts if (offset := one.clock.offset()) is not None]
        vague = {name: one.uncertainty_seconds for name, one in offsets if one.uncertainty_seconds > CLOCK_SECONDS}
        if not vague:
            return []
        worst = max(vague.values())
        return [reason("CLIENT_CLOCKS", hosts=list(vague), uncertainty_seconds=worst, limit_seconds=CLOCK_SECONDS)]

    def to_document(self, since_ns: int) -> dict[str, Any]:
        """How busy they were, for ``result.json``, with each host and those lost, times from ``since_ns``."""
        hosts = {
            "hosts": [self._host(one) for one in self._hosts],
            "lost": [
                {
                    "host": one.host.name,
                    "at_seconds": (one.lost_ns - since_ns) / 1e9,
                    "cause": one.cause,
                    "samples_moved": one.moved,
                }
                for one in self._lost
            ],
        }
        return {
            "processes": len(self._all),
            **_busy(self._all),
            "cores": sum(host.cores for host in self._hosts) or usable_cores(),
            "self_test": self._self_test,
            **(hosts if self._hosts else {}),
        }

    def close(self) -> None:
        """Ends all of them."""
        for one in self._left:
            one.close()

    def _host(self, host: Host) -> dict[str, Any]:
        own = [one for one in self._all if one.host is host]
        offset = host.clock.offset()
        return {
            "host": host.name,
            "address": host.address,
            "processes": len(own),
            "process_ids": list(host.process_ids),
            **_busy(own),
            "cores": host.cores,
            "self_test": host.self_test,
            "clock_offset": None if offset is None else asdict(offset),
        }


def _in_flight(process: ClientProcess) -> int:
    return process.in_flight


def _busy(processes: Sequence[ClientProcess]) -> dict[str, float | str | None]:
    """The busiest of them in each respect, and the lowest priority."""
    waits = [one.core_wait_share for one in processes if one.core_wait_share is not None]
    priorities = [one.priority for one in processes if one.priority is not None]
    return {
        "busy_share": max(one.busy_share for one in processes),
        "loop_lag_seconds": max(one.loop_lag_seconds for one in processes),
        "late_share": max(one.late_looks / max(FEWEST_LOOKS, one.looks) for one in processes),
        "core_wait_share": max(waits, default=None),
        "priority": min(priorities).name.lower() if priorities else None,
    }


def default_processes() -> int:
    """Client processes of one machine, if the user does not say: half as many as cores."""
    return max(1, min(MOST_PROCESSES, usable_cores() // 2))


def start_process(settings: ClientSettings) -> tuple[subprocess.Popen[bytes], socket.socket]:
    """A client process, and the socket with which it ends."""
    ours, theirs = socket.socketpair()
    with theirs:
        process = subprocess.Popen(
            [sys.executable, "-P", "-m", "megatoken.targets.endpoint.worker", str(theirs.fileno())],
            stdin=subprocess.DEVNULL,
            pass_fds=(theirs.fileno(),),
            process_group=0,  # a Ctrl-C in the terminal is for the process that started it
            env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        )
    ours.sendall(first_message(settings))
    return process, ours
