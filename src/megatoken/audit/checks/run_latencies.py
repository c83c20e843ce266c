"""Latencies of a megatoken run folder, from its raw rows: what result.json says of them, and whether LoadGen agrees.

LoadGen's definitions (results.cc): the percentile of n values is the one at position floor(0.99 n) of the sorted; time
per output token is the time after the first token over the tokens after it, 0 for one token; over is beyond a limit.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from megatoken.analysis.statistics import Samples
from megatoken.audit.evidence import Where
from megatoken.audit.finding import Observation, Severity, shown
from megatoken.audit.view import observe
from megatoken.mlperf.detail_log import DetailLog
from megatoken.mlperf.early_stopping import most_over, queries_needed
from megatoken.mlperf.run_figures import completion_seconds
from megatoken.runs.run import Run
from megatoken.text import count_of

PERCENTILE = 0.99
EARLIER_SECONDS = 0.1  # by which the rows may count from an earlier start than LoadGen
LATER_SECONDS = 1.0  # by which LoadGen may hear of the last sample later, on a machine that is busy
AGREEMENT_SHARE = 0.05  # of the limit on TTFT, and of a percentile, by which LoadGen's and the rows' may differ
_SAME = 1e-9  # relative; the same arithmetic on the same rows
_LOGGED = {
    "ttft": "result_first_token_99.00_percentile_latency_ns",
    "tpot": "result_time_per_output_token_99.00_percentile_ns",
}


def check_latencies(folder: Run, log: DetailLog, where: tuple[Where, ...]) -> Iterator[Observation]:
    """``latency_verdict`` of a run with limits, computed again."""
    told = folder.result.get("latency_verdict")
    limits = limits_of(folder.result)
    if limits is None or not isinstance(told, Mapping):
        return
    expected = latencies_of(folder, limits)
    if expected is None:
        return
    met = bool(log.get("result_perf_constraints_met") is True and log.get("early_stopping_met") is True)
    wanted = {**expected, "loadgen_met": met}
    wrong = [name for name, value in wanted.items() if name in told and not _same(told[name], value)]
    yield observe(
        "run_folder.latencies",
        not wrong,
        shown("; ".join(f"{name} {wanted[name]}" for name in wrong)) or "latencies and counts that the raw rows give",
        shown("; ".join(f"{name} {told[name]}" for name in wrong))
        or f"{count_of(len(wanted), 'figure')} compared, all agree",
        where,
    )


def check_duration(folder: Run, log: DetailLog, where: tuple[Where, ...]) -> Iterator[Observation]:
    """How long the run took by its rows and by LoadGen, which hears of the last sample a little later."""
    rows, scenario = folder.requests, folder.result.get("scenario")
    last = Samples.of(rows).last
    theirs: float | None
    if scenario == "offline":
        longest_ns = log.number("result_max_latency_ns")
        theirs = None if longest_ns is None else longest_ns / 1e9
        ours = float(np.nanmax(last)) if np.isfinite(last).any() else math.nan
    elif scenario in ("server", "interactive") and len(rows):
        theirs = completion_seconds(log)  # of the sample that was issued last
        ours = float(last[int(np.argmax(rows["sample_id"].to_numpy()))])
    else:
        return
    if theirs is None or not math.isfinite(ours) or folder.result.get("mode") != "performance":
        return
    longer = ours > theirs + EARLIER_SECONDS
    yield observe(
        "run_folder.duration",
        not longer and ours >= theirs - LATER_SECONDS - AGREEMENT_SHARE * theirs,
        f"the last sample about {theirs:.3f} s after the start, as LoadGen measured",
        f"{ours:.3f} s by the raw rows",
        where,
        Severity.FAIL if longer else Severity.WARN,  # LoadGen may have been told late
    )


def disagreements(folder: Run, log: DetailLog) -> Iterator[tuple[float, float]]:
    """99th percentiles of the rows, and LoadGen's, that are further apart than passing tokens on explains [s]."""
    limits = limits_of(folder.result)
    own = None if limits is None else latencies_of(folder, limits)
    if own is None or limits is None:
        return
    later = AGREEMENT_SHARE * limits["ttft"]
    tolerances = {"ttft": later, "tpot": later / max(1.0, own["tokens_after_first"])}
    for name, key in _LOGGED.items():
        theirs_ns = log.number(key)
        if theirs_ns is not None:
            ours, theirs = own[f"{name}_p99_seconds"], theirs_ns / 1e9
            if abs(theirs - ours) > tolerances[name] + AGREEMENT_SHARE * theirs:
                yield ours, theirs


def latencies_of(folder: Run, limits: Mapping[str, float]) -> dict[str, Any] | None:
    """99th percentiles and counts of all completed samples; None without any."""
    samples = Samples.of(folder.requests)
    done = samples.only(samples.completed)
    if not len(done):
        return None
    after = np.maximum(done.output_tokens - 1, 1)
    ttft = done.first - done.scheduled
    tpot = np.where(done.output_tokens > 1, (done.last - done.first) / after, 0.0)
    place = int(len(done) * PERCENTILE)
    p99 = {name: float(np.sort(values)[place]) for name, values in (("ttft", ttft), ("tpot", tpot))}
    over = {name: int((values > limits[name]).sum()) for name, values in (("ttft", ttft), ("tpot", tpot))}
    allowed = most_over(len(done), PERCENTILE)
    return {
        "queries": len(done),
        **{f"{name}_p99_seconds": value for name, value in p99.items()},
        **{f"{name}_over": count for name, count in over.items()},
        "allowed_over": allowed,
        "needed": queries_needed(0, PERCENTILE),
        "tokens_after_first": float((done.output_tokens - 1).mean()),
        "met": all(p99[name] < limits[name] for name in p99) and max(over.values()) <= allowed,
    }


def limits_of(result: Mapping[str, Any]) -> dict[str, float] | None:
    """Limits on TTFT and TPOT that a run was held against [s]; None where it had none."""
    values = {name: result.get(f"{name}_limit_seconds") for name in _LOGGED}
    numbers = {name: float(value) for name, value in values.items() if isinstance(value, int | float)}
    return numbers if len(numbers) == len(values) else None


def _same(one: Any, other: Any) -> bool:
    if isinstance(one, bool) or isinstance(other, bool) or not isinstance(one, int | float):
        return bool(one is other)
    return math.isclose(one, other, rel_tol=_SAME, abs_tol=1e-12)
