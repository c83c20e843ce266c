import re
from contextlib import suppress
from dataclasses import fields, replace
from pathlib import Path

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from megatoken.config import KEYS, AnswerConfig, EngineSection, RunConfig, load_flags, load_run_config
from megatoken.engine import EngineConfig, Sampling
from megatoken.engine.config import RECORD_SECONDS
from megatoken.errors import ConfigError, ExitCode
from megatoken.serve.options import ServeEngineSection, load_serve_config
from megatoken.text import nearest


def write(folder: Path, text: str) -> Path:
    path = folder / "run.yaml"
    path.write_text(text)
    return path


def test_engine_section_is_the_engines_configuration() -> None:
    section, served = (
        {name: field.default for name, field in one.model_fields.items()} for one in (EngineSection, ServeEngineSection)
    )
    others = ("precision", "throughput_only")  # of the run
    engine = {field.name: field.default for field in fields(EngineConfig) if field.name not in others}
    assert served == engine | {"prefix_cache": True, "record_seconds": RECORD_SECONDS}
    # A run is one group, and always records.
    assert section == {name: value for name, value in engine.items() if name not in ("fair_slowdown", "record_seconds")}
    own = {"record_seconds": RECORD_SECONDS, "throughput_only": True}
    assert RunConfig().engine_config() == EngineConfig(**own)
    assert RunConfig(scenario="server").engine_config() == EngineConfig(**own | {"throughput_only": False})


def test_every_key_says_what_it_is_for() -> None:
    assert all(key.description for key in KEYS.values())
    assert {"model", "min_duration_seconds", "engine.max_batched_tokens"} <= KEYS.keys()


def test_flags_win_over_the_file_and_the_file_over_defaults(tmp_path: Path) -> None:
    path = write(tmp_path, "model: 125m\nsamples: 8\nengine:\n  max_batched_tokens: 64\n  page_size: 16\n")
    config = load_run_config(
        path, {"samples": "9", "engine.max-batched-tokens": "32", "min-duration": "2.5", "precision": "fp32"}
    )
    assert (config.model, config.samples, config.min_duration_seconds) == ("125m", 9, 2.5)
    sizes = {"max_batched_tokens": 32, "page_size": 16}
    assert config.engine_config() == replace(RunConfig().engine_config(), precision="fp32", **sizes)


def test_a_flag_can_set_a_value_back_to_null(tmp_path: Path) -> None:
    assert load_run_config(write(tmp_path, "samples: 8\n"), {"samples": "null"}).samples is None


