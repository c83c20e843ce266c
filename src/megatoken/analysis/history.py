"""Many runs side by side: the main figures of each, whether the latest of a group is worse, and what ran where."""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatoken.analysis.comparison import CONFIDENCE, student_t
from megatoken.analysis.lookup import names_of
from megatoken.analysis.machine import run_accelerators, simulated_gpu
from megatoken.analysis.repeats import setting
from megatoken.analysis.statistics import leading_rates
from megatoken.errors import UsageError
from megatoken.runs.run import Run, Verdict
from megatoken.text import is_number

CODE = "source revision"  # what a history may differ in and repeats may not
BETTER, WORSE, WITHIN = "better", "regression", "within the spread"
Work = tuple[str, str, str]  # model, precision, scenario


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
    """The latest run's value under ``name`` against earlier runs of equal settings, or against a baseline.

    ``low`` to ``high`` is where one more run lies with a confidence of 95 % if nothing changed:
    exp(m ± t(0.975; n - 1) · s · √(1 + 1/n)), m and s the mean and the standard deviation (with n - 1) of the
    logarithms of the ``earlier`` values. For a baseline of one run, m is its logarithm, s that of all n earlier runs,
    and the root is √2. ``outcome`` is better, regression or within the spread.
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
    """All runs of a folder, newest first, their groups, and the name of the baseline, empty without one."""

    name: str
    entries: tuple[Entry, ...]
    groups: tuple[Group, ...]
    baseline: str = ""


def history(runs: Sequence[Run], name: str, baseline: Sequence[Run] = ()) -> History:
    """The history of ``runs``, in any order; the latest of each group is checked against ``baseline`` if one is given.

    Raises:
        UsageError: no group has the settings of the baseline.
    """
    # Runs that ended in the same second stand in the order in which they began.
    times = ("created_at", "started_at")
    ordered = sorted(runs, key=lambda run: (*(_text(run.result.get(time)) for time in times), run.path))
    entries = {run.path: entry_of(run) for run in ordered}
    groups: dict[tuple[str, ...], list[Run]] = {}
    for run in ordered:
        if run.verdict is not Verdict.INTERRUPTED:
            groups.setdefault(entries[run.path].group, []).append(run)
    found = []
    for members in groups.values():
        own = [entries[run.path] for run in members]
        found.append(_against(baseline, members, own) if baseline else _group(members, own))
    if baseline and not any(_same_test(baseline[0], members[-1]) for members in groups.values()):
        raise UsageError(_no_such_settings(baseline[0], [members[-1] for members in groups.values()]))
    names = names_of([run.path for run in baseline])
    return History(name, tuple(reversed(entries.values())), tuple(found), ", ".join(names))


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
        output_tokens_per_second=_number(leading_rates(result)["output_tokens_per_second"]),
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
    checks = tuple(_checks(same, same, entries[-1]))
    return Group(tuple(entries), checks, "" if checks else "the runs state no rate")


def _against(baseline: Sequence[Run], runs: Sequence[Run], entries: Sequence[Entry]) -> Group:
    """The group of ``runs`` with the latest that is not part of the baseline checked against it."""
    chosen = {run.path.resolve(): run for run in baseline}
    later = [index for index, run in enumerate(runs) if run.path.resolve() not in chosen]
    if not later:
        return Group(tuple(entries), (), "all runs are the baseline")
    latest = later[-1]
    if not _same_test(baseline[0], runs[latest]):
        return Group(tuple(entries), (), "the baseline has other settings")
    centre = [entry_of(run) for run in chosen.values()]
    spread = {run.path.resolve(): run for run in (*baseline, *runs[:latest]) if _same_test(run, runs[latest])}
    checks = tuple(_checks(centre, [entry_of(run) for run in spread.values()], entries[latest]))
    if checks:
        return Group(tuple(entries), checks, "")
    now, before = (one.output_tokens_per_second for one in (entries[latest], centre[0]))
    ratio = f"{now / before:.3f} of the baseline's rate; " if now and before else ""
    return Group(tuple(entries), (), f"{ratio}a second earlier run of equal settings would show the spread")


def _no_such_settings(baseline: Run, latest: Sequence[Run]) -> str:
    """What keeps the nearest group from being compared."""
    wanted = setting(baseline)
    found = [[key for key, value in setting(run).items() if key != CODE and value != wanted[key]] for run in latest]
    nearest = min(found, key=len, default=[])
    what = f"; the nearest differs in {', '.join(nearest)}" if nearest else ""
    return f"{baseline.path}: no runs have the settings of this baseline{what}; choose another --baseline"


def _same_test(run: Run, latest: Run) -> bool:
    wanted = setting(latest)
    return all(value == wanted[key] for key, value in setting(run).items() if key != CODE)


def _checks(centre: Sequence[Entry], earlier: Sequence[Entry], latest: Entry) -> Iterator[Check]:
    """Checks of ``latest`` against ``centre``; one run alone has the spread of the ``earlier`` ones."""
    offline = latest.scenario == "offline"  # whose latencies follow from the rate
    for name in ("output_tokens_per_second", *(() if offline else ("ttft_p99_seconds", "tpot_p99_seconds"))):
        middle, values = _values(centre, name), _values(earlier, name)
        now = getattr(latest, name)
        if middle and len(values) > 1 and now is not None:
            low, high = next_run_interval(middle) if len(middle) > 1 else next_to(middle[0], values)
            outcome = WITHIN
            if not low <= now <= high:
                outcome = BETTER if (now > high) == name.endswith("per_second") else WORSE
            yield Check(name, now, middle, low, high, outcome)


def _values(entries: Sequence[Entry], name: str) -> tuple[float, ...]:
    return tuple(value for entry in entries if (value := getattr(entry, name)) is not None and value > 0)


def next_run_interval(values: Sequence[float]) -> tuple[float, float]:
    """Where one more value like these, two or more above zero, lies with a confidence of 95 %; the formula of Check."""
    return _interval(statistics.fmean(map(math.log, values)), values, 1 + 1 / len(values))


def next_to(baseline: float, values: Sequence[float]) -> tuple[float, float]:
    """The same next to one run, whose own deviation counts too; ``values``, two or more, show how far runs vary."""
    return _interval(math.log(baseline), values, 2.0)


def _interval(centre: float, values: Sequence[float], variances: float) -> tuple[float, float]:
    deviation = statistics.stdev(map(math.log, values))
    margin = student_t(0.5 + CONFIDENCE / 2, len(values) - 1) * deviation * math.sqrt(variances)
    rounding = 1e-9  # equal values give an interval of no width, in which they must lie
    return math.exp(centre - margin - rounding), math.exp(min(centre + margin + rounding, 700.0))


def _p99(result: dict[str, Any], name: str) -> float | None:
    return _number((result.get(name) or {}).get("p99"))


def _number(value: object) -> float | None:
    return float(value) if is_number(value) else None


def _text(value: object) -> str:
    return "" if value is None else str(value)


@dataclass(frozen=True, slots=True)
class Cell:
    """The fastest of some runs, and how many there are; one that finished comes before an interrupted one."""

    best: Entry
    runs: int


@dataclass(frozen=True, slots=True)
class Matrix:
    """``cells`` by work and target; what was never run has none."""

    works: tuple[Work, ...]
    targets: tuple[str, ...]
    cells: dict[tuple[Work, str], Cell]


def matrix(runs: Sequence[Run]) -> Matrix:
    """The matrix of ``runs``, in any order."""
    found: dict[tuple[Work, str], list[Entry]] = {}
    for run in runs:
        entry = entry_of(run)
        work = (entry.model, entry.precision, entry.scenario)
        found.setdefault((work, _target(run, entry.machine)), []).append(entry)
    return Matrix(
        works=tuple(sorted({work for work, _ in found})),
        targets=tuple(sorted({target for _, target in found})),
        cells={place: Cell(max(entries, key=_rank), len(entries)) for place, entries in found.items()},
    )


def _target(run: Run, machine: str) -> str:
    """What served the requests and on which machine: our engine, a rack of it, or a server over HTTP."""
    urls = (run.config.get("endpoint") or {}).get("urls")
    if urls:
        return f"server {urls}"
    kind = "rack" if (run.config.get("rack") or {}).get("cluster") else "engine"
    on_gpu = simulated_gpu(run) or run_accelerators(run)
    return f"{kind} on {machine}" if on_gpu else f"{kind} on the CPU of {machine}"


def _rank(entry: Entry) -> tuple[bool, float]:
    return entry.verdict is not Verdict.INTERRUPTED, entry.output_tokens_per_second or 0.0
