"""Write a random-weight Llama checkpoint: ``python -m peers.make_checkpoint DIRECTORY CONFIG_JSON``."""

from __future__ import annotations

import json
import sys

import torch
from transformers import LlamaConfig, LlamaForCausalLM

if __name__ == "__main__":
    directory, config = sys.argv[1:]
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**json.loads(config)))
    # Every engine reads bf16, and fp32 holds its values exactly.
    model.bfloat16().save_pretrained(directory)
