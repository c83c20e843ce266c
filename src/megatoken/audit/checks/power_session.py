"""The session of a power measurement: the files of client and server, compared with each other, the run and the logs.

The client (at the system under test) and the server (at the meter) of mlcommons/power each leave a JSON file with the
session, the times of its phases and the SHA-1 of the files it made (tools/submission/power/power_checker.py of
mlcommons/inference).
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from datetime import datetime
from typing import Any

from megatoken.audit.discovery import Tree, below
from megatoken.audit.documents import json_document
from megatoken.audit.evidence import Document, Run, Where, places
from megatoken.audit.finding import Observation, Outcome, check, free_of, outcome, parts, shown
from megatoken.files import UnreadableError, mapping, open_regular
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
    numbers = [start for start in starts if isinstance(start, int | float) and not isinstance(start, bool)]
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
            digest = hashlib.sha1()
            while chunk := file.read(CHUNK_BYTES):
                digest.update(chunk)
            return digest.hexdigest()
    except (OSError, UnreadableError):
        return None


@check("power.sources", "A known release measured power", "Changed software can write any power.")
def sources(client: Document, server: Document) -> Outcome:
    ends = dict(zip(ENDS, (client, server), strict=True))
    other = {name: end for name, end in ends.items() if _part(end, "sources") not in rules()["power_sources"]}
    found = f"unknown ones on the side of {' and '.join(other)}" if other else "such files"
    where = tuple(end.where("sources") for end in (other or ends).values())
    return outcome(None if other else True, "known source files of mlcommons/power", found, where)
