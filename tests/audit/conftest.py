import shutil
from collections.abc import Callable
from pathlib import Path

import genuine
import pytest

from published import published_logs

Make = Callable[..., Path]


@pytest.fixture(scope="session")
def originals(tmp_path_factory: pytest.TempPathFactory) -> Make:
    """Genuine logs of the installed LoadGen, each kind made once a session."""
    made: dict[tuple[str | int, ...], Path] = {}

    def original(
        scenario: str = "Offline",
        mode: str = "PerformanceOnly",
        model: str = "llama2-70b",
        more: str = "",
        rows: int = 64,
    ) -> Path:
        key = (scenario, mode, model, more, rows)
        if key not in made:
            folder = tmp_path_factory.mktemp("genuine") / "logs"
            made[key] = genuine.make(folder, scenario, mode, model, rows, genuine.CONFIGURATION + more)
        return made[key]

    return original


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
