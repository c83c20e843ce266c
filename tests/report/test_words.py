"""How numbers are written."""

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatoken.report.words import aligned, clean, label, labelled, number, plain_text, precise


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
        (1.5e-7, "1.500e-07"),
    ],
)
def test_precise(value, text):
    assert precise(value) == text


@settings(deadline=None)
@given(st.floats(-1e12, 1e12).filter(lambda value: abs(value) > 1e-9))
def test_precise_keeps_four_digits(value):
    assert float(precise(value).replace(",", "")) == pytest.approx(value, rel=6e-4)


def test_thousands_of_a_column_are_written_alike():
    assert aligned(["3,543", "3,798.9", "99.6", "-"]) == ["3,543.0", "3,798.9", "99.6", "-"]
    assert aligned(["3,543", "99.6"]) == ["3,543", "99.6"]


@pytest.mark.parametrize(
    ("key", "name", "unit"),
    [
        ("output_tokens_per_second", "Output", "tokens/s"),
        ("per_gpu_tokens_per_second", "Per GPU", "tokens/s"),
        ("duration_seconds", "Duration", "s"),
        ("output_tokens", "Output tokens", ""),
        ("accelerators_per_node", "Accelerators per node", ""),
        ("energy_joules_per_output_token", "Energy", "J/output token"),
        ("cost_dollars_per_million_output_tokens", "Cost", "$/million output tokens"),
        ("tokens_per_second_per_watt", "Tokens per second per watt", ""),
        ("nameplate_watts", "Nameplate", "W"),
        ("target_qps", "Target QPS", ""),
        ("site_watt_hours_per_interaction", "Site", "Wh/interaction"),
        ("", "", ""),
    ],
)
def test_a_key_gives_label_and_unit(key, name, unit):
    assert label(key) == (name, unit)


def test_shares_are_percent_and_names_are_not_counted():
    assert labelled("overlap_share", 0.9074) == ("Overlap", "%", "90.74")
    assert labelled("process_id", 30040) == ("Process ID", "", "30040")


def test_plain_text_of_whatever_json_holds():
    assert plain_text({"value": 4.375, "duration_seconds": 2, "on": True, "none": None}) == (
        "Value: 4.375; Duration: 2 s; On: yes; None: -"
    )
    assert plain_text(["a", 1, [2]]) == "a, 1, 2"
    assert plain_text([]) == plain_text("") == plain_text(None) == "-"


def test_text_that_could_do_harm_is_defused():
    assert clean("a\x1b[31mb\x00\u202ec\ud800d\r\ne") == "a�[31mb��c�d\ne"
    assert clean("x" * 10_000).endswith("… (10,000 characters)")
    assert len(clean("x" * 10_000)) < 2100
