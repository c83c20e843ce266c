"""The schema of a run: YAML keys are dotted flags; every error names its place and how to fix it."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from operator import attrgetter
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar, get_args

import yaml
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError

from megatoken.engine.config import DEFAULT_PRECISION, RECORD_SECONDS, REFERENCE, EngineConfig, Precision
from megatoken.engine.request import Sampling
from megatoken.engine.schemes import find_scheme, unknown_precision
from megatoken.errors import ConfigError
from megatoken.mlperf.benchmarks import BenchmarkName
from megatoken.text import suggestion
from megatoken.yaml_files import compose, demand

FLAG_ALIASES = {name: f"{name}_seconds" for name in ("min_duration", "warm_up", "probe", "ttft_limit", "tpot_limit")}
FLAG_ALIASES |= {name: f"endpoint.{name}" for name in ("served_model", "api_key_file", "api", "start_server")}
FLAG_ALIASES["endpoint"] = "endpoint.urls"
REPEATED = "endpoint.urls"  # the flag may be given several times; its values are then joined by commas


def _not_empty(value: Any) -> Any:
    if value == "":  # pathlib takes it for the working directory
        raise ValueError("must be a path")
    return value


def _run_as_a_test(value: Any) -> Any:
    if value in ("TEST07", "TEST09"):
        raise ValueError(
            f"must be 'TEST06' ({value} checks the answers to all rows: megatoken run --mode accuracy, then "
            f"megatoken verify {value})"
        )
    return value


def separated(value: Any) -> Any:
    """The parts of a text between commas."""
    return value.split(",") if isinstance(value, str) else value


RoundName = Literal["v5.1", "v6.0", "v6.1"]  # whose seeds and rules are known: data/loadgen_rules.json
Text = Annotated[str, Field(min_length=1)]
Count = Annotated[int, Field(ge=1, lt=2**63)]
Seconds = Annotated[float, Field(ge=0, lt=1e9)]
Rate = Annotated[float, Field(gt=0)]
Limit = Annotated[float, Field(ge=0.001, lt=1e6)]  # LoadGen takes whole milliseconds
Seed = Annotated[int, Field(ge=0, lt=2**63)]
GivenPath = Annotated[Path, BeforeValidator(_not_empty)]


class Section(BaseModel):
    """Base of the schemas of settings."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


_Schema = TypeVar("_Schema", bound=Section)


class EngineSection(Section):
    """How the engine uses the machine. Null: derived from model and machine, as --dry-run shows."""

    device: Literal["auto", "cpu", "cuda"] = Field(default="auto", description="where the model runs")
    max_batched_tokens: Count | None = Field(default=None, description="tokens computed in one step (the token budget)")
    max_sequences: Count | None = Field(default=None, description="requests that run at once")
    max_length: Count | None = Field(default=None, description="longest prompt + answer, in tokens")
    page_size: Count | None = Field(default=None, description="tokens in one page of the KV cache")
    cache_tokens: Count | None = Field(default=None, description="size of the KV cache, in tokens")
    memory_bytes: Count | None = Field(default=None, description="memory the engine may use")
    threads: Count | None = Field(default=None, description="CPU threads")
    tensor_parallel: Count = Field(default=1, description="GPUs that share one copy of the model")
    fp8_scales: Literal["tensor", "row"] = Field(
        default="tensor", description="scales of fp8: one for each weight and its inputs, or one for each row"
    )
    packed_weights: bool | None = Field(default=None, description="four-bit weights stay packed on a GPU")
    overlap: bool | None = Field(default=None, description="plan the next step while one runs")
    cuda_graphs: bool = Field(default=True, description="replay steps of few rows on a GPU as one launch")
    target_step_seconds: Rate | None = Field(
        default=None,
        lt=1e6,
        description="longest mean step, which limits prefill; null: 95 % of the TPOT limit, if there is one",
    )
    prefix_cache: bool = Field(default=False, description="compute equal beginnings of prompts once")


