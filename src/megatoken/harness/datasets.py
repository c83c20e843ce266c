"""Files of work -> requests: prompts as JSON lines, a table of token lengths, MLPerf's OpenOrca pickle.

A data set is checked whole when it is loaded, so a run never meets a bad request later. Requests are kept as arrays and
made when they are asked for: a million prompts cost little more than their tokens.
"""

from __future__ import annotations

import hashlib
import struct
from array import array
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import overload

import numpy as np
from numpy.typing import NDArray

from megatoken.engine.request import Request, Sampling
from megatoken.errors import DatasetError, RequestError
from megatoken.harness.dataframe_pickle import read_columns
from megatoken.harness.prompt_lines import parse_prompt_line

LLAMA2_70B_LENGTHS = Path(__file__).parents[1] / "data" / "llama2_70b_offline_lengths.csv"
GREEDY = Sampling()
_OPENORCA_MEND = "fetch MLPerf's tokenized OpenOrca pickle again"
OPENORCA_MAX_TOKENS = 1024  # max_new_tokens of the MLPerf llama2-70b reference
_BYTE_ORDER_MARK = b"\xef\xbb\xbf"
_LENGTHS_HEADER = "input_tokens,output_tokens"
_LARGEST_LENGTH = 2**31 - 1


@dataclass(frozen=True, slots=True, eq=False)
class Dataset:
    """The requests of one file, by row.

    Attributes:
        name: The file's name.
        source: Where the rows come from: the path, or what a table of lengths says of itself in its comment lines.
        requests: One request per row, made when it is asked for.
        content_hash: SHA-256 of the file, hexadecimal.
        input_tokens: Prompt length of each row, int64.
        output_limits: ``max_tokens`` of each row, int64.
        fills_limit: Whether the answer of each row surely has that many tokens, bool: nothing can end it earlier.
        notes: What was changed to make rows fit, for the report.
    """

    name: str
    source: str
    requests: Sequence[Request]
    content_hash: str
    input_tokens: NDArray[np.int64]
    output_limits: NDArray[np.int64]
    fills_limit: NDArray[np.bool_]
    notes: tuple[str, ...]


def load_prompts(
    path: Path,
    *,
    encode: Callable[[str], list[int]] | None,
    vocabulary_size: int,
    max_length: int,
    default_max_tokens: int = 128,
    sampling: Sampling = GREEDY,
) -> Dataset:
    """Loads JSON lines: ``{"prompt": text}`` or ``{"prompt_token_ids": [...]}`` and options; blank lines are skipped.

    A ``max_tokens`` that a line states is kept or refused; ``default_max_tokens`` is cut to what the context leaves.
    Options as for ``parse_prompt_line``.

    Args:
        path: The file.
        encode: Text to token ids; None if the model has no tokenizer.
        vocabulary_size: Ids run from 0 to one less.
        max_length: Most tokens, prompt and answer together, that one request may have.
        default_max_tokens: ``max_tokens`` of prompts that state none.
        sampling: Sampling values of prompts that state none.

    Raises:
        DatasetError: The file cannot be read, or a line of it cannot be served.
    """
    rows = _Rows(path, vocabulary_size, max_length, default_max_tokens)
    digest = hashlib.sha256()
    for place, line in _read_lines(path, digest.update):
        if line.isspace():
            continue
        fields = parse_prompt_line(line, sampling, place)
        ids = fields.prompt
        if isinstance(ids, str):
            if encode is None:
                raise DatasetError(
                    f"{place}: the prompt is text but the model has no tokenizer.json; "
                    "add it to the model's folder or give prompt_token_ids"
                )
            try:
                ids = encode(ids)
            except RequestError as error:
                raise DatasetError(f"{place}: {error}") from error
        rows.add(place, ids, fields.max_tokens, fields.sampling, fields.stop_token_ids, fields.ignore_end_token)
    return rows.dataset(digest.hexdigest())


def load_openorca(path: Path, *, vocabulary_size: int, max_length: int) -> Dataset:
    """Loads MLPerf's pickled OpenOrca table without executing it; row position is the sample's index.

    Prompts are the ``tok_input`` column as it is; an answer may have ``OPENORCA_MAX_TOKENS`` tokens or what the context
    leaves. Arguments and errors as for ``load_prompts``.
    """
    try:
        data = path.read_bytes()
    except (OSError, ValueError) as error:
        raise _unreadable(path, error) from error
    columns = read_columns(data, ("tok_input", "tok_input_length"), str(path))
    if "tok_input" not in columns:
        raise DatasetError(f"{path}: the table has no column tok_input; {_OPENORCA_MEND}")
    lengths = columns.get("tok_input_length", [])
    rows = _Rows(path, vocabulary_size, max_length, OPENORCA_MAX_TOKENS)
    for row, cell in enumerate(columns["tok_input"]):
        place = f"{path}, row {row}"
        if isinstance(cell, np.ndarray) and cell.dtype.kind in "iu":
            cell = cell.tolist()
        if not isinstance(cell, list) or not set(map(type, cell)) <= {int}:
            raise DatasetError(f"{place}: tok_input is not a list of token ids; {_OPENORCA_MEND}")
        length = lengths[row] if row < len(lengths) else None
        if lengths and not (isinstance(length, int) and length == len(cell)):
            raise DatasetError(
                f"{place}: tok_input has {len(cell):,} tokens but tok_input_length says otherwise; {_OPENORCA_MEND}"
            )
        rows.add(place, cell)
        if len(rows.tokens) > len(data):  # rows may share one list, so a small file could claim any amount of memory
            raise DatasetError(f"{place}: the rows repeat each other beyond the file's size; {_OPENORCA_MEND}")
    return rows.dataset(hashlib.sha256(data).hexdigest())


