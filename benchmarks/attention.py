"""Times decode and prompt attention at 70B and 8B shapes against a device copy: every candidate launch, and XQA.

Decode is timed by the keys and values that must be read, prompt attention by its floating-point operations (causal half
only). Lengths are those of running sequences of the MLPerf llama2-70b Offline workload at a random moment. Caches hold
Gaussian values on pages in random order; launches rotate through more memory than the L2 cache holds where the pool
allows, and are replayed from a CUDA graph. Errors are against fp32 on the same cache and queries, on 16 sequences:
``largest_head_error`` is the largest distance of one head's output vector over that vector's length,
``largest_element_error`` the largest distance of one element over the largest element.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from gpu_measuring import copy_gigabytes_per_second, graph_microseconds, report, require_gpu, write_report
from megatoken.datasets.lengths import LLAMA2_70B_LENGTHS
from megatoken.engine.ops import paged_attention, prompt_attention
from megatoken.engine.ops.paged_attention import DecodeConfig
from megatoken.engine.ops.prompt_attention import GATHERED_CHUNKS, PAGED_CHUNKS, ChunkConfig
from megatoken.errors import MegatokenError
from megatoken.hardware.power import PowerSampler
from megatoken.hardware.qualify.gpu_timing import BF16, DEVICE, E4M3, device_uuid, gaussian
from xqa import XqaBuffers, xqa_available, xqa_decode

KV_HEADS, HEAD_DIM = 8, 128
HEADS = {"70b": 64, "8b": 32}
PROMPTS = [[(222, 222)] * 18, [(500, 500)] * 8, [(1000, 1000)] * 4, [(2000, 2000)] * 2, [(512, 2000)] * 2]
LONG_PROMPTS = [[(64, 2048)], [(128, 1024)], [(256, 1024)], [(1024, 1024)], [(1536, 4608)], [(1536, 9216)]]
"""Rows and context of every chunk."""
POOL_TOKENS = 2**20
LIMIT_SECONDS = 150.0
GRAPH_LAUNCHES = 8
SCALE = HEAD_DIM**-0.5
OUT_SCALE = 0.01

DECODE_CONFIGS = {
    E4M3: [
        DecodeConfig(64, 4, 2),
        DecodeConfig(64, 4, 1),
        DecodeConfig(64, 4, 2, e4m3_scores=True),
        DecodeConfig(64, 4, 1, e4m3_scores=True),
        DecodeConfig(128, 4, 2, e4m3_scores=True),
        DecodeConfig(128, 4, 2),
        DecodeConfig(128, 8, 2),
        DecodeConfig(64, 4, 3),
    ],
    BF16: [DecodeConfig(64, 4, 2), DecodeConfig(64, 4, 1), DecodeConfig(128, 8, 2), DecodeConfig(32, 4, 2)],
}
CHUNK_CONFIGS = [
    ChunkConfig(64, 64, 4, 2),
    ChunkConfig(128, 128, 8, 2),
    ChunkConfig(128, 64, 8, 3),
    ChunkConfig(128, 64, 8, 3, gathered=True),
]
"""In addition to the two of the engine."""


XQA_BUILDS = (("70b", 32, BF16), ("70b", 32, E4M3), ("70b", 64, BF16), ("8b", 32, BF16))
# In a process of its own, as nothing else in this one may touch the device while a graph is captured.
XQA_BUILD = """
import torch
from flashinfer.jit.xqa import gen_xqa_module
gen_xqa_module(torch.bfloat16, torch.float8_e4m3fn, {}, {}, {}, False, {}, 1).build(verbose=False)
"""


@dataclass(frozen=True, slots=True)
class Result:
    """One kernel at one size; rates that do not apply are None."""

    kernel: str
    model: str
    cache: str
    page_size: int
    work: str
    configuration: dict[str, Any]
    tokens: int
    microseconds: float
    kv_gigabytes_per_second: float | None = None
    copy_share: float | None = None
    teraflops_per_second: float | None = None
    largest_head_error: float | None = None
    largest_element_error: float | None = None


class Pool:
    """Keys and values in e4m3 and in bf16, seen as pages of any size."""

    def __init__(self) -> None:
        """Fill both with Gaussian values."""
        self.sides = {
            dtype: [torch.randn(POOL_TOKENS * KV_HEADS * HEAD_DIM, dtype=BF16, device=DEVICE).to(dtype) for _ in "kv"]
            for dtype in (E4M3, BF16)
        }

    def caches(self, dtype: torch.dtype, page_size: int) -> tuple[Tensor, Tensor]:
        """K and V [P, K, S, E]."""
        k, v = (side.view(-1, KV_HEADS, page_size, HEAD_DIM) for side in self.sides[dtype])
        return k, v


@dataclass(frozen=True, slots=True)
class Batch:
    """Sequences on several disjoint sets of pages."""

    name: str
    model: str
    page_size: int
    lengths: NDArray[np.int32]
    tables: list[Tensor]
    lengths_B: Tensor
    q_BHE: Tensor

    @property
    def tokens(self) -> int:
        """Keys that all queries see together."""
        return int(self.lengths.sum())


def make_batch(name: str, model: str, page_size: int, lengths: NDArray[np.int32], rows: int | None = None) -> Batch:
    used = -(-lengths // page_size)
    pages = np.random.default_rng(1).permutation(POOL_TOKENS // page_size - 1).astype(np.int32) + 1
    tables = []
    for number in range(min(8, len(pages) // int(used.sum()))):
        table = np.zeros((len(lengths), int(used.max())), dtype=np.int32)
        table[np.arange(table.shape[1]) < used[:, None]] = pages[number * used.sum() : (number + 1) * used.sum()]
        tables.append(torch.from_numpy(table).to(DEVICE))
    queries = gaussian(rows or len(lengths), HEADS[model], HEAD_DIM)
    return Batch(name, model, page_size, lengths, tables, torch.from_numpy(lengths).to(DEVICE), queries)


def running_lengths(sequences: int) -> NDArray[np.int32]:
    """Contexts at a random moment: a sequence is as likely to be running as it has tokens to make."""
    table = np.loadtxt(LLAMA2_70B_LENGTHS, dtype=np.int64, delimiter=",", comments="#", skiprows=2)
    random = np.random.default_rng(0)
    chosen = table[random.choice(len(table), sequences, p=table[:, 1] / table[:, 1].sum())]
    return (chosen[:, 0] + 1 + random.integers(0, chosen[:, 1])).astype(np.int32)


def exact_rows(q_THE: Tensor, caches: tuple[Tensor, Tensor], pages: Tensor, length: int) -> Tensor:
    """fp32 [T, H, E]; the rows are the last of the positions."""
    rows, heads, _ = q_THE.shape
    k, v = (
        side[pages.long()].transpose(1, 2).reshape(-1, KV_HEADS, HEAD_DIM)[:length].float()
        for side in (caches[0], caches[1])
    )
    k, v = (side.repeat_interleave(heads // KV_HEADS, 1) for side in (k, v))
    hidden = torch.ones(rows, length, dtype=torch.bool, device=DEVICE).triu(length - rows + 1)
    scores = (torch.einsum("the,lhe->htl", q_THE.float(), k) * SCALE).masked_fill(hidden, float("-inf"))
    return torch.einsum("htl,lhe->the", scores.softmax(-1), v)


def errors(out: Tensor, expected: Tensor, out_scale: float | None) -> dict[str, float]:
    difference = out.float() * (out_scale or 1.0) - expected
    by_head = difference.norm(dim=-1) / expected.norm(dim=-1)
    return {
        "largest_head_error": by_head.max().item(),
        "largest_element_error": (difference.abs().max() / expected.abs().max()).item(),
    }


class Bench:
    """Runs cases while there is time, prints a line for each and keeps the results."""

    def __init__(self) -> None:
        """Let nvcc compile XQA in the background, fill the pool and measure the copy."""
        self.begin = time.perf_counter()
        self.no_xqa = xqa_available(64, KV_HEADS, HEAD_DIM, 32, E4M3, DEVICE)
        self.builds: dict[tuple[str, int, torch.dtype], subprocess.Popen[bytes]] = {}
        for model, page_size, out_dtype in () if self.no_xqa else XQA_BUILDS:
            program = XQA_BUILD.format(page_size, HEAD_DIM, HEADS[model] // KV_HEADS, out_dtype)
            self.builds[model, page_size, out_dtype] = subprocess.Popen([sys.executable, "-c", program])
        self.pool = Pool()
        self.copy_rate = copy_gigabytes_per_second()
        self.results: list[Result] = []
        self.skipped: list[str] = []
        print(f"large copy: {self.copy_rate:.0f} GB/s; XQA: {self.no_xqa or 'yes'}", flush=True)

    def xqa_launch(self, batch: Batch, out_dtype: torch.dtype) -> Callable[[int], Tensor]:
        """Launch on the pages of the given set; nvcc must have finished."""
        self.builds[batch.model, batch.page_size, out_dtype].wait()
        caches = self.pool.caches(E4M3, batch.page_size)
        heads = HEADS[batch.model]
        buffers = XqaBuffers.allocate(len(batch.lengths), heads, KV_HEADS, HEAD_DIM, DEVICE)
        out = torch.empty(batch.q_BHE.shape, dtype=out_dtype, device=DEVICE)
        out_scale = None if out_dtype == BF16 else OUT_SCALE
        return lambda number: xqa_decode(
            batch.q_BHE,
            *caches,
            batch.tables[number],
            batch.lengths_B,
            out,
            buffers,
            softmax_scale=SCALE,
            out_scale=out_scale,
        )

    def triton_launch(
        self, batch: Batch, dtype: torch.dtype, out_dtype: torch.dtype, config: DecodeConfig
    ) -> Callable[[int], Tensor]:
        """Launch on the pages of the given set."""
        caches = self.pool.caches(dtype, batch.page_size)
        out = torch.empty(batch.q_BHE.shape, dtype=out_dtype, device=DEVICE)
        out_scale = None if out_dtype == BF16 else OUT_SCALE
        return lambda number: paged_attention.decode_attention(
            batch.q_BHE,
            *caches,
            batch.tables[number],
            batch.lengths_B,
            out,
            softmax_scale=SCALE,
            out_scale=out_scale,
            max_length=int(batch.lengths.max()),
            total_tokens=batch.tokens,
            config=config,
        )

    def keep(self, result: Result) -> Result:
        """Print and remember."""
        self.results.append(result)
        rate = (
            f"{result.teraflops_per_second:>7.0f} TFLOP/s     "
            if result.teraflops_per_second is not None
            else f"{result.kv_gigabytes_per_second:>7.0f} GB/s{result.copy_share:>6.0%}  "
        )
        configuration = " ".join(str(value) for value in result.configuration.values())
        print(
            f"{result.kernel:8}{result.model:>4} {result.cache:>5}{result.page_size:>4}  {result.work:34}"
            f"{configuration:34}{result.tokens:>8} tokens{result.microseconds:>9.1f} us{rate}"
            f"head {result.largest_head_error:.2%} element {result.largest_element_error:.2%}",
            flush=True,
        )
        return result

    def in_time(self, what: str) -> bool:
        """Whether to start ``what``; notes what there was no time for."""
        if time.perf_counter() - self.begin < LIMIT_SECONDS:
            return True
        self.skipped.append(what)
        return False

    def decode(
        self,
        batch: Batch,
        dtype: torch.dtype,
        expected: Tensor,
        kernel: str,
        config: DecodeConfig | None = None,
        out_dtype: torch.dtype = BF16,
    ) -> Result | None:
        """Time one kernel and compare the first rows with ``expected``. ``config`` None: XQA."""
        if not self.in_time(f"{kernel} {batch.name} {config}"):
            return None
        try:
            if config is None:
                launch = self.xqa_launch(batch, out_dtype)
            else:
                launch = self.triton_launch(batch, dtype, out_dtype, config)
            microseconds = graph_microseconds(launch, len(batch.tables), GRAPH_LAUNCHES)
            out_scale = None if out_dtype == BF16 else OUT_SCALE
            deviations = errors(launch(0)[: len(expected)], expected, out_scale)
        except (RuntimeError, OSError, ImportError) as error:
            self.skipped.append(f"{kernel} {batch.name} {config}: {error}".splitlines()[0])
            print(self.skipped[-1], flush=True)
            return None
        rate = batch.tokens * 2 * KV_HEADS * HEAD_DIM * dtype.itemsize / microseconds / 1e3
        return self.keep(
            Result(
                kernel if out_dtype == BF16 else f"{kernel}>8",
                batch.model,
                "e4m3" if dtype == E4M3 else "bf16",
                batch.page_size,
                batch.name,
                {} if config is None else asdict(config),
                batch.tokens,
                microseconds,
                kv_gigabytes_per_second=rate,
                copy_share=rate / self.copy_rate,
                **deviations,
            )
        )

    def decode_all(self, batch: Batch, dtype: torch.dtype, configs: list[DecodeConfig]) -> DecodeConfig:
        """Every configuration, then XQA; of a sweep, the fastest is run again with an e4m3 output and returned."""
        caches = self.pool.caches(dtype, batch.page_size)
        expected = torch.cat(
            [
                exact_rows(batch.q_BHE[b : b + 1], caches, batch.tables[0][b, : -(-length // batch.page_size)], length)
                for b, length in enumerate(batch.lengths[:16].tolist())
            ]
        )
        timed = [(self.decode(batch, dtype, expected, "triton", config), config) for config in configs]
        best = min(timed, key=lambda pair: pair[0].microseconds if pair[0] else float("inf"))[1]
        if len(configs) > 2:
            self.decode(batch, dtype, expected, "triton", best, E4M3)
        if self.no_xqa is None and dtype == E4M3:
            for out_dtype in (BF16, E4M3):
                if (batch.model, batch.page_size, out_dtype) in self.builds:
                    self.decode(batch, dtype, expected, "xqa", None, out_dtype)
        return best

    def chunks(self, prompts: list[tuple[int, int]], dtype: torch.dtype, config: ChunkConfig) -> None:
        """Chunks of ``(rows, context)``, all of one kind."""
        (count, (kind_rows, kind_context)) = len(prompts), prompts[0]
        before = kind_context - kind_rows
        name = f"{count} x {kind_rows} rows" + (f" after {before:,}" if before else "")
        if not self.in_time(f"chunks {name} {config}"):
            return
        rows = [chunk_rows for chunk_rows, _ in prompts]
        starts = [0, *np.cumsum(rows).tolist()]
        contexts = np.array([context for _, context in prompts], dtype=np.int32)
        batch = make_batch(name, "70b", 32, contexts, rows=starts[-1])
        caches = self.pool.caches(dtype, 32)
        starts_C1 = torch.tensor(starts, dtype=torch.int32, device=DEVICE)
        out = torch.empty_like(batch.q_BHE)

        def launch(number: int) -> Tensor:
            return prompt_attention.chunk_attention(
                batch.q_BHE,
                *caches,
                batch.tables[number],
                starts_C1,
                batch.lengths_B,
                out,
                softmax_scale=SCALE,
                longest_chunk=max(rows),
                max_context=int(contexts.max()),
                config=config,
            )

        microseconds = graph_microseconds(launch, len(batch.tables), GRAPH_LAUNCHES)
        first, context = prompts[0]
        expected = exact_rows(batch.q_BHE[:first], caches, batch.tables[0][0, : -(-context // 32)], context)
        pairs = sum(t * context - t * (t - 1) // 2 for t, context in prompts)
        self.keep(
            Result(
                "chunk",
                "70b",
                "e4m3" if dtype == E4M3 else "bf16",
                32,
                name,
                asdict(config),
                starts[-1],
                microseconds,
                teraflops_per_second=4 * HEADS["70b"] * HEAD_DIM * pairs / microseconds / 1e6,
                **errors(launch(0)[:first], expected, None),
            )
        )


def run(bench: Bench) -> None:
    """The cases in order of interest."""

    def long_lengths(sequences: int) -> NDArray[np.int32]:
        return np.random.default_rng(2).integers(1000, 2001, sequences).astype(np.int32)

    full = running_lengths(900)
    default = DecodeConfig()
    best = bench.decode_all(make_batch("900 running", "70b", 32, full), E4M3, DECODE_CONFIGS[E4M3])
    configs = list(dict.fromkeys((default, best)))
    for config in (PAGED_CHUNKS, GATHERED_CHUNKS):
        for prompts in (*PROMPTS, *LONG_PROMPTS):
            bench.chunks(prompts, E4M3, config)
    for config in CHUNK_CONFIGS:
        for prompts in ([(222, 222)] * 3, [(2000, 2000)] * 2):
            bench.chunks(prompts, E4M3, config)
    bench.decode_all(make_batch("256 running", "70b", 32, running_lengths(256)), E4M3, configs)
    pieces = [replace(best, split_tokens=piece) for piece in (128, 256, 512, 2048)]
    bench.decode_all(make_batch("64 running", "70b", 32, running_lengths(64)), E4M3, configs + pieces)
    for sequences in (200, 16, 1):
        name = f"{sequences} of 1,000-2,000"
        bench.decode_all(make_batch(name, "70b", 32, long_lengths(sequences)), E4M3, configs)
    bench.decode_all(make_batch("900 running", "70b", 64, full), E4M3, configs)
    best_bf16 = bench.decode_all(make_batch("900 running", "70b", 32, full), BF16, DECODE_CONFIGS[BF16])
    bench.decode_all(make_batch("64 running", "70b", 32, running_lengths(64)), BF16, [best_bf16])
    bench.decode_all(make_batch("200 of 1,000-2,000", "70b", 32, long_lengths(200)), BF16, [best_bf16])
    bench.decode_all(make_batch("900 running", "8b", 32, full), E4M3, configs)
    bench.decode_all(make_batch("64 running", "8b", 32, running_lengths(64)), E4M3, configs)
    bench.decode_all(make_batch("900 running", "8b", 32, full), BF16, [best_bf16])
    for config in (PAGED_CHUNKS, GATHERED_CHUNKS):
        for prompts in (PROMPTS[0], *PROMPTS[2:]):
            bench.chunks(prompts, BF16, config)
    bench.decode_all(make_batch("900 running", "70b", 64, full), BF16, [best_bf16])


def parse(arguments: Sequence[str]) -> Path:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True, help="JSON file to write")
    out: Path = parser.parse_args(arguments).out
    return out


def measure() -> dict[str, Any]:
    with PowerSampler(device_uuid()) as power:
        begin = time.monotonic()
        bench = Bench()
        run(bench)
        end = time.monotonic()
    return {
        "power": asdict(power.between(begin, end)),
        "xqa": bench.no_xqa or "available",
        "copy_gigabytes_per_second": bench.copy_rate,
        "seconds": end - begin,
        "skipped": bench.skipped,
        "results": [asdict(result) for result in bench.results],
    }


def main() -> None:
    out = parse(sys.argv[1:])
    try:
        require_gpu()
        result = measure()
        write_report(out, report("attention.py", result))
    except MegatokenError as error:
        raise SystemExit(f"error: {error}") from error
    print(f"{result['seconds']:.0f} s, {len(result['skipped'])} skipped")


if __name__ == "__main__":
    main()
