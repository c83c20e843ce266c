"""Results of load tools in one form: the JSON of vLLM's ``bench serve``, of guidellm and of AIPerf.

``data/load_tools.yaml`` says where a tool writes what; here is what a tool says in another way than by a number. A file
of guidellm holds one result for each of its benchmarks.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import datetime
from functools import cache
from importlib.resources import files
from typing import Any

import numpy as np

from megatoken.analysis.series import Floats
from megatoken.files import mapping, mappings, number_at
from megatoken.yaml_files import load_yaml

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
class ToolFigures:
    """What one result states, in seconds and tokens; None for what it does not.

    ``distributions`` have minimum, mean, maximum and percentiles of latency, TTFT, TPOT and ITL, in seconds. ``sums``
    are those of all requests. ``most_in_flight`` is the concurrency that was asked for.
    """

    seconds: float | None = None
    completed: float | None = None
    failed: float | None = None
    input_tokens: float | None = None
    output_tokens: float | None = None
    request_rate: float | None = None
    output_rate: float | None = None
    total_rate: float | None = None
    most_in_flight: float | None = None
    ended: bool | None = None  # whether the tool says that it came to its end
    distributions: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    sums: Mapping[str, float] = field(default_factory=dict)
    rows: Rows | None = None


def tool_of(head: bytes) -> str | None:
    """The tool that wrote a file with this beginning; None if it is none of those known."""
    return next((tool for tool, of in _tools().items() if all(mark.encode() in head for mark in of["marks"])), None)


def tool_figures(tool: str, values: Mapping[str, Any]) -> Iterator[ToolFigures]:
    """Each result in a file of that tool."""
    known, more = _tools()[tool], {"vLLM bench serve": _vllm, "AIPerf": _aiperf, "guidellm": _guidellm}[tool]
    results = values.get(known["results"]) if "results" in known else [values]
    for result in map(mapping, results if isinstance(results, list) else ()):
        part: dict[str, Any] = {"distributions": {}, "sums": {}}
        for name, places in known["figures"].items():
            found = (number_at(result, *place.split("/")) for place in places)
            part[name] = next((value for value in found if value is not None), None)
        for measure, of in known["distributions"].items():
            figures = _seconds(result, **of)
            if (total := figures.pop("sum", None)) is not None:
                part["sums"][measure] = total
            part["distributions"][measure] = figures
        yield ToolFigures(**(part | more(result)))


@cache
def _tools() -> dict[str, dict[str, Any]]:
    text = (files("megatoken") / "data" / "load_tools.yaml").read_text("utf-8")
    tools: dict[str, dict[str, Any]] = load_yaml(text)
    return tools


def _seconds(
    result: Mapping[str, Any], *, per_second: float, percentile: str, at: str = "", **places: str
) -> dict[str, float]:
    """The figures of a distribution that are there."""
    places = {f"p{percent}": percentile.format(percent) for percent in PERCENTILES} | places
    keys = {name: f"{at}/{place}".strip("/").split("/") for name, place in places.items()}
    known = {name: number_at(result, *path) for name, path in keys.items()}
    return {name: value / per_second for name, value in known.items() if value is not None}


def _vllm(values: Mapping[str, Any]) -> dict[str, Any]:
    """The requests that did not fail, of a file with ``--save-detailed``."""
    lists = [values.get(name) for name in ("latencies", "ttfts", "itls", "output_lens")]
    if any(not isinstance(one, list) for one in lists) or len({len(one or ()) for one in lists}) != 1:
        return {}
    try:
        latency, ttft, tokens = (np.array(one, np.float64) for one in (lists[0], lists[1], lists[3]))
        gaps = np.array([math.fsum(one) for one in lists[2] or ()], np.float64)
    except (TypeError, ValueError):
        return {}
    done = tokens > 0
    return {"rows": Rows(latency[done], ttft[done], gaps[done], tokens[done])}


def _aiperf(values: Mapping[str, Any]) -> dict[str, Any]:
    """Its rates are over the time from start to end, while ``benchmark_duration`` begins with the first request."""
    errors, phases = values.get("error_summary"), mappings(mapping(values.get("input_config")).get("phases"))
    asked = [number_at(phase, "concurrency") for phase in phases]
    found: dict[str, Any] = {"most_in_flight": max((value for value in asked if value is not None), default=None)}
    if isinstance(errors, list):
        found["failed"] = sum(int(number_at(mapping(error), "count") or 0) for error in errors)
    if isinstance(cancelled := values.get("was_cancelled"), bool):
        found["ended"] = not cancelled
    with suppress(KeyError, TypeError, ValueError):
        start, end = (datetime.fromisoformat(values[name]) for name in ("start_time", "end_time"))
        found |= {"seconds": seconds} if (seconds := (end - start).total_seconds()) else {}
    return found


def _guidellm(values: Mapping[str, Any]) -> dict[str, Any]:
    lost = [number_at(values, "metrics", "request_totals", name) for name in ("errored", "incomplete")]
    return {"failed": None if None in lost else sum(one or 0.0 for one in lost)}
