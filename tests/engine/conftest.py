"""What several of the engine's test modules share."""

from __future__ import annotations

from pathlib import Path

import pytest
from checkpoints import make_checkpoint
from tokenizer_kinds import KINDS

from megatoken.engine.tokenizer import Tokenizer


@pytest.fixture(scope="session")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small checkpoint that nobody changes."""
    path = tmp_path_factory.mktemp("model")
    make_checkpoint(path)
    return path


@pytest.fixture(scope="session")
def tokenizers(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Tokenizer]:
    directory = tmp_path_factory.mktemp("tokenizers")
    loaded = {}
    for kind, make in KINDS.items():
        make().save(str(directory / f"{kind}.json"))
        loaded[kind] = Tokenizer(directory / f"{kind}.json")
    return loaded
