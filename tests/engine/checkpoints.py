"""Small checkpoints, written by transformers, and what transformers makes of them."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Sequence
from pathlib import Path

import torch
import transformers
from transformers import PreTrainedModel

ARCHITECTURES = ("Llama", "Mistral", "Qwen2", "Qwen3")
MIXTURES = {
    "Mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "Qwen3Moe": {
        **{"num_experts": 6, "num_experts_per_tok": 3, "moe_intermediate_size": 32, "norm_topk_prob": True},
        **{"num_hidden_layers": 3, "mlp_only_layers": [1]},
    },
    "GptOss": {
        **{"num_local_experts": 5, "num_experts_per_tok": 3, "num_hidden_layers": 3, "sliding_window": 6},
        **{"intermediate_size": 64, "swiglu_limit": 1.5, "swiglu_alpha": 1.3},
        "rope_parameters": {
            **{"rope_type": "yarn", "rope_theta": 100.0, "factor": 4.0, "original_max_position_embeddings": 64},
            **{"beta_fast": 4.0, "beta_slow": 1.0, "truncate": False},
        },
    },
}
"""Small mixtures of experts: the second with a dense layer, the third with a window in the first and the last layer."""
SMALL = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "vocab_size": 301,
    "max_position_embeddings": 256,
}


def make_checkpoint(
    directory: Path,
    architecture: str = "Llama",
    *,
    seed: int = 0,
    stored: torch.dtype = torch.float32,
    shards: int = 1,
    gain: float = 2.0,
    **changes: object,
) -> PreTrainedModel:
    """Saves a random model and returns it as transformers reads it back, in fp32.

    By default weights are large enough for attention to be peaked and for the answer to wander over the vocabulary; at
    ``gain`` 1 no layer amplifies. Norms and biases are far from 1 and 0, where a mix-up would go unseen.
    """
    torch.manual_seed(seed)
    config = getattr(transformers, f"{architecture}Config")(**{**SMALL, **changes})
    model = getattr(transformers, f"{architecture}ForCausalLM")(config)
    for name, parameter in model.named_parameters():
        if name.endswith("norm.weight"):
            torch.nn.init.normal_(parameter, 1.0, 0.3)
        elif name.endswith("bias"):
            torch.nn.init.normal_(parameter, 0.0, 0.5)
        elif name.endswith("embed_tokens.weight"):
            torch.nn.init.normal_(parameter, 0.0, 1.0)
        else:
            torch.nn.init.normal_(parameter, 0.0, gain / math.sqrt(parameter.shape[-1]))
    model.to(stored)
    sizes = [tensor.numel() * tensor.element_size() for tensor in model.state_dict().values()]
    model.save_pretrained(directory, max_shard_size=shard_bytes(sizes, shards))
    return transformers.AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()


def make_uneven_checkpoint(directory: Path, **changes: object) -> None:
    """A random Qwen3 whose queries and keys are 2^15 times as large as its values, before their norms undo it.

    Where all three share a scale, it leaves the values a step or two of e4m3.
    """
    model = make_checkpoint(directory, "Qwen3", stored=torch.bfloat16, gain=1.0, **changes).bfloat16()
    with torch.no_grad():
        for layer in model.model.layers:
            for part in (layer.self_attn.q_proj, layer.self_attn.k_proj):
                part.weight *= 2.0**15
    model.save_pretrained(directory)


def shard_bytes(sizes: Sequence[int], shards: int) -> int:
    """The smallest size of a shard with which tensors of ``sizes`` fit into ``shards``, filled one after the other."""

    def count(limit: int) -> int:
        filled = [0]
        for size in sizes:
            if filled[-1] + size > limit:
                filled.append(0)
            filled[-1] += size
        return len(filled)

    limits = range(max(sizes), sum(sizes) + 1)
    return limits[bisect_left(limits, True, key=lambda limit: count(limit) <= shards)]


@torch.inference_mode()
def generate(model: PreTrainedModel, prompt: Sequence[int], tokens: int) -> list[int]:
    """Exactly ``tokens`` greedy tokens by transformers' own loop and cache."""
    ids = torch.tensor([prompt])
    model.generation_config.eos_token_id = None
    everything = torch.ones_like(ids)  # or generate() takes pad tokens in the prompt for padding
    answer = model.generate(ids, attention_mask=everything, max_new_tokens=tokens, do_sample=False, pad_token_id=0)
    return answer[0, len(prompt) :].tolist()


def is_greedy(model: PreTrainedModel, prompt: Sequence[int], answer: Sequence[int]) -> bool:
    """Whether ``generate`` would give ``answer``: each of its tokens is the best one after those before it."""
    return bool((teacher_forced(model, prompt, answer).argmax(-1) == torch.tensor(answer)).all())


@torch.inference_mode()
def teacher_forced(model: PreTrainedModel, prompt: Sequence[int], answer: Sequence[int]) -> torch.Tensor:
    """Logits [len(answer), vocabulary] from which each token of ``answer`` is chosen, given those before it."""
    ids = torch.tensor([[*prompt, *answer[:-1]]])
    return model(ids, use_cache=False).logits[0, len(prompt) - 1 :]
