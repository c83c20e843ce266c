"""From a path to reports: what the path holds, and where its pages go."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from megatoken.analysis.history import history
from megatoken.analysis.lookup import read_consistent_run, read_each, run_folders
from megatoken.analysis.repeats import REPEATS, are_repeats, missing_notes, read_repeats, summarise_repeats
from megatoken.analysis.sweep import SWEEP, are_points
from megatoken.dossier.saved_audit import refuse_edited
from megatoken.errors import UsageError
from megatoken.files import plain, storage_error, to_json, write_text
from megatoken.mlperf.endpoints import judged_sweep
from megatoken.report.blocks import Points, View
from megatoken.report.documents import Document, checked, document_in, read_document
from megatoken.report.page import page
from megatoken.report.views import document_view, run_view
from megatoken.report.views.history import history_view
from megatoken.runs.run import REPORT, Run
from megatoken.runs.seal import refuse_sealed, sealed_folder

OURS = b"megatoken</title>"  # near the start of every page
HEAD_BYTES = 8192
INDEX = "index.html"


def read_subject(path: Path) -> Run | Document:
    """The subject of the report on ``path``: a run folder, a saved document, a folder with one, or repeats together.

    Raises:
        UsageError: ``path`` holds none of them, or it cannot be read.
    """
    return next(subject for subject, _ in reversed(list(_subjects(path))))


def write_report(path: Path, out: Path | None = None) -> Path:
    """Rebuild the page on ``path``, after those of the runs below it, and return its path; as ``write_reports``."""
    *_, last = write_reports(path, out)
    return last


def write_reports(
    path: Path,
    out: Path | None = None,
    *,
    baseline: Sequence[Run] = (),
    movable: bool = True,
    damaged: list[str] | None = None,
) -> Iterator[Path]:
    """Rebuild the pages on ``path``, and the document of a sweep, and yield the path of each page.

    The page of a run folder is ``report.html`` in it; that of a saved document, or a folder with one, lies next to it
    under its name. Of a folder with run folders below it: the page of each, and in each folder that ``--repeat`` made
    one on them together, ``repeats.html``; of several runs without such a page on all of them, ``index.html`` in
    ``path``, checked against ``baseline`` if one is given. ``out`` names another file for the page on all of ``path``
    and leaves the other pages alone; ``movable``: the command has a flag ``--out``. ``damaged`` gets a line for each
    run folder that cannot be read while others can; without it that is an error. Of several, pages in sealed folders
    stay as they are.

    Raises:
        UsageError: ``path`` cannot be read, another file has the name of the page, or its folder is sealed.
        StorageError: a page cannot be written.
    """
    subjects = list(_subjects(path, damaged))
    runs = [subject for subject, _ in subjects if isinstance(subject, Run)]
    whole = bool(runs) and out is None and not damaged  # all that a document of runs follows from
    together = {place.parent for subject, place in subjects if isinstance(subject, Document)}
    indexed = len(runs) > 1 and {run.path.parent for run in runs} != together
    if out is not None:
        subjects = [] if indexed else [(subjects[-1][0], out)]
    for subject, place in subjects:
        if len(subjects) > 1 and sealed_folder(place):
            continue
        made = run_view(subject) if isinstance(subject, Run) else document_view(subject)
        page_file = write_view(place, made, movable=movable)
        if isinstance(subject, Document) and subject.text("kind") == "sweep" and whole:
            write_text(place.with_suffix(".json"), to_json(subject.values))
        yield page_file
    if indexed:
        place = out or path / INDEX
        name = path.resolve().name or str(path)
        made = history_view(history(runs, name, baseline), place.parent)
        if damaged:
            left_out = Points("Left out, because they cannot be read:", tuple(("", why) for why in damaged))
            made = replace(made, summary=(*made.summary, left_out))
        yield write_view(place, made, movable=movable)


def write_view(place: Path, view: View, *, movable: bool = True) -> Path:
    """Write the page of a view, in place of an earlier page of megatoken only; errors as ``write_reports``."""
    _check_replaceable(place)
    write_text(place, page(view), movable=movable)
    return place


def save_document(document: Mapping[str, Any], folder: Path) -> tuple[Path, Path]:
    """Put a document and its page into ``folder``, made if missing: ``<kind>.json`` and ``<kind>.html``.

    Returns:
        Both paths.

    Raises:
        UsageError: its kind is unknown, or another file has the name of the document or page.
        StorageError: the disk refuses.
    """
    return write_document(document, folder / f"{document['kind']}.json")


def write_document(document: Mapping[str, Any], saved: Path) -> tuple[Path, Path]:
    """Put a document into the file ``saved``, whose folder is made if missing, and its page next to it.

    Returns:
        Both paths.

    Raises:
        UsageError: its kind is unknown, or another file has the name of the document or page.
        StorageError: the disk refuses.
    """
    view = document_view(checked(document, saved.name))
    check_place(saved, document["kind"])
    try:
        saved.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise storage_error(saved.parent, error) from error
    write_text(saved, to_json(document))
    write_text(saved.with_suffix(".html"), page(view))
    return saved, saved.with_suffix(".html")


def check_place(saved: Path, kind: str) -> None:
    """Refuses a file for a document, whose page goes next to it, if another file has one of these names.

    Raises:
        UsageError: a file would be overwritten that is not a document of this kind, or not a page of megatoken.
    """
    if saved.exists():
        _check_same_kind(saved, kind)
    _check_replaceable(saved.with_suffix(".html"))


def _subjects(path: Path, damaged: list[str] | None = None) -> Iterator[tuple[Run | Document, Path]]:
    """The runs and documents on ``path``, each with the path of its page; ``damaged`` as of ``write_reports``."""
    folders = run_folders(path)
    if folders == [path]:
        yield read_consistent_run(path), path / REPORT
        return
    if not folders:
        file = document_in(path) if path.is_dir() else path
        saved = read_document(file)
        refuse_edited(saved.values, file)
        yield saved, file.with_suffix(".html")
        return
    below: dict[Path, list[Run]] = {}
    for one in read_each([path]):
        if isinstance(one, Run):
            below.setdefault(one.path.parent, []).append(one)
        elif damaged is None:
            raise UsageError(one.why)
        else:
            damaged.append(one.why)
    for parent, runs in below.items():
        yield from ((run, run.path / REPORT) for run in runs)
        if are_points(runs):
            place = parent / SWEEP
            document = plain(judged_sweep(runs, parent.name))
            yield checked(document, str(place)), place.with_suffix(".html")
            continue
        known = read_repeats(parent)
        if known and are_repeats(runs):
            missing = missing_notes(parent, runs)
            document = summarise_repeats(runs, known.get("runs_wanted", len(runs)), missing)
            place = parent / REPEATS
            yield checked(plain(document), str(place)), place.with_suffix(".html")


def _check_replaceable(place: Path) -> None:
    """Refuses to overwrite a file that is not a page of megatoken, and to write into a sealed folder."""
    refuse_sealed(place)
    if not place.is_file():
        return
    try:
        with place.open("rb") as file:
            ours = OURS in file.read(HEAD_BYTES)
    except OSError as error:
        raise storage_error(place, error) from error
    if not ours:
        raise UsageError(f"{place}: this file is not a megatoken page; move it, or name another with --out")


def _check_same_kind(saved: Path, kind: str) -> None:
    try:
        there = read_document(saved).text("kind")
    except UsageError:
        there = ""
    if there != kind:
        raise UsageError(f"{saved}: this file is not a megatoken document; move it, or name another with --out")
