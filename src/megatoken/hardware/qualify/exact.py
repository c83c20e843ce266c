"""Silent corruption: computations whose right answer is certain, on any device. Every differing bit counts.

Whole numbers in {-1, 0, 1} multiply exactly in every format as long as sums stay below the format's largest exact
number, whatever the order of additions. Freivalds' check compares ``C r`` with ``A (B r)`` for random r in {0, 1}: one
r misses a wrong row of C with a probability of at most 1/2, ``CHECKS`` of them with 1.5e-5.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from megatoken.engine.device import gpu_obstacle
from megatoken.engine.schemes import find_scheme
from megatoken.hardware.qualify.processor import engine_precision
from megatoken.hardware.qualify.values import NotRun, Outcomes, Setting, Value
from megatoken.text import significant

CHECKS = 16
DEPTH = 2048
"""Of the products: sums of so many numbers in {-1, 0, 1} stay below 256, which bf16 holds exactly."""
CHUNK_WORDS = {"cpu": 2**16, "cuda": 2**24}
"""Of the pattern that are made at once: on a CPU their 64-bit counters stay in a core's cache."""
FREE_SHARE = 0.9
"""Of a GPU's free memory, that the pattern takes at most."""
MULTIPLIER, SHIFT = 0x9E3779B97F4A7C15 - 2**64, 29

Multiply = Callable[[Tensor, Tensor], Tensor]


def small_integers(rows: int, columns: int, generator: torch.Generator, device: torch.device) -> Tensor:
    """Random numbers in {-1, 0, 1}, fp32."""
    return torch.randint(-1, 2, (rows, columns), generator=generator, device=device).float()


def wrong_rows(a_MK: Tensor, b_KN: Tensor, c_MN: Tensor, generator: torch.Generator) -> int:
    """Rows of ``c`` that are not ``a b``, all of whole numbers, found by Freivalds' check in fp64, which is exact."""
    r_NS = torch.randint(0, 2, (b_KN.shape[1], CHECKS), generator=generator, device=c_MN.device).double()
    expected = a_MK.double() @ (b_KN.double() @ r_NS)
    # NaN differs from everything, itself too.
    return int((c_MN.double() @ r_NS != expected).any(dim=1).sum())


def different_elements(first: Tensor, second: Tensor) -> int:
    """Elements of two equally shaped tensors whose bits differ."""
    integers = {1: torch.int8, 2: torch.int16, 4: torch.int32}[first.element_size()]
    return int((first.contiguous().view(integers) != second.contiguous().view(integers)).sum())


