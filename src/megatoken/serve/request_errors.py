"""Why a request is answered with an error: what is wrong with its body, or what the engine raised."""

from __future__ import annotations

import re
from collections.abc import Sequence
from http import HTTPStatus

from pydantic import ValidationError

from megatoken.errors import CapacityError, MegatokenError, RequestError
from megatoken.serve.api_errors import error_body
from megatoken.serve.messages import Busy, Unavailable

UNAVAILABLE_SECONDS = 5  # after which to try again
_TYPES = ("str", "int", "float", "bool")


class ApiError(MegatokenError):
    """A request is answered with an error.

    Attributes:
        status: of HTTP.
        param: the field at fault, or None.
        code: a word for programs, or None.
        retry_after: seconds after which to try again, or None.
    """

    def __init__(
        self,
        message: str,
        status: int = 400,
        *,
        param: str | None = None,
        code: str | None = None,
        retry_after: int | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.param = param
        self.code = code
        self.retry_after = retry_after

    def body(self) -> bytes:
        """The body of an answer, and the data of an event in a stream."""
        return error_body(self.status, str(self), param=self.param, code=self.code)


def as_api_error(error: MegatokenError) -> ApiError:
    """What a client is answered when the engine, or a check of ours, raised ``error``."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, Busy):
        return ApiError(str(error), HTTPStatus.TOO_MANY_REQUESTS, retry_after=error.retry_after_seconds)
    if isinstance(error, Unavailable):
        return ApiError(str(error), HTTPStatus.SERVICE_UNAVAILABLE, retry_after=UNAVAILABLE_SECONDS)
    if isinstance(error, RequestError | CapacityError):
        return ApiError(str(error))
    return ApiError(str(error), HTTPStatus.INTERNAL_SERVER_ERROR)


def field_error(error: ValidationError) -> ApiError:
    """What is wrong with a body, with the name of its field: of several alternatives the one that fits best."""
    found = error.errors(include_url=False, include_input=False, include_context=False)
    worst = max(found, key=lambda one: (len(one["loc"]), not one["type"].endswith("_type")))
    param = field_name(worst["loc"])
    message = re.sub(r"^(Value error, |Input )", "", worst["msg"])[:500]
    if worst["type"] == "json_invalid":
        return ApiError(f"the body is not JSON: {message.removeprefix('Invalid JSON: ')}")
    if param is None:
        return ApiError("the body must be a JSON object" if worst["type"] == "model_type" else message)
    return ApiError(f"{param}: {message}", param=param)


def field_name(place: Sequence[int | str]) -> str | None:
    """Where a field stands in the body, as in ``messages.0.content``; names of alternatives are left out."""
    names = [str(one) for one in place if str(one) not in _TYPES and re.fullmatch(r"[a-z_0-9]+", str(one))]
    return ".".join(names) or None
