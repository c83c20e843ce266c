"""Results of MLPerf Endpoints: figures that follow from each other, settings that were kept, and the rules."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from megatoken.audit.checks.results import disorder, impossible_mean
from megatoken.audit.discovery import Tree, below
from megatoken.audit.endpoints import (
    ACCURACY,
    CAUTIOUS,
    EndpointResult,
    accuracy_scores,
    number,
    percentiles,
    window_seconds,
)
from megatoken.audit.evidence import Where
from megatoken.audit.finding import Observation, Severity, shown
from megatoken.audit.view import observe
from megatoken.files import UnreadableError, display, read_json_object
from megatoken.mlperf.benchmarks import Benchmark, benchmark_of
from megatoken.mlperf.rounds import round_seeds, rules
from megatoken.text import count_of

EXACT = 1e-9  # relative; the summary prints every digit of its floats
ENDED = {"state": "complete", "complete": True}
LENGTHS = "output_sequence_lengths"
TIMES = {"latency": "latency", "ttft": "TTFT", "tpot": "TPOT"}


def check_endpoint(
    tree: Tree, result: EndpointResult, claimed: str | None, rules_claimed: bool
) -> Iterator[Observation]:
    """One result.

    Args:
        tree: all files.
        result: as read.
        claimed: round whose rules are claimed; None: that of its own seeds.
        rules_claimed: whether unmet rules weigh.
    """
    unmet = Severity.NOTE
    if rules_claimed:
        unmet = Severity.WARN if result.files.division == "open" else Severity.FAIL
    benchmark = benchmark_of(result.files.benchmark, None) if result.files.benchmark else None
    yield _complete(result)
    yield _figures(result)
    yield _settings(result)
    yield _seeds(result, claimed, unmet)
    yield from _scenario(result)
    yield from _durations(result, unmet)
    if benchmark is not None:
        yield from _limits(result, benchmark, unmet)
    yield from _accuracy(tree, result, benchmark, unmet)


def _at(result: EndpointResult, *keys: str) -> tuple[Where, ...]:
    return tuple(dict.fromkeys(result.run.where(key) for key in keys)) or (result.run.where(),)


def _complete(result: EndpointResult) -> Observation:
    values = result.summary
    failed = number(values, "n_samples_failed")
    problems = [f"{key} {shown(values.get(key))}" for key, wanted in ENDED.items() if values.get(key, wanted) != wanted]
    if failed != 0:
        problems.append(f"n_samples_failed {shown(failed)}")
    return observe(
        "endpoint.complete",
        not problems,
        "a run that came to its end, and no failed sample",
        "; ".join(problems) or "so it is",
        _at(result, "state", "complete", "n_samples_failed"),
        Severity.WARN,
    )


def _figures(result: EndpointResult) -> Observation:
    """Counts, rates, means and distributions, each computed from the others."""
    values = result.summary
    problems: list[tuple[str, str]] = []
    issued, done, failed = (number(values, f"n_samples_{name}") for name in ("issued", "completed", "failed"))
    if issued is None or done is None or failed is None or issued != done + failed:
        problems.append(("n_samples_issued", f"{issued} issued, {done} completed, {failed} failed"))
    seconds, tokens = window_seconds(values), number(values, LENGTHS, "total")
    if done is not None and number(values, "legacy_loadgen_window_duration_ns"):
        done -= 1  # LoadGen counts the intervals between samples
    for key, count, unit in (("qps", done, "samples/s"), ("tps", tokens, "tokens/s")):
        rate = number(values, key)
        if rate is not None and count is not None and seconds and not _close(rate, count / seconds):
            problems.append(
                (key, f"{rate:,.6g} {unit}, though {count:,.0f} in {seconds:,.3f} s are {count / seconds:,.6g}")
            )
    for key, name in (*TIMES.items(), (LENGTHS, "output lengths")):
        part = values.get(key)
        if isinstance(part, dict) and part:
            samples = number(values, "n_samples_completed")
            problems += [(key, f"{name}: {text}") for text in _distribution(part, key, samples)]
    return observe(
        "endpoint.figures",
        not problems,
        "rates that follow from counts and time, and distributions whose parts fit together",
        shown("; ".join(text for _, text in problems)) or "they do",
        _at(result, *(key for key, _ in problems)),
    )


def _distribution(part: Mapping[str, Any], key: str, samples: float | None) -> Iterator[str]:
    total, mean = number(part, "total"), number(part, "avg")
    unit, scale = (" tokens", 1.0) if key == LENGTHS else (" s", 1e9)
    points = percentiles(part, scale)
    counts = _counts(part)
    counted = sum(counts) if counts else samples
    if total is not None and mean is not None and counted and not _close(total, mean * counted):
        yield f"a mean of {mean:,.6g}, though {total:,.6g} over {counted:,.0f} samples is {total / counted:,.6g}"
    slack = (
        8 * (points.get("max", 0.0) - points.get("min", 0.0)) / (counted or 1)
    )  # percentiles may lie between samples
    if found := disorder(points, unit) or impossible_mean(points, int(counted or 0), unit, slack):
        yield found
    if counts and samples is not None and sum(counts) != samples and key != "tpot":  # answers of one token have none
        yield f"a histogram of {count_of(sum(counts), 'sample')}, not of {samples:,.0f}"
    cautious = percentiles(part, scale, CAUTIOUS)
    for name in cautious.keys() & points.keys() - {"min", "mean", "max"}:
        if cautious[name] < points[name]:
            yield f"an early-stopping estimate of {name} below {name} itself"


def _counts(part: Mapping[str, Any]) -> list[int]:
    histogram = part.get("histogram")
    counts = histogram.get("counts") if isinstance(histogram, dict) else None
    if not isinstance(counts, list) or not all(
        isinstance(count, int) and not isinstance(count, bool) for count in counts
    ):
        return []
    return counts


def _settings(result: EndpointResult) -> Observation:
    """What the configuration asks for against what the summary says was done."""
    wanted = {
        "n_samples_issued": number(result.settings, "runtime", "n_samples_to_issue"),
        "scheduler_random_seed": number(result.settings, "runtime", "scheduler_random_seed"),
        "dataloader_random_seed": number(result.settings, "runtime", "dataloader_random_seed"),
        "target_qps": number(result.settings, "load_pattern", "target_qps"),
    }
    run = result.summary.get("run_config")
    run = run if isinstance(run, dict) else {}
    found = {
        "n_samples_issued": number(result.summary, "n_samples_issued"),
        "scheduler_random_seed": number(run, "scheduler_random_seed"),
        "dataloader_random_seed": number(run, "dataloader_random_seed"),
        "target_qps": number(run, "load_pattern", "target_qps"),
    }
    differing = [key for key, value in wanted.items() if value is not None and value != found[key]]
    place = (Where(result.settings_path),) if result.settings_path else ()
    return observe(
        "endpoint.settings",
        None if not result.settings else not differing,
        shown(", ".join(f"{key} {wanted[key]}" for key in differing)) or "what config.yaml asks for",
        shown(", ".join(f"{key} {found[key]}" for key in differing)) or ("so it ran" if place else "no config.yaml"),
        (*place, *_at(result, *differing)),
    )


def _seeds(result: EndpointResult, claimed: str | None, unmet: Severity) -> Observation:
    mine = result.run.figures.round
    found = f"those of {mine}" if mine else "of no round"
    wanted = (
        f"the seeds of {claimed}: {', '.join(map(str, round_seeds()[claimed][1:]))}" if claimed else "those of a round"
    )
    held = mine is not None and claimed in (None, mine)
    return observe(
        "rules.seeds", held, wanted, found, _at(result, "scheduler_random_seed", "dataloader_random_seed"), unmet
    )


def _scenario(result: EndpointResult) -> Iterator[Observation]:
    folder, ran = result.files.scenario, result.run.figures.scenario
    if folder in ("Offline", "Server", "Interactive"):
        wanted = "Offline" if folder == "Offline" else "Server"
        yield observe(
            "rules.scenario",
            None if ran is None else ran == wanted,
            f"load of scenario {wanted} in a folder named {folder}",
            f"load of scenario {ran}" if ran else "a load pattern that is none of MLPerf's",
            _at(result, "load_pattern"),
        )


def _durations(result: EndpointResult, unmet: Severity) -> Iterator[Observation]:
    least_seconds = rules()["min_duration_ms"] / 1e3
    asked, ran = result.run.figures.min_duration_seconds, result.run.figures.duration_seconds
    where = (Where(result.settings_path),) if result.settings_path else _at(result)
    yield observe(
        "rules.min_duration",
        None if asked is None else asked >= least_seconds,
        f"min_duration_ms of at least {least_seconds * 1e3:,.0f}",
        "not said" if asked is None else f"{asked * 1e3:,.0f}",
        where,
        unmet,
    )
    yield observe(
        "rules.ran_long_enough",
        None if ran is None else ran >= least_seconds,
        f"a run of at least {least_seconds:g} s",
        "not known" if ran is None else f"{ran:.1f} s",
        _at(result, "duration_ns"),
        unmet,
    )


def _limits(result: EndpointResult, benchmark: Benchmark, unmet: Severity) -> Iterator[Observation]:
    """TTFT and TPOT by the early-stopping estimate of the 99th percentile, as MLPerf's checker takes them."""
    figures, scenario = result.run.figures, result.files.scenario or result.run.figures.scenario
    limits = benchmark.limits.get(scenario or "")
    if limits is not None and scenario != "Offline":
        ttft, tpot = (
            percentiles(result.summary.get(key), 1e9, CAUTIOUS).get("p99", measured.get("p99"))
            for key, measured in (("ttft", figures.ttft_seconds), ("tpot", figures.tpot_seconds))
        )
        known = ttft is not None and tpot is not None
        yield observe(
            "rules.latency_limits",
            None if ttft is None or tpot is None else ttft < limits.ttft_ns / 1e9 and tpot < limits.tpot_ns / 1e9,
            f"{scenario}: p99 TTFT < {limits.ttft_ns / 1e6:g} ms and p99 TPOT < {limits.tpot_ns / 1e6:g} ms",
            f"{(ttft or 0) * 1e3:.4g} ms and {(tpot or 0) * 1e3:.4g} ms" if known else "figures missing",
            _at(result, "ttft", "tpot"),
            unmet,
        )
    if scenario == "Offline":
        issued = figures.samples_issued
        yield observe(
            "rules.offline_samples",
            None if issued is None else issued >= benchmark.rows,
            f"at least {benchmark.rows:,} samples",
            "not said" if issued is None else f"{issued:,}",
            _at(result, "n_samples_issued"),
            unmet,
        )
    if benchmark.tokens_per_sample is not None:
        low, high = benchmark.tokens_per_sample
        found = figures.tokens_per_sample
        yield observe(
            "rules.tokens_per_sample",
            None if found is None else low <= found <= high,
            f"{low:g} to {high:g} tokens per sample, within 10 % of the reference of {benchmark.name}",
            "not known" if found is None else f"{found:.2f}",
            _at(result, LENGTHS),
            Severity.WARN if unmet is not Severity.NOTE else Severity.NOTE,
        )


