import os
import shutil
from collections.abc import Callable
from pathlib import Path

import genuine
import pytest

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
    """The folder of published artefacts beside the repository; tests that need it are skipped without."""
    folder = Path(os.environ.get("MEGATOKEN_SHARED") or Path(__file__).parents[3] / "shared")
    if not (folder / "data" / "azure_gb300_1m").is_dir():
        pytest.skip("needs the published logs: set MEGATOKEN_SHARED to the folder that holds data/azure_gb300_1m")
    return folder
