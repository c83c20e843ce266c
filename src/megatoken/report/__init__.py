"""Run folders and result documents as console tables and self-contained HTML pages: pure functions of what was read."""

from megatoken.report.answers import answer_csv, answer_json, answer_table
from megatoken.report.files import (
    check_place,
    read_subject,
    save_document,
    write_document,
    write_report,
    write_reports,
    write_view,
)
from megatoken.report.views.history import check_lines, history_csv

__all__ = [
    "answer_csv",
    "answer_json",
    "answer_table",
    "check_lines",
    "check_place",
    "history_csv",
    "read_subject",
    "save_document",
    "write_document",
    "write_report",
    "write_reports",
    "write_view",
]