def _accuracy(
    tree: Tree, result: EndpointResult, benchmark: Benchmark | None, unmet: Severity
) -> Iterator[Observation]:
    """One score a data set, of every row; the target where the benchmark has one score."""
    folder = result.files.folder.rpartition("/")[0] if "/" in result.files.folder else ""
    path = below(folder, f"accuracy/{ACCURACY}")
    if path not in tree.files:
        return
    where = (Where(display(path)),)
    try:
        values, lines, _ = read_json_object(tree.path(path))
    except UnreadableError as error:
        yield observe("endpoint.readable", False, "a JSON object", str(error), where)
        return
    scores = list(accuracy_scores(values))
    counts = [score.get("response_counts") for score in scores]
    lost = [
        f"{name} {shown(count.get(name))}"
        for count in counts
        if isinstance(count, dict)
        for name in ("empty", "missing")
        if count.get(name) not in (0, None)
    ]
    samples = sum(int(number(score, "total_samples") or 0) for score in scores)
    rows = benchmark.accuracy_rows if benchmark else samples
    whole = bool(scores) and not lost and samples >= rows
    yield observe(
        "accuracy.records",
        whole,
        f"a scored answer for each of {rows:,} rows",
        "; ".join([count_of(samples, "sample"), *lost]),
        (Where(display(path), lines.get("total_samples")),),
        unmet,
    )
    if benchmark is not None and len(benchmark.accuracy) == 1 and scores:
        (target,) = benchmark.accuracy.values()
        reached = number(scores[0], "score") if len(scores) == 1 else number(values, "average_accuracy")
        yield observe(
            "accuracy.scores",
            None if reached is None else reached >= target,
            f"{benchmark.name}: at least {target:g}",
            "no score" if reached is None else f"{reached:g}",
            (Where(display(path), lines.get("score")),),
            unmet,
        )
    lengths = [number(score, LENGTHS, "avg") for score in scores]
    mine = result.run.figures.tokens_per_sample
    if len(lengths) == 1 and lengths[0] and mine:
        yield observe(
            "accuracy.tokens_agree",
            abs(mine / lengths[0] - 1) <= 0.10,
            f"about {lengths[0]:.1f} tokens per sample, as in the accuracy run",
            f"{mine:.1f}",
            (*where, *_at(result, LENGTHS)),
            Severity.WARN,
        )


def _close(one: float, other: float) -> bool:
    return abs(one - other) <= EXACT * max(abs(one), abs(other))
