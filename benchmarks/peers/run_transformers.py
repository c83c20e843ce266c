"""transformers' ``generate``: static batches in order of arrival, left padding, each run to its longest output."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from peers.protocol import LoadedEngine, Specification, serve

BATCH_SIZE = 16


def load(specification: Specification) -> LoadedEngine:
    import torch
    import transformers

    torch.set_num_threads(specification["threads"])
    dtype = {"bf16": torch.bfloat16, "fp32": torch.float32}[specification["precision"]]
    model: Any = transformers.LlamaForCausalLM.from_pretrained(specification["model"], dtype=dtype)
    model.generation_config.eos_token_id = None

    def generate_batch(prompts: Sequence[list[int]], output_lengths: Sequence[int]) -> list[list[int]]:
        longest = max(map(len, prompts))
        padding = [longest - len(prompt) for prompt in prompts]
        ids = torch.tensor([[0] * pad + prompt for pad, prompt in zip(padding, prompts, strict=True)])
        mask = torch.tensor([[0] * pad + [1] * (longest - pad) for pad in padding])
        generated = model.generate(
            ids, attention_mask=mask, max_new_tokens=max(output_lengths), do_sample=False, pad_token_id=0
        )[:, longest:].tolist()
        return [ids[:length] for ids, length in zip(generated, output_lengths, strict=True)]

    def generate(prompts: Sequence[list[int]], output_lengths: Sequence[int]) -> list[list[int]]:
        token_ids: list[list[int]] = []
        for first in range(0, len(prompts), BATCH_SIZE):
            batch = slice(first, first + BATCH_SIZE)
            token_ids += generate_batch(prompts[batch], output_lengths[batch])
        return token_ids

    settings = {
        "batching": f"static, {BATCH_SIZE} requests in order of arrival",
        "attention": model.config._attn_implementation,
        "dtype": specification["precision"],
        "threads": torch.get_num_threads(),
    }
    return LoadedEngine(generate, transformers.__version__, settings)


if __name__ == "__main__":
    serve(load)
