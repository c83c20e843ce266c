"""Opens connections to one endpoint without blocking the event loop, and asks it short questions."""

from __future__ import annotations

import asyncio
import math
import re
import socket
import ssl
from contextlib import suppress
from typing import Any

from megatoken.targets.endpoint.address import Address

MOST_BYTES = 1 << 20  # of an answer to a short question
# Metrics of vLLM's names, and what they are called here.
METRICS = {
    b"vllm:num_requests_running": "running",
    b"vllm:num_requests_waiting": "waiting",
    b"vllm:num_preemptions_total": "preemptions",
    b"vllm:kv_cache_usage_perc": "cache_share",
    b"vllm:prefix_cache_queries_total": "prefix_cache_queries",
    b"vllm:prefix_cache_hits_total": "prefix_cache_hits",
    b"vllm:generation_tokens_total": "output_tokens",
    b"vllm:prompt_tokens_total": "input_tokens",
}
_LABELS = rb'\{(?:[^"}\n]|"(?:[^"\\\n]|\\.)*")*\}'
_METRIC = re.compile(rb"^(vllm:[a-z_]+)(?:%b)? (\S+)" % _LABELS, re.MULTILINE)
_STATUS = re.compile(rb"HTTP/1\.[01] ([1-4])")  # not that of a failing server


class Dialer:
    """Connections to the server at ``address``; ``tls`` None is plain HTTP."""

    def __init__(self, address: Address, tls: ssl.SSLContext | None, key: str | None, seconds: float) -> None:
        """``seconds``: longest time of a short question."""
        self._address = address
        self._tls = tls
        self._key = key
        self._seconds = seconds
        self._places: list[tuple[Any, ...]] = []  # that the name stands for; looked up again after a failure

    async def connect(self) -> socket.socket:
        """A new connection, its handshake done. Raises OSError."""
        loop, host = asyncio.get_running_loop(), self._address.host
        self._places = self._places or await loop.getaddrinfo(host, self._address.port, type=socket.SOCK_STREAM)
        error = OSError("the name has no address")
        for family, kind, protocol, _, place in self._places:
            opened = socket.socket(family, kind, protocol)
            try:
                opened.setblocking(False)
                opened.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                await loop.sock_connect(opened, place)
                if self._tls is not None:
                    opened = self._tls.wrap_socket(opened, server_hostname=host, do_handshake_on_connect=False)
                    await _shake_hands(opened)
            except OSError as raised:
                opened.close()
                error = raised
            except BaseException:
                opened.close()
                self._places = []
                raise
            else:
                return opened
        self._places = []
        raise error

    async def answers(self) -> bool:
        """Whether the server answers a short question, not with a failure of its own."""
        return _STATUS.match(await self._get(f"{self._address.path}/models", status_only=True)) is not None

    async def metrics(self) -> dict[str, float]:
        """The server's metrics, summed over their labels; empty if it has none."""
        values: dict[str, float] = {}
        for name, value in _METRIC.findall(await self._get(f"{self._address.root}/metrics")):
            with suppress(KeyError, ValueError):  # another metric, or no number
                total = values.get(METRICS[name], 0.0) + float(value)
                if math.isfinite(total):
                    values[METRICS[name]] = total
        return values

    async def _get(self, path: str, *, status_only: bool = False) -> bytes:
        """The head and the body of an answer, or its first line; empty without one of at most ``MOST_BYTES``."""
        head = f"GET {path} HTTP/1.1\r\nHost: {self._address.name}\r\nConnection: close\r\n"
        head += f"Authorization: Bearer {self._key}\r\n" if self._key else ""
        try:
            async with asyncio.timeout(self._seconds):
                reader, writer = await asyncio.open_connection(
                    self._address.host, self._address.port, ssl=self._tls, limit=MOST_BYTES
                )
                try:
                    writer.write(head.encode() + b"\r\n")
                    if status_only:
                        return await reader.readline()
                    await reader.readexactly(MOST_BYTES + 1)
                finally:
                    writer.close()
        except asyncio.IncompleteReadError as ended:
            return ended.partial
        except (OSError, ValueError):  # no answer in time, or a line that is too long
            pass
        return b""


async def _shake_hands(opened: ssl.SSLSocket) -> None:
    """TLS's handshake. Raises OSError."""
    loop = asyncio.get_running_loop()
    while True:
        try:
            opened.do_handshake()
            return
        except ssl.SSLWantReadError:
            watch, unwatch = loop.add_reader, loop.remove_reader
        except ssl.SSLWantWriteError:
            watch, unwatch = loop.add_writer, loop.remove_writer
        ready = asyncio.Event()
        watch(opened.fileno(), ready.set)
        try:
            await ready.wait()
        finally:
            unwatch(opened.fileno())
