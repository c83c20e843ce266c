"""A run folder of megatoken: its numbers, verdict, seal and summary of repeats follow from what it holds."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from megatoken.analysis.machine import rate_state, simulated_gpu
from megatoken.analysis.repeats import REPEATS, summarise_repeats
from megatoken.analysis.statistics import Samples
from megatoken.analysis.sweep import SWEEP
from megatoken.audit import replay, run_facts, run_qualification, run_rows
from megatoken.audit.checks.nodes import copied_runs
from megatoken.audit.differences import differences
from megatoken.audit.discovery import Tree, below, innermost
from megatoken.audit.documents import json_values
from megatoken.audit.evidence import Run, Where, places
from megatoken.audit.finding import Observation, Outcome, Reported, Severity, check, free_of, outcome, shown
from megatoken.audit.folder import LOG, LOGGED, TABLES, RunFolder
from megatoken.audit.sweep_document import listed_runs, unlike_its_runs
from megatoken.errors import MegatokenError
from megatoken.files import UnreadableError, display, mapping, mappings, plain, read_json_object
from megatoken.mlperf.detail_log import DetailLog, read_detail_log
from megatoken.runs.run import CONFIG, ENVIRONMENT, MLPERF, QUALIFICATION, REQUESTS, RESULT, SERIES, Verdict, read_run
from megatoken.runs.run import Run as RunOfFolder
from megatoken.runs.seal import SEAL, SealState, named, seal_state
from megatoken.text import count_of

WHOLE = "a whole run folder"
AS_SEALED = "every file as it was sealed"
COMPARED = ("verdict", "verdicts", "metrics", "percentiles", "confidence", "seeds")  # of repeats
TOGETHER = "what the run folders next to it give together"
MOST_REPEATS = 1_000
MOST_COPIES = 6  # in a finding


def run_folders_in(tree: Tree) -> list[str]:
    """Folders that look like run folders of megatoken."""
    return [folder for folder in tree.holding(RESULT) if below(folder, REQUESTS) in tree.files]


def lost_files_in(tree: Tree) -> dict[str, list[str]]:
    """Folders that look like run folders of megatoken of which files are missing, and the missing ones."""
    names = (RESULT, CONFIG, ENVIRONMENT, REQUESTS, SERIES)
    whole = set(run_folders_in(tree))
    counts = Counter(path.rpartition("/")[0] for path in tree.files if path.rpartition("/")[2] in names)
    own = (ENVIRONMENT, REQUESTS, SERIES)  # other programs write a config.yaml and a result.json too
    lost = (
        folder
        for folder, count in counts.items()
        if count > 1 and folder not in whole and any(below(folder, one) in tree.files for one in own)
    )
    return {folder: [one for one in names if below(folder, one) not in tree.files] for folder in lost}


def lost_files_note(folder: str, missing: Sequence[str]) -> str:
    """Says so in one line."""
    where = f"{display(folder)} looks" if folder else "this looks"
    return f"{where} like a run folder of megatoken whose files are missing: {', '.join(missing)}; copy it again"


def check_lost_files(tree: Tree, lost: Mapping[str, Sequence[str]]) -> Iterator[Observation]:
    """Every folder of ``lost_files_in``; its logs alone are audited as those of any LoadGen."""
    for folder, missing in lost.items():
        found = outcome(False, WHOLE, lost_files_note(folder, missing), places(folder))
        yield from (*whole.observations(found), *_not_made(tree, folder, missing))


def interruptions(tree: Tree, folders: Iterable[str]) -> dict[str, Reported]:
    """Those of the run folders that say INTERRUPTED, and why, in their own words."""
    found: dict[str, Reported] = {}
    for folder in folders:
        result = json_values(tree, below(folder, RESULT)) or {}  # run_folder.whole says what is wrong with it
        if result.get("verdict") == Verdict.INTERRUPTED:
            found[folder] = _reported(Verdict.INTERRUPTED, mappings(result.get("reasons")))
    return found


def _reported(verdict: Verdict, stated: Iterable[Mapping[str, Any]], stability: object = None) -> Reported:
    """The verdict and its reasons; a code that repeats the verdict is left out."""
    codes = (("" if one.get("code") == verdict else f"{one.get('code')} ", one.get("message")) for one in stated)
    return Reported(verdict, tuple(shown(f"{code}{message}") for code, message in codes), shown(stability or ""))


def check_run_folder(tree: Tree, path: str, runs: Sequence[Run]) -> Iterator[Observation]:
    """One run folder; of all ``runs`` that LoadGen logged, those below the folder are its own."""
    result = places(below(path, RESULT))
    try:
        run = read_run(tree.path(path))
    except MegatokenError as error:
        files = getattr(error, "files", (RESULT,))
        damaged = places(*(below(path, name) for name in files))
        yield from whole.observations(outcome(False, WHOLE, shown(str(error)), damaged))
        yield from _not_made(tree, path, files)
        return
    logged = next((run for run in runs if run.path == display(below(path, MLPERF))), None)
    part = innermost(path.rpartition("/")[0], set(run_folders_in(tree)) - {path}) is not None
    folder = RunFolder(tree, path, run, logged, _detail_log(tree, path), part)
    try:
        for one in _CHECKS:
            yield from one(folder)
    except Exception as error:  # fields of a type that no run writes can break any step
        found = shown(f"{type(error).__name__}: {error}")
        yield from whole.observations(outcome(False, "fields of the types that a run writes", found, result))


@check("run_folder.interrupted", "The run finished", "An interrupted run has no result, so none is checked.")
def interrupted(folder: RunFolder) -> Outcome | None:
    reported = interruptions(folder.tree, [folder.path]).get(folder.path)
    if reported is None:
        return None
    severity = Severity.NOTE if folder.is_part else Severity.UNKNOWN  # a search ends probes whose answer is clear
    found = f"{reported.text}; samples that had ended: {int((~Samples.of(folder.run.requests).cancelled).sum()):,}"
    return Outcome(severity, "a run that finished", found, folder.places(RESULT), reported=reported)


@check("run_folder.simulated", "The hardware exists", "Figures of a cost model are estimates, not measurements.")
def simulated(folder: RunFolder) -> Outcome | None:
    if rate_state(folder.run) != "estimate":
        return None
    found = f"simulated {shown(simulated_gpu(folder.run))}: a cost model computes rates and times"
    return Outcome(Severity.NOTE, "GPUs that compute", found, folder.places(CONFIG, RESULT))


@check("run_folder.whole", "The run folder is whole", "Its rows are the raw data.")
def whole(folder: RunFolder) -> Outcome:
    rows = count_of(len(folder.run.requests), "row")
    return outcome(True, WHOLE, rows, folder.places(*TABLES))


def _lacks_log(folder: RunFolder) -> bool:
    return folder.has_one_log and not folder.is_logged


@check("run_folder.loadgen", "LoadGen logged the run", "Nothing else shows that the run took place.", _lacks_log)
def loadgen(folder: RunFolder) -> Outcome:
    """A search that found no rate ends INVALID without a test."""
    holds = False if folder.run.verdict is not Verdict.INVALID else None
    expected = f"LoadGen's log of a run that ended {folder.run.verdict}"
    return outcome(holds, expected, "no log that can be read", folder.places(*TABLES))


def _scored(folder: RunFolder) -> bool:
    return folder.is_logged and not folder.is_compliance_test and folder.answers.problems is not None


def _tested(folder: RunFolder) -> bool:
    return folder.is_logged and folder.is_compliance_test and folder.answers.problems is not None


def _judged_again(folder: RunFolder, expected: str) -> Outcome:
    again, where = folder.answers, folder.places(*LOGGED)
    if again.unknown:
        return outcome(None, expected, shown(again.unknown), where)
    otherwise = f"{count_of(len(folder.run.requests), 'answer')}, nothing differs"
    return free_of(again.problems or (), expected, otherwise, where)


@check("accuracy.recomputed", "Scores follow from the logged answers", "Speed may cost accuracy.", _scored)
def scores(folder: RunFolder) -> Outcome:
    return _judged_again(folder, "scores, counts and targets that the logged answers give")


@check("compliance.recomputed", "TEST06 follows from the logged answers", "It only counts tokens.", _tested)
def compliance(folder: RunFolder) -> Outcome:
    return _judged_again(folder, "the outcome of TEST06 that the logged answers give")


@check("compliance.end_tokens", "TEST06 used the end tokens of the run", "Others do not end an answer.", _tested)
def end_tokens(folder: RunFolder) -> Outcome | None:
    ends, expected = folder.answers.other_ends, "a file that was verified with the end tokens of the run"
    return Outcome(Severity.NOTE, expected, shown(ends), folder.places(RESULT)) if ends else None


@check("run_folder.healthy", "The run reports nothing against itself", "A consistent run may still be a bad one.")
def healthy(folder: RunFolder) -> Outcome | None:
    """A compliance test that was not passed breaks a rule.

    A check of our own that was not, and lost replicas, leave results that are less than they look.
    """
    run = folder.run
    clean = run.verdict not in (Verdict.INVALID, Verdict.DEGRADED) and not run.doubts
    if clean or not folder.finished or folder.is_part:
        return None
    stability = mapping(run.result.get("stability")).get("verdict")
    reported = _reported(run.verdict, (*run.reasons, *run.doubts), stability)
    severity = Severity.WARN if run.verdict is Verdict.DEGRADED else Severity.NOTE
    if any(reason["code"] == "COMPLIANCE" for reason in run.reasons):
        passed = mapping(run.result.get("compliance")).get("passed") is True
        severity = Severity.WARN if passed else Severity.FAIL
    where = folder.places(RESULT)
    return Outcome(severity, "a run that reports nothing against itself", reported.text, where, reported=reported)


_CHECKS = (
    *(whole, interrupted, simulated, replay.metrics, run_facts.configuration, replay.notes, run_facts.memory),
    *(run_facts.times, healthy, run_facts.replicas_of_rack, loadgen, run_facts.counts, run_rows.latencies),
    *(run_rows.series, scores, compliance, end_tokens, run_facts.plan),
    *(replay.verdict, replay.nodes, replay.far_clocks, run_qualification.qualification),
)


_OF_EVERY_RUN = (
    replay.metrics,
    replay.verdict,
    run_facts.configuration,
    run_facts.memory,
    run_facts.times,
    run_facts.plan,
    replay.notes,
)


def _not_made(tree: Tree, path: str, files: Sequence[str]) -> Iterator[Observation]:
    """The checks that need every file of a run folder, unanswered where ``files`` are missing or damaged."""
    logged = (run_facts.counts, run_rows.latencies, run_rows.series) if below(path, LOG) in tree.files else ()
    qualified = (run_qualification.qualification,) if below(path, QUALIFICATION) in tree.files else ()
    found = f"not checked, because files are missing or damaged: {', '.join(files)}"
    unanswered = outcome(None, WHOLE, found, places(*(below(path, name) for name in files)))
    for one in (*_OF_EVERY_RUN, *logged, *qualified):
        yield from one.observations(unanswered)


def _detail_log(tree: Tree, path: str) -> DetailLog | None:
    name = below(path, LOG)
    try:
        log = read_detail_log(tree.path(name)) if name in tree.files else None
    except UnreadableError:
        return None  # log.readable says why
    return log if log is not None and log.first else None


def check_seals(tree: Tree) -> Iterator[Observation]:
    """Every sealed folder, also one that lacks files without which it is no run folder."""
    for folder in tree.holding(SEAL):
        where = places(below(folder, SEAL))
        try:
            state = seal_state(tree.path(folder))
        except (OSError, ValueError) as error:
            yield from sealed.observations(outcome(False, AS_SEALED, shown(f"the seal cannot be read: {error}"), where))
            continue
        assert state is not None
        yield from (*sealed(state, where), *unsealed(state, where))


@check("run_folder.sealed", "The sealed files are unchanged", "A change after sealing is not what was measured.")
def sealed(state: SealState, where: tuple[Where, ...]) -> Outcome:
    """A signature that cannot be checked here is unknown."""
    if not state.whole:
        return outcome(False, AS_SEALED, shown(state.problems), where)
    found = state.kept
    if state.public_key is None:
        return outcome(True, AS_SEALED, shown(f"{found}; not signed, so anyone could have sealed it"), where)
    if state.signature is None:
        return Outcome(Severity.UNKNOWN, AS_SEALED, shown(f"{found}; signature not checked: {state.unchecked}"), where)
    return outcome(True, AS_SEALED, shown(f"{found}; signed by {state.public_key}"), where)


@check("run_folder.unsealed", "No file was added after sealing", "The seal says nothing about an added file.")
def unsealed(state: SealState, where: tuple[Where, ...]) -> Outcome | None:
    found = shown(f"added, and not part of what was sealed: {named(state.added)}; remove it, or seal again")
    return Outcome(Severity.WARN, "only files that the seal lists", found, where) if state.added else None


@check("run_folder.copies", "No run folder is a copy of another", "One measurement would be counted several times.")
def check_copies(tree: Tree, runs: Sequence[Run]) -> Iterator[Outcome]:
    """Run folders that are not part of others, whose logs are of one run."""
    whole_runs = {display(below(folder, MLPERF)): folder for folder in _apart(run_folders_in(tree))}
    for group in copied_runs([run for run in runs if run.path in whole_runs]):
        names = [display(whole_runs[run.path]) for run in group]
        found = shown(f"{', '.join(names[:MOST_COPIES])} have logs of one run")
        yield outcome(False, "run folders with logs of their own", found, places(*names), Severity.WARN)


def _apart(folders: Sequence[str]) -> Iterator[str]:
    """Folders that are not inside of another one."""
    known = set(folders)
    return (folder for folder in folders if innermost(folder.rpartition("/")[0], known - {folder}) is None)


@check("run_folder.repeats", "The summary of repeats follows from each of them", "A run may have been left out.")
def check_repeats(tree: Tree) -> Iterator[Outcome]:
    """Every repeats.json, and every folder of numbered runs whose configuration asked for repeats."""
    wanted = _wanted_repeats(tree)
    for folder in sorted({*tree.holding(REPEATS), *wanted}):
        missing = wanted.get(folder, [])
        if below(folder, REPEATS) in tree.files:
            yield _repeats(tree, folder, places(below(folder, REPEATS)), missing)
        else:
            found = [f"no {REPEATS}, which {CONFIG} of its run folders asks for", *missing]
            yield free_of(found, TOGETHER, "", places(folder), Severity.WARN)


def _wanted_repeats(tree: Tree) -> dict[str, list[str]]:
    """Folders of repeats, and which of them are missing; an interrupted repeat is the last one."""
    repeats: dict[str, list[RunOfFolder]] = {}
    for folder in _apart(run_folders_in(tree)):
        parent, _, name = folder.rpartition("/")
        if re.fullmatch("[0-9]{3}", name):
            with suppress(MegatokenError):  # run_folder.whole says what is wrong with it
                repeats.setdefault(parent, []).append(read_run(tree.path(folder)))
    found = {}
    for parent, runs in repeats.items():
        asked = [count for run in runs if isinstance(count := run.config.get("repeat"), int) and count > 1]
        there = {run.path.name for run in runs}
        if asked and all(run.verdict is not Verdict.INTERRUPTED for run in runs):
            names = [f"{number:03}" for number in range(1, min(max(asked), MOST_REPEATS) + 1)]
            found[parent] = [f"{one} of {max(asked)} repeats is missing" for one in names if one not in there]
    return found


def _repeats(tree: Tree, folder: str, where: tuple[Where, ...], missing: Sequence[str]) -> Outcome:
    try:
        stored, _, _ = read_json_object(tree.path(below(folder, REPEATS)))
        names = stored.get("runs")
        if not isinstance(names, list) or not 0 < len(names) <= MOST_REPEATS:
            raise UnreadableError("names no runs")
        runs = [read_run(tree.path(below(folder, str(name)))) for name in names]
        again: Mapping[str, Any] = plain(summarise_repeats(runs, len(runs)))
    except (UnreadableError, MegatokenError) as error:
        return outcome(False, TOGETHER, shown(str(error)), where)
    except Exception as error:  # results of no run can break any step of the arithmetic
        return outcome(False, TOGETHER, shown(f"{type(error).__name__}: {error}"), where)
    wrong = [name for name in COMPARED if any(differences(stored.get(name), again[name], name))]
    left_out = _left_out(tree, folder, {run.path.name for run in runs})
    found = [f"other {name}" for name in wrong] + [f"{name} is left out" for name in left_out] + [*missing]
    where += places(*(below(folder, name) for name in left_out))
    severity = Severity.FAIL if wrong else Severity.WARN  # a kill can come before this file is written
    return free_of(found, TOGETHER, f"{count_of(len(runs), 'run')}, all agree", where, severity)


@check("run_folder.sweep", "The document of a sweep follows from its points", "Plans and pages rest on it.")
def check_sweeps(tree: Tree) -> Iterator[Outcome]:
    """Every sweep.json of ours; a file of that name without run folders next to it may be of another tool."""
    parents = {folder.rpartition("/")[0] for folder in run_folders_in(tree) if folder}
    for folder in tree.holding(SWEEP):
        where = places(below(folder, SWEEP))
        try:
            stored, _, _ = read_json_object(tree.path(below(folder, SWEEP)))
        except UnreadableError as error:
            if folder in parents:
                yield outcome(False, TOGETHER, shown(str(error)), where)
            continue
        if stored.get("kind") == "sweep":
            yield _sweep(tree, folder, stored, where)


def _sweep(tree: Tree, folder: str, stored: Mapping[str, Any], where: tuple[Where, ...]) -> Outcome:
    try:
        listed = listed_runs(stored, tree.path(folder))
        wrong = list(unlike_its_runs(stored, listed))
    except (UnreadableError, MegatokenError) as error:
        return outcome(False, TOGETHER, shown(str(error)), where)
    except Exception as error:  # results of no run can break any step of the arithmetic
        return outcome(False, TOGETHER, shown(f"{type(error).__name__}: {error}"), where)
    left_out = _left_out(tree, folder, {run.name for run in listed})
    found = wrong + [f"{name} is left out" for name in left_out]
    where += places(*(below(folder, name) for name in left_out))
    severity = Severity.FAIL if wrong else Severity.WARN  # a kill can come before this file is written
    return free_of(found, TOGETHER, f"{count_of(len(listed), 'run')}, all agree", where, severity)


def _left_out(tree: Tree, folder: str, listed: set[str]) -> list[str]:
    """Finished runs of the same folder that the file does not list."""
    inside = [path.split("/")[-1] for path in tree.holding(RESULT) if path and path.rpartition("/")[0] == folder]
    return [name for name in inside if name not in listed and _finished(tree.path(below(folder, name)))]


def _finished(folder: Path) -> bool:
    with suppress(MegatokenError):
        return read_run(folder).verdict is not Verdict.INTERRUPTED
    return False
