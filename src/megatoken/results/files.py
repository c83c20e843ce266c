"""Writing single files so that a reader never sees half of one, and values so that JSON and YAML can hold them."""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Callable, Mapping
from contextlib import suppress
from errno import EDQUOT, EFBIG, ENOSPC
from pathlib import Path
from stat import S_ISREG
from typing import Any

from megatoken.errors import StorageError

SECRET_KEY = re.compile(r"(^|_)(password|passwd|secret|api_?key|authorization|credentials?|token)$", re.IGNORECASE)
URL_LOGIN = re.compile(r"(?<=://)[^/@\s]+@")
REDACTED = "***"
OTHER_FOLDER = "choose another folder with --out"
MENDS = {
    ENOSPC: "make room",
    EDQUOT: "make room",
    EFBIG: "raise the limit on the size of files (ulimit -f)",
}


def write_atomically(path: Path, write: Callable[[Path], object], *, movable: bool = True) -> None:
    """Let ``write`` fill a hidden neighbour of ``path``, flush it to the disk, then rename it over ``path``.

    A link stays one; what it names is replaced. ``movable`` as for ``storage_error``.

    Raises:
        StorageError: ``path`` is a folder, a device or a pipe, or the disk refuses; ``path`` is as it was.
    """
    real = Path(os.path.realpath(path))
    with suppress(OSError):  # there is none yet, or writing will tell
        if not S_ISREG(real.stat().st_mode):  # a device such as /dev/null would be renamed over, for all who use it
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


def storage_error(path: Path, error: OSError, *, movable: bool = True) -> StorageError:
    """One line for the user out of what the operating system said, with the mend that fits it.

    Args:
        path: what could not be written.
        error: the system's.
        movable: whether the command has a flag ``--out`` that could name another place for it.
    """
    cause = os.strerror(error.errno) if error.errno else str(error)
    mend = MENDS.get(error.errno or 0)
    if mend is None:
        mend = OTHER_FOLDER if movable else "see to it that it can be"
    elif movable and error.errno != EFBIG:
        mend = f"{mend} or {OTHER_FOLDER}"
    return StorageError(f"{path}: cannot be written ({cause}); {mend}")


def to_json(value: Mapping[str, Any]) -> str:
    """Indented JSON; numbers that are not finite become null."""
    return json.dumps(plain(value), indent=2, ensure_ascii=False, allow_nan=False) + "\n"


def plain(value: Any) -> Any:
    """The same value in the types JSON knows: NaN and infinity as None, paths as text, NumPy scalars as Python's.

    Half of a surrogate pair, as Python makes of a path that is not UTF-8 and somebody's JSON may hold, is written as an
    escape: UTF-8 has no code for it.
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
    """A plain value without its secrets: texts under keys named like one, and logins inside URLs."""
    if isinstance(value, dict):
        return {
            key: REDACTED if item and isinstance(item, str) and SECRET_KEY.search(key) else redact(item)
            for key, item in value.items()
        }
    if isinstance(value, list):
        return [redact(item) for item in value]
    return URL_LOGIN.sub(f"{REDACTED}@", value) if isinstance(value, str) else value
