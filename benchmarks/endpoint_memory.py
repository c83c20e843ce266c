"""Memory of a run on an endpoint with very many requests, each with the times of its tokens.

    python benchmarks/endpoint_memory.py --requests 1000000

It writes the records of a run as the harness and the endpoint target write them, at most 20,000 requests/s: rows,
token times, what is observed of each answer. It prints the peak of resident memory.
"""

from __future__ import annotations

import argparse
import json
import resource
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

from megatoken.analysis.summary import summarise_run
from megatoken.runs.run import Verdict
from megatoken.runs.tables import SampleRow
from megatoken.runs.writer import RunFolder
from megatoken.targets.endpoint import wire
from megatoken.targets.endpoint.observations import Observations
from megatoken.targets.endpoint.target import TEXTS_LATER

RATE = 20_000  # requests/s
FACTS: dict[str, Any] = {"model": "m", "precision": None, "rules_unmet": []}


def peak_gigabytes() -> float:
    """Largest resident memory of this process so far."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e9


def main() -> None:
    """Entry point."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--requests", type=int, default=1_000_000)
    parser.add_argument("--tokens", type=int, default=128, help="of each answer")
    options = parser.parse_args()
    tokens, seen = options.tokens, Observations(None)
    gaps = np.random.default_rng(0).integers(10_000_000, 14_000_000, size=(1000, tokens))
    with tempfile.TemporaryDirectory() as out:
        folder = RunFolder.create(Path(out), "run", {}, {}, scenario="server", facts=FACTS, summarise=summarise_run)
        began = time.monotonic()
        for number in range(options.requests):
            due = number * 200_000
            times = due + 80_000_000 + np.cumsum(gaps[number % 1000])
            first, last = int(times[0]), int(times[-1])
            row = SampleRow(
                *(number, number, due / 1e9, due / 1e9, first / 1e9, last / 1e9, 20, tokens, "length", "host"),
                submitted_seconds=due / 1e9,
                request_sent_seconds=due / 1e9,
            )
            folder.add_token_times(number, times)
            folder.add_samples([row])
            text = "word " * tokens if number % TEXTS_LATER == 0 else ""
            seen.add(
                wire.Ended(
                    *(wire.END, number, due, first, last, "length", tokens, "usage", 20, -1, tokens, times.tobytes()),
                    *((), text, 0, number, number, number % 7, 0, 5, ""),
                )
            )
            if number % 200 == 0:
                time.sleep(max(0.0, number / RATE - (time.monotonic() - began)))
        seen.findings(0)
        folder.end_recording()
        folder.finish({"verdict": Verdict.MEASURED, "reasons": []})
    print(json.dumps({**vars(options), "seconds": time.monotonic() - began, "peak_gigabytes": peak_gigabytes()}))


if __name__ == "__main__":
    main()
