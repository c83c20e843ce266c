"""What the answers of a run show of a server: findings, each a note with its figures."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from megatoken.runs.reasons import Reason, reason
from megatoken.targets.endpoint.answers import Flag
from megatoken.targets.endpoint.wire import Ended

SEVERAL = 1.05  # tokens a frame, beyond which frames are not tokens; a character may take several tokens
USAGE_SHARE = 0.1  # of the tokens counted with the tokenizer, by which the usage may differ
PADDED_SHARE, PADDED_CHARACTERS = 0.25, 16  # of an answer, at its end, that is white space
SAME_FIRST_SHARE = 0.9  # of the answers that begin with the same piece
DUMMY_GAP = 5.0  # times the other gaps, by which the second piece comes after such a beginning
FEWEST = 8  # answers, from which a share says something
CACHED_TIME_SHARE = 0.2  # of the time of other answers, within which a repeated one was not computed
_COUNTS = {
    Flag.EMPTY_FIRST: "EMPTY_FIRST_FRAME",
    Flag.NO_DONE: "NO_DONE",
    Flag.EARLY_DONE: "EARLY_DONE",
    Flag.OVER_LIMIT: "OVER_MAX_TOKENS",
    Flag.CUT: "CUT_ANSWERS",
    Flag.NOT_FORCED: "LENGTHS_NOT_FORCED",
    Flag.FEWER_THAN_FRAMES: "USAGE_TOO_SMALL",
    Flag.NO_USAGE: "NO_USAGE",
    Flag.OVER_REQUEST: "PROMPT_TOKENS_LEFT_OUT",
}
_ROW = np.dtype(
    [
        ("end_ns", "<i8"),
        ("flags", "<i4"),
        ("tokens", "<i4"),
        ("frames", "<i4"),
        ("input_tokens", "<i4"),
        ("cached_tokens", "<i4"),
        ("first_piece", "<i8"),
        ("prompt", "<i8"),
        ("answer", "<i8"),
        ("seconds", "<f8"),
        ("first_gap", "<f8"),
        ("other_gap", "<f8"),
    ]
)
Rows = NDArray[np.void]


@dataclass(frozen=True, slots=True)
class _Text:
    end_ns: int
    text: str
    tokens: int
    counted_by: str


class Observations:
    """Collects answers; ``findings`` looks at those of one test."""

    def __init__(self, count_tokens: Callable[[str], int] | None) -> None:
        """``count_tokens`` counts with the model's tokenizer, where it is known."""
        self._count_tokens = count_tokens
        self._blocks: list[Rows] = []
        self._rows: list[tuple[float, ...]] = []
        self._texts: list[_Text] = []

    def add(self, ended: Ended) -> None:
        """Takes a whole answer."""
        first_gap = other_gap = np.nan
        if ended.frames > 2:
            times = np.frombuffer(ended.times, np.int64)
            first_gap = (times[1] - times[0]) / 1e9
            other_gap = (times[-1] - times[1]) / (len(times) - 2) / 1e9
        self._rows.append(
            (
                *(ended.last_ns, ended.flags, ended.tokens, ended.frames, ended.input_tokens, ended.cached_tokens),
                *(ended.first_piece_hash, ended.prompt_hash, ended.answer_hash),
                *((ended.last_ns - ended.sent_ns) / 1e9, first_gap, other_gap),
            )
        )
        if ended.text:
            self._texts.append(_Text(ended.last_ns, ended.text, ended.tokens, ended.counted_by))
        if len(self._rows) >= 4096:
            self._pack()

    def findings(self, since_ns: int) -> list[Reason]:
        """Notes on the answers that ended after ``since_ns``."""
        self._pack()
        rows = np.concatenate(self._blocks) if self._blocks else np.empty(0, _ROW)
        rows = rows[rows["end_ns"] >= since_ns]
        if not len(rows):
            return []
        texts = [one for one in self._texts if one.end_ns >= since_ns]
        return [
            *self._counted(rows),
            *_frames(rows),
            *_dummy_first(rows),
            *_cached(rows),
            *_padded(texts),
            *self._usage(texts),
        ]

    def _pack(self) -> None:
        if self._rows:
            self._blocks.append(np.array(self._rows, _ROW))
            self._rows = []

    def _counted(self, rows: Rows) -> list[Reason]:
        found = []
        for flag, code in _COUNTS.items():
            if count := int(((rows["flags"] & flag) != 0).sum()):
                found.append(reason(code, answers=count, of=len(rows)))
        return found

    def _usage(self, texts: list[_Text]) -> list[Reason]:
        """Compares the server's counts with the model's tokenizer; white space counts as it is."""
        counted = [one for one in texts if one.counted_by == "usage"]
        if self._count_tokens is None or len(counted) < FEWEST:
            return []
        own = sum(self._count_tokens(one.text) for one in counted)
        stated = sum(one.tokens for one in counted) - len(counted)  # an end token has no text
        if own and (stated > own * (1 + USAGE_SHARE) or stated + 2 * len(counted) < own * (1 - USAGE_SHARE)):
            return [reason("USAGE_DIFFERS", answers=len(counted), usage_tokens=stated + len(counted), own_tokens=own)]
        return []


