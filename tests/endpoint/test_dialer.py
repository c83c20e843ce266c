"""Short questions to an endpoint, whatever it answers, and how often its name is looked up."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Any, TypeVar

import pytest

from megatoken.targets.endpoint.address import Address
from megatoken.targets.endpoint.dialer import MOST_BYTES, Dialer

OK = b"HTTP/1.1 200 OK\r\nContent-Type: text/plain\r\n\r\n"
SECONDS = 20.0
Result = TypeVar("Result")


def asked(answer: bytes, question: Callable[[Dialer], Awaitable[Result]], *, endless: bool = False) -> Result:
    """What a dialer makes of ``answer``, which a server sends once or without end."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(ConnectionError):
            await reader.read(1 << 16)  # else the connection is reset at its end
            writer.write(answer)
            await writer.drain()
            while endless:
                writer.write(answer)
                await writer.drain()
        writer.close()

    async def main() -> Result:
        async with await asyncio.start_server(serve, "127.0.0.1", 0) as server:
            port = server.sockets[0].getsockname()[1]
            return await question(Dialer(Address.parse(f"http://localhost:{port}/v1"), None, None, SECONDS))

    return asyncio.run(main())


def test_metrics_that_are_no_numbers_are_left_out_and_labels_may_hold_braces() -> None:
    page = b"""vllm:num_requests_running{model_name="a}b \\" c"} 2.0
vllm:num_requests_running{model_name="b"} 1
vllm:num_requests_running{model_name="c"} +Inf
vllm:num_requests_waiting{model_name="a"} +
vllm:kv_cache_usage_perc NaN
vllm:num_preemptions_total 4 1795462983
vllm:other_total 7
"""
    assert asked(OK + page, lambda dialer: dialer.metrics()) == {"running": 3.0, "preemptions": 4.0}


def test_a_page_of_metrics_without_end_is_left_out() -> None:
    line = b"vllm:num_requests_running 1\n" * 1000
    assert asked(line, lambda dialer: asyncio.wait_for(dialer.metrics(), SECONDS / 4), endless=True) == {}


def test_a_server_whose_first_line_does_not_end_does_not_answer() -> None:
    assert asked(b"x" * 3 * MOST_BYTES, lambda dialer: dialer.answers()) is False
    assert asked(OK, lambda dialer: dialer.answers()) is True


def test_a_name_is_looked_up_once_until_a_connection_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    looked_up = 0

    async def connect(dialer: Dialer) -> list[int]:
        loop, counts = asyncio.get_running_loop(), []
        look_up = loop.getaddrinfo

        async def getaddrinfo(*args: Any, **more: Any) -> Any:
            nonlocal looked_up
            looked_up += 1
            return await look_up(*args, **more)

        monkeypatch.setattr(loop, "getaddrinfo", getaddrinfo)
        (await dialer.connect()).close()
        for one in await asyncio.gather(*(dialer.connect() for _ in range(20))):
            one.close()
        counts.append(looked_up)
        with monkeypatch.context() as failing:
            failing.setattr(loop, "sock_connect", refuse)
            with pytest.raises(ConnectionRefusedError):
                await dialer.connect()
        (await dialer.connect()).close()
        return [*counts, looked_up]

    async def refuse(*_: Any) -> None:
        raise ConnectionRefusedError

    assert asked(OK, connect) == [1, 2]
