"""``megatoken soak``: keep a target full for hours, in one run folder that can be resumed, and judge its stability.

LoadGen has no test of an exact duration and cannot be stopped or resumed, so a soak issues its own samples to the same
measurement loop: a new one for each that ends. Times and totals in the folder count the time under load. A soak that
was interrupted resumes where it stopped; the length of the interruption is recorded separately.
"""

from __future__ import annotations

import fcntl
import os
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megatoken.analysis.machine import unix_seconds, utc_text
from megatoken.analysis.series import numbers, replicas
from megatoken.analysis.statistics import SOAK
from megatoken.analysis.summary import summarise_run
from megatoken.config import KEYS, RunConfig
from megatoken.engine.state import TOTALS
from megatoken.errors import UsageError
from megatoken.hardware.inventory import take_inventory
from megatoken.hardware.telemetry import ERRORS
from megatoken.harness.loadgen import TestSettings
from megatoken.harness.loadgen_wire import Issued
from megatoken.harness.measurement import Measurement
from megatoken.harness.prepare import Prepared
from megatoken.harness.progress import Progress
from megatoken.harness.recording import interrupted_by_errors, record
from megatoken.harness.result import concluded_soak, end_notes
from megatoken.harness.session import TestSession
from megatoken.harness.stop import Stop, StopSignals
from megatoken.harness.sweep.loads import passes
from megatoken.runs.reasons import reason
from megatoken.runs.run import Run, Verdict, read_run
from megatoken.runs.tables import MOMENTS, SampleRow, SeriesRow
from megatoken.runs.writer import RunFolder
from megatoken.targets import Target
from megatoken.text import count_of

QUEUED_SHARE = 0.5  # samples that wait for each one that a replica can run
FEWEST_QUEUED = 16
# Paths, whose contents are compared instead, and settings that do not affect the records.
MAY_CHANGE = {"prompts", "lengths", "out", "warm_up_seconds", "min_duration_seconds"} | {
    f"rack.{name}" for name in ("cluster", "dead_after_seconds", "reconnect_seconds", "wait_seconds", "replace")
}
ROW_SECONDS = 0.001  # from the last row of a segment to the row that closes it


class SteadyLoad:
    """Keeps a number of samples outstanding for a time; each pass over the data set has its own order."""

    def __init__(self, rows: int, population: int, seconds: float, seed: Sequence[int]) -> None:
        """Issues nothing before the first ``take_issued``.

        Keeps ``population`` samples of ``rows`` outstanding for so many seconds, counted from the first.
        """
        self._order = passes(rows, seed)
        self._population = population
        self._seconds = seconds
        self._end_ns: int | None = None
        self._outstanding: set[int] = set()
        self.issued = 0
        self.all_issued = False

    @property
    def outstanding(self) -> int:
        """Samples without an end."""
        return len(self._outstanding)

    def take_issued(self, timeout_seconds: float) -> list[Issued]:
        """One sample for each that has ended since the last call; none once the time is over."""
        now_ns = time.monotonic_ns()
        if self._end_ns is None:
            self._end_ns = now_ns + round(self._seconds * 1e9)
        self.all_issued = now_ns >= self._end_ns
        wanted = self._population - len(self._outstanding)
        if self.all_issued or not wanted:
            return []
        self._outstanding.update(range(self.issued, self.issued + wanted))
        self.issued += wanted
        return [Issued(now_ns, [next(self._order) for _ in range(wanted)])]

    def patience_seconds(self, longest: float) -> float:
        """The longest: samples are due when others end."""
        return longest

    def first_token(self, sample: int, token_id: int) -> None:
        """Does nothing: the load does not depend on first tokens."""

    def complete(self, sample: int, output_tokens: int, token_ids: Sequence[int] = ()) -> None:
        """Makes room for another sample."""
        self._outstanding.remove(sample)

    def flush(self) -> None:
        """Does nothing: every call has taken effect."""

    def withdraw(self, samples: Sequence[int]) -> None:
        """Drops samples that will not end."""
        self._outstanding.difference_update(samples)


