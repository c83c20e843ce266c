"""Documents of results, as all commands that make one print and save them; and how far they are meanwhile."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer

from megatoken.cli.streams import standard_output

Json = Annotated[bool, typer.Option("--json", help="Print one JSON document and nothing else.")]
Out = Annotated[Path | None, typer.Option(metavar="DIR", help="Folder that receives the document and its page.")]


def deliver(document: Mapping[str, Any], *, json_only: bool, out: Path | None) -> None:
    """Saves a document and its page in ``out``, where given, and prints it."""
    from megatoken.files import plain
    from megatoken.report import save_document, show

    saved = save_document(document, out) if out is not None else ()
    with standard_output(f"the result is in {out}" if saved else ""):
        if json_only:
            print(json.dumps(plain(document), indent=2, allow_nan=False))
        else:
            show(document)
            for path in saved:
                print(f"Saved: {path}")


@contextmanager
def counted(description: str, before: str = "") -> Iterator[Callable[[int, int], None] | None]:
    """A bar on standard error, if that is a terminal, moved by (done, of how many; 0: not known yet).

    Args:
        description: what is counted.
        before: what is done until it is known how many.
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
