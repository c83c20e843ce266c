"""The tools folder on the import path, and one short training that several tests look at."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
TOOLS = ROOT / "tools"
sys.path.insert(0, str(TOOLS))


def run_tool(*arguments: str) -> str:
    environment = os.environ | {"PYTHONPATH": f"{TOOLS}{os.pathsep}{ROOT / 'src'}", "CUDA_VISIBLE_DEVICES": ""}
    ended = subprocess.run([sys.executable, "-m", *arguments], capture_output=True, text=True, env=environment)
    assert ended.returncode == 0, ended.stderr
    return ended.stdout + ended.stderr


@pytest.fixture(scope="session")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An exported folder after some steps of the small size: far from any answer, but past the first words."""
    folder = tmp_path_factory.mktemp("reference") / "model"
    common = ("--output", str(folder), "--size", "small", "--workers", "1", "--eager")
    run_tool("reference_model", *common, "--steps", "100")
    return folder
