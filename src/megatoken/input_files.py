"""Opening what a user names as input: a file, a pipe such as a shell's ``<(command)``, standard input; nothing else."""

from __future__ import annotations

import io
import os
import stat
from errno import EINVAL
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from _typeshed import WriteableBuffer

_REFUSED = {stat.S_IFDIR: "a directory", stat.S_IFCHR: "a device", stat.S_IFBLK: "a device", stat.S_IFSOCK: "a socket"}


def open_input(path: Path) -> io.BufferedReader:
    """Opens ``path`` for reading, without waiting for somebody who may never come.

    With O_NONBLOCK a pipe can be opened before anybody writes into it (fifo(7)). Its first read tells: if it brings
    nothing, it raises OSError.

    Raises:
        OSError: the system's; or ``strerror`` says what it is that cannot be read.
        ValueError: there is a null character in ``path``.
    """
    status = path.stat()
    kind = _REFUSED.get(stat.S_IFMT(status.st_mode))
    if kind is not None and not _is_terminal_of_standard_input(status):
        raise OSError(EINVAL, f"it is {kind}, not a file", str(path))
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    os.set_blocking(descriptor, True)
    return io.BufferedReader(_Pipe(descriptor) if stat.S_ISFIFO(status.st_mode) else io.FileIO(descriptor))


class _Pipe(io.RawIOBase):
    """The reading end of a pipe that must bring something."""

    def __init__(self, descriptor: int) -> None:
        self._file = io.FileIO(descriptor)
        self._empty = True

    def readable(self) -> bool:
        """It is."""
        return True

    def readinto(self, buffer: WriteableBuffer) -> int | None:
        """Reads into ``buffer``; 0 at the end, OSError if that is where it begins."""
        count = self._file.readinto(buffer)
        if not count and self._empty:
            raise OSError(EINVAL, "nobody writes into this pipe")
        self._empty = False
        return count

    def close(self) -> None:
        """Closes the descriptor."""
        self._file.close()
        super().close()


def _is_terminal_of_standard_input(status: os.stat_result) -> bool:
    """Whether somebody may be typing there, as into ``/dev/stdin``."""
    return stat.S_ISCHR(status.st_mode) and os.isatty(0) and status.st_rdev == os.fstat(0).st_rdev
