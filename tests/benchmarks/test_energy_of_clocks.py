"""Energy of clocks: the shipped constants are the fit of the stored points, and the benchmark's arithmetic."""

from __future__ import annotations

import json
import time
from importlib.resources import files
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed")

import attention
import energy_of_clocks
from energy_of_clocks import Point, fit
from megatoken.engine.config import SHAPES
from megatoken.hardware.power import Power
from megatoken.hardware.qualify import gpu_timing
from megatoken.yaml_files import load_yaml

STORED = Path(energy_of_clocks.__file__).parent / "results" / "h200-energy-of-clocks.json"
SHIPPED = ("clock_mhz", "product_microseconds", "attention_microseconds", "attention_exponent")


def test_shipped_constants_are_the_fit_of_the_stored_points() -> None:
    stored = json.loads(STORED.read_text())
    text = (files("megatoken") / "data" / "power_curves.yaml").read_text(encoding="utf-8")
    curve: dict[str, Any] = load_yaml(text)["accelerators"]["H200"]
    assert stored["rest_watts"] == pytest.approx(curve["static_watts"], rel=1e-3)
    assert set(curve["workloads"]) == {work.shape for work in energy_of_clocks.WORKS}
    for shape, shipped in curve["workloads"].items():
        points = [Point(**one) for one in stored["points"] if one["shape"] == shape]
        assert len(points) == len(energy_of_clocks.RESTS)
        found = fit(points, stored["rest_watts"])
        for name in SHIPPED:
            assert shipped[name] == pytest.approx(found[name], rel=2e-3)
        for form, fitted in zip(shipped["forms"], found["forms"], strict=True):
            for name in ("exponent", "constant_joules", "clock_joules"):
                assert form[name] == pytest.approx(fitted[name], abs=6e-4)
            assert fitted["root_mean_square_error"] < 0.02 and fitted["largest_error"] < 0.04


def test_a_model_is_found_again_from_points_that_follow_it() -> None:
    points = []
    for rest, speed in ((0.0, 1.0), (0.5, 1.1), (1.0, 1.2), (2.0, 1.25)):
        attention, products = 200 * speed**-0.4, 2000 / speed
        busy, layer = attention + products, (attention + products) * (1 + rest)
        joules = 100 * busy / 1e6 + 0.5 + 0.8 * speed**2
        watts = (joules * 1e6 + 100 * (layer - busy)) / layer
        points.append(Point("x", rest, 9, busy, layer, attention, attention, watts, 1400.0))
        assert points[-1].joules(100) == pytest.approx(joules)
    found = fit(points, 100)
    assert found["attention_exponent"] == pytest.approx(0.4)
    assert found["fastest_speed"] == pytest.approx(1.25)
    square = found["forms"][0]
    assert (square["constant_joules"], square["clock_joules"]) == pytest.approx((0.5, 0.8))
    assert square["largest_error"] < 1e-9 < found["forms"][2]["largest_error"]
    assert "J" in points[0].line(100)


def test_options_are_checked() -> None:
    assert energy_of_clocks.parse(["--out", "x.json"]).seconds == 4.5
    for wrong in (["--seconds", "0.5"], ["--seconds", "many"]):
        with pytest.raises(SystemExit) as refusal:
            energy_of_clocks.parse([*wrong, "--out", "x.json"])
        assert refusal.value.code == 2


class HostEvent:
    """An event of a device that has nothing to do when it is recorded, as the CPU."""

    def record(self) -> None:
        self.seconds = time.perf_counter()

    def synchronize(self) -> None:
        pass

    def elapsed_time(self, end: HostEvent) -> float:
        return (end.seconds - self.seconds) * 1e3


class Meters:
    """A card that draws 500 W at 1,500 MHz."""

    def watts(self, begin: float, end: float) -> float:
        assert end > begin
        return 500.0

    def between(self, begin: float, end: float) -> Power:
        return Power(500.0, 500.0 * (end - begin), 1500.0, 50.0)


def test_bursts_and_rests_are_timed_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(energy_of_clocks, "timing_event", HostEvent)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(torch.cuda, "_sleep", lambda cycles: time.sleep(cycles / 1.7e9))
    ran: list[int | str] = []

    class StandIn(energy_of_clocks.Layer):
        def __init__(self) -> None:
            pass

        def product(self, number: int, which: int) -> None:
            ran.append(which)
            time.sleep(0.0005)

        def attention(self, number: int) -> None:
            ran.append("attention")
            time.sleep(0.002)

    work = energy_of_clocks.Work("x", "70b", 4, 4, 3)
    meters: Any = (Meters(), Meters())
    point = energy_of_clocks.measure(work, StandIn(), 1.0, 0.3, meters)
    assert ran[:5] == [0, "attention", 1, 2, 3]
    assert 2000 <= point.attention_median_microseconds <= point.busy_microseconds - 1500
    assert point.layer_microseconds >= point.busy_microseconds + 18_000 / 3
    assert point.bursts >= 2 and (point.watts, point.clock_mhz) == (500, 1500)
    assert energy_of_clocks.resting_watts(0.1, meters[0]) == 500


@pytest.mark.skipif(torch.cuda.is_available(), reason="the benchmark itself runs on a GPU")
def test_a_layer_runs_its_four_products_and_attention(monkeypatch: pytest.MonkeyPatch) -> None:
    cpu = torch.device("cpu")
    for module in (gpu_timing, attention, energy_of_clocks):
        monkeypatch.setattr(module, "DEVICE", cpu)
    tiny = {"KV_HEADS": 2, "HEAD_DIM": 32, "HEADS": {"70b": 8}, "POOL_TOKENS": 8192}
    for name, value in tiny.items():
        monkeypatch.setattr(attention, name, value)
    monkeypatch.setattr(energy_of_clocks, "timing_event", HostEvent)
    products: list[tuple[int, ...]] = []
    monkeypatch.setattr(
        torch, "_scaled_mm", lambda x, weight, *scales, **options: products.append((*x.shape, weight.shape[1]))
    )
    layer = energy_of_clocks.Layer(energy_of_clocks.Work("tiny", "70b", 4, 3, 2), attention.Pool())
    assert layer.longest == layer.batch.lengths[0] >= layer.batch.lengths[-1]
    assert len(layer.run(1)) == 4
    model = SHAPES["tiny"]
    assert [one[0] for one in products] == [4] * 4
    assert products[3][1:] == (model.intermediate_size, model.hidden_size)
    assert layer.out.float().abs().max() > 0
