"""Reading a run folder: its files, verdict and numbers."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from megatoken.errors import ExitCode, UsageError
from megatoken.runs.reasons import Reason
from megatoken.runs.shapes import check_environment, check_result
from megatoken.runs.tables import SampleRow, SeriesRow, read_parquet
from megatoken.runs.version_1 import upgrade_config, upgrade_result

if TYPE_CHECKING:
    import pyarrow as pa

SCHEMA_VERSION = 2
CONFIG = "config.yaml"
ENVIRONMENT = "environment.json"
MLPERF = "mlperf"
NODES = "nodes"  # of a rack whose nodes each had a LoadGen: their run folders
REQUESTS = "requests.parquet"
SERIES = "series.parquet"
RESULT = "result.json"
REPORT = "report.html"
QUALIFICATION = "qualify.json"  # of a run that qualified its machine first


class Verdict(StrEnum):
    """How a run ended; no number is shown without it."""

    MEASURED = "MEASURED"
    VALID = "VALID"
    INVALID = "INVALID"
    DEGRADED = "DEGRADED"
    INTERRUPTED = "INTERRUPTED"

    @property
    def stands(self) -> bool:
        """Whether the run's numbers may be relied on: those of an INVALID or INTERRUPTED run prove nothing."""
        return self not in (Verdict.INVALID, Verdict.INTERRUPTED)

    @property
    def exit_code(self) -> ExitCode:
        """Exit code of the process for this verdict."""
        return {
            Verdict.INVALID: ExitCode.INVALID,
            Verdict.DEGRADED: ExitCode.DEGRADED,
            Verdict.INTERRUPTED: ExitCode.INTERRUPTED,
        }.get(self, ExitCode.OK)


@dataclass(frozen=True, slots=True)
class Run:
    """The contents of a run folder, enough to rebuild every number and page."""

    path: Path
    verdict: Verdict
    reasons: list[Reason]
    rules_unmet: list[Reason]
    doubts: list[Reason]  # about the measurement, of a run that claimed no rules
    result: dict[str, Any]
    config: dict[str, Any]
    environment: dict[str, Any]
    requests: pa.Table
    series: pa.Table


class DamagedRunError(UsageError):
    """``files`` of a run folder are missing or damaged."""

    def __init__(self, message: str, files: tuple[str, ...]) -> None:
        super().__init__(message)
        self.files = files


def read_run(path: Path) -> Run:
    """Read a run folder, finished or not.

    Raises:
        UsageError: there is no such folder.
        DamagedRunError: some of its files are missing or damaged; one line names them all.
    """
    if not path.is_dir():
        what = "a file, not a run folder" if path.is_file() else "no such folder"
        raise UsageError(f"{path}: {what}; give a run folder, such as runs/20261120T091233Z-offline-tiny")
    readers: dict[str, Callable[[Path], Any]] = {
        RESULT: lambda file: _checked_result(json.loads(file.read_bytes())),
        CONFIG: lambda file: upgrade_config(_mapping(_load_yaml(file.read_bytes()))),
        ENVIRONMENT: lambda file: _checked_environment(json.loads(file.read_bytes())),
        REQUESTS: lambda file: read_parquet(file, SampleRow),
        SERIES: lambda file: read_parquet(file, SeriesRow),
    }
    contents, problems = {}, {}
    for name, read in readers.items():
        if (path / name).exists() and not (path / name).is_file():
            problems[name] = f"{name} is not a file"  # reading a pipe could wait forever
            continue
        try:
            contents[name] = read(path / name)
        except FileNotFoundError:
            problems[name] = f"{name} is missing"
        except (OSError, ValueError, TypeError, KeyError, NotImplementedError, RecursionError, yaml.YAMLError) as error:
            problems[name] = f"{name} is damaged ({_one_line(error)[:120]})"
    if problems:
        what = "; ".join(problems.values())
        message = f"{path} is not a complete run folder: {what}; copy it again or repeat the run"
        raise DamagedRunError(message, tuple(problems))
    result = contents[RESULT]
    return Run(
        path=path,
        verdict=Verdict(result["verdict"]),
        reasons=result["reasons"],
        rules_unmet=result["rules_unmet"],
        doubts=result.get("doubts", []),
        result=result,
        config=contents[CONFIG],
        environment=contents[ENVIRONMENT],
        requests=contents[REQUESTS],
        series=contents[SERIES],
    )


def _load_yaml(data: bytes) -> Any:
    """By the compiled loader, which takes a tenth of the time; the other one says better where an error is."""
    try:
        return yaml.load(data, Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader))
    except yaml.YAMLError:
        return yaml.safe_load(data)


def _one_line(error: Exception) -> str:
    mark = getattr(error, "problem_mark", None)  # of YAML, whose messages quote the file
    return " ".join((f"line {mark.line + 1}: {getattr(error, 'problem', None)}" if mark else str(error)).split())


def _mapping(value: Any) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise TypeError("not a mapping")
    return value


def _checked_result(value: Any) -> dict[str, Any]:
    result = _mapping(value)
    version = result.get("schema_version")
    if version not in (1, SCHEMA_VERSION):
        raise ValueError(f"schema_version {version!r}, this megatoken reads 1 and {SCHEMA_VERSION}")
    Verdict(result["verdict"])
    for reason in (*result["reasons"], *result["rules_unmet"], *result.get("doubts", [])):
        _mapping(reason)["code"], reason["message"]
    if version == 1:
        result = upgrade_result(result)
    check_result(result)
    return result


def _checked_environment(value: Any) -> dict[str, Any]:
    environment = _mapping(value)
    check_environment(environment)
    return environment
