"""Results of MLPerf Endpoints, which a submission of v6.1 may hold in place of LoadGen's logs.

``<scenario>/performance/result_summary.json`` has counts, rates and percentiles of all samples, ``config.yaml`` beside
the folder the settings, ``accuracy/accuracy_results.json`` the scores (endpoints_parser.py of the submission checker of
mlcommons/inference). There is no log: what the summary says can be held against itself, its settings and the rules.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import Any

from megatoken.audit.discovery import Tree, below, place_of
from megatoken.audit.documents import structured
from megatoken.audit.evidence import Role, Run
from megatoken.audit.view import RunFiles
from megatoken.files import Damage, UnreadableError, display, mapping, read_json_object, read_text
from megatoken.mlperf.rounds import round_seeds
from megatoken.mlperf.run_figures import RunFigures
from megatoken.text import natural

SUMMARY = "result_summary.json"
ACCURACY = "accuracy_results.json"
CONFIGURATIONS = ("config.yaml", "config.yml")
MOST_CONFIGURATION_BYTES = 2**16
SCENARIOS = {"max_throughput": "Offline", "poisson": "Server"}
CAUTIOUS = "early_stopping_percentiles"  # estimates with 99 % confidence
PERCENTILES = ("50", "90", "95", "97", "99", "99.9")


@dataclass(frozen=True, slots=True)
class EndpointResult:
    """One result, read. ``settings`` is empty where the configuration is missing or no YAML."""

    run: Run
    files: RunFiles
    summary: Mapping[str, Any]
    settings: Mapping[str, Any]
    settings_path: str | None


def endpoint_results_in(tree: Tree) -> tuple[list[EndpointResult], list[tuple[str, Damage]]]:
    """Every result below the folder, in natural order, and what is wrong with their files."""
    results, damages = [], []
    for path in sorted((path for path in tree.files if is_endpoint_summary(path)), key=natural):
        try:
            values, lines, problems = read_json_object(tree.path(path))
        except UnreadableError as error:
            damages.append((path, Damage(None, str(error))))
            continue
        damages += [(path, problem) for problem in problems]
        scenario_folder = path.rpartition("/performance/")[0] if "/performance/" in path else ""
        settings, settings_path = _settings(tree, scenario_folder)
        files = _files(tree, path)
        figures = _figures(values, settings)
        run = Run(
            path=display(files.folder),
            role=Role.PERFORMANCE,
            node=display(files.node),
            benchmark=None if files.benchmark is None else display(files.benchmark),
            folder_scenario=files.scenario,
            division=files.division,
            submitter=None if files.submitter is None else display(files.submitter),
            system=None,
            figures=figures,
            detail=display(path),
            summary=None,
            accuracy=None,
            accuracy_records=None,
            source_lines=lines,
        )
        results.append(EndpointResult(run, files, values, settings, settings_path))
    return results, damages


def is_endpoint_summary(path: str) -> bool:
    """Whether a path is that of a result of MLPerf Endpoints."""
    parts = PurePosixPath(path).parts
    return len(parts) >= 2 and parts[-2:] == ("performance", SUMMARY)


def is_endpoint_result(tree: Tree, folder: str) -> bool:
    """Whether a scenario's folder holds such a result."""
    return below(folder, f"performance/{SUMMARY}") in tree.files


def number(values: Mapping[str, Any], *keys: str) -> float | None:
    """The number under nested keys; None where there is none."""
    value: Any = values
    for key in keys:
        value = value.get(key) if isinstance(value, dict) else None
    if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) < 1e30:
        return None
    return value


def percentiles(part: Any, scale: float, kind: str = "percentiles") -> dict[str, float]:
    """Minimum, mean, maximum and percentiles of a distribution, divided by ``scale``."""
    found: dict[str, float] = {}
    if not isinstance(part, dict):
        return found
    for name, own in (("min", "min"), ("mean", "avg"), ("max", "max")):
        if (value := number(part, own)) is not None:
            found[name] = value / scale
    for percent in PERCENTILES:
        value = number(part, kind, percent)
        value = number(part, kind, f"{percent}.0") if value is None else value
        if value is not None:
            found[f"p{percent}"] = value / scale
    return found


def window_seconds(values: Mapping[str, Any]) -> float | None:
    """What rates are divided by: LoadGen's window, to the end of the last issued sample, or the whole run."""
    window = number(values, "legacy_loadgen_window_duration_ns")
    window = number(values, "duration_ns") if window is None else window
    return window / 1e9 if window else None


def _settings(tree: Tree, folder: str) -> tuple[Mapping[str, Any], str | None]:
    for name in CONFIGURATIONS:
        path = below(folder, name)
        if path in tree.files:
            try:
                text, _ = read_text(tree.path(path), MOST_CONFIGURATION_BYTES)
            except UnreadableError:
                return {}, display(path)
            values = structured(name, text)
            settings = values.get("settings") if isinstance(values, dict) else None
            return (settings if isinstance(settings, dict) else {}), display(path)
    return {}, None


def _files(tree: Tree, path: str) -> RunFiles:
    folder, _, name = path.rpartition("/")
    parts = folder.split("/")
    place = place_of([*tree.root.parts[1:], *parts], len(parts))
    return RunFiles(
        folder=folder,
        detail=path,
        summary=None,
        accuracy=None,
        others=tuple(other for other in tree.children(folder) if other != name),
        size_bytes=tree.files[path],
        role=Role.PERFORMANCE,
        node=place.node or tree.root.name,
        benchmark=place.benchmark,
        scenario=place.scenario,
        system=place.system,
        submitter=place.submitter,
        division=place.division,
    )


def _figures(values: Mapping[str, Any], settings: Mapping[str, Any]) -> RunFigures:
    pattern = _part(values, "run_config", "load_pattern").get("type")
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
    """Two seeds are stated: of the schedule, and of the order of samples."""
    run = _part(values, "run_config")
    mine = (run.get("dataloader_random_seed"), run.get("scheduler_random_seed"))
    return next((name for name, seeds in round_seeds().items() if seeds[1:] == mine), None)


def _part(values: Mapping[str, Any], *keys: str) -> Mapping[str, Any]:
    value: Any = values
    for key in keys:
        value = mapping(value).get(key)
    return mapping(value)


def accuracy_scores(values: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    """The scored data sets of an accuracy_results.json."""
    scores = values.get("accuracy_scores")
    for score in scores if isinstance(scores, list) else ():
        if isinstance(score, dict) and score.get("dataset_type") in (None, "accuracy"):
            yield score