class ReplicasSection(Section):
    """Copies of the model on several machines or GPUs. Null cluster: the engine in one process."""

    cluster: Text | None = Field(
        default=None, description="Ray cluster: auto, or host:port; null: no rack, one engine in this process"
    )
    replicas: Count | None = Field(
        default=None, le=100_000, description="copies of the model; null: one per GPU, without GPUs one per node"
    )
    dead_after_seconds: Rate = Field(
        default=8.0, ge=0.5, lt=1e6, description="silence, or length of one step, after which a replica counts as lost"
    )
    reconnect_seconds: Seconds = Field(default=30.0, description="how long a lost replica may take to reconnect")
    wait_seconds: Seconds = Field(default=60.0, description="how long a rack without replicas waits for one")


class RackSection(ReplicasSection):
    """How ``megatoken run`` uses several machines or GPUs through Ray."""

    count: Literal["one_sut", "per_node"] = Field(
        default="one_sut", description="one LoadGen for all nodes, or one per node with the results added up"
    )
    simulated_gpu: Text | None = Field(
        default=None, description="GPU that every replica simulates with a cost model; null: replicas compute"
    )
    simulated_nodes: Count = Field(default=18, le=1000, description="nodes to simulate, each a process")
    simulated_gpus: Count = Field(default=4, le=64, description="GPUs of a simulated node")
    replace: bool = Field(default=True, description="restart lost replicas, and start replicas on nodes that join")


class EndpointSection(Section):
    """How a server of others is measured over HTTP. Null urls: no endpoint, but our own engine."""

    urls: Text | None = Field(
        default=None, description="address of the API, such as http://host:8000/v1; several: with commas between"
    )
    served_model: Text | None = Field(
        default=None, description="name of the model to ask for; null: the first one that the server lists"
    )
    api_key_file: GivenPath | None = Field(default=None, description="file that holds the API key; it is never stored")
    api: Literal["chat", "completions", "responses"] | None = Field(
        default=None, description="route to call; null: chat for prompts of messages, else completions"
    )
    stream: bool | None = Field(default=None, description="answers as streams; null: except in the scenario offline")
    start_server: Text | None = Field(
        default=None, description="command that starts the server to measure; it is stopped afterwards"
    )
    start_seconds: Rate = Field(default=900.0, lt=1e6, description="how long a server may take until it is ready")
    timeout_seconds: Rate = Field(default=600.0, lt=1e6, description="how long one answer may take; then it has failed")
    connect_seconds: Rate = Field(default=10.0, lt=1e6, description="how long opening a connection may take")
    max_in_flight: Count = Field(default=1024, le=65_536, description="requests that are open at once; others wait")
    processes: Count | None = Field(
        default=None, le=256, description="client processes; null: half as many as cores, at most 4 on a machine"
    )
    hosts: Text | None = Field(default=None, description="Ray cluster for the client processes: auto, or host:port")
    ca_file: GivenPath | None = Field(default=None, description="PEM file of certificates to trust, for https")

    @property
    def addresses(self) -> tuple[str, ...]:
        """The URLs one by one."""
        return tuple(url.strip() for url in self.urls.split(",")) if self.urls else ()


class PercentileLimits(Section):
    """Limits on percentiles of a latency, in seconds; null: no limit."""

    p50: Rate | None = Field(default=None, description="longest median, in seconds")
    p90: Rate | None = Field(default=None, description="longest 90th percentile, in seconds")
    p95: Rate | None = Field(default=None, description="longest 95th percentile, in seconds")
    p99: Rate | None = Field(default=None, description="longest 99th percentile, in seconds")
    p999: Rate | None = Field(default=None, description="longest 99.9th percentile, in seconds")


class AccuracyLimits(Section):
    """Lowest scores, from 0 to 100; null: no limit."""

    exact_match: Rate | None = Field(default=None, le=100, description="lowest share of exact matches, in percent")
    rouge1: Rate | None = Field(default=None, le=100, description="lowest ROUGE-1")
    rouge2: Rate | None = Field(default=None, le=100, description="lowest ROUGE-2")
    rougeL: Rate | None = Field(default=None, le=100, description="lowest ROUGE-L")


