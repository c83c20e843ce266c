"""Sources of weights: a Hugging Face directory, checked before anything is loaded, or a seeded generator."""

from __future__ import annotations

import hashlib
import reprlib
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatoken.engine.config import REFERENCE, SHAPES, ModelConfig, end_token_ids, model_folder
from megatoken.engine.hugging_face import model_config
from megatoken.engine.quantized_checkpoint import QuantizedTensors, declared, expected_tensors
from megatoken.engine.quantized_layouts import Expected
from megatoken.engine.quantized_source import QuantizedSource
from megatoken.engine.schemes import LinearScheme
from megatoken.engine.stacked_experts import StackedExperts
from megatoken.engine.tensor_files import StoredTensor, check_finite, find_tensors, one_line_errors, read_json
from megatoken.errors import CheckpointError, ConfigError

if TYPE_CHECKING:  # looking at a checkpoint needs no PyTorch
    import torch

_BLOCK_ELEMENTS = 1 << 20  # of random weights; each block has its own seed, so threads can share a tensor
_DRAW_ELEMENTS = 1 << 15  # the largest operation that torch runs on the calling thread alone


class Checkpoint:
    """Weights of a Hugging Face directory. Made by ``open``; ``read`` may be called from several threads."""

    def __init__(
        self,
        config: ModelConfig,
        tensors: Mapping[str, StoredTensor],
        quantized: QuantizedTensors | StackedExperts | None,
        content_hash: str,
        stacked: StackedExperts | None = None,
    ) -> None:
        self.config = config  # shape of the model; end tokens come from ``generation_config.json`` if that file exists
        self.quantized = quantized  # the linears that are stored in fewer bits, with their scales; None if none are
        self._stacked = stacked
        # SHA-256 over the configuration files and every shard's name, size and header: cheap, but it does not see a
        # change of weights that keeps names and shapes
        self.content_hash = content_hash
        self.tensors = tensors  # what the files hold, by name; without a head that is tied to the embedding

    @classmethod
    def open(cls, directory: Path) -> Checkpoint:
        """Read configuration and safetensors headers, and check presence, shape and dtype of every weight.

        Raises:
            CheckpointError: Something is missing, truncated, damaged, superfluous, of the wrong shape or dtype, or
                unsupported. The message names the file, the key or tensor, and how to fix it.
        """
        config = read_config(directory)
        with one_line_errors(directory):
            declaration = declared(directory, config)
            tensors, content_hash = find_tensors(directory)
            head = tensors.pop("lm_head.weight", None) if config.tied_embeddings else None
            if declaration is None:
                expected = {name: Expected((shape,)) for name, shape in config.tensor_shapes().items()}
            else:
                expected = expected_tensors(declaration, config, tensors)
            stacked = None
            if config.experts is not None and config.experts.biases:
                stacked = StackedExperts(config, tensors)
                expected = {name: one for name, one in expected.items() if not stacked.has(name)} | stacked.expected()
            _check_tensors(expected, tensors, directory)
            if head is not None and not head.equals(tensors["model.embed_tokens.weight"]):
                raise CheckpointError(
                    f"{head.path}: tensor 'lm_head.weight' differs from the embedding it should be tied to; "
                    "set tie_word_embeddings to false in config.json"
                )
            quantized: QuantizedTensors | StackedExperts | None = None
            if stacked is not None and stacked.packed:
                quantized = stacked
            elif declaration is not None:
                quantized = QuantizedTensors(declaration, config, tensors)
        return cls(config, tensors, quantized, content_hash, stacked)

    def keep_packed(self) -> None:
        """Raises ConfigError: no linear is stored in a format that can stay packed on a GPU."""
        groups = self.quantized.groups() if isinstance(self.quantized, QuantizedTensors) else {}
        if all(one.kind != "e2m1" for one in groups.values()):
            raise ConfigError(
                f"packed_weights: {self.config.name} has no weights in NVFP4 or MXFP4, which alone stay packed on a "
                "GPU; leave it on null"
            )

    def read(self, name: str, dtype: torch.dtype, device: torch.device | None = None) -> torch.Tensor:
        """One weight as a fresh tensor that holds no file open.

        Takes a few MB more than its result; on a GPU 64 MiB more there, and buffers of as much in pinned memory.

        Quantized values are multiplied by their scales, in fp32.

        Args:
            name: A key of ``config.tensor_shapes()``.
            dtype: Of the result; values are rounded to it.
            device: Of the result; None: the CPU.

        Raises:
            CheckpointError: The tensor holds NaN or infinity (or does so in ``dtype``), or the file changed.
        """
        import torch

        if self.quantized is not None and name in self.quantized:
            result = self.quantized.stored(name).decode(dtype)
            check_finite(name, self.quantized.directory, result)
            return result if device is None else result.to(device)
        if self._stacked is not None and self._stacked.has(name):
            return self._stacked.plain(name, dtype, device)
        stored = self.tensors[name]
        result = torch.empty(stored.shape, dtype=dtype, device=device)
        with one_line_errors(stored.path):
            for start, chunk in stored.chunks(device):
                rows = slice(start, start + len(chunk))
                part = result.view(-1, chunk.shape[1])[rows]
                part.copy_(chunk)
                check_finite(name, stored.path, part)
        return result


