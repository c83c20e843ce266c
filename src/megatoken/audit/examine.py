"""One run: read its logs, reduce them to figures, check them; many runs in processes of their own."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import ModuleType
from typing import TypeVar

from megatoken.audit.checks import build, lines, results, rules, settings, summary
from megatoken.audit.checks.accuracy import check_accuracy, check_test06
from megatoken.audit.discovery import below
from megatoken.audit.evidence import Role, Run, places
from megatoken.audit.finding import Check, Observation, Outcome, Severity, check, outcome, shown
from megatoken.audit.view import RunFiles, RunView, run_of
from megatoken.files import UnreadableError, display, read_text
from megatoken.mlperf.accuracy_log import AccuracyLog, read_accuracy_log
from megatoken.mlperf.benchmarks import benchmark_of
from megatoken.mlperf.detail_log import ABANDONED, LIBRARY_SET, DetailLog, read_detail_log
from megatoken.mlperf.rounds import has_rules
from megatoken.mlperf.run_figures import RunFigures, run_figures, samples_answers
from megatoken.mlperf.summary_log import read_summary_log
from megatoken.processes import in_order, usable_cores

FEW_RUNS = 24
SMALL_BYTES = 64 * 2**20
BEGINNINGS = ("qsl_name", "effective_scenario", LIBRARY_SET, "generated_query_count")


def _checks_of(*modules: ModuleType) -> tuple[Callable[[RunView], Iterable[Observation]], ...]:
    return tuple(item for module in modules for item in vars(module).values() if isinstance(item, Check))


LINE_CHECKS = _checks_of(lines)  # of logs that have entries
RUN_CHECKS: tuple[Callable[[RunView], Iterable[Observation]], ...] = (
    *_checks_of(build, settings, results, summary, rules),
    check_accuracy,
)
Read = TypeVar("Read")
Progress = Callable[[int, int], None]  # runs done, of how many; 0: not known yet


@dataclass(frozen=True, slots=True)
class Job:
    """What a worker needs to examine one run."""

    root: str
    files: RunFiles
    system: str | None  # path of the description of its machine
    round: str | None
    rules_claimed: bool
    user_conf: str | None = None  # path of the one that speaks for it
    interrupted: bool = False  # its run folder says that the run did not come to its end
    samples_failed: bool = False  # and that samples ended with an error


@dataclass(frozen=True, slots=True)
class Examined:
    """A run and what its checks observed."""

    run: Run
    observations: tuple[Observation, ...]


def examine_all(
    jobs: Sequence[Job], progress: Progress | None = None, workers: int | None = None
) -> Iterator[Examined]:
    """Examines every job, in their order; by default with a process for each core that this one may use.

    Few or small runs are examined in this process, since to start others would take longer.
    """
    small = len(jobs) < FEW_RUNS and sum(job.files.size_bytes for job in jobs) < SMALL_BYTES
    finished = None if progress is None else lambda done: progress(done, len(jobs))
    return in_order(examine, jobs, 1 if small else workers or usable_cores(), _lost, finished)


def _lost(job: Job) -> Examined:
    cause = "the process that read it died; is there enough memory?"
    return Examined(blank_run(job), tuple(not_examined(display(job.files.folder), cause)))


def examine(job: Job) -> Examined:
    """Reads and checks one run. A defect of this program becomes a finding, so that the rest is still audited."""
    try:
        return _examine(job)
    except Exception as error:
        return Examined(blank_run(job), tuple(not_examined(display(job.files.folder), error)))


@check("log.examined", "The run could be examined", "A run that cannot be read can neither be trusted nor refuted.")
def not_examined(place: str, cause: Exception | str) -> Outcome:
    found = cause if isinstance(cause, str) else f"{type(cause).__name__}: {cause}"
    return outcome(None, "a run that can be checked", shown(found), places(place))


@check("log.present", "Detail log and summary exist", "The detail log is the result; the summary is for people.")
def _present(job: Job, files: RunFiles) -> Outcome | None:
    """Compliance tests may keep answers only."""
    if files.role is Role.COMPLIANCE:
        return None
    missing = [name for name, path in (("detail log", files.detail), ("summary", files.summary)) if path is None]
    found = f"no {' and no '.join(missing)}" if missing else "both"
    severity = Severity.UNKNOWN if job.interrupted else Severity.FAIL if job.rules_claimed else Severity.WARN
    return outcome(not missing, "a detail log and a summary", found, places(files.folder), severity)


@check("log.abandoned", "LoadGen's test was completed", "An interrupted test has no result.")
def _abandoned(job: Job, files: RunFiles) -> Outcome | None:
    if ABANDONED not in files.others:
        return None
    found = f"{ABANDONED}: the run was interrupted before all its samples were answered"
    severity = Severity.UNKNOWN if job.interrupted else Severity.FAIL
    return outcome(False, "a run that was completed", found, places(below(files.folder, ABANDONED)), severity)


def blank_run(job: Job) -> Run:
    """The run of a job of which nothing could be read."""
    return _run(job.files, job, RunFigures(), None, None)


def _examine(job: Job) -> Examined:
    root = Path(job.root)
    files = job.files.printable()
    observations: list[Observation] = []

    def read(reader: Callable[[Path], Read], path: str | None) -> Read | None:
        try:
            return None if path is None else reader(root / path)
        except UnreadableError as error:
            unreadable = outcome(False, "a file of LoadGen's", str(error), places(path or ""))
            observations.extend(lines.readable.observations(unreadable))
            return None

    detail, summary_log = read(read_detail_log, job.files.detail), read(read_summary_log, job.files.summary)
    accuracy = read(read_accuracy_log, job.files.accuracy)
    observations += [*_present(job, files), *_abandoned(job, files)]
    if detail is None:
        if accuracy is not None and files.accuracy is not None and "TEST06" in files.folder.split("/"):
            benchmark = benchmark_of(job.files.benchmark, None, job.round) if job.files.benchmark else None
            observations += check_test06(accuracy, files.accuracy, job.files.scenario, benchmark, job.round)
        return Examined(_run(files, job, RunFigures(), None, accuracy), tuple(observations))
    figures = run_figures(detail)
    if files.role is Role.PERFORMANCE and figures.mode == "AccuracyOnly":
        files = replace(files, role=Role.ACCURACY)
    if files.role is Role.PERFORMANCE and files.division is None and samples_answers(detail):
        files = replace(files, role=Role.COMPLIANCE)  # where no folder says what the run is
    ruled = has_rules(job.round or figures.round)
    benchmark = benchmark_of(job.files.benchmark, figures.data_set_rows, job.round) if ruled else None
    stated = (job.round, job.rules_claimed, _user_conf(root, job.user_conf), job.interrupted, job.samples_failed)
    view = RunView(files, detail, summary_log, accuracy, figures, benchmark, *stated)
    for run_check in (*(LINE_CHECKS if detail.first else (lines.readable,)), *RUN_CHECKS):
        try:
            observations += run_check(view)
        except Exception as error:
            observations += not_examined(view.detail_path, error)
    run = _run(files, job, figures, detail, accuracy)
    if run.benchmark is None and benchmark is not None:
        run = replace(run, benchmark=benchmark.name)
    return Examined(run, tuple(observations))


def _user_conf(root: Path, path: str | None) -> tuple[str, str] | None:
    try:
        return None if path is None else (display(path), read_text(root / path)[0])
    except UnreadableError:
        return None


def _run(files: RunFiles, job: Job, figures: RunFigures, detail: DetailLog | None, accuracy: AccuracyLog | None) -> Run:
    first = detail.first if detail else {}
    beginnings = tuple(first[key].time_ms for key in BEGINNINGS if key in first)
    known = accuracy if accuracy is not None and not accuracy.truncated else None
    return run_of(
        files,
        figures,
        job.system,
        accuracy_records=accuracy.records if accuracy else None,
        source_lines={key: entry.line for key, entry in first.items()},
        beginnings=beginnings if len(beginnings) == len(BEGINNINGS) else (),
        accuracy_sha256=known.sha256 if known else None,
        accuracy_bytes=int(known.data_bytes.sum()) if known else None,
    )