def load_lengths(path: Path | None, *, vocabulary_size: int, max_length: int, seed: int = 0) -> Dataset:
    """Loads a CSV of ``input_tokens,output_tokens`` as prompts of random ids whose answers run to their full length.

    The ids of a row depend on ``seed`` and the row's position only. A row longer than the context is scaled down to it,
    prompt and answer by the same factor; a note says how many were.

    Args:
        path: The file, lines that start with ``#`` being comments; None for the token lengths of MLPerf's llama2-70b
            Offline data set, which ship with this package.
        vocabulary_size: Ids are drawn from 0 to one less.
        max_length: Most tokens, prompt and answer together, that one request may have; at least 2.
        seed: Of the random ids, 0 to 2**64 - 1.

    Raises:
        DatasetError: The file cannot be read or a row of it is not two whole numbers above 0.
    """
    path = path or LLAMA2_70B_LENGTHS
    digest = hashlib.sha256()
    comments: list[str] = []
    header_seen = False
    lengths = array("q")
    for place, content in _read_lines(path, digest.update):
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
    inputs, outputs, notes = _fit(pairs[:, 0], pairs[:, 1], max_length)

    def make(row: int) -> Request:
        # Raw output of a counter-based generator, because NumPy keeps that the same from release to release.
        raw = np.random.Philox(key=np.array([seed, row], dtype=np.uint64)).random_raw(int(inputs[row]))
        ids = (raw % np.uint64(vocabulary_size)).tolist()
        return Request(prompt=ids, max_tokens=int(outputs[row]), ignore_end_token=True)

    return Dataset(
        name=path.name,
        source=" ".join(comments) or str(path),
        requests=_LazyRequests(len(inputs), make),
        content_hash=digest.hexdigest(),
        input_tokens=inputs,
        output_limits=outputs,
        fills_limit=np.ones(len(outputs), dtype=np.bool_),
        notes=notes,
    )


def _parse_lengths(line: str, place: str) -> list[int]:
    cells = [cell.strip() for cell in line.split(",")]
    if len(cells) != 2:
        raise DatasetError(f"{place}: {len(cells)} values; a row is {_LENGTHS_HEADER}")
    for name, cell in zip(_LENGTHS_HEADER.split(","), cells, strict=True):
        # int() would also take "1_000" and digits of other scripts.
        if not (cell.isascii() and cell.isdigit() and len(cell) < 11 and 1 <= int(cell) <= _LARGEST_LENGTH):
            raise DatasetError(f"{place}: {name} is {cell[:40]!a}; it must be a whole number, 1 or more")
    return [int(cell) for cell in cells]


