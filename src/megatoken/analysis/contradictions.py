"""Checks that the rates of a run folder follow from the fields next to them; cheap, for every reader of rates.

An audit recomputes every number from the raw rows. This check only keeps a rate that was edited by hand out of ratios,
plans and pages.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from contextlib import suppress
from typing import TYPE_CHECKING

from megatoken.analysis.series import tokens_per_second_within
from megatoken.errors import UsageError
from megatoken.runs.run import Verdict
from megatoken.text import exact, is_number, precise

if TYPE_CHECKING:
    from megatoken.runs.run import Run

SUMMARY = ("mlperf", "mlperf_log_summary.txt")
SAME = 1e-6  # relative: the same division of the same numbers
PRINTED_SHARE = 1e-4  # relative: the summary of Offline has six digits
PRINTED_RATE = 0.0051  # tokens per second: that of Server has two decimals
LATE_SECONDS = 5.0  # LoadGen may hear of the last sample that much later on a busy machine
LATE_SHARE = 0.1
_MOST_SUMMARY_BYTES = 2**20
_LOGGED_RATE = re.compile(r"^(?:Completed tokens|Tokens) per second *: *([0-9.e+]+)$", re.MULTILINE)


def check_arithmetic(run: Run) -> None:
    """Refuse rates that are not their tokens over their seconds.

    Raises:
        UsageError: names the first such rate and both values.
    """
    _refuse(run, _unlike_its_own_figures(run))


def check_rates(run: Run) -> None:
    """Also refuse rates that LoadGen's summary contradicts, if it is in the folder.

    Raises:
        UsageError: names the first such rate and both values.
    """
    check_arithmetic(run)
    _refuse(run, _unlike_loadgen(run))


def _refuse(run: Run, contradictions: Iterator[str]) -> None:
    if (found := next(contradictions, None)) is not None:
        raise UsageError(
            f"{run.path}: result.json contradicts itself or its logs: {found}; copy the folder again or repeat the"
            f" run (megatoken audit {run.path} lists every contradiction)"
        )


def _unlike_its_own_figures(run: Run) -> Iterator[str]:
    result = run.result
    rated = result.get("rated_seconds")
    tokens, read, whole = (result.get(name) for name in ("output_tokens", "input_tokens", "duration_seconds"))
    both = tokens + read if is_number(tokens) and is_number(read) else None
    rates = {
        "output_tokens_per_second": ("output_tokens / rated_seconds", tokens, rated),
        "processed_tokens_per_second": ("(input_tokens + output_tokens) / rated_seconds", both, rated),
        "whole_run_output_tokens_per_second": ("output_tokens / duration_seconds", tokens, whole),
    }
    by_series = result.get("soak") is not None or run.verdict is Verdict.INTERRUPTED
    if by_series and is_number(rated) and rated > 0:
        counted = tokens_per_second_within(run.series, 0.0, rated)
        if counted is not None and is_number(rate := result.get("output_tokens_per_second")) and rate:
            # A soak that completed no sample before its end has no rate under load; nor have older interrupted runs.
            alike = _same(rate, counted) or _same(rate, (tokens or 0) / rated)
            if not alike:
                yield _contradiction("output_tokens_per_second", rate, "series.parquet until rated_seconds", counted)
        rates = {name: rates[name] for name in ("whole_run_output_tokens_per_second",)}
    for name, (formula, count, seconds) in rates.items():
        yield from _unlike(name, result.get(name), formula, count, seconds)
    for node in result.get("nodes") or ():
        name = f"output_tokens_per_second of node {node['node'][:50]}"
        rate, count, seconds = (node[key] for key in ("output_tokens_per_second", "output_tokens", "duration_seconds"))
        yield from _unlike(name, rate, "its output_tokens / duration_seconds", count, seconds)


def _unlike(name: str, rate: object, formula: str, count: object, seconds: object) -> Iterator[str]:
    if is_number(rate) and is_number(count) and is_number(seconds):
        follows = count / seconds if seconds > 0 else math.inf
        if not _same(rate, follows):
            yield _contradiction(name, rate, formula, follows)


def _unlike_loadgen(run: Run) -> Iterator[str]:
    """LoadGen rates by the time it hears of the last sample, on the wall clock; it counts failed samples otherwise."""
    result = run.result
    rate, tokens = result.get("output_tokens_per_second"), result.get("output_tokens")
    single = result.get("samples_without_tpot")
    if not rate or result.get("soak") is not None or result.get("samples_failed") or result.get("samples_cancelled"):
        return
    logged = _logged_rate(run)
    if logged is None or not is_number(rate) or not is_number(tokens):
        return
    summary = "/".join(SUMMARY)
    repeated = result.get("loadgen_output_tokens_per_second")
    if is_number(repeated) and not math.isclose(repeated, logged, rel_tol=PRINTED_SHARE, abs_tol=PRINTED_RATE):
        yield _contradiction("loadgen_output_tokens_per_second", repeated, summary, logged)
    step = result.get("wall_clock_step_seconds")
    heard_of = tokens - (single if is_number(single) else 0)  # LoadGen counts no token for an answer of one
    slack = LATE_SECONDS + LATE_SHARE * heard_of / logged + (abs(step) if is_number(step) else 0.0)
    if abs(heard_of / logged - tokens / rate) > slack:
        yield _contradiction("output_tokens_per_second", rate, summary, logged)


def _logged_rate(run: Run) -> float | None:
    """Output tokens per second of the whole test, as the summary states them; SingleStream's states none."""
    path = run.path.joinpath(*SUMMARY)
    if not path.is_file():  # reading a pipe could wait forever
        return None
    with suppress(OSError, ValueError):
        with path.open("rb") as file:
            found = _LOGGED_RATE.search(file.read(_MOST_SUMMARY_BYTES).decode("utf-8", "replace"))
        rate = float(found[1]) if found else 0.0
        return rate if is_number(rate) and rate > 0 else None
    return None


def _same(one: float, other: float) -> bool:
    return math.isclose(one, other, rel_tol=SAME)


def _contradiction(name: str, says: float, by: str, follows: float) -> str:
    return f"{name} is {exact(says)}, but {by} gives {precise(follows)}"
