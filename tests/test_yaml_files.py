"""YAML of version 1.2: numbers are what a person reads."""

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from megatoken.claims.schema import load_claims
from megatoken.errors import ConfigError, UsageError
from megatoken.planning.assumptions import load_assumptions
from megatoken.planning.workloads import load_profiles
from megatoken.yaml_files import load_yaml

PROFILE = "profiles: {mine: {input_tokens: %s, output_tokens: 20}}"


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("010", 10), ("-08", -8), ("0o10", 8), ("0x1F", 31), ("+4", 4), ("1e6", 1e6), (".5", 0.5), ("1.", 1.0),
        ("-.Inf", float("-inf")), ("true", True), ("FALSE", False), ("", None), ("~", None), ("'010'", "010"),
        ("1:30", "1:30"), ("190:20:30.15", "190:20:30.15"), ("1_000", "1_000"), ("0b11", "0b11"), ("yes", "yes"),
        ("off", "off"), ("2026-11-20", "2026-11-20"), ("{<<: 3}", {"<<": 3}),
    ],
)  # fmt: skip
def test_plain_scalars(text, value):
    found = load_yaml(text)
    assert (found, type(found)) == (value, type(value))


@given(st.integers() | st.floats(allow_nan=False) | st.booleans() | st.none())
def test_what_others_write_is_read_back(value):
    assert load_yaml(yaml.safe_dump({"key": value}))["key"] == value


@pytest.mark.parametrize("text", ["!!int 1:30", "!!float 1:30", "!!int ''"])
def test_a_tag_that_lies_is_refused(text):
    with pytest.raises(ValueError, match=r"invalid literal|could not convert"):
        load_yaml(text)


def test_profiles_and_assumptions_read_the_same_numbers(tmp_path):
    path = tmp_path / "own.yaml"
    path.write_text(PROFILE % "010")
    assert load_profiles(path)[0].input_tokens == 10
    for text in ("1:30", "1_000", "yes"):
        path.write_text(PROFILE % text)
        with pytest.raises(ConfigError, match="whole number"):
            load_profiles(path)
    path.write_text("assumptions: {carbon_grams_per_kwh: {value: 0390}, pue: {value: 1_5}}")
    with pytest.raises(ConfigError, match=r"assumptions\.pue\.value'.*must be a number"):
        load_assumptions(path)
    path.write_text("assumptions: {carbon_grams_per_kwh: {value: 0390}}")
    assert load_assumptions(path)["carbon_grams_per_kwh"] == 390


def test_claims_read_the_same_numbers(tmp_path):
    path = tmp_path / "claims.yaml"
    claim = "title: t\nsource: s\nclaims: [{id: a, text: t, value: %s, unit: tokens/s, scope: gpu}]\n"
    path.write_text(claim % "0100")
    assert load_claims(path).claims[0].value == 100
    path.write_text(claim % "1_000")
    with pytest.raises(UsageError, match="commas and underscores"):
        load_claims(path)
