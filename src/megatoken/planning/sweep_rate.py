"""A measured curve as the rate of a plan: the highest load of a sweep at which chosen percentiles keep the limits.

Only loads that were measured count; nothing is read between two of them. So tighter limits never give a higher rate.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from megatoken.analysis.statistics import samples_needed
from megatoken.analysis.sweep import SWEEP, by_load, made_up_note
from megatoken.audit.sweep_document import listed_runs, unlike_its_runs
from megatoken.errors import UsageError
from megatoken.files import UnreadableError, read_json_object
from megatoken.planning.assumptions import Assumptions
from megatoken.planning.figures import Input, Plan, Result, State, Table, state_of_runs, weakest
from megatoken.planning.service_level import Verdict
from megatoken.planning.throughput import DEFAULT_MIX, LENGTH, LIMITS, MIX, RATE_UNIT, Throughput
from megatoken.text import count_of, precise

PERCENTILES = ("p50", "p90", "p95", "p99")
TTFT, TPOT = "time to first token", "time per output token"


@dataclass(frozen=True, slots=True)
class Load:
    """What a load gave; of repeats the mean rate and the slowest percentiles. Latencies are None if none were seen."""

    value: float
    output_tokens_per_second: float
    ttft_seconds: float | None
    tpot_seconds: float | None
    kept_up: bool  # neither overloaded nor ended early, and no request failed or was left without a first token
    answers: int  # behind the percentiles
    points: tuple[Mapping[str, Any], ...]

    @property
    def cut(self) -> int:
        """Answers that were cut off at the end of the load."""
        return sum(point.get("requests_unended") or 0 for point in self.points)

    def broken(self, ttft_limit: float, tpot_limit: float) -> list[str]:
        """The limits that the load breaks."""
        found = [] if self.kept_up else ["the load itself"]
        if self.ttft_seconds is None or self.ttft_seconds > ttft_limit:
            found.append(TTFT)
        if self.tpot_seconds is not None and self.tpot_seconds > tpot_limit:
            found.append(TPOT)
        return found

    def undecided(self, percentile: str) -> str | None:
        """What the load has instead of enough answers that show the percentile, and the fix; None where they do."""
        whole = (
            one["tpot_seconds"]["p50"] is None and (one["output_tokens_per_request"] or 0) > 1 for one in self.points
        )
        if any(whole):
            return "answers of several tokens in one piece: look for a proxy that holds streams back"
        needed = samples_needed(float(percentile[1:]))
        if self.answers >= needed:
            return None
        return f"{self.answers:,} of the {needed:,} answers that {percentile} needs: use a longer --window"


@dataclass(frozen=True, slots=True)
class Chosen:
    """The load to plan with, and what stops the next faster one."""

    load: Load
    loads: tuple[Load, ...]
    limits: tuple[float, float]
    percentile: str
    unit: str
    binds: str

    @property
    def why(self) -> str:
        """One sentence."""
        ttft, tpot = self.limits
        at = f"{precise(self.load.value)} {self.unit}"
        return (
            f"highest output of the sweep, at {at}, with {self.percentile} of TTFT within {ttft:g} s and of the time"
            f" per output token within {1000 * tpot:g} ms; {self.binds}"
        )


def choose(document: Mapping[str, Any], limits: tuple[float, float], percentile: str) -> Chosen:
    """The load with the highest output among those that keep the limits, as enough answers show.

    Args:
        document: of a sweep.
        limits: on the time to first token and the time per output token, in seconds.
        percentile: of the requests that must keep them.

    Raises:
        UsageError: an unknown percentile, or no load keeps the limits, or too few answers show it of those that may.
    """
    if percentile not in PERCENTILES:
        raise UsageError(f"--percentile {percentile}: expected one of {', '.join(PERCENTILES)}")
    loads = [_load(value, points, percentile) for value, points in by_load(document["points"]).items()]
    unbroken = [load for load in loads if not load.broken(*limits)]
    within = [load for load in unbroken if load.undecided(percentile) is None]
    wanted = (
        f"{percentile} of TTFT within {limits[0]:g} s and of the time per output token within {1000 * limits[1]:g} ms"
    )
    if not unbroken:
        lowest = loads[0] if loads else None
        seen = "" if lowest is None else f"; the lowest, {precise(lowest.value)}, {_latencies(lowest, percentile)}"
        if lowest is not None and not lowest.kept_up:
            failed = sum(point.get("requests_failed") or 0 for point in lowest.points)
            why = f"{count_of(failed, 'request')} failed" if failed else "the target did not keep up with it"
            seen += f", but {why}"
        raise UsageError(f"no load of the sweep keeps {wanted}{seen}")
    if not within:
        most = max(unbroken, key=lambda load: load.answers)
        shown = [name for name in PERCENTILES if most.undecided(name) is None]
        lower = f", or plan with --percentile {shown[-1]}" if shown else ""
        raise UsageError(
            f"the requests of the sweep do not show whether a load keeps {wanted}; the one with most,"
            f" {precise(most.value)}, has {most.undecided(percentile)}{lower}"
        )
    best = max(within, key=lambda load: load.output_tokens_per_second)
    faster = [load for load in loads if load.output_tokens_per_second > best.output_tokens_per_second]
    unit = str(document["load_unit"])
    binds = "no load that was measured is faster: measure higher loads to see where the limits bind"
    if faster:
        nearest = min(faster, key=lambda load: load.output_tokens_per_second)
        at = f"{precise(nearest.value)} {unit}"
        if broken := " and ".join(nearest.broken(*limits)):
            binds = f"{broken} binds: at {at} it {_latencies(nearest, percentile)}"
        else:
            binds = f"limits are unknown at {at}, which has {nearest.undecided(percentile)}"
    elif len(within) == len(loads):
        binds = "neither limit binds up to the highest load that was measured"
    return Chosen(best, tuple(loads), limits, percentile, unit, binds)


def read_sweep_document(path: Path) -> Mapping[str, Any]:
    """The document of a sweep, from its folder or its ``sweep.json``. Raises UsageError."""
    file = path / SWEEP if path.is_dir() else path
    try:
        document, _, _ = read_json_object(file)
    except UnreadableError as error:
        raise UsageError(f"{file}: expected the folder of a sweep, or its {SWEEP}: {error}") from None
    if document.get("kind") != "sweep" or not isinstance(document.get("points"), list):
        raise UsageError(f"{file}: not the document of a sweep; give the folder that megatoken sweep made")
    if document.get("load_kind") == "stages":
        raise UsageError(
            f"{file}: a sweep of stages, each of which begins with the requests of the one before; plan with one load"
            " after the other, such as megatoken sweep --concurrency 1-64"
        )
    _refuse_edited(document, file)
    return document


def _refuse_edited(document: Mapping[str, Any], file: Path) -> None:
    """Refuses what the run folders next to the file contradict; a file that was copied alone cannot be checked."""
    try:
        folders = listed_runs(document, file.parent)
    except UnreadableError:
        return
    if not any(folder.is_dir() for folder in folders):
        return
    if wrong := next(unlike_its_runs(document, folders), None):
        raise UsageError(
            f"{file}: its run folders contradict it: {wrong}; megatoken report {file.parent} rebuilds it from them"
        )


def from_sweep(
    path: Path, assumptions: Assumptions, percentile: str, *, accelerators: int | None, accelerator: str | None
) -> tuple[Throughput, Chosen]:
    """The rate of the chosen load, and how it was chosen. Limits are those of the assumptions. Raises UsageError."""
    document = read_sweep_document(path)
    ttft, tpot = (assumptions[name] for name in LIMITS)
    chosen = choose(document, (ttft, tpot), percentile)
    point = chosen.load.points[0]
    used = point["accelerators"] or accelerators
    if accelerators not in (None, used):
        raise UsageError(f"{path}: expected {accelerators} accelerators, the sweep used {used}")
    verdicts = [str(one.get("verdict")) for one in chosen.load.points]
    state: State = state_of_runs(verdicts, "estimate" if document.get("simulated_gpu") else "measured")
    source = f"{path}, {precise(chosen.load.value)} {chosen.unit}"
    tokens_in, tokens_out = (_mean(chosen.load.points, f"{name}_tokens_per_request") for name in ("input", "output"))
    known = tokens_in is not None and tokens_out is not None
    mix = tokens_in / tokens_out if tokens_in is not None and tokens_out else assumptions[MIX]
    unit = "input tokens / output token"
    mix_state = weakest((state, "estimate")) if chosen.load.cut else state  # of those that ended
    mix_input = Input(MIX, mix, unit, mix_state, source) if known else assumptions.inputs([MIX])[0]
    rates = [float(one["output_tokens_per_second"]) for one in chosen.load.points]
    spread = (min(rates), max(rates)) if len(rates) > 1 else (None, None)
    rate = chosen.load.output_tokens_per_second
    throughput = Throughput(
        output_tokens_per_second=rate,
        scope="system",
        accelerators=used,
        accelerator=document.get("accelerator") or accelerator,
        input_tokens_per_output_token=mix,
        output_tokens_per_request=tokens_out or assumptions[LENGTH],
        scenario="server",
        inputs=(Input("rate", rate, RATE_UNIT.replace("whole run", "window"), state, source, *spread), mix_input),
        state=state,
        source=source,
        mix_state=mix_input.state,
        service=_verdict(chosen),
        notes=tuple(_notes(document, chosen, known=known)),
    )
    return throughput, chosen


def with_curve(plan: Plan, chosen: Chosen, state: State) -> Plan:
    """The plan with the load that it rests on, whose rate has this state, and the curve."""
    percentile, load = chosen.percentile, chosen.load
    result = Result("Load of the sweep", load.value, chosen.unit, chosen.why, state)
    rows = tuple(
        {
            "load": one.value,
            "output_tokens_per_second": one.output_tokens_per_second,
            f"ttft_{percentile}_milliseconds": None if one.ttft_seconds is None else 1000 * one.ttft_seconds,
            f"tpot_{percentile}_milliseconds": None if one.tpot_seconds is None else 1000 * one.tpot_seconds,
            "breaks": ", ".join(one.broken(*chosen.limits))
            or ("chosen" if one is load else "unknown" if one.undecided(percentile) else "nothing"),
        }
        for one in chosen.loads
    )
    note = f"load in {chosen.unit}; limits: TTFT {chosen.limits[0]:g} s, {1000 * chosen.limits[1]:g} ms per token"
    table = Table("sweep", "The measured curve, and what each load breaks", rows, note, rounded=False)
    return replace(plan, results=(*plan.results, result), tables=(*plan.tables, table))


def _load(value: float, points: Sequence[Mapping[str, Any]], percentile: str) -> Load:
    ttft, tpot = (_slowest(points, key, percentile) for key in ("ttft_seconds", "tpot_seconds"))
    rate = statistics.fmean(float(point["output_tokens_per_second"]) for point in points)
    broke = ("overloaded", "ended_by", "requests_failed", "requests_unanswered")
    kept_up = not any(point.get(name) for point in points for name in broke)
    answers = sum(int(point["requests_completed"]) for point in points)
    return Load(value, rate, ttft, tpot, kept_up, answers, tuple(points))


def _slowest(points: Sequence[Mapping[str, Any]], key: str, percentile: str) -> float | None:
    return max((float(one) for point in points if (one := point[key][percentile]) is not None), default=None)


def _latencies(load: Load, percentile: str) -> str:
    parts = (
        ("TTFT", load.ttft_seconds, 1.0, "s"),
        ("time per output token", load.tpot_seconds, 1000.0, "ms"),
    )
    known = [f"{name} {precise(scale * value)} {unit}" for name, value, scale, unit in parts if value is not None]
    if not known:
        return "has no answer within its window; use a longer --window"
    return f"has {percentile} of {', '.join(known)}"


def _verdict(chosen: Chosen) -> Verdict:
    """The service level as kept: the load was chosen by it. Medians stand for means; too few answers show no p99."""
    point = chosen.load.points[0]
    good = point["goodput"] or {}
    p99s_known = chosen.load.undecided("p99") is None
    return Verdict(
        kept=True,
        why=chosen.why,
        ttft_mean_seconds=point["ttft_seconds"]["p50"],
        tpot_mean_seconds=point["tpot_seconds"]["p50"],
        ttft_p99_seconds=point["ttft_seconds"]["p99"] if p99s_known else None,
        tpot_p99_seconds=point["tpot_seconds"]["p99"] if p99s_known else None,
        good_share=None,
        good_requests_per_second=good.get("samples_per_second"),
        good_output_tokens_per_second=good.get("output_tokens_per_second"),
        bound_output_tokens_per_second=chosen.load.output_tokens_per_second,
    )


def _notes(document: Mapping[str, Any], chosen: Chosen, *, known: bool) -> list[str]:
    notes = [
        *made_up_note(document),
        f"The rate is the {chosen.why}.",
        "KV memory and queues are part of the measured curve.",
    ]
    unknown = [one for one in chosen.loads if not one.broken(*chosen.limits) and one.undecided(chosen.percentile)]
    if unknown:
        each = "; ".join(f"load {precise(one.value)}: {one.undecided(chosen.percentile)}" for one in unknown)
        notes.append(f"Limits unknown, so that these do not count as within them: {each}.")
    if cut := chosen.load.cut:
        notes.append(
            f"Cut off at the end of the load: {count_of(cut, 'answer')}. Times per output token and lengths that the"
            " plan rests on are of those that ended; use a longer --window."
        )
    if document.get("verdict") not in ("MEASURED", "VALID"):
        notes.append(f"The sweep ended {document.get('verdict')}, so the plan rests on an unreliable sweep.")
    if not known:
        notes.append(DEFAULT_MIX)
    return notes


def _mean(points: Sequence[Mapping[str, Any]], key: str) -> float | None:
    known = [float(point[key]) for point in points if point.get(key) is not None]
    return statistics.fmean(known) if known else None