def _fit(
    inputs: NDArray[np.int64], outputs: NDArray[np.int64], max_length: int
) -> tuple[NDArray[np.int64], NDArray[np.int64], tuple[str, ...]]:
    totals = inputs + outputs
    long = totals > max_length
    if not long.any():
        return inputs, outputs, ()
    fitted_inputs = np.where(long, np.clip(inputs * max_length // totals, 1, max_length - 1), inputs)
    fitted_outputs = np.where(long, max_length - fitted_inputs, outputs)
    note = (
        f"{long.sum():,} of {len(totals):,} rows exceeded the context of {max_length:,} tokens and were scaled down to "
        f"it, prompt and answer alike: {totals.sum():,} tokens became {np.minimum(totals, max_length).sum():,}"
    )
    return fitted_inputs, fitted_outputs, (note,)


def _read_lines(path: Path, update: Callable[[bytes], None]) -> Iterator[tuple[str, bytes]]:
    """Yields (place for errors, line); ``update`` sees every byte of the file."""
    try:
        with path.open("rb") as file:
            for number, line in enumerate(file, 1):
                update(line)
                yield f"{path}, line {number}", line.removeprefix(_BYTE_ORDER_MARK) if number == 1 else line
    except (OSError, ValueError) as error:
        raise _unreadable(path, error) from error


def _unreadable(path: Path, error: OSError | ValueError) -> DatasetError:
    reason = error.strerror if isinstance(error, OSError) else error
    return DatasetError(f"{path}: cannot be read, {reason}; give the path of a data file")


class _LazyRequests(Sequence[Request]):
    def __init__(self, count: int, make: Callable[[int], Request]) -> None:
        self._rows = range(count)
        self._make = make

    def __len__(self) -> int:
        return len(self._rows)

    @overload
    def __getitem__(self, index: int) -> Request: ...
    @overload
    def __getitem__(self, index: slice) -> list[Request]: ...
    def __getitem__(self, index: int | slice) -> Request | list[Request]:
        rows = self._rows[index]
        return self._make(rows) if isinstance(rows, int) else [self._make(row) for row in rows]


_OPTIONS = np.dtype(
    [
        ("max_tokens", "<i4"),
        ("temperature", "<f8"),
        ("top_k", "<i4"),
        ("top_p", "<f8"),
        ("seed", "<i8"),
        ("ignore_end_token", "?"),
    ]
)
_NO_SEED = -1
_PACKED_OPTIONS = struct.Struct("<idIdq?")


class _Rows:
    """Checks prompts against model and context and keeps them end to end in flat buffers."""

    def __init__(self, path: Path, vocabulary_size: int, max_length: int, default_max_tokens: int) -> None:
        self._path = path
        self._vocabulary_size = vocabulary_size
        self._max_length = max_length
        self._default_max_tokens = default_max_tokens
        self.tokens = array("i")
        self._ends = array("q", [0])
        self._options = bytearray()
        self._stop_token_ids: dict[int, tuple[int, ...]] = {}
        self._shortened = 0

    def add(
        self,
        place: str,
        ids: list[int],
        max_tokens: int | None = None,
        sampling: Sampling = GREEDY,
        stop_token_ids: tuple[int, ...] = (),
        ignore_end_token: bool = False,
    ) -> None:
        if not ids:
            raise DatasetError(f"{place}: the prompt is empty; a request needs at least one token")
        self._check_ids(place, "token id", ids)
        self._check_ids(place, "stop token id", stop_token_ids)
        room = self._max_length - len(ids)
        if room < 1:
            raise DatasetError(
                f"{place}: a prompt of {len(ids):,} tokens leaves no room for an answer in the context of "
                f"{self._max_length:,}; shorten it to {self._max_length - 1:,} or raise max_length"
            )
        if max_tokens is None:
            max_tokens = min(self._default_max_tokens, room)
            self._shortened += max_tokens < self._default_max_tokens
        elif max_tokens > room:
            raise DatasetError(
                f"{place}: a prompt of {len(ids):,} tokens and max_tokens {max_tokens:,} exceed the context of "
                f"{self._max_length:,}; lower max_tokens to {room:,}"
            )
        if stop_token_ids:
            self._stop_token_ids[len(self._ends) - 1] = stop_token_ids
        self.tokens.fromlist(ids)
        self._ends.append(len(self.tokens))
        self._options += _PACKED_OPTIONS.pack(
            max_tokens,
            sampling.temperature,
            sampling.top_k,
            sampling.top_p,
            _NO_SEED if sampling.seed is None else sampling.seed,
            ignore_end_token,
        )

    def _check_ids(self, place: str, kind: str, ids: Sequence[int]) -> None:
        if ids and (min(ids) < 0 or max(ids) >= self._vocabulary_size):
            index, wrong = next(entry for entry in enumerate(ids) if not 0 <= entry[1] < self._vocabulary_size)
            shown = str(wrong) if abs(wrong) < 2**64 else "of more than 64 bits"
            raise DatasetError(
                f"{place}: {kind} {shown} at index {index} is outside the vocabulary of {self._vocabulary_size:,} "
                f"(0 to {self._vocabulary_size - 1}); use the model's own tokenizer"
            )

    def dataset(self, content_hash: str) -> Dataset:
        if not self._options:
            raise DatasetError(f"{self._path}: the file holds no prompts; give one with at least one row")
        tokens = np.frombuffer(self.tokens, dtype=np.int32)
        ends = np.frombuffer(self._ends, dtype=np.int64)
        options = np.frombuffer(self._options, dtype=_OPTIONS)
        stop_token_ids = self._stop_token_ids
        fills_limit = options["ignore_end_token"].copy()
        fills_limit[list(stop_token_ids)] = False

        def make(row: int) -> Request:
            max_tokens, temperature, top_k, top_p, seed, ignore_end_token = options[row].item()
            return Request(
                prompt=tokens[ends[row] : ends[row + 1]].tolist(),
                max_tokens=max_tokens,
                sampling=Sampling(temperature, top_k, top_p, None if seed == _NO_SEED else seed),
                stop_token_ids=stop_token_ids.get(row, ()),
                ignore_end_token=ignore_end_token,
            )

        note = (
            f"{self._shortened:,} of {len(options):,} prompts leave the answer less than {self._default_max_tokens:,} "
            f"tokens in the context of {self._max_length:,}; their answers end there"
        )
        return Dataset(
            name=self._path.name,
            source=str(self._path),
            requests=_LazyRequests(len(options), make),
            content_hash=content_hash,
            input_tokens=np.diff(ends),
            output_limits=options["max_tokens"].astype(np.int64),
            fills_limit=fills_limit,
            notes=(note,) if self._shortened else (),
        )
