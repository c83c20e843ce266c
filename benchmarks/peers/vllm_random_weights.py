"""A plugin of vLLM: fp8 weights with random codes over the full range of their format.

vLLM's own random weights (``--load-format dummy``) lie between -0.001 and 0.001: as fp8 almost all of them are zero,
the card draws less power and the clock is higher. Its random scales differ between the parts of a merged weight, which
is then stored again with the largest of them, so that the other parts lose range. Here all scales are equal.
"""

from __future__ import annotations

import os
import tempfile
from pathlib import Path
from typing import Any

SCALE = 1e-4  # keeps the activations of random layers finite


def register() -> None:
    """Replaces how vLLM makes random weights; vLLM calls this in each of its processes."""
    import torch
    from vllm.model_executor.model_loader import dummy_loader, weight_utils

    original = weight_utils.initialize_dummy_weights

    def initialize(model: torch.nn.Module, *arguments: Any, **keywords: Any) -> None:
        original(model, *arguments, **keywords)
        for name, tensor in model.state_dict().items():
            if tensor.device.type == "meta":
                continue
            if tensor.dtype == torch.float8_e4m3fn:
                codes = torch.randint(0, 256, tensor.shape, dtype=torch.uint8, device=tensor.device)
                codes[(codes & 0x7F) == 0x7F] = 0x7E  # not a number
                tensor.copy_(codes.view(torch.float8_e4m3fn))
            elif tensor.dtype == torch.float32 and name.endswith(("scale", "scale_inv")):
                tensor.fill_(SCALE)

    weight_utils.initialize_dummy_weights = initialize
    dummy_loader.initialize_dummy_weights = initialize


def environment() -> dict[str, str]:
    """Variables with which processes of vLLM find the plugin, through an entry point in a temporary folder."""
    folder = Path(tempfile.mkdtemp(prefix="vllm-random-weights-"))
    metadata = folder / "vllm_random_weights-1.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: vllm-random-weights\nVersion: 1.0\n")
    entry_point = f"random_weights = {__name__}:{register.__name__}"
    (metadata / "entry_points.txt").write_text(f"[vllm.general_plugins]\n{entry_point}\n")
    return os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, [str(folder), os.environ.get("PYTHONPATH", "")]))}
