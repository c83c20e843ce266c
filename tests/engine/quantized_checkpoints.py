"""Small fp8 checkpoints, laid out as quantizers lay them out, and the model in fp32 that they stand for."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from checkpoints import make_checkpoint
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import PreTrainedModel

E4M3_MAX = 448.0


@dataclass(frozen=True)
class Layout:
    """How a quantizer writes what it made."""

    declared: Mapping[str, Mapping[str, object]]  # what is added to which file
    scale_shape: tuple[int, ...] = ()  # -1 for the rows of the weight
    input_scales: bool = True
    scale_dtype: torch.dtype = torch.float32
    cache: tuple[str, str] | None = None


MODELOPT_CACHE, COMPRESSED_CACHE = ("k_proj.k_scale", "v_proj.v_scale"), ("k_scale", "v_scale")
E4M3 = {"num_bits": 8, "type": "float", "dynamic": False}


def modelopt(algorithm: str = "FP8", cache: str | None = None) -> dict[str, object]:
    """``hf_quant_config.json``."""
    quantization = {"quant_algo": algorithm, "kv_cache_quant_algo": cache, "exclude_modules": ["lm_head"]}
    return {"producer": {"name": "modelopt", "version": "0.33.1"}, "quantization": quantization}


def modelopt_config(algorithm: str = "FP8", **others: object) -> dict[str, object]:
    """ModelOpt's part of ``config.json``."""
    group = {"input_activations": E4M3, "weights": E4M3, "targets": ["Linear"]}
    declared = {"config_groups": {"group_0": group}, "ignore": ["lm_head"], "quant_algo": algorithm}
    return {"quantization_config": {**declared, "quant_method": "modelopt", **others}}


def compressed(
    weights: str, inputs: Mapping[str, object] | None, cache: Mapping[str, object] | None = None
) -> dict[str, object]:
    """compressed-tensors' part of ``config.json``."""
    common = {"actorder": None, "block_structure": None, "group_size": None, "observer_kwargs": {}, "symmetric": True}
    group = {
        "weights": {**common, **E4M3, "observer": "minmax", "strategy": weights},
        "input_activations": None if inputs is None else {**common, **E4M3, "observer": None, **inputs},
        "output_activations": None,
        "targets": ["Linear"],
    }
    return {
        "quantization_config": {
            "config_groups": {"group_0": group},
            "format": "float-quantized",
            "global_compression_ratio": None,
            "ignore": ["lm_head"],
            "kv_cache_scheme": cache,
            "quant_method": "compressed-tensors",
            "quantization_status": "compressed",
        }
    }


BF16 = torch.bfloat16
TOKEN = {"strategy": "token", "dynamic": True}
STATIC = {"strategy": "tensor"}
LAYOUTS = {
    "modelopt file": Layout({"hf_quant_config.json": modelopt()}),
    "modelopt config": Layout({"config.json": modelopt_config()}),
    "modelopt cache": Layout(
        {"hf_quant_config.json": modelopt(cache="FP8"), "config.json": modelopt_config()}, cache=MODELOPT_CACHE
    ),
    "modelopt cache in config": Layout({"config.json": modelopt_config(kv_cache_scheme="FP8")}, cache=MODELOPT_CACHE),
    "modelopt rows": Layout({"hf_quant_config.json": modelopt("FP8_PER_CHANNEL_PER_TOKEN")}, (-1,), False),
    "compressed static": Layout({"config.json": compressed("tensor", STATIC)}, (1,), True, BF16),
    "compressed dynamic": Layout({"config.json": compressed("channel", TOKEN)}, (-1, 1), False, BF16),
    "compressed dynamic tensors": Layout(
        {"config.json": compressed("tensor", {**STATIC, "dynamic": True})}, (1,), False, torch.float32
    ),
    "compressed static rows": Layout({"config.json": compressed("channel", STATIC)}, (-1, 1), True, torch.float16),
    "compressed weights only": Layout({"config.json": compressed("channel", None)}, (-1, 1), False, BF16),
    "compressed cache": Layout(
        {"config.json": compressed("tensor", STATIC, {**E4M3, **STATIC, "symmetric": True})},
        (1,),
        True,
        torch.float32,
        COMPRESSED_CACHE,
    ),
}


@dataclass(frozen=True)
class Quantized:
    """A checkpoint, and transformers' model with the weights that it stands for, in fp32."""

    directory: Path
    model: PreTrainedModel
    layout: Layout


