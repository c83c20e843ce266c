"""What every task draws, and the draws that several tasks share."""

from __future__ import annotations

from dataclasses import dataclass
from random import Random


@dataclass(frozen=True, slots=True)
class Problem:
    """The instruction (one wording of several), what it is about, and the only right answer."""

    instruction: str
    given: str
    answer: str


def length(rng: Random, low: int, high: int) -> int:
    """From ``low`` to ``high``, short ones more often: the logarithm is uniform."""
    return min(high, int(low * ((high + 1) / low) ** rng.random()))


def number(rng: Random, most_digits: int) -> int:
    """At least 0; every number of digits is as likely."""
    return rng.randrange(10 ** rng.randint(1, most_digits))


def listed(numbers: list[int]) -> str:
    """As every task writes a list."""
    return ", ".join(map(str, numbers))
