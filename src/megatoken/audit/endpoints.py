"""Results of MLPerf Endpoints, which a submission of v6.1 may hold instead of LoadGen's logs.

``<scenario>/performance/result_summary.json`` has counts, rates and percentiles of all samples, ``config.yaml`` next to
the folder the settings, ``accuracy/accuracy_results.json`` the scores (endpoints_parser.py of the submission checker of
mlcommons/inference). There is no log: the summary can be compared with itself, its settings and the rules.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import Any

from megatoken.audit.discovery import Tree, below, run_files
from megatoken.audit.documents import json_documents, structured
from megatoken.audit.evidence import Run, Where
from megatoken.audit.finding import Severity
from megatoken.audit.view import RunFiles, run_of, unmet
from megatoken.files import Damage, UnreadableError, display, mapping, read_text
from megatoken.mlperf.benchmarks import Benchmark, benchmark_of
from megatoken.mlperf.rounds import round_seeds
from megatoken.mlperf.run_figures import RunFigures

SUMMARY = "result_summary.json"
ACCURACY = "accuracy_results.json"
CONFIGURATIONS = ("config.yaml", "config.yml")
MOST_CONFIGURATION_BYTES = 2**16
SCENARIOS = {"max_throughput": "Offline", "poisson": "Server"}
CAUTIOUS = "early_stopping_percentiles"  # estimates with 99 % confidence
PERCENTILES = ("50", "90", "95", "97", "99", "99.9")
SEEDS = ("dataloader_random_seed", "scheduler_random_seed")  # of the order of samples, and of the schedule


@dataclass(frozen=True, slots=True)
class EndpointResult:
    """One result. ``settings`` is empty where the configuration is missing or not YAML."""

    run: Run
    files: RunFiles
    summary: Mapping[str, Any]
    settings: Mapping[str, Any]
    settings_path: str | None
    round: str | None  # whose rules are applied
    rules_claimed: bool

    @property
    def figures(self) -> RunFigures:
        """Of the summary."""
        return self.run.figures

    @property
    def benchmark(self) -> Benchmark | None:
        """The benchmark that the folder is named after."""
        return benchmark_of(self.files.benchmark, None) if self.files.benchmark else None

    @property
    def scenario(self) -> str | None:
        """The scenario of the folder, by which MLPerf's checker judges; without a folder that of the load."""
        folder = "Server" if self.files.scenario == "Interactive" else self.files.scenario
        return folder or self.figures.scenario

    @property
    def unmet(self) -> Severity:
        """Severity of a rule that is not met."""
        return unmet(self.rules_claimed, self.files.division)

    @property
    def seeds(self) -> tuple[object, ...]:
        """The two seeds that it states."""
        return tuple(mapping(self.summary.get("run_config")).get(name) for name in SEEDS)

    @property
    def ran_seconds(self) -> float | None:
        """How long the run took."""
        return self.figures.duration_seconds

    @property
    def p99_seconds(self) -> tuple[float | None, float | None]:
        """TTFT and TPOT by the early-stopping estimate of the 99th percentile, as MLPerf's checker takes them."""
        cautious = [percentiles(self.summary.get(key), 1e9, CAUTIOUS).get("p99") for key in ("ttft", "tpot")]
        measured = [values.get("p99") for values in (self.figures.ttft_seconds, self.figures.tpot_seconds)]
        ttft, tpot = (one if other is None else other for one, other in zip(measured, cautious, strict=True))
        return ttft, tpot

    def at(self, *keys: str) -> tuple[Where, ...]:
        """The lines of ``keys`` in the summary; the configuration for a setting; else the summary itself."""
        places = [self.run.where(key) for key in keys if key in self.run.source_lines]
        if "min_duration_ms" in keys and self.settings_path:
            places.append(Where(self.settings_path))
        return tuple(dict.fromkeys(places)) or (self.run.where(),)


