import shutil
from pathlib import Path

import pytest

from genuine import Make, originals
from published import published_logs

__all__ = ["originals"]


@pytest.fixture
def twin(originals: Make, tmp_path: Path) -> Make:
    """A copy of genuine logs that a test may spoil."""

    def copy(*kind: str, name: str = "node") -> Path:
        return Path(shutil.copytree(originals(*kind), tmp_path / name))

    return copy


@pytest.fixture(scope="session")
def shared() -> Path:
    """A folder with the published artefacts below ``data``."""
    return published_logs().parents[1]
