"""Writing the run folder; ``run`` reads it. No other code knows its layout.

A folder appears under its name by one rename, complete and with the verdict INTERRUPTED. During the run a thread
replaces its tables about once a second, each by one rename. So a process that dies at any moment leaves a readable
folder with every sample that ended before the last write.
"""

from __future__ import annotations

import re
import shutil
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from errno import EEXIST, ENOTEMPTY
from functools import partial
from os import getpid
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import numpy as np
import yaml
from numpy.typing import NDArray

from megatoken.errors import StorageError
from megatoken.files import free_names, plain, redact, storage_error, to_json, write_atomically, write_text
from megatoken.runs.reasons import Reason, reason
from megatoken.runs.run import (
    CONFIG,
    ENVIRONMENT,
    MLPERF,
    QUALIFICATION,
    REQUESTS,
    RESULT,
    SCHEMA_VERSION,
    SERIES,
    Run,
    Verdict,
    read_run,
)
from megatoken.runs.tables import SampleRow, SeriesRow, append, to_table, write_parquet
from megatoken.runs.token_times import TOKENS, TokenTimes
from megatoken.text import utc_now

if TYPE_CHECKING:
    import pyarrow as pa

    Summarise = Callable[[Mapping[str, Any], pa.Table, pa.Table], dict[str, Any]]

PERIOD_SECONDS = 1.0
BUSY_SHARE = 0.05
_HEAD = ("schema_version", "verdict", "reasons", "rules_unmet")  # of result.json, whatever the facts


def run_name(started: datetime, scenario: str, model: str) -> str:
    """``20261120T091233Z-offline-llama2-70b`` for an aware ``started``; of a model given as a path, the last part."""
    words = (f"{started.astimezone(UTC):%Y%m%dT%H%M%SZ}", scenario, Path(model).name)
    return "-".join(filter(None, (re.sub(r"[^A-Za-z0-9._]+", "-", word).strip("-.") for word in words)))


@contextmanager
def new_folder(wanted: Path) -> Iterator[Path]:
    """Make ``wanted`` (``wanted-2``, ``wanted-3``... if taken) for several runs; left empty, it goes at the end.

    Raises:
        StorageError: it cannot be made.
    """
    try:
        wanted.parent.mkdir(parents=True, exist_ok=True)
        for path in free_names(wanted):
            try:
                path.mkdir()
                break
            except FileExistsError:  # another process took the name just now
                continue
    except OSError as error:
        raise storage_error(wanted, error) from error
    try:
        yield path
    finally:
        with suppress(OSError):
            path.rmdir()


