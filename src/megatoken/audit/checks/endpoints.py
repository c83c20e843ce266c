"""Results of MLPerf Endpoints: figures that follow from each other, settings that were kept, and the rules."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

from megatoken.audit.checks import accuracy, cross, rules
from megatoken.audit.discovery import Tree, below
from megatoken.audit.documents import READABLE
from megatoken.audit.evidence import Where, places
from megatoken.audit.finding import Observation, Outcome, Severity, check, free_of, outcome, shown
from megatoken.audit.stated import EndpointResult
from megatoken.files import Damage, UnreadableError, mapping, number_at, read_json_object
from megatoken.mlperf.endpoints_report import ACCURACY, CAUTIOUS, SEEDS, accuracy_scores, percentiles, window_seconds
from megatoken.mlperf.latencies import disorder, impossible_mean
from megatoken.text import count_of

EXACT = 1e-9  # relative; the summary prints every digit of its floats
ENDED = {"state": "complete", "complete": True}
LENGTHS = "output_sequence_lengths"
TIMES = {"latency": "latency", "ttft": "TTFT", "tpot": "TPOT"}


def check_endpoint(tree: Tree, result: EndpointResult) -> Iterator[Observation]:
    """One result."""
    for one in (complete, figures, settings):
        yield from one(result)
    for rule in rules.OF_ANY_RESULT:
        yield from rule(result)
    yield from _accuracy(tree, result)


@check("endpoint.complete", "The run ended, with every sample", "Samples that failed are missing from every figure.")
def complete(result: EndpointResult) -> Outcome:
    values = result.summary
    failed = number_at(values, "n_samples_failed")
    problems = [f"{key} {shown(values.get(key))}" for key, wanted in ENDED.items() if values.get(key, wanted) != wanted]
    if failed != 0:
        problems.append(f"n_samples_failed {shown(failed)}")
    where, expected = result.at(*ENDED, "n_samples_failed"), "a run that was completed, and no failed sample"
    return free_of(problems, expected, "such a run", where, Severity.WARN)


@check("endpoint.figures", "Figures follow from each other", "All are computed from one set of samples.")
def figures(result: EndpointResult) -> Outcome:
    """Counts, rates, means and distributions, each computed from the others."""
    problems = list(_problems(result.summary))
    expected = "rates that follow from counts and time, and distributions whose parts fit together"
    return free_of((text for _, text in problems), expected, "they do", result.at(*(key for key, _ in problems)))


def _problems(values: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Each with the key that it is about."""
    issued, done, failed = (number_at(values, f"n_samples_{name}") for name in ("issued", "completed", "failed"))
    if issued is None or done is None or failed is None or issued != done + failed:
        yield "n_samples_issued", f"{issued} issued, {done} completed, {failed} failed"
    seconds, tokens = window_seconds(values), number_at(values, LENGTHS, "total")
    # LoadGen's window counts the intervals between samples.
    intervals = done - 1 if done is not None and number_at(values, "legacy_loadgen_window_duration_ns") else done
    for key, count, unit in (("qps", intervals, "samples/s"), ("tps", tokens, "tokens/s")):
        rate = number_at(values, key)
        if rate is None or count is None or not seconds or math.isclose(rate, count / seconds, rel_tol=EXACT):
            continue
        yield key, f"{rate:,.6g} {unit}, though {count:,.0f} in {seconds:,.3f} s are {count / seconds:,.6g}"
    for key, name in (*TIMES.items(), (LENGTHS, "output lengths")):
        part = values.get(key)
        if isinstance(part, dict) and part:
            for text in _distribution(part, key, done):
                yield key, f"{name}: {text}"


