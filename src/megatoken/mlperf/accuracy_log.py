"""mlperf_log_accuracy.json as a stream of records: who was answered, with how many bytes and tokens."""

from __future__ import annotations

import hashlib
import re
from array import array
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megatoken.files import Damage, UnreadableError, encoding_problem, open_regular, read_text

MOST_LINE_BYTES = 8 * 2**20
MOST_RECORDS = 2_000_000
MOST_LINES = 20_000_000  # beyond, lines of one byte would take hours
MOST_LISTED = 20
TRUNCATED_BYTES = 10_240  # a log cut by MLPerf's tool: 4,096 bytes of its start, dots, 4,096 bytes of its end
_DOTS = b"...\n"
_RECORD = re.compile(
    rb'\{ "seq_id" : (\d{1,15}), "qsl_idx" : (\d{1,15}), "data" : "([0-9A-F]*)"'
    rb'(?:, "token_data" : "([0-9A-F]*)")?(?:, "token_count" : (-?\d{1,15}))? \},?\s*'
)


@dataclass
class AccuracyLog:
    """What one accuracy log holds."""

    size_bytes: int = 0
    sha256: str = ""  # of all bytes
    records: int = 0
    lines: int = 0
    truncated: bool = False  # by MLPerf's tool, as a submission's must be
    complete: bool = False  # starts and ends like LoadGen's
    sequence_ids: NDArray[np.int64] = field(default_factory=lambda: np.zeros(0, np.int64))  # [records]
    rows: NDArray[np.int64] = field(default_factory=lambda: np.zeros(0, np.int64))  # [records] of the data set
    data_bytes: NDArray[np.int64] = field(default_factory=lambda: np.zeros(0, np.int64))  # [records]
    token_counts: NDArray[np.int64] = field(default_factory=lambda: np.zeros(0, np.int64))  # [records], -1: not logged
    first_tokens: int = 0  # records that tell what was reported as first token
    first_token_differs: list[int] = field(default_factory=list)  # lines: token_data is no beginning of data
    damages: list[Damage] = field(default_factory=list)
    damage_count: int = 0


def read_accuracy_log(path: Path) -> AccuracyLog:
    """Reads an accuracy log of any size. Raises UnreadableError."""
    log = AccuracyLog()
    values = array("q")
    digest = hashlib.sha256()
    try:
        with open_regular(path) as file:
            if problem := encoding_problem(file.peek(4096) if hasattr(file, "peek") else b""):
                raise UnreadableError(problem)
            opened = closed = False
            gap = False
            for number, line in _lines(file, log, digest.update):
                log.lines = number
                if number > MOST_LINES:
                    raise UnreadableError(f"holds more than {MOST_LINES:,} lines, which no accuracy log does")
                text = line.strip()
                if not text:
                    continue
                if text == b"[" and not opened:
                    opened = True
                elif text == b"[]" and not opened:
                    opened = closed = True
                elif text == b"]":
                    closed = True
                elif line == _DOTS or text == b"...":
                    gap = True
                elif found := _RECORD.fullmatch(text):
                    _take(log, number, found, values)
                else:
                    _damage(log, number, text)
            log.sha256 = digest.hexdigest()
            log.truncated = gap
            log.complete = opened and closed
    except OSError as error:
        raise UnreadableError(f"cannot be read: {error.strerror or error}") from None
    table = np.frombuffer(values, dtype=np.int64).reshape(-1, 4)
    log.sequence_ids, log.rows, log.data_bytes, log.token_counts = table.T
    return log


def records_of(path: Path, most_bytes: int) -> Iterator[tuple[int, int, int, bytes, bytes | None, int | None]]:
    """Line, seq_id, qsl_idx, data, token_data and token_count of every record of a log that was not cut.

    Raises:
        UnreadableError: it cannot be read, is larger than ``most_bytes``, or has other lines, dots of a cut included.
    """
    try:
        with open_regular(path) as file:
            if path.stat().st_size > most_bytes:
                raise UnreadableError(f"is larger than {most_bytes // 2**20} MiB")
            for number, line in _lines(file, AccuracyLog(), lambda _: None):
                text = line.strip()
                if found := _RECORD.fullmatch(text):
                    sequence, row, data, first, count = found.groups()
                    first_bytes = None if first is None else _bytes(first)
                    yield (
                        number,
                        int(sequence),
                        int(row),
                        _bytes(data),
                        first_bytes,
                        None if count is None else int(count),
                    )
                elif text not in (b"", b"[", b"]", b"[]"):
                    raise UnreadableError(f"has a line {number} that is no record")
    except OSError as error:
        raise UnreadableError(f"cannot be read: {error.strerror or error}") from None


def _bytes(digits: bytes) -> bytes:
    try:
        return bytes.fromhex(digits.decode())
    except ValueError:  # an odd number of digits
        raise UnreadableError("holds data that is no whole number of bytes") from None


def _take(log: AccuracyLog, number: int, found: re.Match[bytes], values: array[int]) -> None:
    log.records += 1
    sequence, row, data, first_token, count = found.groups()
    if len(values) < 4 * MOST_RECORDS:
        values.extend((int(sequence), int(row), len(data) // 2, -1 if count is None else int(count)))
    log.first_tokens += first_token is not None
    if first_token is not None and len(log.first_token_differs) < MOST_LISTED:
        common = min(len(data), len(first_token))
        if data[:common] != first_token[:common]:
            log.first_token_differs.append(number)


def _damage(log: AccuracyLog, number: int, text: bytes) -> None:
    log.damage_count += 1
    if len(log.damages) < MOST_LISTED:
        log.damages.append(Damage(number, text[:80].decode("utf-8", "backslashreplace")))


def _lines(file: Any, log: AccuracyLog, seen: Callable[[bytes], None]) -> Iterator[tuple[int, bytes]]:
    number = 0
    while line := file.readline(MOST_LINE_BYTES):
        number += 1
        seen(line)
        log.size_bytes += len(line)
        if len(line) == MOST_LINE_BYTES and not line.endswith(b"\n"):
            _damage(log, number, b"a line too long for any answer")
            while (line := file.readline(MOST_LINE_BYTES)) and not line.endswith(b"\n"):
                seen(line)
                log.size_bytes += len(line)
            seen(line)
            log.size_bytes += len(line)
            continue
        yield number, line


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
