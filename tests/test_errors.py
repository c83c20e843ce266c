"""What errors have in common: how an extra is installed, said the same way by whoever misses it."""

import subprocess
import sys
import venv
from pathlib import Path

import pytest

import megatoken.errors
from megatoken.accuracy.scores import check_installed
from megatoken.analysis.query import query
from megatoken.errors import UsageError

ASK = "from megatoken.errors import how_to_install, install_command as c; print(how_to_install('report'), c('report'))"
COMMAND = ".venv/bin/pip install -e '.[report]'"


def package_in(folder: Path) -> Path:
    """The module alone, installed in ``folder``."""
    (folder / "megatoken").mkdir(parents=True)
    (folder / "megatoken" / "__init__.py").touch()
    (folder / "megatoken" / "errors.py").write_text(Path(megatoken.errors.__file__).read_text())
    return folder


def asked(python: Path | str, path: Path, cwd: Path) -> str:
    done = subprocess.run(
        [python, "-c", ASK], cwd=cwd, env={"PYTHONPATH": str(path)}, capture_output=True, text=True, check=True
    )
    return done.stdout.strip()


def test_in_a_clone_it_is_the_clones_own_environment(tmp_path: Path) -> None:
    clone = tmp_path / "my clone"
    source = package_in(clone / "src")
    (clone / "pyproject.toml").touch()
    venv.create(clone / ".venv", with_pip=False, symlinks=True)
    own = clone / ".venv" / "bin" / "python"
    for python, cwd, command in (
        (own, clone, COMMAND),
        (own, tmp_path, f"cd '{clone}' && {COMMAND}"),
        (sys.executable, clone, f"{sys.executable} -m pip install -e '.[report]'"),
    ):
        assert asked(python, source, cwd) == f"install it with: {command} {command}"


def test_elsewhere_it_is_the_package(tmp_path: Path) -> None:
    installed = package_in(tmp_path / "lib" / "site-packages")
    assert asked(sys.executable, installed, tmp_path) == (
        f"in a checkout of megatoken, install it with: {COMMAND} {COMMAND}"
    )


def test_everybody_says_it_alike(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in ("duckdb", "rouge_score"):
        monkeypatch.setitem(sys.modules, name, None)
    monkeypatch.setattr("megatoken.accuracy.scores.find_spec", lambda name: None)
    for extra, ask in (("report", lambda: query([tmp_path], "select 1")), ("accuracy", check_installed)):
        with pytest.raises(UsageError) as caught:
            ask()
        assert str(caught.value).endswith(f"not installed; {megatoken.errors.how_to_install(extra)}")


def test_little_is_imported_before_a_command_handles_signals() -> None:
    """An interruption during these imports shows a traceback."""
    source = Path(megatoken.errors.__file__).parents[1]
    code = f"import sys; sys.path.insert(0, {str(source)!r}); import megatoken.signals; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-I", "-S", "-c", code], capture_output=True, text=True, check=True)
    assert not {"shlex", "re", "pathlib", "contextlib"} & set(done.stdout.split())
