"""The metrics of ``result.json`` from the two tables of a run: pure functions, exact percentiles."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from megatoken.analysis.early_stopping import queries_needed
from megatoken.analysis.energy import run_energy, system_energy
from megatoken.analysis.series import Floats, masks, numbers, tokens_per_second_within, totals_over_time
from megatoken.runs.run import Verdict
from megatoken.text import is_number

if TYPE_CHECKING:
    import pyarrow as pa

PERCENTILES = (50, 90, 95, 99)
PERCENTILE_METHOD = "exact, from every raw value, linear interpolation between the two nearest"
ONE_PIECE_SECONDS = 1e-6
"""Per output token. No model is this fast: frames of one read are 1 ns apart."""
WHOLE_SHARE = 0.01
"""Of the answers of several tokens: if more came in one piece, their times per output token are unknown."""
STEADY_SHARE = 0.9
SHORTEST_STEADY_SECONDS = 2.0
SHORTEST_STEADY_LIVES = 3.0

ARRIVING = ("server", "interactive")  # scenarios whose samples are due at times that do not depend on answers
SOAK = "soak"  # not an MLPerf scenario: keeps the target full for a given time
SWEEP = "sweep"  # not an MLPerf scenario: a point of a sweep
STAGES = ("tokenise", "queue", "prefill", "decode", "detokenise")


def summarise(
    requests: pa.Table, series: pa.Table, *, scenario: str, finished: bool = True, load_seconds: float | None = None
) -> dict[str, Any]:
    """All metrics of a run, under the names ``result.json`` gives them; what cannot be known is None.

    Only completed samples count as work done: those that stopped or reached their length without an error. Rates divide
    by ``rated_seconds``, as LoadGen's do (results.cc): from the first scheduled time to the last completion, or, where
    samples arrive by themselves, to the completion of the one issued last. What is still being answered then is the
    drain; ``whole_run_output_tokens_per_second`` has it in its time too. A soak is rated over its time under load,
    ``load_seconds``: by the tokens that the series counts until then, for a sample may last as long as the soak.

    Unless the run is ``finished``, samples that had not begun are missing from ``requests``, and with them what a
    steady window is found by, so that it stays None. It is rated as a soak, until the last row of its series.
    """
    samples = Samples.of(requests)
    done = samples.only(samples.completed)
    start = float(samples.scheduled.min()) if len(samples) else 0.0
    end = float(done.last.max()) if len(done) else start
    duration = end - start
    rated = _rated_seconds(samples, start, scenario) if finished else None
    counted = len(done)
    if rated is None:
        rated = duration
    else:  # LoadGen: the last one opens an interval that nothing closes
        counted -= 1
    input_tokens, output_tokens = _total(done.input_tokens), int(done.output_tokens.sum())
    if load_seconds is None and not finished:
        load_seconds = math.inf
    rates = _under_load(samples, series, load_seconds) or {
        "output_tokens_per_second": _rate(output_tokens, rated),
        "processed_tokens_per_second": None if input_tokens is None else _rate(input_tokens + output_tokens, rated),
        "samples_per_second": _rate(counted, rated),
        "rated_seconds": rated,
    }
    steady = steady_window(done.first, done.last, series) if finished else None
    energy, system = run_energy(series), system_energy(series)
    return {
        "output_tokens_per_second": rates["output_tokens_per_second"],
        "whole_run_output_tokens_per_second": _rate(output_tokens, duration),
        "steady_output_tokens_per_second": tokens_per_second_within(series, *steady) if steady else None,
        "processed_tokens_per_second": rates["processed_tokens_per_second"],
        "samples_per_second": rates["samples_per_second"],
        "ttft_seconds": percentiles(done.ttft),
        "tpot_seconds": percentiles(done.known_tpot),
        "latency_seconds": percentiles(done.last - done.scheduled),
        **lateness(samples),
        "handover_seconds": percentiles(samples.submitted - samples.sent),
        "stages": stages(samples),
        "percentile_method": PERCENTILE_METHOD,
        "duration_seconds": duration,
        "rated_seconds": rates["rated_seconds"],
        "steady_window_seconds": list(steady) if steady else None,
        "energy_joules": energy.joules,
        "energy_joules_per_output_token": energy.joules_per_output_token,
        "power_watts": energy.mean_watts,
        **(
            {
                "system_energy_joules": system.joules,
                "system_energy_joules_per_output_token": system.joules_per_output_token,
                "system_power_watts": system.mean_watts,
            }
            if system.seconds
            else {}
        ),
        "samples_completed": len(done),
        "samples_failed": int(samples.failed.sum()),
        "samples_cancelled": int(samples.cancelled.sum()),
        "samples_without_tpot": int((done.output_tokens < 2).sum()),
        "input_tokens": input_tokens,
        "output_tokens": output_tokens,
        "preemptions": _total(totals_over_time(series, ["preemptions"])[1][-1:]) if len(series) else None,
        "nodes": _nodes(requests["node"], samples, start),
    }


def leading_rates(result: Mapping[str, Any]) -> dict[str, Any]:
    """The rates that stand for a run on its first screen, in limits and in prices, under their names in ``result``.

    Under MLPerf's rules they are MLPerf's. Of any other run whose samples arrive by themselves they are over the whole
    time, for a rate that leaves the drain out can be above the rate offered, most of all in a short run.
    """
    output, read, samples = (result.get(name) for name in ("output_tokens", "input_tokens", "samples_completed"))
    counts = {
        "output_tokens_per_second": output,
        "processed_tokens_per_second": output + read if is_number(output) and is_number(read) else None,
        "samples_per_second": samples,
    }
    seconds = result.get("duration_seconds")
    if not leads_with_drain(result) or not is_number(seconds):
        return {name: result.get(name) for name in (*counts, "rated_seconds")}
    rates = {name: _rate(count, seconds) if is_number(count) else None for name, count in counts.items()}
    return rates | {"rated_seconds": seconds}


def leads_with_drain(result: Mapping[str, Any]) -> bool:
    """Whether ``leading_rates`` are over the whole time, though the rates in ``result`` leave the drain out.

    Those of a run that was interrupted do not: it has no drain.
    """
    arrives = result.get("scenario") in ARRIVING and result.get("verdict") != Verdict.INTERRUPTED
    return arrives and not result.get("rules")


def _rated_seconds(samples: Samples, start: float, scenario: str) -> float | None:
    """From ``start`` to the completion of the sample issued last; None where LoadGen rates by the last completion."""
    if scenario not in ARRIVING or not samples.completed.any():
        return None
    latest = int(np.argmax(samples.scheduled))
    return float(samples.last[latest]) - start if samples.completed[latest] else None


def _under_load(samples: Samples, series: pa.Table, load_seconds: float | None) -> dict[str, Any] | None:
    """Rates until the load ends, or until the last row of a run that was interrupted before; None: of neither a soak
    nor such a run.

    Input counts once it has been read, which is when its answer begins.
    """
    if load_seconds is None or not len(series) or not samples.completed.any():
        return None  # no rate without a completed sample
    until = min(load_seconds, float(numbers(series["elapsed_seconds"]).max()))
    output = tokens_per_second_within(series, 0.0, until) if until > 0 else None
    if output is None:
        return None
    read = _total(samples.input_tokens[samples.first <= until])
    return {
        "output_tokens_per_second": output,
        "processed_tokens_per_second": None if read is None else output + read / until,
        "samples_per_second": _rate(int((samples.completed & (samples.last <= until)).sum()), until),
        "rated_seconds": until,
    }


def seconds_under_load(result: Mapping[str, Any]) -> float | None:
    """How long the soak of ``result`` is to be under load; None of any other run."""
    seconds = (result.get("soak") or {}).get("duration_seconds")
    return float(seconds) if is_number(seconds) else None


def latency_origin(scenario: str) -> str:
    """The start of latencies and times to first token."""
    if scenario == "offline":
        return "start of the one Offline query, so the time in the queue is included; no user waits like this"
    if scenario == SOAK:
        return "issue of each sample, when another has ended, so the time in a queue that is never empty is included"
    if scenario == SWEEP:
        return "moment at which each request is due: its arrival, or in a closed loop the end of the one before it"
    if scenario == "singlestream":
        return "issue of each sample, when the one before it has ended"
    return "scheduled time of each sample"


def stages(samples: Samples) -> dict[str, Any]:
    """For each stage its seconds over the completed samples, and its share of all stages' seconds together.

    - tokenise: text of the prompt to ids; None where prompts are used as ids.
    - queue: from when a sample is due until the target starts on it, tokenising left out.
    - prefill: from then to its first token.
    - decode: from its first token to its last.
    - detokenise: ids of the answer to text; None where no text is asked for.

    If the target does not report when it starts, ``queue`` is None and that time is part of ``prefill``.
    """
    done = samples.only(samples.completed)
    tokenise = np.nan_to_num(done.tokenise)
    started = np.isfinite(done.started)
    queue = done.started - done.scheduled - tokenise
    prefill = done.first - np.where(started, done.started, done.scheduled + tokenise)
    seconds = dict(zip(STAGES, (done.tokenise, queue, prefill, done.last - done.first, done.detokenise), strict=True))
    totals = {name: float(np.nansum(values)) for name, values in seconds.items()}
    together = sum(totals.values())
    return {name: _stage(values, totals[name], together) for name, values in seconds.items()}


def _stage(seconds: Floats, total: float, together: float) -> dict[str, Any] | None:
    known = seconds[np.isfinite(seconds)]
    if not len(known):
        return None
    return {
        "mean_seconds": float(known.mean()),
        **{f"{name}_seconds": value for name, value in percentiles(known).items() if name in ("p50", "p99")},
        "share": total / together if together > 0 else None,
    }


def lateness(samples: Samples) -> dict[str, Any]:
    """Percentiles of the seconds from due to issued, and where a client sent requests to their first byte."""
    found = {"send_lag_seconds": percentiles(samples.sent - samples.scheduled)}
    if np.isfinite(samples.request_sent).any():
        found["request_lag_seconds"] = percentiles(samples.request_lag)
    return found


def percentiles(values: Floats) -> dict[str, Any]:
    """p50, p90, p95 and p99 of the finite ``values``, how many there were, and which of the four too few support."""
    values = values[np.isfinite(values)]
    points = np.percentile(values, PERCENTILES).tolist() if len(values) else [None] * len(PERCENTILES)
    return {
        **{f"p{percent}": point for percent, point in zip(PERCENTILES, points, strict=True)},
        "samples": len(values),
        "unreliable": [f"p{percent}" for percent in PERCENTILES if len(values) < samples_needed(percent)],
    }


def samples_needed(percent: float) -> int:
    """Fewest samples that bound a percentile from above with one value to spare, at 99 % confidence, one-sided.

    LoadGen's early stopping rule with one sample over the limit: 64 for p90, 662 for p99.
    """
    return queries_needed(1, percent / 100)


def steady_window(first: Floats, last: Floats, series: pa.Table) -> tuple[float, float] | None:
    """The span between the first and the last moment at which 90 % of the peak number of samples were generating.

    ``first`` and ``last`` are the seconds [N] of the tokens of completed samples. The span ends when no sample waits
    any more: from then on nothing replaces what ends, and without prompts to read, answers come faster than they could
    for long. A sample generates from its first to its last token. None when the span is shorter than two seconds, or
    than three times as long as the median sample generates: samples that started together may all be answering at once,
    or all be read.
    """
    span = steady_span(first, last, series)
    return (span.start, span.end) if span and span.end - span.start >= span.required_seconds else None


@dataclass(frozen=True, slots=True)
class SteadySpan:
    """The span at 90 % of the peak while samples waited, however short, and how long it must be to count.

    ``waited``: whether any sample ever waited; without one the target was never full.
    """

    start: float
    end: float
    required_seconds: float
    waited: bool


def steady_span(first: Floats, last: Floats, series: pa.Table) -> SteadySpan | None:
    """The longest span that could be steady, as ``steady_window`` defines it; None if no sample generated."""
    known = np.isfinite(first) & np.isfinite(last)
    if not known.any():
        return None
    starts, ends = np.sort(first[known]), np.sort(last[known])
    rank = np.arange(len(starts))
    from_start = rank + 1 - np.searchsorted(ends, starts, side="right")  # generating from each start on
    until_end = np.searchsorted(starts, ends, side="left") - rank  # generating until each end
    if from_start.max() < 1:
        return None
    enough = STEADY_SHARE * from_start.max()
    times, waiting = totals_over_time(series, ["waiting"])
    start = float(starts[from_start >= enough][0])
    waited_until = float(times[waiting > 0].max(initial=0.0))
    life = float(np.median(last[known] - first[known]))
    required = max(SHORTEST_STEADY_SECONDS, SHORTEST_STEADY_LIVES * life)
    return SteadySpan(start, min(float(ends[until_end >= enough][-1]), waited_until), required, waited_until > 0)


@dataclass(frozen=True, slots=True)
class Samples:
    """Columns of the requests table as arrays [N]; float64 with NaN for what is absent."""

    scheduled: Floats
    sent: Floats
    submitted: Floats
    started: Floats
    first: Floats
    last: Floats
    tokenise: Floats
    detokenise: Floats
    request_sent: Floats
    input_tokens: Floats
    output_tokens: Floats
    failed: NDArray[np.bool_]
    cancelled: NDArray[np.bool_]
    completed: NDArray[np.bool_]

    @classmethod
    def of(cls, requests: pa.Table) -> Samples:
        """The columns of a table of ``SampleRow``."""
        import pyarrow.compute as pc

        failed = requests["error"].is_valid().to_numpy()
        reason = requests["finish_reason"]
        cancelled = pc.equal(reason, "cancelled").fill_null(False).to_numpy() & ~failed
        last = numbers(requests["last_token_seconds"])
        own_names = ("scheduled", "sent", "submitted", "started", "tokenise", "detokenise", "request_sent")
        return cls(
            **{name: numbers(requests[f"{name}_seconds"]) for name in own_names},
            first=numbers(requests["first_token_seconds"]),
            last=last,
            input_tokens=numbers(requests["input_tokens"]),
            output_tokens=numbers(requests["output_tokens"]),
            failed=failed,
            cancelled=cancelled,
            completed=reason.is_valid().to_numpy() & ~failed & ~cancelled & np.isfinite(last),
        )

    def __len__(self) -> int:
        return len(self.scheduled)

    @property
    def cut(self) -> NDArray[np.bool_]:
        """Which answers [N] had begun when they were cut off, at the end of a load or by an interruption."""
        return self.cancelled & np.isfinite(self.first)

    @property
    def request_lag(self) -> Floats:
        """Seconds [N] from when a sample was due until its request was given to the kernel; NaN without one."""
        return self.request_sent - self.scheduled

    @property
    def ttft(self) -> Floats:
        """Seconds [N] to the first token from when a sample was due; NaN where none came."""
        return self.first - self.scheduled

    @property
    def tpot(self) -> Floats:
        """Seconds [N] per output token after the first: (last - first) / (tokens - 1); NaN for fewer than two."""
        gaps = self.output_tokens - 1
        seconds: Floats = np.full(len(self), np.nan)
        return np.divide(self.last - self.first, gaps, out=seconds, where=gaps > 0)

    @property
    def in_one_piece(self) -> NDArray[np.bool_]:
        """Which answers [N] of several tokens came in one piece, if they are more than ``WHOLE_SHARE`` of all such."""
        found: NDArray[np.bool_] = self.completed & (self.tpot < ONE_PIECE_SECONDS)
        return found if found.sum() > WHOLE_SHARE * self.of_several_tokens.sum() else np.zeros_like(found)

    @property
    def of_several_tokens(self) -> NDArray[np.bool_]:
        """Which samples [N] were completed with more than one token."""
        return self.completed & (self.output_tokens > 1)

    @property
    def known_tpot(self) -> Floats:
        """``tpot`` [N], NaN also for answers in one piece, since the times between their tokens are unknown."""
        return np.where(self.in_one_piece, np.nan, self.tpot)

    def only(self, mask: NDArray[np.bool_]) -> Samples:
        """The samples where ``mask`` [N] is true."""
        return Samples(*(getattr(self, name)[mask] for name in self.__slots__))


def _nodes(column: pa.ChunkedArray, samples: Samples, start: float) -> list[dict[str, Any]]:
    """What each node did, over its own time from the start of the run to its last completion."""
    nodes = []
    for name, mask in masks(column).items():
        done = samples.only(mask & samples.completed)
        end = float(done.last.max()) if len(done) else start
        tokens = int(done.output_tokens.sum())
        nodes.append(
            {
                "node": name,
                "samples_completed": len(done),
                "output_tokens": tokens,
                "duration_seconds": end - start,
                "output_tokens_per_second": _rate(tokens, end - start),
            }
        )
    return nodes


def _total(counts: Floats) -> int | None:
    """The sum of ``counts`` [N]; None if one of them is unknown (NaN)."""
    return int(counts.sum()) if np.isfinite(counts).all() else None


def _rate(count: float, seconds: float) -> float | None:
    return count / seconds if seconds > 0 else None
