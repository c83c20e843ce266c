"""Build a submission tree from run folders, completely or not at all; unknown values are marked to be filled in."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from megatoken.audit.evidence import Role
from megatoken.errors import UsageError
from megatoken.files import plain, storage_error, to_json
from megatoken.mlperf.accuracy_log import ACCURACY_LOG, TRUNCATED_BYTES, read_accuracy_scores
from megatoken.mlperf.benchmarks import Benchmark, benchmarks
from megatoken.mlperf.compliance import compliance_file
from megatoken.mlperf.detail_log import DETAIL_LOG
from megatoken.mlperf.submission_layout import MODEL_MAPPING, TO_FILL, Key, Layout, layout_of, supported_round
from megatoken.runs.seal import refuse_sealed
from megatoken.submission import description
from megatoken.submission.runs import (
    ACCURACY_TXT,
    SUMMARY,
    RefusedRunsError,
    SubmittedRun,
    family_of,
    missing_runs,
    other_references,
    read_runs,
)
from megatoken.text import count_of

SCHEMA_VERSION = 1
DIVISIONS = ("closed", "open")
KEPT_BYTES = 4096  # of each end of an accuracy log: tools/submission/truncate_accuracy_log.py of mlcommons/inference
GAP = b"\n\n...\n\n"
_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]*")

Content = bytes | Path  # what a file holds, or the file to copy


@dataclass(frozen=True, slots=True)
class Built:
    """A written tree, with the fields to fill in (file, line counted from 1, text) and notes."""

    path: Path
    benchmark: str
    system: str
    scenarios: tuple[str, ...]
    to_fill: tuple[tuple[str, int, str], ...]
    notes: tuple[str, ...]

    def to_document(self) -> dict[str, Any]:
        """Plain JSON of the kind ``submission_build``."""
        left = [dict(zip(("file", "line", "text"), one, strict=True)) for one in self.to_fill]
        document = {"kind": "submission_build", "schema_version": SCHEMA_VERSION, **asdict(self), "to_fill": left}
        return dict(plain(document))

    def describe(self) -> Iterator[str]:
        """Text lines."""
        for file, line, text in self.to_fill:
            yield f"{self.path / file}:{line}: {text}"
        if self.to_fill:
            fields = count_of(len(self.to_fill), "field")
            yield f"{fields} to fill in; megatoken submission check refuses the tree until that is done"
        yield from (f"Note: {note}" for note in self.notes)
        yield f"Submission of {self.benchmark}, {', '.join(self.scenarios)}, system {self.system}: {self.path}"


def build(
    # for each scenario a performance run, an accuracy run and, in the closed division, the compliance test
    paths: Sequence[Path],
    *,
    submitter: str,  # name of the submitter's folder, also in the system description
    division: str,  # closed or open
    round_: str,  # v5.1, v6.0 or v6.1
    out: Path,  # folder to create; must not exist, or be empty
    # MLPerf's folder name. None: from the model name and the scores, or as the runs claim.
    benchmark: str | None = None,
    system: str | None = None,  # name of the system. None: from the hardware inventory.
) -> Built:
    """Write the submission of one system and one model to ``out``.

    Raises RefusedRunsError: run folders that cannot be submitted, one line each; UsageError: an invalid name, division
    or round, or ``out`` is in use or sealed; StorageError: ``out`` cannot be written. Nothing is left behind.
    """
    round_ = supported_round(round_)
    if division not in DIVISIONS:
        raise UsageError(f"--division {division}: must be closed or open")
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise UsageError(f"{out}: already exists; give a new folder with --out")
    refuse_sealed(out)
    runs = read_runs(paths, round_, division)
    chosen = _benchmark(runs, round_, division, benchmark)
    if lines := list(missing_runs(runs, chosen, division)):
        raise RefusedRunsError(lines)
    name = system or description.system_name(runs[0].run)
    for flag, text in (("--submitter", submitter), ("--system", name)):
        if not _NAME.fullmatch(text):
            raise UsageError(f"{flag} {text!r}: must be a folder name of letters, digits, dots, dashes and underscores")
    files = dict(_files(runs, chosen, submitter, division, layout_of(round_), name))
    _write({f"{division}/{submitter}/{path}": content for path, content in files.items()}, out)
    scenarios = tuple(dict.fromkeys(run.scenario for run in runs))
    notes = tuple(
        f"scored against {references}, which is not a data set of MLPerf: not scores of {chosen.name}"
        for references in map(other_references, runs)
        if references
    )
    return Built(out, chosen.name, name, scenarios, tuple(_left(out)), notes)


def truncated(path: Path) -> bytes:
    """An accuracy log for a submission: only its two ends if it is longer than the rules allow."""
    with path.open("rb") as file:
        size = file.seek(0, os.SEEK_END)
        file.seek(0)
        if size <= TRUNCATED_BYTES:
            return file.read()
        start = file.read(KEPT_BYTES)
        file.seek(-KEPT_BYTES, os.SEEK_END)
        return start + GAP + file.read()


def _benchmark(runs: Sequence[SubmittedRun], round_: str, division: str, wanted: str | None) -> Benchmark:
    """The benchmark of the runs, by model name, data set rows and scores."""
    family = family_of(runs[0].model)
    if division == "open":
        family = runs[0].run.result.get("benchmark") or runs[0].run.config.get("benchmark") or family
    known = {name: entry.in_round(round_) for name, entry in benchmarks().items() if round_ in entry.rounds}
    candidates = [name for name in known if family and re.fullmatch(rf"{re.escape(family)}(-99|-99\.9|-edge)?", name)]
    if wanted is not None:
        if wanted not in known:
            raise UsageError(f"--benchmark {wanted}: {round_} has {', '.join(known)}")
        if division == "closed" and wanted not in candidates:
            fix = "give runs of that model, or --division open"
            raise UsageError(f"{runs[0].path}: model {runs[0].model} is not the model of {wanted}; {fix}")
        if candidates and wanted not in candidates:
            fix = f"use {' or '.join(candidates)}, or repeat the runs for {wanted}"
            raise UsageError(f"{runs[0].path}: claims the rules of {family}, not of {wanted}; {fix}")
        return known[wanted]
    if not candidates:
        fix = "give --division open and --benchmark" if division == "closed" else "give --benchmark"
        what = f"belongs to no benchmark of {round_} ({', '.join(known)})"
        raise UsageError(f"{runs[0].path}: model {runs[0].model} {what}; {fix}")
    rows = {name for name in candidates if known[name].rows == runs[0].run.result.get("data_set_rows")}
    reached = [name for name in candidates if (not rows or name in rows) and _reaches(runs, known[name])]
    chosen = reached[-1] if reached else next((name for name in candidates if name in rows), candidates[0])
    return known[chosen]


def _reaches(runs: Sequence[SubmittedRun], benchmark: Benchmark) -> bool:
    """Whether every accuracy run reaches the scores on MLPerf's data set."""
    if any(map(other_references, runs)):
        return False
    files = [run.path / ACCURACY_TXT for run in runs if run.role is Role.ACCURACY]
    if not files or not all(file.is_file() for file in files):
        return False
    scores = [read_accuracy_scores(file).scores for file in files]
    return all(found.get(name, -1.0) >= target for found in scores for name, target in benchmark.accuracy.items())


