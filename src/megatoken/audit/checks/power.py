"""Wall power of a run: SPEC PTDaemon's readings over the time that the log gives for the test."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime

from megatoken.audit.checks.power_session import check_session
from megatoken.audit.discovery import Tree, below
from megatoken.audit.evidence import Power, Role, Run, Where, places
from megatoken.audit.finding import Observation, Outcome, Severity, check, outcome, parts
from megatoken.files import UnreadableError, display, open_regular
from megatoken.text import count_of

POWER_FILES = {"client.json", "client.log", "ptd_logs.txt", "server.json", "server.log"}
READINGS = "spl.txt"
LONGEST_LINE = 4096
MOST_LINES = 1_000_000  # a reading a second for eleven days
TESTING_BELOW_RANGING = 0.95


def power_of(tree: Tree, runs: Sequence[Run]) -> tuple[list[Power], list[Observation]]:
    """The mean power of every performance run with an spl.txt, and what the checks of its evidence found."""
    measured: list[Power] = []
    observations: list[Observation] = []
    by_path = {run.path: run for run in runs}
    timed = {path: run for path, run in by_path.items() if run.role is Role.PERFORMANCE}
    for path in sorted(path for path in tree.files if path.rpartition("/")[2] == READINGS):
        folder = path.rpartition("/")[0]
        performance, run = folder.rpartition("/")[0], timed.get(display(folder))
        if run is None:
            continue
        try:
            power = mean_watts(tree, path, run)
        except UnreadableError as error:
            observations += readings(path, run, None, str(error))
            continue
        observations += readings(path, run, power)
        if power is not None and power.readings:
            measured.append(power)
            observations += against_ranging(tree, performance, by_path, power)
        if folder and run.figures.began_at and run.figures.ended_at:  # else other files are above the audited folder
            observations += files(tree, performance)
            observations += check_session(tree, performance, run)
    for folder in sorted(folder for folder in tree.folders if folder.rpartition("/")[2] == "power"):
        path = below(folder.rpartition("/")[0], "run_1")
        run = timed.get(display(path))
        if run is not None and f"{path}/{READINGS}" not in tree.files:
            expected = f"readings in {READINGS} next to the log"
            missing = outcome(False, expected, f"no {READINGS}", (*places(folder), Where(run.path)))
            observations += readings.observations(missing)
    return measured, observations


@check("power.readings", "Power readings cover the run", "Watts are a measurement only with readings from the run.")
def readings(path: str, run: Run, power: Power | None, problem: str = "") -> Outcome:
    where, expected = (*places(path), run.where("power_begin")), "readings between power_begin and power_end"
    if power is None:
        return outcome(False if problem else None, expected, problem or "the log gives no times", where)
    found = f"{count_of(power.readings, 'reading')}, {power.mean_watts:,.2f} W on average"
    return outcome(power.readings > 0, expected, found if power.readings else "no reading in that time", where)


def mean_watts(tree: Tree, path: str, run: Run) -> Power | None:
    """The mean of the positive readings in ``path`` during a run; None if its log gives no times.

    Raises UnreadableError: The readings cannot be read.
    """
    begin, end = run.figures.began_at, run.figures.ended_at
    if begin is None or end is None:
        return None
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
    return Power(display(path), run.path, total / count if count else 0.0, count)


@check("power.ranging", "Ranging and measured power agree", "A run that draws less than its ranging run is another.")
def against_ranging(tree: Tree, performance: str, runs: Mapping[str, Run], power: Power) -> Outcome | None:
    """The measured run may not draw more than 5 % less than the ranging run before it."""
    folder = below(performance, "ranging")
    ranging, path = runs.get(display(folder)), f"{folder}/{READINGS}"
    try:
        before = mean_watts(tree, path, ranging) if ranging is not None and path in tree.files else None
    except UnreadableError:
        return None
    if before is None or not before.readings:
        return None
    expected = f"at least {100 * TESTING_BELOW_RANGING:.0f} % of the ranging run's {before.mean_watts:,.1f} W"
    holds, where = (
        power.mean_watts >= TESTING_BELOW_RANGING * before.mean_watts,
        (Where(power.path), Where(before.path)),
    )
    return outcome(holds, expected, f"{power.mean_watts:,.1f} W", where)


@check("power.files", "The power measurement is complete", "Its logs tie meter, clock and run together.")
def files(tree: Tree, performance: str) -> Outcome:
    place = below(performance, "power")
    missing = sorted(POWER_FILES - set(tree.children(place)))
    expected = f"{', '.join(sorted(POWER_FILES))} of the power measurement"
    return outcome(not missing, expected, parts(missing=missing) or "complete", places(place), Severity.WARN)