def _distribution(part: Mapping[str, Any], key: str, samples: float | None) -> Iterator[str]:
    total, mean = number_at(part, "total"), number_at(part, "avg")
    unit, scale = (" tokens", 1.0) if key == LENGTHS else (" s", 1e9)
    points = percentiles(part, scale)
    counts = _counts(part)
    counted = sum(counts) if counts else samples
    if total is not None and mean is not None and counted and not math.isclose(total, mean * counted, rel_tol=EXACT):
        yield f"a mean of {mean:,.6g}, though {total:,.6g} over {counted:,.0f} samples is {total / counted:,.6g}"
    # Percentiles may lie between samples.
    slack = 8 * (points.get("max", 0.0) - points.get("min", 0.0)) / (counted or 1)
    if found := disorder(points, unit) or impossible_mean(points, int(counted or 0), unit, slack):
        yield found
    if counts and samples is not None and sum(counts) != samples and key != "tpot":  # answers of one token have none
        yield f"a histogram of {count_of(sum(counts), 'sample')}, not of {samples:,.0f}"
    cautious = percentiles(part, scale, CAUTIOUS)
    for name in cautious.keys() & points.keys() - {"min", "mean", "max"}:
        if cautious[name] < points[name]:
            yield f"an early-stopping estimate of {name} below {name} itself"


def _counts(part: Mapping[str, Any]) -> list[int]:
    counts = mapping(part.get("histogram")).get("counts")
    return counts if isinstance(counts, list) and all(type(count) is int for count in counts) else []


@check("endpoint.settings", "The run matches config.yaml", "Another configuration made this result.")
def settings(result: EndpointResult) -> Outcome:
    """What the configuration asks for, compared with what the summary reports."""
    asked, run = mapping(result.settings), mapping(result.summary.get("run_config"))
    load, runtime = mapping(asked.get("load_pattern")), mapping(asked.get("runtime"))
    pairs = {name: (number_at(runtime, name), number_at(run, name)) for name in SEEDS}
    pairs["n_samples_issued"] = number_at(runtime, "n_samples_to_issue"), number_at(result.summary, "n_samples_issued")
    pairs["target_qps"] = number_at(load, "target_qps"), number_at(run, "load_pattern", "target_qps")
    wrong = {key: pair for key, pair in pairs.items() if pair[0] is not None and pair[0] != pair[1]}
    place = (Where(result.settings_path),) if result.settings_path else ()
    expected, found = (shown(", ".join(f"{key} {pair[part]}" for key, pair in wrong.items())) for part in (0, 1))
    found = found or ("the same" if place else "no config.yaml")
    holds = not wrong if result.settings else None
    return outcome(holds, expected or "what config.yaml asks for", found, (*place, *result.at(*wrong)))


def _accuracy(tree: Tree, result: EndpointResult) -> Iterator[Observation]:
    """One score a data set, of every row; the target where the benchmark has one score."""
    folder = result.files.folder.rpartition("/")[0]
    path, benchmark = below(folder, f"accuracy/{ACCURACY}"), result.benchmark
    if path not in tree.files:
        return
    try:
        values, lines, _ = read_json_object(tree.path(path))
    except UnreadableError as error:
        yield from READABLE["endpoint"](path, Damage(None, str(error)))
        return
    scores = accuracy_scores(values)
    counts = [mapping(score.get("response_counts")) for score in scores]
    lost = [f"{name} {shown(one[name])}" for one in counts for name in ("empty", "missing") if one.get(name)]
    samples = sum(int(number_at(score, "total_samples") or 0) for score in scores)
    rows = benchmark.accuracy_rows if benchmark else samples
    found, where = "; ".join([count_of(samples, "sample"), *lost]), places(path, line=lines.get("total_samples"))
    whole, expected = bool(scores) and not lost and samples >= rows, f"a scored answer for each of {rows:,} rows"
    yield from accuracy.records.observations(outcome(whole, expected, found, where, result.unmet))
    if benchmark is not None and len(benchmark.accuracy) == 1 and scores:
        (target,) = benchmark.accuracy.values()
        score = number_at(scores[0], "score") if len(scores) == 1 else number_at(values, "average_accuracy")
        found, where = "no score" if score is None else f"{score:g}", places(path, line=lines.get("score"))
        holds, expected = None if score is None else score >= target, f"{benchmark.name}: at least {target:g}"
        yield from cross.scores.observations(outcome(holds, expected, found, where, result.unmet))
    if len(scores) == 1:
        length, both = number_at(scores[0], LENGTHS, "avg"), (*places(path), *result.at(LENGTHS))
        yield from cross.tokens_agree(result.figures.tokens_per_sample, length, both)
