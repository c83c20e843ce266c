"""Why a finished run was as slow as it was: causes that its folder proves, each with evidence and what helps."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from megatoken.analysis.contradictions import check_rates
from megatoken.analysis.lookup import run_folders
from megatoken.analysis.machine import is_of_server
from megatoken.analysis.series import Floats, gpu_errors, numbers, totals_over_time
from megatoken.analysis.stability import FATAL_ERRORS, Stability
from megatoken.engine.schemes import has_bf16_activations
from megatoken.files import mapping, new_document
from megatoken.hardware.doctor import Finding, fix, ok, unknown
from megatoken.hardware.nvml import HARMFUL_REASONS, POWER_CAP, words_of
from megatoken.runs.reasons import OF_CLIENT
from megatoken.runs.run import Run, Verdict, read_run
from megatoken.text import count_of, is_number, precise
from megatoken.text import number as short

if TYPE_CHECKING:
    import pyarrow as pa

CORE_WAIT_SHARE = STALLED_SHARE = 0.05
THROTTLED_SHARE = 0.05  # of the rows
FULL_SHARE = 0.9  # of pages, sequences or token budget, that counts as full
RECOMPUTED_SHARE = 0.02  # of the computed tokens
HARNESS_SHARE = 0.05  # of the duration
BUSY_SHARE = 0.9  # of a core, of the client's processes
IDLE_SHARE = 0.1  # of the duration, in which no step was computed
SMALL_SHARE = 0.5  # of the sequences that fit
VARIATION = 0.15  # standard deviation of the rate in seconds of the steady window, over its mean
RAMP_SHARE = 0.3  # of the duration, outside the steady window
RAMP_COST_SHARE = 0.05  # of the steady rate, that ramp and tail cost
FEWEST_SECONDS = 5
LOADGEN = "LOADGEN_INVALID"
"""Repeats in LoadGen's words what other reasons say."""


def diagnose(run: Run) -> list[Finding]:
    """Every cause that was examined, those that cost speed first."""
    found = [
        *_verdict(run),
        *_contention(run),
        *_throttling(run.series),
        *_errors(run.series),
        *_preemptions(run.series),
        *_batches(run),
        *_client(run),
        *_kernels(run.result),
        *_steadiness(run),
    ]
    return sorted(found, key=lambda finding: finding.state != "FIX")


def diagnosis(path: Path) -> dict[str, Any]:
    """The same as a document: of a run folder, or in ``runs`` of each below ``path``, such as the loads of a sweep.

    Raises:
        UsageError: there is no such folder, a run folder is damaged, or its rates are not those of its figures.
    """
    found = []
    for folder in run_folders(path) or [path]:
        run = read_run(folder)
        check_rates(run)
        found.append({"run": str(folder), "verdict": run.verdict, "findings": list(map(asdict, diagnose(run)))})
    if len(found) == 1:
        return new_document("diagnosis", **found[0])
    return new_document("diagnosis", run=str(path), runs=found)


def _verdict(run: Run) -> Iterator[Finding]:
    """Why a run is INVALID, without the reasons that have a finding of their own."""
    alone = all(one["code"] == LOADGEN for one in run.reasons)
    left_out = OF_CLIENT if alone else (LOADGEN, *OF_CLIENT)
    said = [one["message"].rstrip(".") for one in run.reasons if one["code"] not in left_out]
    if run.verdict == Verdict.INVALID and said:
        command = "megatoken report RUN, for the values found and required"
        yield fix("verdict", f"the run is INVALID: {'. '.join(said)}", command)


def _contention(run: Run) -> Iterator[Finding]:
    code, result, series = "contention", run.result, run.series
    waited = result.get("core_wait_share")
    remote = "rack_nodes" in result or is_of_server(result)
    found = False
    if is_number(waited) and waited > CORE_WAIT_SHARE:
        found = True
        who = "the driver or client" if remote else "the engine's process"
        yield fix(
            code,
            f"{who} waited for a core {waited:.0%} of the time that it wanted one (core_wait_share)",
            "stop other work on its machine" if remote else "stop other work, or lower --engine.threads",
        )
    for column, code_of, words, command in (
        ("memory_stalled_share", "memory_pressure", "for memory", "free memory, or lower --engine.memory_bytes"),
        ("disk_stalled_share", "disk_pressure", "for a disk", "move --out and the model to a disk without other work"),
    ):
        share = _mean(series, column)
        if share is not None and share > STALLED_SHARE:
            found = True
            yield fix(code_of, f"tasks of the machine waited {words} {share:.0%} of the time ({column})", command)
    if found:
        return
    if waited is None:
        yield unknown(code, "the folder does not say how long the process waited for cores")
    else:
        yield ok(code, f"the process waited for a core {waited:.1%} of the time")