@torch.inference_mode()
def exact_products(multiply: Multiply, name: str, side: int, device: torch.device, setting: Setting) -> Value:
    """Products of whole numbers through ``multiply`` (fp32 [M, K] and [K, N], which hold them exactly)."""
    generator = torch.Generator(device).manual_seed(1)
    wrong = 0
    for _ in range(max(1, setting.repeats // 8)):
        a_MK = small_integers(side, DEPTH, generator, device)
        b_KN = small_integers(DEPTH, side, generator, device)
        wrong += wrong_rows(a_MK, b_KN, multiply(a_MK, b_KN), generator)
    return Value(f"exact_{name}", f"{name} products of whole numbers", "wrong", [wrong], better="zero")


@torch.inference_mode()
def repeated_products(product: Callable[[], Tensor], name: str, setting: Setting) -> Value:
    """The same random product again and again: the first result against all later ones, bit by bit."""
    first = product().clone()
    different = sum(different_elements(first, product()) for _ in range(setting.repeats))
    title = f"{name} product repeated {setting.repeats} times"
    return Value(f"repeat_{name}", title, "wrong", [different], better="zero")


def digest(values: Tensor) -> int:
    """All bits of a tensor (two bytes an element) as one number below 2**32, to which each place adds differently."""
    words = values.contiguous().view(torch.int16).flatten().long()
    words.mul_(torch.arange(1, 2 * len(words), 2, device=words.device))
    total = int(words.sum())  # wraps around, whatever the order
    return (total ^ total >> 32) & 0xFFFFFFFF


def digest_of(product: Tensor, name: str) -> Value:
    """Of a product whose numbers are the same on every GPU: like GPUs with the same software have the same bits."""
    return Value(f"digest_{name}", f"{name} product, all bits", "digest", [digest(product)], better="same")


def pattern(first: int, count: int, seed: int, device: torch.device) -> Tensor:
    """``count`` 32-bit words that depend on their index alone: a mixed counter, so neighbours are unlike."""
    words = torch.arange(first, first + count, dtype=torch.int64, device=device)
    words.bitwise_xor_(seed).mul_(MULTIPLIER)
    words.bitwise_xor_(words >> SHIFT).mul_(MULTIPLIER)
    return words.bitwise_right_shift_(32).to(torch.int32)


def fill_pattern(buffer: Tensor, seed: int) -> None:
    """Write the pattern to all of ``buffer`` (int32, one dimension)."""
    for piece, expected in _pieces(buffer, seed):
        piece.copy_(expected)


def wrong_words(buffer: Tensor, seed: int, *, inverted: bool = False) -> int:
    """Words of ``buffer`` that are not the pattern, or not its inverse."""
    wrong = 0
    for piece, expected in _pieces(buffer, seed):
        wrong += int((piece != (expected.bitwise_not_() if inverted else expected)).sum())
    return wrong


def _pieces(buffer: Tensor, seed: int) -> Iterator[tuple[Tensor, Tensor]]:
    """The parts of ``buffer``, each with the pattern that belongs there."""
    words = CHUNK_WORDS[buffer.device.type]
    for first in range(0, len(buffer), words):
        piece = buffer[first : first + words]
        yield piece, pattern(first, len(piece), seed, buffer.device)


@torch.inference_mode()
def memory_pattern(size_bytes: int, device: torch.device) -> Value:
    """Write a pattern to memory, read it back, invert every bit, read it back: each cell holds 0 and 1 once."""
    buffer = torch.empty(size_bytes // 4, dtype=torch.int32, device=device)
    fill_pattern(buffer, seed := 0x5EED)
    wrong = wrong_words(buffer, seed)
    buffer.bitwise_not_()
    wrong += wrong_words(buffer, seed, inverted=True)
    title = f"Pattern in {significant(size_bytes / 2**30)} GiB of memory"
    return Value("memory_pattern", title, "wrong", [wrong], better="zero")


def idle_memory(setting: Setting) -> Outcomes:
    """Whether a pattern in memory of the first GPU is still there after a time without work."""
    device = torch.device("cuda", 0)
    yield kept_pattern(_most_bytes(setting, device), device, setting.idle_seconds)


@torch.inference_mode()
def kept_pattern(size_bytes: int, device: torch.device, seconds: float) -> Value:
    """Write a pattern to memory, wait, and read it back: cells that lose their charge, and rows of a wrong address."""
    buffer = torch.empty(size_bytes // 4, dtype=torch.int32, device=device)
    fill_pattern(buffer, seed := 0x1D1E)
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    time.sleep(seconds)
    title = f"Pattern in {significant(size_bytes / 2**30)} GiB of memory after {seconds:.3g} s without work"
    return Value("kept_pattern", title, "wrong", [wrong_words(buffer, seed)], better="zero")


def _most_bytes(setting: Setting, device: torch.device) -> int:
    """Of a GPU's memory that a pattern takes."""
    free, _ = torch.cuda.mem_get_info(device)
    return min(setting.pattern_bytes, int(FREE_SHARE * free))


def on_cpu(setting: Setting) -> Outcomes:
    """All of it on the CPU."""
    device, side = torch.device("cpu"), min(1024, max(setting.sides))

    def in_bf16(a: Tensor, b: Tensor) -> Tensor:
        return torch.mm(a.bfloat16(), b.bfloat16())

    yield exact_products(torch.mm, "fp32", side, device, setting)
    if engine_precision(setting) == "bf16":
        yield exact_products(in_bf16, "bf16", side, device, setting)
    left, right = torch.randn(side, side), torch.randn(side, side)
    yield repeated_products(lambda: torch.mm(left, right), "fp32", setting)
    yield memory_pattern(setting.pattern_bytes, device)


def on_gpu(setting: Setting) -> Outcomes:
    """All of it on the first GPU, in bf16 and fp8 as the engine's products."""
    device, side = torch.device("cuda", 0), min(4096, max(setting.sides))
    one = torch.ones(1, device=device)

    def in_bf16(a: Tensor, b: Tensor) -> Tensor:
        return torch.mm(a.bfloat16(), b.bfloat16())

    def in_fp8(a: Tensor, b: Tensor) -> Tensor:
        e4m3 = torch.float8_e4m3fn
        columns = b.t().contiguous().to(e4m3).t()
        return torch._scaled_mm(a.to(e4m3), columns, one, one, out_dtype=torch.bfloat16, use_fast_accum=True)

    torch.manual_seed(0)
    left, right = (torch.randn(side, side, device=device) for _ in range(2))
    yield exact_products(in_bf16, "bf16", side, device, setting)
    bf16_left, bf16_right = left.bfloat16(), right.bfloat16()
    yield repeated_products(lambda: torch.mm(bf16_left, bf16_right), "bf16", setting)
    yield digest_of(torch.mm(bf16_left, bf16_right), "bf16")
    if obstacle := gpu_obstacle(find_scheme("fp8")):
        yield NotRun("exact_fp8", "fp8 products of whole numbers", obstacle, "take a GPU that has fp8")
    else:
        yield exact_products(in_fp8, "fp8", side, device, setting)
        yield repeated_products(lambda: in_fp8(left, right), "fp8", setting)
        yield digest_of(in_fp8(left, right), "fp8")
    torch.cuda.empty_cache()
    yield memory_pattern(_most_bytes(setting, device), device)
