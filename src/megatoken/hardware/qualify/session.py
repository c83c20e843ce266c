"""A qualification: its tests one after the other, what each returned, the verdicts, and the answer."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Self

from megatoken.engine.gpus import gpus
from megatoken.errors import ExitCode
from megatoken.files import new_document
from megatoken.hardware.inventory import take_inventory
from megatoken.hardware.qualify.catalog import FULL_LIMIT_FACTOR, Device, HardwareTest, visible_names
from megatoken.hardware.qualify.document import KIND, SCHEMA_VERSION
from megatoken.hardware.qualify.gpu_errors import ErrorWatch
from megatoken.hardware.qualify.judge import (
    Earlier,
    Verdict,
    answer,
    is_noisy,
    judge,
    overall,
    spread_between_runs,
    tolerance,
    verdict_of_test,
)
from megatoken.hardware.qualify.processes import Ended, Returned, RunningTest
from megatoken.hardware.qualify.references import (
    CORE_SHARE,
    band,
    read_baseline,
    taken_share,
)
from megatoken.hardware.qualify.values import SPEEDS, Setting, Value
from megatoken.hardware.specification import part_name
from megatoken.text import count_of

ERRORS = HardwareTest("errors", "Errors that the GPU counted", "")
ERRORS_OF_ALL = HardwareTest("errors_of_all", "Errors that the GPUs counted", "", whole=True)
CAPPED_SHARE = 0.98
SHARED_HOST = (
    f"This is a virtual machine, and others on its host may take up to {CORE_SHARE:.0%} of the speed of its cores, "
    "memory and disk: these fail only if they are slower than that explains."
)
CONFIRMATIONS = 4
"""Further runs, of all tests together, before a slow processor fails: some 10 s of the quick set, and only then."""


def qualify(
    tests: Sequence[HardwareTest],  # see ``choose``
    setting: Setting,  # one of ``SETTINGS`` or another
    device: Device,  # which form of the tests
    *,
    full: bool = False,  # whether tests may take the time of the full set
    baseline: Path | None = None,  # ``qualify.json`` of an earlier qualification of this machine
    gpu: str | None = None,  # the only one to test, as CUDA_VISIBLE_DEVICES names it; None: the first
    suffix: str = "",  # of this part's names in ``baseline``
    progress: Callable[[int, int], None] | None = None,  # called with the number of tests that have ended, and of all
) -> Iterator[dict[str, Any]]:
    """Run tests and yield the document after each of them, the last one complete.

    Some tests run a second time after the others, so that a drift of the machine shows in their windows. Then so does a
    test that failed only because it was slow. If its two runs differ, its values are noisy, and these fail only if they
    are far behind in every window.

    What is slow in both may still be the work of another machine on the same host, which the system does not show, but
    which comes and goes. A test of a processor therefore runs again at the end, and fails only if it is slow each time.

    Raises:
        UsageError: ``baseline`` cannot be used.
    """
    machine = take_inventory()
    tested = chosen_gpu(machine["gpus"], gpu) if device == "gpu" else None
    part = part_of(machine, device, tested)
    capped = power_cap(part, tested)
    earlier = {} if baseline is None else read_baseline(baseline, part)
    if suffix:
        earlier = {
            (name[: -len(suffix)], title, unit): one
            for (name, title, unit), one in earlier.items()
            if name.endswith(suffix)
        }
    shared_by = device if machine["cpu"]["virtual"] else None
    remarks = [capped] if capped else []
    if shared_by and baseline is not None:
        remarks.append(SHARED_HOST)
    began = time.monotonic()
    measured: dict[str, float] = {}
    errors = ERRORS_OF_ALL if all(test.whole for test in tests) else ERRORS
    together = any(test.whole for test in tests)
    watched = visible_gpus(machine["gpus"]) if device == "gpu" and together else [tested] if tested else []
    watch = ErrorWatch([str(one["uuid"]) for one in watched])
    document: dict[str, Any] = new_document(
        KIND,
        SCHEMA_VERSION,
        title=f"Qualification of {part}",
        inputs=[] if baseline is None else [str(baseline)],
        set="full" if full else "quick",
        device=part,
        machine=machine,
    )
    runs: list[list[Ended]] = [[] for _ in tests]

    def start(index: int) -> RunningTest:
        limit = tests[index].limit_seconds * (FULL_LIMIT_FACTOR if full else 1)
        shown = None if tests[index].whole else gpu
        return RunningTest(tests[index], replace(setting, measured=dict(measured)), limit, shown)

    first_round = True
    with _Turns(tests, start) as turns:
        while turns.left:
            if progress:
                progress(sum(map(len, runs)), sum(map(len, runs)) + turns.left)
            index, ended = turns.next()
            watch.look(" and ".join(tests[number].title for number in (index, *turns.idling)))
            runs[index].append(ended)
            outcomes = [one.outcome for one in merged(runs[index])]
            measured |= {one.name: one.median for one in outcomes if isinstance(one, Value) and one.windows}
            ran = [(test, of_test) for test, of_test in zip(tests, runs, strict=True) if of_test]
            repeated = (one.outcome for test, of_test in ran if test.twice and of_test[1:] for one in merged(of_test))
            between_runs = spread_between_runs(one for one in repeated if isinstance(one, Value))
            results = [
                entry_of_test(test, of_test, "" if capped else part, earlier, between_runs, shared_by)
                for test, of_test in ran
            ]
            if not turns.left and first_round:
                turns.add(index for index, test in enumerate(tests) if test.twice)
                first_round = False
            if not turns.left:
                slow = [index for index, result in enumerate(results) if _is_slow(result)]
                once = [index for index in slow if len(runs[index]) == 1]
                if once:
                    turns.add(once)
                elif slow and device == "cpu" and sum(len(of_test[2:]) for of_test in runs) < CONFIRMATIONS:
                    turns.add([min(slow, key=lambda index: len(runs[index]))])
            if (counted := watch.ended()).returned:
                results.append(entry_of_test(errors, [counted], "", {}, 0.0))
            notes = list(remarks)
            compared = any(value.get("baseline") is not None for result in results for value in result["values"])
            if baseline is not None and not turns.left and not compared:
                notes.append(f"No value is in the baseline {baseline} under the same name, title and unit.")
            document = document | {
                "notes": notes,
                "complete": not turns.left,
                "seconds": time.monotonic() - began,
                "verdict": overall(results),
                "tests": results,
            }
            yield document | {"answer": answer(document)}


class _Turns:
    """The tests that are still to end, by number; one runs at a time, and while one idles, those of the host."""

    def __init__(self, tests: Sequence[HardwareTest], start: Callable[[int], RunningTest]) -> None:
        self._tests, self._start = tests, start
        self._queue = deque(range(len(tests)))
        self._idle: tuple[int, RunningTest] | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        """A qualification that is given up must not leave a process that holds a GPU's memory."""
        if self._idle is not None:
            self._idle[1].stop()

    @property
    def left(self) -> int:
        """How many."""
        return len(self._queue) + (self._idle is not None)

    def add(self, numbers: Iterable[int]) -> None:
        """Let tests run after the others."""
        self._queue.extend(numbers)

    @property
    def idling(self) -> Sequence[int]:
        """The test that waits meanwhile, if one does."""
        return [] if self._idle is None else [self._idle[0]]

    def next(self) -> tuple[int, Ended]:
        """Wait for the next end of a test."""
        while True:
            if self._idle and not (self._queue and self._tests[self._queue[0]].of_host):
                (number, running), self._idle = self._idle, None
                return number, running.ended()
            number = self._queue.popleft()
            running = self._start(number)
            if not self._tests[number].idles:
                return number, running.ended()
            self._idle = number, running


