"""The operations a model is made of, one module for each back end.

``cpu`` and ``cuda`` are modules with the functions of ``Ops``;
the model calls them by name and never asks whose they are. ``fused``, ``paged_attention``, ``prompt_attention``,
``fused_all_reduce`` and ``tokens`` are Triton kernels for ``cuda``; ``native`` calls compiled ones for ``cpu``.
``reference`` writes the operations out in plain torch: the definitions, and the oracle of the tests.

Shape letters: T rows in the step, S rows that sample, D hidden size, N output features, F feed-forward size, H query
heads, K key/value heads, G = H / K, E head dimension, V vocabulary, R sequences in the step, P pages, L positions.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

from torch import Tensor

from megatoken.engine.batch import StepArrays
from megatoken.engine.cache import LayerCache
from megatoken.engine.config import ModelConfig
from megatoken.engine.schemes import LinearScheme

if TYPE_CHECKING:
    from megatoken.engine.ops.fused_all_reduce import FusedAllReduce

NO_TOKEN = -1
"""The id of a row whose logits are no numbers."""


class Batch(Protocol):
    """One step on the device. A back end adds what its attention needs."""

    token_ids: Tensor
    samples: int
    sample_indices: Tensor
    sample_slots: Tensor  # integers [S]


class Ranks(Protocol):
    """The ranks that a model is cut over, as one of them calls the others: all call the same, in the same order."""

    @property
    def shared(self) -> FusedAllReduce | None:
        """Memory in which the ranks' GPUs add up; None where they have none: then each keeps all rows, and ``add``s."""

    def add(self, x: Tensor) -> Tensor:
        """The sum of ``x`` over all ranks, in place."""

    def all_columns(self, x_TN: Tensor) -> Tensor:
        """The columns of all ranks, each of which has N -> [T, N x ranks], in the order of the ranks."""


class Ops(Protocol):
    """What a back end provides.

    An activation on its way into a linear may be held in that linear's own number format, a tensor or not, which is why
    operations that make one are told its ``consumer``.
    """

    def kernels(self) -> dict[str, Any]:
        """What computes, for the record of a run.

        ``kernels`` is a description, ``why_no_kernels`` says why there are no compiled ones (None: there are), and
        ``bf16_widened`` is True where the processor has no instruction for products of bf16.
        """

    def padded_tokens(self, rows: int, weights_bytes: int) -> int:
        """Rows to run instead of ``rows``, where every new number of rows would cost the back end time and memory."""

    def prepare(self, arrays: StepArrays, last_tokens: Tensor, cache: LayerCache, config: ModelConfig) -> Any:
        """Bring one step to the device, with what ``attention`` needs for all layers.

        ``last_tokens``: int64 [slots], the newest token of each slot.
        """

    def pack_linear(self, weight: Any, bias_N: Tensor | None, scheme: LinearScheme) -> Any:
        """Bring ``y = x W^T + b`` into the form ``linear`` wants; the weight may be freed afterwards.

        A plain weight [N, D] is quantised if the scheme asks for it; one that is quantised already keeps its values and
        scales as far as the back end's products can use them.
        """

    def pack_gated(self, gate_up: list[tuple[Any, Tensor | None]], scheme: LinearScheme) -> Any:
        """Bring gate and up projection, each weight [F, D] and bias [F] or None, into the form ``gated`` wants."""

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
        memory, the residual and ``r`` have only this rank's rows; the norms come from all.
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

    def attention(self, q_THE: Tensor, cache: LayerCache, batch: Any, consumer: Any) -> Any:
        """Causal attention of every row over its sequence's cached keys -> [T, H * E]."""

    def sample_attention(self, q_SHE: Tensor, cache: LayerCache, batch: Any, consumer: Any) -> Any:
        """The same for the rows that sample alone, each the last of its sequence -> [S, H * E]."""

    def greedy(self, logits_SV: Tensor) -> Tensor:
        """Highest logit of each row, the lowest id among equals -> int64 [S].

        ``NO_TOKEN`` where the highest is infinite or a logit is NaN.
        """
