"""Accuracy logs become token ids, or one line that says what is wrong with them and where."""

import hashlib
import json
from pathlib import Path

import pytest

from accuracy_files import write_log
from megatoken.errors import ExitCode
from megatoken.mlperf.answers import AccuracyLogError, check_rows, find_log, read_answers


def refusal(path: Path) -> str:
    with pytest.raises(AccuracyLogError) as caught:
        read_answers(path)
    message = str(caught.value)
    assert message.startswith(str(path))
    assert "\n" not in message
    assert caught.value.exit_code == ExitCode.USAGE
    return message.removeprefix(str(path))


@pytest.mark.parametrize("dtype", ["<i4", "<i8"])
@pytest.mark.parametrize("counted", [True, False])
def test_ids_come_back_whatever_their_width(dtype: str, counted: bool, tmp_path: Path) -> None:
    ids = [[5, 6, 70_000], [1, 2], [9]]
    path = write_log(tmp_path / "log", ids, [2, 0, 1], None if counted else [None] * 3, dtype=dtype)
    answers = read_answers(path)
    assert [answer.tolist() for answer in answers.token_ids()] == ids
    assert [record.row for record in answers.records] == [2, 0, 1]
    assert [record.sequence for record in answers.records] == [0, 1, 2]
    assert [record.line for record in answers.records] == [2, 3, 4]
    assert answers.sha256 == hashlib.sha256(path.read_bytes()).hexdigest()
    assert answers.size_bytes == path.stat().st_size


def test_token_counts_decide_where_zeros_look_like_wide_ids(tmp_path: Path) -> None:
    assert read_answers(write_log(tmp_path / "log", [[5, 0], [6, 0]])).token_type().itemsize == 4


def test_counts_that_are_all_wrong_decide_nothing(tmp_path: Path) -> None:
    answers = read_answers(write_log(tmp_path / "log", [[5, 6], [7, 8]], counts=[3, 3], dtype="<i8"))
    assert [answer.tolist() for answer in answers.token_ids()] == [[5, 6], [7, 8]]


def test_an_empty_answer_is_an_answer(tmp_path: Path) -> None:
    answers = read_answers(write_log(tmp_path / "log", [[], [4]]))
    assert [answer.tolist() for answer in answers.token_ids()] == [[], [4]]


GOOD = '{ "seq_id" : 0, "qsl_idx" : 0, "data" : "01000000", "token_count" : 1 }'


def altered(old: str, new: str) -> str:
    assert old in GOOD
    return f"[\n{GOOD.replace(old, new)}\n]\n"


BAD_LOGS = {
    "nothing": ("", ": no whole list"),
    "no end": (f"[\n{GOOD},\n", ": no whole list"),
    "no start": (f"{GOOD}\n]\n", ": no whole list"),
    "of a performance run": ("[]\n", ": holds no answers"),
    "truncated": (f"[\n{GOOD[:30]}\n\n...\n\n{GOOD}\n]\n", ":2: no answer as LoadGen logs it"),
    "truncated between": (f"[\n{GOOD},\n\n...\n\n{GOOD}\n]\n", ":4: the log was truncated"),
    "half a record": (f"[\n{GOOD[:40]}\n]\n", ":2: no answer"),
    "no hex": (altered("01000000", "0100000G"), ":2: no answer"),
    "half a byte": (altered("01000000", "010"), ":2: no answer"),
    "no row": (altered('"qsl_idx" : 0, ', ""), ":2: no answer"),
    "negative row": (altered('"qsl_idx" : 0', '"qsl_idx" : -1'), ":2: no answer"),
    "row no number": (altered('"qsl_idx" : 0', '"qsl_idx" : true'), ":2: no answer"),
    "count no number": (altered('"token_count" : 1', '"token_count" : "1"'), ":2: no answer"),
    "a list": ("[\n[1, 2]\n]\n", ":2: no answer"),
    "not JSON": ("[\n\x00\x01\n]\n", ":2: no answer"),
}


@pytest.mark.parametrize("kind", BAD_LOGS)
def test_a_bad_log_is_named_with_its_line(kind: str, tmp_path: Path) -> None:
    content, problem = BAD_LOGS[kind]
    path = tmp_path / "mlperf_log_accuracy.json"
    path.write_text(content)
    assert refusal(path).startswith(problem)


def test_data_of_no_whole_number_of_ids(tmp_path: Path) -> None:
    path = tmp_path / "log"
    path.write_text('[\n{ "seq_id" : 0, "qsl_idx" : 0, "data" : "0102030405" }\n]\n')
    with pytest.raises(AccuracyLogError, match=r":2: data of 5 bytes is no whole number of int32 ids"):
        read_answers(path).token_ids()


@pytest.mark.parametrize(
    ("rows", "problem"),
    [
        ([0, 1, 1], r":4: qsl_idx 1 was answered already on line 3"),
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
    with pytest.raises(AccuracyLogError, match="answered already"):
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


def test_the_log_is_json_that_others_can_read(tmp_path: Path) -> None:
    """What the other tests here feed is what LoadGen writes: a JSON list."""
    path = write_log(tmp_path / "log", [[1, 2]], first_tokens=[[1]])
    assert json.loads(path.read_text()) == [
        {"seq_id": 0, "qsl_idx": 0, "data": "0100000002000000", "token_data": "01000000", "token_count": 2}
    ]
