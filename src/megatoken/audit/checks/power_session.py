"""The session of a power measurement: the files of client and server, compared with each other, the run and the logs.

The client (at the system under test) and the server (at the meter) of mlcommons/power each leave a JSON file with the
session, the times of its phases and the SHA-1 of the files it made (tools/submission/power/power_checker.py of
mlcommons/inference).
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from megatoken.audit.discovery import Tree, below
from megatoken.audit.evidence import Run, Where
from megatoken.audit.finding import Observation, Outcome, check, listed, outcome, parts, shown
from megatoken.files import UnreadableError, display, mapping, open_regular, read_json_object
from megatoken.mlperf.rounds import rules

CHUNK_BYTES = 2**20
CLOCKS_APART_SECONDS = 0.8
SUMMER_TIME_SECONDS = 3600.0  # MLPerf's checker accepts a power_begin that is an hour late
ENDS = ("client", "server")
KEYS = ("version", "timezone", "modules", "sources", "messages", "uuid", "session_name", "results", "phases")
MODES = ("ranging", "testing")
LOGS = ("mlperf_log_detail.txt", "mlperf_log_summary.txt", "spl.txt")
HASHED = (
    *("power/client.log", "power/ptd_logs.txt", "power/server.log"),
    *(f"{folder}/{name}" for folder in ("ranging", "run_1") for name in LOGS),
)


@dataclass(frozen=True, slots=True)
class _End:
    """The JSON file of one end."""

    name: str
    path: str
    values: Mapping[str, Any]
    lines: Mapping[str, int]

    def where(self, key: str) -> Where:
        return Where(self.path, self.lines.get(key))

    def part(self, key: str) -> Mapping[str, Any]:
        return mapping(self.values.get(key))

    def phase_seconds(self, mode: str) -> list[float] | None:
        """When each phase of a mode began, in seconds since 1970; None if the file does not say."""
        phases = self.part("phases").get(mode)
        if not isinstance(phases, list):
            return None
        starts = [phase[0] if isinstance(phase, list) and phase else None for phase in phases]
        numbers = [start for start in starts if isinstance(start, int | float) and not isinstance(start, bool)]
        return numbers if len(numbers) == len(starts) else None


def check_session(tree: Tree, performance: str, run: Run) -> Iterator[Observation]:
    """The session of the files in ``power`` below ``performance``; power.files reports missing ones."""
    ends = []
    for name in ENDS:
        path = below(performance, f"power/{name}.json")
        if path not in tree.files:
            return
        try:
            values, lines, _ = read_json_object(tree.path(path))
        except UnreadableError as error:
            unreadable = outcome(False, "the JSON file of the client or the server", str(error), (_at(path),))
            yield from session.observations(unreadable)
            return
        ends.append(_End(name, display(path), values, lines))
    client, server = ends
    yield from session(client, server)
    yield from phases(client, server, run)
    yield from hashes(tree, performance, client, server)
    yield from sources(client, server)


@check("power.session", "Client and server report one power session", "Files of two sessions are no measurement.")
def session(client: _End, server: _End) -> Outcome:
    problems: list[str] = []
    places: list[Where] = []
    for end in (client, server):
        missing = [key for key in KEYS if key not in end.values]
        if missing:
            problems.append(f"{end.name}: no {', '.join(missing)}")
            places.append(Where(end.path))
    for key in ("session_name", "uuid"):
        if client.values.get(key) != server.values.get(key):
            problems.append(f"{key} {shown(client.values.get(key))} and {shown(server.values.get(key))}")
            places += [client.where(key), server.where(key)]
    if server.values.get("debug", False) is not False:
        problems.append("the server ran in debug mode")
        places.append(server.where("debug"))
    return outcome(
        not problems,
        "one session, the same on both sides, without debugging",
        listed(problems, shown(client.values.get("session_name"))),
        tuple(places) or (client.where("session_name"), server.where("session_name")),
    )


@check("power.phases", "The run lies in the metered phase", "Power of another time is the power of another load.")
def phases(client: _End, server: _End, run: Run) -> Outcome:
    problems: list[str] = []
    for mode in MODES:
        mine, others = client.phase_seconds(mode), server.phase_seconds(mode)
        if mine is None or others is None or len(mine) != len(others):
            problems.append(f"{mode}: not the same phases on both sides")
            continue
        apart = max((abs(one - other) for one, other in zip(mine, others, strict=True)), default=0.0)
        if apart > CLOCKS_APART_SECONDS:
            problems.append(f"{mode}: the clocks are {apart:.3f} s apart")
    testing = client.phase_seconds("testing") or []
    begin, end = run.figures.began_at, run.figures.ended_at
    if len(testing) < 3:
        problems.append("no times of the load")
    elif begin is not None and end is not None:
        outside = [name for name, moment in (("began", begin), ("ended", end)) if not _inside(moment, testing)]
        if outside:
            problems.append(f"the run {' and '.join(outside)} outside of the phase in which the meter was read")
    return outcome(
        not problems,
        f"phases at most {CLOCKS_APART_SECONDS:g} s apart on both sides, and the run inside the metered one",
        "; ".join(problems) or "such phases",
        (client.where("phases"), server.where("phases"), run.where("power_begin")),
    )


def _inside(moment: datetime, phases: list[float]) -> bool:
    seconds = moment.timestamp()
    return any(phases[1] < seconds - late < phases[2] for late in (0.0, SUMMER_TIME_SECONDS))


@check(
    "power.hashes", "The logs are those of the power session", "Edited logs have another SHA-1 than the recorded one."
)
def hashes(tree: Tree, performance: str, client: _End, server: _End) -> Outcome:
    recorded = [end.part("results") for end in (client, server)]
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
    return outcome(
        not problems,
        "every log with the SHA-1 that client and server recorded",
        problems or f"{len(HASHED)} logs agree",
        tuple(_at(below(performance, name)) for name in (*missing, *unrecorded, *changed))
        or (client.where("results"), server.where("results")),
    )


def _sha1(tree: Tree, path: str) -> str | None:
    if path not in tree.files:
        return None
    try:
        with open_regular(tree.path(path)) as file:
            digest = hashlib.sha1()
            while chunk := file.read(CHUNK_BYTES):
                digest.update(chunk)
            return digest.hexdigest()
    except (OSError, UnreadableError):
        return None


@check("power.sources", "A known release measured power", "Changed software can write any power.")
def sources(client: _End, server: _End) -> Outcome:
    other = [end for end in (client, server) if end.part("sources") not in rules()["power_sources"]]
    return outcome(
        None if other else True,
        "known source files of mlcommons/power",
        f"unknown ones on the side of {' and '.join(end.name for end in other)}" if other else "such files",
        tuple(end.where("sources") for end in other or (client, server)),
    )


def _at(path: str) -> Where:
    return Where(display(path))
