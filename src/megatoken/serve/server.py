"""What answers requests in an HTTP process: finds tenant and route, holds what routes need."""

from __future__ import annotations

import asyncio
import re
import socket
import time
from collections import deque
from collections.abc import Awaitable, Callable, Iterable, Mapping
from http import HTTPStatus

from megatoken.engine.process_memory import collect_garbage_rarely
from megatoken.engine.tokenizer import Tokenizer
from megatoken.errors import MegatokenError
from megatoken.serve.access_log import AccessLog
from megatoken.serve.answer import reply_error
from megatoken.serve.child import Control
from megatoken.serve.context import ApiContext
from megatoken.serve.engine_client import EngineClient, fault
from megatoken.serve.exchange import Exchange, HttpRequest
from megatoken.serve.http_protocol import Connection, Refusal
from megatoken.serve.messages import ServedModel
from megatoken.serve.options import HttpProcessSettings
from megatoken.serve.request_errors import UNAVAILABLE_SECONDS, ApiError, as_api_error
from megatoken.serve.tenants import Keys
from megatoken.serve.tls import tls_context

Route = Callable[["Server", Exchange], Awaitable[None] | None]
OPEN_PATHS = ("/health", "/version", "/metrics", "/ping")  # answered without a key
HEADER_NAMES = re.compile(r"[A-Za-z0-9_-]+(, *[A-Za-z0-9_-]+)*")
USUAL_HEADERS = "authorization, content-type, x-request-id"
OPEN_METRICS_SECONDS = 0.5  # how long metrics are kept for clients without a key
SWEEP_SECONDS = 0.5
FLUSHED_AT_ONCE = 8  # streams; then what has come is read, before the rest of a large step is written
BACKLOG = 4096


