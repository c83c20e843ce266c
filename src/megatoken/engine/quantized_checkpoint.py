"""Checkpoints whose linears are quantized: one form of weight whatever program made them."""

from __future__ import annotations

from collections.abc import Container, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, cast

from megatoken.engine.config import ModelConfig
from megatoken.engine.quantization_declaration import Declaration, read_declaration
from megatoken.engine.quantized_layouts import Expected, Fp8Layout, Groups, read_scale
from megatoken.engine.quantized_source import QuantizedSource
from megatoken.engine.tensor_files import StoredTensor, one_line_errors

if TYPE_CHECKING:  # looking at a checkpoint needs no PyTorch
    import torch

    from megatoken.engine.schemes.fp8_weight import Fp8Weight
    from megatoken.engine.schemes.packed4 import Packed4


def declared(directory: Path, config: ModelConfig) -> Declaration | None:
    """What the files of a checkpoint say of the linears of its layers; None if nothing.

    Raises:
        CheckpointError: a format is not supported, or the files contradict each other.
    """
    return read_declaration(directory, (name.removesuffix(".weight") for name in config.linear_shapes))


def expected_tensors(declaration: Declaration, config: ModelConfig, present: Container[str]) -> dict[str, Expected]:
    """The tensors of the model, quantized linears as declared.

    Scales of the cache are expected only if one is ``present``, since without any they are 1.
    """
    expected = {name: Expected((shape,)) for name, shape in config.tensor_shapes().items()}
    for module, layout in declaration.layouts.items():
        rows, columns = expected.pop(f"{module}.weight").shapes[0]
        expected |= layout.expected(module, (rows, columns), present, declaration.source)
    cache = [name for layer in range(config.layers) for name in _cache_names(declaration, layer)]
    one = Expected(((), (1,)), source=declaration.source.name)
    return expected | dict.fromkeys(cache if any(name in present for name in cache) else (), one)


class QuantizedTensors(QuantizedSource):
    """The quantized linears of a checkpoint. Scales of tensors and rows are read and checked immediately.

    Attributes:
        directory: of the files.

    Raises:
        CheckpointError: a scale is not positive and finite.
    """

    def __init__(self, declaration: Declaration, config: ModelConfig, tensors: Mapping[str, StoredTensor]) -> None:
        super().__init__()
        self._layouts = declaration.layouts
        self.directory = declaration.source.parent
        self._shapes = config.linear_shapes
        self._tensors = tensors
        self._cache_scales = [
            tuple(read_scale(name, tensors).item() for name in _cache_names(declaration, layer) if name in tensors)
            for layer in range(config.layers)
        ]
        for module, layout in self._layouts.items():
            for name in layout.scales(module, tensors):
                read_scale(name, tensors)

    def __contains__(self, name: object) -> bool:
        return isinstance(name, str) and name.endswith(".weight") and name.removesuffix(".weight") in self._layouts

    def stored(self, name: str, device: torch.device | None = None) -> Fp8Weight | Packed4:
        """By the layout of its linear."""
        module = name.removesuffix(".weight")
        with one_line_errors(self.directory):
            return self._layouts[module].read(module, self._shape(name), self._tensors, device)

    def _shape(self, name: str) -> tuple[int, int]:
        rows, columns = self._shapes[name]
        return rows, columns

    def four_bit(self, name: str) -> Packed4 | None:
        """One four-bit weight as stored; None if it is none. Raises as ``stored``."""
        module = name.removesuffix(".weight")
        if name not in self or isinstance(self._layouts[module], Fp8Layout):
            return None
        return cast("Packed4", self.stored(name))

    def groups(self) -> dict[str, Groups]:
        """Of the four-bit weights that need neither an order of columns nor factors of the input, by name.

        Raises:
            CheckpointError: as ``stored``.
        """
        with one_line_errors(self.directory):
            found = {
                f"{module}.weight": layout.groups(module, self._shape(f"{module}.weight"), self._tensors)
                for module, layout in self._layouts.items()
            }
        return {name: groups for name, groups in found.items() if groups is not None}

    def cache_scales(self, layer: int) -> tuple[float, float]:
        """Scales of the layer's keys and values in an fp8 cache."""
        k_scale, v_scale = self._cache_scales[layer] or (1.0, 1.0)
        return k_scale, v_scale


def _cache_names(declaration: Declaration, layer: int) -> list[str]:
    return [f"model.layers.{layer}.self_attn.{name}" for name in declaration.cache_scales or ()]
