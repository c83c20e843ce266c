"""Checkpoints whose linears are e4m3, as written by ModelOpt and compressed-tensors.

Both store scales with each ``X.weight``: ``X.weight_scale``, which multiplies its values, and ``X.input_scale`` if the
scale of the input was measured. They differ in how they declare this, and in the names of the cache's scales.
"""

from __future__ import annotations

from collections.abc import Container, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from megatoken.engine.config import ModelConfig
from megatoken.engine.json_keys import Keys
from megatoken.engine.schemes.fp8 import FP8
from megatoken.engine.tensor_files import FETCH, StoredTensor, one_line_errors, read_json
from megatoken.errors import CheckpointError

if TYPE_CHECKING:  # looking at a checkpoint needs no PyTorch
    import torch
    from torch import Tensor

    from megatoken.engine.schemes.fp8_weight import Fp8Weight

SUPPORTED = (
    "supported are bf16, fp16 and fp32, and fp8 of ModelOpt and compressed-tensors with a scale for each tensor or "
    "row; take such an edition of the model"
)
PLAIN = ("BF16", "F16", "F32")

_MODELOPT_ALGORITHMS = {"FP8": (False, True), "FP8_PER_CHANNEL_PER_TOKEN": (True, False)}
"""Whether each row has a scale, whether inputs have scales."""
_MODELOPT_CACHE = ("k_proj.k_scale", "v_proj.v_scale")
_COMPRESSED_TENSORS_CACHE = ("k_scale", "v_scale")


@dataclass(frozen=True, slots=True)
class Expected:
    """The shapes and dtypes of a tensor that ``source`` allows."""

    shapes: tuple[tuple[int, ...], ...]
    dtypes: tuple[str, ...] = PLAIN
    source: str = "config.json"
    if_other_dtype: str = SUPPORTED


@dataclass(frozen=True, slots=True)
class Fp8Layout:
    """A checkpoint's declaration of its e4m3 linears.

    Attributes:
        source: the file with the declaration.
        row_scales: each row of a weight has its own scale; otherwise each weight has one.
        input_scales: each linear has a scale for its input.
        cache_scales: names of the scales of keys and of values in a layer's attention; None for an unscaled cache.
    """

    source: Path
    row_scales: bool
    input_scales: bool
    cache_scales: tuple[str, str] | None

    def expected(self, config: ModelConfig, present: Container[str]) -> dict[str, Expected]:
        """The linears and every scale; the cache's only if one is ``present``, since without any they are 1."""
        file = self.source.name
        mixed = f"{file} says e4m3, and leaving some linears of the layers unquantized is not supported; {SUPPORTED}"
        one = Expected(((), (1,)), source=file)
        expected = {}
        for name, (rows, columns) in config.linear_shapes.items():
            expected[name] = Expected(((rows, columns),), ("F8_E4M3",), if_other_dtype=mixed)
            expected[f"{name}_scale"] = Expected(((rows,), (rows, 1)), source=file) if self.row_scales else one
            if self.input_scales:
                expected[_input_scale(name)] = one
        cache = [name for layer in range(config.layers) for name in self.cache_names(layer)]
        return expected | dict.fromkeys(cache if any(name in present for name in cache) else (), one)

    def cache_names(self, layer: int) -> list[str]:
        """Tensors with the scales of a layer's keys and values."""
        return [f"model.layers.{layer}.self_attn.{name}" for name in self.cache_scales or ()]


