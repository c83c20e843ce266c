"""Where weights come from: a Hugging Face directory, checked whole before anything is loaded, or a seeded generator."""

from __future__ import annotations

import hashlib
import json
import math
import os
from collections import defaultdict
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from megatoken.engine.config import ModelConfig, end_token_ids
from megatoken.errors import CheckpointError

CPU = torch.device("cpu")
_DTYPES = {"BF16": torch.bfloat16, "F16": torch.float16, "F32": torch.float32}
_LARGEST_HEADER_BYTES = 100_000_000  # the safetensors format's own limit
_CHUNK_ELEMENTS = 1 << 20  # small enough to stay in cache while it is read, converted and checked

_FETCH = "fetch the file again"
_UNQUANTIZED = "only bf16, fp16 and fp32 weights are read: use that edition of the model"

_BLOCK_ELEMENTS = 1 << 20  # of random weights; each block has its own seed, so threads can share a tensor
_DRAW_ELEMENTS = 1 << 15  # the largest operation that torch runs on the calling thread alone


class Checkpoint:
    """Weights of a Hugging Face directory. Made by ``open``; ``read`` may be called from several threads.

    Attributes:
        config: Shape of the model; its end tokens are those of ``generation_config.json`` where there is one.
        content_hash: SHA-256 over the configuration files and every shard's name, size and header: cheap, but blind
            to a change of weights that keeps their names and shapes.
    """

    def __init__(self, config: ModelConfig, tensors: dict[str, _StoredTensor], content_hash: str) -> None:
        self.config = config
        self.content_hash = content_hash
        self._tensors = tensors

    @classmethod
    def open(cls, directory: Path) -> Checkpoint:
        """Read configuration and safetensors headers, and check that every weight is there and as it should be.

        Raises:
            CheckpointError: Something is missing, truncated, damaged, superfluous, of the wrong shape or dtype, or
                unsupported. The message names the file, the key or tensor, and the mend.
        """
        config = read_config(directory)
        with _one_line_errors(directory):
            tensors, content_hash = _gather(directory)
            head = tensors.pop("lm_head.weight", None) if config.tied_embeddings else None
            _check_tensors(config, tensors, directory)
            if head is not None and not _equal(head, tensors["model.embed_tokens.weight"]):
                raise CheckpointError(
                    f"{head.path}: tensor 'lm_head.weight' differs from the embedding it should be tied to; "
                    "set tie_word_embeddings to false in config.json"
                )
        return cls(config, tensors, content_hash)

    def read(self, name: str, dtype: torch.dtype, device: torch.device = CPU) -> torch.Tensor:
        """One weight as a fresh tensor that holds no file open; takes a few MB more than its result.

        Args:
            name: A key of ``config.tensor_shapes()``.
            dtype: Of the result; values are rounded to it.
            device: Of the result.

        Raises:
            CheckpointError: The tensor holds NaN or infinity (or does so in ``dtype``), or the file changed.
        """
        stored = self._tensors[name]
        result = torch.empty(stored.shape, dtype=dtype)
        with _one_line_errors(stored.path):
            for part, chunk in zip(torch.split(result.view(-1), _CHUNK_ELEMENTS), _chunks(stored), strict=True):
                part.copy_(chunk)
                smallest, largest = part.aminmax()  # both NaN if any element is; 20 times faster than isfinite().all()
                if not (math.isfinite(smallest.item()) and math.isfinite(largest.item())):
                    raise CheckpointError(f"{stored.path}: tensor {name!r} holds NaN or infinity as {dtype}; {_FETCH}")
        return result.to(device)


class RandomWeights:
    """Gaussian weights for a shape, in place of a checkpoint: for speed, any weights do.

    A linear weight has standard deviation 1/sqrt(inputs), so that every layer adds to the residual stream at the same
    order and logits have a standard deviation of about 1. Norm weights are around 1 and biases around 0, off by 0.1.
    A value depends on seed, tensor name, position and kind of device alone, not on the order of reading or on threads.

    Attributes:
        config: The shape.
        content_hash: SHA-256 over shape and seed.
    """

    def __init__(self, config: ModelConfig, seed: int = 0) -> None:
        self.config = config
        self.content_hash = hashlib.sha256(f"random {seed} {replace(config, name='')}".encode()).hexdigest()
        self._seed = seed
        self._shapes = config.tensor_shapes()

    def read(self, name: str, dtype: torch.dtype, device: torch.device = CPU) -> torch.Tensor:
        """One weight as a fresh tensor, drawn on ``device``; on the CPU in float32 by as many threads as torch uses."""
        shape = self._shapes[name]
        mean = 1.0 if name.endswith("norm.weight") else 0.0
        deviation = shape[1] ** -0.5 if len(shape) == 2 else 0.1
        result = torch.empty(shape, dtype=dtype, device=device)

        def generator(index: int) -> torch.Generator:
            seed = hashlib.sha256(f"{self._seed} {name} {index}".encode()).digest()
            return torch.Generator(device).manual_seed(int.from_bytes(seed[:4], "little"))

        if device.type == "cuda":
            return result.normal_(mean, deviation, generator=generator(0))

        def fill(index: int, block: torch.Tensor) -> None:
            of_block = generator(index)
            for part in torch.split(block, _DRAW_ELEMENTS):
                part.copy_(torch.empty(part.shape).normal_(mean, deviation, generator=of_block))

        with ThreadPoolExecutor(torch.get_num_threads()) as pool:
            blocks = torch.split(result.view(-1), _BLOCK_ELEMENTS)
            list(pool.map(fill, range(len(blocks)), blocks))
        return result


