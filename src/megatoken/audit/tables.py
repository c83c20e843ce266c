"""Tables of ``megatoken/data`` that checks compare logs with."""

from __future__ import annotations

import csv
from collections.abc import Mapping
from functools import cache
from importlib.resources import files


@cache
def table(name: str) -> tuple[Mapping[str, str], ...]:
    """The rows of a CSV file, without its comment lines."""
    text = files("megatoken").joinpath("data", name).read_text(encoding="utf-8")
    return tuple(csv.DictReader(line for line in text.splitlines() if not line.startswith("#")))
