# ruff: noqa: E402 Triton is not everywhere
"""What the tensors of a step on a GPU take, against its plan: whole models without memory, so no GPU is needed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import chain
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

triton = pytest.importorskip("triton", reason="Triton is not installed")

from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from megatoken.engine.cache import LayerCache
from megatoken.engine.config import SHAPES, EngineConfig, Fp8Scales, ModelConfig, Precision, sharded
from megatoken.engine.memory import plan_memory_of
from megatoken.engine.model import LayerWeights, Weights, forward
from megatoken.engine.ops import cuda, fused, paged_attention, prompt_attention
from megatoken.engine.ops.cuda_fp8 import RowScaledLinear, TensorScaledLinear
from megatoken.engine.ops.cuda_linear import InputScale, Linear
from megatoken.engine.parallel import RankGroup
from megatoken.engine.schemes.fp8_weight import Fp8Weight

META = torch.device("meta")
PAGE_SIZE, LENGTH = 32, 1024
FORMS: dict[str, tuple[Precision, Fp8Scales]] = {
    "bf16": ("bf16", "tensor"),
    "fp8": ("fp8", "tensor"),
    "fp8 by row": ("fp8", "row"),
}


class LiveBytes(TorchDispatchMode):
    """``most``: bytes of the tensors made meanwhile, at the moment when they were most."""

    def __init__(self) -> None:
        super().__init__()
        self.most = 0
        self._made: dict[StorageWeakRef, int] = {}

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        given = {StorageWeakRef(one.untyped_storage()) for one in tree_leaves((args, kwargs)) if torch.is_tensor(one)}
        made = func(*args, **(kwargs or {}))
        for one in tree_leaves(made):
            if torch.is_tensor(one) and StorageWeakRef(one.untyped_storage()) not in given:
                self._made[StorageWeakRef(one.untyped_storage())] = one.untyped_storage().nbytes()
        self._made = {storage: size for storage, size in self._made.items() if not storage.expired()}
        self.most = max(self.most, sum(self._made.values()))
        return made


@pytest.fixture
def _no_launches(monkeypatch: pytest.MonkeyPatch) -> None:
    """A kernel allocates nothing; there is nothing here that it could run on."""
    kinds = (triton.runtime.JITFunction, triton.runtime.interpreter.InterpretedFunction)
    for kernel in chain(*(vars(module).values() for module in (fused, paged_attention, prompt_attention))):
        if isinstance(kernel, kinds):
            monkeypatch.setattr(kernel, "run", lambda *_, **__: None)
    ways = [prompt_attention.PAGED_CHUNKS, prompt_attention.GATHERED_CHUNKS]
    monkeypatch.setattr(prompt_attention, "ways", lambda head_dim, device: ways)


def bf16(*shape: int) -> torch.Tensor:
    return torch.empty(shape, dtype=torch.bfloat16, device=META)


def weights_of(model: ModelConfig, form: str, *, measured: bool) -> Weights:
    def linear(outputs: int, inputs: int) -> Linear:
        if form == "bf16":
            return Linear(bf16(outputs, inputs), None)
        values = torch.empty(outputs, inputs, dtype=torch.float8_e4m3fn, device=META)
        if form == "fp8 by row":
            scale = torch.empty(outputs, 1, device=META)
            return RowScaledLinear.pack(Fp8Weight(values, scale), None)
        one = torch.empty(1, device=META)
        return TensorScaledLinear(values, None, InputScale(one, 1.0) if measured else None, weight_scale=one.view(()))

    hidden, queries, keys = model.hidden_size, model.heads * model.head_dim, model.kv_heads * model.head_dim
    layer = LayerWeights(
        input_norm_D=bf16(hidden),
        qkv=linear(queries + 2 * keys, hidden),
        qk_norms_E=None,
        output=linear(hidden, queries),
        post_norm_D=bf16(hidden),
        gate_up=linear(2 * model.intermediate_size, hidden),
        down=linear(hidden, model.intermediate_size),
        experts=None,
        sinks_H=None,
        cache_scales=(1.0, 1.0),
    )
    tables, shapes = bf16(LENGTH, model.head_dim), model.tensor_shapes()
    embedding, head = (bf16(*shapes[name]) for name in ("model.embed_tokens.weight", "lm_head.weight"))
    return Weights(embedding, [layer] * model.layers, bf16(hidden), Linear(head, None), (tables, tables))


class MetaRanks(RankGroup):
    """Makes the tensors that a rank makes, but sends nothing."""

    def __init__(self, ranks: int) -> None:
        self.ranks, self.shared = ranks, None
        sent = SimpleNamespace(wait=lambda: None)
        self._device = SimpleNamespace(allreduce=lambda _: sent, _allgather_base=lambda *_: sent)


def batch_of(tokens: int, decodes: int) -> cuda.Batch:
    """Sequences of ``LENGTH`` tokens: many decode, the last tokens are one chunk of a prompt; all sample."""
    samples, width = decodes + (tokens > decodes), LENGTH // PAGE_SIZE

    def indices(*shape: int) -> torch.Tensor:
        return torch.empty(shape, dtype=torch.int32, device=META)

    host_lengths = np.full(samples, LENGTH, np.int32)
    return cuda.Batch(
        token_ids=torch.empty(tokens, dtype=torch.int64, device=META),
        positions=indices(tokens),
        cache_slots=indices(tokens),
        decodes=decodes,
        pages=indices(samples, width),
        lengths=indices(samples),
        host_lengths=host_lengths,
        chunk_starts=indices(samples - decodes + 1),
        longest_chunk=tokens - decodes,
        longest_context=LENGTH,
        samples=samples,
        sample_indices=indices(samples),
        sample_slots=indices(samples),
        sample_pages=indices(samples, width),
        sample_lengths=indices(samples),
        sample_host_lengths=host_lengths,
        windowed=None,
    )


def most_bytes(model: ModelConfig, form: str, tokens: int, decodes: int, *, measured: bool = True) -> int:
    """At any moment of a step up to its logits."""
    model = replace(model, layers=3)
    weights = weights_of(model, form, measured=measured)
    cache_type = torch.bfloat16 if form == "bf16" else torch.float8_e4m3fn
    page = torch.empty(2, model.kv_heads, PAGE_SIZE, model.head_dim, dtype=cache_type, device=META)
    cache = [LayerCache(page, page, form != "bf16")] * model.layers
    batch = batch_of(tokens, decodes)
    with LiveBytes() as live:
        forward(weights, model, cuda, cache, batch, MetaRanks(model.vocabulary_ranks))
    return live.most


def workspace_bytes(model: ModelConfig, form: str, tokens: int, sequences: int, ranks: int) -> int:
    """As planned, with a cache whose place is more than loading needs."""
    sizes = {"max_batched_tokens": tokens, "max_sequences": sequences, "max_length": LENGTH, "cache_tokens": 2**22}
    precision, fp8_scales = FORMS[form]
    config = EngineConfig(precision=precision, fp8_scales=fp8_scales, tensor_parallel=ranks, **sizes)
    return plan_memory_of(model, config, "cuda", 10**13).workspace_bytes


@pytest.mark.usefixtures("_no_launches")
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(("name", "ranks"), [("1.1b", 1), ("llama2-70b", 1), ("llama3.1-8b", 4), ("llama3.1-405b", 4)])
@pytest.mark.parametrize(("tokens", "decodes"), [(2048, 0), (2048, 512), (1536, 1536), (64, 63)])
def test_a_step_fits_its_plan(name: str, ranks: int, form: str, tokens: int, decodes: int) -> None:
    model = SHAPES[name]
    own = sharded(model, ranks)
    taken = max(most_bytes(own, form, tokens, decodes, measured=measured) for measured in (True, False))
    planned = workspace_bytes(model, form, tokens, decodes + (tokens > decodes), ranks)
    assert taken < planned
    if form == "fp8 by row":  # it measures no scales: nothing beyond what a step in bf16 takes
        assert taken <= most_bytes(own, "bf16", tokens, decodes)
        assert planned == workspace_bytes(model, "bf16", tokens, decodes + (tokens > decodes), ranks)
