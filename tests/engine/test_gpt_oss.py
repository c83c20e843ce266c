"""gpt-oss: the layouts of its files, what they must say, and its attention. Answers: ``test_experts``."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from checkpoints import MIXTURES, generate, make_checkpoint, teacher_forced
from engines import answer_and_logits, make_engine
from safetensors.torch import load_file, save_file
from test_mxfp4 import value
from transformers import PreTrainedModel

from megatoken.engine.checkpoint import Checkpoint, read_config
from megatoken.engine.config import SHAPES, EngineConfig
from megatoken.engine.cost_model import CostModel
from megatoken.engine.gpus import find_gpu
from megatoken.engine.memory import plan_memory_of
from megatoken.engine.model import rotary_tables
from megatoken.engine.ops import reference
from megatoken.engine.schemes import find_scheme
from megatoken.errors import CheckpointError

CPU, FP8 = torch.device("cpu"), find_scheme("fp8")
MXFP4 = {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn", "lm_head"]}


@pytest.fixture(scope="module")
def packed(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, PreTrainedModel]:
    """A checkpoint with MXFP4 experts, and the same model in plain weights as transformers reads it."""
    plain, directory = tmp_path_factory.mktemp("plain"), tmp_path_factory.mktemp("packed")
    model = make_checkpoint(plain, "GptOss", **MIXTURES["GptOss"])
    random = torch.Generator().manual_seed(0)
    tensors = load_file(plain / "model.safetensors")
    for layer, block in enumerate(model.model.layers):
        for part in ("gate_up_proj", "down_proj"):
            weight = getattr(block.mlp.experts, part)
            experts, columns, rows = weight.shape
            codes = torch.randint(256, (experts, rows, columns // 32, 16), generator=random, dtype=torch.uint8)
            scales = torch.randint(121, 126, (experts, rows, columns // 32), generator=random, dtype=torch.uint8)
            weight.data = decoded(codes, scales).mT.contiguous()
            name = f"model.layers.{layer}.mlp.experts.{part}"
            del tensors[name]
            tensors |= {f"{name}_blocks": codes, f"{name}_scales": scales}
    save_file(tensors, directory / "model.safetensors")
    change_config(plain, directory, quantization_config=MXFP4)
    return directory, model


def decoded(codes: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """From the definition, code by code: [experts, rows, columns]."""
    units = torch.tensor([value(code, 127) for code in range(16)])
    both = torch.stack((units[(codes & 15).long()], units[(codes >> 4).long()]), -1).flatten(-2)
    return (both * 2.0 ** (scales[..., None].float() - 127)).flatten(-2)


def change_config(source: Path, directory: Path, **changes: object) -> Path:
    values = json.loads((source / "config.json").read_text()) | changes
    (directory / "config.json").write_text(json.dumps(values))
    return directory


# Layouts


def test_mxfp4_experts_answer_as_the_same_weights_decoded(
    packed: tuple[Path, PreTrainedModel], monkeypatch: pytest.MonkeyPatch
) -> None:
    directory, model = packed
    prompt = list(range(3, 40))
    answer, logits = answer_and_logits(make_engine(directory), prompt, 8, monkeypatch)
    assert answer == generate(model, prompt, 8)
    expected = teacher_forced(model, prompt, answer)
    torch.testing.assert_close(logits, expected, rtol=0, atol=1e-5 * expected.abs().max().item())


def test_mxfp4_is_exact_in_every_precision(packed: tuple[Path, PreTrainedModel]) -> None:
    directory, model = packed
    checkpoint = Checkpoint.open(directory)
    gate_up = model.model.layers[1].mlp.experts.gate_up_proj[3]
    stem = "model.layers.1.mlp.experts.3."
    for part, exact in (("gate_proj", gate_up[:, ::2].T), ("up_proj", gate_up[:, 1::2].T)):
        for dtype in (torch.float32, torch.bfloat16):
            assert torch.equal(checkpoint.read(f"{stem}{part}.weight", dtype).float(), exact)
        weight = checkpoint.quantized.read(f"{stem}{part}.weight", FP8, CPU)
        assert torch.equal(weight.values_ND.float() * weight.scale_N1, exact)
    assert all(checkpoint.quantized.expanded.values())
    assert f"{stem}gate_proj.bias" not in checkpoint.quantized
    assert "model.layers.1.self_attn.q_proj.weight" not in checkpoint.quantized


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"intermediate_size": 16}, "is square, so rows and columns cannot be distinguished; take the MXFP4 edition"),
        ({"intermediate_size": 48}, r"gate_up_proj' has shape \[5, 32, 128\], config.json implies \[5, 32, 96\]"),
        ({"layer_types": ["full_attention"]}, "layer_types is .*expected a list of 3 kinds of attention"),
        ({"layer_types": ["chunked_attention"] * 3}, "'chunked_attention' is not full_attention or sliding_attention"),
        ({"num_experts_per_tok": 6}, "num_experts_per_tok is 6; the model has 5 experts"),
        ({"attention_bias": False}, "has no place in the model"),
    ],
)
def test_what_cannot_be_gpt_oss_is_refused(changes: dict[str, object], words: str, tmp_path: Path) -> None:
    make_checkpoint(tmp_path, "GptOss", **MIXTURES["GptOss"])
    with pytest.raises(CheckpointError, match=words):
        Checkpoint.open(change_config(tmp_path, tmp_path, **changes))


def test_damaged_mxfp4_is_refused(packed: tuple[Path, PreTrainedModel], tmp_path: Path) -> None:
    directory, _ = packed
    tensors = load_file(directory / "model.safetensors")
    change_config(directory, tmp_path)
    name = "model.layers.0.mlp.experts.down_proj"
    without = {one: tensor for one, tensor in tensors.items() if one != f"{name}_scales"}
    save_file(without, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"down_proj_scales' is missing"):
        Checkpoint.open(tmp_path)
    tensors[f"{name}_scales"][2, 5, 1] = 255
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"down_proj_scales' holds NaN or infinity"):
        Checkpoint.open(tmp_path).quantized.read("model.layers.0.mlp.experts.2.down_proj.weight", FP8, CPU)
    with pytest.raises(CheckpointError, match="must be multiples of 32"):
        Checkpoint.open(change_config(tmp_path, tmp_path, intermediate_size=40))


# Configuration


def test_the_published_configuration_is_the_named_shape(tmp_path: Path) -> None:
    """The keys of openai/gpt-oss-20b's config.json that say what the model is."""
    config = {
        **{"architectures": ["GptOssForCausalLM"], "attention_bias": True, "experts_per_token": 4, "head_dim": 64},
        **{"hidden_size": 2880, "intermediate_size": 2880, "max_position_embeddings": 131072},
        "layer_types": ["sliding_attention", "full_attention"] * 12,
        **{"num_attention_heads": 64, "num_hidden_layers": 24, "num_key_value_heads": 8, "num_local_experts": 32},
        **{"rms_norm_eps": 1e-05, "rope_theta": 150000, "sliding_window": 128, "swiglu_limit": 7.0},
        "rope_scaling": {
            **{"beta_fast": 32.0, "beta_slow": 1.0, "factor": 32.0, "original_max_position_embeddings": 4096},
            **{"rope_type": "yarn", "truncate": False},
        },
        **{"tie_word_embeddings": False, "vocab_size": 201088, "quantization_config": MXFP4},
        "eos_token_id": [200_002, 199_999, 200_012],
    }
    (tmp_path / "gpt-oss-20b").mkdir()
    (tmp_path / "gpt-oss-20b" / "config.json").write_text(json.dumps(config))
    assert read_config(tmp_path / "gpt-oss-20b") == SHAPES["gpt-oss-20b"]
    for key in ("attention_bias", "layer_types", "rms_norm_eps", "sliding_window", "swiglu_limit", "head_dim"):
        del config[key]  # these are transformers' defaults too
    (tmp_path / "gpt-oss-20b" / "config.json").write_text(json.dumps(config))
    assert read_config(tmp_path / "gpt-oss-20b") == SHAPES["gpt-oss-20b"]


