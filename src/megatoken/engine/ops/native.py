"""Build ``kernels.cpp`` on first use and call it; if that fails, cpu.py uses PyTorch only."""

from __future__ import annotations

import ctypes
import functools
import hashlib
import os
import platform
import shutil
import signal
import stat
import subprocess
import tempfile
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

SOURCE = Path(__file__).with_name("kernels.cpp")
HEADERS = tuple(SOURCE.with_name(f"kernels_{name}.h") for name in ("amx", "packed", "vectors"))
PROCESSOR = Path("/proc/cpuinfo")
FLAGS = ("-O3", "-march=native", "-fno-math-errno", "-std=c++17", "-fopenmp", "-shared", "-fPIC")
SUFFIX = {torch.float32: "fp32", torch.bfloat16: "bf16"}
BUILD_SECONDS = 60

_address, _int, _long, _float = ctypes.c_void_p, ctypes.c_int, ctypes.c_int64, ctypes.c_float
SIGNATURES = {
    "attention": (*[_address] * 7, *[_int] * 6, _long, _int),
    "rms_norm": (*[_address] * 3, _long, _long, _float, _int),
    "rotate_and_write": (*[_address] * 8, _long, *[_int] * 5),
}


_WEIGHT = (*[_address] * 3, _long, _long, _int, _int)  # codes, factors, zeros, rows, columns, group, e2m1
PACKED_SIGNATURES = {
    "packed_product": (_address, _address, *_WEIGHT, _int, _int),
    "packed_decode": (_address, *_WEIGHT, _long, _long, _int),
}
"""Of kernels that only processors with AVX2 have."""


def library() -> ctypes.CDLL | None:
    """The compiled kernels, or None. The first call looks for an earlier build, or builds for about ten seconds."""
    return _library_or_reason()[0]


@functools.cache
def has_avx512() -> bool:
    """Whether the processor has the registers that the attention kernel was written for."""
    return "avx512f" in _processor().split()


def status() -> dict[str, Any]:
    """Which kernels run, as ``Ops.kernels``. The first call may build, like ``library``."""
    kernels, why_none = _library_or_reason()
    return {
        "kernels": "compiled" if kernels is not None else "PyTorch only",
        "why_no_kernels": why_none,
        "bf16_widened": kernels is not None and "avx512_bf16" not in _processor().split(),
    }


@functools.cache
def _library_or_reason() -> tuple[ctypes.CDLL | None, str | None]:
    try:
        return _open(), None
    except (OSError, RuntimeError, AttributeError) as error:
        return None, str(error)


def must_build() -> bool:
    """Whether the first call of ``library`` or ``status`` will build, which takes about ten seconds."""
    try:
        return not _place()[1].exists()
    except (OSError, RuntimeError):
        return False


def _place() -> tuple[str, Path, str]:
    """The compiler, the kernels' file in the user's cache folder, and the key in its name."""
    if platform.system() != "Linux":
        raise RuntimeError(f"kernels are for Linux, this is {platform.system()}")
    name = os.environ.get("CXX", "g++")
    compiler = shutil.which(name)
    if compiler is None:
        raise RuntimeError(f"no compiler {name}")
    sources = [source.read_bytes() for source in (SOURCE, *HEADERS)]
    key = hashlib.sha256(repr((sources, FLAGS, compiler, _processor())).encode()).hexdigest()[:16]
    folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "megatoken"
    return compiler, folder / f"kernels-{key}.so", key


def _open() -> ctypes.CDLL:
    """The kernels from the user's cache folder, built if missing or damaged; RuntimeError if that fails."""
    compiler, file, key = _place()
    file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    _refuse_foreign(file.parent)
    if file.exists():
        _refuse_foreign(file)
        content = file.read_bytes()
        if content.endswith(_seal(key, content[: -hashlib.sha256().digest_size])):
            with suppress(OSError, AttributeError):  # built by another system that shares this folder
                return _load(file)
    _build(compiler, file, key)
    return _load(file)


def _processor() -> str:
    # -march=native binds the file to this processor's instructions, and several machines may share a home folder.
    for line in PROCESSOR.read_text(errors="replace").splitlines():
        if line.startswith(("flags", "Features")):
            return line
    return platform.processor()


def _refuse_foreign(path: Path) -> None:
    facts = path.stat()
    if facts.st_uid != os.geteuid() or facts.st_mode & stat.S_IWOTH:
        raise RuntimeError(f"{path} belongs to or can be written by another user")


def _seal(key: str, code: bytes) -> bytes:
    """The end of every file: loading a damaged one can kill the process."""
    return hashlib.sha256(key.encode() + code).digest()


