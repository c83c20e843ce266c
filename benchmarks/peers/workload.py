"""What every engine is asked: the same requests, drawn from a seed."""

from __future__ import annotations

import random
from dataclasses import dataclass

REQUESTS = 64
SHORTEST_TOKENS, LONGEST_TOKENS = 16, 256
SEED = 1234


@dataclass(frozen=True, slots=True)
class Workload:
    """Requests submitted together: token ids in, and how many tokens each must produce."""

    prompts: list[list[int]]
    output_lengths: list[int]

    @property
    def prompt_tokens(self) -> int:
        """Tokens in all prompts."""
        return sum(map(len, self.prompts))

    @property
    def output_tokens(self) -> int:
        """Tokens that all requests must produce."""
        return sum(self.output_lengths)


def measured_workload(vocabulary_size: int) -> Workload:
    """The requests that are timed; their lengths do not depend on the vocabulary."""
    return _draw(SEED, REQUESTS, LONGEST_TOKENS, vocabulary_size)


def warm_up_workload(vocabulary_size: int) -> Workload:
    """Other, fewer and shorter requests, run before the clock starts."""
    return _draw(SEED + 1, REQUESTS // 4, SHORTEST_TOKENS, vocabulary_size)


def _draw(seed: int, count: int, longest_output: int, vocabulary_size: int) -> Workload:
    generator = random.Random(seed)
    prompt_lengths = [generator.randint(SHORTEST_TOKENS, LONGEST_TOKENS) for _ in range(count)]
    output_lengths = [generator.randint(SHORTEST_TOKENS, longest_output) for _ in range(count)]
    prompts = [[generator.randrange(vocabulary_size) for _ in range(length)] for length in prompt_lengths]
    return Workload(prompts, output_lengths)
