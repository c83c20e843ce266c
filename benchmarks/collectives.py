"""Sums over the ranks of a tensor-parallel model: NCCL's all-reduce and a norm, or one kernel in shared memory.

In the second form each rank norms only its own rows and writes them to all. Both are what ``cuda.linear_add_norm`` runs
after its product. They are timed in a CUDA graph, as steps of few rows run them: the host's launches do not count.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.spawn import spawn

from gpu_measuring import graph_microseconds, report, write_report
from megatoken.engine.ops import fused
from megatoken.engine.parallel import RankGroup
from megatoken.errors import CapacityError
from megatoken.hardware.qualify.gpu_timing import BF16

ROWS = (16, 64, 256, 512, 1024, 1536, 2048)


def forms(group: RankGroup, rows: int, width: int) -> dict[str, Callable[[int], Tensor]]:
    """What follows a product that every rank has a part of, up to what the next product reads."""
    delta_TN = torch.randn(rows, width, dtype=BF16, device="cuda") * 1e-30  # which every all-reduce doubles
    residual_TN = torch.randn(rows, width, dtype=BF16, device="cuda")
    norm_N, scale = torch.ones(width, dtype=BF16, device="cuda"), torch.ones(1, device="cuda")
    shared = group.shared
    assert shared is not None
    shared.products(rows).copy_(delta_TN)
    own_TN = shared.keep(residual_TN)

    def all_reduce(_: int) -> Tensor:
        h_TN: Tensor = fused.add_rms_norm(group.add(delta_TN), residual_TN, norm_N, 1e-5, scale)
        return h_TN

    return {"all_reduce": all_reduce, "shared": lambda _: shared.add_rms_norm(rows, own_TN, norm_N, 1e-5, scale)}


def rank_main(rank: int, ranks: int, width: int, folder: str) -> None:
    """One rank; rank 0 saves the figures."""
    torch.cuda.set_device(rank)
    group = RankGroup(Path(folder), rank, ranks, torch.device("cuda", rank))
    group.share_rows(max(ROWS), width, lambda: None)
    figures = [
        {"rows": rows}
        | {f"{name}_microseconds": graph_microseconds(form, 1) for name, form in forms(group, rows, width).items()}
        for rows in ROWS
    ]
    if rank == 0:
        torch.save(figures, Path(folder) / "figures")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, default=torch.cuda.device_count())
    parser.add_argument("--width", type=int, default=8192, help="hidden size of the model")
    parser.add_argument("--out", type=Path, required=True, help="JSON file to write")
    options = parser.parse_args()
    # Only the ranks open a GPU: with a CUDA context of its own, this process ended with a broken heap where it asked
    # NVML for counters once the ranks had shared memory (four H200, driver 580.159.04).
    if torch.cuda.device_count() < options.ranks:
        print(f"collectives.py: needs {options.ranks} GPUs, found {torch.cuda.device_count()}", file=sys.stderr)
        return int(CapacityError.exit_code)
    with tempfile.TemporaryDirectory() as folder:
        spawn(rank_main, (options.ranks, options.width, folder), nprocs=options.ranks)  # type: ignore[no-untyped-call]
        figures: list[dict[str, Any]] = torch.load(Path(folder) / "figures")
    for row in figures:
        one, two = row["all_reduce_microseconds"], row["shared_microseconds"]
        row["ratio"] = one / two
        print(f"{row['rows']:6} rows: all-reduce and norm {one:7.1f} us, shared {two:7.1f} us, {one / two:.2f} times")
    write_report(
        options.out, report("collectives.py", {"ranks": options.ranks, "width": options.width, "sums": figures})
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
