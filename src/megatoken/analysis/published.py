"""Published facts shipped with the package: MLPerf v5.1 results of language models, accelerators, model shapes."""

from __future__ import annotations

import csv
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from importlib.resources import files

from megatoken.errors import UsageError
from megatoken.yaml_files import load_yaml

RESULTS = "mlperf_v5.1_llm_results.csv"
ACCELERATORS = "gpu_specs.csv"
MODELS = "model_facts.csv"
DATA_SETS = "mlperf_datasets.yaml"
SUBMISSION_ID = re.compile(r"\d+\.\d+-\d{4}")


@dataclass(frozen=True, slots=True)
class PublishedResult:
    """One row of the MLPerf Inference v5.1 table: peer-reviewed, so verified, whatever its division.

    ``output_tokens_per_second`` is the whole system's: LoadGen's completed tokens in Server and Interactive.
    ``measured_watts`` is mean AC power of the whole system, in the few submissions that measured it.
    """

    line: int
    id: str
    submitter: str
    division: str
    system: str
    accelerator: str | None
    accelerators: int | None
    nodes: int
    benchmark: str
    used_model: str
    scenario: str
    output_tokens_per_second: float
    precision: str | None
    software: str
    measured_watts: float | None

    @property
    def name(self) -> str:
        """Unique name of the row."""
        return f"{self.id}:{self.benchmark}:{self.scenario}"

    @property
    def source(self) -> str:
        """Where the row is from."""
        return f"MLPerf Inference v5.1, {self.submitter}, {self.id} (data/{RESULTS}, line {self.line})"


@cache
def published_results() -> tuple[PublishedResult, ...]:
    """All rows of the table, in its order."""
    return tuple(
        PublishedResult(
            line=line,
            id=row["id"],
            submitter=row["submitter"],
            division=row["division"],
            system=row["system"].strip(),
            accelerator=row["accelerator"] or None,
            accelerators=int(row["total_accelerators"]) if row["total_accelerators"] else None,
            nodes=int(row["nodes"]),
            benchmark=row["benchmark"],
            used_model=row["used_model"].replace("llama3_1", "llama3.1"),
            scenario=row["scenario"],
            output_tokens_per_second=float(row["result"]),  # all rows: the eight "Queries/s" are tokens/s in the logs
            precision=None if row["weight_data_types"] == "UNSET" else row["weight_data_types"].lower(),
            software=row["software"],
            measured_watts=float(row["power_result"]) if row["power_result"] else None,
        )
        for line, row in _rows(RESULTS)
    )


def published_result(submission: str, benchmark: str, scenario: str) -> PublishedResult:
    """The row of a submission.

    Raises:
        UsageError: there is none; the message lists what the submission has, or says that it has no such id.
    """
    of_submission = [row for row in published_results() if row.id == submission]
    for row in of_submission:
        if (row.benchmark, row.scenario.lower()) == (benchmark, scenario.lower()):
            return row
    if of_submission:
        has = ", ".join(f"{row.benchmark}:{row.scenario}" for row in of_submission)
        raise UsageError(f"{submission} has no published {benchmark} {scenario} result; it has {has}")
    raise UsageError(
        f"{submission} is not among the language model results of MLPerf Inference v5.1, the only round in the shipped"
        " table; that says nothing about the system"
    )


def results_of(accelerator: str, benchmark: str, scenario: str) -> list[PublishedResult]:
    """Rows of systems with that accelerator alone, fastest per accelerator first; closed division before the others.

    ``accelerator`` is a word or several of its name: ``GB200``, ``H200-SXM``. ``B200`` is not in ``GB200``.
    ``scenario`` is in any case.
    """
    name = re.compile(rf"(?<!\w){re.escape(accelerator)}(?!\w)", re.IGNORECASE)
    found = [
        row
        for row in published_results()
        if row.accelerator and row.accelerators and "(x" not in row.accelerator and name.search(row.accelerator)
        if (row.benchmark, row.scenario.lower()) == (benchmark, scenario.lower())
    ]
    return sorted(
        found, key=lambda row: (row.division != "closed", -row.output_tokens_per_second / (row.accelerators or 1))
    )


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

    None if none is known: also for a mix of accelerators, and for PCIe cards (``H200-NVL``) and slices of a GPU, whose
    power differs.
    """
    text = (name or "").upper()
    if re.search(r"\bNVL\b|PCIE|\bMIG\b|\(X\d", text):
        return None
    known = set(re.findall(r"[A-Z]+\d+\w*", text)) & accelerator_table().keys()
    return accelerator_table()[known.pop()] if len(known) == 1 else None


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
