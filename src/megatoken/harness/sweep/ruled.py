"""The loads of a sweep by the rules of MLPerf Endpoints: closed loops in whole passes, then the Offline run."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import IO, Any, Literal

from megatoken.datasets.requests import Dataset
from megatoken.datasets.salt import SALT_BITS, salted
from megatoken.engine.tokenizer import Tokenizer
from megatoken.errors import ConfigError
from megatoken.harness.prepare import Prepared
from megatoken.harness.protocols import Counted
from megatoken.harness.sizing import OwnLoad
from megatoken.harness.sweep.loads import Arrival, ClosedLoop, Load, OpenLoop
from megatoken.harness.sweep.plan import Setup, load_facts
from megatoken.harness.sweep.point import Phases
from megatoken.mlperf.endpoints import (
    PointRules,
    drawn_rows,
    endpoint_rules,
    min_seconds,
    passes_in_order,
    regions,
)
from megatoken.runs.reasons import Reason, reason
from megatoken.targets.backend import tokenizer_of
from megatoken.yaml_files import Strict, read_strict

TEXTS = "answers.jsonl"  # of a point, while it runs
OFFLINE_MARGIN = 1.1  # of the requests that the Offline run is expected to serve in its shortest time
ALL_AT_ONCE = math.inf  # the load of the Offline run


class Disclosures(Strict):
    """What only a submitter can say of the points of a curve, by section 8.3 of the rules."""

    division: Literal["Standardized", "Serviced", "RDI"] | None = None
    model_precision: str | None = None
    link_to_model: str | None = None
    link_to_model_transformation: str | None = None
    model_notes: str | None = None
    dataset_link: str | None = None
    shared_src: str | None = None
    shared_docs: str | None = None
    target_cohort: str | None = None


def read_disclosures(file: Path) -> dict[str, str]:
    """The disclosures of a YAML file, by name; at least one. Raises ConfigError."""
    stated: dict[str, str] = read_strict(file, Disclosures).model_dump(exclude_none=True)
    if not stated:
        raise ConfigError(f"{file}: states nothing; write KEY: VALUE with any of {', '.join(Disclosures.model_fields)}")
    return stated


def with_tokenizer(prepared: Prepared) -> Prepared:
    """The same with the tokenizer of the model, which counts the answers, where the model is known."""
    if prepared.tokenizer is not None or prepared.model.shape is None:
        return prepared
    return replace(prepared, tokenizer=tokenizer_of(prepared.config.model))


@dataclass(slots=True)
class RuledPlan:
    """The loads: concurrencies from lowest to highest, then all requests at once."""

    values: tuple[int, ...]  # requests at once, rising
    version: str  # of the rules
    seed_set: str  # published set
    prepared: Prepared  # what to run
    shortest_seconds: float | None  # of every window, for a trial; None: those of the rules
    over_http: bool  # whether the target is a server
    most_open: int | None  # requests that the client keeps open
    streamed: bool  # whether answers come as streams
    benchmark: str | None  # canonical name of the model; None: it is none of the benchmarks
    disclosures: Mapping[str, Any]  # what the submitter says of every point, section 8.3 of the rules
    requests_per_second: float = 0.0  # of the last point
    kind: str = field(default="concurrency", init=False)
    finds_its_end: bool = field(default=False, init=False)
    phases: Phases = field(default=Phases(0.0, None), init=False)

    @property
    def rows(self) -> int:
        """Of the data set."""
        return len(self.prepared.data_set.requests)

    @property
    def seeds(self) -> Mapping[str, int]:
        """Of the published set."""
        seeds: Mapping[str, int] = endpoint_rules(self.version)["seed_sets"][self.seed_set]
        return seeds

    def own_load(self) -> OwnLoad:
        """That of the highest concurrency."""
        return OwnLoad(in_flight=max(self.values))

    def loads(self, estimated_rate: float) -> Iterator[float]:
        """The concurrencies, then the Offline run."""
        yield from map(float, self.values)
        yield ALL_AT_ONCE

    def setup(self, value: float, data_set: Dataset, seed: Sequence[int], folder: Path | None) -> Setup:
        """One point: salted prompts in an order of the published seeds; every answer is counted and written down."""
        answers = CountedAnswers(folder / TEXTS, self.prepared.tokenizer) if folder is not None else None
        return Setup(self._load(value, self.rows), self._salted(value), answers)

    def _load(self, value: float, rows: int) -> Load:
        least = self._seconds(value)
        order_seed = self.seeds["sample_index_rng_seed"]
        if value != ALL_AT_ONCE:
            return WholePasses(drawn_rows(rows, order_seed), round(value), rows, self._passes(), least)
        passes = max(1, math.ceil(OFFLINE_MARGIN * least * self.requests_per_second / rows))
        order = passes_in_order(rows, order_seed)
        return OpenLoop((0.0, next(order)) for _ in range(passes * rows))

    def facts(self, value: float, seed: int) -> dict[str, Any]:
        """The field ``load`` of a point's ``result.json``."""
        offline = value == ALL_AT_ONCE
        return {
            **load_facts(
                "offline" if offline else self.kind,
                float(self.rows) if offline else value,
                self.salt_seed(value),
                Phases(0.0, self._seconds(value)),
                waits=not offline,
            ),
            "rules": asdict(self._rules(value)),
        }

    def notes(self) -> list[Reason]:
        """What a reader of the point must know."""
        return [
            reason("ENDPOINTS_SCOPE", version=self.version),
            reason("SALTED", bits=SALT_BITS),
        ]

    def _salted(self, value: float) -> Dataset:
        """The requests, each with a salt."""
        model = self.prepared.model
        ids = model.prompts == "token_ids" and model.shape is not None
        size = model.shape.vocabulary_size if ids and model.shape else None
        data_set = self.prepared.data_set
        return salted(data_set, self.salt_seed(value), vocabulary_size=size, max_length=model.max_length)

    def salt_seed(self, value: float) -> int:
        """The seed of the salts: the published one plus the concurrency, or no point would find its prompts new."""
        return self.seeds["model_seed"] + (0 if value == ALL_AT_ONCE else round(value))

    def note(self, result: Mapping[str, Any]) -> None:
        """Learns the rate of a point from its ``result.json``."""
        point = result["ruled"]
        if point["total"]["seconds"]:
            self.requests_per_second = point["requests_completed"] / point["total"]["seconds"]

    def _seconds(self, value: float) -> float:
        offline = value == ALL_AT_ONCE
        required = min_seconds(0 if offline else round(value), offline=offline)
        return required if self.shortest_seconds is None else min(required, self.shortest_seconds)

    def _passes(self) -> int:
        """One that is cropped, and those of the window."""
        return 1 + int(endpoint_rules(self.version)["steady_state"]["super_passes"])

    def _rules(self, value: float) -> PointRules:
        offline = value == ALL_AT_ONCE
        concurrency = self.rows if offline else round(value)
        models = endpoint_rules(self.version)["models"]
        return PointRules(
            version=self.version,
            offline=offline,
            concurrency=concurrency,
            region=None if offline else regions(self.values[0], self.values[-1]).of(concurrency),
            rows=self.rows,
            required_rows=models[self.benchmark]["rows"] if self.benchmark else None,
            min_seconds=min_seconds(concurrency, offline=offline),
            seed_set=self.seed_set,
            salted=True,
            token_count="tokenizer" if self.prepared.tokenizer is not None else "target",
            streamed=self.streamed,
            over_http=self.over_http,
            most_open=self.most_open,
        )


