"""What the sources of quantised linears have in common: files of a checkpoint, random weights, a rank's part."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from megatoken.engine.schemes import LinearScheme

if TYPE_CHECKING:  # looking at a checkpoint needs no PyTorch
    import torch

    from megatoken.engine.schemes.fp8_weight import Fp8Weight
    from megatoken.engine.schemes.packed4 import Packed4


class QuantizedSource:
    """Linears that are stored quantised, with their scales: those whose weights are ``in`` it.

    Attributes:
        expanded: 4-bit weights that were read in fp8, and whether e4m3 held every value exactly.
    """

    def __init__(self) -> None:
        self.expanded: dict[str, bool] = {}

    def __contains__(self, name: object) -> bool:
        return False

    def stored(self, name: str, device: torch.device | None = None) -> Fp8Weight | Packed4:
        """One weight as stored; its large parts on ``device`` where they need no other order, the rest on the CPU.

        Raises:
            CheckpointError: it or a scale holds NaN or infinity, a scale is not positive, or the file changed.
        """
        raise KeyError(name)

    def read(self, name: str, scheme: LinearScheme, device: torch.device) -> Any | None:
        """One weight in the scheme's own format; None if it must be multiplied out for that, or is plain.

        Raises:
            CheckpointError: as ``stored``.
        """
        kept = scheme.keep(lambda: self.stored(name, device).to(device)) if name in self else None
        if kept is None:
            return None
        weight, exact = kept
        if exact is not None:
            self.expanded[name] = exact
        return weight

    def four_bit(self, name: str) -> Packed4 | None:
        """One four-bit weight as stored, on the CPU; None if it is none, or must be multiplied out."""
        return None

    def cache_scales(self, layer: int) -> tuple[float, float]:
        """Of a layer's fp8 keys and values."""
        return 1.0, 1.0
