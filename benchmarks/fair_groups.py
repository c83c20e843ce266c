"""Two groups of requests in a simulated engine: what a flood of long prompts does to the latencies of the other one.

    python benchmarks/fair_groups.py --shape llama3.1-8b --seconds 8 --slowdown 1.15

The steady group sends short requests at a tenth of the engine's capacity, at random moments. Time is the cost model's,
so the figures are predictions for that GPU, and the same on every machine. ``benchmarks/serve_two_keys.py`` measures.
"""

from __future__ import annotations

import argparse
import json
from typing import Any

import numpy as np

from megatoken import Engine, EngineConfig, Request
from megatoken.engine.simulated import VirtualClock

STEADY, FLOOD = (64, 32), (1500, 32)  # tokens of prompt and answer
FLOODING = 64  # requests that the flood keeps open
SHARE = 0.1  # of the capacity, that the steady group uses
CAPACITY_REQUESTS = 512
PERCENTILES = {"p50": 50, "p99": 99}


def request(lengths: tuple[int, int], group: str) -> Request:
    """A request of a group."""
    prompt, answer = lengths
    return Request([5] * prompt, answer, ignore_end_token=True, group=group)


def engine_of(shape: str, slowdown: float | None) -> tuple[Engine, VirtualClock]:
    """A simulated H200 and its clock."""
    clock = VirtualClock()
    return Engine.simulated(shape, EngineConfig(precision="fp8", fair_slowdown=slowdown), "H200", clock), clock


def capacity(shape: str) -> float:
    """Requests of the steady kind that the engine answers per second."""
    engine, clock = engine_of(shape, None)
    engine.generate([request(STEADY, "") for _ in range(CAPACITY_REQUESTS)])
    return CAPACITY_REQUESTS / clock.now()


def measure(
    shape: str, seconds: float, rate: float, *, flood: bool, groups: bool, slowdown: float | None
) -> dict[str, Any]:
    """Latencies of the steady requests in seconds, and whole answers of the flood per second."""
    engine, clock = engine_of(shape, slowdown)
    arrivals = np.cumsum(np.random.default_rng(1).exponential(1 / rate, round(3 * seconds * rate) + 10))
    sent: dict[int, float] = {}
    last: dict[int, float] = {}
    ttft: list[float] = []
    gaps: list[float] = []
    flooding: set[int] = set()
    answered = 0
    while clock.now() < seconds:
        while arrivals[len(sent)] <= clock.now():
            arrival = float(arrivals[len(sent)])
            sent[engine.submit(request(STEADY, "steady" if groups else ""))] = arrival
        while flood and len(flooding) < FLOODING:
            flooding.add(engine.submit(request(FLOOD, "flood" if groups else "")))
        if not engine.busy:
            clock.wait_until(float(arrivals[len(sent)]))
            continue
        for event in engine.step():
            if event.request_id in sent:
                if event.request_id in last:
                    gaps.append(clock.now() - last[event.request_id])
                else:
                    ttft.append(clock.now() - sent[event.request_id])
                last[event.request_id] = clock.now()
            elif event.finish_reason is not None:
                flooding.remove(event.request_id)
                answered += 1
    settled = {"ttft_seconds": ttft[len(ttft) // 10 :], "itl_seconds": gaps[len(gaps) // 10 :]}
    latencies = {
        name: {key: float(np.percentile(values, percent)) for key, percent in PERCENTILES.items()}
        for name, values in settled.items()
    }
    return {**latencies, "flood_answers_per_second": answered / seconds}


def main() -> None:
    """Alone, next to a flood in one group, and next to it as two groups; one JSON object."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default="llama3.1-8b")
    parser.add_argument("--seconds", type=float, default=8.0, help="simulated, of each part")
    parser.add_argument("--slowdown", type=float, default=EngineConfig().fair_slowdown)
    options = parser.parse_args()
    rate = SHARE * capacity(options.shape)
    parts = {
        "alone": measure(options.shape, options.seconds, rate, flood=False, groups=True, slowdown=None),
        "one_group": measure(options.shape, options.seconds, rate, flood=True, groups=False, slowdown=None),
        "two_groups": measure(options.shape, options.seconds, rate, flood=True, groups=True, slowdown=options.slowdown),
    }
    ratios = {
        part: {
            name: {key: round(parts[part][name][key] / parts["alone"][name][key], 2) for key in PERCENTILES}
            for name in ("ttft_seconds", "itl_seconds")
        }
        for part in ("one_group", "two_groups")
    }
    print(json.dumps({"rate": rate, **parts, "ratios_to_alone": ratios}))


if __name__ == "__main__":
    main()
