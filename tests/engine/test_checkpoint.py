"""Checkpoints that transformers wrote: read back exactly, then broken in every way; random weights by shape."""

from __future__ import annotations

import json
import math
import os
import re
import shutil
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import hypothesis.strategies as st
import pytest
import torch
import transformers
from hypothesis import given, settings
from safetensors.torch import load_file, save_file

from examples import examples
from megatoken.engine.checkpoint import Checkpoint, RandomWeights, read_config
from megatoken.engine.config import SHAPES, ModelConfig, RopeConfig
from megatoken.engine.hugging_face import model_config
from megatoken.engine.model import rotary_tables
from megatoken.errors import CheckpointError

ARCHITECTURES = ("Llama", "Mistral", "Qwen2", "Qwen3")
SMALL = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "vocab_size": 61,
    "max_position_embeddings": 64,
}
LLAMA3_FACTORS = {"factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 2.0}
LLAMA3_SCALING = {**LLAMA3_FACTORS, "original_max_position_embeddings": 16}
ABSENT, NO_FILE = object(), object()


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def make_model(architecture: str, **changes: object) -> transformers.PreTrainedModel:
    torch.manual_seed(0)
    config = getattr(transformers, f"{architecture}Config")(**{**SMALL, **changes})
    model = getattr(transformers, f"{architecture}ForCausalLM")(config).eval()
    for parameter in model.parameters():  # norms and biases too: at 1 and 0 a mix-up would go unseen
        torch.nn.init.normal_(parameter, std=0.3)
    return model


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("llama")
    make_model("Llama").save_pretrained(directory)
    return directory


@pytest.fixture(scope="module")
def sharded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("sharded")
    make_model("Llama").save_pretrained(directory, max_shard_size="20KB")
    return directory


@pytest.fixture
def broken(llama: Path, tmp_path: Path) -> Path:
    """A copy to break, in one file."""
    return Path(shutil.copytree(llama, tmp_path / "model"))


@pytest.fixture
def broken_shards(sharded: Path, tmp_path: Path) -> Path:
    """A copy to break, in several shards."""
    return Path(shutil.copytree(sharded, tmp_path / "model"))


def edit_json(path: Path, **changes: object) -> None:
    values = json.loads(path.read_text()) | changes
    path.write_text(json.dumps({key: value for key, value in values.items() if value is not ABSENT}))


def edit_tensors(directory: Path, change: Callable[[dict[str, torch.Tensor]], object]) -> None:
    tensors = load_file(directory / "model.safetensors")
    change(tensors)
    save_file(tensors, directory / "model.safetensors", {"format": "pt"})


def refusal(directory: Path) -> str:
    """The message, without the directory: pytest names it after the test, which would satisfy many an assertion."""
    with pytest.raises(CheckpointError) as caught:
        Checkpoint.open(directory)
    message = str(caught.value)
    assert "\n" not in message
    assert message.startswith(str(directory))
    return message.removeprefix(str(directory)).removeprefix("/")


# Reading what transformers wrote


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("max_shard_size", ["1GB", "20KB"])
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_weights_come_back_as_saved(architecture: str, max_shard_size: str, dtype: torch.dtype, tmp_path: Path) -> None:
    model = make_model(architecture).to(dtype)
    model.save_pretrained(tmp_path, max_shard_size=max_shard_size)
    assert (len(list(tmp_path.glob("*.safetensors"))) > 1) == (max_shard_size == "20KB")
    checkpoint = Checkpoint.open(tmp_path)
    saved = model.state_dict()
    assert checkpoint.config.tensor_shapes() == {name: tuple(tensor.shape) for name, tensor in saved.items()}
    assert checkpoint.config.parameters == model.num_parameters()
    for name, tensor in saved.items():
        for wanted in (torch.float32, torch.bfloat16):
            result = checkpoint.read(name, wanted)
            assert result.dtype == wanted
            assert torch.equal(result, tensor.to(wanted)), name


@pytest.mark.parametrize("options", [{}, {"attention_bias": True}, {"mlp_bias": True}, {"num_key_value_heads": 1}])
@pytest.mark.parametrize("tied", [False, True])
def test_llama_options(options: dict[str, object], tied: bool, tmp_path: Path) -> None:
    model = make_model("Llama", tie_word_embeddings=tied, **options)
    model.save_pretrained(tmp_path)
    checkpoint = Checkpoint.open(tmp_path)
    saved = load_file(tmp_path / "model.safetensors")
    assert set(checkpoint.config.tensor_shapes()) == set(saved)
    assert ("lm_head.weight" in saved) != tied
    for name, tensor in saved.items():
        assert torch.equal(checkpoint.read(name, torch.float32), tensor)


def test_config_is_mapped_key_by_key(tmp_path: Path) -> None:
    expected = ModelConfig(
        name="model",
        hidden_size=32,
        intermediate_size=48,
        layers=2,
        heads=4,
        kv_heads=2,
        head_dim=8,
        vocabulary_size=61,
        max_positions=64,
        rms_norm_epsilon=3e-5,
        rope=RopeConfig(theta=777.0),
        end_token_ids=(2,),
    )
    differences = {
        "Llama": {},
        "Mistral": {},
        "Qwen2": {"qkv_bias": True},
        "Qwen3": {"qk_norm": True},
    }
    for architecture, difference in differences.items():
        directory = tmp_path / architecture / "model"
        make_model(
            architecture, rms_norm_eps=3e-5, rope_theta=777.0, bos_token_id=1, eos_token_id=2, sliding_window=None
        ).save_pretrained(directory)
        fields = {name: getattr(expected, name) for name in ModelConfig.__slots__} | difference
        assert read_config(directory) == ModelConfig(**fields)


@pytest.mark.parametrize(
    "keys",
    [
        {"rope_parameters": {"rope_type": "default", "rope_theta": 5e5}},
        {"rope_parameters": {"rope_type": "linear", "factor": 2.5, "rope_theta": 5e5}},
        {"rope_parameters": {"rope_type": "llama3", "rope_theta": 5e5, **LLAMA3_SCALING}},
        {"rope_parameters": {"rope_type": "linear", "factor": 3}, "rope_theta": 20_000},
        {"rope_theta": 5e5},
        {"rope_theta": 5e5, "rope_scaling": None},
        {"rope_theta": 5e5, "rope_scaling": {"type": "linear", "factor": 2.0}},
        {"rope_theta": 5e5, "rope_scaling": {"rope_type": "linear", "factor": 2.0}},
        {"rope_theta": 5e5, "rope_scaling": {"rope_type": "llama3", **LLAMA3_SCALING}},
        {"rope_scaling": {"rope_type": "llama3", **LLAMA3_FACTORS}},
        {"rope_scaling": {"rope_type": "linear", "factor": 2.0}, "rope_parameters": {"rope_type": "default"}},
        {},
    ],
)
def test_rotary_settings_mean_what_transformers_takes_them_for(broken: Path, keys: dict[str, object]) -> None:
    edit_json(broken / "config.json", **{"rope_parameters": ABSENT, **keys})
    theirs = transformers.AutoConfig.from_pretrained(broken).rope_parameters
    ours = read_config(broken).rope
    assert ours.theta == theirs["rope_theta"]
    assert ours.scaling == {"default": "none"}.get(theirs["rope_type"], theirs["rope_type"])
    if ours.scaling != "none":
        assert ours.factor == theirs["factor"]
    if ours.scaling == "llama3":
        assert ours.low_frequency_factor == theirs["low_freq_factor"]
        assert ours.high_frequency_factor == theirs["high_freq_factor"]
        assert ours.original_max_positions == theirs["original_max_position_embeddings"]


@pytest.mark.parametrize("architecture", ["Mistral", "Qwen2", "Qwen3"])
def test_sliding_window_caps_the_context_where_attention_stops_being_full(architecture: str, tmp_path: Path) -> None:
    options = {} if architecture == "Mistral" else {"use_sliding_window": True, "max_window_layers": 0}
    windowed = make_model(architecture, sliding_window=8, **options)
    full = make_model(architecture, sliding_window=None)
    windowed.save_pretrained(tmp_path)
    limit = read_config(tmp_path).max_positions
    assert limit == 8
    with torch.inference_mode():
        longest, beyond = torch.arange(limit)[None], torch.arange(limit + 1)[None]
        assert torch.allclose(windowed(longest).logits, full(longest).logits, atol=1e-5)
        assert not torch.allclose(windowed(beyond).logits[:, -1], full(beyond).logits[:, -1], atol=1e-2)


@pytest.mark.parametrize(
    ("architecture", "keys", "max_positions"),
    [
        ("MistralForCausalLM", {"sliding_window": None}, 9000),
        ("MistralForCausalLM", {}, 4096),
        ("MistralForCausalLM", {"sliding_window": 10_000}, 9000),
        ("Qwen2ForCausalLM", {"sliding_window": 8}, 9000),
        ("Qwen2ForCausalLM", {"sliding_window": 8, "use_sliding_window": False}, 9000),
        ("Qwen2ForCausalLM", {"sliding_window": None, "use_sliding_window": True}, 9000),
        ("LlamaForCausalLM", {"sliding_window": 8}, 9000),
    ],
)
def test_sliding_window_defaults(architecture: str, keys: dict[str, object], max_positions: int) -> None:
    values = {**SMALL, "architectures": [architecture], "max_position_embeddings": 9000, **keys}
    config = model_config(values, Path("model/config.json"))
    assert config.max_positions == max_positions
    assert config.sliding_window == (max_positions if max_positions < 9000 else None)


@pytest.mark.parametrize(
    ("in_config", "in_generation", "expected"),
    [
        (2, 7, (7,)),
        ([5, 3], 3, (3,)),
        (2, [7, 9], (7, 9)),
        (None, 4, (4,)),
        (2, ABSENT, ()),
        (2, None, ()),
        (2, NO_FILE, (2,)),
        ([5, 3], NO_FILE, (5, 3)),
        (ABSENT, NO_FILE, ()),
    ],
)
def test_end_tokens_are_those_of_transformers(
    broken: Path, in_config: object, in_generation: object, expected: tuple[int]
) -> None:
    edit_json(broken / "config.json", eos_token_id=in_config)
    if in_generation is NO_FILE:
        (broken / "generation_config.json").unlink()
    else:
        edit_json(broken / "generation_config.json", eos_token_id=in_generation)
    assert read_config(broken).end_token_ids == expected
    peer = transformers.AutoModelForCausalLM.from_pretrained(broken).generation_config.eos_token_id
    assert (() if peer is None else tuple(peer) if isinstance(peer, list) else (peer,)) == expected


def test_the_directory_names_the_model(llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where files are links into a store, as in Hugging Face's cache, and for a relative path."""
    directory = tmp_path / "linked"
    directory.mkdir()
    for file in llama.iterdir():
        (directory / file.name).symlink_to(file)
    assert Checkpoint.open(directory).config.name == "linked"
    monkeypatch.chdir(directory)
    assert read_config(Path()).name == "linked"


def test_what_older_files_leave_out(broken: Path) -> None:
    absent = ("head_dim", "rms_norm_eps", "tie_word_embeddings", "attention_bias", "mlp_bias", "hidden_act")
    expected = read_config(broken)
    edit_json(broken / "config.json", **dict.fromkeys(absent, ABSENT))
    assert read_config(broken) == expected
    assert expected.rms_norm_epsilon == transformers.LlamaConfig().rms_norm_eps
    for value in (None, ABSENT):
        edit_json(broken / "config.json", num_key_value_heads=value)
        assert read_config(broken).kv_heads == 4


@pytest.mark.parametrize("section", ["rope_scaling", "rope_parameters"])
def test_the_original_context_at_the_top_level_counts_as_in_transformers(broken: Path, section: str) -> None:
    scaling = {section: {"rope_type": "llama3", **LLAMA3_FACTORS}, "original_max_position_embeddings": 16}
    edit_json(broken / "config.json", **{"rope_parameters": ABSENT, "rope_theta": 1e4, **scaling})
    theirs = transformers.AutoModelForCausalLM.from_pretrained(broken).model.rotary_emb.inv_freq
    config = read_config(broken)
    cosines, _ = rotary_tables(config.rope, config.head_dim, 2)
    assert config.rope.original_max_positions == 16
    assert torch.allclose(cosines[1, : len(theirs)], theirs.cos(), rtol=0, atol=1e-7)
    other, _ = rotary_tables(replace(config.rope, original_max_positions=64), config.head_dim, 2)
    assert not torch.allclose(other, cosines, rtol=0, atol=1e-6)


@pytest.mark.parametrize("absent", ["num_key_value_heads", "head_dim"])
@pytest.mark.parametrize(("architecture", "heads"), [("Llama", 4), ("Mistral", 8), ("Qwen2", 32), ("Qwen3", 32)])
def test_keys_left_out_have_the_models_own_default(tmp_path: Path, architecture: str, heads: int, absent: str) -> None:
    config = getattr(transformers, f"{architecture}Config")(
        **{**SMALL, "hidden_size": 64, "num_attention_heads": heads}
    )
    config.architectures = [f"{architecture}ForCausalLM"]
    config.save_pretrained(tmp_path)
    edit_json(tmp_path / "config.json", **{absent: ABSENT})
    theirs, ours = transformers.AutoConfig.from_pretrained(tmp_path), read_config(tmp_path)
    assert ours.kv_heads == theirs.num_key_value_heads
    assert ours.head_dim == (getattr(theirs, "head_dim", None) or 64 // heads)


# Refusals: configuration


@pytest.mark.parametrize(
    ("changes", "key", "hint"),
    [
        ({"architectures": ["GPT2LMHeadModel"]}, "architectures", "LlamaForCausalLM, MistralForCausalLM"),
        ({"architectures": ABSENT}, "architectures is missing", "Qwen2ForCausalLM, Qwen3ForCausalLM"),
        ({"architectures": "LlamaForCausalLM"}, "architectures", "supported"),
        (
            {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0}},
            "rope_parameters",
            "default, linear, llama3 and yarn",
        ),
        ({"rope_scaling": {"type": "dynamic", "factor": 2.0}}, "rope_scaling", "default, linear, llama3 and yarn"),
        (
            {"rope_scaling": {"rope_type": ["linear"], "factor": 2.0}},
            "rope_scaling",
            "default, linear, llama3 and yarn",
        ),
        ({"rope_scaling": "linear"}, "rope_scaling", "object"),
        (
            {"rope_parameters": {"full_attention": {"rope_type": "default"}}},
            "rope_parameters",
            "different rotary settings",
        ),
        ({"rope_parameters": {"rope_theta": 1e4, "partial_rotary_factor": 0.5}}, "rope_parameters", "whole head"),
        ({"partial_rotary_factor": 0.5}, "rope_parameters", "whole head"),
        ({"rope_scaling": {"rope_type": "linear"}}, "rope_scaling.factor is missing", "positive number"),
        ({"rope_parameters": {"rope_theta": "1e4"}}, "rope_parameters.rope_theta is '1e4'", "positive number"),
        (
            {"rope_scaling": {"rope_type": "llama3", **LLAMA3_SCALING, "low_freq_factor": 2.0}},
            "rope_scaling",
            "must be above",
        ),
        ({"hidden_act": "gelu"}, "hidden_act is 'gelu'", "silu"),
        ({"quantization_config": {"quant_method": "fp8"}}, "quantization_config", "bf16, fp16 and fp32"),
        ({"hidden_size": ABSENT}, "hidden_size is missing", "integer"),
        ({"intermediate_size": None}, "intermediate_size is None", "integer"),
        ({"num_hidden_layers": ABSENT}, "num_hidden_layers is missing", "integer"),
        ({"num_attention_heads": ABSENT}, "num_attention_heads is missing", "integer"),
        ({"vocab_size": ABSENT}, "vocab_size is missing", "integer"),
        ({"max_position_embeddings": ABSENT}, "max_position_embeddings is missing", "integer"),
        ({"hidden_size": "32"}, "hidden_size is '32'", "integer"),
        ({"hidden_size": 32.0}, "hidden_size is 32.0", "integer"),
        ({"num_hidden_layers": True}, "num_hidden_layers is True", "integer"),
        ({"num_hidden_layers": 0}, "num_hidden_layers is 0", "from 1"),
        ({"num_hidden_layers": 10**9}, "num_hidden_layers is 1000000000", "to 10000"),
        ({"vocab_size": -1}, "vocab_size is -1", "from 1"),
        ({"max_position_embeddings": 10**40}, "max_position_embeddings", "to 2147483647"),
        ({"rms_norm_eps": math.nan}, "rms_norm_eps is nan", "positive"),
        ({"rms_norm_eps": 10**400}, "rms_norm_eps", "positive"),
        ({"rms_norm_eps": True}, "rms_norm_eps is True", "positive"),
        ({"tie_word_embeddings": "false"}, "tie_word_embeddings is 'false'", "true or false"),
        ({"attention_bias": 1}, "attention_bias is 1", "true or false"),
        ({"eos_token_id": "2"}, "eos_token_id is '2'", "token id"),
        ({"eos_token_id": [2, -1]}, "eos_token_id is [2, -1]", "token id"),
        ({"num_key_value_heads": 3}, "num_key_value_heads is 3", "divide num_attention_heads (4)"),
        ({"num_attention_heads": 6, "head_dim": None}, "num_attention_heads is 6", "divide hidden_size (32)"),
        ({"head_dim": 7}, "head_dim is 7", "even"),
    ],
)
def test_configuration_refused(broken: Path, changes: dict[str, object], key: str, hint: str) -> None:
    edit_json(broken / "config.json", **changes)
    message = refusal(broken)
    assert message.startswith(f"config.json: {key}")
    assert hint in message


def test_no_directory_or_no_configuration(tmp_path: Path) -> None:
    for directory in (tmp_path, tmp_path / "absent", tmp_path / ("x" * 300)):
        assert refusal(directory).startswith("config.json: ")
    (tmp_path / "config.json").mkdir()
    assert "no such file" in refusal(tmp_path)


@pytest.mark.parametrize("file", ["config.json", "generation_config.json"])
@pytest.mark.parametrize("content", [b"", b"{", b"[]", b"\xff\xfe\x00", b'{"a": ' + b"9" * 5000 + b"}", b"[" * 100_000])
def test_configuration_that_is_not_json(broken: Path, file: str, content: bytes) -> None:
    (broken / file).write_bytes(content)
    assert refusal(broken).startswith(f"{file}: ")


def test_generation_configuration_refused(broken: Path) -> None:
    edit_json(broken / "generation_config.json", eos_token_id={"a": 1})
    assert "generation_config.json: eos_token_id is {'a': 1}" in refusal(broken)
    vocabulary_size = json.loads((broken / "config.json").read_text())["vocab_size"]
    edit_json(broken / "generation_config.json", eos_token_id=[2, vocabulary_size])
    assert f"generation_config.json: eos_token_id is [2, {vocabulary_size}]; expected ids of the vocabulary" in refusal(
        broken
    )
    edit_json(broken / "generation_config.json", eos_token_id=[2, vocabulary_size - 1])
    assert read_config(broken).end_token_ids == (2, vocabulary_size - 1)


def test_quantized_by_a_file_of_its_own(broken: Path) -> None:
    (broken / "hf_quant_config.json").write_text("{}")
    assert "hf_quant_config.json: the object quantization" in refusal(broken)


# Refusals: files


def test_pickled_weights_are_not_touched(broken: Path) -> None:
    (broken / "model.safetensors").rename(broken / "pytorch_model.bin")
    message = refusal(broken)
    assert "pytorch_model.bin" in message
    assert "save_pretrained" in message


def test_no_weights_at_all(broken: Path) -> None:
    (broken / "model.safetensors").unlink()
    assert "neither model.safetensors nor model.safetensors.index.json" in refusal(broken)


def test_missing_shard(broken_shards: Path) -> None:
    shard = sorted(broken_shards.glob("*.safetensors"))[1]
    shard.unlink()
    assert refusal(broken_shards).startswith(f"{shard.name}: No such file")


@pytest.mark.parametrize("kept", [0, 3, 8, 40, -40, -1])
def test_truncated_shard(broken_shards: Path, kept: int) -> None:
    shard = sorted(broken_shards.glob("*.safetensors"))[-1]
    shard.write_bytes(shard.read_bytes()[:kept])
    message = refusal(broken_shards)
    assert message.startswith(f"{shard.name}: ")
    assert "truncated" in message


def test_shard_with_bytes_too_many(broken: Path) -> None:
    with (broken / "model.safetensors").open("ab") as file:
        file.write(b"\0")
    assert "too long" in refusal(broken)


def test_files_that_would_fill_the_memory_are_not_read(broken_shards: Path) -> None:
    """Sparse files of 20 GB; a header of small lists, which take 20 times as much memory as their text."""
    for name in ("generation_config.json", "model.safetensors.index.json", "config.json"):
        path = broken_shards / name
        intact = path.read_bytes()
        os.truncate(path, 20 * 10**9)
        assert refusal(broken_shards).startswith(f"{name}: larger than 16 MiB")
        path.write_bytes(intact)
    shard = min(broken_shards.glob("*.safetensors"))
    with shard.open("wb") as file:
        file.write((99 * 10**6).to_bytes(8, "little"))
        file.truncate(8 + 99 * 10**6)
    assert refusal(broken_shards).startswith(f"{shard.name}: a header of 99,000,000 bytes; at most 16 MiB are read")


def test_a_pipe_in_place_of_a_shard_is_not_waited_for(broken_shards: Path) -> None:
    shard = min(broken_shards.glob("*.safetensors"))
    shard.unlink()
    os.mkfifo(shard)
    assert refusal(broken_shards).startswith(f"{shard.name}: is not a regular file")


def test_large_file_pointer_in_place_of_a_shard(broken: Path) -> None:
    (broken / "model.safetensors").write_text("version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 1\n")
    assert "Git LFS" in refusal(broken)


@pytest.mark.parametrize(
    ("entry", "hint"),
    [
        (None, "damaged header entry"),
        ({"dtype": "F32", "shape": [32]}, "damaged header entry"),
        ({"dtype": "F32", "shape": [-32], "data_offsets": [0, 128]}, "damaged header entry"),
        ({"dtype": "F32", "shape": [32.0], "data_offsets": [0, 128]}, "damaged header entry"),
        ({"dtype": 1, "shape": [32], "data_offsets": [0, 128]}, "damaged header entry"),
        ({"dtype": "F32", "shape": [31], "data_offsets": [0, 128]}, "F32 of shape [31], spans 128 bytes"),
        ({"dtype": "F32", "shape": [2**62] * 300_000, "data_offsets": [0, 128]}, "damaged header entry"),
        ({"dtype": "F32", "shape": [2**62] * 8, "data_offsets": [0, 128]}, "spans 128 bytes"),
        ({"dtype": "F32", "shape": [10**4000], "data_offsets": [0, 128]}, "damaged header entry"),
        ({"dtype": "F32", "shape": [32], "data_offsets": [-128, 0]}, "damaged header entry"),
        ({"dtype": "F32", "shape": [32], "data_offsets": [False, 128]}, "damaged header entry"),
        ({"dtype": "F32", "shape": [32], "data_offsets": [4, 132]}, "does not begin where"),
        ({"dtype": "I8", "shape": [32], "data_offsets": [32, 0]}, "does not begin where"),
    ],
)
def test_damaged_header(broken: Path, entry: object, hint: str) -> None:
    header = json.dumps({"model.norm.weight": entry}).encode()
    (broken / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + bytes(128))
    message = refusal(broken)
    assert message.startswith("model.safetensors: ")
    assert hint in message
    assert "'model.norm.weight'" in message


@pytest.mark.parametrize("weight_map", [ABSENT, None, {}, [], {"a": 1}, {"a": "../model.safetensors"}, {"a": "x\0y"}])
def test_damaged_index(broken_shards: Path, weight_map: object) -> None:
    index = broken_shards / "model.safetensors.index.json"
    edit_json(index, weight_map=weight_map)
    assert refusal(broken_shards).startswith(f"{index.name}: ")


def test_index_that_points_to_the_wrong_shard(broken_shards: Path) -> None:
    index = broken_shards / "model.safetensors.index.json"
    weight_map = json.loads(index.read_text())["weight_map"]
    wrong = next(file for file in weight_map.values() if file != weight_map["model.norm.weight"])
    edit_json(index, weight_map=weight_map | {"model.norm.weight": wrong})
    message = refusal(broken_shards)
    assert message.startswith(f"{wrong}: ")
    assert "'model.norm.weight'" in message


def test_tensor_in_two_shards(broken_shards: Path) -> None:
    index = broken_shards / "model.safetensors.index.json"
    weight_map = json.loads(index.read_text())["weight_map"]
    shutil.copy(broken_shards / weight_map["model.norm.weight"], broken_shards / "model-copy.safetensors")
    edit_json(index, weight_map=weight_map | {"model.norm.weight": "model-copy.safetensors"})
    assert "also in another shard" in refusal(broken_shards)


# Refusals: tensors


def test_missing_tensors_are_named_and_counted(broken: Path) -> None:
    edit_tensors(
        broken, lambda tensors: [tensors.pop(f"model.layers.1.mlp.{part}_proj.weight") for part in ("up", "down")]
    )
    pattern = r": tensor 'model.layers.1.mlp.(up|down)_proj.weight' is missing \(2 of 21 are\)"
    assert re.match(pattern, refusal(broken))


def test_a_missing_head_is_refused_with_the_key_that_ties_it(broken: Path) -> None:
    """Transformers would draw a random one."""
    edit_json(broken / "config.json", tie_word_embeddings=ABSENT)
    edit_tensors(broken, lambda tensors: tensors.pop("lm_head.weight"))
    assert "'lm_head.weight' is missing" in refusal(broken)
    assert "set tie_word_embeddings to true" in refusal(broken)
    edit_json(broken / "config.json", tie_word_embeddings=True)
    assert Checkpoint.open(broken).config.tied_embeddings


def test_extra_tensor(broken: Path) -> None:
    edit_tensors(broken, lambda tensors: tensors.update({"model.layers.2.mlp.up_proj.weight": torch.ones(2)}))
    assert "model.safetensors: tensor 'model.layers.2.mlp.up_proj.weight' has no place" in refusal(broken)


def test_rotary_tables_of_old_checkpoints_are_passed_over(broken: Path) -> None:
    name = "model.layers.0.self_attn.rotary_emb.inv_freq"
    edit_tensors(broken, lambda tensors: tensors.update({name: torch.ones(4)}))
    Checkpoint.open(broken)


def test_wrong_shape(broken: Path) -> None:
    edit_tensors(broken, lambda tensors: tensors.update({"model.norm.weight": torch.ones(31)}))
    assert "'model.norm.weight' has shape [31], config.json implies [32]" in refusal(broken)


def test_config_of_another_size_is_noticed(broken: Path) -> None:
    edit_json(broken / "config.json", vocab_size=62)
    assert "'model.embed_tokens.weight' has shape [61, 32], config.json implies [62, 32]" in refusal(broken)


@pytest.mark.parametrize(
    ("dtype", "name"), [(torch.float64, "F64"), (torch.int8, "I8"), (torch.float8_e4m3fn, "F8_E4M3")]
)
def test_wrong_dtype(broken: Path, dtype: torch.dtype, name: str) -> None:
    edit_tensors(broken, lambda tensors: tensors.update({"lm_head.weight": tensors["lm_head.weight"].to(dtype)}))
    message = refusal(broken)
    assert f"'lm_head.weight' has dtype {name}" in message
    assert "bf16, fp16 and fp32" in message


def test_tied_head_may_be_stored_if_it_is_the_embedding(broken: Path) -> None:
    edit_json(broken / "config.json", tie_word_embeddings=True)
    assert "tensor 'lm_head.weight' differs" in refusal(broken)
    edit_tensors(
        broken, lambda tensors: tensors.update({"lm_head.weight": tensors["model.embed_tokens.weight"].clone()})
    )
    assert "lm_head.weight" not in Checkpoint.open(broken).config.tensor_shapes()
    edit_tensors(broken, lambda tensors: tensors.update({"lm_head.weight": tensors["lm_head.weight"].view(32, 61)}))
    assert "tensor 'lm_head.weight' differs" in refusal(broken)
    edit_tensors(broken, lambda tensors: tensors.update({"lm_head.weight": tensors["lm_head.weight"].bfloat16()}))
    assert "tensor 'lm_head.weight' differs" in refusal(broken)
    edit_tensors(broken, lambda tensors: tensors.pop("model.embed_tokens.weight"))
    assert "'model.embed_tokens.weight' is missing" in refusal(broken)


# Values


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A head of 2.56 million elements, so that it is read in several pieces."""
    directory = tmp_path_factory.mktemp("large")
    make_model("Llama", vocab_size=80_000).save_pretrained(directory)
    return directory


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("stored", [torch.float32, torch.bfloat16, torch.float16])
def test_nan_and_infinity_are_found_wherever_they_are(
    large: Path, value: float, stored: torch.dtype, tmp_path: Path
) -> None:
    shutil.copytree(large, tmp_path, dirs_exist_ok=True)
    clean = load_file(tmp_path / "model.safetensors")["lm_head.weight"].to(stored)
    edit_tensors(tmp_path, lambda tensors: tensors.update({"lm_head.weight": clean}))
    checkpoint = Checkpoint.open(tmp_path)
    assert torch.equal(checkpoint.read("lm_head.weight", torch.float32), clean.float())
    last = clean.numel() - 1
    for position in (0, 1, 17, (1 << 20) - 1, 1 << 20, last - 1, last):
        damaged = clean.clone()
        damaged.view(-1)[position] = value
        edit_tensors(tmp_path, lambda tensors, damaged=damaged: tensors.update({"lm_head.weight": damaged}))
        for wanted in (torch.float32, torch.bfloat16):
            with pytest.raises(
                CheckpointError, match=r"model.safetensors: tensor 'lm_head.weight' holds NaN or infinity"
            ):
                checkpoint.read("lm_head.weight", wanted)


def test_values_that_overflow_the_wanted_dtype(broken: Path) -> None:
    edit_tensors(broken, lambda tensors: tensors["model.norm.weight"].fill_(torch.finfo(torch.float32).max))
    checkpoint = Checkpoint.open(broken)
    assert checkpoint.read("model.norm.weight", torch.float32).isfinite().all()
    with pytest.raises(CheckpointError, match=r"'model.norm.weight' holds NaN or infinity as torch.bfloat16"):
        checkpoint.read("model.norm.weight", torch.bfloat16)


def test_files_that_change_after_opening(broken: Path) -> None:
    checkpoint = Checkpoint.open(broken)
    path = broken / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-8])
    names = checkpoint.config.tensor_shapes()
    with pytest.raises(CheckpointError, match="became shorter"):
        [checkpoint.read(name, torch.float32) for name in names]
    path.unlink()
    with pytest.raises(CheckpointError, match="No such file"):
        checkpoint.read("lm_head.weight", torch.float32)


def test_reading_keeps_nothing_mapped_or_open_and_needs_little_memory(large: Path) -> None:
    def kilobytes(key: str) -> int:
        return int(re.search(rf"{key}:\s+(\d+) kB", Path("/proc/self/status").read_text())[1])

    checkpoint = Checkpoint.open(large)
    checkpoint.read("lm_head.weight", torch.bfloat16)
    Path("/proc/self/clear_refs").write_text("5")  # resets the peak
    before = kilobytes("VmRSS")
    result = checkpoint.read("lm_head.weight", torch.bfloat16)
    assert (kilobytes("VmHWM") - before) * 1024 < result.nbytes + 6 * 2**20
    assert str(large) not in Path("/proc/self/maps").read_text()
    assert not any(str(large) in str(link.readlink()) for link in Path("/proc/self/fd").iterdir() if link.is_symlink())


def test_content_hash_follows_content(llama: Path, broken: Path, sharded: Path) -> None:
    original = Checkpoint.open(llama).content_hash
    assert re.fullmatch("[0-9a-f]{64}", original)
    assert Checkpoint.open(broken).content_hash == original
    hashes = {original, Checkpoint.open(sharded).content_hash}
    edit_tensors(broken, lambda tensors: tensors.update({"model.norm.weight": tensors["model.norm.weight"].half()}))
    hashes.add(Checkpoint.open(broken).content_hash)
    edit_json(broken / "config.json", rope_parameters={"rope_theta": 2e4})
    hashes.add(Checkpoint.open(broken).content_hash)
    edit_json(broken / "generation_config.json", eos_token_id=9)
    hashes.add(Checkpoint.open(broken).content_hash)
    assert len(hashes) == 5


# Fuzz: whatever the bytes, a CheckpointError of one line or a checkpoint that can be read


def open_and_read(directory: Path) -> None:
    try:
        checkpoint = Checkpoint.open(directory)
        for name, shape in checkpoint.config.tensor_shapes().items():
            assert checkpoint.read(name, torch.float32).shape == shape
    except CheckpointError as error:
        message = str(error)
    else:
        message = ""
    assert "\n" not in message


@st.composite
def damage(draw: st.DrawFn) -> Callable[[bytes], bytes]:
    """Cut the content short, or overwrite, insert or delete a few bytes of its first kilobytes."""
    kind = draw(st.sampled_from(["truncate", "overwrite", "insert", "delete"]))
    where = draw(st.floats(0, 1, exclude_max=True))
    spread = draw(st.sampled_from([8, 200, 4000]))
    junk = draw(
        st.one_of(st.binary(min_size=1, max_size=8), st.sampled_from([b"9", b"-", b"[[", b'"', b"null", b"\n"]))
    )

    def apply(content: bytes) -> bytes:
        place = int(where * min(len(content), spread))
        after = {"truncate": len(content), "overwrite": place + len(junk), "insert": place, "delete": place + len(junk)}
        return content[:place] + (junk if kind in ("overwrite", "insert") else b"") + content[after[kind] :]

    return apply


@pytest.fixture(scope="module")
def fuzzed(sharded: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return Path(shutil.copytree(sharded, tmp_path_factory.mktemp("fuzzed") / "model"))


@pytest.mark.parametrize("pattern", ["config.json", "generation_config.json", "*.index.json", "*.safetensors"])
def test_damaged_bytes(fuzzed: Path, pattern: str) -> None:
    path = min(fuzzed.glob(pattern))
    intact = path.read_bytes()

    @settings(max_examples=examples(300), deadline=None)
    @given(damage())
    def try_one(apply: Callable[[bytes], bytes]) -> None:
        path.write_bytes(apply(intact))
        open_and_read(fuzzed)

    try:
        try_one()
    finally:
        path.write_bytes(intact)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.integers(1, 64) | st.floats() | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=8,
)


def test_wrong_values(fuzzed: Path) -> None:
    path = fuzzed / "config.json"
    intact = path.read_text()
    values = json.loads(intact)
    keys = [*values, "rope_scaling", "rope_theta", "quantization_config", "partial_rotary_factor"]
    rope_keys = ["rope_type", "type", "rope_theta", "factor", *LLAMA3_SCALING]
    rope_values = JSON | st.sampled_from(["default", "linear", "llama3", 2.0])
    changes = st.dictionaries(st.sampled_from(keys), JSON, max_size=2)
    scaling = st.none() | st.dictionaries(st.sampled_from(rope_keys), rope_values)

    @settings(max_examples=examples(300), deadline=None)
    @given(changes, scaling)
    def try_one(change: dict[str, object], rope_scaling: dict[str, object] | None) -> None:
        path.write_text(json.dumps({**values, "rope_scaling": rope_scaling, **change}))
        open_and_read(fuzzed)

    try:
        try_one()
    finally:
        path.write_text(intact)


# Shapes and random weights


@pytest.mark.parametrize(
    ("name", "parameters"),
    [
        ("tiny", 9_506_048),
        ("125m", 124_668_672),
        ("1.1b", 1_100_048_384),
        ("llama3.1-8b", 8_030_261_248),
        ("llama2-70b", 68_976_648_192),
        ("llama3.1-405b", 405_853_388_800),
    ],
)
def test_named_shapes_have_the_published_number_of_parameters(name: str, parameters: int) -> None:
    assert SHAPES[name].name == name
    assert SHAPES[name].parameters == parameters
    assert SHAPES[name].heads * SHAPES[name].head_dim == SHAPES[name].hidden_size
    assert SHAPES[name].end_token_ids


def test_llama31_rotary_scaling() -> None:
    expected = RopeConfig(500_000.0, "llama3", 8.0, low_frequency_factor=1.0, high_frequency_factor=4.0)
    assert SHAPES["llama3.1-8b"].rope == SHAPES["llama3.1-405b"].rope == expected
    assert expected.original_max_positions == 8192


ALL_OPTIONS = ModelConfig(
    "options", 64, 96, 2, 4, 2, 16, 101, 32, qkv_bias=True, output_bias=True, mlp_bias=True, qk_norm=True
)


def test_random_weights_depend_on_seed_and_name_alone() -> None:
    names = list(ALL_OPTIONS.tensor_shapes())
    first = {name: RandomWeights(ALL_OPTIONS, 3).read(name, torch.float32) for name in names}
    again = RandomWeights(ALL_OPTIONS, 3)
    for name in reversed(names):
        assert torch.equal(again.read(name, torch.float32), first[name])
        assert torch.equal(again.read(name, torch.bfloat16), first[name].bfloat16())
        assert not torch.equal(RandomWeights(ALL_OPTIONS, 4).read(name, torch.float32), first[name])
    assert len({tensor.view(-1)[0].item() for tensor in first.values()}) == len(names)


def test_random_weights_do_not_depend_on_threads_and_do_not_repeat() -> None:
    weights = RandomWeights(SHAPES["tiny"])
    alone = weights.read("lm_head.weight", torch.float32)
    torch.set_num_threads(2)
    assert torch.equal(weights.read("lm_head.weight", torch.float32), alone)
    assert len(alone.unique(dim=0)) == len(alone)
    assert torch.corrcoef(alone.view(2, -1))[0, 1].abs() < 0.005


def test_random_weights_distribution() -> None:
    weights = RandomWeights(SHAPES["tiny"])
    for name, shape in SHAPES["tiny"].tensor_shapes().items():
        tensor = weights.read(name, torch.float32)
        assert tensor.shape == shape
        mean, deviation = (1.0, 0.1) if len(shape) == 1 else (0.0, shape[1] ** -0.5)
        standard_error = deviation / math.sqrt(tensor.numel())
        assert abs(tensor.mean().item() - mean) < 5 * standard_error
        assert abs(tensor.std().item() - deviation) < 5 * standard_error


def test_random_weights_hash() -> None:
    hashes = {RandomWeights(SHAPES[name], seed).content_hash for name in ("tiny", "125m") for seed in (0, 1)}
    assert len(hashes) == 4
    assert RandomWeights(SHAPES["tiny"], 1).content_hash in hashes


@pytest.mark.parametrize(
    "config",
    [SHAPES["tiny"], ModelConfig("deep", 128, 320, 40, 4, 2, 32, 997, 256, tied_embeddings=True), ALL_OPTIONS],
    ids=lambda config: config.name,
)
def test_activations_stay_sane(config: ModelConfig) -> None:
    """A forward pass written out: no layer explodes or dies out, logits have a deviation of about 1."""
    weights = RandomWeights(config)

    def norm(x: torch.Tensor, name: str) -> torch.Tensor:
        return torch.nn.functional.rms_norm(x, x.shape[-1:], weights.read(name, torch.float32), config.rms_norm_epsilon)

    def linear(x: torch.Tensor, name: str) -> torch.Tensor:
        bias = f"{name}.bias" in config.tensor_shapes()
        return torch.nn.functional.linear(
            x,
            weights.read(f"{name}.weight", torch.float32),
            weights.read(f"{name}.bias", torch.float32) if bias else None,
        )

    def heads(x: torch.Tensor, name: str) -> torch.Tensor:
        x = linear(x, f"{name}_proj").view(length, -1, config.head_dim)
        if config.qk_norm and not name.endswith("v"):
            x = norm(x, f"{name}_norm.weight")
        return x if name.endswith("v") else rotate(x)

    def rotate(x: torch.Tensor) -> torch.Tensor:
        pairs = torch.view_as_complex(x.view(*x.shape[:-1], -1, 2))
        frequency = config.rope.theta ** -torch.linspace(0, 1, pairs.shape[-1])
        angle = torch.outer(torch.arange(length).float(), frequency)[:, None]
        return torch.view_as_real(pairs * torch.polar(torch.ones_like(angle), angle)).view(x.shape)

    length = 32
    tokens = torch.randint(config.vocabulary_size, (length,), generator=torch.Generator().manual_seed(0))
    embedding = weights.read("model.embed_tokens.weight", torch.float32)
    x = embedding[tokens]
    for layer in range(config.layers):
        prefix = f"model.layers.{layer}"
        h = norm(x, f"{prefix}.input_layernorm.weight")
        q, k, v = (heads(h, f"{prefix}.self_attn.{part}").transpose(0, 1) for part in "qkv")
        group = config.heads // config.kv_heads
        k, v = k.repeat_interleave(group, dim=0), v.repeat_interleave(group, dim=0)
        attended = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        attention = linear(attended.transpose(0, 1).reshape(length, -1), f"{prefix}.self_attn.o_proj")
        x = x + attention
        h = norm(x, f"{prefix}.post_attention_layernorm.weight")
        gate, up = linear(h, f"{prefix}.mlp.gate_proj"), linear(h, f"{prefix}.mlp.up_proj")
        feed_forward = linear(torch.nn.functional.silu(gate) * up, f"{prefix}.mlp.down_proj")
        x = x + feed_forward
        assert 0.1 < attention.std() < 3
        assert 0.1 < feed_forward.std() < 3
        assert x.std() < 2 * math.sqrt(layer + 1)
    head = embedding if config.tied_embeddings else weights.read("lm_head.weight", torch.float32)
    logits = norm(x, "model.norm.weight") @ head.T
    assert 0.7 < logits.std() < 1.4
    assert logits.argmax(dim=-1).unique().numel() > length // 4
