"""Auditing: published artefacts, or a run folder -> evidence and findings."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from megatoken.analysis.aggregation import Aggregate, aggregate
from megatoken.analysis.standing import verified_standing
from megatoken.archives import unpacked
from megatoken.audit.checks import endpoints as endpoint_checks
from megatoken.audit.checks import load_tools as tool_checks
from megatoken.audit.checks import systems as system_checks
from megatoken.audit.checks.cross import check_accuracy_evidence, check_layout, check_rounds
from megatoken.audit.checks.nodes import check_nodes, check_systems_apart, process_steps
from megatoken.audit.checks.power import power_of
from megatoken.audit.checks.run_folder import (
    check_copies,
    check_lost_files,
    check_repeats,
    check_run_folder,
    check_seals,
    check_sweeps,
    interruptions,
    lost_files_in,
    lost_files_note,
    run_folders_in,
)
from megatoken.audit.checks.submission import (
    Submission,
    check_names,
    check_submission,
    layout_in,
    submissions_in,
    system_folders,
)
from megatoken.audit.discovery import Tree, below, innermost, runs_in, walk
from megatoken.audit.documents import (
    READABLE,
    accuracy_results_in,
    configurations_in,
    json_values,
    named_system,
    systems_in,
    user_conf_of,
)
from megatoken.audit.evidence import Evidence, Role, Run, System, node_rows, places
from megatoken.audit.examine import Job, Progress, examine_all
from megatoken.audit.finding import Finding, Ledger, Observation, Outcome, Reported, Severity, check, outcome
from megatoken.audit.placement import meanings, meant, results_above, scores_meant
from megatoken.audit.stated import endpoint_results_in, tool_results_in
from megatoken.audit.view import RunFiles
from megatoken.errors import ExitCode, UsageError
from megatoken.files import UnreadableError, display, new_document, read_text
from megatoken.mlperf.detail_log import ABANDONED
from megatoken.mlperf.endpoints_report import ACCURACY
from megatoken.mlperf.rounds import has_rules, known_round
from megatoken.mlperf.run_figures import with_leading_rates
from megatoken.mlperf.submission_layout import layout_of
from megatoken.runs.run import RESULT, Verdict
from megatoken.text import count_of, natural

MOST_README_BYTES = 2**20
MOST_READMES = 50
MOST_INTERRUPTED = 10


@dataclass(frozen=True, slots=True)
class Audit:
    """What was found and what it means; ``claims`` are added by the caller that judges them."""

    evidence: Evidence
    findings: tuple[Finding, ...]
    aggregate: Aggregate | None  # of runs that can be the nodes of one result
    notes: tuple[str, ...] = ()
    claims: tuple[dict[str, Any], ...] = ()

    @property
    def counts(self) -> dict[str, int]:
        """How many findings of each severity."""
        return {str(severity): sum(finding.severity is severity for finding in self.findings) for severity in Severity}

    @property
    def exit_code(self) -> ExitCode:
        """INVALID when a fail stands."""
        return ExitCode.INVALID if self.counts["fail"] else ExitCode.OK

    def to_document(self) -> dict[str, Any]:
        """Plain JSON of the kind ``audit``."""
        together = self.aggregate.to_document() if self.aggregate else None
        slow = set(self.aggregate.stragglers.nodes) if self.aggregate else set()
        return new_document(
            "audit",
            title=f"Audit of {Path(self.evidence.root).name}",
            inputs=[self.evidence.root],
            notes=self.notes,
            artefact_kind=self.evidence.kind,
            round=self.evidence.round,
            findings=[asdict(finding) for finding in self.findings],
            counts=self.counts,
            artefacts=[run.to_document() for run in self.evidence.runs],
            systems=[{"path": system.path, **system.values} for system in self.evidence.systems],
            nodes=[_node_document(run, slow) for run in self.evidence.performance_runs] if together else [],
            aggregate=together,
            claims=self.claims,
        )


def audit(
    path: Path, *, round: str | None = None, progress: Progress | None = None, workers: int | None = None
) -> Audit:
    """Reads the artefacts at ``path`` and checks them.

    Args:
        path: A folder of LoadGen's logs (one run, many nodes, a submission), a megatoken run folder, or a zip or tar
            archive of one of these.
        round: Whose rules are claimed, such as v5.1; None: that of a submission's seeds, elsewhere none.
        progress: Called with (entries seen, 0) while the folder is listed, then with (runs done, runs).
        workers: Processes; by default one a core.

    Raises:
        UsageError: No such folder, no logs in it, an unknown round, or an archive that is refused.
    """
    claimed = known_round(round) if round else None
    with ExitStack() as stack:
        folder = path
        if path.is_file():
            folder = stack.enter_context(unpacked(path))
        elif not path.is_dir():
            what = "no folder, zip or tar archive" if path.exists() else "no such folder or archive"
            raise UsageError(f"{path}: {what}; give the folder that holds the logs")
        tree = walk(folder, (lambda seen: progress(seen, 0)) if progress else None)
        return _audit(tree, path, claimed, progress, workers)


def read_evidence(path: Path) -> Evidence:
    """What the artefacts at ``path`` hold, without findings. Raises UsageError as ``audit`` does."""
    return audit(path).evidence


def _audit(tree: Tree, path: Path, claimed: str | None, progress: Progress | None, workers: int | None) -> Audit:
    submissions = submissions_in(tree)
    meaning = meanings(tree, submissions)
    run_folders = run_folders_in(tree)
    logs = runs_in(tree)
    folders = set(run_folders)
    placed = [
        run
        for run in logs
        if not meaning or results_above(run.folder, meaning) or innermost(run.folder, folders) is not None
    ]
    apart = [run.folder for run in logs if run not in placed]
    files = [meant(run, meaning) for run in placed]
    rules_claimed = bool(submissions or claimed)
    endpoints, endpoint_damages = endpoint_results_in(tree, claimed, rules_claimed)
    tools, tool_damages = ([], []) if submissions else tool_results_in(tree)
    lost = lost_files_in(tree)
    if not any((files, endpoints, endpoint_damages, run_folders, tools, tool_damages)):
        raise _nothing_to_audit(path, lost)
    ledger = Ledger()
    systems, damages = systems_in(tree, system_folders(submissions))
    for kind, wrong in (("system", damages), ("endpoint", endpoint_damages), ("tool", tool_damages)):
        for file, damage in wrong:
            ledger.add(READABLE[kind](file, damage))
    interrupted = interruptions(tree, run_folders)

    def stated(path: str) -> Mapping[str, Any]:
        folder = innermost(path, folders)
        return {} if folder is None else json_values(tree, below(folder, RESULT)) or {}

    def job(run: RunFiles) -> Job:
        system, user_conf = _system_path(run, systems), user_conf_of(tree, run.folder)
        folder = innermost(run.folder, folders)
        early = folder in interrupted if folder is not None else ABANDONED in run.others and not rules_claimed
        failed = bool(stated(run.folder).get("samples_failed"))
        return Job(str(tree.root), run, system, claimed, rules_claimed, user_conf, early, failed)

    runs = []
    lines: dict[tuple[tuple[str, int], ...], Mapping[str, int]] = {}  # large, and alike in all runs of one kind
    for examined in examine_all(list(map(job, files)), progress, workers):
        own = examined.run.source_lines
        run = replace(examined.run, source_lines=lines.setdefault(tuple(own.items()), own))
        runs.append(replace(run, figures=with_leading_rates(run.figures, stated(run.path))))
        ledger.add(examined.observations)
    for result in endpoints:
        runs.append(replace(result.run, system=_system_path(result.files, systems)))
        ledger.add(endpoint_checks.check_endpoint(tree, result))
    only = systems[0].path if len(systems) == 1 else None  # a load tool names no system
    for tool_result in tools:
        runs.append(replace(tool_result.run, system=only))
        ledger.add(tool_checks.check_tool_result(tool_result))
    power, power_observations = power_of(tree, runs)
    ledger.add(power_observations)
    rounds = {run.figures.round for run in runs}
    evidence = Evidence(
        root=str(path),
        kind="runs" if len(tools) > 1 else _kind(runs, bool(submissions), run_folders),
        round=claimed or (rounds.pop() if len(rounds) == 1 else None),
        runs=tuple(runs),
        systems=tuple(systems),
        configurations=() if submissions else tuple(configurations_in(tree)),
        accuracy_results=tuple(scores_meant(accuracy_results_in(tree), meaning)),
        power=tuple(power),
    )
    ledger.add(_check_evidence(tree, evidence, submissions, claimed))
    for folder in run_folders:
        ledger.add(check_run_folder(tree, folder, evidence.runs))
    ledger.add(check_lost_files(tree, lost))
    ledger.add(check_seals(tree))
    ledger.add(check_copies(tree, evidence.runs))
    ledger.add(check_repeats(tree))
    ledger.add(check_sweeps(tree))
    together = None
    if evidence.kind == "nodes":
        ledger.add(system_checks.check_versions_elsewhere(systems, _readmes(tree)))
        together = _together(evidence)
        ledger.add(check_nodes(evidence, evidence.performance_runs, together))
    notes = (
        *(lost_files_note(folder, missing) for folder, missing in lost.items()),
        *_standing(evidence, together),
        *_notes(tree, evidence, claimed, interrupted, (len(files), len(endpoints), len(tools)), apart),
    )
    return Audit(evidence, ledger.findings(), together, notes)


def _nothing_to_audit(path: Path, lost: Mapping[str, Sequence[str]]) -> UsageError:
    if without_result := sorted((folder for folder, missing in lost.items() if RESULT in missing), key=natural):
        why = f"a run folder without {RESULT}, so there is no result to audit; copy it again or repeat the run"
        return UsageError(f"{path / without_result[0]}: {why}")
    expected = "expected files named mlperf_log_detail.txt and mlperf_log_summary.txt"
    return UsageError(f"{path}: no LoadGen logs below it; {expected}")


def _check_evidence(
    tree: Tree, evidence: Evidence, submissions: Sequence[Submission], claimed: str | None
) -> Iterator[Observation]:
    """What only several files together show."""
    yield from _unreadable(tree)
    yield from _links(tree)
    yield from check_rounds(evidence)
    if submissions:
        yield from check_names(tree)
        for one in submissions:
            round_ = claimed or _round_of(one, evidence.performance_runs)
            layout = layout_of(claimed) if claimed else layout_in(tree, one, round_)
            yield from check_submission(tree, one, evidence.systems, layout, ruled=has_rules(round_))
        yield from check_systems_apart(evidence.runs)
    elif claimed:
        yield from check_layout(tree, evidence)
    ending = f"/accuracy/{ACCURACY}"
    scored = {display(path.removesuffix(ending)) for path in tree.files if path.endswith(ending)}
    yield from check_accuracy_evidence(evidence, claimed=bool(submissions or claimed), scored=scored)
    for system in evidence.systems:
        yield from system_checks.check_system(system, any(one.describes(system.path) for one in submissions))
    for configuration in evidence.configurations:
        yield from system_checks.configured_rate(configuration, evidence.performance_runs)
        yield from system_checks.parallelism(configuration)


def _round_of(one: Submission, runs: Sequence[Run]) -> str | None:
    """The round of most seeds of its results."""
    mine = Counter(run.figures.round for run in runs if run.path.startswith(display(below(one.path, "results/"))))
    return mine.most_common(1)[0][0] if mine else None


@check("tree.unreadable", "Folders that cannot be read", "Their contents were not audited.")
def _unreadable(tree: Tree) -> Outcome | None:
    if not tree.unreadable:
        return None
    found = f"{len(tree.unreadable)} that cannot, the first: {tree.unreadable[0][1]}"
    where = places(*(path for path, _ in tree.unreadable[:50]))
    return outcome(False, "folders that can be read", found, where, Severity.WARN)


@check("tree.links", "Links", "Links to folders, and out of the audited folder, are not followed.")
def _links(tree: Tree) -> Outcome | None:
    links = [*tree.folder_links, *tree.outside_links]
    found = f"{count_of(len(links), 'link')}, not followed"
    return Outcome(Severity.NOTE, "files and folders, no links", found, places(*links[:50])) if links else None


def _kind(runs: Sequence[Run], submission: bool, run_folders: Sequence[str]) -> str:
    if submission:
        return "submission"
    if "" in run_folders:
        return "megatoken_run"
    performance = [run for run in runs if run.role is Role.PERFORMANCE]
    if len(performance) <= 1:
        return "run"
    alike = len({(run.benchmark, run.figures.scenario) for run in performance}) == 1
    return "nodes" if alike and len(run_folders) < 2 else "runs"  # two run folders are two runs, not two nodes


def _together(evidence: Evidence) -> Aggregate | None:
    runs = evidence.performance_runs
    rows = node_rows(evidence, runs)
    if len(rows) != len(runs):
        return None
    try:
        return aggregate(rows, title="Nodes as one result", inputs=[evidence.root], observations=process_steps(runs))
    except UsageError:  # nodes that did not do the same work have no common rate
        return None


def _system_path(run: RunFiles, systems: Sequence[System]) -> str | None:
    """The description named like the run's system folder, else one whose name it begins with, else the only one."""
    own = [system for system in systems if run.submitter is None or f"/{run.submitter}/" in f"/{system.path}"]
    if (named := named_system(run.system or "", own)) is not None:
        return named.path
    return own[0].path if len(own) == 1 and run.submitter is None else None