def read_config(directory: Path) -> ModelConfig:
    """Shape of the model in a Hugging Face directory, from ``config.json`` and ``generation_config.json`` alone.

    Raises:
        CheckpointError: No such directory or file, or a file that cannot be read or asks for something unsupported.
    """
    path = directory / "config.json"
    with _one_line_errors(directory):
        if not path.is_file():
            raise CheckpointError(f"{path}: no such file; name the directory of a Hugging Face checkpoint")
        config = ModelConfig.from_hugging_face(_parse_json(path, path.read_bytes()), path)
        if (directory / "hf_quant_config.json").is_file():
            raise CheckpointError(f"{directory / 'hf_quant_config.json'}: quantized; {_UNQUANTIZED}")
        generation = directory / "generation_config.json"
        if generation.is_file():
            # The file replaces what config.json says, also by saying nothing: transformers reads it so.
            ends = end_token_ids(_parse_json(generation, generation.read_bytes()), generation)
            config = replace(config, end_token_ids=ends)
    return config


@dataclass(frozen=True, slots=True)
class _StoredTensor:
    path: Path
    dtype: str  # safetensors' name
    shape: tuple[int, ...]
    offset_bytes: int  # from the start of the file


@contextmanager
def _one_line_errors(place: Path) -> Iterator[None]:
    """Turn what the operating system says about a file into the one line a user sees."""
    try:
        yield
    except OSError as error:
        raise CheckpointError(
            f"{error.filename or place}: {error.strerror or error}; make it readable or {_FETCH}"
        ) from error


def _parse_json(path: Path, content: bytes) -> dict[str, object]:
    try:
        values = json.loads(content)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path}: damaged JSON ({error}); {_FETCH}") from error
    if not isinstance(values, dict):
        raise CheckpointError(f"{path}: expected a JSON object, found {type(values).__name__}; {_FETCH}")
    return values


def _gather(directory: Path) -> tuple[dict[str, _StoredTensor], str]:
    """All tensors of all shards, and the checkpoint's content hash."""
    digest = hashlib.sha256()
    for path in (directory / "config.json", directory / "generation_config.json"):
        if path.is_file():
            digest.update(_stamp(path, path.read_bytes()))
    tensors: dict[str, _StoredTensor] = {}
    for file, names in sorted(_placement(directory).items()):
        path = directory / file
        header = _read_header(path)
        digest.update(_stamp(path, header))
        stored = _parse_header(path, header)
        if absent := names - stored.keys():
            raise CheckpointError(f"{path}: tensor {min(absent)!r} is not in it, but the index says so; {_FETCH}")
        if double := tensors.keys() & stored.keys():
            raise CheckpointError(f"{path}: tensor {min(double)!r} is also in another shard; {_FETCH}")
        tensors |= stored
    return tensors, digest.hexdigest()


def _placement(directory: Path) -> dict[str, set[str]]:
    """Files that hold the weights, each with the tensors that the index, if there is one, says it holds."""
    if (directory / "model.safetensors").is_file():
        return {"model.safetensors": set()}
    index = directory / "model.safetensors.index.json"
    if not index.is_file():
        pickles = [path.name for pattern in ("*.bin", "*.pt", "*.pth") for path in sorted(directory.glob(pattern))]
        if pickles:
            raise CheckpointError(
                f"{directory / pickles[0]}: pickled weights can run code and are not read; "
                "convert them with transformers: from_pretrained(...).save_pretrained(...)"
            )
        raise CheckpointError(f"{directory}: neither model.safetensors nor {index.name} is here; fetch the weights")
    weight_map = _parse_json(index, index.read_bytes()).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(f"{index}: weight_map is missing or not an object of tensor and file names; {_FETCH}")
    placement: dict[str, set[str]] = defaultdict(set)
    for name, file in weight_map.items():
        if not isinstance(file, str) or Path(file).name != file or not file.isprintable():
            raise CheckpointError(f"{index}: tensor {name!r} is placed in {file!r}, which is no file name; {_FETCH}")
        placement[file].add(name)
    return placement


