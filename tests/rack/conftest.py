"""A Ray cluster on this machine, and drivers that run on it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from rack_drivers import LENGTHS, Driver, RayNodes, environment, ray_nodes

from forks import Process

pytest.importorskip("ray", reason="the rack's tests need Ray: pip install -e '.[rack]'")


@pytest.fixture(scope="session")
def cluster() -> Iterator[RayNodes]:
    with ray_nodes() as nodes:
        yield nodes


@pytest.fixture
def drive(cluster: RayNodes, tmp_path: Path) -> Iterator[Any]:
    """Starts drivers; none outlives its test."""
    started = []
    lengths = tmp_path / "lengths.csv"
    lengths.write_text(LENGTHS)

    def start(*flags: str, out: str = "runs") -> Driver:
        command = ["-m", "megatoken", "run", "--rack", cluster.address]
        command += ["--lengths", str(lengths), "--warm-up", "0.5", "--out", str(tmp_path / out), "--json"]
        process = Process([*command, *flags], environment(cluster.folder), None)
        started.append(process)
        return Driver(process, tmp_path / out)

    yield start
    for process in started:
        process.kill()
        process.close()
