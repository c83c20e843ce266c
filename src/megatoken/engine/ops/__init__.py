"""The operations a model is made of, and the choice of who computes them.

``reference`` writes every operation out in plain torch: the definition, and the oracle of the tests. ``cpu`` computes
the same with packed weights and paged matrix products. Both are modules with the functions of ``Ops``; the model calls
them by name and never asks which it got.

Shape letters: T rows in the step, D hidden size, N output features, H query heads, K key/value heads, G = H / K,
E head dimension, B sequences, P pages, S page size.
"""

from __future__ import annotations

from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from megatoken.engine.cache import LayerCache
from megatoken.engine.config import Precision


class Ops(Protocol):
    """What a back end provides. Tensors are rows of activations unless a shape says otherwise."""

    def padded_rows(self, rows: int) -> int:
        """Rows to run instead of ``rows``, where every new number of rows would cost the back end time and memory."""

    def pack_linear(self, weight_ND: Tensor, bias_N: Tensor | None, precision: Precision) -> Any:
        """Bring ``y = x W^T + b`` into the form ``linear`` wants; the plain weight may be freed afterwards."""

    def linear(self, x_TD: Tensor, linear: Any) -> Tensor:
        """``x W^T + b`` -> [T, N]."""

    def linear_add(self, x_TD: Tensor, linear: Any, residual_TN: Tensor) -> Tensor:
        """``residual + x W^T + b`` -> [T, N]."""

    def gated(self, x_TD: Tensor, gate: Any, up: Any) -> Tensor:
        """``silu(gate(x)) * up(x)`` -> [T, N]."""

    def rms_norm(self, x_TD: Tensor, weight_D: Tensor, epsilon: float) -> Tensor:
        """``x / sqrt(mean(x^2) + epsilon) * weight`` over the last dimension."""

    def rotate(self, x_THE: Tensor, cos_TE: Tensor, sin_TE: Tensor) -> Tensor:
        """Rotary embedding in the half-split layout; ``sin_TE`` carries the minus sign of the first half."""

    def greedy(self, logits_SV: Tensor) -> Tensor:
        """Highest logit of each row, the lowest id among equals -> int64 [S]."""

    def attention_index(
        self, pages_BP: NDArray[np.int32], lengths_B: NDArray[np.int32], cache: LayerCache, heads: int
    ) -> Any:
        """Prepare ``decode_attention`` once per step for all layers.

        Args:
            pages_BP: int32 page ids of each sequence, in order; entries past its length are ignored.
            lengths_B: int32 keys that the query of each sequence sees.
            cache: any layer's cache, for its shape.
            heads: query heads.
        """

    def decode_attention(self, q_BHE: Tensor, cache: LayerCache, index: Any) -> Tensor:
        """One query a sequence against all its cached keys -> [B, H, E]."""

    def chunk_attention(self, q_THE: Tensor, k_CKE: Tensor, v_CKE: Tensor) -> Tensor:
        """Causal attention of a prompt chunk: the T queries are the last T of the C positions -> [T, H, E]."""
