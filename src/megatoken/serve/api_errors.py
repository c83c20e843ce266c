"""Errors in the shape that OpenAI's clients expect."""

from __future__ import annotations

import json

_TYPES = {401: "authentication_error", 403: "permission_error", 404: "not_found_error", 429: "rate_limit_error"}


def error_body(status: int, message: str, *, param: str | None = None, code: str | None = None) -> bytes:
    """The body of an answer with an HTTP status of 400 or more."""
    kind = _TYPES.get(status, "invalid_request_error" if status < 500 else "server_error")
    return json.dumps({"error": {"message": message, "type": kind, "param": param, "code": code}}).encode()
