"""When streams are written: those that begin first, a large step in parts with turns of the loop between them."""

from __future__ import annotations

import asyncio
import socket

from megatoken.serve.child import Control
from megatoken.serve.exchange import Exchange, HttpRequest
from megatoken.serve.options import HttpProcessSettings, ServeConfig
from megatoken.serve.server import FLUSHED_AT_ONCE, Server
from megatoken.serve.tenants import Keys


class Written:
    """A connection that notes what is written, by request id, in the order of all connections."""

    def __init__(self, server: Server, order: list[tuple[str, bytes]]) -> None:
        self.server, self.order = server, order

    def open(self, request_id: str) -> Exchange:
        self.request_id = request_id
        exchange = Exchange(HttpRequest("POST", "/", "", {}, b"", request_id, 0), self)
        exchange.start_events()
        return exchange

    def write(self, data: bytes) -> None:
        self.order.append((self.request_id, data))

    def release_body(self, count: int) -> None: ...

    def answered(self, exchange: Exchange) -> None: ...

    def extra_headers(self, request: HttpRequest) -> tuple[tuple[str, str], ...]:
        return ()

    def flush_soon(self, exchange: Exchange) -> None:
        self.server.flush_soon(exchange)


async def turns(count: int) -> None:
    for _ in range(count):
        await asyncio.sleep(0)


def test_first_tokens_are_written_first_and_a_large_step_leaves_turns_to_others() -> None:
    async def check() -> None:
        ours, theirs = socket.socketpair()
        settings = HttpProcessSettings(ServeConfig(), Keys(), "/nowhere", -1)
        server = Server(settings, {}, Control(ours))
        order: list[tuple[str, bytes]] = []
        old = [Written(server, order).open(f"old-{at}") for at in range(3 * FLUSHED_AT_ONCE)]
        await turns(5)
        order.clear()
        for token in (b"a", b"b"):
            for exchange in old:
                exchange.write(token)
        new = Written(server, order).open("new")
        new.write(b"first")
        await turns(1)
        assert order[0][0] == "new" and order[0][1].endswith(b"5\r\nfirst\r\n")
        assert len(order) < len(old)
        old[-1].write(b"c")  # its turn has not come
        await turns(5)
        expected = [(f"old-{at}", b"2\r\nab\r\n") for at in range(len(old) - 1)]
        assert order[1:] == [*expected, (f"old-{len(old) - 1}", b"3\r\nabc\r\n")]
        ours.close()
        theirs.close()

    asyncio.run(check())
