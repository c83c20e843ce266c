"""Which route answers which method and path. A path that ends in ``/*`` takes any rest of a path."""

from __future__ import annotations

import json
from collections.abc import Mapping

from megatoken import __version__
from megatoken.serve.chat import chat_completions
from megatoken.serve.completions import completions
from megatoken.serve.exchange import Exchange
from megatoken.serve.models import detokenize, model, models, openapi, tokenize
from megatoken.serve.responses import responses
from megatoken.serve.server import Route, Server

METRICS_TYPE = "text/plain; version=0.0.4; charset=utf-8"


def health(server: Server, exchange: Exchange) -> None:
    """200 while requests are answered, else 503, with the reason."""
    state = server.client.health
    headers = [] if state.serves else [("retry-after", "5")]
    body: dict[str, object] = {"status": state.value, "message": server.client.message}
    if (replicas := server.client.replicas) is not None:
        body |= {"replicas": replicas.expected, "replicas_serving": replicas.serving, "share_left": replicas.share}
    exchange.reply(200 if state.serves else 503, json.dumps(body).encode(), headers=headers)


def version(server: Server, exchange: Exchange) -> None:
    """The version of megatoken, and what makes tokens up where no model computes: load tools record both."""
    stand_in = server.options.stand_in
    exchange.reply(200, json.dumps({"version": __version__ + (f"+{stand_in}" if stand_in else "")}).encode())


async def metrics(server: Server, exchange: Exchange) -> None:
    """Metrics of the engine process in Prometheus's text format; those of single keys only to clients with a key."""
    text = await (server.open_metrics() if exchange.request.tenant is None else server.client.metrics())
    exchange.reply(200, text.encode(), METRICS_TYPE)


ROUTES: Mapping[tuple[str, str], Route] = {
    ("GET", "/health"): health,
    ("GET", "/ping"): health,
    ("GET", "/version"): version,
    ("GET", "/metrics"): metrics,
    ("GET", "/v1/models"): models,
    ("GET", "/v1/models/*"): model,
    ("POST", "/v1/chat/completions"): chat_completions,
    ("POST", "/v1/completions"): completions,
    ("POST", "/v1/responses"): responses,
    ("POST", "/tokenize"): tokenize,
    ("POST", "/detokenize"): detokenize,
    ("GET", "/openapi.json"): openapi,
}
