"""The numbers of a run against definitions written out the slow way."""

import json
import math

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatoken.analysis.series import tokens_per_second_within, totals_over_time
from megatoken.analysis.statistics import (
    latency_origin,
    leading_rates,
    percentiles,
    samples_needed,
    steady_window,
    summarise,
)
from megatoken.files import to_json
from megatoken.runs.tables import SampleRow, SeriesRow, append, read_parquet, schema, to_table, write_parquet

SECONDS = st.floats(0, 1000, allow_nan=False)


def requests(*rows: SampleRow):
    return to_table(SampleRow, rows)


def series(*rows: SeriesRow):
    return to_table(SeriesRow, rows)


def row(number: int, first: float | None, last: float | None, tokens: int, **changes) -> SampleRow:
    return SampleRow(number, number, 0.0, 0.0, first, last, 10, tokens, "length", "here")._replace(**changes)


def test_rates_and_latencies_of_a_run_done_by_hand():
    table = requests(
        row(0, 1.0, 3.0, 5),
        row(1, 2.0, 4.0, 3, finish_reason="stop"),
        row(2, 3.0, 3.0, 1),
        row(3, 1.0, 9.0, 7, finish_reason="cancelled"),
        row(4, None, None, 0, finish_reason=None, error="engine fell over"),
    )
    result = summarise(table, series(), scenario="offline")
    assert result["duration_seconds"] == 4.0
    assert result["output_tokens"] == 9
    assert result["output_tokens_per_second"] == 9 / 4
    assert result["processed_tokens_per_second"] == (30 + 9) / 4
    assert result["samples_per_second"] == 3 / 4
    assert (result["samples_completed"], result["samples_failed"], result["samples_cancelled"]) == (3, 1, 1)
    assert result["ttft_seconds"]["p50"] == 2.0
    assert result["latency_seconds"]["p50"] == 3.0
    assert result["tpot_seconds"]["p50"] == (0.5 + 1.0) / 2
    assert result["tpot_seconds"]["samples"] == 2
    assert result["samples_without_tpot"] == 1
    assert result["steady_output_tokens_per_second"] is None
    assert "no user waits like this" in latency_origin("offline")


def moment(seconds: float, replica: int, watts: float | None) -> SeriesRow:
    return SeriesRow(seconds, "here", replica, 0, 0, 0, 0, 0, 0, 0, 0, 0, power_watts=watts)


def test_latencies_count_from_the_scheduled_time():
    late = [row(number, 6.0, 8.0, 3, scheduled_seconds=4.0 + number, sent_seconds=5.5) for number in range(2)]
    result = summarise(requests(*late), series(), scenario="server")
    assert result["ttft_seconds"]["p50"] == 1.5
    assert result["latency_seconds"]["p50"] == 3.5
    assert result["duration_seconds"] == 4.0
    assert "scheduled" in latency_origin("server")


def test_what_arrives_by_itself_is_rated_to_the_completion_of_the_sample_issued_last():
    rows = [
        row(number, last - 1, last, 5, scheduled_seconds=float(number)) for number, last in enumerate((10.0, 3.0, 4.0))
    ]
    for scenario in ("server", "interactive"):
        result = summarise(requests(*rows), series(), scenario=scenario)
        assert (result["rated_seconds"], result["duration_seconds"]) == (4.0, 10.0)
        assert result["output_tokens_per_second"] == 15 / 4
        assert result["processed_tokens_per_second"] == (15 + 30) / 4
        assert result["samples_per_second"] == 2 / 4
        assert result["whole_run_output_tokens_per_second"] == 15 / 10
        whole = {
            "output_tokens_per_second": 15 / 10,
            "processed_tokens_per_second": (15 + 30) / 10,
            "samples_per_second": 3 / 10,
            "rated_seconds": 10.0,
        }
        assert leading_rates(result | {"scenario": scenario}) == whole
        assert leading_rates(result | {"scenario": scenario, "rules": "v5.1"}) == {name: result[name] for name in whole}
    cut_off = summarise(requests(*rows), series(), scenario="server", finished=False)
    failed = summarise(
        requests(*rows[:2], row(2, None, None, 0, error="x", scheduled_seconds=2.0)), series(), scenario="server"
    )
    at_once = summarise(requests(*rows), series(), scenario="offline")
    for result in (cut_off, failed, at_once):
        assert result["rated_seconds"] == 10.0
        assert result["output_tokens_per_second"] == result["whole_run_output_tokens_per_second"]


