"""The order of rows that the kernel of gate, up and activation wants."""

import torch

from megatoken.engine.ops.gated_product import interleaved, obstacle


def test_the_place_of_a_row() -> None:
    rows = torch.arange(512)[:, None]  # 256 features
    mixed = interleaved(rows)[:, 0].tolist()
    assert sorted(mixed) == list(range(512))
    for tile, j, lane, part in ((0, 0, 0, 0), (0, 31, 3, 1), (1, 5, 2, 0), (1, 17, 1, 1)):
        feature = 128 * tile + 32 * lane + j
        assert mixed[256 * tile + 8 * j + 2 * lane + part] == feature + 256 * part


def test_not_on_a_cpu() -> None:
    assert obstacle(128, 128, torch.device("cpu")) == "it is written for compute capability 9.0"
