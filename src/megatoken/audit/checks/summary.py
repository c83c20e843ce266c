"""Whether the summary says what the detail log says: LoadGen prints both from the same variables."""

from __future__ import annotations

import re
from collections.abc import Iterator

from megatoken.audit.evidence import Where
from megatoken.audit.finding import Observation, Severity, shown
from megatoken.audit.view import RunView, observe
from megatoken.files import Damage
from megatoken.mlperf.detail_log import COMMON_SETTINGS, DetailLog
from megatoken.mlperf.loadgen_builds import version_number
from megatoken.mlperf.run_figures import LOGS_PADDING, PERCENTILES
from megatoken.mlperf.summary_log import HEADINGS, SummaryField, SummaryLog
from megatoken.text import count_of

_PARAMETERS = [
    "samples_per_query",
    "target_qps",
    "max_async_queries",
    "min_query_count",
    "max_query_count",
    *COMMON_SETTINGS,
    "performance_sample_count",
    "accuracy_sample_count",
]
_LABELS = {
    "SUT name": "sut_name",
    "Scenario": "effective_scenario",
    "Mode": "effective_test_mode",
    "Samples per second": "result_samples_per_second",
    "Tokens per second": "result_tokens_per_second",
    "Tokens per second (inferred)": "result_inferred_tokens_per_second",
    "Completed samples per second": "result_completed_samples_per_sec",
    "Completed tokens per second": "result_completed_tokens_per_second",
    "Completed tokens per second (inferred)": "result_inferred_completed_tokens_per_second",
    "Scheduled samples per second": "result_scheduled_samples_per_sec",
    "QPS w/ loadgen overhead": "result_qps_with_loadgen_overhead",
    "QPS w/o loadgen overhead": "result_qps_without_loadgen_overhead",
    "TPS w/ loadgen overhead": "result_token_throughput_with_loadgen_overhead",
    "Result is": "result_validity",
    "Performance constraints satisfied": "result_perf_constraints_met",
    "Min duration satisfied": "result_min_duration_met",
    "Min queries satisfied": "result_min_queries_met",
    "Early stopping satisfied": "early_stopping_met",
    "target_latency (ns)": "effective_target_latency_ns",
    "ttft_latency (ns)": "requested_server_ttft_latency",
    "tpot_latency (ns)": "requested_server_tpot_latency",
    "min_duration (ms)": "effective_min_duration_ms",
    "max_duration (ms)": "effective_max_duration_ms",
    **{name: f"effective_{name}" for name in _PARAMETERS},
    **{
        f"{word} First Token latency (ns)": f"result_first_token_{word.lower()}_latency_ns"
        for word in ("Min", "Max", "Mean")
    },
    **{
        f"{word} Time per Output Token (ns)": f"result_time_to_output_token_{word.lower()}"
        for word in ("Min", "Max", "Mean")
    },
    **{
        f"{p} percentile first token latency (ns)": f"result_first_token_{p}_percentile_latency_ns" for p in PERCENTILES
    },
    **{
        f"{p} percentile time to output token (ns)": f"result_time_per_output_token_{p}_percentile_ns"
        for p in PERCENTILES
    },
}
# Rates of tokens that the detail log has in every scenario but Offline, and the summary in one only.
_ONLY_IN = {"TPS w/ loadgen overhead": "SingleStream", "Completed tokens per second": "Server"}
_NOT_IN_DETAIL = ("ttft_latency (ns)", "tpot_latency (ns)")  # of Offline
_PER_NANOSECOND = {"TPS w/o loadgen overhead": "result_token_throughput"}
_SEE_DETAIL = "See the detailed log for why this may have occurred."
_RULERS = 2 * len(HEADINGS)


def _statistics(noun: str, percentile: str) -> list[str]:
    return [*(f"{word} {noun}" for word in ("Min", "Max", "Mean")), *(f"{p} {percentile}" for p in PERCENTILES)]


# As LoadGen prints them, where it does; its rate of tokens comes twice in the Server scenario.
_ORDER = [
    *("SUT name", "Scenario", "Mode", "Samples per second", "Completed samples per second"),
    *("Tokens per second", "Completed tokens per second", "Tokens per second (inferred)"),
    *("Completed tokens per second (inferred)", "Result is", "Performance constraints satisfied"),
    *("Min duration satisfied", "Min queries satisfied", "Early stopping satisfied", "QPS w/ loadgen overhead"),
    *("QPS w/o loadgen overhead", "Scheduled samples per second"),
    *_statistics("latency (ns)", "percentile latency (ns)"),
    *("TPS w/ loadgen overhead", "TPS w/o loadgen overhead", "Completed tokens per second"),
    *_statistics("First Token latency (ns)", "percentile first token latency (ns)"),
    *_statistics("Time per Output Token (ns)", "percentile time to output token (ns)"),
    *("samples_per_query", "target_qps", "target_latency (ns)", "ttft_latency (ns)", "tpot_latency (ns)"),
    *("max_async_queries", "min_duration (ms)", "max_duration (ms)"),
    *_PARAMETERS[_PARAMETERS.index("min_query_count") :],
]


