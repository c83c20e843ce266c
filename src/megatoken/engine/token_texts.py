"""What each token adds to a text, for tokenizers whose tokens stand for bytes whatever their neighbours are."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Any

from tokenizers import Tokenizer as FastTokenizer

_SPACE_MARK = "\N{LOWER ONE EIGHTH BLOCK}"
_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


class TokenTexts(dict[int, str | bytes]):
    """By token id: its text, or its bytes if they are not whole characters. Filled at first use.

    Ids without a token, and special tokens unless ``keep_special``, add nothing.
    """

    def __init__(self, tokenizer: FastTokenizer, to_bytes: Callable[[str], bytes], leading: int, keep: bool) -> None:
        """``to_bytes``: from a token as the vocabulary writes it; ``keep``: special tokens are part of the text."""
        self.leading_spaces = leading  # how many spaces the tokenizer leaves out at the beginning of a text
        self._tokenizer = tokenizer
        self._to_bytes = to_bytes
        added = tokenizer.get_added_tokens_decoder()
        self._left_out = frozenset() if keep else frozenset(one for one, token in added.items() if token.special)

    def __missing__(self, token_id: int) -> str | bytes:
        """Look a token up in the vocabulary."""
        token = None if token_id in self._left_out else self._tokenizer.id_to_token(token_id)
        if token is None:
            return ""
        data = self._to_bytes(token)
        try:
            text: str | bytes = data.decode()
        except UnicodeDecodeError:
            text = data
        self[token_id] = text
        return text


def token_texts(tokenizer: FastTokenizer, *, keep_special: bool) -> TokenTexts | None:
    """The table of a byte-level or byte-fallback tokenizer; None for other kinds, whose tokens depend on neighbours."""
    decoder = json.loads(tokenizer.decoder.__getstate__()) if tokenizer.decoder is not None else {}
    if decoder.get("type") == "ByteLevel":
        return TokenTexts(tokenizer, _byte_level_bytes, 0, keep_special)
    leading = _byte_fallback_strip(decoder)
    return None if leading is None else TokenTexts(tokenizer, _byte_fallback_bytes, leading, keep_special)


def _byte_fallback_strip(decoder: dict[str, Any]) -> int | None:
    """How many leading spaces the decoder of Llama 2, Mistral, Gemma and Phi leaves out; None: it is another one."""
    replace = {"type": "Replace", "pattern": {"String": _SPACE_MARK}, "content": " "}
    match decoder.get("decoders"):
        case [first, {"type": "ByteFallback"}, {"type": "Fuse"}] if first == replace:
            return 0
        case [first, {"type": "ByteFallback"}, {"type": "Fuse"}, {"type": "Strip", "content": " ", "stop": 0} as strip]:
            return int(strip["start"]) if first == replace else None
    return None


def _byte_level_characters() -> dict[int, int]:
    """The byte behind each character of a byte-level vocabulary: printable Latin-1 for itself, others moved."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    moved = [byte for byte in range(0x100) if byte not in printable]
    return {byte: byte for byte in printable} | {0x100 + place: byte for place, byte in enumerate(moved)}


_BYTE_OF = _byte_level_characters()


def _byte_level_bytes(token: str) -> bytes:
    if all(ord(character) in _BYTE_OF for character in token):
        return token.translate(_BYTE_OF).encode("latin-1")
    return token.encode()  # an added token written in characters that stand for no byte


def _byte_fallback_bytes(token: str) -> bytes:
    token = token.replace(_SPACE_MARK, " ")
    found = _BYTE_TOKEN.fullmatch(token)
    return bytes([int(found[1], 16)]) if found else token.encode()
