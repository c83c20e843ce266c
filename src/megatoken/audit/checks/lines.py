"""Whether a detail log is as LoadGen writes it: whole, every line there, in order, in LoadGen's spelling."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator, Sequence

from megatoken.audit.evidence import Where
from megatoken.audit.finding import Observation, Severity, shown
from megatoken.audit.view import RunView, observe
from megatoken.mlperf.detail_log import COMMON_SETTINGS, LIBRARY_SET, DetailLog, Entry
from megatoken.mlperf.loadgen_builds import is_known_version, source_lines
from megatoken.mlperf.run_figures import PERCENTILES
from megatoken.text import count_of

# Keys that LoadGen logs several times: one a message, one a library set, or one a part of a run of two parts.
_MANY = ("generic_message", LIBRARY_SET)
_SCENARIO = {
    "Offline": ["offline_expected_qps"],
    "Server": [
        "server_target_qps",
        "server_target_latency_ns",
        "server_target_latency_percentile",
        "server_coalesce_queries",
        "server_find_peak_qps_decimals_of_precision",
        "server_find_peak_qps_boundary_step_size",
        "server_max_async_queries",
        "server_num_issue_query_threads",
    ],
    "SingleStream": ["single_stream_expected_latency_ns", "single_stream_target_latency_percentile"],
    "MultiStream": [
        "multi_stream_expected_latency_ns",
        "multi_stream_target_latency_percentile",
        "multi_stream_samples_per_query",
    ],
}
_STARTS = {"PerformanceOnly": "Starting performance mode", "AccuracyOnly": "Starting accuracy mode"}
# Numbers that C++ prints from a double: six significant digits, no more.
_DOUBLES = re.compile(
    r"(?:requested|effective)_(?:\w*_qps|\w*_percentile|accuracy_log_probability)|result_\w*(?:per_sec|per_second)|"
    r"result_token_throughput\w*|result_qps_\w+"
)
_WHOLE = re.compile(
    r"result_\w*(?:_ns|_count)|result_[\d.]+_percentile\w*|generated_\w+|\w+_rng_seed|\w+_count|\w+_ms|num_errors"
)


def check_lines(run: RunView) -> Iterator[Observation]:
    """Everything that shows without reading a meaning into the values."""
    log = run.detail
    torn_end = log.cut_off and [damage.line for damage in log.damages] == [log.lines]
    if not log.first:
        severity = run.absent if torn_end or not log.size_bytes else Severity.FAIL
        found = _damage_text(log) or "no entry at all"
        yield observe("log.readable", False, "LoadGen's entries", found, run.at(), severity)
        return
    yield observe(
        "log.readable",
        log.damage_count == 0,
        "nothing but LoadGen's entries",
        _damage_text(log) or count_of(log.lines, "line"),
        _places(run, [damage.line for damage in log.damages]) or run.at(),
        run.absent if torn_end else Severity.FAIL,
    )
    yield observe(
        "log.spelling",
        log.restyled_count == 0,
        "the spelling of LoadGen's own writer",
        f"{count_of(log.restyled_count, 'line')} spelled otherwise" if log.restyled_count else "every line",
        _places(run, log.restyled) or run.at(),
    )
    if log.carriage_returns:
        converted = log.carriage_returns >= log.lines - log.cut_off
        found = f"{log.carriage_returns:,} of {count_of(log.lines, 'line')} end in CR LF"
        found += (
            ": the file went through a text conversion" if converted else ": another program wrote those or the others"
        )
        severity = Severity.NOTE if converted else Severity.FAIL
        yield observe("log.line_ends", False, "LF", found, _places(run, log.carriage_return_lines), severity)
    yield from _presence(run)
    yield from _repeats(run)
    yield from _messages(run)
    yield from _numbers(run)
    yield from _times(run)
    yield _writer(run)
    yield from _source_positions(run)


def _writer(run: RunView) -> Observation:
    """One process; and the thread that began the test says all but errors, warnings and messages."""
    log = run.detail
    processes = log.process_ids
    threads = {entry.thread_id: entry.line for entry in reversed(log.order) if entry.key != "generic_message"}
    found = f"process {', '.join(map(str, processes))}; thread {', '.join(map(str, list(threads)[:20]))}"
    places = sorted({*list(processes.values())[:20], *list(threads.values())[:20]})
    return observe(
        "log.one_process",
        len(processes) == 1 and len(threads) <= 1,
        "one process, and one of its threads",
        found,
        tuple(Where(run.detail_path, line) for line in places) or run.at(),
    )


def expected_keys(log: DetailLog) -> tuple[list[str], list[str]] | None:
    """The keys that LoadGen writes for this scenario and mode, in order, and those that depend on its release.

    None for modes that put several runs into one log.
    """
    scenario, mode = log.text("effective_scenario"), log.text("effective_test_mode")
    if scenario not in _SCENARIO or mode not in ("PerformanceOnly", "AccuracyOnly"):
        return None
    tokens = log.get("requested_use_token_latencies") is True
    keys = [
        "loadgen_version",
        "loadgen_build_date_local",
        "loadgen_build_date_utc",
        "loadgen_git_commit_date",
        "loadgen_git_log_message",
        "loadgen_git_status_message",
        "loadgen_file_sha1",
        "test_datetime",
        "sut_name",
        "get_sut_name_duration_ns",
        "qsl_name",
        "qsl_reported_total_count",
        "qsl_reported_performance_count",
        "requested_scenario",
        "requested_test_mode",
    ]
    keys += [f"requested_{name}" for name in _SCENARIO[scenario]]
    keys += [
        f"requested_{name}" for name in ["min_duration_ms", "max_duration_ms", "min_query_count", "max_query_count"]
    ]
    keys += [f"requested_{name}" for name in COMMON_SETTINGS]
    keys += ["requested_performance_sample_count_override", "requested_accuracy_sample_count_override"]
    keys += ["requested_sample_concatenate_permutation"]
    if tokens:
        keys.append("requested_use_token_latencies")
        if scenario != "Offline":
            keys += ["requested_server_ttft_latency", "requested_server_tpot_latency"]
    keys += [
        f"effective_{name}"
        for name in [
            "scenario",
            "test_mode",
            "samples_per_query",
            "target_qps",
            "target_latency_ns",
            "target_latency_percentile",
            "max_async_queries",
            "target_duration_ms",
            "min_duration_ms",
            "max_duration_ms",
            "min_query_count",
            "max_query_count",
            "min_sample_count",
        ]
    ]
    keys += [f"effective_{name}" for name in COMMON_SETTINGS]
    keys += ["effective_performance_sample_count", "effective_accuracy_sample_count"]
    keys += ["effective_sample_concatenate_permutation", "generic_message", LIBRARY_SET]
    keys += ["generated_query_count", "generated_samples_per_query", "generated_query_duration"]
    keys += [
        f"logger_{name}"
        for name in [
            "swap_request_slots_retry_count",
            "swap_request_slots_retry_retry_count",
            "swap_request_slots_retry_reencounter_count",
            "start_reading_entries_retry_count",
            "tls_total_log_cas_fail_count",
            "tls_total_swap_buffers_slot_retry_count",
        ]
    ]
    keys += ["power_begin", "power_end"]
    if mode == "PerformanceOnly":
        keys += _result_keys(scenario, tokens, log.get("result_validity") == "VALID")
    by_release = ["requested_accuracy_sample_count_override", "effective_accuracy_sample_count", "num_errors"]
    return keys, by_release


def _result_keys(scenario: str, tokens: bool, valid: bool) -> list[str]:
    keys = ["result_validity"]
    keys += ["result_perf_constraints_met"] * (scenario == "Server")
    keys += ["result_min_duration_met", "result_min_queries_met", "early_stopping_met"]
    keys += ["result_invalid_reason"] * (not valid)
    keys += ["early_stopping_ttft_result", "early_stopping_tpot_result"] if tokens else ["early_stopping_result"]
    keys.append("result_query_count")
    if scenario == "Server":
        keys += ["result_overlatency_query_count"]
        keys += ["result_scheduled_samples_per_sec", "result_completed_samples_per_sec"]
    elif scenario == "Offline":
        keys.append("result_samples_per_second")
    elif scenario == "SingleStream":
        keys += ["result_qps_with_loadgen_overhead", "result_qps_without_loadgen_overhead"]
        keys += ["early_stopping_latency_ss", "early_stopping_latency_ms"]
    else:
        keys += [f"result_{name}_query_latency_ns" for name in ("min", "max", "mean")]
        keys += [f"result_{percent}_percentile_per_query_latency_ns" for percent in PERCENTILES]
        keys.append("early_stopping_latency_ms")
    keys += [f"result_{name}_latency_ns" for name in ("min", "max", "mean")]
    keys += [f"result_{percent}_percentile_latency_ns" for percent in PERCENTILES]
    if tokens and scenario == "Offline":
        keys.append("result_tokens_per_second")
    elif tokens:
        keys += [f"result_first_token_{name}_latency_ns" for name in ("min", "max", "mean")]
        keys += [f"result_first_token_{percent}_percentile_latency_ns" for percent in PERCENTILES]
        keys += ["result_token_throughput_with_loadgen_overhead", "result_token_throughput"]
        keys += [f"result_time_per_output_token_{percent}_percentile_ns" for percent in PERCENTILES]
        keys += [f"result_time_to_output_token_{name}" for name in ("min", "max", "mean")]
        keys.append("result_completed_tokens_per_second")
    return [*keys, "num_errors"]


def _presence(run: RunView) -> Iterator[Observation]:
    log = run.detail
    expected = expected_keys(log)
    if expected is None:
        if None in (log.get("effective_scenario"), log.get("effective_test_mode")):
            found = f"it says no scenario or no mode; its last line is {shown(log.order[-1].key if log.order else '')}"
            place = (Where(run.detail_path, log.lines),)
            expected_end = "a log that runs to its last line, num_errors"
            yield observe("log.whole", False, expected_end, found, place, run.absent)
        found = f"scenario {shown(log.get('effective_scenario'))}, mode {shown(log.get('effective_test_mode'))}"
        yield observe("log.lines", None, "a performance or an accuracy run", found, run.at("effective_test_mode"))
        return
    keys, by_release = expected
    present = [entry.key for entry in log.order]
    known = is_known_version(log.text("loadgen_version"))
    optional = {key for key in by_release if _written_by_release(log, key) is None}
    absent_by_release = {key for key in by_release if _written_by_release(log, key) is False}
    keys = [key for key in keys if key not in absent_by_release]
    missing = [key for key in keys if key not in log.first and key not in optional]
    last = log.order[-1].key if log.order else ""
    ends = keys[-1] if keys[-1] not in optional else keys[-2]
    yield observe(
        "log.whole",
        not log.cut_off and (ends in log.first or last == keys[-1]),
        f"a log that runs to its last line, {keys[-1]}",
        f"the last line{' has no end and' if log.cut_off else ''} is {shown(last)}",
        (Where(run.detail_path, log.lines),),
        run.absent,
    )
    if ends not in log.first:  # a log that was cut off lacks all that follows; saying so once is enough
        missing = [
            key for key in missing if keys.index(key) < max((keys.index(k) for k in keys if k in log.first), default=0)
        ]
    held: bool | None = not missing if known or not missing else None
    yield observe(
        "log.lines",
        held,
        f"every kind of line that LoadGen {shown(log.text('loadgen_version') or '?')} writes",
        f"{count_of(len(missing), 'kind')} missing: {', '.join(missing)}" if missing else f"all {len(keys)} kinds",
        run.at(),
    )
    extra = [
        key for key in present if key not in keys and key not in optional and not key.startswith("result_inferred_")
    ]
    yield observe(
        "log.extra_lines",
        not extra if known or not extra else None,
        "no kind of line that this LoadGen never writes",
        shown(", ".join(extra[:20])) if extra else "none",
        run.at(*extra[:20]) if extra else run.at(),
    )
    order = [key for key in keys if key in log.first]
    common = [key for key in present if key in set(order)]
    swapped = next(((a, b) for a, b in zip(common, order, strict=False) if a != b), None)
    yield observe(
        "log.order",
        swapped is None,
        "lines in the order in which LoadGen writes them",
        f"{swapped[0]} stands where {swapped[1]} belongs" if swapped else "that order",
        run.at(*swapped) if swapped else run.at(),
    )


def _written_by_release(log: DetailLog, key: str) -> bool | None:
    """Whether this log's own source files write ``key``; None if they are not known."""
    sources = log.get("loadgen_file_sha1")
    name = "results.cc" if key == "num_errors" else "test_settings_internal.cc"
    sha1 = sources.get(f"/{name}") if isinstance(sources, dict) else None
    lines = source_lines(name, sha1) if isinstance(sha1, str) else None
    return None if lines is None else key in lines


