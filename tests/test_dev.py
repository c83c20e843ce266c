"""``./dev`` makes an environment for its own checkout only."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

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


def test_a_test_file_that_cannot_be_read_ends_the_tests_with_several_workers(tmp_path: Path) -> None:
    (tmp_path / "test_good.py").write_text("def test_good(): pass")
    (tmp_path / "test_bad.py").write_text("import absent_package")
    options = ("-n", "2", "-q", "-p", "unread_files", "-p", "no:cacheprovider", "--rootdir", tmp_path)
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *options, tmp_path],
        capture_output=True,
        text=True,
        timeout=120,
        env=os.environ | {"PYTHONPATH": str(ROOT / "tests")},
    )
    assert done.returncode == pytest.ExitCode.INTERRUPTED and "1 passed, 1 error" in done.stdout, done.stdout
