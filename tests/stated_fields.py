"""Fields of a result, and which of them docs/run-folder.md does not state."""

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

PAGE = Path(__file__).parents[1] / "docs" / "run-folder.md"


def fields(result: Mapping[str, Any]) -> set[str]:
    """Keys at every depth."""
    return set(_names(result)) - {"run_folder"}


def unstated_fields(result: Mapping[str, Any]) -> set[str]:
    return fields(result) - set(re.findall(r"\w+", " ".join(re.findall(r"`([^`\n]+)`", PAGE.read_text()))))


def _names(value: Any) -> Iterator[str]:
    if isinstance(value, Mapping):
        yield from value
        value = list(value.values())
    for item in value if isinstance(value, list) else ():
        yield from _names(item)