class LimitsSection(Section):
    """The user's own limits, which a run is judged by; a file of them is given with --slo. Null: no limit."""

    ttft_seconds: PercentileLimits = PercentileLimits()
    tpot_seconds: PercentileLimits = PercentileLimits()
    itl_seconds: PercentileLimits = PercentileLimits()
    latency_seconds: PercentileLimits = PercentileLimits()
    accuracy: AccuracyLimits = AccuracyLimits()
    output_tokens_per_second: Rate | None = Field(default=None, description="lowest output rate")
    samples_per_second: Rate | None = Field(default=None, description="lowest sample rate")
    dollars_per_request: Rate | None = Field(default=None, description="highest price of a request")


class RunConfig(Section):
    """All settings of ``megatoken run``; the resolved configuration is written to the run folder."""

    model: str = Field(
        default=REFERENCE, min_length=1, description="checkpoint directory, named shape, or the model that ships"
    )
    random_weights: bool = Field(default=False, description="use the model's shape with random weights")
    seed: Seed = Field(default=0, description="seed of random weights and random prompts")
    precision: Precision | None = Field(default=None, description="number format of weights; null: bf16 or faster fp32")
    scenario: Literal["offline", "server", "interactive", "singlestream"] = Field(
        default="offline", description="how load arrives"
    )
    mode: Literal["performance", "accuracy"] = Field(default="performance", description="accuracy logs all token ids")
    compliance: Annotated[Literal["TEST06"] | None, BeforeValidator(_run_as_a_test)] = Field(
        default=None, description="MLPerf compliance test to run instead of a measurement"
    )
    rules: RoundName | None = Field(default=None, description="MLPerf round whose rules the run claims")
    benchmark: BenchmarkName | None = Field(
        default=None, description="MLPerf benchmark to compare with; null: by the model's name, else llama2-70b"
    )
    rate: Rate | None = Field(
        default=None, lt=1e6, description="samples/s offered (server, interactive); null: a share of the warm-up's rate"
    )
    find_rate: bool = Field(default=False, description="search for the highest valid rate, then confirm it")
    probe_seconds: Rate | None = Field(
        default=None, lt=1e9, description="length of a probe of the search; null: derived"
    )
    ttft_limit_seconds: Limit | None = Field(default=None, description="p99 time to first token; null: the benchmark's")
    tpot_limit_seconds: Limit | None = Field(default=None, description="p99 per output token; null: the benchmark's")
    repeat: Count = Field(default=1, le=1000, description="number of times to run the same test")
    text: bool = Field(default=False, description="tokenise prompts and detokenise answers within the measured time")
    prompts: GivenPath | None = Field(default=None, description="prompts: JSON lines, or the OpenOrca pickle")
    lengths: GivenPath | None = Field(default=None, description="CSV of input_tokens,output_tokens")
    max_tokens: Count = Field(default=128, description="longest answer to prompts that state no max_tokens")
    samples: Count | None = Field(
        default=None,
        le=100_000_000,
        description="samples to issue (with rack.count per_node, on every node); null: enough for the duration",
    )
    min_duration_seconds: Seconds | None = Field(
        default=None, description="shortest run; null: 600 under rules, otherwise about 15 if samples is null"
    )
    power_meter: Text | None = Field(default=None, description="file or command with the watts of the whole system")
    qualify: bool = Field(default=False, description="run the quick set of megatoken qualify first, and keep it")
    warm_up_seconds: Seconds = Field(default=3.0, description="time to estimate the rate; not measured")
    out: GivenPath = Field(default=Path("runs"), description="folder in which the run folder is created")
    engine: EngineSection = EngineSection()
    rack: RackSection = RackSection()
    endpoint: EndpointSection = EndpointSection()
    limits: LimitsSection = LimitsSection()
    dollars_per_hour: Rate | None = Field(
        default=None, lt=1e9, description="price of the machine for an hour; null: assumed for known accelerators"
    )

    def engine_config(self) -> EngineConfig:
        """The settings of the engine, as its own type. Short steps are recorded before the run."""
        own: dict[str, Any] = {"record_seconds": RECORD_SECONDS, "throughput_only": self.scenario == "offline"}
        return EngineConfig(precision=self.precision or DEFAULT_PRECISION, **self.engine.model_dump(), **own)


