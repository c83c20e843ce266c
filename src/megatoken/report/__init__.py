"""A run folder as a console table and as one self-contained HTML page: pure functions of what the folder holds."""

from megatoken.report.console import show
from megatoken.report.html import write_report

__all__ = ["show", "write_report"]
