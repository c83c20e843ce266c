"""Standard output and standard error of the commands, and what happens if they are closed or full."""

from __future__ import annotations

import io
import os
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress

from megatoken.errors import ExitCode, MegatokenError


@contextmanager
def standard_output(kept: str = "", code: ExitCode = ExitCode.ERROR) -> Iterator[None]:
    """Flush standard output at the end of the block.

    Args:
        kept: added to the error message: where the result is stored.
        code: exit code if standard output cannot be written.
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
    """Open /dev/null in place of closed standard streams; otherwise a file opened later would get their output.

    It is open for reading only, so that writing fails as it does on a closed stream.
    """
    while (descriptor := os.open(os.devnull, os.O_RDONLY)) <= 2:
        pass
    os.close(descriptor)
    sys.stdout = sys.stdout or os.fdopen(1, "w")
    sys.stderr = sys.stderr or os.fdopen(2, "w")


def escape_what_cannot_be_encoded() -> None:
    """Print characters that standard output cannot encode, as in a path that is not UTF-8, as escapes."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")


def complain(message: str, code: ExitCode) -> ExitCode:
    """Print one line on standard error; returns ``code``."""
    with suppress(OSError):  # standard error is closed or full
        print(f"megatoken: {' '.join(message.split())}", file=sys.stderr, flush=True)
    return code


def complain_of(damaged: Iterable[str]) -> ExitCode:
    """Name on standard error each input that could not be read while others were; ``USAGE`` if there is any."""
    return max((complain(why, ExitCode.USAGE) for why in damaged), default=ExitCode.OK)


def flush() -> None:
    """Flush both streams; discard what cannot be written."""
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except OSError:  # reported before; the interpreter's own flush at exit must not fail again
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