class AnswerConfig(Section):
    """How ``megatoken generate`` samples tokens and ends answers; a line of a prompt file may override it."""

    temperature: float = Field(default=0.0, ge=0)
    top_k: int = Field(default=0, ge=0, lt=2**31)
    top_p: float = Field(default=1.0, gt=0, le=1)
    seed: Seed | None = None
    stop_token_ids: Annotated[tuple[int, ...], BeforeValidator(separated)] = ()

    def sampling(self) -> Sampling:
        """The sampling settings, as the engine's own type."""
        return Sampling(self.temperature, self.top_k, self.top_p, self.seed)


@dataclass(frozen=True, slots=True)
class Key:
    """One setting of the schema."""

    default: Any
    description: str
    is_switch: bool  # takes true or false


@dataclass(frozen=True, slots=True)
class _Setting:
    value: str | bool | None
    place: str  # "run.yaml:3" or "--samples"


def load_run_config(
    path: Path | None, flags: Mapping[str, str | bool | None], rack: str | None = None, slo: Path | None = None
) -> RunConfig:
    """Loads a configuration: defaults, overridden by a YAML file, overridden by flags.

    Args:
        path: YAML file, or None.
        flags: value by flag name without dashes (``engine.max_batched_tokens``, ``min-duration``), as typed on the
            command line; None: not given.
        rack: value of ``--rack``: ``auto``, host:port, or a YAML file of the keys of the section ``rack``, whose
            ``cluster`` is ``auto`` if it names none.
        slo: YAML file of the keys of the section ``limits``.

    Raises:
        ConfigError: an unknown key (with the nearest right one), a bad value or an unreadable file, with its place.
    """
    settings = _read_yaml(path, KEYS) if path is not None else {}
    settings |= _rack_settings(rack, KEYS) | _slo_settings(slo) | _from_flags(flags)
    inputs = [one.place for key in ("prompts", "lengths") if (one := settings.get(key)) and one.value is not None]
    if len(inputs) > 1:
        raise ConfigError(f"{' and '.join(inputs)}: give prompts or lengths, not both")
    config = _checked(RunConfig, settings)
    _check_together(config, settings)
    return config


def load_limits(slo: Path | None, flags: Mapping[str, str | bool | None]) -> dict[str, Any]:
    """Loads limits as ``config.yaml`` of a run holds them, and the price of an hour: a file, overridden by flags.

    Raises ConfigError as ``load_run_config``.
    """
    config = _checked(RunConfig, _slo_settings(slo) | _from_flags(flags))
    return config.model_dump(mode="json", include={"limits", "dollars_per_hour"})


def load_flags(schema: type[_Schema], flags: Mapping[str, str | bool | None], rack: str | None = None) -> _Schema:
    """Loads settings: defaults, overridden by ``rack`` as for a run, overridden by flags. Raises ConfigError."""
    return _checked(schema, _rack_settings(rack, keys_of(schema)) | _from_flags(flags))


def flag_key(flag: str) -> str:
    """The key that a flag, typed without its leading dashes, would set if the schema has it."""
    key = flag.replace("-", "_")
    return FLAG_ALIASES.get(key, key)


def describe_keys(keys: Mapping[str, Key]) -> Iterator[tuple[str, str, str]]:
    """Yields (dotted key, default, description) of every setting, in the order of the schema."""
    for name, key in keys.items():
        yield name, json.dumps(key.default, default=str).strip('"'), key.description