def _repeats(run: RunView) -> Iterator[Observation]:
    log = run.detail
    several_parts = log.counts.get(LIBRARY_SET, 0) > 1
    again = [
        entry
        for entry in log.repeats
        if entry.key not in _MANY and not (several_parts and entry.key.startswith(("generated_", "logger_", "power_")))
    ]
    yield observe(
        "log.repeats",
        not again,
        "one line of each kind",
        f"{shown(again[0].key)} stands {count_of(log.counts[again[0].key], 'time')}" if again else "one",
        tuple(Where(run.detail_path, entry.line) for entry in again) or run.at(),
    )


def _messages(run: RunView) -> Iterator[Observation]:
    """How it starts and, where one thread issues the queries, that it ended naturally; else an error says why not."""
    log, scenario, mode = run.detail, run.detail.text("effective_scenario"), run.detail.text("effective_test_mode")
    ended = "result_validity" in log.first or "power_end" in log.first
    if mode not in _STARTS or not ended or not is_known_version(log.text("loadgen_version")):
        return
    expected = [_STARTS[mode]]
    if mode == "PerformanceOnly" and scenario in ("Offline", "SingleStream") and not log.error_count:
        expected.append("Ending naturally: Minimum query count and test duration met.")
    held = log.messages == expected or (log.error_count > 0 and log.messages[:1] == expected)
    yield observe(
        "log.messages",
        held or (scenario == "MultiStream" and log.messages[:1] == expected),
        shown("; ".join(expected)),
        shown("; ".join(log.messages)) or "none",
        run.at("generic_message"),
    )


