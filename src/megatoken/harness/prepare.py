"""From a configuration to a model's shape, its memory plan and a checked data set, before any weight is allocated."""

from __future__ import annotations

import os
import tempfile
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

import yaml

from megatoken.accuracy.gate import SHARE, AccuracyGate, ComplianceGate, Gate, reference_gate
from megatoken.config import KEYS, RoundName, RunConfig
from megatoken.datasets.lengths import load_lengths
from megatoken.datasets.mlperf import load_mlperf
from megatoken.datasets.prompts import load_prompts
from megatoken.datasets.references import HELD_OUT
from megatoken.datasets.requests import Dataset
from megatoken.datasets.tables import SUFFIXES
from megatoken.engine.checkpoint import Checkpoint, RandomWeights, open_model
from megatoken.engine.config import REFERENCE, ModelConfig, model_folder
from megatoken.engine.memory import MemoryPlan
from megatoken.engine.tokenizer import Tokenizer
from megatoken.errors import CapacityError, StorageError, UsageError
from megatoken.hardware.inventory import cpu
from megatoken.harness.loadgen_plan import (
    OFFERED_SHARES,
    full_length,
    plan_test,
    run_benchmark,
    run_round,
    with_target_step,
)
from megatoken.harness.rate_finder import too_few
from megatoken.mlperf.rounds import round_of_build
from megatoken.mlperf.rules import foreign_scenario
from megatoken.text import count_of

if TYPE_CHECKING:
    from megatoken.engine import Engine

THREADS_PER_CORE = 4  # more only wait for each other, and a typing error of two digits hangs the machine
REFERENCE_NOTE = (
    "the reference model (7.9 M parameters) answers short tasks of its own and nothing else; "
    "its speed says nothing about larger models"
)


@dataclass(frozen=True, slots=True)
class Prepared:
    """What a run needs and what is known about it.

    ``warnings`` say why the run may not be worth its time; ``notes``, what a reader of its number must know; ``gate``,
    what the answers are held against; ``tokenizer`` is there if it has a part in the run and the model has one.
    """

    config: RunConfig
    model: ModelConfig
    memory: MemoryPlan
    data_set: Dataset
    weights: str
    warnings: tuple[str, ...]
    notes: tuple[str, ...]
    gate: Gate | None
    tokenizer: Tokenizer | None

    def facts(self) -> dict[str, Any]:
        """The part of ``result.json`` that is known before the run."""
        return {
            "model": self.model.name,
            "weights": self.weights,
            "precision": self.config.precision,
            "data_set": self.data_set.name,
            "data_set_source": self.data_set.source,
            "data_set_sha256": self.data_set.content_hash,
            "data_set_rows": len(self.data_set.requests),
            "memory_plan": asdict(self.memory),
            "notes": list(self.notes),
        }

    def plan(self) -> dict[str, Any]:
        """The resolved configuration and what follows from it, ready for JSON."""
        config = resolve(self.config, self.memory).model_dump(mode="json")
        return {"config": config, **self.facts(), "notes": [*self.warnings, *self.notes]}

    def describe(self) -> str:
        """The same for a person: the configuration as YAML, the rest as comments."""
        data_set = self.data_set
        comments = [
            f"model {self.model.name}: {self.model.parameters:,} parameters, weights {self.weights}",
            *self.memory.lines(),
            f"data set {data_set.name}: {count_of(len(data_set.requests), 'row')}, "
            f"{data_set.input_tokens.mean():.1f} tokens in, "
            f"at most {data_set.output_limits.mean():.1f} out on average",
            *self.warnings,
            *self.notes,
        ]
        config = resolve(self.config, self.memory).model_dump(mode="json")
        return yaml.safe_dump(config, sort_keys=False) + "\n".join(f"# {line}" for line in comments)


