"""Sums over ranks through memory that every rank's GPU reads and writes, fused with the norm: one kernel.

Each rank keeps and norms a part of the residual stream's tokens (Korthikanti et al., 2022: sequence parallelism). The
kernel reads its tokens of every rank's product, adds them and the residual, norms, quantises and writes the result to
every rank. A reduce-scatter, a norm and an all-gather would do the same in three times the launches. The ranks
synchronise twice in it: before it reads other ranks' products, and before other kernels read its results.

To synchronise, each kernel has a number, and a rank's flags hold the number of the newest kernel that each rank has
reached. Numbers wrap around. Shape letters as in ``ops``; T counts the tokens of all ranks.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
from __future__ import annotations

import ctypes
import os
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from importlib import import_module
from itertools import accumulate, permutations
from typing import Any, Self

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.distributed import Store  # type: ignore[attr-defined]

from megatoken.engine.ops.fused import RUN, require_contiguous, saturate
from megatoken.errors import MegatokenError

_ALIGNMENT = 256  # bytes
_REGISTERS = 32
"""Registers of a thread. With 16 columns a thread, this many let threads fill a multiprocessor and hide latencies."""
_NATIVE_ATOMICS = 3  # CU_DEVICE_P2P_ATTRIBUTE_NATIVE_ATOMIC_SUPPORTED, cuda.h
_CHECK_SECONDS = 0.01
_RELEASED = 1 << 30
"""Added to a flag so that no kernel waits for it."""


def tokens_each(tokens: int, ranks: int) -> int:
    """Tokens that a rank keeps; the last ranks may have fewer."""
    return -(-tokens // ranks)


def own_tokens(tokens: int, rank: int, ranks: int) -> slice:
    """The tokens of a step that a rank keeps."""
    each = tokens_each(tokens, ranks)
    return slice(min(rank * each, tokens), min((rank + 1) * each, tokens))


@dataclass(frozen=True, slots=True)
class _Places:
    """Offsets in each rank's memory, in bytes."""

    products: int  # bf16 [T, D], this rank's part of a sum
    inputs: int  # [T, D] of the next linear
    residual: int  # bf16 [T / ranks, D]
    flags: int  # int32 [2, ranks]: newest kernels that each rank has begun, and ended
    end: int

    @classmethod
    def of(cls, max_tokens: int, hidden: int, ranks: int) -> Self:
        token = 2 * hidden
        sizes = (max_tokens * token, max_tokens * token, tokens_each(max_tokens, ranks) * token, 8 * ranks)
        return cls(*accumulate((-(-size // _ALIGNMENT) * _ALIGNMENT for size in sizes), initial=0))


class _RendezvousStore(Store):
    """A store for one rendezvous of processes that may have taken part in others, and may end meanwhile.

    PyTorch's ``StoreExchange`` uses keys PREFIX/NUMBER/RANK and counts from a process's start; here the first key has
    number 0.
    """

    def __init__(self, store: Store, check: Callable[[], None]) -> None:
        """``check`` is called while waiting for other ranks; it raises if one has ended."""
        super().__init__()
        self._store = store
        self._check = check
        self._first: dict[str, int] = {}

    def _key(self, key: str) -> str:
        prefix, number, rank = key.rsplit("/", 2)
        return f"{prefix}/{int(number) - self._first.setdefault(prefix, int(number))}/{rank}"

    def set(self, key: str, value: Any) -> None:
        self._store.set(self._key(key), value)

    def get(self, key: str) -> bytes:
        return self._store.get(self._key(key))

    def wait(self, keys: list[str], *timeout: Any) -> None:
        known = [self._key(key) for key in keys]
        while not self._store.check(known):
            self._check()
            time.sleep(_CHECK_SECONDS)
        self._store.wait(known, *timeout)


class FusedAllReduce:
    """One rank's memory, and the addresses of all ranks'."""

    def __init__(
        self, memory: Tensor, addresses: list[int], rank: int, max_tokens: int, hidden: int, mapped: Any = None
    ) -> None:
        """Use memory that exists; ``rendezvous`` allocates it.

        Args:
            memory: zeros, uint8 [bytes], on this rank's device.
            addresses: of every rank's memory, as seen by this rank's device.
            rank: this one.
            max_tokens: of a step.
            hidden: D.
            mapped: object that keeps the other ranks' memory mapped.
        """
        self.rank, self.ranks = rank, len(addresses)
        self._places = places = _Places.of(max_tokens, hidden, self.ranks)
        self._hidden = hidden
        self._addresses = torch.tensor(addresses, dtype=torch.int64, device=memory.device)
        self._products_TD = memory[: max_tokens * hidden * 2].view(torch.bfloat16).view(max_tokens, hidden)
        self._inputs = memory[places.inputs : places.residual]
        residual = memory[places.residual : places.flags].view(torch.bfloat16)
        self._residual_TD = residual[: len(residual) // hidden * hidden].view(-1, hidden)
        self._flags = memory[places.flags : places.flags + 8 * self.ranks].view(torch.int32)
        self._state = torch.zeros(2, dtype=torch.int32, device=memory.device)  # kernels so far; programs of this one
        self._on_host = torch.zeros(2, dtype=torch.int32, pin_memory=memory.is_cuda)
        self._mapped = mapped

    @classmethod
    def rendezvous(
        cls, name: str, store: Any, rank: int, ranks: int, max_tokens: int, hidden: int, check: Callable[[], None]
    ) -> Self:
        """Allocate and exchange the memory of all ranks, rank N on CUDA device N; waits for every rank.

        Args:
            name: of the group, the same on every rank and unique.
            store: shared by the ranks.
            rank: this one.
            ranks: their number.
            max_tokens: of a step.
            hidden: D.
            check: raises if a rank has ended.

        Raises:
            MegatokenError: the GPUs or the system do not support it.
        """
        os.environ.setdefault("TORCH_SYMM_MEM_DISABLE_MULTICAST", "1")
        c10d: Any = import_module("torch._C._distributed_c10d")  # the public functions take global groups only
        symmetric = c10d._SymmetricMemory
        # Local variables keep both alive: C++ keeps no Python part of a store, and the registry keeps no group.
        exchange = _RendezvousStore(store, check)
        group = c10d.ProcessGroup(exchange, rank, ranks)
        c10d._register_process_group(name, group)
        try:
            symmetric.set_group_info(name, rank, ranks, exchange)  # before PyTorch 2.11
            size = _Places.of(max_tokens, hidden, ranks).end
            memory = symmetric.empty_strided_p2p((size,), (1,), torch.uint8, torch.device("cuda", rank), name)
            memory.zero_()
            torch.cuda.synchronize()
            mapped = symmetric.rendezvous(memory)
        except RuntimeError as error:
            raise MegatokenError(f"the ranks' GPUs cannot share memory: {str(error).splitlines()[0]}") from error
        finally:
            c10d._unregister_process_group(name)
        return cls(memory, mapped.buffer_ptrs, rank, max_tokens, hidden, mapped)

    @classmethod
    def alone(cls, ranks: int, max_tokens: int, hidden: int, device: torch.device) -> Self:
        """Rank 0 with its memory in place of all ranks', released, so that kernels run without other ranks."""
        memory = torch.zeros(_Places.of(max_tokens, hidden, ranks).end, dtype=torch.uint8, device=device)
        shared = cls(memory, [memory.data_ptr()] * ranks, 0, max_tokens, hidden)
        shared._flags.fill_(_RELEASED)
        return shared

    @staticmethod
    def reachable(ranks: int) -> bool:
        """Whether the GPUs of that many ranks can use each other's memory, with atomic operations: over NVLink."""
        driver, whether = ctypes.CDLL("libcuda.so.1"), ctypes.c_int()
        for one, other in permutations(range(ranks), 2):
            status = driver.cuDeviceGetP2PAttribute(ctypes.byref(whether), _NATIVE_ATOMICS, one, other)
            if status or not whether.value:
                return False
        return True

    def products(self, tokens: int) -> Tensor:
        """bf16 [T, D]: write this rank's part of the next sum here."""
        if tokens > len(self._products_TD):
            raise ValueError(f"expected at most {len(self._products_TD)} tokens in a step, got {tokens}")
        return self._products_TD[:tokens]

    def keep(self, x_TD: Tensor) -> Tensor:
        """This rank's tokens of a residual stream, bf16 [T / ranks, D], in memory that all ranks' ``select`` reads."""
        own = x_TD[own_tokens(len(x_TD), self.rank, self.ranks)]
        return self._residual_TD[: len(own)].copy_(own)

    def select(self, indices_S: Tensor, tokens: int) -> Tensor:
        """This rank's part, [S / ranks, D], of tokens ``indices_S`` (int32) of a residual stream that all ranks kept.

        ``tokens``: T. A sum must follow: until it begins on all ranks, others may read what this rank kept.
        """
        samples = len(indices_S)
        own = own_tokens(samples, self.rank, self.ranks)
        own_SD = torch.empty((own.stop - own.start, self._hidden), dtype=torch.bfloat16, device=self._state.device)
        each_S, each_T = (tokens_each(count, self.ranks) for count in (samples, tokens))
        _select_kernel[(each_S,)](
            self._addresses, self._state, indices_S, own_SD, samples, each_S, each_T, self.rank,
            self._places.residual, self._places.flags, D=self._hidden,
            BLOCK=triton.next_power_of_2(self._hidden), RANKS=self.ranks, num_warps=4,
        )  # fmt: skip
        return own_SD

    def add_rms_norm(
        self, tokens: int, residual_TD: Tensor, weight_D: Tensor, epsilon: float, scale: Tensor | None
    ) -> Tensor:
        """``residual +=`` the sum of all ranks' ``products`` in place, then RMSNorm of all tokens.

        Args:
            tokens: T.
            residual_TD: bf16 [T / ranks, D], this rank's.
            weight_D: bf16 or fp32 [D].
            epsilon: added to the mean square.
            scale: fp32, one element, the same on every rank: the result is e4m3 of ``y / scale``. None: bf16.

        Returns:
            e4m3 or bf16 [T, D], the same on every rank, until the next sum.
        """
        require_contiguous(residual_TD, weight_D)
        dtype = torch.bfloat16 if scale is None else torch.float8_e4m3fn
        block = triton.next_power_of_2(self._hidden)
        each = tokens_each(tokens, self.ranks)
        _add_rms_norm_kernel[(each,)](
            self._addresses, self._state, residual_TD, weight_D, scale, tokens, each, self.rank, float(epsilon),
            self._places.inputs, self._places.flags,
            INPUTS=tl.bfloat16 if scale is None else tl.float8e4nv, D=self._hidden, BLOCK=block, RANKS=self.ranks,
            num_warps=min(max(block // 512, 1), 32), maxnreg=_REGISTERS,
        )  # fmt: skip
        return self._inputs[: tokens * self._hidden * dtype.itemsize].view(dtype).view(tokens, self._hidden)

    def release(self) -> None:
        """End this rank's kernels that wait for ranks that have ended.

        Uses copies only: waiting kernels may leave no room for another kernel.
        """
        with suppress(RuntimeError), torch.cuda.stream(torch.cuda.Stream(self._flags.device)):
            self._on_host.copy_(self._state, non_blocking=True)
            torch.cuda.current_stream().synchronize()
            released = (self._on_host[:1] + _RELEASED).repeat(2 * self.ranks)
            self._flags.copy_(released, non_blocking=True)
            torch.cuda.current_stream().synchronize()


@triton.jit
def _rows_at(addresses, rank, place, dtype: tl.constexpr):
    return tl.multiple_of((tl.load(addresses + rank) + place).to(tl.pointer_type(dtype)), 16)


@triton.jit
def _announce(addresses, place, rank, number, mark: tl.constexpr, RANKS: tl.constexpr):
    """Set this rank's flag on all ranks: it has begun (mark 0) or ended (1) kernel ``number``."""
    other = tl.arange(0, triton.next_power_of_2(RANKS))
    flags = (tl.load(addresses + other, mask=other < RANKS, other=0) + place).to(tl.pointer_type(tl.int32))
    tl.atomic_xchg(flags + mark * RANKS + rank, number, mask=other < RANKS, sem="release", scope="sys")


@triton.jit
def _wait(addresses, place, rank, number, mark: tl.constexpr, RANKS: tl.constexpr):
    """Wait until all ranks have begun or ended kernel ``number``."""
    flags = (tl.load(addresses + rank) + place).to(tl.pointer_type(tl.int32)) + mark * RANKS
    for other in tl.static_range(RANKS):
        while tl.atomic_add(flags + other, 0, sem="acquire", scope="sys") - number < 0:
            pass


@triton.jit
def _begin(addresses, state, place, rank, RANKS: tl.constexpr):
    """Wait until every rank has begun this kernel, and return its number."""
    number = tl.load(state) + 1
    if tl.program_id(0) == 0:
        _announce(addresses, place, rank, number, 0, RANKS)
    _wait(addresses, place, rank, number, 0, RANKS)
    return number


@triton.jit
def _is_last(state, number):
    """Whether all other programs of this kernel have reached this point."""
    tl.debug_barrier()  # all threads before the one that counts
    last = tl.atomic_add(state + 1, 1, sem="acq_rel", scope="sys") == tl.num_programs(0) - 1
    if last:
        tl.store(state + 1, 0)
        tl.store(state, number)
    return last


@triton.jit(do_not_specialize=["rows", "each", "rank", "epsilon"])
def _add_rms_norm_kernel(
    addresses, state, residual, weight, scale, rows, each, rank, epsilon, inputs_place, flags_place,
    INPUTS: tl.constexpr, D: tl.constexpr, BLOCK: tl.constexpr, RANKS: tl.constexpr,
):  # fmt: skip
    number = _begin(addresses, state, flags_place, rank, RANKS)
    program = tl.program_id(0)
    row = rank * each + program
    if row < rows:
        column = tl.max_contiguous(tl.arange(0, BLOCK), RUN)
        inside = column < D
        at = row.to(tl.int64) * D + column
        total = tl.zeros([BLOCK], dtype=tl.float32)
        for other in tl.static_range(RANKS):
            products = _rows_at(addresses, other, 0, tl.bfloat16)
            total += tl.load(products + at, mask=inside, other=0.0, cache_modifier=".cg").to(tl.float32)
        own = program.to(tl.int64) * D + column
        x = (total + tl.load(residual + own, mask=inside, other=0.0).to(tl.float32)).to(tl.bfloat16)
        tl.store(residual + own, x, mask=inside)
        x = x.to(tl.float32)
        factor = tl.rsqrt(tl.sum(x * x) / D + epsilon)
        y = x * factor * tl.load(weight + column, mask=inside, other=0.0).to(tl.float32)
        if scale is not None:
            y = saturate(y * (1.0 / tl.load(scale)))
        y = y.to(INPUTS)
        for other in tl.static_range(RANKS):
            tl.store(_rows_at(addresses, other, inputs_place, INPUTS) + at, y, mask=inside)
    if _is_last(state, number):
        _announce(addresses, flags_place, rank, number, 1, RANKS)
        _wait(addresses, flags_place, rank, number, 1, RANKS)


@triton.jit(do_not_specialize=["samples", "each_S", "each_T", "rank"])
def _select_kernel(
    addresses, state, rows, own, samples, each_S, each_T, rank, residual_place, flags_place,
    D: tl.constexpr, BLOCK: tl.constexpr, RANKS: tl.constexpr,
):  # fmt: skip
    number = _begin(addresses, state, flags_place, rank, RANKS)
    program = tl.program_id(0)
    sample = rank * each_S + program
    if sample < samples:
        row = tl.load(rows + sample)
        column = tl.max_contiguous(tl.arange(0, BLOCK), RUN)
        inside = column < D
        residual = _rows_at(addresses, row // each_T, residual_place, tl.bfloat16)
        x = tl.load(residual + (row % each_T).to(tl.int64) * D + column, mask=inside, other=0.0, cache_modifier=".cg")
        tl.store(own + program.to(tl.int64) * D + column, x, mask=inside)
    _is_last(state, number)
