"""From a configuration and a backend to a checked data set, before any weights are loaded."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from operator import attrgetter
from pathlib import Path
from typing import Any, get_args

import numpy as np
import yaml

from megatoken.accuracy.gate import SHARE, AccuracyGate, ComplianceGate, Gate, reference_gate
from megatoken.config import KEYS, RoundName, RunConfig
from megatoken.datasets.lengths import load_lengths
from megatoken.datasets.mlperf import load_mlperf
from megatoken.datasets.prompts import load_prompts, load_texts
from megatoken.datasets.references import HELD_OUT
from megatoken.datasets.requests import Dataset, rows_sha256
from megatoken.datasets.tables import SUFFIXES
from megatoken.engine.config import REFERENCE, ModelConfig
from megatoken.engine.measured_costs import ModelWork
from megatoken.engine.memory import MemoryPlan
from megatoken.engine.request import Request
from megatoken.engine.schemes import has_bf16_activations, scheme_of
from megatoken.engine.tokenizer import Tokenizer
from megatoken.errors import CapacityError, UsageError
from megatoken.files import check_writable, plain, redact
from megatoken.hardware.host_sensors import read_meter
from megatoken.hardware.inventory import multiplies_bf16
from megatoken.harness.loadgen_plan import (
    OFFERED_SHARES,
    full_length,
    plan_test,
    run_benchmark,
    with_target_step,
)
from megatoken.harness.rate_finder import too_few
from megatoken.mlperf.benchmarks import SCENARIOS
from megatoken.mlperf.loadgen_builds import round_of_build
from megatoken.mlperf.rules import missing_scenario
from megatoken.runs.reasons import Reason, reason
from megatoken.runs.seal import refuse_sealed
from megatoken.targets.backend import Backend, ServedModel
from megatoken.text import count_of

LONGEST_USUAL_LIMIT_SECONDS = 60.0  # on the time to a first or another token
_OF_TOKENS = re.compile(r"(?:ttft|tpot)_limit_seconds|limits\.(?:ttft|tpot|itl)_seconds\.p\d+")

NO_DATA_SET = Dataset(
    name="conversations",
    source="the load",
    requests=[Request("Hello", max_tokens=1)],
    content_hash="",
    input_tokens=np.ones(1, np.int64),
    output_limits=np.ones(1, np.int64),
    fills_limit=np.ones(1, np.bool_),
    notes=(),
    prompts_counted=False,
)


@dataclass(frozen=True, slots=True)
class Prepared:
    """What a run needs, checked, and what is known about it."""

    config: RunConfig  # what to run
    model: ServedModel  # the model that the backend serves
    data_set: Dataset  # the requests; the backend can serve every one
    warnings: tuple[str, ...]  # why the run may not be worth its time
    notes: tuple[Reason, ...]  # what a reader of the results must know
    gate: Gate | None  # what the answers are compared with before there is a verdict
    tokenizer: Tokenizer | None  # the model's, where the run uses it and the model has one
    qualification: Mapping[str, Any] | None = None  # document of the machine, if it was qualified first

    def facts(self, *, hashed: bool = True) -> dict[str, Any]:
        """The fields of ``result.json`` that are known before the run; unless ``hashed``, without reading the model."""
        memory = self.model.memory
        files = self.model.files.identity() if self.model.files and hashed else {}
        return {
            "model": self.model.name,
            "weights": files.get("weights_sha256") or self.model.weights,
            **({"identity": {**files, "rows_sha256": rows_sha256(self.data_set)}} if hashed else {}),
            "random_weights": self.model.random_weights,
            "precision": self.model.precision,
            "data_set": self.data_set.name,
            "data_set_source": self.data_set.source,
            "data_set_sha256": self.data_set.content_hash,
            "data_set_rows": len(self.data_set.requests),
            **({"memory_plan": asdict(memory)} if memory else {}),
            **({"work": self._work(memory.device)} if memory and self.model.shape else {}),
            **({"qualification_document": self.qualification} if self.qualification else {}),
            "changed_settings": _changed_settings(self.config),
            "notes": list(self.notes),
        }

    def _work(self, device: str) -> dict[str, Any]:
        """What the model computes and moves; which experts' weights a step of a mixture reads is not known."""
        assert self.model.shape is not None and self.model.precision is not None
        engine = replace(self.config.engine_config(), precision=self.model.precision)
        work = ModelWork.of(self.model.shape, scheme_of(engine), device)
        windows = [window._asdict() for window in work.windows]
        return {**work._asdict(), "windows": windows, **({"weights_bytes": None} if self.model.shape.experts else {})}

    def plan(self) -> dict[str, Any]:
        """The resolved configuration and what follows from it, ready for JSON."""
        config = resolve(self.config, self.model).model_dump(mode="json")
        warnings = [reason("NOTE", text=warning) for warning in self.warnings]
        return {"config": config, **self.facts(hashed=False), "notes": [*warnings, *self.notes]}

    def describe(self) -> str:
        """The same as text: the configuration as YAML, the rest as comments."""
        model, data_set = self.model, self.data_set
        parameters = f"{model.shape.parameters:,} parameters, " if model.shape else ""
        if model.shape and model.shape.experts:
            parameters += f"{model.shape.active_parameters:,} of them active for a token, "
        weights = model.weights or ("hashed as they load" if model.files else "unknown")
        tokens_in = f"{data_set.input_tokens.mean():.1f} tokens in, " if data_set.prompts_counted else ""
        comments = [
            f"model {model.name}: {parameters}weights {weights}",
            *(model.memory.lines() if model.memory else ()),
            f"data set {data_set.name}: {count_of(len(data_set.requests), 'row')}, {tokens_in}"
            f"at most {data_set.output_limits.mean():.1f} out on average",
            *self.warnings,
            *(note["message"] for note in self.notes),
        ]
        config = resolve(self.config, model).model_dump(mode="json")
        return yaml.safe_dump(config, sort_keys=False) + "\n".join(f"# {line}" for line in comments)


