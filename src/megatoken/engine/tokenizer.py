"""Text to ids and back, over the checkpoint's ``tokenizer.json``."""

from __future__ import annotations

from pathlib import Path

from tokenizers import Tokenizer as FastTokenizer

from megatoken.errors import CheckpointError, RequestError

REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
WINDOW_TOKENS = 8


class Tokenizer:
    """A Hugging Face fast tokenizer. Special tokens are added on encoding and left out on decoding."""

    def __init__(self, file: Path) -> None:
        self.file = file
        try:
            self._tokenizer = FastTokenizer.from_file(str(file))
            self._tokenizer.no_truncation()  # a saved file may carry both, and would cut or pad prompts in silence
            self._tokenizer.no_padding()
        except Exception as error:  # the library raises bare Exception for every kind of bad file
            raise CheckpointError(
                f"{file}: not a tokenizer.json that can be read ({_one_line(error)}); export it again"
            ) from error

    @property
    def largest_id(self) -> int:
        """Of all its tokens, added ones too; -1 if it has none."""
        return max(self._tokenizer.get_vocab(with_added_tokens=True).values(), default=-1)

    def encode(self, text: str) -> list[int]:
        """Ids of ``text``, with the special tokens the tokenizer itself puts around it.

        Raises:
            RequestError: ``text`` is not Unicode text (lone surrogates), or holds what the tokenizer has no token for.
        """
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise RequestError(
                f"the prompt is not Unicode text: character {error.start + 1} is half of a surrogate pair; remove it"
            ) from error
        try:
            return list(self._tokenizer.encode(text).ids)
        except Exception as error:  # as in __init__
            raise RequestError(f"the prompt cannot be encoded: {_one_line(error)}; change the text") from error

    def decode(self, token_ids: list[int]) -> str:
        """Text of ``token_ids``."""
        return str(self._tokenizer.decode(token_ids))

    def incremental(self) -> IncrementalDecoder:
        """A decoder for one stream of tokens."""
        return IncrementalDecoder(self)


class IncrementalDecoder:
    """Turns a stream of ids into pieces of text whose concatenation is the text of all ids.

    A piece is held back while it ends in the middle of a character. Only a short window is decoded again at each token,
    so the cost of a stream is linear.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._window: list[int] = []
        self._shown = ""

    def add(self, token_id: int) -> str:
        """The text that ``token_id`` makes certain."""
        self._window.append(token_id)
        text = self._tokenizer.decode(self._window)
        if text.endswith(REPLACEMENT):
            return ""
        piece = text[len(self._shown) :]
        self._shown = text
        if piece and len(self._window) > WINDOW_TOKENS:
            self._shorten()
        return piece

    def flush(self) -> str:
        """What was held back, when the stream has ended."""
        text = self._tokenizer.decode(self._window)
        piece = text[len(self._shown) :]
        self._shown = text
        return piece

    def _shorten(self) -> None:
        """Keep the last tokens as context, because some tokenizers drop the space before the first token of a decode.

        Where a character spans tokens, the first one kept must begin one: bytes of half a character spoil their
        neighbours.
        """
        for kept in range(WINDOW_TOKENS // 2, WINDOW_TOKENS):
            text = self._tokenizer.decode(self._window[-kept:])
            if not text.startswith(REPLACEMENT):
                self._window, self._shown = self._window[-kept:], text
                return


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())