def check_summary(run: RunView) -> Iterator[Observation]:
    """Field by field, both ways, and the parts every summary has."""
    log = run.summary
    if log is None or run.files.summary is None:
        return
    for damage in log.damages:
        yield observe(
            "summary.readable",
            False,
            "plain text",
            damage.what,
            (Where(run.files.summary, damage.line),),
            Severity.WARN,
        )
    if run.is_performance and "result_validity" in run.detail.first:
        yield from _fields(run, log)
        yield from _structure(run, log)
    yield _counts(run, log)


def _fields(run: RunView, log: SummaryLog) -> Iterator[Observation]:
    detail, path = run.detail, run.files.summary or ""
    wrong: list[tuple[SummaryField, str]] = []
    labels_of_keys: dict[str, str] = {}
    compared = 0
    for item in log.fields:
        key = _PER_NANOSECOND.get(item.label) or _key(item.label, run.figures.scenario)
        if key is None or key not in detail.first:
            continue
        labels_of_keys[key] = item.label
        compared += 1
        scale = 1e9 if item.label in _PER_NANOSECOND else 1.0
        if not _agrees(item.value, detail, key, scale):
            wrong.append((item, key))
    places = [Where(path, item.line) for item, _ in wrong]
    yield observe(
        "summary.fields",
        not wrong if compared else None,
        shown("; ".join(f"{item.label}: {_as_printed(detail, key)}" for item, key in wrong))
        or "the values of the detail log",
        shown("; ".join(f"{item.label}: {item.value}" for item, _ in wrong)) or f"{compared} fields agree",
        (*places, *(run.at(*(key for _, key in wrong)) if wrong else ())) or (Where(path),),
    )
    for name in ("", "TTFT", "TPOT"):
        key = f"early_stopping_{name.lower()}_result" if name else "early_stopping_result"
        told = detail.text(key)
        if told is not None and run.figures.scenario != "Offline":  # which has none, and prints none
            text, line = log.early_stopping.get(name, ("not told", log.lines))
            yield observe(
                "summary.early_stopping",
                text.split() == told.split(),
                shown(" ".join(told.split())) or "no text",
                shown(text) or "no text",
                (Where(path, line), *run.at(key)),
            )
    yield from _recommendations(run, log)


def _recommendations(run: RunView, log: SummaryLog) -> Iterator[Observation]:
    """Why the run is INVALID, in both logs; nothing where only early stopping failed."""
    told = run.detail.text("result_invalid_reason")
    if told is None and log.recommendations is None:
        return
    text, line = log.recommendations or ("", log.lines)
    said, expected = ("".join(words.replace(_SEE_DETAIL, "").replace("*", "").split()) for words in (text, told or ""))
    yield observe(
        "summary.reason",
        said == expected and (told is None) is (log.recommendations is None),
        shown(" ".join((told or "").split())) or "no recommendation",
        shown(text) or "none",
        (Where(run.files.summary or "", line), *run.at("result_invalid_reason")),
    )


def _structure(run: RunView, log: SummaryLog) -> Iterator[Observation]:
    path = run.files.summary or ""
    unknown = [
        item
        for item in log.fields
        if not _key(item.label, run.figures.scenario) and item.label not in (*_NOT_IN_DETAIL, *_PER_NANOSECOND)
    ]
    strange = [*log.strange, *(Damage(item.line, item.label) for item in unknown)]
    labels = {_usual(item.label) for item in log.fields}
    missing = [heading for heading in HEADINGS if heading not in log.headings]
    missing += ["rulers"] * (log.rulers < _RULERS)
    missing += [label for label in _expected_labels(run) if label not in labels]
    doubled = sorted({item.label for item in log.fields if _count(log, item.label) > _allowed(item.label, run)})
    warns = version_number(run.detail.text("loadgen_version")) >= LOGS_PADDING
    if warns and run.detail.get("effective_sample_concatenate_permutation") is True and not log.warns_of_permutation:
        missing.append("the warning that sample_concatenate_permutation was set")
    problems = []
    moved = _moved(run, log)
    mixed = 0 < log.carriage_returns < log.lines
    if mixed:
        problems.append(f"{log.carriage_returns:,} of {count_of(log.lines, 'line')} end in CR LF, the others in LF")
    if moved:
        problems.append(f"{moved.label} where it does not belong")
    if missing:
        problems.append(f"missing: {', '.join(missing)}")
    if strange:
        problems.append(f"no LoadGen prints: {strange[0].what}")
    if doubled:
        problems.append(f"more than once: {', '.join(doubled)}")
    places = [Where(path, damage.line) for damage in strange[:20]]
    places += [Where(path, item.line) for item in log.fields if item.label in doubled or item is moved]
    yield observe(
        "summary.lines",
        not problems,
        "every line that LoadGen prints, once, in its order, and no other",
        shown("; ".join(problems)) or f"{log.lines} lines",
        tuple(places) or (Where(path),),
        Severity.FAIL if strange or doubled or moved or mixed else run.absent,
    )