def prepare(config: RunConfig, backend: Backend, *, brings_requests: bool = False) -> Prepared:
    """Checks configuration, model and data set against each other.

    Args:
        config: what to run.
        backend: what will serve, opened with the same configuration.
        brings_requests: whether the test has requests of its own; then the data set is one that is never used.

    Raises:
        CheckpointError, CapacityError, DatasetError: what cannot be used, with its place.
        StorageError: ``config.out`` cannot be written.
        UsageError: something that the run needs is missing; the round lacks the benchmark; the backend cannot do what
            the run asks for; a search is too short to find anything.
    """
    check_benchmark(config)
    if find_spec("mlperf_loadgen") is None:
        raise UsageError("LoadGen is not installed, which every run needs: pip install mlcommons-loadgen")
    refuse_sealed(config.out)
    check_writable(config.out)
    if config.power_meter is not None:
        read_meter(config.power_meter)
    config = with_target_step(config)
    model = backend.served()
    _check_backend(config, model, needs_prompts=not brings_requests)
    if config.endpoint.urls is not None and config.model == REFERENCE:
        config = config.model_copy(update={"model": model.name})  # no model was named, so it is the server's
    tokenizer = backend.tokenizer() if config.text or _prompts(config) is not None else None
    if config.text and tokenizer is None:
        raise UsageError(f"text: {model.name} has no tokenizer.json; add it to the model's folder")
    data_set = NO_DATA_SET if brings_requests else _load_data_set(config, model, tokenizer)
    _check_max_tokens(config, data_set)
    if config.find_rate and config.rate is not None:
        length = full_length(plan_test(config, len(data_set.requests), config.rate))
        if (why := too_few(config.rate, *length)) is not None:
            raise UsageError(why)
    notes = [*(reason("NOTE", text=note) for note in data_set.notes), *model.notes]
    if _prompts(config) is None:
        notes.append(reason("RANDOM_PROMPTS"))
    scored: AccuracyGate | None = None
    if _is_reference(config):
        if "MADE_UP_TOKENS" not in {note["code"] for note in notes}:
            notes.append(reason("REFERENCE_MODEL"))
        if config.mode == "accuracy":
            scored = reference_gate(data_set.content_hash, config.samples or len(data_set.requests))
            if scored is not None and scored.targets is not None:
                notes.append(reason("ACCURACY_GATE", share=SHARE))
            else:
                notes.append(reason("ACCURACY_NOT_JUDGED"))
    warnings = [*tokenizer_warnings(tokenizer, model.shape), *_unit_warnings(config), *_widened(config, model)]
    if config.rules:
        rows, rows_required = len(data_set.requests), run_benchmark(config).rows
        if rows != rows_required:
            warnings.append(f"cannot be VALID: the data set has {count_of(rows, 'row')}, MLPerf's {rows_required:,}")
        if (missing := missing_scenario(run_benchmark(config), config.scenario)) is not None:
            warnings.append(f"cannot be VALID: {missing['message']}")
        not_judged = "model and data set" if scored and scored.targets else "model, data set and accuracy"
        notes.append(reason("RULES_SCOPE", not_judged=not_judged))
        installed = _loadgen_version()
        embedded = round_of_build(installed)
        if embedded != config.rules:
            notes.append(reason("OTHER_SEEDS", loadgen_version=installed, brings=embedded, round=config.rules))
    gate: Gate | None = scored
    if config.compliance is not None and model.shape is not None:
        notes.append(reason("COMPLIANCE_TEST", test=config.compliance))
        gate = ComplianceGate(config.scenario == "offline", model.shape.end_token_ids)
    return Prepared(config, model, data_set, tuple(warnings), tuple(notes), gate, tokenizer)


