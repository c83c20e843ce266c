"""Results of load tools as evidence: the JSON of vLLM's ``bench serve``, of guidellm and of AIPerf.

Each is read into one form in seconds and tokens, so that the checks know no tool. Fields: ``benchmarks/serve.py`` of
vLLM (commit 009e6d4a), and files made with guidellm 0.8.1 and AIPerf 0.13.0. A file of guidellm holds one result for
each of its benchmarks.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from datetime import datetime
from typing import Any

import numpy as np

from megatoken.analysis.series import Floats
from megatoken.audit.discovery import Tree, run_files
from megatoken.audit.documents import json_documents
from megatoken.audit.endpoints import number
from megatoken.audit.evidence import Run, Where
from megatoken.audit.view import run_of
from megatoken.files import Damage, mapping, open_regular
from megatoken.mlperf.run_figures import RunFigures

HEAD_BYTES = 1 << 16
MOST_BYTES = 256 << 20
MARKS = {  # of a tool's file: text near its beginning
    "vLLM bench serve": ('"request_throughput"', '"total_output_tokens"', '"mean_ttft_ms"'),
    "AIPerf": ('"aiperf_version"',),
    "guidellm": ('"guidellm_version"',),
}
PERCENTILES = ("50", "90", "95", "99", "99.9")


@dataclass(frozen=True, slots=True)
class Rows:
    """One value for each request, where the file has them; seconds and tokens [N]."""

    latency: Floats
    ttft: Floats
    gaps: Floats  # sum of the gaps between tokens
    output_tokens: Floats

    @property
    def tpot(self) -> Floats:
        """Seconds per token after the first, of requests with two tokens or more."""
        several = self.output_tokens > 1
        tokens = self.output_tokens[several] - 1
        found: Floats = (self.latency[several] - self.ttft[several]) / tokens
        return found


@dataclass(frozen=True, slots=True)
class ToolResult:
    """What one result states; None for what it does not.

    ``distributions`` have minimum, mean, maximum and percentiles of latency, TTFT, TPOT and ITL, in seconds, under the
    names of ``RunFigures``. ``sums`` are those of all requests. ``most_in_flight`` is the concurrency that was asked
    for.
    """

    run: Run
    tool: str
    seconds: float | None
    completed: float | None
    failed: float | None
    input_tokens: float | None
    output_tokens: float | None
    request_rate: float | None
    output_rate: float | None
    total_rate: float | None
    most_in_flight: float | None
    ended: bool | None = None  # whether the tool says that it came to its end
    distributions: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    sums: Mapping[str, float] = field(default_factory=dict)
    rows: Rows | None = None

    def at(self, *keys: str) -> tuple[Where, ...]:
        """The lines of ``keys`` in the file; else the file."""
        places = [self.run.where(key) for key in keys if key in self.run.source_lines]
        return tuple(dict.fromkeys(places)) or (self.run.where(),)


def tool_results_in(tree: Tree) -> tuple[list[ToolResult], list[tuple[str, Damage]]]:
    """Every result of a load tool below the folder, in natural order, and what is wrong with their files."""
    tools = {path: tool for path in tree.files if path.endswith(".json") and (tool := _tool(tree, path)) is not None}
    documents, damages = json_documents(tree, tools)
    found = []
    for path, document in documents.items():
        readers = {"vLLM bench serve": _vllm, "AIPerf": _aiperf, "guidellm": _guidellm}
        parts = list(readers[tools[path]](document.values))
        for at, part in enumerate(parts, 1):
            name = path if len(parts) == 1 else f"{path} {at}"
            files = run_files(tree, path.rpartition("/")[0], {"detail": path})
            run = run_of(files, _figures(part), accuracy_records=None, source_lines=document.source_lines)
            found.append(ToolResult(replace(run, path=name, node=name), tools[path], **part))
    return found, damages


def _tool(tree: Tree, path: str) -> str | None:
    if tree.files[path] > MOST_BYTES:
        return None
    try:
        with open_regular(tree.path(path)) as file:
            head = file.read(HEAD_BYTES)
    except OSError:
        return None  # the walk reports what cannot be read
    return next((tool for tool, marks in MARKS.items() if all(mark.encode() in head for mark in marks)), None)


def _figures(part: Mapping[str, Any]) -> RunFigures:
    done, tokens = part["completed"], part["output_tokens"]
    issued = None if done is None or part["failed"] is None else int(done + part["failed"])
    spread = part["distributions"]
    return RunFigures(
        mode="PerformanceOnly",
        output_tokens_per_second=part["output_rate"],
        samples_per_second=part["request_rate"],
        tokens_per_sample=tokens / done if tokens is not None and done else None,
        output_tokens=tokens,
        samples_issued=issued,
        duration_seconds=part["seconds"],
        latency_seconds=spread.get("latency", {}),
        ttft_seconds=spread.get("ttft", {}),
        tpot_seconds=spread.get("tpot", {}),
        errors=None if part["failed"] is None else int(part["failed"]),
    )


def _seconds(part: Any, keys: Mapping[str, str], scale: float) -> dict[str, float]:
    """The figures that ``part`` has under ``keys``, divided by ``scale``."""
    known = {name: number(mapping(part), key) for name, key in keys.items()}
    return {name: value / scale for name, value in known.items() if value is not None}


def _vllm(values: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    names = {"latency": "e2el", "ttft": "ttft", "tpot": "tpot", "itl": "itl"}
    spread = {}
    for measure, own in names.items():
        keys = {"mean": f"mean_{own}_ms", "p50": f"median_{own}_ms"}
        keys |= {f"p{percent}": f"p{percent}_{own}_ms" for percent in PERCENTILES if percent != "50"}
        spread[measure] = _seconds(values, keys, 1e3)
    yield {
        "seconds": number(values, "duration"),
        "completed": number(values, "completed"),
        "failed": number(values, "failed"),
        "input_tokens": number(values, "total_input_tokens"),
        "output_tokens": number(values, "total_output_tokens"),
        "request_rate": number(values, "request_throughput"),
        "output_rate": number(values, "output_throughput"),
        "total_rate": number(values, "total_token_throughput"),
        "most_in_flight": number(values, "max_concurrency"),
        "distributions": spread,
        "rows": _vllm_rows(values),
    }


def _vllm_rows(values: Mapping[str, Any]) -> Rows | None:
    """The requests that did not fail, of a file with ``--save-detailed``."""
    lists = [values.get(name) for name in ("latencies", "ttfts", "itls", "output_lens")]
    if any(not isinstance(one, list) for one in lists) or len({len(one or ()) for one in lists}) != 1:
        return None
    try:
        latency, ttft, tokens = (np.array(one, np.float64) for one in (lists[0], lists[1], lists[3]))
        gaps = np.array([math.fsum(one) for one in lists[2] or ()], np.float64)
    except (TypeError, ValueError):
        return None
    done = tokens > 0
    return Rows(latency[done], ttft[done], gaps[done], tokens[done])


def _aiperf(values: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    names = {"latency": "request_latency", "ttft": "time_to_first_token", "tpot": "inter_token_latency"}

    def one(name: str) -> float | None:
        return number(values, name, "avg")

    spread = {}
    for measure, own in names.items():
        keys = {"min": "min", "mean": "avg", "max": "max", **{f"p{percent}": f"p{percent}" for percent in PERCENTILES}}
        spread[measure] = _seconds(values.get(own), keys, 1e3)
    tokens, done, errors = one("total_osl"), one("request_count"), values.get("error_summary")
    failed = sum(int(number(mapping(error), "count") or 0) for error in errors) if isinstance(errors, list) else None
    phases = mapping(values.get("input_config")).get("phases")
    asked = [number(mapping(phase), "concurrency") for phase in phases] if isinstance(phases, list) else []
    cancelled = values.get("was_cancelled")
    yield {
        "seconds": _elapsed(values) or one("benchmark_duration"),
        "completed": done,
        "failed": failed,
        "input_tokens": one("total_isl"),
        "output_tokens": one("total_output_tokens") if tokens is None else tokens,
        "request_rate": one("request_throughput"),
        "output_rate": one("output_token_throughput"),
        "total_rate": None,  # its own counts prompts by the server's usage and answers by a tokenizer
        "most_in_flight": max((value for value in asked if value is not None), default=None),
        "ended": None if not isinstance(cancelled, bool) else not cancelled,
        "distributions": spread,
    }


def _elapsed(values: Mapping[str, Any]) -> float | None:
    """From start to end, which AIPerf's rates are over; its ``benchmark_duration`` begins with the first request."""
    try:
        start, end = (datetime.fromisoformat(values[name]) for name in ("start_time", "end_time"))
    except (KeyError, TypeError, ValueError):
        return None
    return (end - start).total_seconds()


