"""Times the fused kernels at 70B and 8B shapes, every candidate launch, against a device copy.

Inputs rotate through more memory than the L2 cache holds; launches are replayed from a CUDA graph, so that times are
the device's alone, launch gaps included. ``host`` is what one call costs the CPU.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from gpu_measuring import copy_gigabytes_per_second, graph_microseconds, report, require_gpu, write_report
from megatoken.engine.config import RopeConfig
from megatoken.engine.model import rotary_tables
from megatoken.engine.ops import fused, tokens
from megatoken.errors import MegatokenError
from megatoken.hardware.power import PowerSampler
from megatoken.hardware.qualify.gpu_timing import DEVICE, E4M3, device_uuid, gaussian

ROWS = (64, 256, 512, 1024, 1536, 2048, 4096)
FEW_ROWS = (512, 1536, 4096)
SAMPLED_ROWS = (1, 64, 256, 870, 1100)
POOL_ROWS = 8192
PAGES, PAGE_SIZE, POSITIONS = 16_384, 32, 4096
COPY_WORDS = 2**28


@dataclass(frozen=True, slots=True)
class Shape:
    """Sizes of one model, letters as in ``ops``."""

    name: str
    D: int
    F: int
    H: int
    K: int
    V: int
    E: int = 128


SHAPES = (Shape("70b", 8192, 28672, 64, 8, 32_000), Shape("8b", 4096, 14336, 32, 8, 128_256))


@dataclass(frozen=True, slots=True)
class Case:
    """One kernel at one size with one launch configuration; ``launch`` takes the number of an input set."""

    kernel: str
    shape: str
    rows: int
    configuration: dict[str, Any]
    moved_bytes: int
    sets: int
    launch: Callable[[int], Any] = field(repr=False)


@dataclass(frozen=True, slots=True)
class Result:
    """``copy_share`` is the achieved rate over that of a large copy, ``copy_microseconds`` a copy of as many bytes."""

    kernel: str
    shape: str
    rows: int
    configuration: dict[str, Any]
    moved_bytes: int
    microseconds: float
    gigabytes_per_second: float
    copy_share: float
    copy_microseconds: float
    host_microseconds: float


def scalar(value: float) -> Tensor:
    return torch.tensor([value], device=DEVICE)


def pieces(rows: int) -> list[slice]:
    """The pool cut into sets of ``rows``; at most 128, which only a few rows of logits or ids fit the L2 cache with."""
    return [slice(start, start + rows) for start in range(0, POOL_ROWS - rows + 1, rows)][:128]


def norm_cases(shape: Shape) -> Iterator[Case]:
    delta, residual, weight = gaussian(POOL_ROWS, shape.D, spread=0.01), gaussian(POOL_ROWS, shape.D), gaussian(shape.D)
    scale = scalar(0.01)

    def case(kernel: str, rows: int, out_bytes: int, call: Callable[..., Any], **configuration: Any) -> Case:
        parts = pieces(rows)

        def launch(number: int) -> Any:
            return call(delta[parts[number]], residual[parts[number]], **configuration)

        moved = rows * shape.D * (6 + out_bytes) + 2 * shape.D
        return Case(kernel, shape.name, rows, configuration, moved, len(parts), launch)

    def static(delta: Tensor, residual: Tensor, warps: int) -> Tensor:
        return fused.add_rms_norm(delta, residual, weight, 1e-5, scale, warps=warps)

    def by_row(delta: Tensor, residual: Tensor, warps: int) -> tuple[Tensor, Tensor]:
        return fused.add_rms_norm_rows(delta, residual, weight, 1e-5, warps=warps)

    def plain(delta: Tensor, residual: Tensor, warps: int) -> Tensor:
        return fused.add_rms_norm(delta, residual, weight, 1e-5, warps=warps)

    default = shape.D // 1024
    for warps in (default // 2, default, default * 2):
        yield from (case("add_rms_norm fp8", rows, 1, static, warps=warps) for rows in ROWS)
        yield from (case("add_rms_norm_rows", rows, 1, by_row, warps=warps) for rows in FEW_ROWS)
    yield from (case("add_rms_norm bf16", rows, 2, plain, warps=default) for rows in FEW_ROWS)


def silu_cases(shape: Shape) -> Iterator[Case]:
    gate_up, scale = gaussian(POOL_ROWS, 2 * shape.F), scalar(0.01)

    def case(kernel: str, rows: int, call: Callable[..., Any], **configuration: Any) -> Case:
        parts = pieces(rows)
        launch: Callable[[int], Any] = lambda number: call(gate_up[parts[number]], **configuration)  # noqa: E731
        return Case(kernel, shape.name, rows, configuration, rows * shape.F * 5, len(parts), launch)

    def static(gate_up: Tensor, block: int, warps: int) -> Tensor:
        return fused.silu_mul(gate_up, scale, block=block, warps=warps)

    for block, warps in ((1024, 4), (2048, 4), (2048, 8), (4096, 8)):
        yield from (case("silu_mul fp8", rows, static, block=block, warps=warps) for rows in ROWS)
    for block, warps in ((2048, 8), (4096, 8), (8192, 16)):
        yield from (case("silu_mul_rows", rows, fused.silu_mul_rows, block=block, warps=warps) for rows in FEW_ROWS)


def rotate_cases(shape: Shape) -> Iterator[Case]:
    heads = shape.H + 2 * shape.K
    qkv = gaussian(POOL_ROWS, heads * shape.E)
    cos, sin = (table.to(DEVICE) for table in rotary_tables(RopeConfig(), shape.E, POSITIONS))
    positions = torch.randint(POSITIONS, (POOL_ROWS,), device=DEVICE, dtype=torch.int32)
    slots = torch.randperm((PAGES - 1) * PAGE_SIZE, device=DEVICE)[:POOL_ROWS].int() + PAGE_SIZE
    k_cache, v_cache = (torch.zeros(PAGES, shape.K, PAGE_SIZE, shape.E, device=DEVICE).to(E4M3) for _ in range(2))
    q_norm, k_norm = gaussian(shape.E), gaussian(shape.E)

    def case(kernel: str, rows: int, norms: dict[str, Any], **configuration: Any) -> Case:
        parts = pieces(rows)

        def launch(number: int) -> Tensor:
            part = parts[number]
            return fused.rotate_and_write(
                qkv[part],
                cos,
                sin,
                positions[part],
                slots[part],
                k_cache,
                v_cache,
                0.02,
                0.02,
                **norms,
                **configuration,
            )

        moved = rows * shape.E * (2 * heads + 2 * shape.H + 2 * shape.K)
        return Case(kernel, shape.name, rows, configuration, moved, len(parts), launch)

    for block_heads, warps in ((8, 4), (16, 4), (32, 4), (32, 8), (64, 8), (8, 2)):
        yield from (case("rotate_and_write", rows, {}, block_heads=block_heads, warps=warps) for rows in ROWS)
    norms = {"q_norm_E": q_norm, "k_norm_E": k_norm, "epsilon": 1e-6}
    for block_heads, warps in ((16, 4), (32, 8)):
        yield from (
            case("rotate_and_write, q/k norm", rows, norms, block_heads=block_heads, warps=warps) for rows in FEW_ROWS
        )


def argmax_cases(shape: Shape) -> Iterator[Case]:
    logits = gaussian(POOL_ROWS, shape.V)

    def case(kernel: str, rows: int, call: Callable[..., Any], **configuration: Any) -> Case:
        parts = pieces(rows)
        launch: Callable[[int], Any] = lambda number: call(logits[parts[number]], **configuration)  # noqa: E731
        return Case(kernel, shape.name, rows, configuration, rows * (2 * shape.V + 8), len(parts), launch)

    for block, warps, programs in ((2048, 4, 1024), (2048, 4, 2048), (4096, 8, 1024), (4096, 4, 1024)):
        configuration = {"block": block, "warps": warps, "programs": programs}
        yield from (case("argmax_rows", rows, tokens.argmax_rows, **configuration) for rows in SAMPLED_ROWS)
    yield from (case("torch argmax", rows, torch.argmax, dim=-1) for rows in SAMPLED_ROWS)


def token_cases(shape: Shape) -> Iterator[Case]:
    table = gaussian(shape.V, shape.D)
    ids = torch.randint(shape.V, (POOL_ROWS,), device=DEVICE, dtype=torch.int32)
    slots = torch.randint(-1, 1024, (POOL_ROWS,), device=DEVICE, dtype=torch.int32)
    last_tokens = ids[:1024].long()
    for rows in FEW_ROWS:
        parts = pieces(rows)

        def gather(number: int, parts: list[slice] = parts) -> Tensor:
            return tokens.gather_tokens(ids[parts[number]], slots[parts[number]], last_tokens)

        def embed(number: int, parts: list[slice] = parts) -> Tensor:
            return table.index_select(0, ids[parts[number]])

        yield Case("gather_tokens", shape.name, rows, {}, rows * 24, len(parts), gather)
        yield Case("torch index_select (embed)", shape.name, rows, {}, rows * (4 * shape.D + 4), len(parts), embed)


def host_microseconds(launch: Callable[[int], Any]) -> float:
    """Fewer launches than the device's queue takes without waiting."""
    torch.cuda.synchronize()
    begin = time.perf_counter()
    for _ in range(50):
        launch(0)
    elapsed = time.perf_counter() - begin
    torch.cuda.synchronize()
    return elapsed / 50 * 1e6