def _build(compiler: str, file: Path, key: str) -> None:
    with tempfile.TemporaryDirectory(dir=file.parent) as folder:
        built = Path(folder) / file.name
        _compile([compiler, *FLAGS, str(SOURCE), "-o", str(built)])
        code = built.read_bytes()
        built.write_bytes(code + _seal(key, code))
        built.chmod(0o700)
        built.replace(file)


def _compile(command: list[str]) -> None:
    with subprocess.Popen(
        command,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
        start_new_session=True,
    ) as process:
        try:
            _, messages = process.communicate(timeout=BUILD_SECONDS)
        except subprocess.TimeoutExpired:
            raise RuntimeError(f"{command[0]} took over {BUILD_SECONDS} s") from None
        finally:
            if process.returncode is None:
                os.killpg(process.pid, signal.SIGKILL)  # including the children of g++, which do the work
    if process.returncode:
        errors = (line.partition("error: ")[2] for line in messages.splitlines())
        raise RuntimeError(f"{command[0]} failed: {next(filter(None, errors), f'exit status {process.returncode}')}")


def _load(file: Path) -> ctypes.CDLL:
    kernels = ctypes.CDLL(str(file))
    for name, arguments in SIGNATURES.items():
        for suffix in SUFFIX.values():
            function = getattr(kernels, f"{name}_{suffix}")
            function.argtypes, function.restype = arguments, None
    if kernels.has_packed():
        for name, arguments in PACKED_SIGNATURES.items():
            function = getattr(kernels, name)
            function.argtypes, function.restype = arguments, None
    return kernels


def _pointer(tensor: Tensor, dtype: torch.dtype, shape: tuple[int, ...]) -> int:
    """Address of an operand, checked here because a kernel cannot check it."""
    if tensor.dtype != dtype or tensor.shape != shape or not (tensor.is_contiguous() and tensor.is_cpu):
        found = f"{tensor.dtype} {tuple(tensor.shape)}, strides {tensor.stride()} on {tensor.device}"
        raise TypeError(f"internal error: a kernel expects contiguous {dtype} {shape} on the CPU, not {found}")
    return tensor.data_ptr()


def has_attention(heads: int, k_cache: Tensor) -> bool:
    """Whether ``attention`` supports these shapes and this dtype."""
    _, kv_heads, page_size, head_dim = k_cache.shape
    fits = head_dim in (32, 64, 96, 128) and heads // kv_heads <= 16 and page_size % 16 == 0 and page_size <= 256
    return fits and k_cache.dtype in SUFFIX and library() is not None


def attention(
    q_THE: Tensor, k_cache: Tensor, v_cache: Tensor, pages_RP: Tensor, lengths_R: Tensor, starts: Tensor
) -> Tensor:
    """Causal attention of the newest tokens of each sequence over its paged keys -> [T, H, E]; needs ``has_attention``.

    Args:
        q_THE: fp32 or bf16; heads of a token contiguous.
        k_cache: [pages, kv_heads, page_size, head_dim], like ``v_cache``; dtype of the queries.
        v_cache: values.
        pages_RP: int32 page ids in order.
        lengths_R: int32 keys that the last token of each sequence sees; each earlier token sees one fewer.
        starts: int32 [R + 1] first token of each sequence, from 0, and T.

    Raises:
        TypeError: an operand has another dtype, shape or layout.
    """
    tokens, heads, head_dim = q_THE.shape
    kv_heads, page_size = k_cache.shape[1:3]
    dtype, (sequences, width) = q_THE.dtype, pages_RP.shape
    if q_THE.stride()[1:] != (head_dim, 1):
        raise TypeError(f"internal error: strides {q_THE.stride()} of queries whose tokens must be contiguous")
    out_THE = torch.empty(tokens, heads, head_dim, dtype=dtype)
    getattr(library(), f"attention_{SUFFIX[dtype]}")(
        out_THE.data_ptr(),
        q_THE.data_ptr(),
        _pointer(k_cache, dtype, (len(k_cache), kv_heads, page_size, head_dim)),
        _pointer(v_cache, dtype, k_cache.shape),
        _pointer(pages_RP, torch.int32, (sequences, width)),
        _pointer(lengths_R, torch.int32, (sequences,)),
        _pointer(starts, torch.int32, (sequences + 1,)),
        *(sequences, width, heads, kv_heads, head_dim, page_size),
        q_THE.stride(0),
        torch.get_num_threads(),
    )
    return out_THE


@dataclass(frozen=True, slots=True)
class PackedWeight:
    """``factor * (code - zero)``, four bits a code."""

    codes_NB: Tensor  # uint8, two to a byte, the even column in the low bits
    factor_NG: Tensor  # fp32, for each group of columns
    zero_NG: Tensor | None  # fp32; None for e2m1, and if all zeros are 8
    e2m1: bool  # whether codes are e2m1 numbers; otherwise integers

    @property
    def columns(self) -> int:
        """K."""
        return 2 * self.codes_NB.shape[1]


