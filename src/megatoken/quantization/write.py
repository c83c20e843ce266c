"""Writes a quantized copy of a checkpoint in the layouts of compressed-tensors, tensor by tensor."""

from __future__ import annotations

import json
import math
import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, Literal

import torch
from torch import Tensor

from megatoken.engine.checkpoint import Checkpoint, open_model
from megatoken.engine.config import model_folder
from megatoken.engine.quantized_layouts import MXFP4_BLOCK, NVFP4_BLOCK
from megatoken.engine.schemes.fp8_weight import Fp8Weight
from megatoken.engine.schemes.packed4 import Packed4
from megatoken.engine.tensor_files import DTYPES, StoredTensor, read_json
from megatoken.errors import UsageError
from megatoken.files import storage_error
from megatoken.quantization import encode

Format = Literal["nvfp4", "mxfp4", "fp8", "int4"]
FORMATS: tuple[Format, ...] = ("nvfp4", "mxfp4", "fp8", "int4")
INT4_BLOCKS = (128, 64, 32)
INDEX = "model.safetensors.index.json"
COPIED = (
    *("generation_config.json", "tokenizer*", "special_tokens_map.json", "added_tokens.json"),
    *("vocab.*", "merges.txt"),
)
COPIED_TEXTS = ("chat_template*", "LICENSE*", "NOTICE*", "README*", "model_card*")
MERGED = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"), ("w1", "w3"))
"""Linears with the same input, which engines compute as one; they share their second scale."""

_NAMES = {getattr(torch, torch_name): name for name, (torch_name, _) in DTYPES.items()}


@dataclass(frozen=True, slots=True)
class Quantized:
    """What was written."""

    directory: Path
    form: Format
    block: int | None
    # root of the mean square of the error of a linear over that of its values, by its weight's name
    relative_errors: Mapping[str, float]
    bytes_before: int
    bytes_after: int


def quantize(
    directory: Path, form: Format, out: Path, *, progress: Callable[[int, int], None] | None = None
) -> Quantized:
    """Writes a copy of the checkpoint in ``directory`` to the new folder ``out``, its layers' linears in ``form``.

    Memory is bounded by the largest tensor. The folder appears when it is complete. ``progress`` is called with the
    number of linears done, and of all linears.

    Raises:
        CheckpointError: ``directory`` cannot be loaded.
        UsageError: it is quantized already, its shapes do not suit the format, or ``out`` exists.
        StorageError: ``out`` cannot be written.
    """
    if out.exists():
        raise UsageError(f"{out}: exists already; name a new folder with --out")
    source = open_model(directory)
    if not isinstance(source, Checkpoint) or (source.config.experts is not None and source.config.experts.biases):
        raise UsageError(f"{directory}: only checkpoints with a tensor for each linear can be quantized; name another")
    if source.quantized is not None:
        raise UsageError(f"{directory}: is quantized already; take the edition in bf16, fp16 or fp32")
    block, original = _block(source, form), model_folder(directory)
    with _new_folder(out) as folder:
        writer = _Writer(source, form, block, progress)
        files: dict[Path, list[str]] = {}
        for name, stored in source.tensors.items():
            if not name.endswith("rotary_emb.inv_freq"):
                files.setdefault(stored.path, []).append(name)
        weight_map: dict[str, str] = {}
        for path, names in files.items():
            weight_map |= dict.fromkeys(writer.write(folder / path.name, names), path.name)
        size = sum((folder / path.name).stat().st_size for path in files)
        if [path.name for path in files] != ["model.safetensors"]:
            index = {"metadata": {"total_size": size}, "weight_map": weight_map}
            (folder / INDEX).write_text(json.dumps(index, indent=2))
        config = {**read_json(original / "config.json"), "quantization_config": declaration(form, block)}
        (folder / "config.json").write_text(json.dumps(config, indent=2))
        for pattern in (*COPIED, *COPIED_TEXTS):
            for path in original.glob(pattern):
                if path.is_file():
                    shutil.copyfile(path, folder / path.name)
    before = sum(path.stat().st_size for path in files)
    return Quantized(out, form, block, writer.relative_errors, before, size)


