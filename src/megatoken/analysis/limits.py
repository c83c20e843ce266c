"""The user's own limits on a run: which ones were asked for, and whether the run meets each.

A percentile is judged by order statistics, as LoadGen's early stopping does. With 99 % confidence it is within a limit
if no more values are over it than ``early_stopping.most_over`` allows; fewer values than ``samples_needed`` show
nothing. Requests that failed or never began to be answered count as over every limit on a latency. An answer that was
cut off at the end of a load shows its time to first token; its other times count as they were until then, and where it
decides whether they would have stayed within the limit, the answer is CANNOT TELL.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from enum import StrEnum
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megatoken.analysis.early_stopping import CONFIDENCE, most_over, odds, queries_needed
from megatoken.analysis.seen_tokens import Gaps, SeenTokens
from megatoken.analysis.series import Floats
from megatoken.analysis.statistics import Samples, leading_rates, samples_needed
from megatoken.runs.run import Run, Verdict
from megatoken.text import is_number, precise

PERCENTS = {"p50": 50.0, "p90": 90.0, "p95": 95.0, "p99": 99.0, "p999": 99.9}
LATENCIES = {
    "ttft_seconds": "time to first token",
    "tpot_seconds": "time per output token",
    "itl_seconds": "time between tokens",
    "latency_seconds": "end-to-end latency",
}
FROM_THE_QUERY = ("ttft_seconds", "latency_seconds")  # of Offline, which includes the queue
_RATES = {"output_tokens_per_second": "output rate", "samples_per_second": "sample rate"}
_UNITS = {"output_tokens_per_second": "tokens/s", "samples_per_second": "samples/s", "dollars_per_request": "$"}
DOLLARS = "dollars_per_request"
SHORTCUTS = {"ttft_limit_seconds": "ttft_seconds.p99", "tpot_limit_seconds": "tpot_seconds.p99"}  # older keys
SECONDS_PER_HOUR = 3600.0
WHY_TPOT_UNKNOWN = "answers of several tokens came in one piece, so the times between them are unknown"


class Answer(StrEnum):
    """Whether a run meets a limit; of a whole run also that its numbers prove nothing, whatever its limits say."""

    DOES_NOT_STAND = "RUN DOES NOT STAND"
    MET = "MET"
    NOT_MET = "NOT MET"
    CANNOT_TELL = "CANNOT TELL"


@dataclass(frozen=True, slots=True)
class Limit:
    """One limit: its dotted key below ``limits``, its value, and whether the value is the most or the least."""

    key: str
    value: float
    at_most: bool

    @property
    def label(self) -> str:
        """What is limited, such as ``time to first token, p99``."""
        metric, _, part = self.key.partition(".")
        if metric in LATENCIES:
            return f"{LATENCIES[metric]}, {'p99.9' if part == 'p999' else part}"
        return f"{metric} {part}" if part else {**_RATES, DOLLARS: "dollars per request"}[metric]

    @property
    def unit(self) -> str:
        """Unit of the value."""
        metric = self.key.partition(".")[0]
        return "s" if metric in LATENCIES else _UNITS.get(metric, "%")


@dataclass(frozen=True, slots=True)
class Judged:
    """A limit and the answer.

    ``found`` is the value of the run, None where it has none; ``samples`` the values behind a percentile, ``over`` of
    which are above the limit, and ``needed`` how many values would decide, if more would.
    """

    key: str
    label: str
    limit: float
    unit: str
    at_most: bool
    answer: Answer
    found: float | None
    why: str
    samples: int | None = None
    over: int | None = None
    needed: int | None = None


@dataclass(frozen=True, slots=True)
class _Observed:
    """What a run, or the window of a point of a sweep, shows; seconds [N] of latencies, infinite where one failed."""

    latencies: Mapping[str, Floats | str]  # a text says why there are none
    until_cut: Mapping[str, Floats]  # the same, with those of answers that were cut off as they were until then
    rates: Mapping[str, float | None]
    scores: Mapping[str, Any]
    dollars_per_hour: float | None
    unfinished: bool


def asked_limits(config: Mapping[str, Any]) -> list[Limit]:
    """The limits of a configuration, as ``config.yaml`` of a run holds it; empty where the user gave none."""
    found = dict(_flat(config.get("limits") or {}))
    for key, name in SHORTCUTS.items():
        if is_number(config.get(key)):
            found.setdefault(name, config[key])
    return [
        Limit(key, float(value), key.partition(".")[0] in LATENCIES or key == DOLLARS) for key, value in found.items()
    ]


def judge_limits(run: Run, limits: Sequence[Limit], dollars_per_hour: float | None = None) -> list[Judged]:
    """Whether ``run`` meets each of ``limits``; a machine hour costs ``dollars_per_hour``, None where unknown."""
    observed = _observed(run, dollars_per_hour)
    return [_judged(limit, observed) for limit in limits]


def not_judged(limits: Sequence[Limit], why: str) -> list[Judged]:
    """The answers where there is no run to judge, which ``why`` explains."""
    return [_open(limit, why) for limit in limits]


def overall(answers: Iterable[Answer | None]) -> Answer | None:
    """The first of RUN DOES NOT STAND, NOT MET, CANNOT TELL and MET that is among ``answers``; None without any."""
    found = set(answers)
    order = (Answer.DOES_NOT_STAND, Answer.NOT_MET, Answer.CANNOT_TELL, Answer.MET)
    return next((one for one in order if one in found), None)


def answer_for(verdict: Verdict | None, answers: Sequence[Judged]) -> Answer | None:
    """The answer for a run with this verdict and these limits; None without limits."""
    if answers and verdict is not None and not verdict.stands:
        return Answer.DOES_NOT_STAND
    return overall(one.answer for one in answers)


def in_brief(answers: Sequence[Judged]) -> str | None:
    """One phrase, such as ``NOT MET (time to first token, p99)``; None without limits."""
    worst = overall(one.answer for one in answers)
    if worst is None or worst is Answer.MET:
        return worst
    return f"{worst} ({'; '.join(one.label for one in answers if one.answer is worst)})"


def within(answer: Mapping[str, Any]) -> bool:
    """Whether the value that a run shows, if it shows one, is within the limit; of one of ``limit_documents``."""
    found, limit = answer["found"], answer["limit"]
    return found is None or (found <= limit if answer["at_most"] else found >= limit)


def dollars_each(dollars_per_hour: float, per_second: float) -> float:
    """The price of one of what a machine does so often per second."""
    return dollars_per_hour / (SECONDS_PER_HOUR * per_second)


def limit_documents(answers: Sequence[Judged]) -> list[dict[str, Any]]:
    """The answers as plain JSON."""
    return [asdict(one) for one in answers]


def _flat(values: Mapping[str, Any]) -> Iterator[tuple[str, float]]:
    for key, value in values.items():
        if isinstance(value, Mapping):
            yield from ((f"{key}.{name}", number) for name, number in _flat(value))
        elif is_number(value):
            yield key, value


def none_ended(samples: Samples, tokens: SeenTokens, start: float, end: float) -> bool:
    """Whether answers came, but the window from ``start`` to ``end`` was too short for one and shows no latency.

    Not so where a request failed, or waits for its first token: that is a slow target, whatever the window.
    """
    inside = samples.only((samples.scheduled >= start) & (samples.scheduled < end))
    under_way = ~inside.completed & ~inside.failed & np.isfinite(inside.first)
    return bool(under_way.all()) and tokens.within(start, end) > 0


def why_unjudged(load: Mapping[str, Any]) -> str:
    """Why a window in which no request ended shows no latency, and which flag of the sweep makes it longer."""
    longer = "give the stage more seconds, LOAD@SECONDS" if "stage" in load else "raise --window"
    return f"no request that came in the window ended; {longer}"


def _observed(run: Run, dollars_per_hour: float | None) -> _Observed:
    result, samples = run.result, Samples.of(run.requests)
    counted: NDArray[np.bool_] = np.ones(len(samples), bool)
    leading = leading_rates(result)
    rates = {name: leading[name] for name in _RATES}
    tokens = SeenTokens.of(run, samples)
    if window := (result.get("load") or {}).get("window_seconds"):
        start, end = window
        counted = (samples.scheduled >= start) & (samples.scheduled < end)
        ended = samples.completed & (samples.last >= start) & (samples.last < end)
        totals = (tokens.within(start, end), float(ended.sum()))
        rates = {name: total / (end - start) for name, total in zip(_RATES, totals, strict=True)}
    inside = samples.only(counted)
    begun = inside.completed | inside.cut
    gaps = tokens.gaps((samples.completed | samples.cut) & counted)
    latencies: dict[str, Floats | str] = {
        "itl_seconds": "times of single tokens are recorded of a server that streams (--endpoint) and in a sweep only",
        **_latencies(inside, inside.completed, gaps),
        "ttft_seconds": np.where(begun, inside.ttft, np.inf),
    }
    if inside.in_one_piece.any():
        latencies |= dict.fromkeys(latencies.keys() & {"tpot_seconds", "itl_seconds"}, WHY_TPOT_UNKNOWN)
    until_cut: Mapping[str, Floats] = {}
    if inside.cut.any():
        until_cut = _latencies(tokens.until_cut(samples).only(counted), begun, gaps)
    if result.get("scenario") == "offline":
        why = "all samples of Offline are due at once, so no user waits like this; measure with --scenario server"
        latencies |= dict.fromkeys(FROM_THE_QUERY, why)
    if window and none_ended(samples, tokens, *window):
        latencies |= dict.fromkeys(LATENCIES, why_unjudged(result["load"]))
        rates["samples_per_second"] = None
    scores = (result.get("accuracy") or {}).get("metrics") or {}
    return _Observed(latencies, until_cut, rates, scores, dollars_per_hour, run.verdict is Verdict.INTERRUPTED)


def _latencies(samples: Samples, known: NDArray[np.bool_], gaps: Gaps | None) -> dict[str, Floats]:
    """Latencies [N] of the samples whose times are ``known``, infinite for the others; without gaps, none of those.

    A sample whose times are not known counts once more among the gaps, next to those of it that were seen.
    """
    found = {
        "ttft_seconds": np.where(known, samples.ttft, np.inf),
        "tpot_seconds": np.where(known, samples.tpot, np.inf),
        "latency_seconds": np.where(known, samples.last - samples.scheduled, np.inf),
    }
    if gaps is not None:
        found["itl_seconds"] = np.concatenate([gaps[0], np.full(int((~known).sum()), np.inf)])
    return found


def _judged(limit: Limit, observed: _Observed) -> Judged:
    metric, _, part = limit.key.partition(".")
    if metric in LATENCIES:
        values = observed.latencies[metric]
        if isinstance(values, str):
            judged = _open(limit, values)
        else:
            judged = _percentile(limit, values, PERCENTS[part])
            if (other := observed.until_cut.get(metric)) is not None:
                judged = _between(judged, _percentile(limit, other, PERCENTS[part]))
    else:
        judged = _figure(limit, *_FIGURES.get(metric, _rate)(metric, part, observed))
    if observed.unfinished and judged.answer is Answer.MET:
        return _open(limit, "the run was interrupted, so its slowest requests are missing", judged.found)
    return judged


def _rate(metric: str, part: str, observed: _Observed) -> tuple[float | None, str]:
    return observed.rates[metric], "the run has no rate"


def _score(metric: str, part: str, observed: _Observed) -> tuple[float | None, str]:
    found = (observed.scores.get(part) or {}).get("value")
    return found, "the answers were not scored; see docs/accuracy.md"


def _dollars(metric: str, part: str, observed: _Observed) -> tuple[float | None, str]:
    rate, price = observed.rates["samples_per_second"], observed.dollars_per_hour
    if price is None:
        return None, "the price of the machine is unknown; give --dollars-per-hour"
    return dollars_each(price, rate) if rate else None, "the run has no rate"


_FIGURES: Mapping[str, Callable[[str, str, _Observed], tuple[float | None, str]]] = {
    "accuracy": _score,
    DOLLARS: _dollars,
}


def _figure(limit: Limit, found: float | None, unknown: str) -> Judged:
    if found is None:
        return _open(limit, unknown)
    met = found <= limit.value if limit.at_most else found >= limit.value
    answer = Answer.MET if met else Answer.NOT_MET
    sign = "at most" if limit.at_most else "at least"
    return _with(limit, answer, f"{with_unit(found, limit.unit)}; {sign} {with_unit(limit.value, limit.unit)}", found)


def _percentile(limit: Limit, values: Floats, percent: float) -> Judged:
    values = np.sort(values[~np.isnan(values)])
    count, over = len(values), int((values > limit.value).sum())
    if not count:
        return _open(limit, "no request has such a time")
    found, share, least = _value_at(values, percent / 100), percent / 100, samples_needed(percent)
    parts = {"samples": count, "over": over}
    shown = f"{over:,} of {count:,} are over {with_unit(limit.value, limit.unit)}"
    figure = float(found) if np.isfinite(found) else None
    by_chance = 1.0 if not over else 1 - odds(count - over + 1, over - 1, share)  # so many over, if the limit holds
    if found > limit.value and (count >= least or by_chance < 1 - CONFIDENCE):
        return _with(limit, Answer.NOT_MET, shown, figure, **parts)
    if count < least:
        why = f"{count:,} values are too few for this percentile; at least {least:,} are needed"
        return _with(limit, Answer.CANNOT_TELL, why, figure, **parts, needed=least)
    if over <= most_over(count, share):
        return _with(limit, Answer.MET, shown, figure, **parts)
    needed = queries_needed(over, share)
    why = f"{shown}, which {needed:,} values would need for 99 % confidence"
    return _with(limit, Answer.CANNOT_TELL, why, figure, **parts, needed=needed)


def _between(worst: Judged, best: Judged) -> Judged:
    """The answer where answers were cut off: all over the limit in ``worst``, as they were until then in ``best``.

    Those that were within the limit until then are in ``samples`` only where they do not decide.
    """
    undecided = (worst.over or 0) - (best.over or 0)
    if not undecided or best.answer is Answer.NOT_MET:
        return best
    why = f"{best.why}; {undecided:,} answers were cut off within the limit"
    if worst.answer is Answer.MET:
        return replace(worst, over=best.over, why=f"{why}, which could not change the answer")
    if best.answer is Answer.MET:
        why += ", which could change the answer; raise --window, or let the run end"
    return replace(best, answer=Answer.CANNOT_TELL, why=why, samples=(worst.samples or 0) - undecided)


def _value_at(ordered: Floats, share: float) -> float:
    """The percentile as ``statistics.percentiles`` has it; infinite where one of its two neighbours is."""
    position = (len(ordered) - 1) * share
    if not np.isfinite(ordered[int(np.ceil(position))]):
        return float("inf")
    return float(np.percentile(ordered[np.isfinite(ordered)], 100 * position / max(1, np.isfinite(ordered).sum() - 1)))


def _open(limit: Limit, why: str, found: float | None = None) -> Judged:
    return _with(limit, Answer.CANNOT_TELL, why, found)


def _with(limit: Limit, answer: Answer, why: str, found: float | None, **parts: int) -> Judged:
    return Judged(limit.key, limit.label, limit.value, limit.unit, limit.at_most, answer, found, why, **parts)


def with_unit(value: float, unit: str) -> str:
    """The value of a limit, or of what is held against it, as text."""
    return f"${precise(value)}" if unit == "$" else f"{precise(value)} {unit}"
