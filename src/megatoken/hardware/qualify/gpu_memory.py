"""Memory and cache of the GPU: Triton kernels that read, write, copy and add, and one that reads the same again."""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from megatoken.hardware.qualify.gpu_timing import DEVICE, gpu_seconds, start
from megatoken.hardware.qualify.timing import rates
from megatoken.hardware.qualify.values import Bound, Outcomes, Setting, Value

BLOCK, CACHE_BLOCK, WARPS = 8192, 4096, 8
"""fp32 numbers of a program, or of one of its reads in the cache test, and warps per program."""
CACHE_BYTES, CACHE_PASSES = 24 * 2**20, 64
PROGRAMS_PER_MULTIPROCESSOR = 8


@triton.jit
def _read_kernel(x, sums, BLOCK: tl.constexpr):
    program = tl.program_id(0).to(tl.int64)
    values = tl.load(x + program * BLOCK + tl.arange(0, BLOCK))
    tl.store(sums + program, tl.sum(values))


@triton.jit
def _write_kernel(x, value, BLOCK: tl.constexpr):
    places = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    tl.store(x + places, tl.zeros([BLOCK], dtype=tl.float32) + value)


@triton.jit
def _copy_kernel(x, y, BLOCK: tl.constexpr):
    places = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    tl.store(y + places, tl.load(x + places))


@triton.jit
def _triad_kernel(a, b, c, factor, BLOCK: tl.constexpr):
    places = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    tl.store(a + places, tl.load(b + places) + factor * tl.load(c + places))


@triton.jit
def _reread_kernel(x, sums, blocks: tl.constexpr, passes: tl.constexpr, BLOCK: tl.constexpr):
    """Each program reads ``passes`` blocks, all together the same few again and again, past the first cache."""
    program, programs = tl.program_id(0), tl.num_programs(0)
    total = tl.zeros([BLOCK], dtype=tl.float32)
    for number in range(passes):
        block = (program + number * programs) % blocks
        total += tl.load(x + block * BLOCK + tl.arange(0, BLOCK), cache_modifier=".cg")
    tl.store(sums + program, tl.sum(total))


def read(x: Tensor, sums: Tensor) -> None:
    """Sum each block of ``x`` (fp32 [n], a multiple of ``BLOCK``) into ``sums`` (fp32 [n / BLOCK])."""
    _read_kernel[(len(x) // BLOCK,)](x, sums, BLOCK=BLOCK, num_warps=WARPS)


def write(x: Tensor, value: float) -> None:
    """Fill ``x`` (fp32 [n], a multiple of ``BLOCK``)."""
    _write_kernel[(len(x) // BLOCK,)](x, value, BLOCK=BLOCK, num_warps=WARPS)


def copy(x: Tensor, y: Tensor) -> None:
    """``y = x``, both fp32 [n], n a multiple of ``BLOCK``."""
    _copy_kernel[(len(x) // BLOCK,)](x, y, BLOCK=BLOCK, num_warps=WARPS)


def triad(a: Tensor, b: Tensor, c: Tensor, factor: float) -> None:
    """``a = b + factor c``, all fp32 [n], n a multiple of ``BLOCK``."""
    _triad_kernel[(len(a) // BLOCK,)](a, b, c, factor, BLOCK=BLOCK, num_warps=WARPS)


def reread(x: Tensor, sums: Tensor, passes: int) -> None:
    """Read ``passes`` blocks of ``x`` (fp32 [n], a multiple of ``CACHE_BLOCK``) in each program, one per ``sums``."""
    _reread_kernel[(len(sums),)](x, sums, len(x) // CACHE_BLOCK, passes, BLOCK=CACHE_BLOCK, num_warps=WARPS)


@torch.inference_mode()
def hbm(setting: Setting) -> Outcomes:
    """Large buffers, bytes read and written over the time."""
    sheet = start()
    size = setting.buffer_bytes // (4 * BLOCK) * BLOCK
    a, b, c = (torch.rand(size, device=DEVICE) for _ in range(3))
    sums = torch.empty(size // BLOCK, device=DEVICE)
    patterns: dict[str, tuple[str, int, Callable[[], Any]]] = {
        "read": ("Memory read", 1, lambda: read(a, sums)),
        "write": ("Memory write", 1, lambda: write(a, 1.0)),
        "copy": ("Memory copy", 2, lambda: copy(b, a)),
        "triad": ("Memory triad", 3, lambda: triad(a, b, c, 3.0)),
    }
    bound = None if sheet is None else Bound(sheet.memory_bytes_per_second / 1e9, "data sheet")
    for name, (title, buffers, run) in patterns.items():
        yield Value(f"hbm_{name}", title, "GB/s", rates(buffers * 4e-9 * size, gpu_seconds(run, setting)), bound=bound)


@torch.inference_mode()
def cache(setting: Setting) -> Outcomes:
    """24 MB that stay in the second-level cache, read again and again by all multiprocessors."""
    torch.cuda.set_device(DEVICE)
    programs = torch.cuda.get_device_properties(DEVICE).multi_processor_count * PROGRAMS_PER_MULTIPROCESSOR
    x, sums = torch.rand(CACHE_BYTES // 4, device=DEVICE), torch.empty(programs, device=DEVICE)
    moved = programs * CACHE_PASSES * CACHE_BLOCK * 4
    rate = rates(moved / 1e9, gpu_seconds(lambda: reread(x, sums, CACHE_PASSES), setting))
    memory, note = setting.measured.get("hbm_read"), ""
    if memory:
        note = f"{sorted(rate)[len(rate) // 2] / memory:.1f} times the read of memory"
    yield Value("l2_read", "Second-level cache, read", "GB/s", rate, note=note)
