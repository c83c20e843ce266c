"""Releases of LoadGen: their source hashes, the seeds that they embed, and the source lines that log each key."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

from megatoken.mlperf.rounds import load_table, round_seeds


@dataclass(frozen=True, slots=True)
class Build:
    """One release of LoadGen whose source files are known."""

    version: str
    commit: str
    commit_date: str  # ISO 8601, with a time where the release's own logs state it
    sha1: Mapping[str, str]  # path below loadgen/ -> SHA-1


@cache
def builds() -> tuple[Build, ...]:
    """Releases of LoadGen whose source hashes are known."""
    table = _table()
    return tuple(
        Build(entry["version"], entry["commit"], entry["commit_date"], {**table["base"], **entry["differs"]})
        for entry in table["builds"]
    )


@cache
def round_of_build(version: str) -> str | None:
    """The round whose seeds the package mlcommons-loadgen of that version embeds; None if that is not known."""
    of_seed = {seeds.qsl: name for name, seeds in round_seeds().items()}
    return next((of_seed.get(int(entry["seeds"])) for entry in _table()["builds"] if entry["version"] == version), None)


def source_lines(source: str, sha1: str) -> Mapping[str, list[int]] | None:
    """For each key that this version of a source file logs, the source lines that log it; None: version unknown."""
    lines: Mapping[str, Mapping[str, list[int]]] = _table()["source_lines"]
    return lines.get(f"{source} {sha1}")


def version_number(version: str | None) -> tuple[int, ...]:
    """``5.1.0 @ 47b91b979c`` -> (5, 1, 0); empty if it is not a version."""
    found = re.match(r"\s*(\d{1,4}(?:\.\d{1,4}){1,3})", version or "")
    return tuple(int(part) for part in found.group(1).split(".")) if found else ()


def is_known_version(version: str | None) -> bool:
    """Whether the version lies between the oldest and the newest release whose sources are known."""
    number = version_number(version)
    known = [version_number(build.version) for build in builds()]
    return min(known) <= number <= max(known)


def is_older(version: str | None) -> bool:
    """Whether the version is older than all whose sources are known: what follows from those does not apply to it."""
    return () < version_number(version) < min(version_number(build.version) for build in builds())


@cache
def _table() -> dict[str, Any]:
    return load_table("loadgen_builds.json")
