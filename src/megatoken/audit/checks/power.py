"""Wall power of a run: SPEC PTDaemon's readings over the time of the test, and the session that they are of.

The client (at the system under test) and the server (at the meter) of mlcommons/power each leave a JSON file with the
session, the times of its phases and the SHA-1 of the files it made (tools/submission/power/power_checker.py of
mlcommons/inference).
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime
from typing import Any

from megatoken.audit.discovery import Tree, below
from megatoken.audit.documents import json_document
from megatoken.audit.evidence import Document, Power, Role, Run, Where, places
from megatoken.audit.finding import Observation, Outcome, Severity, check, free_of, outcome, parts, shown
from megatoken.files import UnreadableError, display, mapping, open_regular
from megatoken.mlperf.power_log import READINGS, mean_watts
from megatoken.mlperf.rounds import rules
from megatoken.text import count_of, is_number

POWER_FILES = {"client.json", "client.log", "ptd_logs.txt", "server.json", "server.log"}
TESTING_BELOW_RANGING = 0.95
CLOCKS_APART_SECONDS = 0.8
SUMMER_TIME_SECONDS = 3600.0  # MLPerf's checker accepts a power_begin that is an hour late
ENDS = ("client", "server")
KEYS = ("version", "timezone", "modules", "sources", "messages", "uuid", "session_name", "results", "phases")
MODES = ("ranging", "testing")
LOGS = ("mlperf_log_detail.txt", "mlperf_log_summary.txt", READINGS)
HASHED = (
    *("power/client.log", "power/ptd_logs.txt", "power/server.log"),
    *(f"{folder}/{name}" for folder in ("ranging", "run_1") for name in LOGS),
)


def power_of(tree: Tree, runs: Sequence[Run]) -> tuple[list[Power], list[Observation]]:
    """The mean power of every performance run with an spl.txt, and what the checks of its evidence found."""
    measured: list[Power] = []
    observations: list[Observation] = []
    by_path = {run.path: run for run in runs}
    timed = {path: run for path, run in by_path.items() if run.role is Role.PERFORMANCE}
    for folder in tree.holding(READINGS):
        path, performance, run = below(folder, READINGS), folder.rpartition("/")[0], timed.get(display(folder))
        if run is None:
            continue
        try:
            power = _power(tree, path, run)
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


def _power(tree: Tree, path: str, run: Run) -> Power | None:
    """The mean power of a run; None if its log gives no times. Raises UnreadableError."""
    begin, end = run.figures.began_at, run.figures.ended_at
    if begin is None or end is None:
        return None
    return Power(display(path), run.path, *mean_watts(tree.path(path), begin, end))


@check("power.ranging", "Ranging and measured power agree", "A run that draws less than its ranging run is another.")
def against_ranging(tree: Tree, performance: str, runs: Mapping[str, Run], power: Power) -> Outcome | None:
    """The measured run may not draw more than 5 % less than the ranging run before it."""
    folder = below(performance, "ranging")
    ranging, path = runs.get(display(folder)), f"{folder}/{READINGS}"
    try:
        before = _power(tree, path, ranging) if ranging is not None and path in tree.files else None
    except UnreadableError:
        return None
    if before is None or not before.readings:
        return None
    expected = f"at least {100 * TESTING_BELOW_RANGING:.0f} % of the ranging run's {before.mean_watts:,.1f} W"
    holds = power.mean_watts >= TESTING_BELOW_RANGING * before.mean_watts
    where = (Where(power.path), Where(before.path))
    return outcome(holds, expected, f"{power.mean_watts:,.1f} W", where)


@check("power.files", "The power measurement is complete", "Its logs tie meter, clock and run together.")
def files(tree: Tree, performance: str) -> Outcome:
    place = below(performance, "power")
    missing = sorted(POWER_FILES - set(tree.children(place)))
    expected = f"{', '.join(sorted(POWER_FILES))} of the power measurement"
    return outcome(not missing, expected, parts(missing=missing) or "complete", places(place), Severity.WARN)


def check_session(tree: Tree, performance: str, run: Run) -> Iterator[Observation]:
    """The session of the files in ``power`` below ``performance``; power.files reports missing ones."""
    ends = []
    for path in (below(performance, f"power/{name}.json") for name in ENDS):
        if path not in tree.files:
            return
        try:
            ends.append(json_document(tree, path))
        except UnreadableError as error:
            expected = "the JSON file of the client or the server"
            yield from session.observations(outcome(False, expected, str(error), places(path)))
            return
    client, server = ends
    yield from session(client, server)
    yield from phases(client, server, run)
    yield from hashes(tree, performance, client, server)
    yield from sources(client, server)


def _part(end: Document, key: str) -> Mapping[str, Any]:
    return mapping(end.values.get(key))


def _phase_seconds(end: Document, mode: str) -> list[float] | None:
    """When each phase of a mode began, in seconds since 1970; None if the file does not say."""
    phases = _part(end, "phases").get(mode)
    if not isinstance(phases, list):
        return None
    starts = [phase[0] if isinstance(phase, list) and phase else None for phase in phases]
    numbers = [start for start in starts if is_number(start)]
    return numbers if len(numbers) == len(starts) else None


@check("power.session", "Client and server report one power session", "Files of two sessions are no measurement.")
def session(client: Document, server: Document) -> Outcome:
    found: list[tuple[str, tuple[Where, ...]]] = []
    for name, end in zip(ENDS, (client, server), strict=True):
        if missing := [key for key in KEYS if key not in end.values]:
            found.append((f"{name}: no {', '.join(missing)}", (end.where(),)))
    for key in ("session_name", "uuid"):
        mine, other = client.values.get(key), server.values.get(key)
        if mine != other:
            found.append((f"{key} {shown(mine)} and {shown(other)}", (client.where(key), server.where(key))))
    if server.values.get("debug", False) is not False:
        found.append(("the server ran in debug mode", (server.where("debug"),)))
    where = tuple(place for _, places in found for place in places)
    return free_of(
        (text for text, _ in found),
        "one session, the same on both sides, without debugging",
        shown(client.values.get("session_name")),
        where or (client.where("session_name"), server.where("session_name")),
    )


@check("power.phases", "The run lies in the metered phase", "Power of another time is the power of another load.")
def phases(client: Document, server: Document, run: Run) -> Outcome:
    expected = f"phases at most {CLOCKS_APART_SECONDS:g} s apart on both sides, and the run inside the metered one"
    where = (client.where("phases"), server.where("phases"), run.where("power_begin"))
    return free_of(_phase_problems(client, server, run), expected, "such phases", where)


def _phase_problems(client: Document, server: Document, run: Run) -> Iterator[str]:
    for mode in MODES:
        mine, others = _phase_seconds(client, mode), _phase_seconds(server, mode)
        if mine is None or others is None or len(mine) != len(others):
            yield f"{mode}: not the same phases on both sides"
            continue
        apart = max((abs(one - other) for one, other in zip(mine, others, strict=True)), default=0.0)
        if apart > CLOCKS_APART_SECONDS:
            yield f"{mode}: the clocks are {apart:.3f} s apart"
    testing = _phase_seconds(client, "testing") or []
    begin, end = run.figures.began_at, run.figures.ended_at
    if len(testing) < 3:
        yield "no times of the load"
    elif begin is not None and end is not None:
        outside = [name for name, moment in (("began", begin), ("ended", end)) if not _inside(moment, testing)]
        if outside:
            yield f"the run {' and '.join(outside)} outside of the phase in which the meter was read"


def _inside(moment: datetime, phases: list[float]) -> bool:
    seconds = moment.timestamp()
    return any(phases[1] < seconds - late < phases[2] for late in (0.0, SUMMER_TIME_SECONDS))


@check("power.hashes", "The logs are those of the power session", "Edited logs have another SHA-1 than recorded.")
def hashes(tree: Tree, performance: str, client: Document, server: Document) -> Outcome:
    recorded = [_part(end, "results") for end in (client, server)]
    missing, unrecorded, changed = [], [], []
    for name in HASHED:
        known = {shown(results[name]) for results in recorded if name in results}
        found = _sha1(tree, below(performance, name))
        if found is None:
            missing.append(name)
        elif not known:
            unrecorded.append(name)
        elif known != {found}:
            changed.append(name)
    problems = parts(missing_or_unreadable=missing, recorded_by_neither_side=unrecorded, other_than_recorded=changed)
    where = places(*(below(performance, name) for name in (*missing, *unrecorded, *changed)))
    return outcome(
        not problems,
        "every log with the SHA-1 that client and server recorded",
        problems or f"{len(HASHED)} logs agree",
        where or (client.where("results"), server.where("results")),
    )


def _sha1(tree: Tree, path: str) -> str | None:
    if path not in tree.files:
        return None
    try:
        with open_regular(tree.path(path)) as file:
            return hashlib.file_digest(file, "sha1").hexdigest()
    except (OSError, UnreadableError):
        return None


@check("power.sources", "A known release measured power", "Changed software can write any power.")
def sources(client: Document, server: Document) -> Outcome:
    ends = dict(zip(ENDS, (client, server), strict=True))
    other = {name: end for name, end in ends.items() if _part(end, "sources") not in rules()["power_sources"]}
    found = f"unknown ones on the side of {' and '.join(other)}" if other else "such files"
    where = tuple(end.where("sources") for end in (other or ends).values())
    return outcome(None if other else True, "known source files of mlcommons/power", found, where)