def _leaves(section: type[Section], prefix: str = "") -> Iterator[tuple[str, Key]]:
    for name, field in section.model_fields.items():
        if isinstance(field.annotation, type) and issubclass(field.annotation, Section):
            yield from _leaves(field.annotation, f"{prefix}{name}.")
        else:
            is_switch = field.annotation is bool or bool in get_args(field.annotation)
            yield f"{prefix}{name}", Key(field.default, field.description or "", is_switch)


def keys_of(schema: type[Section]) -> dict[str, Key]:
    """Every setting of a schema by its dotted key."""
    return dict(_leaves(schema))


KEYS = keys_of(RunConfig)
_GIVE_YAML = "give a YAML file of settings; a model is given with --model, prompts with --prompts"
_GIVE = {"rack": "give auto, host:port or a YAML file", "limits": "give a YAML file of limits"}
_NULL = "tag:yaml.org,2002:null"
_PLAIN_TAGS = {_NULL, *(f"tag:yaml.org,2002:{kind}" for kind in ("bool", "int", "float", "str"))}


def _read_yaml(path: Path, keys: Mapping[str, Key], section: str = "") -> dict[str, _Setting]:
    root = compose(path, _GIVE.get(section, _GIVE_YAML))
    settings = {} if root is None else dict(_settings(root, str(path), keys, section))
    if section and not settings:
        raise ConfigError(f"{path}: sets nothing; {_GIVE[section]} with at least one KEY: VALUE")
    return settings


def _settings(root: yaml.Node, file: str, keys: Mapping[str, Key], section: str) -> Iterator[tuple[str, _Setting]]:
    seen: set[str] = set()
    sections = {key.rpartition(".")[0] for key in keys} - {""}

    def walk(node: yaml.Node, section: str) -> Iterator[tuple[str, _Setting]]:
        if not isinstance(node, yaml.MappingNode):
            if section and _is_null(node):
                return
            where = f"'{section}'" if section else "the file"
            raise ConfigError(
                f"{file}:{node.start_mark.line + 1}: {where} must be a mapping of keys to values; write KEY: VALUE"
            )
        for key_node, value_node in node.value:
            place = f"{file}:{key_node.start_mark.line + 1}"
            name = key_node.value if isinstance(key_node, yaml.ScalarNode) else "?"
            key = f"{section}.{name}" if section else name
            if key in seen:
                raise ConfigError(f"{place}: key '{key}' is given twice; keep one")
            seen.add(key)
            if key in keys:
                yield key, _Setting(_as_typed(value_node, f"{place}: {key}"), place)
            elif key in sections:
                yield from walk(value_node, key)
            else:
                fix = suggestion(FLAG_ALIASES.get(key, key), [*keys, *sections], "see megatoken run --help")
                raise ConfigError(f"{place}: unknown key '{key}'; {fix}")

    yield from walk(root, section)


def _as_typed(node: yaml.Node, place: str) -> str | None:
    """A value as text; its key decides how it is parsed, as with a flag."""
    if not isinstance(node, yaml.ScalarNode):
        raise ConfigError(f"{place}: must be one value, not a list or mapping")
    if node.tag not in _PLAIN_TAGS:
        raise ConfigError(f"{place}: must be a plain value, without the tag {node.tag}")
    return None if _is_null(node) else node.value


def _is_null(node: yaml.Node) -> bool:
    return isinstance(node, yaml.ScalarNode) and node.style is None and node.tag == _NULL


def _rack_settings(rack: str | None, keys: Mapping[str, Key]) -> dict[str, _Setting]:
    if rack is None:
        return {}
    if rack == "auto" or (":" in rack and not Path(rack).exists()):
        return {"rack.cluster": _Setting(rack, "--rack")}
    return {"rack.cluster": _Setting("auto", "--rack")} | _read_yaml(Path(rack), keys, "rack")


def _slo_settings(slo: Path | None) -> dict[str, _Setting]:
    return {} if slo is None else _read_yaml(slo, KEYS, "limits")


def _from_flags(flags: Mapping[str, str | bool | None]) -> dict[str, _Setting]:
    return {
        flag_key(flag): _Setting(None if text in ("null", "none") else text, f"--{flag}")
        for flag, text in flags.items()
        if text is not None
    }


