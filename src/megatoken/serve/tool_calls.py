"""Tool calls in a model's text: how models write them, and their parts as they arrive."""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Protocol
from uuid import uuid4

_HEAD = re.compile(r'\{\s*"name"\s*:\s*("(?:[^"\\]|\\.)*")\s*,\s*"(?:parameters|arguments)"\s*:\s*(?=\{)')
_CALL_BEGIN = re.compile(r'\{\s*"name"\s*:')
_HERMES_BEGIN, _HERMES_END = "<tool_call>", "</tool_call>"
_PYTHON_TAG = "<|python_tag|>"
LONGEST_HEAD = 4096  # characters of an object in which a name and the beginning of arguments must have come


class ToolFormat(StrEnum):
    """How a model writes its calls."""

    AUTO = "auto"  # found in its chat template
    LLAMA3 = "llama3"  # {"name": ..., "parameters": {...}}; {...}
    HERMES = "hermes"  # <tool_call>{"name": ..., "arguments": {...}}</tool_call>; Qwen's too


def format_of(templates: Iterable[str]) -> ToolFormat | None:
    """The format that a model's chat templates ask for; None: none that is known."""
    text = "\n".join(templates)
    if _HERMES_BEGIN in text:
        return ToolFormat.HERMES
    return ToolFormat.LLAMA3 if _PYTHON_TAG in text or '"parameters": dictionary' in text else None


@dataclass(frozen=True, slots=True)
class CallStart:
    """A call begins."""

    index: int
    call_id: str
    name: str


@dataclass(frozen=True, slots=True)
class CallArguments:
    """A piece of the arguments, JSON, of the call that began last."""

    index: int
    text: str


@dataclass(slots=True)
class ThoughtText:
    """Text that the model thinks before its answer, or a piece of it."""

    text: str


Piece = str | ThoughtText | CallStart | CallArguments  # a string is text of the answer, outside of calls


@dataclass(slots=True)
class Call:
    """A whole call; ``arguments`` is JSON."""

    call_id: str
    name: str
    arguments: str = ""


class CallParser(Protocol):
    """Separates calls from text."""

    def add(self, text: str) -> list[Piece]:
        """What a piece of the answer's text brings."""

    def end(self) -> list[Piece]:
        """What was held back, when the answer has ended, unless it can only be the beginning of a call."""


def whole_parts(pieces: Iterable[Piece]) -> list[str | ThoughtText | Call]:
    """Thoughts, texts and calls in their order."""
    parts: list[str | ThoughtText | Call] = []
    for piece in pieces:
        last = parts[-1] if parts else None
        if isinstance(piece, CallStart):
            parts.append(Call(piece.call_id, piece.name))
        elif isinstance(piece, CallArguments):
            assert isinstance(last, Call)
            last.arguments += piece.text
        elif isinstance(piece, ThoughtText):
            if isinstance(last, ThoughtText):
                last.text += piece.text
            else:
                parts.append(ThoughtText(piece.text))
        elif isinstance(last, str):
            parts[-1] = last + piece
        else:
            parts.append(piece)
    return parts


def first_call_only(pieces: Iterable[Piece]) -> list[Piece]:
    """The pieces of an answer that may make one call: what it brings of others is left out."""
    return [piece for piece in pieces if not isinstance(piece, CallStart | CallArguments) or piece.index == 0]


def call_parser(tool_format: ToolFormat, names: Collection[str]) -> CallParser:
    """A parser of an answer that may call the functions ``names``."""
    return _HermesParser(names) if tool_format is ToolFormat.HERMES else _ObjectsParser(names, between=" \t\r\n;")


def forced_parser() -> CallParser:
    """A parser of the answer to ``forced_schema``: a JSON array of calls."""
    return _ObjectsParser(None, between=" \t\r\n,[]")


