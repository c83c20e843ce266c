"""The checksums that ``qualify`` compares answers with: ``python -m reference_model.answers FILE fp32 bf16 ...``.

Those of other precisions stay as the file has them. Made on a healthy machine, a GPU for fp8.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any, cast

import torch

from megatoken.engine.config import Precision
from megatoken.hardware.qualify.engine_answers import CPU_SIZES, GPU_SIZES, checksum, first_requests, two_passes


def main(file: Path, precisions: list[str]) -> None:
    """Write the file."""
    document: dict[str, Any] = {"weights_sha256": "", "made_on": {}, "checksums": {}}
    if file.exists():
        document |= json.loads(file.read_text(encoding="utf-8"))
    _, *steps = GPU_SIZES if torch.cuda.is_available() else CPU_SIZES
    made_on = torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU"
    for precision in precisions:
        requests = first_requests(GPU_SIZES[0])
        document["weights_sha256"], (first, second) = two_passes(cast(Precision, precision), requests, *steps)
        if first != second:
            raise SystemExit(f"{precision}: the same prompts had other answers the second time")
        document["made_on"][precision] = f"{made_on}, PyTorch {torch.__version__}"
        document["checksums"][precision] = "".join(f"{checksum(answer):08x}" for answer in first)
    file.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
