"""Whether a soak held its rate: windows of the time series, their trend and spread, and a verdict with its reasons.

The trend is the Theil-Sen slope with Sen's interval (Sen, "Estimates of the regression coefficient based on Kendall's
tau", JASA 63, 1968). That interval assumes independent windows. They are not: a machine that is slow now is still
slow in the next window. So the variance of Kendall's score is multiplied by n over the effective number of independent
values of a first-order autoregressive series, as Yue and Wang do for the Mann-Kendall test (Water Resources Management
18, 2004), with the lag-one autocorrelation of the residuals, corrected for its bias (Kendall, Biometrika 41,
1954).
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from megatoken.analysis.comparison import student_t
from megatoken.analysis.series import Floats, gpu_errors, numbers, replicas, tokens_from_start, totals_over_time
from megatoken.hardware.nvml import HARMFUL_REASONS, POWER_CAP, words_of
from megatoken.runs.reasons import Shortfall, shortfall

if TYPE_CHECKING:
    import pyarrow as pa

CONFIDENCE = 0.99
WINDOWS = 80
SHORTEST_WINDOW_SECONDS, LONGEST_WINDOW_SECONDS = 1.0, 60.0
MOST_WINDOWS = 1440  # the slopes of all pairs are kept
FEWEST_WINDOWS = 10
SETTLED_SHARE = 0.9  # of the samples that generate in the middle of a segment's second half
TENTH = 0.1

TREND_LIMIT = 0.02  # change over the soak, as a share of the median window
DRIFT_LIMIT = 0.03  # from the first tenth of the windows to the last
VARIATION_LIMIT = 0.05  # standard deviation of the windows over their mean
WORST_WINDOW_LIMIT = 0.9  # of the median window
GAP_SECONDS = 5.0  # without a token, or five times the usual distance of two rows where that is longer
GAP_ROWS = 5.0
FULL_LIMIT = 0.95  # of the rows in which a sample must be waiting
THROTTLED_LIMIT = 0.05  # of the rows of a GPU
FATAL_ERRORS = ("ecc_uncorrected_errors", "xid_errors")

LOW_CLOCK_SHARE = 0.98
AT_POWER_LIMIT_SHARE = 0.97
DROPPED_CLOCK_SHARE = 0.95
BELOW_POWER_LIMIT_SHARE = 0.95


class Stability(StrEnum):
    """The result of a soak."""

    STABLE = "STABLE"
    UNSTABLE = "UNSTABLE"
    UNDECIDED = "UNDECIDED"


@dataclass(frozen=True, slots=True)
class GpuLimits:
    """Limits of the GPUs of a replica, power summed; None if unknown or if the GPUs of the node differ."""

    power_limit_watts: float | None
    max_clock_mhz: float | None


@dataclass(frozen=True, slots=True)
class Trend:
    """Change of the rate for each second, its interval's ends, and the autocorrelation that the interval allows for.

    ``inflation`` is by how much that makes the variance of a mean larger than that of independent values.
    """

    slope: float
    low: float
    high: float
    autocorrelation: float
    inflation: float


@dataclass(frozen=True, slots=True)
class Windows:
    """Rates [N] in output tokens/s of windows that begin at ``begins`` [N] seconds, all ``seconds`` long."""

    seconds: float
    begins: Floats
    rates: Floats


def window_seconds(duration_seconds: float) -> float:
    """Length of a window: an 80th of the soak between 1 s and 60 s, longer where that would be more than 1,440."""
    usual = min(LONGEST_WINDOW_SECONDS, duration_seconds / WINDOWS)
    return max(usual, SHORTEST_WINDOW_SECONDS, duration_seconds / MOST_WINDOWS)


def theil_sen(x: Floats, y: Floats) -> Trend:
    """The median slope of all pairs of points ``y`` [N] at distinct ``x`` [N], N at least 3, and its interval.

    The ends of the interval, which the module's first lines describe, are infinite where N is too small for it.
    """
    count = len(x)
    one, other = np.triu_indices(count, 1)
    slopes = np.sort((y[other] - y[one]) / (x[other] - x[one]))
    slope = float(np.median(slopes))
    autocorrelation = _autocorrelation(y - slope * x)
    inflation = _inflation(autocorrelation, count)
    score_variance = inflation * count * (count - 1) * (2 * count + 5) / 18
    reach = statistics.NormalDist().inv_cdf(0.5 + CONFIDENCE / 2) * math.sqrt(score_variance)
    below, above = math.floor((len(slopes) - reach) / 2) - 1, math.ceil((len(slopes) + reach) / 2)
    low = float(slopes[below]) if below >= 0 else -math.inf
    high = float(slopes[above]) if above < len(slopes) else math.inf
    return Trend(slope, low, high, autocorrelation, inflation)


def _inflation(autocorrelation: float, count: int) -> float:
    """Variance of the mean of ``count`` values over that of independent ones."""
    lags = np.arange(1, count)
    return float(1 + 2 * ((1 - lags / count) * autocorrelation**lags).sum())


def _autocorrelation(values: Floats) -> float:
    """At lag one, corrected for bias; negative ones, which would narrow an interval, count as none."""
    values = values - values.mean()
    spread = float((values**2).sum())
    if spread == 0:
        return 0.0
    found = float((values[1:] * values[:-1]).sum()) / spread
    return min(max(found + (1 + 4 * found) / len(values), 0.0), 0.95)


def settled_spans(
    requests: pa.Table, series: pa.Table, segments: Sequence[tuple[float, float]]
) -> list[tuple[float, float]]:
    """The part of each of ``segments``, in which samples were issued, where the load was even; none where it never was.

    It begins a median sample's time from first to last token after as many samples were generating as 90 % of the
    median in the segment's second half: by then those that started together have been replaced.
    """
    if not len(series):
        return []
    times, in_flight, waiting = totals_over_time(series, ["in_flight", "waiting"])
    first, last = numbers(requests["first_token_seconds"]), numbers(requests["last_token_seconds"])
    lives = (last - first)[np.isfinite(last - first)]
    life = float(np.median(lives)) if len(lives) else 0.0
    spans = []
    for begin, end in segments:
        within = (times > begin) & (times <= end)
        generating = (in_flight - waiting)[within]
        usual = float(np.median(generating[len(generating) // 2 :])) if len(generating) else 0.0
        if usual <= 0:
            continue
        start = float(times[within][generating >= SETTLED_SHARE * usual][0]) + life
        if start < end:
            spans.append((start, min(end, float(times[-1]))))
    return spans


def windows_of(series: pa.Table, spans: Sequence[tuple[float, float]], seconds: float) -> Windows:
    """As many whole windows as fit into each span, from its begin on."""
    begins = np.concatenate(
        [np.empty(0)]
        + [begin + seconds * np.arange(math.floor((end - begin) / seconds + 1e-9)) for begin, end in spans]
    )
    if not len(begins):
        return Windows(seconds, begins, begins)
    times, tokens = tokens_from_start(series)
    grown = np.interp(begins + seconds, times, tokens) - np.interp(begins, times, tokens)
    return Windows(seconds, begins, grown / seconds)


def judge_soak(
    result: Mapping[str, Any], environment: Mapping[str, Any], requests: pa.Table, series: pa.Table
) -> dict[str, Any]:
    """The field ``stability`` of a soak's ``result.json``, from all else in its folder.

    Of ``result`` it uses ``soak`` and, of a rack, ``rack_nodes``.
    """
    soak = result["soak"]
    begins = [segment["begins_seconds"] for segment in soak["segments"]]
    times = numbers(series["elapsed_seconds"])
    # Up to its last row: the next segment begins with the last token that was written, which may be later.
    reached = [float(times[times < following].max(initial=begin)) for begin, following in pairwise(begins)]
    ends = [min(end, soak["duration_seconds"]) for end in (*reached, soak["duration_seconds"])]
    machines = {node["node"]: node["machine"] for node in result.get("rack_nodes") or ()}
    if not machines:  # a soak resumes only on a machine like the first, which may have another name
        machines = dict.fromkeys(set(series["node"].to_pylist()), environment)
    ranks = (result.get("target") or {}).get("tensor_parallel") or 1
    gpus = {}
    for node, machine in machines.items():
        watts, clock = (_common(machine["gpus"], name) for name in ("power_limit_watts", "max_clock_mhz"))
        gpus[node] = GpuLimits(None if watts is None else ranks * watts, clock)
    return judge_stability(requests, series, list(zip(begins, ends, strict=True)), gpus)


def _common(gpus: Sequence[Mapping[str, Any]], name: str) -> float | None:
    values = {gpu.get(name) for gpu in gpus}
    return values.pop() if len(values) == 1 else None


def judge_stability(
    requests: pa.Table, series: pa.Table, segments: Sequence[tuple[float, float]], gpus: Mapping[str, GpuLimits]
) -> dict[str, Any]:
    """The field ``stability`` of ``result.json``: every figure, and the verdict with its reasons.

    ``segments`` are begin and end of each stretch in which samples were issued, in order; more than one where the soak
    was interrupted and resumed. ``gpus`` are the limits by node.
    """
    spans = settled_spans(requests, series, segments)
    windows = windows_of(series, spans, window_seconds(segments[-1][1]))
    settled = _within(numbers(series["elapsed_seconds"]), spans)
    figures = {
        **_spread(windows),
        **_changes(windows),
        "gaps": list(_gaps(series, spans)),
        "full_share": float((numbers(series["waiting"])[settled] > 0).mean()) if settled.any() else None,
        "throttling": _throttling(series, settled, gpus),
        "gpu_errors": gpu_errors(series),
    }
    if len(windows.rates) < FEWEST_WINDOWS:
        seconds = windows.seconds
        unstable, unknown = [], [shortfall("TOO_SHORT", len(windows.rates), FEWEST_WINDOWS, window_seconds=seconds)]
    else:
        unstable, unknown = list(_unstable(figures)), list(_unknown(figures))
    verdict = Stability.UNSTABLE if unstable else Stability.UNDECIDED if unknown else Stability.STABLE
    return {
        "verdict": verdict,
        "reasons": [*unstable, *unknown],
        "confidence": CONFIDENCE,
        "settled_spans_seconds": [list(span) for span in spans],
        "window_seconds": windows.seconds,
        "windows": len(windows.rates),
        **figures,
    }


def _spread(windows: Windows) -> dict[str, Any]:
    rates = windows.rates
    if not len(rates) or rates.mean() <= 0:
        return {"median_output_tokens_per_second": None, "coefficient_of_variation": None, "worst_window": None}
    worst, median = int(rates.argmin()), float(np.median(rates))
    return {
        "median_output_tokens_per_second": median,
        "coefficient_of_variation": float(rates.std(ddof=1) / rates.mean()) if len(rates) > 1 else None,
        "worst_window": {
            "begins_seconds": float(windows.begins[worst]),
            "output_tokens_per_second": float(rates[worst]),
            "share_of_median": float(rates[worst]) / median if median > 0 else None,
        },
    }


def _changes(windows: Windows) -> dict[str, Any]:
    """Trend and drift, as shares of the median window; None where there are too few windows, or most stood still."""
    begins, rates, count = windows.begins, windows.rates, len(windows.rates)
    median = float(np.median(rates)) if count else 0.0
    if count < FEWEST_WINDOWS or median <= 0:
        return {"trend": None, "drift": None}
    trend = theil_sen(begins, rates)
    over = (begins[-1] + windows.seconds - begins[0]) / median
    tenth = max(2, math.floor(TENTH * count))
    ends = (rates[:tenth], rates[-tenth:])
    first, last = (float(end.mean()) for end in ends)
    # From the windows of each end only: a step between them is not noise.
    variance = float(np.mean([end.var(ddof=1) for end in ends]))
    inflation = _inflation(trend.autocorrelation, tenth)
    reach = student_t(0.5 + CONFIDENCE / 2, 2 * (tenth - 1)) * math.sqrt(2 * inflation * variance / tenth)
    return {
        "trend": {
            "change_share": trend.slope * over,
            "low_share": trend.low * over,
            "high_share": trend.high * over,
            "autocorrelation": trend.autocorrelation,
        },
        "drift": {
            "first_output_tokens_per_second": first,
            "last_output_tokens_per_second": last,
            "change_share": (last - first) / median,
            "low_share": (last - first - reach) / median,
            "high_share": (last - first + reach) / median,
        },
    }


def _gaps(series: pa.Table, spans: Sequence[tuple[float, float]]) -> Iterator[dict[str, float]]:
    """Stretches of the settled time in which no row of the series shows a new token."""
    if not spans:
        return
    times, tokens = totals_over_time(series, ["output_tokens"])
    usual = float(np.median(np.diff(times))) if len(times) > 1 else 0.0
    longest = max(GAP_SECONDS, GAP_ROWS * usual)
    grown = times[np.diff(tokens, prepend=0.0) > 0]
    for begin, end in spans:
        moments = np.concatenate([[begin], grown[(grown > begin) & (grown < end)], [end]])
        for moment, length in zip(moments[:-1], np.diff(moments), strict=True):
            if length > longest:
                yield {"begins_seconds": float(moment), "seconds": float(length)}


def _throttling(series: pa.Table, settled: NDArray[np.bool_], gpus: Mapping[str, GpuLimits]) -> dict[str, Any] | None:
    """Throttling by clocks, power and temperatures of the settled time; None without telemetry.

    A GPU at its power limit lowers its clock by design, and the rate includes that cost. A clock well below the highest
    of the soak while power is below its limit has another cause, most often heat. Where the driver gives its reasons
    for low clocks, those of a fault count instead of that guess.
    """
    names = ("clock_mhz", "power_watts", "temperature_celsius", "clock_reasons")
    clock, power, heat, reasons = (numbers(series[name]) for name in names)
    found = []
    for node, replica, rows in replicas(series):
        rows = rows[settled[rows] & np.isfinite(clock[rows]) & np.isfinite(power[rows])]
        limits = gpus.get(node)
        if not len(rows) or limits is None or not limits.power_limit_watts:
            continue
        full, used = limits.max_clock_mhz or float(clock[rows].max()), power[rows] / limits.power_limit_watts
        capped = (clock[rows] < LOW_CLOCK_SHARE * full) & (used >= AT_POWER_LIMIT_SHARE)
        dropped = (clock[rows] < DROPPED_CLOCK_SHARE * clock[rows].max()) & (used < BELOW_POWER_LIMIT_SHARE)
        stated, seen = reasons[rows], 0
        if np.isfinite(stated).all():
            bits = stated.astype(np.int64)
            capped, dropped = (bits & POWER_CAP) > 0, (bits & HARMFUL_REASONS) > 0
            seen = int(np.bitwise_or.reduce(bits)) & HARMFUL_REASONS
        found.append((float(dropped.mean()), float(capped.mean()), f"{node}/{replica}", words_of(seen)))
    if not found:
        return None
    worst = max(found)
    known = settled & np.isfinite(clock)
    hot = settled & np.isfinite(heat)
    return {
        "otherwise_limited_share": worst[0],
        "otherwise_limited_replica": worst[2] if worst[0] else None,
        "otherwise_limited_causes": worst[3],
        "power_limited_share": float(np.mean([capped for _, capped, *_ in found])),
        "lowest_clock_mhz": float(clock[known].min()),
        "median_clock_mhz": float(np.median(clock[known])),
        "highest_temperature_celsius": float(heat[hot].max()) if hot.any() else None,
    }


def _unstable(figures: Mapping[str, Any]) -> Iterator[Shortfall]:
    worst, throttling = figures["worst_window"], figures["throttling"]
    for code, change, limit in (("TREND", figures["trend"], TREND_LIMIT), ("DRIFT", figures["drift"], DRIFT_LIMIT)):
        if change and abs(change["change_share"]) > limit and change["low_share"] * change["high_share"] > 0:
            yield shortfall(code, change["change_share"], limit, change=change)
    if (variation := figures["coefficient_of_variation"]) is not None and variation > VARIATION_LIMIT:
        yield shortfall("VARIATION", variation, VARIATION_LIMIT)
    if worst is None or worst["share_of_median"] is None:
        yield shortfall("STANDSTILL", 0.0, WORST_WINDOW_LIMIT)
    elif worst["share_of_median"] < WORST_WINDOW_LIMIT:
        begins = worst["begins_seconds"]
        yield shortfall("WORST_WINDOW", worst["share_of_median"], WORST_WINDOW_LIMIT, begins_seconds=begins)
    if gaps := figures["gaps"]:
        longest = max(gaps, key=lambda gap: float(gap["seconds"]))
        begins = longest["begins_seconds"]
        yield shortfall("GAP", longest["seconds"], GAP_SECONDS, gaps=len(gaps), begins_seconds=begins)
    if throttling and (share := throttling["otherwise_limited_share"]) > THROTTLED_LIMIT:
        replica, causes = throttling["otherwise_limited_replica"], throttling["otherwise_limited_causes"]
        yield shortfall("THROTTLED", share, THROTTLED_LIMIT, replica=replica, causes=causes or None)
    for error in figures["gpu_errors"]:
        if error["field"] in FATAL_ERRORS:
            yield shortfall("GPU_ERRORS", error["count"], 0, replica=error["replica"], kind=error["kind"])


def _unknown(figures: Mapping[str, Any]) -> Iterator[Shortfall]:
    trend, full = figures["trend"], figures["full_share"]
    if trend and (most := max(-trend["low_share"], trend["high_share"])) > TREND_LIMIT:
        yield shortfall("TREND_UNCERTAIN", most, TREND_LIMIT, change=trend)
    if full is not None and full < FULL_LIMIT:
        yield shortfall("NOT_FULL", full, FULL_LIMIT)


def _within(moments: Floats, spans: Sequence[tuple[float, float]]) -> NDArray[np.bool_]:
    inside: NDArray[np.bool_] = np.zeros(len(moments), np.bool_)
    for begin, end in spans:
        inside |= (moments >= begin) & (moments < end)
    return inside