def _readmes(tree: Tree) -> dict[str, str]:
    texts: dict[str, str] = {}
    names = ("readme.md", "readme.txt", "readme")
    for path in sorted(path for path in tree.files if path.lower().endswith(names))[:MOST_READMES]:
        with suppress(UnreadableError):
            texts[display(path)] = read_text(tree.path(path), MOST_README_BYTES)[0]
    return texts


def _standing(evidence: Evidence, together: Aggregate | None) -> Iterator[str]:
    """Which verified rows exist for the work of the nodes."""
    accelerators = {system.accelerator for system in evidence.systems}
    if together is None or len(accelerators) != 1:
        return
    work, rate = together.workload, together.sum_of_rates_tokens_per_second
    standing = verified_standing(work["model"], work["scenario"], accelerators.pop(), together.accelerators, rate)
    if standing:
        yield standing


def _notes(
    tree: Tree,
    evidence: Evidence,
    claimed: str | None,
    interrupted: Mapping[str, Reported],
    results: tuple[int, int, int],
    apart: Sequence[str],
) -> tuple[str, ...]:
    above = {folder: innermost(folder.rpartition("/")[0], interrupted.keys() - {folder}) for folder in interrupted}
    whole = [folder for folder, holder in above.items() if holder is None]
    notes = [f"{display(folder)}: {interrupted[folder].text}".removeprefix(": ") for folder in whole[:MOST_INTERRUPTED]]
    if len(whole) > MOST_INTERRUPTED:
        notes.append(f"{count_of(len(whole) - MOST_INTERRUPTED, 'more run')} {Verdict.INTERRUPTED}")
    logs, endpoints, tools = results
    held = f"{count_of(len(tree.files), 'file')}, {count_of(logs, 'set')} of LoadGen's logs"
    held += f", {count_of(endpoints, 'result')} of MLPerf Endpoints" if endpoints else ""
    notes.append(held + (f", {count_of(tools, 'result')} of load tools" if tools else ""))
    if apart:
        held = count_of(len(apart), "set")
        notes.append(f"{held} of logs outside results and compliance, not audited, the first in {display(apart[0])}")
    if evidence.kind != "submission":
        weight = f"weigh as those of {claimed}" if claimed else "are notes unless a round is claimed"
        notes.append(f"no MLPerf submission: rules that a run does not meet {weight}")
    return tuple(notes)


def _node_document(run: Run, slow: set[str]) -> dict[str, Any]:
    names = ("samples_requested", "duration_seconds", "tokens_per_sample", "target_qps", "process_id", "validity")
    return {
        "node": run.node,
        "path": run.path,
        "output_tokens_per_second": run.figures.output_tokens_per_second,
        "samples": run.figures.samples_issued,
        **{name: getattr(run.figures, name) for name in names},
        "latency_p50_seconds": run.figures.latency_seconds.get("p50"),
        "group": "slow" if run.node in slow else "main",
    }
