"""One thread, no progress bars and no GPU, for the tests and the processes they start; set before PyTorch is loaded."""

import os

import pytest

os.environ["OMP_NUM_THREADS"] = "1"
os.environ["HF_HUB_DISABLE_PROGRESS_BARS"] = "1"
os.environ["HF_HUB_OFFLINE"] = "1"


def pytest_configure(config: pytest.Config) -> None:
    """``-m gpu`` runs the tests that need a GPU; all others say what a CPU does and must not find one."""
    if config.option.markexpr != "gpu":
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