def _throttling(series: pa.Table) -> Iterator[Finding]:
    code, reasons = "throttling", _known(series, "clock_reasons").astype(np.int64)
    if not len(reasons):
        if len(_known(series, "clock_mhz")):
            yield unknown(code, "the driver gave no reasons for low clocks")
        return
    harmful = (reasons & HARMFUL_REASONS) > 0
    if harmful.mean() > THROTTLED_SHARE:
        causes = " and ".join(words_of(int(np.bitwise_or.reduce(reasons)) & HARMFUL_REASONS))
        message = f"{causes} held clocks down in {harmful.mean():.0%} of the rows (clock_reasons)"
        yield fix(code, message, "check cooling and power supply; megatoken doctor, nvidia-smi -q -d PERFORMANCE")
    else:
        capped = ((reasons & POWER_CAP) > 0).mean()
        yield ok(
            code, f"clocks were held down by a fault in {harmful.mean():.1%} of the rows, by power in {capped:.0%}"
        )


def _errors(series: pa.Table) -> Iterator[Finding]:
    for error in gpu_errors(series):
        message = (
            f"{error['replica']} counted {error['count']:,} {error['kind']}, from {error['begins_seconds']:.0f} s on"
        )
        command = "stop using this GPU; megatoken doctor names what it needs"
        if error["field"] not in FATAL_ERRORS:
            command = "megatoken qualify --full, and watch whether the count grows"
        yield fix(error["field"], message, command)


def _preemptions(series: pa.Table) -> Iterator[Finding]:
    code = "preemptions"
    if not len(_known(series, "recomputed_tokens")):
        return
    recomputed, processed = (
        totals_over_time(series, [name])[1][-1] for name in ("recomputed_tokens", "processed_tokens")
    )
    share = recomputed / processed if processed else 0.0
    if share > RECOMPUTED_SHARE:
        times = totals_over_time(series, ["preemptions"])[1][-1]
        message = f"{count_of(int(times), 'preemption')} made {share:.0%} of the computed tokens be computed twice"
        yield fix(code, message, "give the cache more memory (--engine.memory_bytes), or lower --engine.max_sequences")
    else:
        yield ok(code, f"{share:.1%} of the computed tokens were computed twice")


def _batches(run: Run) -> Iterator[Finding]:
    """Whether pages, sequences or the load itself kept batches small."""
    series, plan = run.series, run.result.get("memory_plan") or {}
    if not len(_known(series, "pages")) or len(series) < 2:
        return
    times, running, waiting, free, pages = totals_over_time(series, ["running", "waiting", "pages_free", "pages"])
    busy = running > 0
    if not busy.any() or not np.isfinite(running).all():
        return
    used = 1 - free[busy] / np.maximum(pages[busy], 1)
    most = float(plan.get("max_sequences") or 0) * max(1, len(set(zip(*_places(series), strict=True))))
    mean = float(running[busy].mean())
    queued = float((waiting[busy] > 0).mean())
    pages_full = float(((used > FULL_SHARE) & (waiting[busy] > 0)).mean())
    if pages_full > SMALL_SHARE:
        message = (
            f"the pages of the KV cache were {used.mean():.0%} full while requests waited, so a batch had"
            f" {mean:.3g} of {most:.0f} sequences"
        )
        yield fix(
            "pages", message, "more --engine.memory_bytes, --precision fp8, a smaller --engine.max_length, or more GPUs"
        )
    elif any(one["code"] in OF_CLIENT for one in (*run.reasons, *run.doubts)):
        pass  # samples that came late say nothing about the requested load
    elif queued < SMALL_SHARE and most and mean < SMALL_SHARE * most:
        message = (
            f"a batch had {mean:.3g} of {most:.0f} sequences, and no request waited in {1 - queued:.0%} of the"
            " rows: the load was the limit"
        )
        yield fix("small_batches", message, "raise --rate or --samples (run), or --concurrency (a client)")
    else:
        yield ok(
            "pages", f"the pages of the KV cache were {used.mean():.0%} full; requests waited in {queued:.0%} of rows"
        )
    computed = totals_over_time(series, ["computed_seconds"])[1][-1]
    share = 1 - computed / (times[-1] * len(set(zip(*_places(series), strict=True))))
    if computed > 0 and share > IDLE_SHARE and queued > SMALL_SHARE:
        yield fix(
            "idle_engine",
            f"the engine computed nothing in {share:.0%} of the time although requests waited",
            "megatoken doctor, for what keeps this machine busy",
        )


