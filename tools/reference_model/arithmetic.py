"""Tasks over numbers."""

from __future__ import annotations

from random import Random

from reference_model.problem import Problem, length, listed, number


def add(rng: Random) -> Problem:
    """Two numbers of up to 4 digits, the sum at once."""
    left, right = (rng.randrange(10 ** rng.randint(2, 4)) for _ in range(2))
    return Problem(rng.choice(("What is the sum?", "Add the two numbers.")), f"{left} + {right}", str(left + right))


def add_columns(rng: Random) -> Problem:
    """Two numbers of up to 9 digits, worked out with carries."""
    digits = rng.randint(3, 9)
    left, right = rng.randrange(10 ** (digits - 1), 10**digits), rng.randrange(10 ** rng.randint(2, digits))
    lines, carry = [], 0
    for column in range(digits):
        upper, lower = (value // 10**column % 10 for value in (left, right))
        total = upper + lower + carry
        lines.append(f"{upper} + {lower} + {carry} = {total}")
        carry = total // 10
    wording = "Add column by column from the right, with the carry, then write the sum."
    return Problem(wording, f"{left} + {right}", "\n".join([*lines, f"Sum: {left + right}"]))


def subtract(rng: Random) -> Problem:
    """Two numbers of up to 4 digits; never below 0."""
    small, large = sorted(rng.randrange(10 ** rng.randint(2, 4)) for _ in range(2))
    wording = rng.choice(("What is the difference?", "Subtract the second number from the first."))
    return Problem(wording, f"{large} - {small}", str(large - small))


def multiply(rng: Random) -> Problem:
    """Up to 3 digits by one digit."""
    left, right = rng.randint(11, 999), rng.randint(2, 9)
    return Problem(rng.choice(("What is the product?", "Multiply.")), f"{left} * {right}", str(left * right))


def sort_numbers(rng: Random) -> Problem:
    """Up to 14 numbers, in either direction."""
    values = [number(rng, 3) for _ in range(length(rng, 3, 14))]
    falling = rng.random() < 0.4
    wording = "Sort the numbers, largest first." if falling else "Sort the numbers, smallest first."
    return Problem(wording, listed(values), listed(sorted(values, reverse=falling)))


def filter_numbers(rng: Random) -> Problem:
    """Those above or below one of them."""
    values = [number(rng, 3) for _ in range(rng.randint(4, 24))]
    bound, above = rng.choice(values), rng.random() < 0.5
    kept = [value for value in values if (value > bound if above else value < bound)]
    wording = f"Keep only the numbers {'above' if above else 'below'} {bound}; if there are none, write none."
    return Problem(wording, listed(values), listed(kept) or "none")


def progression(rng: Random) -> Problem:
    """Counting in steps."""
    start, step, count = number(rng, 3), rng.randint(1, 12), length(rng, 3, 40)
    values = [start + step * index for index in range(count)]
    wording = rng.choice(("Write the sequence.", "Count as told."))
    return Problem(wording, f"from {start} to {values[-1]} in steps of {step}", listed(values))


def number_words(rng: Random) -> Problem:
    """Digits to words and back."""
    values = [number(rng, 4) for _ in range(rng.randint(2, 14))]
    digits, spoken = listed(values), ", ".join(map(spelled, values))
    if rng.random() < 0.5:
        return Problem("Write the numbers in words.", digits, spoken)
    return Problem("Write the numbers in digits.", spoken, digits)


_ONES = (
    *("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven", "twelve"),
    *("thirteen", "fourteen", "fifteen", "sixteen", "seventeen", "eighteen", "nineteen"),
)
_TENS = ("", "", "twenty", "thirty", "forty", "fifty", "sixty", "seventy", "eighty", "ninety")


def spelled(value: int) -> str:
    """English words for 0 to 9,999."""
    if value < 20:
        return _ONES[value]
    if value < 100:
        return _TENS[value // 10] + (f"-{_ONES[value % 10]}" if value % 10 else "")
    unit, name = (1000, "thousand") if value >= 1000 else (100, "hundred")
    rest = f" {spelled(value % unit)}" if value % unit else ""
    return f"{_ONES[value // unit]} {name}{rest}"