@dataclass(frozen=True, slots=True)
class Earlier:
    """A soak that was interrupted; its folder is locked until the process ends."""

    run: Run  # its run folder
    begins_seconds: float  # time under load so far
    reached: Sequence[SeriesRow]  # the last row of every replica

    @classmethod
    def read(cls, path: Path) -> Earlier:
        """Locks the folder and reads it.

        Raises:
            UsageError: it is not a soak, has finished, or another process writes to it.
        """
        hold(path)
        run = read_run(path)
        if "soak" not in run.result:
            raise UsageError(f"{path}: not a soak; give the folder of an interrupted megatoken soak")
        if run.verdict is not Verdict.INTERRUPTED:
            raise UsageError(f"{path}: already finished ({run.verdict}); start another soak with --duration")
        series = run.series
        last = [series.slice(rows[-1], 1).to_pylist()[0] for _, _, rows in replicas(series)]
        reached = [numbers(series["elapsed_seconds"]), numbers(run.requests["last_token_seconds"])]
        latest = max((float(np.nanmax(moments)) for moments in reached if len(moments)), default=0.0)
        return cls(run, latest + ROW_SECONDS, tuple(SeriesRow(**row) for row in last))

    @property
    def last_rows(self) -> list[SeriesRow]:
        """The state of every replica after the interruption: its totals, and no sample in flight."""
        at = self.begins_seconds
        return [
            row._replace(elapsed_seconds=at, batched_tokens=0, pages_free=row.pages, in_flight=0, waiting=0, running=0)
            for row in self.reached
        ]

    def check_settings(self, config: RunConfig) -> None:
        """Refuses to resume with other settings than those recorded in ``result.json``.

        Raises:
            UsageError: names the first setting that differs, with both values.
        """
        soak = self.run.result["soak"]
        recorded, now = soak.get("settings", {}), _settings(config)
        self._compare({key: (value, now[key]) for key, value in recorded.items() if key in now})
        self._compare({"min_duration_seconds": (soak["duration_seconds"], config.min_duration_seconds)})

    def check(self, facts: Mapping[str, Any]) -> None:
        """Refuses to resume with another model, data set or machine; needs no weights. Raises UsageError."""
        there = self.run.result
        pairs = {name: (there.get(name), facts.get(name)) for name in ("weights", "precision", "data_set_sha256")}
        pairs["hardware"] = (_hardware(there, self.run.environment), _hardware(facts, take_inventory()))
        self._compare(pairs)

    def _compare(self, pairs: Mapping[str, tuple[Any, Any]]) -> None:
        for name, (before, now) in pairs.items():
            if before != now:
                raise UsageError(
                    f"{self.run.path}: cannot be resumed: {name} was {before}, now it is {now}; "
                    "start another soak with --duration"
                )


def run_soak(
    prepared: Prepared,
    config: RunConfig,
    target: Target,
    progress: Progress,
    earlier: Earlier | None = None,
) -> Path:
    """Warms up, keeps the target full for the duration, lets running samples end, and judges.

    ``config`` is resolved; its ``min_duration_seconds`` is the duration. No one else may use ``target`` meanwhile.
    ``earlier``: the soak to resume, which has been checked; None: a new one.

    Returns:
        The run folder.

    Raises:
        StorageError: the folder cannot be written; it says INTERRUPTED.
    """
    # One sample: a soak needs no number of samples from the warm-up.
    warm_up = config.model_copy(update={"samples": 1, "min_duration_seconds": 0.0})
    facts = prepared.facts()
    session, settings, _ = TestSession.start(warm_up, prepared.data_set, target, facts, progress, prepared.tokenizer)
    population = target.state().replicas * _population(prepared.model.max_running)
    with StopSignals() as stop:
        if earlier is None:
            folder = _create(config, {**facts, **target.facts()}, population, prepared.model.content_hash)
            hold(folder.path)
        else:
            folder = RunFolder.reopen(earlier.run, {**target.facts(), "soak": _resumed(earlier)}, summarise_run)
            for row in earlier.last_rows:
                folder.add_series(row)
        stop.parting_words = f"stopped at once; {_how_to_resume(folder)}"
        stop.write_seconds = folder.write_seconds
        with interrupted_by_errors(folder, progress, _how_to_resume(folder)):
            _run(session, settings, folder, stop, population, earlier)
    return folder.path


