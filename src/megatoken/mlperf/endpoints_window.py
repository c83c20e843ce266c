"""The steady-state window of MLPerf Endpoints: super-passes of a run over which the gated metrics show no trend.

A super-pass is a block of requests, in the order of their issue, as large as the data set. Leading super-passes that
are still off the level of the second half are cropped. From the first that is left, a plateau grows as long as every
gated metric, a percentile of each super-pass, has no trend that is both significant (Mann-Kendall with the variance
correction of Hamed and Rao, 1998) and large, and varies little. The window is the first plateau that lasts long enough.
Limits: ``data/endpoints_rules.yaml``; section 4.4 of the rules.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from megatoken.analysis.series import Floats

Shape = Literal["STEADY STATE", "drifting_up", "drifting_down", "anomaly", "not found"]
State = Literal["Plateau", "Drifting Up", "Drifting Down"]
Trajectories = Mapping[str, Floats]  # of each metric one value a super-pass
WATCHED = ("tpot_p50", "tpot_p90", "ttft_p50", "ttft_p90")
SHARES = {"p50": 0.5, "p90": 0.9}
TWO_SIDED_95 = 1.959964


@dataclass(frozen=True, slots=True)
class Requests:
    """Requests in the order of their issue, as arrays [N]: seconds and tokens; NaN for what did not come."""

    issued: Floats
    ttft: Floats
    tpot: Floats
    latency: Floats
    output_tokens: Floats

    def within(self, start: int, end: int) -> Requests:
        """Those from ``start`` until before ``end``."""
        return Requests(*(getattr(self, name)[start:end] for name in self.__slots__))


@dataclass(frozen=True, slots=True)
class Window:
    """What was found."""

    shape: Shape  # the verdict of section 4.4
    super_passes: int  # complete ones of the run
    super_pass_rows: int  # requests of one
    cropped: int  # super-passes before the window was looked for
    start: int | None = None  # first super-pass of the window, counted from 0; None without one
    end: int | None = None  # after its last one
    seconds: float = 0.0  # issue times of the window
    needed_seconds: float = 0.0  # that the window must last by its own latencies and variation, whatever its region
    states: Mapping[str, State] | None = None  # of each gated metric
    drifting_up: tuple[str, ...] = ()  # watched metrics that climb from the start of the window to the end of the run
    # change of mean TPOT from the window to a later plateau, as a share; None without one
    level_shift: float | None = None

    @property
    def passes(self) -> int:
        """Super-passes of the window."""
        return self.end - self.start if self.start is not None and self.end is not None else 0


def find_window(requests: Requests, rows: int, min_seconds: float, limits: Mapping[str, Any]) -> Window:
    """The window of a run.

    Args:
        requests: all that were issued.
        rows: of the data set; a super-pass.
        min_seconds: that the region of the point requires.
        limits: ``steady_state`` of the rules.
    """
    count = len(requests.issued) // rows
    passes = [requests.within(at * rows, (at + 1) * rows) for at in range(count)]
    cropped = _cropped(passes, limits)
    kept = passes[cropped:]
    plateaus = _plateaus(kept, limits)
    if not plateaus:
        return Window("not found", count, rows, cropped, states=_states(kept, limits))
    needs = [_needed_seconds(kept[slice(*one)], limits) for one in plateaus]
    lasting = [_seconds(kept[slice(*one)]) for one in plateaus]
    long = [at for at, one in enumerate(lasting) if one >= max(needs[at], min_seconds)]
    chosen = long[0] if long else int(np.argmax(lasting))
    start, end = plateaus[chosen]
    tail = _trajectories(kept[start:])
    trends = {name: _trend(tail[name], limits["trend_significance"]) for name in WATCHED}
    shift = _level_shift(kept, plateaus[chosen:], limits)
    return Window(
        _shape(trends, limits["gated"], shift),
        count,
        rows,
        cropped,
        cropped + start,
        cropped + end,
        lasting[chosen],
        needs[chosen],
        _states(kept[start:end], limits),
        tuple(name for name, trend in trends.items() if trend > 0),
        shift,
    )


def _shape(trends: Mapping[str, int], gated: Sequence[str], shift: float | None) -> Shape:
    if shift is not None:
        return "anomaly"
    if any(trends[name] > 0 for name in gated):
        return "drifting_up"
    return "drifting_down" if any(trends[name] < 0 for name in gated) else "STEADY STATE"


def lower_percentile(values: Floats, share: float) -> float:
    """The value at the rank below ``share`` among the finite ``values``, as the reference client takes percentiles."""
    known = np.sort(values[np.isfinite(values)])
    return float(known[int(share * (len(known) - 1))]) if len(known) else math.nan


def _trajectories(passes: Sequence[Requests]) -> Trajectories:
    return {
        name: np.array([lower_percentile(getattr(one, name[:4]), SHARES[name[5:]]) for one in passes])
        for name in WATCHED
    }


def _cropped(passes: Sequence[Requests], limits: Mapping[str, Any]) -> int:
    """Leading super-passes that are further from the level of the second half than the band; at least one."""
    medians = _trajectories(passes)["tpot_p50"]
    if len(passes) < limits["super_passes"] or not np.isfinite(medians).all():
        return min(1, len(passes))
    level = float(np.median(medians[len(medians) // 2 :]))
    off = np.abs(medians - level) > limits["warm_up_band"] * level
    most = max(1, int(limits["warm_up_share"] * len(passes)))
    first = next((at for at, one in enumerate(off) if not one), len(off))
    return min(max(1, first), most)


def _plateaus(passes: Sequence[Requests], limits: Mapping[str, Any]) -> list[tuple[int, int]]:
    """Spans of super-passes, each grown from its left end as long as it is steady."""
    found, start, least = [], 0, limits["super_passes"]
    values = _trajectories(passes)
    while start <= len(passes) - least:
        end = start + least
        if not _steady(values, start, end, limits):
            start += 1
            continue
        while end < len(passes) and _steady(values, start, end + 1, limits):
            end += 1
        found.append((start, end))
        start = end
    return found


def _steady(values: Trajectories, start: int, end: int, limits: Mapping[str, Any]) -> bool:
    return all(_flat(values[name][start:end], limits) for name in limits["gated"])


def _flat(values: Floats, limits: Mapping[str, Any]) -> bool:
    if not np.isfinite(values).all():
        return False
    trending = _trend(values, limits["trend_significance"]) != 0
    mean = float(values.mean())
    steady: bool = float(values.std()) <= limits["variation"] * abs(mean)
    return steady and not (trending and abs(_change(values)) >= limits["trend_share"])


def _change(values: Floats) -> float:
    """Change of a line through ``values``, from the first to the last, as a share of their median."""
    slope = np.polyfit(np.arange(len(values)), values, 1)[0]
    return float(slope * (len(values) - 1) / (np.median(values) or math.inf))


def _states(passes: Sequence[Requests], limits: Mapping[str, Any]) -> dict[str, State]:
    values = _trajectories(passes)
    known = {name: values[name] for name in limits["gated"] if len(passes) >= limits["super_passes"]}
    return {
        name: "Plateau" if _flat(one, limits) else "Drifting Up" if _change(one) > 0 else "Drifting Down"
        for name, one in known.items()
        if np.isfinite(one).all()
    }


def _trend(values: Floats, significance: float) -> int:
    """1 or -1 for a significant rise or fall of ``values`` in time, else 0."""
    values = values[np.isfinite(values)]
    count = len(values)
    if count < 4:
        return 0
    one, other = np.triu_indices(count, 1)
    score = int(np.sign(values[other] - values[one]).sum())
    ties = np.unique(values, return_counts=True)[1].astype(float)
    variance = (count * (count - 1) * (2 * count + 5) - (ties * (ties - 1) * (2 * ties + 5)).sum()) / 18
    variance *= _rank_correction(values)
    if variance <= 0:
        return int(np.sign(score))
    z = (score - np.sign(score)) / math.sqrt(variance)
    significant = 2 * (1 - statistics.NormalDist().cdf(abs(z))) < significance
    return int(np.sign(score)) if significant else 0


def _rank_correction(values: Floats) -> float:
    """Factor on the variance of Mann-Kendall's score for autocorrelated values; 1 where it would be none."""
    count = len(values)
    ranks = np.argsort(np.argsort(values, kind="stable"), kind="stable").astype(float)
    deviations = ranks - ranks.mean()
    spread = float((deviations**2).sum())
    lags = np.arange(1, count)
    correlations = np.array([(deviations[lag:] * deviations[:-lag]).sum() for lag in lags]) / spread
    weights = (count - lags) * (count - lags - 1.0) * (count - lags - 2.0)
    known = np.abs(correlations) > TWO_SIDED_95 / math.sqrt(count)
    factor = 1 + 2 / (count * (count - 1.0) * (count - 2.0)) * float((weights * correlations)[known].sum())
    return factor if factor > 0 else 1.0


