"""An archive instead of a folder: unpacked to a temporary one, within bounds; bombs and escaping names are refused."""

from __future__ import annotations

import lzma
import os
import struct
import tarfile
import tempfile
import zipfile
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path, PurePosixPath
from typing import IO

from megatoken.errors import UsageError

MOST_BYTES = 8 * 2**30
MOST_MEMBERS = 200_000
MOST_RATIO = 200  # LoadGen's logs shrink to a fiftieth; a bomb to a thousandth and less
SMALL_BYTES = 100 * 2**20  # below this no ratio harms
MOST_DIRECTORY_BYTES = 64 * 2**20
_CHUNK = 2**20
_LONGEST_END = 22 + 2**16 + 20 + 56  # the record of the end with the longest comment, and both of ZIP64


@contextmanager
def unpacked(path: Path) -> Iterator[Path]:
    """A temporary folder with the regular files of a zip or tar archive; removed afterwards.

    Raises UsageError: no archive, a damaged one, one that unpacks to more than the bounds, or one with a name outside.
    """
    with tempfile.TemporaryDirectory(prefix="megatoken-unpacked-") as folder:
        room = _Room(path, Path(folder))
        try:
            if zipfile.is_zipfile(path):
                room.check_count(_zip_members(path))
                with zipfile.ZipFile(path) as archive:
                    for member in archive.infolist():
                        if not member.is_dir() and (member.external_attr >> 28) != 0o12:  # 0o12: a link
                            room.check(member.filename, member.file_size)
                            with archive.open(member) as source:
                                room.write(member.filename, source)
            elif tarfile.is_tarfile(path):
                with tarfile.open(path) as archive:
                    for entry in archive:
                        room.check(entry.name, entry.size if entry.isfile() else 0)
                        content = archive.extractfile(entry) if entry.isfile() else None
                        if content is not None:
                            room.write(entry.name, content)
            else:
                raise UsageError(f"{path}: no folder, zip or tar archive; give the folder that holds the logs")
        except (zipfile.BadZipFile, tarfile.TarError, zlib.error, lzma.LZMAError, EOFError) as error:
            raise UsageError(f"{path}: a damaged archive ({error})") from None
        except (RuntimeError, NotImplementedError) as error:  # encrypted, or an unknown method
            raise UsageError(f"{path}: cannot be unpacked ({error})") from None
        except OSError as error:
            raise UsageError(f"{path}: cannot be unpacked ({error.strerror or error})") from None
        yield Path(folder)


def _zip_members(path: Path) -> int:
    """How many files the directory of a zip archive names, counted before ``zipfile`` makes an object of each.

    By the ZIP specification (APPNOTE 4.3) the directory ends where the record of its end begins, in an archive of many
    files that of ZIP64. Where there is no such record ``zipfile`` refuses the archive itself.
    """
    with path.open("rb") as file:
        size = file.seek(0, os.SEEK_END)
        start = file.seek(max(0, size - _LONGEST_END))
        tail = file.read()
        end = tail.rfind(b"PK\x05\x06")
        if end < 0 or len(tail) < end + 22:
            return 0
        (directory,) = struct.unpack_from("<L", tail, end + 12)
        end64 = tail.rfind(b"PK\x06\x06", 0, end)
        if end64 >= 0 and len(tail) >= end64 + 56:
            (directory,) = struct.unpack_from("<Q", tail, end64 + 40)
            end = end64
        if directory > MOST_DIRECTORY_BYTES:
            return MOST_MEMBERS + 1
        file.seek(max(0, start + end - directory))
        return file.read(directory).count(b"PK\x01\x02")


class _Room:
    """Writes members below a folder and counts what they take."""

    def __init__(self, archive: Path, folder: Path) -> None:
        self._archive, self._folder = archive, folder
        self._members = self._bytes = 0
        packed = archive.stat().st_size
        self._most = min(MOST_BYTES, max(SMALL_BYTES, packed * MOST_RATIO))

    def check_count(self, members: int) -> None:
        """Refuses more files than any submission has."""
        if members > MOST_MEMBERS:
            raise UsageError(f"{self._archive}: holds more than {MOST_MEMBERS:,} files; unpack what is to be audited")

    def check(self, name: str, size: int) -> None:
        """Refuses by what the archive says, before a byte is unpacked."""
        self._members += 1
        self.check_count(self._members)
        if self._bytes + size > self._most:
            self._refuse()
        parts = PurePosixPath(name.replace("\\", "/")).parts
        if name.startswith(("/", "\\")) or ".." in parts or "\0" in name:
            raise UsageError(f"{self._archive}: holds a name outside of it ({name[:80]!r}); not unpacked")

    def write(self, name: str, source: IO[bytes]) -> None:
        """Unpacks one member, counting what really comes out."""
        target = self._folder.joinpath(*PurePosixPath(name.replace("\\", "/")).parts)
        target.parent.mkdir(parents=True, exist_ok=True)
        with target.open("wb") as file:
            while chunk := source.read(_CHUNK):
                self._bytes += len(chunk)
                if self._bytes > self._most:
                    self._refuse()
                file.write(chunk)

    def _refuse(self) -> None:
        size = f"unpacks to more than {self._most // 2**20:,} MiB, which no logs of its size do"
        raise UsageError(f"{self._archive}: {size}; unpack it yourself if you trust it")
