"""YAML as people mean it: version 1.2's core schema in place of PyYAML's 1.1.

Version 1.1 takes 010 for 8, 1:30 for 90, 1_000 for 1000, yes and no for booleans, 1e6 for text. Here 010 is 10, 1e6 is
a number, 0o10 is 8 as it says, and all the rest is text, which a schema that wants a number refuses.
"""

from __future__ import annotations

import re
from typing import Any

import yaml

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
