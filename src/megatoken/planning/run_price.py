"""What a machine hour of a run costs, what one of the run's own requests costs, and the limits that need these."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from megatoken.analysis.comparison import Entry
from megatoken.analysis.limits import (
    DOLLARS,
    Answer,
    Judged,
    answer_for,
    asked_limits,
    dollars_each,
    in_brief,
    judge_limits,
    limit_documents,
    overall,
)
from megatoken.analysis.lookup import Unreadable, read_runs
from megatoken.analysis.machine import accelerator_name, run_accelerators
from megatoken.analysis.published import accelerator_facts
from megatoken.analysis.statistics import leading_rates
from megatoken.errors import ExitCode, UsageError
from megatoken.files import new_document
from megatoken.planning.assumptions import load_assumptions
from megatoken.planning.cost import System, accelerator_hour
from megatoken.planning.energy import energy_of, power_of
from megatoken.planning.figures import State
from megatoken.planning.throughput import from_runs
from megatoken.runs.run import RESULT, Run, read_run
from megatoken.text import is_number, precise, significant

NO_LIMITS = "no limits to judge by: give --slo FILE, or flags such as --limits.ttft_seconds.p99 2"


@dataclass(frozen=True, slots=True)
class MachineHour:
    """Dollars of an hour of a run's machine, the state of that price, and where it comes from."""

    dollars: float
    state: State
    source: str


@dataclass(frozen=True, slots=True)
class RequestPrice:
    """Dollars of one request of a run, and the arithmetic behind it."""

    dollars: float
    dollars_per_million_output_tokens: float | None
    state: State
    formula: str


def machine_hour(run: Run, given: float | None = None) -> MachineHour | None:
    """The price of an hour: ``given``, else that of the configuration, else assumed for accelerators that are known."""
    stated = given if given is not None else run.config.get("dollars_per_hour")
    if is_number(stated):
        return MachineHour(float(stated), "given", "dollars_per_hour")
    count, name = run_accelerators(run), accelerator_name(run)
    if not count or accelerator_facts(name) is None or not run.result.get("output_tokens_per_second"):
        return None
    assumptions = load_assumptions().priced_for(name)
    throughput = from_runs([run], assumptions)
    hour = accelerator_hour(System(throughput, power_of(throughput, energy_of([run]))), assumptions)
    if hour is None:
        return None
    dollars, state, _ = hour
    source = f"{count} x ${significant(dollars)} an hour of {name}, as in megatoken plan cost"
    return MachineHour(dollars * count, state, source)


def request_price(run: Run, given: float | None = None) -> RequestPrice | None:
    """What one request of the run costs on the busy machine; None where the price or the rate is unknown."""
    hour, rates = machine_hour(run, given), leading_rates(run.result)
    rate, tokens = rates["samples_per_second"], rates["output_tokens_per_second"]
    if hour is None or not rate:
        return None
    return RequestPrice(
        dollars_each(hour.dollars, rate),
        1e6 * dollars_each(hour.dollars, tokens) if tokens else None,
        hour.state,
        f"${precise(hour.dollars)} an hour ({hour.state}: {hour.source}) / (3,600 s x {precise(rate)} requests/s)",
    )


def judge_run(run: Run, asked: Mapping[str, Any] | None = None) -> list[Judged]:
    """Whether a run meets the limits of ``asked``, a configuration; by default those that it was run with."""
    limits = asked_limits(run.config if asked is None else asked)
    needs_price = any(limit.key == DOLLARS for limit in limits)
    hour = machine_hour(run, (asked or {}).get("dollars_per_hour")) if needs_price else None
    return judge_limits(run, limits, hour.dollars if hour else None)


def check_runs(runs: Sequence[Run | Unreadable], asked: Mapping[str, Any]) -> dict[str, Any]:
    """The document of ``megatoken check``: every limit of every run; without ``asked`` limits, each run's own.

    A run folder that cannot be read has ``unreadable``, a line that says why, and the answer CANNOT TELL.

    Raises:
        UsageError: there is no limit to judge by.
    """
    rows = [_checked_run(run, asked) for run in runs]
    if not any(row["limits"] for row in rows):
        raise UsageError(NO_LIMITS)
    answer = overall(row["answer"] for row in rows)
    return new_document("check", title="Limits", inputs=[run.path for run in runs], notes=[], answer=answer, runs=rows)


def _checked_run(run: Run | Unreadable, asked: Mapping[str, Any]) -> dict[str, Any]:
    row: dict[str, Any] = {"run": run.path.name, "verdict": None, "answer": Answer.CANNOT_TELL, "limits": []}
    if isinstance(run, Unreadable):
        return {**row, "unreadable": run.why}
    own = not asked_limits(asked)
    answers = judge_run(run, {**run.config, **_price_of(asked)} if own else asked)
    found = {"verdict": run.verdict, "answer": answer_for(run.verdict, answers), "limits": limit_documents(answers)}
    return {**row, **found, "reasons": run.reasons}


def broken_limits(path: Path) -> bool:
    """Whether the runs of a command in the folder ``path`` break their own limits: any, or in a sweep every load.

    A load breaks them if one of its repeats does, as on the page of the sweep.
    """
    broken: dict[float | None, bool] = {}
    for run in read_runs(path):
        if asked_limits(run.config):
            load = (run.result.get("load") or {}).get("value")
            breaks = overall(one.answer for one in judge_run(run)) is Answer.NOT_MET
            broken[load] = broken.get(load, False) or breaks
    return bool(broken) and all(broken.values())


def exit_code_of(answer: str | None) -> ExitCode:
    """INVALID (3) where a run does not stand or a limit is broken, DEGRADED (4) where a limit cannot be judged."""
    codes = {
        Answer.DOES_NOT_STAND: ExitCode.INVALID,
        Answer.NOT_MET: ExitCode.INVALID,
        Answer.CANNOT_TELL: ExitCode.DEGRADED,
    }
    return codes[Answer(answer)] if answer in codes else ExitCode.OK


def judged_entry(entry: Entry, asked: Mapping[str, Any] | None) -> Entry:
    """An entry of a comparison with the limits of its runs in one phrase: those ``asked``, else their own."""
    runs = [read_run(Path(path)) for path in entry.paths if (Path(path) / RESULT).is_file()]
    brief = in_brief([one for run in runs for one in judge_run(run, asked)])
    if brief is not None and any(not run.verdict.stands for run in runs):
        brief = f"{Answer.DOES_NOT_STAND}; its limits alone: {brief}"
    return replace(entry, limits=brief)


def _price_of(asked: Mapping[str, Any]) -> dict[str, Any]:
    price = asked.get("dollars_per_hour")
    return {} if price is None else {"dollars_per_hour": price}
