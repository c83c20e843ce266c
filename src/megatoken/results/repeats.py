"""Equal runs together: their verdicts, and the interval that the geometric mean of each metric lies in."""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from megatoken.errors import UsageError
from megatoken.results.comparison import CONFIDENCE, student_t
from megatoken.results.run_folder import Run, Verdict

REPEATS = "repeats.json"
SCHEMA_VERSION = 1
INTERVAL_FORMULA = (
    "exp(m ± t(1 - (1 - confidence) / 2; n - 1) · s / √n), m and s the mean and the standard deviation (with n - 1) of"
    " the logarithms, exp(m) the geometric mean: a rate differs by factors, and no end of the interval is below zero"
)
SEEDS_NOTE = (
    "Every repeat has the same seeds: LoadGen issues the same samples in the same order at the same times, random"
    " weights and prompts are the same, and draws of tokens differ only where a sample has no seed of its own. So the"
    " interval says what the machine makes of equal work; it does not hold what other seeds would change."
)
_METRICS = (
    "output_tokens_per_second",
    "steady_output_tokens_per_second",
    "samples_per_second",
    "loadgen_output_tokens_per_second",
    "energy_joules_per_output_token",
)
_PERCENTILES = ("loadgen_ttft_p99_seconds", "loadgen_tpot_p99_seconds", "loadgen_latency_p90_seconds")
_WORST = (Verdict.INTERRUPTED, Verdict.INVALID, Verdict.DEGRADED, Verdict.MEASURED, Verdict.VALID)


def summarise_repeats(runs: Sequence[Run], wanted: int) -> dict[str, Any]:
    """The document of ``repeats.json``: verdicts, and interval of every metric that all healthy runs have.

    Percentiles are listed, not averaged: the mean of p99s is the p99 of nothing.
    """
    healthy = [run for run in runs if run.verdict is not Verdict.INTERRUPTED]
    metrics = {name: interval(values) for name in _METRICS if (values := _values(healthy, name))}
    percentiles = {name: {"values": values} for name in _PERCENTILES if (values := _values(healthy, name))}
    return {
        "kind": "repeats",
        "schema_version": SCHEMA_VERSION,
        "verdict": worst_verdict(runs),
        "verdicts": [run.verdict for run in runs],
        "runs": [run.path.name for run in runs],
        "runs_wanted": wanted,
        "metrics": metrics,
        "percentiles": percentiles,
        "confidence": CONFIDENCE,
        "interval_formula": INTERVAL_FORMULA,
        "seeds": runs[0].result.get("seeds"),
        "seeds_note": SEEDS_NOTE,
    }


def _values(runs: Sequence[Run], name: str) -> list[float]:
    """Of every run; empty unless all have one."""
    values = [run.result.get(name) for run in runs]
    return [float(value) for value in values if isinstance(value, int | float)] if None not in values else []


def interval(values: Sequence[float]) -> dict[str, Any]:
    """Mean and geometric mean of ``values``, and by ``INTERVAL_FORMULA`` where the latter lies.

    None for what cannot be told: the interval of one value, logarithms of what is not above zero.
    """
    told: dict[str, Any] = {"values": list(values), "mean": statistics.fmean(values)}
    if min(values) <= 0:
        return {**told, "geometric_mean": None, "low": None, "high": None}
    logarithms = [math.log(value) for value in values]
    centre = statistics.fmean(logarithms)
    told["geometric_mean"] = math.exp(centre)
    if len(values) < 2:
        return {**told, "low": None, "high": None}
    deviation = statistics.stdev(logarithms)
    margin = student_t(0.5 + CONFIDENCE / 2, len(values) - 1) * deviation / math.sqrt(len(values))
    return {**told, "low": math.exp(centre - margin), "high": math.exp(centre + margin)}


def worst_verdict(runs: Sequence[Run]) -> Verdict:
    """The verdict that says least in favour of the runs together."""
    return min((run.verdict for run in runs), key=_WORST.index)


def read_repeats(folder: Path) -> dict[str, Any] | None:
    """``repeats.json`` of a folder of repeats; None where there is none.

    Raises:
        UsageError: it cannot be read.
    """
    path = folder / REPEATS
    if not path.is_file():
        return None
    try:
        document: dict[str, Any] = json.loads(path.read_bytes())
    except (OSError, ValueError) as error:
        raise UsageError(f"{path}: cannot be read ({error}); repeat the runs") from error
    return document


def describe_repeats(repeats: Mapping[str, Any]) -> Iterator[str]:
    """The document in lines for a person."""
    yield f"{len(repeats['runs'])} of {repeats['runs_wanted']} runs: {', '.join(repeats['verdicts'])}"
    for name, found in repeats["metrics"].items():
        shown = found["mean"] if found["geometric_mean"] is None else found["geometric_mean"]
        within = "" if found["low"] is None else f", {found['low']:.5g} .. {found['high']:.5g}"
        yield f"{name}: {shown:.5g}{within}"
    for name, found in repeats.get("percentiles", {}).items():
        yield f"{name} of each run: {', '.join(f'{value:.5g}' for value in found['values'])}"
    yield f"{repeats['confidence']:.0%} confidence: {repeats['interval_formula']}"
    yield repeats["seeds_note"]
