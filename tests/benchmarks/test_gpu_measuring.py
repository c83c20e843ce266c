"""What the GPU benchmarks share, as far as it runs without a GPU."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpu_measuring import require_gpu, watts_between
from megatoken.errors import CapacityError
from megatoken.hardware.power import Reading, mean_power
from megatoken.hardware.telemetry import Telemetry


def reading(since: float, at: float, watts: float | None, clock: float = 1500.0) -> Reading:
    return Reading(since, at, Telemetry(power_watts=watts, clock_mhz=clock, temperature_celsius=60.0))


def test_power_is_weighted_by_time_and_cut_at_the_ends() -> None:
    readings = [reading(0, 1, 100.0), reading(1, 3, 700.0), reading(3, 4, 400.0)]
    power = mean_power(readings, 0.5, 3.5)
    assert power.watts == pytest.approx((0.5 * 100 + 2 * 700 + 0.5 * 400) / 3)
    assert power.joules == pytest.approx(0.5 * 100 + 2 * 700 + 0.5 * 400)
    assert (power.clock_mhz, power.temperature_celsius) == (1500.0, 60.0)


@given(st.lists(st.floats(50, 700), min_size=1, max_size=20), st.integers(0, 19))
def test_joules_of_two_parts_add_up(watts: list[float], cut: int) -> None:
    readings = [reading(second, second + 1, value) for second, value in enumerate(watts)]
    end, middle = len(watts), min(cut, len(watts) - 1) + 0.5
    whole = mean_power(readings, 0, end).joules
    assert whole == pytest.approx(sum(watts))
    assert mean_power(readings, 0, middle).joules + mean_power(readings, middle, end).joules == pytest.approx(whole)


def test_unknown_power_is_refused_and_gaps_are_passed_over() -> None:
    assert mean_power([reading(0, 1, None), reading(1, 2, 300.0)], 0, 2).watts == 300.0
    with pytest.raises(CapacityError, match="power_watts"):
        mean_power([reading(0, 1, None)], 0, 1)
    with pytest.raises(CapacityError, match="measure longer"):
        mean_power([reading(0, 1, 100.0)], 5, 6)


def test_without_a_gpu_one_line_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    with pytest.raises(CapacityError, match="needs a GPU: no NVIDIA GPU"):
        require_gpu()


@given(st.floats(50, 700), st.floats(0.02, 0.1), st.floats(0, 0.1), st.floats(0.3, 2))
def test_watts_between_renewals_do_not_depend_on_where_a_window_begins(
    watts: float, period: float, begin: float, seconds: float
) -> None:
    """Before and after, other power is drawn."""
    joules, renewals = 0.0, []
    for number in range(200):
        at = number * period
        joules += period * (watts if 1 < at < 4 else 10 * watts)
        renewals.append((at, joules))
    assert watts_between(renewals, 1.2 + begin, 1.2 + begin + seconds) == pytest.approx(watts)


def test_an_energy_counter_that_stands_still_is_an_error() -> None:
    with pytest.raises(CapacityError, match=r"not renewed twice in 0.30 s"):
        watts_between([(0.9, 1.0), (1.1, 70.0), (1.4, 140.0)], 1.0, 1.3)