def test_empty_files_and_empty_sections_are_the_defaults(tmp_path: Path) -> None:
    for text in ("", "# nothing\n", "engine:\n", "{}", "engine: {}"):
        assert load_run_config(write(tmp_path, text), {}) == RunConfig()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "model: tiny\nengine:\n  max_batched_token: 5\n",
            "run.yaml:3: unknown key 'engine.max_batched_token'; did you mean engine.max_batched_tokens?",
        ),
        (
            "max_batched_tokens: 5\n",
            "run.yaml:1: unknown key 'max_batched_tokens'; did you mean engine.max_batched_tokens?",
        ),
        ("modle: 125m\n", "run.yaml:1: unknown key 'modle'; did you mean model?"),
        ("engin: {max_batched_tokens: 5}\n", "run.yaml:1: unknown key 'engin'; did you mean engine?"),
        ("samples: true\n", "run.yaml:1: samples: must be a whole number, got 'true'"),
        ("find_rate: yes\n", "run.yaml:1: find_rate: only for the scenarios server and interactive, and "),
        ("seed: no\n", "run.yaml:1: seed: must be a whole number, got 'no'"),
        ("engine: {threads: yes}\n", "run.yaml:1: engine.threads: must be a whole number, got 'yes'"),
        ("warm_up_seconds: true\n", "run.yaml:1: warm_up_seconds: must be a number of seconds, got 'true'"),
        ("samples: 1e3\n", "run.yaml:1: samples: must be a whole number, got '1e3'"),
        ("samples: 0x10\n", "run.yaml:1: samples: must be a whole number, got '0x10'"),
        ("samples: 1:30\n", "run.yaml:1: samples: must be a whole number, got '1:30'"),
        ("min_duration_seconds: 1:30\n", "run.yaml:1: min_duration_seconds: must be a number of seconds, got '1:30'"),
        ("samples: [1, 2]\n", "run.yaml:1: samples: must be one value, not a list or mapping"),
        ("samples: ~\nmodel:\n", "run.yaml:2: model: must not be null"),
        ("random_weights: 2\n", "run.yaml:1: random_weights: must be true or false, got '2'"),
        ("seed: 9223372036854775808\n", "seed: must be less than 9,223,372,036,854,775,808, got '9223372036854775808'"),
        (f"samples: {'9' * 5000}\n", "run.yaml:1: samples: must be a whole number of fewer digits, got '9999"),
        ("samples: 100000001\n", "run.yaml:1: samples: must be at most 100,000,000, got '100000001'"),
        ("warm_up_seconds: 1e9\n", "run.yaml:1: warm_up_seconds: must be less than 1,000,000,000 seconds, got '1e9'"),
        (
            "engine.max_batched_tokens: 5\nengine: {max_batched_tokens: 6}\n",
            "run.yaml:2: key 'engine.max_batched_tokens' is given twice; keep one",
        ),
        (
            "engine: {max_batched_tokens: 6}\nengine: {threads: 1}\n",
            "run.yaml:2: key 'engine' is given twice; keep one",
        ),
        ("model: " + "[" * 3000, "run.yaml: nested too deeply"),
        ("out: ''\n", "run.yaml:1: out: must be a path, got ''"),
        ("min_duration: 5\n", "run.yaml:1: unknown key 'min_duration'; did you mean min_duration_seconds?"),
        ("\nxyzzy: 5\n", "run.yaml:2: unknown key 'xyzzy'; see megatoken run --help"),
        ("engine: 5\n", "run.yaml:1: 'engine' must be a mapping of keys to values; write KEY: VALUE"),
        ("- model\n", "run.yaml:1: the file must be a mapping of keys to values"),
        ("samples: 3\nsamples: 4\n", "run.yaml:2: key 'samples' is given twice"),
        (
            "model: [\n",
            "run.yaml:2: not YAML: expected the node content, but found '<stream end>'; correct it there or just above",
        ),
        ("samples: 0\n", "run.yaml:1: samples: must be at least 1, got '0'"),
        ("samples: 2020-01-01\n", "run.yaml:1: samples: must be a whole number, got '2020-01-01'"),
        (
            "precision: fp4\n",
            "run.yaml:1: precision: must be 'fp32', 'bf16' or 'fp8'; fp4 is supported on simulated GPUs",
        ),
        ("model: tiny\nprecision: int4\n", "run.yaml:2: precision: must be 'fp32', 'bf16', 'fp8' or 'fp4', got 'int4'"),
        ("min_duration_seconds: .nan\n", "run.yaml:1: min_duration_seconds: must be a number of seconds, got '.nan'"),
        (
            "min_duration_seconds: nan\n",
            "run.yaml:1: min_duration_seconds: must be a finite number of seconds, got 'nan'",
        ),
        ("warm_up_seconds: -1\n", "run.yaml:1: warm_up_seconds: must be at least 0 seconds"),
        ("model: ''\n", "run.yaml:1: model: must not be empty"),
        (
            "rules: v6.0\nengine:\n  prefix_cache: true\n",
            "run.yaml:3: engine.prefix_cache: MLPerf forbids reusing results of one sample for another; leave it out",
        ),
        ("engine: {device: tpu}\n", "run.yaml:1: engine.device: must be 'auto', 'cpu' or 'cuda', got 'tpu'"),
        (
            "model: !!python/object:os.system x\n",
            "run.yaml:1: model: must be a plain value, without the tag tag:yaml.org,2002:python/",
        ),
        ("engine: &loop\n  max_batched_tokens: *loop\n", "run.yaml:2: engine.max_batched_tokens: must be one value"),
        ("? [a, b]\n: 5\n", "run.yaml:1: unknown key"),
        ("prompts: a.jsonl\nlengths: b.csv\n", "run.yaml:1 and .*run.yaml:2: give prompts or lengths, not both"),
    ],
)
def test_what_is_wrong_in_a_file_is_named_with_its_line(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_run_config(write(tmp_path, text), {})
    assert re.search(re.escape(message).replace(r"\.\*", ".*"), str(caught.value))
    assert caught.value.exit_code is ExitCode.USAGE
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("text", "key", "value"),
    [
        ("samples: 010", "samples", 10),  # 8 in YAML 1.1
        ("samples: 1_000", "samples", 1000),
        ("samples: '12'", "samples", 12),
        ("seed: !!int 7", "seed", 7),
        ("min_duration_seconds: 1e3", "min_duration_seconds", 1000.0),  # a text in YAML 1.1
        ("min_duration_seconds: 007", "min_duration_seconds", 7.0),
        ("warm_up_seconds: 5", "warm_up_seconds", 5.0),
        ("random_weights: on", "random_weights", True),
        ("random_weights: NO", "random_weights", False),
        *((f"random_weights: {word}", "random_weights", True) for word in ("true", "yes", "y", "t", "1")),
        *((f"random_weights: {word}", "random_weights", False) for word in ("false", "off", "n", "f", "0")),
        ("model: no", "model", "no"),
        ("model: 010", "model", "010"),
        ("model: 1.10", "model", "1.10"),
        ("model: 1:30", "model", "1:30"),
        ("model: 2026-11-21", "model", "2026-11-21"),
        ("model: 'null'", "model", "null"),
        ("out: 2026-11-21", "out", Path("2026-11-21")),
        ("out: 0x1F", "out", Path("0x1F")),
        ("rules: ~", "rules", None),
        ("rules:", "rules", None),
    ],
)
def test_a_value_means_what_its_key_says_not_what_yaml_makes_of_it(
    tmp_path: Path, text: str, key: str, value: object
) -> None:
    found = getattr(load_run_config(write(tmp_path, f"{text}\n"), {}), key)
    assert (found, type(found)) == (value, type(value))


