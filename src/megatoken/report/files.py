"""From a path to a report: what lies there, and where its page goes."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megatoken.report.documents import Document, checked, document_in, read_document
from megatoken.report.page import page
from megatoken.report.views import document_view, run_view
from megatoken.results import Run, read_run, save_report
from megatoken.results.files import storage_error, to_json, write_text
from megatoken.results.run_folder import REPORT, RESULT


def read_subject(path: Path) -> Run | Document:
    """The run folder or the document at ``path``: a folder with ``result.json`` or one saved document, or the document.

    Raises:
        UsageError: neither is there, or it cannot be read.
    """
    if path.is_dir():
        return read_document(document_in(path)) if not (path / RESULT).exists() else read_run(path)
    return read_document(path)


def write_report(path: Path, out: Path | None = None) -> Path:
    """Make the page of a run folder or document anew and return where it is.

    Args:
        path: as for ``read_subject``.
        out: file to write; by default ``report.html`` in the run folder or beside the document.

    Raises:
        UsageError: ``path`` cannot be read.
        StorageError: the page cannot be written.
    """
    subject = read_subject(path)
    if isinstance(subject, Run):
        html = page(run_view(subject))
        if out is None:
            return save_report(path, html)
    else:
        html = page(document_view(subject))
    out = out or (path if path.is_dir() else path.parent) / REPORT
    write_text(out, html)
    return out


def save_document(document: Mapping[str, Any], folder: Path) -> tuple[Path, Path]:
    """Put a document into ``folder``, made if missing: ``<kind>.json`` and ``report.html``, whose paths are returned.

    Raises:
        UsageError: it is no document of a kind known here.
        StorageError: the disk refuses.
    """
    view = document_view(checked(document))
    saved, report = folder / f"{document['kind']}.json", folder / REPORT
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise storage_error(folder, error) from error
    write_text(saved, to_json(document))
    write_text(report, page(view))
    return saved, report
