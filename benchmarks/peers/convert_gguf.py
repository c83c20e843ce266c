"""Convert a Llama with a byte-level tokenizer for llama.cpp: ``python -m peers.convert_gguf CHECKPOINT FILE.gguf``.

llama.cpp knows the pre-tokenizers of published models only, so text is cut its own way: send it token ids.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import gguf  # type: ignore[import-not-found]
import numpy as np

NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    **{f"self_attn.{one}_proj": f"attn_{one}" for one in "qkv"},
    "self_attn.o_proj": "attn_output",
    **{f"mlp.{one}_proj": f"ffn_{one}" for one in ("gate", "up", "down")},
}


def convert(checkpoint: Path, file: Path) -> None:
    """Writes weights in bf16 and norms in fp32."""
    config = json.loads((checkpoint / "config.json").read_text())
    tokenizer = json.loads((checkpoint / "tokenizer.json").read_text())
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    writer = gguf.GGUFWriter(file, "llama")
    writer.add_name(checkpoint.name)
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(heads)
    writer.add_head_count_kv(kv_heads)
    writer.add_key_length(config["head_dim"])
    writer.add_value_length(config["head_dim"])
    writer.add_rope_dimension_count(config["head_dim"])
    writer.add_rope_freq_base(config["rope_theta"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_vocab_size(config["vocab_size"])
    _add_tokenizer(writer, tokenizer, config)
    for name, values in _tensors(checkpoint / "model.safetensors"):
        module = name.removesuffix(".weight")
        layer, _, part = module.removeprefix("model.layers.").partition(".") if "layers." in module else ("", "", "")
        if part in ("self_attn.q_proj", "self_attn.k_proj"):
            values = _interleaved(values, heads if part == "self_attn.q_proj" else kv_heads)
        own = f"blk.{layer}.{NAMES[part]}.weight" if part else f"{NAMES[module]}.weight"
        kind = gguf.GGMLQuantizationType.F32 if values.ndim == 1 else gguf.GGMLQuantizationType.BF16
        writer.add_tensor(own, gguf.quants.quantize(values, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _add_tokenizer(writer: Any, tokenizer: dict[str, Any], config: dict[str, Any]) -> None:
    special = {one["id"] for one in tokenizer["added_tokens"]}
    ids = sorted(tokenizer["model"]["vocab"].items(), key=lambda item: int(item[1]))
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list([token for token, _ in ids])
    writer.add_token_types(
        [gguf.TokenType.CONTROL if number in special else gguf.TokenType.NORMAL for _, number in ids]
    )
    merges = tokenizer["model"]["merges"]
    writer.add_token_merges([one if isinstance(one, str) else " ".join(one) for one in merges])
    writer.add_bos_token_id(config["bos_token_id"])
    writer.add_eos_token_id(config["eos_token_id"])
    writer.add_add_bos_token(False)  # ids come with it


def _interleaved(values: np.ndarray[Any, Any], heads: int) -> np.ndarray[Any, Any]:
    """Rows in llama.cpp's order: it rotates neighbours, and a checkpoint has the two halves of a head."""
    rows, columns = values.shape
    return values.reshape(heads, 2, rows // heads // 2, columns).swapaxes(1, 2).reshape(rows, columns)


def _tensors(file: Path) -> list[tuple[str, np.ndarray[Any, Any]]]:
    """Name and fp32 values of each tensor of a safetensors file in bf16."""
    data = file.read_bytes()
    start = 8 + int.from_bytes(data[:8], "little")
    found = []
    for name, entry in json.loads(data[8:start]).items():
        if name == "__metadata__":
            continue
        if entry["dtype"] != "BF16":
            raise SystemExit(f"{file}: {name} is {entry['dtype']}; only bf16 is converted")
        first, last = entry["data_offsets"]
        codes = np.frombuffer(data[start + first : start + last], np.uint16).astype(np.uint32)
        found.append((name, (codes << 16).view(np.float32).reshape(entry["shape"])))
    return found


if __name__ == "__main__":
    convert(Path(sys.argv[1]), Path(sys.argv[2]))
