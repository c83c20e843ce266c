"""Latencies and TEST06 against second implementations in plain Python, written from LoadGen's and MLPerf's sources."""

import math
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatoken.analysis.early_stopping import most_over, queries_needed
from megatoken.analysis.statistics import Samples
from megatoken.mlperf.accuracy_log import Answer, Answers
from megatoken.mlperf.benchmarks import LatencyLimits
from megatoken.mlperf.compliance import check_test06
from megatoken.mlperf.latencies import latencies
from megatoken.runs.tables import SampleRow, to_table

END = (7, 8)


@dataclass(frozen=True)
class Served:
    """One sample of a Server run: times in seconds, and whether it failed."""

    due: float
    ttft: float
    decode: float
    tokens: int
    failed: bool


SERVED = st.builds(Served, st.floats(0, 100), st.floats(0.001, 5), st.floats(0, 20), st.integers(1, 300), st.booleans())


@given(st.lists(SERVED, max_size=150), st.floats(0.01, 5), st.floats(0.001, 1))
@settings(deadline=None, max_examples=60)
def test_latencies_by_loadgens_definitions(served: list[Served], ttft_limit: float, tpot_limit: float) -> None:
    rows = [
        SampleRow(
            number,
            number,
            one.due,
            one.due,
            one.due + one.ttft,
            None if one.failed else one.due + one.ttft + one.decode,
            5,
            one.tokens,
            None if one.failed else "stop",
            "node",
            error="lost" if one.failed else None,
        )
        for number, one in enumerate(served)
    ]
    limits = LatencyLimits(ttft_limit, tpot_limit)
    own = latencies(Samples.of(to_table(SampleRow, rows)), limits)
    done = [row for row in rows if row.last_token_seconds is not None]
    if not done:
        assert own is None
        return
    assert own is not None
    ttft = [row.first_token_seconds - row.scheduled_seconds for row in done]
    tpot = [
        (row.last_token_seconds - row.first_token_seconds) / (row.output_tokens - 1) if row.output_tokens > 1 else 0.0
        for row in done
    ]
    place = math.floor(len(done) * 0.99)
    assert own.queries == len(done)
    assert own.ttft_p99_seconds == pytest.approx(sorted(ttft)[place])
    assert own.tpot_p99_seconds == pytest.approx(sorted(tpot)[place])
    assert own.ttft_over == sum(value > ttft_limit for value in ttft)
    assert own.tpot_over == sum(value > tpot_limit for value in tpot)
    assert own.tokens_after_first == pytest.approx(sum(row.output_tokens - 1 for row in done) / len(done))
    assert (own.allowed_over, own.needed) == (most_over(len(done), 0.99), queries_needed(0, 0.99))
    kept = own.ttft_p99_seconds < ttft_limit and own.tpot_p99_seconds < tpot_limit
    assert own.met(limits) is (kept and max(own.ttft_over, own.tpot_over) <= own.allowed_over)


@dataclass(frozen=True)
class Logged:
    """One answer as token ids, the ids reported first, and the number of tokens reported."""

    ids: list[int]
    first: list[int] | None
    reported: int | None
    cut: bool


def as_logged(ids: list[int], first: list[int] | None, extra: int, counted: bool, cut: bool) -> Logged:
    return Logged(ids, ids[:1] if first is None else first, len(ids) + extra if counted else None, cut)


IDS = st.lists(st.integers(1, 9), max_size=6)
LOGGED = st.builds(as_logged, IDS, st.none() | IDS, st.sampled_from((0, 0, 0, 1)), st.just(True), st.booleans())


@given(st.lists(LOGGED, min_size=1, max_size=6), st.booleans(), st.booleans())
@settings(deadline=None, max_examples=150)
def test_test06_by_its_definition(logged: list[Logged], offline: bool, whole: bool) -> None:
    logged = (logged * 100)[:100] if whole else logged
    records = tuple(
        Answer(number + 2, number, number, packed(one.ids), one.reported, packed(one.first or []))
        for number, one in enumerate(logged)
    )
    cut = {number for number, one in enumerate(logged) if one.cut}
    result = check_test06(Answers(Path("log"), records, "", 0), offline=offline, end_token_ids=END, cut_samples=cut)
    trailing = [len(list(takewhile(END.__contains__, reversed(one.ids)))) for one in logged]
    begins = all(one.first and all(a == b for a, b in zip(one.ids, one.first, strict=False)) for one in logged)
    lengths = all(one.reported == len(one.ids) for one in logged)
    once = max(trailing) < 2
    assert result.passed is ((offline or bool(begins)) and once and lengths)
    assert result.lines[:3] == (
        f"First token check pass: {'Skipped' if offline else bool(begins)}",
        f"EOS check pass: {once}",
        f"Sample length check pass: {lengths}",
    )
    inside = any(
        token in END for one, at_end in zip(logged, trailing, strict=True) for token in one.ids[: len(one.ids) - at_end]
    )
    ended = all(at_end or one.cut for one, at_end in zip(logged, trailing, strict=True))
    assert result.sound is (len(logged) == 100 and any(trailing) and not inside and ended)
    assert bool(result.findings) is not (result.passed and result.sound)


def packed(ids: list[int]) -> bytes:
    return b"".join(token.to_bytes(4, "little") for token in ids)
