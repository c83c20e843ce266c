"""The two tables of a run folder against LoadGen's percentiles and against each other."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import numpy as np

from megatoken.analysis.early_stopping import RANKS
from megatoken.analysis.machine import is_of_server
from megatoken.analysis.series import Floats, numbers, replicas, totals_over_time
from megatoken.analysis.statistics import Samples
from megatoken.audit.folder import LOGGED, TABLES, RunFolder, compared
from megatoken.files import mapping
from megatoken.runs.run import REQUESTS, SERIES
from megatoken.text import count_of, is_number

if TYPE_CHECKING:
    import pyarrow as pa

# LoadGen hears of a token later. In 20 runs of the engine half of them took up to 1 ms, of a few that a busy machine
# stopped up to 12 ms; over HTTP it was 40 ms, on simulated racks 150 ms.
LATE_SECONDS, FEW_LATE_SECONDS, REMOTE_LATE_SECONDS = 0.01, 0.1, 0.2
LATE_SHARE = 0.1  # of the latency, and half the share of the time that the process waited for a core
# Above them a few late answers decide, and answers of two tokens decide the time per output token.
MIDDLE = ("p50", "p90")
FEW = 5  # answers above a percentile
CLOCK_SECONDS = 1.0  # from the last token to the last row of the series
ROW_SECONDS = 0.25  # between a token's own time and the row that counts it


@compared(
    "run_folder.latencies",
    "Latencies are those that LoadGen logged",
    "The rows of samples may have been edited.",
    LOGGED,
)
def latencies(folder: RunFolder) -> Iterator[str]:
    """Every percentile that LoadGen logs, taken from the rows as LoadGen takes it."""
    run, figures = folder.run, folder.figures
    done = Samples.of(run.requests)
    done = done.only(done.completed)
    if figures is None or figures.mode != "PerformanceOnly" or run.result.get("samples_failed") or not len(done):
        return  # of samples without a first token LoadGen's percentiles hold memory that it never set
    waited = run.result.get("core_wait_share")
    share = LATE_SHARE + (float(waited) / 2 if is_number(waited) else 0.5)
    remote = folder.on_rack or is_of_server(run.result)
    late, few_late = (REMOTE_LATE_SECONDS,) * 2 if remote else (LATE_SECONDS, FEW_LATE_SECONDS)
    per_token = late * float(np.mean(1 / np.maximum(done.output_tokens - 1, 1)))
    ttft, tpot = done.ttft, np.where(done.output_tokens > 1, done.tpot, 0.0)
    measures = (
        ("latency", figures.latency_seconds, done.last - done.scheduled),
        ("TTFT", figures.ttft_seconds, ttft),
        ("TPOT", figures.tpot_seconds, tpot),
    )
    for measure, logged, values in measures:
        ordered = np.sort(values)
        for name, rank in RANKS.items():
            if name not in logged:
                continue
            own, theirs = float(ordered[int(len(ordered) * rank)]), logged[name]
            middle = name in MIDDLE and len(ordered) * (1 - rank) >= FEW
            tolerance = (late if middle else few_late) + share * theirs
            if measure == "TPOT" and middle:
                tolerance = per_token + share * theirs
            elif measure == "TPOT":
                tolerance += share * figures.ttft_seconds.get(name, 0.0)
            if abs(own - theirs) > tolerance:
                yield f"{name} of {measure} {own:.6g} s in {REQUESTS}, by LoadGen {theirs:.6g} s"


def _counts_all(folder: RunFolder) -> bool:
    """Whether the series saw every token: none was lost with a replica, an endpoint, a client or a sample."""
    result = folder.run.result
    parts = [mapping(result.get(name)) for name in ("rack", "endpoints", "client")]
    lost = any(one.get("lost") or one.get("joined") for one in parts) or mapping(result.get("soak")).get(
        "interruptions"
    )
    ended = not (result.get("samples_failed") or result.get("samples_cancelled"))
    rated = (folder.is_logged or "soak" in result) and folder.finished and len(folder.run.requests) > 0
    return bool(rated and ended and not lost and not parts[1].get("requests_repeated"))


@compared(
    "run_folder.series",
    "The time series is of this run",
    "Steady rates and energy per token follow from it.",
    TABLES,
    _counts_all,
)
def series(folder: RunFolder) -> Iterator[str]:
    """Its clock, and its tokens against those of the samples: all of them, and at each row those that had ended."""
    run = folder.run
    samples, table = Samples.of(run.requests), run.series
    if not len(table):
        yield f"{SERIES} has no row"
        return
    elapsed = numbers(table["elapsed_seconds"])
    node, replica = table["node"].to_pylist(), table["replica"].to_pylist()
    last_of: dict[tuple[object, object], float] = {}
    for key, seconds in zip(zip(node, replica, strict=True), elapsed, strict=True):
        if seconds < last_of.get(key, 0.0):
            yield f"a row of {SERIES} at {seconds:.3f} s after one at {last_of[key]:.3f} s"
            return
        last_of[key] = seconds
    end = float(np.max(samples.last))
    if not abs(elapsed.max() - end) <= CLOCK_SECONDS:
        yield f"{SERIES} ends at {elapsed.max():.3f} s, the last answer at {end:.3f} s"
    output = int(samples.output_tokens.sum())
    counted = _last_total(table, "output_tokens")
    if counted != output:
        yield f"{counted:,.0f} output tokens in {SERIES}, {output:,} in {REQUESTS}"
        return
    times, tokens = totals_over_time(table, ["output_tokens"])
    ended = _until(samples.last, samples.output_tokens, times - ROW_SECONDS)
    seen = np.nan_to_num(samples.first, nan=-np.inf)  # an answer that was not streamed may have begun at any time
    begun = _until(seen, samples.output_tokens, times + ROW_SECONDS)
    if len(wrong := np.flatnonzero((tokens < ended) | (tokens > begun))):
        at = wrong[0]
        yield (
            f"{tokens[at]:,.0f} output tokens at {times[at]:.3f} s in {SERIES}, {ended[at]:,.0f} to {begun[at]:,.0f} "
            f"by {REQUESTS}; {count_of(len(wrong), 'row')} like this"
        )
    yield from _processed(folder, samples, output)


def _processed(folder: RunFolder, samples: Samples, output: int) -> Iterator[str]:
    """An engine computes every token of prompts and answers but the last of each; a prefix cache spares it some."""
    table = folder.run.series
    recomputed = _last_total(table, "recomputed_tokens")
    most = float(samples.input_tokens.sum()) + output
    least = 0.0 if mapping(folder.run.config.get("engine")).get("prefix_cache") else most - len(samples)
    counted = _last_total(table, "processed_tokens") - (recomputed if np.isfinite(recomputed) else 0.0)
    if counted < least or counted > most:
        yield f"{counted:,.0f} input and output tokens in {SERIES}, {most:,.0f} in {REQUESTS}"


def _last_total(table: pa.Table, column: str) -> float:
    """The last value of every replica, together; NaN where one is absent."""
    values = numbers(table[column])
    return float(sum(values[rows[-1]] for _, _, rows in replicas(table)))


def _until(moments: Floats, tokens: Floats, times: Floats) -> Floats:
    """Tokens of the samples whose moment is not after each of ``times``."""
    order = np.argsort(moments)
    sums: Floats = np.append(0.0, np.cumsum(tokens[order]))
    return sums[np.searchsorted(moments[order], times, side="right")]