def _checked(schema: type[_Schema], settings: Mapping[str, _Setting]) -> _Schema:
    try:
        return schema.model_validate(_nested(settings))
    except ValidationError as error:
        raise ConfigError(_explain(error, settings)) from None


def _check_together(config: RunConfig, settings: Mapping[str, _Setting]) -> None:
    """Refuses settings that exclude each other; the error names the place of the first."""

    def refuse(key: str, why: str) -> None:
        if key in settings and attrgetter(key)(config) != KEYS[key].default:
            raise ConfigError(f"{_place_of(key, settings)}: {why}")

    if config.scenario not in ("server", "interactive"):
        for key in ("rate", "find_rate", "ttft_limit_seconds", "tpot_limit_seconds", "probe_seconds"):
            refuse(key, f"only for the scenarios server and interactive, and this is {config.scenario}; leave it out")
    if not config.find_rate:
        refuse("probe_seconds", "only for a search for a rate; give --find-rate")
    if config.rules is not None:
        refuse("engine.prefix_cache", "MLPerf forbids reusing results of one sample for another; leave it out")
    if config.rack.count == "per_node":
        for key in ("find_rate", "repeat", "text"):
            refuse(key, "not supported with rack.count per_node, where every node has its own LoadGen; leave it out")
    if config.rack.cluster is None:
        for key in ("rack.count", "rack.replicas", "rack.simulated_gpu"):
            refuse(key, "only for a rack; give --rack auto")
    if config.rack.simulated_gpu is None:
        precision = config.engine_config().precision
        if find_scheme(precision).simulated_only:
            raise unknown_precision(precision, _place_of("precision", settings))
    else:
        for key in ("rules", "compliance", "rack.replicas", "text"):
            refuse(key, "not supported with rack.simulated_gpu, which computes nothing; leave it out")
        if config.mode == "accuracy":
            refuse("mode", "not supported with rack.simulated_gpu, which computes nothing; leave it out")
        if config.rack.count == "per_node":
            refuse("rack.count", "must be one_sut for simulated nodes, which share one machine")
    if config.endpoint.urls is None:
        for key in (key for key in KEYS if key.startswith("endpoint.")):
            refuse(key, "only for a server to measure; give --endpoint http://host:8000/v1")
    else:
        named = ("precision",) if config.precision != DEFAULT_PRECISION else ()  # as in config.yaml of version 0.1
        own = ("random_weights", *named, "text", "rack.cluster")
        for key in (*own, *(key for key in KEYS if key.startswith("engine."))):
            refuse(key, "not supported with an endpoint, whose server decides it; leave it out")
    if config.find_rate:
        for key in ("repeat", "samples"):
            refuse(key, "not supported with find_rate; leave it out")
        if config.mode == "accuracy":
            refuse("find_rate", "accuracy mode has no rate to find; give --mode performance")
    if config.compliance is not None:
        for key in ("mode", "samples", "min_duration_seconds", "find_rate", "repeat"):
            refuse(key, f"not supported with compliance: {config.compliance} defines it; leave it out")


def _nested(settings: Mapping[str, _Setting]) -> dict[str, Any]:
    tree: dict[str, Any] = {}
    for key, setting in settings.items():
        *sections, name = key.split(".")
        branch = tree
        for section in sections:
            branch = branch.setdefault(section, {})
        branch[name] = setting.value
    return tree


def _explain(error: ValidationError, settings: Mapping[str, _Setting]) -> str:
    first = error.errors()[0]
    key = next(key for key in settings if key == ".".join(str(part) for part in first["loc"][: key.count(".") + 1]))
    problem = "must not be null" if first["input"] is None else demand(first, key)
    return f"{_place_of(key, settings)}: {problem}"


def _place_of(key: str, settings: Mapping[str, _Setting]) -> str:
    """Where it was set: the flag, or file and line with the key."""
    place = settings[key].place
    return place if place.startswith("--") else f"{place}: {key}"
