"""Check a submission tree by the rules of MLCommons, with a fix for each problem."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatoken.audit.checks.cross import check_accuracy_evidence
from megatoken.audit.checks.nodes import check_systems_apart
from megatoken.audit.checks.power import power_of
from megatoken.audit.checks.submission import (
    Submission,
    check_submission,
    layout_in,
    submissions_in,
    system_folders,
)
from megatoken.audit.checks.systems import check_system
from megatoken.audit.discovery import Tree, below, runs_in, walk
from megatoken.audit.documents import accuracy_results_in, systems_in, user_conf_of
from megatoken.audit.evidence import Evidence, Role, System, places
from megatoken.audit.examine import Job, Progress, examine_all
from megatoken.audit.finding import Observation
from megatoken.audit.placement import Meaning, benchmark_names, meanings, meant, results_above, scores_meant
from megatoken.audit.stated import is_endpoint_result
from megatoken.audit.view import RunFiles
from megatoken.errors import ExitCode, UsageError
from megatoken.files import UnreadableError, display, new_document
from megatoken.mlperf.benchmarks import benchmarks, is_other_benchmark
from megatoken.mlperf.detail_log import read_detail_log
from megatoken.mlperf.rounds import round_of_seeds
from megatoken.mlperf.submission_layout import ROUNDS, layout_of, supported_round
from megatoken.submission.evidence_checks import Published, check_compliance, check_scores, published
from megatoken.submission.judge import Judge, Problem, observe
from megatoken.submission.tree_checks import (
    check_description,
    check_files,
    check_mapping,
    check_scenario,
    check_strays,
    check_system_values,
    check_to_fill,
    is_networked,
)
from megatoken.text import count_of

SCHEMA_VERSION = 2
MOST_WARNINGS_SHOWN = 20
MOST_LOGS_ASKED = 20  # to find the round
READ = ("performance/run_1", "performance/ranging", "accuracy")


@dataclass(frozen=True, slots=True)
class Check:
    """The decision, its reasons, and the figures that the submission publishes."""

    root: str
    round: str
    round_is_given: bool
    problems: tuple[Problem, ...]
    results: tuple[tuple[str, str, Published], ...]  # division, submitter, figure
    endpoints: tuple[str, ...]  # folders of MLPerf Endpoints results, which have other rules and are not decided
    others: tuple[str, ...]  # folders of results of other benchmarks than language models, not decided either

    @property
    def refusals(self) -> tuple[Problem, ...]:
        """The problems that refuse the submission."""
        return tuple(problem for problem in self.problems if problem.refused)

    @property
    def warnings(self) -> tuple[Problem, ...]:
        """The other problems."""
        return tuple(problem for problem in self.problems if not problem.refused)

    @property
    def mlcommons_refuses(self) -> bool:
        """Whether MLCommons' checker refuses the submission."""
        return any(problem.by_mlcommons for problem in self.problems)

    @property
    def exit_code(self) -> ExitCode:
        """INVALID if refused."""
        return ExitCode.INVALID if self.refusals else ExitCode.OK

    def to_document(self) -> dict[str, Any]:
        """Plain JSON of the kind ``submission_check``."""
        return new_document(
            "submission_check",
            SCHEMA_VERSION,
            inputs=[self.root],
            round=self.round,
            decision="refused" if self.refusals else "accepted",
            mlcommons_checker="refuses" if self.mlcommons_refuses else "accepts",
            refusals=[problem.to_document() for problem in self.refusals],
            warnings=[problem.to_document() for problem in self.warnings],
            undecided=sorted(self.endpoints + self.others),
            results=[
                {"division": division, "submitter": submitter, **one.to_document()}
                for division, submitter, one in self.results
            ],
        )

    def describe(self) -> Iterator[str]:
        """Text lines: refusals with fixes, warnings, figures, the decision."""
        for problem in self.refusals:
            yield from _lines("refused", problem)
        for problem in self.warnings[:MOST_WARNINGS_SHOWN]:
            yield from _lines("warning", problem)
        if len(self.warnings) > MOST_WARNINGS_SHOWN:
            yield f"{len(self.warnings) - MOST_WARNINGS_SHOWN} more warnings; use --json to list them"
        for division, submitter, result in self.results:
            yield f"{division}/{submitter} {result.key.path}: {result.value:,.6g} {result.unit}"
        for folder in self.endpoints:
            yield f"not decided: {folder}: a result of MLPerf Endpoints; use megatoken audit"
        if self.others:
            names = ", ".join(sorted({folder.split("/")[-2] for folder in self.others}))
            yield f"not decided: {count_of(len(self.others), 'result')} without a language model ({names})"
        left = self.endpoints or self.others
        chosen = "" if self.round_is_given else ", the round of the seeds (change it with --round)"
        if not self.refusals:
            yield f"Accepted by the rules of {self.round}{chosen}" + (", but for what is not decided" if left else "")
            return
        count = len(self.refusals)
        yield f"Refused by the rules of {self.round}{chosen}: {count_of(count, 'reason')}"
        theirs = sum(problem.by_mlcommons for problem in self.refusals)
        if not theirs:
            yield "MLCommons' checker does not find these and accepts the submission"
        elif theirs < count:
            yield f"MLCommons' checker finds {theirs} of them and refuses the submission"


