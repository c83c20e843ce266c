"""Read run folders for a submission: the role of each, and why a run is refused."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from megatoken.audit.checks.run_folder import check_run_folder
from megatoken.audit.discovery import runs_in, walk
from megatoken.audit.evidence import Role
from megatoken.audit.examine import Job, examine
from megatoken.audit.finding import Severity
from megatoken.errors import UsageError
from megatoken.files import UnreadableError, mapping, read_json_object
from megatoken.mlperf.accuracy_log import ACCURACY_LOG
from megatoken.mlperf.benchmarks import SCENARIOS, Benchmark
from megatoken.mlperf.compliance import DOCUMENT, compliance_file
from megatoken.mlperf.detail_log import ABANDONED, DETAIL_LOG, DetailLog, read_detail_log
from megatoken.mlperf.rules import LIMITS_GIVEN, were_given
from megatoken.mlperf.run_figures import run_figures, samples_answers
from megatoken.runs.run import MLPERF, Run, Verdict, read_run
from megatoken.submission.description import is_random, same_system
from megatoken.text import count_of

SUMMARY = "mlperf_log_summary.txt"
USER_CONF = "user.conf"
ACCURACY_TXT, ACCURACY_JSON = "accuracy/accuracy.txt", "accuracy/accuracy.json"
ONE_FOR_ALL = {"model": "model", "weights": "weights", "precision": "precision", "data_set_sha256": "data set"}
FILES_FOR_ALL = {"tokenizer_sha256": "tokenizer", "chat_template_sha256": "chat template"}
LATENCY_CODES = {"TTFT_LIMIT", "TPOT_LIMIT"}
_FAMILIES = {
    "llama2-70b": r"llama[-_ ]?2[-_ ]70b",
    "llama3.1-405b": r"llama[-_ ]?3[._]1[-_ ]405b",
    "llama3.1-8b": r"llama[-_ ]?3[._]1[-_ ]8b",
}


class RefusedRunsError(UsageError):
    """Run folders that cannot be submitted, one line each."""

    def __init__(self, lines: Sequence[str]) -> None:
        super().__init__("; ".join(lines))
        self.lines = tuple(lines)


@dataclass(frozen=True, slots=True)
class SubmittedRun:
    """A run folder and LoadGen's log of it."""

    run: Run
    role: Role
    scenario: str  # as MLPerf names the folder
    log: DetailLog

    @property
    def path(self) -> Path:
        """The folder of the run."""
        return self.run.path

    @property
    def logs(self) -> Path:
        """LoadGen's files."""
        return self.run.path / MLPERF

    @property
    def model(self) -> str:
        """Name of the model."""
        return str(self.run.result.get("model"))

    def verified(self, test: str) -> Path:
        """The file that ``megatoken verify`` writes for a compliance test."""
        return self.path / "compliance" / test / compliance_file(test)


def read_runs(paths: Iterable[Path], round_: str, division: str) -> list[SubmittedRun]:
    """Read every run folder and compare it with the round and with the first run. Raises RefusedRunsError."""
    runs: list[SubmittedRun] = []
    refused: list[str] = []
    for path in paths:
        try:
            runs.append(_read(path, round_))
        except UsageError as error:
            refused.append(str(error))
    for run in runs:
        refused += [f"{run.path}: {reason}" for reason in _unlike(run, runs[0], division)][:1]
    if refused:
        raise RefusedRunsError(refused)
    return runs


def family_of(model: str) -> str | None:
    """The MLPerf model with this checkpoint or shape name: llama2-70b, llama3.1-405b or llama3.1-8b."""
    name = model.lower().replace("meta-", "")
    return next((family for family, pattern in _FAMILIES.items() if re.search(pattern, name)), None)


def other_references(run: SubmittedRun) -> str | None:
    """The references of an accuracy run, if they are not a data set of MLPerf."""
    path = run.path / ACCURACY_JSON
    if run.role is not Role.ACCURACY or not path.is_file():
        return None
    document, _, _ = read_json_object(path)
    return None if document.get("data_set", "") is not None else str(document.get("references"))


