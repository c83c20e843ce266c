"""What several of the engine's test modules share."""

from __future__ import annotations

from pathlib import Path

import pytest
from checkpoints import make_checkpoint


@pytest.fixture(scope="session")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small checkpoint that nobody changes."""
    path = tmp_path_factory.mktemp("model")
    make_checkpoint(path)
    return path
