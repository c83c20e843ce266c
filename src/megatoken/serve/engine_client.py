"""An HTTP process's end of the channel to the engine process."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import cast

from megatoken.engine.request import FinishReason, Request, TokenEvent
from megatoken.errors import MegatokenError
from megatoken.framing import FrameReader, frame
from megatoken.serve.messages import (
    Health,
    Kind,
    Replicas,
    ServedModel,
    Status,
    Submission,
    Unavailable,
    pickled,
    step_events,
    submission_frame,
    unpickled,
)
from megatoken.serve.tenants import Tenant

RECONNECT_SECONDS = 0.05
SILENT_SECONDS = 10.0
METRICS_SECONDS = 5.0
RETRY_AFTER_SECONDS = 5


Sink = Callable[[TokenEvent], None]
"""Takes the events of one request on the event loop's thread; must not block. ``request_id`` is that of ``submit``."""


class Refused(MegatokenError):  # noqa: N818
    """A request is not taken now."""

    def __init__(self, status: int, message: str, retry_after_seconds: int | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.retry_after_seconds = retry_after_seconds


class EngineClient(asyncio.Protocol):
    """Sends requests to the engine process and hands its events to their sinks. Reconnects when it was restarted."""

    def __init__(
        self, path: str, on_model: Callable[[ServedModel], None], log: Callable[[str], None], *, restarts: bool
    ) -> None:
        """Prepares the client; ``run`` connects.

        Args:
            path: of the engine process's Unix socket.
            on_model: called whenever an engine has become ready.
            log: takes a line about a fault.
            restarts: whether an engine process that has ended is started again.
        """
        self.message = "the engine is starting"  # explains ``health``
        self.draining = False  # set when new requests are refused because the server is stopping
        self.replicas: Replicas | None = None  # how many serve, of a rack
        self._path = path
        self._on_model = on_model
        self._log = log
        self._restarts = restarts
        self._health = Health.STARTING
        self._model: ServedModel | None = None
        self._sinks: dict[int, Sink] = {}
        self._next_id = 0
        self._reader = FrameReader()
        self._transport: asyncio.Transport | None = None
        self._lost = asyncio.Event()
        self._heard = time.monotonic()
        self._metrics: list[asyncio.Future[str]] = []

    async def run(self) -> None:
        """Connect, and connect again whenever the engine process has ended."""
        loop = asyncio.get_running_loop()
        while True:
            self._lost.clear()
            try:
                await loop.create_unix_connection(lambda: self, self._path)
                await self._lost.wait()
            except OSError:
                pass
            await asyncio.sleep(RECONNECT_SECONDS)

    @property
    def model(self) -> ServedModel:
        """The model that is served. Raises Refused while no engine has been ready."""
        if self._model is None:
            raise Refused(503, self.message, RETRY_AFTER_SECONDS)
        return self._model

    @property
    def health(self) -> Health:
        """What the engine reported last; STUCK if no report came for a while."""
        if self.draining:
            self.message = "the server is stopping"
            return Health.DRAINING
        if self._health.serves and time.monotonic() - self._heard > SILENT_SECONDS:
            self.message = f"the engine process has been silent for {SILENT_SECONDS:.0f} s"
            return Health.STUCK
        return self._health

    def submit(
        self,
        request: Request,
        sink: Sink,
        tenant: Tenant,
        priority: int = 0,
        *,
        whole: bool = False,
        answers: int = 1,
    ) -> int:
        """Send a request; its events go to ``sink``. Returns its id.

        ``priority``: the lowest first, among the requests of ``tenant`` that wait. ``whole``: no client sees a token
        before the last, so a rack may start the answer over; an event with the error ``StartedOver`` says so.
        ``answers``: as in ``Submission``.

        Raises:
            Refused: the engine does not take requests now.
        """
        if not self.health.serves or self._transport is None:
            raise Refused(503, self.message, RETRY_AFTER_SECONDS)
        request_id = self._next_id
        self._next_id += 1
        self._sinks[request_id] = sink
        submission = Submission(request_id, request, tenant, time.monotonic_ns(), priority, whole, answers)
        self._transport.write(submission_frame(submission))
        return request_id

    def cancel(self, request_id: int, *, stopped: bool = False) -> None:
        """End a request; its sink gets no further event. Ids of ended requests pass.

        ``stopped``: its answer is complete, as far as metrics are concerned.
        """
        if self._sinks.pop(request_id, None) is not None and self._transport is not None:
            self._transport.write(pickled(Kind.CANCEL, (request_id, stopped)))

    async def metrics(self) -> str:
        """The engine process's metrics in Prometheus's text format. Raises Refused: it does not answer."""
        if self._transport is None:
            raise Refused(503, self.message, RETRY_AFTER_SECONDS)
        answer: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self._metrics.append(answer)
        self._transport.write(frame(Kind.METRICS))
        try:
            return await asyncio.wait_for(answer, METRICS_SECONDS)
        except TimeoutError:
            raise Refused(503, "the engine process does not answer", RETRY_AFTER_SECONDS) from None

    # asyncio

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """The engine process's socket accepts; its first status says how far it is."""
        self._transport = cast(asyncio.Transport, transport)
        self._reader = FrameReader()

    def data_received(self, data: bytes) -> None:
        """Hand out what has arrived."""
        self._heard = time.monotonic()
        for kind, payload in self._reader.feed(data):
            if kind == Kind.STEP:
                self._take_step(payload)
            elif kind == Kind.STATUS:
                self._take_status(Status(*unpickled(payload)))
            elif kind == Kind.METRICS and self._metrics:
                answer = self._metrics.pop(0)
                if not answer.done():
                    answer.set_result(payload.decode())

    def connection_lost(self, error: Exception | None) -> None:
        """The engine process has ended: end every open request with an error."""
        self._transport = None
        self._health = Health.STARTING if self._restarts else Health.DEAD
        self.message = "the engine has stopped" + (" and is started again" if self._restarts else "")
        self._lost.set()
        for answer in self._metrics:
            if not answer.done():
                answer.set_exception(Refused(503, self.message, RETRY_AFTER_SECONDS))
        self._metrics.clear()
        why = "the engine stopped while it computed this answer"
        if self.draining:
            why = "the server is stopping, and its engine ended before this answer was complete"
        failure = Unavailable(f"{why}; send the request again")
        for request_id in list(self._sinks):
            self._deliver(TokenEvent(request_id, (), FinishReason.ERROR, failure))

    # inside

    def _take_step(self, payload: bytes) -> None:
        sinks = self._sinks
        for event in step_events(payload):
            if event.request_id in sinks:  # else it was cancelled, and the engine had not heard of it
                self._deliver(event)

    def _deliver(self, event: TokenEvent) -> None:
        request_id = event.request_id
        sink = self._sinks[request_id] if event.finish_reason is None else self._sinks.pop(request_id, None)
        if sink is None:
            return
        try:
            sink(event)
        except Exception as error:
            self._log(fault(f"a sink of request {request_id} failed", error))
            self.cancel(request_id)

    def _take_status(self, status: Status) -> None:
        self._health, self.message, self.replicas = status.health, status.message, status.replicas
        if status.model is not None and status.model != self._model:
            self._model = status.model
            self._on_model(status.model)


def fault(what: str, error: BaseException) -> str:
    """One line about a fault of this program: what failed, the error, and the place in the code."""
    traceback = error.__traceback__
    while traceback is not None and traceback.tb_next is not None:
        traceback = traceback.tb_next
    place = ""
    if traceback is not None:
        place = f" at {traceback.tb_frame.f_code.co_filename.rpartition('/')[2]}:{traceback.tb_lineno}"
    return " ".join(f"{what}: {type(error).__name__}: {error}{place}".split())[:1000]
