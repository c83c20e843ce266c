"""What tests of kernels ask for, so that they see what a GPU would do and what a kernel leaves unwritten."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
import torch
from torch import Tensor

from megatoken.engine.schemes.fp8_weight import E4M3_MAX


@pytest.fixture(scope="module")
def interpreter_rounds_as_the_device() -> Iterator[None]:
    """Triton's interpreter truncates to bf16, and loses carries and NaN on the way to e4m3; torch rounds.

    Casts to e4m3 are held to what Triton promises: nothing, beyond the format's range.
    """
    from gpu_kernels import BF16, E4M3, ON_GPU, tl, triton

    if ON_GPU:
        yield
        return
    dtypes = {tl.float32: torch.float32, tl.float16: torch.float16, tl.bfloat16: BF16, tl.float8e4nv: E4M3}

    def convert(values: np.ndarray, source: tl.dtype, target: tl.dtype, rounding_mode: object) -> np.ndarray:
        assert target != tl.float8e4nv or not (np.abs(values.view(np.float32)) > E4M3_MAX).any(), "not saturated"
        converted = torch.from_numpy(values.copy()).view(dtypes[source]).to(dtypes[target])
        bits = {1: torch.uint8, 2: torch.uint16, 4: torch.uint32}[converted.itemsize]
        return converted.view(bits).numpy()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(triton.runtime.interpreter, "_convert_float", convert)
        yield


@pytest.fixture(scope="module")
def poisoned_allocations() -> Iterator[None]:
    """What a kernel does not write reads as NaN or -1."""
    empty = torch.empty

    def poisoned(*size: object, **options: object) -> Tensor:
        tensor: Tensor = empty(*size, **options)  # type: ignore[call-overload]
        tensor.view(-1).view(torch.uint8).fill_(0xFF)
        return tensor

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "empty", poisoned)
        yield
