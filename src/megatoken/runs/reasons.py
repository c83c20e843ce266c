"""Every reason, shortfall, doubt and note of a run: a stable code, typed fields, and the one sentence made from them.

The sentences are written in ``data/messages.json`` only. Code decides by ``code`` and fields; ``message`` is for
people, and its wording may change between versions.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from string import Formatter
from typing import Any, TypedDict, cast

from megatoken.text import count_of, precise


class Reason(TypedDict):
    """A stable code, its sentence, and the fields that the code has in ``TEMPLATES``, as keys of the same mapping."""

    code: str
    message: str


class Shortfall(Reason):
    """A rule that is not met, or a doubt about the measurement, with the value found and the value required."""

    found: float | str
    required: float | str


# Kind -> section -> code -> templates. The first template whose fields are all given makes the message. ``_Formatter``
# has the formats of fields.
_MESSAGES: Mapping[str, Mapping[str, Mapping[str, list[str]]]] = json.loads(
    (Path(__file__).parents[1] / "data" / "messages.json").read_text(encoding="utf-8")
)


def _templates(kind: str) -> Mapping[str, list[str]]:
    return {code: templates for section in _MESSAGES[kind].values() for code, templates in section.items()}


REASONS = _templates("reasons")
TEMPLATES = {**REASONS, **_templates("findings"), **_templates("notes")}
"""Messages by code: of runs, then of compliance tests and evaluations, then notes."""
CAUSES = ("SERVER_FAILED", "REQUESTS_FAILED")
"""Notes that say why samples failed."""
OF_CLIENT = ("CLIENT_SATURATED", "CLIENT_LIMIT", "SEND_LAG")
"""Reasons and doubts that say that the client was the limit, not what it measured; the most certain first."""


def reason(code: str, **fields: Any) -> Reason:
    """The reason with this code of ``TEMPLATES`` and its fields; with the field ``node`` the message begins with it.

    Raises:
        KeyError: the code is unknown, or no template of it has only fields that are given.
    """
    given = {name: value for name, value in fields.items() if value is not None}
    template = next((one for one in TEMPLATES[code] if _names(one) <= given.keys()), None)
    if template is None:
        raise KeyError(f"{code} needs other fields than {', '.join(fields) or 'none'}")
    message = _Formatter().vformat(template, (), given)
    if "node" in given:
        message = f"{given['node']}: {message}"
    return cast("Reason", {"code": code, "message": message, **fields})


def shortfall(code: str, found: float | str, required: float | str, **fields: Any) -> Shortfall:
    """A reason with the value found and the value required."""
    return cast("Shortfall", reason(code, found=found, required=required, **fields))


def on_node(one: Reason, node: str) -> Reason:
    """The same reason, of one node of several."""
    return cast("Reason", {**one, "node": node, "message": f"{node}: {one['message']}"})


def _names(template: str) -> set[str]:
    return {name for _, name, _, _ in Formatter().parse(template) if name}


class _Formatter(Formatter):
    """Python's formats, and five more.

    ``precise`` is ``text.precise``; ``ms`` is of seconds; ``percent`` and ``percent.1`` are of shares; ``list`` joins
    texts; ``count query/queries`` is a number of things; ``change`` is a share with its interval.
    """

    def format_field(self, value: Any, format_spec: str) -> str:
        kind, _, words = format_spec.partition(" ")
        if kind == "count":
            one, _, many = words.partition("/")
            return count_of(value, one, many or None)
        if kind == "precise":
            return precise(value)
        if kind == "ms":
            return f"{precise(value * 1e3)} ms"
        if kind.startswith("percent"):
            return f"{100 * value:.{kind.removeprefix('percent').removeprefix('.') or 0}f} %"
        if kind == "list":
            return "; ".join(map(str, value))
        if kind == "change":
            return _change(value)
        return str(super().format_field(value, format_spec))


def _change(change: Mapping[str, float]) -> str:
    share, low, high = (100 * change[name] for name in ("change_share", "low_share", "high_share"))
    known = math.isfinite(low) and math.isfinite(high)
    return f"{share:+.1f} % ({f'{low:+.1f} to {high:+.1f} %' if known else 'too few windows for an interval'})"
