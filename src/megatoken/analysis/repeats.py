"""Repeats of one test: checking that they are, their verdicts, and the interval of each metric's geometric mean."""

from __future__ import annotations

import json
import math
import os
import statistics
from collections.abc import Container, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from megatoken.analysis.comparison import CONFIDENCE, student_t
from megatoken.analysis.lookup import read_runs
from megatoken.analysis.machine import contentions, simulated_gpu
from megatoken.errors import UsageError
from megatoken.files import cause, new_document
from megatoken.runs.run import RESULT, Run, Verdict
from megatoken.text import is_number

REPEATS = "repeats.json"
INTERVAL_FORMULA = (
    "exp(m ± t(1 - (1 - confidence) / 2; n - 1) · s / √n), m and s the mean and the standard deviation (with n - 1) of"
    " the logarithms, exp(m) the geometric mean, because rates differ by factors"
)
SEEDS_NOTE = (
    "Every repeat has the same seeds: LoadGen issues the same samples in the same order at the same times, random"
    " weights and prompts are the same, and sampled tokens differ only where a sample has no seed. So the interval"
    " covers how the machine varies on equal work, not what other seeds would change."
)
_METRICS = (
    *("output_tokens_per_second", "steady_output_tokens_per_second", "samples_per_second"),
    *("loadgen_output_tokens_per_second", "energy_joules_per_output_token"),
)
_OWN_PERCENTILES = ("ttft", "tpot", "latency")  # where LoadGen states none, as in Offline
_PERCENTILES = ("loadgen_ttft_p99_seconds", "loadgen_tpot_p99_seconds", "loadgen_latency_p90_seconds")
_WORST = (Verdict.INTERRUPTED, Verdict.INVALID, Verdict.DEGRADED, Verdict.MEASURED, Verdict.VALID)
# What repeats of one test have in common; the rest of a configuration is where it writes, and sizes from free memory.
_SETTING = (
    *("scenario", "mode", "rules", "model", "weights", "precision", "data_set_sha256", "offered_samples_per_second"),
    *("ttft_limit_seconds", "tpot_limit_seconds"),
)


def read_repeats_in(path: Path) -> list[Run]:
    """The run folder ``path`` alone, or all below it, which must be repeats of one test.

    Raises:
        UsageError: there is none, one is damaged, or they are of several tests.
    """
    runs = read_runs(path)
    check_repeats(runs, str(path))
    return runs


def check_repeats(runs: Sequence[Run], name: str) -> None:
    """Refuse runs that are not the same test on the same machine, and copies of one run.

    Raises:
        UsageError: names the first that is not, and in what it differs.
    """
    first = setting(runs[0])
    for run in runs[1:]:
        for key, value in setting(run).items():
            if value != first[key]:
                raise UsageError(
                    f"{name}: {run.path.name} is not a repeat of {runs[0].path.name}: {key} is {value}, not"
                    f" {first[key]}; give one of them, or a folder of repeats alone"
                )
    _refuse_copies(runs, name)


def _refuse_copies(runs: Sequence[Run], name: str) -> None:
    """No two runs have answers that all ended at the same moments, to the nanosecond."""
    known: dict[bytes, Run] = {}
    for run in runs:
        moments = np.asarray(run.requests["last_token_seconds"].to_numpy(), dtype=np.float64)
        if len(np.unique(moments)) < 2:
            continue  # too few answers to say so
        if (other := known.setdefault(moments.tobytes(), run)) is not run:
            raise UsageError(
                f"{name}: {run.path.name} is a copy of {other.path.name}: their answers ended at the same moments;"
                " remove one of them"
            )


def are_repeats(runs: Sequence[Run]) -> bool:
    """Whether all are the same test on the same machine."""
    return all(setting(run) == setting(runs[0]) for run in runs)


def setting(run: Run) -> dict[str, Any]:
    """What repeats of one test have in common; ``samples`` and ``min_duration_seconds`` as asked for."""
    target, load = run.result.get("target") or {}, run.result.get("load")
    return {
        **{name: run.result.get(name) for name in _SETTING},
        "load": load and f"{load['kind']} {load['value']:g}{' next to a neighbour' if load.get('neighbour') else ''}",
        **{name: run.config.get(name) for name in ("samples", "min_duration_seconds")},
        "source revision": (run.environment.get("source") or {}).get("revision"),
        "device": target.get("device"),
        "threads": target.get("threads"),
        "hostname": run.environment.get("hostname"),
    }


def whole_runs(runs: Sequence[Run]) -> list[Run]:
    """The runs that finished; all of them if none did."""
    return [run for run in runs if run.verdict is not Verdict.INTERRUPTED] or list(runs)


