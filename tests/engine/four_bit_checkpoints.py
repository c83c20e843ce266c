"""Four-bit checkpoints in every layout that is read, written and decoded from the formats' definitions alone.

Nothing here uses the decoder under test: values are computed in numpy from the meaning of their bits.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
from checkpoints import make_checkpoint
from numpy.typing import NDArray
from safetensors.torch import load_file, save_file
from torch import Tensor

Floats = NDArray[np.float32]
Tensors = dict[str, Tensor]
AWQ_COLUMNS = (0, 2, 4, 6, 1, 3, 5, 7)


def e2m1(codes: NDArray[np.uint8]) -> Floats:
    """A sign, two bits of exponent (bias 1) and one of mantissa."""
    sign, exponent, mantissa = codes >> 3 & 1, (codes >> 1 & 3).astype(float), (codes & 1).astype(float)
    magnitude = np.where(exponent == 0, mantissa / 2, 2 ** (exponent - 1) * (1 + mantissa / 2))
    return np.where(sign == 1, -magnitude, magnitude).astype(np.float32)


def e4m3(bits: NDArray[np.uint8]) -> Floats:
    """A sign, four bits of exponent (bias 7) and three of mantissa; 0x7f and 0xff are NaN."""
    sign, exponent, mantissa = bits >> 7, (bits >> 3 & 15).astype(float), (bits & 7).astype(float)
    magnitude = np.where(exponent == 0, mantissa / 8 * 2**-6, 2 ** (exponent - 7) * (1 + mantissa / 8))
    return np.where(sign == 1, -magnitude, magnitude).astype(np.float32)


def bytes_of(codes_NK: NDArray[np.uint8]) -> Tensor:
    """Two codes to a byte, the even column low."""
    return torch.from_numpy(codes_NK[:, ::2] | codes_NK[:, 1::2] << 4)


def words_of(codes: NDArray[np.uint8], side: int, order: tuple[int, ...] = tuple(range(8))) -> Tensor:
    """Eight codes along ``side`` to an int32, the ``order[i]``-th of them in bits 4i; padded with zeros."""
    codes = np.moveaxis(codes, side, -1).astype(np.uint64)
    codes = np.pad(codes, [(0, 0), (0, -codes.shape[1] % 8)])
    words = sum(codes[:, order[i] :: 8] << np.uint64(4 * i) for i in range(8))
    return torch.from_numpy(np.ascontiguousarray(np.moveaxis(words, -1, side)).astype(np.uint32).view(np.int32))


def as_e4m3(bits: NDArray[np.uint8]) -> Tensor:
    return torch.from_numpy(bits).view(torch.float8_e4m3fn)


def one(value: float) -> Tensor:
    return torch.tensor(value, dtype=torch.float32)


def nvfp4(
    codes: NDArray[np.uint8], scales: NDArray[np.uint8], second: float, *, divides: bool = False
) -> tuple[Tensors, Floats]:
    """ModelOpt's tensors, or those of compressed-tensors, whose second scale divides; and the values."""
    bs, gs = e4m3(scales), np.float32(second)
    factor = (bs / gs if divides else bs * gs).astype(np.float32)
    values = e2m1(codes) * np.repeat(factor, 16, axis=1)
    if divides:
        named = {"weight_packed": bytes_of(codes), "weight_global_scale": one(second).view(1)}
    else:
        named = {"weight": bytes_of(codes), "weight_scale_2": one(second)}
    return {**named, "weight_scale": as_e4m3(scales)}, values


def mxfp4(codes: NDArray[np.uint8], scales: NDArray[np.uint8], name: str = "weight") -> tuple[Tensors, Floats]:
    power = np.exp2(scales.astype(np.float64) - 127)
    values = (e2m1(codes).astype(np.float64) * np.repeat(power, 32, axis=1)).astype(np.float32)
    return {name: bytes_of(codes), "weight_scale": torch.from_numpy(scales)}, values


def int4_values(codes, scales, zeros, groups) -> Floats:
    """``(u - z) s`` with each column's own group."""
    centred = codes.astype(np.float32) - zeros.astype(np.float32)[:, groups]
    return centred * scales.astype(np.float32)[:, groups]


