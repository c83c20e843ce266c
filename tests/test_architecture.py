"""The house's own rules: arrows point down, and no room grows too large to read."""

from __future__ import annotations

import ast
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

import megatoken

ROOT = Path(megatoken.__file__).parent
ORDER = [
    "__main__",
    "cli",
    "report",
    "dossier",
    "planning",
    "claims",
    "submission",
    "audit",
    "harness",
    "serve",
    "targets",
    "rack",
    "accuracy",
    "datasets",
    "config",
    "mlperf",
    "analysis",
    "runs",
    "hardware",
    "quantization",
    "engine",
    "processes",
    "signals",
    "yaml_files",
    "archives",
    "files",
    "framing",
    "addresses",
    "text",
    "errors",
    "__init__",
]
LARGEST_MODULE_LINES = 500


def room_of(module: Path) -> str:
    return module.relative_to(ROOT).parts[0].removesuffix(".py")


@cache
def nodes_of(module: Path) -> list[ast.AST]:
    """All nodes of its syntax tree that import or name a class."""
    kinds = (ast.Import, ast.ImportFrom, ast.ClassDef)
    return [node for node in ast.walk(ast.parse(module.read_text())) if isinstance(node, kinds)]


def imported_rooms(module: Path) -> set[str]:
    rooms = set()
    for node in nodes_of(module):
        names = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module is not None:
            names = [node.module] if node.module != "megatoken" else [f"megatoken.{alias.name}" for alias in node.names]
        rooms |= {name.split(".")[1] for name in names if name.startswith("megatoken.")}
    return {room if (ROOT / room).is_dir() or (ROOT / f"{room}.py").exists() else "__init__" for room in rooms}


def test_arrows_point_down() -> None:
    upward = [
        f"{module.relative_to(ROOT)} imports {room}"
        for module in ROOT.rglob("*.py")
        if room_of(module) != "__init__"
        for room in imported_rooms(module)
        if ORDER.index(room) < ORDER.index(room_of(module))
    ]
    assert not upward


def imported_modules(module: Path) -> set[Path]:
    """Also within functions and for types alone. A package's ``__init__`` is no module of its own here."""
    names = []
    for node in nodes_of(module):
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module is not None:
            names += [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
    paths = {ROOT.parent.joinpath(*name.split(".")).with_suffix(".py") for name in names}
    return {path for path in paths if path.is_relative_to(ROOT) and path.is_file()}


def test_no_modules_import_each_other_in_a_circle() -> None:
    graph = {module: imported_modules(module) for module in ROOT.rglob("*.py")}
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        pytest.fail(" -> ".join(str(module.relative_to(ROOT)) for module in error.args[1]))


def test_the_engine_imports_nothing_but_errors() -> None:
    assert {room for module in (ROOT / "engine").rglob("*.py") for room in imported_rooms(module)} == {
        "engine",
        "errors",
    }


def test_one_class_says_what_a_benchmark_is() -> None:
    named = [
        (str(module.relative_to(ROOT)), node.name)
        for module in ROOT.rglob("*.py")
        for node in nodes_of(module)
        if isinstance(node, ast.ClassDef) and node.name.strip("_").endswith("Benchmark")
    ]
    assert named == [("mlperf/benchmarks.py", "Benchmark")]


def test_one_module_reads_detail_logs() -> None:
    """No other can: none knows the mark with which each line of ``mlperf_log_detail.txt`` begins."""
    assert [module.relative_to(ROOT) for module in ROOT.rglob("*.py") if "MLLOG" in module.read_text()] == [
        Path("mlperf/detail_log.py")
    ]


def test_no_module_is_too_long_to_read() -> None:
    long = {str(module) for module in ROOT.rglob("*.py") if len(module.read_text().splitlines()) > LARGEST_MODULE_LINES}
    assert not long
