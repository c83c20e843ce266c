"""The temporary folder of a server: its sockets, and the temporary files of its engine."""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

PREFIX = "megatoken-serve-"
LOCK = "lock"
"""A file that the server holds locked; the kernel unlocks it when the server has ended, however that was."""


@contextmanager
def server_folder() -> Iterator[Path]:
    """A new folder, removed afterwards. Folders of servers that were killed are removed first."""
    _remove_abandoned(Path(tempfile.gettempdir()))
    with tempfile.TemporaryDirectory(prefix=PREFIX) as name:
        folder = Path(name)
        with (folder / "new lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            Path(lock.name).rename(folder / LOCK)  # no other server sees it unlocked
            yield folder


def _remove_abandoned(parent: Path) -> None:
    """Remove this user's folders whose server has ended."""
    for entry in os.scandir(parent):
        if not entry.name.startswith(PREFIX):
            continue
        with suppress(OSError):  # another server removes it, or it is in use
            if entry.is_dir(follow_symlinks=False) and entry.stat(follow_symlinks=False).st_uid == os.geteuid():
                with Path(entry.path, LOCK).open() as lock:
                    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    shutil.rmtree(entry.path)
