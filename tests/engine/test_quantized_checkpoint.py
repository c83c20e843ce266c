"""fp8 checkpoints in every layout that is read: answers of the weights they stand for by transformers; refusals."""

from __future__ import annotations

import json
import math
import random
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from types import SimpleNamespace

import hypothesis.strategies as st
import pytest
import torch
from checkpoints import make_checkpoint, teacher_forced
from engines import answer_and_logits
from hypothesis import given, settings
from quantized_checkpoints import LAYOUTS, MODELOPT_CACHE, Quantized, modelopt, modelopt_config, quantize
from safetensors.torch import load_file, save_file
from torch import Tensor

from examples import every, examples
from megatoken.engine import Engine, EngineConfig, tensor_files
from megatoken.engine.checkpoint import Checkpoint, open_model
from megatoken.engine.memory import weight_bytes
from megatoken.engine.model import load_weights
from megatoken.engine.ops import cpu, reference
from megatoken.engine.schemes import find_scheme
from megatoken.engine.schemes.fp8_weight import Fp8Weight, quantise_tensor, stack, with_one_scale
from megatoken.errors import CheckpointError

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
FP8 = find_scheme("fp8")
SHAPE = {"hidden_size": 64, "head_dim": 32, "vocab_size": 301}
ANSWER_TOKENS = 12
ABSENT = object()
IN_FP8_LARGEST, IN_FP8_TYPICAL = 0.4, 0.07
"""Error of logits as a share of their standard deviation: of activations, keys and values, weights being the same."""


