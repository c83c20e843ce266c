"""One test of MLPerf's LoadGen in its own process: start it, take the samples it issues, answer, read its log.

Times are ``time.monotonic_ns()``, a clock that all processes of a machine share and that is never set. LoadGen itself
uses the wall clock (std::chrono::high_resolution_clock in GNU's library).
"""

from __future__ import annotations

import json
import math
import os
import select
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from fcntl import F_SETPIPE_SZ, fcntl
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Literal, Never, Self

from megatoken.errors import MegatokenError, StorageError
from megatoken.files import write_text
from megatoken.harness.loadgen_wire import (
    ALL_ISSUED,
    ENDED,
    FAILED,
    ISSUED,
    Completion,
    FirstToken,
    Issued,
    pack_answers,
    unpack_issued,
)
from megatoken.mlperf.compliance import TEST06_RECORDS, TEST06_SEED
from megatoken.mlperf.detail_log import ABANDONED, DetailLog, read_finished_log
from megatoken.mlperf.rounds import Seeds
from megatoken.text import count_of

Scenario = Literal["offline", "server", "interactive", "singlestream"]
LOADGEN_SCENARIOS: dict[str, str] = {
    "offline": "Offline",
    "server": "Server",
    "interactive": "Server",  # with the limits of another model name
    "singlestream": "SingleStream",
}
AUDIT_CONFIG = "audit.config"
PIPE_BYTES = 2**20  # an engine may be busy with one step while thousands of samples come due


@dataclass(frozen=True, slots=True)
class TestSettings:
    """What LoadGen is asked for. None leaves the value of LoadGen's built-in mlperf.conf.

    In performance mode LoadGen draws whole passes over its library. Offline issues max(samples, 1.1 x
    min_duration_seconds x rate) at once, rounded up to passes; Server the first whole passes that have ``samples`` and
    whose last sample is due at ``min_duration_seconds`` or later; SingleStream ends once it has issued ``samples`` and
    the duration is over. In accuracy mode every row of the library is issued once. The compliance test TEST06 draws
    ``TEST06_RECORDS`` samples of the library, whatever ``samples`` and ``min_duration_seconds`` are, keeping their ids.
    """

    __test__ = False  # no test of pytest's

    scenario: Scenario  # interactive is Server under another model name
    mode: Literal["performance", "accuracy"]  # accuracy keeps every token id
    model: str  # LoadGen's name of the benchmark, which decides limits and switches its token metrics on
    library_rows: int  # rows that LoadGen draws from
    samples: int | None  # fewest samples
    min_duration_seconds: float | None  # shortest test
    # samples per second: expected (Offline), offered (Server), one over the expected latency (SingleStream)
    rate: float
    seeds: Seeds  # of order and arrivals
    ttft_limit_seconds: float | None = None  # instead of the benchmark's limit; whole milliseconds
    tpot_limit_seconds: float | None = None  # instead of the benchmark's limit; whole milliseconds
    compliance: Literal["TEST06"] | None = None  # test to run

    @property
    def keeps_token_ids(self) -> bool:
        """Whether LoadGen logs the answers."""
        return self.mode == "accuracy" or self.compliance is not None

    @property
    def offered_rate(self) -> float:
        """``rate`` as the user.conf states it."""
        return float(f"{self.rate:.6g}")

    def user_conf(self) -> str:
        """The text of LoadGen's user.conf."""
        scenario = LOADGEN_SCENARIOS[self.scenario]
        if scenario == "SingleStream":
            lines = [f"*.SingleStream.target_latency = {math.ceil(1000 / self.rate)}"]  # whole milliseconds
        else:
            lines = [f"*.{scenario}.target_qps = {self.rate:.6g}"]
        if self.samples is not None:
            lines.append(f"*.{scenario}.min_query_count = {self.samples}")
        if self.min_duration_seconds is not None:
            lines.append(f"*.{scenario}.min_duration = {round(self.min_duration_seconds * 1000)}")
        for name, limit in (("ttft", self.ttft_limit_seconds), ("tpot", self.tpot_limit_seconds)):
            if limit is not None:
                lines.append(f"*.{scenario}.{name}_latency = {round(limit * 1000)}")
        lines.append(f"*.*.performance_sample_count_override = {self.library_rows}")
        return "\n".join(lines) + "\n"

    def audit_config(self) -> str:
        """The text of TEST06's audit.config, which overrides all else (compliance/TEST06 of mlcommons/inference)."""
        overrides = {
            "mode": 2,  # performance
            "accuracy_log_rng_seed": TEST06_SEED,
            "accuracy_log_sampling_target": TEST06_RECORDS,
            "min_query_count": TEST06_RECORDS,
            "min_duration": 0,
            "sample_concatenate_permutation": 0,  # no equal issue
        }
        return "".join(f"*.*.{key} = {value}\n" for key, value in overrides.items())


