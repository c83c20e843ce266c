"""Two groups of requests in one engine: what a flood of long prompts does to the latencies of the other one.

    python benchmarks/fair_groups.py --shape llama3.1-8b --seconds 8 --slowdown 1.15
    python benchmarks/fair_groups.py --cpu --shape tiny --seconds 20

The steady group sends short requests at a tenth of the engine's capacity, at random moments. Time is the cost model's,
so the figures are predictions for that GPU, and the same on every machine. With ``--cpu`` a real engine runs on one
thread, and time is the processor time of that thread, so that other work on the machine hardly matters.
``benchmarks/serve_two_keys.py`` measures a whole server.
"""

from __future__ import annotations

import argparse
import json
import time
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


class ThreadClock:
    """Processor time of this thread, and the time for which it had nothing to do."""

    def __init__(self) -> None:
        self._idle = -time.thread_time()

    def now(self) -> float:
        """Seconds."""
        return time.thread_time() + self._idle

    def wait_until(self, moment: float) -> None:
        """Skip the time until then."""
        self._idle += max(0.0, moment - self.now())


def engine_of(shape: str, slowdown: float | None, *, cpu: bool) -> tuple[Engine, VirtualClock | ThreadClock]:
    """A simulated H200, or this machine's processor, and its clock."""
    if cpu:
        engine = Engine(shape, EngineConfig(precision="fp32", threads=1, fair_slowdown=slowdown), random_weights=True)
        engine.generate([request(STEADY, "")])
        return engine, ThreadClock()
    clock = VirtualClock()
    return Engine.simulated(shape, EngineConfig(precision="fp8", fair_slowdown=slowdown), "H200", clock), clock


def capacity(engine: Engine, clock: VirtualClock | ThreadClock) -> float:
    """Requests of the steady kind that the engine answers per second."""
    engine.generate([request(STEADY, "") for _ in range(CAPACITY_REQUESTS)])
    return CAPACITY_REQUESTS / clock.now()


def measure(
    engine: Engine, clock: VirtualClock | ThreadClock, seconds: float, rate: float, *, flood: bool, groups: bool
) -> dict[str, Any]:
    """Latencies of the steady requests in seconds, and whole answers of the flood per second."""
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
    parser.add_argument("--cpu", action="store_true", help="a real engine on one thread of this machine")
    options = parser.parse_args()
    shape, cpu = options.shape, options.cpu
    rate = SHARE * capacity(*engine_of(shape, None, cpu=cpu))
    parts = {
        name: measure(*engine_of(shape, slowdown, cpu=cpu), options.seconds, rate, flood=flood, groups=groups)
        for name, flood, groups, slowdown in (
            ("alone", False, True, None),
            *([] if cpu else [("one_group", True, False, None)]),  # there, the steady group waits for minutes
            ("two_groups", True, True, options.slowdown),
        )
    }
    ratios = {
        part: {
            name: {key: round(parts[part][name][key] / parts["alone"][name][key], 2) for key in PERCENTILES}
            for name in ("ttft_seconds", "itl_seconds")
        }
        for part in parts
        if part != "alone"
    }
    print(json.dumps({"rate": rate, **parts, "ratios_to_alone": ratios}))


if __name__ == "__main__":
    main()
