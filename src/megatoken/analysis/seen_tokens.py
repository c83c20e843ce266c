"""When each token of each request was seen: rates of any stretch of a run, and the gaps between tokens."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from megatoken.analysis.series import Floats
from megatoken.analysis.statistics import Samples, percentiles
from megatoken.runs.run import Run
from megatoken.runs.token_times import read_token_times

if TYPE_CHECKING:
    import pyarrow as pa

Gaps: TypeAlias = tuple[Floats, NDArray[np.int64], float]
"""Seconds between frames of tokens [G], the row of the request of each [G], and the tokens of all those requests."""
STALL_GAPS, SHORTEST_STALL_SECONDS = 5.0, 0.05
STALL_RULE = (
    f"a gap between two tokens of one answer longer than {STALL_GAPS:g} times the median gap of the point, and than"
    f" {1000 * SHORTEST_STALL_SECONDS:g} ms"
)


class SeenTokens:
    """When each token of each request was seen, in seconds since the run's start; those of failed requests left out.

    Without ``tokens.parquet``, the tokens of an answer count as evenly spaced from its first to its last, and gaps are
    unknown. Where pieces of text were seen and not tokens, a piece counts as its share of the answer's tokens.

    Answers that were cut off, at the end of a load or by an interruption, count too. Where only their first tokens were
    seen, as of a rack, they have tokens at the median pace of the others from then on.
    """

    def __init__(self, times: Floats, owners: NDArray[np.int64], weights: Floats, *, known: bool) -> None:
        """Takes times, rows of the requests and tokens [T], the times of one request in order."""
        self._times, self._owners, self._weights, self._known = times, owners, weights, known

    @classmethod
    def of(cls, run: Run, samples: Samples) -> SeenTokens:
        """Those of a run folder."""
        table = read_token_times(run.path)
        if table is not None:
            return cls._recorded(table, run.requests, samples)
        first, last, counts = samples.first, samples.last, np.where(samples.completed, samples.output_tokens, 0)
        cut = samples.cut
        paces = samples.tpot[samples.completed]
        if cut.any() and (paces := paces[paces > 0]).size:
            last = np.where(cut, np.fmax(first, np.nanmax(last)), last)
            guessed = np.maximum(0, (last - first) // np.median(paces)) + 1
            counts = np.where(cut, np.where(samples.output_tokens > 1, samples.output_tokens, guessed), counts)
        counts = counts.astype(np.int64)
        owners = np.repeat(np.arange(len(samples)), counts)
        position = np.arange(len(owners)) - np.repeat(np.cumsum(counts) - counts, counts)
        share = position / np.maximum(counts[owners] - 1, 1)
        times = first[owners] + share * (last - first)[owners]
        return cls(times, owners, np.ones(len(owners)), known=False)

    @classmethod
    def _recorded(cls, table: pa.Table, requests: pa.Table, samples: Samples) -> SeenTokens:
        ids = requests["sample_id"].to_numpy()
        if not (known := np.isin(table["sample_id"].to_numpy(), ids)).all():
            table = table.filter(known)  # a run that was cut off wrote times of requests whose rows it did not write
        order = np.argsort(ids)
        lists = table["token_times_ns"].combine_chunks()
        counts = np.diff(lists.offsets.to_numpy())
        rows = order[np.searchsorted(ids, table["sample_id"].to_numpy(), sorter=order)]
        owners = np.repeat(rows, counts)
        weights = np.repeat(samples.output_tokens[rows] / np.maximum(counts, 1), counts)
        kept = ~samples.failed[owners]
        return cls(lists.flatten().to_numpy()[kept] / 1e9, owners[kept], weights[kept], known=True)

    def within(self, start: float, end: float) -> float:
        """Tokens seen from ``start`` until before ``end``."""
        return float(self._weights[self._seen(start, end)].sum())

    def within_each(self, start: float, end: float, count: int) -> Floats:
        """The same of each of the ``count`` requests [N]."""
        seen = self._seen(start, end)
        return np.bincount(self._owners[seen], self._weights[seen], count).astype(np.float64)

    def _seen(self, start: float, end: float) -> NDArray[np.bool_]:
        return (self._times >= start) & (self._times < end)

    def until_cut(self, samples: Samples) -> Samples:
        """``samples`` with the last tokens that were seen of the answers that were cut off at the end of the load."""
        cut = samples.cut
        if not cut.any():
            return samples
        last = np.full(len(samples), np.nan)
        last[self._owners] = self._times  # of one request in order, so the last one stays
        seen = np.bincount(self._owners, self._weights, len(samples))
        return replace(
            samples,
            last=np.where(cut, np.fmax(last, samples.first), samples.last),
            output_tokens=np.where(cut, np.maximum(seen, 1), samples.output_tokens),
        )

    def gaps(self, counted: NDArray[np.bool_]) -> Gaps | None:
        """Seconds between frames of tokens of the requests ``counted`` [N], the row of each, and their tokens.

        None where the times of single tokens are unknown.
        """
        if not self._known:
            return None
        together = np.diff(self._owners) == 0
        gaps, owners = np.diff(self._times)[together], self._owners[1:][together]
        chosen = counted[owners]
        frames = chosen & (gaps > 0)
        return gaps[frames], owners[frames], float(self._weights[1:][together][chosen].sum())

    def gap_figures(self, counted: NDArray[np.bool_]) -> dict[str, Any]:
        """Gaps between tokens of the requests ``counted`` [N]; tokens of one frame share a time and have no gap."""
        found = self.gaps(counted)
        if found is None:
            return {"itl_seconds": None, "tokens_per_frame": None, "stalls": None}
        gaps, owners, tokens = found
        longest = max(STALL_GAPS * float(np.median(gaps)), SHORTEST_STALL_SECONDS) if len(gaps) else math.inf
        stalled = gaps > longest
        requests = int(counted.sum())
        return {
            "itl_seconds": percentiles(gaps),
            "tokens_per_frame": tokens / len(gaps) if len(gaps) else None,
            "stalls": {
                "longer_than_seconds": longest if math.isfinite(longest) else None,
                "count": int(stalled.sum()),
                "requests_share": len(np.unique(owners[stalled])) / requests if requests else None,
                "longest_seconds": float(gaps.max()) if len(gaps) else None,
            },
        }
