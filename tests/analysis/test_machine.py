"""How many GPUs a run is said to have used."""

from types import SimpleNamespace
from typing import Any

import pytest

from megatoken.analysis.machine import run_accelerators

HERE, THERE = "http://127.0.0.1:8000/v1", "https://models.example.com/v1"


def run(config: dict[str, Any], gpus: int, nodes: int = 1) -> Any:
    """What the function reads of a run folder."""
    environment = {"gpus": [{"name": "NVIDIA H200"}] * gpus}
    return SimpleNamespace(config=config, environment=environment, result={"nodes": [{}] * nodes})


@pytest.mark.parametrize(
    ("addresses", "gpus", "expected"),
    [
        (HERE, 1, 1),
        ("http://localhost:8000/v1,http://[::1]:8001/v1", 1, 1),  # two servers share the one GPU
        (HERE, 2, None),  # of two it may use one or both
        (HERE, 0, None),
        (THERE, 1, None),  # the client's GPU is not the server's
        (f"{HERE},{THERE}", 1, None),
        ("http://[::1", 1, None),  # damaged folders
        ([HERE], 1, None),
        (5, 1, None),
    ],
)
def test_a_servers_gpus_are_counted_only_where_they_can_be_known(
    addresses: Any, gpus: int, expected: int | None
) -> None:
    servers = len(str(addresses).split(","))
    measured = run({"endpoint": {"urls": addresses}, "engine": {"device": "auto"}}, gpus, servers)
    assert run_accelerators(measured) == expected
    assert run_accelerators(measured, "127.0.0.1:8000") == expected


def test_an_engines_gpus_are_those_of_its_nodes() -> None:
    engine = {"engine": {"device": "auto"}, "endpoint": {"urls": None}}
    assert run_accelerators(run(engine, gpus=4, nodes=2)) == 2
    assert run_accelerators(run(engine, gpus=0)) is None
