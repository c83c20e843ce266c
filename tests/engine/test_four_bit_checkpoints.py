"""Four-bit checkpoints: each layout against its definition, bit by bit; answers of the decoded model; refusals."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path

import four_bit_checkpoints as files
import hypothesis.strategies as st
import numpy as np
import pytest
import torch
from engines import answer_and_logits
from four_bit_checkpoints import DECLARED, FourBit, make, random_linear
from hypothesis import given, settings
from safetensors.torch import load_file, save_file
from torch import Tensor

from examples import examples
from megatoken.engine import Engine, EngineConfig
from megatoken.engine.checkpoint import Checkpoint
from megatoken.engine.device import plan_memory
from megatoken.engine.model import load_weights
from megatoken.engine.ops import cpu, cpu_packed, native
from megatoken.engine.ops.cpu_packed import PackedLinear
from megatoken.engine.quantization_declaration import read_declaration
from megatoken.engine.schemes import find_scheme
from megatoken.engine.schemes.fp8_weight import Fp8Weight
from megatoken.engine.schemes.packed4 import Packed4, expand, pack, stack
from megatoken.engine.tensor_files import find_tensors
from megatoken.errors import CheckpointError

CPU = torch.device("cpu")
PROMPTS = ([5], list(range(40, 59)))
LINEAR = "model.layers.1.mlp.up_proj"


@pytest.fixture(scope="module", params=DECLARED)
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> FourBit:
    """Every layout."""
    return make(tmp_path_factory.mktemp(request.param.replace(" ", "-")), request.param)


@pytest.fixture(scope="module")
def intact(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """A checkpoint in a layout, to make damaged copies of."""
    made: dict[str, Path] = {}

    def of(kind: str) -> Path:
        if kind not in made:
            made[kind] = make(tmp_path_factory.mktemp("intact"), kind).directory
        return made[kind]

    return of


def read_one(folder: Path, kind: str, tensors: Mapping[str, Tensor], shape: tuple[int, int]) -> Packed4 | Fp8Weight:
    """One linear, through its layout and a file."""
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text("{}")
    (folder / "hf_quant_config.json").unlink(missing_ok=True)
    files.declare(folder, DECLARED[kind])
    save_file({f"m.{name}": tensor.contiguous() for name, tensor in tensors.items()}, folder / "model.safetensors")
    declaration = read_declaration(folder, ["m"])
    assert declaration is not None
    stored, _ = find_tensors(folder)
    layout = declaration.layouts["m"]
    expected = layout.expected("m", shape, stored, declaration.source)
    assert expected.keys() == stored.keys()
    for name, tensor in stored.items():
        assert tensor.shape in expected[name].shapes
        assert tensor.dtype in expected[name].dtypes
    return layout.read("m", shape, stored, None)


def assert_same(found: Tensor, values: files.Floats) -> None:
    """Bit by bit, but for the sign of zero."""
    assert np.array_equal(found.numpy(), values)


# Bits


def test_every_weight_is_its_definition(checkpoint: FourBit) -> None:
    source = Checkpoint.open(checkpoint.directory)
    assert len(checkpoint.values) == 14
    for name, values in checkpoint.values.items():
        assert_same(source.read(name, torch.float32), values)
        assert torch.equal(source.read(name, torch.bfloat16), torch.from_numpy(values).bfloat16())


def test_answers_are_those_of_the_decoded_model(checkpoint: FourBit, monkeypatch: pytest.MonkeyPatch) -> None:
    answers = []
    for directory in (checkpoint.directory, checkpoint.decoded):
        engine = Engine(directory, EngineConfig(precision="fp32", max_batched_tokens=16, cache_tokens=256))
        answers.append([answer_and_logits(engine, prompt, 6, monkeypatch) for prompt in PROMPTS])
    for (tokens, logits), (meant, meant_logits) in zip(*answers, strict=True):
        assert tokens == meant
        assert torch.equal(logits, meant_logits)


@settings(max_examples=examples(60))
@given(
    kind=st.sampled_from(["e2m1", "int4", "int4 zeros"]),
    group=st.sampled_from([16, 32, 64, 128, 256, 384]),
    groups=st.integers(1, 4),
    rows=st.integers(1, 9),
    tokens=st.sampled_from([*range(1, 8), cpu_packed.MOST_TOKENS, cpu_packed.MOST_TOKENS + 1]),
    magnitude=st.sampled_from([1e-30, 1.0, 1e30]),
    seed=st.integers(0, 99),
)
def test_packed_products(
    kind: str, group: int, groups: int, rows: int, tokens: int, magnitude: float, seed: int
) -> None:
    """Any number of tokens and rows against float64, inputs of all sizes in one row; expanded rows are exact."""
    if not native.has_packed():
        pytest.skip("this processor has no AVX2, or kernels could not be compiled")
    draw = torch.Generator().manual_seed(seed)
    groups *= max(1, 64 // group)
    weight = Packed4(
        torch.randint(0, 256, (rows, group * groups // 2), generator=draw).byte(),
        group * groups,
        "e2m1" if kind == "e2m1" else "int4",
        torch.rand(rows, groups, generator=draw) - 0.5,
        zero_NG=torch.randint(0, 16, (rows, groups), generator=draw).byte() if kind == "int4 zeros" else None,
    )
    x = torch.randn(tokens, weight.columns, generator=draw).exp2().bfloat16() * magnitude
    bias = torch.randn(rows, generator=draw).bfloat16()
    packed = cpu.pack_linear(weight, bias, find_scheme("bf16"))
    assert isinstance(packed, PackedLinear)
    values = weight.decode(torch.float32).double()
    expected = x.double() @ values.T + bias.double()
    # Inputs have 15 bits below the largest of their block, sums fp32's 24.
    bound = x.double().abs().amax(1, keepdim=True) * values.abs().sum(1) * 2.0**-15 + expected.abs() * 2.0**-8
    found = cpu.linear(x, packed)
    assert found.dtype == torch.bfloat16
    assert ((found.double() - expected).abs() <= bound + 1e-37).all()
    first = seed % rows
    decoded = native.packed_decode(packed.weight, first, rows)[:, : weight.columns]
    assert torch.equal(decoded.double(), values[first:])


def test_packed_products_of_what_is_not_finite() -> None:
    """The token's whole row is NaN, so that its request fails; its neighbours' rows are as without it."""
    if not native.has_packed():
        pytest.skip("this processor has no AVX2, or kernels could not be compiled")
    weight = Packed4(torch.full((5, 64), 0x53, dtype=torch.uint8), 128, "int4", torch.ones(5, 1))
    packed = cpu.pack_linear(weight, None, find_scheme("bf16"))
    x = torch.ones(3, 128, dtype=torch.bfloat16)
    meant = cpu.linear(x, packed)
    for wrong in (float("nan"), float("inf"), -float("inf")):
        x[1, 77] = wrong
        found = cpu.linear(x, packed)
        assert found[1].isnan().all()
        assert torch.equal(found[[0, 2]], meant[[0, 2]])


def test_weights_stay_packed_where_a_kernel_fits(tmp_path: Path) -> None:
    """Merged ones too; others are multiplied out."""
    for kind, stays in (("awq", True), ("modelopt-nvfp4 inputs", True), ("gptq order", False)):
        made = make(tmp_path / kind.split()[0], kind)
        for precision in ("fp32", "bf16"):
            layer = load_weights(Checkpoint.open(made.directory), cpu, find_scheme(precision), 16, CPU).layers[0]
            for linear in (layer.qkv, layer.output, *layer.gate_up):
                assert isinstance(linear, PackedLinear) == (stays and precision == "bf16" and native.has_packed())
            assert not isinstance(layer.down, PackedLinear), "its 96 columns are no multiple of 64"


DECODED = {"modelopt-nvfp4 awq inputs", "gptq order"}
"""Of these, the kinds that no kernel multiplies."""


@pytest.mark.parametrize(
    "kind", ["awq", "modelopt-nvfp4 inputs", "modelopt-int4", "compressed-int4", "gptq", *sorted(DECODED)]
)
def test_the_plan_counts_packed_weights(kind: str, tmp_path: Path) -> None:
    """By the bytes of the tensors that a load leaves, and of the values of the linears that it multiplied out."""
    if not native.has_packed():
        pytest.skip("no kernels for packed weights here")
    source = Checkpoint.open(make(tmp_path, kind).directory)
    whole, packed = (plan_memory(source.config, EngineConfig(), stored) for stored in (None, source.quantized))
    linears = [
        linear
        for layer in load_weights(source, cpu, find_scheme("bf16"), 16, CPU).layers
        for linear in (layer.qkv, layer.output, *layer.gate_up, layer.down)
    ]
    saved = 0
    for linear in linears:
        if isinstance(linear, PackedLinear):
            weight = linear.weight
            parts = (weight.codes_NB, weight.factor_NG, *(() if weight.zero_NG is None else (weight.zero_NG,)))
            columns = source.config.hidden_size
            saved += 2 * len(weight.codes_NB) * columns - sum(part.nbytes for part in parts)
    assert whole.weights_bytes - packed.weights_bytes == saved
    assert (saved > 0) == any(isinstance(linear, PackedLinear) for linear in linears) == (kind not in DECODED)


def test_every_code_and_every_scale(tmp_path: Path) -> None:
    """A row for each scale, in which each byte of codes occurs."""
    codes = np.stack([np.arange(256, dtype=np.uint8) & 15, np.arange(256, dtype=np.uint8) >> 4], axis=1).reshape(1, -1)

    def rows(scales: list[int], block: int) -> tuple[np.ndarray, np.ndarray]:
        count = len(scales)
        return codes.repeat(count, 0), np.array(scales, dtype=np.uint8)[:, None].repeat(512 // block, 1)

    every_e4m3 = [bits for bits in range(256) if bits & 127 != 127]
    cases = [
        ("modelopt-nvfp4 inputs", *files.nvfp4(*rows(every_e4m3, 16), 3.1e-5)),
        ("compressed-nvfp4 inputs", *files.nvfp4(*rows(every_e4m3, 16), 77.7, divides=True)),
        ("modelopt-mxfp4", *files.mxfp4(*rows([*range(252)], 32))),
        ("compressed-mxfp4", *files.mxfp4(*rows([*range(252)], 32), "weight_packed")),
    ]
    for kind, tensors, values in cases:
        weight = read_one(tmp_path, kind, tensors, values.shape)
        assert_same(weight.decode(torch.float32), values)
        assert torch.equal(weight.decode(torch.bfloat16), torch.from_numpy(values).bfloat16())


@pytest.mark.parametrize("kind", ["modelopt-int4", "compressed-int4 zeros", "awq", "gptq", "gptq_v2 order"])
def test_every_code_zero_and_fp16_scale(kind: str, tmp_path: Path) -> None:
    """Each finite fp16 as a scale, each zero, and each code in a group."""
    halves = np.arange(65536, dtype=np.uint16).view(np.float16)
    scales = halves[np.isfinite(halves)].reshape(-1, 16).astype(np.float32)
    codes = np.tile(np.arange(16, dtype=np.uint8), (len(scales), 32))
    groups = np.arange(512) // 32
    zeros = np.tile(np.arange(16, dtype=np.uint8).clip(kind == "gptq"), (len(scales), 1))
    match kind:
        case "modelopt-int4":
            tensors, values = files.modelopt_int4(codes, scales, 32)
        case "compressed-int4 zeros":
            tensors, values = files.packed_int4(codes, scales, zeros, groups, symmetric=False, order=False)
        case "awq":
            tensors, values = files.awq(codes, scales, zeros, groups)
        case _:
            less = int(kind == "gptq")
            tensors, values = files.gptq(codes, scales, zeros, groups, less=less, order=not less)
    assert_same(read_one(tmp_path, kind, tensors, values.shape).decode(torch.float32), values)


@settings(max_examples=examples(40))
@given(kind=st.sampled_from([*DECLARED]), seed=st.integers(0, 99), rows=st.integers(1, 5), columns=st.integers(1, 5))
def test_odd_shapes(kind: str, seed: int, rows: int, columns: int, tmp_path_factory: pytest.TempPathFactory) -> None:
    tensors, values = random_linear(kind, seed, 8 * rows, 32 * columns)
    weight = read_one(tmp_path_factory.getbasetemp() / "odd", kind, tensors, values.shape)
    assert_same(weight.decode(torch.float32), values)


@pytest.mark.parametrize(("rows", "columns"), [(1, 1), (3, 13), (9, 31), (5, 64)])
def test_one_group_for_an_odd_row(rows: int, columns: int, tmp_path: Path) -> None:
    """compressed-tensors alone packs rows and columns of any number."""
    tensors, values = random_linear("compressed-int4 zeros", 1, rows, columns, columns)
    directory = Path(shutil.copytree(tmp_path, tmp_path / "x"))
    declared = files.compressed("pack-quantized", {"type": "int", "strategy": "channel", "symmetric": False})
    files.DECLARED["channel"] = declared
    try:
        assert_same(read_one(directory, "channel", tensors, values.shape).decode(torch.float32), values)
    finally:
        del files.DECLARED["channel"]


# Forms


def weight_of(kind: str, folder: Path, seed: int = 0, rows: int = 24, columns: int = 128) -> tuple[Packed4, Tensor]:
    tensors, values = random_linear(kind, seed, rows, columns)
    weight = read_one(folder, kind, tensors, values.shape)
    assert isinstance(weight, Packed4)
    return weight, torch.from_numpy(values)


@pytest.mark.parametrize("kind", DECLARED)
def test_merged_weights_keep_their_values(kind: str, tmp_path: Path) -> None:
    """Queries, keys and values have second scales of their own."""
    parts = [weight_of(kind, tmp_path, seed, rows) for seed, rows in enumerate((24, 8, 16))]
    if parts[0][0].second_N1 is not None:
        weights = [weight for weight, _ in parts]
        weights[1] = weight_of(kind, tmp_path, 1, 8)[0]
        weights[1] = Packed4(**{**fields(weights[1]), "second_N1": weights[1].second_N1 * 1.7})
        parts[1] = (weights[1], weights[1].decode(torch.float32))
    one_scale = {name: getattr(parts[0][0], name) for name in ("group_K", "pre_scale_K")}
    parts = [(Packed4(**{**fields(weight), **one_scale}), values) for weight, values in parts]
    merged = stack([weight for weight, _ in parts])
    assert merged is not None
    assert torch.equal(merged.decode(torch.float32), torch.cat([weight.decode(torch.float32) for weight, _ in parts]))
    assert (
        stack([parts[0][0], weight_of("awq" if parts[0][0].kind == "e2m1" else "modelopt-mxfp4", tmp_path)[0]]) is None
    )


def fields(weight: Packed4) -> dict[str, object]:
    return {name: getattr(weight, name) for name in Packed4.__dataclass_fields__}


@pytest.mark.parametrize("kind", DECLARED)
def test_expansion_to_e4m3(kind: str, tmp_path: Path) -> None:
    """MXFP4 exactly; others within half a step of e4m3, and the answer says which."""
    weight, values = weight_of(kind, tmp_path)
    expanded, exact = expand(weight)
    assert expanded.scale_N1.shape == (24, 1)
    error = (expanded.decode(torch.float32) - values).abs()
    assert exact == ("mxfp4" in kind)
    if exact:
        assert not error.any()
        assert (expanded.scale_N1.frexp().mantissa == 0.5).all()
    assert (error <= torch.maximum(values.abs() * 2**-4, expanded.scale_N1 * 2**-10) * 1.0001).all()
    # No smaller power of two would do.
    largest = expanded.values_ND.float().abs().amax(1)
    assert (largest > 223).all()
    assert (expanded.input_scale is not None) == ("inputs" in kind and "awq" not in kind)
    if kind == "modelopt-nvfp4 inputs":
        assert expanded.input_scale == pytest.approx(0.0023 * 6)
        relative = float(error.square().mean().sqrt() / values.square().mean().sqrt())
        print(f"\n{kind}: {relative:.4f} of the values' RMS, {float((error == 0).float().mean()):.2f} of them exact")
        assert relative < 0.03


def test_expansion_says_when_powers_are_too_far_apart() -> None:
    codes = np.full((1, 64), 2, dtype=np.uint8)
    for octaves, exact in ((14, True), (15, True), (18, False)):
        scales = torch.tensor([[120, 120 + octaves]], dtype=torch.uint8).view(torch.float8_e8m0fnu)
        weight = Packed4(pack(torch.from_numpy(codes)), 64, "e2m1", scales)
        assert expand(weight)[1] is exact


def test_an_engine_in_fp8_expands_and_says_so(tmp_path: Path) -> None:
    """Through the loader: the count of linears, and how many are exact."""
    config = EngineConfig(precision="fp8", max_batched_tokens=16, cache_tokens=256)
    for kind, exact in (("modelopt-mxfp4", 14), ("compressed-nvfp4 inputs", 0)):
        made = make(tmp_path / kind.split()[0], kind)
        described = Engine(made.directory, config).describe()
        assert described["expanded_linears"] == {"count": 14, "exact": exact}
    assert (
        Engine(made.directory, EngineConfig(precision="fp32", cache_tokens=256)).describe()["expanded_linears"] is None
    )


# Lists of exceptions, mixed precision


def plain(*parts: str) -> Callable[[str], str | None]:
    return lambda module: None if any(part in module for part in parts) else ""


@pytest.mark.parametrize(
    ("kind", "declared", "kind_of"),
    [
        (
            "modelopt-nvfp4 inputs",
            files.modelopt("NVFP4", exclude_modules=["lm_head", "model.layers.0.self_attn*", "*.1.mlp.down_proj"]),
            plain("0.self_attn", "1.mlp.down"),
        ),
        ("modelopt-mxfp4", files.modelopt("MXFP4", exclude_modules=["model.layers.1"]), plain("layers.1")),
        (
            "compressed-int4",
            files.compressed(
                "pack-quantized", files.INT4, ignore=["lm_head", "re:.*(q|k|v)_proj$", "model.layers.0.mlp.up_proj"]
            ),
            plain("q_proj", "k_proj", "v_proj", "0.mlp.up"),
        ),
        ("awq", files.in_config("awq", modules_to_not_convert=["down_proj"]), plain("down_proj")),
        (
            "gptq",
            files.in_config("gptq", modules_in_block_to_quantize=[["self_attn.q_proj"], ["mlp.up_proj"]]),
            lambda module: "" if module.endswith(("q_proj", "up_proj")) else None,
        ),
        (
            "modelopt-nvfp4 inputs",
            files.modelopt(
                "MIXED_PRECISION",
                quantized_layers={
                    f"model.layers.{layer}.{name}_proj": {"quant_algo": algorithm, "group_size": group}
                    for layer in range(2)
                    for name, algorithm, group in (
                        ("mlp.up", "NVFP4", 16),
                        ("mlp.gate", "W4A16_AWQ", 32),
                        ("self_attn.o", "MXFP4", 32),
                    )
                },
            ),
            lambda module: {"up": "", "gate": "modelopt-int4", "o": "modelopt-mxfp4"}.get(
                module.rpartition(".")[2].removesuffix("_proj")
            ),
        ),
        (
            "compressed-int4",
            {
                "config.json": {
                    "quantization_config": {
                        "quant_method": "compressed-tensors",
                        "format": "mixed-precision",
                        "config_groups": {
                            "a": {
                                "weights": {"num_bits": 4, **files.INT4},
                                "targets": ["Linear"],
                                "format": "pack-quantized",
                            },
                            "b": {
                                "weights": {
                                    "num_bits": 4,
                                    "type": "float",
                                    "strategy": "tensor_group",
                                    "group_size": 16,
                                },
                                "targets": ["re:.*down_proj"],
                                "format": "nvfp4-pack-quantized",
                            },
                        },
                        "ignore": ["model.layers.0.mlp.down_proj"],
                    }
                }
            },
            lambda module: (
                None if "0.mlp.down" in module else "compressed-nvfp4 inputs" if "down_proj" in module else ""
            ),
        ),
    ],
)
def test_only_the_named_linears_are_quantized(
    kind: str,
    declared: Mapping[str, Mapping[str, object]],
    kind_of: Callable[[str], str | None],
    tmp_path: Path,
) -> None:
    made = make(tmp_path, kind, declared=declared, kind_of=kind_of)
    source, meant = Checkpoint.open(made.directory), Checkpoint.open(made.decoded)
    assert 0 < len(made.values) < 14
    for name in source.config.tensor_shapes():
        assert torch.equal(source.read(name, torch.float32), meant.read(name, torch.float32)), name
    assert source.quantized is not None
    assert {name for name in source.config.tensor_shapes() if name in source.quantized} == made.values.keys()
    Engine(made.directory, EngineConfig(precision="fp8", max_batched_tokens=16, cache_tokens=256))


# Refusals


def read_all(directory: Path) -> None:
    """Opens a checkpoint and reads every weight, multiplied out and in fp8."""
    source = Checkpoint.open(directory)
    for name in source.config.tensor_shapes():
        source.read(name, torch.float32)
        if source.quantized is not None:
            source.quantized.read(name, find_scheme("fp8"), CPU)


def refusal(directory: Path) -> str:
    """The one line that opening or reading ends in."""
    with pytest.raises(CheckpointError) as caught:
        read_all(directory)
    message = str(caught.value)
    assert "\n" not in message
    return message


ABSENT = object()


@pytest.mark.parametrize(
    ("kind", "name", "change", "problem"),
    [
        ("modelopt-nvfp4 inputs", "weight_scale", ABSENT, "weight_scale' is missing"),
        ("modelopt-nvfp4 inputs", "weight_scale_2", ABSENT, "weight_scale_2' is missing"),
        ("modelopt-nvfp4 inputs", "weight_scale_2", torch.tensor(0.0), "holds 0.0; expected a positive scale"),
        ("modelopt-nvfp4 inputs", "input_scale", torch.tensor(float("nan")), "holds nan"),
        ("modelopt-nvfp4 inputs", "weight", torch.zeros(96, 64, dtype=torch.uint8), "has shape [96, 64]"),
        (
            "modelopt-nvfp4 inputs",
            "weight",
            torch.zeros(96, 64).bfloat16(),
            "has dtype BF16; hf_quant_config.json says",
        ),
        (
            "modelopt-nvfp4 inputs",
            "weight_scale",
            torch.full((96, 4), float("nan")).to(torch.float8_e4m3fn),
            "holds NaN",
        ),
        ("modelopt-nvfp4 inputs", "weight_scale", torch.ones(4, 96).to(torch.float8_e4m3fn), "has shape [4, 96]"),
        ("modelopt-nvfp4 inputs", "svdquant_lora_a", torch.ones(4, 64), "has no place in the model"),
        ("modelopt-nvfp4 awq inputs", "pre_quant_scale", torch.full((64,), float("inf")), "holds NaN or infinity"),
        ("modelopt-mxfp4", "weight_scale", torch.full((96, 2), 255, dtype=torch.uint8), "holds NaN"),
        ("modelopt-mxfp4", "weight_scale", torch.full((96, 2), 254, dtype=torch.uint8), "holds NaN or infinity as"),
        ("modelopt-int4", "weight", torch.zeros(96, 32, dtype=torch.uint8), "has shape [96, 32]"),
        ("compressed-nvfp4 inputs", "weight_global_scale", torch.tensor([-1.0]), "holds -1.0"),
        ("compressed-int4", "weight_shape", torch.tensor([64, 96]), "holds [64, 96], config.json implies [96, 64]"),
        ("compressed-int4", "weight_zero_point", torch.zeros(12, 2, dtype=torch.int32), "has no place in the model"),
        ("compressed-int4 zeros", "weight_zero_point", ABSENT, "weight_zero_point' is missing"),
        ("compressed-int4 zeros order", "weight_g_idx", torch.full((64,), 2, dtype=torch.int32), "of 2 groups"),
        ("compressed-int4 zeros order", "weight_g_idx", torch.full((64,), -1, dtype=torch.int32), "holds -1 to -1"),
        ("awq", "qweight", torch.zeros(8, 96, dtype=torch.int32), "has shape [8, 96]"),
        ("awq", "scales", torch.full((2, 96), float("inf")).half(), "holds NaN or infinity"),
        ("awq", "qzeros", ABSENT, "qzeros' is missing"),
        ("gptq", "qweight", torch.zeros(64, 12, dtype=torch.int32), "has shape [64, 12]"),
        ("gptq", "qzeros", torch.full((2, 12), -1, dtype=torch.int32), "stands for a zero of 0 or of 16"),
        ("gptq order", "g_idx", torch.full((64,), 7, dtype=torch.int32), "holds 7 to 7"),
    ],
)
def test_tensors_refused(
    intact: Callable[[str], Path], kind: str, name: str, change: object, problem: str, tmp_path: Path
) -> None:
    directory = Path(shutil.copytree(intact(kind), tmp_path / "model"))
    tensors = load_file(directory / "model.safetensors")
    if isinstance(change, Tensor):
        tensors[f"{LINEAR}.{name}"] = change
    else:
        del tensors[f"{LINEAR}.{name}"]
    save_file(tensors, directory / "model.safetensors")
    message = refusal(directory)
    assert problem in message
    assert f"{LINEAR}.{name}" in message or f"{LINEAR}.weight" in message


@pytest.mark.parametrize(
    ("kind", "keys", "value", "problem"),
    [
        ("awq", ("bits",), 8, "bits is 8"),
        ("awq", ("version",), "gemv", "version is 'gemv'; only the layout gemm is read"),
        ("awq", ("zero_point",), False, "zero_point is False"),
        ("awq", ("group_size",), 0, "group_size is 0"),
        ("awq", ("group_size",), 48, "has shape [3, 8], config.json implies [2, 8]"),
        ("awq", ("modules_to_not_convert",), [1], "modules_to_not_convert is [1]"),
        ("gptq", ("bits",), 3, "bits is 3"),
        ("gptq", ("checkpoint_format",), "marlin", "checkpoint_format is 'marlin'"),
        ("gptq", ("dynamic",), {"-:.*": {}}, "dynamic is {"),
        ("gptq", ("lm_head",), True, "lm_head is True"),
        ("compressed-int4", ("transform_config",), {"config_groups": {"R1": {}}}, "transform_config is {"),
        ("compressed-int4", ("sparsity_config",), {"format": "sparse-24-bitmask"}, "sparsity_config.format is"),
        ("compressed-int4", ("ignore",), ["re:(a+)+$"], "ignore is ['re:(a+)+$']; expected patterns"),
        ("compressed-int4", ("ignore",), ["re:.*.*.*.*.*x"], "expected patterns of at most 4 repetitions"),
        ("compressed-int4", ("ignore",), ["re:["], "expected regular expressions"),
        ("compressed-int4", ("config_groups", "group_0", "weights", "group_size"), 48, "no multiple of its groups"),
        ("compressed-int4", ("config_groups", "group_0", "weights", "num_bits"), 3, "num_bits is 3"),
        ("compressed-int4", ("config_groups", "group_0", "weights", "strategy"), "block", "strategy is 'block'"),
        ("compressed-nvfp4 inputs", ("config_groups", "group_0", "weights", "group_size"), 32, "expected 16"),
        ("compressed-nvfp4 inputs", ("config_groups", "group_0", "weights", "type"), "int", "type is 'int'"),
        ("compressed-nvfp4 inputs", ("format",), "mxfp4-pack-quantized", "group_size is 16; expected 32"),
    ],
)
def test_declarations_refused(
    intact: Callable[[str], Path], kind: str, keys: tuple[str, ...], value: object, problem: str, tmp_path: Path
) -> None:
    directory = Path(shutil.copytree(intact(kind), tmp_path / "model"))
    path = directory / "config.json"
    values = json.loads(path.read_text())
    inner = values["quantization_config"]
    for key in keys[:-1]:
        inner = inner[key]
    inner[keys[-1]] = value
    path.write_text(json.dumps(values))
    assert problem in refusal(directory)


def test_modelopt_algorithms_refused(intact: Callable[[str], Path], tmp_path: Path) -> None:
    directory = Path(shutil.copytree(intact("modelopt-nvfp4 inputs"), tmp_path / "model"))
    for changes, problem in (
        ({"algorithm": "NVFP4_SVD"}, "quant_algo is 'NVFP4_SVD'"),
        ({"group_size": 32}, "group_size is 32; NVFP4 has groups of 16"),
        ({"kv_cache_quant_algo": "NVFP4"}, "kv_cache_quant_algo is 'NVFP4'"),
        ({"exclude_modules": "lm_head"}, "exclude_modules is 'lm_head'; expected a list of names"),
        ({"exclude_modules": ["*up_proj"]}, "has dtype U8"),
    ):
        files.declare(directory, files.modelopt(**{"algorithm": "NVFP4", **changes}))
        assert problem in refusal(directory)


def test_bits_of_the_file_may_be_anything(intact: Callable[[str], Path], tmp_path: Path) -> None:
    """Damage in any tensor is a value or one line, never anything else."""
    draw = np.random.default_rng(0)
    for kind in ("modelopt-nvfp4 inputs", "compressed-int4 zeros order", "gptq order", "awq"):
        directory = Path(shutil.copytree(intact(kind), tmp_path / kind))
        path = directory / "model.safetensors"
        content = np.frombuffer(path.read_bytes(), dtype=np.uint8)
        start = int.from_bytes(content[:8].tobytes(), "little") + 8
        for _ in range(6):
            damaged = content.copy()
            places = draw.integers(start, len(content), 50)
            damaged[places] = draw.integers(0, 256, 50)
            path.write_bytes(damaged.tobytes())
            message = ""
            try:
                read_all(directory)
            except CheckpointError as error:
                message = str(error)
            assert "\n" not in message