def missing_runs(runs: Sequence[SubmittedRun], benchmark: Benchmark, division: str) -> Iterator[str]:
    """One line for each run that is missing, duplicate or not evaluated."""
    for scenario in dict.fromkeys(run.scenario for run in runs):
        mine = [run for run in runs if run.scenario == scenario]
        needed = {Role.PERFORMANCE: "performance run", Role.ACCURACY: "accuracy run"}
        if division == "closed" and benchmark.compliance:
            needed[Role.COMPLIANCE] = f"{benchmark.compliance[0]} run"
        for role, what in needed.items():
            found = [run for run in mine if run.role is role]
            if not found:
                how = {Role.ACCURACY: "--mode accuracy", Role.COMPLIANCE: "--compliance TEST06"}.get(role, "--rules")
                yield f"{scenario}: no {what} among the run folders; add one (megatoken run {how})"
            elif len(found) > 1:
                yield f"{scenario}: {len(found)} {what}s ({', '.join(str(run.path) for run in found)}); give one"
    for run in runs:
        yield from _unevaluated(run, benchmark)
        yield from _other_limits(run, benchmark)
        if division == "closed" and (references := other_references(run)):
            what = f"its answers were scored against {references}, not a data set of MLPerf"
            yield f"{run.path}: {what}; the closed division needs one (--prompts, --references)"


def _read(path: Path, round_: str) -> SubmittedRun:
    run = read_run(path)
    log = _log(path)
    role = _role(log)
    reason = _unfinished(run, role, round_) or _unlike_log(run, log, role, round_)
    if reason:
        raise UsageError(f"{path}: {reason}")
    return SubmittedRun(run, role, SCENARIOS[str(run.result["scenario"]).lower()], log)


def _log(path: Path) -> DetailLog:
    for name in (DETAIL_LOG, SUMMARY, ACCURACY_LOG, USER_CONF):
        if not (path / MLPERF / name).is_file():
            raise UsageError(f"{path}: no {MLPERF}/{name}; copy the run folder again or repeat the run")
    try:
        return read_detail_log(path / MLPERF / DETAIL_LOG)
    except UnreadableError as error:
        raise UsageError(
            f"{path}: {MLPERF}/{DETAIL_LOG} {error}; copy the run folder again or repeat the run"
        ) from None


def _role(log: DetailLog) -> Role:
    """The role of a run: compliance tests are performance runs that log some of their answers."""
    if log.text("effective_test_mode") == "AccuracyOnly":
        return Role.ACCURACY
    return Role.COMPLIANCE if samples_answers(log) else Role.PERFORMANCE


def _unfinished(run: Run, role: Role, round_: str) -> str | None:
    """Why the verdict of a run excludes it."""
    codes = ", ".join(reason["code"] for reason in run.reasons)
    if run.verdict is Verdict.INTERRUPTED or (run.path / MLPERF / ABANDONED).exists():
        return f"INTERRUPTED ({codes or ABANDONED}); repeat the run"
    if run.verdict is Verdict.DEGRADED:
        return "DEGRADED: replicas were lost during the run; repeat the run"
    if run.result.get("samples_failed"):
        return f"{count_of(run.result['samples_failed'], 'sample')} failed; repeat the run"
    if role is Role.PERFORMANCE and run.verdict is Verdict.MEASURED:
        return f"MEASURED: no rules claimed; repeat the run with --rules {round_}"
    if run.verdict is Verdict.INVALID:
        test = " --compliance TEST06" if role is Role.COMPLIANCE else ""
        how = "without --samples and --min-duration"
        if codes == "DATA_SET_SIZE":
            how = "on MLPerf's whole data set (--prompts)"
        elif any(reason["code"] in LATENCY_CODES for reason in run.reasons):
            how = "at a lower rate"
        return f"INVALID ({codes}); repeat the run with --rules {round_}{test} {how}"
    return None


def _unlike_log(run: Run, log: DetailLog, role: Role, round_: str) -> str | None:
    """How LoadGen's log differs from the run folder or from the round; None if it does not."""
    figures = run_figures(log)
    scenario = SCENARIOS.get(str(run.result.get("scenario")).lower())
    logged = "Server" if scenario == "Interactive" else scenario
    if scenario is None or figures.scenario != logged:
        return f"result.json says scenario {run.result.get('scenario')}, LoadGen's log says {figures.scenario}"
    if (run.result.get("mode") == "accuracy") != (role is Role.ACCURACY):
        return f"result.json says mode {run.result.get('mode')}, LoadGen's log says {figures.mode}"
    if figures.round != round_:
        of = f"those of {figures.round}" if figures.round else "not those of a known round"
        return f"LoadGen's seeds are {of}, not those of {round_}; repeat the run with --rules {round_}"
    if role is Role.PERFORMANCE and figures.validity != "VALID":
        return f"LoadGen's log says {figures.validity}, result.json says {run.verdict}; repeat the run"
    if role is not Role.COMPLIANCE and log.error_count:
        return f"LoadGen logged {count_of(log.error_count, 'error')}, the first: {log.errors[0].value}; repeat the run"
    tree = walk(run.path)
    files = [files for files in runs_in(tree) if files.folder == MLPERF]
    own = [examine(Job(str(tree.root), one, None, None, False)).run for one in files]
    for one in check_run_folder(tree, "", own):
        if one.severity is Severity.FAIL:
            return f"changed after the run, by {one.id}: expected {one.expected}, found {one.found}; repeat the run"
    return None


