"""Fields whose stored values do not follow from the rest of the artefacts."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Set
from typing import Any, NamedTuple

from megatoken.files import mappings
from megatoken.text import is_number

SAME = 1e-9  # relative: the same arithmetic on the same rows


class Doubt(str):
    """A contradiction that an honest explanation is possible for."""

    __slots__ = ()


class Difference(NamedTuple):
    """A field whose stored value is not the recomputed one."""

    field: str
    stored: Any
    recomputed: Any

    def __str__(self) -> str:
        return f"{self.field} {_short(self.stored)}, recomputed {_short(self.recomputed)}"


def is_doubt(problem: object) -> bool:
    """Whether a problem has an honest explanation: another version may have worded a sentence in another way."""
    worded = isinstance(problem, Difference) and problem.field.endswith((".message", ".finding"))
    return worded or isinstance(problem, Doubt)


def differences(
    stored: Any, again: Any, field: str = "", *, relative: float = SAME, ignoring: Set[str] = frozenset()
) -> Iterator[Difference]:
    """Where two values of JSON differ: texts and integers exactly, other numbers nearly; null may be absent.

    Args:
        stored: from a file.
        again: recomputed; of the outermost mapping only its keys are compared.
        field: what the values are called.
        relative: tolerance of numbers.
        ignoring: keys that are not compared, at any depth.
    """
    if isinstance(stored, Mapping) and isinstance(again, Mapping):
        for key in again if not field else {**again, **stored}:
            if key not in ignoring:
                name = f"{field}.{key}" if field else str(key)
                yield from differences(stored.get(key), again.get(key), name, relative=relative, ignoring=ignoring)
    elif isinstance(stored, list) and isinstance(again, list) and len(stored) == len(again):
        for number, (one, other) in enumerate(zip(stored, again, strict=True)):
            place = one.get("code", number) if isinstance(one, Mapping) else number
            yield from differences(one, other, f"{field}.{place}", relative=relative, ignoring=ignoring)
    elif _codes(stored) != _codes(again):
        yield Difference(field, _codes(stored), _codes(again))
    elif not _same(stored, again, relative):
        yield Difference(field, stored, again)


def _codes(listed: Any) -> str:
    """The codes of reasons; none for no reason, and for anything else."""
    return ", ".join(str(one.get("code")) for one in mappings(listed)) or "none"


def _same(one: Any, other: Any, relative: float) -> bool:
    if isinstance(one, bool) or isinstance(other, bool):
        return one is other
    if one is None and other == []:
        return True
    if (isinstance(one, float) and is_number(other)) or (isinstance(other, float) and is_number(one)):
        return math.isclose(one, other, rel_tol=relative, abs_tol=1e-12) or (math.isnan(one) and math.isnan(other))
    return bool(one == other)  # integers too: a seed has 20 digits


def _short(value: Any) -> str:
    text = "none" if value is None else str(value)
    return text if len(text) <= 120 else f"{text[:120]}..."