def _frames(rows: Rows) -> list[Reason]:
    streamed = rows[rows["frames"] > 0]
    frames, tokens = int(streamed["frames"].sum()), int(streamed["tokens"].sum())
    if frames and tokens / frames > SEVERAL:
        return [reason("SEVERAL_TOKENS_A_FRAME", tokens_per_frame=tokens / frames)]
    return []


def _dummy_first(rows: Rows) -> list[Reason]:
    """A first piece that is the same whatever the prompt, and the next one late."""
    long = rows[np.isfinite(rows["first_gap"])]
    if len(long) < FEWEST or len(np.unique(long["prompt"])) < FEWEST:
        return []
    values, counts = np.unique(long["first_piece"], return_counts=True)
    same = long[long["first_piece"] == values[counts.argmax()]]
    first, other = float(np.median(same["first_gap"])), float(np.median(same["other_gap"]))
    if len(same) < SAME_FIRST_SHARE * len(long) or first <= DUMMY_GAP * other:
        return []
    return [reason("DUMMY_FIRST_TOKEN", answers=len(same), of=len(long), first_gap_seconds=first, gap_seconds=other)]


def _cached(rows: Rows) -> list[Reason]:
    """Prompts that came again and were answered with the same text in a small part of the time of new ones."""
    found = []
    known = rows[rows["cached_tokens"] > 0]
    if len(known):
        share = float(known["cached_tokens"].sum() / max(1, rows["input_tokens"][rows["input_tokens"] > 0].sum()))
        found.append(reason("CACHED_PROMPTS", answers=len(known), of=len(rows), share=share))
    ordered = rows[np.argsort(rows["end_ns"], kind="stable")]
    _, first, inverse = np.unique(ordered["prompt"], return_index=True, return_inverse=True)
    again = np.arange(len(ordered)) != first[inverse]
    repeated, new = ordered[again], ordered[~again]
    if len(repeated) < FEWEST or len(new) < FEWEST:
        return found
    equal = repeated["answer"] == new["answer"][np.searchsorted(np.sort(first), first[inverse][again])]
    share = float(np.median(repeated["seconds"]) / max(1e-9, np.median(new["seconds"])))
    if equal.mean() >= SAME_FIRST_SHARE and share < CACHED_TIME_SHARE:
        found.append(reason("CACHED_ANSWERS", answers=int(equal.sum()), of=len(repeated), share=share))
    return found


def _padded(texts: list[_Text]) -> list[Reason]:
    padding = [len(one.text) - len(one.text.rstrip()) for one in texts]
    padded = sum(
        blank >= PADDED_CHARACTERS and blank >= PADDED_SHARE * len(one.text)
        for blank, one in zip(padding, texts, strict=True)
    )
    return [reason("PADDED_ANSWERS", answers=padded, of=len(texts))] if padded else []