class RandomWeights:
    """Gaussian weights for a shape, to measure speed without a checkpoint.

    A linear weight has standard deviation 1/sqrt(inputs), so that every layer adds to the residual stream at the same
    order and logits have a standard deviation of about 1. Norm weights are around 1 and biases around 0, off by 0.1.
    A value depends on seed, tensor name, position and kind of device only, not on the order of reading or on threads.
    """

    def __init__(self, config: ModelConfig, seed: int = 0) -> None:
        self.config = config  # the shape
        # None: linears are drawn before they are quantised
        self.quantized: RandomFourBit | None = None
        experts = "" if config.experts is None else f" {config.experts}"
        # SHA-256 over shape and seed
        self.content_hash = hashlib.sha256(f"random {seed} {replace(config, name='')}{experts}".encode()).hexdigest()
        self._seed = seed
        self._shapes = config.tensor_shapes()

    def keep_packed(self) -> None:
        """Linears are four-bit from now on."""
        self.quantized = RandomFourBit(self)

    def read(self, name: str, dtype: torch.dtype, device: torch.device | None = None) -> torch.Tensor:
        """One weight as a fresh tensor, drawn on ``device``; on the CPU in float32 by as many threads as torch uses."""
        import torch

        device = device or torch.device("cpu")
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


class RandomFourBit(QuantizedSource):
    """The linears of random weights as NVFP4, as if a checkpoint stored them so."""

    def __init__(self, plain: RandomWeights) -> None:
        super().__init__()
        self._plain = plain

    def read(self, name: str, scheme: LinearScheme, device: torch.device) -> Any:
        """One weight in the scheme's format."""
        from megatoken.engine.schemes.packed4 import draw

        kept = scheme.keep(lambda: draw(self._plain.read(name, scheme.activation_dtype, device)))
        return None if kept is None else kept[0]


def open_model(model: str | Path, *, random_weights: bool = False, seed: int = 0) -> Checkpoint | RandomWeights:
    """A checkpoint directory, the reference model, or random weights for a named shape or a directory's configuration.

    Raises:
        CheckpointError: neither a directory nor a shape, or the directory cannot be loaded.
    """
    if not isinstance(model, str | Path):
        raise CheckpointError(f"expected a directory or a shape as model, got {reprlib.repr(model)}")
    path = model_folder(model)
    try:
        is_directory = path.is_dir()
    except OSError as error:
        raise CheckpointError(f"{model}: {error.strerror}; give another directory") from error
    if str(model) in SHAPES and not is_directory:
        return RandomWeights(SHAPES[str(model)], seed)
    if not is_directory:
        raise CheckpointError(
            f"{model}: no such directory, and not one of the shapes {', '.join(SHAPES)}; "
            f"the model that ships with the package is {REFERENCE}"
        )
    if random_weights:
        return RandomWeights(read_config(path), seed)
    return Checkpoint.open(path)


def read_config(directory: Path) -> ModelConfig:
    """Shape of the model in a Hugging Face directory, from ``config.json`` and ``generation_config.json`` alone.

    Raises:
        CheckpointError: No such directory or file, or a file that cannot be read or asks for something unsupported.
    """
    path = directory / "config.json"
    with one_line_errors(directory):
        if not path.is_file():
            raise CheckpointError(f"{path}: no such file; name the directory of a Hugging Face checkpoint")
        config = model_config(read_json(path), path)
        generation = directory / "generation_config.json"
        if generation.is_file():
            # As in transformers, the file replaces the end tokens of config.json even if it names none.
            ids = end_token_ids(read_json(generation), generation, config.vocabulary_size)
            config = replace(config, end_token_ids=ids)
    return config


def _check_tensors(expected: Mapping[str, Expected], tensors: Mapping[str, StoredTensor], directory: Path) -> None:
    """Compare the tensors in the files with what the configuration implies."""
    for name, wanted in expected.items():
        stored = tensors.get(name)
        if stored is None:
            missing = len(expected.keys() - tensors.keys())
            fix = f"fetch the weights again or fix {wanted.source}"
            if name == "lm_head.weight":  # transformers would draw a random head
                fix += "; if the head is the embedding, set tie_word_embeddings to true there"
            raise CheckpointError(f"{directory}: tensor {name!r} is missing ({missing} of {len(expected)} are); {fix}")
        if stored.dtype not in wanted.dtypes:
            raise CheckpointError(f"{stored.path}: tensor {name!r} has dtype {stored.dtype}; {wanted.if_other_dtype}")
        if stored.shape not in wanted.shapes:
            implied = " or ".join(str(list(shape)) for shape in wanted.shapes)
            raise CheckpointError(
                f"{stored.path}: tensor {name!r} has shape {list(stored.shape)}, {wanted.source} implies {implied}; "
                f"fix {wanted.source} or fetch the file again"
            )
    # Old Llama checkpoints carry the rotary table, which follows from the configuration.
    if extra := [name for name in tensors if name not in expected and not name.endswith("rotary_emb.inv_freq")]:
        raise CheckpointError(
            f"{tensors[extra[0]].path}: tensor {extra[0]!r} has no place in the model ({len(extra)} such); "
            "fix config.json if it describes another model"
        )
