"""Messages between a run and the process that holds LoadGen: samples issued one way, answers the other.

A message is bytes, the first of which is its kind; the connection does the framing. Both ends are on one machine, so
numbers have its byte order.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

ISSUED, ALL_ISSUED, ENDED, FAILED = b"I", b"A", b"E", b"F"

_TIME = struct.Struct("=q")
_COUNTS = struct.Struct("=qqq")


@dataclass(frozen=True, slots=True)
class Issued:
    """Samples of one call of LoadGen; numbers continue from the call before; the times are ``time.monotonic_ns()``.

    ``due_ns`` is when a load of our own says that they are due; None: at issue, or by LoadGen's schedule. Samples given
    before they are due count as issued when they are.
    """

    issued_ns: int
    rows: list[int]
    due_ns: int | None = None


class FirstToken(NamedTuple):
    """The first token of a sample exists."""

    sample: int
    token_id: int


class Completion(NamedTuple):
    """A sample has ended. ``token_ids`` may be empty: LoadGen counts ``output_tokens``."""

    sample: int
    output_tokens: int
    token_ids: Sequence[int]


def pack_issued(issued_ns: int, rows: Sequence[int]) -> bytes:
    """A message of kind ``ISSUED``."""
    return ISSUED + _TIME.pack(issued_ns) + np.asarray(rows, np.int64).tobytes()


def unpack_issued(message: bytes) -> Issued:
    """Reverses ``pack_issued``."""
    (issued_ns,) = _TIME.unpack_from(message, 1)
    return Issued(issued_ns, np.frombuffer(message, np.int64, offset=1 + _TIME.size).tolist())


def pack_answers(first: Sequence[FirstToken], completions: Sequence[Completion]) -> bytes:
    """The answers of one step of the target; LoadGen gets the first tokens before the completions."""
    ids = [np.asarray(completion.token_ids, np.int32) for completion in completions]
    heads = [(one.sample, one.output_tokens, len(own)) for one, own in zip(completions, ids, strict=True)]
    counts = _COUNTS.pack(len(first), len(completions), sum(map(len, ids)))
    return b"".join(
        (
            counts,
            np.asarray(first, np.int64).tobytes(),
            np.asarray(heads, np.int64).tobytes(),
            *map(np.ndarray.tobytes, ids),
        )
    )


def unpack_answers(message: bytes) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int32]]:
    """Reverses ``pack_answers``.

    Returns:
        First tokens [F, 2] as sample and id; completions [C, 3] as sample, output tokens and number of ids; all ids.
    """
    first, completions, ids = _COUNTS.unpack_from(message)
    begin = _COUNTS.size
    firsts = np.frombuffer(message, np.int64, 2 * first, begin).reshape(first, 2)
    begin += firsts.nbytes
    heads = np.frombuffer(message, np.int64, 3 * completions, begin).reshape(completions, 3)
    return firsts, heads, np.frombuffer(message, np.int32, ids, begin + heads.nbytes)
