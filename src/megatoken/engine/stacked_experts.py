"""Checkpoints of gpt-oss: one tensor for a projection of all experts of a layer, in MXFP4 or plain.

The engine knows each expert's gate, up and down projection by names of their own, as other families store them. Here
``gate_up_proj`` has the rows of both in turn, gate first. MXFP4 has ``X_blocks``, uint8 [experts, rows, columns / 32,
16], and ``X_scales``, uint8 [experts, rows, columns / 32] (``schemes.packed4``). Plain weights are transposed,
[experts, columns, rows]. Biases are plain, [experts, rows].
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, NamedTuple

from megatoken.engine.config import ModelConfig
from megatoken.engine.quantized_layouts import MXFP4_BLOCK, Expected
from megatoken.engine.quantized_source import QuantizedSource
from megatoken.engine.tensor_files import FETCH, StoredTensor, one_line_errors
from megatoken.errors import CheckpointError

if TYPE_CHECKING:  # looking at a checkpoint needs no PyTorch
    import torch
    from torch import Tensor

    from megatoken.engine.schemes.packed4 import Packed4

BYTES = ("U8",)
_BLOCKS, _SCALES = "_blocks", "_scales"
_LARGEST_SCALE = 252  # six times as much is finite


class _Place(NamedTuple):
    """Where weight and bias of an expert's projection are: every ``step``-th row of ``stored``, from ``first`` on."""

    stored: str
    expert: int
    first: int
    step: int


class StackedExperts(QuantizedSource):
    """The experts of such a checkpoint. If they are MXFP4, also a source of quantised linears.

    They have no four-bit form: each has few tokens, but many rows, so all are multiplied out.
    """

    def __init__(self, config: ModelConfig, tensors: Mapping[str, StoredTensor]) -> None:
        """``tensors``: all of the checkpoint, checked when they are read.

        Raises:
            CheckpointError: sides that MXFP4 cannot have, or that do not show which of them has the rows.
        """
        super().__init__()
        assert config.experts is not None
        self.packed = any(name.endswith(_BLOCKS) for name in tensors)  # the weights are MXFP4
        self.directory = next(iter(tensors.values())).path.parent  # of the files
        self._tensors = tensors
        self._places: dict[str, _Place] = {}
        self._sides: dict[str, tuple[int, int]] = {}
        mixture, hidden, width = config.experts, config.hidden_size, config.experts.intermediate_size
        self._count = mixture.count
        if self.packed and (hidden % MXFP4_BLOCK or width % MXFP4_BLOCK):
            raise CheckpointError(
                f"{config.name}: MXFP4 experts of {hidden} x {width}, which must be multiples of {MXFP4_BLOCK}; "
                "fix hidden_size and intermediate_size in config.json"
            )
        if not self.packed and hidden == 2 * width:
            raise CheckpointError(
                f"{config.name}: gate_up_proj of {hidden} x {2 * width} is square, so rows and columns "
                "cannot be distinguished; take the MXFP4 edition of the model"
            )
        for layer in mixture.layers:
            stem = f"model.layers.{layer}.{mixture.module}.experts."
            gate_up, down = f"{stem}gate_up_proj", f"{stem}down_proj"
            self._sides |= {gate_up: (2 * width, hidden), down: (hidden, width)}
            for expert in range(mixture.count):
                places = _Place(gate_up, expert, 0, 2), _Place(gate_up, expert, 1, 2), _Place(down, expert, 0, 1)
                self._places |= zip(mixture.names(layer, expert), places, strict=True)

    def expected(self) -> dict[str, Expected]:
        """The tensors that the files must have for the experts."""
        tensors = {}
        for name, (rows, columns) in self._sides.items():
            blocks = (self._count, rows, columns // MXFP4_BLOCK)
            if self.packed:
                tensors[f"{name}{_BLOCKS}"] = Expected(((*blocks, MXFP4_BLOCK // 2),), BYTES)
                tensors[f"{name}{_SCALES}"] = Expected((blocks,), BYTES)
            else:
                tensors[name] = Expected(((self._count, columns, rows),))
            tensors[f"{name}_bias"] = Expected(((self._count, rows),))
        return tensors

    def has(self, name: str) -> bool:
        """Whether ``name`` is the weight or bias of an expert."""
        return name.rpartition(".")[0] in self._places

    def __contains__(self, name: object) -> bool:
        """Whether ``name`` is the weight of an expert that is stored quantised."""
        return self.packed and isinstance(name, str) and name.endswith(".weight") and self.has(name)

    def stored(self, name: str, device: torch.device | None = None) -> Packed4:
        """One weight, on ``device`` or the CPU."""
        import torch

        from megatoken.engine.schemes.packed4 import Packed4

        place = self._places[name.rpartition(".")[0]]
        blocks, scales = (self._tensors[f"{place.stored}{end}"].item(place.expert) for end in (_BLOCKS, _SCALES))
        with one_line_errors(blocks.path):
            codes_NB = blocks.whole(device).flatten(1)[place.first :: place.step].contiguous()
            scales_NG = scales.whole(device)[place.first :: place.step].contiguous()
        if scales_NG.amax() > _LARGEST_SCALE:
            raise CheckpointError(f"{scales.path}: tensor {place.stored + _SCALES!r} holds NaN or infinity; {FETCH}")
        return Packed4(codes_NB, 2 * codes_NB.shape[1], "e2m1", scales_NG.view(torch.float8_e8m0fnu))

    def plain(self, name: str, dtype: torch.dtype, device: torch.device | None) -> Tensor:
        """One plain weight [rows, columns] or bias [rows] as a fresh tensor, as ``Checkpoint.read``."""
        part, kind = name.rsplit(".", 1)
        place = self._places[part]
        bias = kind == "bias"
        stored = self._tensors[place.stored + "_bias" * bias].item(place.expert)
        with one_line_errors(stored.path):
            whole = stored.whole()
        values = (whole if bias else whole.T)[place.first :: place.step].to(dtype)
        smallest, largest = values.aminmax()
        if not (math.isfinite(smallest.item()) and math.isfinite(largest.item())):
            raise CheckpointError(f"{stored.path}: tensor {place.stored!r} holds NaN or infinity as {dtype}; {FETCH}")
        return values.contiguous().to(device or "cpu")
