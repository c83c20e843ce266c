"""``mlperf_log_accuracy.json`` as LoadGen writes it -> the token ids of every answer."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megatoken.errors import UsageError
from megatoken.text import count_of

LOG = "mlperf_log_accuracy.json"
SCORES = "accuracy.json"  # of an evaluation
WHOLE_RUN = "megatoken run --mode accuracy"  # logs the answers to all rows
ABANDONED = "ABANDONED.txt"  # beside the log of a run that was interrupted
_INT32, _INT64 = np.dtype("<i4"), np.dtype("<i8")


class AccuracyLogError(UsageError):
    """An accuracy log cannot be read or does not fit the data set; the message names file and line."""


@dataclass(frozen=True, slots=True)
class Answer:
    """One record of the log.

    Attributes:
        line: Where it stands, from 1.
        sequence: ``seq_id``, the position of the sample among all that LoadGen issued.
        row: ``qsl_idx``, the row of LoadGen's library.
        data: The bytes of all token ids.
        token_count: How many tokens the system said it made; None where the log does not say.
        first_token: The bytes that were reported first; None where none were logged, as in Offline.
    """

    line: int
    sequence: int
    row: int
    data: bytes
    token_count: int | None
    first_token: bytes | None


@dataclass(frozen=True, slots=True)
class Answers:
    """All records of a log, in its order, and what identifies the file."""

    path: Path
    records: tuple[Answer, ...]
    sha256: str
    size_bytes: int

    def token_type(self) -> np.dtype[Any]:
        """int32 or int64, little-endian: what the ids are stored as, which the log itself does not say.

        Where token counts decide, they do. Otherwise int64 shows in every second word of 32 bits being 0.
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
        """The ids of every record.

        Raises:
            AccuracyLogError: An answer is no whole number of ids.
        """
        kind = self.token_type()
        for record in self.records:
            if len(record.data) % kind.itemsize:
                raise AccuracyLogError(
                    f"{self.path}:{record.line}: data of {len(record.data):,} bytes is no whole number of {kind.name} "
                    "ids; answers must be logged as int32 or int64"
                )
        return [np.frombuffer(record.data, kind).astype(np.int64) for record in self.records]


def read_answers(path: Path, logged_by: str = WHOLE_RUN) -> Answers:
    """Reads a whole accuracy log; ``logged_by`` is the command that makes one with answers in it.

    Raises:
        AccuracyLogError: It cannot be read, is no such log, was truncated, has no end or holds no answer.
    """
    digest = hashlib.sha256()
    records = []
    size_bytes = 0
    opened = ended = False
    for number, line in _lines(path):
        digest.update(line)
        size_bytes += len(line)
        text = line.strip()
        if text == b"...":
            raise AccuracyLogError(f"{path}:{number}: the log was truncated for a submission; evaluate the whole one")
        opened |= text.startswith(b"[")
        ended = text.endswith(b"]")
        record = text.removeprefix(b"[").removesuffix(b"]").strip().removesuffix(b",")
        if record:
            records.append(_record(path, number, record))
    if not opened or not ended:
        raise AccuracyLogError(f"{path}: no whole list of answers; was the run or the copy cut short?")
    if not records:
        raise AccuracyLogError(f"{path}: holds no answers; {logged_by} logs them")
    return Answers(path, tuple(records), digest.hexdigest(), size_bytes)


def find_log(path: Path) -> Path:
    """The accuracy log that ``path`` means: itself, in that folder, or in the ``mlperf`` folder of a run folder.

    Raises:
        AccuracyLogError: There is none, or it is of a run that was interrupted.
    """
    places = (path, path / LOG, path / "mlperf" / LOG)
    found = next((place for place in places if place.is_file()), None)
    if found is None:
        raise AccuracyLogError(f"{path}: no {LOG} there; give a run folder, LoadGen's output folder, or the file")
    if found == path and path.name == SCORES:
        raise AccuracyLogError(f"{path}: scores, no answers; give the run folder, or the folder with {LOG}")
    if (found.parent / ABANDONED).exists():
        raise AccuracyLogError(f"{found}: the run was interrupted and its last answers are empty; run it again")
    return found


def check_rows(answers: Answers, rows: int, *, partial: bool = False) -> None:
    """Holds the rows answered against a data set of ``rows`` rows: each once, none beyond it.

    Args:
        answers: The log.
        rows: Of the data set.
        partial: Rows may be missing.

    Raises:
        AccuracyLogError: Names the first row that is doubled, beyond the data set, or missing.
    """
    seen: dict[int, int] = {}
    for record in answers.records:
        place = f"{answers.path}:{record.line}"
        if record.row >= rows:
            raise AccuracyLogError(
                f"{place}: qsl_idx {record.row:,} is outside the data set of {count_of(rows, 'row')}; give the one "
                "that was run"
            )
        if record.row in seen:
            raise AccuracyLogError(
                f"{place}: qsl_idx {record.row:,} was answered already on line {seen[record.row]:,}; an accuracy run "
                "asks for each row once, so this log is of another run, or of two"
            )
        seen[record.row] = record.line
    if len(seen) < rows and not partial:
        first = next(row for row in range(rows) if row not in seen)
        raise AccuracyLogError(
            f"{answers.path}: {rows - len(seen):,} of {count_of(rows, 'row')} have no answer, the first is "
            f"qsl_idx {first:,}; {WHOLE_RUN} answers all of them, --partial scores those that are there"
        )


def _lines(path: Path) -> Iterator[tuple[int, bytes]]:
    try:
        with path.open("rb") as file:
            yield from enumerate(file, 1)
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise AccuracyLogError(f"{path}: cannot be read, {reason}") from None


def _record(path: Path, number: int, text: bytes) -> Answer:
    try:
        fields = json.loads(text)
        sequence, row, count = fields["seq_id"], fields["qsl_idx"], fields.get("token_count")
        data = bytes.fromhex(fields["data"])
        first = bytes.fromhex(fields["token_data"]) if "token_data" in fields else None
        known = all(type(value) is int and value >= 0 for value in (sequence, row))
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        known = False
    if not known or not (count is None or type(count) is int):
        shown = text[:40].decode("utf-8", "backslashreplace")
        raise AccuracyLogError(f"{path}:{number}: no answer as LoadGen logs it, one on a line: {shown!a}")
    return Answer(number, sequence, row, data, count, first)
