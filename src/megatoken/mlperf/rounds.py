"""MLPerf Inference's rounds: their seeds, and the table of rules that ships with the package."""

from __future__ import annotations

import csv
import json
from collections.abc import Mapping, Sequence
from functools import cache
from importlib.resources import files
from typing import Any, NamedTuple

from megatoken.errors import UsageError

DEFAULT_ROUND = "v5.1"  # its seeds are used, and its rules are listed, where no rules are claimed


class Seeds(NamedTuple):
    """The three random seeds that a round publishes."""

    qsl: int
    sample_index: int
    schedule: int


@cache
def rules() -> dict[str, Any]:
    """``data/loadgen_rules.json``: rounds, benchmarks, and what submissions must hold."""
    return load_table("loadgen_rules.json")


@cache
def round_seeds() -> dict[str, Seeds]:
    """The seeds of each round."""
    return {name: Seeds(**entry["seeds"]) for name, entry in rules()["rounds"].items()}


def round_of_seeds(seeds: Sequence[object]) -> str | None:
    """The round that published these three seeds; None if no round did."""
    return next((name for name, official in round_seeds().items() if official == tuple(seeds)), None)


def ruled_rounds() -> tuple[str, ...]:
    """Rounds whose rules are known for at least one benchmark; of older rounds only the seeds are known."""
    ruled = {name for entry in rules()["benchmarks"].values() for name in entry["rounds"]}
    return tuple(name for name in round_seeds() if name in ruled)


def has_rules(round: str | None) -> bool:
    """False for a round of which only the seeds are known, so that the rules of other rounds are not applied to it."""
    return round not in round_seeds() or round in ruled_rounds()


def known_round(name: str, among: Sequence[str] | None = None) -> str:
    """``name`` as the tables spell it.

    Args:
        name: As typed: ``v5.1`` or ``5.1``.
        among: Rounds to list in the error; None: all whose rules are known.

    Raises:
        UsageError: The rules of that round are not known.
    """
    wanted = name.strip().lower()
    wanted = wanted if wanted.startswith("v") else f"v{wanted}"
    if wanted not in ruled_rounds():
        only_seeds = "only the seeds of this round are known, not its rules"
        what = only_seeds if wanted in round_seeds() else "not a known MLPerf Inference round"
        raise UsageError(f"--round {name}: {what}; known: {', '.join(among or ruled_rounds())}")
    return wanted


def load_table(name: str) -> dict[str, Any]:
    """A JSON table of ``megatoken/data``."""
    table: dict[str, Any] = json.loads(files("megatoken").joinpath("data", name).read_text(encoding="utf-8"))
    return table


@cache
def load_csv(name: str) -> tuple[Mapping[str, str], ...]:
    """The rows of a CSV table of ``megatoken/data``, without its comment lines."""
    text = files("megatoken").joinpath("data", name).read_text(encoding="utf-8")
    return tuple(csv.DictReader(line for line in text.splitlines() if not line.startswith("#")))
