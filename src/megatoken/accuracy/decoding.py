"""Decodes the token ids of answers as MLPerf's references do: without special tokens."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer

from megatoken.engine.tensor_files import read_json
from megatoken.errors import CheckpointError, UsageError

# ``clean_up_tokenization_spaces`` of a Hugging Face tokenizer removes the space before each of these.
_NO_SPACE_BEFORE = (".", "?", "!", ",")
_CONTRACTIONS = ("n't", "'m", "'s", "'ve", "'re")


class AnswerDecoder:
    """The tokenizer of a checkpoint, with the clean-up that its ``tokenizer_config.json`` asks for."""

    def __init__(self, model: Path) -> None:
        """Opens ``tokenizer.json`` in the folder ``model``, or the file itself. Raises CheckpointError."""
        self.file = model if model.is_file() else model / "tokenizer.json"
        try:
            self._tokenizer = Tokenizer.from_file(str(self.file))
        except Exception as error:  # the library raises bare Exception for every kind of bad file
            reason = " ".join(str(error).split())
            raise CheckpointError(
                f"{self.file}: cannot be read as a tokenizer ({reason}); give the tokenizer.json of the model"
            ) from None
        self._size = self._tokenizer.get_vocab_size(with_added_tokens=True)
        self._cleans_up = _cleans_up(self.file.with_name("tokenizer_config.json"))

    def decode(self, ids: Sequence[NDArray[np.int64]], places: Sequence[str]) -> list[str]:
        """The texts of answers; ``places`` say where each stands. Raises UsageError: an id outside the vocabulary."""
        for answer, place in zip(ids, places, strict=True):
            if len(answer) and not 0 <= answer.min() <= answer.max() < self._size:
                wrong = next(int(token) for token in answer if not 0 <= token < self._size)
                raise UsageError(
                    f"{place}: token id {wrong} is outside the vocabulary of {self.file} "
                    f"({self._size:,} tokens); give the model that answered with --model"
                )
        texts = self._tokenizer.decode_batch([answer.tolist() for answer in ids], skip_special_tokens=True)
        return [_cleaned(text) for text in texts] if self._cleans_up else list(texts)


def _cleans_up(config: Path) -> bool:
    try:
        values = read_json(config)
    except (OSError, CheckpointError):
        return False
    return values.get("clean_up_tokenization_spaces") is True


def _cleaned(text: str) -> str:
    for mark in _NO_SPACE_BEFORE:
        text = text.replace(f" {mark}", mark)
    text = text.replace(" ' ", "'")
    for ending in _CONTRACTIONS:
        text = text.replace(f" {ending}", ending)
    return text
