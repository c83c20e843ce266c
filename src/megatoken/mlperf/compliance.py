"""MLPerf's compliance tests of language models: TEST06, TEST07 and TEST09, as arithmetic on an accuracy log.

Source: compliance/ of mlcommons/inference. Its TEST06 looks for one end token id, 2, which only Llama 2 has, at the
end of an answer. Here the end tokens are those of the model, and a check of our own reports where that proves nothing.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megatoken.files import to_json, write_text
from megatoken.mlperf.accuracy_log import Answer, Answers
from megatoken.runs.reasons import Reason, reason, shortfall

TESTS = ("TEST06", "TEST07", "TEST09")
TEST06_RECORDS = 100  # accuracy_log_sampling_target of its audit.config
TEST06_SEED = 720381539243781796  # accuracy_log_rng_seed of its audit.config
TEST06_RUN = "megatoken run --compliance TEST06"
TEST07_LEAST = 60.698  # exact_match of gpt-oss-120b over all answers
TEST07_ROWS = 990
TEST09_MEAN_TOKENS = (1150.38, 1406.02)  # of gpt-oss-120b: 1,278.20, plus and minus 10 %
TEST09_ROWS = 6396
MOST_NAMED = 3
DOCUMENT = "compliance.json"  # ours, next to the file that a submission carries
_PASSED = {
    "TEST06": (
        ("First token check pass: True", "First token check pass: Skipped"),
        ("EOS check pass: True",),
        ("Sample length check pass: True",),
    )
}


@dataclass(frozen=True, slots=True)
class ComplianceResult:
    """The outcome of one test."""

    test: str  # TEST06, TEST07 or TEST09
    passed: bool  # the answers meet what MLPerf asks for
    sound: bool  # they also meet our own check
    lines: tuple[str, ...]  # of the file that a submission carries, as MLPerf's checker reads it
    findings: tuple[Reason, ...]  # what failed or proves nothing
    # TEST06: the end tokens that were looked for; None for the other tests
    end_token_ids: tuple[int, ...] | None = None

    def to_document(self) -> dict[str, Any]:
        """Both verdicts, the findings and the end tokens as plain JSON."""
        ends = {} if self.end_token_ids is None else {"end_token_ids": list(self.end_token_ids)}
        return {"test": self.test, "passed": self.passed, "sound": self.sound, "findings": list(self.findings), **ends}

    @property
    def file(self) -> str:
        """Name of the file that a submission carries."""
        return compliance_file(self.test)

    def write(self, folder: Path) -> Path:
        """Writes that file into ``folder``, and ``compliance.json`` with our own check. Raises StorageError."""
        write_text(folder / DOCUMENT, to_json(self.to_document()), movable=False)
        write_text(folder / self.file, "\n".join(self.lines) + "\n", movable=False)
        return folder / self.file


def compliance_file(test: str) -> str:
    """Name of the file on a test that a submission carries."""
    return "verify_output_len.txt" if test == "TEST09" else "verify_accuracy.txt"


def passed_lines(test: str) -> tuple[tuple[str, ...], ...]:
    """The lines of that file by which MLCommons' checker sees that the test passed: one of each group."""
    return _PASSED.get(test, (("TEST PASS",),))


def missing_lines(test: str, text: str) -> list[str]:
    """Of each group of ``passed_lines`` that ``text`` has no line of, the first."""
    lines = {line.strip() for line in text.splitlines()}
    return [choices[0] for choices in passed_lines(test) if not lines & set(choices)]


