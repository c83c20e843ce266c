"""Results that are stated without a log: of MLPerf Endpoints, and of load tools.

A submission of v6.1 may hold ``<scenario>/performance/result_summary.json`` of MLPerf Endpoints instead of LoadGen's
logs, with ``config.yaml`` next to the folder and ``accuracy/accuracy_results.json``. Such results can be compared with
themselves, their settings and the rules.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import PurePosixPath
from typing import Any

from megatoken.analysis.load_tools import ToolFigures, tool_figures, tool_of
from megatoken.audit.discovery import Tree, below, run_files
from megatoken.audit.documents import MOST_YAML_BYTES, json_documents, structured
from megatoken.audit.evidence import Run, Where
from megatoken.audit.finding import Severity
from megatoken.audit.view import RunFiles, run_of, unmet
from megatoken.files import Damage, UnreadableError, display, mapping, open_regular, read_text
from megatoken.mlperf.benchmarks import Benchmark, benchmark_of
from megatoken.mlperf.endpoints_report import CAUTIOUS, SEEDS, SUMMARY, percentiles, summary_figures
from megatoken.mlperf.run_figures import RunFigures

CONFIGURATIONS = ("config.yaml", "config.yml")
HEAD_BYTES = 1 << 16
MOST_TOOL_BYTES = 256 << 20


@dataclass(frozen=True, slots=True)
class ToolResult:
    """One result of a load tool, and what it states."""

    run: Run
    stated: ToolFigures

    def at(self, *keys: str) -> tuple[Where, ...]:
        """The lines of ``keys`` in the file; else the file."""
        return _lines(self.run, *keys)


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
        setting = self.settings_path if "min_duration_ms" in keys else None
        return _lines(self.run, *keys, more=[Where(setting)] if setting else [])


def _lines(run: Run, *keys: str, more: Sequence[Where] = ()) -> tuple[Where, ...]:
    places = [run.where(key) for key in keys if key in run.source_lines]
    return tuple(dict.fromkeys([*places, *more])) or (run.where(),)


def endpoint_results_in(
    tree: Tree, round_: str | None, rules_claimed: bool
) -> tuple[list[EndpointResult], list[tuple[str, Damage]]]:
    """Every result below the folder, in natural order, and what is wrong with their files.

    ``round_`` is the one whose rules are claimed; None: that of each result's own seeds.
    """
    results = []
    summaries = [path for path in tree.files if PurePosixPath(path).parts[-2:] == ("performance", SUMMARY)]
    documents, damages = json_documents(tree, summaries)
    for path, summary in documents.items():
        settings, settings_path = _settings(tree, path.rpartition("/performance/")[0])
        files = run_files(tree, path.rpartition("/")[0], {"detail": path})
        figures = summary_figures(summary.values, settings)
        run = run_of(files, figures, accuracy_records=None, source_lines=summary.source_lines)
        results.append(EndpointResult(run, files, summary.values, settings, settings_path, round_, rules_claimed))
    return results, damages


def is_endpoint_result(tree: Tree, folder: str) -> bool:
    """Whether a scenario's folder holds such a result."""
    return below(folder, f"performance/{SUMMARY}") in tree.files


def _settings(tree: Tree, folder: str) -> tuple[Mapping[str, Any], str | None]:
    path = next((path for name in CONFIGURATIONS if (path := below(folder, name)) in tree.files), None)
    if path is None:
        return {}, None
    try:
        text, _ = read_text(tree.path(path), MOST_YAML_BYTES)
    except UnreadableError:
        return {}, display(path)
    return mapping(mapping(structured(path, text)).get("settings")), display(path)


def tool_results_in(tree: Tree) -> tuple[list[ToolResult], list[tuple[str, Damage]]]:
    """Every result of a load tool below the folder, in natural order, and what is wrong with their files."""
    tools = {path: tool for path in tree.files if path.endswith(".json") and (tool := _tool(tree, path)) is not None}
    documents, damages = json_documents(tree, tools)
    found = []
    for path, document in documents.items():
        several = list(tool_figures(tools[path], document.values))
        for at, stated in enumerate(several, 1):
            name = path if len(several) == 1 else f"{path} {at}"
            files = run_files(tree, path.rpartition("/")[0], {"detail": path})
            run = run_of(files, _run_figures(stated), accuracy_records=None, source_lines=document.source_lines)
            found.append(ToolResult(replace(run, path=name, node=name), stated))
    return found, damages


def _tool(tree: Tree, path: str) -> str | None:
    if tree.files[path] > MOST_TOOL_BYTES:
        return None
    try:
        with open_regular(tree.path(path)) as file:
            return tool_of(file.read(HEAD_BYTES))
    except OSError:
        return None  # the walk reports what cannot be read


def _run_figures(stated: ToolFigures) -> RunFigures:
    done, failed, tokens, spread = stated.completed, stated.failed, stated.output_tokens, stated.distributions
    return RunFigures(
        mode="PerformanceOnly",
        output_tokens_per_second=stated.output_rate,
        samples_per_second=stated.request_rate,
        tokens_per_sample=tokens / done if tokens is not None and done else None,
        output_tokens=tokens,
        samples_issued=None if done is None or failed is None else int(done + failed),
        duration_seconds=stated.seconds,
        latency_seconds=spread.get("latency", {}),
        ttft_seconds=spread.get("ttft", {}),
        tpot_seconds=spread.get("tpot", {}),
        errors=None if failed is None else int(failed),
    )
