"""A run folder of megatoken: the numbers of result.json computed again from the raw rows, and against LoadGen's log."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from datetime import datetime
from functools import partial
from itertools import pairwise
from typing import Any

from megatoken.analysis.machine import rate_state, simulated_gpu
from megatoken.analysis.stability import Stability, judge_soak
from megatoken.analysis.statistics import seconds_under_load, summarise
from megatoken.audit.checks.run_answers import check_answers
from megatoken.audit.checks.run_latencies import check_duration, check_latencies
from megatoken.audit.checks.run_nodes import check_together
from megatoken.audit.checks.run_rack import check_replicas
from megatoken.audit.checks.run_series import check_segments
from megatoken.audit.checks.run_told import check_health, check_told
from megatoken.audit.checks.run_unmet import SEND_LAG_SHARE, SHORTEST_SEND_LAG_LIMIT_SECONDS
from megatoken.audit.checks.run_verdict import (
    LOST_REPLICAS,
    check_codes,
    check_configured,
    check_verdict,
    lost_replicas,
)
from megatoken.audit.discovery import Tree, below
from megatoken.audit.evidence import Run, Where
from megatoken.audit.finding import Observation, Severity, shown
from megatoken.audit.likeness import same
from megatoken.audit.view import observe
from megatoken.errors import MegatokenError
from megatoken.files import UnreadableError, display, mapping, plain, read_json_object
from megatoken.mlperf.detail_log import DetailLog, read_detail_log
from megatoken.mlperf.run_figures import elapsed, in_seconds
from megatoken.runs.run import CONFIG, MLPERF, NODES, REQUESTS, RESULT, Verdict, read_run
from megatoken.runs.run import Run as RunFolder
from megatoken.text import count_of, natural

SEEDS = ("qsl", "sample_index", "schedule")
CLOCK_SECONDS = 1.0  # dates are told in whole seconds, and a clock may be set a little
LATE_SECONDS = 60.0  # between LoadGen's own start and when the run noted it, on a machine that is busy
NO_SOAKS_OWN = ("FAILED_SAMPLES", LOST_REPLICAS)  # codes of reasons that a soak has as every run does
MOST_UNWRITTEN_SECONDS = 30  # rows of the series that a killed process may have written since the metrics
LOGGED = 1e-4  # LoadGen's clock runs until it has been told of the last sample, and its rates have six digits
# Fields of result.json by the key of LoadGen's log that they repeat; of several keys the first that the log has.
_FROM_LOG: dict[str, tuple[str, ...]] = {
    "loadgen_version": ("loadgen_version",),
    "loadgen_validity": ("result_validity",),
    "loadgen_output_tokens_per_second": ("result_completed_tokens_per_second",),
    "loadgen_samples_per_second": ("result_completed_samples_per_sec", "result_qps_with_loadgen_overhead"),
    "loadgen_scheduled_samples_per_second": ("result_scheduled_samples_per_sec",),
    "loadgen_early_stopping_met": ("early_stopping_met",),
}
_SECONDS_FROM_LOG = {
    "loadgen_ttft_p99_seconds": "result_first_token_99.00_percentile_latency_ns",
    "loadgen_tpot_p99_seconds": "result_time_per_output_token_99.00_percentile_ns",
    "loadgen_latency_p90_seconds": "result_90.00_percentile_latency_ns",
    "loadgen_latency_p99_seconds": "result_99.00_percentile_latency_ns",
}
_OFFLINE_FROM_LOG: dict[str, tuple[str, ...]] = {
    **{name: _FROM_LOG[name] for name in ("loadgen_version", "loadgen_validity")},
    "loadgen_output_tokens_per_second": ("result_tokens_per_second",),
    "loadgen_samples_per_second": ("result_samples_per_second",),
}


def run_folders_in(tree: Tree) -> list[str]:
    """Folders that look like run folders of megatoken."""
    names = (path.removesuffix(RESULT) for path in tree.files if path == RESULT or path.endswith(f"/{RESULT}"))
    return sorted((name.rstrip("/") for name in names if f"{name}{REQUESTS}" in tree.files), key=natural)


def without_result(tree: Tree) -> str | None:
    """The first folder that would look like a run folder if it had a result; soaks have no logs of LoadGen either."""
    names = (path.removesuffix(REQUESTS) for path in tree.files if path == REQUESTS or path.endswith(f"/{REQUESTS}"))
    lost = (
        name.rstrip("/") for name in names if f"{name}{CONFIG}" in tree.files and f"{name}{RESULT}" not in tree.files
    )
    return min(lost, key=natural, default=None)


def owner(path: str, folders: Set[str]) -> str | None:
    """The innermost of ``folders`` that is or holds ``path``."""
    while path and path not in folders:
        path = path.rpartition("/")[0]
    return path if path in folders else None


def interruptions(tree: Tree, folders: Iterable[str]) -> dict[str, str]:
    """Those of the run folders that say INTERRUPTED, and why, in their own words."""
    found: dict[str, str] = {}
    for folder in folders:
        try:
            result, _, _ = read_json_object(tree.path(below(folder, RESULT)))
        except UnreadableError:
            continue  # run_folder.whole says why
        if result.get("verdict") == Verdict.INTERRUPTED:
            reasons = result.get("reasons")
            told = [reason for reason in reasons if isinstance(reason, dict)] if isinstance(reasons, list) else []
            why = "; ".join(f"{reason.get('code')} {reason.get('message')}" for reason in told)
            why = why.removeprefix(f"{Verdict.INTERRUPTED} ")
            found[folder] = f"{Verdict.INTERRUPTED}: {shown(why or 'no reason given')}"
    return found


def check_run_folder(tree: Tree, path: str, runs: Sequence[Run]) -> Iterator[Observation]:
    """One run folder.

    Args:
        tree: all files.
        path: the folder in it.
        runs: all runs that LoadGen logged; those below the folder are its own.
    """
    prefix = f"{display(path)}/" if path else ""
    where = (Where(prefix + RESULT), Where(prefix + REQUESTS))
    logged = next((run for run in runs if run.path == display(below(path, MLPERF))), None)
    try:
        folder = read_run(tree.path(path))
        again = _metrics(folder)
    except MegatokenError as error:
        yield observe("run_folder.whole", False, "a whole run folder", shown(str(error)), where)
        return
    except Exception as error:  # rows that no run writes can break any step of the arithmetic
        found = shown(f"{type(error).__name__}: {error}")
        yield observe("run_folder.whole", False, "rows and numbers that can be computed with", found, where)
        return
    yield observe("run_folder.whole", True, "a whole run folder", count_of(len(folder.requests), "row"), where)
    part_of_another = owner(path.rpartition("/")[0], set(run_folders_in(tree)) - {path}) is not None
    if why := interruptions(tree, [path]).get(path):
        severity = Severity.NOTE if part_of_another else Severity.UNKNOWN  # a search ends probes whose answer is clear
        done = f"{why}; samples that had ended: {len(folder.requests):,}"
        yield Observation("run_folder.interrupted", severity, "a run that came to its end", done, where[:1])
    log = _detail_log(tree, path)
    yield from _guarded(_folder_checks(folder, again, prefix, where), where)
    yield from _guarded(check_together(tree, path, folder, where), where)
    yield from _guarded(check_told(folder, log, prefix), where)
    if not part_of_another:
        yield from _guarded(check_health(folder, prefix), where)
    if "soak" in folder.result or folder.verdict is Verdict.INTERRUPTED:
        return
    if logged is None and _logged_by_nodes(tree, folder, path):
        return
    if logged is None or log is None:
        # A search that found no rate ends INVALID without a test of its own.
        lost = folder.verdict is not Verdict.INVALID
        expected = f"LoadGen's log of a run that ended {folder.verdict}"
        yield observe("run_folder.loadgen", False if lost else None, expected, "no log that can be read", where)
        return
    yield from _guarded(_log_checks(folder, logged, log, where), where)
    yield from _guarded(check_answers(tree, folder, log, path, where), where)
    yield from _guarded(check_verdict(folder, log, (*where, logged.where("result_validity"))), where)


def _folder_checks(
    folder: RunFolder, again: Mapping[str, Any], prefix: str, where: tuple[Where, ...]
) -> Iterator[Observation]:
    if rate_state(folder) == "estimate":
        found = f"simulated {shown(simulated_gpu(folder))}: rates and times are a cost model's"
        places = (Where(prefix + CONFIG), Where(prefix + RESULT))
        yield Observation("run_folder.simulated", Severity.NOTE, "GPUs that compute", found, places)
    result = folder.result
    differing = _differing(result, again)
    unlike = [f"{name} {result[name]}" if name in result else f"no {name}" for name in differing]
    yield observe(
        "run_folder.metrics",
        not unlike,
        shown("; ".join(f"{name} {again[name]}" for name in differing)) or "the numbers that its raw rows give",
        shown("; ".join(unlike)) or f"{count_of(len(again), 'metric')} compared, all agree",
        where,
    )
    yield from check_codes(folder, where[:1])
    yield from check_configured(folder, prefix)
    yield from check_replicas(folder, where)
    if "soak" in result:
        yield from check_segments(folder, where)
        if folder.verdict is not Verdict.INTERRUPTED:
            yield _stability(folder, where)


def _log_checks(folder: RunFolder, logged: Run, log: DetailLog, where: tuple[Where, ...]) -> Iterator[Observation]:
    yield from _against_log(folder.result, logged, log, where)
    yield from _asked(folder, log, (*where, logged.where("effective_qsl_rng_seed")))
    yield _times(folder.result, logged, where)
    yield from check_duration(folder, log, where)
    yield from check_latencies(folder, log, where)


def _guarded(checks: Iterator[Observation], where: tuple[Where, ...]) -> Iterator[Observation]:
    """What checks observe; fields of a kind that no run writes can break any step of them."""
    try:
        yield from checks
    except Exception as error:
        found = shown(f"{type(error).__name__}: {error}")
        yield observe("run_folder.whole", False, "fields that can be computed with", found, where)


def _metrics(folder: RunFolder) -> dict[str, Any]:
    """What follows from the raw rows.

    A process that was killed may have written rows after it last wrote the metrics; those are of the rows before.
    """
    summarised = partial(
        summarise,
        scenario=folder.result["scenario"],
        finished=folder.verdict is not Verdict.INTERRUPTED,
        load_seconds=seconds_under_load(folder.result),
    )
    metrics = summarised(folder.requests, folder.series)
    if folder.verdict is not Verdict.INTERRUPTED or not _differing(folder.result, metrics):
        return metrics
    ended = [folder.result.get(f"samples_{how}") for how in ("completed", "failed", "cancelled")]
    requests = folder.requests.slice(0, sum(count for count in ended if isinstance(count, int)))
    for unwritten in range(min(len(folder.series), MOST_UNWRITTEN_SECONDS) + 1):
        series = folder.series.slice(0, len(folder.series) - unwritten)
        earlier = summarised(requests, series)
        if not _differing(folder.result, earlier):
            return earlier
    return metrics


def _differing(result: Mapping[str, Any], metrics: Mapping[str, Any]) -> list[str]:
    return sorted(name for name, value in metrics.items() if name not in result or not same(result[name], value))


def _detail_log(tree: Tree, path: str) -> DetailLog | None:
    name = below(path, f"{MLPERF}/mlperf_log_detail.txt")
    try:
        return read_detail_log(tree.path(name)) if name in tree.files else None
    except UnreadableError:
        return None  # log.readable says why


def _against_log(
    result: Mapping[str, Any], logged: Run, log: DetailLog, where: tuple[Where, ...]
) -> Iterator[Observation]:
    figures = logged.figures
    offline = result.get("scenario") == "offline"
    expected: dict[str, Any] = {}
    for name, keys in (_OFFLINE_FROM_LOG if offline else _FROM_LOG).items():
        expected[name] = _finite(next((log.get(key) for key in keys if key in log.first), None))
    for name, key in _SECONDS_FROM_LOG.items():
        expected[name] = None if offline else in_seconds(log.number(key), 1e9)
    if offline:
        expected |= dict.fromkeys(_FROM_LOG.keys() - _OFFLINE_FROM_LOG.keys())
    differing = [name for name, value in expected.items() if not same(result.get(name), value)]
    yield observe(
        "run_folder.loadgen",
        not differing,
        shown("; ".join(f"{name} {expected[name]}" for name in differing))
        or "LoadGen's own numbers as its log has them",
        shown("; ".join(f"{name} {result.get(name)}" for name in differing))
        or f"{count_of(len(expected), 'field')}, all the same",
        (*where, logged.where()),
    )
    tokens, samples = result.get("output_tokens"), result.get("samples_completed")
    if figures.output_tokens is not None and isinstance(tokens, int) and result.get("mode") == "performance":
        single = result.get("samples_without_tpot") or 0  # of one token, which LoadGen takes for none
        found = f"{samples} samples and {tokens:,} tokens"
        yield observe(
            "run_folder.tokens",
            samples == figures.samples_issued
            and abs(tokens - single - figures.output_tokens) <= LOGGED * max(tokens, 1),
            f"{figures.samples_issued:,} samples and about {figures.output_tokens:,.0f} tokens, as LoadGen counted",
            f"{found}, of which LoadGen leaves out {single:,} that were answers of one" if single else found,
            (*where, logged.where("result_tokens_per_second")),
            Severity.FAIL,
        )


def _finite(value: Any) -> Any:
    """``value``, None for what C++ prints of 0 / 0: rates of a single query."""
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _asked(folder: RunFolder, log: DetailLog, where: tuple[Where, ...]) -> Iterator[Observation]:
    """What result.json and config.yaml say that LoadGen was asked for."""
    result = folder.result
    expected: dict[str, Any] = {}
    expected |= {f"seeds.{name}": log.get(f"effective_{name}_rng_seed") for name in SEEDS}
    if result.get("scenario") in ("server", "interactive"):
        expected["offered_samples_per_second"] = log.number("effective_target_qps")
        for name in ("ttft", "tpot"):
            expected[f"{name}_limit_seconds"] = in_seconds(log.number(f"requested_server_{name}_latency"), 1e9)
    else:
        expected |= dict.fromkeys(("offered_samples_per_second", "ttft_limit_seconds", "tpot_limit_seconds"))
    if result.get("mode") == "performance":
        expected["send_lag_limit_seconds"] = _send_lag_limit_seconds(result)
    told = {name: _at(result, name) for name in expected}
    for key, value, asked in _configured(folder.config, log):
        told[f"{CONFIG} {key}"], expected[f"{CONFIG} {key}"] = value, asked
    wrong = [name for name, value in expected.items() if not same(told[name], value)]
    yield observe(
        "run_folder.asked",
        not wrong,
        shown("; ".join(f"{name} {expected[name]}" for name in wrong)) or "seeds, rate and limits of LoadGen's log",
        shown("; ".join(f"{name} {told[name]}" for name in wrong)) or f"{len(expected)} compared, all agree",
        where,
    )


def _configured(config: Mapping[str, Any], log: DetailLog) -> Iterator[tuple[str, Any, float]]:
    """Keys of config.yaml that are what LoadGen was asked for, their values, and what its log says of that.

    A compliance test has its own duration, a search offers other rates than the first, and SingleStream is asked for
    one sample less (``harness.loadgen_plan``).
    """
    searched = config.get("find_rate") is True
    known: dict[str, float | None] = {}
    if config.get("compliance") is None:
        known["min_duration_seconds"] = in_seconds(log.number("effective_min_duration_ms"), 1e3)
    if config.get("samples") is not None and config.get("scenario") != "singlestream" and not searched:
        known["samples"] = log.number("requested_min_query_count")
    if config.get("scenario") in ("server", "interactive"):
        if not searched:
            known["rate"] = log.number("effective_target_qps")
        for name in ("ttft", "tpot"):
            if config.get(f"{name}_limit_seconds") is not None:
                known[f"{name}_limit_seconds"] = in_seconds(log.number(f"requested_server_{name}_latency"), 1e9)
    for key, asked in known.items():
        if key in config and asked is not None:
            value = config[key]
            if key == "min_duration_seconds" and isinstance(value, float):
                value = round(1e3 * value) / 1e3  # as LoadGen is given it
            yield key, value, asked


def _send_lag_limit_seconds(result: Mapping[str, Any]) -> float | None:
    if result.get("scenario") == "offline":
        return None
    ttft = result.get("ttft_limit_seconds")
    share = SEND_LAG_SHARE * ttft if isinstance(ttft, int | float) else 0.0
    return max(SHORTEST_SEND_LAG_LIMIT_SECONDS, share)


def _at(result: Mapping[str, Any], name: str) -> Any:
    value: Any = result
    for part in name.split("."):
        value = mapping(value).get(part)
    return value


def _times(result: Mapping[str, Any], logged: Run, where: tuple[Where, ...]) -> Observation:
    """When the folder was made, the query issued and the verdict reached, against LoadGen's own clock."""
    moments = {name: _moment(result.get(name)) for name in ("created_at", "started_at", "ended_at")}
    started, ended = moments["started_at"], moments["ended_at"]
    begun, done = logged.figures.began_at, logged.figures.ended_at
    problems = [f"{name} is no date" for name, moment in moments.items() if name in result and moment is None]
    problems += [
        f"{later} {result.get(later)} before {earlier} {result.get(earlier)}"
        for (earlier, first), (later, second) in pairwise(moments.items())
        if first is not None and second is not None and elapsed(second, first) > CLOCK_SECONDS
    ]
    if started is not None and begun is not None and abs(elapsed(begun, started)) > LATE_SECONDS:
        problems.append(f"started_at {result.get('started_at')}, LoadGen's test began {begun.isoformat()}")
    if ended is not None and done is not None and elapsed(ended, done) > CLOCK_SECONDS:
        problems.append(f"ended_at {result.get('ended_at')}, LoadGen's test ended {done.isoformat()}")
    compared = sum(moment is not None for moment in moments.values())
    return observe(
        "run_folder.times",
        not problems if compared else None,
        "a folder made before LoadGen's test began, and a verdict reached after it ended",
        shown("; ".join(problems)) or f"{compared} times, in order",
        (*where, logged.where("power_begin")),
    )


