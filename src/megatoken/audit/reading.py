"""Opening and decoding files that nobody vouches for: bounded, regular files only, and every defect with its line."""

from __future__ import annotations

import json
import os
import re
import stat
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, NoReturn

MOST_DOCUMENT_BYTES = 16 * 2**20
DEEPEST = 20  # levels of a JSON document


@dataclass(frozen=True, slots=True)
class Damage:
    """What is wrong with a file, and the line, counted from 1; None: the file."""

    line: int | None
    what: str


class UnreadableError(Exception):
    """A file that cannot be read at all; its text says why, without the path."""


def open_regular(path: Path) -> BinaryIO:
    """Opens ``path`` for reading if it is a regular file, without waiting for pipes; UnreadableError otherwise."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    except (OSError, ValueError) as error:
        raise UnreadableError(_cause(error)) from None
    try:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise UnreadableError("is no regular file")
        return os.fdopen(descriptor, "rb", buffering=2**18)
    except BaseException:
        os.close(descriptor)
        raise


def read_text(path: Path, most_bytes: int = MOST_DOCUMENT_BYTES) -> tuple[str, list[Damage]]:
    """A small file as text, with what was wrong with its bytes; UnreadableError if it cannot or should not be read."""
    try:
        with open_regular(path) as file:
            data = file.read(most_bytes + 1)
    except OSError as error:
        raise UnreadableError(_cause(error)) from None
    if len(data) > most_bytes:
        raise UnreadableError(f"is larger than {most_bytes // 2**20} MiB, which no such file is")
    if problem := encoding_problem(data):
        raise UnreadableError(problem)
    damages = []
    if data.startswith(b"\xef\xbb\xbf"):
        data = data[3:]
        damages.append(Damage(1, "starts with a byte order mark"))
    try:
        return data.decode("utf-8"), damages
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        return data.decode("utf-8", "replace"), [*damages, Damage(line, "bytes that are not UTF-8")]


def encoding_problem(head: bytes) -> str | None:
    """Why the first bytes of a file cannot be plain text; None if they can."""
    if head.startswith((b"\xff\xfe", b"\xfe\xff")):
        return "is UTF-16; LoadGen and MLPerf's tools write plain UTF-8"
    if head.startswith((b"\x1f\x8b", b"PK\x03\x04", b"BZh", b"\xfd7zXZ", b"\x28\xb5\x2f\xfd")):
        return "is compressed; unpack it first"
    if b"\0" in head[:4096]:
        return "is binary, not text"
    return None


def parse_json(text: str) -> tuple[Any, list[str]]:
    """A JSON value, the first of keys that stand twice, and those keys; UnreadableError if it is none."""
    twice: list[str] = []

    def first_of_each(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        values: dict[str, Any] = {}
        for key, value in pairs:
            if key in values:
                twice.append(key)
            else:
                values[key] = value
        return values

    try:
        return json.loads(text, object_pairs_hook=first_of_each, parse_constant=_refuse_constant), twice
    except RecursionError:
        raise UnreadableError("is nested too deeply") from None
    except ValueError as error:
        raise UnreadableError(f"is no JSON ({error})") from None


def read_json_object(path: Path) -> tuple[Mapping[str, Any], dict[str, int], list[Damage]]:
    """A file with one JSON object: its values, the line of each key, and what is wrong with it."""
    text, damages = read_text(path)
    value, twice = parse_json(text)
    if not isinstance(value, dict):
        raise UnreadableError("is no JSON object")
    if _deeper_than(value, DEEPEST):
        raise UnreadableError(f"is nested more than {DEEPEST} deep")
    lines = key_lines(text)
    return value, lines, [*damages, *(Damage(lines.get(key), f"key {key!r} stands twice") for key in twice)]


def mapping(value: Any) -> Mapping[str, Any]:
    """A part of a document, empty where something else stands in its place."""
    return value if isinstance(value, Mapping) else {}


def _deeper_than(value: Any, levels: int) -> bool:
    layer = [value]
    for _ in range(levels):
        held = (item.values() if isinstance(item, dict) else item for item in layer if isinstance(item, dict | list))
        layer = [item for items in held for item in items]
    return any(isinstance(item, dict | list) for item in layer)


def key_lines(text: str) -> dict[str, int]:
    """The first line on which each ``"key":`` of a JSON text stands."""
    lines: dict[str, int] = {}
    for number, line in enumerate(text.split("\n"), 1):
        for key in re.findall(r'"([^"\\]{1,200})"\s*:', line):
            lines.setdefault(key, number)
    return lines


def display(path: str) -> str:
    """A path as printable text: names may hold any bytes."""
    text = os.fsencode(path).decode("utf-8", "backslashreplace")
    return "".join(
        character if character.isprintable() else character.encode("unicode_escape").decode() for character in text
    )


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is no JSON number")


def _cause(error: OSError | ValueError) -> str:
    text = os.strerror(error.errno) if isinstance(error, OSError) and error.errno else str(error)
    return f"cannot be read: {text}"
