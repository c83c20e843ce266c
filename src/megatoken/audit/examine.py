"""One run: read its logs, reduce them to figures, check them. Runs alone in a worker process, and never raises."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

from megatoken.audit.checks.accuracy import check_accuracy, check_test06
from megatoken.audit.checks.build import check_build
from megatoken.audit.checks.lines import check_lines
from megatoken.audit.checks.results import check_results
from megatoken.audit.checks.rules import check_rules
from megatoken.audit.checks.settings import check_settings
from megatoken.audit.checks.summary import check_summary
from megatoken.audit.checks.user_conf import check_user_conf
from megatoken.audit.evidence import Role, Run, Where
from megatoken.audit.finding import Observation, Severity, shown
from megatoken.audit.view import RunFiles, RunView, observe
from megatoken.files import UnreadableError, display, read_text
from megatoken.mlperf.accuracy_log import AccuracyLog, read_accuracy_log
from megatoken.mlperf.benchmarks import benchmark_of
from megatoken.mlperf.detail_log import ABANDONED, LIBRARY_SET, DetailLog, read_detail_log
from megatoken.mlperf.run_figures import RunFigures, run_figures, samples_answers
from megatoken.mlperf.summary_log import read_summary_log

BEGINNINGS = ("qsl_name", "effective_scenario", LIBRARY_SET, "generated_query_count")
CHECKS = (
    check_lines,
    check_build,
    check_settings,
    check_results,
    check_summary,
    check_rules,
    check_accuracy,
    check_user_conf,
)


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


@dataclass(frozen=True, slots=True)
class Examined:
    """A run and what its checks observed."""

    run: Run
    observations: tuple[Observation, ...]


def examine(job: Job) -> Examined:
    """Reads and checks one run. A defect of this program becomes a finding, so that the rest is still audited."""
    try:
        return _examine(job)
    except Exception as error:
        return Examined(blank_run(job), (not_examined(display(job.files.folder), error),))


def not_examined(place: str, cause: Exception | str) -> Observation:
    """That something could not be checked, which is neither for nor against it."""
    found = shown(cause if isinstance(cause, str) else f"{type(cause).__name__}: {cause}")
    return Observation("log.examined", Severity.UNKNOWN, "a run that can be checked", found, (Where(place),))


def blank_run(job: Job) -> Run:
    """The run of a job of which nothing could be read."""
    return _run(_displayed(job.files), job, RunFigures(), None, None)


def _examine(job: Job) -> Examined:
    root = Path(job.root)
    shown_files = _displayed(job.files)
    observations: list[Observation] = []
    detail = summary = accuracy = None
    try:
        if job.files.detail is not None:
            detail = read_detail_log(root / job.files.detail)
    except UnreadableError as error:
        observations.append(_unreadable(shown_files.detail, error))
    try:
        if job.files.summary is not None:
            summary = read_summary_log(root / job.files.summary)
    except UnreadableError as error:
        observations.append(_unreadable(shown_files.summary, error))
    try:
        if job.files.accuracy is not None:
            accuracy = read_accuracy_log(root / job.files.accuracy)
    except UnreadableError as error:
        observations.append(_unreadable(shown_files.accuracy, error))
    observations += _presence(job, shown_files)
    observations += _abandoned(job, shown_files)
    if detail is None:
        if accuracy is not None and shown_files.accuracy is not None and "TEST06" in shown_files.folder.split("/"):
            benchmark = benchmark_of(job.files.benchmark, None, job.round) if job.files.benchmark else None
            observations += check_test06(accuracy, shown_files.accuracy, job.files.scenario, benchmark, job.round)
        return Examined(_run(shown_files, job, RunFigures(), None, accuracy), tuple(observations))
    figures = run_figures(detail)
    role = job.files.role
    if role is Role.PERFORMANCE and figures.mode == "AccuracyOnly":
        role = Role.ACCURACY
    if role is Role.PERFORMANCE and job.files.division is None and samples_answers(detail):
        role = Role.COMPLIANCE  # where no folder says what the run is
    shown_files = replace(shown_files, role=role)
    benchmark = benchmark_of(job.files.benchmark, figures.data_set_rows, job.round)
    view = RunView(
        files=shown_files,
        detail=detail,
        summary=summary,
        accuracy=accuracy,
        figures=figures,
        benchmark=benchmark,
        round=job.round,
        rules_claimed=job.rules_claimed,
        user_conf=_user_conf(root, job.user_conf),
        interrupted=job.interrupted,
    )
    for check in CHECKS:
        try:
            observations += check(view)
        except Exception as error:
            observations.append(not_examined(view.detail_path, error))
    run = _run(shown_files, job, figures, detail, accuracy)
    if run.benchmark is None and benchmark is not None:
        run = replace(run, benchmark=benchmark.name)
    return Examined(run, tuple(observations))


def _user_conf(root: Path, path: str | None) -> tuple[str, str] | None:
    try:
        return None if path is None else (display(path), read_text(root / path)[0])
    except UnreadableError:
        return None


def _presence(job: Job, files: RunFiles) -> list[Observation]:
    """A detail log is the result; a summary without one proves nothing. Compliance tests may keep answers only."""
    if files.role is Role.COMPLIANCE:
        return []
    missing = [name for name, path in (("detail log", files.detail), ("summary", files.summary)) if path is None]
    return [
        observe(
            "log.present",
            not missing,
            "a detail log and a summary",
            f"no {' and no '.join(missing)}" if missing else "both",
            (Where(files.folder),),
            Severity.UNKNOWN if job.interrupted else Severity.FAIL if job.rules_claimed else Severity.WARN,
        )
    ]


def _abandoned(job: Job, files: RunFiles) -> list[Observation]:
    if ABANDONED not in files.others:
        return []
    found = f"{ABANDONED}: the run was interrupted before all its samples were answered"
    where = (Where(f"{files.folder}/{ABANDONED}".lstrip("/")),)
    severity = Severity.UNKNOWN if job.interrupted else Severity.FAIL
    return [observe("log.abandoned", False, "a run that came to its end", found, where, severity)]


def _unreadable(path: str | None, error: UnreadableError) -> Observation:
    return observe("log.readable", False, "a file of LoadGen's", str(error), (Where(path or ""),))


def _displayed(files: RunFiles) -> RunFiles:
    def printable(path: str | None) -> str | None:
        return None if path is None else display(path)

    return replace(
        files,
        folder=display(files.folder),
        detail=printable(files.detail),
        summary=printable(files.summary),
        accuracy=printable(files.accuracy),
        node=display(files.node),
        benchmark=printable(files.benchmark),
        system=printable(files.system),
        submitter=printable(files.submitter),
    )


def _beginnings(log: DetailLog) -> tuple[float, ...]:
    times = tuple(log.first[key].time_ms for key in BEGINNINGS if key in log.first)
    return times if len(times) == len(BEGINNINGS) else ()


def _run(
    files: RunFiles,
    job: Job,
    figures: RunFigures,
    detail: DetailLog | None,
    accuracy: AccuracyLog | None,
) -> Run:
    return Run(
        path=files.folder,
        role=files.role,
        node=files.node,
        benchmark=files.benchmark,
        folder_scenario=files.scenario,
        division=files.division,
        submitter=files.submitter,
        system=job.system,
        figures=figures,
        detail=files.detail,
        summary=files.summary,
        accuracy=files.accuracy,
        accuracy_records=accuracy.records if accuracy else None,
        source_lines={key: entry.line for key, entry in detail.first.items()} if detail else {},
        beginnings=_beginnings(detail) if detail else (),
        accuracy_sha256=accuracy.sha256 if accuracy and not accuracy.truncated else None,
        accuracy_bytes=int(accuracy.data_bytes.sum()) if accuracy and not accuracy.truncated else None,
    )
