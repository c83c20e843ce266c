"""FlashInfer's XQA, the fastest decode attention for e4m3 caches on Hopper, behind ``decode_attention``'s arguments.

An optional dependency: nothing here imports it before the first ``xqa_decode``, which compiles it with nvcc (seconds).
"""

from __future__ import annotations

import importlib
import importlib.util
import math
import os
import shutil
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from megatoken.engine.ops.paged_attention import check


@dataclass(frozen=True, slots=True)
class XqaBuffers:
    """What XQA wants besides its inputs: scratch for partial sums and semaphores that every launch leaves at zero.

    One launch at a time may use them: one set per stream.
    """

    workspace: Tensor
    semaphores: Tensor

    @classmethod
    def allocate(cls, sequences: int, heads: int, kv_heads: int, head_dim: int, device: torch.device) -> XqaBuffers:
        """For launches of up to ``sequences``. XQA cuts a batch into at most one piece a multiprocessor."""
        pieces = torch.cuda.get_device_properties(device).multi_processor_count
        workspace = torch.empty(pieces * 4 * heads // kv_heads * head_dim, dtype=torch.uint8, device=device)
        return cls(workspace, torch.zeros(sequences * kv_heads, dtype=torch.uint32, device=device))


def _has_nvcc() -> bool:
    named = os.environ.get("FLASHINFER_NVCC")
    homes = (os.environ.get("CUDA_HOME"), os.environ.get("CUDA_PATH"), "/usr/local/cuda")
    found = any(home and (Path(home) / "bin" / "nvcc").exists() for home in homes)
    return found or bool(named and Path(named).exists()) or shutil.which("nvcc") is not None


def xqa_available(
    heads: int, kv_heads: int, head_dim: int, page_size: int, cache_dtype: torch.dtype, device: torch.device
) -> str | None:
    """None if ``xqa_decode`` can run here with these shapes, or one line that says why not. Imports nothing."""
    if cache_dtype != torch.float8_e4m3fn:
        return f"XQA is used for e4m3 caches only, this one is {cache_dtype}"
    if head_dim not in (64, 128) or page_size not in (16, 32, 64, 128) or heads % kv_heads or heads // kv_heads > 16:
        return (
            "XQA wants heads of 64 or 128, pages of 16 to 128 tokens and at most 16 grouped queries, not heads of "
            f"{head_dim}, pages of {page_size}, {heads} heads over {kv_heads}"
        )
    if device.type != "cuda" or torch.cuda.get_device_capability(device) != (9, 0):
        return "XQA for e4m3 caches wants a Hopper GPU (compute capability 9.0)"
    missing = [name for name in ("flashinfer", "tvm_ffi") if importlib.util.find_spec(name) is None]
    if missing:
        return f"{' and '.join(missing)} not installed: pip install flashinfer-python apache-tvm-ffi"
    if not _has_nvcc():
        return "XQA is compiled at its first call and nvcc was not found: install the CUDA toolkit or set CUDA_HOME"
    if shutil.which("ninja") is None:
        return "XQA is compiled at its first call and ninja was not found: pip install ninja"
    return None


def xqa_decode(
    q_BHE: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    page_table_BW: Tensor,
    lengths_B: Tensor,
    out_BHE: Tensor,
    buffers: XqaBuffers,
    *,
    softmax_scale: float,
    k_scale: float = 1.0,
    v_scale: float = 1.0,
    out_scale: float | None = None,
) -> Tensor:
    """``decode_attention`` with an e4m3 cache by FlashInfer's XQA. Ask ``xqa_available`` first.

    Arguments as there, except: lengths are at least 1 (an empty sequence's output is left as it was), the page table is
    contiguous, and unused slots of a sequence's last page must be finite: their values are multiplied by a weight of 0.

    Numerics: queries are rounded to e4m3 without a scale of their own (saturating at 448, spacing 2^-9 below 2^-6);
    weights relative to the running maximum, times 448, are rounded to e4m3, their sum is taken before that rounding;
    both products run on the e4m3 tensor cores; softmax and accumulators are fp32; partial sums of sequences that are
    split over programs (at most 66 pairs of sequence and key/value head on 132 multiprocessors) pass through bf16.
    """
    library = importlib.import_module("flashinfer.xqa")
    check(q_BHE, k_cache, v_cache, out_BHE, out_scale, page_table_BW, lengths_B)
    _, kv_heads, page_size, head_dim = k_cache.shape
    if not page_table_BW.is_contiguous() or len(q_BHE) * kv_heads > len(buffers.semaphores):
        raise ValueError(
            f"XQA wants a contiguous page table and buffers for {len(q_BHE)} sequences x {kv_heads} key/value heads; "
            f"the table's strides are {page_table_BW.stride()}, the buffers hold {len(buffers.semaphores)} pairs"
        )
    library.xqa(
        q_BHE[:, None],
        k_cache,
        v_cache,
        page_table_BW,
        lengths_B.view(torch.uint32)[:, None],
        out_BHE[:, None],
        buffers.workspace,
        buffers.semaphores,
        kv_heads,
        page_size,
        # Scores are scaled by q_scale * kv_scale / sqrt(E), values by kv_scale.
        q_scale=softmax_scale * math.sqrt(head_dim) * k_scale / v_scale,
        kv_scale=float(v_scale),
        kv_layout="HND",
        # With programmatic launch it would read lengths and page table before the kernel ahead of it has finished.
        enable_pdl=False,
        rcp_out_scale=1.0 / (out_scale or 1.0),
    )
    return out_BHE
