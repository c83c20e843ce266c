"""Text to ids and back, over the checkpoint's ``tokenizer.json``."""

from __future__ import annotations

import base64
import json
import math
import os
from collections.abc import Sequence
from pathlib import Path

from tokenizers import Tokenizer as FastTokenizer

from megatoken.engine.tensor_files import one_line_errors, read_whole
from megatoken.engine.token_texts import TokenTexts, token_texts
from megatoken.errors import CheckpointError, RequestError

LONG_TEXT = 4096  # characters; encoding takes milliseconds from there on
LARGEST_FILE_BYTES = 64 * 2**20
LARGEST_GROWTH = (
    1000  # a text becomes at most so many times as long, in bytes; Llama 2's tokenizer can make it 12 times
)
# One text is encoded at a time, so the library's threads bring nothing, and it warns of them at every fork.
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")


class Tokenizer:
    """A Hugging Face fast tokenizer. Special tokens are added on encoding and left out on decoding."""

    def __init__(self, file: Path) -> None:
        self.file = file
        self._token_texts: dict[bool, TokenTexts | None] = {}  # by whether special tokens are kept; made at first use
        with one_line_errors(file):
            content = read_whole(file, LARGEST_FILE_BYTES)
        try:
            _check_growth(json.loads(content))
            self._tokenizer = FastTokenizer.from_buffer(content)
            self._tokenizer.no_truncation()  # a saved file may carry both, and would cut or pad prompts in silence
            self._tokenizer.no_padding()
        except BaseException as error:
            _raise_unless_of_the_library(error)
            raise CheckpointError(
                f"{file}: not a tokenizer.json that can be read ({_one_line(error)}); export it again"
            ) from error

    @property
    def largest_id(self) -> int:
        """Of all its tokens, added ones too; -1 if it has none."""
        return max(self._tokenizer.get_vocab(with_added_tokens=True).values(), default=-1)

    def encode(self, text: str, *, add_special: bool = True, what: str = "the prompt") -> list[int]:
        """Ids of ``text``; with ``add_special`` also the special tokens that the tokenizer itself puts around it.

        Other threads run while a text of ``LONG_TEXT`` characters or more is encoded. ``what``: its name in errors.

        Raises:
            RequestError: ``text`` is not Unicode text (lone surrogates), or holds what the tokenizer has no token for.
        """
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise RequestError(
                f"{what} is not Unicode text: character {error.start + 1} is half of a surrogate pair; remove it"
            ) from error
        try:
            if len(text) < LONG_TEXT:
                return list(self._tokenizer.encode(text, add_special_tokens=add_special).ids)
            # Of the library's methods only those for batches release the interpreter's lock.
            (encoding,) = self._tokenizer.encode_batch_fast([text], add_special_tokens=add_special)
            return list(encoding.ids)
        except BaseException as error:
            _raise_unless_of_the_library(error)
            raise RequestError(f"{what} cannot be encoded: {_one_line(error)}; change the text") from error

    def single_id(self, text: str) -> int | None:
        """The id of the token that a text alone is encoded to; None if that takes several."""
        ids = self.encode(text, add_special=False)
        return ids[0] if len(ids) == 1 else None

    def decode(self, token_ids: Sequence[int], *, keep_special: bool = False) -> str:
        """Text of ``token_ids``. Raises CheckpointError: the tokenizer cannot decode its own tokens."""
        try:
            return str(self._tokenizer.decode(token_ids, skip_special_tokens=not keep_special))
        except BaseException as error:
            _raise_unless_of_the_library(error)
            raise CheckpointError(
                f"{self.file}: the decoder fails on tokens of the vocabulary ({_one_line(error)}); export it again"
            ) from error

    def token_texts(self, *, keep_special: bool = False) -> TokenTexts | None:
        """What each token adds to a text; None if that depends on the tokens around it."""
        if keep_special not in self._token_texts:
            self._token_texts[keep_special] = token_texts(self._tokenizer, keep_special=keep_special)
        return self._token_texts[keep_special]


def _raise_unless_of_the_library(error: BaseException) -> None:
    """Raise an interruption again; return if the library failed.

    It raises bare Exception for every kind of bad file, and its panics are no Exception.
    """
    if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
        raise error


def _check_growth(values: object) -> None:
    """ValueError if the file could make a text longer without bound."""
    if not isinstance(values, dict):
        return
    before = growth(values.get("normalizer")) * growth(values.get("pre_tokenizer"))
    for times, part in ((before, "normalizer"), (growth(values.get("decoder")), "decoder")):
        if times > LARGEST_GROWTH:
            raise ValueError(f"its {part} can make a text more than {LARGEST_GROWTH:,} times as long")


def _one_line(error: BaseException) -> str:
    return " ".join(str(error).split())


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