def _numbers(run: RunView) -> Iterator[Observation]:
    strange: list[Entry] = []
    for entry in run.detail.order:
        if entry.text in ("nan", "-nan", "inf", "-inf"):
            continue
        if _DOUBLES.fullmatch(entry.key):
            if not _printed_double(entry.text):
                strange.append(entry)
        elif _WHOLE.fullmatch(entry.key) and not re.fullmatch(r"-?\d+", entry.text):
            strange.append(entry)
    yield observe(
        "log.numbers",
        not strange,
        "rates with at most six digits, as C++ prints them, and whole nanoseconds and counts",
        shown(f"{strange[0].key}: {strange[0].text}") if strange else "such numbers",
        tuple(Where(run.detail_path, entry.line) for entry in strange[:20]) or run.at(),
    )


def _printed_double(text: str) -> bool:
    try:
        return f"{float(text):g}" == text
    except ValueError:
        return False


def _times(run: RunView) -> Iterator[Observation]:
    log = run.detail
    torn = [(a, b) for group in _written_together(log) for a, b in itertools.pairwise(group) if a.time_ms != b.time_ms]
    drops = log.time_drops
    found = "that"
    if drops:
        found = f"{shown(drops[0].key)} at {drops[0].time_ms:f} ms comes after a later line"
    elif torn:
        found = f"{torn[0][0].key} at {torn[0][0].time_ms:f} ms, {torn[0][1].key} at {torn[0][1].time_ms:f} ms"
    places = drops or [entry for pair in torn for entry in pair]
    yield observe(
        "log.times",
        not drops and not torn,
        "times that do not go back, and one time for lines that LoadGen writes at once",
        found,
        tuple(Where(run.detail_path, entry.line) for entry in places[:20]) or run.at(),
    )


