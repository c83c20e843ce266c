"""The run folder: writing it while the run lasts, reading it years later, and the statistics that it states."""

from megatoken.results.run import Reason, Run, Verdict, read_run
from megatoken.results.run_folder import RunFolder, run_name
from megatoken.results.statistics import summarise
from megatoken.results.tables import SampleRow, SeriesRow

__all__ = [
    "Reason",
    "Run",
    "RunFolder",
    "SampleRow",
    "SeriesRow",
    "Verdict",
    "read_run",
    "run_name",
    "summarise",
]
