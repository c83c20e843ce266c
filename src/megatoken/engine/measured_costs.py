"""Duration of one step on a machine whose parts were measured: a processor, or a GPU that the cost model knows.

``hardware/qualify`` measures the parts; ``analysis/qualified.py`` reads them from its document.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import NamedTuple

import numpy as np

from megatoken.engine.config import ModelConfig
from megatoken.engine.cost_model import CostModel, Costs, StepCost
from megatoken.engine.schemes import LinearScheme


class Window(NamedTuple):
    """Layers whose queries see at most so many keys."""

    keys: int
    layers_share: float  # of all layers


class ModelWork(NamedTuple):
    """What a model computes and moves, for bounds and utilisation."""

    token_operations: float  # of the layers' products, for each token of a step
    sample_operations: float  # of the head, for each token that is sampled
    pair_operations: float  # of attention, for each pair of a query and a key
    weights_bytes: float  # of the layers and the head, read in each step
    cached_token_bytes: float  # keys and values of one token
    windows: tuple[Window, ...] = ()

    @classmethod
    def of(cls, model: ModelConfig, scheme: LinearScheme, device: str) -> ModelWork:
        """The work of a model in a number format on "cpu" or "cuda"; of a mixture, the experts that a token uses."""
        head = float(model.hidden_size * model.vocabulary_size)
        windows = Counter(window for layer in range(model.layers) if (window := model.window(layer)) is not None)
        weight_bytes = scheme.weight_bytes if device == "cuda" else scheme.activation_bytes
        return cls(
            2.0 * model.active_linear_parameters,
            2.0 * head,
            4.0 * model.layers * model.heads * model.head_dim,
            model.linear_parameters * weight_bytes + head * scheme.activation_bytes,
            2.0 * model.layers * model.kv_heads * model.head_dim * scheme.cache_item_bytes(device),
            tuple(Window(keys, layers / model.layers) for keys, layers in sorted(windows.items())),
        )


def keys_seen(windows: Iterable[Window], keys: float, queries: float) -> float:
    """Of the ``keys`` before ``queries``, summed over these, those that are seen: the mean over all layers.

    Contexts shorter than a window next to longer ones make this too high, by at most the keys that these lack.
    """
    return keys - sum(share * max(0.0, keys - queries * window) for window, share in windows)


@dataclass(frozen=True, slots=True)
class ProcessorRates:
    """What a processor reaches in the engine's own kernels, in one number format."""

    # tokens in a product, and operations/s of the layers' products then, in the order of tokens
    products: Sequence[tuple[float, float]]
    decode_attention: float  # bytes/s of cached keys and values
    prompt_attention: float  # operations/s
    norm: float  # bytes/s of an RMS norm, read and written
    step_seconds: float = 0.0  # that a step takes beyond its kernels
    layer_seconds: float = 0.0  # that each layer takes beyond its kernels
    token_seconds: float = 0.0  # that each token of a step takes beyond its kernels


class ProcessorCosts(Costs):
    """Predicts steps of one model on a processor."""

    def __init__(self, model: ModelConfig, scheme: LinearScheme, rates: ProcessorRates) -> None:
        """Derive what is the same for all steps."""
        self.basis = "measured by megatoken qualify"
        self._work, self._rates, self._layers = ModelWork.of(model, scheme, "cpu"), rates, model.layers
        tokens, operations = zip(*rates.products, strict=True)
        self._log_tokens, self._log_rates = np.log(tokens), np.log(operations)
        self._norm_bytes = (2 * model.layers + 1) * 2.0 * model.hidden_size * scheme.activation_bytes

    def step_of(
        self, decodes: int, cached_tokens: float, chunks: Iterable[tuple[int, int]], samples: float
    ) -> StepCost:
        """The cost of a step, see ``Costs``."""
        work, rates = self._work, self._rates
        tokens, pairs = float(decodes), 0.0
        for start, count in chunks:
            tokens += count
            pairs += keys_seen(work.windows, count * (start + (count + 1) / 2), count)
        products = tokens * work.token_operations / self._product_rate(tokens)
        head = samples * work.sample_operations / self._product_rate(max(samples, 1.0))
        keys = keys_seen(work.windows, cached_tokens, decodes)
        decode_attention = keys * work.cached_token_bytes / rates.decode_attention
        chunk_attention = pairs * work.pair_operations / rates.prompt_attention
        elementwise = tokens * (self._norm_bytes / rates.norm + rates.token_seconds)
        gaps = self._layers * rates.layer_seconds
        parts = (products, decode_attention, chunk_attention, elementwise, head, gaps, 0.0, rates.step_seconds)
        return StepCost(math.fsum(parts), *parts, math.nan, math.nan)

    def _product_rate(self, tokens: float) -> float:
        """Operations/s of a product of so many tokens, between the measured ones on logarithmic axes."""
        return float(np.exp(np.interp(math.log(max(tokens, 1.0)), self._log_tokens, self._log_rates)))


@dataclass(frozen=True, slots=True)
class Factors:
    """Measured time over that of the cost model, by part of a step; None: not measured, and as in the cost model."""

    products: float | None = None
    weights: float | None = None
    decode_attention: float | None = None
    elementwise: float | None = None
    chunk_attention: float | None = None


class CorrectedCosts(Costs):
    """The cost model of a GPU, with each part as much slower or faster as this GPU was measured to be."""

    def __init__(self, model: CostModel, factors: Factors, few_tokens: float, many_tokens: float) -> None:
        """``weights`` holds for steps of ``few_tokens``, ``products`` from ``many_tokens`` on."""
        self._model, self.factors = model, factors
        self._applied = {name: 1.0 if factor is None else factor for name, factor in asdict(factors).items()}
        self._log_tokens = (math.log(few_tokens), math.log(many_tokens))
        self.basis = f"{model.basis}, corrected by megatoken qualify"

    def step_of(
        self, decodes: int, cached_tokens: float, chunks: Iterable[tuple[int, int]], samples: float
    ) -> StepCost:
        """The cost of a step, see ``Costs``."""
        chunks, factors = list(chunks), self._applied
        cost = self._model.step_of(decodes, cached_tokens, chunks, samples)
        log_tokens = math.log(max(decodes + sum(count for _, count in chunks), 1.0))
        products = float(np.interp(log_tokens, self._log_tokens, (factors["weights"], factors["products"])))
        parts = cost._replace(
            products=cost.products * products,
            head=cost.head * products,
            decode_attention=cost.decode_attention * factors["decode_attention"],
            chunk_attention=cost.chunk_attention * factors["chunk_attention"],
            elementwise=cost.elementwise * factors["elementwise"],
        )
        return parts._replace(seconds=cost.seconds + math.fsum(parts[1:9]) - math.fsum(cost[1:9]))