def _files(
    runs: Sequence[SubmittedRun], benchmark: Benchmark, submitter: str, division: str, layout: Layout, system: str
) -> Iterator[tuple[str, Content]]:
    """Every file below ``<division>/<submitter>``."""
    first = runs[0].run
    folder = benchmark.name
    if division == "open" and family_of(runs[0].model) is None:
        folder = "_".join(re.findall(r"[A-Za-z0-9.-]+", runs[0].model)).lstrip(".") or "model"
        yield MODEL_MAPPING, _json({folder: benchmark.name})
    for run in runs:
        key = Key(system, folder, run.scenario)
        if run.role is Role.PERFORMANCE:
            yield from _performance(run, key, layout)
        elif run.role is Role.ACCURACY:
            place = f"{layout.results(key)}/accuracy"
            yield from ((f"{place}/{name}", run.logs / name) for name in (SUMMARY, DETAIL_LOG))
            yield f"{place}/{ACCURACY_LOG}", truncated(run.logs / ACCURACY_LOG)
            yield f"{place}/accuracy.txt", run.path / ACCURACY_TXT
        else:
            for test in benchmark.compliance:
                place = f"{layout.compliance(key)}/{test}"
                yield f"{place}/{compliance_file(test)}", run.verified(test)
                yield f"{place}/accuracy/{ACCURACY_LOG}", run.logs / ACCURACY_LOG
    names = {"submitter": submitter, "division": division, "benchmark": benchmark.name, "name": system}
    yield f"systems/{system}.json", _json(description.system_description(first, **names))
    yield f"{layout.code(folder)}/README.md", description.code_readme(first).encode()
    if division == "closed":
        yield "documentation/calibration.md", description.calibration(first).encode()


def _performance(run: SubmittedRun, key: Key, layout: Layout) -> Iterator[tuple[str, Content]]:
    place = f"{layout.results(key)}/performance/run_1"
    yield from ((f"{place}/{name}", run.logs / name) for name in (SUMMARY, DETAIL_LOG, ACCURACY_LOG))
    place = layout.description(key)
    yield f"{place}/{layout.description_name(key)}", _json(description.model_description(run.run))
    yield f"{place}/user.conf", run.logs / "user.conf"
    yield f"{place}/README.md", description.readme(run.run, key.benchmark, key.scenario).encode()


def _json(value: Mapping[str, object]) -> bytes:
    return to_json(value).encode()


def _write(files: Mapping[str, Content], out: Path) -> None:
    """Write all files to a hidden folder next to ``out``, then rename it."""
    draft = out.parent / f".{out.name}.{os.getpid()}.tmp"
    try:
        for path, content in files.items():
            target = draft / path
            target.parent.mkdir(parents=True, exist_ok=True)
            if isinstance(content, Path):
                shutil.copyfile(content, target)
            else:
                target.write_bytes(content)
        draft.rename(out)
    except BaseException as error:
        shutil.rmtree(draft, ignore_errors=True)
        if isinstance(error, OSError):
            raise storage_error(out, error) from error
        raise


def _left(out: Path) -> Iterator[tuple[str, int, str]]:
    for path in sorted(path for path in out.rglob("*") if path.suffix in (".json", ".md")):
        if path.name == ACCURACY_LOG:
            continue
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
            if TO_FILL in line:
                yield str(path.relative_to(out)), number, line.strip().rstrip(",")