def _check_backend(config: RunConfig, model: ServedModel, *, needs_prompts: bool) -> None:
    """Refuses what a backend cannot give: token ids from text alone, another precision. Raises UsageError."""
    if config.precision is not None and config.endpoint.urls is not None:
        where = "the command of --start-server" if config.endpoint.start_server else "the server's own command"
        raise UsageError(f"--precision {config.precision}: the server at --endpoint has its own; choose it in {where}")
    if config.endpoint.stream is False and (config.find_rate or config.scenario == "singlestream"):
        what = "a search for a rate" if config.find_rate else "the scenario singlestream"
        raise UsageError(f"endpoint.stream false: {what} needs times to first token, which streams show; leave it out")
    for key, wanted in (
        ("mode", config.mode == "accuracy"),
        ("compliance", config.compliance is not None),
        ("text", config.text),
    ):
        if wanted and (model.answers or model.prompts) == "text":
            raise UsageError(f"{key}: needs token ids, and {model.name} is served as text; leave it out")
    if needs_prompts and config.prompts is None and model.prompts == "text":
        if config.endpoint.api == "chat":
            raise UsageError("--api chat: that route takes messages, so it needs prompts; give a file with --prompts")
        give = "give a file with --prompts, or its model with --model for random ones"
        raise UsageError(f"{model.name} is served as text, so it needs prompts; {give}")


def check_benchmark(config: RunConfig) -> None:
    """Refuses a scenario without limits in the benchmark, or rules of a round without the benchmark.

    Raises:
        UsageError: names the rounds or scenarios to choose from.
    """
    benchmark = run_benchmark(config)
    if config.scenario in OFFERED_SHARES and benchmark.limits_of(config.scenario) is None:
        raise UsageError(
            f"--scenario {config.scenario}: {benchmark.name} has no limits for it; use singlestream or offline, or "
            "give the --benchmark whose limits apply"
        )
    if config.rules is not None and config.rules not in benchmark.rounds:
        known = ", ".join(name for name in get_args(RoundName) if name in benchmark.rounds)
        raise UsageError(f"--rules {config.rules}: that round has no {benchmark.name}; rounds that have it: {known}")
    had = benchmark.scenario_rounds.get(SCENARIOS[config.scenario])
    if config.rules is not None and had is not None and config.rules not in had:
        raise UsageError(
            f"--rules {config.rules}: {benchmark.name} has no scenario {config.scenario} in that round; "
            f"rounds that have it: {', '.join(had)}"
        )


def _changed_settings(config: RunConfig) -> list[dict[str, Any]]:
    """The settings that were given and differ from their defaults, without secrets."""
    given = ((key, attrgetter(key)(config), setting.default) for key, setting in KEYS.items() if key != "out")
    return [
        {"setting": key, "value": redact(plain(value)), "default": plain(default)}
        for key, value, default in given
        if value != default
    ]


def resolve(config: RunConfig, model: ServedModel) -> RunConfig:
    """``config`` with the engine's precision and sizes in place of null; ``memory_bytes`` is a limit and stays.

    As given without a memory plan.
    """
    memory = model.memory
    if memory is None:
        return config
    engine = config.engine
    sizes = {
        "device": memory.device,
        "max_batched_tokens": memory.max_batched_tokens,
        "max_sequences": memory.max_sequences,
        "max_length": memory.max_length,
        "page_size": memory.page_size,
        "cache_tokens": memory.cache_tokens,
        "threads": engine.threads or _threads(config),
        "packed_weights": memory.packed_weights,
        "overlap": memory.device == "cuda" if engine.overlap is None else engine.overlap,  # as Engine decides
    }
    return config.model_copy(update={"precision": model.precision, "engine": engine.model_copy(update=sizes)})


