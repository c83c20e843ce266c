"""The user's YAML files: read by the core schema of YAML 1.2, checked by pydantic schemas, errors with file and line.

YAML 1.1, which PyYAML reads by default, takes 010 for 8, 1:30 for 90, 1_000 for 1000, yes and no for booleans, and 1e6
for text. Here 010 is 10, 1e6 is a number, 0o10 is 8, and everything else is text, which a schema refuses as a number.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TypeVar, get_args

import yaml
from pydantic import BaseModel, ConfigDict, ValidationError
from pydantic_core import ErrorDetails

from megatoken.errors import ConfigError
from megatoken.files import open_input
from megatoken.text import suggestion

LARGEST_FILE_BYTES = 1 << 20
LONGEST_MESSAGE = 400
LONGEST_VALUE = 60

_TAG = "tag:yaml.org,2002:"
_RESOLVERS = (  # tag, pattern, first letters; chapter 10.3.2 of the specification
    ("null", r"~|null|Null|NULL|", ["~", "n", "N", ""]),
    ("bool", r"true|True|TRUE|false|False|FALSE", list("tTfF")),
    ("int", r"[-+]?[0-9]+|0o[0-7]+|0x[0-9a-fA-F]+", list("-+0123456789")),
    ("float", r"[-+]?(?:\.[0-9]+|[0-9]+(?:\.[0-9]*)?)(?:[eE][-+]?[0-9]+)?", list("-+.0123456789")),
    ("float", r"[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN)", list("-+.")),
)
_FIX_FILE = "correct it and save the file as UTF-8 text"
_FIX_PLACE = "correct it there or just above: indent with spaces, quote text that has signs such as : # [ { @"

DEMANDS = {  # by pydantic's type of error
    "bool_parsing": "must be true or false",
    "bool_type": "must be true or false",
    "dict_type": "must be a mapping of keys to values; write KEY: VALUE",
    "finite_number": "must be a finite number",
    "float_parsing": "must be a number",
    "float_type": "must be a number",
    "greater_than": "must be more than {gt}",
    "greater_than_equal": "must be at least {ge}",
    "int_from_float": "must be a whole number",
    "int_parsing": "must be a whole number",
    "int_parsing_size": "must be a whole number of fewer digits",
    "int_type": "must be a whole number",
    "less_than": "must be less than {lt}",
    "less_than_equal": "must be at most {le}",
    "list_type": "must be a list; begin each entry with a dash",
    "literal_error": "must be {expected}",
    "enum": "must be {expected}",
    "model_type": "must be a mapping of keys to values; write KEY: VALUE",
    "string_too_short": "must not be empty",
    "string_type": "must be text",
    "string_unicode": "must be UTF-8 text",
    "too_short": "must have at least {min_length}",
    "value_error": "{error}",
}

_OF_NUMBERS = {
    *("finite_number", "float_parsing", "float_type", "int_from_float", "int_parsing", "int_type"),
    *("greater_than", "greater_than_equal", "less_than", "less_than_equal"),
}
_UNIT = re.compile(
    r"(?:^|[_.])((?:(?:dollars|tokens|samples)_per_)?(?:seconds?|hour|request)|bytes|tokens)(?:\.p\d+)?$"
)

Place = tuple[str | int, ...]


class CoreLoader(yaml.SafeLoader):
    """PyYAML's safe loader with the core schema of YAML 1.2."""

    yaml_implicit_resolvers: dict[str, list[tuple[str, re.Pattern[str]]]] = {}

    def construct_whole_number(self, node: yaml.ScalarNode) -> int:
        """An int in the base that its prefix names. ValueError if the text of a tagged value is not one."""
        text = self.construct_scalar(node)
        base = {"0o": 8, "0x": 16}.get(text[:2], 10)
        return int(text[2:] if base != 10 else text, base)

    def construct_real_number(self, node: yaml.ScalarNode) -> float:
        """A float, finite or not. ValueError if the text of a tagged value is not one."""
        return float(self.construct_scalar(node).lower().replace(".inf", "inf").replace(".nan", "nan"))


