"""The search against targets whose highest valid rate is known, because they are simulated at full length too."""

import math
from dataclasses import replace
from functools import cache
from itertools import product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from queueing import Batching, Serve, Simulated, queue_of, replay, rows_of

from examples import ALL, every, examples
from megatoken.harness.rate_finder import Goal, Outcome, Probe, RateFinder
from megatoken.harness.rate_search import MOST_FULL_LENGTHS, MOST_PROBES, RESOLUTION, RateSearch, Try, Verdict
from megatoken.harness.saturation import SaturationWatch
from megatoken.mlperf.benchmarks import LatencyLimits
from megatoken.mlperf.draws import PoissonSchedule
from megatoken.report.views.rate_search import search_answer
from megatoken.runs.tables import SampleRow
from megatoken.text import precise

SEED = 18209322760996052031  # of round v5.1


def search(target: Simulated, seed: int, first_rate: float) -> RateFinder:
    goal = Goal(target.limits, target.full_length, seed)
    finder = RateFinder(goal, first_rate, target.measure, lambda words: None)
    finder.run()
    return finder


TARGETS = [  # what serves, about how much it can, limits that the queue or the time per token meets first
    (queue_of(1, 0.01), 100.0, LatencyLimits(0.5, 1.0)),
    (queue_of(20, 0.2), 100.0, LatencyLimits(2.0, 1.0)),
    (queue_of(4, 0.02), 200.0, LatencyLimits(0.1, 1.0)),
    (Batching(), 44.0, LatencyLimits(2.0, 0.1)),
    (Batching(), 44.0, LatencyLimits(0.3, 0.1)),
    (Batching(), 44.0, LatencyLimits(2.0, 0.025)),
]
STARTS = [(SEED, 0.9), (1, 0.3), (2465351861681999779, 2.5)]  # seed, and the share of the capacity to begin with


@pytest.mark.parametrize(
    ("target", "start"), list(product(TARGETS, STARTS)) if ALL else list(zip(TARGETS, STARTS * 2, strict=True))
)
def test_the_rate_found_is_within_two_percent_of_the_highest_valid_one(
    target: tuple[Serve, float, LatencyLimits], start: tuple[int, float]
) -> None:
    (serve, capacity, limits), (seed, share) = target, start
    simulated = Simulated(serve, limits, seed, full_seconds=60.0)
    finder = search(simulated, seed, share * capacity)
    best = simulated.highest_valid_rate(0.2 * capacity, 1.3 * capacity)
    assert finder.found is not None
    assert simulated.valid(finder.found)
    # The time per token of bursts makes a lower rate invalid where a higher one is not: then the lower edge counts.
    assert finder.found >= 0.98 * best or finder.facts()["too_high_samples_per_second"] < best, finder.probes
    whole = [seconds for full, seconds in simulated.seconds_of_probes if full]
    probes = [seconds for full, seconds in simulated.seconds_of_probes if not full]
    assert sum(whole) < 9 * 60
    assert max(probes) <= 75
    assert [probe["full_length"] for probe in finder.probes].count(True) == len(whole)
    assert finder.facts()["samples_per_second"] == finder.found
    too_high = finder.facts()["too_high_samples_per_second"]
    assert too_high <= 1.02 * finder.found
    assert not simulated.valid(too_high)


def twenty_servers(stalled_try: int | None = None) -> Simulated:
    return Simulated(queue_of(20, 0.2), LatencyLimits(2.0, 1.0), SEED, full_seconds=60.0, stalled_try=stalled_try)


@cache
def best_of_twenty_servers() -> float:
    return twenty_servers().highest_valid_rate(20.0, 130.0)


@pytest.mark.parametrize("stalled", [0, 10, *every(2, 4, 6, 8)])
def test_one_stalled_try_does_not_change_the_answer(stalled: int) -> None:
    target = twenty_servers(stalled)
    finder = search(target, SEED, 40.0)
    first = finder.probes[stalled]
    assert not first["valid"] and not first["repeat"]
    again = [one for one in finder.probes if one["repeat"] and one["samples_per_second"] == first["samples_per_second"]]
    assert first["samples_per_second"] > 100.0 or [one["valid"] for one in again] == [True]
    best = best_of_twenty_servers()
    assert finder.found is not None
    assert 0.98 * best <= finder.found <= best
    too_high = finder.facts()["too_high_samples_per_second"]
    upper_end = [one for one in finder.probes if one["samples_per_second"] == too_high]
    assert [(one["valid"], one["repeat"]) for one in upper_end] == [(False, False), (False, True)]


