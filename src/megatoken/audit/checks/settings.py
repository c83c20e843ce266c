"""Whether the settings and the queries of a log follow from what was asked for, as LoadGen computes them."""

from __future__ import annotations

import math
from collections.abc import Iterator

from megatoken.audit.finding import Observation, Severity, shown
from megatoken.audit.view import RunView, observe
from megatoken.mlperf.detail_log import COMMON_SETTINGS, LIBRARY_SET, DetailLog
from megatoken.mlperf.draws import MOST_ARRIVALS, MOST_ROWS, PoissonSchedule, library_order
from megatoken.mlperf.loadgen_builds import version_number
from megatoken.mlperf.run_figures import LOGS_PADDING, whole
from megatoken.text import count_of

SIX_DIGITS = 6e-6  # relative error of a number printed with six significant digits
OFFLINE_SLACK = 1.1
EVERY_ROW_A_QUERY = (
    5,
    0,
    6,
)  # releases before it may generate as many Offline queries as there are rows; one is issued
# effective_<name> is requested_<name>, whatever the scenario (test_settings_internal.cc)
_KEPT = [
    "scenario",
    "test_mode",
    "min_duration_ms",
    "max_duration_ms",
    "max_query_count",
    *COMMON_SETTINGS,
    "sample_concatenate_permutation",
]


def check_settings(run: RunView) -> Iterator[Observation]:
    """From requested settings to effective ones, to the queries generated from them."""
    if run.figures.scenario is None:
        return
    yield from _effective(run)
    yield from _library(run)
    if run.figures.scenario == "Offline":
        yield from _offline_samples(run)
    if run.is_performance:
        yield from _generated(run)


def _effective(run: RunView) -> Iterator[Observation]:
    log = run.detail
    wrong: list[tuple[str, object]] = []
    compared = 0
    for name, expected in _expected_effective(log).items():
        found = log.get(f"effective_{name}")
        if isinstance(expected, int | float) and expected < 0:
            continue  # LoadGen logs an error and takes its default
        if found is None or expected is None:
            continue
        compared += 1
        if not _same(found, expected):
            wrong.append((name, expected))
    keys = [f"effective_{name}" for name, _ in wrong]
    yield observe(
        "settings.effective",
        not wrong if compared else None,
        shown(", ".join(f"effective_{name} {expected!r}" for name, expected in wrong))
        or "effective settings that follow from the requested ones",
        shown(", ".join(run.text(key) for key in keys)) or f"{compared} settings compared, all do",
        run.at(*keys, *(key.replace("effective", "requested") for key in keys)) if keys else run.at(),
    )


def _expected_effective(log: DetailLog) -> dict[str, object]:
    expected: dict[str, object] = {name: log.get(f"requested_{name}") for name in _KEPT}
    scenario = log.text("requested_scenario")
    override = whole(log, "requested_performance_sample_count_override")
    rows = whole(log, "qsl_reported_performance_count")
    expected["performance_sample_count"] = override or rows
    if (least := whole(log, "requested_accuracy_sample_count_override")) is not None:
        expected["accuracy_sample_count"] = least or whole(log, "qsl_reported_total_count")
    min_queries = whole(log, "requested_min_query_count")
    duration = log.get("requested_min_duration_ms")
    samples = whole(log, "effective_samples_per_query")
    if scenario == "Offline":
        expected |= {"min_query_count": 1, "target_duration_ms": 0, "max_async_queries": 1, "min_sample_count": samples}
        expected["target_qps"] = log.number("requested_offline_expected_qps")
    elif scenario == "Server":
        expected |= {"min_query_count": min_queries, "target_duration_ms": duration, "samples_per_query": 1}
        expected |= {"target_qps": log.number("requested_server_target_qps"), "min_sample_count": min_queries}
        expected["target_latency_ns"] = log.get("requested_server_target_latency_ns")
        expected["target_latency_percentile"] = log.number("requested_server_target_latency_percentile")
        expected["max_async_queries"] = log.get("requested_server_max_async_queries")
    elif scenario == "SingleStream":
        expected |= {"target_duration_ms": duration, "samples_per_query": 1, "max_async_queries": 1}
        expected["target_latency_percentile"] = log.number("requested_single_stream_target_latency_percentile")
        latency_ns = log.number("requested_single_stream_expected_latency_ns")
        expected["target_qps"] = 1e9 / latency_ns if latency_ns else None
        if not log.get("requested_sample_concatenate_permutation"):
            expected["min_query_count"] = min_queries
        elif min_queries is not None and latency_ns and rows and isinstance(duration, int):
            least = max(min_queries, int(2.0 * (duration / 1e3) * (1e9 / latency_ns)))
            expected["min_query_count"] = least + rows - least % rows
        expected["min_sample_count"] = whole(log, "effective_min_query_count")
    return expected


def _offline_samples(run: RunView) -> Iterator[Observation]:
    log = run.detail
    keys = ("effective_samples_per_query", "requested_min_query_count", "effective_target_qps")
    samples, least = whole(log, keys[0]), whole(log, keys[1])
    rate, duration_ms = log.number(keys[2]), log.number("effective_min_duration_ms")
    if samples is None or least is None or rate is None or duration_ms is None:
        yield observe("settings.samples", None, "1.1 x rate x duration samples", "figures missing", run.at(*keys))
        return
    if log.get("effective_performance_issue_unique") is True:
        expected = whole(log, "effective_performance_sample_count") or 0
    else:
        expected = max(least, int(OFFLINE_SLACK * (duration_ms / 1e3) * rate))
    yield observe(
        "settings.samples",
        abs(samples - expected) <= 1 + SIX_DIGITS * expected,
        f"{count_of(expected, 'sample')}: the larger of {least:,} and 1.1 x {rate:g}/s x {duration_ms / 1e3:g} s",
        f"{samples:,}",
        run.at(*keys, "effective_min_duration_ms"),
    )


