"""Convert a checkpoint for OpenVINO: ``python -m peers.convert_openvino DIRECTORY CHECKPOINT PRECISION``."""

from __future__ import annotations

import os
import sys


def convert(directory: str, checkpoint: str, precision: str) -> None:
    """Store the weights in the precision they are computed in; the checkpoint's own, bf16, is the default."""
    os.environ["CI"] = "true"  # keeps the exporter from sending usage events
    from optimum.exporters.openvino import main_export  # type: ignore[import-not-found]
    from optimum.intel import OVConfig  # type: ignore[import-not-found]

    main_export(
        checkpoint,
        directory,
        task="text-generation-with-past",
        ov_config=OVConfig(dtype="fp32") if precision == "fp32" else None,
        convert_tokenizer=False,
    )


if __name__ == "__main__":
    convert(*sys.argv[1:])
