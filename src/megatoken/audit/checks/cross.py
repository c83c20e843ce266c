"""What only several artefacts together show: one round, and evidence of accuracy for what was timed."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Set

from megatoken.audit.evidence import AccuracyResult, Evidence, Role, Run, Where
from megatoken.audit.facts import Benchmark, benchmark_of
from megatoken.audit.finding import Observation, Severity, shown
from megatoken.audit.view import observe

TOKENS_TOLERANCE = 0.10


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
            ", ".join(f"{name}: {count} runs" for name, count in rounds.items()),
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
        yield from _scores(result, evidence)
    performance = evidence.performance_runs
    if not performance:
        return
    with_accuracy = {_key(run) for run in evidence.runs if run.role is Role.ACCURACY}
    scored = scored | {result.path.rpartition("/accuracy/")[0] for result in evidence.accuracy_results}
    without = [
        run
        for run in performance
        if _key(run) not in with_accuracy and run.path.partition("/performance")[0] not in scored
    ]
    empty = sum(run.accuracy_records == 0 for run in performance)
    absent = len(performance) - empty
    found = f"no accuracy run for {len(without)} of {len(performance)} performance runs; beside them "
    found += f"{empty} empty accuracy logs" + (f", {absent} other or none" if absent else "")
    division = {str(system.values.get("division", "")).strip().lower() for system in evidence.systems}
    severity = Severity.FAIL if claimed else Severity.UNKNOWN if "closed" in division else Severity.NOTE
    yield observe(
        "accuracy.evidence",
        not without,
        "an accuracy run for every performance run",
        found if without else f"{len(performance)} performance runs have one",
        tuple(Where(run.accuracy or run.path) for run in without[:50]),
        severity,
    )


def check_layout(evidence: Evidence, paths: Iterable[str]) -> Iterator[Observation]:
    """What a submission has beside its performance runs, where rules are claimed for logs that stand in none.

    Args:
        evidence: all that was found.
        paths: of all files.
    """
    names = {path.rpartition("/")[2] for path in paths}
    for name in sorted({run.benchmark for run in evidence.performance_runs if run.benchmark}):
        benchmark = benchmark_of(name, None)
        if benchmark is None:
            continue
        scenarios = {
            run.folder_scenario or run.figures.scenario for run in evidence.performance_runs if run.benchmark == name
        }
        wanted = benchmark.required.get("datacenter", ())
        missing = [choice.replace("|", " or ") for choice in wanted if not scenarios & set(choice.split("|"))]
        if benchmark.compliance and not names & {"verify_accuracy.txt", "verify_output_len.txt"}:
            missing.append(" and ".join(benchmark.compliance))
        described = (("systems/*.json", evidence.systems), ("user.conf", "user.conf" in names))
        missing += [what for what, there in described if not there]
        yield observe(
            "submission.layout",
            not missing,
            "every scenario and test that the closed division asks for, and what describes the runs",
            f"{name}: no {', no '.join(missing)}" if missing else f"{name}: all of them",
            (Where(evidence.performance_runs[0].path),),
            Severity.WARN,
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
            Severity.FAIL,
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
    return run.division, run.submitter, run.node, run.benchmark, run.folder_scenario