def test_a_target_that_keeps_its_limits_at_no_rate_is_given_up() -> None:
    target = Simulated(queue_of(10, 3.0), LatencyLimits(1.0, 1.0), SEED, full_seconds=60.0)
    finder = search(target, SEED, 20.0)
    assert finder.found is None
    assert all(probe["valid"] is False for probe in finder.probes)
    assert len(finder.probes) <= 40


def test_a_length_that_can_show_no_percentile_is_told_and_not_tried() -> None:
    target = Simulated(queue_of(10, 0.1), LatencyLimits(0.1, 1.0), SEED, full_seconds=2.0)  # serves 100 samples/s
    finder = search(target, SEED, 300.0)
    assert finder.found is None
    assert all(target.full_length(probe["samples_per_second"])[0] >= 459 for probe in finder.probes)
    assert 1 <= len(finder.probes) <= 4
    assert "only 459 or more show a p99; give --min-duration " in finder.outcome
    assert finder.facts()["outcome"] == finder.outcome


@settings(max_examples=6, deadline=None)
@given(st.floats(2.0, 600.0), st.floats(1.0, 1.3), st.floats(0.1, 30.0), st.floats(0.0, 1.5), st.integers(0, 2**32))
def test_a_search_ends_within_its_number_of_probes_whatever_becomes_of_them(
    full_seconds: float, growth: float, life: float, late: float, seed: int
) -> None:
    """Lives that grow from probe to probe made it repeat one probe again and again."""
    draws = np.random.default_rng(seed)
    limits, lives, tried_rates = LatencyLimits(1000.0, 1.0), life, []

    def measure(tried: Try, probe: Probe) -> Outcome:
        nonlocal lives
        lives *= growth
        tried_rates.append(tried.rate)
        assert len(tried_rates) <= MOST_PROBES + MOST_FULL_LENGTHS
        seconds = probe.seconds or full_seconds
        due = np.linspace(0.0, seconds, 50 if draws.random() > 0.02 else 0)
        first = due + np.where(draws.random(len(due)) < late * draws.random(), 2000.0, 0.01)
        probe.watch.add_samples(rows_of(due, first, due + lives, np.full(len(due), 2)))
        return Outcome("x", None, ("LATENCIES",) if probe.seconds is None and draws.random() < late else ())

    def full_length(rate: float) -> tuple[int, float]:  # a rate that doubles 40 times has billions
        return max(1, min(10_000, round(rate * full_seconds))), full_seconds

    goal = Goal(limits, full_length, SEED)
    finder = RateFinder(goal, 500.0, measure, lambda words: None)
    finder.run()
    assert finder.found is None or finder.found in tried_rates
    assert finder.outcome


@pytest.mark.parametrize(
    ("again", "by_client"),
    [
        (("LOADGEN_DISAGREES",), True),
        (("CLIENT_SATURATED", "LATENCIES"), True),
        (("LATENCIES", "LOADGEN_DISAGREES"), False),
    ],
)
def test_a_rate_that_only_the_client_could_not_send_is_no_limit_of_the_server(
    again: tuple[str, ...], by_client: bool
) -> None:
    """The server would serve any rate; the client gives up above 100 samples/s, on the repeat with another code."""
    said: list[str] = []

    def measure(tried: Try, probe: Probe) -> Outcome:
        codes = again if tried.repeat else ("CLIENT_SATURATED", "LATENCIES")
        outcome = target.measure(tried, probe)
        return replace(outcome, broken=codes) if tried.rate > 100 else outcome

    target = Simulated(queue_of(1, 1e-4), LatencyLimits(1.0, 1.0), SEED, full_seconds=30.0)
    finder = RateFinder(Goal(target.limits, target.full_length, SEED), 95.0, measure, said.append)
    finder.run()
    assert finder.found is not None and 98 <= finder.found <= 100
    assert finder.facts()["limited_by_client"] is by_client
    assert "client" not in finder.outcome  # search_answer says it, from the field above
    assert any("samples/s too high for the client: CLIENT_SATURATED, LATENCIES" in line for line in said)
    assert any("too high for the client, repeated" in line for line in said) is by_client