class RunFolder:
    """A run being recorded. ``finish`` or ``interrupt`` ends it; without either its verdict stays INTERRUPTED.

    ``add_samples`` and ``add_series`` only append to lists, because they are called between two steps of the engine. A
    thread writes the new rows once a second, or less often so that it never takes more than 5 % of one core: from about
    150,000 samples on, where one write takes 50 ms (a million take 0.3 s, which leaves 6 s between writes).

    The first write that fails ends the recording: the files on the disk stay unchanged, and the next call of any method
    raises the StorageError.
    """

    def __init__(
        self, path: Path, environment: Mapping[str, Any], facts: Mapping[str, Any], summarise: Summarise
    ) -> None:
        self.path = path
        self.environment = environment
        self._summarise = summarise
        self._facts = facts
        self._new_samples: list[SampleRow] = []
        self._new_series: list[SeriesRow] = []
        self._new_times: list[tuple[int, NDArray[np.int64]]] = []
        self._token_times: TokenTimes | None = None
        self._handover = threading.Lock()  # the three lists
        self._requests = to_table(SampleRow, [])
        self._series = to_table(SeriesRow, [])
        self._written_rows = (-1, -1)
        self._write_seconds = 0.0
        self._movable = True  # the command that made it has --out
        self._error: Exception | None = None
        self._ended = False
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._write_while_running, name="run-folder", daemon=True)

    @classmethod
    def create(
        cls,
        out: Path,
        name: str,
        config: Mapping[str, Any],
        environment: Mapping[str, Any],
        *,
        scenario: str,
        facts: Mapping[str, Any],
        summarise: Summarise,
        qualification: Mapping[str, Any] | None = None,
    ) -> Self:
        """Make ``out/name`` (``name-2``, ``name-3``... if taken) and start recording; ``out`` is made if missing.

        ``name`` comes from ``run_name``, ``environment`` from ``megatoken.hardware.inventory``. Secrets of ``config``
        are blanked before it is written. ``scenario`` is ``offline``, ``server``, ``interactive`` or ``singlestream``;
        ``facts`` are fields of ``result.json`` known from the start, such as ``model``, ``precision``, ``rules_unmet``;
        ``summarise`` gives metrics from the known fields and the two tables, at every write. ``qualification`` is the
        document of a machine that was qualified first.

        Raises:
            StorageError: the folder cannot be made; no part of it is left.
        """
        draft = out / f".{name}.{getpid()}.tmp"
        missing: list[Path] = []
        try:
            missing += [parent for parent in (out, *out.parents) if not parent.exists()]
            (draft / MLPERF).mkdir(parents=True)
            write_text(draft / CONFIG, yaml.safe_dump(redact(plain(config)), sort_keys=False, allow_unicode=True))
            write_text(draft / ENVIRONMENT, to_json(environment))
            if qualification is not None:
                write_text(draft / QUALIFICATION, to_json(qualification))
            more = {"scenario": scenario, **plain(facts), "created_at": utc_now()}
            folder = cls(draft, plain(environment), more, summarise)
            folder._write_tables()
            folder._write_unfinished()
            folder.path = _rename_to_free_name(draft, out / name)
        except BaseException as error:
            shutil.rmtree(draft, ignore_errors=True)
            for parent in missing:
                with suppress(OSError):
                    parent.rmdir()
            cause = error.__cause__ if isinstance(error, StorageError) else error
            if isinstance(cause, OSError):
                raise storage_error(out / name, cause) from cause
            raise
        folder._thread.start()
        return folder

    @classmethod
    def reopen(cls, run: Run, facts: Mapping[str, Any], summarise: Summarise) -> Self:
        """Resume recording in the folder of an interrupted run, which no other process writes.

        ``facts`` are fields of ``result.json`` to replace or add; ``summarise`` as for ``create``.
        """
        kept = {name: value for name, value in run.result.items() if name not in _HEAD}
        folder = cls(run.path, run.environment, {**kept, **plain(facts)}, summarise)
        folder._movable = False
        folder._requests, folder._series = run.requests, run.series
        folder._written_rows = (len(run.requests), len(run.series))
        folder._thread.start()
        return folder

    @property
    def mlperf_directory(self) -> Path:
        """Where LoadGen writes its own files."""
        return self.path / MLPERF

    def write_seconds(self) -> float:
        """Duration of the longest write so far."""
        return self._write_seconds

    @property
    def facts(self) -> Mapping[str, Any]:
        """Fields of ``result.json`` known so far."""
        return self._facts

    def add_facts(self, facts: Mapping[str, Any]) -> None:
        """Add or replace fields of ``result.json`` that become known during the run; written with the next rows."""
        self._facts = {**self._facts, **plain(facts)}  # a new mapping, because the thread may be reading the old one

    def add_samples(self, rows: Sequence[SampleRow]) -> None:
        """Record samples that have ended, each once."""
        self._raise_failure()
        with self._handover:
            self._new_samples.extend(rows)

    def add_series(self, row: SeriesRow) -> None:
        """Record the state of one replica."""
        self._raise_failure()
        with self._handover:
            self._new_series.append(row)

    def add_token_times(self, sample_id: int, times_ns: NDArray[np.int64]) -> None:
        """Record when the tokens of a sample were seen, in nanoseconds since the start of the run [tokens]."""
        with self._handover:
            self._new_times.append((sample_id, times_ns))

    def add_tables(self, requests: pa.Table, series: pa.Table) -> None:
        """Record the tables of other runs: of ``SampleRow`` and of ``SeriesRow``."""
        self._raise_failure()
        self._stop_thread()
        self._requests, self._series = append(self._requests, requests), append(self._series, series)

    def end_recording(self) -> tuple[pa.Table, pa.Table]:
        """Stop recording and return all samples and the time series. Raises StorageError: an earlier write failed."""
        self._stop_thread()
        self._raise_failure()
        self._take_new_rows()
        return self._requests, self._series

    def finish(self, result: Mapping[str, Any]) -> None:
        """Write the last rows, then the final ``result.json``: ``verdict``, ``reasons``, and more fields.

        Raises:
            StorageError: this or an earlier write failed; the verdict stays INTERRUPTED.
        """
        verdict, reasons = Verdict(result["verdict"]), result["reasons"]
        self._stop_thread()
        self._raise_failure()
        self._write_last(verdict, reasons, result)

    def interrupt(self, why: Reason) -> None:
        """End the run as INTERRUPTED; does nothing to a run that has ended.

        Raises:
            StorageError: the last rows could not be written.
        """
        if not self._ended:
            self._stop_thread()
            self._write_last(Verdict.INTERRUPTED, [why], {})

    def finish_as(self, other: Path, more: Mapping[str, Any]) -> None:
        """End the run with the contents of the run folder ``other``, and ``more`` in ``result.json``.

        Raises:
            StorageError: a write failed; the verdict stays INTERRUPTED.
        """
        self._stop_thread()
        self._raise_failure()
        run = read_run(other)
        try:
            shutil.copytree(other / MLPERF, self.mlperf_directory, dirs_exist_ok=True)
            if (other / TOKENS).exists():
                shutil.copyfile(other / TOKENS, self.path / TOKENS)
        except (OSError, shutil.Error) as error:
            raise StorageError(f"{self.mlperf_directory}: cannot be written ({error})") from error
        self._requests, self._series = run.requests, run.series
        own = {name: value for name, value in run.result.items() if name != "plan_sha256"}  # of its own configuration
        self._facts = {**self._facts, **own}
        self._write_last(run.verdict, run.reasons, {"rules_unmet": run.rules_unmet, **plain(more)})

    def _write_last(self, verdict: Verdict, reasons: Sequence[Reason], result: Mapping[str, Any]) -> None:
        self._write_tables()
        if self._token_times is not None:
            self._token_times.close()
        self._write_result(verdict, reasons, result)
        self._ended = True

    def _write_while_running(self) -> None:
        pause = PERIOD_SECONDS
        while not self._stop.wait(pause):
            started, busy = time.monotonic(), time.thread_time()
            try:
                if self._write_tables():
                    self._write_unfinished()
            except Exception as error:
                self._error = error
                return
            # A row waits for the pause and the next write: both together must stay within the period.
            # The share counts processor time, because waiting for a disk takes none from the engine.
            taken, busy = time.monotonic() - started, time.thread_time() - busy
            self._write_seconds = max(self._write_seconds, taken)
            pause = max(PERIOD_SECONDS - 2 * taken, busy * (1 / BUSY_SHARE - 1))

    def _stop_thread(self) -> None:
        self._stop.set()
        self._thread.join()

    def _raise_failure(self) -> None:
        if self._error is not None:
            raise self._error

    def _take_new_rows(self) -> None:
        with self._handover:
            samples, self._new_samples = self._new_samples, []
            series, self._new_series = self._new_series, []
            times, self._new_times = self._new_times, []
        if times and self._token_times is None:
            self._token_times = TokenTimes(self.path)
        for sample_id, times_ns in times:
            assert self._token_times is not None
            self._token_times.add(sample_id, times_ns)
        if samples:
            self._requests = append(self._requests, to_table(SampleRow, samples))
        if series:
            self._series = append(self._series, to_table(SeriesRow, series))

    def _write_tables(self) -> bool:
        """Replace the tables that have grown; returns whether one has."""
        self._take_new_rows()
        rows = (len(self._requests), len(self._series))
        if rows[0] != self._written_rows[0]:
            write_atomically(self.path / REQUESTS, partial(write_parquet, self._requests), movable=self._movable)
        if rows[1] != self._written_rows[1]:
            write_atomically(self.path / SERIES, partial(write_parquet, self._series), movable=self._movable)
        grown, self._written_rows = rows != self._written_rows, rows
        return grown

    def _write_unfinished(self) -> None:
        self._write_result(Verdict.INTERRUPTED, [reason("NOT_FINISHED", written_at=utc_now())], {})

    def _write_result(self, verdict: Verdict, reasons: Sequence[Reason], more: Mapping[str, Any]) -> None:
        head = {"schema_version": SCHEMA_VERSION, "verdict": verdict, "reasons": reasons, "rules_unmet": []}
        fields = self._summarise({**head, **self._facts, **more}, self._requests, self._series)
        write_text(self.path / RESULT, to_json({**head, **self._facts, **fields, **more}), movable=self._movable)


def _rename_to_free_name(draft: Path, wanted: Path) -> Path:
    for path in free_names(wanted):
        try:
            return draft.rename(path)
        except OSError as error:
            if error.errno not in (ENOTEMPTY, EEXIST):  # another process took the name just now
                raise
    raise AssertionError("names are endless")
