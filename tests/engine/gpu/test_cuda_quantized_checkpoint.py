"""fp8 checkpoints on a GPU: linears and caches as their scales say, answers of the weights they stand for."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

pytest.importorskip("triton")

from gpu_engines import MARKS, SHAPE, SIZES, error_from_transformers, linears, norms_and_vocabulary
from quantized_checkpoints import LAYOUTS, Quantized, quantize
from safetensors.torch import load_file

from megatoken.engine import Engine, EngineConfig
from megatoken.engine.memory import weight_bytes
from megatoken.engine.ops.cuda_fp8 import GatedLinear
from megatoken.engine.ops.gated_product import interleaved
from megatoken.engine.schemes import find_scheme

pytestmark = MARKS

BF16_LOGIT_ERROR = 0.01
FP8_LOGIT_ERROR = 0.12
"""Root mean square of the difference from transformers in fp32, as a share of the deviation of the logits."""
SERVED = (
    "modelopt file",
    "modelopt cache",
    "modelopt rows",
    "compressed static",
    "compressed dynamic",
    "compressed static rows",
    "compressed cache",
)


@pytest.fixture(scope="module", params=SERVED)
def quantized(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Quantized:
    biased = request.param == "compressed static"
    directory = tmp_path_factory.mktemp(request.param.replace(" ", "-"))
    return quantize(directory, LAYOUTS[request.param], **SHAPE, attention_bias=biased, mlp_bias=biased)


def logit_error(quantized: Quantized, precision: str, monkeypatch: pytest.MonkeyPatch) -> float:
    engine = Engine(quantized.directory, EngineConfig(precision=precision, **SIZES))
    assert engine.memory_plan.device == "cuda"
    return error_from_transformers(engine, quantized.model, monkeypatch)


def test_logits(quantized: Quantized, monkeypatch: pytest.MonkeyPatch) -> None:
    wide, narrow = (logit_error(quantized, precision, monkeypatch) for precision in ("bf16", "fp8"))
    print(f"\nlogit errors: bf16 {wide:.4f}, fp8 {narrow:.4f}")
    assert wide <= BF16_LOGIT_ERROR
    assert narrow <= FP8_LOGIT_ERROR


def test_linears_have_the_scales_of_the_checkpoint(quantized: Quantized) -> None:
    engine = Engine(quantized.directory, EngineConfig(precision="fp8", **SIZES))
    stored = load_file(quantized.directory / "model.safetensors")
    meant = quantized.model.state_dict()
    tensors = norms_and_vocabulary(engine)
    for names, linear in linears(engine):
        assert linear.weight.dtype == torch.float8_e4m3fn
        assert linear.weight_scale is not None
        assert linear.input_scale is not None
        assert linear.largest_input is None
        scale = max(stored[f"{name}.weight_scale"].float().max() for name in names)
        assert linear.weight_scale.item() == scale.item()
        expected = torch.cat([meant[f"{name}.weight"] for name in names])
        if isinstance(linear, GatedLinear):
            expected = interleaved(expected)
        error = (linear.weight.cpu().float() * scale - expected).abs()
        assert (error <= torch.maximum(expected.abs() * 2**-4, scale * 2**-10) * 1.0001).all()
        if quantized.layout.input_scales:
            largest = max(stored[f"{name}.input_scale"].item() for name in names)
            assert linear.input_scale.value == linear.input_scale.device.item() == largest
        tensors += [linear.weight] if linear.bias is None else [linear.weight, linear.bias]
    assert sum(tensor.nbytes for tensor in tensors) == weight_bytes(
        engine.model_config, find_scheme("fp8"), engine.memory_plan.device
    )


@pytest.mark.parametrize("layout", ["modelopt cache", "compressed cache"])
def test_scales_of_the_cache_are_honoured(layout: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Keys and values of some thousands saturate at 448, unless their scales are used."""
    quantized = quantize(tmp_path, LAYOUTS[layout], "Qwen3", cache_gain=1024.0, **SHAPE)
    error = logit_error(quantized, "fp8", monkeypatch)
    print(f"\nlogit error with scaled keys and values: {error:.4f}")
    assert error <= FP8_LOGIT_ERROR
