"""Workload profiles as lengths of requests: a profile states mean token counts, each request is drawn around them.

The spread of the answers is measured: the answer lengths in the compliance logs of MLPerf v5.1 for llama2-70b (FP8 runs
of TensorRT-LLM) follow a gamma distribution of this shape more closely than a log-normal, Weibull or inverse Gaussian.
The spread of the prompts is assumed, as for the lengths that ship with this package: no public log has any.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

import numpy as np

from megatoken.datasets.conversations import Conversation, Conversations, Turn
from megatoken.errors import UsageError
from megatoken.files import storage_error, write_text
from megatoken.planning.workloads import Profile

HEAD = "# Workload profile "  # first line of every file written here
OUTPUT_GAMMA_SHAPE = 2.54
INPUT_LOG_NORMAL_SIGMA = 0.75
CONVERSATIONS = 512  # of a profile, that users draw from
LARGEST_FACTOR = 8.0  # of a mean; 1 in 1,000 prompts would be longer, and almost no answer


def write_lengths(profile: Profile, path: Path, rows: int, seed: int) -> Path:
    """Write ``profile_csv`` to ``path``. UsageError if ``path`` is a file of another kind; returns ``path``."""
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


def profile_conversations(profile: Profile, seed: int, count: int = CONVERSATIONS) -> Conversations:
    """Conversations of a profile: turns of lengths drawn around its means, of random tokens."""
    random = np.random.Generator(np.random.Philox(seed))
    turns = iter(lambda: _turn(profile, random), None)
    talks = tuple(
        Conversation(tuple(Turn(*next(turns)) for _ in range(profile.turns)), carries=profile.carries_context)
        for _ in range(count)
    )
    source = f"{profile.name} ({profile.title}; {profile.state}: {profile.source})"
    digest = hashlib.sha256(f"{profile.model_dump_json()} {seed} {count}".encode()).hexdigest()
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
