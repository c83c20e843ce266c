"""Takes many frames of a stream apart at once, where they differ only in their pieces of text.

A server sends every token in the same envelope. What stands before and after the piece is learnt from one frame. The
pieces of the frames that follow are cut out by position, and the frames are built again from them: only if these bytes
equal those that came is the result used; otherwise the caller parses each frame.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import NamedTuple

BLANK_LINE = b"\n\n"  # after each frame
BLANK_LINE_AND_CHUNK = b"\n\n\r\n"  # where each frame is a chunk of HTTP's chunked encoding
# Whole characters and escapes of JSON strings, with a null byte, which no JSON has, between two of them. Possessive:
# what does not match would take exponential time otherwise.
_STRINGS = re.compile(rb'(?:[^"\\\x00-\x1f]++|\\["\\/bfnrtu])++(?:\x00(?:[^"\\\x00-\x1f]++|\\["\\/bfnrtu])++)*+')
_NO_STRING = re.compile(rb'["\x00-\x1f]')


class Pieces(NamedTuple):
    """Pieces of text: how many came in each read, and the whole text in UTF-8 (lone surrogates pass)."""

    counts: Sequence[int]
    text: bytes


def take_apart(reads: Sequence[bytes], head: bytes, tail: bytes, *, chunked: bool) -> Pieces | None:
    """The pieces in ``reads``, each of which ends with a frame; None where anything deviates.

    Args:
        reads: bytes in the order in which they came, each the end of one read and the start of the next.
        head: of a frame, up to its piece.
        tail: of a frame, without the blank line.
        chunked: whether each frame is a chunk; otherwise frames follow each other.
    """
    end = BLANK_LINE_AND_CHUNK if chunked else BLANK_LINE
    frames = b"".join(reads).split(end)
    frames.pop()  # nothing follows the last end
    first, last = len(head), len(tail)
    if chunked:
        pieces = [frame[frame.find(b"\n") + 1 + first : -last] for frame in frames]
        rest = first + last + len(BLANK_LINE)
        heads = {size: b"%x\r\n%b" % (size + rest, head) for size in set(map(len, pieces))}
    else:
        pieces = [frame[first:-last] for frame in frames]
        heads = dict.fromkeys(map(len, pieces), head)
    if 0 in heads or [heads[len(piece)] + piece + tail for piece in pieces] != frames:
        return None
    text = b"".join(pieces)
    if b"\\" in text or not text.isascii():
        if not _STRINGS.fullmatch(b"\0".join(pieces)):
            return None
        try:
            text = "".join(json.loads(b'["%b"]' % b'","'.join(pieces))).encode("utf-8", "surrogatepass")
        except ValueError:
            return None
    elif _NO_STRING.search(text):
        return None
    if len(reads) == len(frames):
        return Pieces([1] * len(frames), text)
    return Pieces([read.count(end) for read in reads], text)
