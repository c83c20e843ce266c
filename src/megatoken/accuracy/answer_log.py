"""The accuracy log of a run: where it lies, and whether it answers each row of its data set once."""

from __future__ import annotations

from pathlib import Path

from megatoken.mlperf.accuracy_log import ACCURACY_LOG, WHOLE_RUN, AccuracyLogError, Answers
from megatoken.mlperf.detail_log import ABANDONED
from megatoken.runs.run import MLPERF
from megatoken.text import count_of

SCORES = "accuracy.json"  # of an evaluation


def find_log(path: Path) -> Path:
    """The accuracy log that ``path`` means: itself, in that folder, or in the ``mlperf`` folder of a run folder.

    Raises AccuracyLogError: There is none, or it is of a run that was interrupted.
    """
    places = (path, path / ACCURACY_LOG, path / MLPERF / ACCURACY_LOG)
    found = next((place for place in places if place.is_file()), None)
    if found is None:
        fix = "give a run folder, LoadGen's output folder, or the file"
        raise AccuracyLogError(f"{path}: no {ACCURACY_LOG} there; {fix}")
    if found == path and path.name == SCORES:
        fix = f"give the run folder or the folder with {ACCURACY_LOG}"
        raise AccuracyLogError(f"{path}: has scores, not answers; {fix}")
    if (found.parent / ABANDONED).exists():
        raise AccuracyLogError(f"{found}: the run was interrupted and its last answers are empty; run it again")
    return found


def check_rows(answers: Answers, rows: int, *, partial: bool = False) -> None:
    """Raises AccuracyLogError unless each of ``rows`` rows is answered once, or at most once if ``partial``."""
    seen: dict[int, int] = {}
    for record in answers.records:
        place = f"{answers.path}:{record.line}"
        if record.row >= rows:
            what = f"is outside the data set of {count_of(rows, 'row')}"
            raise AccuracyLogError(f"{place}: qsl_idx {record.row:,} {what}; give the data set of this run")
        if record.row in seen:
            why = "an accuracy run asks for each row once, so this log is of another kind of run, or of two runs"
            line = f"was already answered on line {seen[record.row]:,}"
            raise AccuracyLogError(f"{place}: qsl_idx {record.row:,} {line}; {why}")
        seen[record.row] = record.line
    if len(seen) < rows and not partial:
        first = next(row for row in range(rows) if row not in seen)
        missing = f"{rows - len(seen):,} of {count_of(rows, 'row')} have no answer, the first is qsl_idx {first:,}"
        fix = f"{WHOLE_RUN} answers all rows; with --partial, only the answered rows are scored"
        raise AccuracyLogError(f"{answers.path}: {missing}; {fix}")