def modelopt_int4(codes: NDArray[np.uint8], scales: Floats, group: int) -> tuple[Tensors, Floats]:
    signed = (codes.astype(np.int16) - 8).astype(np.int8).view(np.uint8) & 15
    stored = torch.from_numpy(signed[::2] | signed[1::2] << 4)
    values = int4_values(codes, scales, np.full(scales.shape, 8), np.arange(codes.shape[1]) // group)
    return {"weight": stored, "weight_scale": torch.from_numpy(scales).half()}, values


def packed_int4(codes, scales, zeros, groups, *, symmetric: bool, order: bool) -> tuple[Tensors, Floats]:
    zeros = np.full(scales.shape, 8, dtype=np.uint8) if symmetric else zeros
    tensors = {
        "weight_packed": words_of(codes, 1),
        "weight_scale": torch.from_numpy(scales).half(),
        "weight_shape": torch.tensor(codes.shape),
    }
    if not symmetric:
        tensors["weight_zero_point"] = words_of(zeros, 0)
    if order:
        tensors["weight_g_idx"] = torch.from_numpy(groups.astype(np.int32))
    return tensors, int4_values(codes, scales, zeros, groups)


def awq(codes, scales, zeros, groups) -> tuple[Tensors, Floats]:
    tensors = {
        "qweight": words_of(codes.T, 1, AWQ_COLUMNS),
        "qzeros": words_of(zeros.T, 1, AWQ_COLUMNS),
        "scales": torch.from_numpy(scales.T.copy()).half(),
    }
    return tensors, int4_values(codes, scales, zeros, groups)


def gptq(codes, scales, zeros, groups, *, less: int, order: bool) -> tuple[Tensors, Floats]:
    """Zeros are stored ``less`` 1 in the first version."""
    tensors = {
        "qweight": words_of(codes.T, 0),
        "qzeros": words_of((zeros.T - less).astype(np.uint8), 1),
        "scales": torch.from_numpy(scales.T.copy()).half(),
    }
    if order:
        tensors["g_idx"] = torch.from_numpy(groups.astype(np.int32))
    return tensors, int4_values(codes, scales, zeros, groups)


def random_linear(kind: str, seed: int, rows: int, columns: int, group: int = 32) -> tuple[Tensors, Floats]:
    """One linear in the layout ``kind``, of values about as large as a trained model's: tensors by name, and values."""
    draw = np.random.default_rng(seed)
    codes = draw.integers(0, 16, (rows, columns), dtype=np.uint8)
    groups = np.arange(columns) // group
    if "order" in kind:
        draw.shuffle(groups)
    shape = (rows, groups.max() + 1)
    zeros = draw.integers(1, 16, shape, dtype=np.uint8)
    scales = (draw.uniform(0.5, 1.5, shape) / columns**0.5 / 5).astype(np.float16).astype(np.float32)
    blocks = draw.integers(0x48, 0x78, (rows, columns // 16), dtype=np.uint8)
    powers = draw.integers(120, 126, (rows, columns // 32), dtype=np.uint8)
    match kind.split()[0]:
        case "modelopt-nvfp4":
            tensors, values = nvfp4(codes, blocks, 0.000731)
            if "inputs" in kind:
                tensors["input_scale"] = one(0.0023)
            if "awq" in kind:
                pre = draw.uniform(0.5, 2, columns).astype(np.float16).astype(np.float32)
                tensors["pre_quant_scale"] = torch.from_numpy(pre).half()
                values = values * pre
            return tensors, values
        case "compressed-nvfp4":
            tensors, values = nvfp4(codes, blocks, 1413.0, divides=True)
            if "inputs" in kind:
                tensors["input_global_scale"] = one(311.0).view(1)
            return tensors, values
        case "modelopt-mxfp4":
            return mxfp4(codes, powers)
        case "compressed-mxfp4":
            return mxfp4(codes, powers, "weight_packed")
        case "modelopt-int4":
            return modelopt_int4(codes, scales, group)
        case "compressed-int4":
            return packed_int4(codes, scales, zeros, groups, symmetric="zeros" not in kind, order="order" in kind)
        case "awq":
            return awq(codes, scales, zeros, groups)
        case "gptq":
            return gptq(codes, scales, zeros, groups, less=1, order="order" in kind)
        case "gptq_v2":
            return gptq(codes, scales, zeros, groups, less=0, order="order" in kind)
    raise AssertionError(kind)


def modelopt(algorithm: str, **others: object) -> dict[str, dict[str, object]]:
    quantization = {"quant_algo": algorithm, "kv_cache_quant_algo": None, "exclude_modules": ["lm_head"], **others}
    return {"hf_quant_config.json": {"producer": {"name": "modelopt"}, "quantization": quantization}}


def compressed(form: str, weights: Mapping[str, object], **others: object) -> dict[str, dict[str, object]]:
    group = {"weights": {"num_bits": 4, "dynamic": False, **weights}, "input_activations": None, "targets": ["Linear"]}
    declared = {"quant_method": "compressed-tensors", "format": form, "config_groups": {"group_0": group}}
    return {"config.json": {"quantization_config": {**declared, "ignore": ["lm_head"], **others}}}


def in_config(method: str, **keys: object) -> dict[str, dict[str, object]]:
    return {"config.json": {"quantization_config": {"quant_method": method, "bits": 4, "group_size": 32, **keys}}}


INT4 = {"type": "int", "strategy": "group", "group_size": 32}
NVFP4 = compressed("nvfp4-pack-quantized", {"type": "float", "strategy": "tensor_group", "group_size": 16})
GPTQ = {"desc_act": False, "sym": False}
DECLARED: dict[str, dict[str, dict[str, object]]] = {
    "modelopt-nvfp4 inputs": modelopt("NVFP4", group_size=16),
    "modelopt-nvfp4 weights only": modelopt("W4A16_NVFP4"),
    "modelopt-nvfp4 awq inputs": modelopt("NVFP4_AWQ", group_size=16),
    "modelopt-mxfp4": modelopt("MXFP4", group_size=32),
    "modelopt-int4": modelopt("W4A16_AWQ", group_size=32),
    "compressed-nvfp4 inputs": NVFP4,
    "compressed-nvfp4 weights only": NVFP4,
    "compressed-mxfp4": compressed("mxfp4-pack-quantized", {"type": "float", "strategy": "group", "group_size": 32}),
    "compressed-int4": compressed("pack-quantized", {**INT4, "symmetric": True}),
    "compressed-int4 zeros": compressed("pack-quantized", {**INT4, "symmetric": False}),
    "compressed-int4 zeros order": compressed("pack-quantized", {**INT4, "symmetric": False, "actorder": "group"}),
    "awq": in_config("awq", zero_point=True, version="gemm"),
    "gptq": in_config("gptq", **GPTQ),
    "gptq order": in_config("gptq", **GPTQ | {"desc_act": True}),
    "gptq_v2 order": in_config("gptq", **GPTQ | {"desc_act": True, "checkpoint_format": "gptq_v2"}),
}


@dataclass(frozen=True)
class FourBit:
    """A checkpoint, the same one with its values written out in fp32, and those values."""

    directory: Path
    decoded: Path
    values: Mapping[str, Floats] = field(repr=False)


def make(
    folder: Path,
    kind: str,
    *,
    declared: Mapping[str, Mapping[str, object]] | None = None,
    kind_of: Callable[[str], str | None] = lambda name: "",
    **changes: object,
) -> FourBit:
    """A random model in a layout; ``kind_of`` names that of one linear ("" for ``kind``, None: plain)."""
    directory, decoded = folder / "quantized", folder / "decoded"
    shape = {"hidden_size": 64, "intermediate_size": 96, "head_dim": 16, **changes}
    make_checkpoint(directory, **shape)
    make_checkpoint(decoded, **shape)
    tensors = load_file(directory / "model.safetensors")
    plain, values = dict(tensors), {}
    for seed, name in enumerate(sorted(name for name in tensors if name.endswith("_proj.weight"))):
        module = name.removesuffix(".weight")
        own = kind_of(module)
        if own is None:
            continue
        stored, values[name] = random_linear(own or kind, seed, *tensors.pop(name).shape)
        tensors |= {f"{module}.{part}": tensor for part, tensor in stored.items()}
        plain[name] = torch.from_numpy(values[name])
    save_file(tensors, directory / "model.safetensors")
    save_file(plain, decoded / "model.safetensors")
    declare(directory, DECLARED[kind] if declared is None else declared)
    return FourBit(directory, decoded, values)


def declare(directory: Path, declared: Mapping[str, Mapping[str, object]]) -> None:
    for file, keys in declared.items():
        path = directory / file
        path.write_text(json.dumps((json.loads(path.read_text()) if path.is_file() else {}) | dict(keys)))