def _lines(kind: str, problem: Problem) -> Iterator[str]:
    rule = problem.rule
    yield f"{kind} {rule.id + ' ' + rule.title if rule else problem.check}: {problem.place}"
    yield f"  expected  {problem.expected}"
    yield f"  found     {problem.found}"
    yield f"  fix       {rule.fix if rule else 'run megatoken audit for an explanation'}"


def check(path: Path, *, round: str | None = None, progress: Progress | None = None) -> Check:
    """Check all submissions at ``path`` together: the folder with closed or open, or a folder inside it.

    Args:
        path: down to a submitter's folder.
        round: the round to check against. None: the round of most seeds; without seeds, v5.1 or v6.1 by the layout.
        progress: called with (runs read, number of runs).

    Raises UsageError: no such folder, no submission in it, or an unsupported round.
    """
    if not path.is_dir():
        raise UsageError(f"{path}: no such folder; give the folder that contains closed or open")
    tree = walk(path)
    submissions = submissions_in(tree)
    if not submissions:
        raise UsageError(f"{path}: no submission below it; expected closed/SUBMITTER/results/SYSTEM or open/...")
    wanted = supported_round(round) if round else None
    systems, damages = systems_in(tree, system_folders(submissions))
    known = meanings(tree, submissions)
    files = [meant(run, known) for run in runs_in(tree) if _is_read(run, known)]
    chosen = wanted or _round_of(tree, files, submissions)
    for one in submissions:
        _set_apart(tree, one, chosen)
    known = meanings(tree, submissions)
    files = [run for run in files if results_above(run.folder, known)]
    judge, runs = Judge(tree, submissions, layout_of(chosen).version), []

    def job(run: RunFiles) -> Job:
        return Job(str(tree.root), run, _system_of(run, systems), chosen, True, user_conf_of(tree, run.folder))

    for item in examine_all(list(map(job, files)), progress):
        judge.take(item.observations, item.run)
        runs.append(item.run)
    readable = {system.path for system in systems}
    for file, damage in damages:
        if display(file) not in readable and any(one.describes(file) for one in submissions):
            where = places(file, line=damage.line)
            judge.take([observe("system.readable", False, "a JSON object", damage.what, where)])
    judge.take(power_of(tree, runs)[1])
    scores = tuple(scores_meant(accuracy_results_in(tree), known))
    evidence = Evidence(str(path), "submission", chosen, tuple(runs), tuple(systems), accuracy_results=scores)
    judge.take(check_accuracy_evidence(evidence, claimed=True))
    judge.take(check_systems_apart(evidence.runs))
    judge.take(check_files(tree))
    judge.take(_unreadable(tree))
    judge.take(check_to_fill(tree))
    for system in (system for system in systems if any(one.describes(system.path) for one in submissions)):
        judge.take(check_system(system, True))
        judge.take(check_system_values(system))
    results, endpoints = [], []
    for one in submissions:
        judge.take(check_submission(tree, one, systems, layout_of(chosen)))
        judge.take(check_strays(tree, one, chosen))
        judge.take(check_mapping(tree, one))
        endpoints += [display(folder) for folder in one.results.values() if is_endpoint_result(tree, folder)]
        figures = _check_results(tree, one, systems, chosen, judge)
        results += [(one.division, one.submitter, figure) for figure in figures]
    others = sorted(display(folder) for one in submissions for folder in one.others.values())
    problems = tuple(judge.problems())
    return Check(
        *(str(path), chosen, wanted is not None, problems),
        *(tuple(results), tuple(sorted(endpoints)), tuple(others)),
    )


