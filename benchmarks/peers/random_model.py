"""Model folders with ``config.json`` and a tokenizer, for servers that make random weights of their own.

python benchmarks/peers/random_model.py llama3.1-8b FOLDER
python benchmarks/peers/random_model.py llama3.1-8b FOLDER --fp8  # one scale a tensor
python benchmarks/peers/random_model.py qwen3-30b-a3b FOLDER --fp8 block  # one for each 128 x 128, as Qwen's own
python benchmarks/peers/random_model.py llama2-70b FOLDER --weights  # a checkpoint: random fp8 weights, as ModelOpt's
python benchmarks/peers/random_model.py llama2-70b FOLDER --weights nvfp4  # the same in NVFP4
"""

from __future__ import annotations

import argparse
import json
import math
import random
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from megatoken.engine.config import SHAPES, ModelConfig

QUANTIZATIONS: dict[str, dict[str, Any]] = {
    "tensor": {"quant_method": "fp8", "activation_scheme": "static"},
    "modelopt": {"quant_method": "modelopt", "quant_algo": "FP8"},
    "modelopt nvfp4": {"quant_method": "modelopt", "quant_algo": "NVFP4", "group_size": 16},
    "block": {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128]},
}


def make_model_folder(model: ModelConfig, folder: Path, *, stored: str | None = None) -> None:
    """``config.json``, and a ``tokenizer.json`` whose every id has a text of three to six letters.

    ``stored``, a key of ``QUANTIZATIONS``: the form that the configuration gives the weights, which megatoken takes
    from ``--precision`` where they are random. Of mixtures, only Qwen3's are known.
    """
    config: dict[str, Any] = {
        "architectures": ["Qwen3MoeForCausalLM" if model.experts else "LlamaForCausalLM"],
        "model_type": "qwen3_moe" if model.experts else "llama",
        "dtype": "bfloat16",
        "vocab_size": model.vocabulary_size,
        "hidden_size": model.hidden_size,
        "intermediate_size": model.intermediate_size,
        "num_hidden_layers": model.layers,
        "num_attention_heads": model.heads,
        "num_key_value_heads": model.kv_heads,
        "head_dim": model.head_dim,
        "max_position_embeddings": model.max_positions,
        "rms_norm_eps": model.rms_norm_epsilon,
        "rope_theta": model.rope.theta,
        "hidden_act": "silu",
        "tie_word_embeddings": model.tied_embeddings,
        "eos_token_id": list(model.end_token_ids),
    }
    if model.experts:
        config |= {
            "num_experts": model.experts.count,
            "num_experts_per_tok": model.experts.active,
            "moe_intermediate_size": model.experts.intermediate_size,
            "norm_topk_prob": model.experts.normalized,
        }
    if stored is not None:
        config["quantization_config"] = QUANTIZATIONS[stored]
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "PreTrainedTokenizerFast"}))
    letters = random.Random(0)
    texts = dict.fromkeys(sorted(pre_tokenizers.ByteLevel.alphabet()))
    while len(texts) < model.vocabulary_size:
        texts["Ġ" + "".join(letters.choices("abcdefghijklmnopqrstuvwxyz", k=letters.randint(3, 6)))] = None
    tokenizer = Tokenizer(models.BPE(vocab={text: number for number, text in enumerate(texts)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.save(str(folder / "tokenizer.json"))


def write_weights(model: ModelConfig, folder: Path, form: str) -> None:
    """Random weights of a dense model, in a file for each part; linears of the layers in e4m3 with one scale, or NVFP4.

    Made on a GPU if there is one; each file is written by a thread of its own.
    """
    import torch
    from safetensors.torch import save_file

    from megatoken.engine.schemes.packed4 import draw

    device = "cuda" if torch.cuda.is_available() else "cpu"
    hidden, wide = model.hidden_size, model.intermediate_size
    queries, keys = model.heads * model.head_dim, model.kv_heads * model.head_dim
    linears = {
        **{f"self_attn.{name}_proj": (rows, hidden) for name, rows in (("q", queries), ("k", keys), ("v", keys))},
        "self_attn.o_proj": (hidden, queries),
        "mlp.gate_proj": (wide, hidden),
        "mlp.up_proj": (wide, hidden),
        "mlp.down_proj": (hidden, wide),
    }

    def plain(*shape: int) -> torch.Tensor:
        return (torch.randn(shape, device=device, dtype=torch.bfloat16) * 0.02).cpu()

    def layer(number: int) -> dict[str, torch.Tensor]:
        prefix = f"model.layers.{number}."
        norms = ("input_layernorm", "post_attention_layernorm")
        tensors = {f"{prefix}{name}.weight": torch.ones(hidden, dtype=torch.bfloat16) for name in norms}
        for name, shape in linears.items():
            values = torch.randn(shape, device=device, dtype=torch.bfloat16)
            if form == "nvfp4":
                packed = draw(values.div_(math.sqrt(shape[1])))
                assert packed.second_N1 is not None
                tensors[f"{prefix}{name}.weight"] = packed.codes_NB.cpu()
                tensors[f"{prefix}{name}.weight_scale"] = packed.scale_NG.cpu()
                tensors[f"{prefix}{name}.weight_scale_2"] = packed.second_N1[0, 0].float().cpu()
                tensors[f"{prefix}{name}.input_scale"] = torch.tensor(8 / (448 * 6))
                continue
            tensors[f"{prefix}{name}.weight"] = values.mul_(64).clamp_(-448, 448).to(torch.float8_e4m3fn).cpu()
            tensors[f"{prefix}{name}.weight_scale"] = torch.tensor(1 / (64 * math.sqrt(shape[1])))
            tensors[f"{prefix}{name}.input_scale"] = torch.tensor(8 / 448)
        return tensors

    def ends() -> dict[str, torch.Tensor]:
        tensors = {"model.embed_tokens.weight": plain(model.vocabulary_size, hidden)}
        tensors["model.norm.weight"] = torch.ones(hidden, dtype=torch.bfloat16)
        if not model.tied_embeddings:
            tensors["lm_head.weight"] = plain(model.vocabulary_size, hidden)
        return tensors

    names: dict[str, str] = {}
    with ThreadPoolExecutor(8) as pool:

        def write(number: int) -> None:
            tensors = layer(number) if number < model.layers else ends()
            file = f"model-{number:05}.safetensors"
            names.update(dict.fromkeys(tensors, file))
            save_file(tensors, folder / file, metadata={"format": "pt"})

        list(pool.map(write, range(model.layers + 1)))
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": names}))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("shape", choices=list(SHAPES))
    parser.add_argument("folder", type=Path)
    parser.add_argument(
        "--fp8",
        choices=["tensor", "modelopt", "block"],
        nargs="?",
        const="tensor",
        help="state that they are stored in fp8",
    )
    parser.add_argument("--weights", choices=["fp8", "nvfp4"], nargs="?", const="fp8", help="a whole checkpoint")
    options = parser.parse_args()
    model = SHAPES[options.shape]
    whole = {"fp8": "modelopt", "nvfp4": "modelopt nvfp4"}.get(options.weights)
    make_model_folder(model, options.folder, stored=whole or options.fp8)
    if options.weights:
        write_weights(model, options.folder, options.weights)
    return 0


if __name__ == "__main__":
    sys.exit(main())