def test_a_soak_is_rated_under_load_and_not_over_its_drain():
    rows = [
        row(0, 1.0, 9.0, 900, scheduled_seconds=0.0),
        row(1, 2.0, 26.0, 300, scheduled_seconds=0.0),
        row(2, 11.0, 26.0, 50, scheduled_seconds=9.0),
    ]
    kept = seen((5.0, 0, 500), (9.5, 0, 950), (10.5, 0, 1050), (26.0, 0, 1250))
    result = summarise(requests(*rows), kept, scenario="soak", load_seconds=10.0)
    assert (result["rated_seconds"], result["duration_seconds"]) == (10.0, 26.0)
    assert result["output_tokens_per_second"] == 1000 / 10
    assert result["processed_tokens_per_second"] == pytest.approx((1000 + 20) / 10)  # the third prompt is read later
    assert result["samples_per_second"] == 1 / 10
    assert result["whole_run_output_tokens_per_second"] == 1250 / 26

    cut_off = summarise(requests(rows[0]), seen((5.0, 0, 500)), scenario="soak", finished=False, load_seconds=10.0)
    assert (cut_off["rated_seconds"], cut_off["output_tokens_per_second"]) == (5.0, 100.0)
    nothing = summarise(requests(), seen((5.0, 0, 500)), scenario="soak", finished=False, load_seconds=10.0)
    assert nothing["output_tokens_per_second"] is None


def test_nothing_done_is_null_and_never_a_division():
    for rows in ((), (row(0, None, None, 0, finish_reason=None, error="x"),)):
        result = json.loads(to_json(summarise(requests(*rows), series(), scenario="offline")))
        assert result["output_tokens_per_second"] is None
        assert result["ttft_seconds"]["p99"] is None
        assert result["samples_completed"] == 0
        assert result["preemptions"] is None


def test_nodes_are_stated_apart():
    table = requests(row(0, 1.0, 2.0, 10), row(1, 1.0, 5.0, 30, node="there"), row(2, 1.0, 4.0, 10, node="there"))
    here, there = summarise(table, series(), scenario="offline")["nodes"]
    assert here == {
        "node": "here",
        "samples_completed": 1,
        "output_tokens": 10,
        "duration_seconds": 2.0,
        "output_tokens_per_second": 5.0,
    }
    assert (there["node"], there["output_tokens"], there["output_tokens_per_second"]) == ("there", 40, 8.0)


@settings(deadline=None)
@given(st.lists(st.floats(0, 1e6), min_size=1, max_size=60))
def test_percentiles_are_exact_and_linear(values):
    result = percentiles(np.array(values))
    ordered = sorted(values)
    for percent in (50, 90, 95, 99):
        position = (len(ordered) - 1) * percent / 100
        below, above = ordered[math.floor(position)], ordered[math.ceil(position)]
        expected = below + (above - below) * (position - math.floor(position))
        assert result[f"p{percent}"] == pytest.approx(expected, rel=1e-12, abs=1e-12)
    assert result["samples"] == len(values)


def test_percentiles_leave_out_what_never_happened():
    assert percentiles(np.array([np.nan, 2.0, np.nan]))["p50"] == 2.0
    assert percentiles(np.array([np.nan]))["p50"] is None


@pytest.mark.parametrize(("percent", "count"), [(50, 11), (90, 64), (95, 130), (99, 662)])
def test_percentiles_of_too_few_samples_are_marked(percent, count):
    assert samples_needed(percent) == count
    assert f"p{percent}" in percentiles(np.ones(count - 1))["unreliable"]
    assert f"p{percent}" not in percentiles(np.ones(count))["unreliable"]


def seen(*rows: tuple[float, int, int], waiting: int = 1):
    """Output tokens of a replica until a time, with samples in its queue."""
    levels = dict.fromkeys(SeriesRow._fields[3:12], 0) | {"waiting": waiting}
    return series(*(SeriesRow(at, "a", replica, **levels | {"output_tokens": tokens}) for at, replica, tokens in rows))


def lanes(life: float) -> tuple[np.ndarray, np.ndarray]:
    """First and last tokens of samples back to back in ten lanes that start 1 s apart and are busy for 20 s."""
    first = np.concatenate([lane + np.arange(0, 20, life) for lane in range(10)])
    return first, first + life


def test_the_steady_window_leaves_out_ramp_and_tail():
    # All ten lanes are busy from 9 s to 20 s, nine from 8 s to 21 s.
    assert steady_window(*lanes(4.0), seen((29.0, 0, 0))) == (8.0, 21.0)


def test_the_steady_window_ends_with_the_queue():
    queue = [seen((seconds, 0, 0), waiting=int(seconds < 17.5)) for seconds in range(30)]
    assert steady_window(*lanes(2.0), pa.concat_tables(queue)) == (8.0, 17.0)
    assert steady_window(*lanes(2.0), seen((29.0, 0, 0), waiting=0)) is None, "no sample ever waited"


