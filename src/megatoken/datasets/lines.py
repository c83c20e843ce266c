"""Text files line by line, each with its place for errors."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

from megatoken.errors import DatasetError
from megatoken.files import open_input

_BYTE_ORDER_MARK = b"\xef\xbb\xbf"
_GZIP = b"\x1f\x8b"


def read_lines(path: Path, update: Callable[[bytes], None]) -> Iterator[tuple[str, bytes]]:
    """Yields (place for errors, line); ``update`` sees every byte of the file."""
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
    """Raises DatasetError if a file that begins so is compressed."""
    if beginning.startswith(_GZIP):
        raise DatasetError(f"{path}: compressed; unpack it with gunzip")


def unreadable(path: Path, error: OSError | ValueError) -> DatasetError:
    """The error for a file that the system does not give."""
    reason = error.strerror if isinstance(error, OSError) else error
    return DatasetError(f"{path}: cannot be read, {reason}; give the path of a data file")
