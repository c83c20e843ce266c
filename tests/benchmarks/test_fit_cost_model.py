"""The cost model's constants are those that its measurements give."""

import pytest

from fit_cost_model import constant, fits, main, power, products_load, read


@pytest.fixture(scope="module")
def all_fits():
    return fits()


def test_every_constant_is_the_fitted_one(all_fits):
    assert len(all_fits) == 19
    for fit in all_fits:
        assert constant(fit.name) == pytest.approx(fit.value, rel=0.005), fit


def test_the_idle_power_moves_the_others_but_no_margin():
    """All loads were at the power limit: what idling takes is taken from the rest, in proportion."""
    loads = [products_load(run) for run in read("h200-gemm.json")["sustained"] if run["scaling"] != "row"]
    (low, _), (high, _) = power(loads, 80.0), power(loads, 150.0)
    assert (low / high)[:2] == pytest.approx([(690 - 80) / (690 - 150)] * 2, rel=0.02)


def test_it_prints_what_it_found(capsys, monkeypatch, all_fits):
    monkeypatch.setattr("fit_cost_model.fits", lambda: all_fits)
    main()
    assert "DECODE_SHARE" in capsys.readouterr().out
