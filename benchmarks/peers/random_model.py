"""Model folders without weights: ``config.json`` and a tokenizer, for servers that make random weights of their own.

python benchmarks/peers/random_model.py llama3.1-8b FOLDER
python benchmarks/peers/random_model.py llama3.1-8b FOLDER --fp8  # one scale a tensor
python benchmarks/peers/random_model.py qwen3-30b-a3b FOLDER --fp8 block  # one for each 128 x 128, as Qwen's own
"""

from __future__ import annotations

import argparse
import json
import random
import sys
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from megatoken.engine.config import SHAPES, ModelConfig

FP8: dict[str, dict[str, Any]] = {
    "tensor": {"quant_method": "fp8", "activation_scheme": "static"},
    "block": {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128]},
}


def make_model_folder(model: ModelConfig, folder: Path, *, fp8: str | None = None) -> None:
    """``config.json``, and a ``tokenizer.json`` whose every id has a text of three to six letters.

    With ``fp8``, a key of ``FP8``, the configuration says that the weights are stored in e4m3, which megatoken takes
    from ``--precision``. Of mixtures, only Qwen3's are known.
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
    if fp8 is not None:
        config["quantization_config"] = FP8[fp8]
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


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("shape", choices=list(SHAPES))
    parser.add_argument("folder", type=Path)
    parser.add_argument("--fp8", choices=list(FP8), nargs="?", const="tensor", help="state that they are stored in fp8")
    options = parser.parse_args()
    make_model_folder(SHAPES[options.shape], options.folder, fp8=options.fp8)
    return 0


if __name__ == "__main__":
    sys.exit(main())
