"""Read text files line by line, each with its place for error messages."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

from megatoken.errors import DatasetError
from megatoken.files import open_input

_BYTE_ORDER_MARK = b"\xef\xbb\xbf"
_GZIP = b"\x1f\x8b"


def read_lines(path: Path, update: Callable[[bytes], None]) -> Iterator[tuple[str, bytes]]:
    """Yield (place for error messages, line); ``update`` gets every byte of the file."""
    try:
        with open_input(path) as file:
            for number, line in enumerate(file, 1):
                if number == 1:
                    refuse_compressed(path, line)
                update(line)
                yield f"{path}, line {number}", line.removeprefix(_BYTE_ORDER_MARK) if number == 1 else line
    except (OSError, ValueError) as error:
        raise unreadable(path, error) from error


def refuse_compressed(path: Path, beginning: bytes) -> None:
    """Raise DatasetError if a file with this beginning is compressed."""
    if beginning.startswith(_GZIP):
        raise DatasetError(f"{path}: compressed; unpack it with gunzip")


def unreadable(path: Path, error: OSError | ValueError) -> DatasetError:
    """The error for a file that the system cannot read."""
    reason = error.strerror if isinstance(error, OSError) else error
    return DatasetError(f"{path}: cannot be read: {reason}; give the path of a data file")
