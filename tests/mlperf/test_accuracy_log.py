"""Accuracy logs become token ids, or one line that says what is wrong with them and where."""

import hashlib
import json
from pathlib import Path

import pytest

from accuracy_files import write_log
from megatoken.errors import ExitCode
from megatoken.mlperf.accuracy_log import AccuracyLogError, read_answers


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
    "nothing": ("", ": not a whole list"),
    "no end": (f"[\n{GOOD},\n", ": not a whole list"),
    "no start": (f"{GOOD}\n]\n", ": not a whole list"),
    "of a performance run": ("[]\n", ": holds no answers"),
    "truncated": (f"[\n{GOOD[:30]}\n\n...\n\n{GOOD}\n]\n", ":2: not an answer as LoadGen logs it"),
    "truncated between": (f"[\n{GOOD},\n\n...\n\n{GOOD}\n]\n", ":4: the log was truncated"),
    "half a record": (f"[\n{GOOD[:40]}\n]\n", ":2: not an answer"),
    "no hex": (altered("01000000", "0100000G"), ":2: not an answer"),
    "half a byte": (altered("01000000", "010"), ":2: not an answer"),
    "no row": (altered('"qsl_idx" : 0, ', ""), ":2: not an answer"),
    "negative row": (altered('"qsl_idx" : 0', '"qsl_idx" : -1'), ":2: not an answer"),
    "row no number": (altered('"qsl_idx" : 0', '"qsl_idx" : true'), ":2: not an answer"),
    "count no number": (altered('"token_count" : 1', '"token_count" : "1"'), ":2: not an answer"),
    "a list": ("[\n[1, 2]\n]\n", ":2: not an answer"),
    "not JSON": ("[\n\x01\x02\n]\n", ":2: not an answer"),
    "binary": ("[\n\x00\x01\n]\n", ": is binary, not text"),
    "another writer's": ('[\n{"seq_id": 0, "qsl_idx": 0, "data": "01000000"}\n]\n', ":2: not an answer"),
    "no file": (None, ": cannot be read"),
}


@pytest.mark.parametrize("kind", BAD_LOGS)
def test_a_bad_log_is_named_with_its_line(kind: str, tmp_path: Path) -> None:
    content, problem = BAD_LOGS[kind]
    path = tmp_path / "mlperf_log_accuracy.json"
    if content is not None:
        path.write_text(content)
    assert refusal(path).startswith(problem)


def test_data_of_no_whole_number_of_ids(tmp_path: Path) -> None:
    path = tmp_path / "log"
    path.write_text('[\n{ "seq_id" : 0, "qsl_idx" : 0, "data" : "0102030405" }\n]\n')
    with pytest.raises(AccuracyLogError, match=r":2: data of 5 bytes is not a whole number of int32 ids"):
        read_answers(path).token_ids()


def test_the_log_is_json_that_others_can_read(tmp_path: Path) -> None:
    """What the other tests here feed is what LoadGen writes: a JSON list."""
    path = write_log(tmp_path / "log", [[1, 2]], first_tokens=[[1]])
    assert json.loads(path.read_text()) == [
        {"seq_id": 0, "qsl_idx": 0, "data": "0100000002000000", "token_data": "01000000", "token_count": 2}
    ]
