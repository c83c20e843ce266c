"""Wall power beside a run: SPEC PTDaemon's readings over the time that the log gives for the test."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime

from megatoken.audit.checks.power_session import check_session
from megatoken.audit.discovery import Tree, below
from megatoken.audit.evidence import Power, Role, Run, Where
from megatoken.audit.finding import Observation, Severity
from megatoken.audit.view import observe
from megatoken.files import UnreadableError, display, open_regular
from megatoken.text import count_of

POWER_FILES = {"client.json", "client.log", "ptd_logs.txt", "server.json", "server.log"}
LONGEST_LINE = 4096
MOST_LINES = 1_000_000  # a reading a second for eleven days
TESTING_BELOW_RANGING = 0.95


def power_of(tree: Tree, runs: Sequence[Run]) -> tuple[list[Power], list[Observation]]:
    """The mean power of every performance run with an spl.txt, and what is wrong with its evidence."""
    readings: list[Power] = []
    observations: list[Observation] = []
    by_path = {run.path: run for run in runs}
    for path in sorted(path for path in tree.files if path.rpartition("/")[2] == "spl.txt"):
        folder = path.rpartition("/")[0]
        run = by_path.get(display(folder))
        if run is None or run.role is not Role.PERFORMANCE:
            continue
        where = (Where(display(path)), run.where("power_begin"))
        expected = "readings between power_begin and power_end"
        begin, end = run.figures.began_at, run.figures.ended_at
        if begin is None or end is None:
            observations.append(observe("power.readings", None, expected, "the log gives no times", where))
            continue
        try:
            watts, count = mean_watts(tree, path, begin, end)
        except UnreadableError as error:
            observations.append(observe("power.readings", False, expected, str(error), where))
            continue
        found = f"{count_of(count, 'reading')}, {watts:,.2f} W on average" if count else "no reading in that time"
        observations.append(observe("power.readings", count > 0, expected, found, where))
        if count:
            readings.append(Power(display(path), run.path, watts, count))
            observations += _against_ranging(tree, folder, by_path, watts)
        if folder:  # otherwise what belongs to it lies above what is audited
            observations += _files(tree, folder)
            observations += check_session(tree, folder.rpartition("/")[0], run)
    observations += _without_readings(tree, by_path)
    return readings, observations


def _without_readings(tree: Tree, runs: dict[str, Run]) -> Iterator[Observation]:
    """Runs with a folder of power logs beside them, but without the readings."""
    for folder in sorted(folder for folder in tree.folders if folder.rpartition("/")[2] == "power"):
        run = runs.get(display(below(folder.rpartition("/")[0], "run_1")))
        path = below(folder.rpartition("/")[0], "run_1/spl.txt")
        if run is not None and run.role is Role.PERFORMANCE and path not in tree.files:
            where = (Where(display(folder)), Where(run.path))
            yield observe("power.readings", False, "readings in spl.txt beside the log", "no spl.txt", where)


def mean_watts(tree: Tree, path: str, begin: datetime, end: datetime) -> tuple[float, int]:
    """Mean of the positive readings after ``begin`` and before ``end``, and how many there are."""
    total, count = 0.0, 0
    try:
        with open_regular(tree.path(path)) as file:
            for _ in range(MOST_LINES):
                line = file.readline(LONGEST_LINE)
                if not line:
                    break
                fields = line.decode("utf-8", "replace").split(",")
                if len(fields) < 4 or fields[0] != "Time" or fields[2] != "Watts":
                    continue
                try:
                    time = datetime.strptime(fields[1].strip(), "%m-%d-%Y %H:%M:%S.%f").replace(tzinfo=UTC)
                    watts = float(fields[3])
                except ValueError:
                    continue
                if begin < time < end and 0 < watts < math.inf:
                    total += watts
                    count += 1
    except OSError as error:
        raise UnreadableError(f"cannot be read: {error.strerror}") from None
    return (total / count if count else 0.0), count


def _against_ranging(tree: Tree, folder: str, runs: dict[str, Run], watts: float) -> Iterator[Observation]:
    """The measured run may not draw more than 5 % less than the ranging run before it."""
    ranging_folder = below(folder.rpartition("/")[0], "ranging")
    ranging, path = runs.get(display(ranging_folder)), f"{ranging_folder}/spl.txt"
    if ranging is None or path not in tree.files or not ranging.figures.began_at or not ranging.figures.ended_at:
        return
    try:
        before, count = mean_watts(tree, path, ranging.figures.began_at, ranging.figures.ended_at)
    except UnreadableError:
        return
    if count:
        yield observe(
            "power.ranging",
            watts >= TESTING_BELOW_RANGING * before,
            f"at least {100 * TESTING_BELOW_RANGING:.0f} % of the ranging run's {before:,.1f} W",
            f"{watts:,.1f} W",
            (Where(display(f"{folder}/spl.txt")), Where(display(path))),
        )


def _files(tree: Tree, folder: str) -> Iterator[Observation]:
    place = below(folder.rpartition("/")[0], "power")
    missing = sorted(POWER_FILES - set(tree.children(place)))
    yield observe(
        "power.files",
        not missing,
        f"{', '.join(sorted(POWER_FILES))} of the power measurement",
        f"missing: {', '.join(missing)}" if missing else "they are there",
        (Where(display(place)),),
        Severity.WARN,
    )