def _library(run: RunView) -> Iterator[Observation]:
    log = run.detail
    loaded = log.library_set()
    seed, total = whole(log, "effective_qsl_rng_seed"), whole(log, "qsl_reported_total_count")
    expected = "the order that the seed gives"
    if log.text("effective_test_mode") not in ("PerformanceOnly", "AccuracyOnly"):
        return
    if loaded is None or seed is None or total is None or not 0 < total <= MOST_ROWS:
        found = "no library set" if loaded is None else "no seed or size, or a data set too large to shuffle again"
        yield observe("settings.library_order", None, expected, found, run.at(LIBRARY_SET))
        return
    rows = total
    wanted = whole(log, "effective_accuracy_sample_count" if run.is_accuracy else "effective_performance_sample_count")
    if whole(log, "effective_accuracy_sample_count") is not None and wanted:
        rows = min(wanted, total)  # from LoadGen 6.0.6 on only so many are shuffled
    set_size = whole(log, "effective_performance_sample_count") or rows
    padding = (whole(log, "effective_samples_per_query") or 1) - 1 if run.figures.scenario == "MultiStream" else 0
    mine = loaded.tolist()
    best = 0
    for before_gcc_11 in (False, True):
        order = list(library_order(seed, rows, before_gcc_11)[:set_size])
        order += order[:padding]
        if mine == order:
            yield observe(
                "settings.library_order",
                True,
                expected,
                f"{count_of(len(mine), 'row')} in that order",
                run.at(LIBRARY_SET),
            )
            return
        best = max(best, sum(a == b for a, b in zip(mine, order, strict=False)))
    found = f"{count_of(len(mine), 'row')}, {best:,} of them where the seed puts them"
    if len(set(mine)) == len(mine) == min(set_size, rows) and max(mine) < total and best < len(mine) // 2:
        found += "; each row once, so another C++ library's shuffle is possible"
        yield observe("settings.library_order", False, expected, found, run.at(LIBRARY_SET), Severity.WARN)
    else:
        yield observe("settings.library_order", False, expected, found, run.at(LIBRARY_SET, "effective_qsl_rng_seed"))


def _generated(run: RunView) -> Iterator[Observation]:
    """generated_*: the padded sample count, the number of queries and when the last is due."""
    log = run.detail
    keys = ("generated_query_count", "generated_samples_per_query", "generated_query_duration")
    count, each, duration = (whole(log, key) for key in keys)
    loaded = log.library_set()
    rate, samples = log.number("effective_target_qps"), whole(log, "effective_samples_per_query")
    if count is None or each is None or duration is None or not rate or samples is None or loaded is None:
        yield observe(
            "settings.generated", None, "queries that follow from the settings", "figures missing", run.at(*keys)
        )
        return
    permuted = log.get("effective_sample_concatenate_permutation") is True
    rows = len(loaded)
    scenario = run.figures.scenario
    release = version_number(log.text("loadgen_version"))
    padded = permuted and scenario == "Offline" and rows and release >= LOGS_PADDING
    expected_each = math.ceil(samples / rows) * rows if padded else samples
    problems = []
    if each != expected_each:
        whole_passes = (
            f" ({count_of(expected_each // rows, 'pass', 'passes')} over {count_of(rows, 'row')})"
            if expected_each != samples
            else ""
        )
        problems.append(f"{count_of(expected_each, 'sample')} a query{whole_passes}, not {each:,}")
    if scenario == "Offline" and count != 1 and release >= EVERY_ROW_A_QUERY:
        problems.append(f"one query, not {count:,}")
    if permuted and scenario != "Offline" and rows and count % rows:
        problems.append(f"whole passes over {count_of(rows, 'row')}, not {count_of(count, 'query', 'queries')}")
    due = _due_ns(log, scenario, rate, count)
    if due is not None and abs(duration - due) > count + SIX_DIGITS * due:
        problems.append(f"queries over {due:.0f} ns, not {duration}")
    yield observe(
        "settings.generated",
        not problems,
        shown("; ".join(problems)) or "queries that follow from the settings and seeds",
        shown("; ".join(run.text(key) for key in keys)),
        run.at(*keys),
    )


def _due_ns(log: DetailLog, scenario: str | None, rate: float, count: int) -> float | None:
    if scenario != "Server":
        return count * math.floor(1e9 / rate)
    seed = whole(log, "effective_schedule_rng_seed")
    if seed is None or not 0 < count <= MOST_ARRIVALS:
        return None
    return PoissonSchedule(seed, rate).due_ns(count)


def _same(found: object, expected: object) -> bool:
    if isinstance(found, bool) or isinstance(expected, bool) or not isinstance(found, int | float):
        return found == expected
    if isinstance(expected, int | float) and (isinstance(found, float) or isinstance(expected, float)):
        return abs(found - expected) <= SIX_DIGITS * max(abs(found), abs(expected))
    return found == expected
