"""Tokenises prompts and detokenises answers within the measured time."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Protocol

from megatoken.datasets.requests import Dataset


class Codec(Protocol):
    """A tokenizer."""

    def encode(self, text: str) -> list[int]:
        """Ids of a text."""

    def decode(self, token_ids: list[int]) -> str:
        """Text of ids."""


class TextStages:
    """Does the text work of a server and times it. The model still gets the ids of the data set.

    ``characters`` counts the text made so far.
    """

    def __init__(self, tokenizer: Codec, data_set: Dataset) -> None:
        """Makes the text of every prompt, before anything is measured."""
        self._tokenizer = tokenizer
        self._texts = [
            request.prompt if isinstance(request.prompt, str) else tokenizer.decode(list(request.prompt))
            for request in data_set.requests
        ]
        self.characters = 0

    def tokenise(self, row: int) -> int:
        """Encodes the prompt of a row; returns the nanoseconds it took."""
        began_ns = time.monotonic_ns()
        self._tokenizer.encode(self._texts[row])
        return time.monotonic_ns() - began_ns

    def detokenise(self, token_ids: Sequence[int]) -> int:
        """Decodes an answer; returns the nanoseconds it took."""
        began_ns = time.monotonic_ns()
        text = self._tokenizer.decode(list(token_ids))
        taken_ns = time.monotonic_ns() - began_ns
        self.characters += len(text)
        return taken_ns
