"""Reading and writing single files: bounded reads of regular files and pipes, atomic writes, values as plain JSON."""

from __future__ import annotations

import io
import json
import math
import os
import re
import stat
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from errno import EDQUOT, EFBIG, EINVAL, ENOSPC
from itertools import chain, count
from pathlib import Path
from stat import S_ISREG
from typing import TYPE_CHECKING, Any, NoReturn

from megatoken.errors import StorageError
from megatoken.text import printable, utc_now

if TYPE_CHECKING:
    from _typeshed import WriteableBuffer

SECRET_KEY = re.compile(r"(^|_)(password|passwd|secret|api_?key|authorization|credentials?|token)$", re.IGNORECASE)
URL_LOGIN = re.compile(r"(?<=://)[^/@\s]+@")
SECRET_FLAG = re.compile(r"((?:api[-_]?key|secret|password|token)[= ]+)[^\s=]+", re.IGNORECASE)  # of a command
REDACTED = "***"
OTHER_FOLDER = "choose another folder with --out"
FIXES = {
    ENOSPC: "make room",
    EDQUOT: "make room",
    EFBIG: "raise the limit on the size of files (ulimit -f)",
}


def free_names(wanted: Path) -> Iterator[Path]:
    """``wanted``, then ``wanted-2``, ``wanted-3``..., without those that exist; numbers before ``.log``, ``.json``."""
    suffix = wanted.suffix if wanted.suffix in (".log", ".json") else ""
    name = wanted.name.removesuffix(suffix)
    names = chain([wanted.name], (f"{name}-{number}{suffix}" for number in count(2)))
    return (path for path in map(wanted.with_name, names) if not path.exists())