def test_a_short_window_is_not_stated():
    queue = seen((100.0, 0, 0))
    assert steady_window(*lanes(5.0), queue) is None, "13 s are less than three lives"
    starts = np.arange(0, 1.75, 0.25)
    assert steady_window(starts, starts + 0.25, queue) is None, "1.75 s"
    starts = np.arange(0, 2.25, 0.25)
    assert steady_window(starts, starts + 0.25, queue) == (0.0, 2.25)
    assert steady_window(np.zeros(50), np.zeros(50), queue) is None
    assert steady_window(np.array([]), np.array([]), queue) is None


def test_the_steady_rate_counts_what_was_seen_when_it_was_seen():
    # Two lanes, 50 tokens a second each until 9.5 s; whoever spread the last samples' tokens evenly would find more.
    rows = [row(2 * at + lane, at, at + 1.0, 50) for at in range(9) for lane in (0, 1)]
    rows += [row(90 + lane, 9.0, 11.0, 500) for lane in (0, 1)]
    found = summarise(requests(*rows), seen((9.5, 0, 950), (11.0, 0, 1900)), scenario="offline")
    assert found["steady_window_seconds"] == [0.0, 11.0]
    assert found["steady_output_tokens_per_second"] == pytest.approx(1900 / 11)
    queue = pa.concat_tables([seen((9.5, 0, 950)), seen((11.0, 0, 1900), waiting=0)])
    found = summarise(requests(*rows), queue, scenario="offline")
    assert found["steady_window_seconds"] == [0.0, 9.5]
    assert found["steady_output_tokens_per_second"] == pytest.approx(100.0)


def test_a_steady_rate_needs_a_series_that_reaches_over_it():
    assert tokens_per_second_within(seen((4.0, 0, 400)), 1.0, 4.0) == pytest.approx(100.0)
    assert tokens_per_second_within(
        seen((2.0, 0, 10), (4.0, 0, 30), (2.0, 1, 40), (3.0, 1, 60)), 2.0, 4.0
    ) == pytest.approx((90 - 50) / 2)
    assert tokens_per_second_within(seen((3.9, 0, 400)), 1.0, 4.0) is None
    assert tokens_per_second_within(series(), 1.0, 4.0) is None


def test_a_run_still_going_has_no_steady_window():
    table = requests(*(row(number, number, number + 1.0, 50) for number in range(9)))
    queue = seen((9.0, 0, 450))
    assert summarise(table, queue, scenario="offline")["steady_window_seconds"] == [0.0, 9.0]
    assert summarise(table, queue, scenario="offline", finished=False)["steady_window_seconds"] is None


spans = st.lists(
    st.tuples(st.integers(0, 40), st.integers(0, 30)).map(lambda t: (t[0], t[0] + t[1])), min_size=1, max_size=30
)


@settings(deadline=None)
@given(spans)
def test_the_steady_window_agrees_with_counting(samples):
    """Whole seconds: how many samples generate in each second, counted one by one."""
    generating = [sum(first <= second < last for first, last in samples) for second in range(71)]
    peak = max(generating)
    busy = [second for second, count in enumerate(generating) if peak and count >= 0.9 * peak]
    shortest = max(2, 3 * np.median([last - first for first, last in samples]))
    expected = (busy[0], busy[-1] + 1) if busy and busy[-1] + 1 - busy[0] >= shortest else None
    first, last = (np.array(column, dtype=float) for column in zip(*samples, strict=True))
    assert steady_window(first, last, seen((100.0, 0, 0))) == expected


@settings(deadline=None)
@given(st.integers(1, 9), st.integers(1, 9), st.integers(2, 6), st.integers(4, 12))
def test_waves_in_lockstep_have_no_rate_that_could_not_last(lanes, prompt_seconds, answer_seconds, waves):
    """All read their prompts together and answer together: no window may hold the answering alone."""
    life = prompt_seconds + answer_seconds
    rows = [
        row(lanes * wave + lane, wave * life + prompt_seconds, (wave + 1) * life, answer_seconds)
        for wave in range(waves)
        for lane in range(lanes)
    ]
    seconds = [(wave * life + second, lanes * (wave * answer_seconds + max(0, second - prompt_seconds)))
               for wave in range(waves) for second in range(1, life + 1)]  # fmt: skip
    queue = seen(*((float(at), 0, tokens) for at, tokens in seconds))
    found = summarise(requests(*rows), queue, scenario="offline")
    if found["steady_window_seconds"] is not None:
        lasting = lanes * answer_seconds / life
        assert found["steady_output_tokens_per_second"] <= lasting * (1 + 1 / (waves - 1))