def _threads(config: RunConfig) -> int | None:
    """PyTorch's number of threads; None on simulated GPUs."""
    if config.rack.simulated_gpu is not None:
        return None
    import torch

    return torch.get_num_threads()


def _loadgen_version() -> str:
    try:
        return version("mlcommons-loadgen")
    except PackageNotFoundError:  # built from source
        return "of unknown version"


def tokenizer_warnings(tokenizer: Tokenizer | None, shape: ModelConfig | None) -> tuple[str, ...]:
    """Warns of a tokenizer with ids that the model lacks: only texts that use them are refused."""
    if tokenizer is None or shape is None or tokenizer.largest_id < shape.vocabulary_size:
        return ()
    return (
        f"{tokenizer.file} has ids up to {tokenizer.largest_id:,}, but the model's vocabulary ends at "
        f"{shape.vocabulary_size - 1:,}; text with higher ids is refused: use the model's own tokenizer",
    )


def _unit_warnings(config: RunConfig) -> Iterator[str]:
    """Warns of limits on first tokens and tokens that are so long that milliseconds may be meant."""
    for key in filter(_OF_TOKENS.fullmatch, KEYS):
        limit = attrgetter(key)(config)
        if limit is not None and limit > LONGEST_USUAL_LIMIT_SECONDS:
            yield f"{key} is {limit:g} seconds; if {limit:g} ms are meant, give {limit / 1000:g}"


def _widened(config: RunConfig, model: ServedModel) -> Iterator[str]:
    """Warns of a format that was named and that this processor has no instructions for."""
    on_cpu = model.memory is not None and model.memory.device == "cpu"
    here = config.rack.cluster is None and config.rack.simulated_gpu is None
    if has_bf16_activations(config.precision) and on_cpu and here and not multiplies_bf16():
        yield reason("BF16_WIDENED")["message"]


def _is_reference(config: RunConfig) -> bool:
    return config.model == REFERENCE and not config.random_weights


def _prompts(config: RunConfig) -> Path | None:
    """The file of prompts: by default the reference model's held-out set. None: the data set is a table of lengths."""
    if config.prompts is None and config.lengths is None and _is_reference(config):
        return HELD_OUT
    return config.prompts


def _check_max_tokens(config: RunConfig, data_set: Dataset) -> None:
    """Refuses an answer length that no row uses. Raises UsageError."""
    if config.max_tokens != KEYS["max_tokens"].default and not data_set.default_used:
        raise UsageError(
            f"--max-tokens {config.max_tokens}: applies to JSON lines that state no max_tokens, and every row of "
            f"{data_set.name} has its own length; leave it out"
        )


def _load_data_set(config: RunConfig, model: ServedModel, tokenizer: Tokenizer | None) -> Dataset:
    prompts = _prompts(config)
    if model.shape is None or model.prompts == "text":
        assert prompts is not None  # _check_backend
        return load_texts(prompts, encode=tokenizer.encode if tokenizer else None, default_max_tokens=config.max_tokens)
    vocabulary_size = model.shape.vocabulary_size
    max_length = model.max_length
    assert max_length is not None  # the shape is known
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
        max_length=model.shape.max_positions if packaged else max_length,
        default_max_tokens=config.max_tokens,
    )
    if packaged and model.memory:  # users cannot shorten its lines
        _check_context(int((data_set.input_tokens + data_set.output_limits).max()), config, model.memory)
    return data_set


def _check_context(needed: int, config: RunConfig, memory: MemoryPlan) -> None:
    """Refuses a context shorter than the ``needed`` tokens of the packaged data set, and says how to extend it."""
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
        fix = f"raise {' and '.join(too_small)} or more, or leave {them} out"
    elif config.engine.memory_bytes is not None:
        fix = "raise engine.memory_bytes, or leave it out"
    else:
        fix = "free memory"
    raise CapacityError(
        f"the prompts that ship with {REFERENCE} need a context of {needed:,} tokens with their answers, but it is "
        f"{memory.max_length:,}; {fix}, or give your own --prompts"
    )