def write_atomically(path: Path, write: Callable[[Path], object], *, movable: bool = True) -> None:
    """Let ``write`` fill a hidden neighbour of ``path``, flush it to the disk, then rename it over ``path``.

    A link stays a link; its target is replaced. ``movable`` as for ``storage_error``.

    Raises:
        StorageError: ``path`` is a folder, a device or a pipe, or the disk refuses; ``path`` is unchanged.
    """
    real = Path(os.path.realpath(path))
    with suppress(OSError):  # it does not exist yet, or writing will raise
        if not S_ISREG(real.stat().st_mode):  # renaming over /dev/null would break it for every process
            raise StorageError(f"{path}: not a regular file; name another")
    temporary = real.with_name(f".{real.name}.tmp")
    try:
        write(temporary)
        descriptor = os.open(temporary, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
        temporary.replace(real)
    except BaseException as error:
        with suppress(OSError):
            temporary.unlink()
        if isinstance(error, OSError):
            raise storage_error(path, error, movable=movable) from error
        raise


def write_text(path: Path, text: str, *, movable: bool = True) -> None:
    """Replace ``path`` by ``text`` in one step; StorageError when the disk refuses, ``movable`` as for that."""
    write_atomically(path, lambda temporary: temporary.write_text(text, encoding="utf-8"), movable=movable)


def check_writable(folder: Path) -> None:
    """Refuse an output folder before the work whose results would go there.

    Makes and removes a folder in the nearest parent that exists, because permissions alone are not enough to know.

    Raises:
        StorageError: with the system's reason.
    """
    for nearest in (folder, *folder.absolute().parents):
        try:
            Path(tempfile.mkdtemp(prefix=".megatoken-", dir=nearest)).rmdir()
            return
        except (OSError, ValueError) as error:
            if isinstance(error, FileNotFoundError) and not os.path.lexists(nearest):
                continue
            reason = error.strerror if isinstance(error, OSError) else error
            raise StorageError(f"{folder}: cannot write in {nearest} ({reason}); {OTHER_FOLDER}") from error


def storage_error(path: Path, error: OSError, *, movable: bool = True) -> StorageError:
    """The error of the operating system as one line for the user, with the fix.

    Args:
        path: what could not be written.
        error: the system's.
        movable: whether the command has a flag ``--out`` that could name another place for it.
    """
    cause = os.strerror(error.errno) if error.errno else str(error)
    fix = FIXES.get(error.errno or 0)
    if fix is None:
        fix = OTHER_FOLDER if movable else "make it writable"
    elif movable and error.errno != EFBIG:
        fix = f"{fix} or {OTHER_FOLDER}"
    return StorageError(f"{path}: cannot be written ({cause}); {fix}")


def to_json(value: Mapping[str, Any]) -> str:
    """Indented JSON; numbers that are not finite become null."""
    return json.dumps(plain(value), indent=2, ensure_ascii=False, allow_nan=False) + "\n"


def new_document(kind: str, version: int = 1, /, **fields: Any) -> dict[str, Any]:
    """A document made now, in the types JSON knows; ``version`` is that of the kind's form."""
    return {"kind": kind, "schema_version": version, "created_at": utc_now(), **plain(fields)}


def plain(value: Any) -> Any:
    """The same value in the types JSON knows: NaN and infinity as None, paths as text, NumPy scalars as Python's.

    A lone surrogate, from a path that is not UTF-8 or from JSON, is written as an escape, because UTF-8 cannot hold it.
    """
    if isinstance(value, Mapping):
        return {_text(str(key)): plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, str | os.PathLike):
        return _text(str(value))
    if isinstance(value, int):
        return int(value)
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else None
    if hasattr(value, "item"):
        return plain(value.item())
    raise TypeError(f"{type(value).__name__} has no place in a run folder: {value!r}")


def _text(text: str) -> str:
    return text.encode("utf-8", "backslashreplace").decode("utf-8")


def redact(value: Any) -> Any:
    """A plain value without its secrets: texts under keys named like one, logins in URLs, keys in commands."""
    if isinstance(value, dict):
        return {
            key: REDACTED if item and isinstance(item, str) and SECRET_KEY.search(key) else redact(item)
            for key, item in value.items()
        }
    if isinstance(value, list):
        return [redact(item) for item in value]
    if not isinstance(value, str):
        return value
    value = URL_LOGIN.sub(f"{REDACTED}@", value)
    return SECRET_FLAG.sub(rf"\1{REDACTED}", value) if " --" in value else value


_REFUSED = {stat.S_IFDIR: "a directory", stat.S_IFCHR: "a device", stat.S_IFBLK: "a device", stat.S_IFSOCK: "a socket"}


def open_input(path: Path) -> io.BufferedReader:
    """Open ``path`` for reading, without waiting for the writer of a pipe.

    With O_NONBLOCK a pipe can be opened before it has a writer (fifo(7)). If the first read returns nothing, it raises
    OSError.

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
            raise OSError(EINVAL, "no process writes into this pipe")
        self._empty = False
        return count

    def close(self) -> None:
        """Closes the descriptor."""
        self._file.close()
        super().close()


def _is_terminal_of_standard_input(status: os.stat_result) -> bool:
    """Whether it is the terminal of standard input, such as ``/dev/stdin``."""
    return stat.S_ISCHR(status.st_mode) and os.isatty(0) and status.st_rdev == os.fstat(0).st_rdev


MOST_DOCUMENT_BYTES = 16 * 2**20
DEEPEST = 20  # levels of a JSON document


@dataclass(frozen=True, slots=True)
class Damage:
    """What is wrong with a file, and the line, counted from 1; None: the file."""

    line: int | None
    what: str


class UnreadableError(Exception):
    """A file that cannot be read at all; its text says why, without the path."""


def open_regular(path: Path) -> io.BufferedReader:
    """Opens ``path`` for reading if it is a regular file, without waiting for pipes; UnreadableError otherwise."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    except (OSError, ValueError) as error:
        raise UnreadableError(f"cannot be read: {cause(error)}") from None
    try:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise UnreadableError("is not a regular file")
        return io.BufferedReader(io.FileIO(descriptor), 2**18)
    except BaseException:
        os.close(descriptor)
        raise


def read_text(path: Path, most_bytes: int = MOST_DOCUMENT_BYTES) -> tuple[str, list[Damage]]:
    """A small file as text, with what was wrong with its bytes; UnreadableError if it cannot or should not be read."""
    try:
        with open_regular(path) as file:
            data = file.read(most_bytes + 1)
    except OSError as error:
        raise UnreadableError(f"cannot be read: {cause(error)}") from None
    if len(data) > most_bytes:
        raise UnreadableError(f"is larger than {most_bytes // 2**20} MiB, which no such file is")
    if problem := encoding_problem(data):
        raise UnreadableError(problem)
    damages = []
    if data.startswith(b"\xef\xbb\xbf"):
        data = data[3:]
        damages.append(Damage(1, "starts with a byte order mark"))
    try:
        return data.decode("utf-8"), damages
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        return data.decode("utf-8", "replace"), [*damages, Damage(line, "bytes that are not UTF-8")]


def numbered_lines(
    file: io.BufferedReader, most_bytes: int, seen: Callable[[bytes], object] = lambda _: None
) -> Iterator[tuple[int, bytes | None]]:
    """Lines with their numbers from 1, None in place of a line of more than ``most_bytes``; ``seen`` gets all bytes."""
    number = 0
    while line := file.readline(most_bytes):
        number += 1
        seen(line)
        if len(line) < most_bytes or line.endswith(b"\n"):
            yield number, line
            continue
        while (line := file.readline(most_bytes)) and not line.endswith(b"\n"):
            seen(line)
        seen(line)
        yield number, None


def encoding_problem(head: bytes) -> str | None:
    """Why the first bytes of a file cannot be plain text; None if they can."""
    if head.startswith((b"\xff\xfe", b"\xfe\xff")):
        return "is UTF-16; LoadGen and MLPerf's tools write plain UTF-8"
    if head.startswith((b"\x1f\x8b", b"PK\x03\x04", b"BZh", b"\xfd7zXZ", b"\x28\xb5\x2f\xfd")):
        return "is compressed; unpack it first"
    if b"\0" in head[:4096]:
        return "is binary, not text"
    return None


def parse_json(text: str) -> tuple[Any, list[str]]:
    """A JSON value, the first of keys that stand twice, and those keys; UnreadableError if it is not JSON."""
    twice: list[str] = []

    def first_of_each(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        values: dict[str, Any] = {}
        for key, value in pairs:
            if key in values:
                twice.append(key)
            else:
                values[key] = value
        return values

    try:
        return json.loads(text, object_pairs_hook=first_of_each, parse_constant=_refuse_constant), twice
    except RecursionError:
        raise UnreadableError("is nested too deeply") from None
    except ValueError as error:
        raise UnreadableError(f"is not JSON ({error})") from None


def read_json_object(path: Path) -> tuple[Mapping[str, Any], dict[str, int], list[Damage]]:
    """A file with one JSON object: its values, the line of each key, and what is wrong with it."""
    text, damages = read_text(path)
    value, twice = parse_json(text)
    if not isinstance(value, dict):
        raise UnreadableError("is not a JSON object")
    if deeper_than(value, DEEPEST):
        raise UnreadableError(f"is nested more than {DEEPEST} deep")
    lines = key_lines(text)
    return value, lines, [*damages, *(Damage(lines.get(key), f"key {key!r} stands twice") for key in twice)]


def mapping(value: Any) -> Mapping[str, Any]:
    """``value`` if it is a mapping, else an empty one."""
    return value if isinstance(value, Mapping) else {}


def mappings(value: Any) -> list[Mapping[str, Any]]:
    """The mappings in ``value`` if it is a list, else none."""
    return [one for one in value if isinstance(one, Mapping)] if isinstance(value, list) else []


def number_at(values: Any, *keys: str) -> float | None:
    """The number under nested keys; None where there is none, or one above 1e30."""
    for key in keys:
        values = mapping(values).get(key)
    if isinstance(values, bool) or not isinstance(values, int | float) or not abs(values) < 1e30:
        return None
    return values


_HOLDERS = (dict, list, tuple)


def deeper_than(value: Any, levels: int) -> bool:
    """Whether JSON data is nested deeper than that."""
    layer = [value]
    for _ in range(levels):
        held = (item.values() if isinstance(item, dict) else item for item in layer if isinstance(item, _HOLDERS))
        layer = [item for items in held for item in items]
    return any(isinstance(item, _HOLDERS) for item in layer)


def key_lines(text: str) -> dict[str, int]:
    """The first line of each ``"key":`` in a JSON text."""
    lines: dict[str, int] = {}
    for number, line in enumerate(text.split("\n"), 1):
        for key in re.findall(r'"([^"\\]{1,200})"\s*:', line):
            lines.setdefault(key, number)
    return lines


def display(path: str) -> str:
    """A path as printable text: names may hold any bytes."""
    return printable(os.fsencode(path).decode("utf-8", "backslashreplace"))


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not a JSON number")


def cause(error: Exception) -> str:
    """Why a file cannot be read, without the number of the system's error and without the path."""
    return os.strerror(error.errno) if isinstance(error, OSError) and error.errno else str(error)
