"""Where the accuracy log of a run lies, and whether it answers each row once."""

from pathlib import Path

import pytest

from accuracy_files import write_log
from megatoken.accuracy.answer_log import check_rows, find_log
from megatoken.mlperf.accuracy_log import AccuracyLogError, read_answers


@pytest.mark.parametrize(
    ("rows", "problem"),
    [
        ([0, 1, 1], r":4: qsl_idx 1 was already answered on line 3"),
        ([0, 1, 3], r":4: qsl_idx 3 is outside the data set of 3 rows"),
        ([2, 0], r": 1 of 3 rows have no answer, the first is qsl_idx 1"),
    ],
)
def test_rows_are_answered_once_each_or_refused(rows: list[int], problem: str, tmp_path: Path) -> None:
    answers = read_answers(write_log(tmp_path / "log", [[1]] * len(rows), rows))
    with pytest.raises(AccuracyLogError, match=problem):
        check_rows(answers, 3)


def test_missing_rows_are_allowed_where_asked_for_and_doubled_ones_never(tmp_path: Path) -> None:
    check_rows(read_answers(write_log(tmp_path / "log", [[1], [1]], [2, 0])), 3, partial=True)
    with pytest.raises(AccuracyLogError, match="already answered"):
        check_rows(read_answers(write_log(tmp_path / "log", [[1], [1]], [2, 2])), 3, partial=True)


def test_a_log_is_found_where_it_can_lie(tmp_path: Path) -> None:
    (tmp_path / "run" / "mlperf").mkdir(parents=True)
    log = write_log(tmp_path / "run" / "mlperf" / "mlperf_log_accuracy.json", [[1]])
    assert find_log(log) == find_log(log.parent) == find_log(tmp_path / "run") == log
    with pytest.raises(AccuracyLogError, match=r"no mlperf_log_accuracy\.json there"):
        find_log(tmp_path)
    (log.parent / "ABANDONED.txt").write_text("")
    with pytest.raises(AccuracyLogError, match="interrupted"):
        find_log(log)
