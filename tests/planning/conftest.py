"""Assumptions, rates and real run folders to plan with."""

from collections.abc import Callable
from pathlib import Path

import pytest

from megatoken.analysis.summary import summarise_run
from megatoken.planning.assumptions import Assumptions, load_assumptions
from megatoken.planning.throughput import Throughput, from_number
from megatoken.runs.reasons import reason
from megatoken.runs.run import Run, read_run
from megatoken.runs.tables import SampleRow, SeriesRow
from megatoken.runs.writer import RunFolder


@pytest.fixture(scope="session")
def assumptions() -> Assumptions:
    return load_assumptions()


@pytest.fixture(scope="session")
def rack(assumptions) -> Throughput:
    """The published rack: 18 nodes of 4 GB300."""
    return from_number(1_100_948.3, scope="rack", accelerators=72, accelerator="NVIDIA GB300", assumptions=assumptions)


@pytest.fixture
def make_run(tmp_path) -> Callable[..., Run]:
    """A run of 1,000 samples, one every 0.1 s, on one node: TTFT 0.5 s, then 50 ms a token by default."""

    def make(
        *,
        scenario: str = "server",
        samples: int = 1000,
        input_tokens: int = 200,
        output_tokens: int = 101,
        token_seconds: float = 0.05,
        slow: int = 0,
        failed: int = 0,
        watts: float | None = None,
        metered_watts: float | None = None,
        verdict: str = "MEASURED",
        name: str = "run",
        gpus: tuple[str, ...] = (),
        simulated_gpu: str | None = None,
    ) -> Run:
        folder = RunFolder.create(
            Path(tmp_path),
            name,
            {"engine": {"device": "cuda" if gpus else "cpu"}, "rack": {"simulated_gpu": simulated_gpu}},
            {"gpus": [{"name": gpu} for gpu in gpus]},
            scenario=scenario,
            summarise=summarise_run,
            facts={"model": "tiny", "precision": "bf16", "rules_unmet": [], "notes": [reason("RANDOM_WEIGHTS")]},
        )
        for number in range(samples):
            due = 0.0 if scenario == "offline" else number * 0.1
            start = number * 0.1
            first = start + (3.0 if number < slow else 0.5)
            last = first + (output_tokens - 1) * token_seconds
            broken = number >= samples - failed
            row = SampleRow(
                number, number, due, due, first, None if broken else last, input_tokens, output_tokens,
                None if broken else "length", "host", error="lost" if broken else None,
            )  # fmt: skip
            folder.add_samples([row])
        for second in range(11):
            row = SeriesRow(second * 1.0, "host", 0, 500 * second, 1500 * second, 4, 8, 90, 100, 4, 0, 0, watts)
            folder.add_series(row._replace(system_power_watts=metered_watts))
        reasons = [] if verdict == "MEASURED" else [{"code": "SAMPLES_FAILED", "message": "some"}]
        folder.finish({"verdict": verdict, "reasons": reasons})
        return read_run(folder.path)

    return make
