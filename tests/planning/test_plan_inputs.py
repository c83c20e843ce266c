"""Files and flags of the user: strict schemas, errors with place and mend, nothing that crashes."""

import itertools

import pytest
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from examples import examples
from megatoken.errors import ConfigError
from megatoken.planning.assumptions import load_assumptions
from megatoken.planning.workloads import load_profiles
from megatoken.yaml_files import LARGEST_FILE_BYTES

PROFILE = "profiles:\n  mine:\n    input_tokens: 10\n    output_tokens: 20\n"


@pytest.fixture
def write(tmp_path):
    numbers = itertools.count()

    def save(content: str | bytes):
        path = tmp_path / f"my file ü {next(numbers)}.yaml"
        path.write_bytes(content.encode() if isinstance(content, str) else content)
        return path

    return save


def test_a_profile_needs_two_keys(write):
    [mine] = load_profiles(write(PROFILE))
    assert (mine.name, mine.title, mine.turns, mine.state) == ("mine", "mine", 1, "given")
    assert mine.counted_tokens == 30 and mine.source.endswith(".yaml")


def test_own_profiles_win_and_mix_with_shipped_ones(write):
    path = write(PROFILE.replace("mine", "rag"))
    assert [profile.counted_tokens for profile in load_profiles(path, ["simple_qa", "rag"])] == [650, 30]
    assert len(load_profiles()) == 4


@pytest.mark.parametrize(
    ("content", "line", "why"),
    [
        (PROFILE.replace("t_tokens: 2", "t_token: 2"), 4, "'profiles.mine.output_token'; did you mean output_tokens?"),
        (PROFILE + "    thinkseconds: 5\n", 5, "did you mean think_seconds?"),
        (PROFILE + "    zzz: 5\n", 5, "known are title, turns"),
        (PROFILE.replace("profiles", "profile"), 1, "did you mean profiles?"),
        (PROFILE.replace("    output_tokens: 20\n", ""), 2, "'profiles.mine.output_tokens' is missing; add it"),
        (PROFILE.replace("20", "0"), 4, "must be at least 1, got 0"),
        (PROFILE.replace("20", "2.5"), 4, "must be a whole number"),
        (PROFILE.replace("20", "'20'"), 4, "must be a whole number"),
        (PROFILE.replace("20", "yes"), 4, "must be a whole number"),
        (PROFILE.replace("20", "1" + "0" * 400), 4, "must be at most 100,000,000"),
        (PROFILE + "    prefix_cache_share: 1.5\n", 5, "must be at most 1, got 1.5"),
        (PROFILE + "    think_seconds: .inf\n", 5, "finite"),
        (PROFILE + "    think_seconds: .nan\n", 5, "finite"),
        (PROFILE + "    state: certain\n", 5, "'assumed'"),
        (PROFILE + "    input_tokens: 3\n", 5, "key 'input_tokens' is given twice; keep one"),
        ("profiles: {a: &x {input_tokens: 1, output_tokens: 2}, b: *x}\n", 1, "aliases"),
        ("profiles: [1, 2]\n", 1, "must be a mapping"),
        ("profiles: {}\n", 1, "must have at least 1"),
        ("", 1, "'profiles' is missing"),
        ("just text\n", 1, "must be a mapping"),
        ("profiles: {mine: {input_tokens: 2024-99-99, output_tokens: 1}}\n", 1, "must be a whole number"),
        ("profiles: {mine: {input_tokens: !!timestamp 2024-99-99, output_tokens: 1}}\n", None, "not YAML"),
        ("profiles: !!python/object/apply:os.system [true]\n", 1, "must be a mapping"),
        ("a: [\n", 2, "not YAML: expected the node content, but found '<stream end>'; correct it there or just above"),
        ("profiles:\n\t- x\n", 2, "cannot start any token; correct it there or just above: indent with spaces"),
        ("[" * 100_000, None, "nested too deeply; write fewer levels"),
        (b"\xff\xfe\x00", None, "not UTF-8 at byte 0; give a YAML file, saved as UTF-8"),
        (b"\x00\x01\x02", None, "; correct it and save the file as UTF-8 text"),
        ("#" * (LARGEST_FILE_BYTES + 1), None, "larger than"),
    ],
)  # fmt: skip
def test_profiles_that_are_none(write, content, line, why):
    path = write(content)
    with pytest.raises(ConfigError) as caught:
        load_profiles(path)
    message = str(caught.value)
    assert message.startswith(f"{path}:{line}: " if line else f"{path}: ")
    assert why in message and "\n" not in message


