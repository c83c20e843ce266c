"""What only several artefacts together show: one round, and evidence of accuracy for what was timed."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Set

from megatoken.audit.checks.accuracy import ID_BYTES
from megatoken.audit.evidence import AccuracyResult, Evidence, Role, Run, Where
from megatoken.audit.finding import Observation, Severity, shown
from megatoken.audit.view import observe
from megatoken.mlperf.benchmarks import Benchmark, benchmark_of, benchmarks
from megatoken.text import count_of

TOKENS_TOLERANCE = 0.10
USER_CONF = "user.conf"
VERIFIED = ("verify_accuracy.txt", "verify_output_len.txt")


def check_rounds(evidence: Evidence) -> Iterator[Observation]:
    """A submission is of one round."""
    rounds = Counter(run.figures.round for run in evidence.runs if run.role in (Role.PERFORMANCE, Role.ACCURACY))
    if evidence.kind == "submission" and sum(rounds.values()) > 1:
        usual = rounds.most_common(1)[0][0]
        others = [run for run in evidence.runs if run.role is not Role.COMPLIANCE and run.figures.round != usual]
        yield observe(
            "rules.one_round",
            len(rounds) == 1,
            f"seeds of one round, {usual}",
            ", ".join(f"{name}: {count_of(count, 'run')}" for name, count in rounds.items()),
            tuple(run.where("effective_qsl_rng_seed") for run in others[:50]),
        )


def check_accuracy_evidence(
    evidence: Evidence, *, claimed: bool, scored: Set[str] = frozenset()
) -> Iterator[Observation]:
    """Accuracy runs and their scores beside the performance runs they stand for.

    Args:
        evidence: all that was found.
        claimed: whether the rules of the closed division are claimed.
        scored: folders of scenarios whose scores stand in another form than accuracy.txt.
    """
    for result in evidence.accuracy_results:
        yield from _scored_log(result, evidence)
        yield from _scores(result, evidence)
    performance = evidence.performance_runs
    if not performance:
        return
    with_accuracy = {_key(run) for run in evidence.runs if run.role is Role.ACCURACY}
    scored = scored | {result.path.rpartition("/accuracy/")[0] for result in evidence.accuracy_results}
    without = [run for run in performance if _key(run) not in with_accuracy and _scenario_folder(run) not in scored]
    empty = sum(run.accuracy_records == 0 for run in performance)
    absent = len(performance) - empty
    found = f"no accuracy run for {len(without)} of {len(performance)} performance runs"
    if evidence.kind == "submission":  # where several models may stand for one benchmark
        found += f" ({', '.join(dict.fromkeys(_scenario_folder(run).rpartition('results/')[2] for run in without))})"
    found += f"; beside them {empty} empty accuracy logs" + (f", {absent} other or none" if absent else "")
    division = {str(system.values.get("division", "")).strip().lower() for system in evidence.systems}
    severity = Severity.FAIL if claimed else Severity.UNKNOWN if "closed" in division else Severity.NOTE
    yield observe(
        "accuracy.evidence",
        not without,
        "an accuracy run for every performance run",
        shown(found) if without else f"{len(performance)} performance runs have one",
        tuple(Where(run.accuracy or run.path) for run in without[:50]),
        severity,
    )


def check_layout(evidence: Evidence, paths: Iterable[str]) -> Iterator[Observation]:
    """What a submission has beside its performance runs, where rules are claimed for logs that stand in none.

    Args:
        evidence: all that was found.
        paths: of all files.
    """
    found = {name: [path for path in paths if path.rpartition("/")[2] == name] for name in (USER_CONF, *VERIFIED)}
    runs: dict[str, list[Run]] = {}
    for run in evidence.performance_runs:
        benchmark = benchmark_of(run.benchmark, None) if run.benchmark else None
        if benchmark is not None:
            runs.setdefault(benchmark.name, []).append(run)
            continue
        yield observe(
            "submission.layout",
            None,
            "a benchmark whose rules are known",
            f"{run.benchmark or 'no benchmark'}: what the rules ask for beside its runs is not known",
            (run.where(),),
        )
    for name, mine in runs.items():
        benchmark = benchmarks()[name]
        others = [run.path for other, theirs in runs.items() if other != name for run in theirs]
        scenarios = {run.folder_scenario or run.figures.scenario for run in mine}
        wanted = benchmark.required.get("datacenter", ())
        missing = [choice.replace("|", " or ") for choice in wanted if not scenarios & set(choice.split("|"))]
        verified = any(
            _belongs(path, run.path, others, benchmark) for run in mine for at in VERIFIED for path in found[at]
        )
        if benchmark.compliance and not verified:
            missing.append(" and ".join(benchmark.compliance))
        if not evidence.systems:
            missing.append("systems/*.json")
        bare = [run for run in mine if not any(_belongs(path, run.path, others) for path in found[USER_CONF])]
        if bare:
            missing.append(
                USER_CONF if len(bare) == len(mine) else f"{USER_CONF} of {len(bare)} of {count_of(len(mine), 'run')}"
            )
        yield observe(
            "submission.layout",
            not missing,
            "every scenario and test that the closed division asks for, and what describes the runs",
            f"{name}: no {', no '.join(missing)}" if missing else f"{name}: all of them",
            tuple(Where(run.path) for run in (bare or mine)[:50]),
            Severity.WARN,
        )


def _belongs(path: str, run: str, others: Iterable[str], benchmark: Benchmark | None = None) -> bool:
    """Whether a file is about a run: it lies beside or below it, or above it and above no run of another benchmark.

    With ``benchmark`` also a file below any folder of that name, as compliance tests stand in one.
    """
    folder = path.rpartition("/")[0]
    if benchmark is not None and any(benchmark_of(part, None) is benchmark for part in folder.split("/")):
        return True
    if f"{folder}/".startswith(f"{run}/"):
        return True
    above = f"{folder}/" if folder else ""
    return f"{run}/".startswith(above) and not any(f"{other}/".startswith(above) for other in others)


def _scored_log(result: AccuracyResult, evidence: Evidence) -> Iterator[Observation]:
    """accuracy.txt against the log that it scores, where that is whole."""
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
        yield observe(
            "accuracy.scored_log",
            not problems,
            "hash, answers and tokens per sample of the log beside it",
            "; ".join(problems) or "the same",
            (Where(result.path), Where(run.accuracy or run.path)),
        )


def _scores(result: AccuracyResult, evidence: Evidence) -> Iterator[Observation]:
    place = (Where(result.path),)
    benchmark = benchmark_of(result.benchmark, None) if result.benchmark else None
    if benchmark is None:
        return
    closed = "/open/" not in f"/{result.path}"
    yield from _targets(result, benchmark, closed)
    if evidence.kind == "submission":
        yield observe(
            "accuracy.hash",
            result.hash is not None,
            "a line hash=...",
            shown(result.hash or "none"),
            place,
            Severity.FAIL if closed else Severity.NOTE,
        )
    tokens = result.scores.get("tokens_per_sample")
    folder = result.path.rpartition("/accuracy/")[0]
    for run in evidence.performance_runs:
        mine = run.figures.tokens_per_sample
        if tokens and mine and folder and run.path.startswith(f"{folder}/"):
            yield observe(
                "accuracy.tokens_agree",
                abs(mine / tokens - 1) <= TOKENS_TOLERANCE,
                f"about {tokens:g} tokens per sample, as in the accuracy run",
                f"{mine:.1f}",
                (*place, run.where()),
                Severity.WARN,
            )


def _targets(result: AccuracyResult, benchmark: Benchmark, closed: bool) -> Iterator[Observation]:
    low = [
        f"{name} {result.scores[name]:g} below {target:g}" if name in result.scores else f"no {name}"
        for name, target in benchmark.accuracy.items()
        if result.scores.get(name, -1.0) < target
    ]
    for name, window in (("tokens_per_sample", benchmark.tokens_per_sample), ("gen_len", benchmark.gen_len)):
        found = result.scores.get(name)
        if window is not None and (found is None or not window[0] <= found <= window[1]):
            low.append(
                f"{name} {found:g} outside {window[0]:g} to {window[1]:g}" if found is not None else f"no {name}"
            )
    targets = ", ".join(f"{name} of at least {target:g}" for name, target in benchmark.accuracy.items())
    yield observe(
        "accuracy.scores",
        not low,
        f"{benchmark.name}: {targets}",
        shown("; ".join(low)) or ", ".join(f"{name} {result.scores[name]:g}" for name in benchmark.accuracy),
        (Where(result.path),),
        Severity.FAIL if closed else Severity.NOTE,
    )


def _key(run: Run) -> tuple[str | None, ...]:
    """What a performance run shares with its accuracy run: in a submission the folder, elsewhere what it is of."""
    if run.submitter is not None:
        return (_scenario_folder(run),)
    return run.node, run.benchmark, run.folder_scenario


def _scenario_folder(run: Run) -> str:
    return re.split(r"/(?:performance|accuracy)(?=/|$)", run.path)[0]
