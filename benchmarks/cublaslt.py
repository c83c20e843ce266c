"""cuBLASLt's own interface, of which PyTorch uses only the first algorithm that its heuristic names.

Functions of the library that PyTorch has loaded, through ctypes; numbers are those of its header (CUDA 13). Products:
``y [tokens, outputs] = x [tokens, inputs] W^T`` of e4m3 with a scale for each matrix and a bf16 result.
"""

from __future__ import annotations

import ctypes
import itertools
import time
from collections.abc import Iterable, Iterator
from ctypes import byref, c_float, c_int, c_int32, c_size_t, c_uint16, c_uint32, c_uint64, c_void_p, sizeof
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megatoken.errors import CapacityError
from megatoken.hardware.qualify.gpu_timing import DEVICE

# Values of cublasLt.h and library_types.h (CUDA 13).
REAL_32F, REAL_16BF, REAL_8F_E4M3, COMPUTE_32F = 0, 14, 28, 68
TRANSPOSE = 1
DESCRIPTION = {"transpose_a": 3, "scale_a": 17, "scale_b": 18, "fast_accumulation": 25}
WORKSPACE_LIMIT = 1
CAPABILITY = {"split_k": 0, "swizzling": 2, "tiles": 6, "custom_most": 7, "stages": 13}
SETTING = {"id": 0, "tile": 1, "split_k": 2, "reduction": 3, "swizzle": 4, "custom": 5, "stages": 6, "inner": 7}
SETTING["cluster"] = 8
WORKSPACE_BYTES = 64 * 2**20
MOST_HEURISTIC = 64
CLUSTERS = range(2, 52)
SEARCH_SECONDS = 3.0


class Algorithm(ctypes.Structure):
    """cublasLtMatmulAlgo_t."""

    _fields_ = (("data", c_uint64 * 8),)


class Heuristic(ctypes.Structure):
    """cublasLtMatmulHeuristicResult_t."""

    _fields_ = (
        ("algorithm", Algorithm),
        ("workspace_bytes", c_size_t),
        ("state", c_int),
        ("waves", c_float),
        ("reserved", c_int * 4),
    )


@dataclass(frozen=True, slots=True)
class Settings:
    """What distinguishes an algorithm, as cuBLASLt numbers it."""

    id: int
    tile: int
    split_k: int
    reduction: int
    swizzle: int
    custom: int
    stages: int
    inner: int
    cluster: int


class Library:
    """cuBLASLt as PyTorch has loaded it; every call that fails raises."""

    def __init__(self) -> None:
        names = [line.split()[-1] for line in Path("/proc/self/maps").read_text().splitlines() if "cublasLt" in line]
        if not names:
            raise CapacityError("cuBLASLt is not loaded: PyTorch has no CUDA build here")
        self._library = ctypes.CDLL(names[0])
        self.workspace = torch.empty(WORKSPACE_BYTES, dtype=torch.uint8, device=DEVICE)
        self.handle = c_void_p()
        self.call("Create", byref(self.handle))

    def status(self, name: str, *arguments: Any) -> int:
        """The status that ``cublasLt<name>`` returns; 0 is success."""
        result: int = getattr(self._library, f"cublasLt{name}")(*arguments)
        return result

    def call(self, name: str, *arguments: Any) -> None:
        """Call ``cublasLt<name>``.

        Raises:
            CapacityError: it failed.
        """
        if status := self.status(name, *arguments):
            raise CapacityError(f"cublasLt{name} failed with status {status}")


Sides = tuple[int, int, int]
"""Tokens, outputs, inputs."""


