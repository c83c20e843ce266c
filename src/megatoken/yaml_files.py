"""YAML as people mean it: version 1.2's core schema in place of PyYAML's 1.1.

Version 1.1 takes 010 for 8, 1:30 for 90, 1_000 for 1000, yes and no for booleans, 1e6 for text. Here 010 is 10, 1e6 is
a number, 0o10 is 8 as it says, and all the rest is text, which a schema that wants a number refuses.
"""

from __future__ import annotations

import re
import stat
from collections.abc import Iterable
from pathlib import Path
from typing import Any, TypeVar, get_args

import yaml
from pydantic import BaseModel, ConfigDict, ValidationError

from megatoken.errors import ConfigError
from megatoken.text import nearest

_TAG = "tag:yaml.org,2002:"
_RESOLVERS = (  # tag, what it looks like, first letters; chapter 10.3.2 of the specification
    ("null", r"~|null|Null|NULL|", ["~", "n", "N", ""]),
    ("bool", r"true|True|TRUE|false|False|FALSE", list("tTfF")),
    ("int", r"[-+]?[0-9]+|0o[0-7]+|0x[0-9a-fA-F]+", list("-+0123456789")),
    ("float", r"[-+]?(?:\.[0-9]+|[0-9]+(?:\.[0-9]*)?)(?:[eE][-+]?[0-9]+)?", list("-+.0123456789")),
    ("float", r"[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN)", list("-+.")),
)

_MEND_FILE = "correct it and save the file as UTF-8 text"
_MEND_PLACE = "correct it there or just above: indent with spaces, quote text that has signs such as : # [ { @"


class CoreLoader(yaml.SafeLoader):
    """PyYAML's safe loader with the core schema of YAML 1.2."""

    yaml_implicit_resolvers: dict[str, list[tuple[str, re.Pattern[str]]]] = {}

    def construct_whole_number(self, node: yaml.ScalarNode) -> int:
        """An int in the base that its prefix says; ValueError where a tag lies about the text."""
        text = self.construct_scalar(node)
        base = {"0o": 8, "0x": 16}.get(text[:2], 10)
        return int(text[2:] if base != 10 else text, base)

    def construct_real_number(self, node: yaml.ScalarNode) -> float:
        """A float, finite or not; ValueError where a tag lies about the text."""
        return float(self.construct_scalar(node).lower().replace(".inf", "inf").replace(".nan", "nan"))


for _name, _pattern, _letters in _RESOLVERS:
    CoreLoader.add_implicit_resolver(f"{_TAG}{_name}", re.compile(f"(?:{_pattern})$"), _letters)
CoreLoader.add_constructor(f"{_TAG}int", CoreLoader.construct_whole_number)
CoreLoader.add_constructor(f"{_TAG}float", CoreLoader.construct_real_number)


def not_yaml(file: object, error: Exception) -> str:
    """One line on a ``file`` that cannot be parsed: where, what and how to mend it, which a ``note`` may say better."""
    mark, note = getattr(error, "problem_mark", None), getattr(error, "note", None)
    problem = getattr(error, "problem", None) or " ".join(str(error).split())
    place = f"{file}:{mark.line + 1}" if mark else f"{file}"
    if note:
        return f"{place}: {problem}; {note}"
    return f"{place}: not YAML: {problem:.200}; {_MEND_PLACE if mark else _MEND_FILE}"


def load_yaml(text: str) -> Any:
    """The one document of ``text``. Raises yaml.YAMLError, ValueError."""
    return yaml.load(text, Loader=CoreLoader)


LARGEST_FILE_BYTES = 1 << 20
LONGEST_MESSAGE = 400

Place = tuple[str | int, ...]


class Strict(BaseModel):
    """Base of the schemas of files: unknown keys and numbers that are none are refused."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False, strict=True)


_Schema = TypeVar("_Schema", bound=Strict)


def read_strict(path: Path, schema: type[_Schema]) -> _Schema:
    """The content of a YAML file as ``schema``.

    Raises:
        ConfigError: unreadable, not YAML, an unknown or repeated key, a value of the wrong kind; with its line.
    """
    data, lines = _read(path)
    try:
        return schema.model_validate(data)
    except ValidationError as error:
        errors = error.errors(include_url=False)
        first = next(
            (one for one in errors if one["type"] == "extra_forbidden"), errors[0]
        )  # it explains a missing one
        raise _refusal(path, *_explain(schema, lines, first["loc"], first["type"], first["msg"])) from None


def one_line(text: str) -> str:
    """``text`` of a stranger's file, fit for an error: no control characters, not endless."""
    shown = "".join(letter if letter.isprintable() else "?" for letter in text)
    return shown if len(shown) <= LONGEST_MESSAGE else f"{shown[:LONGEST_MESSAGE]}..."


