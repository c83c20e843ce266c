"""How much longer the steps of a ``tokenizer.json`` can make a text, from the file alone, before anything runs."""

from __future__ import annotations

import base64
import math


def growth(step: object) -> float:
    """Bytes of the longest output of a normalizer, pre-tokenizer or decoder per byte of its input, at most.

    Steps in a sequence multiply. A step of a kind that cannot repeat what it adds counts as 1.
    """
    match step:
        case {"type": "Sequence", "normalizers": [*steps]}:
            return math.prod(map(growth, steps))
        case {"type": "Sequence", "pretokenizers": [*steps]}:
            return math.prod(map(growth, steps))
        case {"type": "Sequence", "decoders": [*steps]}:
            return math.prod(map(growth, steps))
        case {"type": "Replace", "pattern": {"String": str(pattern)}, "content": str(content)} if pattern:
            return max(1.0, _size(content) / _size(pattern))
        case {"type": "Replace", "content": str(content)}:  # an expression can match between any two characters
            return 1.0 + _size(content)
        case {"type": "Prepend", "prepend": str(text)}:
            return 1.0 + _size(text)
        case {"type": "Precompiled", "precompiled_charsmap": str(table)}:
            return _longest_replacement(base64.b64decode(table))
        case {"type": "ByteLevel"}:  # bytes that do not print become characters of two
            return 2.0
    return 1.0


def _longest_replacement(table: bytes) -> float:
    """Of SentencePiece's table: the size of a trie, the trie, then texts that end with a zero byte."""
    trie_bytes = int.from_bytes(table[:4], "little")
    return max(1.0, *map(len, table[4 + trie_bytes :].split(b"\0")))


def _size(text: str) -> float:
    return float(len(text.encode("utf-8", "surrogatepass")))
