"""The settings of ``megatoken serve``: one schema, every key is a flag."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Literal

from pydantic import BeforeValidator, Field

from megatoken.config import (
    Count,
    EngineSection,
    GivenPath,
    Rate,
    ReplicasSection,
    Seconds,
    Section,
    Seed,
    keys_of,
    load_flags,
    separated,
)
from megatoken.engine.config import DEFAULT_PRECISION, FAIR_SLOWDOWN, RECORD_SECONDS, REFERENCE, EngineConfig, Precision
from megatoken.engine.schemes import find_scheme, unknown_precision
from megatoken.errors import ConfigError
from megatoken.serve.reasoning import ReasoningFormat
from megatoken.serve.tenants import Keys
from megatoken.serve.tool_calls import ToolFormat

Names = Annotated[tuple[str, ...], BeforeValidator(separated)]


class ServeEngineSection(EngineSection):
    """The engine's settings; a server wants another default of one, and has two more."""

    prefix_cache: bool = Field(default=True, description="compute equal beginnings of prompts once")
    fair_slowdown: Annotated[float, Field(gt=1, lt=1e6)] | None = Field(
        default=FAIR_SLOWDOWN,
        description="while a key asks for less than its share, prompts of other keys make a step at most so many times "
        "as long; null: no limit",
    )
    record_seconds: Seconds | None = Field(
        default=RECORD_SECONDS, description="most time for recording steps on a GPU before the first request; 0: none"
    )


class ServeConfig(Section):
    """All settings of ``megatoken serve``."""

    model: str = Field(
        default=REFERENCE, min_length=1, description="checkpoint directory, named shape, or the model that ships"
    )
    served_model_name: str | None = Field(
        default=None, min_length=1, description="name that clients ask for; null: the model's own"
    )
    random_weights: bool = Field(default=False, description="use the model's shape with random weights")
    seed: Seed = Field(default=0, description="seed of random weights")
    precision: Precision | None = Field(
        default=None,
        description="number format of the weights; null: bf16, or fp32 where it is faster",
    )
    engine_kind: Literal["real", "mock"] = Field(
        default="real", description="--engine mock makes up tokens at a set pace, to measure everything but the engine"
    )
    tokens_per_second: Rate = Field(default=50.0, le=1e6, description="of one stream, with --engine mock")
    simulated_gpu: str | None = Field(
        default=None, min_length=1, description="GPU to simulate: real plans, made-up tokens, the time of a cost model"
    )
    host: str = Field(default="127.0.0.1", min_length=1, description="address to listen on")
    port: int = Field(default=8000, ge=0, le=65535, description="port to listen on; 0: any free one")
    http_processes: Count = Field(default=1, le=256, description="processes that speak HTTP")
    api_key: Names = Field(default=(), description="keys that clients must send, separated by commas")
    api_keys: GivenPath | None = Field(
        default=None, description="YAML file of keys with names, weights and limits of requests and tokens"
    )
    max_queued: Count = Field(default=4096, description="requests that may wait; more are refused with 429")
    max_body_bytes: Count = Field(
        default=8 << 20, le=1 << 32, description="largest body of a request; an HTTP process holds 16 of them at most"
    )
    max_connections: Count = Field(default=16_384, description="open connections of one HTTP process")
    idle_seconds: Rate = Field(default=75.0, lt=1e6, description="how long an idle connection stays open")
    head_seconds: Rate = Field(default=10.0, lt=1e6, description="how long the head of a request may take")
    body_seconds: Rate = Field(default=60.0, lt=1e6, description="how long the body of a request may take")
    stalled_seconds: Rate = Field(default=30.0, lt=1e6, description="how long a client may read nothing of its answer")
    drain_seconds: Seconds = Field(default=600.0, description="how long open answers may take after SIGTERM")
    restart: bool = Field(default=False, description="start the engine again when it has failed")
    access_log: bool = Field(default=True, description="log every request; otherwise only errors")
    json_logs: bool = Field(default=False, description="--json: log lines of JSON")
    tls_certificate: GivenPath | None = Field(default=None, description="PEM file of the certificate chain, for HTTPS")
    tls_key: GivenPath | None = Field(default=None, description="PEM file of its private key")
    cors_origins: Names = Field(default=(), description="web origins that may call the server, or *")
    chat_template: GivenPath | None = Field(
        default=None, description="jinja2 file that turns chats into prompts; null: the model's own"
    )
    tool_format: ToolFormat = Field(
        default=ToolFormat.AUTO, description="how the model writes tool calls; auto: found in its chat template"
    )
    reasoning_format: ReasoningFormat = Field(
        default=ReasoningFormat.AUTO,
        description="how the model marks what it thinks before it answers; auto: found in its chat template",
    )
    trust_request_chat_template: bool = Field(default=False, description="requests may bring their own chat_template")
    engine: ServeEngineSection = ServeEngineSection()
    rack: ReplicasSection = ReplicasSection()

    @property
    def stand_in(self) -> str | None:
        """What makes tokens up instead of a model, in the form of a version's local part; None: a model computes."""
        if self.simulated_gpu is not None:
            return f"simulated.{self.simulated_gpu}"
        return "mock" if self.engine_kind == "mock" else None

    def engine_config(self) -> EngineConfig:
        """The settings of the engine, as its own type."""
        return EngineConfig(precision=self.precision or DEFAULT_PRECISION, **self.engine.model_dump())


