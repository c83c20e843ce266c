"""mlperf_log_accuracy.json, read as a stream: one record of LoadGen's per answer; and accuracy.txt, its scores."""

from __future__ import annotations

import hashlib
import re
from array import array
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megatoken.errors import UsageError
from megatoken.files import Damage, UnreadableError, encoding_problem, numbered_lines, open_regular, read_text

ACCURACY_LOG = "mlperf_log_accuracy.json"
WHOLE_RUN = "megatoken run --mode accuracy"  # logs the answers to all rows
MOST_LINE_BYTES = 8 * 2**20
MOST_RECORDS = 2_000_000
MOST_LINES = 20_000_000  # beyond, lines of one byte would take hours
MOST_ANSWER_BYTES = 2 * 2**30  # of a log whose answers are held in memory
MOST_LISTED = 20
TRUNCATED_BYTES = 10_240  # a log cut by MLPerf's tool: 4,096 bytes of its start, dots, 4,096 bytes of its end
_RECORD = re.compile(
    rb'\{ "seq_id" : (\d{1,15}), "qsl_idx" : (\d{1,15}), "data" : "([0-9A-F]*)"'
    rb'(?:, "token_data" : "([0-9A-F]*)")?(?:, "token_count" : (-?\d{1,15}))? \},?\s*'
)
_INT32, _INT64 = np.dtype("<i4"), np.dtype("<i8")


class AccuracyLogError(UsageError):
    """An accuracy log cannot be read or does not fit the data set; the message names file and line."""


@dataclass
class AccuracyLog:
    """What one accuracy log holds, without the answers."""

    size_bytes: int = 0
    sha256: str = ""  # of all bytes
    records: int = 0
    lines: int = 0
    cut_line: int | None = None  # where MLPerf's tool cut it, as a submission's must be
    complete: bool = False  # starts and ends like LoadGen's
    sequence_ids: NDArray[np.int64] = field(default_factory=lambda: np.zeros(0, np.int64))  # [records]
    rows: NDArray[np.int64] = field(default_factory=lambda: np.zeros(0, np.int64))  # [records] of the data set
    data_bytes: NDArray[np.int64] = field(default_factory=lambda: np.zeros(0, np.int64))  # [records]
    token_counts: NDArray[np.int64] = field(default_factory=lambda: np.zeros(0, np.int64))  # [records], -1: not logged
    first_tokens: int = 0  # records with the token that was reported first
    first_token_differs: list[int] = field(default_factory=list)  # lines where data does not begin with token_data
    damages: list[Damage] = field(default_factory=list)
    damage_count: int = 0

    @property
    def truncated(self) -> bool:
        """Whether MLPerf's tool cut it."""
        return self.cut_line is not None


@dataclass(frozen=True, slots=True)
class Answer:
    """One record of the log."""

    line: int  # where it stands, from 1
    sequence: int  # ``seq_id``, the position of the sample among all that LoadGen issued
    row: int  # ``qsl_idx``, the row of LoadGen's library
    data: bytes  # the bytes of all token ids
    token_count: int | None  # how many tokens the system reported; None where the log does not say
    first_token: bytes | None  # the bytes that were reported first; None where none were logged, as in Offline


@dataclass(frozen=True, slots=True)
class Answers:
    """All records of a log, in its order, and what identifies the file."""

    path: Path
    records: tuple[Answer, ...]
    sha256: str
    size_bytes: int

    def token_type(self) -> np.dtype[Any]:
        """How the ids are stored: int32 or int64, little-endian. The log itself does not say.

        Token counts decide if they can. Otherwise the ids are int64 if every second word of 32 bits is 0.
        """
        counted = [record for record in self.records if record.token_count]
        fits = {
            kind: sum(len(record.data) == kind.itemsize * (record.token_count or 0) for record in counted)
            for kind in (_INT32, _INT64)
        }
        if fits[_INT32] != fits[_INT64]:
            return max(fits, key=lambda kind: fits[kind])
        words = [record.data for record in self.records if record.data]
        wide = all(len(data) % 8 == 0 and not np.frombuffer(data, "<u4")[1::2].any() for data in words)
        return _INT64 if wide and words else _INT32

    def token_ids(self) -> list[NDArray[np.int64]]:
        """The ids of every record. Raises AccuracyLogError: an answer is not a whole number of ids."""
        kind = self.token_type()
        for record in self.records:
            if len(record.data) % kind.itemsize:
                raise AccuracyLogError(
                    f"{self.path}:{record.line}: data of {len(record.data):,} bytes is not a whole number of "
                    f"{kind.name} ids; answers must be logged as int32 or int64"
                )
        return [np.frombuffer(record.data, kind).astype(np.int64) for record in self.records]


