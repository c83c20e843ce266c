"""``fp8_scales``: which scales the weights get, what they do to the answers, and what is refused."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from checkpoints import make_checkpoint, make_uneven_checkpoint
from engines import answer_and_logits, make_engine, request
from quantized_checkpoints import LAYOUTS, quantize

from megatoken.engine import EngineConfig
from megatoken.engine.checkpoint import Checkpoint, open_model
from megatoken.engine.config import SHAPES
from megatoken.engine.memory import plan_memory_of, weight_bytes
from megatoken.engine.model import load_weights
from megatoken.engine.ops import cpu
from megatoken.engine.schemes import LinearScheme, find_scheme
from megatoken.engine.schemes.fp8_weight import Fp8Weight
from megatoken.errors import ConfigError

CPU = torch.device("cpu")
FP8, FP8_ROWS, BF16 = find_scheme("fp8"), find_scheme("fp8", "row"), find_scheme("bf16")


def quantised(weight: torch.Tensor | Fp8Weight, scheme: LinearScheme) -> torch.Tensor | Fp8Weight:
    return scheme.quantise(weight) if isinstance(weight, torch.Tensor) else weight


AS_READ = SimpleNamespace(
    pack_linear=lambda weight, bias, scheme: quantised(weight, scheme),
    pack_gated=lambda gate_up, scheme: [quantised(weight, scheme) for weight, _ in gate_up],
)
"""A back end that keeps what it is given to pack."""


def test_each_row_of_a_weight_gets_its_scale(directory: Path) -> None:
    source = open_model(directory)
    weights = load_weights(source, AS_READ, FP8_ROWS, 16, CPU)
    plain = load_weights(source, AS_READ, BF16, 16, CPU)
    assert torch.equal(weights.head, plain.head)
    for layer, expected in zip(weights.layers, plain.layers, strict=True):
        for part in ("qkv", "output", "down"):
            expect_rows(getattr(layer, part), getattr(expected, part))
        for weight, original in zip(layer.gate_up, expected.gate_up, strict=True):
            expect_rows(weight, original)


def expect_rows(weight: Fp8Weight, original_ND: torch.Tensor) -> None:
    largest_N1 = original_ND.float().abs().amax(-1, keepdim=True)
    torch.testing.assert_close(weight.scale_N1, largest_N1 / 448, rtol=1e-6, atol=0)
    error_ND = (weight.values_ND.float() * weight.scale_N1 - original_ND.float()).abs()
    assert (error_ND <= original_ND.float().abs() * 2**-4 + weight.scale_N1 * 2**-10).all()


@pytest.mark.parametrize("layout", ["modelopt cache", "compressed dynamic"])
def test_scales_of_a_checkpoint_stay(layout: str, tmp_path: Path) -> None:
    quantize(tmp_path, LAYOUTS[layout])
    source = Checkpoint.open(tmp_path)
    each = [load_weights(source, AS_READ, scheme, 16, CPU).layers[1].qkv for scheme in (FP8, FP8_ROWS)]
    assert torch.equal(each[0].values_ND.view(torch.uint8), each[1].values_ND.view(torch.uint8))
    assert torch.equal(each[0].scale_N1, each[1].scale_N1)


def test_rows_keep_what_one_scale_loses(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_uneven_checkpoint(tmp_path)
    prompt = request(prompt_tokens=40).prompt
    _, expected = answer_and_logits(make_engine(tmp_path, precision="bf16"), prompt, 1, monkeypatch)
    errors = {}
    for kind in ("row", "tensor"):
        engine = make_engine(tmp_path, precision="fp8", fp8_scales=kind)
        assert engine.describe()["fp8_scales"] == kind
        assert "on a GPU" in engine.describe()["why_no_fused_gate"]
        assert not engine.describe()["screened_head"]
        _, logits = answer_and_logits(engine, prompt, 1, monkeypatch)
        errors[kind] = float((logits - expected).square().mean().sqrt() / expected.square().mean().sqrt())
    print(f"\nlogit errors {errors}")
    assert errors["row"] < 0.8 * errors["tensor"]


def test_two_ranks_scale_their_own_rows(tmp_path: Path) -> None:
    make_checkpoint(tmp_path, num_attention_heads=8, num_key_value_heads=4)
    engine = make_engine(tmp_path, precision="fp8", fp8_scales="row", tensor_parallel=2)
    [answer] = engine.generate([request(tokens=3)])
    assert len(answer.token_ids) == 3
    assert {len(layer.qkv.scale) for layer in engine._runner._weights.layers} == {(8 + 4 + 4) * 8 // 2}


def test_scales_are_in_the_memory_plan(directory: Path) -> None:
    source = open_model(directory)
    layers = load_weights(source, cpu, FP8_ROWS, 16, CPU).layers
    linears = [linear for layer in layers for linear in (layer.qkv, layer.output, *layer.gate_up, layer.down)]
    scales = sum(linear.scale.nbytes for linear in linears)
    for device in ("cpu", "cuda"):
        sizes = [weight_bytes(source.config, scheme, device) for scheme in (FP8, FP8_ROWS)]
        assert sizes[1] - sizes[0] == scales
    plans = [
        plan_memory_of(SHAPES["llama2-70b"], EngineConfig("fp8", fp8_scales=kind), "cuda", 140 * 10**9)
        for kind in ("tensor", "row")
    ]
    assert plans[1].weights_bytes - plans[0].weights_bytes == 4 * 80 * (8192 + 2 * 1024 + 8192 + 2 * 28_672 + 8192)


@pytest.mark.parametrize(("precision", "fp8_scales"), [("bf16", "row"), ("fp32", "row"), ("fp8", "rows")])
def test_what_has_no_such_scales_is_refused(directory: Path, precision: str, fp8_scales: str) -> None:
    message = f"fp8_scales is {fp8_scales} in precision {precision}; take tensor, or row in precision fp8"
    with pytest.raises(ConfigError, match=message):
        make_engine(directory, precision=precision, fp8_scales=fp8_scales)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_other_precisions_name_no_scales(directory: Path, precision: str) -> None:
    assert make_engine(directory, precision=precision).describe()["fp8_scales"] is None
