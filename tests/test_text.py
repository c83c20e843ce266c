"""How numbers are written."""

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatoken.text import count_of, exact, natural, number, precise


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (None, "-"),
        (True, "-"),
        ("12", "-"),
        (math.nan, "-"),
        (math.inf, "-"),
        (0, "0"),
        (0.0, "0"),
        (24576, "24,576"),
        (1255.24, "1,255"),
        (999.96, "1,000"),
        (655.27, "655"),
        (9.996, "10.00"),
        (4.2745, "4.27"),
        (0.0275, "0.0275"),
        (1e-9, "0.000000"),
    ],
)
def test_number(value, text):
    assert number(value) == text


@settings(deadline=None)
@given(st.floats(1e-4, 1e12))
def test_a_number_keeps_three_digits(value):
    assert float(number(value).replace(",", "")) == pytest.approx(value, rel=6e-3)


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (None, "-"),
        (math.nan, "-"),
        (10**400, "-"),
        (True, "-"),
        (0, "0"),
        (0.0, "0"),
        (1032192, "1,032,192"),
        (1100948.3, "1,100,948.3"),
        (1690.0, "1,690"),
        (999.96, "1,000"),
        (62111.7, "62,111.7"),
        (4.375, "4.375"),
        (10.01, "10.01"),
        (0.98, "0.98"),
        (-4.9387, "-4.939"),
        (1.5e-7, "0.00000015"),
        (2e6, "2,000,000"),
        (2_000_000.26, "2,000,000.3"),
        (1.5e-13, "1.500e-13"),
    ],
)
def test_precise(value, text):
    assert precise(value) == text


@settings(deadline=None)
@given(st.floats(-1e12, 1e12).filter(lambda value: abs(value) > 1e-9))
def test_precise_keeps_four_digits(value):
    assert float(precise(value).replace(",", "")) == pytest.approx(value, rel=6e-4)


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (2e6, "2,000,000"),
        (1_100_948.3, "1,100,948.3"),
        (0.815, "0.815"),
        (1e-7, "0.0000001"),
        (1e15, "1,000,000,000,000,000"),
        (1e300, "-"),
        (True, "-"),
    ],
)
def test_exact(value, text):
    assert exact(value) == text


def test_nine_comes_before_ten():
    assert sorted(["n10", "n9", "a", "10", "9"], key=natural) == ["9", "10", "a", "n9", "n10"]
    assert natural("n" + 5_000 * "1")  # Python makes no number of so many digits


@given(st.lists(st.text()))
def test_any_names_can_be_sorted(names):
    assert len(sorted(names, key=natural)) == len(names)


@pytest.mark.parametrize(
    ("count", "words", "text"),
    [
        (0, ("run",), "0 runs"),
        (1, ("run",), "1 run"),
        (2048, ("row",), "2,048 rows"),
        (1, ("query", "queries"), "1 query"),
        (3, ("query", "queries"), "3 queries"),
    ],
)
def test_one_thing_is_no_plural(count: int, words: tuple[str, ...], text: str) -> None:
    assert count_of(count, *words) == text
