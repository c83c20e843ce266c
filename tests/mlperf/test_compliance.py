"""TEST06, TEST07 and TEST09 on logs that pass them, fail them, and pass them without proving anything."""

from pathlib import Path

import pytest

from accuracy_files import write_log
from megatoken.mlperf.accuracy_log import read_answers
from megatoken.mlperf.compliance import ComplianceResult, check_test06, check_test07, check_test09

END = (7, 8)
PASSED = ("First token check pass: True", "EOS check pass: True", "Sample length check pass: True")


def run_test06(tmp_path: Path, answers: list[list[int]], **options: object) -> ComplianceResult:
    """100 answers, those given first; ``first``, ``counts``: of the log."""
    filled = [*answers, *[[1, 2, 7]] * (100 - len(answers))]
    first = options.pop("first", None) or [answer[:1] for answer in filled]
    counts = options.pop("counts", None)
    path = write_log(tmp_path / "mlperf_log_accuracy.json", filled, counts=counts, first_tokens=first)  # type: ignore[arg-type]
    return check_test06(read_answers(path), **({"offline": False, "end_token_ids": END} | options))  # type: ignore[arg-type]


def test_answers_that_end_once_are_as_long_as_counted_and_begin_as_reported(tmp_path: Path) -> None:
    result = run_test06(tmp_path, [[1, 2, 3, 4, 5], [3, 8]])  # the longest was cut
    assert result.passed and result.sound
    assert result.lines == (*PASSED, "TEST06 verification complete")
    assert result.findings == ()
    assert result.write(tmp_path).read_text().splitlines() == list(result.lines)
    assert result.file == "verify_accuracy.txt"


def test_offline_reports_no_first_token(tmp_path: Path) -> None:
    path = write_log(tmp_path / "log", [[1, 7]] * 100)
    result = check_test06(read_answers(path), offline=True, end_token_ids=END)
    assert result.passed and result.sound
    assert result.lines[0] == "First token check pass: Skipped"
    assert not check_test06(read_answers(path), offline=False, end_token_ids=END).passed


@pytest.mark.parametrize(
    ("answer", "changes", "line", "finding"),
    [
        ([1, 7, 7], {}, 1, "1 of 100 answers end with more than one end token"),
        ([1, 7, 8], {}, 1, "1 of 100 answers end with more than one end token"),
        ([7, 7], {}, 1, "1 of 100 answers end with more than one end token"),
        ([1, 2, 7], {"first": [[2]] + [[1]] * 99}, 0, "1 of 100 answers do not begin with the token reported first"),
        ([1, 2, 7], {"first": [[1, 3]] + [[1]] * 99}, 0, "1 of 100 answers do not begin with the token reported first"),
        ([1, 2, 7], {"first": [[]] + [[1]] * 99}, 0, "1 of 100 answers do not begin with the token reported first"),
        ([1, 2, 7], {"counts": [4] + [3] * 99}, 2, "1 of 100 answers have another number of tokens than was reported"),
    ],
)
def test_what_test06_looks_for(
    answer: list[int], changes: dict[str, object], line: int, finding: str, tmp_path: Path
) -> None:
    result = run_test06(tmp_path, [answer], **changes)
    assert not result.passed
    assert result.lines[line].endswith("False")
    assert [one.endswith("False") for one in result.lines[:3]].count(True) == 1
    assert result.lines[3] == "TEST06 verification failed"
    assert result.findings[0]["message"].startswith(finding)
    assert result.findings[0]["message"].endswith("mlperf_log_accuracy.json, line 2")


@pytest.mark.parametrize(
    ("answers", "finding"),
    [
        ([[1, 7, 2, 7]], "1 of 100 answers continue after an end token"),
        ([[1, 7, 7, 2]], "1 of 100 answers continue after an end token"),
        ([[1, 2], [1, 2, 3, 4]], "1 of 100 answers have no end token and were not cut"),
    ],
)
def test_what_test06_overlooks_and_our_own_check_does_not(
    answers: list[list[int]], finding: str, tmp_path: Path
) -> None:
    result = run_test06(tmp_path, answers)
    assert result.passed
    assert not result.sound
    assert result.findings[0]["message"].startswith(finding)


def test_a_run_knows_which_answers_were_cut(tmp_path: Path) -> None:
    assert run_test06(tmp_path, [[1, 2]], cut_samples={0}).sound
    assert not run_test06(tmp_path, [[1, 2, 3, 4]], cut_samples={5}).sound


def test_answers_without_any_end_token_prove_nothing(tmp_path: Path) -> None:
    """So passes every log of a Llama 3 model under MLPerf's script, which looks for the id 2 alone."""
    result = run_test06(tmp_path, [], end_token_ids=(128_001, 128_009))
    assert result.passed
    assert not result.sound
    (finding,) = result.findings
    assert "(128001, 128009), so the EOS check proves nothing" in finding["message"]


def test_another_number_of_answers_is_not_the_test(tmp_path: Path) -> None:
    path = write_log(tmp_path / "log", [[1, 7]] * 99)
    result = check_test06(read_answers(path), offline=True, end_token_ids=END)
    assert (result.passed, result.sound) == (True, False)
    (finding,) = result.findings
    assert finding["message"] == "99 answers; TEST06 needs 100: megatoken run --compliance TEST06"


@pytest.mark.parametrize(
    ("score", "rows", "passed", "sound"),
    [(60.698, 990, True, True), (60.697, 990, False, True), (99.0, 989, True, False)],
)
def test_test07_is_a_threshold(score: float, rows: int, passed: bool, sound: bool) -> None:
    result = check_test07(score, rows)
    assert (result.passed, result.sound) == (passed, sound)
    assert ("TEST PASS" in result.lines) is passed
    assert result.file == "verify_accuracy.txt"


@pytest.mark.parametrize(("length", "passed"), [(1150, False), (1151, True), (1406, True), (1407, False)])
def test_test09_is_a_window_around_the_mean(length: int, passed: bool, tmp_path: Path) -> None:
    result = check_test09(read_answers(write_log(tmp_path / "log", [[3] * length] * 2)))
    assert result.passed is passed
    assert ("TEST PASS" in result.lines) is passed
    assert not result.sound  # two of 6,396 rows
    assert f"Mean output tokens: {length}.00" in result.lines
    assert result.file == "verify_output_len.txt"


def test_test09_of_all_rows(tmp_path: Path) -> None:
    result = check_test09(read_answers(write_log(tmp_path / "log", [[3] * 1200] * 6396)))
    assert result.passed and result.sound and not result.findings