def hold(folder: Path) -> None:
    """Locks ``folder`` until this process ends. Raises UsageError if another process records in it."""
    try:
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    except OSError as error:
        raise UsageError(f"{folder}: cannot be opened ({error.strerror}); give the folder of a soak") from error
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        raise UsageError(f"{folder}: another process is recording in it; wait until it ends") from None


def _population(max_running: int) -> int:
    return max_running + max(FEWEST_QUEUED, round(QUEUED_SHARE * max_running))


def _create(config: RunConfig, facts: Mapping[str, Any], population: int, content_hash: str | None) -> RunFolder:
    now, settings = datetime.now(UTC), _settings(config)
    if content_hash is not None:
        del settings["model"]  # the hash identifies the checkpoint, which may have moved
    soak = {
        "duration_seconds": config.min_duration_seconds,
        "population": population,
        "settings": settings,
        "segments": [{"begins_seconds": 0.0, "started_at": utc_text(now)}],
        "interruptions": [],
    }
    facts = {**facts, "started_at": utc_text(now), "soak": soak}
    return record(config, facts, config.out, scenario=SOAK, notes=[reason("SOAK")])


def _settings(config: RunConfig) -> dict[str, Any]:
    """By dotted key, the settings that affect the records."""
    there = config.model_dump(mode="json")
    flat: dict[str, Any] = {}
    for key in KEYS.keys() - MAY_CHANGE:
        value: Any = there
        for part in key.split("."):
            value = value[part]
        flat[key] = value
    return dict(sorted(flat.items()))


def _resumed(earlier: Earlier) -> dict[str, Any]:
    """The field ``soak`` with the interruption added and a new segment begun."""
    soak, now = earlier.run.result["soak"], datetime.now(UTC)
    last = soak["segments"][-1]
    began = unix_seconds(last["started_at"]) or now.timestamp()
    stopped = began + earlier.begins_seconds - last["begins_seconds"]
    interruption = {
        "at_seconds": earlier.begins_seconds,
        "gap_seconds": max(0.0, now.timestamp() - stopped),
        "samples_dropped": sum(row.in_flight for row in earlier.reached),
        "why": "; ".join(reason["message"] for reason in earlier.run.reasons),
        "lost_replicas": _lost_replicas(earlier.run.result.get("rack")),
    }
    return {
        **soak,
        "segments": [*soak["segments"], {"begins_seconds": earlier.begins_seconds, "started_at": utc_text(now)}],
        "interruptions": [*soak["interruptions"], interruption],
    }


def _lost_replicas(rack: Mapping[str, Any] | None) -> int:
    return rack["replicas"] - rack["replicas_least"] if rack else 0


def _how_to_resume(folder: RunFolder) -> str:
    return f"resume with megatoken soak --resume {folder.path}"


def _run(
    session: TestSession,
    settings: TestSettings,
    folder: RunFolder,
    stop: Stop,
    population: int,
    earlier: Earlier | None,
) -> None:
    duration, begins = folder.facts["soak"]["duration_seconds"], earlier.begins_seconds if earlier else 0.0
    outcome: Mapping[str, Any] = {}
    if begins < duration:
        rows, left = len(session.data_set.requests), duration - begins
        load = SteadyLoad(rows, population, left, (session.config.seed, round(begins * 1e9)))
        record = _Continued(folder, earlier) if earlier else folder
        measurement = Measurement(
            load,
            settings,
            np.arange(rows),
            session.data_set,
            session.target,
            record,
            session.progress,
            session.text,
            planned_seconds=left,
            power_meter=session.power_meter,
        )
        while not load.all_issued and not stop.received:
            measurement.step()
        if load.all_issued:  # else the drain would last as long as the queue and not as one answer
            load.withdraw(measurement.withdraw())
        while not measurement.over and not stop.received:
            measurement.step()
        measurement.note_state()
        if stop.received:
            at_seconds = begins + measurement.elapsed_seconds()
            reached = {"at_seconds": at_seconds, "duration_seconds": duration, "folder": str(folder.path)}
            folder.interrupt(reason("INTERRUPTED", signal=stop.received, **reached))
            session.target.cancel_all()
            return
        outcome = session.target.outcome(measurement.start_ns)
    _conclude(folder, outcome)