def _read_header(path: Path) -> bytes:
    with path.open("rb") as file:
        available = os.fstat(file.fileno()).st_size - 8
        length = int.from_bytes(file.read(8), "little")
        if length > min(available, _LARGEST_HEADER_BYTES):
            raise CheckpointError(
                f"{path}: no complete header: truncated, not safetensors or a Git LFS pointer; {_FETCH}"
            )
        return file.read(length)


def _parse_header(path: Path, header: bytes) -> dict[str, _StoredTensor]:
    """Tensors of one file, checked to fill it without gap or overlap, as the format demands."""
    data_start = 8 + len(header)
    tensors: dict[str, _StoredTensor] = {}
    ranges: list[tuple[int, int, str]] = []
    for name, entry in _parse_json(path, header).items():
        if name == "__metadata__":
            continue
        match entry:
            case {"dtype": str(dtype), "shape": [*shape], "data_offsets": [begin, end]} if all(
                type(number) is int and 0 <= number < 2**63 for number in (*shape, begin, end)
            ):
                if dtype in _DTYPES and end - begin != math.prod(shape) * _DTYPES[dtype].itemsize:
                    raise CheckpointError(
                        f"{path}: tensor {name!r}, {dtype} of shape {shape}, spans {end - begin} bytes; {_FETCH}"
                    )
                tensors[name] = _StoredTensor(path, dtype, tuple(shape), data_start + begin)
                ranges.append((begin, end, name))
            case _:
                raise CheckpointError(f"{path}: damaged header entry for tensor {name!r}; {_FETCH}")
    position = 0
    for begin, end, name in sorted(ranges):
        if begin != position or end < begin:
            raise CheckpointError(f"{path}: tensor {name!r} does not begin where the one before it ends; {_FETCH}")
        position = end
    size = path.stat().st_size
    if size != data_start + position:
        state = "truncated" if size < data_start + position else "too long"
        raise CheckpointError(f"{path}: {state}: {size} bytes, its header describes {data_start + position}; {_FETCH}")
    return tensors


def _check_tensors(config: ModelConfig, tensors: dict[str, _StoredTensor], directory: Path) -> None:
    """Hold what the files have against what the configuration asks for."""
    expected = config.tensor_shapes()
    if missing := [name for name in expected if name not in tensors]:
        raise CheckpointError(
            f"{directory}: tensor {missing[0]!r} is missing ({len(missing)} of {len(expected)} are); "
            "fetch the weights again or mend config.json"
        )
    for name, shape in expected.items():
        stored = tensors[name]
        if stored.dtype not in _DTYPES:
            raise CheckpointError(f"{stored.path}: tensor {name!r} has dtype {stored.dtype}; {_UNQUANTIZED}")
        if stored.shape != shape:
            raise CheckpointError(
                f"{stored.path}: tensor {name!r} has shape {list(stored.shape)}, config.json implies {list(shape)}; "
                "mend config.json or fetch the file again"
            )
    # Old Llama checkpoints carry the rotary table, which follows from the configuration.
    if extra := [name for name in tensors if name not in expected and not name.endswith("rotary_emb.inv_freq")]:
        raise CheckpointError(
            f"{tensors[extra[0]].path}: tensor {extra[0]!r} has no place in the model ({len(extra)} such); "
            "mend config.json if it describes another model"
        )


def _chunks(stored: _StoredTensor) -> Iterator[torch.Tensor]:
    """The tensor piece by piece, in file order and stored dtype; each piece overwrites the one before.

    Plain reads instead of a mapping: pages of a mapped file count as this process's memory.
    """
    elements = math.prod(stored.shape)
    buffer = torch.empty(min(elements, _CHUNK_ELEMENTS), dtype=_DTYPES[stored.dtype])
    raw = buffer.view(torch.uint8).numpy().data
    with stored.path.open("rb") as file:
        file.seek(stored.offset_bytes)
        for start in range(0, elements, _CHUNK_ELEMENTS):
            count = min(elements - start, _CHUNK_ELEMENTS)
            piece = raw[: count * buffer.itemsize]
            if file.readinto(piece) != len(piece):
                raise CheckpointError(f"{stored.path}: became shorter while it was read; {_FETCH}")
            yield buffer[:count]


def _equal(left: _StoredTensor, right: _StoredTensor) -> bool:
    if (left.dtype, left.shape) != (right.dtype, right.shape):
        return False
    return all(torch.equal(*pair) for pair in zip(_chunks(left), _chunks(right), strict=True))


def _stamp(path: Path, content: bytes) -> bytes:
    return f"{path.name} {path.stat().st_size} {len(content)}\n".encode() + content
