"""Metrics under vLLM's names, in Prometheus's text format, so that dashboards and load tools for vLLM work."""

from __future__ import annotations

import json
from bisect import bisect_left
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from megatoken.engine.state import ReplicaState
from megatoken.serve.messages import EngineSizes

_TABLE = json.loads((Path(__file__).parents[1] / "data" / "serve_metrics.json").read_text(encoding="utf-8"))
_SECONDS: Sequence[float] = _TABLE["bounds"]["seconds"]
_HISTOGRAMS: Mapping[str, tuple[Sequence[float], str]] = {  # bounds and help text by name
    name: (_TABLE["bounds"][bounds], text) for name, (bounds, text) in _TABLE["histograms"].items()
}
QUEUE = "queue"  # label of what is in front of all engines of a rack


@dataclass(slots=True)
class Histogram:
    """Counts of observations up to each bound."""

    bounds: Sequence[float]
    counts: list[int] = field(init=False)
    total: float = 0.0

    def __post_init__(self) -> None:
        self.counts = [0] * (len(self.bounds) + 1)

    def observe(self, value: float, times: int = 1) -> None:
        """Count a value that was observed so many times."""
        self.counts[bisect_left(self.bounds, value)] += times
        self.total += value * times


@dataclass(slots=True)
class TenantCounters:
    """What one tenant was served."""

    prompt_tokens: int = 0
    generation_tokens: int = 0
    cached_tokens: int = 0
    refused: int = 0
    ttft: Histogram = field(default_factory=lambda: Histogram(_SECONDS))


@dataclass(slots=True)
class EngineCounters:
    """What one engine has done."""

    prompt_tokens: int = 0
    generation_tokens: int = 0
    ended: dict[str, int] = field(default_factory=dict)  # by reason
    histograms: dict[str, Histogram] = field(
        default_factory=lambda: {name: Histogram(bounds) for name, (bounds, _) in _HISTOGRAMS.items()}
    )


@dataclass(frozen=True, slots=True)
class EngineReport:
    """An engine at one moment. ``place``: where it is, of a rack's; ``serving``: whether it gets requests."""

    state: ReplicaState
    sizes: EngineSizes
    place: Mapping[str, str] = field(default_factory=dict)
    serving: bool = True


