"""user.conf: what a submitter asks LoadGen for."""

from __future__ import annotations

import re

MOST_LINES = 5_000
_LINE = re.compile(r"\s*([\w-]{1,80}|\*)\.(\w{1,40}|\*)\.(\w{1,80})\s+=\s+(-?\d{1,20}(?:\.\d{1,20})?)(?:\s.*)?")


def user_conf_entries(text: str) -> dict[tuple[str, str, str], tuple[str, int]]:
    """Value and line of each ``<model>.<scenario>.<key> = <number>``, as LoadGen reads it: of equal keys the last."""
    entries: dict[tuple[str, str, str], tuple[str, int]] = {}
    for number, line in enumerate(text.split("\n")[:MOST_LINES], 1):
        if found := _LINE.fullmatch(line[:300]):
            model, scenario, key, value = found.groups()
            entries[model, scenario, key] = (value, number)
    return entries
