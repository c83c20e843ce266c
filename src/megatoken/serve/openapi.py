"""The OpenAPI document of the server, made from the schemas that check the bodies."""

from __future__ import annotations

from functools import cache
from typing import Any

from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

from megatoken import __version__
from megatoken.serve.schema_chat import ChatBody
from megatoken.serve.schema_completions import CompletionBody, DetokenizeBody, TokenizeBody
from megatoken.serve.schema_responses import ResponsesBody

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
