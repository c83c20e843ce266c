"""MLPerf LoadGen's Offline test: start it, take its one query, complete its samples, read what it logged.

LoadGen blocks the thread that starts a test and cannot be stopped from outside, so it gets a thread of its own and the
main thread stays free for signals. Its response ids are addresses in this process. It accepts one test a process.
"""

from __future__ import annotations

import json
import queue
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np

from megatoken.errors import MegatokenError, StorageError
from megatoken.results.files import write_text

MODEL = "llama2-70b"  # the name that switches LoadGen's token metrics on
ABANDONED = "ABANDONED.txt"
_LOG_PREFIX = ":::MLLOG "


@dataclass(frozen=True, slots=True)
class Seeds:
    """The three random seeds that an MLPerf round publishes."""

    qsl: int
    sample_index: int
    schedule: int


@dataclass(frozen=True, slots=True)
class OfflineSettings:
    """What LoadGen is asked for. None leaves the value of LoadGen's built-in mlperf.conf.

    In performance mode LoadGen issues max(samples, 1.1 x min_duration_seconds x target_samples_per_second), rounded up
    to whole passes over its library; in accuracy mode every row of the library once.
    """

    mode: Literal["performance", "accuracy"]
    library_rows: int
    samples: int | None
    min_duration_seconds: float | None
    target_samples_per_second: float
    seeds: Seeds

    def user_conf(self) -> str:
        """The text of LoadGen's user.conf."""
        lines = [f"*.Offline.target_qps = {self.target_samples_per_second:.6g}"]
        if self.samples is not None:
            lines.append(f"*.Offline.min_query_count = {self.samples}")
        if self.min_duration_seconds is not None:
            lines.append(f"*.Offline.min_duration = {round(self.min_duration_seconds * 1000)}")
        lines.append(f"*.*.performance_sample_count_override = {self.library_rows}")
        return "\n".join(lines) + "\n"


