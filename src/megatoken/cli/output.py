"""Print and save result documents; show progress."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer

from megatoken.cli.flags import flag
from megatoken.cli.streams import standard_output
from megatoken.errors import UsageError

FILE_ENDINGS = (".csv", ".html", ".json", ".jsonl", ".log", ".md", ".pdf", ".txt", ".yaml", ".yml")


def check_folder(out: Path | None, takes: str) -> Path | None:
    """Refuse the name of a file, which would become that of a folder. Raises UsageError."""
    if out is not None and out.suffix.lower() in FILE_ENDINGS and not out.is_dir():
        raise UsageError(f"--out {out}: expected {takes}; leave out {out.suffix}, or make a folder of that name first")
    return out


Json = Annotated[bool, typer.Option("--json", help="Print only a JSON document.")]
Out = Annotated[
    Path | None,
    flag(
        "DIR",
        "Folder to save the JSON document and its HTML page in.",
        callback=lambda out: check_folder(out, "a folder"),
    ),
]


def print_result(document: Mapping[str, Any], show: Callable[[], object], *, json_only: bool, kept: str = "") -> None:
    """Print ``document`` as JSON, or let ``show`` print it for a person; ``kept`` says where the result is stored."""
    from megatoken.files import plain

    with standard_output(kept):
        if json_only:
            print(json.dumps(plain(document), indent=2, allow_nan=False))
        else:
            show()


def deliver(document: Mapping[str, Any], *, json_only: bool, out: Path | None, full: bool = False) -> None:
    """Print a document, in brief unless ``full``; save it and its page in ``out`` if given."""
    from megatoken.report import save_document
    from megatoken.report.console import show

    saved = save_document(document, out) if out is not None else ()

    def show_all() -> None:
        show(document, full=full)
        for path in saved:
            print(f"Saved: {path}")

    print_result(document, show_all, json_only=json_only, kept=f"the result is in {out}" if saved else "")


@contextmanager
def counted(description: str, before: str = "") -> Iterator[Callable[[int, int], None] | None]:
    """Show a progress bar on standard error if it is a terminal; yields the function (done, total or 0) that moves it.

    Args:
        description: what is counted.
        before: description while the total is not known.
    """
    if not sys.stderr.isatty():
        yield None
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(before or description, total=None)

        def report(done: int, total: int) -> None:
            bar.update(task, completed=done, total=total or None, description=description if total else before)

        yield report