def read_accuracy_log(path: Path, keep: Callable[[Answer], object] | None = None) -> AccuracyLog:
    """Reads an accuracy log of any size; ``keep`` receives every answer. Raises UnreadableError."""
    log = AccuracyLog()
    values = array("q")
    digest = hashlib.sha256()
    try:
        with open_regular(path) as file:
            if problem := encoding_problem(file.peek(4096) if hasattr(file, "peek") else b""):
                raise UnreadableError(problem)
            opened = closed = False
            for number, line in numbered_lines(file, MOST_LINE_BYTES, digest.update):
                log.lines = number
                if number > MOST_LINES:
                    raise UnreadableError(f"holds more than {MOST_LINES:,} lines, which no accuracy log does")
                if line is None:
                    _damage(log, number, b"a line too long for any answer")
                    continue
                text = line.strip()
                if not text:
                    continue
                if text == b"[" and not opened:
                    opened = True
                elif text == b"[]" and not opened:
                    opened = closed = True
                elif text == b"]":
                    closed = True
                elif text == b"...":
                    log.cut_line = log.cut_line or number
                elif found := _RECORD.fullmatch(text):
                    _take(log, number, found, values, keep)
                else:
                    _damage(log, number, text)
            log.sha256, log.size_bytes = digest.hexdigest(), file.tell()
            log.complete = opened and closed
    except OSError as error:
        raise UnreadableError(f"cannot be read: {error.strerror or error}") from None
    table = np.frombuffer(values, dtype=np.int64).reshape(-1, 4)
    log.sequence_ids, log.rows, log.data_bytes, log.token_counts = table.T
    return log


def read_answers(path: Path, logged_by: str = WHOLE_RUN) -> Answers:
    """Reads a whole accuracy log; ``logged_by`` is the command that logs answers.

    Raises:
        AccuracyLogError: It cannot be read, has other lines than LoadGen's, was truncated, has no end or no answer, or
            is too large to be held in memory.
    """
    records: list[Answer] = []
    try:
        if path.stat().st_size > MOST_ANSWER_BYTES:
            raise UnreadableError(f"is larger than {MOST_ANSWER_BYTES // 2**30} GiB")
        log = read_accuracy_log(path, records.append)
    except OSError as error:
        raise AccuracyLogError(f"{path}: cannot be read: {error.strerror or error}") from None
    except (UnreadableError, ValueError) as error:
        raise AccuracyLogError(f"{path}: {error}") from None
    if log.damages and not (log.cut_line and log.cut_line < (log.damages[0].line or 0)):
        damage = log.damages[0]
        raise AccuracyLogError(
            f"{path}:{damage.line}: not an answer as LoadGen logs it, one per line: {damage.what[:40]!a}"
        )
    if log.cut_line is not None:
        raise AccuracyLogError(f"{path}:{log.cut_line}: the log was truncated for a submission; use the whole log")
    if not log.complete:
        raise AccuracyLogError(f"{path}: not a whole list of answers; was the run or the copy cut short?")
    if not records:
        raise AccuracyLogError(f"{path}: holds no answers; {logged_by} logs them")
    return Answers(path, tuple(records), log.sha256, log.size_bytes)


def _take(
    log: AccuracyLog,
    number: int,
    found: re.Match[bytes],
    values: array[int],
    keep: Callable[[Answer], object] | None,
) -> None:
    sequence, row, data, first_token, count = found.groups()
    if len(data) % 2 or len(first_token or b"") % 2:
        _damage(log, number, found.group())
        return
    log.records += 1
    if len(values) < 4 * MOST_RECORDS:
        values.extend((int(sequence), int(row), len(data) // 2, -1 if count is None else int(count)))
    log.first_tokens += first_token is not None
    if first_token is not None and len(log.first_token_differs) < MOST_LISTED:
        common = min(len(data), len(first_token))
        if data[:common] != first_token[:common]:
            log.first_token_differs.append(number)
    if keep is not None:
        first = None if first_token is None else bytes.fromhex(first_token.decode())
        tokens = None if count is None else int(count)
        keep(Answer(number, int(sequence), int(row), bytes.fromhex(data.decode()), tokens, first))


def _damage(log: AccuracyLog, number: int, text: bytes) -> None:
    log.damage_count += 1
    if len(log.damages) < MOST_LISTED:
        log.damages.append(Damage(number, text[:80].decode("utf-8", "backslashreplace")))


@dataclass(frozen=True, slots=True)
class AccuracyScores:
    """accuracy.txt: scores by lower-case name, the line of each, and the hash of the log before it was truncated."""

    scores: dict[str, float]
    lines: dict[str, int]
    hash: str | None


def read_accuracy_scores(path: Path) -> AccuracyScores:
    """Reads an accuracy.txt. Raises UnreadableError."""
    text, _ = read_text(path)
    scores: dict[str, float] = {}
    lines: dict[str, int] = {}
    digest = None
    for number, line in enumerate(text.splitlines(), 1):
        if found := re.match(r"hash=(\w+)\s*$", line):
            digest = digest or found.group(1)
            continue
        if not line.lstrip().startswith(("{", "Results", "Evaluating")) and "'" not in line and '"' not in line:
            continue
        for key, number_text in re.findall(
            r"""['"]([\w. -]{1,40})['"]\s*:\s*(?:np\.float64\()?['"]?(-?\d{1,15}(?:\.\d{1,15})?)""", line
        ):
            name = key.strip().lower()
            if name not in scores:
                scores[name] = float(number_text)
                lines[name] = number
    return AccuracyScores(scores, lines, digest)
