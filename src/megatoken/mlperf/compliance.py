"""MLPerf's compliance tests of language models, as far as they are arithmetic on a log: TEST06, TEST07, TEST09.

Source: compliance/ of mlcommons/inference. Its TEST06 looks for one end token id, 2, which only Llama 2 has, at the
very end of an answer; here the end tokens are the model's, and a check of our own says where that proves nothing.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megatoken.files import to_json, write_text
from megatoken.mlperf.answers import Answer, Answers
from megatoken.text import count_of

TESTS = ("TEST06", "TEST07", "TEST09")
TEST06_RECORDS = 100  # accuracy_log_sampling_target of its audit.config
TEST06_SEED = 720381539243781796  # accuracy_log_rng_seed of the same
TEST06_RUN = "megatoken run --compliance TEST06"
TEST07_LEAST = 60.698  # exact_match of gpt-oss-120b over all answers
TEST07_ROWS = 990
TEST09_MEAN_TOKENS = (1150.38, 1406.02)  # of gpt-oss-120b: 1,278.20, plus and minus 10 %
TEST09_ROWS = 6396
MOST_NAMED = 3
DOCUMENT = "compliance.json"  # ours, beside the file that a submission carries


@dataclass(frozen=True, slots=True)
class ComplianceResult:
    """The outcome of one test.

    Attributes:
        test: TEST06, TEST07 or TEST09.
        passed: What MLPerf asks for is met.
        sound: What our own check asks for is met too.
        lines: Of the file that a submission carries, as MLPerf's checker reads it.
        findings: What failed or proves nothing, each in one sentence with the lines of the log.
        end_token_ids: TEST06: what was looked for; None: the test looks for none.
    """

    test: str
    passed: bool
    sound: bool
    lines: tuple[str, ...]
    findings: tuple[str, ...]
    end_token_ids: tuple[int, ...] | None = None

    def to_document(self) -> dict[str, Any]:
        """Both verdicts and what they rest on, as plain JSON."""
        ends = {} if self.end_token_ids is None else {"end_token_ids": list(self.end_token_ids)}
        told = {"test": self.test, "passed": self.passed, "sound": self.sound, "findings": list(self.findings)}
        return told | ends

    @property
    def file(self) -> str:
        """Name of the file that a submission carries."""
        return "verify_output_len.txt" if self.test == "TEST09" else "verify_accuracy.txt"

    def write(self, folder: Path) -> Path:
        """Writes that file into ``folder``, and ``compliance.json`` with our own check. Raises StorageError."""
        write_text(folder / DOCUMENT, to_json(self.to_document()), movable=False)
        write_text(folder / self.file, "\n".join(self.lines) + "\n", movable=False)
        return folder / self.file


def check_test06(
    answers: Answers, *, offline: bool, end_token_ids: Sequence[int], cut_samples: Collection[int] | None = None
) -> ComplianceResult:
    """TEST06: answers begin with the token reported first, end at most once, and are as long as was counted.

    Our own check asks more of end tokens: none may stand inside an answer, and an answer without one must have been
    cut. Where no answer has any, nothing is proved: the system does not log them, or they are not the model's.

    Args:
        answers: The log of the test's run.
        offline: The scenario reports no first tokens.
        end_token_ids: Of the model.
        cut_samples: ``seq_id`` of the answers that ended at their limit; None: not known, those as long as the longest.
    """
    ids = answers.token_ids()
    ends = [np.isin(answer, end_token_ids) for answer in ids]
    trailing = [_trailing(end) for end in ends]
    begins = [_begins(record) for record in answers.records]
    counted = [record.token_count == len(answer) for record, answer in zip(answers.records, ids, strict=True)]
    first = None if offline else _failure(answers, begins, "do not begin with the token reported first")
    again = _failure(answers, [count < 2 for count in trailing], "end with more than one end token")
    length = _failure(answers, counted, "have another number of tokens than was counted")
    longest = max(map(len, ids))
    cut = [len(answer) == longest for answer in ids]
    if cut_samples is not None:
        cut = [record.sequence in cut_samples for record in answers.records]
    clean = [int(end.sum()) == count for end, count in zip(ends, trailing, strict=True)]
    stopped = [bool(count or was_cut) for count, was_cut in zip(trailing, cut, strict=True)]
    if any(end.any() for end in ends):
        own = (
            _failure(answers, clean, "go on after an end token"),
            _failure(answers, stopped, "have no end token and were not cut"),
        )
    else:
        shown = ", ".join(map(str, end_token_ids)) or "none"
        own = (f"no answer has an end token of the model ({shown}), so the EOS check proves nothing", None)
    number = len(answers.records)
    other = (
        None
        if number == TEST06_RECORDS
        else f"{count_of(number, 'answer')}; the test's run logs {TEST06_RECORDS}: {TEST06_RUN}"
    )
    passed = not (first or again or length)
    lines = (
        f"First token check pass: {'Skipped' if offline else not first}",
        f"EOS check pass: {not again}",
        f"Sample length check pass: {not length}",
        f"TEST06 verification {'complete' if passed else 'failed'}",
    )
    findings = tuple(finding for finding in (first, again, length, *own, other) if finding)
    return ComplianceResult("TEST06", passed, not any((*own, other)), lines, findings, tuple(end_token_ids))


def check_test07(exact_match: float, rows: int) -> ComplianceResult:
    """TEST07 of gpt-oss-120b: ``exact_match`` (0 to 100) of ``rows`` answers of a performance run."""
    passed = exact_match >= TEST07_LEAST
    findings = [] if rows == TEST07_ROWS else [f"{count_of(rows, 'answer')}; the test is of {TEST07_ROWS}"]
    if not passed:
        findings.append(f"exact_match is {exact_match:.7g}; the test asks for {TEST07_LEAST} or more")
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
    findings = [] if rows == TEST09_ROWS else [f"answers to {count_of(rows, 'row')}; the test is of {TEST09_ROWS:,}"]
    if not passed:
        findings.append(f"the mean answer has {mean:.2f} tokens; the test asks for {least} to {most}")
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
    """How many end tokens stand at the end [tokens]."""
    return int(np.argmin(ends[::-1])) if len(ends) and not ends.all() else len(ends)


def _failure(answers: Answers, good: Sequence[bool], what: str) -> str | None:
    bad = [record.line for record, fine in zip(answers.records, good, strict=True) if not fine]
    if not bad:
        return None
    named = ", ".join(map(str, bad[:MOST_NAMED])) + ", ..." * (len(bad) > MOST_NAMED)
    return f"{len(bad):,} of {count_of(len(good), 'answer')} {what}: {answers.path}, line {named}"
