"""A third party's server that a run starts, waits for and stops; its output is kept."""

from __future__ import annotations

import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

from megatoken.errors import UsageError
from megatoken.files import free_names, storage_error
from megatoken.targets.endpoint.address import AnswerError
from megatoken.targets.endpoint.failures import ServerEnd

LOOK_SECONDS = 0.2
STOP_SECONDS = 20.0
SHOWN_LINES = 3
READ_BYTES = 65_536  # of the end of a log, which may be long

# Waits for the end of its input, which comes even if SIGKILL ended this process, then ends a process group.
_GUARD = """
import os, signal, sys, time
os.read(0, 1)
os.killpg(int(sys.argv[1]), signal.SIGTERM)
time.sleep(10)
os.killpg(int(sys.argv[1]), signal.SIGKILL)
"""


@contextmanager
def started_server(
    command: str, log: Path, ready: Callable[[], object], seconds: float, flag: str = "--start-server"
) -> Iterator[tuple[subprocess.Popen[bytes], Path]]:
    """Starts ``command`` in a session of its own, waits until ``ready`` raises no AnswerError, stops it at the end.

    It is also stopped if this process is killed. Yields the process and the file that holds its output.

    Args:
        command: as a shell would split it.
        log: file for its output, or the next of ``free_names`` if it exists; removed if the command cannot be started,
            and after a KeyboardInterrupt without words, which comes before the measurement.
        ready: asks the server something.
        seconds: how long it may take.
        flag: that asked for it.

    Raises:
        UsageError: it cannot be started, ends, or does not become ready in time; with the last lines of its output.
        StorageError: the log cannot be written.
    """
    try:
        words = shlex.split(command)
        if not words:
            raise UsageError(f"{flag}: no command")
        made = [folder for folder in (log.parent, *log.parent.parents) if not folder.exists()]
        log.parent.mkdir(parents=True, exist_ok=True)
        log, file = _new_file(log)
    except ValueError as error:
        raise UsageError(f"{flag} {command}: {error}; quote it as for a shell") from None
    except OSError as error:
        raise storage_error(log, error) from error
    with file:
        try:
            process = subprocess.Popen(
                words, stdin=subprocess.DEVNULL, stdout=file, stderr=subprocess.STDOUT, start_new_session=True
            )
        except OSError as error:
            _remove(log, made)
            raise UsageError(f"{flag}: {shlex.quote(words[0])} cannot be started ({error.strerror})") from None
        guard = None
        try:
            guard = subprocess.Popen(
                [sys.executable, "-I", "-S", "-c", _GUARD, str(process.pid)],
                stdin=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                start_new_session=True,
            )
            try:
                _wait(process, log, ready, time.monotonic() + seconds, seconds)
            except UsageError as error:
                raise UsageError(f"{flag}: {error}") from None
            yield process, log
        except KeyboardInterrupt as interruption:
            if not interruption.args:  # else it names a run, which names the log
                _remove(log, made)
            raise
        finally:
            _stop(process)
            if guard is not None:
                guard.kill()
                guard.communicate()


def _new_file(wanted: Path) -> tuple[Path, BinaryIO]:
    for path in free_names(wanted):
        with suppress(FileExistsError):  # another process took the name just now
            return path, path.open("xb")
    raise AssertionError("names are endless")


def _remove(log: Path, made: list[Path]) -> None:
    """Removes a log, and the folders made for it, the innermost first."""
    log.unlink(missing_ok=True)
    for folder in made:
        with suppress(OSError):
            folder.rmdir()


def _wait(
    process: subprocess.Popen[bytes], log: Path, ready: Callable[[], object], deadline: float, seconds: float
) -> None:
    while True:
        code = process.poll()
        if code is not None:
            raise UsageError(f"it ended with code {code}: {_last_lines(log)}; all of it is in {log}")
        try:
            ready()
            return
        except AnswerError as error:
            if time.monotonic() > deadline:
                raise UsageError(
                    f"not ready after {seconds:g} s: {error}; its output: {_last_lines(log)}; all of it is in {log}"
                ) from None
        time.sleep(LOOK_SECONDS)


def end_of(process: subprocess.Popen[bytes], log: Path) -> ServerEnd | None:
    """How the server ended and the last lines of its log; None while it runs."""
    status = process.poll()
    return None if status is None else ServerEnd(status, _last_lines(log), str(log))


def _last_lines(log: Path) -> str:
    try:
        with log.open("rb") as file:
            file.seek(max(0, log.stat().st_size - READ_BYTES))
            lines = file.read().decode(errors="replace").strip().splitlines()[-SHOWN_LINES:]
    except OSError as error:
        return f"no log ({error.strerror})"
    return " / ".join(line.strip()[:200] for line in lines) or "no output"


def _stop(process: subprocess.Popen[bytes]) -> None:
    """Ends the server and what it has started, which are one process group."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGKILL):
        with suppress(ProcessLookupError):
            os.killpg(process.pid, number)
        with suppress(subprocess.TimeoutExpired):
            process.wait(STOP_SECONDS / 2)
            break
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
