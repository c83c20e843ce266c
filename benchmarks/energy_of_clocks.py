"""What do the joules of a layer cost in clock? Its time and energy at several clocks of one card.

Most users may not set a card's clock or its power limit. But a card that rests between bursts of work has power to
spare, so inside a burst its clock is higher: layers of 70B and 8B (four e4m3 products, and the engine's decode
attention at MLPerf's lengths) run in bursts, with longer and longer rests. Energy of a layer is the mean power of the
energy counter, less that of the rests, which is measured alone. ``fit`` makes of it the constants of
``power_curves.yaml``: layer = products, whose time goes with 1 / clock, and attention; joules = static power x time +
a constant + a part that grows with a power of the clock. Clocks reached are at and above that of the card's limit:
a lower limit is extrapolated.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean, median
from typing import Any

import numpy as np
import torch

from attention import OUT_SCALE, SCALE, Batch, Pool, make_batch, running_lengths
from gpu_measuring import EnergyMeter, report, require_gpu, write_report
from megatoken.engine.config import SHAPES
from megatoken.engine.ops.paged_attention import decode_attention
from megatoken.errors import MegatokenError
from megatoken.hardware.power import PowerSampler
from megatoken.hardware.qualify.gpu_timing import BF16, DEVICE, E4M3, device_uuid, gaussian_e4m3, timing_event
from megatoken.hardware.qualify.shapes import products_of

PAGE_SIZE = 32
RESTS = (0.0, 0.1, 0.2, 0.35, 0.5, 0.75, 1.0, 1.5, 2.0)
"""Of a burst of about 18 ms."""
REST_CYCLES = 18e-3 * 1.7e9
MOST_SETTLING_SECONDS = 1.5
COUNTER_SECONDS = 0.05
"""At the end, which the energy counter may not have seen."""
FORMS = ((2, len(RESTS)), (1, len(RESTS)), (3, 4))
"""Exponent of the clock in the joules that grow with it, so that power grows with the third, second or fourth power of
it; and how many points are fitted, those of the lowest clocks first. The last two span what fits about as well."""


@dataclass(frozen=True, slots=True)
class Work:
    """Layers of a shape: tokens of its products, sequences of its attention, layers in a burst."""

    shape: str
    heads_of: str
    tokens: int
    sequences: int
    burst: int


WORKS = (Work("llama2-70b", "70b", 1536, 880, 8), Work("llama3.1-8b", "8b", 2048, 1170, 16))


@dataclass(frozen=True, slots=True)
class Point:
    """Means with one length of the rests.

    ``busy_microseconds`` of a layer are without its share of the rest, ``layer_microseconds`` with it. ``watts`` are
    those of the energy counter; ``clock_mhz`` is NVML's, which includes the rests.
    """

    shape: str
    rest: float
    bursts: int
    busy_microseconds: float
    layer_microseconds: float
    attention_microseconds: float
    attention_median_microseconds: float
    watts: float
    clock_mhz: float

    def joules(self, rest_watts: float) -> float:
        """Energy of a layer, without the rest."""
        resting = self.layer_microseconds - self.busy_microseconds
        return (self.watts * self.layer_microseconds - rest_watts * resting) / 1e6

    def line(self, rest_watts: float) -> str:
        """For a table."""
        joules = self.joules(rest_watts)
        return (
            f"{self.shape:12} rest {self.rest:4.2f}  {self.busy_microseconds:7.1f} us, attention"
            f" {self.attention_microseconds:6.1f}  {joules:.3f} J  {joules / self.busy_microseconds * 1e6:5.0f} W in"
            f" bursts  {self.watts:5.0f} W, {self.clock_mhz:,.0f} MHz with rests"
        )


class Layer:
    """Products on two sets of weights in turn, and decode attention on several sets of pages, longest first."""

    def __init__(self, work: Work, pool: Pool) -> None:
        """Fill weights and inputs."""
        products = products_of(SHAPES[work.shape])
        self.inputs = {inputs: gaussian_e4m3(work.tokens, inputs) for inputs in {one.inputs for one in products}}
        self.weights = [[gaussian_e4m3(one.outputs, one.inputs) for one in products] for _ in range(2)]
        lengths = np.sort(running_lengths(work.sequences))[::-1].copy()
        self.batch: Batch = make_batch("decode", work.heads_of, PAGE_SIZE, lengths)
        self.caches = pool.caches(E4M3, PAGE_SIZE)
        self.out = torch.empty(self.batch.q_BHE.shape, dtype=E4M3, device=DEVICE)
        self.one = torch.ones((), device=DEVICE)
        self.longest = int(lengths.max())

    def product(self, number: int, which: int) -> None:
        """One of the four."""
        weight = self.weights[number % 2][which]
        torch._scaled_mm(
            self.inputs[weight.shape[1]], weight.t(), self.one, self.one, out_dtype=BF16, use_fast_accum=True
        )

    def attention(self, number: int) -> None:
        """Of all sequences."""
        batch = self.batch
        decode_attention(
            batch.q_BHE,
            *self.caches,
            batch.tables[number % len(batch.tables)],
            batch.lengths_B,
            self.out,
            softmax_scale=SCALE,
            out_scale=OUT_SCALE,
            max_length=self.longest,
            total_tokens=batch.tokens,
        )

    def run(self, number: int) -> list[torch.cuda.Event]:
        """One layer; events before it, before and after its attention, and after it."""
        events = [timing_event() for _ in range(4)]
        events[0].record()
        self.product(number, 0)
        events[1].record()
        self.attention(number)
        events[2].record()
        for which in (1, 2, 3):
            self.product(number, which)
        events[3].record()
        return events


def repeat_bursts(burst: Callable[[], None], seconds: float) -> int:
    """Launch bursts, at most one ahead of the device. Returns how many."""
    begin, last, bursts = time.monotonic(), None, 0
    while time.monotonic() - begin < seconds:
        burst()
        event = timing_event()
        event.record()
        if last is not None:
            last.synchronize()
        last, bursts = event, bursts + 1
    torch.cuda.synchronize()
    return bursts


def measure(work: Work, layer: Layer, rest: float, seconds: float, meters: tuple[EnergyMeter, PowerSampler]) -> Point:
    """Bursts of layers with rests, after a moment in which the clock settles."""
    events: list[list[torch.cuda.Event]] = []

    def burst() -> None:
        events.extend(layer.run(number) for number in range(work.burst))
        if rest:
            torch.cuda._sleep(int(rest * REST_CYCLES))  # type: ignore[no-untyped-call]

    repeat_bursts(burst, min(seconds / 3, MOST_SETTLING_SECONDS))
    events.clear()
    first, last = timing_event(), timing_event()
    begin = time.monotonic()
    first.record()
    bursts = repeat_bursts(burst, seconds)
    last.record()
    torch.cuda.synchronize()
    end = time.monotonic()
    attention = [one[1].elapsed_time(one[2]) * 1e3 for one in events]
    return Point(
        work.shape,
        rest,
        bursts,
        fmean(one[0].elapsed_time(one[3]) * 1e3 for one in events),
        first.elapsed_time(last) * 1e3 / len(events),
        fmean(attention),
        median(attention),
        meters[0].watts(begin, end - COUNTER_SECONDS),
        meters[1].between(begin, end).clock_mhz,
    )


def resting_watts(seconds: float, meter: EnergyMeter) -> float:
    """Power while the card does nothing but rest as between bursts."""
    begin = time.monotonic()
    repeat_bursts(lambda: torch.cuda._sleep(int(REST_CYCLES)), seconds)  # type: ignore[no-untyped-call]
    return meter.watts(begin + seconds / 3, time.monotonic())


# Model ------------------------------------------------------------------------------------------------------------


def fit(points: Sequence[Point], rest_watts: float) -> dict[str, Any]:
    """The constants of a shape's layer, as in ``power_curves.yaml``, and how far joules are from them.

    A speed is that of the products, 1 in the first point, which has no rest. Static power is that at rest.
    """
    products = np.array([one.busy_microseconds - one.attention_microseconds for one in points])
    speed = products[0] / products
    attention = np.array([one.attention_median_microseconds for one in points])
    slope, at_one = np.polyfit(np.log(speed), np.log(attention), 1)
    joules = np.array([one.joules(rest_watts) for one in points])
    static = rest_watts * np.array([one.busy_microseconds for one in points]) / 1e6
    forms = []
    for exponent, fitted in FORMS:
        columns = np.stack([np.ones_like(speed), speed**exponent], axis=1)[:fitted]
        constants = np.linalg.lstsq(columns, (joules - static)[:fitted], rcond=None)[0]
        errors = (columns @ constants + static[:fitted]) / joules[:fitted] - 1
        forms.append(
            {
                "exponent": exponent,
                "points": len(columns),
                "constant_joules": float(constants[0]),
                "clock_joules": float(constants[1]),
                "root_mean_square_error": float(np.sqrt((errors**2).mean())),
                "largest_error": float(np.abs(errors).max()),
            }
        )
    return {
        "clock_mhz": points[0].clock_mhz,
        "product_microseconds": float(products[0]),
        "attention_microseconds": float(np.exp(at_one)),
        "attention_exponent": float(-slope),
        "fastest_speed": float(speed.max()),
        "forms": forms,
    }


# Command ----------------------------------------------------------------------------------------------------------


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--seconds", type=float, default=4.5, help="for each rest of each model")
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args(arguments)
    if options.seconds < 1:
        parser.error("--seconds: at least 1, in which the energy counter is renewed ten times")
    return options


def main(arguments: Sequence[str]) -> int:
    options = parse(arguments)
    points: list[Point] = []
    try:
        require_gpu()
        with PowerSampler(device_uuid()) as sampler, EnergyMeter(device_uuid()) as meter:
            rest_watts = resting_watts(3.0, meter)
            print(f"at rest: {rest_watts:.0f} W", flush=True)
            pool = Pool()
            for work in WORKS:
                layer = Layer(work, pool)
                for rest in RESTS:
                    points.append(measure(work, layer, rest, options.seconds, (meter, sampler)))
                    print(points[-1].line(rest_watts), flush=True)
    except MegatokenError as error:
        print(error, file=sys.stderr)
        return 1
    models = {work.shape: fit([one for one in points if one.shape == work.shape], rest_watts) for work in WORKS}
    for shape, model in models.items():
        print(shape, model)
    fields = {"rest_watts": rest_watts, "points": [asdict(one) for one in points], "fits": models}
    write_report(options.out, report("energy_of_clocks.py", fields))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
