"""Verdicts: a value against its bound, published values and an earlier qualification; and the answer in sentences."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from megatoken.hardware.qualify.values import COUNTS, NOISY_DRIFT, NOISY_SPREAD, NORMAL_MAD, SPEEDS, Outcome, Value
from megatoken.text import count_of, number

IMPOSSIBLE_SHARE = 1.02
MARGIN = 0.05
SPREADS = 3
"""A difference from a baseline within so many spreads is noise."""
MOST_TOLERANCE = 0.25
"""However noisy two values are, one that is worse than its baseline by more than this does not pass.

If even its fastest window is so much worse than the slowest of the baseline, it fails.
"""
CONTENTION = 0.05
"""Share of its time that a value waited for cores, above which it counts as noisy."""
HEADLINES = (
    ("multiplies matrices in fp8 at", ("gemm_fp8_8192", "gemm_fp8_4096")),
    (
        "in bf16 at",
        (
            "gemm_bf16_8192",
            *(f"gemm_bf16_{side}_{cores}" for cores in ("all_cores", "one_core") for side in (2048, 1024)),
            "layer_products_bf16_256",
        ),
    ),
    ("in fp32 at", ("gemm_fp32_1024_all_cores", "gemm_fp32_2048_all_cores", "gemm_fp32_1024_one_core")),
    ("reads memory at", ("hbm_read", "memory_read")),
)
"""What the second sentence says, from the first of the values that was measured and not only recorded."""
MOST_NAMED = 3


@dataclass(frozen=True, slots=True)
class Band:
    """From ``lowest`` to ``highest``, in the unit of the value, and where the published values are from."""

    lowest: float
    highest: float
    sources: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Earlier:
    """A value of an earlier qualification: its median and relative spread, and how often its test ran.

    ``slowest``: the worst of its windows; None if it had none.
    """

    median: float
    spread: float
    runs: int = 1
    slowest: float | None = None
    noisy: bool = False
    waited: bool = False  # for cores, so much that it says nothing about the machine


class Verdict(StrEnum):
    """Of a value or a test, the worst last."""

    NO_REFERENCE = "NO REFERENCE"
    PASS = "PASS"
    NOT_RUN = "NOT RUN"
    MARGINAL = "MARGINAL"
    FAIL = "FAIL"


ORDER = list(Verdict)


@dataclass(frozen=True, slots=True)
class Judged:
    """A verdict and the sentence that explains it; empty where the verdict needs none."""

    verdict: Verdict
    reason: str = ""


def worst(verdicts: list[Verdict]) -> Verdict:
    """The verdict on all of them together."""
    return max(verdicts, key=ORDER.index, default=Verdict.NOT_RUN)


def verdict_of_test(test: Mapping[str, Any]) -> Verdict:
    """FAIL for a fault; else the worst of the values that ran.

    NOT RUN if no value ran, or if the test ended early, which a value of its name says.
    """
    if test.get("fault") is not None:
        return Verdict.FAIL
    verdicts = [(value["name"], Verdict(value["verdict"])) for value in test["values"]]
    ended_early = (test.get("name"), Verdict.NOT_RUN) in verdicts
    ran: list[Verdict] = [verdict for _, verdict in verdicts if verdict is not Verdict.NOT_RUN]
    return worst([*ran, Verdict.NOT_RUN] if ended_early else ran)


def overall(tests: Sequence[Mapping[str, Any]]) -> Verdict:
    """The verdict on the tests of a document: no PASS if error counts alone had something to be compared with."""
    verdict = worst([Verdict(test["verdict"]) for test in tests])
    values = (value for test in tests for value in test["values"])
    if verdict is Verdict.PASS and not any(
        value.get("better") in SPEEDS and value["verdict"] == Verdict.PASS for value in values
    ):
        return Verdict.NO_REFERENCE
    return verdict


def waited(core_wait_share: float | None) -> bool:
    """Whether a value waited for cores so much that it says little about the machine."""
    return (core_wait_share or 0.0) > CONTENTION


def is_unsteady(spread: float, drift: float, core_wait_share: float | None) -> bool:
    """Whether its own windows, or its waits for cores, make a value noisy."""
    return spread > NOISY_SPREAD or drift > NOISY_DRIFT or waited(core_wait_share)


def is_noisy(
    value: Value,
    core_wait_share: float | None,
    band: Band | None = None,
    earlier: Earlier | None = None,
    between_runs: float = 0.0,
) -> bool:
    """Whether a repetition could differ by more than 5 %; counts of errors never are.

    A speed also is if it is too slow in all runs together and not in one of them: a fault of the machine is in each.
    """
    if value.better in COUNTS:
        return False
    if is_unsteady(value.spread, value.drift, core_wait_share):
        return True
    in_all, in_best = (
        any(one.verdict is Verdict.FAIL for one in _compared(value, median, band, earlier, between_runs))
        for median in (value.median, value.best_median)
    )
    return value.better in SPEEDS and in_all and not in_best


def judge(
    outcome: Outcome,
    band: Band | None,
    earlier: Earlier | None,
    *,
    noisy: bool,
    between_runs: float = 0.0,  # see ``tolerance``
    core_wait_share: float | None = None,  # as given to ``is_noisy``
    taken_share: float = 0.0,  # of its speed, that other virtual machines of the host may take, see ``far_behind``
) -> Judged:
    """The verdict on one value."""
    if not isinstance(outcome, Value):
        return Judged(Verdict.NOT_RUN, f"{outcome.reason}; {outcome.enable}")
    if not outcome.windows or not all(map(math.isfinite, outcome.windows)):
        return Judged(Verdict.FAIL, "the test returned no finite number")
    if outcome.better in COUNTS:
        wrong = max(outcome.windows)
        if not wrong:
            return Judged(Verdict.PASS)
        found = f"{number(wrong)} {outcome.unit}"
        if outcome.better == "rare":
            return Judged(Verdict.MARGINAL, f"{found}; expected 0, a warning only")
        return Judged(Verdict.FAIL, f"{found}; expected 0")
    if outcome.better not in SPEEDS:
        return Judged(Verdict.NO_REFERENCE)
    share, bound = outcome.share, outcome.bound
    if bound is not None and bound.certain and share is not None and share > IMPOSSIBLE_SHARE:
        return Judged(Verdict.FAIL, f"measurement error: {share:.0%} of what is possible ({bound.formula})")
    compared = list(_compared(outcome, outcome.median, band, earlier, between_runs))
    if not compared:
        no_reference = earlier is not None and earlier.waited
        reason = "the baseline's value waited for cores: no reference" if no_reference else ""
        return Judged(Verdict.NO_REFERENCE, reason)
    judged = max(compared, key=lambda one: ORDER.index(one.verdict))
    if judged.verdict is Verdict.PASS or not (noisy or taken_share):
        return judged
    alone = speed_without_others(outcome.median, outcome.better, taken_share)
    if not noisy and Verdict.FAIL in (one.verdict for one in _compared(outcome, alone, band, earlier, between_runs)):
        return Judged(Verdict.FAIL, f"{judged.reason}; other virtual machines take {taken_share:.0%} at most")
    fastest = (min if outcome.better == "lower" else max)(outcome.windows)
    slowest = None if earlier is None else earlier.slowest
    if slowest is not None and far_behind(fastest, slowest, outcome.better, core_wait_share, taken_share):
        found = f"{number(fastest)} {outcome.unit} in its fastest window"
        allowed = f"{number(_far_limit(slowest, outcome.better, taken_share))} {outcome.unit} is allowed"
        reference = f"the baseline's slowest had {number(slowest)} {outcome.unit}, {allowed}"
        return Judged(Verdict.FAIL, f"{'noisy, and ' if noisy else ''}{found}; {reference}")
    if waited(core_wait_share):
        cause = f"it waited for a core {core_wait_share:.0%} of its time: stop other work and repeat"
        return Judged(Verdict.MARGINAL, f"{judged.reason}; {cause}")
    if noisy:
        return Judged(Verdict.MARGINAL, f"{judged.reason}; the value is noisy: repeat it on a quiet machine")
    shared = f"other virtual machines of the host may take up to {taken_share:.0%}: repeat it later"
    return Judged(Verdict.MARGINAL, f"{judged.reason}; {shared}")


def _compared(
    value: Value, median: float, band: Band | None, earlier: Earlier | None, between_runs: float
) -> Iterator[Judged]:
    """What a median of a value is worth next to each reference. Better than a band is no fault, see the bound."""
    lower = value.better == "lower"
    if band is not None:
        limit = band.highest if lower else band.lowest
        yield _graded(value, median, limit, f"published values allow {number(limit)} {value.unit}")
    if earlier is not None and not earlier.waited:
        allowed = tolerance(value, earlier, between_runs)
        limit = baseline_limit(earlier.median, allowed, value.better)
        reference = f"the baseline had {number(earlier.median)} {value.unit}, {allowed:.1%} worse is allowed"
        yield _graded(value, median, limit, reference)


def baseline_limit(median: float, allowed: float, better: str) -> float:
    """What passes at the worst next to a baseline of this median, if it may be worse by the share ``allowed``."""
    return median * (1 + allowed if better == "lower" else 1 - allowed)


def speed_without_others(median: float, better: str, taken_share: float) -> float:
    """What a speed would be at best if other virtual machines took nothing of the host."""
    return median * (1 - taken_share) if better == "lower" else median / (1 - taken_share)


def far_behind(
    fastest: float, slowest: float, better: str, core_wait_share: float | None, taken_share: float = 0.0
) -> bool:
    """Whether even the fastest window of a value is far behind the slowest one that it is compared with.

    Noise does not reach every window. A wait for cores does, so a value that waited never is. So does what other
    virtual machines take of a host, up to ``taken_share`` of a speed.
    """
    limit = _far_limit(slowest, better, taken_share)
    is_behind = fastest > limit if better == "lower" else fastest < limit
    return is_behind and not waited(core_wait_share)


def _far_limit(slowest: float, better: str, taken_share: float) -> float:
    left = (1 - MARGIN) * (1 - max(MOST_TOLERANCE, taken_share))
    return slowest / left if better == "lower" else slowest * left


def tolerance(value: Value, earlier: Earlier, between_runs: float = 0.0) -> float:
    """Share of the baseline by which a value may be worse than it and pass.

    The windows of one run do not show how far the next run would be from it. Where this value or the baseline is of one
    run, ``between_runs`` counts as well, which ``spread_between_runs`` takes from the tests that ran twice.
    """
    unseen = 0.0 if value.run_medians and earlier.runs > 1 else between_runs
    return min(MOST_TOLERANCE, max(MARGIN, SPREADS * math.hypot(value.spread, earlier.spread, unseen)))


def spread_between_runs(values: Iterable[Value]) -> float:
    """Standard deviation of the difference of two runs of a speed, as a share; 0 without values.

    ``values``: each of two runs, so that its drift is such a difference.
    """
    return NORMAL_MAD * statistics.median([one.drift for one in values if one.better in SPEEDS] or [0.0])


def graded(measured: float, limit: float, better: str) -> Verdict:
    """PASS up to the limit of a speed, MARGINAL within 5 % behind it."""
    lower = better == "lower"
    if measured <= limit if lower else measured >= limit:
        return Verdict.PASS
    near = measured <= limit * (1 + MARGIN) if lower else measured >= limit * (1 - MARGIN)
    return Verdict.MARGINAL if near else Verdict.FAIL


def _graded(value: Value, measured: float, limit: float, reference: str) -> Judged:
    verdict = graded(measured, limit, value.better)
    return Judged(verdict, "" if verdict is Verdict.PASS else f"{number(measured)} {value.unit}; {reference}")


def answer(document: Mapping[str, Any]) -> list[str]:
    """Three sentences on a document of qualify."""
    values = [value for test in document["tests"] for value in test["values"]]
    return [
        health(document["tests"], values),
        _speed({value["name"]: value for value in values}),
        _trust(values),
    ]


def health(tests: Sequence[Mapping[str, Any]], values: Sequence[Mapping[str, Any]]) -> str:
    """What failed, or that nothing did, and how many values had a reference."""
    failed = [f"{test['title']} ({test['fault']})" for test in tests if test["fault"]]
    failed += [f"{value['title']} ({value['reason']})" for value in values if value["verdict"] == Verdict.FAIL]
    count = {verdict: sum(value["verdict"] == verdict for value in values) for verdict in Verdict}
    passed, marginal, missing = (count[one] for one in (Verdict.PASS, Verdict.MARGINAL, Verdict.NO_REFERENCE))
    unjudged = f"{missing} {'has' if missing == 1 else 'have'} no reference and {count[Verdict.NOT_RUN]} did not run"
    if not failed and not passed + marginal:
        return f"Nothing was judged: of {count_of(len(values), 'value')}, {unjudged}."
    passes = f"{count_of(passed, 'value')} {'passes' if passed == 1 else 'pass'}"
    rest = f"{passes}, {marginal} {_is(marginal)} marginal, {unjudged}"
    if not failed:
        return f"No fault was found: {rest}."
    more = f" and {len(failed) - MOST_NAMED} more" if len(failed) > MOST_NAMED else ""
    return f"{count_of(len(failed), 'fault')} found: {'; '.join(failed[:MOST_NAMED])}{more}; {rest}."


def _is(count: int) -> str:
    return "is" if count == 1 else "are"


def _speed(values: Mapping[str, Mapping[str, Any]]) -> str:
    parts = list(_headlines(values))
    if not parts:
        return "Neither large products nor reads of memory were measured."
    *first, last = parts
    part = next(values[name].get("part") for _, names in HEADLINES for name in names if name in values) or "the machine"
    return f"{part[0].upper()}{part[1:]} {', '.join(first)}{' and ' if first else ''}{last}."


def _headlines(values: Mapping[str, Mapping[str, Any]]) -> Iterator[str]:
    begun = False
    for words, names in HEADLINES:
        measured = [values[name] for name in names if values.get(name, {}).get("median")]
        judged = [value for value in measured if value.get("better") in SPEEDS]
        if found := next(iter(judged or measured), None):
            verb = "multiplies matrices " if words.startswith("in ") and not begun else ""
            begun = True
            one_core = values.get(found["name"].replace("_all_cores", "_one_core"), {}).get("median") or 0.0
            slower = ""
            if one_core > found["median"]:
                cause = "other work took cores, or the clock fell"
                slower = f" on all cores, less than one core alone ({number(one_core)}; {cause})"
            yield f"{verb}{words} {number(found['median'])} {found['unit']}{slower}"


def _trust(values: Sequence[Mapping[str, Any]]) -> str:
    """How many speeds will repeat; rates that are only recorded do not count, nor those of one window."""
    speeds = [value for value in values if len(value.get("windows") or ()) > 1 and value["better"] in SPEEDS]
    noisy = [value for value in speeds if value["noisy"]]
    shared = sum(bool(value.get("taken_share")) for value in speeds if not value["noisy"])
    if not speeds:
        return "No speed was measured in several windows."
    if not noisy:
        several = len(speeds) > 1
        steady = f"{f'All {len(speeds)} speeds were' if several else 'The only speed was'} steady within 5 %"
        if shared:
            slowed = f"{shared} of them" if several else "it"
            return f"{steady}, but other virtual machines of the host may slow {slowed} next time."
        return f"{steady}, so later qualifications can be compared."
    counted = f"{len(noisy)} of {count_of(len(speeds), 'speed')} {_is(len(noisy))} noisy"
    found = f"{counted} and may differ by over 5 % next time"
    if shared:
        found += f", and other virtual machines of the host may slow {shared} more"
    if waits := [value["core_wait_share"] for value in noisy if waited(value["core_wait_share"])]:
        found += f"; {len(waits)} waited for a core, up to {max(waits):.0%} of the time: stop other work and repeat"
    return f"{found}."
