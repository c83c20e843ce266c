"""The operations a model is made of, one module for each back end.

``cpu`` and ``cuda`` are modules with the functions of ``Ops``, so the model does not know on which device it runs.
``fused``, ``paged_attention``, ``prompt_attention``, ``grouped_product``, ``routing_kernels``, ``fused_all_reduce`` and
``tokens`` are Triton kernels for ``cuda``; ``native`` calls compiled ones for ``cpu``. ``reference`` defines the
operations in plain torch, for tests and where ``cpu`` has nothing faster, and ``routing`` how experts are chosen.

Shape letters: T tokens in the step, S tokens that sample, D hidden size, N output features, F feed-forward size, H
query heads, K key/value heads, G = H / K, E head dimension, V vocabulary, R sequences, P pages, L positions.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor

from megatoken.engine.batch import StepArrays
from megatoken.engine.cache import LayerCache
from megatoken.engine.config import ExpertsConfig, ModelConfig
from megatoken.engine.schemes import LinearScheme

if TYPE_CHECKING:
    from megatoken.engine.ops.fused_all_reduce import FusedAllReduce

NO_TOKEN = -1
"""The id sampled from logits that are not finite."""
NOTHING_LEFT = -2
"""The id sampled where a request's options leave no token to choose."""


Draw = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
"""Logits [S, V], rows [R], temperatures [R], numbers in [0, 1) [R] -> ids [R], see ``tokens.draw_rows``."""


class Batch(Protocol):
    """One step on the device. A back end adds the indices of its attention.

    ``windowed``: the step as layers with windows see it, if they have pages of their own.
    """

    @property
    def windowed(self) -> Batch | None:
        """See above."""

    token_ids: Tensor
    samples: int
    sample_indices: Tensor
    sample_slots: Tensor  # integers [S]


class Ranks(Protocol):
    """The ranks that share a model, seen by one of them. All make the same calls in the same order."""

    @property
    def shared(self) -> FusedAllReduce | None:
        """Sums in memory that the GPUs share; None without it: then each rank keeps all tokens and calls ``add``."""

    def add(self, x: Tensor) -> Tensor:
        """The sum of ``x`` over all ranks, in place."""

    def all_columns(self, x_TN: Tensor) -> Tensor:
        """The columns of all ranks, N from each -> [T, N x ranks], in the order of the ranks."""


class Ops(Protocol):
    """The functions of a back end.

    The input of a linear may be in that linear's own number format, a tensor or not, so an operation that makes one
    gets the linear as its ``consumer``.
    """

    def kernels(self) -> dict[str, Any]:
        """The libraries that compute, for the record of a run.

        ``kernels`` is a description, ``why_no_kernels`` the reason why there are no compiled ones (None: there are),
        ``bf16_widened`` whether the processor lacks an instruction for products of bf16.
        """

    def padded_tokens(self, tokens: int, weights_bytes: int) -> int:
        """Tokens to run instead of ``tokens``, where every new number would cost the back end time and memory."""

    def prepare(self, arrays: StepArrays, last_tokens: Tensor) -> Any:
        """Bring one step to the device, with the indices that ``attention`` needs in all layers.

        ``last_tokens``: int64 [slots], the newest token of each slot.
        """

    def keeps_packed(self, dtype: torch.dtype) -> bool:
        """Whether ``pack_linear`` multiplies four-bit weights by inputs of ``dtype`` without expanding them."""

    def pack_linear(self, weight: Any, bias_N: Tensor | None, scheme: LinearScheme) -> Any:
        """Bring ``y = x W^T + b`` into the form ``linear`` wants; the weight may be freed afterwards.

        A plain weight [N, D] is quantised if the scheme asks for it; one that is quantised already keeps its values and
        scales as far as the back end's products can use them.
        """

    def pack_gated(self, gate_up: list[tuple[Any, Tensor | None]], scheme: LinearScheme) -> Any:
        """Bring gate and up projection, each weight [F, D] and bias [F] or None, into the form ``gated`` wants."""

    def pack_experts(
        self,
        router: tuple[Tensor, Tensor | None],
        experts: Iterable[list[tuple[Any, Tensor | None]]],
        config: ExpertsConfig,
        scheme: LinearScheme,
    ) -> Any:
        """Bring a mixture into the form ``linear_add_norm`` wants. A linear is a weight and its bias or None.

        ``router``: scores the X experts, plain, [X, D]. ``experts``: gate and up projection [F, D] and down projection
        [D, F] of each in turn, read when they are asked for, plain or quantised as for ``pack_linear``.
        """

    def rms_norm(self, x_TD: Tensor, weight_D: Tensor, epsilon: float, consumer: Any) -> Any:
        """``x / sqrt(mean(x^2) + epsilon) * weight`` over the last dimension."""

    def linear(self, x_TD: Any, linear: Any) -> Tensor:
        """``x W^T + b`` -> [T, N]."""

    def linear_add_norm(
        self,
        x_TD: Any,
        linear: Any,
        residual_TN: Tensor,
        weight_N: Tensor,
        epsilon: float,
        consumer: Any,
        ranks: Ranks | None = None,
    ) -> tuple[Tensor, Any]:
        """``r = residual + x W^T + b`` -> (r, rms_norm(r)), both [T, N]; ``residual`` may be overwritten.

        With ``ranks``, which have parts of ``x`` and ``W``, the product is summed over them. If they have shared
        memory, the residual and ``r`` have only this rank's tokens, the norms those of all ranks. A mixture of experts
        is a linear whose product is ``reference.experts``.
        """

    def gated(self, x_TD: Any, gate_up: Any, consumer: Any) -> Any:
        """``silu(gate(x)) * up(x)`` -> [T, F]."""

    def rotate_and_write(
        self,
        qkv_TN: Tensor,
        norms: tuple[Tensor, Tensor] | None,
        tables_LE: tuple[Tensor, Tensor],
        cache: LayerCache,
        batch: Any,
        config: ModelConfig,
    ) -> Tensor:
        """Rotate queries and keys (Qwen3: after normalising each head), store keys and values -> queries [T, H, E].

        ``tables_LE``: cosine and sine in the half-split layout, the sine with the minus sign of the first half.
        """

    def attention(self, q_THE: Tensor, cache: LayerCache, batch: Any, consumer: Any, sinks_H: Tensor | None) -> Any:
        """Causal attention of every token over its sequence's cached keys, those in its window -> [T, H * E].

        ``sinks_H``: fp32, of each head the logit of one more key, whose value is 0.
        """

    def sample_attention(
        self, q_SHE: Tensor, cache: LayerCache, batch: Any, consumer: Any, sinks_H: Tensor | None
    ) -> Any:
        """The same for the tokens that sample, each the last of its sequence -> [S, H * E]."""

    @property
    def draw(self) -> Draw | None:
        """A faster way to draw from all tokens than ``sampling`` has."""

    def greedy(self, logits_SV: Tensor) -> Tensor:
        """Id of the highest logit of each row, the lowest among equals -> int64 [S].

        ``NO_TOKEN`` if the highest is infinite or a logit is NaN.
        """
