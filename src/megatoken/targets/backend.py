"""Where requests are served: this process, a rack, an endpoint; opened and checked before weights are loaded."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Literal, Protocol

from megatoken.config import RunConfig
from megatoken.engine.checkpoint import Checkpoint, RandomWeights
from megatoken.engine.config import ModelConfig, Precision, model_folder
from megatoken.engine.memory import MemoryPlan
from megatoken.engine.tensor_files import weight_files
from megatoken.engine.tokenizer import Tokenizer
from megatoken.runs.identity import ModelFiles
from megatoken.runs.reasons import Reason, reason
from megatoken.targets import Target


class Reporter(Protocol):
    """Where a backend reports how far it is."""

    def stage(self, text: str) -> None:
        """Shows what is being done now."""

    def waiting(self, text: str, in_flight: int, silent_seconds: float) -> None:
        """Shows what is being done, and for how long requests have had no answer; to be called once a second."""

    def note(self, text: str) -> None:
        """Shows a message that stays on the screen."""


@dataclass(frozen=True, slots=True)
class ServedModel:
    """The model that a backend serves. ``None`` means unknown."""

    name: str  # of the model
    weights: str | None  # ``random, seed N``; None where hashes of ``files`` identify them, or nothing does
    max_running: int  # requests that one replica runs at once
    shape: ModelConfig | None = None  # shape of the model; a backend that takes text need not know it
    memory: MemoryPlan | None = None  # memory plan of one replica
    precision: Precision | None = None  # what our own engine computes in; only another server knows its own
    # what the target takes in ``submit``: token ids, or text and chat messages
    prompts: Literal["token_ids", "text"] = "token_ids"
    # what the target returns: token ids, or text alone; None: the same as ``prompts``
    answers: Literal["token_ids", "text"] | None = None
    content_hash: str | None = None  # of configuration and headers of the checkpoint; random weights have none
    random_weights: bool = False  # whether the weights are random
    files: ModelFiles | None = None  # the checkpoint's, to be hashed; None where the model has none here
    notes: tuple[Reason, ...] = ()  # what a reader of the results must know about the model

    @property
    def max_length(self) -> int | None:
        """Tokens of the longest sequence; None: unknown."""
        if self.memory is not None:
            return self.memory.max_length
        return None if self.shape is None else self.shape.max_positions


class Backend(Protocol):
    """A place that can serve. ``served`` and ``facts`` cost little; ``load`` loads the weights."""

    def served(self) -> ServedModel:
        """The model; after ``load`` with the sizes that the engines took.

        Raises:
            CheckpointError, CapacityError: the model cannot be used, or not on these machines.
        """

    def tokenizer(self) -> Tokenizer | None:
        """The model's tokenizer, read at the first call; None if there is none."""

    def facts(self) -> Mapping[str, Any]:
        """Fields of ``result.json`` that are known before ``load``: the nodes of a rack."""

    def load(self) -> AbstractContextManager[Target]:
        """Loads the model, or connects to it; leaving the context frees what the target holds."""


def model_files(config: RunConfig, source: Checkpoint | RandomWeights) -> ModelFiles | None:
    """The files to hash of the model that our own engine serves; None where it has no folder."""
    folder = model_folder(config.model)
    if not folder.is_dir():
        return None
    return ModelFiles(folder, weight_files(folder) if isinstance(source, Checkpoint) else ())


def engine_model(
    config: RunConfig, source: Checkpoint | RandomWeights, memory: MemoryPlan, files: ModelFiles | None
) -> ServedModel:
    """Our own engine's model with its ``model_files``. Raises CapacityError: no prompt with an answer fits."""
    shape = source.config
    memory.check_answers()
    notes = []
    if memory.max_length == shape.sliding_window:
        notes.append(reason("SLIDING_WINDOW", model=shape.name, max_length=memory.max_length))
    content_hash = source.content_hash if isinstance(source, Checkpoint) else None
    if content_hash is None:
        gpu = config.rack.simulated_gpu
        notes.append(reason("SIMULATED_GPU", gpu=gpu) if gpu else reason("RANDOM_WEIGHTS"))
    return ServedModel(
        name=shape.name,
        weights=None if content_hash is not None else f"random, seed {config.seed}",
        max_running=memory.max_sequences,
        shape=shape,
        memory=memory,
        precision=config.engine_config().precision,
        content_hash=content_hash,
        random_weights=content_hash is None,
        files=files,
        notes=tuple(notes),
    )


def tokenizer_of(model: str) -> Tokenizer | None:
    """The tokenizer of a checkpoint directory; None without one."""
    file = model_folder(model) / "tokenizer.json"
    return Tokenizer(file) if file.is_file() else None