def prepare(config: RunConfig, memory: MemoryPlan | None = None) -> Prepared:
    """Opens model and data set and holds one against the other.

    Args:
        config: what to run.
        memory: the plan of the machines that compute, where that is not this one.

    Raises:
        CheckpointError, CapacityError, DatasetError: whatever cannot be used, with its place.
        StorageError: ``config.out`` cannot be written.
        UsageError: something that the run needs is not installed or not there; rules of a round that does not have the
            benchmark; a search so short that it can find nothing.
    """
    check_benchmark(config)
    if find_spec("mlperf_loadgen") is None:
        raise UsageError("LoadGen is not installed, which every run needs: pip install mlcommons-loadgen")
    check_writable(config.out)
    config = with_target_step(config)
    if memory is None:
        source, memory = open_and_plan(config)
    else:
        source = open_model(config.model, random_weights=config.random_weights, seed=config.seed)
        _check_longest(memory)
    tokenizer = tokenizer_of(config.model) if config.text or _prompts(config) is not None else None
    if config.text and tokenizer is None:
        raise UsageError(f"text: {source.config.name} has no tokenizer.json; add it to the model's folder")
    data_set = _load_data_set(config, source.config, memory, tokenizer)
    _check_max_tokens(config, data_set)
    if config.find_rate and config.rate is not None:
        length = full_length(plan_test(config, len(data_set.requests), config.rate))
        if (why := too_few(config.rate, *length)) is not None:
            raise UsageError(why)
    notes = list(data_set.notes)
    if memory.max_length == source.config.sliding_window:
        notes.append(
            f"the context ends at the sliding_window of {source.config.name}, {memory.max_length:,} tokens: beyond it "
            "its attention is another"
        )
    if _prompts(config) is None:
        notes.append("prompts are random tokens of the data set's lengths")
    if isinstance(source, Checkpoint):
        weights = source.content_hash
    else:
        weights = f"random, seed {config.seed}"
        notes.append(
            f"every GPU is a simulated {config.rack.simulated_gpu}: speed and text are made up, by a cost model"
            if config.rack.simulated_gpu
            else "random weights: the speed is real, the text is not"
        )
    scored: AccuracyGate | None = None
    if _is_reference(config):
        notes.append(REFERENCE_NOTE)
        if config.mode == "accuracy":
            scored = reference_gate(data_set.content_hash, config.samples or len(data_set.requests))
            if scored is not None and scored.targets is not None:
                notes.append(f"every score of the answers must reach {100 * SHARE:.0f} % of the model's own in fp32")
            else:
                notes.append("accuracy is not judged: that takes every row of the held-out set, once")
    warnings = list(tokenizer_warnings(tokenizer, source.config.vocabulary_size))
    if config.rules:
        rows, rows_required = len(data_set.requests), run_round(config).data_set_rows
        if rows != rows_required:
            warnings.append(f"cannot be VALID: the data set has {count_of(rows, 'row')}, MLPerf's {rows_required:,}")
        if (foreign := foreign_scenario(run_benchmark(config), config.scenario)) is not None:
            warnings.append(f"cannot be VALID: {foreign}")
        beside = "model and data set" if scored and scored.targets else "model, data set and accuracy"
        notes.append(f"the verdict judges LoadGen's log by the rules; {beside} are not part of it")
        installed = _loadgen_version()
        embedded = round_of_build(installed)
        if embedded != config.rules:
            whose = f"the seeds of {embedded}" if embedded else "seeds that are not known here"
            notes.append(f"LoadGen {installed} brings {whose}; it was given those of {config.rules} instead")
    gate: Gate | None = scored
    if config.compliance is not None:
        notes.append(f"compliance test {config.compliance}: few samples whose answers are logged, no measure of speed")
        gate = ComplianceGate(config.scenario == "offline", source.config.end_token_ids)
    return Prepared(config, source.config, memory, data_set, weights, tuple(warnings), tuple(notes), gate, tokenizer)


