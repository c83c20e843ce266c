"""A setting so small that the tests of qualify end in milliseconds, on a machine that counts as a real one."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from megatoken.hardware.inventory import take_inventory
from megatoken.hardware.qualify import session
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


@pytest.fixture
def set_virtual(monkeypatch: pytest.MonkeyPatch) -> Callable[[bool], None]:
    """Makes this machine a virtual or a real one for ``qualify``."""

    def to(virtual: bool) -> None:
        def inventory() -> dict[str, Any]:
            machine = take_inventory()
            return machine | {"cpu": machine["cpu"] | {"virtual": virtual}}

        monkeypatch.setattr(session, "take_inventory", inventory)

    return to


@pytest.fixture(autouse=True)
def on_a_real_machine(set_virtual: Callable[[bool], None]) -> None:
    set_virtual(False)