def test_files_that_are_none(tmp_path):
    for path in (tmp_path / "absent.yaml", tmp_path):
        with pytest.raises(ConfigError, match="cannot be read"):
            load_profiles(path)


def test_unknown_names_find_the_nearest():
    with pytest.raises(ConfigError, match="did you mean summarisation"):
        load_profiles(names=["summarization"])
    with pytest.raises(ConfigError, match="did you mean pue"):
        load_assumptions(settings=["peu=1.2"])
    with pytest.raises(ConfigError, match="did you mean electricity_dollars_per_kwh"):
        load_assumptions(settings=["electricity_price_per_kwh=1"])


def test_settings_and_files_of_assumptions(write):
    path = write(
        "assumptions:\n  pue: {value: 1.2, source: our meter, state: measured}\n  carbon_grams_per_kwh: {value: 50}\n"
    )
    loaded = load_assumptions(path, ["carbon-grams-per-kwh=60:40:80", "pue = 1.3"])
    assert loaded["pue"] == 1.3 and loaded.entries["pue"].low is None
    carbon = loaded.entries["carbon_grams_per_kwh"]
    assert (carbon.value, carbon.low, carbon.high, carbon.state) == (60, 40, 80, "given")
    of_file = load_assumptions(path).entries
    assert (of_file["pue"].source, of_file["pue"].state) == ("our meter", "measured")
    assert of_file["carbon_grams_per_kwh"].source == str(path)


@pytest.mark.parametrize(
    ("setting", "why"),
    [
        ("pue", "give a value, as in --set pue=1.54"),
        ("pue=", "expected a number"),
        ("pue=1:2", "VALUE:LOW:HIGH"),
        ("pue=nan", "expected a number"),
        ("pue=inf", "expected a number"),
        ("pue=0.9", "must be at least 1"),
        ("pue=1.5:0.5:2", "must be at least 1"),
        ("pue=9", "must be at most 5"),
        ("pue=1.5:1.6:2", "outside its range 1.6 to 2"),
        ("utilisation_share=0", "must be at least 0.001"),
        ("carbon_grams_per_kwh=1e300", "too large"),
        ("", "unknown assumption ''"),
    ],
)
def test_settings_that_are_none(setting, why):
    with pytest.raises(ConfigError, match=why):
        load_assumptions(settings=[setting])


@pytest.mark.parametrize(
    ("content", "why"),
    [
        ("assumptions: {puee: {value: 1.2}}", "did you mean pue"),
        ("assumptions: {pue: {value: 1.2, minimum: 0}}", "unknown key 'assumptions.pue.minimum'"),
        ("assumptions: {pue: 1.2}", "must be a mapping"),
        ("assumptions: {pue: {value: 1.2, low: 1.1}}", "one end of a range"),
    ],
)
def test_assumptions_files_that_are_none(write, content, why):
    with pytest.raises(ConfigError, match=why):
        load_assumptions(write(content))


def test_every_shipped_assumption_has_a_source_a_unit_and_a_range():
    for name, entry in load_assumptions().entries.items():
        assert len(entry.source) > 10, name
        assert entry.unit and entry.low is not None and entry.high is not None and entry.low < entry.high, name
        assert entry.minimum is not None, name


YAML_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20) | st.dates(),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=10) | st.integers(), inner, max_size=3)
    ),
    max_leaves=10,
)
KEYS = st.sampled_from(["input_tokens", "output_tokens", "turns", "think_seconds", "title", "state", "carries_context"])


@settings(max_examples=examples(200), deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.dictionaries(KEYS | st.text(max_size=5), YAML_VALUES, max_size=8))
def test_any_profile_is_read_or_refused_in_one_line(write, profile):
    path = write(yaml.safe_dump({"profiles": {"mine": profile}}, allow_unicode=True))
    try:
        [mine] = load_profiles(path)
    except ConfigError as error:
        message = str(error)
    else:
        assert mine.written_tokens >= 1 and mine.read_tokens() >= 0
        return
    assert message.startswith(str(path)) and "\n" not in message


@settings(max_examples=examples(200), deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.binary(max_size=200) | st.text(alphabet="profiles: {}[]&*!|>-\n\t'\"#%@`\\0a1", max_size=100).map(str.encode))
def test_any_bytes_are_refused_in_one_line(write, content):
    path = write(content)
    with pytest.raises(ConfigError) as caught:
        load_profiles(path)
    assert str(caught.value).startswith(str(path)) and "\n" not in str(caught.value)
