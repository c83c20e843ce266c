"""Metrics under vLLM's names, in Prometheus's text format, so that dashboards and load tools for vLLM work."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from megatoken.engine.state import ReplicaState

_SECONDS = (
    0.001,
    0.005,
    0.01,
    0.02,
    0.04,
    0.06,
    0.08,
    0.1,
    0.25,
    0.5,
    0.75,
    1.0,
    2.5,
    5.0,
    7.5,
    10.0,
    20.0,
    40.0,
    80.0,
)
_TOKEN_SECONDS = (0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0)
_REQUEST_SECONDS = (
    0.3,
    0.5,
    0.8,
    1.0,
    1.5,
    2.0,
    2.5,
    5.0,
    10.0,
    15.0,
    20.0,
    30.0,
    40.0,
    50.0,
    60.0,
    120.0,
    240.0,
    480.0,
)
_TOKENS = tuple(float(mantissa * 10**power) for power in range(6) for mantissa in (1, 2, 5))
_STEP_TOKENS = tuple(float(2**power) for power in range(15))
_HISTOGRAMS = {
    "time_to_first_token_seconds": (_SECONDS, "Arrival of a request to its first token."),
    "inter_token_latency_seconds": (_TOKEN_SECONDS, "Time between two tokens of one answer."),
    "e2e_request_latency_seconds": (_REQUEST_SECONDS, "Arrival of a request to its end."),
    "request_queue_time_seconds": (_REQUEST_SECONDS, "Arrival of a request to its hand-over to the engine."),
    "request_inference_time_seconds": (_REQUEST_SECONDS, "Hand-over of a request to its end."),
    "request_prefill_time_seconds": (_REQUEST_SECONDS, "Hand-over of a request to its first token."),
    "request_decode_time_seconds": (_REQUEST_SECONDS, "First token of a request to its end."),
    "request_prompt_tokens": (_TOKENS, "Prompt tokens of a request."),
    "request_generation_tokens": (_TOKENS, "Generated tokens of a request."),
    "request_params_max_tokens": (_TOKENS, "Most tokens that a request asked for."),
    "iteration_tokens_total": (_STEP_TOKENS, "Tokens that one step computed."),
}


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
    ended: dict[str, int] = field(default_factory=dict)  # by reason
    ttft: Histogram = field(default_factory=lambda: Histogram(_SECONDS))


class Metrics:
    """All that the engine process counts."""

    def __init__(self, model: str) -> None:
        self._labels = f'model_name="{_escaped(model)}",engine="0"'
        self.histograms = {name: Histogram(bounds) for name, (bounds, _) in _HISTOGRAMS.items()}
        self.tenants: dict[str, TenantCounters] = {}

    def tenant(self, name: str) -> TenantCounters:
        """The counters of a tenant."""
        if name not in self.tenants:
            self.tenants[name] = TenantCounters()
        return self.tenants[name]

    def text(
        self, state: ReplicaState, queues: Mapping[str, tuple[int, int]], cache: Mapping[str, int], *, healthy: bool
    ) -> str:
        """Prometheus's text format.

        Args:
            state: of the engine.
            queues: requests that wait in front of the engine, and that are in it, by tenant.
            cache: page size and number of pages, as ``cache_config_info`` reports them.
            healthy: whether requests are served.
        """
        tenants = self.tenants.values()
        in_front = sum(waiting for waiting, _ in queues.values())
        used = 1 - state.pages_free / state.pages if state.pages else 0.0
        reasons: dict[str, int] = dict.fromkeys(("stop", "length", "abort", "error"), 0)
        for one in tenants:
            for reason, count in one.ended.items():
                reasons[reason] += count
        lines: list[str] = []

        def add(name: str, kind: str, text: str, samples: Iterable[tuple[str, float]]) -> None:
            lines.extend((f"# HELP {name} {text}", f"# TYPE {name} {kind}"))
            lines.extend(f"{name}{{{labels}}} {_number(value)}" for labels, value in samples)

        def single(name: str, kind: str, text: str, value: float) -> None:
            add(f"vllm:{name}", kind, text, [(self._labels, value)])

        single("num_requests_running", "gauge", "Requests in the batch.", state.running)
        single("num_requests_waiting", "gauge", "Requests that wait.", in_front + state.waiting)
        single("kv_cache_usage_perc", "gauge", "Used share of the KV cache; 1 is all of it.", used)
        single("num_preemptions_total", "counter", "Preempted requests.", state.preemptions)
        single("prompt_tokens_total", "counter", "Prompt tokens.", sum(one.prompt_tokens for one in tenants))
        single("generation_tokens_total", "counter", "Generated tokens.", sum(one.generation_tokens for one in tenants))
        queries, hits = state.prefix_cache_queries, state.prefix_cache_hits
        single("prefix_cache_queries_total", "counter", "Prompt tokens looked up in the prefix cache.", queries)
        single("prefix_cache_hits_total", "counter", "Prompt tokens found in the prefix cache.", hits)
        ends = [(f'{self._labels},finished_reason="{reason}"', count) for reason, count in reasons.items()]
        add("vllm:request_success_total", "counter", "Requests that ended, by reason.", ends)
        info = ",".join(f'{name}="{value}"' for name, value in cache.items())
        add("vllm:cache_config_info", "gauge", "Sizes of the KV cache.", [(f"{info},{self._labels}", 1)])
        for name, histogram in self.histograms.items():
            add(f"vllm:{name}", "histogram", _HISTOGRAMS[name][1], ())
            lines.extend(_histogram_lines(f"vllm:{name}", self._labels, histogram))
        add("megatoken:healthy", "gauge", "Whether requests are served.", [(self._labels, int(healthy))])
        self._add_tenants(add, lines, queues)
        return "\n".join([*lines, ""])

    def _add_tenants(self, add: object, lines: list[str], queues: Mapping[str, tuple[int, int]]) -> None:
        assert callable(add)
        labels = {name: f'{self._labels},key="{_escaped(name)}"' for name in self.tenants}
        for field_name, text in (
            ("prompt_tokens", "Prompt tokens of a key."),
            ("generation_tokens", "Generated tokens of a key."),
            ("cached_tokens", "Prompt tokens of a key that came from the prefix cache."),
            ("refused", "Requests of a key that were refused: queue full or over a limit."),
        ):
            samples = [(labels[name], getattr(one, field_name)) for name, one in self.tenants.items()]
            add(f"megatoken:key_{field_name}_total", "counter", text, samples)
        for at, (name, text) in enumerate(
            (("waiting", "wait in front of the engine"), ("running", "are in the engine"))
        ):
            samples = [(labels[key], queues.get(key, (0, 0))[at]) for key in self.tenants]
            add(f"megatoken:key_requests_{name}", "gauge", f"Requests of a key that {text}.", samples)
        add("megatoken:key_time_to_first_token_seconds", "histogram", "TTFT of a key.", ())
        for name, counters in self.tenants.items():
            lines.extend(_histogram_lines("megatoken:key_time_to_first_token_seconds", labels[name], counters.ttft))


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