class WholePasses(ClosedLoop):
    """A closed loop that ends with a pass over the data set: after enough of them, and enough time after the first."""

    def __init__(self, rows: Iterator[int], concurrency: int, pass_rows: int, passes: int, seconds: float) -> None:
        super().__init__(rows, concurrency)
        self._pass_rows, self._passes, self._seconds = pass_rows, passes, seconds
        self._issued = 0
        self._second_pass_ns: int | None = None
        self._over = False

    def take_due(self, now_ns: int) -> list[Arrival]:
        """One request for each that has ended, until the last pass is complete."""
        due: list[Arrival] = []
        free, self._free_ns = self._free_ns, []
        for free_ns in free:
            if self._issued and not self._issued % self._pass_rows:
                self._end_of_pass(free_ns)
            if self._over:
                break
            due.append(Arrival(free_ns, next(self._rows)))
            self._issued += 1
        return due

    def next_due_ns(self) -> int | None:
        """None after the last pass."""
        return None if self._over else super().next_due_ns()

    def _end_of_pass(self, due_ns: int) -> None:
        if self._second_pass_ns is None:
            self._second_pass_ns = due_ns
        lasted = (due_ns - self._second_pass_ns) / 1e9
        self._over = self._issued >= self._passes * self._pass_rows and lasted >= self._seconds


class CountedAnswers:
    """Counts the tokens of answers with the model's tokenizer, and writes their texts down.

    A text is a line of JSON: ``sample``, ``first`` (characters of the first frame) and ``text``.
    """

    def __init__(self, file: Path, tokenizer: Tokenizer | None) -> None:
        self._tokenizer = tokenizer
        self._file: IO[str] = file.open("w", encoding="utf-8")

    def take(self, sample: int, token_ids: Sequence[int], text: str, first_characters: int) -> Counted | None:
        """Counts an answer: its ids as text, or its text; None without a tokenizer."""
        tokenizer = self._tokenizer
        if token_ids and not text and tokenizer is not None:
            text, first = tokenizer.decode(token_ids), tokenizer.decode(token_ids[:1])
            first_characters = len(first)
        self._file.write(json.dumps({"sample": sample, "first": first_characters, "text": text}) + "\n")
        if tokenizer is None or not text:
            return None
        tokens = _count(tokenizer, text)
        later = _count(tokenizer, text[first_characters:]) if first_characters else tokens - 1
        return Counted(tokens, tokens - later)

    def close(self) -> None:
        """Ends the file."""
        self._file.close()


def _count(tokenizer: Tokenizer, text: str) -> int:
    return len(tokenizer.encode(text, add_special=False)) if text else 0
