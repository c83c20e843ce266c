"""LoadGen's early stopping, recomputed from the figures of a log and compared with what the log says of it."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from megatoken.analysis.early_stopping import MOST_QUERIES, bounds, discarded, most_over, places_over, queries_needed
from megatoken.mlperf.detail_log import DetailLog
from megatoken.mlperf.run_figures import RunFigures, whole

# In the order in which LoadGen judges them; it writes the second only if the first is successful.
TEXTS = ("early_stopping_result", "early_stopping_tpot_result", "early_stopping_ttft_result")
SUCCESS = "Run successful."
_ESTIMATE = re.compile(r"Early stopping (\d{1,2}(?:\.\d)?)th percentile estimate: (\d{1,18})")
_NEEDED = re.compile(r"Processed (\d{1,12}) queries\. Would need to run at least (\d{1,12}) more queries")
_DISCARDED = re.compile(r"Processed at least (\d{1,12}) queries \((\d{1,12})\).*Would discard (\d{1,12})")
_ESTIMATES = ("early_stopping_latency_ss", "early_stopping_latency_ms")
_MULTI_STREAM_PERCENTILE = 0.99  # SingleStream estimates it too
STOPPING_KEYS = ("early_stopping_met", *TEXTS, "result_overlatency_query_count", *_ESTIMATES)


@dataclass(frozen=True, slots=True)
class EarlyStopping:
    """What the rule gives for the queries of a log and the percentile of its target."""

    log: DetailLog
    figures: RunFigures
    queries: int
    percentile: float

    @classmethod
    def of(cls, log: DetailLog, figures: RunFigures) -> EarlyStopping | None:
        """None for a log that the rule does not apply to, or that does not say what it needs."""
        queries, percentile = whole(log, "result_query_count"), log.number("effective_target_latency_percentile")
        if figures.scenario not in ("Server", "SingleStream", "MultiStream") or percentile is None:
            return None
        if not queries or queries > MOST_QUERIES or not 0.5 <= percentile < 1:
            return None
        return cls(log, figures, queries, percentile)

    def problems(self) -> Iterator[str]:
        """What the log should say instead.

        Server: whether few enough queries were over the limits. The streams: how many the estimate discards.
        """
        met, server = self.log.get("early_stopping_met"), self.figures.scenario == "Server"
        expected = self._server_met() if server else self.queries >= queries_needed(1, self.percentile)
        if expected is not None and met is not expected:
            yield f"early_stopping_met {expected}"
        if server:
            yield from self._server_texts()
            yield from self._overlatency()
        elif met is True:
            yield from self._stream_texts()

    def _limits(self) -> dict[str, tuple[Mapping[str, float], float | None]]:
        """Latencies in seconds and their limit in ns, by the key of LoadGen's text about them."""
        log, figures = self.log, self.figures
        if log.get("requested_use_token_latencies") is not True:
            return {TEXTS[0]: (figures.latency_seconds, log.number("effective_target_latency_ns"))}
        return {
            TEXTS[1]: (figures.tpot_seconds, log.number("requested_server_tpot_latency")),
            TEXTS[2]: (figures.ttft_seconds, log.number("requested_server_ttft_latency")),
        }

    def _server_met(self) -> bool | None:
        """Whether few enough queries were over the limits; None where the percentiles leave it open."""
        allowed = most_over(self.queries, self.percentile)
        met: list[bool | None] = []
        for values, limit_ns in self._limits().values():
            at_least, at_most = (
                (0, self.queries) if limit_ns is None else places_over(values, limit_ns / 1e9, self.queries)
            )
            met.append(True if at_most <= allowed else False if at_least > allowed else None)
        return False if False in met else None if None in met else True

    def _server_texts(self) -> Iterator[str]:
        """LoadGen's text on each limit, compared with its own verdict, the count of queries and the percentiles."""
        failed = False
        for key, (values, limit_ns) in self._limits().items():
            text = " ".join((self.log.text(key) or "").replace("*", " ").split())
            if failed:
                if text:
                    yield f"no {key} after another limit was not kept"
                continue
            failed = text != SUCCESS
            if not failed or limit_ns is None:
                continue
            numbers = _NEEDED.search(text)
            at_least, at_most = places_over(values, limit_ns / 1e9, self.queries)
            fewest, most = (queries_needed(over, self.percentile) - self.queries for over in (at_least, at_most))
            if numbers is None:
                yield f"{key} {SUCCESS} or how many queries it would need"
            elif int(numbers.group(1)) != self.queries:
                yield f"{key} of {self.queries} queries, not {numbers.group(1)}"
            elif not max(1, fewest) <= int(numbers.group(2)) <= most:
                yield f"{key} with {max(1, fewest)} to {most} more queries, not {numbers.group(2)}"
        if failed is self.log.get("early_stopping_met"):
            yield f"early_stopping_met {not failed}, as the text says"

    def _overlatency(self) -> Iterator[str]:
        count = whole(self.log, "result_overlatency_query_count")
        limit_ns = whole(self.log, "effective_target_latency_ns")
        if count is not None and limit_ns is not None:
            at_least, at_most = places_over(self.figures.latency_seconds, limit_ns / 1e9, self.queries)
            if not at_least <= count <= at_most:
                yield f"{at_least} to {at_most} queries over {limit_ns} ns, not {count}"

    def _stream_texts(self) -> Iterator[str]:
        """The estimates are latencies of one query each, whose rank is known."""
        log, scenario = self.log, self.figures.scenario
        estimates: list[int] = []
        for key, (values, _) in self._limits().items():
            text = log.text(key) or ""
            numbers = _DISCARDED.search(text)
            if numbers is None:
                continue
            needed, dropped = queries_needed(1, self.percentile), discarded(self.queries, self.percentile)
            if tuple(map(int, numbers.groups())) != (needed, self.queries, dropped):
                yield f"{key} with at least {needed} of {self.queries} queries, {dropped} discarded"
            estimates = []
            for at, (name, number) in zip(
                (self.percentile, _MULTI_STREAM_PERCENTILE), _ESTIMATE.findall(text), strict=False
            ):
                estimates.append(int(number))
                low, high = bounds(values, self.queries - 1 - discarded(self.queries, at), self.queries)
                # MultiStream's text is about queries, whose latencies are not those of samples.
                if scenario == "SingleStream" and not low - 1e-9 <= int(number) / 1e9 <= high + 1e-9:
                    yield f"an estimate of {name} % in {key} between {low:.9g} and {high:.9g} s, not {number} ns"
        kept = _ESTIMATES if scenario == "SingleStream" else _ESTIMATES[1:]
        for key, estimate in zip(kept, estimates, strict=False):
            if whole(log, key) != estimate:  # LoadGen keeps the last: that of the first token
                yield f"{key} {estimate}"
