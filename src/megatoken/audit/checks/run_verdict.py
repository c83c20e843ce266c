"""The verdict of a megatoken run folder, reached again from LoadGen's log, the raw rows and the configuration."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import PurePath
from typing import Any

from megatoken.analysis.statistics import SOAK, Samples
from megatoken.audit.checks.run_unmet import benchmark_judged_by, told_otherwise, unmet_rules
from megatoken.audit.evidence import Where
from megatoken.audit.finding import Observation, Severity, shown
from megatoken.audit.view import observe
from megatoken.files import mapping
from megatoken.mlperf.detail_log import DetailLog
from megatoken.mlperf.rounds import DEFAULT_ROUND, round_seeds
from megatoken.runs.run import CONFIG, RESULT, Run, Verdict

CONFIGURED = ("scenario", "mode", "rules", "precision", "text")  # what result.json says as config.yaml does
LOST_REPLICAS = "LOST_REPLICAS"
REASON_CODES = {
    *("MIN_DURATION", "MIN_SAMPLES", "DATA_SET_SIZE", "SCENARIO", "EQUAL_ISSUE", "SEEDS"),
    *("TTFT_LIMIT", "TPOT_LIMIT", "EARLY_STOPPING", "LATENCY_LIMITS"),
    *("LOADGEN_INVALID", "LOADGEN_ERRORS", "LOADGEN_DISAGREES", "SEND_LAG", "CLIENT_LIMIT", "WALL_CLOCK"),
    *("FAILED_SAMPLES", "ACCURACY", "ANSWERS", "COMPLIANCE", LOST_REPLICAS),
    *("NO_VALID_RATE", "OVER_LIMIT", "FALLS_SHORT", "INTERRUPTED", "NOT_FINISHED"),
    *("TREND", "DRIFT", "VARIATION", "WORST_WINDOW", "STANDSTILL", "GAP", "THROTTLED"),
    *("TOO_SHORT", "TREND_UNCERTAIN", "NOT_FULL"),
}  # of shortfalls, which stay what they are from release to release


def check_verdict(folder: Run, log: DetailLog, where: tuple[Where, ...]) -> Iterator[Observation]:
    """Verdict and reasons of a finished run.

    Args:
        folder: the run.
        log: LoadGen's detail log of it.
        where: its files.
    """
    name = folder.result.get("rules")
    claimed = name is not None
    benchmark = benchmark_judged_by(folder.result)
    if benchmark is None or (name or DEFAULT_ROUND) not in round_seeds():
        found = f"benchmark {folder.result.get('benchmark')}, rules {name}"
        yield observe("run_folder.verdict", None, "a benchmark and a round that are known", shown(found), where)
        return
    failed = int(Samples.of(folder.requests).failed.sum())
    numbers = unmet_rules(folder, log, benchmark)
    unmet = [*dict.fromkeys(one.code for one in numbers)]
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
    shortfalls = [*folder.reasons, *folder.rules_unmet, *folder.doubts]
    said = {shortfall["code"] for shortfall in shortfalls}
    lacking = [code for code in (*against, *unmet) if code not in said]
    otherwise = [*told_otherwise(shortfalls, numbers)]
    grounds = [*dict.fromkeys([*against, *unmet])]
    yield observe(
        "run_folder.reasons",
        not lacking and not otherwise,
        f"every rule that log and rows do not meet, and every doubt they raise: {', '.join(grounds) or 'none'}",
        shown("; ".join([*otherwise, *(f"not told: {code}" for code in dict.fromkeys(lacking))]))
        or "all told, with the numbers of log and rows",
        where,
    )


def check_codes(folder: Run, where: tuple[Where, ...]) -> Iterator[Observation]:
    """Codes of shortfalls that nothing gives: a verdict may rest on one, which log and rows can then not bear out."""
    shortfalls = [*folder.reasons, *folder.rules_unmet, *folder.doubts]
    if unknown := [*dict.fromkeys(str(one["code"]) for one in shortfalls if one["code"] not in REASON_CODES)]:
        yield observe("run_folder.reasons", False, "reason codes that are known", shown(", ".join(unknown)), where)


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
