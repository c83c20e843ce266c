"""Every kernel that is compiled while weights load: it runs, and no step of the engine needs another."""

from __future__ import annotations

import threading
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from checkpoints import MIXTURES, make_checkpoint
from gpu_kernels import ON_GPU, needs_gpu, triton

from examples import every
from megatoken.engine import Engine, EngineConfig, Request
from megatoken.engine.config import ClampedSwiglu, ExpertsConfig, ModelConfig, gpt_oss_experts
from megatoken.engine.ops import (
    compilation,
    fused,
    grouped_product,
    paged_attention,
    prompt_attention,
    routing_kernels,
    tokens,
)
from megatoken.engine.schemes import find_scheme

CPU = torch.device("cpu")
LLAMA = ModelConfig("llama", 64, 96, 2, 4, 2, 16, 301, 256)
MODELS = {
    "llama": LLAMA,
    "qwen3moe": replace(LLAMA, name="qwen3moe", qk_norm=True, experts=ExpertsConfig(4, 2, 32, True, (1,))),
    "gpt-oss": replace(
        LLAMA,
        name="gpt-oss",
        experts=gpt_oss_experts(4, 2, 32, 2, ClampedSwiglu(1.702, 7.0)),
        windows=(16, None),
        sinks=True,
    ),
}
KINDS = [("bf16", "tensor"), ("fp8", "tensor"), ("fp8", "row")]
SHAPE = {
    "hidden_size": 384,
    "intermediate_size": 384,
    "num_attention_heads": 6,
    "num_key_value_heads": 1,
    "head_dim": 64,
    "vocab_size": 9001,
    "max_position_embeddings": 2048,
}


@pytest.mark.skipif(ON_GPU, reason="a GPU compiles them in the test below")
@pytest.mark.parametrize(
    ("model", "kind"),
    [
        *(("llama", KINDS[1]), ("qwen3moe", KINDS[2]), ("gpt-oss", KINDS[0])),
        *every(*(("llama", kind) for kind in (KINDS[0], KINDS[2]))),
        *every(*(("qwen3moe", kind) for kind in KINDS[:2])),
        *every(*(("gpt-oss", kind) for kind in KINDS[1:])),
    ],
)
def test_every_launch_runs(model: str, kind: tuple[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    """They read zeros, so only that they accept their arguments is checked."""
    monkeypatch.setattr(compilation, "TOKENS", 2)  # each takes the interpreter its time
    scheme = find_scheme(*kind)
    launches = compilation.launches(MODELS[model], scheme, 16, CPU)
    assert len(launches) >= 9
    if scheme.fused_all_reduce:
        launches += compilation.shared_launches(MODELS[model], scheme.cuda_consumers(CPU), CPU, 2)
    for launch in launches:
        launch()


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("architecture", ["Llama", "Qwen3", "Qwen3Moe", "GptOss"])
@pytest.mark.parametrize(("precision", "fp8_scales"), KINDS)
def test_no_step_compiles(
    architecture: str, precision: str, fp8_scales: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither warm-up nor requests, short, long, alone and together: all was compiled beside the weights' loading."""
    make_checkpoint(
        tmp_path,
        architecture,
        stored=torch.bfloat16,
        gain=1.0,
        **{"num_hidden_layers": 2, **SHAPE, **MIXTURES.get(architecture, {})},
    )
    for module in (fused, grouped_product, paged_attention, prompt_attention, routing_kernels, tokens):
        for kernel in vars(module).values():
            if isinstance(kernel, triton.runtime.JITFunction):
                kernel.device_caches.clear()  # of what other tests compiled
    ahead: list[str] = []
    late: list[str] = []

    def note(**details: object) -> None:
        thread = threading.current_thread().name
        (ahead if thread.startswith("compile") else late).append(str(details["repr"]))

    monkeypatch.setattr(triton.knobs.runtime, "jit_post_compile_hook", note)
    config = EngineConfig(precision=precision, fp8_scales=fp8_scales, max_batched_tokens=256, cache_tokens=65_536)
    engine = Engine(tmp_path, config)
    for lengths in ([1], [3], [700], [1, 33, 300, 2000, 64], [20] * 100):
        engine.generate([Request([7] * length, 1 + length % 30, ignore_end_token=True) for length in lengths])
    assert len(ahead) >= 9
    assert late == []
