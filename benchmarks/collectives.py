"""Sums over the ranks of a tensor-parallel model: one all-reduce, or a reduce-scatter and an all-gather in e4m3.

Between the two halves of the second form each rank norms only its own rows. Both forms are ``RankGroup``'s.
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

from gpu_measuring import BF16, E4M3, median_milliseconds, report, require_gpu, timing_event, write_report
from megatoken.engine.ops import fused
from megatoken.engine.parallel import RankGroup
from megatoken.errors import MegatokenError

ROWS = (16, 64, 256, 512, 1024, 1536, 2048)
REPEATS, LAUNCHES = 7, 20


def microseconds(launch: Callable[[], object]) -> float:
    """Median over repeats of the mean time of one launch."""
    for _ in range(LAUNCHES):
        launch()
    events = [timing_event()]
    events[0].record()
    for _ in range(REPEATS):
        for _ in range(LAUNCHES):
            launch()
        events.append(timing_event())
        events[-1].record()
    torch.cuda.synchronize()
    return median_milliseconds(events) / LAUNCHES * 1e3


def forms(group: RankGroup, rows: int, width: int) -> dict[str, Callable[[], Tensor]]:
    """What follows a product that every rank has a part of, up to what the next product reads."""
    delta_TN = torch.randn(rows, width, dtype=BF16, device="cuda")
    residual_TN = torch.randn(rows, width, dtype=BF16, device="cuda")
    norm_N, scale = torch.ones(width, dtype=BF16, device="cuda"), torch.ones(1, device="cuda")
    own = slice(group.rank * rows // group.ranks, (group.rank + 1) * rows // group.ranks)

    def all_rows() -> Tensor:
        h_TN: Tensor = fused.add_rms_norm(group.add(delta_TN), residual_TN, norm_N, 1e-5, scale)
        return h_TN

    def own_rows() -> Tensor:
        h_TN = fused.add_rms_norm(group.add_own_rows(delta_TN), residual_TN[own], norm_N, 1e-5, scale)
        assert h_TN.dtype == E4M3
        return group.all_rows(h_TN)

    return {"all_reduce": all_rows, "reduce_scatter_all_gather": own_rows}


def rank_main(rank: int, ranks: int, width: int, folder: str) -> None:
    """One rank; rank 0 saves the figures."""
    torch.cuda.set_device(rank)
    group = RankGroup(Path(folder), rank, ranks, torch.device("cuda", rank))
    figures = [
        {"rows": rows}
        | {f"{name}_microseconds": microseconds(form) for name, form in forms(group, rows, width).items()}
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
    try:
        require_gpu()
    except MegatokenError as error:
        print(f"collectives.py: {error}", file=sys.stderr)
        return int(error.exit_code)
    with tempfile.TemporaryDirectory() as folder:
        spawn(rank_main, (options.ranks, options.width, folder), nprocs=options.ranks)  # type: ignore[no-untyped-call]
        figures: list[dict[str, Any]] = torch.load(Path(folder) / "figures")
    for row in figures:
        one, two = row["all_reduce_microseconds"], row["reduce_scatter_all_gather_microseconds"]
        row["ratio"] = one / two
        print(
            f"{row['rows']:6} rows: all-reduce and norm {one:7.1f} us, rows apart {two:7.1f} us, {one / two:.2f} times"
        )
    write_report(
        options.out, report("collectives.py", {"ranks": options.ranks, "width": options.width, "sums": figures})
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