def endpoint_results_in(
    tree: Tree, round_: str | None, rules_claimed: bool
) -> tuple[list[EndpointResult], list[tuple[str, Damage]]]:
    """Every result below the folder, in natural order, and what is wrong with their files.

    ``round_`` is the one whose rules are claimed; None: that of each result's own seeds.
    """
    results = []
    documents, damages = json_documents(tree, filter(is_endpoint_summary, tree.files))
    for path, summary in documents.items():
        settings, settings_path = _settings(tree, path.rpartition("/performance/")[0])
        files = run_files(tree, path.rpartition("/")[0], {"detail": path})
        figures = _figures(summary.values, settings)
        run = run_of(files, figures, accuracy_records=None, source_lines=summary.source_lines)
        results.append(EndpointResult(run, files, summary.values, settings, settings_path, round_, rules_claimed))
    return results, damages


def is_endpoint_summary(path: str) -> bool:
    """Whether a path is that of a result of MLPerf Endpoints."""
    return PurePosixPath(path).parts[-2:] == ("performance", SUMMARY)


def is_endpoint_result(tree: Tree, folder: str) -> bool:
    """Whether a scenario's folder holds such a result."""
    return below(folder, f"performance/{SUMMARY}") in tree.files


def number(values: Mapping[str, Any], *keys: str) -> float | None:
    """The number under nested keys; None where there is none."""
    value: Any = values
    for key in keys:
        value = mapping(value).get(key)
    if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) < 1e30:
        return None
    return value


def percentiles(part: Any, scale: float, kind: str = "percentiles") -> dict[str, float]:
    """Minimum, mean, maximum and percentiles of a distribution, divided by ``scale``."""
    part = mapping(part)
    found = {name: number(part, own) for name, own in (("min", "min"), ("mean", "avg"), ("max", "max"))}
    for percent in PERCENTILES:
        value = number(part, kind, percent)
        found[f"p{percent}"] = number(part, kind, f"{percent}.0") if value is None else value
    return {name: value / scale for name, value in found.items() if value is not None}


def window_seconds(values: Mapping[str, Any]) -> float | None:
    """The time that rates are divided by: LoadGen's window, to the end of the last issued sample, or the run."""
    window = number(values, "legacy_loadgen_window_duration_ns")
    window = number(values, "duration_ns") if window is None else window
    return window / 1e9 if window else None


def _settings(tree: Tree, folder: str) -> tuple[Mapping[str, Any], str | None]:
    path = next((path for name in CONFIGURATIONS if (path := below(folder, name)) in tree.files), None)
    if path is None:
        return {}, None
    try:
        text, _ = read_text(tree.path(path), MOST_CONFIGURATION_BYTES)
    except UnreadableError:
        return {}, display(path)
    return mapping(mapping(structured(path, text)).get("settings")), display(path)


def _figures(values: Mapping[str, Any], settings: Mapping[str, Any]) -> RunFigures:
    pattern = mapping(mapping(values.get("run_config")).get("load_pattern")).get("type")
    issued, duration_ns = number(values, "n_samples_issued"), number(values, "duration_ns")
    failed, tokens = number(values, "n_samples_failed"), number(values, "output_sequence_lengths", "total")
    duration_ms = number(settings, "runtime", "min_duration_ms")
    return RunFigures(
        scenario=SCENARIOS.get(pattern) if isinstance(pattern, str) else None,
        mode="PerformanceOnly",
        round=_round(values),
        output_tokens_per_second=number(values, "tps"),
        samples_per_second=number(values, "qps"),
        tokens_per_sample=number(values, "output_sequence_lengths", "avg"),
        output_tokens=tokens,
        samples_issued=None if issued is None else int(issued),
        target_qps=number(values, "run_config", "load_pattern", "target_qps"),
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


def accuracy_scores(values: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    """The scored data sets of an accuracy_results.json."""
    scores = values.get("accuracy_scores")
    for score in scores if isinstance(scores, list) else ():
        if isinstance(score, dict) and score.get("dataset_type") in (None, "accuracy"):
            yield score
