"""A real soak that was killed twice: its segments are held against each other, its dates and its time series."""

import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from test_run_folder_fields import FEW, OPTIONS, Edit, edited, in_result, made

from cli_support import TIMEOUT_SECONDS, started
from megatoken.audit import Severity, audit
from megatoken.errors import UsageError
from megatoken.runs.run import read_run


@pytest.fixture(scope="module")
def killed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("runs")
    kill_in_segment(1, out, "--out", out, *FEW, "--duration", "1h", *OPTIONS)
    (path,) = out.glob("2*")
    kill_in_segment(2, out, "--resume", path)
    return path


@pytest.fixture(scope="module")
def ended(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return made(tmp_path_factory, "soak", *FEW, "--duration", "2s")


def kill_in_segment(number: int, out: Path, *flags: object) -> None:
    """Kills a soak once it has told of that segment and of a moment in it."""

    def there(path: Path) -> bool:
        run = read_run(path)
        segments, moments = run.result["soak"]["segments"], run.series["elapsed_seconds"].to_pylist()
        return len(segments) == number and bool(moments) and moments[-1] > segments[-1]["begins_seconds"]

    deadline = time.monotonic() + TIMEOUT_SECONDS
    with started("soak", *flags) as process:
        while not any(map(there, out.glob("2*"))):
            assert process.poll() is None and time.monotonic() < deadline, process.communicate()
            time.sleep(0.1)


@pytest.mark.parametrize("kind", ["killed", "ended"])
def test_segments_that_were_not_edited_fit(kind: str, request: pytest.FixtureRequest) -> None:
    (found,) = [item for item in audit(request.getfixturevalue(kind)).findings if item.id == "run_folder.times"]
    assert (found.severity, found.found) == (
        Severity.PASS,
        "nothing differs",
    )


def in_last(**values: Callable[[Any], Any]) -> Callable[[list[dict[str, Any]]], list[dict[str, Any]]]:
    return lambda parts: [*parts[:-1], parts[-1] | {name: change(parts[-1][name]) for name, change in values.items()}]


def a_year_earlier(text: str) -> str:
    return text.replace(text[:4], str(int(text[:4]) - 1), 1)


def moved(seconds: float) -> Edit:
    """The second segment begins elsewhere, and the interruption before it says so too."""

    def move(begin: float) -> float:
        return begin + seconds

    return in_result(
        soak__segments=in_last(begins_seconds=move),
        soak__interruptions=in_last(at_seconds=move, gap_seconds=lambda gap: gap - seconds),
    )


@pytest.mark.parametrize(
    ("kind", "edits", "found"),
    [
        ("killed", [in_result(soak__interruptions=[])], "interruptions are at []"),
        ("killed", [in_result(soak__segments=lambda parts: parts[:1])], "segments begin at [0.0], interruptions are"),
        ("killed", [in_result(soak__segments=in_last(begins_seconds=lambda at: at + 1))], "segments begin at [0.0, "),
        ("killed", [moved(0.01)], "has no rows of replicas that start there"),
        ("killed", [in_result(soak__segments=in_last(started_at=a_year_earlier))], "s, by started_at 0.000"),
        ("killed", [in_result(soak__interruptions=in_last(gap_seconds=lambda gap: gap / 2))], "gap_seconds "),
        ("killed", [in_result(soak__interruptions=in_last(samples_dropped=lambda count: count + 1))], "were in flight"),
        ("killed", [in_result(started_at=a_year_earlier)], ", started_at "),
        ("ended", [in_result(soak__segments=in_last(started_at=a_year_earlier))], "soak.segments started_at "),
        ("ended", [in_result(soak__segments=in_last(begins_seconds=lambda at: 1.0))], "segments begin at [1.0]"),
        ("ended", [in_result(created_at=a_year_earlier)], "created_at "),
        ("ended", [in_result(started_at="today")], "started_at today is not a date"),
    ],
)
def test_segments_that_were_edited(
    kind: str, edits: list[Edit], found: str, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    assert found in edited(request.getfixturevalue(kind), tmp_path, *edits)["run_folder.times"]


def test_a_soak_cannot_have_ended_before_its_time_was_over(ended: Path, tmp_path: Path) -> None:
    start = read_run(ended).result["soak"]["segments"][0]["started_at"]
    found = edited(ended, tmp_path, in_result(ended_at=start, created_at=start, started_at=start))
    assert f"ended_at {start}, " in found["run_folder.times"]


def test_a_soak_without_its_result_is_told_so(ended: Path, tmp_path: Path) -> None:
    soak = tmp_path / "runs" / ended.name
    shutil.copytree(ended, soak)
    (soak / "result.json").unlink()
    for path in (soak, soak.parent):
        with pytest.raises(UsageError) as caught:
            audit(path)
        assert str(caught.value).startswith(f"{soak}: a run folder without result.json, so ")
