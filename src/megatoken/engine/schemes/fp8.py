"""fp8: e4m3 weights and inputs, with one scale for a tensor or one for each row of a weight and each token's input."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from megatoken.engine.config import Fp8Scales, Precision
from megatoken.engine.schemes.linear_scheme import LinearScheme
from megatoken.engine.schemes.plain import BF16

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from megatoken.engine.ops.cuda_linear import Linear
    from megatoken.engine.schemes.fp8_weight import Fp8Weight
    from megatoken.engine.schemes.packed4 import Packed4


@dataclass(frozen=True)
class Fp8Scheme(LinearScheme):
    """One scale for a weight and, on a GPU, one for all inputs of a linear, fixed before the first request.

    The CPU scales the input of each token by itself.
    """

    precision: Precision = "fp8"
    activation_type: str = "bfloat16"
    activation_bytes: int = 2
    weight_bytes: float = 1
    quantised_format: str | None = "e4m3"
    fp8_scales: Fp8Scales | None = "tensor"
    fp8_cache: bool = True
    lowest_capability: tuple[int, int] | None = (8, 9)
    cpu_input_bytes: int = 16
    gpu_input_bytes: int = 8  # bf16, fp32 and e4m3
    spec_column: str | None = "fp8_dense_tflops"
    product_share: float = 0.952  # the step of llama2-70b
    sustained_share: float = 0.715
    watts_per_operation: float = 0.454e-12
    product_operations_per_second: float = 1.2e15

    @property
    def head(self) -> LinearScheme:
        """bf16."""
        return BF16

    def keep(self, stored: Callable[[], Fp8Weight | Packed4]) -> tuple[Fp8Weight, bool | None]:
        """e4m3 with its own scales; 4-bit weights expanded with a scale for each row."""
        from megatoken.engine.schemes.fp8_weight import Fp8Weight
        from megatoken.engine.schemes.packed4 import expand

        weight = stored()
        return (weight, None) if isinstance(weight, Fp8Weight) else expand(weight)

    def quantise(self, weight: Tensor) -> Fp8Weight:
        """One scale for the whole weight."""
        from megatoken.engine.schemes.fp8_weight import quantise_tensor

        return quantise_tensor(weight)

    def stack(self, parts: Sequence[Tensor | Fp8Weight]) -> Tensor | Fp8Weight:
        """Plain parts next to quantised ones are quantised; plain parts alone stay plain."""
        from megatoken.engine.schemes.fp8_weight import Fp8Weight, stack

        if any(isinstance(part, Fp8Weight) for part in parts):
            return stack([part if isinstance(part, Fp8Weight) else self.quantise(part) for part in parts])
        plain: Tensor = super().stack(parts)
        return plain

    def cuda_linear(self, weight: Fp8Weight, bias_N: Tensor | None) -> Linear:
        """With one scale."""
        from megatoken.engine.ops.cuda_fp8 import TensorScaledLinear

        return TensorScaledLinear.pack(weight, bias_N)

    def cuda_consumers(self, device: torch.device) -> list[Linear]:
        """Without an input scale, which is then measured, and with one."""
        return [self.cuda_linear(_zeros(device, input_scale), None) for input_scale in (None, 1.0)]


@dataclass(frozen=True)
class Fp8RowScheme(Fp8Scheme):
    """A scale for each output of a linear, and one for the input of each token, found as that input is computed."""

    fp8_scales: Fp8Scales | None = "row"
    output_scale_bytes: int = 4
    gpu_input_bytes: int = 0
    fused_all_reduce: bool = False

    def quantise(self, weight: Tensor) -> Fp8Weight:
        """A scale for each row."""
        from megatoken.engine.schemes.fp8_weight import Fp8Weight, quantise_rows

        return Fp8Weight(*quantise_rows(weight))

    def cuda_linear(self, weight: Fp8Weight, bias_N: Tensor | None) -> Linear:
        """With a scale for each row."""
        from megatoken.engine.ops.cuda_fp8 import RowScaledLinear

        return RowScaledLinear.pack(weight, bias_N)

    def cuda_consumers(self, device: torch.device) -> list[Linear]:
        """One form."""
        return [self.cuda_linear(_zeros(device), None)]


@dataclass(frozen=True)
class PackedFp8Scheme(Fp8Scheme):
    """Four-bit weights stay packed on a GPU: few tokens are multiplied by their codes, many by what they expand to."""

    weight_bytes: float = 0.5 + 1 / 16  # NVFP4's
    stays_packed: bool = True

    def formats(self) -> dict[str, str]:
        """Of the weights as they are stored."""
        return super().formats() | {"weights": "e2m1"}

    def keep(self, stored: Callable[[], Fp8Weight | Packed4]) -> tuple[Any, bool | None]:
        """A weight as the checkpoint stores it, and nothing to say of its expansion."""
        return stored(), None

    def stack(self, parts: Sequence[Tensor | Fp8Weight | Packed4]) -> Any:
        """Four-bit parts whose codes can be stacked stay packed, others are expanded."""
        from megatoken.engine.schemes import packed4

        packed = [part for part in parts if isinstance(part, packed4.Packed4)]
        if packed and len(packed) == len(parts) and (merged := packed4.stack(packed)) is not None:
            return merged
        return super().stack([packed4.expand(one)[0] if isinstance(one, packed4.Packed4) else one for one in parts])

    def cuda_linear(self, weight: Fp8Weight | Packed4, bias_N: Tensor | None) -> Linear:
        """Packed, or expanded where the kernels cannot multiply it."""
        from megatoken.engine.ops import packed_product
        from megatoken.engine.ops.cuda_fp8 import TensorScaledLinear
        from megatoken.engine.schemes.packed4 import Packed4, expand

        if isinstance(weight, Packed4):
            if packed_product.fits(weight):
                return TensorScaledLinear.keep_packed(weight, bias_N)
            weight, _ = expand(weight)
        return super().cuda_linear(weight, bias_N)


def _zeros(device: torch.device, input_scale: float | None = None) -> Fp8Weight:
    """The smallest weight that a GPU multiplies."""
    import torch

    from megatoken.engine.schemes.fp8_weight import Fp8Weight

    values_ND = torch.zeros(16, 16, dtype=torch.float8_e4m3fn, device=device)
    return Fp8Weight(values_ND, torch.ones(1, 1, device=device), input_scale)


FP8, FP8_ROWS, FP8_PACKED = Fp8Scheme(), Fp8RowScheme(), PackedFp8Scheme()
