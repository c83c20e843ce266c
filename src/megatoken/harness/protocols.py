"""What a measurement is connected to: the load that issues samples, the record of rows, a reader of answers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from megatoken.harness.loadgen_wire import Issued
from megatoken.runs.tables import SampleRow, SeriesRow


class Load(Protocol):
    """Issues samples, numbered from 0, and receives their ends: a test of LoadGen, the load of a soak or of a sweep."""

    @property
    def issued(self) -> int:
        """Samples issued so far."""

    @property
    def all_issued(self) -> bool:
        """Whether no more samples come."""

    @property
    def outstanding(self) -> int:
        """Samples without an end."""

    def take_issued(self, timeout_seconds: float) -> list[Issued]:
        """Samples issued since the last call; waits for the first at most about this long."""

    def patience_seconds(self, longest: float) -> float:
        """How long the target may be polled, at most ``longest``: a load may know when its next sample is due."""

    def first_token(self, sample: int, token_id: int) -> None:
        """Notes that the first token of a sample exists."""

    def complete(self, sample: int, output_tokens: int, token_ids: Sequence[int] = ()) -> None:
        """Notes that a sample has ended."""

    def flush(self) -> None:
        """Passes on the notes."""


class Record(Protocol):
    """Stores the rows of a run."""

    def add_samples(self, rows: Sequence[SampleRow]) -> None:
        """Adds samples that have ended."""

    def add_series(self, row: SeriesRow) -> None:
        """Adds the state of a replica."""

    def add_token_times(self, sample_id: int, times_ns: NDArray[np.int64]) -> None:
        """Adds when the tokens of a sample were seen, in nanoseconds since the start [tokens]."""

    def add_facts(self, facts: Mapping[str, Any]) -> None:
        """Adds or replaces facts."""


class Counted(NamedTuple):
    """Output tokens of an answer: all, and those of its first frame."""

    tokens: int
    first: int


class Answers(Protocol):
    """Reads every whole answer: counts its tokens, or asks the next question."""

    def take(self, sample: int, token_ids: Sequence[int], text: str, first_characters: int) -> Counted | None:
        """Takes the answer of a sample, which has not failed.

        Args:
            sample: its number.
            token_ids: of a target that answers in ids; else none.
            text: of a target that answers in text; else empty.
            first_characters: of the text, that came in the first frame with text; 0: unknown.

        Returns:
            Its tokens; None: as the target counts them.
        """

    def close(self) -> None:
        """No more answers come."""