def declaration(form: Format, block: int | None) -> dict[str, Any]:
    """``quantization_config`` of compressed-tensors."""
    weights: dict[str, Any] = {"num_bits": 4, "dynamic": False, "symmetric": True, "group_size": block}
    inputs = None
    match form:
        case "nvfp4":
            weights |= {"type": "float", "strategy": "tensor_group", "scale_dtype": "torch.float8_e4m3fn"}
        case "mxfp4":
            weights |= {"type": "float", "strategy": "group", "scale_dtype": "torch.uint8"}
        case "int4":
            weights |= {"type": "int", "strategy": "group"}
        case "fp8":
            weights |= {"num_bits": 8, "type": "float", "strategy": "channel"}
            inputs = {"num_bits": 8, "type": "float", "strategy": "token", "dynamic": True, "symmetric": True}
    names = {"nvfp4": "nvfp4-pack-quantized", "mxfp4": "mxfp4-pack-quantized", "int4": "pack-quantized"}
    group = {"targets": ["Linear"], "weights": weights, "input_activations": inputs, "output_activations": None}
    return {
        "quant_method": "compressed-tensors",
        "format": names.get(form, "float-quantized"),
        "quantization_status": "compressed",
        "config_groups": {"group_0": {**group, "format": names.get(form, "float-quantized")}},
        "ignore": ["lm_head", "re:.*\\.gate$"],  # the head, and the routers of mixtures
        "kv_cache_scheme": None,
    }