def _refusal(path: Path, line: int | None, text: str) -> ConfigError:
    return ConfigError(f"{path}:{line}: {one_line(text)}" if line else f"{path}: {one_line(text)}")


def _read(path: Path) -> tuple[Any, dict[Place, int]]:
    try:
        status = path.stat()
        if not stat.S_ISREG(status.st_mode):  # a pipe would wait for ever
            raise _refusal(path, None, "cannot be read: it is no regular file; give a YAML file")
        if status.st_size > LARGEST_FILE_BYTES:
            raise _refusal(path, None, f"larger than {LARGEST_FILE_BYTES:,} bytes; this is no file of settings")
        loader = CoreLoader(path.read_text(encoding="utf-8"))
        root = loader.get_single_node()
        lines: dict[Place, int] = {}
        return ({} if root is None else _plain(loader, root, (), lines, path, set())), lines
    except OSError as error:
        raise _refusal(path, None, f"cannot be read: {error.strerror}; give a YAML file") from None
    except UnicodeDecodeError as error:
        raise _refusal(path, None, f"not UTF-8 at byte {error.start}; save it as UTF-8") from None
    except (yaml.YAMLError, ValueError, OverflowError) as error:
        raise ConfigError(not_yaml(path, error)) from None
    except RecursionError:
        raise _refusal(path, None, "nested too deeply; write fewer levels") from None


def _plain(
    loader: yaml.SafeLoader, node: yaml.Node, place: Place, lines: dict[Place, int], path: Path, seen: set[int]
) -> Any:
    """Plain data of ``node``; notes the line of every place in ``lines``. Aliases are refused: they can explode."""
    line = node.start_mark.line + 1
    lines.setdefault(place, line)
    if id(node) in seen:
        raise _refusal(path, line, "aliases (*name) are not supported; write the value out")
    if isinstance(node, yaml.ScalarNode):
        return loader.construct_object(node)
    seen.add(id(node))
    if isinstance(node, yaml.SequenceNode):
        return [_plain(loader, item, (*place, at), lines, path, seen) for at, item in enumerate(node.value)]
    data: dict[str, Any] = {}
    for key_node, value_node in node.value:
        key = key_node.value if isinstance(key_node, yaml.ScalarNode) else "?"
        lines[*place, key] = key_node.start_mark.line + 1
        if key in data:
            raise _refusal(path, lines[*place, key], f"key '{key}' is given twice; keep one")
        data[key] = _plain(loader, value_node, (*place, key), lines, path, seen)
    return data


def _explain(schema: type[Strict], lines: dict[Place, int], at: Place, kind: str, message: str) -> tuple[int, str]:
    """Line and text of one error of pydantic."""
    line = next((lines[at[:length]] for length in range(len(at), -1, -1) if at[:length] in lines), 1)
    key = ".".join(map(str, at))
    if kind == "extra_forbidden":
        known = _keys(schema, at[:-1])
        meant = nearest(str(at[-1]), known)
        return line, f"unknown key '{key}'; " + (f"did you mean {meant}?" if meant else f"known are {', '.join(known)}")
    if kind == "missing":
        return line, f"key '{key}' is missing; add it"
    subject = f"'{key}'" if key else "the file"
    return line, f"{subject}: {message}"


def _keys(schema: Any, at: Iterable[str | int]) -> list[str]:
    """Keys that the section at ``at`` of ``schema`` has."""
    for part in at:
        if isinstance(schema, type) and issubclass(schema, BaseModel):
            schema = schema.model_fields[str(part)].annotation
        else:
            schema = next((one for one in reversed(get_args(schema)) if one is not type(None)), None)
    return list(schema.model_fields) if isinstance(schema, type) and issubclass(schema, BaseModel) else []
