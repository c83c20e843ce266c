"""Published facts shipped with the package: MLPerf results of language models, accelerators, model shapes."""

from __future__ import annotations

import csv
import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from statistics import fmean

from megatoken.errors import UsageError
from megatoken.hardware.specification import part_name
from megatoken.text import nearest
from megatoken.yaml_files import load_yaml

RESULTS = {f"v{number}": f"mlperf_v{number}_llm_results.csv" for number in ("4.1", "5.0", "5.1", "6.0", "6.1")}
"""Tables of results by round, oldest first."""
ACCELERATORS = "gpu_specs.csv"
MODELS = "model_facts.csv"
DATA_SETS = "mlperf_datasets.yaml"
RULES = "loadgen_rules.json"
SUBMISSION_ID = re.compile(r"(\d+\.\d+)-(\d{4}|[^:/]+/[^:/]+)")
ACCURACY_TARGET = re.compile(r"-(99(?:\.9)?)$")
MIXED = re.compile(r"\(x|\+")  # several kinds of accelerators in one system
TOKENS_PER_SAMPLE = re.compile(r"TOKENS_PER_SAMPLE: ([\d.]+)")


@dataclass(frozen=True, slots=True)
class PublishedResult:
    """One row of the results of an MLPerf Inference round: peer-reviewed, so verified, whatever its division.

    ``id`` is the submission's, or ``6.1-SUBMITTER/PLATFORM`` in a table without ids.
    ``output_tokens_per_second`` is the whole system's: LoadGen's completed tokens in Server and Interactive. None where
    the round publishes samples or queries per second instead.
    ``output_tokens_per_sample`` is the mean answer of the accuracy run. ``measured_watts`` is mean AC power of the
    whole system, in the few submissions that measured it.
    """

    round: str
    line: int
    id: str
    submitter: str
    division: str
    availability: str
    system: str
    accelerator: str | None
    accelerators: int | None
    nodes: int
    benchmark: str
    used_model: str
    scenario: str
    output_tokens_per_second: float | None
    output_tokens_per_sample: float | None
    precision: str | None
    software: str
    measured_watts: float | None

    @property
    def name(self) -> str:
        """Unique name of the row."""
        return f"{self.id}:{self.benchmark}:{self.scenario}"

    @property
    def table(self) -> str:
        """File of the row, below ``megatoken/data``."""
        return RESULTS[self.round]

    @property
    def source(self) -> str:
        """Where the row is from."""
        return f"MLPerf Inference {self.round}, {self.submitter}, {self.id} (data/{self.table}, line {self.line})"

    @property
    def tokens_per_second_per_accelerator(self) -> float | None:
        """Rate of one accelerator; None without a rate in tokens or without accelerators."""
        if self.output_tokens_per_second is None or not self.accelerators:
            return None
        return self.output_tokens_per_second / self.accelerators

    def is_of(self, benchmark: str, scenario: str) -> bool:
        """Whether the row is of a benchmark, with or without accuracy target, and scenario, in any case."""
        return benchmark in (self.benchmark, model_of(self.benchmark)) and self.scenario.lower() == scenario.lower()


@cache
def published_results() -> tuple[PublishedResult, ...]:
    """All rows of all rounds, oldest round first, in the order of the tables."""
    return tuple(_result(round, line, row) for round, table in RESULTS.items() for line, row in _rows(table))


def _result(round: str, line: int, row: dict[str, str]) -> PublishedResult:
    tokens = TOKENS_PER_SAMPLE.search(row["accuracy"])
    # All rows of v5.1 are tokens/s: the eight "Queries/s" are tokens/s in the logs.
    in_tokens = row["units"] == "Tokens/s" or round == "v5.1"
    return PublishedResult(
        round=round,
        line=line,
        id=row["id"] or f"{round[1:]}-{row['submitter']}/{row['platform']}",
        submitter=row["submitter"],
        division=row["division"],
        availability=row["availability"],
        system=row["system"].strip(),
        accelerator=row["accelerator"] or None,
        accelerators=int(row["total_accelerators"]) if row["total_accelerators"] else None,
        nodes=int(row["nodes"]),
        benchmark=row["benchmark"],
        used_model=row["used_model"].replace("llama3_1", "llama3.1"),
        scenario=row["scenario"],
        output_tokens_per_second=float(row["result"]) if in_tokens else None,
        output_tokens_per_sample=float(tokens.group(1)) if tokens else None,
        precision=None if row["weight_data_types"] == "UNSET" else row["weight_data_types"].lower(),
        software=row["software"],
        measured_watts=float(row["power_result"]) if row["power_result"] else None,
    )


def published_result(submission: str, benchmark: str, scenario: str) -> PublishedResult:
    """The row of a submission; of two accuracy targets of a benchmark named without one, the lower.

    Raises:
        UsageError: there is none; the message lists what the submission has, or says that it has no such id.
    """
    of_submission = [row for row in published_results() if row.id == submission]
    for row in sorted(of_submission, key=lambda row: row.benchmark):
        if row.is_of(benchmark, scenario):
            return row
    if of_submission:
        has = ", ".join(f"{row.benchmark}:{row.scenario}" for row in of_submission)
        raise UsageError(f"{submission} has no published {benchmark} {scenario} result; it has {has}")
    round = f"v{submission.partition('-')[0]}"
    if round not in RESULTS:
        raise UsageError(f"{submission}: the shipped results are of {', '.join(RESULTS)}, not of {round}")
    ids = {row.id: None for row in published_results() if row.round == round}
    hint = ""
    if "/" in next(iter(ids)):
        meant = nearest(submission, ids) or f"{round[1:]}-SUBMITTER/PLATFORM"
        hint = f", whose rows have no ids; write {meant}"
    raise UsageError(
        f"{submission} is not among the shipped language model results of MLPerf Inference {round}{hint}; that says"
        " nothing about the system"
    )