def forced_schema(functions: Sequence[Mapping[str, Any]], *, several: bool) -> dict[str, Any]:
    """The JSON schema of an answer that calls at least one of these functions.

    Args:
        functions: each with ``name`` and perhaps ``parameters``, a JSON schema.
        several: it may hold more than one call.
    """
    calls: list[dict[str, Any]] = []
    definitions: dict[str, Any] = {}
    for number, function in enumerate(functions):
        root = f"#/$defs/{number}"
        definitions[str(number)] = _moved(function.get("parameters") or {"type": "object"}, root)
        properties = {"name": {"type": "string", "enum": [function["name"]]}, "parameters": {"$ref": root}}
        calls.append(
            {
                "type": "object",
                "properties": properties,
                "required": ["name", "parameters"],
                "additionalProperties": False,
            }
        )
    item = calls[0] if len(calls) == 1 else {"anyOf": calls}
    schema: dict[str, Any] = {"type": "array", "minItems": 1, "items": item, "$defs": definitions}
    if not several:
        schema["maxItems"] = 1
    return schema


def _moved(schema: Any, root: str) -> Any:
    """A JSON schema whose references begin at ``root``, because the schema is no longer a document of its own."""
    if isinstance(schema, list):
        return [_moved(one, root) for one in schema]
    if not isinstance(schema, dict):
        return schema
    return {
        key: root + value[1:] if key == "$ref" and isinstance(value, str) and value[:1] == "#" else _moved(value, root)
        for key, value in schema.items()
    }


class NamedParser:
    """The whole answer is the arguments of one function."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._begun = False

    def add(self, text: str) -> list[Piece]:
        """A piece of the arguments."""
        pieces: list[Piece] = [CallArguments(0, text)] if text else []
        if not self._begun:
            self._begun = True
            pieces.insert(0, CallStart(0, new_call_id(), self._name))
        return pieces

    def end(self) -> list[Piece]:
        """Nothing is held back."""
        return []


class _Object:
    """One call, as its JSON object arrives."""

    def __init__(self, index: int, names: Collection[str] | None) -> None:
        self._index = index
        self._names = names
        self._depth = 0
        self._in_string = self._escaped = False
        self._inner_ends: list[int] = []  # where values of the object that are objects or arrays end
        self._arguments: int | None = None  # where they begin
        self._sent = 0
        self.text = ""
        self.complete = False
        self.refused = False  # it is no call

    @property
    def begun(self) -> bool:
        """Whether a call was reported."""
        return self._arguments is not None

    def add(self, text: str) -> tuple[list[Piece], str]:
        """What the text brings, and what follows the object in it."""
        used = self._scan(text)
        self.text += text[:used]
        pieces: list[Piece] = []
        if self._arguments is None:
            head = _HEAD.match(self.text)
            if head is not None:
                self._start(head[1], head.end(), pieces)
            elif self.complete:
                self._take_whole(pieces)
            elif len(self.text) > LONGEST_HEAD:
                self.refused = True
        if self._arguments is not None and self._sent >= self._arguments:
            ends = [end for end in self._inner_ends if end > self._arguments]
            until = ends[0] if ends else len(self.text)
            if until > self._sent:
                pieces.append(CallArguments(self._index, self.text[self._sent : until]))
                self._sent = until
        return pieces, text[used:]

    def _start(self, quoted: str, at: int, pieces: list[Piece]) -> None:
        name = _parsed(quoted)
        if not isinstance(name, str) or (self._names is not None and name not in self._names):
            self.refused = True
            return
        self._arguments = self._sent = at
        pieces.append(CallStart(self._index, new_call_id(), name))

    def _take_whole(self, pieces: list[Piece]) -> None:
        """The members came in another order, or the arguments as a string."""
        value = _parsed(self.text)
        name = value.get("name") if isinstance(value, dict) else None
        if not isinstance(name, str) or (self._names is not None and name not in self._names):
            self.refused = True
            return
        arguments = value.get("parameters", value.get("arguments", {}))
        if not isinstance(arguments, str) or not isinstance(_parsed(arguments), dict):  # some models quote the object
            arguments = json.dumps(arguments)
        self._arguments, self._sent = len(self.text), -1
        pieces += [CallStart(self._index, new_call_id(), name), CallArguments(self._index, arguments)]

    def _scan(self, text: str) -> int:
        """Follow the structure; returns how many characters belong to the object."""
        before = len(self.text)
        for at, character in enumerate(text, 1):
            if self._in_string:
                if self._escaped:
                    self._escaped = False
                elif character == "\\":
                    self._escaped = True
                elif character == '"':
                    self._in_string = False
            elif character == '"':
                self._in_string = True
            elif character in "{[":
                self._depth += 1
            elif character in "}]":
                self._depth -= 1
                if self._depth == 1:
                    self._inner_ends.append(before + at)
                elif self._depth == 0:
                    self.complete = True
                    return at
        return len(text)


class _ObjectsParser:
    """Calls one after the other from the beginning of the answer on; an answer that begins otherwise is text."""

    def __init__(self, names: Collection[str] | None, between: str) -> None:
        """``names``: of functions, other objects are text; None: any. ``between``: characters around objects."""
        self._names = names
        self._between = between
        self._calls = 0
        self._object: _Object | None = None
        self._held = ""  # before the first object
        self._is_text = False

    def add(self, text: str) -> list[Piece]:
        """What a piece of the answer's text brings."""
        pieces: list[Piece] = []
        while text:
            if self._is_text:
                return [*pieces, text]
            if self._object is None:
                self._held += text
                stripped = self._held.lstrip(self._between).removeprefix(_PYTHON_TAG).lstrip(self._between)
                if not stripped or _PYTHON_TAG.startswith(stripped):
                    return pieces
                if not stripped.startswith("{"):
                    self._is_text = True
                    text, self._held = self._held, ""
                    continue
                self._object, text, self._held = _Object(self._calls, self._names), stripped, ""
            new, text = self._object.add(text)
            pieces += new
            if self._object.refused:
                text = self._object.text + text
                self._is_text, self._object = True, None
            elif self._object.complete:
                self._calls += 1
                self._object = None
        return pieces

    def end(self) -> list[Piece]:
        """What was held back, when the answer has ended, unless it can only be the beginning of a call."""
        if self._names is None:  # held to calls, so that anything else was cut off
            return []
        if self._object is not None and not self._object.begun:
            return [] if _CALL_BEGIN.match(self._object.text) else [self._object.text]
        return [self._held] if self._held.strip(self._between) and self._object is None else []