def _unlike(run: SubmittedRun, first: SubmittedRun, division: str) -> Iterator[str]:
    """Why a run cannot be in the same submission as the first run."""
    result, other = run.run.result, first.run.result
    for key, what in ONE_FOR_ALL.items():
        if result.get(key) != other.get(key):
            yield f"{what} is {result.get(key)}, but {other.get(key)} in {first.path}"
    files, others = (mapping(one.get("identity")) for one in (result, other))
    for key, what in FILES_FOR_ALL.items():
        if None not in (found := (files.get(key), others.get(key))) and found[0] != found[1]:
            yield f"{what} is {found[0]}, but {found[1]} in {first.path}"
    if not same_system(run.run, first.run):
        yield f"machine or LoadGen version differs from {first.path}; a submission has one system"
    if division == "closed":
        if is_random(run.run):
            yield "random weights are not allowed in the closed division; give --division open"
        if any(note["code"] == "RANDOM_PROMPTS" for note in result.get("notes") or []):
            yield "its prompts are random tokens; the closed division needs MLPerf's data set (--prompts)"


def _unevaluated(run: SubmittedRun, benchmark: Benchmark) -> Iterator[str]:
    if run.role is Role.ACCURACY:
        path = run.path / ACCURACY_TXT
        if not path.is_file():
            yield f"{run.path}: no {ACCURACY_TXT}; create it: megatoken accuracy {run.path}"
            return
        lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
        digest = next((line.removeprefix("hash=") for line in reversed(lines) if line.startswith("hash=")), None)
        with (run.logs / ACCURACY_LOG).open("rb") as answers:
            scored = hashlib.file_digest(answers, "sha256").hexdigest()
        if digest != scored:
            yield f"{path}: not the hash of {ACCURACY_LOG}; evaluate the run again: megatoken accuracy {run.path}"
    elif run.role is Role.COMPLIANCE:
        for test in benchmark.compliance:
            file = run.verified(test)
            if not file.is_file():
                yield f"{run.path}: no {file.relative_to(run.path)}; create it: megatoken verify {test} {run.path}"
            elif not file.read_text(encoding="utf-8", errors="replace").endswith(f"{test} verification complete\n"):
                yield f"{file}: the test did not pass; see megatoken verify {test} {run.path}"
            elif (found := _other_end_tokens(run, file.with_name(DOCUMENT))) is not None:
                yield f"{file}: verified with {found}, not those of the run; repeat megatoken verify {test} {run.path}"


def _other_end_tokens(run: SubmittedRun, file: Path) -> str | None:
    """The end tokens with which a test was verified, if they differ from those of the run."""
    mine = mapping(run.run.result.get("compliance")).get("end_token_ids")
    try:
        theirs = read_json_object(file)[0].get("end_token_ids")
    except UnreadableError:
        return None
    if not isinstance(mine, list) or not isinstance(theirs, list) or set(map(str, mine)) == set(map(str, theirs)):
        return None
    return f"end tokens {', '.join(map(str, theirs))}"


def _other_limits(run: SubmittedRun, benchmark: Benchmark) -> Iterator[str]:
    """A line if LoadGen was given other latency limits than the benchmark has: its verdict is for these."""
    limits = benchmark.limits.get(run.scenario)
    if run.role is Role.PERFORMANCE and limits is not None and not were_given(limits, run.log):
        given = " and ".join(str(run.log.number(key)) for key in LIMITS_GIVEN)
        theirs = f"the limits of {benchmark.name} {run.scenario} are {limits.ttft_ns} and {limits.tpot_ns}"
        yield f"{run.path}: LoadGen was given TTFT and TPOT limits of {given} ns, {theirs}; repeat the run"