@pytest.mark.parametrize("last", [1, 3, 8])
def test_a_search_ends_with_the_first_try_that_serves_nothing_and_keeps_a_rate_confirmed_before(last: int) -> None:
    def measure(tried: Try, probe: Probe) -> Outcome:
        if len(finder.probes) + 1 == last:
            return Outcome("x", None, ("FAILED_SAMPLES",), failure="9 x HTTP 500: out of memory", served=False)
        return target.measure(tried, probe)

    said: list[str] = []
    target = Simulated(queue_of(20, 0.2), LatencyLimits(2.0, 1.0), SEED, full_seconds=60.0)
    finder = RateFinder(Goal(target.limits, target.full_length, SEED), 80.0, measure, said.append)
    confirmed = finder.run()
    *before, failed = finder.probes
    assert len(before) == last - 1 and failed["valid"] is None
    assert failed["reason"] == "no sample was served: 9 x HTTP 500: out of memory" and failed["reason"] in said[-1]
    full = sum(one["full_length"] for one in finder.probes)
    assert f"{last - full} probe" in finder.outcome and f"{full} run" in finder.outcome
    assert finder.outcome.endswith("samples/s: 9 x HTTP 500: out of memory")
    assert finder.facts()["too_high_samples_per_second"] != failed["samples_per_second"]
    found = [one["samples_per_second"] for one in before if one["full_length"] and one["valid"]]
    assert finder.found == max(found, default=None) and (confirmed is None) is (finder.found is None)
    answer = search_answer({"rate_search": finder.facts()})
    assert answer is not None and ("out of memory" in answer) is (finder.found is not None)


def arrivals(rate: float, seconds: float, seed: int = SEED) -> np.ndarray:
    schedule = PoissonSchedule(seed, rate)
    return np.array([schedule.due_ns(query) / 1e9 for query in range(schedule.queries_until(seconds))])


@pytest.mark.parametrize(("load", "within"), [(3.0, 3.0), (1.5, 4.0), (1.1, 12.0)])
def test_too_high_a_rate_is_seen_long_before_the_end(load: float, within: float) -> None:
    due = arrivals(100 * load, 60.0)
    watch = SaturationWatch(LatencyLimits(0.5, 1.0), 100 * load, len(due), 60.0)
    found, when = replay(watch, due, *queue_of(1, 0.01)(due))
    assert found is not None
    assert when <= within
    assert watch.capacity is None or watch.capacity == pytest.approx(100, rel=0.1)


def test_what_falls_short_is_seen_before_a_limit_is_passed() -> None:
    due = arrivals(105.0, 120.0)
    watch = SaturationWatch(LatencyLimits(10.0, 1.0), 105.0, 63_000, 600.0)
    found, when = replay(watch, due, *queue_of(1, 0.01)(due))
    assert found is not None and found.reason["code"] == "FALLS_SHORT"
    assert not found.surely
    assert when < 90
    assert watch.capacity == pytest.approx(100, rel=0.02)


@pytest.mark.parametrize(
    "serve", [queue_of(1, 0.01), queue_of(20, 0.2), Batching(step_seconds=0.004, row_seconds=1e-4)]
)
@pytest.mark.parametrize("seed", range(examples(12)))
def test_a_rate_that_is_low_enough_is_left_alone(serve: Serve, seed: int) -> None:
    due = arrivals(85.0, 120.0, seed)
    watch = SaturationWatch(LatencyLimits(1.0, 1.0), 85.0, len(due), 600.0)
    found, _ = replay(watch, due, *serve(due))
    assert found is None
    assert watch.result().valid


def test_a_time_per_token_over_its_limit_is_seen() -> None:
    due = arrivals(20.0, 120.0)
    first = due + 0.05
    last = first + 9 * (0.02 + 0.004 * due)  # passes 0.1 s after 20 s
    watch = SaturationWatch(LatencyLimits(1.0, 0.1), 20.0, len(due), 120.0)
    found, when = replay(watch, due, first, last, np.full(len(due), 10))
    assert found is not None and found.surely and "TPOT limit" in found.reason["message"]
    assert 20 < when < 30


@pytest.mark.parametrize(("late", "code"), [(0, "FAILED_SAMPLES"), (2, "FAILED_SAMPLES"), (3, "OVER_LIMIT")])
def test_failed_samples_speak_against_a_rate_and_are_not_called_late(late: int, code: str) -> None:
    watch = SaturationWatch(LatencyLimits(1.0, 1.0), 10.0, 1000, 100.0)  # a run of full length may have 2
    failed = [SampleRow(n, 0, n / 10, n / 10, None, None, 1, 0, None, "here", 0, "no") for n in range(max(1, 3 - late))]
    due = np.zeros(late)
    watch.add_samples([*rows_of(due, due + 2, due + 2, np.full(late, 2)), *failed])
    found = watch.look(5.0, np.empty(0), np.empty(0))
    assert found is not None and found.reason["code"] == code and found.surely
    count = {"FAILED_SAMPLES": "failed", "OVER_LIMIT": "samples"}[code]
    assert dict(found.reason)[count] == (late if code == "OVER_LIMIT" else len(failed))


