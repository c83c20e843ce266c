"""vLLM's server with random weights over the full range of their format, which draw the power of real ones.

    python benchmarks/peers/run_vllm_server.py FOLDER --port 8000 [flags of `vllm serve`]

vLLM's own random weights (`--load-format dummy`) lie between -0.001 and 0.001: as fp8 almost all of them are zero, the
card draws less power and the clock is higher. This file is a plugin of vLLM as well: its entry point is written next to
a copy of it in a temporary folder, since vLLM loads plugins in each of its processes.
"""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
from pathlib import Path

FLAGS = ["--load-format", "dummy", "--no-enable-prefix-caching", "--disable-uvicorn-access-log"]


def register() -> None:
    """Makes vLLM fill fp8 weights with random codes; vLLM calls this in each of its processes."""
    import torch
    from vllm.model_executor.model_loader import dummy_loader, weight_utils

    original = weight_utils.initialize_single_dummy_weight

    def fill(parameter: torch.Tensor, *arguments: object, **keywords: object) -> None:
        if parameter.device.type == "meta" or parameter.dtype != torch.float8_e4m3fn:
            original(parameter, *arguments, **keywords)
            return
        codes = torch.randint(0, 256, parameter.shape, dtype=torch.uint8, device=parameter.device)
        codes[(codes & 0x7F) == 0x7F] = 0x7E  # not a number
        parameter.data.copy_(codes.view(torch.float8_e4m3fn))

    weight_utils.initialize_single_dummy_weight = fill
    dummy_loader.initialize_single_dummy_weight = fill


def main() -> None:
    with_plugin = Path(tempfile.mkdtemp(prefix="vllm-random-weights-"))
    shutil.copy(__file__, with_plugin / "vllm_random_weights.py")
    metadata = with_plugin / "vllm_random_weights-1.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: vllm-random-weights\nVersion: 1.0\n")
    (metadata / "entry_points.txt").write_text(
        "[vllm.general_plugins]\nrandom_weights = vllm_random_weights:register\n"
    )
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(with_plugin), os.environ.get("PYTHONPATH", "")]))
    command = [sys.executable, "-m", "vllm.entrypoints.cli.main", "serve", *sys.argv[1:], *FLAGS]
    os.execv(sys.executable, command)


if __name__ == "__main__":
    main()
