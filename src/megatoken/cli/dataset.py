"""``megatoken dataset list|check|convert``."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from megatoken.cli.flags import Command
from megatoken.cli.output import Json
from megatoken.cli.streams import standard_output
from megatoken.errors import DatasetError, ExitCode

app = typer.Typer(rich_markup_mode=None, help="Data sets: what is known, what is there, whether it is whole.")

Folder = Annotated[
    Path, typer.Option("--folder", metavar="DIR", help="Where files of MLPerf's data sets are looked for.")
]


@app.callback(invoke_without_command=True)
def _dataset(ctx: typer.Context) -> None:
    if ctx.invoked_subcommand is None:
        with standard_output():
            print(ctx.get_help())


@app.command("list", cls=Command)
def list_data_sets(folder: Folder = Path("datasets"), json_only: Json = False) -> int:
    """List MLPerf's data sets and the workload profiles. Whether they are there and how to get them."""
    from megatoken.datasets.catalog import catalog
    from megatoken.planning import load_profiles
    from megatoken.report import show_table
    from megatoken.report.blocks import Column, Table

    data_sets = []
    for entry in catalog().values():
        place = folder / entry.file
        found = [path for path in (place, place.with_suffix(".parquet")) if path.exists()]
        data_sets.append(
            {
                **entry.model_dump(mode="json", exclude={"get"}),
                "how_to_get": entry.how_to_get(place),
                "found": [str(path) for path in found],
            }
        )
    profiles = [profile.to_document() for profile in load_profiles()]
    with standard_output():
        if json_only:
            print(json.dumps({"mlperf": data_sets, "profiles": profiles}, indent=2))
            return ExitCode.OK
        rows = tuple(
            (listed["name"], f"{listed['rows']:,}", listed["title"], ", ".join(listed["found"]) or "missing")
            for listed in data_sets
        )
        columns = (Column("MLPerf data set"), Column("Rows", numeric=True), Column("What"), Column("File"))
        show_table(Table("", columns, rows))
        for listed in data_sets:
            if not listed["found"]:
                print(f"{listed['name']}: {listed['how_to_get']}")
        print()
        profile_rows = tuple(
            (
                profile["name"],
                str(profile["turns"]),
                f"{profile['input_tokens'] + profile['context_tokens']:,}",
                f"{profile['output_tokens']:,}",
                profile["title"],
            )
            for profile in profiles
        )
        heads = (Column("Workload profile"), *(Column(name, numeric=True) for name in ("Turns", "In", "Out")))
        note = "Mean tokens of a turn; megatoken dataset convert PROFILE writes lengths for megatoken run --lengths."
        show_table(Table("", (*heads, Column("What")), profile_rows, note=note))
    return ExitCode.OK


@app.command(cls=Command)
def check(
    name: Annotated[str, typer.Argument(metavar="NAME|FILE", help="One of MLPerf's data sets, or a file.")],
    model: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Checkpoint whose tokenizer and context it must fit.")
    ] = None,
    folder: Folder = Path("datasets"),
    json_only: Json = False,
) -> int:
    """Read a data set whole and check it. Columns, rows, order, hash; token ids against a model's."""
    from megatoken.datasets.check import check as checked
    from megatoken.datasets.check import locate
    from megatoken.datasets.tables import SUFFIXES

    path = locate(name, folder)
    limits: dict[str, Any] = {}
    tokenizer = None
    if model is not None:
        from megatoken.engine.checkpoint import read_config
        from megatoken.engine.config import model_folder
        from megatoken.engine.tokenizer import Tokenizer

        model = model_folder(str(model))
        config = read_config(model)
        limits = {"vocabulary_size": config.vocabulary_size, "max_length": config.max_positions}
        tokenizer = Tokenizer(model / "tokenizer.json") if (model / "tokenizer.json").is_file() else None
    if path.suffix.lower() in SUFFIXES:
        table = checked(path, decode=tokenizer.decode if tokenizer else None, **limits)
        facts: dict[str, Any] = {
            "data_set": table.data_set.name,
            "sha256": table.content_hash,
            "notes": list(table.notes),
        }
        input_tokens = table.input_tokens
    else:
        from megatoken.datasets.lengths import load_lengths
        from megatoken.datasets.prompts import load_prompts

        if path.suffix.lower() == ".csv":
            requests = load_lengths(path, **(limits or {"vocabulary_size": 2**31 - 1, "max_length": 2**31 - 1}))
        elif not limits:
            raise DatasetError(f"{path}: prompts fit or do not fit a model; name one with --model DIR")
        else:
            requests = load_prompts(path, encode=tokenizer.encode if tokenizer else None, **limits)
        facts = {"sha256": requests.content_hash, "notes": list(requests.notes)}
        input_tokens = requests.input_tokens
    document = {
        "file": str(path),
        "rows": len(input_tokens),
        "input_tokens": {
            "mean": float(input_tokens.mean()),
            "min": int(input_tokens.min()),
            "max": int(input_tokens.max()),
        },
        **facts,
    }
    _print(document, json_only)
    return ExitCode.OK


@app.command(cls=Command)
def convert(
    name: Annotated[
        str, typer.Argument(metavar="NAME|FILE|PROFILE", help="A data set of MLPerf's, or a workload profile.")
    ],
    out: Annotated[Path | None, typer.Option(metavar="FILE", help="What to write; default beside the source.")] = None,
    rows: Annotated[int, typer.Option(metavar="N", min=1, max=10_000_000, help="Requests of a profile.")] = 4096,
    seed: Annotated[int, typer.Option(metavar="N", min=0, help="Of a profile's draws.")] = 0,
    folder: Folder = Path("datasets"),
    json_only: Json = False,
) -> int:
    """Convert a data set to parquet, or a profile to lengths. MLPerf's, once; lengths of a workload are CSV."""
    from megatoken.planning import load_profiles

    profile = next((profile for profile in load_profiles() if profile.name == name), None)
    if profile is not None:
        from megatoken.files import write_text
        from megatoken.planning.profile_lengths import check_replaceable, profile_csv

        target = out or Path(f"{name}.csv")
        check_replaceable(target)
        write_text(target, profile_csv(profile, rows, seed))
        _print({"file": str(target), "profile": name, "rows": rows, "seed": seed}, json_only)
        return ExitCode.OK

    from megatoken.datasets.check import locate
    from megatoken.datasets.convert import convert as converted

    source = locate(name, folder)
    result = converted(source, out or source.with_suffix(".parquet"))
    document = {
        "file": str(result.path),
        "data_set": result.data_set,
        "rows": result.rows,
        "source": str(source),
        "source_sha256": result.source_sha256,
        "content_sha256": result.content_sha256,
    }
    _print(document, json_only)
    return ExitCode.OK


def _print(document: Mapping[str, Any], json_only: bool) -> None:
    with standard_output():
        if json_only:
            print(json.dumps(document, indent=2))
            return
        for key, value in document.items():
            if isinstance(value, list):
                print(*(f"note: {note}" for note in value), sep="\n", end="\n" if value else "")
            elif isinstance(value, dict):
                print(f"{key}: " + ", ".join(f"{name} {number:,.6g}" for name, number in value.items()))
            else:
                print(f"{key}: {value:,}" if isinstance(value, int) else f"{key}: {value}")
