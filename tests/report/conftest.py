"""Real run folders to report on, written as a run writes them."""

from collections.abc import Callable
from pathlib import Path

import pytest

from megatoken.analysis.summary import summarise_run
from megatoken.runs.tables import SampleRow, SeriesRow
from megatoken.runs.writer import RunFolder


@pytest.fixture
def unmet() -> list[dict[str, str]]:
    """Two rules that a run does not meet, one with letters that HTML must escape."""
    return [
        {"code": "MIN_DURATION", "message": "ran 20 s of 600 s"},
        {"code": "SAMPLES", "message": "80 of 24,576 <b>"},
    ]


@pytest.fixture
def make_run(tmp_path) -> Callable[..., Path]:
    """A finished or interrupted run of ``samples`` samples on four lanes."""

    def make(
        verdict: str = "MEASURED",
        samples: int = 80,
        reasons=(),
        rules_unmet=(),
        scenario="offline",
        environment=None,
        **facts,
    ) -> Path:
        folder = RunFolder.create(
            tmp_path / "runs & <more>",
            f"20261120T091233Z-{scenario}-tiny",
            {"model": "a<b>&\"c'", "stop_token_ids": [], "nested": {"list": [{"x": None}, 2]}},
            {"hostname": "host", "gpus": [], **(environment or {})},
            scenario=scenario,
            summarise=summarise_run,
            facts={"model": "tiny", "precision": "bf16", "rules_unmet": list(rules_unmet), **facts},
        )
        for number in range(samples):
            start = number // 4 * 1.0
            folder.add_samples(
                [
                    SampleRow(
                        number, number, 0.0, 0.0, start + 0.25, start + 0.75 + number / 1e3, 16, 26, "length", "host"
                    )
                ]
            )
        for second in range(samples // 4):
            folder.add_series(
                SeriesRow(
                    second + 1.0,
                    "host",
                    0,
                    104 * second,
                    300 * second,
                    4,
                    8,
                    90,
                    100,
                    samples - 4 * second,
                    max(0, samples - 4 * second - 4),
                    0,
                )
            )
        if verdict == "INTERRUPTED":
            folder.interrupt(reasons[0])
        else:
            folder.add_facts({"peak_memory_bytes": 300 * 2**20})
            folder.finish({"verdict": verdict, "reasons": list(reasons)})
        return folder.path

    return make


@pytest.fixture
def make_rack(tmp_path) -> Callable[[int], Path]:
    """A run of 20 s on some nodes of two replicas each, with power, clocks and temperatures; the first is slower."""

    def make(nodes: int) -> Path:
        folder = RunFolder.create(
            tmp_path / "runs",
            "20261120T091233Z-offline-tiny",
            {},
            {"hostname": "host"},
            scenario="offline",
            summarise=summarise_run,
            facts={},
        )
        for node in range(nodes):
            name, speed = f"node-{node}", 100 if node else 80
            folder.add_samples(
                [
                    SampleRow(node * 4 + n, n, 0.0, 0.0, 1.0, 20.0 - n / 10, 10, 5 * speed, "length", name)
                    for n in range(4)
                ]
            )
            for second in range(20):
                for replica in range(2):
                    moment = second + 1 + replica / 50
                    clock = 1900.0 if replica else 1700.0
                    tokens = speed * second
                    folder.add_series(
                        SeriesRow(
                            moment, name, replica, tokens, tokens, 8, 8, 5, 10, 4, 0, 0, 700.0, clock, 50.0 + second
                        )
                    )
        folder.finish({"verdict": "MEASURED", "reasons": []})
        return folder.path

    return make