def _guidellm(values: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    benchmarks = values.get("benchmarks")
    for benchmark in benchmarks if isinstance(benchmarks, list) else ():
        metrics = mapping(mapping(benchmark).get("metrics"))
        names = {
            "latency": ("request_latency", 1.0),
            "ttft": ("time_to_first_token_ms", 1e3),
            "tpot": ("inter_token_latency_ms", 1e3),
        }
        spread, sums = {}, {}
        for measure, (own, scale) in names.items():
            part = mapping(mapping(metrics.get(own)).get("successful"))
            percents = {f"p{percent}": f"p{percent.replace('.', '')}" for percent in PERCENTILES}
            spread[measure] = _seconds(part, {name: name for name in ("min", "mean", "max")}, scale)
            spread[measure] |= _seconds(part.get("percentiles"), percents, scale)
            if (total := number(part, "total_sum")) is not None:
                sums[measure] = total / scale
        totals = mapping(metrics.get("request_totals"))
        lost = [number(totals, name) for name in ("errored", "incomplete")]

        def total_of(name: str, what: str = "total_sum", metrics: Mapping[str, Any] = metrics) -> float | None:
            return number(metrics, name, "successful", what)

        yield {
            "seconds": number(mapping(benchmark), "duration"),
            "completed": number(totals, "successful"),
            "failed": None if None in lost else sum(one or 0.0 for one in lost),
            "input_tokens": total_of("prompt_token_count"),
            "output_tokens": total_of("output_token_count"),
            "request_rate": total_of("requests_per_second", "mean"),
            "output_rate": total_of("output_tokens_per_second", "mean"),
            "total_rate": total_of("tokens_per_second", "mean"),
            "most_in_flight": number(mapping(benchmark), "config", "strategy", "max_concurrency"),
            "distributions": spread,
            "sums": sums,
        }