def _written_together(log: DetailLog) -> Iterator[Sequence[Entry]]:
    if log.counts.get(LIBRARY_SET, 0) > 1:
        return
    starts = ("loadgen_", "requested_", "effective_", "generated_", "logger_", "power_")
    for prefix in starts:
        yield [entry for entry in log.order if entry.key.startswith(prefix)]
    yield [
        entry
        for entry in log.order
        if entry.key.startswith(("sut_", "qsl_", "get_sut_")) or entry.key == "test_datetime"
    ]
    yield [
        entry
        for entry in log.order
        if entry.key.startswith(("result_", "early_stopping_")) or entry.key == "num_errors"
    ]


def _source_positions(run: RunView) -> Iterator[Observation]:
    """Each entry names the line of LoadGen's code that wrote it; the log also says which code that was."""
    log = run.detail
    sources = log.get("loadgen_file_sha1")
    if not isinstance(sources, dict):
        return
    tables = {
        name: source_lines(name, sha1)
        for name in {entry.source for entry in log.order}
        if isinstance(sha1 := sources.get(f"/{name}"), str)
    }
    checked = [
        entry
        for entry in log.order
        if entry.key != "generic_message" and (tables.get(entry.source) or {}).get(entry.key)
    ]
    # Where a call spans several source lines, compilers differ in which one they report.
    wrong = [
        entry
        for entry in checked
        if not any(0 <= entry.source_line - line <= 3 for line in (tables[entry.source] or {})[entry.key])
    ]
    yield observe(
        "log.source_lines",
        not wrong if checked else None,
        "the places in LoadGen's code that write these lines in the release the log names",
        shown(f"{wrong[0].key} from {wrong[0].source}:{wrong[0].source_line}")
        if wrong
        else f"{count_of(len(checked), 'line')} agree",
        tuple(Where(run.detail_path, entry.line) for entry in wrong[:20]) or run.at(),
    )


def _damage_text(log: DetailLog) -> str:
    if not log.damage_count:
        return ""
    first = log.damages[0]
    return shown(
        f"{count_of(log.damage_count, 'line')} that {'is' if log.damage_count == 1 else 'are'} not: line "
        f"{first.line} {first.what}"
    )


def _places(run: RunView, lines: Sequence[int | None]) -> tuple[Where, ...]:
    return tuple(Where(run.detail_path, line) for line in lines)
