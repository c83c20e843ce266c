"""Programs of the tools folder, run as a user runs them."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
TOOLS = ROOT / "tools"


def run_tool(*arguments: str) -> str:
    environment = os.environ | {"PYTHONPATH": f"{TOOLS}{os.pathsep}{ROOT / 'src'}", "CUDA_VISIBLE_DEVICES": ""}
    ended = subprocess.run([sys.executable, "-m", *arguments], capture_output=True, text=True, env=environment)
    assert ended.returncode == 0, ended.stderr
    return ended.stdout + ended.stderr