def test_totals_sum_replicas_at_every_time():
    levels = dict.fromkeys(SeriesRow._fields[3:12], 0)
    rows = [
        SeriesRow(1.0, "a", 0, **levels | {"output_tokens": 10}),
        SeriesRow(1.0, "b", 0, **levels | {"output_tokens": 100}),
        SeriesRow(2.0, "a", 1, **levels | {"output_tokens": 1000}),
        SeriesRow(3.0, "a", 0, **levels | {"output_tokens": 30}),
        SeriesRow(2.0, "b", 0, **levels | {"output_tokens": 300}),
    ]
    times, totals = totals_over_time(series(*rows), ["output_tokens"])
    assert times.tolist() == [1.0, 2.0, 3.0]
    assert totals.tolist() == [1110.0, 1320.0, 1330.0]


@settings(deadline=None)
@given(st.lists(st.tuples(*[st.floats(0, 50)] * 5), min_size=1, max_size=20), st.booleans(), st.booleans())
def test_stages_add_up_to_the_whole_time_of_every_sample(times, text, tells_start):
    rows = []
    for number, (wait, tokenise, prefill, decode, detokenise) in enumerate(times):
        tokenise, detokenise = (tokenise, detokenise) if text else (None, None)
        submitted = 5.0 + (tokenise or 0)
        started = submitted + wait
        rows.append(
            SampleRow(number, 0, 5.0, 5.0, started + prefill, started + prefill + decode, 8, 9, "length", "a", 0, None)
            ._replace(submitted_seconds=submitted, started_seconds=started if tells_start else None)
            ._replace(tokenise_seconds=tokenise, detokenise_seconds=detokenise)
        )
    found = summarise(requests(*rows), series(), scenario="server")["stages"]
    assert (found["queue"] is None) == (not tells_start)
    assert (found["tokenise"] is None) == (found["detokenise"] is None) == (not text)
    known = [stage for stage in found.values() if stage is not None]
    whole = sum(row.last_token_seconds - 5.0 + (row.detokenise_seconds or 0) for row in rows)
    assert sum(stage["mean_seconds"] for stage in known) * len(rows) == pytest.approx(whole, abs=1e-6)
    if whole > 1e-3:
        assert sum(stage["share"] for stage in known) == pytest.approx(1)
    assert found["decode"]["mean_seconds"] == pytest.approx(np.mean([time[3] for time in times]), abs=1e-6)


def test_an_older_table_has_no_stages_but_the_rest(tmp_path):
    table = requests(row(0, 1.0, 3.0, 5)).drop_columns(["started_seconds", "submitted_seconds", "tokenise_seconds"])
    write_parquet(table, tmp_path / "requests.parquet")
    result = summarise(read_parquet(tmp_path / "requests.parquet", SampleRow), series(), scenario="server")
    assert result["handover_seconds"]["p50"] is None
    assert result["stages"]["queue"] is None
    assert result["stages"]["prefill"]["mean_seconds"] == 1.0
    with pytest.raises(KeyError):
        read_parquet(tmp_path / "requests.parquet", SeriesRow)


sample_rows = st.builds(
    SampleRow,
    st.integers(0, 2**63 - 1),
    st.integers(0, 10**6),
    SECONDS,
    st.none() | SECONDS,
    st.none() | SECONDS,
    st.none() | SECONDS,
    st.integers(0, 10**5),
    st.integers(0, 10**5),
    st.none() | st.sampled_from(["stop", "length", "cancelled"]),
    st.sampled_from(["a", "b"]),
    st.integers(0, 3),
    st.none() | st.text(max_size=5),
    *[st.none() | SECONDS] * 5,
    st.none() | st.integers(0, 10**5),
)


@settings(max_examples=60, deadline=None)
@given(st.lists(sample_rows, max_size=20), st.integers(0, 20))
def test_any_rows_give_valid_json_and_no_sample_is_counted_twice(rows, split):
    table = append(to_table(SampleRow, rows[:split]), to_table(SampleRow, rows[split:]))
    assert table.schema.equals(schema(SampleRow))
    assert table.to_pylist() == [row._asdict() for row in rows]
    result = json.loads(to_json(summarise(table, series(), scenario="offline")))
    counted = result["samples_completed"] + result["samples_failed"] + result["samples_cancelled"]
    assert counted <= len(rows)
    assert sum(node["output_tokens"] for node in result["nodes"]) == result["output_tokens"]
    assert result["samples_failed"] == sum(row.error is not None for row in rows)