class OfflineTest:
    """One running Offline test. All methods are for one thread, the one that drives the target."""

    def __init__(self, settings: OfflineSettings, directory: Path) -> None:
        """Prepares the test; LoadGen will write its logs, and this the user.conf, into ``directory``."""
        self._settings = settings
        self._accuracy = settings.mode == "accuracy"
        self._directory = directory
        self._user_conf = directory / "user.conf"
        self._queries: queue.SimpleQueue[tuple[list[int], list[int], int]] = queue.SimpleQueue()
        self._response_ids: list[int] = []
        self._outstanding: set[int] = set()
        self._failure: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="loadgen", daemon=True)

    def start(self) -> tuple[list[int], int]:
        """Starts LoadGen and takes its query.

        Returns:
            The library row of every sample in the order of the query, and ``time.monotonic_ns()`` when it was issued.
        """
        write_text(self._user_conf, self._settings.user_conf())
        self._thread.start()
        while True:
            try:
                self._response_ids, rows, issued_ns = self._queries.get(timeout=0.1)
            except queue.Empty:
                if not self._thread.is_alive():
                    self._raise_failure()
                    raise MegatokenError("LoadGen ended without issuing a query") from None
            else:
                self._outstanding = set(range(len(rows)))
                return rows, issued_ns

    @property
    def outstanding(self) -> int:
        """Samples that LoadGen still waits for."""
        return len(self._outstanding)

    def complete(self, sample: int, output_tokens: int, token_ids: Sequence[int] = ()) -> None:
        """Tells LoadGen that a sample is done; it takes the time now.

        Args:
            sample: position in the query.
            output_tokens: how many tokens were generated. LoadGen logs an error below 2, and the run cannot be valid.
            token_ids: the tokens; LoadGen keeps them in accuracy mode only.
        """
        import mlperf_loadgen as lg

        data = np.asarray(token_ids, dtype="<i4")  # LoadGen copies it inside the call
        self._outstanding.remove(sample)
        lg.QuerySamplesComplete(
            [lg.QuerySampleResponse(self._response_ids[sample], data.ctypes.data, data.nbytes, output_tokens)]
        )

    def abandon(self) -> None:
        """Ends the test early: LoadGen waits for every sample, so the outstanding ones get empty answers.

        LoadGen's summary may then say VALID. ``ABANDONED.txt`` beside it, there before the first empty answer, says
        that it is none; and because that answer counts 0 tokens, the detail log has an error.
        """
        if not self._thread.is_alive():
            return
        with suppress(StorageError):  # the caller's own next write meets the same disk and says so
            write_text(
                self._directory / ABANDONED,
                f"The run was interrupted and {len(self._outstanding):,} of its {len(self._response_ids):,} samples "
                "got empty answers, so LoadGen's files in this folder are no result, whatever they say.\n",
            )
        import mlperf_loadgen as lg

        lg.QuerySamplesComplete(
            [
                lg.QuerySampleResponse(self._response_ids[sample], 0, 0, 0 if position == 0 else 2)
                for position, sample in enumerate(sorted(self._outstanding))
            ]
        )
        self._outstanding.clear()
        self._thread.join()

    def finish(self) -> LoadGenLog:
        """Waits until LoadGen has written its logs and returns what they say; every sample must be complete."""
        self._thread.join()
        self._raise_failure()
        return LoadGenLog.read(self._directory, last_key="power_end" if self._accuracy else "num_errors")

    def _raise_failure(self) -> None:
        if self._failure is not None:
            raise MegatokenError(f"LoadGen failed: {self._failure}") from self._failure

    def _run(self) -> None:
        try:
            self._run_test()
        except BaseException as failure:  # the driving thread reports it
            self._failure = failure

    def _run_test(self) -> None:
        import mlperf_loadgen as lg

        settings = lg.TestSettings()
        if code := settings.FromConfig(str(self._user_conf), MODEL, "Offline"):
            raise MegatokenError(f"LoadGen refuses {self._user_conf} (code {code})")
        settings.scenario = lg.TestScenario.Offline
        settings.mode = lg.TestMode.AccuracyOnly if self._accuracy else lg.TestMode.PerformanceOnly
        # The installed LoadGen embeds the seeds of its own round.
        settings.qsl_rng_seed = self._settings.seeds.qsl
        settings.sample_index_rng_seed = self._settings.seeds.sample_index
        settings.schedule_rng_seed = self._settings.seeds.schedule

        logs = lg.LogSettings()
        logs.enable_trace = False
        logs.log_output.outdir = str(self._directory)
        logs.log_output.copy_summary_to_stdout = False

        def issue(response_ids: list[int], rows: list[int]) -> None:
            self._queries.put((response_ids, rows, time.monotonic_ns()))

        sut = lg.ConstructFastSUT(issue, lambda: None)
        rows = self._settings.library_rows
        library = lg.ConstructQSL(rows, rows, lambda _: None, lambda _: None)
        try:
            # An audit.config in the working directory would override the settings: name one that cannot exist.
            lg.StartTestWithLogSettings(sut, library, settings, logs, str(self._user_conf / "audit"))
        finally:
            lg.DestroyQSL(library)
            lg.DestroyFastSUT(sut)


@dataclass(frozen=True, slots=True)
class LoadGenLog:
    """mlperf_log_detail.txt: the first value of every key, and the text of every error."""

    values: dict[str, Any]
    errors: list[str]

    @classmethod
    def read(cls, directory: Path, last_key: str) -> LoadGenLog:
        """Reads the detail log, which must get as far as ``last_key``. Raises StorageError if a log is cut off."""
        path = directory / "mlperf_log_detail.txt"
        values: dict[str, Any] = {}
        errors = []
        try:
            with path.open(encoding="utf-8") as lines:
                for line in lines:
                    entry = json.loads(line.removeprefix(_LOG_PREFIX))
                    values.setdefault(entry["key"], entry["value"])
                    if entry["metadata"]["is_error"]:
                        errors.append(str(entry["value"]))
            accuracy = (directory / "mlperf_log_accuracy.json").read_bytes()[-2:]
        except (OSError, ValueError, KeyError) as error:
            raise StorageError(f"{path}: LoadGen's log cannot be read back ({error}); is the disk full?") from None
        if last_key not in values or not accuracy.endswith(b"]\n"):
            raise StorageError(f"{path.parent}: a log of LoadGen has no end; is the disk full?")
        return cls(values, errors)
