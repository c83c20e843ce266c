"""``megatoken report``."""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from threading import Thread
from typing import TYPE_CHECKING, Annotated, TypeVar

import typer

from megatoken.cli.flags import flag, place
from megatoken.cli.streams import complain, complain_of, standard_output
from megatoken.errors import ExitCode, UsageError

if TYPE_CHECKING:
    from megatoken.runs.run import Run

_Answer = TypeVar("_Answer")


def report(
    paths: Annotated[list[Path], place("PATH", "Run folders, folders of run folders, saved result documents.")],
    out: Annotated[Path | None, flag("FILE.html", "Write the page to this file, not next to PATH.")] = None,
    baseline: Annotated[
        Path | None, flag("RUN", "Check the latest run of each group against this run or folder of repeats.")
    ] = None,
    sql: Annotated[
        str | None, flag("SQL", "Run a SELECT over the run folders and print the result.", "--query")
    ] = None,
    csv: Annotated[
        bool, typer.Option("--csv", help="Print a line for each run, or the result of --query, as CSV.")
    ] = False,
    json_only: Annotated[bool, typer.Option("--json", help="Print the result of --query as JSON.")] = False,
    matrix: Annotated[bool, typer.Option("--matrix", help="Print what ran where: models by targets.")] = False,
) -> int:
    """Rebuild reports, list runs as CSV, or query them with SQL.

    With --baseline, exit code 3 if a run is worse than the baseline.
    """
    if baseline is not None and (csv or matrix or sql is not None):
        raise UsageError("--baseline: give no --csv, no --matrix and no --query")
    if sql is not None:
        if out is not None or matrix or (csv and json_only):
            raise UsageError("--query: give at most one of --csv and --json, no --out and no --matrix")
        _answer(paths, sql, csv=csv, json_only=json_only)
        return ExitCode.OK
    if json_only:
        raise UsageError("--json needs --query SQL")
    if matrix:
        if csv:
            raise UsageError("--matrix: give no --csv")
        return _show_matrix(paths, out)
    if csv:
        if out is not None:
            raise UsageError("--csv prints on standard output; give no --out")
        return _print_runs(paths)
    if out is not None and len(paths) > 1:
        raise UsageError("--out names one page; give only one PATH")

    from megatoken.analysis.lookup import run_folders
    from megatoken.analysis.repeats import read_repeats_in
    from megatoken.report import write_reports

    chosen = read_repeats_in(baseline) if baseline is not None else []
    damaged: list[str] = []
    for path in paths:
        of_path: list[str] = []
        try:
            for page in write_reports(path, out, baseline=chosen, damaged=of_path):
                with standard_output(f"the page is {page}"):
                    print(page)
        except UsageError as error:
            if len(paths) == 1 or not run_folders(path):
                raise
            of_path.append(str(error))
        damaged += of_path
    if chosen:
        return _check(paths, chosen)
    return complain_of(damaged)


def _check(paths: list[Path], baseline: list[Run]) -> int:
    """Print how the latest runs compare with the baseline; the exit code says whether one is worse."""
    from megatoken.analysis.history import WORSE, history
    from megatoken.report import check_lines

    runs, damaged = _readable(paths)
    found = history(runs, "", baseline)
    with standard_output():
        for line in check_lines(found):
            print(line)
    worse = any(check.outcome == WORSE for group in found.groups for check in group.checks)
    return complain_of(damaged) or (ExitCode.INVALID if worse else ExitCode.OK)


def _readable(paths: list[Path]) -> tuple[list[Run], list[str]]:
    """The runs, and a line for each folder that cannot be read while others can."""
    from megatoken.analysis.lookup import Unreadable, read_each

    found = read_each(paths)
    damaged = [one.why for one in found if isinstance(one, Unreadable)]
    return [one for one in found if not isinstance(one, Unreadable)], damaged


def _show_matrix(paths: list[Path], out: Path | None) -> ExitCode:
    from megatoken.analysis.history import matrix as made
    from megatoken.report import write_view
    from megatoken.report.console import show_table
    from megatoken.report.views.matrix import matrix_table, matrix_view

    runs, damaged = _readable(paths)
    found = made(runs)
    if out is not None:
        write_view(out, matrix_view(found, ", ".join(path.resolve().name for path in paths)))
    with standard_output():
        show_table(matrix_table(found))
        if out is not None:
            print(out)
    return complain_of(damaged)


def _print_runs(paths: list[Path]) -> ExitCode:
    from megatoken.analysis.history import entry_of
    from megatoken.report import history_csv

    runs, damaged = _readable(paths)
    with standard_output():
        print(history_csv(map(entry_of, runs)), end="")
    return complain_of(damaged)


def _answer(paths: list[Path], sql: str, *, csv: bool, json_only: bool) -> None:
    from megatoken.analysis.query import query
    from megatoken.report import answer_csv, answer_json, answer_table
    from megatoken.report.console import show_table

    answer = _interruptible(lambda: query(paths, sql))
    with standard_output():
        if csv:
            print(answer_csv(answer), end="")
        elif json_only:
            print(answer_json(answer), end="")
        else:
            show_table(answer_table(answer))


def _interruptible(work: Callable[[], _Answer]) -> _Answer:
    """Return the result of ``work``, run in a thread, so that a signal can end the process during a long query.

    It ends at once: at a normal exit the interpreter would tear the thread down and abort.
    """
    future: Future[_Answer] = Future()

    def run() -> None:
        try:
            future.set_result(work())
        except BaseException as error:  # passed on to the main thread
            future.set_exception(error)

    Thread(target=run, daemon=True).start()
    try:
        return future.result()
    except KeyboardInterrupt:
        os._exit(complain("interrupted; nothing was written", ExitCode.INTERRUPTED))
