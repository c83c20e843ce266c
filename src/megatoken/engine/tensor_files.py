"""The tensors in a directory's safetensors files: find them, check them, read them in pieces."""

from __future__ import annotations

import hashlib
import io
import json
import math
import os
import stat
from collections import defaultdict
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from megatoken.errors import CheckpointError

if TYPE_CHECKING:  # looking at a checkpoint needs no PyTorch
    import torch

DTYPES = {
    **{"BF16": ("bfloat16", 2), "F16": ("float16", 2), "F32": ("float32", 4)},
    **{"F8_E4M3": ("float8_e4m3fn", 1), "F8_E8M0": ("float8_e8m0fnu", 1)},
    **{"U8": ("uint8", 1), "I32": ("int32", 4), "I64": ("int64", 8)},
}
"""Supported types by safetensors' names: PyTorch's name and bytes of a value."""
FETCH = "fetch the file again"

_INDEX = "model.safetensors.index.json"
_CONFIGURATION_FILES = ("config.json", "generation_config.json", "hf_quant_config.json")
LARGEST_JSON_BYTES = 16 * 2**20  # of a configuration, an index or a header; parsed lists take 20 times as much memory
_MOST_DIMENSIONS = 8
_CHUNK_ELEMENTS = 1 << 20  # small enough to stay in cache while it is read, converted and checked
_AHEAD_BYTES = 1 << 26  # of a chunk for a GPU, of which two are in the CPU's memory
_READERS = 4  # threads that share one such chunk


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A tensor in a file. ``dtype`` is safetensors' name, ``offset_bytes`` counts from the start of the file."""

    path: Path
    dtype: str
    shape: tuple[int, ...]
    offset_bytes: int

    def chunks(self, device: torch.device | None = None) -> Iterator[tuple[int, torch.Tensor]]:
        """Pairs of a first row's number and some rows, [rows, last side], in stored dtype, on ``device`` or the CPU.

        Each chunk overwrites the one before. The file is read, not mapped: mapped pages would count as this process's
        memory.

        Raises:
            CheckpointError: the file became shorter.
        """
        import torch

        width = self.shape[-1] if self.shape else 1
        rows, most = math.prod(self.shape) // width, max(1, _CHUNK_ELEMENTS // width)
        dtype = getattr(torch, DTYPES[self.dtype][0])
        if device is not None and device.type == "cuda" and rows > most:
            yield from self._chunks_ahead(rows, width, dtype, device)
            return
        buffer = torch.empty(min(rows, most), width, dtype=dtype)
        raw = buffer.view(-1).view(torch.uint8).numpy().data
        with open_file(self.path) as file:
            file.seek(self.offset_bytes)
            for start in range(0, rows, most):
                count = min(rows - start, most)
                piece = raw[: count * width * buffer.itemsize]
                if file.readinto(piece) != len(piece):
                    raise CheckpointError(f"{self.path}: became shorter while it was read; {FETCH}")
                yield start, buffer[:count] if device is None else buffer[:count].to(device)

    def _chunks_ahead(
        self, rows: int, width: int, dtype: torch.dtype, device: torch.device
    ) -> Iterator[tuple[int, torch.Tensor]]:
        """The chunks of a large tensor for a GPU: several threads read the next one while one is copied and checked.

        PyTorch gives out a pinned buffer again only after the copies from it have ended.
        """
        import torch

        row_bytes = width * dtype.itemsize
        most = max(1, _AHEAD_BYTES // row_bytes)
        on_device = torch.empty(min(rows, most), width, dtype=dtype, device=device)

        def begin(start: int) -> tuple[torch.Tensor, list[Future[None]]]:
            buffer = torch.empty(min(rows - start, most), width, dtype=dtype, pin_memory=True)
            raw = buffer.view(-1).view(torch.uint8).numpy().data
            offset_bytes, part_bytes = self.offset_bytes + start * row_bytes, -(-len(raw) // _READERS)
            parts = range(0, len(raw), part_bytes)
            return buffer, [pool.submit(fill, raw[at : at + part_bytes], offset_bytes + at) for at in parts]

        def fill(part: memoryview, offset_bytes: int) -> None:
            while part:
                count = os.preadv(file.fileno(), [part], offset_bytes)
                if not count:
                    raise CheckpointError(f"{self.path}: became shorter while it was read; {FETCH}")
                part, offset_bytes = part[count:], offset_bytes + count

        with open_file(self.path) as file, ThreadPoolExecutor(_READERS) as pool:
            following = begin(0)
            for start in range(0, rows, most):
                buffer, reads = following
                if start + most < rows:
                    following = begin(start + most)
                for read in reads:
                    read.result()
                yield start, on_device[: len(buffer)].copy_(buffer, non_blocking=True)

    def item(self, index: int) -> StoredTensor:
        """One of the first side."""
        shape = self.shape[1:]
        offset_bytes = self.offset_bytes + index * math.prod(shape) * DTYPES[self.dtype][1]
        return StoredTensor(self.path, self.dtype, shape, offset_bytes)

    def whole(self, device: torch.device | None = None) -> torch.Tensor:
        """All values, in stored dtype, on ``device`` or the CPU. Raises CheckpointError if the file became shorter."""
        import torch

        result = torch.empty(self.shape, dtype=getattr(torch, DTYPES[self.dtype][0]), device=device)
        for start, chunk in self.chunks(device):
            result.view(-1, chunk.shape[1])[start : start + len(chunk)] = chunk
        return result

    def equals(self, other: StoredTensor) -> bool:
        """Whether dtype, shape and every value are the same."""
        import torch

        if (self.dtype, self.shape) != (other.dtype, other.shape):
            return False
        pairs = zip(self.chunks(), other.chunks(), strict=True)
        return all(torch.equal(mine, theirs) for (_, mine), (_, theirs) in pairs)


def check_finite(name: str, path: Path, values: torch.Tensor) -> None:
    """Raises CheckpointError if a value of a tensor is NaN or infinite."""
    import torch

    wide = values if values.dtype in (torch.float32, torch.bfloat16) else values.float()
    smallest, largest = wide.aminmax()  # both NaN if any element is; 20 times faster than isfinite().all()
    if not (math.isfinite(smallest.item()) and math.isfinite(largest.item())):
        raise CheckpointError(f"{path}: tensor {name!r} holds NaN or infinity as {values.dtype}; {FETCH}")


@contextmanager
def one_line_errors(place: Path) -> Iterator[None]:
    """Turn an error of the operating system about a file into one line for the user."""
    try:
        yield
    except OSError as error:
        raise CheckpointError(
            f"{error.filename or place}: {error.strerror or error}; make it readable or {FETCH}"
        ) from error


def open_file(path: Path) -> io.BufferedReader:
    """Open a file for reading, without waiting for the writer of a pipe.

    Raises:
        CheckpointError: it is a pipe, a device or a folder.
        OSError: the system's.
    """
    file: io.BufferedReader = io.BufferedReader(io.FileIO(os.open(path, os.O_RDONLY | os.O_NONBLOCK)), 2**18)
    if stat.S_ISREG(os.fstat(file.fileno()).st_mode):
        return file
    file.close()
    raise CheckpointError(f"{path}: is not a regular file; {FETCH}")


def read_whole(path: Path, most_bytes: int = LARGEST_JSON_BYTES) -> bytes:
    """The content of a file.

    Raises:
        CheckpointError, OSError: as ``open_file``, or the file is larger than ``most_bytes``.
    """
    with open_file(path) as file:
        content = file.read(most_bytes + 1)
    if len(content) > most_bytes:
        raise CheckpointError(f"{path}: larger than {most_bytes // 2**20} MiB, which no such file is; {FETCH}")
    return content


def read_json(path: Path) -> dict[str, object]:
    """The JSON object in a file.

    Raises:
        CheckpointError, OSError: as ``read_whole``, or the file holds something else.
    """
    return _parse_json(path, read_whole(path))


def find_tensors(directory: Path) -> tuple[dict[str, StoredTensor], str]:
    """All tensors of all files, and a hash over configuration and headers, see ``Checkpoint.content_hash``.

    Raises:
        CheckpointError: a file is missing, truncated, damaged or at odds with the index.
    """
    digest = hashlib.sha256()
    for path in (directory / name for name in _CONFIGURATION_FILES):
        if path.is_file():
            digest.update(_stamp(path, read_whole(path)))
    tensors: dict[str, StoredTensor] = {}
    for file, names in sorted(_placement(directory).items()):
        path = directory / file
        header = _read_header(path)
        digest.update(_stamp(path, header))
        stored = _parse_header(path, header)
        if absent := names - stored.keys():
            raise CheckpointError(f"{path}: tensor {min(absent)!r} is not in it, but the index says so; {FETCH}")
        if double := tensors.keys() & stored.keys():
            raise CheckpointError(f"{path}: tensor {min(double)!r} is also in another shard; {FETCH}")
        tensors |= stored
    return tensors, digest.hexdigest()


def weight_files(directory: Path) -> list[Path]:
    """The files that decide the weights of a checkpoint: configuration, index, and every shard, in this order.

    Raises:
        CheckpointError: there are no weights, or the index is damaged.
    """
    others = [directory / name for name in (*_CONFIGURATION_FILES, _INDEX)]
    return [path for path in others if path.is_file()] + [directory / file for file in sorted(_placement(directory))]


def _parse_json(path: Path, content: bytes) -> dict[str, object]:
    try:
        values = json.loads(content)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path}: damaged JSON ({error}); {FETCH}") from error
    if not isinstance(values, dict):
        raise CheckpointError(f"{path}: expected a JSON object, got {type(values).__name__}; {FETCH}")
    return values


def _placement(directory: Path) -> dict[str, set[str]]:
    """Files with weights, each with the tensors that the index, if there is one, places in it."""
    if (directory / "model.safetensors").is_file():
        return {"model.safetensors": set()}
    index = directory / _INDEX
    if not index.is_file():
        pickles = [path.name for pattern in ("*.bin", "*.pt", "*.pth") for path in sorted(directory.glob(pattern))]
        if pickles:
            raise CheckpointError(
                f"{directory / pickles[0]}: pickled weights can run code and are not read; "
                "convert them with transformers: from_pretrained(...).save_pretrained(...)"
            )
        raise CheckpointError(f"{directory}: neither model.safetensors nor {index.name} is here; fetch the weights")
    weight_map = read_json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(f"{index}: weight_map is missing or not an object of tensor and file names; {FETCH}")
    placement: dict[str, set[str]] = defaultdict(set)
    for name, file in weight_map.items():
        if not isinstance(file, str) or Path(file).name != file or not file.isprintable():
            raise CheckpointError(f"{index}: tensor {name!r} is placed in {file!r}, which is no file name; {FETCH}")
        placement[file].add(name)
    return placement


def _read_header(path: Path) -> bytes:
    with open_file(path) as file:
        available = os.fstat(file.fileno()).st_size - 8
        length = int.from_bytes(file.read(8), "little")
        if length > available:
            raise CheckpointError(
                f"{path}: no complete header: truncated, not safetensors or a Git LFS pointer; {FETCH}"
            )
        if length > LARGEST_JSON_BYTES:
            raise CheckpointError(
                f"{path}: a header of {length:,} bytes; at most {LARGEST_JSON_BYTES // 2**20} MiB are read; {FETCH}"
            )
        return file.read(length)


def _parse_header(path: Path, header: bytes) -> dict[str, StoredTensor]:
    """Tensors of one file, which must fill it without gap or overlap."""
    data_start = 8 + len(header)
    tensors: dict[str, StoredTensor] = {}
    ranges: list[tuple[int, int, str]] = []
    for name, entry in _parse_json(path, header).items():
        if name == "__metadata__":
            continue
        match entry:
            case {"dtype": str(dtype), "shape": [*shape], "data_offsets": [begin, end]} if len(
                shape
            ) <= _MOST_DIMENSIONS and all(
                type(number) is int and 0 <= number < 2**63 for number in (*shape, begin, end)
            ):
                if dtype in DTYPES and end - begin != math.prod(shape) * DTYPES[dtype][1]:
                    raise CheckpointError(
                        f"{path}: tensor {name!r}, {dtype} of shape {shape}, spans {end - begin} bytes; {FETCH}"
                    )
                tensors[name] = StoredTensor(path, dtype, tuple(shape), data_start + begin)
                ranges.append((begin, end, name))
            case _:
                raise CheckpointError(f"{path}: damaged header entry for tensor {name!r}; {FETCH}")
    position = 0
    for begin, end, name in sorted(ranges):
        if begin != position or end < begin:
            raise CheckpointError(f"{path}: tensor {name!r} does not begin where the one before it ends; {FETCH}")
        position = end
    size = path.stat().st_size
    if size != data_start + position:
        state = "truncated" if size < data_start + position else "too long"
        raise CheckpointError(f"{path}: {state}: {size} bytes, its header describes {data_start + position}; {FETCH}")
    return tensors


def _stamp(path: Path, content: bytes) -> bytes:
    return f"{path.name} {path.stat().st_size} {len(content)}\n".encode() + content
