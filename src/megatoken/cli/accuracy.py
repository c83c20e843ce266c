"""``megatoken accuracy``."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from megatoken.cli.output import Json
from megatoken.cli.streams import standard_output
from megatoken.files import plain

if TYPE_CHECKING:
    from megatoken.accuracy.judge import Judged


def accuracy(
    path: Annotated[
        Path, typer.Argument(metavar="PATH", help="Run folder, or LoadGen accuracy log, or the folder of that log.")
    ],
    references: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Data set with the expected answers. Default: the prompts of the run."),
    ] = None,
    model: Annotated[
        str | None,
        typer.Option(metavar="DIR", help="Model that answered, for its tokenizer. Default: the model of the run."),
    ] = None,
    benchmark: Annotated[
        str | None,
        typer.Option(
            metavar="NAME", help="Compare with the targets of an MLPerf benchmark, for example llama2-70b-99.9."
        ),
    ] = None,
    baseline: Annotated[
        Path | None,
        typer.Option(metavar="PATH", help="Compare with another evaluation: its accuracy.json or run folder."),
    ] = None,
    share: Annotated[
        float,
        typer.Option(
            metavar="SHARE", min=0.0, max=1.0, help="Share of each metric of --baseline that must be reached."
        ),
    ] = 0.99,
    partial: Annotated[
        bool, typer.Option("--partial", help="Score the answered rows if some rows have no answer.")
    ] = False,
    json_only: Json = False,
) -> int:
    """Score the answers of an accuracy run. Uses the metrics of MLPerf; writes accuracy.txt and accuracy.json."""
    from megatoken.accuracy.judge import judge
    from megatoken.engine.config import model_folder

    with _progress() as progress:
        judged = judge(
            path,
            references=references,
            model=None if model is None else model_folder(model),
            benchmark=benchmark,
            baseline=baseline,
            share=share,
            partial=partial,
            progress=progress,
        )
    with standard_output(f"the result is in {judged.folder}"):
        if json_only:
            print(json.dumps(plain(judged.document), indent=2, allow_nan=False))
        else:
            _show(judged)
    return judged.verdict.exit_code


def _show(judged: Judged) -> None:
    from megatoken.report import show_table
    from megatoken.report.blocks import Column, Table

    document = judged.document
    names = list(document["metrics"])
    groups = {"all": document["metrics"], **document["by_task"]}
    rows = [(group, *(_cell(metrics.get(name)) for name in names)) for group, metrics in groups.items()]
    columns = (Column("Answers"), *(Column(name, numeric=True) for name in names))
    show_table(Table("", columns, tuple(rows), note="value ± standard error"))
    print(f"Tokens per sample: {document['tokens_per_sample']:,}")
    if document["gen_len"] is not None:
        print(f"Characters (gen_len): {document['gen_len']:,}")
    meaning = {
        "VALID": "all targets reached",
        "INVALID": "some targets missed",
        "MEASURED": "no targets given; give them with --benchmark or --baseline",
    }
    targets = document["targets"]
    print(f"{judged.verdict}: {meaning[judged.verdict]}" + (f" ({targets['source']})" if targets else ""))
    for reason in document["reasons"]:
        print(f"  {reason['code']} {reason['message']}")
    for note in document["notes"]:
        print(f"Note: {note['message']}")
    print(f"Written: {judged.folder}/accuracy.txt, accuracy.json")


def _cell(metric: dict[str, float] | None) -> str:
    if metric is None:
        return "-"
    error = metric["standard_error"]  # not defined for one answer
    return f"{metric['value']:.4f} ± {'-' if math.isnan(error) else f'{error:.2f}'}"


@contextmanager
def _progress() -> Iterator[Callable[[int, int], None] | None]:
    """Show a progress bar on standard error if it is a terminal."""
    if not sys.stderr.isatty():
        yield None
        return
    from rich.console import Console
    from rich.progress import Progress

    with Progress(console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("scoring answers", total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)
