"""YAML files against a schema: every mistake with file, line and the nearest right key."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any, TypeVar, get_args

import yaml
from pydantic import BaseModel, ConfigDict, ValidationError

from megatoken.config import nearest
from megatoken.errors import ConfigError

LARGEST_FILE_BYTES = 1 << 20

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
        raise ConfigError(_explain(path, schema, lines, first["loc"], first["type"], first["msg"])) from None


def _read(path: Path) -> tuple[Any, dict[Place, int]]:
    try:
        if path.stat().st_size > LARGEST_FILE_BYTES:
            raise ConfigError(f"{path}: larger than {LARGEST_FILE_BYTES:,} bytes; this is no file of settings")
        loader = yaml.SafeLoader(path.read_text(encoding="utf-8"))
        root = loader.get_single_node()
        lines: dict[Place, int] = {}
        return ({} if root is None else _plain(loader, root, (), lines, str(path), set())), lines
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: not UTF-8 at byte {error.start}") from None
    except yaml.MarkedYAMLError as error:
        line = error.problem_mark.line + 1 if error.problem_mark else 1
        raise ConfigError(f"{path}:{line}: not YAML: {error.problem}") from None
    except (yaml.YAMLError, ValueError, OverflowError) as error:
        raise ConfigError(f"{path}: not YAML: {str(error).splitlines()[0]}") from None
    except RecursionError:
        raise ConfigError(f"{path}: nested too deeply") from None


def _plain(
    loader: yaml.SafeLoader, node: yaml.Node, place: Place, lines: dict[Place, int], file: str, seen: set[int]
) -> Any:
    """Plain data of ``node``; notes the line of every place in ``lines``. Aliases are refused: they can explode."""
    line = node.start_mark.line + 1
    lines.setdefault(place, line)
    if id(node) in seen:
        raise ConfigError(f"{file}:{line}: aliases (*name) are not supported; write the value out")
    if isinstance(node, yaml.ScalarNode):
        return loader.construct_object(node)
    seen.add(id(node))
    if isinstance(node, yaml.SequenceNode):
        return [_plain(loader, item, (*place, at), lines, file, seen) for at, item in enumerate(node.value)]
    data: dict[str, Any] = {}
    for key_node, value_node in node.value:
        key = key_node.value if isinstance(key_node, yaml.ScalarNode) else "?"
        lines[*place, key] = key_node.start_mark.line + 1
        if key in data:
            raise ConfigError(f"{file}:{key_node.start_mark.line + 1}: key '{key}' is given twice")
        data[key] = _plain(loader, value_node, (*place, key), lines, file, seen)
    return data


def _explain(path: Path, schema: type[Strict], lines: dict[Place, int], at: Place, kind: str, message: str) -> str:
    known = next((lines[at[:length]] for length in range(len(at), -1, -1) if at[:length] in lines), 1)
    key = ".".join(map(str, at))
    where = f"{path}:{known}: "
    if kind == "extra_forbidden":
        meant = nearest(str(at[-1]), _keys(schema, at[:-1]))
        mend = f"did you mean {meant}?" if meant else f"known are {', '.join(_keys(schema, at[:-1]))}"
        return f"{where}unknown key '{key}'; {mend}"
    if kind == "missing":
        return f"{where}key '{key}' is missing"
    subject = f"'{key}'" if key else "the file"
    return f"{where}{subject}: {message.removeprefix('Value error, ')}"


def _keys(schema: Any, at: Iterable[str | int]) -> list[str]:
    """Keys that the section at ``at`` of ``schema`` has."""
    for part in at:
        if isinstance(schema, type) and issubclass(schema, BaseModel):
            schema = schema.model_fields[str(part)].annotation
        else:
            schema = next((one for one in reversed(get_args(schema)) if one is not type(None)), None)
    return list(schema.model_fields) if isinstance(schema, type) and issubclass(schema, BaseModel) else []