def _stability(folder: RunFolder, where: tuple[Where, ...]) -> Observation:
    """A soak's verdict, judged again: it has no log of LoadGen's."""
    expected = "the stability that its time series shows; where that is STABLE MEASURED, DEGRADED without all replicas"
    try:
        held = Verdict.DEGRADED if lost_replicas(folder.result) else Verdict.MEASURED
        again = plain(judge_soak(folder.result, folder.environment, folder.requests, folder.series))
    except (KeyError, TypeError, ValueError, AttributeError, IndexError) as error:
        return observe("run_folder.stability", False, expected, shown(f"cannot be judged: {error!r}"), where)
    stated = mapping(folder.result.get("stability"))
    agrees = same(_coded(stated), _coded(again))
    of_the_run = [reason for reason in folder.result["reasons"] if reason["code"] not in NO_SOAKS_OWN]
    repeated = of_the_run == stated.get("reasons")
    steady = again["verdict"] == Stability.STABLE
    healthy = folder.verdict is Verdict.INVALID or (steady and folder.verdict is held)
    found = f"{stated.get('verdict')}, judged again {again['verdict']}; the run is {folder.verdict}"
    if not repeated:
        found += ", for other reasons than its stability has"
    return observe("run_folder.stability", agrees and repeated and healthy, expected, shown(found), where)


def _logged_by_nodes(tree: Tree, folder: RunFolder, path: str) -> bool:
    """Whether each node of a rack had a LoadGen of its own, whose run folders lie in this one and are checked there."""
    verdicts = folder.result.get("node_verdicts")
    ended = [name for name, verdict in verdicts.items() if verdict] if isinstance(verdicts, Mapping) else []
    logs = [below(path, f"{NODES}/{name}/{MLPERF}/mlperf_log_detail.txt") for name in ended]
    return bool(logs) and all(log in tree.files for log in logs)


def _coded(stability: Mapping[str, Any]) -> dict[str, Any]:
    """A soak's stability without what its reasons say in words, which other versions word otherwise."""
    reasons = stability.get("reasons")
    if not isinstance(reasons, list):
        return dict(stability)
    coded = [{**reason, "message": None} if isinstance(reason, Mapping) else reason for reason in reasons]
    return {**stability, "reasons": coded}


def _moment(text: Any) -> datetime | None:
    try:
        moment = datetime.fromisoformat(text)
    except (TypeError, ValueError):
        return None
    return moment if moment.tzinfo else None
