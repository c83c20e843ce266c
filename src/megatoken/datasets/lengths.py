"""A CSV of token lengths -> requests of random ids whose answers have exactly those lengths."""

from __future__ import annotations

import hashlib
import threading
from array import array
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from megatoken.datasets.lines import read_lines
from megatoken.datasets.requests import Dataset, LazyRows
from megatoken.engine.request import Request
from megatoken.errors import DatasetError
from megatoken.text import count_of

LLAMA2_70B_LENGTHS = Path(__file__).parents[1] / "data" / "llama2_70b_offline_lengths.csv"
_LENGTHS_HEADER = "input_tokens,output_tokens"
_LARGEST_LENGTH = 2**31 - 1


def load_lengths(path: Path | None, *, vocabulary_size: int, max_length: int, seed: int = 0) -> Dataset:
    """Load a CSV of ``input_tokens,output_tokens`` as prompts of random ids whose answers have the full length.

    Lines that start with ``#`` are comments; ``path`` None: the lengths of MLPerf's llama2-70b Offline data set, which
    ship with this package. The ids of a row, below ``vocabulary_size``, depend only on ``seed`` (0 to 2**64 - 1) and
    the position of the row. A row longer than the context of ``max_length`` is scaled down, prompt and answer by the
    same factor; a note gives the number of such rows.

    Raises:
        DatasetError: The file cannot be read, or a row is not two whole numbers above 0.
    """
    path = path or LLAMA2_70B_LENGTHS
    digest = hashlib.sha256()
    comments: list[str] = []
    header_seen = False
    lengths = array("q")
    for place, content in read_lines(path, digest.update):
        try:
            line = content.decode().strip()
        except UnicodeDecodeError as error:
            raise DatasetError(
                f"{place}: byte {error.start + 1} of the line is not UTF-8; save the file as UTF-8"
            ) from None
        if line.startswith("#"):
            comments.append(line.lstrip("# "))
        elif line and not header_seen:
            if line != _LENGTHS_HEADER:
                raise DatasetError(f"{place}: the header is {line[:40]!a}; it must be {_LENGTHS_HEADER}")
            header_seen = True
        elif line:
            lengths.extend(_parse_lengths(line, place))
    if not lengths:
        raise DatasetError(f"{path}: the file has no rows; write {_LENGTHS_HEADER} and one row per request")
    pairs = np.frombuffer(lengths, dtype=np.int64).reshape(-1, 2)
    inputs, outputs, notes = fit_lengths(pairs[:, 0], pairs[:, 1], max_length)

    ids = RandomIds(vocabulary_size, seed)

    def make(row: int) -> Request:
        return Request(ids.draw(row, int(inputs[row])), int(outputs[row]), ignore_end_token=True)

    return Dataset(
        name=path.name,
        source=" ".join(comments) or str(path),
        requests=LazyRows(len(inputs), make),
        content_hash=digest.hexdigest(),
        input_tokens=inputs,
        output_limits=outputs,
        fills_limit=np.ones(len(outputs), dtype=np.bool_),
        notes=notes,
    )


def _parse_lengths(line: str, place: str) -> list[int]:
    cells = [cell.strip() for cell in line.split(",")]
    if len(cells) != 2:
        raise DatasetError(f"{place}: {count_of(len(cells), 'value')}; a row is {_LENGTHS_HEADER}")
    for name, cell in zip(_LENGTHS_HEADER.split(","), cells, strict=True):
        # int() would also take "1_000" and digits of other scripts.
        if not (cell.isascii() and cell.isdigit() and len(cell) < 11 and 1 <= int(cell) <= _LARGEST_LENGTH):
            raise DatasetError(f"{place}: {name} is {cell[:40]!a}; it must be a whole number, 1 or more")
    return [int(cell) for cell in cells]


def fit_lengths(
    inputs: NDArray[np.int64], outputs: NDArray[np.int64], max_length: int
) -> tuple[NDArray[np.int64], NDArray[np.int64], tuple[str, ...]]:
    """Lengths [N] of prompts and answers that fit into a context of ``max_length``, and a note on those that did not.

    A row that exceeds it is scaled down to it, prompt and answer by the same factor.
    """
    totals = inputs + outputs
    long = totals > max_length
    if not long.any():
        return inputs, outputs, ()
    fitted_inputs = np.where(long, np.clip(inputs * max_length // totals, 1, max_length - 1), inputs)
    fitted_outputs = np.where(long, max_length - fitted_inputs, outputs)
    note = (
        f"{long.sum():,} of {count_of(len(totals), 'row')} exceeded the context of {max_length:,} tokens and were "
        f"scaled down to it, prompt and answer by the same factor: {totals.sum():,} tokens became "
        f"{np.minimum(totals, max_length).sum():,}"
    )
    return fitted_inputs, fitted_outputs, (note,)


class RandomIds:
    """Ids below ``vocabulary_size`` that depend on ``seed`` and a number alone."""

    def __init__(self, vocabulary_size: int, seed: int) -> None:
        self._vocabulary_size = np.uint64(vocabulary_size)
        # A generator is only set back, which takes a tenth of the time of making one: ids are drawn while a load runs.
        self._generator = np.random.Philox(key=np.array([seed, 0], dtype=np.uint64))
        self._start = self._generator.state
        self._lock = threading.Lock()

    def draw(self, number: int, count: int) -> list[int]:
        """``count`` ids; fewer are the first of more."""
        with self._lock:
            self._start["state"]["key"][1] = number
            self._generator.state = self._start
            raw = self._generator.random_raw(count)  # the counter's raw output does not change between releases
        return (raw % self._vocabulary_size).tolist()  # type: ignore[no-any-return]