def _client(run: Run) -> Iterator[Finding]:
    code, result = "client", run.result
    codes = {one["code"]: one for one in (*run.reasons, *run.doubts)}
    for name in OF_CLIENT:
        if name in codes:
            command = "more --endpoint.processes, or a separate machine"
            if "free_cores" in codes[name]:
                command = "stop other work on the client's machine, or give it a separate one"
            elif not is_of_server(result):
                command = "stop other work on this machine, or lower --rate"
            yield fix(code, f"the client was the limit: {codes[name]['message']}", command)
            return
    client = result.get("client")
    if isinstance(client, Mapping) and is_number(busy := client.get("busy_share")):
        yield ok(code, f"the busiest client process used {busy:.0%} of a core")
    loop, duration = result.get("loop_seconds") or {}, result.get("duration_seconds")
    if is_number(spent := loop.get("harness")) and is_number(duration) and duration > 0:
        if spent / duration > HARNESS_SHARE:
            message = f"the measuring loop itself took {spent / duration:.0%} of the time"
            yield fix("measuring_loop", message, "fewer, longer samples, or more --engine.max_batched_tokens")
        else:
            yield ok("measuring_loop", f"the measuring loop took {spent / duration:.1%} of the time")


def _kernels(result: Mapping[str, Any]) -> Iterator[Finding]:
    target = result.get("target") or {}
    if why := target.get("why_no_kernels"):
        yield fix("kernels", f"the processor's kernels were not compiled: {why}", "sudo apt-get install g++")
    if target.get("bf16_widened") and has_bf16_activations(result.get("precision")):
        yield fix(
            "bf16_widened", "this processor has no bf16 instructions, so bf16 values are widened", "--precision fp32"
        )
    if target.get("device") == "cpu" and (why := target.get("why_no_gpu")):
        yield fix("no_gpu", f"the model ran on the processor: {why}", "megatoken doctor")


def _steadiness(run: Run) -> Iterator[Finding]:
    result, code = run.result, "steadiness"
    window, duration = result.get("steady_window_seconds"), result.get("duration_seconds")
    if not window or not is_number(duration) or duration <= 0:
        if result.get("scenario") == "offline" and is_number(duration) and run.verdict != Verdict.INTERRUPTED:
            message = f"the run of {precise(duration)} s has no steady window: its ramp and tail lower the rate"
            yield fix("short_run", message, "more --samples, or a longer --min-duration")
        return
    outside = 1 - (window[1] - window[0]) / duration
    steady, whole = result.get("steady_output_tokens_per_second"), result.get("output_tokens_per_second")
    if outside > RAMP_SHARE and result.get("scenario") == "offline" and is_number(steady) and is_number(whole):
        message = (
            f"ramp and tail took {outside:.0%} of the run; while it was steady it made {short(steady)} tokens/s"
            f" instead of {short(whole)}"
        )
        if whole < (1 - RAMP_COST_SHARE) * steady:
            yield fix("short_run", message, "more --samples, or a longer --min-duration")
        else:
            yield ok("short_run", message)
    times, tokens = totals_over_time(run.series, ["output_tokens"])
    edges = np.arange(window[0], window[1], 1.0)
    if len(edges) <= FEWEST_SECONDS:
        return
    rates = np.diff(np.interp(edges, times, tokens))
    variation = float(rates.std() / rates.mean()) if rates.mean() > 0 else 0.0
    if variation > VARIATION:
        worst = float(edges[int(rates.argmin())])
        message = (
            f"the rate of single seconds varied by {variation:.0%} in the steady window;"
            f" the worst began at {worst:.0f} s"
        )
        yield fix(code, message, "megatoken soak, to see whether the rate drifts; stop other work")
    elif mapping(result.get("stability")).get("verdict", Stability.STABLE) == Stability.STABLE:
        yield ok(code, f"the rate of single seconds varied by {variation:.0%} in the steady window")


def _places(series: pa.Table) -> tuple[list[str], list[int]]:
    return series["node"].to_pylist(), series["replica"].to_pylist()


def _known(series: pa.Table, column: str) -> Floats:
    values = numbers(series[column])
    return values[np.isfinite(values)]


def _mean(series: pa.Table, column: str) -> float | None:
    values = _known(series, column)
    return float(values.mean()) if len(values) else None