KEYS = keys_of(ServeConfig)


def load_serve_config(flags: Mapping[str, str | bool | None], rack: str | None = None) -> ServeConfig:
    """Loads the settings: defaults, overridden by flags. ``rack``: value of ``--rack``, as for a run.

    Raises:
        ConfigError: a bad value, with its flag.
    """
    config = load_flags(ServeConfig, flags, rack)
    if config.rack.cluster is None and config.rack != ReplicasSection():
        raise ConfigError("--rack.replicas and the like are only for a rack; give --rack auto")
    if "tokens_per_second" in config.model_fields_set and config.engine_kind != "mock":
        raise ConfigError("--tokens-per-second: only the mock engine has a pace; add --engine mock or leave it out")
    if (config.tls_certificate is None) != (config.tls_key is None):
        raise ConfigError("--tls-certificate and --tls-key go together; give both files")
    if config.simulated_gpu is not None:
        if config.rack.cluster is not None or config.engine_kind == "mock":
            raise ConfigError("--simulated-gpu: not supported with --rack or --engine mock; leave one of them out")
    elif config.precision is not None and find_scheme(config.precision).simulated_only:
        raise unknown_precision(config.precision, "--precision")
    return config


@dataclass(frozen=True, slots=True)
class HttpProcessSettings:
    """What an HTTP process gets from the supervisor."""

    options: ServeConfig
    keys: Keys
    engine_path: str  # Unix socket of the engine process
    listener: int  # file descriptor of the listening socket


@dataclass(frozen=True, slots=True)
class ReplicaSettings:
    """How a replica finds the router, and its part of its node."""

    router: str | tuple[str, int]  # path of its Unix socket, or host and port
    key: bytes  # which both must know
    number: int
    threads: int | None = None  # of its CPU engine
    neighbours: int = 1  # replicas that share the node's main memory


@dataclass(frozen=True, slots=True)
class EngineProcessSettings:
    """What the process of an engine gets from the supervisor."""

    options: ServeConfig
    clients: int | ReplicaSettings  # file descriptor of the Unix socket that HTTP processes connect to, or the router
    several_tenants: bool


@dataclass(frozen=True, slots=True)
class RouterProcessSettings:
    """What the process in front of a rack's replicas gets from the supervisor."""

    options: ServeConfig
    listener: int  # file descriptor of the Unix socket that HTTP processes connect to
    several_tenants: bool
    key: bytes  # which replicas must know
    replicas_path: str  # Unix socket for the replicas of this machine
    local_replicas: int  # how many; 0: the replicas are those of a cluster
    cluster: str  # its address
