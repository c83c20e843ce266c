"""Workload profiles: tokens of one interaction, how its user behaves; random lengths and conversations of them."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator
from functools import cache
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
from pydantic import Field

from megatoken.datasets.conversations import Conversation, Conversations, Turn
from megatoken.errors import ConfigError, UsageError
from megatoken.files import storage_error, write_text
from megatoken.planning.assumptions import read_shipped
from megatoken.planning.figures import State
from megatoken.planning.schedule import Lengths
from megatoken.runs.seal import refuse_sealed
from megatoken.text import suggestion
from megatoken.yaml_files import Strict, read_strict

LARGEST_COUNT = 100_000_000
HEAD = "# Workload profile "  # first line of every file written here
# The answers of llama2-70b in the compliance logs of MLPerf v5.1 (FP8 runs of TensorRT-LLM) follow a gamma distribution
# of this shape more closely than a log-normal, Weibull or inverse Gaussian one. No public log shows how prompts spread.
OUTPUT_GAMMA_SHAPE = 2.54
INPUT_LOG_NORMAL_SIGMA = 0.75
CONVERSATIONS = 512  # of a profile, that users draw from
LARGEST_FACTOR = 8.0  # of a mean; 1 in 1,000 prompts would be longer, and almost no answer


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


def write_lengths(profile: Profile, path: Path, rows: int, seed: int) -> Path:
    """Write ``profile_csv`` to ``path``, and return it. UsageError: a file of another kind, or a sealed folder."""
    refuse_sealed(path)
    if path.is_file():
        try:
            with path.open("rb") as file:
                ours = file.read(len(HEAD)) == HEAD.encode()
        except OSError as error:
            raise storage_error(path, error) from error
        if not ours:
            raise UsageError(
                f"{path}: the file exists and does not hold lengths of a workload profile; move it away, or name "
                "another file with --out"
            )
    write_text(path, profile_csv(profile, rows, seed))
    return path


def profile_csv(profile: Profile, rows: int, seed: int) -> str:
    """Lengths of ``rows`` requests as CSV, for ``megatoken run --lengths``.

    Interactions follow each other, turn by turn; if a profile carries its context, the prompt of a turn includes the
    prompts and answers of all turns before it.
    """
    comment = (
        f"{profile.name} ({profile.title}), turns {profile.turns}, means of a turn "
        f"{profile.input_tokens + profile.context_tokens:,} new tokens in and {profile.output_tokens:,} out "
        f"({profile.state}: {profile.source}). Prompts drawn log-normal (sigma {INPUT_LOG_NORMAL_SIGMA}, assumed), "
        f"answers gamma (shape {OUTPUT_GAMMA_SHAPE}, measured on llama2-70b). Seed {seed}."
    )
    lengths = islice(_lengths(profile, np.random.Generator(np.random.Philox(seed))), rows)
    lines = [f"{prompt},{answer}" for prompt, answer in lengths]
    return "\n".join([f"{HEAD}{' '.join(comment.split())}", "input_tokens,output_tokens", *lines]) + "\n"


def profile_conversations(profile: Profile, seed: int) -> Conversations:
    """Conversations of a profile: turns of lengths drawn around its means, of random tokens."""
    random = np.random.Generator(np.random.Philox(seed))
    turns = iter(lambda: _turn(profile, random), None)
    talks = tuple(
        Conversation(tuple(Turn(*next(turns)) for _ in range(profile.turns)), carries=profile.carries_context)
        for _ in range(CONVERSATIONS)
    )
    source = f"{profile.name} ({profile.title}; {profile.state}: {profile.source})"
    digest = hashlib.sha256(f"{profile.model_dump_json()} {seed} {CONVERSATIONS}".encode()).hexdigest()
    return Conversations(profile.name, source, digest, talks)


def _turn(profile: Profile, random: np.random.Generator) -> tuple[int, int]:
    """New tokens of a turn, and those of its answer."""
    new = _log_normal(profile.input_tokens, random) + _log_normal(profile.context_tokens, random)
    answer = _whole(random.gamma(OUTPUT_GAMMA_SHAPE) / OUTPUT_GAMMA_SHAPE, profile.output_tokens)
    return max(1, new), answer


def _lengths(profile: Profile, random: np.random.Generator) -> Iterator[tuple[int, int]]:
    while True:
        history = 0
        for _ in range(profile.turns):
            new, answer = _turn(profile, random)
            yield history + new, answer
            history += new + answer if profile.carries_context else 0


def _log_normal(mean: int, random: np.random.Generator) -> int:
    sigma = INPUT_LOG_NORMAL_SIGMA
    return _whole(random.lognormal(-(sigma**2) / 2, sigma), mean) if mean else 0


def _whole(factor: float, mean: int) -> int:
    return max(1, round(min(factor, LARGEST_FACTOR) * mean))