def exit_code(document: dict[str, Any]) -> ExitCode:
    """0 if nothing failed; 3 if a value failed; 4 if a test did not run, or not to its end."""
    verdicts = [test.get("verdict") for test in document["tests"]]
    if Verdict.FAIL in verdicts:
        return ExitCode.INVALID
    return ExitCode.DEGRADED if Verdict.NOT_RUN in verdicts or not document.get("complete") else ExitCode.OK


def chosen_gpu(found: Sequence[dict[str, Any]], gpu: str | None) -> dict[str, Any] | None:
    """The one of the machine's GPUs that CUDA_VISIBLE_DEVICES names so; None: the first visible. None if none fits."""
    if gpu is None:
        return next(iter(visible_gpus(found)), None)
    return next((one for one in found if gpu == str(one["index"]) or str(one["uuid"]).startswith(gpu or "-")), None)


def visible_gpus(found: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Those of the machine's GPUs that CUDA_VISIBLE_DEVICES names, in its order; all without it."""
    if (names := visible_names()) is None:
        return list(found)
    return [one for name in names if (one := chosen_gpu(found, name)) is not None]


def part_of(machine: dict[str, Any], device: Device, tested: dict[str, Any] | None) -> str:
    """The name that references are found by: of the GPU as in gpu_specs.csv if it is there, else the processor's."""
    if device == "cpu":
        return f"{machine['cpu']['model'] or machine['machine']}, {count_of(machine['cpu']['usable_cores'], 'core')}"
    names = [tested["name"]] if tested else _driver_names()
    return part_name(names[0]) if names and names[0] else "an unknown GPU"


def power_cap(part: str, tested: dict[str, Any] | None) -> str | None:
    """Why published values do not apply: the GPU's power limit is below that of its data sheet. None if it is not."""
    sheet = gpus().get(part)
    limit = tested["power_limit_watts"] if tested else None
    if sheet is None or limit is None or limit >= CAPPED_SHARE * sheet.power_limit_watts:
        return None
    return (
        f"The power limit is {limit:.0f} W, below the {sheet.power_limit_watts:.0f} W of the data sheet, so published "
        "values do not apply. That is a setting, not a fault."
    )


def _driver_names() -> list[str]:
    """Names of the GPUs by the driver's files, for machines without nvidia-ml-py."""
    return [
        line.partition(":")[2].strip()
        for file in sorted(Path("/proc/driver/nvidia/gpus").glob("*/information"))
        for line in file.read_text().splitlines()
        if line.startswith("Model:")
    ]


def entry_of_test(
    test: HardwareTest,
    runs: Sequence[Ended],
    part: str,  # finds published values
    earlier: dict[tuple[str, str, str], Earlier],
    between_runs: float,  # see ``tolerance``
    shared_by: Device | None = None,  # see ``taken_share``
) -> dict[str, Any]:
    """A test in the document: the values of all its runs with their verdicts."""
    values = [_value_entry(one, part, earlier, between_runs, shared_by) for one in merged(runs)]
    fault = next((run.fault for run in runs if run.fault is not None), None)
    if fault is None and not values:
        fault = "returned no value"
    return {
        "name": test.name,
        "title": test.title,
        "verdict": verdict_of_test({"name": test.name, "fault": fault, "values": values}),
        "fault": fault,
        "seconds": sum(run.seconds for run in runs),
        "runs": len(runs),
        "values": values,
    }


def merged(runs: Sequence[Ended]) -> list[Returned]:
    """What all runs of a test returned: each value with the windows of all, and the longest wait for cores."""
    found: dict[str, Returned] = {}
    for one in (one for run in runs for one in run.returned):
        before = found.get(one.outcome.name)
        if before is not None and isinstance(before.outcome, Value) and isinstance(one.outcome, Value):
            windows = [*before.outcome.windows, *one.outcome.windows]
            medians = [*(before.outcome.run_medians or [before.outcome.median]), one.outcome.median]
            waits = [wait for wait in (before.core_wait_share, one.core_wait_share) if wait is not None]
            value = replace(one.outcome, windows=windows, run_medians=medians)
            one = Returned(value, max(waits, default=None))
        found[one.outcome.name] = one
    return list(found.values())


def _is_slow(result: dict[str, Any]) -> bool:
    """Whether values fail although nothing crashed and no result is wrong."""
    failed = [value["better"] for value in result["values"] if value["verdict"] is Verdict.FAIL]
    return result["fault"] is None and bool(failed) and "zero" not in failed


def _value_entry(
    one: Returned,
    part: str,
    earlier: dict[tuple[str, str, str], Earlier],
    between_runs: float,
    shared_by: Device | None,
) -> dict[str, Any]:
    outcome = one.outcome
    entry: dict[str, Any] = {"name": outcome.name, "title": outcome.title}
    if not isinstance(outcome, Value):
        not_run = judge(outcome, None, None, noisy=False)
        return entry | {"verdict": not_run.verdict, "reason": not_run.reason}
    published = band(part, outcome.name, outcome.unit)
    before = earlier.get((outcome.name, outcome.title, outcome.unit))
    noisy = is_noisy(outcome, one.core_wait_share, published, before, between_runs)
    taken = taken_share(shared_by, outcome.name)
    judged = judge(
        outcome,
        published,
        before,
        noisy=noisy,
        between_runs=between_runs,
        core_wait_share=one.core_wait_share,
        taken_share=taken,
    )
    allowed = None
    if before and not before.waited and outcome.windows and outcome.better in SPEEDS:
        allowed = tolerance(outcome, before, between_runs)
    bound = outcome.bound
    return entry | {
        "unit": outcome.unit,
        "better": outcome.better,
        "median": outcome.median if outcome.windows else None,
        "spread": outcome.spread if outcome.windows else None,
        "drift": outcome.drift if outcome.windows else None,
        "windows": list(outcome.windows),
        "core_wait_share": one.core_wait_share,
        "taken_share": taken,
        "noisy": noisy,
        "bound": bound and {"value": bound.value, "formula": bound.formula, "certain": bound.certain},
        "share": outcome.share if outcome.windows else None,
        "band": published and {"lowest": published.lowest, "highest": published.highest, "sources": published.sources},
        "baseline": before and before.median,
        "baseline_noisy": before and before.noisy,
        "difference": outcome.median / before.median - 1 if before and before.median and outcome.windows else None,
        "tolerance": allowed,
        "precision": outcome.precision,
        "note": outcome.note,
        "verdict": judged.verdict,
        "reason": judged.reason,
    }
