"""Messages between a run and the process that holds LoadGen: samples issued one way, answers the other.

A message is bytes with a kind in front; framing is the connection's affair. Both ends are on one machine, so numbers
are in its byte order.
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
    """Samples of one call of LoadGen, numbered on from the call before; the time is ``time.monotonic_ns()``."""

    issued_ns: int
    rows: list[int]


class FirstToken(NamedTuple):
    """The first token of a sample exists."""

    sample: int
    token_id: int


class Completion(NamedTuple):
    """A sample is done. ``token_ids`` may be left out: LoadGen counts ``output_tokens``."""

    sample: int
    output_tokens: int
    token_ids: Sequence[int]


def pack_issued(issued_ns: int, rows: Sequence[int]) -> bytes:
    """A message of kind ``ISSUED``."""
    return ISSUED + _TIME.pack(issued_ns) + np.asarray(rows, np.int64).tobytes()


def unpack_issued(message: bytes) -> Issued:
    """What ``pack_issued`` packed."""
    (issued_ns,) = _TIME.unpack_from(message, 1)
    return Issued(issued_ns, np.frombuffer(message, np.int64, offset=1 + _TIME.size).tolist())


def pack_answers(first: Sequence[FirstToken], completions: Sequence[Completion]) -> bytes:
    """What one step of the target brought; every first token counts as earlier than every completion."""
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
    """What ``pack_answers`` packed.

    Returns:
        First tokens [F, 2] as sample and id; completions [C, 3] as sample, output tokens and number of ids; all ids.
    """
    first, completions, ids = _COUNTS.unpack_from(message)
    begin = _COUNTS.size
    firsts = np.frombuffer(message, np.int64, 2 * first, begin).reshape(first, 2)
    begin += firsts.nbytes
    heads = np.frombuffer(message, np.int64, 3 * completions, begin).reshape(completions, 3)
    return firsts, heads, np.frombuffer(message, np.int32, ids, begin + heads.nbytes)