def _seconds(passes: Sequence[Requests]) -> float:
    return float(passes[-1].issued[-1] - passes[0].issued[0])


def _needed_seconds(passes: Sequence[Requests], limits: Mapping[str, Any]) -> float:
    """How long a plateau must last: several latencies, and long enough for the precision of TPOT p50."""
    latency = lower_percentile(np.concatenate([one.latency for one in passes]), SHARES["p90"])
    medians = _trajectories(passes)["tpot_p50"]
    least = limits["super_passes"]
    batches = math.ceil((TWO_SIDED_95 * float(medians.std() / medians.mean()) / limits["precision"]) ** 2)
    median_pass = float(np.median([_seconds([one]) for one in passes]))
    precise = batches * median_pass if batches > least else 0.0
    return max(float(limits["latencies"]) * latency, precise)


def _level_shift(
    passes: Sequence[Requests], plateaus: Sequence[tuple[int, int]], limits: Mapping[str, Any]
) -> float | None:
    """Change of mean TPOT from the first plateau to a later one, where a change point confirms it."""
    if len(plateaus) < 2 or not _has_change_point(np.array([np.nanmean(one.tpot) for one in passes])):
        return None
    first, *later = (np.nanmean(np.concatenate([one.tpot for one in passes[slice(*span)]])) for span in plateaus)
    shifts = [float(one / first - 1) for one in later]
    return next((shift for shift in shifts if abs(shift) > limits["level_shift"]), None)


def _has_change_point(values: Floats) -> bool:
    """Whether Pettitt's test finds a change of level among ``values`` [N], at a significance of 5%."""
    count = len(values)
    ranks = _mean_ranks(values)
    sums = 2 * np.cumsum(ranks)[:-1] - np.arange(1, count) * (count + 1)
    largest = float(np.abs(sums).max())
    return 2 * math.exp(-6 * largest**2 / (count**3 + count**2)) < 0.05


def _mean_ranks(values: Floats) -> NDArray[np.float64]:
    """Ranks from 1; equal values share the mean of theirs."""
    ordered = np.sort(values)
    low, high = np.searchsorted(ordered, values, "left"), np.searchsorted(ordered, values, "right")
    return (low + 1 + high) / 2