@given(
    key=st.sampled_from(sorted(KEYS)), text=st.text() | st.sampled_from(["nan", "-1", "1e999", "9" * 5000, "\udcff"])
)
def test_no_library_speaks_to_the_user(key: str, text: str) -> None:
    with suppress(ConfigError):
        load_run_config(None, {key: text})
        return
    with pytest.raises(ConfigError, match=rf"--{re.escape(key)}: (must|only )") as caught:
        load_run_config(None, {key: text})
    assert not re.search("nput|valid|parse|string|integer", str(caught.value).partition(", got ")[0])


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ({"out": ""}, "--out: must be a path, got ''"),
        ({"samples": "many"}, "--samples: must be a whole number, got 'many'"),
        ({"samples": "-3"}, "--samples: must be at least 1, got '-3'"),
        ({"ttft-limit": "450ms"}, "--ttft-limit: must be a number of seconds, got '450ms'"),
        ({"limits.tpot_seconds.p99": "0"}, "--limits.tpot_seconds.p99: must be more than 0 seconds, got '0'"),
        ({"engine.memory_bytes": "16G"}, "--engine.memory_bytes: must be a whole number of bytes, got '16G'"),
        (
            {"limits.samples_per_second": "x"},
            "--limits.samples_per_second: must be a number of samples per second, got 'x'",
        ),
        ({"rate": "fast"}, "--rate: must be a number of samples per second, got 'fast'"),
        (
            {"scenario": "batch"},
            "--scenario: must be 'offline', 'server', 'interactive' or 'singlestream', got 'batch'",
        ),
        ({"rules": "v4.0"}, "--rules: must be 'v5.1', 'v6.0' or 'v6.1', got 'v4.0'"),
        ({"min-duration": "inf"}, "--min-duration: must be"),
        ({"random-weights": "maybe"}, "--random-weights: must be true or false, got 'maybe'"),
        ({"model": "\udcff"}, "--model: must be UTF-8 text"),
        ({"prompts": "a", "lengths": "b"}, "--prompts and --lengths: give prompts or lengths, not both"),
    ],
)
def test_what_is_wrong_in_a_flag_is_named_as_typed(flags: dict[str, str | bool], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_run_config(None, flags)
    assert str(caught.value).startswith(message)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ({"temperature": "nan"}, "--temperature: must be a finite number, got 'nan'"),
        ({"temperature": "inf"}, "--temperature: must be a finite number, got 'inf'"),
        ({"temperature": "-1"}, "--temperature: must be at least 0, got '-1'"),
        ({"temperature": "hot"}, "--temperature: must be a number, got 'hot'"),
        ({"temperature": "null"}, "--temperature: must not be null"),
        ({"top-p": "0"}, "--top-p: must be more than 0, got '0'"),
        ({"top-p": "1.1"}, "--top-p: must be at most 1, got '1.1'"),
        ({"top-k": "2147483648"}, "--top-k: must be less than 2,147,483,648"),
        ({"top-k": "2.5"}, "--top-k: must be a whole number, got '2.5'"),
        ({"seed": "-1"}, "--seed: must be at least 0, got '-1'"),
        ({"stop-token-ids": "1,x"}, "--stop-token-ids: must be a whole number, got 'x'"),
        ({"stop-token-ids": ""}, "--stop-token-ids: must be a whole number, got ''"),
        ({"stop-token-ids": "null"}, "--stop-token-ids: must not be null"),
    ],
)
def test_what_is_wrong_in_a_sampling_flag_is_named_as_typed(flags: dict[str, str | None], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_flags(AnswerConfig, flags)
    assert str(caught.value).startswith(message)


def test_sampling_flags_become_the_engines_sampling() -> None:
    config = load_flags(
        AnswerConfig, {"temperature": ".5", "top-k": "40", "top-p": None, "seed": "7", "stop-token-ids": "1, 2,3"}
    )
    assert config.sampling() == Sampling(temperature=0.5, top_k=40, top_p=1.0, seed=7)
    assert config.stop_token_ids == (1, 2, 3)
    assert load_flags(AnswerConfig, {}).sampling() == Sampling()


def test_letters_that_changed_places_count_for_more_than_a_missing_one() -> None:
    assert nearest("gb300", ["B300", "GB300", "GB200"]) == "GB300"
    assert nearest("modle", ["mode", "model", "out"]) == "model"
    assert nearest("mod", ["mode", "model", "out"]) == "mode"
    assert nearest("xyzzy", ["mode", "model", "out"]) is None


def test_a_file_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"none\.yaml: cannot be read: No such file"):
        load_run_config(tmp_path / "none.yaml", {})
    (tmp_path / "binary.yaml").write_bytes(b"model: \xff\xfe")
    with pytest.raises(ConfigError, match=r"binary\.yaml: not UTF-8 at byte 7; give a YAML file of settings"):
        load_run_config(tmp_path / "binary.yaml", {})
    (tmp_path / "nul.yaml").write_bytes(b"model: a\0b")
    with pytest.raises(ConfigError, match=r"nul\.yaml: not YAML: .*; correct it and save the file as UTF-8 text$"):
        load_run_config(tmp_path / "nul.yaml", {})


