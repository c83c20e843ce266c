"""How many examples a property test draws.

A few, the same ones each time, so that the suite is quick and says the same on every machine. With
``MEGATOKEN_EXAMPLES=all`` a test draws all, and other ones each time.
"""

import os

ALL = os.environ.get("MEGATOKEN_EXAMPLES") == "all"


def examples(count: int) -> int:
    """A fifth of ``count``, or all."""
    return count if ALL else count // 5