def has_packed() -> bool:
    """Whether ``packed_product`` and ``packed_decode`` were compiled."""
    compiled = library()
    return compiled is not None and bool(compiled.has_packed())


def packed_product(x_TD: Tensor, weight: PackedWeight) -> Tensor:
    """``x W^T`` in fp32 -> [T, N]; needs ``has_packed``. Inputs are rounded to 16 bits of the largest of 128 or 64.

    Args:
        x_TD: fp32. K is a multiple of 128.
        weight: groups of 16, 32 or 64 columns, or of a multiple of 128.

    Raises:
        TypeError: an operand has another dtype, shape or layout.
    """
    out_TN = torch.empty(len(x_TD), len(weight.codes_NB))
    compiled = library()
    assert compiled is not None
    compiled.packed_product(
        out_TN.data_ptr(),
        _pointer(x_TD, torch.float32, (len(x_TD), weight.columns)),
        *_packed_weight(weight),
        len(x_TD),
        torch.get_num_threads(),
    )
    return out_TN


def packed_decode(weight: PackedWeight, first: int, last: int) -> Tensor:
    """Rows from ``first`` to ``last``, exactly, fp32 [rows, K]; groups have a multiple of 8 columns. As the product."""
    out_NK = torch.empty(last - first, weight.columns)
    compiled = library()
    assert compiled is not None
    compiled.packed_decode(out_NK.data_ptr(), *_packed_weight(weight), first, last, torch.get_num_threads())
    return out_NK


def _packed_weight(weight: PackedWeight) -> tuple[int | None, ...]:
    (rows, groups), columns = weight.factor_NG.shape, weight.columns
    return (
        _pointer(weight.codes_NB, torch.uint8, (rows, columns // 2)),
        _pointer(weight.factor_NG, torch.float32, (rows, groups)),
        None if weight.zero_NG is None else _pointer(weight.zero_NG, torch.float32, (rows, groups)),
        *(rows, columns, columns // groups, weight.e2m1),
    )


def rms_norm(x_TD: Tensor, weight_D: Tensor, epsilon: float) -> Tensor | None:
    """``x / sqrt(mean(x^2) + epsilon) * weight`` over the last dimension; None if no kernel fits.

    Raises:
        TypeError: ``weight`` has another dtype, shape or layout than ``x``'s last dimension.
    """
    compiled = library()
    width = x_TD.shape[-1]
    if compiled is None or x_TD.dtype not in SUFFIX or width % 16 or not x_TD.is_contiguous():
        return None
    out_TD = torch.empty_like(x_TD)
    getattr(compiled, f"rms_norm_{SUFFIX[x_TD.dtype]}")(
        out_TD.data_ptr(),
        x_TD.data_ptr(),
        _pointer(weight_D, x_TD.dtype, (width,)),
        x_TD.numel() // width,
        width,
        epsilon,
        torch.get_num_threads(),
    )
    return out_TD


def rotate_and_write(
    qkv_TN: Tensor,  # contiguous [T, (H + 2K) * E]
    cos_LE: Tensor,  # rotary tables of all positions, like ``sin_LE``, which carries the minus sign of the first half
    sin_LE: Tensor,  # see ``cos_LE``
    positions_T: Tensor,  # int32
    cache_slots_T: Tensor,  # int32 page * page_size + offset
    k_cache: Tensor,  # [pages, kv_heads, page_size, head_dim], like ``v_cache``
    v_cache: Tensor,  # values
    heads: int,  # H
) -> Tensor | None:
    """Rotate queries and keys, store keys and values -> queries [T, H, E]; None if no kernel fits.

    Raises:
        TypeError: an operand has another dtype, shape or layout.
    """
    compiled = library()
    pages, kv_heads, page_size, head_dim = k_cache.shape
    dtype, tokens = qkv_TN.dtype, len(qkv_TN)
    if compiled is None or dtype not in SUFFIX or head_dim % 32:
        return None
    q_THE = torch.empty(tokens, heads, head_dim, dtype=dtype)
    getattr(compiled, f"rotate_and_write_{SUFFIX[dtype]}")(
        q_THE.data_ptr(),
        _pointer(k_cache, dtype, (pages, kv_heads, page_size, head_dim)),
        _pointer(v_cache, dtype, k_cache.shape),
        _pointer(qkv_TN, dtype, (tokens, (heads + 2 * kv_heads) * head_dim)),
        _pointer(cos_LE, dtype, (len(cos_LE), head_dim)),
        _pointer(sin_LE, dtype, cos_LE.shape),
        _pointer(positions_T, torch.int32, (tokens,)),
        _pointer(cache_slots_T, torch.int32, (tokens,)),
        *(tokens, heads, kv_heads, head_dim, page_size),
        torch.get_num_threads(),
    )
    return q_THE
