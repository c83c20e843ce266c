"""Workload profiles: the tokens of one interaction, turn by turn, and how its user behaves."""

from __future__ import annotations

from collections.abc import Iterable
from functools import cache
from pathlib import Path
from typing import Any

from pydantic import Field

from megatoken.errors import ConfigError
from megatoken.planning.assumptions import read_shipped
from megatoken.planning.figures import State
from megatoken.planning.schedule import Lengths
from megatoken.text import suggestion
from megatoken.yaml_files import Strict, read_strict

LARGEST_COUNT = 100_000_000


class _Entry(Strict):
    title: str = ""
    turns: int = Field(default=1, ge=1, le=10_000)
    input_tokens: int = Field(ge=0, le=LARGEST_COUNT)
    context_tokens: int = Field(default=0, ge=0, le=LARGEST_COUNT)
    output_tokens: int = Field(ge=1, le=LARGEST_COUNT)
    carries_context: bool = False
    prefix_cache_share: float = Field(default=0.0, ge=0, le=1)
    tool_seconds: float = Field(default=0.0, ge=0, le=1e9)
    think_seconds: float = Field(default=0.0, ge=0, le=1e9)
    interactions_per_user_month: float = Field(default=200.0, ge=0, le=1e9)
    state: State = "given"
    source: str = ""


class _ProfilesFile(Strict):
    profiles: dict[str, _Entry] = Field(min_length=1)


class Profile(_Entry):
    """One kind of interaction; the fields are explained at the head of ``workload_profiles.yaml``."""

    name: str

    @property
    def counted_tokens(self) -> int:
        """Tokens of an interaction as the source documents count them: input and output of every turn, each once."""
        return self.turns * (self.input_tokens + self.context_tokens + self.output_tokens)

    @property
    def written_tokens(self) -> int:
        """Output tokens of an interaction."""
        return self.turns * self.output_tokens

    @property
    def repeated_tokens(self) -> int:
        """Input tokens that later turns repeat: turn k repeats the input and output of the k - 1 turns before it."""
        once = self.input_tokens + self.context_tokens + self.output_tokens
        return once * self.turns * (self.turns - 1) // 2 if self.carries_context else 0

    def read_tokens(self, prefix_cache_share: float | None = None) -> float:
        """Input tokens to compute in an interaction; by default with the profile's own share of prefix cache hits."""
        share = self.prefix_cache_share if prefix_cache_share is None else prefix_cache_share
        new = self.turns * (self.input_tokens + self.context_tokens)
        return new + self.repeated_tokens * (1 - share)

    @property
    def request_lengths(self) -> Lengths:
        """Mean lengths of a request, over the turns."""
        return Lengths(self.read_tokens(0.0) / self.turns, self.read_tokens() / self.turns, self.output_tokens)

    @property
    def pause_seconds(self) -> float:
        """Seconds from one interaction of a user to the next: reading and thinking, and tools between turns.

        Answers are read while they stream, so the time of the answer is not added and slower service does not lower
        demand.
        """
        return self.think_seconds + (self.turns - 1) * self.tool_seconds

    def shortened(self, share: float) -> Profile:
        """The same profile with inputs shorter by ``share``, in whole tokens."""
        inputs = {name: round(getattr(self, name) * (1 - share)) for name in ("input_tokens", "context_tokens")}
        return self.model_copy(update=inputs)

    def to_document(self) -> dict[str, Any]:
        """Plain JSON."""
        counts = {"counted_tokens": self.counted_tokens, "repeated_tokens": self.repeated_tokens}
        return {"name": self.name, **self.model_dump(), **counts}


def load_profiles(path: Path | None = None, names: Iterable[str] = ()) -> tuple[Profile, ...]:
    """The profiles ``names`` in this order; without names those of the user's file ``path``, else all shipped ones.

    Own profiles (YAML: ``profiles: {name: {input_tokens: ..., output_tokens: ...}}``) replace shipped ones of their
    name.

    Raises:
        ConfigError: the file has another form, or a name is unknown.
    """
    own = _profiles(read_strict(path, _ProfilesFile), str(path)) if path is not None else {}
    known = {**_shipped(), **own}
    for name in names:
        if name not in known:
            raise ConfigError(f"unknown workload profile '{name}'; {suggestion(name, known)}")
    return tuple(known[name] for name in (names or own or known))


@cache
def _shipped() -> dict[str, Profile]:
    return _profiles(read_shipped("workload_profiles.yaml", _ProfilesFile), "workload_profiles.yaml")


def _profiles(file: _ProfilesFile, source: str) -> dict[str, Profile]:
    return {
        name: Profile(
            name=name, **entry.model_dump() | {"title": entry.title or name, "source": entry.source or source}
        )
        for name, entry in file.profiles.items()
    }