def test_yarn_blends_as_gpt_oss_wants_it() -> None:
    """From the formula, dimension by dimension: the ramp's ends are not whole dimensions."""
    rope = SHAPES["gpt-oss-120b"].rope
    cos_LE, _ = rotary_tables(rope, 64, 2)
    low, high = (32 * math.log(4096 / (turns * 2 * math.pi)) / math.log(150_000) for turns in (32, 1))
    assert (round(low, 3), round(high, 3)) == (8.093, 17.398)
    for dimension in range(32):
        frequency = 150_000 ** (-dimension / 32)
        share = min(max((dimension - low) / (high - low), 0.0), 1.0)
        frequency = frequency / 32 * share + frequency * (1 - share)
        assert cos_LE[1, dimension].item() == pytest.approx((0.1 * math.log(32) + 1) * math.cos(frequency), abs=1e-6)


# Attention


def test_a_sink_is_a_key_without_value_and_a_window_ends() -> None:
    """The definition against the softmax written out, for every query of a chunk."""
    random = torch.Generator().manual_seed(1)
    q, k, v = (torch.randn(shape, generator=random) for shape in ((5, 4, 8), (9, 2, 8), (9, 2, 8)))
    sinks = torch.randn(4, generator=random)
    out = reference.chunk_attention(q, k, v, 3, sinks)
    for query in range(5):
        last = 9 - 5 + query
        for head in range(4):
            keys = range(last - 2, last + 1)
            powers = [math.exp(float(q[query, head] @ k[key, head // 2]) / 8**0.5) for key in keys]
            total = sum(powers) + math.exp(float(sinks[head]))
            expected = sum(power / total * v[key, head // 2] for key, power in zip(keys, powers, strict=True))
            torch.testing.assert_close(out[query, head], expected)


# Plans


def test_layers_with_a_window_read_no_more_than_it() -> None:
    shape = SHAPES["gpt-oss-20b"]
    windowed, full = (
        CostModel(one, find_scheme("fp8"), find_gpu("H200")) for one in (shape, replace(shape, windows=()))
    )
    key_bytes = 2 * 8 * 64 / windowed._few_decodes[0]
    saved = full.step_of(10, 10_000, [], 10).decode_attention - windowed.step_of(10, 10_000, [], 10).decode_attention
    assert saved == pytest.approx(12 * (10_000 - 10 * 128) * key_bytes)
    short = [costs.step_of(10, 600, [(0, 128)], 11) for costs in (windowed, full)]
    assert short[0] == short[1]
    prompt = [(0, 8192)]
    assert windowed.step_of(0, 0, prompt, 1).chunk_attention < 0.6 * full.step_of(0, 0, prompt, 1).chunk_attention


def test_the_larger_model_fits_one_h200_in_fp8() -> None:
    plan = plan_memory_of(SHAPES["gpt-oss-120b"], EngineConfig("fp8", max_batched_tokens=2048), "cuda", 150 * 10**9)
    assert 118e9 < plan.weights_bytes < 121e9
    assert plan.cache_tokens > 300_000
