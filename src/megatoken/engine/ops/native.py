"""Builds ``kernels.cpp`` on first use and calls it; without a GCC there are no kernels, and cpu.py does without."""

from __future__ import annotations

import ctypes
import functools
import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
from pathlib import Path

import torch
from torch import Tensor

SOURCE = Path(__file__).with_name("kernels.cpp")
FLAGS = ("-O3", "-march=native", "-fno-math-errno", "-std=c++17", "-fopenmp", "-shared", "-fPIC")
SUFFIX = {torch.float32: "fp32", torch.bfloat16: "bf16"}
BUILD_SECONDS = 60


@functools.cache
def library() -> ctypes.CDLL | None:
    """The compiled kernels, from the user's cache folder when they were built before; None without a compiler."""
    compiler = shutil.which(os.environ.get("CXX", "g++"))
    if compiler is None or platform.system() != "Linux":
        return None
    key = hashlib.sha256(SOURCE.read_bytes() + repr((FLAGS, compiler, _processor())).encode()).hexdigest()[:16]
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "megatoken"
    file = cache / f"kernels-{key}.so"
    try:
        if not file.exists():
            cache.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryDirectory(dir=cache) as folder:
                built = Path(folder) / file.name
                command = [compiler, *FLAGS, str(SOURCE), "-o", str(built)]
                subprocess.run(command, check=True, capture_output=True, timeout=BUILD_SECONDS)
                built.replace(file)
        return ctypes.CDLL(str(file))
    except (OSError, subprocess.SubprocessError):
        return None


def _processor() -> str:
    # -march=native binds the file to the instructions of this processor, and a home folder may be shared by several.
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith(("flags", "Features")):
            return line
    return platform.processor()


def has_attention(heads: int, k_cache: Tensor) -> bool:
    """Whether there is a ``decode_attention`` for these shapes."""
    _, kv_heads, page_size, head_dim = k_cache.shape
    fits = head_dim in (32, 64, 96, 128) and heads // kv_heads <= 16 and page_size % 16 == 0 and page_size <= 256
    return fits and library() is not None


def decode_attention(q_RHE: Tensor, k_cache: Tensor, v_cache: Tensor, pages_RP: Tensor, lengths_R: Tensor) -> Tensor:
    """One query a sequence over its paged keys -> [R, H, E]; only where ``has_attention``.

    Args:
        q_RHE: fp32 or bf16; heads of a row contiguous.
        k_cache: [pages, kv_heads, page_size, head_dim], like ``v_cache``.
        v_cache: values.
        pages_RP: int32 page ids in order.
        lengths_R: int32 keys to see.
    """
    sequences, heads, head_dim = q_RHE.shape
    kv_heads, page_size = k_cache.shape[1:3]
    out_RHE = torch.empty(sequences, heads, head_dim, dtype=q_RHE.dtype)
    getattr(library(), f"decode_attention_{SUFFIX[q_RHE.dtype]}")(
        *(ctypes.c_void_p(t.data_ptr()) for t in (out_RHE, q_RHE, k_cache, v_cache, pages_RP, lengths_R)),
        *(ctypes.c_int(n) for n in (sequences, pages_RP.shape[1], heads, kv_heads, head_dim, page_size)),
        ctypes.c_int64(q_RHE.stride(0)),
    )
    return out_RHE


def rms_norm(x_TD: Tensor, weight_D: Tensor, epsilon: float) -> Tensor | None:
    """``x / sqrt(mean(x^2) + epsilon) * weight`` over the last dimension; None where no kernel fits."""
    compiled = library()
    width = x_TD.shape[-1]
    if compiled is None or width % 16 or not x_TD.is_contiguous():
        return None
    out_TD = torch.empty_like(x_TD)
    getattr(compiled, f"rms_norm_{SUFFIX[x_TD.dtype]}")(
        *(ctypes.c_void_p(t.data_ptr()) for t in (out_TD, x_TD, weight_D)),
        ctypes.c_int64(x_TD.numel() // width),
        ctypes.c_int64(width),
        ctypes.c_float(epsilon),
    )
    return out_TD


def rotate_and_write(
    qkv_TN: Tensor,
    cos_LE: Tensor,
    sin_LE: Tensor,
    positions_T: Tensor,
    cache_slots_T: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    heads: int,
) -> Tensor | None:
    """Rotate queries and keys, store keys and values -> queries [T, H, E]; None where no kernel fits.

    Args:
        qkv_TN: contiguous [T, (H + 2K) * E].
        cos_LE: rotary tables of all positions, like ``sin_LE``, which carries the minus sign of the first half.
        sin_LE: see ``cos_LE``.
        positions_T: int32.
        cache_slots_T: int32 page * page_size + offset.
        k_cache: [pages, kv_heads, page_size, head_dim], like ``v_cache``.
        v_cache: values.
        heads: H.
    """
    compiled = library()
    _, kv_heads, page_size, head_dim = k_cache.shape
    if compiled is None or head_dim % 32:
        return None
    rows = len(qkv_TN)
    q_THE = torch.empty(rows, heads, head_dim, dtype=qkv_TN.dtype)
    tensors = (q_THE, k_cache, v_cache, qkv_TN, cos_LE, sin_LE, positions_T, cache_slots_T)
    getattr(compiled, f"rotate_and_write_{SUFFIX[qkv_TN.dtype]}")(
        *(ctypes.c_void_p(t.data_ptr()) for t in tensors),
        ctypes.c_int64(rows),
        *(ctypes.c_int(n) for n in (heads, kv_heads, head_dim, page_size)),
    )
    return q_THE