for _name, _pattern, _letters in _RESOLVERS:
    CoreLoader.add_implicit_resolver(f"{_TAG}{_name}", re.compile(f"(?:{_pattern})$"), _letters)
CoreLoader.add_constructor(f"{_TAG}int", CoreLoader.construct_whole_number)
CoreLoader.add_constructor(f"{_TAG}float", CoreLoader.construct_real_number)


def load_yaml(text: str) -> Any:
    """The one document of ``text``. Raises yaml.YAMLError, ValueError."""
    return yaml.load(text, Loader=CoreLoader)


class Strict(BaseModel):
    """Base of the schemas of files: refuses unknown keys, numbers that are not finite, and values of another type."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False, strict=True)


def refuse_repeated_ids(ids: Sequence[str], what: str) -> None:
    """Raises ValueError that names the ids which several entries have; ``what`` they are, in the plural."""
    twice = sorted({one for one in ids if ids.count(one) > 1})
    if twice:
        raise ValueError(f"several {what} have the id {', '.join(twice)}")


SECRET = "secret"
"""Type of a ``PydanticCustomError`` about a value that no message may show."""

_Schema = TypeVar("_Schema", bound=Strict)


def read_strict(path: Path, schema: type[_Schema]) -> _Schema:
    """The content of a YAML file as ``schema``.

    Raises:
        ConfigError: unreadable, not YAML, an unknown or repeated key, a value of the wrong type; with its line.
    """
    lines: dict[Place, int] = {}
    try:
        root = compose(path)
        data = {} if root is None else _plain(CoreLoader(""), root, (), lines, path, set())
    except (yaml.YAMLError, ValueError, OverflowError) as error:
        raise ConfigError(_not_yaml(path, error)) from None
    try:
        return schema.model_validate(data)
    except ValidationError as error:
        place, problem = _explain(schema, data, error.errors(include_url=False))
        line = next((lines[place[:length]] for length in range(len(place), -1, -1) if place[:length] in lines), 1)
        raise _refusal(path, line, problem) from None


def compose(path: Path, fix: str = "give a YAML file") -> yaml.Node | None:
    """The root node of a YAML file; None if it is empty.

    Args:
        path: A file or a pipe.
        fix: What the user should give instead of a file that cannot be read.

    Raises:
        ConfigError: unreadable, too large, not UTF-8, not YAML, nested too deeply.
    """
    try:
        with open_input(path) as file:
            content = file.read(LARGEST_FILE_BYTES + 1)
        if len(content) > LARGEST_FILE_BYTES:
            raise _refusal(path, None, f"larger than {LARGEST_FILE_BYTES:,} bytes; {fix}")
        return CoreLoader(content.decode()).get_single_node()
    except OSError as error:
        raise _refusal(path, None, f"cannot be read: {error.strerror}; {fix}") from None
    except UnicodeDecodeError as error:
        raise _refusal(path, None, f"not UTF-8 at byte {error.start}; {fix}, saved as UTF-8") from None
    except (yaml.YAMLError, ValueError) as error:
        raise ConfigError(_not_yaml(path, error)) from None
    except RecursionError:
        raise _refusal(path, None, "nested too deeply; write fewer levels") from None


def one_line(text: str) -> str:
    """``text`` of a third party's file, fit for an error message: no control characters, cut if long."""
    shown = "".join(letter if letter.isprintable() else "?" for letter in text)
    return shown if len(shown) <= LONGEST_MESSAGE else f"{shown[:LONGEST_MESSAGE]}..."


def demand(error: ErrorDetails, key: str = "") -> str:
    """What pydantic demands of a value and, of a single value, what it got: ``must be at least 1, got '0'``.

    A number has the unit that the name of its dotted ``key`` ends with: ``must be a number of seconds``.
    """
    requirement, found = _requirement(error), _UNIT.search(key)
    unit = "samples per second" if key == "rate" else found and found[1].replace("_", " ")
    if unit and error["type"] in _OF_NUMBERS:
        if requirement.endswith(" 1"):
            unit = re.sub(r"^(\w+)s\b", r"\1", unit)
        requirement += f"{' of' * requirement.endswith('number')} {unit}"
    return requirement + _got(error)


