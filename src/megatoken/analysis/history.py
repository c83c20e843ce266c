"""Many runs side by side: the main figures of each, and whether the latest of a group is worse than those before it."""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatoken.analysis.comparison import CONFIDENCE, student_t
from megatoken.analysis.machine import simulated_gpu
from megatoken.analysis.repeats import setting
from megatoken.runs.run import Run, Verdict
from megatoken.text import is_number

CODE = "source revision"  # what a history may differ in and repeats may not
BETTER, WORSE, WITHIN = "better", "regression", "within the spread"


@dataclass(frozen=True, slots=True)
class Entry:
    """One run of a history; None where the run does not state a figure. Rates in output tokens per second."""

    path: Path
    verdict: Verdict
    model: str
    precision: str
    scenario: str
    machine: str
    created_at: str
    output_tokens_per_second: float | None
    ttft_p99_seconds: float | None
    tpot_p99_seconds: float | None
    latency_p99_seconds: float | None
    power_watts: float | None

    @property
    def group(self) -> tuple[str, str, str, str]:
        """What the runs of one history share: model, precision, scenario, machine."""
        return self.model, self.precision, self.scenario, self.machine


@dataclass(frozen=True, slots=True)
class Check:
    """The latest run's value under ``name`` against earlier runs of equal settings.

    ``low`` to ``high`` is where one more run lies with a confidence of 95 % if nothing changed:
    exp(m ± t(0.975; n - 1) · s · √(1 + 1/n)), m and s the mean and the standard deviation (with n - 1) of the
    logarithms of the ``earlier`` values. ``outcome`` is better, regression or within the spread.
    """

    name: str
    latest: float
    earlier: tuple[float, ...]
    low: float
    high: float
    outcome: str


@dataclass(frozen=True, slots=True)
class Group:
    """Runs of one group, oldest first; interrupted ones are left out. ``checks`` is empty where ``why`` says why."""

    entries: tuple[Entry, ...]
    checks: tuple[Check, ...]
    why: str


@dataclass(frozen=True, slots=True)
class History:
    """All runs of a folder, newest first, and their groups."""

    name: str
    entries: tuple[Entry, ...]
    groups: tuple[Group, ...]


def history(runs: Sequence[Run], name: str) -> History:
    """The history of ``runs``, in any order."""
    # Runs that ended in the same second stand in the order in which they began.
    times = ("created_at", "started_at")
    ordered = sorted(runs, key=lambda run: (*(_text(run.result.get(time)) for time in times), run.path))
    entries = {run.path: entry_of(run) for run in ordered}
    groups: dict[tuple[str, ...], list[Run]] = {}
    for run in ordered:
        if run.verdict is not Verdict.INTERRUPTED:
            groups.setdefault(entries[run.path].group, []).append(run)
    return History(
        name,
        tuple(reversed(entries.values())),
        tuple(_group(members, [entries[run.path] for run in members]) for members in groups.values()),
    )


def entry_of(run: Run) -> Entry:
    """The main figures of one run."""
    result = run.result
    return Entry(
        path=run.path,
        verdict=run.verdict,
        model=_text(result.get("model")),
        precision=_text(result.get("precision")),
        scenario=_text(result.get("scenario")),
        machine=machine_of(run),
        created_at=_text(result.get("created_at")),
        output_tokens_per_second=_number(result.get("output_tokens_per_second")),
        ttft_p99_seconds=_p99(result, "ttft_seconds"),
        tpot_p99_seconds=_p99(result, "tpot_seconds"),
        latency_p99_seconds=_p99(result, "latency_seconds"),
        power_watts=_number(result.get("power_watts")),
    )


def machine_of(run: Run) -> str:
    """Host and GPUs, simulated ones too."""
    gpus = Counter(gpu["name"] for gpu in run.environment.get("gpus") or ())
    parts = [_text(run.environment.get("hostname")), *(f"{count} × {name}" for name, count in gpus.items())]
    if simulated := simulated_gpu(run):
        parts.append(f"simulated {simulated}")
    return ", ".join(filter(None, parts))


def _group(runs: Sequence[Run], entries: Sequence[Entry]) -> Group:
    *before, latest = runs
    same = [entry for run, entry in zip(before, entries, strict=False) if _same_test(run, latest)]
    if len(same) < 2:
        return Group(tuple(entries), (), f"needs 2 earlier runs of equal settings, has {len(same)}")
    offline = entries[-1].scenario == "offline"  # whose latencies follow from the rate
    names = ["output_tokens_per_second", *([] if offline else ["ttft_p99_seconds", "tpot_p99_seconds"])]
    checks = tuple(_checks(names, same, entries[-1]))
    return Group(tuple(entries), checks, "" if checks else "the runs state no rate")


def _same_test(run: Run, latest: Run) -> bool:
    wanted = setting(latest)
    return all(value == wanted[key] for key, value in setting(run).items() if key != CODE)


def _checks(names: Sequence[str], earlier: Sequence[Entry], latest: Entry) -> Iterator[Check]:
    for name in names:
        values = tuple(value for entry in earlier if (value := getattr(entry, name)) is not None and value > 0)
        now = getattr(latest, name)
        if len(values) > 1 and now is not None:
            low, high = next_run_interval(values)
            outcome = WITHIN
            if not low <= now <= high:
                outcome = BETTER if (now > high) == name.endswith("per_second") else WORSE
            yield Check(name, now, values, low, high, outcome)


def next_run_interval(values: Sequence[float]) -> tuple[float, float]:
    """Where one more value like these, two or more above zero, lies with a confidence of 95 %; the formula of Check."""
    logarithms = [math.log(value) for value in values]
    centre, count = statistics.fmean(logarithms), len(values)
    margin = student_t(0.5 + CONFIDENCE / 2, count - 1) * statistics.stdev(logarithms) * math.sqrt(1 + 1 / count)
    rounding = 1e-9  # equal values give an interval of no width, in which they must lie
    return math.exp(centre - margin - rounding), math.exp(min(centre + margin + rounding, 700.0))


def _p99(result: dict[str, Any], name: str) -> float | None:
    return _number((result.get(name) or {}).get("p99"))


def _number(value: object) -> float | None:
    return float(value) if is_number(value) else None


def _text(value: object) -> str:
    return "" if value is None else str(value)
