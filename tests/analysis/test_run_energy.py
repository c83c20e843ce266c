"""Energy of a run over the tokens of the same stretch: one rule for result.json and for plans."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatoken.analysis.energy import energy_together, run_energy
from megatoken.analysis.statistics import summarise
from megatoken.analysis.summary import summarise_run
from megatoken.planning.energy import energy_of
from megatoken.runs.reasons import reason
from megatoken.runs.run import read_run
from megatoken.runs.tables import SampleRow, SeriesRow, to_table
from megatoken.runs.writer import RunFolder


def moments(watts, *, node="host", replica=0, tokens=100, step=1.0, first=1):
    """A row every ``step`` seconds; ``tokens`` more in each."""
    return [
        SeriesRow(at * step, node, replica, tokens * at, 0, 4, 8, 90, 100, 4, 0, 0, value)
        for at, value in enumerate(watts, first)
    ]


def energy(*rows):
    return run_energy(to_table(SeriesRow, rows))


@given(st.lists(st.floats(1, 2000), min_size=1, max_size=50))
def test_every_row_is_the_mean_since_the_one_before_or_the_start(watts):
    found = energy(*moments(watts))
    assert found.joules == pytest.approx(sum(watts))
    assert (found.output_tokens, found.seconds) == (100 * len(watts), len(watts))
    assert min(watts) * (1 - 1e-9) <= found.mean_watts <= max(watts) * (1 + 1e-9)
    assert found.joules_per_output_token == pytest.approx(found.joules / found.output_tokens)


def test_a_row_at_the_start_covers_no_time():
    found = energy(*moments([900.0, 100.0, 200.0], first=0))
    assert (found.joules, found.output_tokens, found.seconds) == (300, 200, 2)


def test_replicas_add_up_in_any_order():
    rows = moments([500] * 10) + moments([700] * 10, node="other") + moments([300] * 10, replica=1)
    found = energy(*rows[::-1])
    assert (found.joules, found.output_tokens, found.seconds) == (15_000, 3000, 10)
    assert found.mean_watts == 1500


@pytest.mark.parametrize(
    ("rows", "why"),
    [
        ([], "no series"),
        (moments([100, None, 100]), "no power"),
        (moments([100]) + moments([None], replica=1), "no power"),
        (moments([100, 100], step=3.5), "replica 0 of host was not read for 3.5 s"),
        (moments([0, 0]), "is zero"),
    ],
)
def test_energy_that_is_not_known(rows, why):
    found = energy(*rows)
    assert found.joules is None and found.mean_watts is None and found.joules_per_output_token is None
    assert why in found.why


def test_energy_without_tokens_is_energy_all_the_same():
    found = energy(*moments([100, 100], tokens=0))
    assert (found.joules, found.joules_per_output_token) == (200, None)


def test_runs_one_after_the_other():
    one, other = energy(*moments([100] * 4)), energy(*moments([300] * 2))
    both = energy_together([one, other])
    assert (both.joules, both.output_tokens, both.seconds) == (1000, 600, 6)
    unknown = energy_together([one, energy()])
    assert unknown.joules is None and "no series" in unknown.why


def test_result_json_and_plans_say_the_same_of_a_run_that_was_cut_off(tmp_path):
    """Two samples ended, a third was answered halfway: its tokens are in the series alone, its energy in both."""
    folder = RunFolder.create(
        tmp_path, "run", {}, {}, scenario="offline", summarise=summarise_run, facts={"model": "tiny"}
    )
    folder.add_samples([SampleRow(n, n, 0.0, 0.0, 0.5, 1.0 + n, 9, 100, "length", "host") for n in range(2)])
    for row in moments([400.0, 500.0], tokens=150):
        folder.add_series(row)
    folder.interrupt(reason("INTERRUPTED", cause="enough"))
    run = read_run(folder.path)
    planned = energy_of([run])
    assert run.result["energy_joules"] == planned.joules == 900
    assert run.result["power_watts"] == planned.mean_watts == 450
    assert run.result["energy_joules_per_output_token"] == planned.joules_per_output_token == 3
    assert run.result["output_tokens"] == 200
    assert summarise(run.requests, run.series, scenario="offline")["energy_joules"] == 900
