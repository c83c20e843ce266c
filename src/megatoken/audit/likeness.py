"""Whether what is told is what comes out when it is computed again."""

from __future__ import annotations

import math
from collections.abc import Mapping, Set
from typing import Any

SAME = 1e-9  # relative; the same arithmetic on the same rows


def same(
    told: Any, again: Any, *, relative: float = SAME, absolute: float = 1e-12, ignoring: Set[str] = frozenset()
) -> bool:
    """Whether two values of JSON are alike: keys, names and integers exactly, other numbers nearly.

    Args:
        told: as it stands somewhere.
        again: as it was computed.
        relative: tolerance of numbers.
        absolute: the same; either is enough.
        ignoring: keys that are compared nowhere.
    """
    if isinstance(told, Mapping) and isinstance(again, Mapping):
        keys = told.keys() - ignoring
        return keys == again.keys() - ignoring and all(
            same(told[key], again[key], relative=relative, absolute=absolute, ignoring=ignoring) for key in keys
        )
    if isinstance(told, list | tuple) and isinstance(again, list | tuple):
        return len(told) == len(again) and all(
            same(one, other, relative=relative, absolute=absolute, ignoring=ignoring)
            for one, other in zip(told, again, strict=True)
        )
    if isinstance(told, bool) or isinstance(again, bool):
        return told is again
    if isinstance(told, int) and isinstance(again, int):
        return told == again  # a seed has 20 digits
    if isinstance(told, int | float) and isinstance(again, int | float):
        alike = math.isclose(told, again, rel_tol=relative, abs_tol=absolute)
        return alike or (math.isnan(told) and math.isnan(again))
    return bool(told == again)
