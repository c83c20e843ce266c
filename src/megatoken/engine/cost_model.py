"""Duration of one step on a GPU that need not be present: its data sheet, times the share that a measured GPU reaches.

Everything but transfers was measured on H200 with this engine: its products, its attention and the parts of its steps
(``h200-gemm.json``, ``h200-attention.json`` and ``h200-*-steps*.json`` in ``benchmarks/results``).
``benchmarks/fit_cost_model.py`` fits the constants to these files again and reports the residuals.
``docs/simulation.md`` compares the model with whole runs that were not used to fit it.

A step's time is the sum of its parts:

- products of the layers: operations at a share of the data sheet that falls with the clock, but at least the time to
  read the weights; of experts, the weights of those that the tokens choose, if all are equally likely, and operations
  at the rate of dense products, which is an upper bound;
- attention: for decodes the bytes of cached keys and values, for prompts operations; in layers with a window those of
  the keys in it;
- elementwise work, and the expansion of packed weights in steps of many tokens: bytes;
- the head, for tokens that sample; gaps between launches; sums and gathers over the ranks of tensor parallelism.

Power limits a Hopper GPU under such load: its clock is the highest at which the step's operations and bytes stay within
the limit. No such law is known for other GPUs; their products take the share of the data sheet that an H200 reaches at
the clock it settles at or, if the rate of large products is published, that rate.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Iterable
from typing import NamedTuple

from megatoken.engine.config import PACKED_TOKENS, ModelConfig, sharded
from megatoken.engine.gpus import Gpu
from megatoken.engine.memory import (
    GATHERED_HEAD_SIZES,
    gathers_contexts,
    most_recorded_tokens,
    records_step,
    screens_head,
)
from megatoken.engine.schemes import BF16, LinearScheme
from megatoken.engine.step_plan import StepPlan
from megatoken.errors import ConfigError

CLOCK_LIMITED = ("H100", "H200")
"""GPUs whose clock is computed. An H100 is an H200 with other memory, but was not measured."""
HIGHEST_CLOCK_MHZ = 1980.0

DEPTH_OVERHEAD = 607.0
"""Elements: a product over depth K takes as long as one over K plus this at full rate. Fitted to bursts of products of
depth 8,192 and 28,672."""
WEIGHTS_SHARE, WEIGHTS_EXPONENT = 0.83, 3.25
"""Share of the bandwidth of products that only read their weights; and p in (a^p + b^p)^(1/p), which combines that time
and the time of operations. Fitted to bursts at 64, 256 and 512 tokens."""
DECODE_SHARE, DECODE_TAIL_SECONDS = 0.716, 17.1e-6
"""Share of the bandwidth of decode attention; and its constant time in a layer at the highest clock. From two steps of
2026-11-22, whose programs had four warps, as those of few sequences still do."""
MANY_SHARE, MANY_TAIL_SECONDS, MANY_PROGRAMS = 0.926, 23.1e-6, 3072
"""The same from so many sequences x key heads on, which have programs of one warp. From two steps of 2026-11-28."""
CHUNK_SHARE, CHUNK_TILE = 0.226, 128
"""Share of bf16 operations at the highest clock of prompt attention, which computes whole tiles of this many tokens."""
GATHERED_SHARE, GATHERED_SECONDS = 0.527, 14.8e-6
"""The same if contexts are gathered first, and the constant time in a layer, at the highest clock; up to a quarter off
the work it was fitted to. Steps recorded as CUDA graphs gather nothing."""
HOPPER = ("H100", "H200")
"""GPUs on which the engine gathers contexts, and computes gate, up and activation as one kernel, if in fp8 with one
scale."""
FUSED_TOKENS = 512
"""Fewest tokens of a step with that kernel. Its activation costs the products no time: seen in steps."""
ELEMENTWISE_SHARE = 0.848
"""Share of the bandwidth of norms, rotation and cache writes, and what else only moves bytes. From two steps."""
GAP_SECONDS = 27.3e-6
"""Gaps between the kernels of a layer, and copies of ids; waits for the host are left out. From four steps."""
SUM_SECONDS, SUM_SECONDS_OF_RANK, SUM_LINK_SHARE = 4e-6, 1.25e-6, 0.71
"""A sum over ranks with the norm after it, through shared memory: its least time, what each rank adds to that, and its
share of the link. By hand, from two and four H200 and 256 tokens on (``h200x*-collectives-*.json``); assumed for
schemes without the fused all-reduce, which NCCL sums."""
WIDE_SUM_ELEMENTS, WIDE_SUM_LINK_SHARE = 32_768, 0.57
"""The share where all ranks' parts of a token are more elements than that: measured of four ranks, 16,384 wide,
and assumed of all else that is as wide."""
GATHER_SECONDS, GATHER_LINK_SHARE = 19e-6, 0.787
"""The same for gathers by NCCL, from its sums of 16 KB and 1 GB over four H200, which move twice as many bytes."""

IDLE_WATTS = 100.0
"""Assumed: an H200 that computes nothing at a high clock. Between 80 and 150 no rate changes by more than 0.3 %."""
FITTED_CLOCK_MHZ = 1500.0
WATTS_PER_BYTE = 93.5e-12
"""Watts per byte/s read or written. Fitted, with each scheme's watts per operation/s, to sustained products and two
steps; those of operations grow with the square of the clock."""
LIMIT_SHARE = 0.989
"""Of the power limit, that a run draws on average."""

PUBLISHED_DEPTH = 16_384

SECONDS_PER_SEQUENCE = {"megatoken": 0.0, "published": 12.7e-6}
"""Time that serving software adds to a step for each sequence; none was seen of this engine. "published" is fitted to
the verified fp4 result of GB200 (MLPerf v5.1 5.1-0008, 52,061.6 tokens/s of four), which the model overestimates by
20 % without it; the H200 of 5.1-0026 would need about 19 us, a B200 (5.1-0061) 7 us."""


class StepCost(NamedTuple):
    """Seconds of a step and of its parts. Clock and power are NaN where no law for them is known.

    ``transfers``: sums and gathers over ranks, with the norms fused into sums.
    """

    seconds: float
    products: float
    decode_attention: float
    chunk_attention: float
    elementwise: float
    head: float
    gaps: float
    transfers: float
    stack: float
    clock_mhz: float
    watts: float


class Costs(ABC):
    """What a simulated engine needs to know of its hardware.

    Attributes:
        basis: source of the rate of products, in a few words.
    """

    basis: str

    def step(self, plan: StepPlan) -> StepCost:
        """The cost of a planned step."""
        return self.step_of(*plan.work())

    @abstractmethod
    def step_of(
        self, decodes: int, cached_tokens: float, chunks: Iterable[tuple[int, int]], samples: float
    ) -> StepCost:
        """The cost of a step.

        Args:
            decodes: sequences that decode one token each.
            cached_tokens: keys that they see, summed.
            chunks: first position and length of each prompt chunk.
            samples: tokens that are sampled.
        """


class CostModel(Costs):
    """Predicts the duration of steps of one model on one kind of GPU."""

    def __init__(
        self,
        model: ModelConfig,
        scheme: LinearScheme,
        gpu: Gpu,
        *,
        ranks: int = 1,
        seconds_per_sequence: float = 0.0,
        cuda_graphs: bool = True,
    ) -> None:
        """Derive everything that is the same for all steps.

        ``model``: the whole model, even if ``ranks`` share each layer. ``scheme``: of the layers' linears.
        ``seconds_per_sequence``: time that the serving software adds to a step for each sequence. ``cuda_graphs``:
        whether the engine records short steps.

        Raises:
            ConfigError: the GPU has no such products, or its link to other ranks is unknown.
            CapacityError: ``ranks`` cannot share the model.
        """
        if not {scheme.precision, BF16.precision} <= gpu.operations_per_second.keys():
            known = ", ".join(gpu.operations_per_second)
            raise ConfigError(f"{gpu.name} is not known to multiply in {scheme.precision}; take one of {known}")
        if ranks > 1 and gpu.link_bytes_per_second is None:
            raise ConfigError(f"the link between GPUs is not known of {gpu.name}, so it cannot be simulated on {ranks}")
        m = sharded(model, ranks)
        self._layers, self._seconds_per_sequence = model.layers, seconds_per_sequence
        D, F, V, L = m.hidden_size, m.intermediate_size, m.vocabulary_size, m.layers
        queries, keys = m.heads * m.head_dim, m.kv_heads * m.head_dim
        item, cache_item = scheme.input_bytes, scheme.cache_item_bytes("cuda")
        # In the last layer, only tokens that sample go through the products after qkv.
        experts = m.experts
        sparse_layers, last_sparse, choices, expert_width = 0, 0, 0, 0
        self._experts_bytes, self._idle_share = 0.0, 1.0
        if experts is not None:
            sparse_layers, last_sparse = len(experts.layers), int(L - 1 in experts.layers)
            choices, expert_width = experts.active, experts.intermediate_size
            self._experts_bytes = sparse_layers * experts.count * m.expert_parameters * item
            self._idle_share = 1 - choices / experts.count
        fuses = gpu.name in HOPPER and scheme.fp8_scales == "tensor" and not m.mlp_bias
        self._fused_tokens = FUSED_TOKENS if fuses else math.inf
        gated_bytes = item / 2 if fuses else 2.0  # of a gate or an up; one kernel writes the activation instead

        def feed_forward(dense_layers: int, sparse_layers: int) -> list[_Linear]:
            dense = [_Linear(D, 2 * F, dense_layers, gated_bytes), _Linear(F, D, dense_layers)]
            sparse = [(D, 2 * expert_width), (expert_width, D)]
            return dense + [_Linear(depth, width, sparse_layers * choices) for depth, width in sparse]

        last_dense, dense_layers = 1 - last_sparse, L - sparse_layers
        in_every_token = [
            _Linear(D, queries + 2 * keys, L),
            _Linear(queries, D, L - 1),
            *feed_forward(dense_layers - last_dense, sparse_layers - last_sparse),
        ]
        in_samples = [_Linear(queries, D, 1), *feed_forward(last_dense, last_sparse)]
        rate, head_rate, self.basis = _product_rates(gpu, scheme)
        self._token, self._sample = _Products(in_every_token, rate, item), _Products(in_samples, rate, item)
        self._weights_bytes = m.linear_parameters * scheme.weight_bytes
        # Of packed weights, once they are expanded to the format of the inputs.
        self._expanded_bytes = m.linear_parameters * item if scheme.stays_packed else 0.0
        self._weights_rate = WEIGHTS_SHARE * gpu.memory_bytes_per_second

        bandwidth = gpu.memory_bytes_per_second
        windows = Counter(m.window(layer) for layer in range(L))
        full_layers = windows.pop(None, 0)
        self._cached_token_bytes = 2.0 * full_layers * keys * cache_item
        self._windows = [
            _Window(window, 2.0 * count * keys * cache_item, 4.0 * count * queries)
            for window, count in windows.items()
            if window is not None
        ]
        self._decode_bytes = L * queries * (2.0 + item)
        self._few_decodes = DECODE_SHARE * bandwidth, L * DECODE_TAIL_SECONDS
        self._many_decodes = MANY_SHARE * bandwidth, L * MANY_TAIL_SECONDS
        self._many_sequences = MANY_PROGRAMS / m.kv_heads
        self._pair_operations = 4.0 * full_layers * queries
        self._group = m.heads // m.kv_heads
        self._gathers = gpu.name in HOPPER and m.head_dim in GATHERED_HEAD_SIZES
        self._most_recorded_tokens = most_recorded_tokens(m, scheme) if cuda_graphs else 0.0
        self._chunk_rate, self._gathered_rate = (
            share * gpu.operations_per_second[BF16.precision] for share in (CHUNK_SHARE, GATHERED_SHARE)
        )
        # With several ranks the norms are fused into the sums.
        norms = 2 * L * D * (6 + item) if ranks == 1 else 0
        # Of a choice also its output, written and read; of a token its input once more.
        expert_activation = choices * (expert_width * (4 + item) + 4.0 * D) + D * (2 + item)
        rotation = L * (2.0 * (queries + 2 * keys) + 2 * queries + 2 * keys * cache_item)
        self._token_bytes, self._sample_bytes = float(norms + rotation), 8.0 * D
        self._token_activation_bytes = (dense_layers - last_dense) * F * (4.0 + item)
        self._sample_activation_bytes = last_dense * F * (4.0 + item)
        if experts is not None:
            self._token_bytes += (sparse_layers - last_sparse) * expert_activation
            self._sample_bytes += last_sparse * expert_activation
        self._elementwise_rate = ELEMENTWISE_SHARE * bandwidth
        head_width = V // m.vocabulary_ranks

        def head(scheme: LinearScheme, rate: float, read_bytes: float) -> _Head:
            weights_bytes = BF16.weight_bytes * float(D * head_width) * scheme.input_bytes / BF16.input_bytes
            return _Head(
                2.0 * D * head_width,
                2.0 * (D + DEPTH_OVERHEAD) * head_width / rate,
                weights_bytes,
                weights_bytes / (WEIGHTS_SHARE * bandwidth),
                scheme.watts_per_operation,
                read_bytes,
            )

        self._head, self._screen = head(BF16, head_rate, 0.0), None
        if screens_head(m, scheme, "cuda", ranks):  # steps are taken as greedy
            self._screen = head(scheme, rate, 2.0 * head_width)
        self._transfer_seconds, self._token_transfer_seconds, self._sample_transfer_seconds = 0.0, 0.0, 0.0
        if ranks > 1 and gpu.link_bytes_per_second is not None:
            link, from_others = gpu.link_bytes_per_second, (ranks - 1) / ranks
            products_and_inputs = from_others * (scheme.activation_bytes + item) * D
            self._transfer_seconds = 2 * L * (SUM_SECONDS + ranks * SUM_SECONDS_OF_RANK)
            share = WIDE_SUM_LINK_SHARE if ranks * D > WIDE_SUM_ELEMENTS else SUM_LINK_SHARE
            sum_seconds = products_and_inputs / (share * link)
            # In the last layer only tokens that sample are summed.
            self._token_transfer_seconds, self._sample_transfer_seconds = (2 * L - 2) * sum_seconds, 2 * sum_seconds
            if m.vocabulary_ranks > 1:
                element_seconds = from_others * scheme.activation_bytes / (GATHER_LINK_SHARE * link)
                self._transfer_seconds += 2 * GATHER_SECONDS
                self._token_transfer_seconds += D * element_seconds
                self._sample_transfer_seconds += V * element_seconds
                # Gathered columns are read and written once more, to reorder them.
                self._token_bytes += 2 * scheme.activation_bytes * D
                self._sample_bytes += 2 * scheme.activation_bytes * V
        self._limit_watts = LIMIT_SHARE * gpu.power_limit_watts if gpu.name in CLOCK_LIMITED else None
        self._watts_per_operation = scheme.watts_per_operation

    def step_of(
        self, decodes: int, cached_tokens: float, chunks: Iterable[tuple[int, int]], samples: float
    ) -> StepCost:
        """The cost of a step, see ``Costs``."""
        tokens, chunk_operations, sequences = float(decodes), 0.0, decodes
        longest_chunk = longest_context = 0
        for start, count in chunks:
            tiles = -(-count // CHUNK_TILE)
            tokens += count
            sequences += 1
            keys = start + CHUNK_TILE * (tiles + 1) / 2  # of each token on average
            of_token = keys * self._pair_operations
            of_token += sum(min(keys, one.keys + CHUNK_TILE) * one.pair_operations for one in self._windows)
            chunk_operations += CHUNK_TILE * tiles * of_token
            longest_chunk, longest_context = max(longest_chunk, count), max(longest_context, start + count)
        operations = tokens * self._token.operations + samples * self._sample.operations
        product_seconds = tokens * self._token.seconds + samples * self._sample.seconds
        decode_bytes = cached_tokens * self._cached_token_bytes + decodes * self._decode_bytes
        decode_bytes += sum(min(cached_tokens, decodes * one.keys) * one.key_bytes for one in self._windows)
        decode_rate, tail_seconds = self._many_decodes if decodes >= self._many_sequences else self._few_decodes
        decode_seconds = decode_bytes / decode_rate
        tail_seconds = tail_seconds if decodes else 0.0
        prompts = sequences - decodes
        recorded = records_step(prompts, tokens, self._most_recorded_tokens)
        if self._gathers and not recorded and gathers_contexts(self._group, prompts, longest_chunk, longest_context):
            chunk_seconds = chunk_operations / self._gathered_rate + self._layers * GATHERED_SECONDS
        else:
            chunk_seconds = chunk_operations / self._chunk_rate
        elementwise_bytes = tokens * self._token_bytes + samples * self._sample_bytes
        activation_bytes = tokens * self._token_activation_bytes + samples * self._sample_activation_bytes
        if tokens < self._fused_tokens:
            elementwise_bytes += activation_bytes
        weights_bytes = self._weights_bytes - self._experts_bytes * math.pow(self._idle_share, tokens)
        if self._expanded_bytes and tokens > PACKED_TOKENS:
            elementwise_bytes += weights_bytes + self._expanded_bytes
            weights_bytes = self._expanded_bytes
        head = self._screen if self._screen is not None and not recorded else self._head
        elementwise_bytes += samples * head.read_bytes
        elementwise = elementwise_bytes / self._elementwise_rate
        gaps = self._layers * GAP_SECONDS
        transfers = (
            self._transfer_seconds + tokens * self._token_transfer_seconds + samples * self._sample_transfer_seconds
        )
        stack = sequences * self._seconds_per_sequence
        head_seconds = samples * head.seconds

        weights_seconds = weights_bytes / self._weights_rate
        clock, watts = 1.0, math.nan  # the clock as a share of the highest
        if self._limit_watts is not None:
            moved = (
                weights_bytes
                + tokens * self._token.bytes
                + samples * self._sample.bytes
                + decode_bytes
                + elementwise_bytes
                + head.weights_bytes
            )
            energy_of_bytes = moved * WATTS_PER_BYTE
            at_full_clock = (HIGHEST_CLOCK_MHZ / FITTED_CLOCK_MHZ) ** 2 * (
                operations * self._watts_per_operation
                + chunk_operations * BF16.watts_per_operation
                + samples * head.operations * head.watts_per_operation
            )
            fixed = decode_seconds + elementwise + gaps + transfers + stack
            by_clock = chunk_seconds + tail_seconds
            clock = self._clock(
                product_seconds, weights_seconds, by_clock, head_seconds, fixed, energy_of_bytes, at_full_clock
            )
        products = _either(product_seconds / clock, weights_seconds)
        of_head = max(head_seconds / clock, head.weights_seconds) if samples else 0.0
        decode_attention, chunk_attention = decode_seconds + tail_seconds / clock, chunk_seconds / clock
        seconds = products + decode_attention + chunk_attention + elementwise + of_head + gaps + transfers + stack
        if self._limit_watts is not None:
            watts = IDLE_WATTS + (at_full_clock * clock * clock + energy_of_bytes) / seconds
        return StepCost(
            seconds,
            products,
            decode_attention,
            chunk_attention,
            elementwise,
            of_head,
            gaps,
            transfers,
            stack,
            clock * HIGHEST_CLOCK_MHZ if self._limit_watts is not None else math.nan,
            watts,
        )

    def _clock(
        self,
        products: float,
        weights: float,
        by_clock: float,
        head: float,
        fixed: float,
        energy_of_bytes: float,
        at_full_clock: float,
    ) -> float:
        """The highest clock, as a share, at which the step stays within the power limit, by Newton's method.

        Time falls with the clock and the energy of operations grows with its square, so the margin is monotonous and
        has one root; two iterations from the clock of most runs find it to 0.1 %.
        """
        assert self._limit_watts is not None
        spare_watts = self._limit_watts - IDLE_WATTS
        clock = FITTED_CLOCK_MHZ / HIGHEST_CLOCK_MHZ
        for _ in range(2):
            slowed = products / clock
            in_products, others = _either(slowed, weights), (by_clock + head) / clock
            margin = spare_watts * (in_products + others + fixed) - energy_of_bytes - at_full_clock * clock * clock
            # d/df (a^p + m^p)^(1/p) with a = c / f is -(a/g)^p g / f.
            slope = in_products * math.pow(slowed / in_products, WEIGHTS_EXPONENT) + others
            clock += margin / (spare_watts * slope / clock + 2 * at_full_clock * clock)
            clock = min(max(clock, 0.5), 1.0)
        return clock


class _Window(NamedTuple):
    """Layers whose queries see so many keys; bytes of a key and operations of a query with a key, in all of them."""

    keys: int
    key_bytes: float
    pair_operations: float


def _either(operations: float, weights: float) -> float:
    """Seconds of products from those of their operations and of reading their weights."""
    longer, shorter = max(operations, weights), min(operations, weights)
    return longer * math.pow(1 + math.pow(shorter / longer, WEIGHTS_EXPONENT), 1 / WEIGHTS_EXPONENT)


class _Head(NamedTuple):
    """Of a token that samples: operations and seconds of its product, and bytes of its logits that are read again."""

    operations: float
    seconds: float
    weights_bytes: float
    weights_seconds: float
    watts_per_operation: float
    read_bytes: float


class _Linear(NamedTuple):
    """``number`` products of one token; ``output_bytes`` are written of each output."""

    depth: int
    width: int
    number: int
    output_bytes: float = 2.0


class _Products:
    """Cost of one token in linears."""

    def __init__(self, linears: list[_Linear], rate: float, item: float) -> None:
        self.operations = sum(2.0 * one.depth * one.width * one.number for one in linears)
        self.seconds = sum(2.0 * (one.depth + DEPTH_OVERHEAD) * one.width * one.number for one in linears) / rate
        self.bytes = sum((one.depth * item + one.output_bytes * one.width) * one.number for one in linears)


def _product_rates(gpu: Gpu, scheme: LinearScheme) -> tuple[float, float, str]:
    """Operations/s of products of endless depth, of the layers and of the head; and what the first rests on.

    At the highest clock of a GPU whose clock is computed, at the clock that it settles at of any other.
    """
    peak, head_peak = (gpu.operations_per_second[one.precision] for one in (scheme, BF16))
    if gpu.name in CLOCK_LIMITED:
        basis = "measured" if gpu.name == "H200" else "measured on an H200"
        return scheme.product_share * peak, BF16.product_share * head_peak, basis
    head_rate = BF16.sustained_share * head_peak
    published = gpu.published_operations_per_second.get(scheme.precision)
    if published is not None:
        return published * (1 + DEPTH_OVERHEAD / PUBLISHED_DEPTH), head_rate, "published rate of large products"
    basis = f"data sheet, at the share of it that {scheme.sustained_basis}"
    return scheme.sustained_share * peak, head_rate, basis
