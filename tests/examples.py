"""How many examples a property test draws, and how many cases a test with costly ones has.

A few, the same ones each time, so that the suite is quick and says the same on every machine. With
``MEGATOKEN_EXAMPLES=all`` a test draws all, and other ones each time, and no case is left out.
"""

import os
from typing import TypeVar

Case = TypeVar("Case")

ALL = os.environ.get("MEGATOKEN_EXAMPLES") == "all"


def examples(count: int) -> int:
    """A fifth of ``count``, or all."""
    return count if ALL else count // 5


def every(*cases: Case) -> tuple[Case, ...]:
    """``cases`` with ``MEGATOKEN_EXAMPLES=all``, none otherwise: what takes the same paths as cases that always run."""
    return cases if ALL else ()
