"""What the tests of the commands about results start from: real runs of the engine, published logs, hostile folders."""

import json
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from cli_support import call_here

REPOSITORY = Path(__file__).parents[1]
RACK = ("--tokens-per-second", 1_100_948.3, "--per", "rack", "--accelerators", 72, "--accelerator", "GB300")


def two_runs(factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Two runs of one setting in one folder, made by the command itself once a session."""
    return _two_runs(factory.getbasetemp() / "measured" / "runs")


@cache
def _two_runs(out: Path) -> tuple[Path, Path]:
    for _ in range(2):
        code, stdout, err = call_here(
            *(
                "run",
                "--samples",
                5,
                "--precision",
                "fp32",
                "--engine.threads",
                1,
                "--warm-up",
                0.1,
                "--out",
                out,
                "--json",
            )
        )
        assert code == 0, (stdout, err)
    first, second = sorted(out.iterdir())
    return first, second


def document_of(*arguments: object, code: int = 0) -> dict[str, Any]:
    """The one JSON document that a command prints, and nothing else."""
    found, stdout, err = call_here(*arguments, "--json")
    assert (found, err) == (code, ""), stdout
    document = json.loads(stdout)
    assert isinstance(document, dict)
    return document


def refused(*arguments: object) -> str:
    """The one line with which a command refuses its arguments."""
    code, stdout, err = call_here(*arguments)
    assert (code, stdout) == (2, ""), (code, stdout, err)
    assert err.startswith("megatoken: ")
    assert err.count("\n") == 1, err
    return err


def hostile_paths(folder: Path) -> dict[str, Path]:
    """Paths that hold no result, each in a way of its own."""
    (folder / "empty").mkdir()
    (folder / "broken.json").write_text('{"kind": "audit"')
    (folder / "damaged").mkdir()
    (folder / "damaged" / "result.json").write_text("{")
    return {name: folder / name for name in ("absent", "empty", "broken.json", "damaged")}
