"""/v1/models, /tokenize, /detokenize and /openapi.json."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from functools import cache
from typing import Any
from urllib.parse import unquote

from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

from megatoken import __version__
from megatoken.engine.text_stream import TextStream
from megatoken.serve import frames
from megatoken.serve.chat_prompt import chat_text
from megatoken.serve.context import ApiContext
from megatoken.serve.exchange import Exchange
from megatoken.serve.logprobs import TokenNames
from megatoken.serve.request_errors import ApiError
from megatoken.serve.schema_chat import ChatBody
from megatoken.serve.schema_common import parse_body
from megatoken.serve.schema_completions import CompletionBody, DetokenizeBody, TokenizeBody
from megatoken.serve.schema_responses import ResponsesBody
from megatoken.serve.server import api_route

PART_TOKENS = 4096  # handled at a time, so that a long list does not hold up the streams


@api_route
async def models(api: ApiContext, exchange: Exchange) -> None:
    """The list of models: one."""
    _reply(exchange, {"object": "list", "data": [_model(api)]})


@api_route
async def model(api: ApiContext, exchange: Exchange) -> None:
    """One model by its name, the rest of the path."""
    name = unquote(exchange.request.path.removeprefix("/v1/models/"))
    if name != api.model.name:
        raise ApiError(f"the model {name[:200]!r} is not served here", 404, param="model", code="model_not_found")
    _reply(exchange, _model(api))


@api_route
async def tokenize(api: ApiContext, exchange: Exchange) -> None:
    """Token ids of a text or a chat."""
    body = parse_body(TokenizeBody, exchange.take_body())
    api.check_body(body)
    if body.messages is not None:
        variables = body.chat_template_kwargs
        text = await chat_text(api, body, body.messages, exchange.tenant_name, tools=body.tools, variables=variables)
        param, add_special = "messages", body.add_special_tokens or False
    else:
        text, param, add_special = body.prompt or "", "prompt", body.add_special_tokens is not False
    token_ids = await api.encode(text, add_special=add_special, param=param)
    members = [
        f'"count":{len(token_ids)},"max_model_len":{api.model.max_length}',
        f'"tokens":{await _array(token_ids, lambda one: one)}',
    ]
    if body.return_token_strs:
        if len(token_ids) > api.model.max_length:
            raise ApiError(
                f"return_token_strs: the text has {len(token_ids):,} tokens, more than the model's context of "
                f"{api.model.max_length:,}; leave it out",
                param="return_token_strs",
            )
        members.append(f'"token_strs":{await _array(token_ids, TokenNames(api.tokenizer, as_ids=False).text)}')
    exchange.reply(200, f"{{{','.join(members)}}}".encode())


async def _array(token_ids: list[int], of: Callable[[int], int | str]) -> str:
    """A JSON array of what ``of`` makes of each token, made in parts."""
    parts = []
    for start in range(0, len(token_ids), PART_TOKENS):
        parts.append(frames.json_text([of(one) for one in token_ids[start : start + PART_TOKENS]])[1:-1])
        await asyncio.sleep(0)
    return f"[{','.join(parts)}]"


@api_route
async def detokenize(api: ApiContext, exchange: Exchange) -> None:
    """Text of token ids, special tokens included."""
    body = parse_body(DetokenizeBody, exchange.take_body())
    api.check_body(body)
    if api.tokenizer is None:
        raise ApiError("the model has no tokenizer", param="tokens")
    if len(body.tokens) > api.model.max_length:
        raise ApiError(
            f"tokens: {len(body.tokens):,} are more than the model's context of {api.model.max_length:,}",
            param="tokens",
            code="context_length_exceeded",
        )
    api.check_known(body.tokens, "tokens")
    stream = TextStream(api.tokenizer, keep_special=True)
    text = ""
    for start in range(0, len(body.tokens), PART_TOKENS):
        text += stream.add(body.tokens[start : start + PART_TOKENS])
        await asyncio.sleep(0)
    _reply(exchange, {"prompt": text + stream.flush()})


@api_route
async def openapi(api: ApiContext, exchange: Exchange) -> None:
    """The OpenAPI document."""
    exchange.reply(200, json.dumps(openapi_document()).encode())


def _model(api: ApiContext) -> dict[str, Any]:
    return {
        "id": api.model.name,
        "object": "model",
        "created": api.model.created,
        "owned_by": "megatoken",
        "max_model_len": api.model.max_length,
    }


def _reply(exchange: Exchange, value: Any) -> None:
    exchange.reply(200, frames.json_text(value).encode())


_BODIES: dict[str, tuple[type[BaseModel], str]] = {
    "/v1/chat/completions": (ChatBody, "Answer a chat"),
    "/v1/completions": (CompletionBody, "Continue prompts"),
    "/v1/responses": (ResponsesBody, "Answer an input, without a store of earlier answers"),
    "/tokenize": (TokenizeBody, "Token ids of a text or a chat"),
    "/detokenize": (DetokenizeBody, "Text of token ids"),
}
_PAGES = {
    "/v1/models": "The model that is served",
    "/health": "200 while requests are answered, else 503",
    "/metrics": "Metrics in Prometheus's text format",
    "/version": "The version of megatoken",
    "/openapi.json": "This document",
}


@cache
def openapi_document() -> dict[str, Any]:
    """The document."""
    place = "#/components/schemas/{model}"
    kinds = [(body, "validation") for body, _ in _BODIES.values()]
    _, definitions = models_json_schema(kinds, ref_template=place)  # type: ignore[arg-type]
    paths: dict[str, Any] = {}
    for path, (body, summary) in _BODIES.items():
        content = {"application/json": {"schema": {"$ref": place.format(model=body.__name__)}}}
        operation = {"summary": summary, "requestBody": {"required": True, "content": content}, "responses": _answers()}
        paths[path] = {"post": operation}
    for path, summary in _PAGES.items():
        paths[path] = {"get": {"summary": summary, "responses": _answers()}}
    return {
        "openapi": "3.1.0",
        "info": {"title": "megatoken", "version": __version__},
        "paths": paths,
        "components": {
            "schemas": definitions["$defs"],
            "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
        },
        "security": [{"key": []}],
    }


def _answers() -> dict[str, Any]:
    error = {"description": "an error: error.message says what is wrong and how to fix it, error.param where"}
    return {"200": {"description": "the answer"}, "default": error}
