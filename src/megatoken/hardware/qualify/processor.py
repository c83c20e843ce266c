"""What a core can do at most: its clock, measured, times the operations that its instructions do per cycle."""

from __future__ import annotations

import ctypes
import math
import os
import platform
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from megatoken.engine.config import Precision
from megatoken.hardware import inventory
from megatoken.hardware.inventory import cpu, multiplies_bf16
from megatoken.hardware.qualify.values import Bound, NotRun, Setting, Value
from megatoken.hardware.topology import data_caches
from megatoken.processes import usable_core_numbers
from megatoken.text import count_of

# A chain of instructions each of which needs the result of the one before: its length in cycles is known.
CHAIN = """
extern "C" void chain(long count) {{
    unsigned long x = 3, y = 5;
    for (long i = 0; i < count; i++) __asm__ volatile({instructions} : "+r"(x) : "r"(y));
}}
"""
INSTRUCTIONS = {"x86_64": ("imul %1, %0", 3), "aarch64": ("eor %0, %0, %1", 1)}
"""The instruction of the chain and its latency in cycles: imul on Intel since Nehalem and on AMD Zen, eor on ARMv8."""
LINKS, COMPILE_SECONDS, CHAIN_SECONDS = 64, 20, 1e-3

SMALL_BYTES = 2**24
"""Of each buffer in a setting that is for a test of the code, not for a measurement."""
TIMES_CACHES, MEMORY_SHARE = 4, 0.5
"""A buffer is this many times as large as the caches, but all take at most this share of the available memory."""

OPERATIONS_PER_CYCLE = {
    "fp32": (("avx512f", 64), ("avx2", 32), ("asimd", 32)),
    "bf16": (("amx_bf16", 1024), ("avx512_bf16", 128), ("avx512f", 64), ("avx2", 32), ("bf16", 128), ("asimd", 32)),
}
"""Most operations per cycle and core, by instruction set, the best first: multiply-adds count as two, and every core
is assumed to have two such vector units (ARM: four of 128 bits), which only some have."""


def note_on_kernels(described: Mapping[str, Any]) -> str:
    """What readers of a speed of the engine must know, by its description: that it runs without compiled kernels."""
    why = described.get("why_no_kernels")
    return f"PyTorch only: {why}" if why else ""


def clock(setting: Setting) -> Value | NotRun:
    """The clock of one core under light load, from instructions of known latency. Compiles a few lines of C."""
    name, title = "core_clock", "Clock of one core"
    machine = platform.machine()
    if machine not in INSTRUCTIONS:
        return NotRun(name, title, f"no instruction of known latency for {machine}", "take an x86-64 or ARMv8 machine")
    instruction, cycles = INSTRUCTIONS[machine]
    library = compiled(CHAIN.format(instructions=f'"{instruction}\\n"' * LINKS), name, title)
    if isinstance(library, NotRun):
        return library
    chain = library.chain
    chain.argtypes, chain.restype = (ctypes.c_long,), None
    count = 1000
    while (seconds := _seconds(chain, count)) < CHAIN_SECONDS:
        count = max(2 * count, int(count * CHAIN_SECONDS / max(seconds, 1e-6)))
    # Interruptions only make a window longer, so the shortest of a few is the window.
    windows = [min(_seconds(chain, count) for _ in range(20)) for _ in range(setting.windows)]
    return Value(name, title, "GHz", [count * LINKS * cycles / one / 1e9 for one in windows])


def compiled(source: str, name: str, title: str) -> ctypes.CDLL | NotRun:
    """A library of a few lines of C++; why not, for the value or test of this name, where they cannot be compiled."""
    compiler = shutil.which(os.environ.get("CXX", "g++"))
    if compiler is None:
        return NotRun(name, title, "no C++ compiler", "install g++, or name one in CXX")
    with tempfile.TemporaryDirectory() as folder:
        library = str(Path(folder) / "library.so")
        command = [compiler, "-x", "c++", "-O2", "-march=native", "-shared", "-fPIC", "-o", library, "-"]
        try:
            subprocess.run(command, input=source, text=True, check=True, capture_output=True, timeout=COMPILE_SECONDS)
            return ctypes.CDLL(library)
        except (OSError, subprocess.SubprocessError) as error:
            return NotRun(name, title, f"{compiler} failed ({type(error).__name__})", "install a working g++")


def peak(dtype: str, threads: int, setting: Setting) -> Bound | None:
    """Most GFLOP/s of ``threads`` cores; None where the clock or the instruction set is not known."""
    gigahertz, flags = setting.measured.get("core_clock"), cpu()["instruction_sets"]
    known = next(((flag, count) for flag, count in OPERATIONS_PER_CYCLE[dtype] if flag in flags), None)
    if gigahertz is None or known is None:
        return None
    flag, count = known
    formula = f"{count_of(threads, 'core')} x {count} operations per cycle ({flag}) x {gigahertz:.2f} GHz (measured)"
    return Bound(threads * count * gigahertz, formula)


def engine_precision(setting: Setting) -> Precision:
    """The format of the engine's products: the setting's, or the fastest on this processor.

    A processor without instructions for bf16 widens each value before it multiplies, if it has bf16 at all.
    """
    if setting.precision is not None:
        return setting.precision
    return "bf16" if multiplies_bf16() else "fp32"


def cores_within_quota() -> int:
    """Cores that this process may use and that its container's quota lets it keep busy; at least 1."""
    facts = cpu()
    cores: int = facts["usable_cores"]
    quota = facts["quota_cores"]
    return max(1, cores if quota is None else min(cores, round(quota)))


def buffer_bytes(setting: Setting, caches: int, buffers: int) -> tuple[int, str]:
    """Bytes of each of so many buffers, larger than caches of so many bytes; a note if memory is too small for that."""
    if setting.buffer_bytes <= SMALL_BYTES:
        return SMALL_BYTES, ""
    memory = inventory.memory()
    available = min(memory["available_bytes"], memory["limit_bytes"] or math.inf)
    size = min(max(setting.buffer_bytes, TIMES_CACHES * caches), int(available * MEMORY_SHARE / buffers))
    if size >= TIMES_CACHES * caches:
        return size, ""
    mebibytes = f"{caches / 2**20:,.0f} MiB: memory had room for {size / 2**20:,.0f} MiB a buffer"
    return size, f"partly from caches of {mebibytes}"


def last_level_cache_bytes() -> int:
    """Of all last-level caches that usable cores reach, together: a processor of several dies or sockets has several.

    32 MiB where the kernel does not say.
    """
    last = {caches[-1] for core in usable_core_numbers() if (caches := data_caches(core))}
    return sum(cache.size_bytes for cache in last) or 32 * 2**20


def _seconds(chain: Callable[[int], None], count: int) -> float:
    began = time.perf_counter()
    chain(count)
    return time.perf_counter() - began
