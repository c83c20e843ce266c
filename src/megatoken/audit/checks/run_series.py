"""What a megatoken run folder tells of a soak's segments, against its dates and its time series."""

from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import pairwise

import numpy as np

from megatoken.analysis.machine import unix_seconds
from megatoken.analysis.series import numbers, replicas
from megatoken.audit.evidence import Where
from megatoken.audit.finding import Observation, shown
from megatoken.audit.view import observe
from megatoken.runs.run import SERIES, Run
from megatoken.text import count_of

CLOCK_SECONDS = 1.0  # dates are told in whole seconds, and a clock may be set a little
CLOCK_DRIFT = 0.01  # of a soak, for which nobody may have set the clock
LATE_SECONDS = 60.0  # from the first segment to the folder, and on to its first sample, on a machine that is busy
GAP_ROUNDING_SECONDS = 1e-3


def check_segments(folder: Run, where: tuple[Where, ...]) -> Iterator[Observation]:
    """When a soak began, when it went on after each interruption, and what it had under way until then."""
    segments = folder.result["soak"]["segments"]
    problems = [*_segments(folder), *_dates(folder)]
    expected = "segments and interruptions that fit each other, the soak's dates and its time series"
    found = shown("; ".join(problems)) or f"{count_of(len(segments), 'segment')}, all fit"
    yield observe("run_folder.segments", not problems, expected, found, where)


def _segments(folder: Run) -> Iterator[str]:
    soak, series = folder.result["soak"], folder.series
    begins = [segment["begins_seconds"] for segment in soak["segments"]]
    stops = [one["at_seconds"] for one in soak["interruptions"]]
    if begins != [0.0, *stops] or any(one >= other for one, other in pairwise(begins)):
        yield f"segments begin at {begins}, interruptions are at {stops}"
        return
    elapsed, levels = numbers(series["elapsed_seconds"]), [numbers(series[name]) for name in ("in_flight", "waiting")]
    dates = [unix_seconds(segment["started_at"]) for segment in soak["segments"]]
    parts = zip(soak["interruptions"], pairwise(begins), pairwise(dates), strict=True)
    for one, (begin, stop), (date, resumed) in parts:
        if date is not None and resumed is not None:
            gap = max(0.0, resumed - date - (stop - begin))
            if not math.isclose(gap, one["gap_seconds"], abs_tol=GAP_ROUNDING_SECONDS):
                yield f"gap_seconds {one['gap_seconds']:.3f} at {stop:.3f} s, by started_at {gap:.3f}"
        earlier, resumption = np.flatnonzero(elapsed < stop), np.flatnonzero(elapsed == stop)
        last = [earlier[rows[-1]] for _, _, rows in replicas(series.take(earlier))]
        if len(resumption) != len(last) or any(level[resumption].any() for level in levels):
            yield f"a segment begins at {stop:.3f} s, {SERIES} has no rows of replicas that begin anew there"
        elif (under_way := int(levels[0][last].sum())) != one["samples_dropped"]:
            yield f"samples_dropped {one['samples_dropped']} at {stop:.3f} s, {under_way} were under way"


def _dates(folder: Run) -> Iterator[str]:
    result, last = folder.result, folder.result["soak"]["segments"][-1]
    told = {"soak.segments started_at": result["soak"]["segments"][0]["started_at"]}
    told |= {name: result[name] for name in ("created_at", "started_at", "ended_at") if name in result}
    dates = {name: unix_seconds(text) for name, text in told.items()}
    yield from (f"{name} is no date" for name, date in dates.items() if date is None)
    known = {name: date for name, date in dates.items() if date is not None}
    for (earlier, before), (later, after) in pairwise(known.items()):
        if before - after > CLOCK_SECONDS or (later != "ended_at" and after - before > LATE_SECONDS):
            yield f"{earlier} {told[earlier]}, {later} {told[later]}"
    resumed, ended = unix_seconds(last["started_at"]), known.get("ended_at")
    if resumed is not None and ended is not None and len(folder.series):
        under_load = float(np.max(numbers(folder.series["elapsed_seconds"]))) - last["begins_seconds"]
        if ended - resumed < (1 - CLOCK_DRIFT) * under_load - CLOCK_SECONDS:
            yield f"ended_at {told['ended_at']}, {under_load:.0f} s under load after {last['started_at']}"
