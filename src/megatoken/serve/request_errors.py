"""Why a request is answered with an error: what is wrong with its body, or what the engine raised."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from http import HTTPStatus

from pydantic import ValidationError
from pydantic_core import ErrorDetails, PydanticCustomError

from megatoken.errors import CapacityError, MegatokenError, RequestError
from megatoken.serve.engine_client import Refused
from megatoken.serve.exchange import error_body
from megatoken.serve.messages import Busy, Unavailable
from megatoken.yaml_files import DEMANDS

UNAVAILABLE_SECONDS = 5  # after which to try again
_WRONG_FIELD = "wrong_field"
_KINDS = {  # of values, by pydantic's type of error
    "bool_type": "true or false",
    "dict_type": "an object",
    "float_type": "a number",
    "int_type": "an integer",
    "list_type": "a list",
    "model_type": "an object",
    "string_type": "a string",
}
_DEMANDS = DEMANDS | {
    "missing": "is required",
    "string_pattern_mismatch": "must match {pattern}",
    "string_too_long": "must have at most {max_length:,} characters",
    "too_long": "must have at most {max_length:,} items",
    "too_short": "must not be empty",
    "union_tag_invalid": "its type must be one of {expected_tags}",
}
# In the place of an error, next to names of fields: the alternatives that a value could have been.
_ALTERNATIVES = frozenset({"str", "int", "float", "bool", "message", "function_call", "function_call_output"})


class ApiError(MegatokenError):
    """A request is answered with an error."""

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
        self.status = status  # of HTTP
        self.param = param  # the field at fault, or None
        self.code = code  # a word for programs, or None
        self.retry_after = retry_after  # seconds after which to try again, or None

    def renamed(self, names: Mapping[str, str]) -> ApiError:
        """The same error in the words of a route whose fields have other names.

        ``names``: by their names here, which the message begins with. A name with an underscore is no word of the
        language, so it is replaced in all of the message.
        """
        if self.param is None:
            param, message = None, str(self)
        else:
            name, dot, rest = self.param.partition(".")
            param = names.get(name, name + dot + rest)
            message = re.sub(rf"^{re.escape(self.param)}(?=:)", param, str(self))
        for name, new in names.items():
            if "_" in name:
                message = re.sub(rf"\b{name}\b", new, message)
        return ApiError(message, self.status, param=param, code=self.code, retry_after=self.retry_after)

    def body(self) -> bytes:
        """The body of an answer, and the data of an event in a stream."""
        return error_body(self.status, str(self), param=self.param, code=self.code)


def as_api_error(error: MegatokenError) -> ApiError:
    """What a client is answered when the engine, or a check of ours, raised ``error``."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, Refused):
        return ApiError(str(error), error.status, retry_after=error.retry_after_seconds)
    if isinstance(error, Busy):
        return ApiError(str(error), HTTPStatus.TOO_MANY_REQUESTS, retry_after=error.retry_after_seconds)
    if isinstance(error, Unavailable):
        return ApiError(str(error), HTTPStatus.SERVICE_UNAVAILABLE, retry_after=UNAVAILABLE_SECONDS)
    if isinstance(error, RequestError):
        return ApiError(str(error), param=error.field)
    if isinstance(error, CapacityError):
        return ApiError(str(error), param="prompt", code="context_length_exceeded")
    return ApiError(str(error), HTTPStatus.INTERNAL_SERVER_ERROR)


def wrong_field(field: str, message: str) -> PydanticCustomError:
    """The error that a validator of a body raises about one of its fields."""
    return PydanticCustomError(_WRONG_FIELD, "{message}", {"field": field, "message": message})


def field_error(error: ValidationError) -> ApiError:
    """What is wrong with a body, with the name of its field: of several alternatives the one that fits best."""
    found = error.errors(include_url=False, include_input=False)
    worst = max(found, key=lambda one: (len(one["loc"]), one["type"] not in _KINDS))
    param = worst["ctx"]["field"] if worst["type"] == _WRONG_FIELD else field_name(worst["loc"])
    if worst["type"] == "json_invalid":
        return ApiError(f"the body is not JSON: {worst['msg'].removeprefix('Invalid JSON: ')}"[:500])
    if worst["type"] in _KINDS:
        kinds = [_KINDS[one["type"]] for one in found if one["type"] in _KINDS and field_name(one["loc"]) == param]
        message = f"must be {' or '.join(dict.fromkeys(kinds))}"
    else:
        message = _demand(worst)
    if param is None:
        return ApiError("the body must be a JSON object")
    return ApiError(f"{param}: {message}", param=param)


def _demand(error: ErrorDetails) -> str:
    """What a value must be."""
    values = error.get("ctx", {})
    if error["type"] == "value_error":
        return str(values["error"])
    shown = {name: f"{value:g}" if isinstance(value, float) else value for name, value in values.items()}
    demand = _DEMANDS[error["type"]].format(**shown) if error["type"] in _DEMANDS else error["msg"]
    return demand[:500]


def field_name(place: Sequence[int | str]) -> str | None:
    """Where a field stands in the body, as in ``messages.0.content``; names of alternatives are left out."""
    left_out = _ALTERNATIVES | {"reasoning"} if place[:1] == ("input",) else _ALTERNATIVES  # a kind of item, there
    names = [str(one) for one in place if str(one) not in left_out and re.fullmatch(r"[a-z_0-9]+", str(one))]
    return ".".join(names) or None
