"""What user.conf asks LoadGen for; settings and queries that it computes (test_settings_internal.cc, loadgen.cc)."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass

from megatoken.mlperf.benchmarks import benchmark_of, spelled
from megatoken.mlperf.detail_log import COMMON_SETTINGS, DetailLog
from megatoken.mlperf.draws import MOST_ARRIVALS, PoissonSchedule
from megatoken.mlperf.loadgen_builds import version_number
from megatoken.mlperf.run_figures import LOGS_PADDING, whole

OFFLINE_SLACK = 1.1
# effective_<name> is requested_<name> in every scenario
_KEPT = (
    *("scenario", "test_mode", "min_duration_ms", "max_duration_ms", "max_query_count"),
    *(*COMMON_SETTINGS, "sample_concatenate_permutation"),
)
# Other settings by scenario: a number, or the key of the setting that they equal.
_BY_SCENARIO: dict[str | None, dict[str, int | str]] = {
    "Offline": {
        "min_query_count": 1,
        "target_duration_ms": 0,
        "max_async_queries": 1,
        "min_sample_count": "effective_samples_per_query",
        "target_qps": "requested_offline_expected_qps",
    },
    "Server": {
        "min_query_count": "requested_min_query_count",
        "target_duration_ms": "requested_min_duration_ms",
        "samples_per_query": 1,
        "target_qps": "requested_server_target_qps",
        "min_sample_count": "requested_min_query_count",
        "target_latency_ns": "requested_server_target_latency_ns",
        "target_latency_percentile": "requested_server_target_latency_percentile",
        "max_async_queries": "requested_server_max_async_queries",
    },
    "SingleStream": {
        "target_duration_ms": "requested_min_duration_ms",
        "samples_per_query": 1,
        "max_async_queries": 1,
        "target_latency_percentile": "requested_single_stream_target_latency_percentile",
        "min_sample_count": "effective_min_query_count",
    },
}
# Keys of user.conf and the keys of the log, whose values are the same; durations are in milliseconds.
_LOGGED = {
    "min_duration": "requested_min_duration_ms",
    "max_duration": "requested_max_duration_ms",
    "min_query_count": "requested_min_query_count",
    "max_query_count": "requested_max_query_count",
    "performance_sample_count_override": "requested_performance_sample_count_override",
    "sample_concatenate_permutation": "requested_sample_concatenate_permutation",
}
_LIMITS = {"ttft_latency": "requested_server_ttft_latency", "tpot_latency": "requested_server_tpot_latency"}
_OF_SCENARIO = {
    "Offline": {"target_qps": "requested_offline_expected_qps"},
    "Server": {"target_qps": "requested_server_target_qps", **_LIMITS},
}
MOST_LINES = 5_000
_LINE = re.compile(r"\s*([\w-]{1,80}|\*)\.(\w{1,40}|\*)\.(\w{1,80})\s+=\s+(-?\d{1,20}(?:\.\d{1,20})?)(?:\s.*)?")


def effective_settings(log: DetailLog) -> dict[str, object]:
    """What each ``effective_<name>`` must be by the requested settings; None where they do not say."""
    expected: dict[str, object] = {name: log.get(f"requested_{name}") for name in _KEPT}
    rows = whole(log, "qsl_reported_performance_count")
    expected["performance_sample_count"] = whole(log, "requested_performance_sample_count_override") or rows
    if (count := whole(log, "requested_accuracy_sample_count_override")) is not None:
        expected["accuracy_sample_count"] = count or whole(log, "qsl_reported_total_count")
    scenario = log.text("requested_scenario")
    for name, value in _BY_SCENARIO.get(scenario, {}).items():
        expected[name] = log.get(value) if isinstance(value, str) else value
    if scenario == "SingleStream":
        expected |= _single_stream(log, rows)
    return expected


def _single_stream(log: DetailLog, rows: int | None) -> dict[str, object]:
    """The rate that the expected latency gives, and queries for twice the duration, in whole passes if permuted."""
    least, duration_ms = whole(log, "requested_min_query_count"), log.get("requested_min_duration_ms")
    latency_ns = log.number("requested_single_stream_expected_latency_ns")
    if not latency_ns:
        return {}
    expected: dict[str, object] = {"target_qps": 1e9 / latency_ns}
    permuted = log.get("requested_sample_concatenate_permutation")  # not in logs of LoadGen 4.0 and 4.1
    if permuted is False:
        expected["min_query_count"] = least
    elif permuted and least is not None and rows and isinstance(duration_ms, int):
        least = max(least, int(2.0 * (duration_ms / 1e3) * (1e9 / latency_ns)))
        expected["min_query_count"] = least + rows - least % rows
    return expected


def offline_query_samples(log: DetailLog, least: int, samples_per_second: float, duration_ms: float) -> int:
    """Samples of an Offline query before padding: the larger of ``least`` and 1.1 x rate x duration."""
    if log.get("effective_performance_issue_unique") is True:
        return whole(log, "effective_performance_sample_count") or 0
    return max(least, int(OFFLINE_SLACK * (duration_ms / 1e3) * samples_per_second))


def samples_per_query(log: DetailLog, samples: int, rows: int) -> int:
    """``generated_samples_per_query``: Offline, ``samples`` padded to whole passes if every row is issued equally."""
    permuted = log.get("effective_sample_concatenate_permutation") is True and rows > 0
    logged = version_number(log.text("loadgen_version")) >= LOGS_PADDING
    padded = permuted and logged and log.text("effective_scenario") == "Offline"
    return math.ceil(samples / rows) * rows if padded else samples


def queries_due_ns(log: DetailLog, queries_per_second: float, count: int) -> float | None:
    """``generated_query_duration``: when the query after the last is due; None if it cannot be computed."""
    if log.text("effective_scenario") != "Server":
        return count * math.floor(1e9 / queries_per_second)
    seed = whole(log, "effective_schedule_rng_seed")
    if seed is None or not 0 < count <= MOST_ARRIVALS:
        return None
    return PoissonSchedule(seed, queries_per_second).due_ns(count)


def user_conf_entries(text: str) -> dict[tuple[str, str, str], tuple[str, int]]:
    """Value and line of each ``<model>.<scenario>.<key> = <number>``, as LoadGen reads it: of equal keys the last."""
    entries: dict[tuple[str, str, str], tuple[str, int]] = {}
    for number, line in enumerate(text.split("\n")[:MOST_LINES], 1):
        if found := _LINE.fullmatch(line[:300]):
            model, scenario, key, value = found.groups()
            entries[model, scenario, key] = (value, number)
    return entries


@dataclass(frozen=True, slots=True)
class Asked:
    """A key of user.conf with the key of the log that has its value."""

    key: str
    log_key: str
    asked: list[tuple[str, int]]  # value and line; several if it is not known which model ran

    def as_logged(self, value: str, logged: object) -> float | bool:
        """A value in the unit of the log, which has flags as true and false and limits in nanoseconds."""
        number = float(value)
        if isinstance(logged, bool):
            return number == 1
        return number * 1e6 if self.key in _LIMITS else number


def user_conf_settings(text: str, scenario: str, benchmark: str | None) -> list[Asked]:
    """What a user.conf asks of a run, as LoadGen prefers it: of its model and scenario, else of any.

    LoadGen's log does not say by which name it was asked for a model; ``benchmark`` is the one that ran, if known.
    """
    entries, found = user_conf_entries(text), []
    for key, log_key in {**_LOGGED, **_OF_SCENARIO.get(scenario, {})}.items():
        mine = [model for model, _, name in entries if model != "*" and name == key and _may_be(benchmark, model)]
        for models, of in ((mine, scenario), (["*"], scenario), (mine, "*"), (["*"], "*")):
            if asked := [entries[model, of, key] for model in models if (model, of, key) in entries]:
                found.append(Asked(key, log_key, asked))
                break
    return found


def _may_be(benchmark: str | None, model: str) -> bool:
    return benchmark is None or benchmark_of(model, None) is None or _family(model) == _family(benchmark)


def _family(name: str) -> str:
    return re.sub(r"-99(?:\.9)?$|-interactive$", "", spelled(name))