def quantize(
    directory: Path,
    layout: Layout,
    architecture: str = "Llama",
    *,
    shards: int = 1,
    cache_gain: float = 1.0,
    **changes: object,
) -> Quantized:
    """Saves a random model and quantises it, with scales measured on a few tokens.

    ``cache_gain``, for Qwen3, a power of two, makes keys and values larger, and queries and the projection after
    attention smaller, which changes no answer unless something saturates.
    """
    model = make_checkpoint(directory, architecture, stored=torch.bfloat16, gain=1.0, **changes)
    if cache_gain != 1:
        with torch.no_grad():
            for layer in model.model.layers:
                attention = layer.self_attn
                for part in (layer.input_layernorm, attention.k_norm):
                    part.weight *= cache_gain
                for part in (attention.q_norm, attention.o_proj):
                    part.weight /= cache_gain
    largest_inputs, largest_outputs = measure(model)
    meant = model.state_dict()
    tensors: dict[str, Tensor] = {}
    for file in sorted(directory.glob("*.safetensors")):
        tensors |= {name: meant[name].bfloat16() for name in load_file(file)}
        file.unlink()
    for name, module in model.named_modules():
        if not name.endswith("_proj"):
            continue
        weight_ND = module.weight.data
        by_row = -1 in layout.scale_shape
        largest = weight_ND.abs().amax(1, keepdim=True) if by_row else weight_ND.abs().amax().view(1, 1)
        scale = (largest / E4M3_MAX).to(layout.scale_dtype)
        values_ND = (weight_ND / scale.float()).clamp(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn)
        module.weight.data = values_ND.float() * scale.float()
        tensors[f"{name}.weight"] = values_ND
        tensors[f"{name}.weight_scale"] = scale.reshape(layout.scale_shape).contiguous()
        shape = (1,) if layout.scale_shape else ()
        if layout.input_scales:
            # Parts of a merged linear disagree, as when each was measured by itself: the largest is right.
            spread = largest_inputs[name] * (0.8 if name.endswith(("q_proj", "up_proj")) else 1.0) / E4M3_MAX
            tensors[f"{name}.input_scale"] = spread.to(layout.scale_dtype).view(shape)
        for side, scale_name in zip("kv", layout.cache or (), strict=False):
            if name.endswith(f"{side}_proj"):
                # Keys are measured before they are rotated, which can make the largest larger.
                measured = largest_outputs.get(name.replace("k_proj", "k_norm"), largest_outputs[name])
                spread = measured * (1.5 if side == "k" else 1.0) / E4M3_MAX
                attention = name.rpartition(".")[0]
                tensors[f"{attention}.{scale_name}"] = spread.to(layout.scale_dtype).view(shape)
    save_shards(directory, tensors, shards)
    for file, values in layout.declared.items():
        path = directory / file
        path.write_text(json.dumps((json.loads(path.read_text()) if path.is_file() else {}) | dict(values)))
    return Quantized(directory, model, layout)


@torch.inference_mode()
def measure(model: PreTrainedModel) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Largest input and output of linears and norms of keys in the layers, over 200 random tokens."""
    inputs: dict[str, Tensor] = {}
    outputs: dict[str, Tensor] = {}

    def record(name: str):
        def hook(module: torch.nn.Module, arguments: tuple[Tensor], output: Tensor) -> None:
            inputs[name], outputs[name] = arguments[0].abs().amax().float(), output.abs().amax().float()

        return hook

    hooks = [
        module.register_forward_hook(record(name))
        for name, module in model.named_modules()
        if name.endswith(("_proj", "k_norm"))
    ]
    model(torch.randint(model.config.vocab_size, (4, 50), generator=torch.Generator().manual_seed(0)))
    for hook in hooks:
        hook.remove()
    return inputs, outputs


def save_shards(directory: Path, tensors: Mapping[str, Tensor], shards: int) -> None:
    """Spreads the tensors over the files in turn, so that scales and weights are rarely in the same."""
    if shards == 1:
        save_file(dict(tensors), directory / "model.safetensors")
        return
    files: dict[str, dict[str, Tensor]] = defaultdict(dict)
    for number, (name, tensor) in enumerate(sorted(tensors.items())):
        files[f"model-{number % shards}.safetensors"][name] = tensor
    for file, content in files.items():
        save_file(content, directory / file)
    weight_map = {name: file for file, content in files.items() for name in content}
    (directory / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
