"""What a run ran, exactly: SHA-256 of every file of a model, read while the weights load.

The hashes of files are kept in the user's cache folder. A file is read again unless its path, size, inode and both
times of change are those of its entry; a change that keeps the size and sets the older time back still moves the newer
one, which no program can set. A file that was changed within the last seconds gets no entry, because a further change
could leave its times as they are.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from threading import Event, Thread
from typing import Any

from megatoken.errors import CheckpointError
from megatoken.files import write_text
from megatoken.processes import usable_cores

TOKENIZER_FILES = (
    *("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json"),
    *("tokenizer.model", "vocab.json", "merges.txt"),
)
TEMPLATE_FILES = ("chat_template.jinja", "chat_template.json")
CACHE = "file_hashes.json"
BLOCK_BYTES = 1 << 22
MOST_THREADS = 16
SETTLED_SECONDS = 3.0  # since the last change of a file, before its hash is kept
MOST_ENTRIES = 4096


@dataclass(frozen=True, slots=True)
class FileHash:
    """A file of the model by its name, with its size in bytes and its SHA-256."""

    name: str
    bytes: int
    sha256: str


def joint_hash(files: Mapping[str, str]) -> str | None:
    """SHA-256 over several files, given theirs by name; None of no file."""
    lines = [f"{sha256}  {name}\n" for name, sha256 in sorted(files.items())]
    return hashlib.sha256("".join(lines).encode()).hexdigest() if lines else None


class ModelFiles:
    """The files of a model's folder, hashed by threads of their own from ``start`` on.

    The hash of several files is SHA-256 over their lines ``SHA-256  name``, as ``sha256sum`` prints them, by name.
    """

    def __init__(self, folder: Path, weights: Sequence[Path]) -> None:
        """Takes the folder of a checkpoint and its files of weights and configuration; none where those are random."""
        self._folder = folder
        self._weights = [path.name for path in weights]
        self._thread: Thread | None = None
        self._stopped = Event()
        self._found: dict[str, FileHash] = {}
        self._whole = False
        self._error: OSError | None = None

    def start(self) -> None:
        """Begin to read, unless begun; what was stopped before all was read begins again."""
        if self._thread is not None and self._stopped.is_set() and not self._whole:
            self._thread.join()
            self._thread = None
        if self._thread is None:
            self._stopped.clear()
            self._error = None
            self._thread = Thread(target=self._run, name="file-hashes", daemon=True)
            self._thread.start()

    def stop(self) -> None:
        """End the threads soon: the hashes are no longer needed."""
        self._stopped.set()

    @property
    def done(self) -> bool:
        """Whether ``identity`` would answer at once."""
        return self._thread is not None and not self._thread.is_alive()

    def identity(self) -> dict[str, Any]:
        """Hashes of weights, tokenizer and chat template, and of each file; waits until all are read.

        Raises:
            CheckpointError: a file cannot be read.
        """
        self.start()
        assert self._thread is not None
        self._thread.join()
        if self._error is not None:
            where = self._error.filename or self._folder
            raise CheckpointError(f"{where}: {self._error.strerror}; fetch the file again") from self._error
        return {
            "weights_sha256": self._joint(self._weights),
            "tokenizer_sha256": self._joint(TOKENIZER_FILES),
            "chat_template_sha256": self._joint(TEMPLATE_FILES),
            "files": [
                {"name": one.name, "bytes": one.bytes, "sha256": one.sha256}
                for one in sorted(self._found.values(), key=lambda one: one.name)
            ],
        }

    def _joint(self, names: Iterable[str]) -> str | None:
        return joint_hash({name: one.sha256 for name in names if (one := self._found.get(name))})

    def _run(self) -> None:
        others = [name for name in (*TOKENIZER_FILES, *TEMPLATE_FILES) if (self._folder / name).is_file()]
        paths = [self._folder / name for name in dict.fromkeys((*self._weights, *others))]
        try:
            self._found = {one.name: one for one in file_hashes(paths, self._stopped)}
            self._whole = not self._stopped.is_set()
        except OSError as error:
            self._error = error


def file_hashes(paths: Sequence[Path], stopped: Event | None = None) -> list[FileHash]:
    """The hashes of files, each from the cache if the file has not changed since.

    Processes of one machine take turns, so that each file is read once.

    Raises:
        OSError: a file cannot be read.
    """
    folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "megatoken"
    with _alone(folder):
        cache = _read_cache(folder / CACHE)
        known = {path: _known(cache, path) for path in paths}
        unread = [path for path, found in known.items() if found is None]
        if not unread:
            return [found for found in known.values() if found is not None]
        with ThreadPoolExecutor(min(MOST_THREADS, max(1, usable_cores() // 2))) as pool:
            read = dict(zip(unread, pool.map(lambda path: _hash(path, stopped), unread), strict=True))
        found = {path: read[path][0] if path in read else known[path] for path in paths}
        settled = {str(path.absolute()): entry for path, (_, entry) in read.items() if entry is not None}
        if settled:
            kept = dict(list((cache | settled).items())[-MOST_ENTRIES:])
            with suppress(Exception):  # the hashes are found again next time
                write_text(folder / CACHE, json.dumps(kept))
        return [one for one in found.values() if one is not None]


def _hash(path: Path, stopped: Event | None) -> tuple[FileHash, list[Any] | None]:
    """A file's hash, and its entry of the cache if the file has been the same for a while."""
    before = _stamp(path)
    digest = hashlib.sha256()
    buffer = memoryview(bytearray(BLOCK_BYTES))
    with path.open("rb", buffering=0) as file:
        while (count := file.readinto(buffer)) and not (stopped is not None and stopped.is_set()):
            digest.update(buffer[:count])
    settled = time.time_ns() - max(before[2], before[3]) > SETTLED_SECONDS * 1e9 and before == _stamp(path)
    whole = stopped is None or not stopped.is_set()
    entry = [*before, digest.hexdigest()] if settled and whole else None
    return FileHash(path.name, before[0], digest.hexdigest()), entry


def _stamp(path: Path) -> list[int]:
    status = path.stat()
    return [status.st_size, status.st_ino, status.st_mtime_ns, status.st_ctime_ns]


def _known(cache: dict[str, Any], path: Path) -> FileHash | None:
    entry = cache.get(str(path.absolute()))
    if not isinstance(entry, list) or len(entry) != 5 or entry[:4] != _stamp(path):
        return None
    return FileHash(path.name, entry[0], str(entry[4]))


def _read_cache(file: Path) -> dict[str, Any]:
    try:
        entries = json.loads(file.read_bytes())
    except (OSError, ValueError):
        return {}
    return entries if isinstance(entries, dict) else {}


@contextmanager
def _alone(folder: Path) -> Iterator[None]:
    """Holds the lock of the cache; without a folder to write in, no lock is needed, since nothing is kept."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(folder / f"{CACHE}.lock", os.O_RDWR | os.O_CREAT, 0o600)
    except OSError:
        yield
        return
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)
