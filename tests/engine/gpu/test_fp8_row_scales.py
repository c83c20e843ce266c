"""fp8 with a scale per row on a GPU: products, logits, scales of checkpoints, the same bits every time."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

pytest.importorskip("triton")

from checkpoints import make_uneven_checkpoint
from engines import answer_and_logits
from gpu_engines import (
    MARKS,
    SHAPE,
    SIZES,
    bf16_checkpoint,
    error_from_transformers,
    linears,
    mixed_requests,
    norms_and_vocabulary,
    some_prompts,
)
from quantized_checkpoints import LAYOUTS, quantize
from safetensors.torch import load_file
from torch import Tensor

from megatoken.engine import Engine, EngineConfig, Request
from megatoken.engine.memory import GPU_LIBRARY_BYTES, weight_bytes
from megatoken.engine.ops.cuda_fp8 import ScaledTokens
from megatoken.engine.schemes import find_scheme
from megatoken.engine.schemes.fp8_weight import Fp8Weight, quantise_rows
from megatoken.errors import CapacityError

pytestmark = MARKS

FP8_ROWS = find_scheme("fp8", "row")
LOGIT_ERROR = 0.15
"""Root mean square of the difference from bf16, as a share of the root mean square of the logits."""
CHECKPOINT_LOGIT_ERROR = 0.12
"""The same from transformers in fp32 with the weights that the checkpoint stands for, as a share of the deviation."""
ROWS = {"precision": "fp8", "fp8_scales": "row"}


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("llama")
    bf16_checkpoint(directory, attention_bias=True, mlp_bias=True)
    return directory


def logit_error(directory: Path, monkeypatch: pytest.MonkeyPatch, **config: str) -> float:
    """Of the first token after some prompts, against bf16."""
    wide = Engine(directory, EngineConfig(**SIZES))
    narrow = Engine(directory, EngineConfig(precision="fp8", **SIZES, **config))
    squares = []
    for prompt in some_prompts([1, 2, 31, 33, 100, 300]):
        _, expected = answer_and_logits(wide, prompt, 1, monkeypatch)
        _, logits = answer_and_logits(narrow, prompt, 1, monkeypatch)
        squares.append((logits - expected).square().mean() / expected.square().mean())
    return float(torch.stack(squares).mean().sqrt())


@pytest.mark.parametrize("rows", [1, 2, 3, 15, 17, 63, 129, 1000])
@pytest.mark.parametrize("with_bias", [False, True])
def test_products(rows: int, with_bias: bool) -> None:
    """Rows and outputs of very different size, each as exact as its own scale allows."""
    generator = torch.Generator("cuda").manual_seed(rows)

    def uneven(count: int, width: int) -> Tensor:
        x = torch.randn((count, width), generator=generator, device="cuda")
        return x * torch.exp2(torch.randint(-12, 12, (count, 1), generator=generator, device="cuda"))

    weight = Fp8Weight(*quantise_rows(uneven(144, 272)))
    bias = torch.randn(144, generator=generator, device="cuda").bfloat16() if with_bias else None
    linear = FP8_ROWS.cuda_linear(weight, bias)
    values, scale_T1 = quantise_rows(uneven(rows, 272).bfloat16())
    product = (values.double() * scale_T1) @ (weight.values_ND.double() * weight.scale_N1).T
    sizes = (values.double() * scale_T1).norm(dim=1, keepdim=True) * (weight.values_ND.double() * weight.scale_N1).norm(
        dim=1
    )
    expected = product if bias is None else product + bias.double()
    actual = linear.product(ScaledTokens(values, scale_T1))
    assert actual.shape == (rows, 144)
    assert actual.dtype == torch.bfloat16
    # bf16 rounds the result; the tensor cores' sums keep about 14 bits of the larger of what they add.
    assert ((actual.double() - expected).abs() <= 2.0**-8 * expected.abs() + 2.0**-10 * sizes).all()


def test_logits(llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows, tensor = logit_error(llama, monkeypatch, fp8_scales="row"), logit_error(llama, monkeypatch)
    print(f"\nfp8 against bf16: logit error {rows:.4f} with a scale per row, {tensor:.4f} with one")
    assert rows <= LOGIT_ERROR
    assert rows <= 1.1 * tensor


def test_logits_where_one_scale_is_not_enough(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_uneven_checkpoint(tmp_path, **SHAPE)
    rows, tensor = logit_error(tmp_path, monkeypatch, fp8_scales="row"), logit_error(tmp_path, monkeypatch)
    print(f"\nfp8 against bf16, uneven weights: logit error {rows:.4f} with a scale per row, {tensor:.4f} with one")
    assert rows <= LOGIT_ERROR
    assert rows < 0.8 * tensor


@pytest.mark.parametrize("layout", ["modelopt cache", "modelopt rows", "compressed dynamic", "compressed static rows"])
def test_scales_of_checkpoints_are_honoured(layout: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    quantized = quantize(tmp_path, LAYOUTS[layout], **SHAPE)
    engine = Engine(tmp_path, EngineConfig(**ROWS, **SIZES))
    stored = load_file(tmp_path / "model.safetensors")
    tensors = norms_and_vocabulary(engine)
    for parts, linear in linears(engine):
        values = torch.cat([stored[f"{part}.weight"].view(torch.uint8) for part in parts])
        assert torch.equal(linear.weight.view(torch.uint8).cpu(), values)
        scales = [stored[f"{part}.weight_scale"].float().view(-1) for part in parts]
        shares = [len(stored[f"{part}.weight"]) for part in parts]
        expected = torch.cat([scale.expand(share) for scale, share in zip(scales, shares, strict=True)])
        assert linear.weight_scale.shape == (1, len(values))
        assert torch.equal(linear.weight_scale[0].cpu(), expected)
        assert linear.input_scale is None
        tensors += [linear.weight, linear.weight_scale]
    assert engine.describe()["fp8_scales"] == "row"
    assert engine.describe()["measured_input_scales"] == 0
    assert sum(tensor.nbytes for tensor in tensors) == weight_bytes(engine.model_config, FP8_ROWS, "cuda")
    error = error_from_transformers(engine, quantized.model, monkeypatch)
    print(f"\n{layout}: logit error {error:.4f}")
    assert error <= CHECKPOINT_LOGIT_ERROR


def test_same_inputs_same_bits(llama: Path) -> None:
    """With and without a step on its way."""
    requests = mixed_requests()
    answers = [
        Engine(llama, EngineConfig(**ROWS, max_batched_tokens=96, overlap=overlap)).generate(requests)
        for overlap in (False, True, True)
    ]
    assert answers[0] == answers[1] == answers[2]


def test_memory_stays_within_the_plan() -> None:
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_reserved()
    engine = Engine("1.1b", EngineConfig(**ROWS, cache_tokens=200_000))
    plan = engine.memory_plan
    assert torch.cuda.max_memory_reserved() - before <= plan.total_bytes
    assert torch.cuda.memory_allocated() >= plan.weights_bytes + plan.cache_bytes
    engine.generate([Request([1] * length, 1 + length % 40) for length in [1, 2000, 700, 30] * 100])
    assert torch.cuda.max_memory_reserved() - before <= plan.total_bytes - GPU_LIBRARY_BYTES


def test_sides_that_no_fp8_product_has_are_refused() -> None:
    odd = Fp8Weight(*quantise_rows(torch.ones(24, 32, device="cuda")))
    with pytest.raises(CapacityError, match="a linear of 24 x 32: fp8 on a GPU needs multiples of 16; take bf16"):
        FP8_ROWS.cuda_linear(odd, None)
