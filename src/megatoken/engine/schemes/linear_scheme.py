"""What the engine must know of a number format of the layers' linears; torch is imported only to quantise or pack."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from megatoken.engine.config import Fp8Scales, Precision

if TYPE_CHECKING:  # memory planning and simulation run without PyTorch
    import torch
    from torch import Tensor

    from megatoken.engine.ops.cuda_linear import Linear
    from megatoken.engine.schemes.fp8_weight import Fp8Weight
    from megatoken.engine.schemes.packed4 import Packed4

_SHORT = {"float32": "fp32", "bfloat16": "bf16"}


@dataclass(frozen=True)
class LinearScheme:
    """A number format of weights and inputs of linears. Embedding, norms and head are in ``activation_type``.

    This class is the plain format, with weights like activations; a quantised one is a subclass in its own module.
    A weight is a tensor [N, D], or the scheme's own type once it is quantised.
    """

    precision: Precision  # name of the format
    activation_type: str  # PyTorch's name of the type of activations
    activation_bytes: int  # of one activation
    weight_bytes: float  # of one weight on a GPU, its part of a block's scale included
    quantised_format: str | None = None  # of weights and inputs of the linears; None: that of activations
    # the option that picks this scheme among those of its precision; None if there is one alone
    fp8_scales: Fp8Scales | None = None
    output_scale_bytes: int = 0  # of the scales of one output of a linear
    fp8_cache: bool = False  # keys and values are e4m3, which the CPU holds in ``activation_type``
    # CUDA compute capability that the GPU back end needs; None if that back end lacks the format
    lowest_capability: tuple[int, int] | None = None
    simulated_only: bool = False  # no back end has it
    stays_packed: bool = False  # four-bit weights are not expanded when they are loaded to a GPU
    cpu_input_bytes: int = 0  # of one input value, quantised and of the product before it is scaled, on the CPU
    gpu_input_bytes: int = 0  # of one input value on a GPU while its scale is being measured
    fused_all_reduce: bool = True  # ``ops.fused_all_reduce`` can quantise the inputs
    # of ``gpu_specs.csv``, with the rate of dense products; None if GPUs have no such products
    spec_column: str | None = None
    published_column: str | None = None  # with a published rate of large products
    # of the data sheet's rate, reached by products of endless depth at the highest clock of an H200
    product_share: float = math.nan
    sustained_share: float = math.nan  # the same at the clock that such products settle at
    sustained_basis: str = "an H200 reaches"  # which GPUs reach ``sustained_share``
    watts_per_operation: float = math.nan  # per operation/s at ``cost_model.FITTED_CLOCK_MHZ``
    product_operations_per_second: float = math.nan  # of one H200 (benchmarks/gemm.py)

    def formats(self) -> dict[str, str]:
        """Number formats of the weights of the layers' linears, the inputs of these linears, and the KV cache."""
        plain, quantised = _SHORT[self.activation_type], self.quantised_format
        return {
            "weights": quantised or plain,
            "activations": quantised or plain,
            "kv_cache": "e4m3" if self.fp8_cache else plain,
        }

    def cache_item_bytes(self, device: str) -> int:
        """Of one element of a key or value on a device, "cpu" or "cuda"."""
        return 1 if self.fp8_cache and device == "cuda" else self.activation_bytes

    @property
    def input_bytes(self) -> float:
        """Of one input of a linear on a GPU."""
        return 1 if self.stays_packed else self.weight_bytes

    @property
    def activation_dtype(self) -> torch.dtype:
        """``activation_type`` for PyTorch."""
        import torch

        dtype: torch.dtype = getattr(torch, self.activation_type)
        return dtype

    def cache_dtype(self, device: torch.device) -> torch.dtype:
        """How keys and values are stored."""
        import torch

        return torch.float8_e4m3fn if self.fp8_cache and device.type == "cuda" else self.activation_dtype

    @property
    def head(self) -> LinearScheme:
        """The plain scheme of the head."""
        return self

    def keep(self, stored: Callable[[], Fp8Weight | Packed4]) -> tuple[Any, bool | None] | None:
        """A weight in this format from one that a checkpoint stores quantised; None if it must be multiplied out.

        With it, whether all values of a 4-bit weight are still exact; None where there was nothing to round. ``stored``
        reads the weight, on the device of the result.
        """
        return None

    def quantise(self, weight: Tensor) -> Any:
        """A plain weight [N, D] in this format."""
        return weight

    def stack(self, parts: Sequence[Any]) -> Any:
        """Weights of linears with the same input as one weight, rows below each other. Plain parts stay plain."""
        import torch

        from megatoken.engine.schemes.packed4 import Packed4, stack

        packed = [part for part in parts if isinstance(part, Packed4)]
        if packed and len(packed) == len(parts) and (merged := stack(packed)) is not None:
            return merged
        plain = (part.decode(self.activation_dtype) if isinstance(part, Packed4) else part for part in parts)
        return torch.cat(list(plain))

    def cuda_linear(self, weight: Any, bias_N: Tensor | None) -> Linear:
        """The GPU back end's form of a weight in this format.

        Raises:
            CapacityError: its products cannot have these sides.
        """
        from megatoken.engine.ops.cuda_linear import Linear

        return Linear(weight, bias_N)

    def cuda_consumers(self, device: torch.device) -> list[Linear]:
        """A small linear for each form of input that a step computes, so that the kernels can be compiled ahead."""
        import torch

        return [self.cuda_linear(torch.zeros(16, 16, dtype=self.activation_dtype, device=device), None)]