class _HermesParser:
    """Calls between tags, text around them."""

    def __init__(self, names: Collection[str]) -> None:
        """``names``: of functions; a call of another one is text."""
        self._names = names
        self._calls = 0
        self._held = ""
        self._after_call = False  # only white space and the end tag have come since a call
        self._object: _Object | None = None

    def add(self, text: str) -> list[Piece]:
        """What a piece of the answer's text brings."""
        pieces: list[Piece] = []
        self._held += text
        while self._held:
            if self._object is not None:
                if not self._object.text:
                    self._held = self._held.lstrip()
                    if self._held and self._held[0] != "{":
                        pieces.append(_HERMES_BEGIN)
                        self._object = None
                        continue
                new, self._held = self._object.add(self._held)
                pieces += new
                if self._object.refused:
                    pieces.append(_HERMES_BEGIN + self._object.text)
                    self._object = None
                elif self._object.complete:
                    self._calls += 1
                    self._object, self._after_call = None, True
                continue
            if self._after_call:
                self._held = self._held.lstrip()
                if self._held.startswith(_HERMES_END):
                    self._held = self._held.removeprefix(_HERMES_END)
                    continue
                if _HERMES_END.startswith(self._held):
                    break
                self._after_call = False
            before, tag, after = self._held.partition(_HERMES_BEGIN)
            if tag:
                pieces += [before] if before else []
                self._object, self._held = _Object(self._calls, self._names), after
                continue
            certain = len(self._held) - partial_tag(self._held, _HERMES_BEGIN)
            pieces += [self._held[:certain]] if certain else []
            self._held = self._held[certain:]
            break
        return pieces

    def end(self) -> list[Piece]:
        """What was held back, when the answer has ended, unless it can only be the beginning of a call."""
        if self._object is not None:
            return []
        return [self._held] if self._held and not self._after_call else []


def partial_tag(text: str, tag: str) -> int:
    """How many characters at the end of ``text`` may be the beginning of ``tag``."""
    return next((size for size in range(len(tag) - 1, 0, -1) if text.endswith(tag[:size])), 0)


def _parsed(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None


def new_call_id() -> str:
    """An id for a call."""
    return f"call_{uuid4().hex[:24]}"