class LoadGenTest:
    """One running test. All methods are for one thread, the one that drives the target."""

    def __init__(self, settings: TestSettings, directory: Path, start_wall_ns: int | None = None) -> None:
        """Prepares the test.

        ``directory`` gets the user.conf and LoadGen's logs. ``start_wall_ns``: the moment of the wall clock
        (``time.time_ns()``) to start at; None: at once.
        """
        self._settings = settings
        self._start_wall_ns = start_wall_ns
        self._directory = directory
        self.issued = 0
        """Samples issued so far; they are numbered from 0."""
        self.all_issued = False
        """Whether LoadGen has reported that no more samples come."""
        self._ended = False
        self._outstanding: set[int] = set()
        self._first: list[FirstToken] = []
        self._completions: list[Completion] = []

    def __enter__(self) -> Self:
        """Starts LoadGen; its first samples may be due at once."""
        user_conf = self._directory / "user.conf"
        write_text(user_conf, self._settings.user_conf())
        audit_config = None
        if self._settings.compliance is not None:
            audit_config = self._directory / AUDIT_CONFIG
            write_text(audit_config, self._settings.audit_config())
        settings = {
            "user_conf": str(user_conf),
            "audit_config": str(audit_config) if audit_config else None,
            "directory": str(self._directory),
            "model": self._settings.model,
            "scenario": LOADGEN_SCENARIOS[self._settings.scenario],
            "accuracy": self._settings.mode == "accuracy",
            "seeds": list(self._settings.seeds),
            "library_rows": self._settings.library_rows,
            "start_wall_ns": self._start_wall_ns,
        }
        their_source, sink = _pipe()
        source, their_sink = _pipe()
        module = "megatoken.harness.loadgen_process"
        self._messages = tempfile.TemporaryFile()
        self._sink = Connection(sink, readable=False)
        self._source = Connection(source, writable=False)
        self._readable = select.poll()  # ``Connection.poll`` makes one at every call, which takes longer than a message
        self._readable.register(source, select.POLLIN)
        try:
            # -P: modules of the working directory are not imported. New session: Ctrl-C does not reach the process.
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-m", module, json.dumps(settings), str(their_source), str(their_sink)],
                stdin=subprocess.DEVNULL,
                stdout=self._messages,
                stderr=self._messages,
                pass_fds=(their_source, their_sink),
                start_new_session=True,
                env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
            )
        except OSError as error:
            self._close()
            raise MegatokenError(f"LoadGen's process cannot be started: {error.strerror}") from error
        finally:
            os.close(their_source)
            os.close(their_sink)
        return self

    def __exit__(self, *exception: object) -> None:
        """Ends LoadGen's process. If the test was not over, its logs are cut off, and ``ABANDONED.txt`` says so."""
        if not self._ended:
            with suppress(StorageError):  # the caller's next write to the same disk reports the error
                write_text(
                    self._directory / ABANDONED,
                    f"The run was interrupted when {len(self._outstanding):,} of the "
                    f"{count_of(self.issued, 'sample')} issued "
                    "had no answer, and LoadGen was ended. Its files in this folder are no result.\n",
                )
            self._process.kill()
        self._process.wait()
        self._close()

    @property
    def outstanding(self) -> int:
        """Samples that LoadGen still waits for."""
        return len(self._outstanding)

    def take_issued(self, timeout_seconds: float) -> list[Issued]:
        """Samples issued since the last call; waits for the first at most ``timeout_seconds``.

        Raises:
            MegatokenError: LoadGen failed.
        """
        taken: list[Issued] = []
        while not self._ended and self._readable.poll(0 if taken else timeout_seconds * 1000):
            message = self._receive()
            kind = message[:1]
            if kind == ISSUED:
                taken.append(unpack_issued(message))
                samples = len(taken[-1].rows)
                self._outstanding.update(range(self.issued, self.issued + samples))
                self.issued += samples
            elif kind == ALL_ISSUED:
                self.all_issued = True
                break
            elif kind == ENDED:
                self._ended = True
            else:
                raise MegatokenError(f"LoadGen failed: {message.removeprefix(FAILED).decode()}")
        return taken

    def patience_seconds(self, longest: float) -> float:
        """The longest: LoadGen says when a sample is due."""
        return longest

    def fileno(self) -> int:
        """Of the pipe from which samples are taken."""
        return self._source.fileno()

    def first_token(self, sample: int, token_id: int) -> None:
        """Notes that the first token of a sample exists; sent with the next ``flush``."""
        self._first.append(FirstToken(sample, token_id))

    def complete(self, sample: int, output_tokens: int, token_ids: Sequence[int] = ()) -> None:
        """Notes that a sample has ended; sent with the next ``flush``.

        LoadGen logs an error for fewer than 2 ``output_tokens``, and the run cannot be valid. It keeps ``token_ids``
        only if the settings say so.
        """
        self._outstanding.remove(sample)
        self._completions.append(Completion(sample, output_tokens, token_ids))

    def flush(self) -> None:
        """Sends what was noted to LoadGen, which takes the time at that moment.

        Raises:
            MegatokenError: LoadGen failed.
        """
        if not self._first and not self._completions:
            return
        answers = pack_answers(self._first, self._completions)
        self._first, self._completions = [], []
        try:
            self._sink.send_bytes(answers)
        except OSError:
            self._raise_failure()

    def finish(self) -> DetailLog:
        """Waits until LoadGen has written its logs and returns them; every sample must be complete.

        Raises:
            MegatokenError: LoadGen failed.
            StorageError: a log is cut off.
        """
        while not self._ended:
            self.take_issued(timeout_seconds=0.1)
        last_key = "power_end" if self._settings.mode == "accuracy" else "num_errors"
        return read_finished_log(self._directory, last_key)

    def _close(self) -> None:
        self._source.close()
        self._sink.close()
        self._messages.close()

    def _receive(self) -> bytes:
        try:
            return self._source.recv_bytes()
        except (EOFError, OSError):
            self._raise_failure()

    def _raise_failure(self) -> Never:
        code = self._process.wait()
        self._messages.seek(0)
        said = self._messages.read().decode(errors="replace").split("\n")
        last = next((line.strip() for line in reversed(said) if line.strip()), "no message")
        raise MegatokenError(f"LoadGen's process ended with code {code}: {last}")


def _pipe() -> tuple[int, int]:
    reader, writer = os.pipe()
    with suppress(OSError):  # the user's limit of pipe memory is reached
        fcntl(writer, F_SETPIPE_SZ, PIPE_BYTES)
    return reader, writer
