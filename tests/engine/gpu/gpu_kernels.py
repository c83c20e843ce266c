"""Where the tests of kernels run them: compiled on a GPU, in Triton's interpreter elsewhere."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import torch
from torch import Tensor

ON_GPU = torch.cuda.is_available()
triton = pytest.importorskip("triton", reason="Triton is not installed")
tl = pytest.importorskip("triton.language")

DEVICE = torch.device("cuda" if ON_GPU else "cpu")
REPEATS = 100 if ON_GPU else 1
BF16, E4M3 = torch.bfloat16, torch.float8_e4m3fn
needs_gpu = pytest.mark.skipif(not ON_GPU, reason="needs a CUDA device")
MARKS = [pytest.mark.usefixtures("interpreter_rounds_as_the_device", "poisoned_allocations")]
"""Of a module whose tests run kernels."""
if ON_GPU:
    MARKS.append(pytest.mark.gpu)


def full_size(*values: object) -> object:
    """A case that only a GPU has the time for."""
    return pytest.param(*values, marks=[pytest.mark.gpu, needs_gpu])


def normal(*shape: int, seed: int, spread: float = 1.0, dtype: torch.dtype = BF16) -> Tensor:
    generator = torch.Generator(DEVICE).manual_seed(seed)
    return (torch.randn(shape, generator=generator, device=DEVICE) * spread).to(dtype)


def assert_same_bits(run: Callable[[], Sequence[Tensor]]) -> None:
    first = [tensor.clone() for tensor in run()]
    for _ in range(REPEATS):
        for expected, actual in zip(first, run(), strict=True):
            assert torch.equal(expected.view(torch.uint8), actual.view(torch.uint8))