def _requirement(error: ErrorDetails) -> str:
    forms = {int: ",d", float: ",.15g"}  # of a float no more digits than were written
    limits = {name: format(value, forms.get(type(value), "")) for name, value in error.get("ctx", {}).items()}
    return DEMANDS[error["type"]].format(**limits) if error["type"] in DEMANDS else error["msg"]


def _got(error: ErrorDetails) -> str:
    value = error["input"] if error["type"] != SECRET else None
    return f", got {value!r:.{LONGEST_VALUE}}" if isinstance(value, str | int | float) else ""


def _not_yaml(path: Path, error: Exception) -> str:
    mark = getattr(error, "problem_mark", None)
    problem = getattr(error, "problem", None) or " ".join(str(error).split())
    place = f"{path}:{mark.line + 1}" if mark else f"{path}"
    return f"{place}: not YAML: {problem:.200}; {_FIX_PLACE if mark else _FIX_FILE}"


def _refusal(path: Path, line: int | None, text: str) -> ConfigError:
    return ConfigError(f"{path}:{line}: {one_line(text)}" if line else f"{path}: {one_line(text)}")


def _plain(
    loader: yaml.SafeLoader, node: yaml.Node, place: Place, lines: dict[Place, int], path: Path, seen: set[int]
) -> Any:
    """Plain data of ``node``; records the line of every place in ``lines``. Refuses aliases: they can explode."""
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


def _explain(schema: type[Strict], data: Any, errors: Sequence[ErrorDetails]) -> tuple[Place, str]:
    """Place and text of the first error; of an unknown key first, because a typo also leaves its key missing."""
    first = next((one for one in errors if one["type"] == "extra_forbidden"), errors[0])
    key = _path(data, first["loc"])
    if first["type"] == "extra_forbidden":
        known = _keys(schema, first["loc"][:-1])
        fix = suggestion(str(first["loc"][-1]), known)
        return first["loc"], f"unknown key '{key}'; {fix}"
    if first["type"] == "missing":
        return first["loc"], f"key '{key}' is missing; add it"
    # Of a value that may be of several types, pydantic reports one error for each; the deepest is of the type meant.
    places = [_place_in(data, error["loc"]) for error in errors]
    place = max((one for one in places if one[: len(places[0])] == places[0]), key=len)
    requirements = dict.fromkeys(_requirement(error) for one, error in zip(places, errors, strict=True) if one == place)
    first_way, *other_ways = requirements
    ways = " or ".join([first_way, *(way.removeprefix("must be ") for way in other_ways)])
    subject = f"'{_path(data, place)}'" if place else "the file"
    return place, f"{subject}: {ways}{_got(errors[places.index(place)])}"


def _path(data: Any, place: Place) -> str:
    """``place`` with dots between its keys, and entries of lists named by their ids."""
    names = []
    for part in place:
        if part in data if isinstance(data, dict) else isinstance(data, list) and isinstance(part, int):
            data = data[part]
        own = data.get("id") if isinstance(part, int) and isinstance(data, dict) else None
        names.append(own if isinstance(own, str) and own else str(part))
    return ".".join(names)


def _place_in(data: Any, location: Place) -> Place:
    """The part of pydantic's location that names keys and positions of the file, without the names of types."""
    place: Place = ()
    for part in location:
        if part in data if isinstance(data, dict) else isinstance(data, list) and isinstance(part, int):
            place, data = (*place, part), data[part]
    return place


def _keys(schema: Any, at: Place) -> list[str]:
    """Keys that the section at ``at`` of ``schema`` has."""
    for part in at:
        is_model = isinstance(schema, type) and issubclass(schema, BaseModel)
        schema = schema.model_fields[str(part)].annotation if is_model else _item(schema)
        if type(None) in get_args(schema):
            schema = get_args(schema)[0]
    return list(schema.model_fields)


def _item(schema: Any) -> Any:
    """The type of what a list, a tuple of any length or a dictionary holds."""
    return [one for one in get_args(schema) if one is not ...][-1]
