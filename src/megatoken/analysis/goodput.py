"""Goodput: the work of a run within latency limits, by one rule for runs, points of a sweep and plans.

The requests that are judged are those that were due within a span; failed and late ones are bad. An answer that was cut
off within the limits is not judged, because how it would have ended is unknown. Tokens count where they were seen: all
tokens seen within the span, of any request that kept the limits, also of answers that were cut off.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from megatoken.analysis.limits import none_ended
from megatoken.analysis.seen_tokens import SeenTokens
from megatoken.analysis.series import Floats, numbers
from megatoken.analysis.statistics import Samples
from megatoken.runs.run import Run, Verdict


@dataclass(frozen=True, slots=True)
class Goodput:
    """Work of a span within limits.

    ``share`` is of the ``judged`` requests, ``cut_off`` ones are not among them; ``output_tokens_share`` is of the
    tokens seen of all requests that did not fail.
    """

    share: float
    output_tokens_share: float
    samples_per_second: float
    output_tokens_per_second: float
    judged: int
    cut_off: int


@dataclass(frozen=True, slots=True)
class Span:
    """The part of a run that counts: which samples [N] were due in it, and the output tokens [N] of each seen in it.

    ``samples`` are all of the run; those that were cut off have the tokens that were seen of them. ``seconds`` is above
    zero.
    """

    samples: Samples
    due: NDArray[np.bool_]
    output_tokens: Floats
    seconds: float

    @property
    def tpot_unknown(self) -> bool:
        """Whether so many of its answers came in one piece that they show no time per output token."""
        return bool(self.samples.only(self.due).in_one_piece.any())

    @classmethod
    def of(cls, samples: Samples, tokens: SeenTokens, start: float, end: float) -> Span:
        """From ``start`` until before ``end``."""
        due = (samples.scheduled >= start) & (samples.scheduled < end)
        return cls(tokens.until_cut(samples), due, tokens.within_each(start, end, len(samples)), end - start)

    @classmethod
    def whole(cls, samples: Samples, seconds: float) -> Span:
        """All of a run."""
        return cls(samples, np.ones(len(samples), bool), samples.output_tokens, seconds)


def counted_span(run: Run, samples: Samples, seconds: float | None) -> Span | None:
    """The window of the load if the run has one, else the whole run, which counts as ``seconds`` long.

    An interrupted run counts until the last row of its series. None if the span shows no latency.
    """
    window = (run.result.get("load") or {}).get("window_seconds")
    if window is None and run.verdict is Verdict.INTERRUPTED and len(run.series):
        window = 0.0, float(numbers(run.series["elapsed_seconds"]).max())
    if window is not None and window[0] < window[1]:
        tokens = SeenTokens.of(run, samples)
        return None if none_ended(samples, tokens, *window) else Span.of(samples, tokens, *window)
    if samples.cut.any():
        samples = SeenTokens.of(run, samples).until_cut(samples)
    return Span.whole(samples, seconds) if seconds else None


def goodput(span: Span, *, ttft_seconds: float | None, tpot_seconds: float | None) -> Goodput | None:
    """Work of a span within limits; None if none of its requests can be judged.

    ``ttft_seconds`` is None in Offline, where all samples are due at once and it does not apply.
    """
    good = within_limits(span.samples, ttft_seconds, tpot_seconds)
    cut_off = span.due & good & span.samples.cut
    judged = span.due & ~cut_off
    if not judged.any():
        return None
    kept = int((judged & good).sum())
    tokens = float(span.output_tokens[good].sum())
    seen = float(span.output_tokens[span.samples.completed | span.samples.cut].sum())
    return Goodput(
        share=kept / int(judged.sum()),
        samples_per_second=kept / span.seconds,
        output_tokens_share=tokens / seen if seen else 0.0,
        output_tokens_per_second=tokens / span.seconds,
        judged=int(judged.sum()),
        cut_off=int(cut_off.sum()),
    )


def within_limits(samples: Samples, ttft_seconds: float | None, tpot_seconds: float | None) -> NDArray[np.bool_]:
    """Which samples [N] were completed within the limits that are given, or within them until they were cut off.

    A sample of one token has no time per output token and meets any limit on it.
    """
    good = samples.completed | samples.cut
    if tpot_seconds is not None:
        good = good & ((samples.output_tokens < 2) | (samples.tpot <= tpot_seconds))
    if ttft_seconds is not None:
        good = good & (samples.ttft <= ttft_seconds)
    return good