class Fp8Tensors:
    """The e4m3 linears of a checkpoint. Their scales are read and checked immediately.

    Raises:
        CheckpointError: a scale is not positive and finite.
    """

    precision = FP8.precision

    def __init__(self, layout: Fp8Layout, config: ModelConfig, tensors: Mapping[str, StoredTensor]) -> None:
        weights = config.linear_shapes
        scales = layout.expected(config, tensors).keys() - weights.keys()
        self._weights = {name: tensors[name] for name in weights}
        self._scales = {name: _read_scale(name, tensors[name]) for name in sorted(scales)}
        self._cache_names = [layout.cache_names(layer) for layer in range(config.layers)]

    def __contains__(self, name: object) -> bool:
        return name in self._weights

    def read(self, name: str, device: torch.device) -> Fp8Weight:
        """One weight, as stored.

        Raises:
            CheckpointError: it holds NaN, or the file changed.
        """
        import torch

        from megatoken.engine.schemes.fp8_weight import Fp8Weight

        stored = self._weights[name]
        values_ND = torch.empty(stored.shape, dtype=torch.float8_e4m3fn)
        with one_line_errors(stored.path):
            for start, chunk in stored.chunks():
                if (chunk.view(torch.uint8) & 0x7F).amax() == 0x7F:
                    raise CheckpointError(f"{stored.path}: tensor {name!r} holds NaN; {FETCH}")
                values_ND[start : start + len(chunk)] = chunk
        input_scale = self._scales.get(_input_scale(name))
        return Fp8Weight(
            values_ND.to(device),
            self._scales[f"{name}_scale"].to(device),
            None if input_scale is None else input_scale.item(),
        )

    def scale(self, name: str) -> Tensor:
        """fp32 [N, 1], the factors of the rows of a weight [N, D]."""
        return self._scales[f"{name}_scale"].expand(self._weights[name].shape[0], 1)

    def cache_scales(self, layer: int) -> tuple[float, float]:
        """Scales of the layer's keys and values in an fp8 cache."""
        scales = [self._scales[name].item() for name in self._cache_names[layer] if name in self._scales]
        k_scale, v_scale = scales or (1.0, 1.0)
        return k_scale, v_scale


def declared_layout(directory: Path) -> Fp8Layout | None:
    """The layout in ``config.json`` and ModelOpt's ``hf_quant_config.json``; None if neither mentions quantization.

    Raises:
        CheckpointError: the format is not supported, or the files contradict each other.
    """
    layouts = []
    path = directory / "config.json"
    keys = Keys(read_json(path), path)
    if keys.get("quantization_config") is not None:
        section = keys.section("quantization_config")
        if section.get("quant_method") == "mxfp4":  # of experts alone, see stacked_experts
            return None
        layouts.append(_of_config(section, path))
    path = directory / "hf_quant_config.json"
    if path.is_file():
        keys = Keys(read_json(path), path)
        if keys.get("quantization") is None:
            raise CheckpointError(f"{path}: the object quantization, which describes the format, is missing; {FETCH}")
        layouts.append(_of_modelopt(keys.section("quantization"), path, "kv_cache_quant_algo"))
    if len({(layout.row_scales, layout.input_scales) for layout in layouts}) > 1:
        raise CheckpointError(f"{path}: contradicts quantization_config in config.json; remove the one that is wrong")
    # Some versions of ModelOpt mention the cache in one of their files only.
    return next((layout for layout in layouts if layout.cache_scales), layouts[0]) if layouts else None


def _of_config(keys: Keys, path: Path) -> Fp8Layout:
    match keys.get("quant_method"):
        case "modelopt":
            return _of_modelopt(keys, path, "kv_cache_scheme")
        case "compressed-tensors":
            return _of_compressed_tensors(keys, path)
    raise keys.refuse("quant_method", SUPPORTED)


def _of_modelopt(keys: Keys, path: Path, cache_key: str) -> Fp8Layout:
    algorithm = keys.get("quant_algo")
    if not isinstance(algorithm, str) or algorithm not in _MODELOPT_ALGORITHMS:
        raise keys.refuse("quant_algo", SUPPORTED)
    row_scales, input_scales = _MODELOPT_ALGORITHMS[algorithm]
    return Fp8Layout(path, row_scales, input_scales, _MODELOPT_CACHE if _has_cache_scales(keys, cache_key) else None)