def _moved(run: RunView, log: SummaryLog) -> SummaryField | None:
    """The first field that stands before what LoadGen prints before it; MultiStream prints some latencies twice."""
    if run.figures.scenario == "MultiStream":
        return None
    rank = 0
    for item in log.fields:
        places = [place for place, label in enumerate(_ORDER) if label == _usual(item.label)]
        later = [place for place in places if place >= rank]
        if places and not later:
            return item
        rank = min(later, default=rank)
    return None


def _expected_labels(run: RunView) -> list[str]:
    """Labels whose values stand in the detail log, in every performance summary of this scenario."""
    detail = run.detail
    labels = ["SUT name", "Scenario", "Mode", "Result is"]
    if run.figures.scenario == "SingleStream":
        labels += [label for label, key in _PER_NANOSECOND.items() if key in detail.first]
    for label, key in _LABELS.items():
        printed = _ONLY_IN.get(label) in (None, run.figures.scenario)
        if key in detail.first and printed and label not in labels and not label.endswith("_latency (ns)"):
            labels.append(label)
    if detail.get("requested_use_token_latencies") is True:
        labels += ["ttft_latency (ns)", "tpot_latency (ns)"]
    else:
        labels.append("target_latency (ns)")
    if run.figures.scenario != "MultiStream":
        labels += [f"{word} latency (ns)" for word in ("Min", "Max", "Mean")]
    labels += [f"{percent} percentile latency (ns)" for percent in PERCENTILES]
    return labels


def _counts(run: RunView, log: SummaryLog) -> Observation:
    detail, path = run.detail, run.files.summary or ""
    problems, places = [], []
    for name, told, count in (
        ("warnings", log.warnings, detail.warning_count),
        ("errors", log.errors, detail.error_count),
    ):
        if told is None:
            problems.append(f"does not say how many {name} there were")
        elif told[0] != count:
            problems.append(f"says {told[0]:,} {name}")
            places.append(Where(path, told[1]))
    return observe(
        "summary.counts",
        not problems,
        f"{count_of(detail.warning_count, 'warning')} and {count_of(detail.error_count, 'error')}, "
        "as in the detail log",
        "; ".join(problems) or "the same",
        tuple(places) or (Where(path, log.lines or None),),
        Severity.FAIL if places else run.absent,
    )


def _usual(label: str) -> str:
    """Releases before 5.1.1 print "Min Time to Output Token"."""
    return label.replace("Time to Output Token", "Time per Output Token")


def _key(label: str, scenario: str | None) -> str | None:
    label = _usual(label)
    if label in _LABELS:
        return _LABELS[label]
    per_query = "per_query_" if scenario == "MultiStream" else ""
    if found := re.fullmatch(r"(Min|Max|Mean) latency \(ns\)", label):
        return f"result_{found.group(1).lower()}_{'query_' if per_query else ''}latency_ns"
    if (found := re.fullmatch(r"(\d+\.\d\d) percentile latency \(ns\)", label)) and found.group(1) in PERCENTILES:
        return f"result_{found.group(1)}_percentile_{per_query}latency_ns"
    if found := re.fullmatch(r"(\d+(?:\.\d)?)th (first token )?percentile latency \(ns\)", label):
        first_token, percent = "first_token_" if found.group(2) else "", f"{float(found.group(1)):.2f}"
        return f"result_{first_token}{percent}_percentile_{'' if first_token else per_query}latency_ns"
    return None


def _agrees(printed: str, detail: DetailLog, key: str, scale: float = 1.0) -> bool:
    """Whether a summary shows the value of ``key`` times ``scale``: some rates with two decimals, flags as words."""
    entry = detail.first[key]
    value = entry.value
    printed = printed.strip()
    if isinstance(value, bool):
        return printed == (("Yes" if value else "NO") if key.endswith("_met") else ("1" if value else "0"))
    if isinstance(value, str):
        return printed == value.strip()
    if printed == entry.text and scale == 1.0:
        return True
    try:
        number = float(printed)
    except ValueError:
        return False
    if not isinstance(value, int | float) or not re.fullmatch(r"-?\d+\.\d\d", printed):
        return False
    return abs(number - value * scale) <= 0.00501 + 6e-6 * abs(value * scale)


def _as_printed(detail: DetailLog, key: str) -> str:
    value = detail.first[key].value
    if isinstance(value, bool) and key.endswith("_met"):
        return "Yes" if value else "NO"
    return detail.first[key].text[:80]


def _count(log: SummaryLog, label: str) -> int:
    return sum(item.label == label for item in log.fields)


def _allowed(label: str, run: RunView) -> int:
    if label == "Completed tokens per second" and run.figures.scenario == "Server":
        return 2  # as result and among the additional statistics
    return 2 if run.figures.scenario == "MultiStream" and label.endswith("latency (ns)") else 1