class Metrics:
    """All that the process in front of one engine, or of those of a rack, counts.

    As in vLLM, every engine has its own series, with its number as the label ``engine``. What waits in front of all
    engines of a rack, or was given up there, has the label ``queue``.
    """

    def __init__(self, model: str, *, rack: bool = False) -> None:
        self._model = f'model_name="{_escaped(model)}"'
        self._front = QUEUE if rack else "0"
        self._rack = rack
        self.engines: dict[str, EngineCounters] = {}
        self.tenants: dict[str, TenantCounters] = {}
        self.engine(self._front)

    def engine(self, label: str) -> EngineCounters:
        """The counters of an engine."""
        if label not in self.engines:
            self.engines[label] = EngineCounters()
        return self.engines[label]

    def front(self) -> EngineCounters:
        """The counters of what never reached an engine."""
        return self.engines[self._front]

    def tenant(self, name: str) -> TenantCounters:
        """The counters of a tenant."""
        if name not in self.tenants:
            self.tenants[name] = TenantCounters()
        return self.tenants[name]

    def text(
        self, reports: Mapping[str, EngineReport], queues: Mapping[str, tuple[int, int]], *, healthy: bool, share: float
    ) -> str:
        """Prometheus's text format.

        Args:
            reports: of every engine, by its label.
            queues: requests that wait in front of the engines, and that are in one, by tenant.
            healthy: whether requests are served.
            share: of a rack's replicas, those that serve.
        """
        labels = {name: f'{self._model},engine="{name}"' for name in (*self.engines, *reports)}
        waiting = {name: one.state.waiting for name, one in reports.items()}
        waiting[self._front] = waiting.get(self._front, 0) + sum(count for count, _ in queues.values())
        lines: list[str] = []

        def add(name: str, kind: str, text: str, samples: Iterable[tuple[str, float]]) -> None:
            lines.extend((f"# HELP {name} {text}", f"# TYPE {name} {kind}"))
            lines.extend(f"{name}{{{labels}}} {_number(value)}" for labels, value in samples)

        def of_engines(name: str, kind: str, text: str, values: Mapping[str, float]) -> None:
            add(name, kind, text, [(labels[engine], value) for engine, value in values.items()])

        def of_states(name: str, kind: str, text: str, value: Callable[[ReplicaState], float]) -> None:
            of_engines(f"vllm:{name}", kind, text, {engine: value(one.state) for engine, one in reports.items()})

        def of_counters(name: str, text: str, value: Callable[[EngineCounters], float]) -> None:
            of_engines(f"vllm:{name}", "counter", text, {engine: value(one) for engine, one in self.engines.items()})

        of_states("num_requests_running", "gauge", "Requests in the batch.", lambda one: one.running)
        of_engines("vllm:num_requests_waiting", "gauge", "Requests that wait.", waiting)
        reasons = [
            (f'{labels[engine]},reason="{reason}"', count * (reason == "capacity"))
            for engine, count in waiting.items()
            for reason in ("capacity", "deferred")
        ]
        add("vllm:num_requests_waiting_by_reason", "gauge", "Requests that wait; none is deferred here.", reasons)
        of_states("kv_cache_usage_perc", "gauge", "Used share of the KV cache; 1 is all of it.", _used)
        of_states("num_preemptions_total", "counter", "Preempted requests.", lambda one: one.preemptions)
        of_counters("prompt_tokens_total", "Prompt tokens.", lambda one: one.prompt_tokens)
        of_counters("generation_tokens_total", "Generated tokens.", lambda one: one.generation_tokens)
        looked_up, found = "Prompt tokens looked up in the prefix cache.", "Prompt tokens found in the prefix cache."
        of_states("prefix_cache_queries_total", "counter", looked_up, lambda one: one.prefix_cache_queries)
        of_states("prefix_cache_hits_total", "counter", found, lambda one: one.prefix_cache_hits)
        ends = [
            (f'{labels[engine]},finished_reason="{reason}"', one.ended.get(reason, 0))
            for engine, one in self.engines.items()
            for reason in sorted({"stop", "length", "abort", "error", *one.ended})
        ]
        add("vllm:request_success_total", "counter", "Requests that ended, by reason.", ends)
        sizes = [
            (f'block_size="{size}",num_gpu_blocks="{one.sizes.cache_tokens // max(1, size)}",{labels[engine]}', 1)
            for engine, one in reports.items()
            for size in (one.sizes.page_size,)
        ]
        add("vllm:cache_config_info", "gauge", "Sizes of the KV cache.", sizes)
        for name, (_, text) in _HISTOGRAMS.items():
            add(f"vllm:{name}", "histogram", text, ())
            for engine, counters in self.engines.items():
                lines.extend(_histogram_lines(f"vllm:{name}", labels[engine], counters.histograms[name]))
        add("megatoken:healthy", "gauge", "Whether requests are served.", [(labels[self._front], int(healthy))])
        if self._rack:
            places = [
                (f"{labels[engine]},{where}", int(one.serving))
                for engine, one in reports.items()
                for where in (",".join(f'{name}="{_escaped(value)}"' for name, value in one.place.items()),)
            ]
            add("megatoken:replica_serving", "gauge", "Whether a replica gets requests.", places)
            add("megatoken:replicas_share", "gauge", "Share of the replicas that serve.", [(self._model, share)])
        self._add_tenants(add, lines, queues)
        return "\n".join([*lines, ""])

    def _add_tenants(self, add: object, lines: list[str], queues: Mapping[str, tuple[int, int]]) -> None:
        assert callable(add)
        labels = {name: f'{self._model},engine="{self._front}",key="{_escaped(name)}"' for name in self.tenants}
        for field_name, text in (
            ("prompt_tokens", "Prompt tokens of a key."),
            ("generation_tokens", "Generated tokens of a key."),
            ("cached_tokens", "Prompt tokens of a key that came from the prefix cache."),
            ("refused", "Requests of a key that were refused: queue full or over a limit."),
        ):
            samples = [(labels[name], getattr(one, field_name)) for name, one in self.tenants.items()]
            add(f"megatoken:key_{field_name}_total", "counter", text, samples)
        for at, (name, text) in enumerate(
            (("waiting", "wait in front of the engine"), ("running", "are in an engine"))
        ):
            samples = [(labels[key], queues.get(key, (0, 0))[at]) for key in self.tenants]
            add(f"megatoken:key_requests_{name}", "gauge", f"Requests of a key that {text}.", samples)
        add("megatoken:key_time_to_first_token_seconds", "histogram", "TTFT of a key.", ())
        for name, counters in self.tenants.items():
            lines.extend(_histogram_lines("megatoken:key_time_to_first_token_seconds", labels[name], counters.ttft))


def _used(state: ReplicaState) -> float:
    return 1 - state.pages_free / state.pages if state.pages else 0.0


def _histogram_lines(name: str, labels: str, histogram: Histogram) -> Iterable[str]:
    count = 0
    for bound, more in zip((*histogram.bounds, float("inf")), histogram.counts, strict=True):
        count += more
        shown = "+Inf" if bound == float("inf") else _number(bound)
        yield f'{name}_bucket{{{labels},le="{shown}"}} {count}'
    yield f"{name}_count{{{labels}}} {count}"
    yield f"{name}_sum{{{labels}}} {_number(histogram.total)}"


def _number(value: float) -> str:
    return str(int(value)) if value == int(value) else repr(float(value))


def _escaped(text: str) -> str:
    return text.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")
