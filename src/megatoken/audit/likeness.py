"""Whether what is told is what comes out when it is computed again."""

from __future__ import annotations

import math
from collections.abc import Mapping, Set
from typing import Any

from megatoken.text import is_number

SAME = 1e-9  # relative; the same arithmetic on the same rows


def same(
    told: Any, again: Any, *, relative: float = SAME, absolute: float = 1e-12, ignoring: Set[str] = frozenset()
) -> bool:
    """Whether two values of JSON are alike: names and integers exactly, other numbers nearly; null may be absent.

    Args:
        told: as it stands somewhere.
        again: as it was computed.
        relative: tolerance of numbers.
        absolute: the same; either is enough.
        ignoring: keys that are compared nowhere.
    """
    if isinstance(told, Mapping) and isinstance(again, Mapping):
        return all(
            same(told.get(key), again.get(key), relative=relative, absolute=absolute, ignoring=ignoring)
            for key in (told.keys() | again.keys()) - ignoring
        )
    if isinstance(told, list | tuple) and isinstance(again, list | tuple):
        return len(told) == len(again) and all(
            same(one, other, relative=relative, absolute=absolute, ignoring=ignoring)
            for one, other in zip(told, again, strict=True)
        )
    if isinstance(told, bool) or isinstance(again, bool):
        return told is again
    if isinstance(told, float) and isinstance(again, float) and math.isnan(told):
        return math.isnan(again)
    if (isinstance(told, float) and is_number(again)) or (isinstance(again, float) and is_number(told)):
        return math.isclose(told, again, rel_tol=relative, abs_tol=absolute)
    return bool(told == again)  # integers too: a seed has 20 digits