def _conclude(folder: RunFolder, outcome: Mapping[str, Any]) -> None:
    requests, series = folder.end_recording()
    folder.add_facts(outcome)
    folder.add_facts({"notes": end_notes(folder.facts, requests)})
    result = concluded_soak(folder.facts, folder.environment, requests, series)
    folder.finish({**result, "ended_at": utc_text(datetime.now(UTC))})


class _Continued:
    """A run folder that is resumed: moments and totals continue where they stopped."""

    def __init__(self, folder: RunFolder, earlier: Earlier) -> None:
        self._folder = folder
        self._begins_seconds = earlier.begins_seconds
        self._first_id = 1 + int(max(numbers(earlier.run.requests["sample_id"]), default=-1))
        self._reached = {(row.node, row.replica): row for row in earlier.reached}
        # The same machine may have another name now, as a container does.
        names = set() if "rack_nodes" in earlier.run.result else {row.node for row in earlier.reached}
        self._node = names.pop() if len(names) == 1 else None
        self._peak_memory_bytes = earlier.run.result.get("peak_memory_bytes") or 0

    def add_samples(self, rows: Sequence[SampleRow]) -> None:
        self._folder.add_samples([self._moved(row) for row in rows])

    def add_series(self, row: SeriesRow) -> None:
        row = row._replace(node=self._node or row.node)
        before = self._reached.get((row.node, row.replica))
        totals = {
            name: total + ((getattr(before, name) or 0) if before else 0)
            for name in (*TOTALS, *ERRORS)
            if (total := getattr(row, name)) is not None
        }
        self._folder.add_series(row._replace(elapsed_seconds=row.elapsed_seconds + self._begins_seconds, **totals))

    def add_token_times(self, sample_id: int, times_ns: NDArray[np.int64]) -> None:
        """Adds token times; those of a resumed soak count from its first start."""
        self._folder.add_token_times(sample_id + self._first_id, times_ns + round(self._begins_seconds * 1e9))

    def add_facts(self, facts: Mapping[str, Any]) -> None:
        """Adds facts; the start and the peak memory are those of the whole soak."""
        kept = {name: value for name, value in facts.items() if name != "started_at"}
        if (peak := kept.get("peak_memory_bytes")) is not None:
            kept["peak_memory_bytes"] = max(peak, self._peak_memory_bytes)
        self._folder.add_facts(kept)

    def _moved(self, row: SampleRow) -> SampleRow:
        moments = ((name, getattr(row, name)) for name in MOMENTS)
        moved = {name: value + self._begins_seconds for name, value in moments if value is not None}
        return row._replace(sample_id=row.sample_id + self._first_id, node=self._node or row.node, **moved)


def _hardware(facts: Mapping[str, Any], environment: Mapping[str, Any]) -> str:
    """Processors and GPUs of the machine, or of all nodes of a rack with their replicas; no host names."""
    nodes = facts.get("rack_nodes")
    if not nodes:
        return _machine(environment)
    kinds = Counter(f"{count_of(node['replicas'], 'replica')} on {_machine(node['machine'])}" for node in nodes)
    return "; ".join(f"{count} x {kind}" for kind, count in sorted(kinds.items()))


def _machine(environment: Mapping[str, Any]) -> str:
    gpus = Counter(gpu["name"] for gpu in environment.get("gpus") or ())
    cpu = (environment.get("cpu") or {}).get("model")
    return ", ".join([str(cpu), *(f"{count} {name}" for name, count in sorted(gpus.items()))])