class Server:
    """What routes need: the engine, the model's tokenizer, the settings, the log."""

    def __init__(
        self, settings: HttpProcessSettings, routes: Mapping[tuple[str, str], Route], control: Control
    ) -> None:
        self.settings = settings
        self.options = settings.options
        self.connections: set[Connection] = set()
        self.held_body_bytes = 0
        self.api: ApiContext | None = None  # what routes need of the model; None until an engine is ready
        self.log = AccessLog(as_json=settings.options.json_logs, quiet=not settings.options.access_log)
        self.client = EngineClient(
            settings.engine_path, self._take_model, self.log.note, restarts=settings.options.restart
        )
        self._routes = routes
        self._paths = {path for _, path in routes}
        self._stars = [path for path in self._paths if path.endswith("/*")]
        self._open_metrics = ""
        self._metrics_until = 0.0  # time.monotonic() to which they are good
        self._metrics_lock = asyncio.Lock()
        self._keys: Keys = settings.keys
        self._control = control
        self._ready = False
        self._beginning: deque[Exchange] = deque()  # of which nothing is written yet
        self._dirty: deque[Exchange] = deque()
        self._tasks: set[asyncio.Future[None]] = set()
        self._exchanges: set[Exchange] = set()

    # Handler of connections

    def admit(self, request: HttpRequest) -> Refusal | None:
        """Find the route and the tenant."""
        path = self._known_path(request.path)
        if path is None:
            return Refusal(404, f"there is no {request.path[:200]}; see /openapi.json", keep_alive=True)
        if request.method == "OPTIONS":
            return None
        method = "GET" if request.method == "HEAD" else request.method
        if (method, path) not in self._routes:
            allowed = (("allow", ", ".join(self._methods(path))),)
            return Refusal(405, f"{request.method} is not supported for {path}", allowed, keep_alive=True)
        request.tenant = self._keys.tenant_of(request.headers.get("authorization"))
        if request.tenant is None and path not in OPEN_PATHS:
            challenge = (("www-authenticate", "Bearer"),)
            return Refusal(401, "a valid API key is needed: Authorization: Bearer KEY", challenge, keep_alive=True)
        kind = request.headers.get("content-type", "application/json").partition(";")[0].strip().lower()
        if method == "POST" and kind != "application/json":
            return Refusal(415, "the body must be JSON, with Content-Type: application/json")
        return None

    def handle(self, exchange: Exchange) -> None:
        """Call the route."""
        self._exchanges.add(exchange)
        request = exchange.request
        path = self._known_path(request.path)
        assert path is not None
        if request.method == "OPTIONS":
            exchange.reply(HTTPStatus.NO_CONTENT, headers=[("allow", ", ".join(self._methods(path)))])
            return
        route = self._routes["GET" if request.method == "HEAD" else request.method, path]
        try:
            waiting = route(self, exchange)
        except Exception as error:
            self._answer_error(exchange, error)
            return
        if waiting is not None:
            task = asyncio.get_running_loop().create_task(self._wait(exchange, waiting))
            self._keep(task)
            exchange.on_disconnect(task.cancel)

    def finished(self, exchange: Exchange) -> None:
        """Log it."""
        self._exchanges.discard(exchange)
        if not self.log.wants(exchange.status):
            return
        request = exchange.request
        facts = {
            "request_id": request.request_id,
            "method": request.method or "-",
            "path": request.path[:200] or "-",
            "seconds": round((time.monotonic_ns() - request.arrival_ns) / 1e9, 4) if request.arrival_ns else 0.0,
            "body_bytes": exchange.body_bytes,
            **({"tenant": request.tenant.name} if request.tenant is not None and self._keys.entries else {}),
            **exchange.notes,
        }
        self.log.request(exchange.status, facts)

    def extra_headers(self, request: HttpRequest) -> Iterable[tuple[str, str]]:
        """CORS, where it is switched on."""
        origin, allowed = request.headers.get("origin"), self.options.cors_origins
        if origin is None or not allowed or (origin not in allowed and "*" not in allowed):
            return ()
        headers = [("access-control-allow-origin", "*" if "*" in allowed else origin), ("vary", "origin")]
        headers.append(("access-control-expose-headers", "x-request-id, retry-after"))
        if request.method == "OPTIONS":
            wanted = request.headers.get("access-control-request-headers", "")
            headers += [
                ("access-control-allow-methods", "GET, POST, OPTIONS"),
                ("access-control-allow-headers", wanted if HEADER_NAMES.fullmatch(wanted) else USUAL_HEADERS),
                ("access-control-max-age", "600"),
            ]
        return headers

    def flush_soon(self, exchange: Exchange) -> None:
        """Flush it in a turn of the loop to come: those that begin first, so that no first token waits for others."""
        if not (self._beginning or self._dirty):
            asyncio.get_running_loop().call_soon(self._flush)
        (self._beginning if exchange.begins else self._dirty).append(exchange)

    async def open_metrics(self) -> str:
        """Metrics for a client without a key: without the series of keys, and the engine is seldom asked."""
        async with self._metrics_lock:
            if time.monotonic() >= self._metrics_until:
                lines = (await self.client.metrics()).splitlines(keepends=True)
                self._open_metrics = "".join(line for line in lines if "megatoken:key_" not in line)
                self._metrics_until = time.monotonic() + OPEN_METRICS_SECONDS
        return self._open_metrics

    # inside

    def _keep(self, task: asyncio.Future[None]) -> None:
        """Hold a reference, without which a task may be collected before its end."""
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def _known_path(self, path: str) -> str | None:
        """The path of the route that answers: the same one, or one whose star stands for the rest, slashes included."""
        if path in self._paths:
            return path
        return next((known for known in self._stars if path.startswith(known[:-1]) and path != known[:-1]), None)

    def _methods(self, path: str) -> list[str]:
        methods = sorted(method for method, known in self._routes if known == path)
        return [*methods, *(["HEAD"] if "GET" in methods else []), "OPTIONS"]

    def _flush(self) -> None:
        beginning, dirty = self._beginning, self._dirty
        try:
            for _ in range(min(FLUSHED_AT_ONCE, len(beginning) + len(dirty))):
                (beginning or dirty).popleft().flush()
        finally:  # an error of one stream does not hold up the others
            if beginning or dirty:
                asyncio.get_running_loop().call_soon(self._flush)

    async def _wait(self, exchange: Exchange, answer: Awaitable[None]) -> None:
        try:
            await answer
        except Exception as error:
            self._answer_error(exchange, error)

    def _answer_error(self, exchange: Exchange, error: Exception) -> None:
        if isinstance(error, MegatokenError):
            reply_error(exchange, as_api_error(error))
            return
        self.log.note(fault(f"request {exchange.request.request_id} failed", error))
        exchange.fail(500, "the server failed to answer this request; its log says more")
        exchange.end()

    def _take_model(self, model: ServedModel) -> None:
        tokenizer = self.api.tokenizer if self.api is not None else None
        if tokenizer is None and model.tokenizer_file is not None:
            tokenizer = Tokenizer(model.tokenizer_file)
        if self.api is not None:
            self._keep(asyncio.ensure_future(self.api.close()))
        self.api = ApiContext.open(self.client, model, tokenizer, self.options, self.log.note)
        self._keep(asyncio.ensure_future(self.api.start()))
        if not self._ready:
            self._ready = True
            collect_garbage_rarely()
            self._control.send({"ready": True})

    async def run(self) -> None:
        """Serve until the parent says stop and every open request has been answered."""
        loop = asyncio.get_running_loop()
        connecting = loop.create_task(self.client.run())
        listener = await loop.create_server(
            lambda: Connection(self),
            sock=socket.socket(fileno=self.settings.listener),
            ssl=tls_context(self.options.tls_certificate, self.options.tls_key),
            backlog=BACKLOG,
        )
        sweeping = loop.create_task(self._sweep())
        await self._control.wait_for_stop()
        self.client.draining = True
        while self._exchanges:  # new connections still get an answer: 503
            await asyncio.sleep(0.02)
        listener.close()
        if self.api is not None:
            await self.api.close()
        for connection in list(self.connections):
            connection.transport.close()
        await asyncio.sleep(0.02)
        for task in (connecting, sweeping):
            task.cancel()
        self.log.close()

    async def _sweep(self) -> None:
        while True:
            await asyncio.sleep(SWEEP_SECONDS)
            now = time.monotonic()
            for connection in list(self.connections):
                connection.check(now)


def api_route(route: Callable[[ApiContext, Exchange], Awaitable[None] | None]) -> Route:
    """A route that needs a ready model, and answers what it raises in OpenAI's shape."""

    def answered(server: Server, exchange: Exchange) -> Awaitable[None] | None:
        if server.api is None:
            raise ApiError(server.client.message, HTTPStatus.SERVICE_UNAVAILABLE, retry_after=UNAVAILABLE_SECONDS)
        return route(server.api, exchange)

    return answered
