"""The order of rows that the kernel of gate, up and activation wants."""

import sys

import pytest
import torch

from megatoken.engine.ops import gated_product, nvrtc
from megatoken.engine.ops.gated_product import CLUSTERS, interleaved, obstacle


def test_the_place_of_a_row() -> None:
    rows = torch.arange(512)[:, None]  # 256 features
    mixed = interleaved(rows)[:, 0].tolist()
    assert sorted(mixed) == list(range(512))
    for tile, j, lane, part in ((0, 0, 0, 0), (0, 31, 3, 1), (1, 5, 2, 0), (1, 17, 1, 1)):
        feature = 128 * tile + 32 * lane + j
        assert mixed[256 * tile + 8 * j + 2 * lane + part] == feature + 256 * part


def test_not_on_a_cpu() -> None:
    assert obstacle(128, 128, torch.device("cpu")) == "it is written for compute capability 9.0"


@pytest.mark.skipif(nvrtc.compiler_obstacle() is not None, reason="NVRTC is not installed")
@pytest.mark.parametrize("cluster", CLUSTERS)
def test_the_kernel_is_compiled_without_a_gpu(cluster: int) -> None:
    assert gated_product._machine_code(cluster).startswith(b"\x7fELF")


def test_a_compiler_that_is_missing_is_an_obstacle(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cuda.bindings", None)
    nvrtc.compiler_obstacle.cache_clear()
    try:
        assert "cannot use NVRTC" in str(nvrtc.compiler_obstacle())
    finally:
        nvrtc.compiler_obstacle.cache_clear()
