"""The worker process: its replicas, and the thread that talks to the driver.

It does not use Ray: given the driver's address and key, it serves until that driver ends or is lost.
"""

from __future__ import annotations

import os
import select
import time
from collections.abc import Sequence
from contextlib import suppress
from typing import TYPE_CHECKING

import numpy as np

from megatoken.errors import MegatokenError
from megatoken.framing import WireError
from megatoken.hardware.telemetry import Sensors
from megatoken.rack.records import WorkerSpec
from megatoken.rack.replica import Replica
from megatoken.rack.wire import (
    PING,
    PONG,
    STATE,
    Channel,
    Kind,
    Report,
    dial,
    pack_report,
    unpack_submit,
)

if TYPE_CHECKING:
    from megatoken.engine.loop import Engine

REPORT_SECONDS = 0.25  # between reports, unless single tokens are waited for
STREAM_SECONDS = 0.004  # the least between reports if they are
CANCEL_POLL_SECONDS = 0.05
CONNECT_SECONDS = 2.0
LONGEST_ROUND_SECONDS = 1.0
RECONNECT_PAUSE_SECONDS = 0.2
REFUSALS = 3  # refused connections in a row, after which the driver is gone for good


class Worker:
    """Serves a driver with the engines of this process until that driver is gone."""

    def __init__(self, engines: Sequence[Engine], number: int, spec: WorkerSpec) -> None:
        """Starts a thread for each engine. The driver knows this worker by ``number``."""
        self._number = number
        self._spec = spec
        self._wake_reader, self._wake_writer = os.pipe()
        os.set_blocking(self._wake_writer, False)
        os.set_blocking(self._wake_reader, False)
        self._replicas = [
            Replica(
                engine,
                f"replica-{place}",
                streams=spec.streams,
                keep_ids=spec.keep_ids,
                sensors=Sensors(engine.gpu_uuids) if place == 0 or engine.gpu_uuids else None,
                notify=self._wake,
            )
            for place, engine in enumerate(engines)
        ]

    def serve(self, address: tuple[str, int], key: bytes) -> None:
        """Serves the driver at ``address`` until the driver ends it, ends itself, or is out of reach for too long.

        Samples of a connection that broke are dropped: the driver has given them to other replicas.

        Raises:
            MegatokenError: a replica failed; the driver got the error.
        """
        refusals, until = 0, time.monotonic() + self._spec.reconnect_seconds
        while refusals < REFUSALS and time.monotonic() < until:
            try:
                channel = Channel(dial(address, key, self._number, CONNECT_SECONDS))
            except ConnectionRefusedError:
                refusals += 1
                time.sleep(RECONNECT_PAUSE_SECONDS)
                continue
            except (OSError, WireError):
                time.sleep(RECONNECT_PAUSE_SECONDS)
                continue
            try:
                if self._talk(channel):
                    return
            except WireError:
                pass
            finally:
                channel.close()
            self._drop_everything()
            refusals, until = 0, time.monotonic() + self._spec.reconnect_seconds

    def close(self) -> None:
        """Ends the engines' threads after their steps."""
        for replica in self._replicas:
            replica.close()

    def _talk(self, channel: Channel) -> bool:
        """Serves one connection; whether the driver asked to end. Raises WireError when it is gone."""
        for replica in self._replicas:
            replica.start_counting()
        heard = now = time.monotonic()
        reported, pressing = 0.0, False
        cancelling: bytes | None = None
        while True:
            now, before = time.monotonic(), now
            if now - before > LONGEST_ROUND_SECONDS:  # this process was stopped and could hear nothing
                heard += now - before
                for replica in self._replicas:
                    replica.discount(now - before)
            if now - heard > self._spec.dead_after_seconds:
                raise WireError("the driver has fallen silent")
            writers = [channel.socket.fileno()] if channel.pending else []
            wait = max(0.0, reported + (STREAM_SECONDS if pressing else REPORT_SECONDS) - now)
            readable, writable, _ = select.select([channel.socket.fileno(), self._wake_reader], writers, [], wait)
            if writable:
                channel.flush()
            if channel.socket.fileno() in readable:
                heard = time.monotonic()
                for kind, body in channel.receive():
                    if kind == Kind.CLOSE:
                        return True
                    if kind == Kind.SUBMIT:
                        place, samples = unpack_submit(body)
                        self._replicas[place].take(samples)
                    elif kind == Kind.PING:
                        channel.send(Kind.PONG, PONG.pack(*PING.unpack(body), time.monotonic_ns(), time.time_ns()))
                    elif kind == Kind.CANCEL:
                        cancelling = body
                        for replica in self._replicas:
                            replica.start_cancelling()
            if self._wake_reader in readable:
                os.read(self._wake_reader, 4096)
                pressing = True
                self._raise_failure(channel)
                if cancelling is not None and all(replica.cancelled for replica in self._replicas):
                    channel.send(Kind.CANCELLED, cancelling)
                    cancelling = None
            due = STREAM_SECONDS if pressing else REPORT_SECONDS
            now_after = time.monotonic()
            if now_after - reported >= due and cancelling is None and not channel.pending:
                reported, pressing = now_after, False
                channel.send(Kind.REPORT, self._report())

    def _report(self) -> bytes:
        news = [replica.take_news() for replica in self._replicas]
        states = [replica.state(replica.wanted()) for replica in self._replicas]
        return pack_report(
            Report(
                np.array(states, STATE),
                np.array([token for _, _, ids, _ in news for token in ids], "<i4"),
                [one for first, *_ in news for one in first],
                [one for _, done, *_ in news for one in done],
                [one for *_, failures in news for one in failures],
            )
        )

    def _raise_failure(self, channel: Channel) -> None:
        for replica in self._replicas:
            if (failure := replica.failure) is not None:
                text = f"{type(failure).__name__}: {str(failure).splitlines()[0] if str(failure) else ''}"
                with suppress(WireError):
                    channel.send(Kind.FAILED, text.encode())
                raise MegatokenError(text)

    def _drop_everything(self) -> None:
        for replica in self._replicas:
            replica.start_cancelling()
        while not all(replica.cancelled or replica.failure for replica in self._replicas):
            time.sleep(CANCEL_POLL_SECONDS)

    def _wake(self) -> None:
        with suppress(BlockingIOError):
            os.write(self._wake_writer, b"\0")