def summarise_repeats(runs: Sequence[Run], wanted: int, missing: Sequence[str] = ()) -> dict[str, Any]:
    """The document of ``repeats.json``: verdicts, and interval of every metric that all whole runs have.

    Percentiles are listed, not averaged: the mean of p99s is the p99 of nothing. ``wanted`` runs were asked for; the
    notes ``missing`` are those of ``missing_notes``.
    """
    whole = whole_runs(runs)
    metrics = {name: interval(values) for name in _METRICS if (values := _values(whole, name))}
    percentiles = {name: {"values": values} for name in _PERCENTILES if (values := _values(whole, name))}
    if not any(run.result.get(name) for run in whole for name in _PERCENTILES):
        for name in _OWN_PERCENTILES:
            found = [(run.result.get(f"{name}_seconds") or {}).get("p99") for run in whole]
            if len(p99s := [float(p99) for p99 in found if isinstance(p99, int | float)]) == len(whole):
                percentiles[f"{name}_p99_seconds"] = {"values": p99s}
    result = runs[0].result
    subject = (result.get("scenario"), result.get("model"), result.get("precision"))
    return new_document(
        "repeats",
        title=f"Repeats of {' '.join(str(part) for part in subject if part)}",
        inputs=[run.path for run in runs],
        notes=[*missing, *_notes(runs, whole)],
        verdict=worst_verdict(runs),
        verdicts=[run.verdict for run in runs],
        reasons=[{"run": run.path.name, **reason} for run in runs for reason in run.reasons],
        simulated_gpu=simulated_gpu(runs[0]),
        runs=[run.path.name for run in runs],
        runs_wanted=wanted,
        runs_in_the_mean=[run.path.name for run in whole],
        metrics=metrics,
        percentiles=percentiles,
        confidence=CONFIDENCE,
        interval_formula=INTERVAL_FORMULA,
        seeds=result.get("seeds"),
        seeds_note=SEEDS_NOTE,
    )


def _notes(runs: Sequence[Run], whole: Sequence[Run]) -> list[str]:
    left_out = [run.path.name for run in runs if run not in whole]
    return [
        *shared_notes(runs),
        *([f"not in the mean, because they did not finish: {', '.join(left_out)}"] if left_out else []),
        *contentions(runs),
    ]


def shared_notes(runs: Sequence[Run], leaving_out: str | None = None) -> Iterator[str]:
    """The notes of all runs, each once, with the runs that have it unless all do; of several shares the highest.

    ``leaving_out``: code of a note that the reader of them together has no use for.
    """
    alike: dict[tuple[str, ...], list[tuple[str, Mapping[str, Any]]]] = {}
    for run in runs:
        for note in run.result.get("notes") or ():
            if note["code"] == leaving_out:
                continue
            key = (note["code"], note.get("node", "")) if is_number(note.get("share")) else (note["message"],)
            alike.setdefault(key, []).append((run.path.name, note))
    for found in alike.values():
        names = dict.fromkeys(name for name, _ in found)
        of = "" if len(names) == len(runs) else f"{', '.join(names)}: "
        highest = max((note for _, note in found), key=lambda note: float(note.get("share", 0)))
        several = len({note["message"] for _, note in found}) > 1
        yield f"{of}{highest['message']}{f' (the highest of {len(names)} runs)' if several else ''}"


def _values(runs: Sequence[Run], name: str) -> list[float]:
    """Of every run; empty unless all have one."""
    values = [run.result.get(name) for run in runs]
    return [float(value) for value in values if isinstance(value, int | float)] if None not in values else []


def interval(values: Sequence[float]) -> dict[str, Any]:
    """Mean and geometric mean of ``values``, and by ``INTERVAL_FORMULA`` where the latter lies.

    None for what is undefined: the interval of one value, logarithms of values that are not above zero.
    """
    found: dict[str, Any] = {"values": list(values), "mean": statistics.fmean(values)}
    if min(values) <= 0:
        return {**found, "geometric_mean": None, "low": None, "high": None}
    logarithms = [math.log(value) for value in values]
    centre = statistics.fmean(logarithms)
    found["geometric_mean"] = math.exp(centre)
    if len(values) < 2:
        return {**found, "low": None, "high": None}
    deviation = statistics.stdev(logarithms)
    margin = student_t(0.5 + CONFIDENCE / 2, len(values) - 1) * deviation / math.sqrt(len(values))
    return {**found, "low": math.exp(centre - margin), "high": math.exp(centre + margin)}


def worst_verdict(runs: Sequence[Run]) -> Verdict:
    """The worst verdict of the runs."""
    return min((run.verdict for run in runs), key=_WORST.index)


def missing_notes(path: Path, runs: Sequence[Run]) -> list[str]:
    """Notes on runs that ``repeats.json`` lists and that are not among ``runs``, all runs below ``path``.

    Raises:
        UsageError: a ``repeats.json`` cannot be read.
    """
    below: dict[Path, set[str]] = {}
    for run in runs:
        if run.path != path:  # else one of several is meant
            below.setdefault(run.path.parent, set()).add(run.path.name)
    missing = [one for folder, there in below.items() for one in _missing(folder, there)]
    if not missing:
        return []
    return [f"missing although {REPEATS} lists them: {', '.join(missing)}; all numbers cover the other runs"]


def _missing(folder: Path, there: Container[str]) -> Iterator[str]:
    listed = (read_repeats(folder) or {}).get("runs")
    for name in map(str, listed) if isinstance(listed, list) else ():
        if name not in there:
            lost = RESULT if os.path.isdir(folder / name) else "folder"  # noqa: PTH112 - the name may hold anything
            yield f"{name} (its {lost} is gone)"


def read_repeats(folder: Path) -> dict[str, Any] | None:
    """``repeats.json`` of a folder of repeats; None where there is none. Raises UsageError: it cannot be read."""
    path = folder / REPEATS
    if not path.is_file():
        return None
    try:
        document: dict[str, Any] = json.loads(path.read_bytes())
    except (OSError, ValueError) as error:
        raise UsageError(f"{path}: cannot be read ({cause(error)}); repeat the runs") from error
    return document
