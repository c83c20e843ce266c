"""``./dev`` makes an environment for its own checkout only."""

import shutil
import subprocess
from pathlib import Path

ROOT = Path(__file__).parents[1]


def test_the_environment_of_another_checkout_is_left_alone(tmp_path: Path) -> None:
    other, here = tmp_path / "other" / ".venv", tmp_path / "here"
    other.mkdir(parents=True)
    here.mkdir()
    for name in ("dev", "pyproject.toml", "constraints-cpu.txt"):
        shutil.copy(ROOT / name, here / name)
    (here / ".venv").symlink_to(other)
    for command in ("setup", "run"):
        done = subprocess.run(["sh", here / "dev", command], capture_output=True, text=True, timeout=60)
        assert done.returncode == 2
        [line] = done.stderr.splitlines()
        assert line == f"dev: .venv is a link to {other}, which is left alone; remove the link to set up .venv here"
    assert not list(other.iterdir())
