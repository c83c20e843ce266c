"""Result files in the formats of MLPerf Endpoints' reference client: the summary of a run, its report, its events.

A submission of v6.1 may hold such a summary instead of LoadGen's logs, so it is read here too
(endpoints_parser.py of the submission checker of mlcommons/inference).

Formats: ``metrics/report.py``, ``core/record.py`` and ``core/types.py`` of mlcommons/endpoints, August 2026. Times are
nanoseconds. Percentiles are values of the run at the rank below, as the client takes them.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np

from megatoken import __version__
from megatoken.analysis.series import Floats, numbers
from megatoken.analysis.statistics import Samples
from megatoken.files import mapping, mappings, number_at
from megatoken.mlperf.endpoints import in_order_of_issue
from megatoken.mlperf.endpoints_window import lower_percentile
from megatoken.mlperf.rounds import round_seeds
from megatoken.mlperf.run_figures import RunFigures

if TYPE_CHECKING:
    import pyarrow as pa

PERCENTS = (99.9, 99.0, 97.0, 95.0, 90.0, 80.0, 75.0, 50.0, 25.0, 10.0, 5.0, 1.0)
BUCKETS = 30
BAR_CHARACTERS = 30
NANOSECONDS = 1e9
SECTIONS = (
    ("TTFT", "ttft", "ms", 1e-6),
    ("TPOT", "tpot", "ms", 1e-6),
    ("Latency", "latency", "ms", 1e-6),
    ("Input sequence lengths", "input_sequence_lengths", "tokens", 1.0),
    ("Output sequence lengths", "output_sequence_lengths", "tokens", 1.0),
)
SUMMARY, ACCURACY = "result_summary.json", "accuracy_results.json"
SCENARIO_OF_LOAD = {"max_throughput": "Offline", "poisson": "Server"}
CAUTIOUS = "early_stopping_percentiles"  # estimates with 99 % confidence
PERCENTILES = ("50", "90", "95", "97", "99", "99.9")  # that LoadGen states too
SEEDS = ("dataloader_random_seed", "scheduler_random_seed")  # of the order of samples, and of the schedule
FINISH_REASONS = ("stop", "length", "tool_calls", "content_filter", "function_call", "other")


def summary_of(requests: pa.Table, run_config: Mapping[str, Any], *, streamed: bool) -> dict[str, Any]:
    """The contents of ``result_summary.json``.

    Args:
        requests: table of ``SampleRow``; every sample has ended.
        run_config: load pattern, warm-up and seeds.
        streamed: whether first tokens were seen when they came.
    """
    samples, issued = Samples.of(requests), in_order_of_issue(requests)
    done = samples.completed
    end = float(samples.last[np.isfinite(samples.last)].max(initial=0.0))
    seconds = end - float(samples.sent.min()) if len(samples) else 0.0
    tokens = samples.output_tokens[done]
    reasons = requests["finish_reason"].to_pylist()
    counts = {name: sum(one == name for one in reasons) for name in FINISH_REASONS}
    return {
        "version": f"megatoken {__version__}",
        "git_sha": None,
        "test_started_at": 0,
        "n_samples_issued": len(samples),
        "n_samples_completed": int(done.sum()),
        "n_samples_failed": len(samples) - int(done.sum()),
        "duration_ns": round(seconds * NANOSECONDS),
        "state": "complete",
        "complete": True,
        "ttft": distribution(issued.ttft * NANOSECONDS) if streamed else {},
        "tpot": distribution(issued.tpot * NANOSECONDS) if streamed else {},
        "latency": distribution(issued.latency * NANOSECONDS),
        "output_sequence_lengths": distribution(tokens),
        "input_sequence_lengths": distribution(samples.input_tokens[done]),
        "legacy_loadgen_window_duration_ns": None,
        "qps": int(done.sum()) / seconds if seconds > 0 else None,
        "tps": float(tokens.sum()) / seconds if seconds > 0 else None,
        "finish_reason_counts": counts,
        "run_config": dict(run_config),
    }


def distribution(values: Floats) -> dict[str, Any]:
    """Sum, bounds, moments, percentiles and histogram of the finite ``values`` [N]; empty without any."""
    known = values[np.isfinite(values)]
    if not len(known):
        return {}
    low, high = float(known.min()), float(known.max())
    edges = np.geomspace(low, high, BUCKETS + 1) if 0 < low < high else np.linspace(low, high, BUCKETS + 1)
    counts = np.bincount(
        np.clip(np.searchsorted(edges, known, side="right") - 1, 0, BUCKETS - 1), minlength=BUCKETS
    ).tolist()
    return {
        "total": float(known.sum()),
        "min": low,
        "max": high,
        "median": lower_percentile(known, 0.5),
        "avg": float(known.mean()),
        "std_dev": float(known.std(ddof=1)) if len(known) > 1 else 0.0,
        "percentiles": {str(percent): lower_percentile(known, percent / 100) for percent in PERCENTS},
        "histogram": {"buckets": [list(pair) for pair in pairwise(edges.tolist())], "counts": counts},
    }


def report_of(summary: Mapping[str, Any]) -> str:
    """The contents of ``report.txt``."""
    return "\n".join(_report_lines(summary)) + "\n"


def _report_lines(summary: Mapping[str, Any]) -> Iterator[str]:
    yield "----------------- Summary -----------------"
    yield f"Version: {summary['version']}"
    yield "Run config:"
    for name, value in summary["run_config"].items():
        words = ", ".join(f"{key}={one}" for key, one in value.items()) if isinstance(value, dict) else value
        yield f"  {name}: {words}"
    for what in ("issued", "completed", "failed"):
        yield f"Total samples {what}: {summary[f'n_samples_{what}']}"
    yield f"Duration: {summary['duration_ns'] / NANOSECONDS:.2f} seconds"
    for name in ("qps", "tps"):
        value = summary[name]
        yield f"{name.upper()}: {'N/A' if value is None else f'{value:.2f}'}"
    yield "\n------------------- Latency Breakdowns -------------------"
    for title, key, unit, scale in SECTIONS:
        if part := summary[key]:
            yield f"{title}:"
            yield from _section_lines(part, unit, scale)
            yield ""
    yield "----------------- End of Report -----------------"


def _section_lines(part: Mapping[str, Any], unit: str, scale: float) -> Iterator[str]:
    for name, key in (("Min", "min"), ("Max", "max"), ("Median", "median"), ("Avg.", "avg"), ("Std Dev.", "std_dev")):
        yield f"  {name}: {part[key] * scale:.2f} {unit}"
    yield "\n  Histogram:"
    buckets, counts = part["histogram"]["buckets"], part["histogram"]["counts"]
    names = [f"  [{low * scale:.2f}, {high * scale:.2f}{')' if high < part['max'] else ']'}" for low, high in buckets]
    width, most = max(map(len, names)), max(counts) or 1
    for name, count in zip(names, counts, strict=True):
        yield f"  {name:>{width}} |{'#' * int(count * BAR_CHARACTERS / most)} {count}"
    yield "\n  Percentiles:"
    for name, value in part["percentiles"].items():
        yield f"  {name:>6}: {value * scale:.2f} {unit}"


def sample_uuid(sample: int) -> str:
    """The name of a sample in the events."""
    return f"{sample:032x}"


def moments_of(requests: pa.Table) -> list[tuple[int, str, int]]:
    """Every event of the samples as (nanoseconds since the run's start, kind, row of the table), by time."""
    columns = (("issued", "sent_seconds"), ("recv_first", "first_token_seconds"), ("complete", "last_token_seconds"))
    order = {kind: rank for rank, (kind, _) in enumerate(columns)}
    found = [
        (round(float(moment) * NANOSECONDS), kind, row)
        for kind, column in columns
        for row, moment in enumerate(numbers(requests[column]))
        if math.isfinite(moment)
    ]
    return sorted(found, key=lambda one: (one[0], order[one[1]]))


def event(kind: str, moment_ns: int, sample: int | None = None, pieces: Sequence[str] | None = None) -> dict[str, Any]:
    """One record of ``events.jsonl``; ``pieces``: of a complete answer, the text of its first frame and the rest."""
    data = None if pieces is None else ["TextModelOutput", [piece for piece in pieces if piece]]
    return {
        "event_type": kind,
        "timestamp_ns": moment_ns,
        "sample_uuid": "" if sample is None else sample_uuid(sample),
        "conversation_id": "",
        "turn": None,
        "data": data,
    }


def percentiles(part: Any, scale: float, kind: str = "percentiles") -> dict[str, float]:
    """Minimum, mean, maximum and percentiles of a distribution, divided by ``scale``."""
    part = mapping(part)
    found = {name: number_at(part, own) for name, own in (("min", "min"), ("mean", "avg"), ("max", "max"))}
    for percent in PERCENTILES:
        value = number_at(part, kind, percent)
        found[f"p{percent}"] = number_at(part, kind, f"{percent}.0") if value is None else value
    return {name: value / scale for name, value in found.items() if value is not None}


def window_seconds(values: Mapping[str, Any]) -> float | None:
    """The time that rates are divided by: LoadGen's window, to the end of the last issued sample, or the run."""
    window = number_at(values, "legacy_loadgen_window_duration_ns")
    window = number_at(values, "duration_ns") if window is None else window
    return window / 1e9 if window else None


def summary_figures(values: Mapping[str, Any], settings: Mapping[str, Any]) -> RunFigures:
    """The figures of a ``result_summary.json``; ``settings`` are those of the ``config.yaml`` next to it."""
    pattern = mapping(mapping(values.get("run_config")).get("load_pattern")).get("type")
    issued, duration_ns = number_at(values, "n_samples_issued"), number_at(values, "duration_ns")
    failed, tokens = number_at(values, "n_samples_failed"), number_at(values, "output_sequence_lengths", "total")
    duration_ms = number_at(settings, "runtime", "min_duration_ms")
    return RunFigures(
        scenario=SCENARIO_OF_LOAD.get(pattern) if isinstance(pattern, str) else None,
        mode="PerformanceOnly",
        round=_round(values),
        output_tokens_per_second=number_at(values, "tps"),
        samples_per_second=number_at(values, "qps"),
        tokens_per_sample=number_at(values, "output_sequence_lengths", "avg"),
        output_tokens=tokens,
        samples_issued=None if issued is None else int(issued),
        target_qps=number_at(values, "run_config", "load_pattern", "target_qps"),
        min_duration_seconds=None if duration_ms is None else duration_ms / 1e3,
        duration_seconds=None if duration_ns is None else duration_ns / 1e9,
        latency_seconds=percentiles(values.get("latency"), 1e9),
        ttft_seconds=percentiles(values.get("ttft"), 1e9),
        tpot_seconds=percentiles(values.get("tpot"), 1e9),
        errors=None if failed is None else int(failed),
    )


def _round(values: Mapping[str, Any]) -> str | None:
    """The round that published the two seeds that a result states."""
    mine = tuple(mapping(values.get("run_config")).get(name) for name in SEEDS)
    return next((name for name, seeds in round_seeds().items() if seeds[1:] == mine), None)


def accuracy_scores(values: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """The scored data sets of an accuracy_results.json."""
    scores = mappings(values.get("accuracy_scores"))
    return [score for score in scores if score.get("dataset_type") in (None, "accuracy")]
