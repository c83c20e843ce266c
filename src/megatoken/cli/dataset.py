"""``megatoken dataset list|check|convert``."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

from megatoken.cli.flags import Command, flag, group, place
from megatoken.cli.output import Json, print_result
from megatoken.errors import ExitCode

app = group("List, check and convert data sets.")

Folder = Annotated[Path, flag("DIR", "Folder with the files of MLPerf's data sets.", "--folder")]


@app.command("list", cls=Command)
def list_data_sets(folder: Folder = Path("datasets"), json_only: Json = False) -> int:
    """List MLPerf's data sets and the workload profiles. Shows which files are missing and how to get them."""
    from megatoken.datasets.catalog import catalog
    from megatoken.planning.workloads import load_profiles

    data_sets = [entry.to_document(folder) for entry in catalog().values()]
    profiles = [profile.to_document() for profile in load_profiles()]
    document = {"mlperf": data_sets, "profiles": profiles}
    print_result(document, lambda: _show(data_sets, profiles), json_only=json_only)
    return ExitCode.OK


def _show(data_sets: list[dict[str, Any]], profiles: list[dict[str, Any]]) -> None:
    from megatoken.report.blocks import Column, Table
    from megatoken.report.console import show_table

    rows = tuple(
        (listed["name"], f"{listed['rows']:,}", listed["title"], ", ".join(listed["found"]) or "missing")
        for listed in data_sets
    )
    columns = (Column("MLPerf data set"), Column("Rows", numeric=True), Column("Title"), Column("File"))
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
    note = "Mean tokens per turn. megatoken dataset convert PROFILE writes lengths for megatoken run --lengths."
    show_table(Table("", (*heads, Column("Title")), profile_rows, note=note))


@app.command(cls=Command)
def check(
    name: Annotated[str, place("NAME|FILE", "Name of an MLPerf data set, or a file.")],
    model: Annotated[str | None, flag("DIR", "Checkpoint whose vocabulary, context and tokenizer must fit.")] = None,
    folder: Folder = Path("datasets"),
    json_only: Json = False,
) -> int:
    """Check a data set. Reads all rows; checks columns, order, hash and token ids."""
    from megatoken.datasets.check import check as checked
    from megatoken.datasets.check import locate
    from megatoken.engine.config import model_folder

    result = checked(locate(name, folder), None if model is None else model_folder(model))
    document = result.to_document()
    print_result(document, lambda: _print(document), json_only=json_only)
    return ExitCode.OK


@app.command(cls=Command)
def convert(
    name: Annotated[str, place("NAME|FILE|PROFILE", "MLPerf data set (name or file), or workload profile.")],
    out: Annotated[Path | None, flag("FILE", "File to write. Default: in the folder of the source.")] = None,
    rows: Annotated[int, flag("N", "Number of requests, for a profile.", min=1, max=10_000_000)] = 4096,
    seed: Annotated[int, flag("N", "Seed of the random lengths, for a profile.", min=0)] = 0,
    folder: Folder = Path("datasets"),
    json_only: Json = False,
) -> int:
    """Convert an MLPerf data set to Parquet. Or a workload profile to a CSV of lengths."""
    from megatoken.planning.workloads import load_profiles

    profile = next((profile for profile in load_profiles() if profile.name == name), None)
    if profile is not None:
        from megatoken.planning.workloads import write_lengths

        target = write_lengths(profile, out or Path(f"{name}.csv"), rows, seed)
        document = {"file": str(target), "profile": name, "rows": rows, "seed": seed}
    else:
        from megatoken.datasets.check import convert as converted
        from megatoken.datasets.check import locate

        source = locate(name, folder)
        document = converted(source, out or source.with_suffix(".parquet")).to_document()
    print_result(document, lambda: _print(document), json_only=json_only)
    return ExitCode.OK


def _print(document: Mapping[str, Any]) -> None:
    for key, value in document.items():
        if isinstance(value, list):
            print(*(f"note: {note}" for note in value), sep="\n", end="\n" if value else "")
        elif isinstance(value, dict):
            print(f"{key}: " + ", ".join(f"{name} {number:,.6g}" for name, number in value.items()))
        else:
            print(f"{key}: {value:,}" if isinstance(value, int) else f"{key}: {value}")