@pytest.fixture(scope="module", params=LAYOUTS)
def quantized(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Quantized:
    """Every layout, with other options of the model and other numbers of files."""
    number = list(LAYOUTS).index(request.param)
    architecture = ("Llama", "Qwen2", "Qwen3")[number % 3]
    options = {"tie_word_embeddings": number % 2 == 1}
    if number % 3 == 0:
        options |= {"attention_bias": True, "mlp_bias": True}
    directory = tmp_path_factory.mktemp(request.param.replace(" ", "-"))
    return quantize(directory, LAYOUTS[request.param], architecture, shards=1 + number % 3, **SHAPE, **options)


@pytest.fixture(scope="module")
def intact(tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, Path]:
    """One file each, to make damaged copies of."""
    layouts = ("modelopt cache", "compressed static", "compressed dynamic", "compressed cache")
    directories = {layout: tmp_path_factory.mktemp("intact") for layout in layouts}
    for layout, directory in directories.items():
        quantize(directory, LAYOUTS[layout])
    return directories


def some_prompts(*lengths: int) -> list[list[int]]:
    draw = random.Random(0)
    return [[draw.randrange(SHAPE["vocab_size"]) for _ in range(length)] for length in lengths]


# Answers


ERRORS = {"fp32": (5e-6, 1e-6), "bf16": (0.08, 0.01), "fp8": (IN_FP8_LARGEST, IN_FP8_TYPICAL)}
ROUNDED = ("bf16", "fp8")


@pytest.mark.parametrize(
    ("quantized", "precision"),
    [
        (layout, precision)
        for number, layout in enumerate(LAYOUTS)
        for precision in ("fp32", ROUNDED[number % 2], *every(ROUNDED[1 - number % 2]))
    ],
    indirect=["quantized"],
)
def test_logits_are_those_of_the_weights_that_are_meant(
    quantized: Quantized, precision: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    largest_error, typical_error = ERRORS[precision]
    engine = Engine(quantized.directory, EngineConfig(precision=precision, max_batched_tokens=24, cache_tokens=256))
    errors = []
    for prompt in some_prompts(1, 40):
        answer, logits = answer_and_logits(engine, prompt, ANSWER_TOKENS, monkeypatch)
        expected = teacher_forced(quantized.model, prompt, answer)
        errors.append((logits - expected) / expected.std())
    largest, typical = torch.cat(errors).abs().max(), torch.cat(errors).square().mean().sqrt()
    print(f"\n{precision}: largest error {largest:.1e}, typical {typical:.1e}")
    assert largest < largest_error
    assert typical < typical_error


@pytest.mark.parametrize("layout", ["modelopt cache", "compressed cache"])
def test_scales_of_the_cache_are_honoured(layout: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Keys and values of some thousands saturate at 448, unless their scales are used."""
    quantized = quantize(tmp_path, LAYOUTS[layout], "Qwen3", cache_gain=1024.0, **SHAPE)
    [prompt] = some_prompts(40)

    def typical_error() -> float:
        engine = Engine(tmp_path, EngineConfig(precision="fp8", cache_tokens=256))
        answer, logits = answer_and_logits(engine, prompt, ANSWER_TOKENS, monkeypatch)
        expected = teacher_forced(quantized.model, prompt, answer)
        return float((logits - expected).square().mean().sqrt() / expected.std())

    assert typical_error() < IN_FP8_TYPICAL
    intact = (tmp_path / "model.safetensors").read_bytes()
    for name in LAYOUTS[layout].cache:
        edit_tensors(
            tmp_path, lambda tensors, name=name: [tensors[key].fill_(1.0) for key in tensors if key.endswith(name)]
        )
        assert typical_error() > 3 * IN_FP8_TYPICAL
        (tmp_path / "model.safetensors").write_bytes(intact)


# Weights


def test_weights_are_multiplied_out_exactly(quantized: Quantized) -> None:
    checkpoint = Checkpoint.open(quantized.directory)
    meant = quantized.model.state_dict()
    for name in checkpoint.config.tensor_shapes():
        assert torch.equal(checkpoint.read(name, torch.float32), meant[name]), name
        assert torch.equal(checkpoint.read(name, torch.bfloat16), meant[name].bfloat16()), name


def test_linears_reach_the_back_end_as_they_are_stored(quantized: Quantized) -> None:
    """Merged ones too: rows keep their scales, and the input scale is the largest."""
    stored: dict[str, Tensor] = {}
    for file in quantized.directory.glob("*.safetensors"):
        stored |= load_file(file)
    meant = quantized.model.state_dict()
    source = Checkpoint.open(quantized.directory)
    ops = SimpleNamespace(
        pack_linear=lambda weight, bias, scheme: (weight, bias),
        pack_gated=lambda parts, scheme: parts,
        keeps_packed=lambda dtype: False,
    )
    weights = load_weights(source, ops, FP8, 16, CPU)
    for number, layer in enumerate(weights.layers):
        attention, mlp = f"model.layers.{number}.self_attn", f"model.layers.{number}.mlp"
        linears = [
            ([f"{attention}.{part}_proj" for part in "qkv"], layer.qkv),
            ([f"{attention}.o_proj"], layer.output),
            ([f"{mlp}.gate_proj"], layer.gate_up[0]),
            ([f"{mlp}.up_proj"], layer.gate_up[1]),
            ([f"{mlp}.down_proj"], layer.down),
        ]
        for names, (weight, bias) in linears:
            assert isinstance(weight, Fp8Weight)
            parts = [stored[f"{name}.weight"].view(torch.uint8) for name in names]
            assert torch.equal(weight.values_ND.view(torch.uint8), torch.cat(parts))
            expected = torch.cat([meant[f"{name}.weight"] for name in names])
            assert torch.equal(weight.values_ND.float() * weight.scale_N1, expected)
            scales = [stored[f"{name}.input_scale"].item() for name in names if quantized.layout.input_scales]
            assert weight.input_scale == (max(scales) if scales else None)
            assert (bias is None) == (f"{names[0]}.bias" not in meant)
            if bias is not None:
                assert torch.equal(bias, torch.cat([meant[f"{name}.bias"] for name in names]).bfloat16())
        expected_scales = [1.0, 1.0]
        if quantized.layout.cache:
            expected_scales = [stored[f"{attention}.{name}"].item() for name in quantized.layout.cache]
            assert len(set(expected_scales)) == 2
        assert list(layer.cache_scales) == expected_scales
    for precision in ("bf16", "fp32"):
        for layer in load_weights(source, ops, find_scheme(precision), 16, CPU).layers:
            assert layer.cache_scales == (1.0, 1.0)
            assert isinstance(layer.down[0], Tensor)


def test_weight_bytes(quantized: Quantized) -> None:
    """On a GPU as many as the files hold of weights; on the CPU e4m3 values take the place of bf16."""
    stored = 0
    for file in quantized.directory.glob("*.safetensors"):
        stored += sum(tensor.nbytes for name, tensor in load_file(file).items() if not name.endswith("_scale"))
    source = Checkpoint.open(quantized.directory)
    assert weight_bytes(source.config, FP8, "cuda") == stored
    for precision in ("bf16", "fp8"):
        weights = load_weights(source, cpu, find_scheme(precision), 16, CPU)
        tensors = [weights.embedding_VD, weights.norm_D, weights.head.packed]
        for layer in weights.layers:
            linears = [layer.qkv, layer.output, *layer.gate_up, layer.down]
            tensors += [linear.packed for linear in linears]
            tensors += [linear.bias for linear in linears if linear.bias is not None]
            tensors += [layer.input_norm_D, layer.post_norm_D, *(layer.qk_norms_E or ())]
        assert weight_bytes(source.config, find_scheme(precision), "cpu") == sum(tensor.nbytes for tensor in tensors)


# Number formats

SIZES = st.integers(1, 40)


def some_weight(seed: int, rows: int, columns: int, by_row: bool) -> Fp8Weight:
    draw = torch.Generator().manual_seed(seed)
    values = (torch.randn(rows, columns, generator=draw) * 120).clamp(-448, 448).to(torch.float8_e4m3fn)
    return Fp8Weight(values, torch.randn(rows if by_row else 1, 1, generator=draw).exp(), torch.rand(1).item() + 0.1)


def multiplied_out(weight: Fp8Weight) -> Tensor:
    return weight.values_ND.float() * weight.scale_N1


@settings(max_examples=examples(100))
@given(seed=st.integers(0, 2**31), rows=SIZES, columns=SIZES, by_row=st.booleans())
def test_one_scale_rounds_once(seed: int, rows: int, columns: int, by_row: bool) -> None:
    weight = some_weight(seed, rows, columns, by_row)
    one = with_one_scale(weight)
    assert one.scale_N1.shape == (1, 1)
    assert one.scale_N1 == weight.scale_N1.max()
    assert one.input_scale == weight.input_scale
    unchanged = (weight.scale_N1 == one.scale_N1).expand(rows, 1)[:, 0]
    assert torch.equal(one.values_ND.float()[unchanged], weight.values_ND.float()[unchanged])
    exact, error = multiplied_out(weight), (multiplied_out(one) - multiplied_out(weight)).abs()
    # Half a step of 3 bits, or of the subnormal numbers below 2^-6.
    assert (error <= torch.maximum(exact.abs() * 2**-4, one.scale_N1 * 2**-10) * 1.0001).all()


@settings(max_examples=examples(50))
@given(parts=st.lists(st.tuples(st.integers(0, 2**31), SIZES, st.booleans()), min_size=1, max_size=3), columns=SIZES)
def test_stacked_weights_keep_their_values(parts: list[tuple[int, int, bool]], columns: int) -> None:
    weights = [some_weight(seed, rows, columns, by_row) for seed, rows, by_row in parts]
    stacked = stack(weights)
    assert torch.equal(multiplied_out(stacked), torch.cat([multiplied_out(weight) for weight in weights]))
    assert stacked.input_scale == max(weight.input_scale for weight in weights)
    unmeasured = Fp8Weight(weights[0].values_ND, weights[0].scale_N1)
    assert stack([*weights, unmeasured]).input_scale is None
    plain = multiplied_out(weights[0])
    assert torch.equal(FP8.stack([plain, plain]), torch.cat((plain, plain)))
    mixed = multiplied_out(FP8.stack([plain, weights[0]]))
    assert torch.equal(mixed, torch.cat((multiplied_out(quantise_tensor(plain)), plain)))


@settings(max_examples=examples(50))
@given(seed=st.integers(0, 2**31), rows=SIZES, inputs=SIZES, outputs=SIZES, by_row=st.booleans())
def test_linears_with_a_scale_for_each_row(seed: int, rows: int, inputs: int, outputs: int, by_row: bool) -> None:
    weight = some_weight(seed, outputs, inputs, by_row)
    x = torch.randn(rows, inputs, generator=torch.Generator().manual_seed(seed)).bfloat16()
    packed = cpu.pack_linear(weight, None, FP8)
    oracle = reference.Linear(weight.values_ND, None, weight.scale_N1.view(-1))
    expected = reference.linear(x.float(), oracle)
    magnitude = x.float().abs() @ multiplied_out(weight).abs().T
    assert ((cpu.linear(x, packed).float() - expected).abs() <= 2**-7 * magnitude).all()


# Refusals


def edit_json(path: Path, *keys: str, value: object) -> None:
    """Sets what ``keys`` lead to, or deletes it."""
    values = inner = json.loads(path.read_text())
    for key in keys[:-1]:
        inner = inner[key]
    if value is ABSENT:
        del inner[keys[-1]]
    else:
        inner[keys[-1]] = value
    path.write_text(json.dumps(values))


def edit_tensors(directory: Path, change: Callable[[dict[str, Tensor]], object]) -> None:
    tensors = load_file(directory / "model.safetensors")
    change(tensors)
    save_file(tensors, directory / "model.safetensors")


def copy(intact: Mapping[str, Path], layout: str, tmp_path: Path) -> Path:
    return Path(shutil.copytree(intact[layout], tmp_path / "model"))


def refusal(directory: Path) -> str:
    with pytest.raises(CheckpointError) as caught:
        Checkpoint.open(directory)
    message = str(caught.value)
    assert "\n" not in message
    return message.removeprefix(str(directory)).removeprefix("/")


READ = "supported are bf16, fp16 and fp32; fp8 of ModelOpt and compressed-tensors"
GROUP = ("config_groups", "group_0")
INT4 = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 128}


@pytest.mark.parametrize(
    ("keys", "value", "problem"),
    [
        (("quant_method",), "fp8", "quant_method is 'fp8'"),
        (("quant_method",), "gptq", "bits is missing"),
        (("quant_method",), "awq", "bits is missing"),
        (("quant_method",), ["modelopt"], "quant_method is ['modelopt']"),
        (("quant_method",), ABSENT, "quant_method is missing"),
        (("format",), "nvfp4-pack-quantized", "weights.num_bits is 8"),
        (("format",), "pack-quantized", "weights.num_bits is 8"),
        (("format",), "int-quantized", "format is 'int-quantized'"),
        (("format",), ABSENT, "format is missing"),
        (("sparsity_config",), {"format": "sparse-24-bitmask"}, "sparsity_config.format is 'sparse-24-bitmask'"),
        (("transform_config",), {"config_groups": {"R4": {}}}, "transform_config is {"),
        (("config_groups",), {}, "config_groups is {}"),
        (("config_groups",), {"a": {}, "b": {}}, "config_groups.a.weights.type is missing"),
        (("config_groups",), {"a\nb": {}}, "config_groups is {"),
        ((*GROUP, "weights"), INT4, "config_groups.group_0.weights.num_bits is 4"),
        ((*GROUP, "weights"), None, "config_groups.group_0.weights.type is missing"),
        ((*GROUP, "weights", "type"), "int", "weights.type is 'int'"),
        ((*GROUP, "weights", "strategy"), "block", "weights.strategy is 'block'"),
        ((*GROUP, "weights", "strategy"), "group", "weights.strategy is 'group'"),
        ((*GROUP, "weights", "symmetric"), False, "weights.symmetric is False"),
        ((*GROUP, "weights", "dynamic"), True, "weights.dynamic is True"),
        ((*GROUP, "input_activations", "num_bits"), 4, "input_activations.num_bits is 4"),
        ((*GROUP, "input_activations", "strategy"), "token", "input_activations.strategy is 'token'"),
        ((*GROUP, "input_activations", "strategy"), {}, "input_activations.strategy is {}"),
        ((*GROUP, "weights"), {"type": "float", "group_size": 128}, "weights.strategy is missing"),
        ((*GROUP, "input_activations", "dynamic"), "local", "input_activations.dynamic is 'local'"),
        ((*GROUP, "output_activations"), {"num_bits": 8}, "output_activations is {'num_bits': 8}"),
        (("kv_cache_scheme",), {"num_bits": 8, "type": "int"}, "kv_cache_scheme.type is 'int'"),
        (("kv_cache_scheme",), {"num_bits": 4, "type": "float"}, "kv_cache_scheme.num_bits is 4"),
        (("kv_cache_scheme",), {"type": "float", "strategy": "attn_head"}, "kv_cache_scheme.strategy is 'attn_head'"),
        (("kv_cache_scheme",), {"type": "float", "dynamic": True}, "kv_cache_scheme.dynamic is True"),
        (("kv_cache_scheme",), "NVFP4", "kv_cache_scheme is 'NVFP4'"),
    ],
)
def test_unsupported_compressed_tensors(
    intact: Mapping[str, Path], keys: tuple[str, ...], value: object, problem: str, tmp_path: Path
) -> None:
    directory = copy(intact, "compressed static", tmp_path)
    edit_json(directory / "config.json", "quantization_config", *keys, value=value)
    message = refusal(directory)
    assert message.startswith("config.json: quantization_config.")
    assert problem in message
    assert READ in message or "expected true or false" in message


@pytest.mark.parametrize("quantization", [{}, [], "fp8", False])
def test_a_declaration_that_declares_nothing(intact: Mapping[str, Path], quantization: object, tmp_path: Path) -> None:
    directory = copy(intact, "compressed static", tmp_path)
    edit_json(directory / "config.json", "quantization_config", value=quantization)
    assert refusal(directory).startswith("config.json: quantization_config")


@pytest.mark.parametrize(
    ("algorithm", "cache", "problem"),
    [
        ("NVFP4_SVD", None, "quant_algo is 'NVFP4_SVD'"),
        ("W4A8_AWQ", None, "quant_algo is 'W4A8_AWQ'"),
        ("FP8_PB_WO", None, "quant_algo is 'FP8_PB_WO'"),
        ("MIXED_PRECISION", None, "quantized_layers is missing"),
        (None, "FP8", "quant_algo is None"),
        (["FP8"], None, "quant_algo is ['FP8']"),
        ("FP8", "NVFP4", "kv_cache_quant_algo is 'NVFP4'"),
        ("FP8", "INT8", "kv_cache_quant_algo is 'INT8'"),
    ],
)
def test_unsupported_modelopt(
    intact: Mapping[str, Path], algorithm: str, cache: str | None, problem: str, tmp_path: Path
) -> None:
    directory = copy(intact, "modelopt cache", tmp_path)
    path = directory / "hf_quant_config.json"
    path.write_text(json.dumps(modelopt(algorithm, cache)))
    message = refusal(directory)
    assert message.startswith(f"hf_quant_config.json: quantization.{problem}")
    assert READ in message
    path.unlink()
    edit_json(directory / "config.json", "quantization_config", value=modelopt_config(algorithm)["quantization_config"])
    edit_json(directory / "config.json", "quantization_config", "kv_cache_scheme", value=cache)
    message = refusal(directory)
    assert message.startswith("config.json: quantization_config.")
    assert READ in message


def test_declarations_that_contradict_each_other(intact: Mapping[str, Path], tmp_path: Path) -> None:
    directory = copy(intact, "compressed static", tmp_path)
    path = directory / "hf_quant_config.json"
    path.write_text(json.dumps(modelopt()))
    Checkpoint.open(directory)
    path.write_text(json.dumps(modelopt("FP8_PER_CHANNEL_PER_TOKEN")))
    assert refusal(directory).startswith("hf_quant_config.json: contradicts quantization_config in config.json")


LINEAR = "model.layers.1.mlp.up_proj"
KEY_SCALE, VALUE_SCALE = (f"model.layers.0.self_attn.{name}" for name in MODELOPT_CACHE)


@pytest.mark.parametrize(
    ("layout", "name", "tensor", "problem"),
    [
        ("modelopt cache", f"{LINEAR}.weight_scale", ABSENT, "is missing (1 of 53 are)"),
        ("modelopt cache", f"{LINEAR}.input_scale", ABSENT, "is missing"),
        ("modelopt cache", KEY_SCALE, ABSENT, "is missing"),
        ("compressed static", f"{LINEAR}.weight_scale", torch.ones(48, 1), "has shape [48, 1], config.json implies []"),
        ("compressed dynamic", f"{LINEAR}.weight_scale", torch.ones(1), "has shape [1], config.json implies [48] or"),
        ("compressed dynamic", f"{LINEAR}.weight_scale", torch.ones(1, 48), "has shape [1, 48], config.json implies"),
        ("compressed dynamic", f"{LINEAR}.input_scale", torch.ones(1), "has no place in the model"),
        ("compressed dynamic", f"{LINEAR}.weight_zero_point", torch.ones(48, 1), "has no place in the model"),
        ("compressed static", "model.layers.0.self_attn.k_scale", torch.ones(1), "has no place in the model"),
        ("modelopt cache", f"{LINEAR}.weight", torch.ones(48, 31).to(torch.float8_e4m3fn), "has shape [48, 31]"),
        (
            "modelopt cache",
            f"{LINEAR}.weight",
            torch.ones(48, 32).bfloat16(),
            "has dtype BF16; hf_quant_config.json says e4m3",
        ),
        ("modelopt cache", f"{LINEAR}.weight", torch.ones(48, 32).to(torch.float8_e5m2), "has dtype F8_E5M2"),
        ("modelopt cache", f"{LINEAR}.weight_scale", torch.ones(1, dtype=torch.int8), "has dtype I8"),
        ("modelopt cache", f"{LINEAR}.weight_scale", torch.tensor(1.0, dtype=torch.float64), "has dtype F64"),
        ("modelopt cache", "lm_head.weight", torch.ones(301, 32).to(torch.float8_e4m3fn), "has dtype F8_E4M3"),
        *[
            (layout, name, torch.tensor(value), f"holds {value}; expected a positive scale")
            for layout, name in (("modelopt cache", f"{LINEAR}.weight_scale"), ("modelopt cache", VALUE_SCALE))
            for value in (math.nan, math.inf, 0.0, -0.5)
        ],
        ("compressed static", f"{LINEAR}.input_scale", torch.tensor([0.0]), "holds 0.0"),
        ("compressed static", f"{LINEAR}.input_scale", torch.tensor([1e-40]), "holds 9.9999"),
        ("compressed static", f"{LINEAR}.weight_scale", torch.tensor([2e38]), "holds 1.99"),
        ("compressed dynamic", f"{LINEAR}.weight_scale", torch.tensor([1.0] * 47 + [-1.0])[:, None], "holds -1.0"),
    ],
)
def test_tensors_refused(
    intact: Mapping[str, Path], layout: str, name: str, tensor: object, problem: str, tmp_path: Path
) -> None:
    directory = copy(intact, layout, tmp_path)

    def change(tensors: dict[str, Tensor]) -> None:
        if tensor is ABSENT:
            del tensors[name]
        else:
            tensors[name] = tensor

    edit_tensors(directory, change)
    message = refusal(directory)
    if tensor is not ABSENT:
        assert message.startswith("model.safetensors: ")
    assert f"tensor {name!r} {problem}" in message


def test_e4m3_without_a_declaration(intact: Mapping[str, Path], tmp_path: Path) -> None:
    directory = copy(intact, "compressed static", tmp_path)
    edit_json(directory / "config.json", "quantization_config", value=ABSENT)
    assert "has dtype F8_E4M3; supported are bf16, fp16 and fp32" in refusal(directory)


def test_a_declaration_without_e4m3(tmp_path: Path) -> None:
    make_checkpoint(tmp_path)
    (tmp_path / "hf_quant_config.json").write_text(json.dumps(modelopt()))
    message = refusal(tmp_path)
    assert "'model.layers.0.self_attn.q_proj.weight' has dtype F32; hf_quant_config.json says e4m3" in message


@pytest.mark.parametrize("code", [0x7F, 0xFF])
@pytest.mark.parametrize("position", [0, 700, -1])
def test_nan_is_found(intact: Mapping[str, Path], code: int, position: int, tmp_path: Path) -> None:
    directory = copy(intact, "compressed dynamic", tmp_path)
    name = f"{LINEAR}.weight"

    def damage(tensors: dict[str, Tensor]) -> None:
        tensors[name].view(torch.uint8).view(-1)[position] = code

    edit_tensors(directory, damage)
    checkpoint = Checkpoint.open(directory)
    assert checkpoint.quantized is not None
    pattern = rf"model.safetensors: tensor '{name}' holds NaN"
    with pytest.raises(CheckpointError, match=pattern):
        checkpoint.quantized.read(name, FP8, CPU)
    with pytest.raises(CheckpointError, match=pattern):
        checkpoint.read(name, torch.float32)


def test_cache_scales_may_be_left_out_together(intact: Mapping[str, Path], tmp_path: Path) -> None:
    directory = copy(intact, "compressed cache", tmp_path)
    edit_tensors(
        directory, lambda tensors: [tensors.pop(name) for name in [*tensors] if name[-8:] in (".k_scale", ".v_scale")]
    )
    checkpoint = Checkpoint.open(directory)
    assert checkpoint.quantized is not None
    assert checkpoint.quantized.cache_scales(1) == (1.0, 1.0)


@pytest.mark.parametrize("layout", ["compressed static", "compressed dynamic"])
def test_weights_are_read_in_pieces(intact: Mapping[str, Path], layout: str, monkeypatch: pytest.MonkeyPatch) -> None:
    checkpoint = Checkpoint.open(intact[layout])
    assert checkpoint.quantized is not None
    names = checkpoint.config.tensor_shapes()
    whole = {name: checkpoint.read(name, torch.float32) for name in names}
    for elements in (1, 100, 1000):
        monkeypatch.setattr(tensor_files, "_CHUNK_ELEMENTS", elements)
        for name in names:
            assert torch.equal(checkpoint.read(name, torch.float32), whole[name])
            if name in checkpoint.quantized:
                assert torch.equal(multiplied_out(checkpoint.quantized.read(name, FP8, CPU)), whole[name])


def test_the_hash_covers_every_declaration(intact: Mapping[str, Path], tmp_path: Path) -> None:
    directory = copy(intact, "modelopt cache", tmp_path)
    before = Checkpoint.open(directory).content_hash
    edit_json(directory / "hf_quant_config.json", "producer", "version", value="0.34.0")
    assert Checkpoint.open(directory).content_hash != before


def test_random_weights_need_only_the_shape(intact: Mapping[str, Path], tmp_path: Path) -> None:
    directory = copy(intact, "modelopt cache", tmp_path)
    edit_json(directory / "hf_quant_config.json", "quantization", "quant_algo", value="NVFP4")
    source = open_model(directory, random_weights=True)
    assert source.quantized is None
    assert source.config.hidden_size == 32


# Fuzz: whatever the declaration, an error of one line or a checkpoint that can be read

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=6,
)
KNOWN = st.sampled_from(["modelopt", "compressed-tensors", "float-quantized", "FP8", "tensor", "channel", "token", 8])


def places(values: Mapping[str, object], before: tuple[str, ...] = ()) -> list[tuple[str, ...]]:
    inner = [
        place for key, value in values.items() if isinstance(value, dict) for place in places(value, (*before, key))
    ]
    return [(*before, key) for key in values] + inner


@pytest.mark.parametrize(
    ("layout", "file"), [("modelopt cache", "hf_quant_config.json"), ("compressed cache", "config.json")]
)
def test_wrong_declarations(intact: Mapping[str, Path], layout: str, file: str, tmp_path: Path) -> None:
    directory = copy(intact, layout, tmp_path)
    path = directory / file
    content = path.read_text()
    section = "quantization" if "quantization" in json.loads(content) else "quantization_config"
    keys = st.sampled_from([(section, *place) for place in places(json.loads(content)[section])] + [(section,)])

    @settings(max_examples=examples(200), deadline=None)
    @given(keys, JSON | KNOWN | st.just(ABSENT))
    def try_one(place: tuple[str, ...], value: object) -> None:
        path.write_text(content)
        edit_json(path, *place, value=value)
        message = ""
        try:
            checkpoint = Checkpoint.open(directory)
            for name in checkpoint.config.tensor_shapes():
                checkpoint.read(name, torch.float32)
        except CheckpointError as error:
            message = str(error)
        assert "\n" not in message

    try_one()
