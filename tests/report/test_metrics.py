"""How numbers are written."""

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatoken.report.metrics import number


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
        (999.96, "1000"),
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