def check_benchmark(config: RunConfig) -> None:
    """Refuses a scenario that the benchmark has no limits for, or rules of a round without it. Raises UsageError."""
    benchmark = run_benchmark(config)
    if config.scenario in OFFERED_SHARES and config.scenario not in benchmark.limits:
        raise UsageError(
            f"--scenario {config.scenario}: {benchmark.name} has no limits for it; take singlestream or offline, or "
            "name the --benchmark whose limits are meant"
        )
    if config.rules is not None and config.rules not in benchmark.rounds:
        known = ", ".join(name for name in get_args(RoundName) if name in benchmark.rounds)
        raise UsageError(f"--rules {config.rules}: that round has no {benchmark.name}; rounds that have it: {known}")
    had = benchmark.scenario_rounds.get(config.scenario)
    if config.rules is not None and had is not None and config.rules not in had:
        raise UsageError(
            f"--rules {config.rules}: {benchmark.name} has no scenario {config.scenario} in that round; "
            f"rounds that have it: {', '.join(had)}"
        )


def build_engine(config: RunConfig, tokenizer: Tokenizer | None = None) -> Engine:
    """Loads the weights, and the model's tokenizer unless it is there already."""
    from megatoken.engine import Engine  # and PyTorch, which nothing before this needs

    return Engine(
        config.model,
        config.engine_config(),
        random_weights=config.random_weights,
        seed=config.seed,
        tokenizer=tokenizer,
    )


def resolve(config: RunConfig, memory: MemoryPlan) -> RunConfig:
    """``config`` with the engine's sizes in place of what was left open; ``memory_bytes`` is a limit and stays."""
    engine = config.engine
    sizes = {
        "device": memory.device,
        "max_batched_tokens": memory.max_batched_tokens,
        "max_sequences": memory.max_sequences,
        "max_length": memory.max_length,
        "page_size": memory.page_size,
        "cache_tokens": memory.cache_tokens,
        "threads": engine.threads or _threads(config),
        "overlap": memory.device == "cuda" if engine.overlap is None else engine.overlap,  # as Engine decides
    }
    return config.model_copy(update={"engine": engine.model_copy(update=sizes)})


def _threads(config: RunConfig) -> int | None:
    """PyTorch's; None where nothing is computed."""
    if config.rack.simulated_gpu is not None:
        return None
    import torch

    return torch.get_num_threads()


def open_and_plan(config: RunConfig) -> tuple[Checkpoint | RandomWeights, MemoryPlan]:
    """The model without its weights, and what it would take of this machine.

    Raises:
        CheckpointError, CapacityError: what cannot be used, or not on this machine.
    """
    from megatoken.engine.device import plan_memory  # PyTorch, which a rack of simulated GPUs does without

    cores = cpu()["usable_cores"]
    threads = config.engine.threads
    if threads is not None and threads > THREADS_PER_CORE * cores:
        raise CapacityError(
            f"engine.threads is {threads:,}, but this process may use {cores} cores; "
            f"take {cores}, at most {THREADS_PER_CORE * cores}"
        )
    source = open_model(config.model, random_weights=config.random_weights, seed=config.seed)
    memory = plan_memory(source.config, config.engine_config())
    _check_longest(memory)
    return source, memory


def _check_longest(memory: MemoryPlan) -> None:
    if memory.max_length < 2:
        raise CapacityError(
            f"the longest sequence has {memory.max_length} token, but a prompt and its answer have at least 2; "
            "raise engine.max_length or engine.cache_tokens"
        )


def check_writable(folder: Path) -> None:
    """Refuses an output folder now rather than after minutes of loading.

    A folder of another name is made, in the nearest parent that exists, and removed: permissions alone do not tell.

    Raises:
        StorageError: says what the system said.
    """
    for nearest in (folder, *folder.absolute().parents):
        try:
            Path(tempfile.mkdtemp(prefix=".megatoken-", dir=nearest)).rmdir()
            return
        except (OSError, ValueError) as error:
            if isinstance(error, FileNotFoundError) and not os.path.lexists(nearest):
                continue
            reason = error.strerror if isinstance(error, OSError) else error
            raise StorageError(
                f"{folder}: cannot write in {nearest} ({reason}); choose another folder with --out"
            ) from error