def _set_apart(tree: Tree, one: Submission, round_: str) -> None:
    """Move the results of other benchmarks than language models out of those that are decided."""
    names = benchmark_names(tree, one)
    one.others = {key: folder for key, folder in one.results.items() if is_other_benchmark(names[key[1]], round_)}
    one.results = {key: folder for key, folder in one.results.items() if key not in one.others}


def _check_results(
    tree: Tree, one: Submission, systems: Sequence[System], round_: str, judge: Judge
) -> Iterator[Published]:
    layout = layout_of(round_)
    names = benchmark_names(tree, one)
    described = {system.name: system for system in systems if system.path.startswith(below(one.path, "systems/"))}
    for key, folder in sorted(one.results.items()):
        if is_endpoint_result(tree, folder):
            continue
        name, system = names[key.benchmark], described.get(key.system)
        benchmark = benchmarks().get(name)
        judge.take(check_scenario(key, folder, name, system, round_))
        judge.take(check_description(tree, one, key, layout))
        judge.take(check_scores(tree, folder, benchmark))
        if one.division != "open":
            judge.take(check_compliance(tree, one, key, layout, benchmark))
        figure, observations = published(tree, key, folder, benchmark, is_networked(system))
        judge.take(observations)
        if figure is not None:
            yield figure


def _unreadable(tree: Tree) -> Iterator[Observation]:
    if tree.unreadable:
        where = places(*(path for path, _ in tree.unreadable))
        yield observe("tree.unreadable", False, "folders that can be read", tree.unreadable[0][1], where)


def _is_read(run: RunFiles, known: Mapping[str, Meaning]) -> bool:
    """Whether a run is in a folder that MLCommons' checker reads."""
    place = results_above(run.folder, known)
    inside = "" if place is None else run.folder.removeprefix(f"{place}/")
    return inside in READ or inside.startswith("TEST")


def _system_of(run: RunFiles, systems: Sequence[System]) -> str | None:
    named = (system for system in systems if run.system == system.name)
    mine = (one.path for one in named if run.submitter is None or f"/{run.submitter}/" in f"/{one.path}")
    return next(mine, None)


def _round_of(tree: Tree, files: Sequence[RunFiles], submissions: Sequence[Submission]) -> str:
    """The round of most seeds in the first runs; without seeds, the newest round of the layout.

    Raises UsageError: the rules of that round are not known here.
    """
    rounds: Counter[str] = Counter()
    for run in [run for run in files if run.role is Role.PERFORMANCE][:MOST_LOGS_ASKED]:
        try:
            found = round_of_seeds(read_detail_log(tree.path(run.detail)).seeds) if run.detail else None
        except UnreadableError:
            continue
        if found is not None:
            rounds[found] += 1
    if rounds:
        name = rounds.most_common(1)[0][0]
        if name not in ROUNDS:
            others = f"give --round {', '.join(ROUNDS[:-1])} or {ROUNDS[-1]} to apply the rules of another round"
            raise UsageError(f"{tree.root}: its seeds are those of {name}, whose rules are not known here; {others}")
        return name
    return "v5.1" if any(layout_in(tree, one, None).version == 5 for one in submissions) else "v6.1"