def results_of(accelerator: str, benchmark: str, scenario: str, round: str | None = None) -> list[PublishedResult]:
    """Rows in tokens/s of systems with that accelerator alone, of one round or all; fastest per accelerator first.

    The closed division comes before the others. ``accelerator`` is a word or several of its name: ``GB200``,
    ``H200-SXM``. ``B200`` is not in ``GB200``. ``benchmark`` and ``scenario`` are as in ``PublishedResult.is_of``.
    """
    found = [
        row
        for row in published_results()
        if row.is_of(benchmark, scenario) and row.tokens_per_second_per_accelerator
        if has_accelerator(row, accelerator) and round in (None, row.round)
    ]
    return sorted(found, key=lambda row: (row.division != "closed", -(row.tokens_per_second_per_accelerator or 0)))


def has_accelerator(row: PublishedResult, accelerator: str) -> bool:
    """Whether a row is of systems with that accelerator alone; ``accelerator`` as in ``results_of``."""
    if not row.accelerator or MIXED.search(row.accelerator):
        return False
    return bool(re.search(rf"(?<!\w){re.escape(accelerator)}(?!\w)", row.accelerator, re.IGNORECASE))


def split_benchmark(name: str) -> tuple[str, str | None]:
    """Model and accuracy target in percent: ``llama2-70b-99.9`` is llama2-70b at 99.9."""
    target = ACCURACY_TARGET.search(name)
    return (name[: target.start()], target.group(1)) if target else (name, None)


def model_of(benchmark: str) -> str:
    """A benchmark without its accuracy target: ``llama2-70b-99.9`` is of llama2-70b."""
    return split_benchmark(benchmark)[0]


@cache
def reference_tokens_per_sample() -> dict[str, float]:
    """Mean answer of the reference by benchmark: the middle of the round's window of plus and minus 10 %.

    An upper bound alone, with 0 as the lower one, does not say what the reference's mean is.
    """
    rules = json.loads((files("megatoken") / "data" / RULES).read_text(encoding="utf-8"))
    windows = {name: entry.get("tokens_per_sample") for name, entry in rules["benchmarks"].items()}
    return {name: round(fmean(window), 4) for name, window in windows.items() if window and window[0]}


@dataclass(frozen=True, slots=True)
class AcceleratorFacts:
    """Data sheet figures of one accelerator; numbers by the column names of the table, those unknown left out."""

    name: str
    line: int
    values: dict[str, float]

    @property
    def tdp_watts(self) -> float | None:
        """Nameplate power of one."""
        return self.values.get("tdp_w")

    @property
    def per_rack(self) -> int | None:
        """Accelerators in the rack-scale product; None where there is no such product."""
        count = self.values.get("accelerators_per_rack")
        return None if count is None else int(count)

    @property
    def per_node(self) -> int:
        """Accelerators in a compute tray or on a base board."""
        return int(self.values["accelerators_per_node"])


@cache
def accelerator_table() -> dict[str, AcceleratorFacts]:
    """Facts by short name: A100, H100, ... MI355X."""
    table = {}
    for line, row in _rows(ACCELERATORS):
        numbers = {key: float(value) for key, value in row.items() if re.fullmatch(r"\d+(\.\d+)?", value or "")}
        table[row["gpu"]] = AcceleratorFacts(row["gpu"], line, numbers)
    return table


def accelerator_facts(name: str | None) -> AcceleratorFacts | None:
    """Facts of the accelerator that a product name such as ``NVIDIA B200-SXM-180GB`` contains.

    None if none is known: also for a mix of accelerators, and for the variants that ``part_name`` leaves out.
    """
    return None if name is None or MIXED.search(name) else accelerator_table().get(part_name(name))


@cache
def model_architectures() -> dict[str, str]:
    """``dense`` or ``mixture of experts`` by model."""
    return {row["model"]: row["architecture"] for _, row in _rows(MODELS)}


@cache
def mlperf_data_set(benchmark: str) -> str:
    """The file that holds MLPerf's data set for a benchmark, such as ``llama2-70b-99``."""
    sets = load_yaml((files("megatoken") / "data" / DATA_SETS).read_text(encoding="utf-8"))["data_sets"]
    known = {name: entry["file"] for entry in sets.values() for name in entry["benchmarks"]}
    return str(known.get(benchmark, f"MLPerf's for {benchmark}"))


def _rows(name: str) -> Iterator[tuple[int, dict[str, str]]]:
    """Line number and row of each row of a shipped table; its comment lines start with #."""
    text = (files("megatoken") / "data" / name).read_text(encoding="utf-8")
    lines = [(number, line) for number, line in enumerate(text.splitlines(), 1) if not line.startswith("#")]
    numbers = [number for number, _ in lines[1:]]  # no field of these tables holds a line break
    return zip(numbers, csv.DictReader(line for _, line in lines), strict=True)