@pytest.mark.parametrize("highest_served", [0.0, 60.0])
def test_samples_that_fail_are_no_limit_of_the_client_and_need_no_longer_run(highest_served: float) -> None:
    """Every third sample fails, at any rate or above 60 samples/s only."""
    said: list[str] = []

    def measure(tried: Try, probe: Probe) -> Outcome:
        outcome = target.measure(tried, probe)
        if tried.rate <= highest_served:
            return outcome
        broken = ("CLIENT_SATURATED", "FAILED_SAMPLES")
        return replace(outcome, broken=broken, failure="9 of 27 samples failed: 9 x HTTP 500: no room")

    target = Simulated(queue_of(20, 0.01), LatencyLimits(2.0, 1.0), SEED, full_seconds=30.0)
    finder = RateFinder(Goal(target.limits, target.full_length, SEED), 150.0, measure, said.append)
    finder.run()
    assert said[0] == "150 samples/s too high: 9 of 27 samples failed: 9 x HTTP 500: no room; CLIENT_SATURATED"
    assert not finder.limited_by_client and "--min-duration" not in finder.outcome
    if highest_served:
        assert finder.found is not None and 0.98 * highest_served <= finder.found <= highest_served
        assert "no room" not in finder.outcome
    else:
        assert finder.found is None
        assert finder.outcome.endswith(" samples/s, 9 of 27 samples failed: 9 x HTTP 500: no room")


@pytest.mark.parametrize("share", [0.01, 0.05, 0.5, 0.9])
def test_a_search_ends_where_as_many_samples_fail_at_a_much_lower_rate(share: float) -> None:
    def measure(tried: Try, probe: Probe) -> Outcome:
        return Outcome("x", None, ("FAILED_SAMPLES",), failure="5 x HTTP 500", failed_share=share)

    target = Simulated(queue_of(20, 0.01), LatencyLimits(2.0, 1.0), SEED, full_seconds=600.0)
    finder = RateFinder(Goal(target.limits, target.full_length, SEED), 150.0, measure, lambda words: None)
    finder.run()
    lowest = finder.probes[-1]["samples_per_second"]
    assert 0.7 * min(0.55, 1 - share) <= lowest / 150 <= min(0.55, 1 - share)
    same = f"at 150 samples/s {precise(100 * share)} % failed too, so load is not the cause: look at the server"
    assert finder.outcome.endswith(f"5 x HTTP 500; {same}")


@pytest.mark.parametrize("first_rate", [75.0, 130.0, 1000.0])
def test_a_search_goes_on_where_a_server_fails_what_it_cannot_keep_up_with(first_rate: float) -> None:
    """It serves 60 samples/s, and fails at once all above that."""

    def measure(tried: Try, probe: Probe) -> Outcome:
        share = max(0.0, 1 - 60.0 / tried.rate)
        if not share:
            return target.measure(tried, probe)
        return Outcome("x", None, ("FAILED_SAMPLES",), failure="5 x HTTP 500", failed_share=share)

    target = Simulated(queue_of(20, 0.01), LatencyLimits(2.0, 1.0), SEED, full_seconds=600.0)
    finder = RateFinder(Goal(target.limits, target.full_length, SEED), first_rate, measure, lambda words: None)
    finder.run()
    assert finder.found is not None and 0.98 * 60 <= finder.found <= 60


@pytest.mark.parametrize(
    ("ttft", "tpot", "said"),
    [(2.5, 0.01, "TTFT was 2,500 ms; the limit is 2,000 ms"), (1.0, 3.0, "TPOT was 3,000 ms; the limit is 1,000 ms")],
)
def test_a_limit_that_no_rate_keeps_is_named_with_what_was_measured_at_the_lowest(
    ttft: float, tpot: float, said: str
) -> None:
    def measure(tried: Try, probe: Probe) -> Outcome:
        return replace(target.measure(tried, probe), ttft_p99_seconds=ttft, tpot_p99_seconds=tpot)

    target = Simulated(queue_of(20, 2.5), LatencyLimits(2.0, 1.0), SEED, full_seconds=30.0)
    finder = RateFinder(Goal(target.limits, target.full_length, SEED), 60.0, measure, lambda words: None)
    finder.run()
    lowest = min(one["samples_per_second"] for one in finder.probes)
    assert f": even at {precise(lowest)} samples/s, the lowest rate tried, the p99 of {said}; " in finder.outcome


