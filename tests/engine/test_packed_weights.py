"""``packed_weights``: which weights stay packed on a GPU, what they take, and what is refused."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from checkpoints import make_checkpoint
from engines import make_engine

from megatoken.engine import EngineConfig, device
from megatoken.engine.checkpoint import RandomWeights, open_model
from megatoken.engine.config import PACKED_TOKENS, SHAPES
from megatoken.engine.cost_model import CostModel
from megatoken.engine.gpus import find_gpu
from megatoken.engine.memory import MemoryPlan, plan_memory_of
from megatoken.engine.ops import packed_product
from megatoken.engine.quantized_layouts import Groups
from megatoken.engine.schemes import FP8, FP8_PACKED, find_scheme, scheme_of
from megatoken.engine.schemes.fp8_weight import Fp8Weight
from megatoken.engine.schemes.packed4 import Packed4, draw, expand
from megatoken.errors import CapacityError, ConfigError
from megatoken.quantization import write

CPU, LLAMA = torch.device("cpu"), SHAPES["llama2-70b"]
PACKED = EngineConfig("fp8", packed_weights=True)


def test_four_bit_weights_are_kept_as_they_are_stored(tmp_path: Path) -> None:
    make_checkpoint(tmp_path / "plain", hidden_size=64, intermediate_size=128)
    write.quantize(tmp_path / "plain", "nvfp4", tmp_path / "packed")
    source = open_model(tmp_path / "packed")
    source.keep_packed()
    names = [f"model.layers.0.self_attn.{part}_proj.weight" for part in "qkv"]
    parts = [source.quantized.read(name, FP8_PACKED, CPU) for name in names]
    whole = FP8_PACKED.stack(parts)
    assert isinstance(whole, Packed4)
    assert torch.equal(whole.decode(torch.float32), torch.cat([part.decode(torch.float32) for part in parts]))
    # One that is stored otherwise is no obstacle: all are expanded, none is rounded to fp8 again.
    other = expand(parts[0])[0]
    mixed = FP8_PACKED.stack([other, *parts[1:]])
    assert isinstance(mixed, Fp8Weight)
    expected = FP8.stack([expand(part)[0] for part in parts])
    assert torch.equal(mixed.values_ND.view(torch.uint8), expected.values_ND.view(torch.uint8))
    assert torch.equal(mixed.scale_N1, expected.scale_N1)


def test_what_is_expanded_counts_as_expanded() -> None:
    def saved(**different: Groups) -> int:
        groups = dict.fromkeys(LLAMA.linear_shapes, Groups(16, zeros=False, kind="e2m1"))
        groups |= {name: different[one] for name in groups for one in different if f".{one}_proj" in name}
        return device._packed_saves(LLAMA, groups)

    per_layer = {"q": 8192, "k": 1024, "v": 1024, "o": 8192, "gate": 28_672, "up": 28_672, "down": 28_672}

    def expanded(*names: str) -> int:
        return -sum(80 * 8192 * per_layer[name] for name in names) * 7 // 16

    assert saved() == 0
    int4 = Groups(16, zeros=False)
    assert saved(o=int4) == expanded("o")
    assert saved(k=int4) == expanded("q", "k", "v")
    assert saved(up=Groups(32, zeros=False, kind="e2m1")) == expanded("gate", "up")
    assert saved(**dict.fromkeys(per_layer, int4)) == expanded(*per_layer)


def test_four_bit_integers_do_not_stay_packed_on_a_gpu(tmp_path: Path) -> None:
    make_checkpoint(tmp_path / "plain", hidden_size=64, intermediate_size=128)
    write.quantize(tmp_path / "plain", "int4", tmp_path / "packed")
    with pytest.raises(ConfigError, match="no weights in NVFP4 or MXFP4"):
        open_model(tmp_path / "packed").keep_packed()


def test_the_formats_are_those_of_memory() -> None:
    assert FP8_PACKED.formats() == {"weights": "e2m1", "activations": "e4m3", "kv_cache": "e4m3"}


def test_random_weights_are_drawn_in_four_bits() -> None:
    plain = RandomWeights(SHAPES["tiny"])
    name = "model.layers.0.mlp.down_proj.weight"
    weight = plain.read(name, torch.bfloat16)
    plain.keep_packed()
    packed = plain.quantized.read(name, FP8_PACKED, CPU)
    error = (
        packed.decode(torch.float32) - weight.float()
    ).square().mean().sqrt() / weight.float().square().mean().sqrt()
    assert 0.08 < error < 0.11  # of NVFP4 for a normal distribution


def test_the_largest_value_of_a_block_is_its_largest_code() -> None:
    weight = torch.tensor([[6.0, -3.0, 0.0, 0.5] * 4 + [12.0, -12.0, 8.0, 1.0] * 4] * 2)
    assert torch.equal(draw(weight).decode(torch.float32), weight)


def test_the_plan_of_packed_weights_is_smaller() -> None:
    plans = [plan_memory_of(LLAMA, config, "cuda", 83 * 10**9) for config in (EngineConfig("fp8"), PACKED)]
    linears = 80 * (8192 * (8192 + 2 * 1024 + 8192) + 3 * 8192 * 28_672)
    assert plans[0].weights_bytes - plans[1].weights_bytes == linears * 7 // 16
    assert plans[1].cache_tokens > 3 * plans[0].cache_tokens
    assert [plan.packed_weights for plan in plans] == [False, True]
    assert "packed in four bits" in plans[1].lines()[1]
    # The largest linear, expanded in steps and in recorded ones.
    assert plans[1].process_bytes - plans[0].process_bytes == 2 * 2 * 28_672 * 8192


def test_steps_of_few_tokens_read_packed_weights_and_others_expand_them() -> None:
    costs = [CostModel(LLAMA, scheme, find_gpu("H200")) for scheme in (FP8, FP8_PACKED)]

    def seconds(tokens: int) -> list[float]:
        return [cost.step_of(tokens, 0.0, [], tokens).seconds for cost in costs]

    one, few, many = seconds(1), seconds(PACKED_TOKENS), seconds(PACKED_TOKENS + 1)
    assert one[1] < 0.65 * one[0]
    assert few[1] < few[0]
    rate = 0.861 * find_gpu("H200").memory_bytes_per_second
    expansion = LLAMA.linear_parameters * (9 / 16 + 1) / rate
    assert many[1] - many[0] == pytest.approx(expansion, rel=0.05)  # and the clock, which more memory traffic lowers


@pytest.fixture
def on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """Plans are made for one."""
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(device, "choose_device", lambda config: (torch.device("cuda", 0), None))
    monkeypatch.setattr(device, "available_memory_bytes", lambda chosen: 80 * 10**9)
    monkeypatch.setattr(packed_product, "obstacle", lambda chosen: None)
    return monkeypatch


def test_undecided_weights_stay_packed_only_where_they_do_not_fit(tmp_path: Path, on_a_gpu: pytest.MonkeyPatch) -> None:
    make_checkpoint(tmp_path / "plain", hidden_size=512, intermediate_size=1024, head_dim=16, num_hidden_layers=5)
    write.quantize(tmp_path / "plain", "nvfp4", tmp_path / "packed")
    source = open_model(tmp_path / "packed")

    def settled(packed: bool | None, memory_bytes: int | None = None) -> tuple[EngineConfig, MemoryPlan]:
        config = EngineConfig("fp8", packed_weights=packed, memory_bytes=memory_bytes, cache_tokens=512)
        return device.settle(source, config)

    taken = [settled(packed)[1].total_bytes for packed in (False, True)]
    assert taken[1] < taken[0]
    for memory_bytes, packed in ((None, False), (taken[0], False), (taken[0] - 1, True), (taken[1], True)):
        config, plan = settled(None, memory_bytes)
        assert config.packed_weights == plan.packed_weights == packed
        assert plan == settled(packed, memory_bytes)[1]
    with pytest.raises(CapacityError, match="does not fit: packed weights "):
        settled(None, taken[1] - 1)
    on_a_gpu.setattr(packed_product, "obstacle", lambda chosen: "no compiler")
    assert not settled(None)[1].packed_weights
    with pytest.raises(CapacityError, match=r"does not fit.*four-bit weights cannot stay packed: no compiler"):
        settled(None, taken[1])
    with pytest.raises(CapacityError, match="packed_weights: no compiler; leave it on null"):
        settled(True)


def test_weights_that_are_expanded_are_counted_so(tmp_path: Path, on_a_gpu: pytest.MonkeyPatch) -> None:
    """Of columns that are no multiple of 64."""
    sizes = {}
    for columns in (1024, 1056):
        make_checkpoint(tmp_path / f"plain-{columns}", hidden_size=512, intermediate_size=columns, head_dim=16)
        write.quantize(tmp_path / f"plain-{columns}", "mxfp4", tmp_path / f"packed-{columns}")
        source = open_model(tmp_path / f"packed-{columns}")
        plans = [
            device.plan_memory(source.config, EngineConfig("fp8", packed_weights=packed), source.quantized)
            for packed in (False, True)
        ]
        sizes[columns] = plans[0].weights_bytes - plans[1].weights_bytes, source.config
    for columns, (saved, config) in sizes.items():
        staying = [shape for shape in config.linear_shapes.values() if shape[1] % 64 == 0]
        assert (len(staying) == len(config.linear_shapes)) == (columns == 1024)
        assert saved == sum(rows * columns for rows, columns in staying) * 15 // 32


@pytest.mark.parametrize("precision", ["bf16", "fp32"])
def test_other_precisions_are_refused(precision: str) -> None:
    with pytest.raises(ConfigError, match=f"packed_weights in precision {precision}.*take --precision fp8, or leave"):
        scheme_of(EngineConfig(precision, packed_weights=True))


def test_what_cannot_stay_packed_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="packed_weights in precision fp8"):
        find_scheme("fp8", "row", packed=True)
    for model, config in (
        (LLAMA, EngineConfig("fp8", packed_weights=True, tensor_parallel=2)),
        (SHAPES["gpt-oss-20b"], PACKED),
    ):
        with pytest.raises(ConfigError, match="one GPU that has a whole dense model"):
            plan_memory_of(model, config, "cuda", 83 * 10**9)
    make_checkpoint(tmp_path)
    with pytest.raises((CapacityError, ConfigError), match="packed_weights"):
        make_engine(tmp_path, precision="fp8", packed_weights=True)
    with pytest.raises(ConfigError, match="has no weights in NVFP4 or MXFP4"):
        open_model(tmp_path).keep_packed()
