"""Numbers as text: thousands separators, no exponent, significant digits only; and natural sorting."""

from __future__ import annotations

import difflib
import math
import re
from collections.abc import Iterable
from datetime import UTC, datetime
from decimal import Decimal
from typing import TypeGuard

ABSENT = "-"
LARGEST = 1e300
SMALLEST = 1e-12  # below it, the exponent is easier to read than the zeros


def is_number(value: object) -> TypeGuard[int | float]:
    """Whether ``value`` is a number within float range; booleans are not."""
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < LARGEST


def number(value: object) -> str:
    """Three to four significant digits, thousands apart, no exponent; a dash for what is not a number."""
    if not is_number(value):
        return ABSENT
    if isinstance(value, int) or abs(value) >= 1000 or value == 0:
        return f"{value:,.0f}"
    decimals = min(6, max(0, 2 - math.floor(math.log10(abs(value)))))
    return f"{value:,.{decimals}f}"


def precise(value: object) -> str:
    """One decimal from a thousand on, four significant digits below: for comparisons with published figures."""
    if not is_number(value):
        return ABSENT
    if isinstance(value, int):
        return f"{value:,}"
    if abs(value) >= 999.95:
        return f"{value:,.1f}".removesuffix(".0")
    return f"{value:.3e}" if 0 < abs(value) < SMALLEST else _trimmed(value)


def significant(value: object) -> str:
    """Three significant digits and no exponent, for assumed and estimated numbers; counts keep all their digits."""
    return precise(rounded(value) if isinstance(value, float) and is_number(value) else value)


def rounded(value: float, digits: int = 3) -> float:
    """``value`` to so many significant digits; not finite numbers and zero unchanged."""
    if not value or not math.isfinite(value):
        return value
    return round(value, digits - 1 - math.floor(math.log10(abs(value))))


def exact(value: object) -> str:
    """All digits of a number, as it was written."""
    if not is_number(value):
        return ABSENT
    if value and not SMALLEST <= abs(value) < 1e21:
        return f"{value:g}"
    text = f"{Decimal(repr(value)):,f}"
    return text.rstrip("0").rstrip(".") if "." in text else text


def count_of(count: int, one: str, many: str | None = None) -> str:
    """A number of things, such as 1 run and 2,048 rows; ``many``: where that is not ``one`` and an s."""
    return f"{count:,} {one if count == 1 else many or one + 's'}"


def printable(text: str) -> str:
    """Text of others in one line: what a terminal would obey, or not show, is escaped."""
    return "".join(
        character if character.isprintable() else character.encode("unicode_escape", "backslashreplace").decode()
        for character in text
    )


def utc_now() -> str:
    """The current time as documents state it: ISO 8601 in UTC, to the second."""
    return f"{datetime.now(UTC):%Y-%m-%dT%H:%M:%SZ}"


def _trimmed(value: float) -> str:
    decimals = 0 if value == 0 else max(0, 3 - math.floor(math.log10(abs(value))))
    text = f"{value:.{decimals}f}"
    return text.rstrip("0").rstrip(".") if "." in text else text


def natural(text: str) -> list[tuple[int, int | str]]:
    """A sorting key that puts node 9 before node 10."""
    parts = (part for part in re.split(r"(\d{1,18})", text) if part)  # longer ones are not numbers to sort by
    return [(0, int(part)) if part.isascii() and part.isdigit() else (1, part) for part in parts]


def nearest(name: str, known: Iterable[str]) -> str | None:
    """What ``name`` was probably meant to be: with other capitals, its letters in another order, or the most alike."""
    names = list(known)
    if other_capitals := [one for one in names if one.casefold() == name.casefold()]:
        return other_capitals[0]
    close = difflib.get_close_matches(name, names, cutoff=0.5)
    return max(close, key=lambda one: sorted(one) == sorted(name), default=None)


def suggestion(name: str, known: Iterable[str], otherwise: str | None = None) -> str:
    """How to fix an unknown name: the nearest known one, else ``otherwise``, by default all that are known."""
    names = list(known)
    meant = nearest(name, names)
    return f"did you mean {meant}?" if meant else otherwise or f"known are {', '.join(names)}"