@given(st.floats(0.01, 1e5), st.floats(0.01, 100), st.booleans())
def test_a_search_without_noise_ends_just_below_the_edge(edge: float, factor: float, hints: bool) -> None:
    search = RateSearch(edge * factor)
    tries = 0
    while (tried := search.next()) is not None:
        tries += 1
        valid = tried.rate <= edge
        search.note(tried, Verdict(valid, surely=True, capacity=edge if hints and not valid else None))
    assert search.found is not None
    assert edge / (1 + RESOLUTION) <= search.found <= edge
    assert tries < 45


@given(st.floats(0.01, 1e5), st.floats(0.01, 10), st.integers(0, 40), st.booleans())
def test_a_disturbance_that_makes_one_try_fail_does_not_change_the_answer(
    edge: float, factor: float, disturbed: int, surely: bool
) -> None:
    search, outcomes = RateSearch(edge * factor), dict[Try, list[bool]]()
    while (tried := search.next()) is not None:
        valid = tried.rate <= edge and sum(map(len, outcomes.values())) != disturbed
        assert tried.repeat == (tried in outcomes)  # a repeat is marked as one, and nothing is tried a third time
        outcomes.setdefault(tried, []).append(valid)
        search.note(tried, Verdict(valid, surely))
    full_lengths = sum(len(found) for tried, found in outcomes.items() if tried.full_length)
    assert search.found is not None
    assert search.found <= edge
    assert search.found >= edge / (1 + RESOLUTION) or full_lengths == MOST_FULL_LENGTHS
    for tried, found in outcomes.items():
        if found == [False]:  # neither the upper end, nor a probe below a rate that passed
            assert tried.rate > search.too_high or tried.full_length or tried.rate > search.found


def test_a_full_length_that_contradicts_a_probe_is_tried_again_while_no_rate_is_found() -> None:
    """All runs of full length fail, until one at a rate that a probe passed was tried twice."""
    search, passed, tries = RateSearch(80.0), 0.0, list[Try]()
    while (tried := search.next()) is not None and not (tries and tried.full_length and tries[-1].rate <= passed):
        valid = tried.rate <= 100 and not tried.full_length
        passed = max(passed, tried.rate if valid else 0.0)
        tries.append(tried)
        search.note(tried, Verdict(valid, surely=False, lasted_share=0.9))
    contradicting = [one for one in tries if one.full_length][-1]
    assert contradicting.rate <= passed
    assert tried == contradicting and tried is not None and tried.repeat
    search.note(tried, Verdict(True, surely=False))
    assert search.found == contradicting.rate


verdicts = st.builds(Verdict, st.booleans(), st.booleans(), st.floats(0, 1), st.none() | st.floats(1e-3, 1e6))


@given(st.lists(verdicts, max_size=60))
def test_a_search_ends_whatever_the_verdicts(verdicts: list[Verdict]) -> None:
    search = RateSearch(10.0)
    tries = 0
    while (tried := search.next()) is not None:
        assert tried.rate > 0 and math.isfinite(tried.rate)
        search.note(tried, verdicts[tries] if tries < len(verdicts) else Verdict(False))
        tries += 1
        assert tries <= 45
    assert search.found is None or search.found <= search.too_high


@settings(max_examples=20, deadline=None)
@given(st.integers(0, 2**64 - 1), st.floats(0.1, 5000), st.floats(0.001, 50))
def test_as_many_queries_as_reach_the_time(seed: int, rate: float, seconds: float) -> None:
    schedule = PoissonSchedule(seed, rate)
    queries = schedule.queries_until(seconds)
    assert schedule.due_ns(queries - 1) >= seconds * 1e9
    assert queries == 1 or schedule.due_ns(queries - 2) < seconds * 1e9
    assert schedule.due_ns(0) == 0


def test_a_rate_only_stretches_the_arrivals() -> None:
    slow, fast = PoissonSchedule(SEED, 2.0), PoissonSchedule(SEED, 500.0)
    for query in (1, 100, 9000):
        assert slow.due_ns(query) / 250 == pytest.approx(fast.due_ns(query), rel=1e-5)
    assert fast.mean_rate(200_000) == pytest.approx(500, rel=0.01)
