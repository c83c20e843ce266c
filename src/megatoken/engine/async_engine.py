"""An engine for an event loop: answers are awaited, and tokens are iterated over as they come."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing, suppress
from typing import Self

from megatoken.engine.active_request import ActiveRequest
from megatoken.engine.loop import Engine
from megatoken.engine.request import Completion, FinishReason, Request, TokenEvent, TokenLogprobs
from megatoken.engine.thread import EngineThread, Step
from megatoken.errors import ThreadError


class AsyncEngine:
    """Shares an engine among the tasks of one event loop; their requests run in the same steps.

    Use it as an asynchronous context manager: on leaving, requests still running are cancelled and the engine is
    closed. A step costs the loop one call, however many requests are running. All methods belong to the loop that
    first ran a request.
    """

    def __init__(self, engine: Engine) -> None:
        """Takes the engine over: no other code may use it from now on, and no request may be in flight."""
        self._engine = engine
        self._thread = EngineThread(engine, self._on_step, name="async engine")
        self._loop: asyncio.AbstractEventLoop | None = None
        self._queues: dict[int, asyncio.Queue[TokenEvent]] = {}

    def __repr__(self) -> str:
        return f"<AsyncEngine of {self._thread!r}>"

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        """Cancel every request, whose consumers get an event that says so, and close the engine."""
        await asyncio.to_thread(self._thread.close)
        await asyncio.to_thread(self._engine.close)

    async def generate(self, request: Request) -> Completion:
        """Run a request to its end. Cancelling the task that waits here cancels the request.

        Raises:
            RequestError, CapacityError: as ``Engine.submit``.
            MegatokenError: what ended the request, or the engine.
        """
        token_ids: list[int] = []
        pieces: list[str] = []
        logprobs: list[TokenLogprobs] = []
        prompt_logprobs: tuple[TokenLogprobs, ...] = ()
        cached_tokens, reason = 0, FinishReason.CANCELLED
        checked = await self._check(request)
        async with aclosing(self._run(checked)) as events:
            async for event in events:
                token_ids += event.token_ids
                pieces.append(event.text)
                logprobs += event.logprobs
                prompt_logprobs += event.prompt_logprobs
                cached_tokens += event.cached_tokens
                reason = event.finish_reason or reason
        text, prompt_tokens = "".join(pieces), len(checked.prompt)
        return Completion(token_ids, reason, prompt_tokens, text, tuple(logprobs), cached_tokens, prompt_logprobs)

    async def stream(self, request: Request) -> AsyncGenerator[TokenEvent]:
        """Run one request, event by event; leaving the loop early cancels it. Raises as ``generate``.

        Python closes an asynchronous generator that a loop left early when it is collected; ``contextlib.aclosing``
        does it at once.
        """
        async with aclosing(self._run(await self._check(request))) as events:
            async for event in events:
                yield event

    async def _check(self, request: Request) -> ActiveRequest:
        """On another thread: encoding a long text takes longer than a loop should wait."""
        return await asyncio.to_thread(self._engine.check, request, text=True)

    async def _run(self, checked: ActiveRequest) -> AsyncGenerator[TokenEvent]:
        loop = asyncio.get_running_loop()
        self._loop = self._loop or loop
        if loop is not self._loop:
            raise ThreadError("an AsyncEngine belongs to one event loop; make another one for this loop")
        events: asyncio.Queue[TokenEvent] = asyncio.Queue()
        request_id = self._thread.enqueue(checked)
        self._queues[request_id] = events  # before its first event: those come by calls of this loop
        try:
            while request_id in self._queues:
                event = await events.get()
                if event.finish_reason is not None:
                    del self._queues[request_id]
                if event.error is not None:
                    raise event.error
                yield event
        finally:
            if self._queues.pop(request_id, None) is not None:
                self._thread.cancel(request_id)

    def _on_step(self, step: Step) -> None:
        if step.events and self._loop is not None:
            with suppress(RuntimeError):  # the loop is closed, and all that waited in it is gone
                self._loop.call_soon_threadsafe(self._deliver, step.events)

    def _deliver(self, events: Sequence[TokenEvent]) -> None:
        for event in events:
            queue = self._queues.get(event.request_id)
            if queue is not None:  # otherwise its consumer has left
                queue.put_nowait(event)
