"""The verdict of a megatoken run folder, reached again from LoadGen's log, the raw rows and the configuration.

The numbers of the rules are those of ``data/loadgen_rules.json``. Nothing here is the harness's own code: an audit that
asked the harness would only hear it twice.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import PurePath
from typing import Any

import numpy as np

from megatoken.audit.checks.run_latencies import disagreement
from megatoken.audit.detail_log import DetailLog
from megatoken.audit.discovery import SCENARIOS
from megatoken.audit.evidence import Where
from megatoken.audit.facts import DEFAULT_ROUND, Benchmark, benchmark_of, round_seeds, rules
from megatoken.audit.figures import round_of, samples_answers, whole
from megatoken.audit.finding import Observation, Severity, shown
from megatoken.audit.reading import mapping
from megatoken.audit.view import observe
from megatoken.results import Run, Verdict
from megatoken.results.run import CONFIG, RESULT
from megatoken.results.statistics import SOAK, Samples

CONFIGURED = ("scenario", "mode", "rules", "precision", "text")  # what result.json says as config.yaml does
SHORTEST_SEND_LAG_LIMIT_SECONDS, SEND_LAG_SHARE = 0.01, 0.05  # of the limit on the time to first token
CLIENT_SHARE = 0.5
LOST_REPLICAS = "LOST_REPLICAS"
WALL_CLOCK_STEP_SECONDS = 0.01
_PERCENTILES = {
    "TTFT": "result_first_token_99.00_percentile_latency_ns",
    "TPOT": "result_time_per_output_token_99.00_percentile_ns",
}


def check_verdict(folder: Run, log: DetailLog, where: tuple[Where, ...]) -> Iterator[Observation]:
    """Verdict and reasons of a finished run.

    Args:
        folder: the run.
        log: LoadGen's detail log of it.
        where: its files.
    """
    name = folder.result.get("rules")
    claimed = name is not None
    benchmark = _benchmark(folder.result)
    if benchmark is None or (name or DEFAULT_ROUND) not in round_seeds():
        found = f"benchmark {folder.result.get('benchmark')}, rules {name}"
        yield observe("run_folder.verdict", None, "a benchmark and a round that are known", shown(found), where)
        return
    failed = int(Samples.of(folder.requests).failed.sum())
    unmet = [*dict.fromkeys(_unmet(folder, log, benchmark))]
    against = [*(["FAILED_SAMPLES"] if failed else []), *(unmet if claimed else [])]
    stated = [reason["code"] for reason in folder.reasons]
    lost = [LOST_REPLICAS] if lost_replicas(folder.result) else []
    grounds = [*against, *(code for code in stated if code not in (*against, *lost))]
    healthy = Verdict.DEGRADED if lost else Verdict.VALID if claimed else Verdict.MEASURED
    expected = Verdict.INVALID if grounds else healthy
    against += lost
    yield observe(
        "run_folder.verdict",
        folder.verdict is expected,
        shown(f"{expected} ({', '.join(grounds + lost) or 'no reason against it'}), computed again from log and rows"),
        shown(f"{folder.verdict} ({', '.join(stated) or 'no reason'})"),
        where,
    )
    said = {*stated, *(shortfall["code"] for shortfall in (*folder.rules_unmet, *folder.doubts))}
    lacking = [code for code in (*against, *unmet) if code not in said]
    grounds = [*dict.fromkeys([*against, *unmet])]
    yield observe(
        "run_folder.reasons",
        not lacking,
        f"every rule that log and rows do not meet, and every doubt they raise: {', '.join(grounds) or 'none'}",
        shown(f"not told: {', '.join(dict.fromkeys(lacking))}") if lacking else "all told",
        where,
        Severity.WARN,
    )


def lost_replicas(result: Mapping[str, Any]) -> bool:
    """Whether a run says that it was without one of its replicas, now or, of a soak, before it was interrupted."""
    rack, soak = result.get("rack") or {}, result.get("soak") or {}
    return rack.get("replicas_least") != rack.get("replicas") or any(
        one["lost_replicas"] for one in soak.get("interruptions", ())
    )


def check_configured(folder: Run, prefix: str) -> Iterator[Observation]:
    """What ran, as result.json tells it, against config.yaml.

    Args:
        folder: the run.
        prefix: path of the folder, with a slash at its end; empty for the audited folder itself.
    """
    result, config = folder.result, folder.config
    if "soak" in result and config.get("scenario") == "offline":
        config = {**config, "scenario": SOAK}  # it runs under the full load that Offline has
    differing = [
        f"{key} {result.get(key)}, configured {config[key]}"
        for key in CONFIGURED
        if key in config and result.get(key) != config[key]
    ]
    differing += _unlike_settings(folder)
    given = config.get("prompts") or config.get("lengths")
    if isinstance(given, str) and "data_set" in result and result["data_set"] != PurePath(given).name:
        differing.append(f"data_set {result['data_set']}, configured {given}")
    unknown = [key for key in CONFIGURED if key not in config]
    model, ran = config.get("model"), result.get("model")
    name = PurePath(model).name if isinstance(model, str) else ""
    linked = False
    if name in ("", ".."):
        unknown.append("model")
    elif ran != name:
        linked = not differing and "/" in str(model)  # a link may lead to a directory of another name
        differing.append(f"model {ran}, configured {model}")
    if "random_weights" not in config or not isinstance(result.get("weights"), str):
        unknown.append("weights")
    else:
        seeded = f"random, seed {config.get('seed')}"
        drawn = result["weights"].startswith("random")
        if (drawn and result["weights"] != seeded) or (config["random_weights"] is True and not drawn):
            differing.append(f"weights {result['weights']}, configured random_weights {config['random_weights']}")
    compared = len(CONFIGURED) + 2 - len(unknown)
    left = f"; not compared: {', '.join(unknown)}" if unknown else ""
    yield observe(
        "run_folder.configuration",
        False if differing else True if compared else None,
        "scenario, mode, rules, precision, data set, model and weights as configured",
        shown("; ".join(differing) or f"{compared} of {len(CONFIGURED) + 2} agree{left}"),
        (Where(prefix + RESULT), Where(prefix + CONFIG)),
        Severity.WARN if linked and len(differing) == 1 else Severity.FAIL,
    )


def _unlike_settings(folder: Run) -> Iterator[str]:
    """Settings of config.yaml that are not those that a soak recorded, which it would not go on with."""
    soak = mapping(folder.result.get("soak"))
    recorded = dict(mapping(soak.get("settings")))
    if "duration_seconds" in soak:
        recorded["min_duration_seconds"] = soak["duration_seconds"]
    for key, value in recorded.items():
        *above, last = key.split(".")
        section: Mapping[str, Any] = folder.config
        for name in above:
            section = mapping(section.get(name))
        if last in section and section[last] != value:
            yield f"{key} {value}, configured {section[last]}"


def _benchmark(result: Mapping[str, Any]) -> Benchmark | None:
    name = result.get("benchmark") or "llama2-70b"  # the yardstick of models that are named after none
    return benchmark_of(name, None) if isinstance(name, str) else None


def _unmet(folder: Run, log: DetailLog, benchmark: Benchmark) -> Iterator[str]:
    """Codes of rules not met and of doubts; what the log does not say is left to the checks of the log."""
    scenario = str(folder.result.get("scenario"))
    named = isinstance(folder.result.get("benchmark"), str)  # else it is a yardstick, which says nothing of scenarios
    round_ = folder.result.get("rules") or DEFAULT_ROUND
    if named and scenario in SCENARIOS and not benchmark.in_round(round_).has(SCENARIOS[scenario]):
        yield "SCENARIO"
    total = whole(log, "qsl_reported_total_count")
    data_set_rows = folder.result.get("data_set_rows")
    rows = total if total is None or not isinstance(data_set_rows, int) else min(total, data_set_rows)
    if samples_answers(log):  # a compliance test, whose few samples show no speed
        if round_of(log) is None:
            yield "SEEDS"
    elif folder.result.get("mode") == "performance":
        yield from _duration_and_samples(folder, log, scenario, benchmark)
        if round_of(log) is None:  # whether they are of the round that somebody claims is rules.seeds' question
            yield "SEEDS"
        if not _every_row_equally_often(log, scenario, data_set_rows):
            yield "EQUAL_ISSUE"
        yield from _latencies(log, scenario, benchmark)
        if log.text("result_validity") != "VALID":
            yield "LOADGEN_INVALID"
        if scenario in ("server", "interactive") and disagreement(folder, log):
            yield "LOADGEN_DISAGREES"
        yield from _client(folder, scenario)
    if rows is not None and rows != benchmark.rows:
        yield "DATA_SET_SIZE"
    if log.error_count:
        yield "LOADGEN_ERRORS"


def _duration_and_samples(folder: Run, log: DetailLog, scenario: str, benchmark: Benchmark) -> Iterator[str]:
    required = rules()["min_duration_ms"] / 1e3
    asked = (log.number("effective_min_duration_ms") or 0.0) / 1e3
    if scenario == "offline":
        ran = (log.number("result_max_latency_ns") or 0.0) / 1e9
        long_enough = ran >= required
    else:
        due = Samples.of(folder.requests).scheduled
        long_enough = log.get("result_min_duration_met") is True or bool(len(due) and due.max() >= required)
    if asked < required or not long_enough:
        yield "MIN_DURATION"
    samples = whole(log, "effective_samples_per_query")
    if scenario == "offline" and samples is not None and samples < benchmark.rows:
        yield "MIN_SAMPLES"


def _every_row_equally_often(log: DetailLog, scenario: str, data_set_rows: object) -> bool:
    rows, each = whole(log, "qsl_reported_performance_count"), whole(log, "generated_samples_per_query")
    queries = whole(log, "generated_query_count")
    if not rows or each is None:
        return True
    if isinstance(data_set_rows, int) and data_set_rows > 0:
        rows = min(rows, data_set_rows)
    issued = each * (1 if queries is None else queries)
    in_passes = scenario == "singlestream" or issued % rows == 0
    return log.get("effective_sample_concatenate_permutation") is True and in_passes


def _latencies(log: DetailLog, scenario: str, benchmark: Benchmark) -> Iterator[str]:
    limits = benchmark.limits.get(SCENARIOS.get(scenario, scenario))
    if scenario in ("server", "interactive") and limits is not None:
        for name, limit_ns in (("TTFT", limits.ttft_ns), ("TPOT", limits.tpot_ns)):
            found = log.number(_PERCENTILES[name])
            if found is not None and found >= limit_ns:
                yield f"{name}_LIMIT"
            asked = log.number(f"requested_server_{name.lower()}_latency")
            if asked is not None and asked > limit_ns:
                yield "LATENCY_LIMITS"
    if scenario != "offline" and log.get("early_stopping_met") is not True:
        yield "EARLY_STOPPING"


def _client(folder: Run, scenario: str) -> Iterator[str]:
    """What the client took part in: samples sent late, a rate near its own, a wall clock that was set."""
    result = folder.result
    if scenario != "offline":
        samples = Samples.of(folder.requests)
        lags = np.sort(samples.sent - samples.scheduled)
        lags = lags[np.isfinite(lags)]
        benchmark = _benchmark(result)
        limits = benchmark.limits.get(SCENARIOS.get(scenario, scenario)) if benchmark else None
        most = max(SHORTEST_SEND_LAG_LIMIT_SECONDS, SEND_LAG_SHARE * limits.ttft_ns / 1e9 if limits else 0.0)
        if len(lags) and lags[int(0.99 * len(lags))] > most:
            yield "SEND_LAG"
    offered = result.get("offered_samples_per_second")
    alone = mapping(result.get("client_limit")).get("samples_per_second")
    if isinstance(offered, int | float) and isinstance(alone, int | float) and offered > CLIENT_SHARE * alone:
        yield "CLIENT_LIMIT"
    step = result.get("wall_clock_step_seconds")
    if isinstance(step, int | float) and abs(step) > WALL_CLOCK_STEP_SECONDS:
        yield "WALL_CLOCK"
