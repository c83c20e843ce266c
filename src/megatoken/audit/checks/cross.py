"""What only several artefacts together show: one round, and evidence of accuracy for the timed runs."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Set

from megatoken.analysis.standing import answer_length
from megatoken.audit.checks.accuracy import ID_BYTES
from megatoken.audit.discovery import Tree
from megatoken.audit.documents import USER_CONF
from megatoken.audit.evidence import AccuracyResult, Evidence, Role, Run, Where
from megatoken.audit.finding import Observation, Outcome, Severity, check, free_of, outcome, shown
from megatoken.mlperf.benchmarks import Benchmark, benchmark_of, benchmarks
from megatoken.mlperf.compliance import TESTS, compliance_file
from megatoken.mlperf.rounds import has_rules
from megatoken.text import count_of

TOKENS_TOLERANCE = 0.10


@check("rules.one_round", "One round", "Results of different rounds were made under different rules and seeds.")
def check_rounds(evidence: Evidence) -> Outcome | None:
    rounds = Counter(run.figures.round for run in evidence.runs if run.role in (Role.PERFORMANCE, Role.ACCURACY))
    if evidence.kind != "submission" or sum(rounds.values()) <= 1:
        return None
    usual = rounds.most_common(1)[0][0]
    others = [run for run in evidence.runs if run.role is not Role.COMPLIANCE and run.figures.round != usual]
    found = ", ".join(f"{name}: {count_of(count, 'run')}" for name, count in rounds.items())
    where = tuple(run.where("effective_qsl_rng_seed") for run in others[:50])
    return outcome(len(rounds) == 1, f"seeds of one round, {usual}", found, where)


@check("accuracy.evidence", "Evidence of accuracy", "Less accurate answers, as of FP4 or FP8, can be faster.")
def accuracy_evidence(evidence: Evidence, claimed: bool, scored: Set[str]) -> Outcome | None:
    performance = evidence.performance_runs
    if not performance:
        return None
    with_accuracy = {_key(run) for run in evidence.runs if run.role is Role.ACCURACY}
    scored = scored | {result.path.rpartition("/accuracy/")[0] for result in evidence.accuracy_results}
    without = [run for run in performance if _key(run) not in with_accuracy and _scenario_folder(run) not in scored]
    empty = sum(run.accuracy_records == 0 for run in performance)
    absent = len(performance) - empty
    found = f"no accuracy run for {len(without)} of {len(performance)} performance runs"
    if evidence.kind == "submission":  # where several models may be submitted for one benchmark
        found += f" ({', '.join(dict.fromkeys(_scenario_folder(run).rpartition('results/')[2] for run in without))})"
    found += f"; next to them {empty} empty accuracy logs" + (f", {absent} other or none" if absent else "")
    found = shown(found) if without else f"{len(performance)} performance runs have one"
    divisions = {str(system.values.get("division", "")).strip().lower() for system in evidence.systems}
    otherwise = Severity.FAIL if claimed else Severity.UNKNOWN if "closed" in divisions else Severity.NOTE
    where = tuple(Where(run.accuracy or run.path) for run in without[:50])
    return outcome(not without, "an accuracy run for every performance run", found, where, otherwise)


def check_accuracy_evidence(
    evidence: Evidence, *, claimed: bool, scored: Set[str] = frozenset()
) -> Iterator[Observation]:
    """Accuracy runs and their scores, and the performance runs that need them, if the closed division is claimed.

    ``scored`` are folders of scenarios whose scores are in another file than accuracy.txt.
    """
    for result in evidence.accuracy_results:
        yield from scored_log(result, evidence)
        benchmark = benchmark_of(result.benchmark, None) if result.benchmark else None
        if benchmark is None or not has_rules(evidence.round):
            continue
        closed = Severity.NOTE if result.division == "open" else Severity.FAIL
        yield from scores(result, benchmark, closed)
        if evidence.kind == "submission":
            yield from scored_hash(result, closed)
        folder = result.path.rpartition("/accuracy/")[0]
        for run in evidence.performance_runs:
            if folder and run.path.startswith(f"{folder}/"):
                where = (Where(result.path), run.where())
                yield from tokens_agree(run.figures.tokens_per_sample, result.scores.get("tokens_per_sample"), where)
    yield from accuracy_evidence(evidence, claimed, scored)


@check("accuracy.scores", "Scores reach the targets", "The closed division demands them.")
def scores(result: AccuracyResult, benchmark: Benchmark, otherwise: Severity) -> Outcome:
    found, targets = result.scores, benchmark.accuracy
    bounds = {name: (target, math.inf, f"below {target:g}") for name, target in targets.items()}
    for name, window in (("tokens_per_sample", benchmark.tokens_per_sample), ("gen_len", benchmark.gen_len)):
        if window is not None:
            bounds[name] = (*window, f"outside {window[0]:g} to {window[1]:g}")
    low = [
        f"{name} {found[name]:g} {how}" if name in found else f"no {name}"
        for name, (least, most, how) in bounds.items()
        if (name in found or least > 0) and not least <= found.get(name, -1.0) <= most
    ]
    expected = f"{benchmark.name}: {', '.join(f'{name} of at least {target:g}' for name, target in targets.items())}"
    reached = ", ".join(f"{name} {found[name]:g}" for name in targets if name in found)
    reached = "; ".join(filter(None, (reached, answer_length(benchmark.name, found.get("tokens_per_sample")))))
    return free_of(low, expected, reached, (Where(result.path),), otherwise)


@check("accuracy.scored_log", "accuracy.txt scores the log next to it", "Scores of other answers say nothing here.")
def scored_log(result: AccuracyResult, evidence: Evidence) -> Iterator[Outcome]:
    """Where that log was not truncated."""
    folder = result.path.rpartition("/")[0]
    logs = {folder, f"{folder.removesuffix('accuracy')}mlperf"}  # of a submission, or a run folder of megatoken
    for run in evidence.runs:
        if run.path not in logs or run.accuracy_sha256 is None or not run.accuracy_records or not run.accuracy_bytes:
            continue
        problems = []
        if result.hash is not None and result.hash.lower() != run.accuracy_sha256:
            problems.append(f"hash {shown(result.hash)}, the log has {run.accuracy_sha256}")
        answers, mean = result.scores.get("gen_num"), result.scores.get("tokens_per_sample")
        if answers is not None and answers != run.accuracy_records:
            problems.append(f"{answers:g} answers, the log has {run.accuracy_records:,}")
        counted = [run.accuracy_bytes / size / run.accuracy_records for size in ID_BYTES]
        if mean is not None and not any(abs(mean - found) <= 0.05 + 1e-9 * found for found in counted):
            problems.append(f"{mean:g} tokens per sample, the log has {counted[0]:.1f}")
        where = (Where(result.path), Where(run.accuracy or run.path))
        yield free_of(problems, "hash, answers and tokens per sample of the log next to it", "the same", where)


@check("accuracy.hash", "accuracy.txt has the hash of the full log", "It ties the truncated log to the evaluated one.")
def scored_hash(result: AccuracyResult, otherwise: Severity) -> Outcome:
    found = shown(result.hash or "none")
    return outcome(result.hash is not None, "a line hash=...", found, (Where(result.path),), otherwise)


@check("accuracy.tokens_agree", "Timed and scored answers are alike", "Shorter answers come from another model.")
def tokens_agree(timed: float | None, scored: float | None, where: tuple[Where, ...]) -> Outcome | None:
    """Tokens per sample of a performance run and of its accuracy run."""
    if not timed or not scored:
        return None
    holds = abs(timed / scored - 1) <= TOKENS_TOLERANCE
    expected = f"about {scored:g} tokens per sample, as in the accuracy run"
    return outcome(holds, expected, f"{timed:.1f}", where, Severity.WARN)


@check("submission.layout", "Other parts that the claimed rules ask for", "A run alone meets only some rules.")
def check_layout(tree: Tree, evidence: Evidence) -> Iterator[Outcome]:
    """Where rules are claimed for logs outside a submission."""
    configured = tree.holding(USER_CONF)
    tested = [folder for name in {*map(compliance_file, TESTS)} for folder in tree.holding(name)]
    runs: dict[str, list[Run]] = {}
    for run in evidence.performance_runs:
        benchmark = benchmark_of(run.benchmark, None) if run.benchmark else None
        if benchmark is not None:
            runs.setdefault(benchmark.name, []).append(run)
            continue
        unknown = f"{run.benchmark or 'no benchmark'}: the rules for what its submission needs are not known"
        yield outcome(None, "a benchmark whose rules are known", unknown, (run.where(),))
    for name, mine in runs.items():
        benchmark = benchmarks()[name]
        others = [run.path for other, theirs in runs.items() if other != name for run in theirs]
        scenarios = {run.folder_scenario or run.figures.scenario for run in mine}
        wanted = benchmark.required.get("datacenter", ())
        missing = [choice.replace("|", " or ") for choice in wanted if not scenarios & set(choice.split("|"))]
        verified = any(_belongs(folder, run.path, others, benchmark) for run in mine for folder in tested)
        if benchmark.compliance and not verified:
            missing.append(" and ".join(benchmark.compliance))
        if not evidence.systems:
            missing.append("systems/*.json")
        bare = [run for run in mine if not any(_belongs(folder, run.path, others) for folder in configured)]
        if bare:
            some = f" of {len(bare)} of {count_of(len(mine), 'run')}" if len(bare) < len(mine) else ""
            missing.append(f"{USER_CONF}{some}")
        shown_as = f"{name}: no {', no '.join(missing)}" if missing else f"{name}: all of them"
        where = tuple(Where(run.path) for run in (bare or mine)[:50])
        expected = "every scenario and test that the closed division asks for, and what describes the runs"
        yield outcome(not missing, expected, shown_as, where, Severity.WARN)


def _belongs(folder: str, run: str, others: Iterable[str], benchmark: Benchmark | None = None) -> bool:
    """Whether files are about a run: next to it or below it, or above it and above no run of another benchmark.

    With ``benchmark`` also those below any folder of that name, as for compliance tests.
    """
    if benchmark is not None and any(benchmark_of(part, None) is benchmark for part in folder.split("/")):
        return True
    if f"{folder}/".startswith(f"{run}/"):
        return True
    above = f"{folder}/" if folder else ""
    return f"{run}/".startswith(above) and not any(f"{other}/".startswith(above) for other in others)


def _key(run: Run) -> tuple[str | None, ...]:
    """What a performance run shares with its accuracy run: in a submission the folder, else what it is of."""
    if run.submitter is not None:
        return (_scenario_folder(run),)
    return run.node, run.benchmark, run.folder_scenario


def _scenario_folder(run: Run) -> str:
    return re.split(r"/(?:performance|accuracy)(?=/|$)", run.path)[0]
