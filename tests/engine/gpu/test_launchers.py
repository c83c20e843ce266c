"""Launchers that several threads load at the same time: each thread gets its own."""

from __future__ import annotations

import importlib.util
import shutil
import subprocess
import sysconfig
from concurrent.futures import ThreadPoolExecutor
from types import ModuleType

import pytest

from megatoken.engine.ops.launchers import CopyingLoader, make_loading_safe

SOURCE = """
#include <Python.h>
static PyObject *launch(PyObject *self, PyObject *args) { return PyLong_FromLong(NUMBER); }
static PyMethodDef methods[] = {{"launch", launch, METH_VARARGS, NULL}, {NULL, NULL, 0, NULL}};
static struct PyModuleDef definition = {PyModuleDef_HEAD_INIT, "one_name", NULL, -1, methods};
PyMODINIT_FUNC PyInit_one_name(void) { return PyModule_Create(&definition); }
"""
COUNT = 4


def load(name: str, path: str) -> ModuleType:
    """As Triton does it."""
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def paths(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Extension modules of one name, as Triton's launchers are; ``launch`` of each returns its place here."""
    compiler = shutil.which("gcc") or shutil.which("cc")
    if compiler is None:
        pytest.skip("no C compiler")
    found = []
    for number in range(COUNT):
        folder = tmp_path_factory.mktemp("launcher")
        source, built = folder / "one_name.c", folder / f"one_name{sysconfig.get_config_var('EXT_SUFFIX')}"
        source.write_text(SOURCE.replace("NUMBER", str(number)))
        include = sysconfig.get_paths()["include"]
        subprocess.run([compiler, "-shared", "-fPIC", f"-I{include}", str(source), "-o", str(built)], check=True)
        found.append(str(built))
    return found


def test_a_launcher_that_is_loaded_again_changes_no_other_one(paths: list[str]) -> None:
    safe = CopyingLoader(load)
    first = [safe("one_name", path) for path in paths]
    again = [safe("one_name", path) for path in paths]
    assert [one.launch() for one in (*first, *again)] == [*range(COUNT), *range(COUNT)]
    # What it protects from: Python keeps one module object for the name.
    shared = [load("one_name", path) for path in paths]
    assert [one.launch() for one in shared] == [COUNT - 1] * COUNT


def test_threads_load_their_own(paths: list[str]) -> None:
    safe = CopyingLoader(load)
    with ThreadPoolExecutor(8) as pool:
        wanted = [number % COUNT for number in range(400)]
        loaded = pool.map(lambda number: safe("one_name", paths[number]).launch(), wanted)
        assert list(loaded) == wanted


def test_triton_loads_this_way(monkeypatch: pytest.MonkeyPatch) -> None:
    build = pytest.importorskip("triton.runtime.build", reason="Triton is not installed")
    monkeypatch.setattr(build, "_load_module_from_path", load)
    make_loading_safe()
    make_loading_safe()  # again changes nothing
    assert isinstance(build._load_module_from_path, CopyingLoader)
    assert build._load_module_from_path._load is load
