"""Run folders and result documents as console tables and self-contained HTML pages: pure functions of what was read."""

from megatoken.report.console import show, show_table
from megatoken.report.files import save_document, write_report

__all__ = ["save_document", "show", "show_table", "write_report"]