class CopyClock:
    """Times kernels that read half of the given bytes and write the other half, rotating as the measured ones do.

    Kernels, because the copies of a CUDA graph run slower than those outside.
    """

    def __init__(self) -> None:
        self.source = torch.randint(-(2**31), 2**31, (COPY_WORDS,), dtype=torch.int32, device=DEVICE)
        self.target = torch.empty_like(self.source)
        self.known: dict[int, float] = {}

    def microseconds(self, moved_bytes: int) -> float:
        """Rotates through at most 128 places."""
        words = min(-(-moved_bytes // 2 // 512) * 128, COPY_WORDS)
        if words not in self.known:
            parts = [slice(start, start + words) for start in range(0, COPY_WORDS - words + 1, words)][:128]
            self.known[words] = graph_microseconds(
                lambda number: torch.bitwise_not(self.source[parts[number]], out=self.target[parts[number]]), len(parts)
            )
        return self.known[words]


def measure_case(case: Case, copies: CopyClock, copy_rate: float) -> Result:
    microseconds = graph_microseconds(case.launch, case.sets)
    rate = case.moved_bytes / microseconds / 1e3
    return Result(
        **{name: getattr(case, name) for name in ("kernel", "shape", "rows", "configuration", "moved_bytes")},
        microseconds=microseconds,
        gigabytes_per_second=rate,
        copy_share=rate / copy_rate,
        copy_microseconds=copies.microseconds(case.moved_bytes),
        host_microseconds=host_microseconds(case.launch),
    )


def line(result: Result) -> str:
    configuration = " ".join(f"{name}={value}" for name, value in result.configuration.items())
    return (
        f"{result.kernel:27}{result.shape:>4}{result.rows:>6}  {configuration:36}{result.moved_bytes / 1e6:>8.1f} MB"
        f"{result.microseconds:>9.2f} us{result.gigabytes_per_second:>7.0f} GB/s{result.copy_share:>6.0%}"
        f"{result.copy_microseconds:>9.2f} us{result.host_microseconds:>7.1f} us"
    )


def best(results: list[Result]) -> list[Result]:
    """The fastest launch of each kernel, shape and number of rows."""
    fastest: dict[tuple[str, str, int], Result] = {}
    for result in results:
        key = (result.kernel, result.shape, result.rows)
        if key not in fastest or result.microseconds < fastest[key].microseconds:
            fastest[key] = result
    return list(fastest.values())


def parse(arguments: Sequence[str]) -> Path:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True, help="JSON file to write")
    out: Path = parser.parse_args(arguments).out
    return out


def measure() -> dict[str, Any]:
    header = f"{'kernel':27}{'':>4}{'rows':>6}  {'launch':36}{'moved':>11}{'time':>12}{'rate':>12}"
    header += f"{'of copy':>8}{'same copy':>10}{'host':>10}"
    copy_rate = copy_gigabytes_per_second()
    print(f"large copy: {copy_rate:.0f} GB/s\n{header}")
    copies = CopyClock()
    results = []
    with PowerSampler(device_uuid()) as power:
        begin = time.monotonic()
        for cases in (norm_cases, silu_cases, rotate_cases, argmax_cases, token_cases):
            for shape in SHAPES:
                for case in cases(shape):
                    results.append(measure_case(case, copies, copy_rate))
                    print(line(results[-1]), flush=True)
        end = time.monotonic()
    print(f"\nfastest launches\n{header}")
    for result in best(results):
        print(line(result))
    return {
        "power": asdict(power.between(begin, end)),
        "copy_gigabytes_per_second": copy_rate,
        "seconds": end - begin,
        "results": [asdict(result) for result in results],
    }


def main() -> None:
    out = parse(sys.argv[1:])
    try:
        require_gpu()
        result = measure()
        write_report(out, report("fused.py", result))
    except MegatokenError as error:
        raise SystemExit(f"error: {error}") from error
    print(f"{result['seconds']:.0f} s")


if __name__ == "__main__":
    main()
