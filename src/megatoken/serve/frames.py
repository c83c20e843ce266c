"""Server-sent events: JSON made once per stream, with a gap for each piece of text."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from json.encoder import encode_basestring
from typing import Any

DONE = b"data: [DONE]\n\n"
_COMPACT = json.JSONEncoder(ensure_ascii=False, check_circular=False, separators=(",", ":"))
_GAP = "\N{OBJECT REPLACEMENT CHARACTER}gap"


def event(data: Mapping[str, Any], name: str | None = None) -> bytes:
    """One event; ``name`` is its type where an API has several."""
    head = "" if name is None else f"event: {name}\n"
    return f"{head}data: {json_text(data)}\n\n".encode()


def json_text(value: Any) -> str:
    """Compact JSON; characters beyond ASCII stay, half surrogates do not."""
    text = _COMPACT.encode(value)
    try:
        text.encode()
    except UnicodeEncodeError:
        return json.dumps(value, separators=(",", ":"))
    return text


def text_frame(make: Callable[[str], Mapping[str, Any]], name: str | None = None) -> tuple[bytes, bytes]:
    """The bytes before and after the text in events that differ in one string only: a piece of an answer's text.

    ``make`` returns the data of the event of a piece; it is called once. ``name``: as in ``event``.
    """
    head, gap, tail = event(make(_GAP), name).partition(encode_basestring(_GAP).encode())
    assert gap, "the piece is not in the event"
    return head, tail


def text_writer(write: Callable[[bytes], None], make: Callable[[str], Mapping[str, Any]]) -> Callable[[str], None]:
    """A function that writes the event of a piece of text, arguments as of ``text_frame``."""
    (head, tail), escaped = text_frame(make), encode_basestring
    return lambda text: write(head + escaped(text).encode() + tail)
