"""The requests of a data set, checked when it is loaded and stored as arrays.

A run never meets an invalid request. Request objects are created on access, so a million prompts take little more
memory than their tokens.
"""

from __future__ import annotations

import hashlib
import struct
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import TypeVar, overload

import numpy as np
from numpy.typing import NDArray

from megatoken.engine.request import Request, Sampling
from megatoken.errors import DatasetError
from megatoken.text import count_of

GREEDY = Sampling()
Row = TypeVar("Row")


@dataclass(frozen=True, slots=True, eq=False)
class Dataset:
    """The requests of one file, by row."""

    name: str  # the file's name
    source: str  # where the rows come from: the path, or the comment lines of a CSV of lengths
    requests: Sequence[Request]  # one request per row, created on access
    content_hash: str  # SHA-256 of the file, hexadecimal
    input_tokens: NDArray[np.int64]  # prompt length of each row, int64; zeros if ``prompts_counted`` is false
    output_limits: NDArray[np.int64]  # ``max_tokens`` of each row, int64
    # whether the answer of each row always has ``output_limits`` tokens, bool: nothing ends it earlier
    fills_limit: NDArray[np.bool_]
    notes: tuple[str, ...]  # what was changed to make rows fit
    default_used: bool = False  # whether a row without ``max_tokens`` got the caller's default
    # whether the tokens of prompts are known. Only text for another tokenizer is not counted.
    prompts_counted: bool = True


@dataclass(frozen=True, slots=True)
class ChatRequest(Request):
    """A request whose prompt is a chat: ``messages`` as (role, content); ``prompt`` is their text, for counting."""

    messages: tuple[tuple[str, str], ...] = ()


@lru_cache(maxsize=2)
def rows_sha256(data_set: Dataset) -> str:
    """SHA-256 of the rows as they are sent: prompts as token ids or text, and every setting of every answer."""
    digest = hashlib.sha256()
    for request in data_set.requests:
        prompt = request.prompt
        ids = b"" if isinstance(prompt, str) else np.asarray(prompt, np.int64).tobytes()
        text = repr((prompt if isinstance(prompt, str) else len(prompt), getattr(request, "messages", ())))
        settings = (request.max_tokens, request.sampling, request.stop_token_ids, request.ignore_end_token)
        digest.update(f"{text} {settings} {request.stop} {request.grammar}\n".encode(errors="surrogatepass"))
        digest.update(ids)
    return digest.hexdigest()


class LazyRows(Sequence[Row]):
    """Objects that ``make`` creates by row, on each access: stored as objects, they would take far more memory."""

    def __init__(self, count: int, make: Callable[[int], Row]) -> None:
        self._rows = range(count)
        self._make = make

    def __len__(self) -> int:
        return len(self._rows)

    @overload
    def __getitem__(self, index: int) -> Row: ...
    @overload
    def __getitem__(self, index: slice) -> list[Row]: ...
    def __getitem__(self, index: int | slice) -> Row | list[Row]:
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


def check_ids(place: str, kind: str, ids: Sequence[int], vocabulary_size: int) -> None:
    """Raise DatasetError, which begins with ``place``, if an id is outside the vocabulary."""
    if ids and (min(ids) < 0 or max(ids) >= vocabulary_size):
        index, wrong = next(entry for entry in enumerate(ids) if not 0 <= entry[1] < vocabulary_size)
        shown = str(wrong) if abs(wrong) < 2**64 else "of more than 64 bits"
        raise DatasetError(
            f"{place}: {kind} {shown} at index {index} is outside the vocabulary of {vocabulary_size:,} "
            f"(0 to {vocabulary_size - 1}); use the model's own tokenizer"
        )


def answer_room(place: str, prompt_tokens: int, max_tokens: int | None, max_length: int) -> int:
    """The tokens that the context leaves for an answer.

    Raises:
        DatasetError: Fewer than ``max_tokens`` (None: fewer than one); begins with ``place``.
    """
    room = max_length - prompt_tokens
    prompt = f"{place}: a prompt of {count_of(prompt_tokens, 'token')}"
    if room < 1:
        raise DatasetError(
            f"{prompt} leaves no room for an answer in the context of {max_length:,}; shorten it to "
            f"{max_length - 1:,}, or raise max_length where model and cache allow more"
        )
    if max_tokens is not None and max_tokens > room:
        raise DatasetError(
            f"{prompt} and max_tokens {max_tokens:,} exceed the context of {max_length:,}; lower max_tokens to "
            f"{room:,}, or raise max_length where model and cache allow more"
        )
    return room


class RequestRows:
    """Check prompts against the model and store them in flat buffers."""

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
        self._default_used = False

    def add(
        self,
        place: str,
        ids: list[int],
        max_tokens: int | None = None,
        sampling: Sampling = GREEDY,
        stop_token_ids: tuple[int, ...] = (),
        ignore_end_token: bool = False,
    ) -> None:
        """Add a row. Raises DatasetError, which begins with ``place``, if it cannot be served."""
        if not ids:
            raise DatasetError(f"{place}: the prompt is empty; a request needs at least one token")
        check_ids(place, "token id", ids, self._vocabulary_size)
        check_ids(place, "stop token id", stop_token_ids, self._vocabulary_size)
        room = answer_room(place, len(ids), max_tokens, self._max_length)
        if max_tokens is None:
            self._default_used = True
            max_tokens = min(self._default_max_tokens, room)
            self._shortened += max_tokens < self._default_max_tokens
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

    def dataset(self, content_hash: str) -> Dataset:
        """The rows added so far. Raises DatasetError if there are none."""
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
            f"{self._shortened:,} of {count_of(len(options), 'prompt')} leave the answer fewer than "
            f"{self._default_max_tokens:,} tokens in the context of {self._max_length:,}; their answers end there"
        )
        return Dataset(
            name=self._path.name,
            source=str(self._path),
            requests=LazyRows(len(options), make),
            content_hash=content_hash,
            input_tokens=np.diff(ends),
            output_limits=options["max_tokens"].astype(np.int64),
            fills_limit=fills_limit,
            notes=(note,) if self._shortened else (),
            default_used=self._default_used,
        )