def _of_compressed_tensors(keys: Keys, path: Path) -> Fp8Layout:
    if keys.get("format") != "float-quantized":
        raise keys.refuse("format", SUPPORTED)
    sparsity = keys.section("sparsity_config")
    if sparsity.get("format", "dense") != "dense":
        raise sparsity.refuse("format", f"sparse weights are not supported; {SUPPORTED}")
    if keys.get("transform_config") not in (None, {}, {"config_groups": {}}):
        raise keys.refuse("transform_config", f"transforms are not supported; {SUPPORTED}")
    groups = keys.get("config_groups")
    if not isinstance(groups, dict) or len(groups) != 1 or not all(name.isprintable() for name in groups):
        raise keys.refuse("config_groups", f"expected one group, for all linears; {SUPPORTED}")
    group = keys.section("config_groups").section(*groups)
    if group.get("output_activations") is not None:
        raise group.refuse("output_activations", f"outputs are not quantized; {SUPPORTED}")
    row_scales = _static_strategy(group.section("weights"), "tensor", "channel") == "channel"
    cache = _COMPRESSED_TENSORS_CACHE if _has_cache_scales(keys, "kv_cache_scheme") else None
    return Fp8Layout(path, row_scales, _has_input_scales(group), cache)


def _has_input_scales(group: Keys) -> bool:
    if group.get("input_activations") is None:  # weights alone were quantized
        return False
    inputs = group.section("input_activations")
    static = not inputs.boolean("dynamic")
    _e4m3_strategy(inputs, *(("tensor",) if static else ("tensor", "token")))
    return static


def _has_cache_scales(keys: Keys, key: str) -> bool:
    scheme = keys.get(key)
    if isinstance(scheme, dict):
        _static_strategy(keys.section(key), "tensor")
    elif scheme not in (None, "FP8"):
        raise keys.refuse(key, f"keys and values can be e4m3 with one scale for each layer; {SUPPORTED}")
    return scheme is not None


def _static_strategy(arguments: Keys, *supported: str) -> str:
    if arguments.boolean("dynamic"):
        raise arguments.refuse("dynamic", f"expected scales in the files; {SUPPORTED}")
    return _e4m3_strategy(arguments, *supported)


def _e4m3_strategy(arguments: Keys, *supported: str) -> str:
    """What shares one scale, from compressed-tensors' arguments of a quantization, which must be to e4m3."""
    if arguments.get("num_bits", 8) != 8:
        raise arguments.refuse("num_bits", SUPPORTED)
    if arguments.get("type") != "float":
        raise arguments.refuse("type", SUPPORTED)
    if arguments.get("symmetric", True) is not True:
        raise arguments.refuse("symmetric", SUPPORTED)
    strategy = arguments.get("strategy")
    if strategy is None and arguments.get("group_size") is None:
        strategy = "tensor"
    if not isinstance(strategy, str) or strategy not in supported:
        raise arguments.refuse("strategy", SUPPORTED)
    return strategy


def _input_scale(name: str) -> str:
    return f"{name.removesuffix('weight')}input_scale"


def _read_scale(name: str, stored: StoredTensor) -> Tensor:
    """fp32, one column."""
    import torch

    from megatoken.engine.schemes.fp8_weight import E4M3_MAX

    chunks = [chunk.to(torch.float32, copy=True) for _, chunk in stored.chunks()]
    scale_N1 = torch.cat(chunks).view(-1, 1)
    # Products with 448 and quotients of 1 must not overflow either.
    good_N1 = (scale_N1 >= torch.finfo(torch.float32).tiny) & (scale_N1 * E4M3_MAX).isfinite()
    if not good_N1.all():
        value = scale_N1[~good_N1][0].item()
        raise CheckpointError(f"{stored.path}: tensor {name!r} holds {value}; expected a positive scale; {FETCH}")
    return scale_N1