def check_test06(
    answers: Answers, *, offline: bool, end_token_ids: Sequence[int], cut_samples: Collection[int] | None = None
) -> ComplianceResult:
    """TEST06: answers begin with the token reported first, end with at most one end token, and are as long as reported.

    Our own check asks for more: no end token inside an answer, and an answer without one must have been cut. If no
    answer has an end token, nothing is proved: the system does not log end tokens, or these are not the model's.

    Args:
        answers: The log of the test's run.
        offline: Whether the scenario reports no first tokens.
        end_token_ids: Of the model.
        cut_samples: ``seq_id`` of the answers that ended at their limit; None: unknown, so those of the largest length.
    """
    ids = answers.token_ids()
    ends = [np.isin(answer, end_token_ids) for answer in ids]
    trailing = [_trailing(end) for end in ends]
    begins = [_begins(record) for record in answers.records]
    counted = [record.token_count == len(answer) for record, answer in zip(answers.records, ids, strict=True)]
    first = None if offline else _failure("FIRST_TOKEN_DIFFERS", answers, begins)
    again = _failure("END_TOKEN_REPEATED", answers, [count < 2 for count in trailing])
    length = _failure("TOKEN_COUNT_DIFFERS", answers, counted)
    if cut_samples is None:
        longest = max(map(len, ids))
        cut = [len(answer) == longest for answer in ids]
    else:
        cut = [record.sequence in cut_samples for record in answers.records]
    own: list[Reason | None]
    if any(end.any() for end in ends):
        clean = [int(end.sum()) == count for end, count in zip(ends, trailing, strict=True)]
        stopped = [bool(count or was_cut) for count, was_cut in zip(trailing, cut, strict=True)]
        own = [_failure("AFTER_END_TOKEN", answers, clean), _failure("NO_END_TOKEN", answers, stopped)]
    else:
        own = [reason("END_TOKENS_UNPROVEN", end_token_ids=", ".join(map(str, end_token_ids)) or "none")]
    if (number := len(answers.records)) != TEST06_RECORDS:
        own.append(shortfall("ANSWER_COUNT", number, TEST06_RECORDS, test="TEST06", logged_by=TEST06_RUN))
    passed = not (first or again or length)
    lines = (
        f"First token check pass: {'Skipped' if offline else not first}",
        f"EOS check pass: {not again}",
        f"Sample length check pass: {not length}",
        f"TEST06 verification {'complete' if passed else 'failed'}",
    )
    findings = tuple(finding for finding in (first, again, length, *own) if finding)
    return ComplianceResult("TEST06", passed, not any(own), lines, findings, tuple(end_token_ids))


def check_test07(exact_match: float, rows: int) -> ComplianceResult:
    """TEST07 of gpt-oss-120b: ``exact_match`` (0 to 100) of ``rows`` answers of a performance run."""
    passed = exact_match >= TEST07_LEAST
    findings: list[Reason] = []
    if rows != TEST07_ROWS:
        findings.append(shortfall("ANSWER_COUNT", rows, TEST07_ROWS, test="TEST07"))
    if not passed:
        findings.append(shortfall("EXACT_MATCH", exact_match, TEST07_LEAST, test="TEST07"))
    lines = (
        f"'exact_match': {exact_match:.6f}",
        f"Accuracy score: {exact_match:.6f}",
        f"Accuracy threshold: {TEST07_LEAST}",
        f"Accuracy check pass: {passed}",
        f"TEST {'PASS' if passed else 'FAIL'}",
    )
    return ComplianceResult("TEST07", passed, rows == TEST07_ROWS, lines, tuple(findings))


def check_test09(answers: Answers) -> ComplianceResult:
    """TEST09 of gpt-oss-120b: the mean length of the answers of a performance run."""
    lengths = np.array([len(answer) for answer in answers.token_ids()])
    rows = len({record.row for record in answers.records})
    mean = float(lengths.mean())
    least, most = TEST09_MEAN_TOKENS
    passed = least <= mean <= most
    findings: list[Reason] = []
    if rows != TEST09_ROWS:
        findings.append(shortfall("ROW_COUNT", rows, TEST09_ROWS, test="TEST09"))
    if not passed:
        findings.append(reason("MEAN_TOKENS", found=mean, at_least=least, at_most=most, test="TEST09"))
    lines = (
        f"Total samples: {len(lengths)}",
        f"Mean output tokens: {mean:.2f}",
        f"Min output tokens: {lengths.min()}",
        f"Max output tokens: {lengths.max()}",
        f"Std deviation: {lengths.std():.2f}",
        f"Min threshold: {least}",
        f"Max threshold: {most}",
        f"Min check pass: {mean >= least}",
        f"Max check pass: {mean <= most}",
        f"TEST {'PASS' if passed else 'FAIL'}",
    )
    return ComplianceResult("TEST09", passed, rows == TEST09_ROWS, lines, tuple(findings))


def _begins(record: Answer) -> bool:
    """Whether the ids agree with those reported first over their common length, as MLPerf compares them."""
    first = record.first_token
    return first is not None and len(first) > 0 and record.data[: len(first)] == first[: len(record.data)]


def _trailing(ends: NDArray[np.bool_]) -> int:
    """How many end tokens stand at the end of an answer [tokens]."""
    return int(np.argmin(ends[::-1])) if len(ends) and not ends.all() else len(ends)


def _failure(code: str, answers: Answers, good: Sequence[bool]) -> Reason | None:
    lines = [record.line for record, fine in zip(answers.records, good, strict=True) if not fine]
    if not lines:
        return None
    named = ", ".join(map(str, lines[:MOST_NAMED])) + ", ..." * (len(lines) > MOST_NAMED)
    return reason(code, failed=len(lines), answers=len(good), place=f"{answers.path}, line {named}")
