"""The tools folder on the import path, and one short training that several tests look at."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from tool_runs import TOOLS, run_tool

sys.path.insert(0, str(TOOLS))


@pytest.fixture(scope="session")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An exported folder after some steps of the small size: far from any answer, but past the first words."""
    folder = tmp_path_factory.mktemp("reference") / "model"
    common = ("--output", str(folder), "--size", "small", "--workers", "1", "--eager")
    run_tool("reference_model", *common, "--steps", "60")
    return folder