counts = st.none() | st.integers(min_value=1, max_value=10**12)
seconds = st.floats(min_value=0, max_value=1e6)
configurations = st.builds(
    RunConfig,
    model=st.text(st.characters(codec="utf-8", exclude_categories=["Cc", "Cs", "Zl", "Zp"]), min_size=1),
    random_weights=st.booleans(),
    seed=st.integers(0, 2**63 - 1),
    precision=st.sampled_from(["fp32", "bf16", "fp8"]),
    mode=st.sampled_from(["performance", "accuracy"]),
    rules=st.sampled_from([None, "v5.1", "v6.0", "v6.1"]),
    lengths=st.none() | st.just(Path("a b.csv")),
    samples=st.none() | st.integers(min_value=1, max_value=10**8),
    min_duration_seconds=st.none() | seconds,
    warm_up_seconds=seconds,
    engine=st.builds(EngineSection, max_batched_tokens=counts, cache_tokens=counts, overlap=st.none() | st.booleans()),
)


@given(configurations)
def test_the_resolved_configuration_gives_the_same_run_again(
    tmp_path_factory: pytest.TempPathFactory, config: RunConfig
) -> None:
    path = write(
        tmp_path_factory.mktemp("round-trip"), yaml.safe_dump(config.model_dump(mode="json"), allow_unicode=True)
    )
    assert load_run_config(path, {}) == config


@given(st.binary(max_size=80) | st.text("engin:mxrows5 \n-&*[]{}?!\"'|>%@`#,\t", max_size=60).map(str.encode))
def test_no_file_gets_more_than_a_configuration_error(tmp_path_factory: pytest.TempPathFactory, content: bytes) -> None:
    path = tmp_path_factory.mktemp("fuzz") / "run.yaml"
    path.write_bytes(content)
    with suppress(ConfigError):
        load_run_config(path, {})


def test_a_rack_of_a_server_takes_the_same_file_without_the_keys_of_a_run(tmp_path: Path) -> None:
    file = write(tmp_path, "replicas: 3\ndead_after_seconds: 2\n")
    rack = load_serve_config({}, str(file)).rack
    assert (rack.cluster, rack.replicas, rack.dead_after_seconds) == ("auto", 3, 2.0)
    assert load_serve_config({"rack.replicas": "2"}, "10.0.0.1:6379").rack.cluster == "10.0.0.1:6379"
    with pytest.raises(ConfigError, match=r"run\.yaml:1: unknown key 'rack\.count'"):
        load_serve_config({}, str(write(tmp_path, "count: per_node\n")))
    with pytest.raises(ConfigError, match="only for a rack; give --rack auto"):
        load_serve_config({"rack.replicas": "2"})


@pytest.mark.parametrize("text", ["", "{}", "# nothing\n"])
def test_a_file_of_one_section_that_sets_nothing_is_refused(tmp_path: Path, text: str) -> None:
    file = write(tmp_path, text)
    with pytest.raises(ConfigError, match=r"run\.yaml: sets nothing; give auto, host:port or a YAML file with"):
        load_serve_config({}, str(file))
    with pytest.raises(ConfigError, match=r"run\.yaml: sets nothing; give a YAML file of limits with"):
        load_run_config(None, {}, slo=file)
