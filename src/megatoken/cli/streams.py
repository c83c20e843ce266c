"""Standard output and error of the commands: what leaves the process, and what is said when it cannot."""

from __future__ import annotations

import io
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from megatoken.errors import ExitCode, MegatokenError


@contextmanager
def standard_output(kept: str = "", code: ExitCode = ExitCode.ERROR) -> Iterator[None]:
    """What is printed inside has left the process at the end; if it cannot, the error says what was ``kept``.

    The command ends with ``code`` then.
    """
    also = f"; {kept}" if kept else ""
    try:
        yield
        sys.stdout.flush()
    except KeyboardInterrupt:
        raise KeyboardInterrupt(f"interrupted{also}") from None
    except BrokenPipeError:
        raise
    except OSError as error:
        failure = MegatokenError(f"cannot write to standard output: {error.strerror}{also}")
        failure.exit_code = code
        raise failure from error


def stand_in_for_closed_streams() -> None:
    """Puts /dev/null where a standard stream is closed: a file opened later would get its number and its output.

    It is open for reading only, so that writing fails as on the closed one.
    """
    while (descriptor := os.open(os.devnull, os.O_RDONLY)) <= 2:
        pass
    os.close(descriptor)
    sys.stdout = sys.stdout or os.fdopen(1, "w")
    sys.stderr = sys.stderr or os.fdopen(2, "w")


def escape_what_cannot_be_encoded() -> None:
    """A letter that standard output has no code for, as in a path that is not UTF-8, is printed as an escape."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")


def complain(message: str, code: ExitCode) -> ExitCode:
    """Says on standard error, in one line, why the command ends with ``code``."""
    with suppress(OSError):  # then there is nobody to tell
        print(f"megatoken: {' '.join(message.split())}", file=sys.stderr, flush=True)
    return code


def flush() -> None:
    """Empties the buffers of both streams for good, whatever becomes of their content."""
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except OSError:  # said already; the interpreter's own flush at the end must not fail too
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