class _Writer:
    """Files of one checkpoint."""

    def __init__(
        self, source: Checkpoint, form: Format, block: int | None, progress: Callable[[int, int], None] | None
    ) -> None:
        self.relative_errors: dict[str, float] = {}
        self._source, self._form, self._block, self._progress = source, form, block, progress
        self._linears = source.config.linear_shapes
        self._largest: dict[str, float] = {}

    def write(self, path: Path, names: list[str]) -> list[str]:
        """One safetensors file with these weights in their new form; returns the names of its tensors."""
        layout: dict[str, tuple[torch.dtype, tuple[int, ...]]] = {}
        for name in names:
            layout |= self._layout(name)
        header, offset = {}, 0
        places: dict[str, int] = {}
        for name, (dtype, shape) in layout.items():
            size = math.prod(shape) * dtype.itemsize
            header[name] = {"dtype": _NAMES[dtype], "shape": shape, "data_offsets": [offset, offset + size]}
            places[name], offset = offset, offset + size
        text = json.dumps({"__metadata__": {"format": "pt"}, **header}).encode()
        text += b" " * (-len(text) % 8)
        with path.open("wb") as file:
            file.write(len(text).to_bytes(8, "little") + text)
            for name in names:
                for part, chunks in self._parts(name):
                    file.seek(8 + len(text) + places[part])
                    _append(file, chunks)
            file.flush()
            os.fsync(file.fileno())
        return [*layout]

    def _layout(self, name: str) -> dict[str, tuple[torch.dtype, tuple[int, ...]]]:
        stored = self._source.tensors[name]
        if name not in self._linears:
            return {name: (getattr(torch, DTYPES[stored.dtype][0]), stored.shape)}
        # Shapes and types of the smallest such weight, made by the encoder itself.
        rows, columns = stored.shape
        one_row = self._tensors(name, self._encode(torch.zeros(1, columns), 0.0, stored))
        by_row = ("weight", "weight_packed", "weight_scale")
        return {
            part: (tensor.dtype, (rows, *tensor.shape[1:]) if part.rpartition(".")[2] in by_row else tensor.shape)
            for part, tensor in one_row.items()
        }

    def _parts(self, name: str) -> Iterator[tuple[str, Iterator[Tensor]]]:
        stored = self._source.tensors[name]
        if name not in self._linears:
            yield name, (chunk for _, chunk in stored.chunks())
            return
        weight_NK = self._source.read(name, torch.float32)
        largest = self._shared_largest(name) if self._form == "nvfp4" else 0.0
        quantized = self._encode(weight_NK, largest, stored)
        error = quantized.decode(torch.float32).sub_(weight_NK).square_().mean() / weight_NK.square_().mean()
        self.relative_errors[name] = math.sqrt(error.item()) if error.isfinite() else 0.0
        if self._progress is not None:
            self._progress(len(self.relative_errors), len(self._linears))
        for part, tensor in self._tensors(name, quantized).items():
            yield part, iter([tensor])

    def _encode(self, weight_NK: Tensor, largest: float, stored: StoredTensor) -> Fp8Weight | Packed4:
        match self._form:
            case "nvfp4":
                return encode.nvfp4(weight_NK, largest)
            case "mxfp4":
                return encode.mxfp4(weight_NK)
            case "int4":
                assert self._block is not None
                return encode.int4(weight_NK, self._block, torch.float16 if stored.dtype == "F16" else torch.bfloat16)
            case "fp8":
                return encode.fp8(weight_NK)

    def _tensors(self, name: str, weight: Fp8Weight | Packed4) -> dict[str, Tensor]:
        module = name.removesuffix(".weight")
        if isinstance(weight, Fp8Weight):
            return {name: weight.values_ND, f"{module}.weight_scale": weight.scale_N1}
        tensors = {f"{module}.weight_packed": weight.codes_NB, f"{module}.weight_scale": weight.scale_NG}
        if self._form == "nvfp4":
            assert weight.second_N1 is not None
            tensors[f"{module}.weight_global_scale"] = (1 / weight.second_N1[0]).float()
        if self._form == "mxfp4":
            tensors[f"{module}.weight_scale"] = weight.scale_NG.view(torch.uint8)
        if self._form == "int4":
            tensors[f"{module}.weight_packed"] = weight.codes_NB.view(torch.int32)
            tensors[f"{module}.weight_shape"] = torch.tensor(self._linears[name])
        return tensors

    def _shared_largest(self, name: str) -> float:
        """Largest magnitude in a linear and in those that an engine merges with it."""
        stem, _, part = name.removesuffix(".weight").rpartition(".")
        parts = next((group for group in MERGED if part in group), (part,))
        names = [f"{stem}.{one}.weight" for one in parts]
        for one in names:
            if one not in self._largest:
                smallest, largest = self._source.read(one, torch.float32).aminmax()
                self._largest[one] = max(-smallest.item(), largest.item())
        return max(self._largest[one] for one in names)


def _append(file: BinaryIO, chunks: Iterator[Tensor]) -> None:
    for chunk in chunks:
        file.write(chunk.contiguous().view(-1).view(torch.uint8).numpy().data)


def _block(source: Checkpoint, form: Format) -> int | None:
    """Columns that share a scale."""
    columns = {shape[1] for shape in source.config.linear_shapes.values()}
    blocks = {"nvfp4": (NVFP4_BLOCK,), "mxfp4": (MXFP4_BLOCK,), "int4": INT4_BLOCKS, "fp8": (1,)}[form]
    fitting = next((block for block in blocks if not any(side % block for side in columns)), None)
    if fitting is None:
        sides = ", ".join(map(str, sorted(columns)))
        raise UsageError(f"{source.config.name}: linears of {sides} columns, {form} needs multiples of {blocks[-1]}")
    return None if form == "fp8" else fitting


@contextmanager
def _new_folder(out: Path) -> Iterator[Path]:
    """A hidden folder that becomes ``out`` when the block ends, and is removed if it fails."""
    folder = out.with_name(f".{out.name}.partial")
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()
        yield folder
        folder.rename(out)
    except BaseException as error:
        shutil.rmtree(folder, ignore_errors=True)
        if isinstance(error, OSError):
            raise storage_error(out, error) from error
        raise