def _loadgen_version() -> str:
    try:
        return version("mlcommons-loadgen")
    except PackageNotFoundError:  # built by hand
        return "of unknown version"


def tokenizer_of(model: str) -> Tokenizer | None:
    """The tokenizer of a checkpoint directory; None without one."""
    file = model_folder(model) / "tokenizer.json"
    return Tokenizer(file) if file.is_file() else None


def tokenizer_warnings(tokenizer: Tokenizer | None, vocabulary_size: int) -> tuple[str, ...]:
    """What a model's tokenizer would be refused for by some texts only."""
    if tokenizer is None or tokenizer.largest_id < vocabulary_size:
        return ()
    return (
        f"{tokenizer.file} has ids up to {tokenizer.largest_id:,}, the model's vocabulary ends at "
        f"{vocabulary_size - 1:,}: text with one above is refused; use the model's own tokenizer",
    )


def _is_reference(config: RunConfig) -> bool:
    return config.model == REFERENCE and not config.random_weights


def _prompts(config: RunConfig) -> Path | None:
    """The file of prompts; of the reference model its held-out set, where nothing is given. None: lengths alone."""
    if config.prompts is None and config.lengths is None and _is_reference(config):
        return HELD_OUT
    return config.prompts


def _check_max_tokens(config: RunConfig, data_set: Dataset) -> None:
    """Refuses an answer length that no row takes. Raises UsageError."""
    if config.max_tokens != KEYS["max_tokens"].default and not data_set.default_used:
        raise UsageError(
            f"--max-tokens {config.max_tokens}: it is for JSON lines that state no max_tokens, and every row of "
            f"{data_set.name} has a length of its own; leave it out"
        )


def _load_data_set(config: RunConfig, model: ModelConfig, memory: MemoryPlan, tokenizer: Tokenizer | None) -> Dataset:
    vocabulary_size, max_length = model.vocabulary_size, memory.max_length
    prompts = _prompts(config)
    if prompts is None:
        return load_lengths(config.lengths, vocabulary_size=vocabulary_size, max_length=max_length, seed=config.seed)
    if prompts.suffix.lower() in SUFFIXES:
        return load_mlperf(
            prompts,
            vocabulary_size=vocabulary_size,
            max_length=max_length,
            decode=tokenizer.decode if tokenizer else None,
            as_published=config.rules is not None,
        )
    packaged = config.prompts is None
    data_set = load_prompts(
        prompts,
        encode=tokenizer.encode if tokenizer else None,
        vocabulary_size=vocabulary_size,
        max_length=model.max_positions if packaged else max_length,
        default_max_tokens=config.max_tokens,
    )
    if packaged:  # nobody can shorten its lines
        _check_context(int((data_set.input_tokens + data_set.output_limits).max()), config, memory)
    return data_set


def _check_context(needed: int, config: RunConfig, memory: MemoryPlan) -> None:
    """Refuses a context shorter than the ``needed`` tokens of the data set that ships, with what makes it longer."""
    if needed <= memory.max_length:
        return
    in_pages = -(-needed // memory.page_size) * memory.page_size
    too_small = [
        f"{name} to {enough:,}"
        for name, given, enough in (
            ("engine.cache_tokens", config.engine.cache_tokens, in_pages),
            ("engine.max_length", config.engine.max_length, needed),
        )
        if given is not None and given < enough
    ]
    if too_small:
        them = "it" if len(too_small) == 1 else "them"
        mend = f"raise {' and '.join(too_small)} or more, or leave {them} out"
    elif config.engine.memory_bytes is not None:
        mend = "raise engine.memory_bytes, or leave it out"
    else:
        mend = "free memory"
    raise CapacityError(
        f"the prompts that ship with {REFERENCE} need a context of {needed:,} tokens with their answers, and here it "
        f"is {memory.max_length:,}; {mend}, or give --prompts of your own"
    )
