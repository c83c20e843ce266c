"""A setting so small that the tests of qualify end in milliseconds."""

from __future__ import annotations

from pathlib import Path

import pytest

from megatoken.hardware.qualify.values import Setting


@pytest.fixture
def tiny(tmp_path: Path) -> Setting:
    return Setting(
        seconds=0.01,
        warm_up_seconds=0.001,
        windows=3,
        sides=(64,),
        buffer_bytes=2**20,
        pattern_bytes=2**16,
        file_bytes=2**20 * 3,
        repeats=4,
        power_seconds=0.1,
        folder=tmp_path,
    )