class Problem:
    """The sides of a product as cuBLASLt describes them."""

    def __init__(self, library: Library, sides: Sides, scales: tuple[Tensor, Tensor], *, fast: bool = True) -> None:
        """Scales of x and of the weight: fp32 of one element each. ``fast``: sums are less exact."""
        tokens, outputs, inputs = sides
        self.library, self._sides, self._scales, self._fast = library, sides, scales, fast
        self._one, self._zero = c_float(1.0), c_float(0.0)
        self._description = c_void_p()
        library.call("MatmulDescCreate", byref(self._description), c_int(COMPUTE_32F), c_int(REAL_32F))
        self._describe("transpose_a", c_int32(TRANSPOSE))
        self._describe("scale_a", c_void_p(scales[1].data_ptr()))
        self._describe("scale_b", c_void_p(scales[0].data_ptr()))
        self._describe("fast_accumulation", ctypes.c_int8(fast))
        # Column-major, as BLAS has it: W^T is A, x^T is B, y^T is C and D.
        a, b = self._layout(REAL_8F_E4M3, inputs, outputs), self._layout(REAL_8F_E4M3, inputs, tokens)
        d = self._layout(REAL_16BF, outputs, tokens)
        self._layouts = a, b, d, d

    def _describe(self, name: str, value: Any) -> None:
        arguments = (self._description, c_int(DESCRIPTION[name]), byref(value), c_size_t(sizeof(value)))
        self.library.call("MatmulDescSetAttribute", *arguments)

    def _layout(self, kind: int, rows: int, columns: int) -> c_void_p:
        layout = c_void_p()
        arguments = (c_int(kind), c_uint64(rows), c_uint64(columns), ctypes.c_int64(rows))
        self.library.call("MatrixLayoutCreate", byref(layout), *arguments)
        return layout

    def proposed(self) -> list[Algorithm]:
        """By the heuristic, best first; nothing is launched."""
        preference = c_void_p()
        self.library.call("MatmulPreferenceCreate", byref(preference))
        limit, kind = c_uint64(WORKSPACE_BYTES), c_int(WORKSPACE_LIMIT)
        self.library.call("MatmulPreferenceSetAttribute", preference, kind, byref(limit), c_size_t(8))
        found, count = (Heuristic * MOST_HEURISTIC)(), c_int()
        problem = (self.library.handle, self._description, *self._layouts, preference)
        self.library.call("MatmulAlgoGetHeuristic", *problem, c_int(MOST_HEURISTIC), found, byref(count))
        return [Algorithm.from_buffer_copy(one.algorithm) for one in found[: count.value] if one.state == 0]

    def elsewhere(self, outputs: Iterable[int], tokens: Iterable[int]) -> Iterator[Algorithm]:
        """What the heuristic proposes for other sides."""
        for sides in itertools.product(tokens, outputs, [self._sides[2]]):
            yield from Problem(self.library, sides, self._scales, fast=self._fast).proposed()

    def variations(self, base: Algorithm) -> Iterator[Algorithm]:
        """With one setting changed to anything that the algorithm says it can be; most are not accepted."""
        choices: dict[str, Iterable[int]] = {
            "tile": self._capabilities(base, "tiles"),
            "stages": self._capabilities(base, "stages"),
            "swizzle": (0, 1) if any(self._capabilities(base, "swizzling")) else (),
            "split_k": (2, 4) if any(self._capabilities(base, "split_k")) else (),
            "custom": range(max(self._capabilities(base, "custom_most") or [0]) + 1),
            "cluster": CLUSTERS,
        }
        for name, values in choices.items():
            for value in values:
                algorithm = Algorithm.from_buffer_copy(base)
                held = c_uint16(value) if name == "cluster" else c_uint32(value)
                arguments = (byref(algorithm), c_int(SETTING[name]), byref(held), c_size_t(sizeof(held)))
                if not self.library.status("MatmulAlgoConfigSetAttribute", *arguments):
                    yield algorithm

    def fits(self, algorithm: Algorithm) -> bool:
        """Whether cuBLASLt accepts it for these sides."""
        result = Heuristic()
        problem = (self.library.handle, self._description, *self._layouts, byref(algorithm), byref(result))
        refused = self.library.status("MatmulAlgoCheck", *problem)
        return not refused and result.workspace_bytes <= WORKSPACE_BYTES

    def _capabilities(self, algorithm: Algorithm, name: str) -> list[int]:
        values, written = (c_uint32 * 1024)(), c_size_t()
        capability = byref(algorithm), c_int(CAPABILITY[name])
        if not self.library.status(
            "MatmulAlgoCapGetAttribute", *capability, values, c_size_t(sizeof(values)), byref(written)
        ):
            return list(values[: written.value // 4])
        single = c_int32()
        arguments = (*capability, byref(single), c_size_t(4), byref(written))
        return [] if self.library.status("MatmulAlgoCapGetAttribute", *arguments) else [single.value]

    def run(self, algorithm: Algorithm, x: Tensor, weight: Tensor, y: Tensor) -> None:
        """Launch on the current stream.

        Raises:
            CapacityError: cuBLASLt refused to launch it.
        """
        a, b, c, d = self._layouts
        matrices = (c_void_p(weight.data_ptr()), a, c_void_p(x.data_ptr()), b)
        results = (c_void_p(y.data_ptr()), c, c_void_p(y.data_ptr()), d)
        self.library.call(
            "Matmul",
            self.library.handle,
            self._description,
            byref(self._one),
            *matrices,
            byref(self._zero),
            *results,
            byref(algorithm),
            c_void_p(self.library.workspace.data_ptr()),
            c_size_t(WORKSPACE_BYTES),
            c_void_p(torch.cuda.current_stream().cuda_stream),
        )


def settings_of(library: Library, algorithm: Algorithm) -> Settings:
    """-1 for what an algorithm does not tell."""
    values = {}
    for name, number in SETTING.items():
        held: Any = c_uint16() if name in ("inner", "cluster") else c_uint32()
        arguments = (byref(algorithm), c_int(number), byref(held), c_size_t(sizeof(held)), byref(c_size_t()))
        failed = library.status("MatmulAlgoConfigGetAttribute", *arguments)
        values[name] = -1 if failed else held.value
    return Settings(**values)


def accepted(problem: Problem, outputs: Iterable[int], tokens: Iterable[int]) -> dict[Settings, Algorithm]:
    """Every algorithm found for a problem: proposed for it, then for other sides, then each with one setting changed.

    The first is the one that PyTorch takes.
    """
    found: dict[Settings, Algorithm] = {}
    tried: set[Settings] = set()
    deadline = time.monotonic() + SEARCH_SECONDS

    def keep(algorithms: Iterable[Algorithm]) -> None:
        for algorithm in algorithms:
            if found and time.monotonic() > deadline:
                return
            settings = settings_of(problem.library, algorithm)
            if settings not in tried and problem.fits(algorithm):
                found[settings] = algorithm
            tried.add(settings)

    keep(problem.proposed())
    keep(problem.elsewhere(outputs, tokens))
    for algorithm in list(found.values()):
        keep(problem.variations(algorithm))
    return found
