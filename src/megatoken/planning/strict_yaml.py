"""YAML files against a schema: every mistake with file, line and the nearest right key."""

from __future__ import annotations

import stat
from collections.abc import Iterable
from pathlib import Path
from typing import Any, TypeVar, get_args

import yaml
from pydantic import BaseModel, ConfigDict, ValidationError

from megatoken.config import nearest
from megatoken.errors import ConfigError
from megatoken.yaml_core import CoreLoader, not_yaml

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
