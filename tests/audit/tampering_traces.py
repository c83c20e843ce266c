"""Finer ways to spoil genuine logs: figures changed together, in both files, or a single character."""

import re
from pathlib import Path

from tampering import (
    ACCURACY,
    DETAIL,
    SHORT,
    SUMMARY,
    Spoil,
    Tampering,
    both,
    change_line,
    do,
    edit,
    in_detail,
    lines,
    put,
    records,
    renamed,
    say,
    value,
    whole,
)

SERVER, STREAM = ("Server",), ("SingleStream",)
PERCENTILES = ("50.00", "90.00", "95.00", "97.00", "99.00", "99.90")


def in_both(old: str, new: str) -> Spoil:
    """A text replaced wherever it stands in both logs."""

    def spoil(folder: Path) -> None:
        for file in (DETAIL, SUMMARY):
            edit(folder, file, lambda log: re.sub(old, new, log))

    return spoil


def moved(label: str, before: str) -> Spoil:
    """A line of the summary put before another one."""

    def change(log: list[str]) -> list[str]:
        line = next(line for line in log if line.startswith(label))
        rest = [other for other in log if other is not line]
        at = next(place for place, other in enumerate(rest) if other.startswith(before))
        return [*rest[:at], line, *rest[at:]]

    return lines(change, SUMMARY)


def all_of(key: str, label: str, ends: str, end_label: str, factor: float) -> Spoil:
    """Least, most, mean and every percentile of one time multiplied, in both logs."""
    return do(
        *(whole(key.format(f"{p}_percentile"), f"{p} percentile {label} (ns)", factor) for p in PERCENTILES),
        *(whole(ends.format(word), f"{word.title()} {end_label} (ns)", factor) for word in ("min", "max", "mean")),
    )


def crlf(file: str, start: str) -> Spoil:
    def spoil(folder: Path) -> None:
        before = (folder / file).read_bytes()
        after = re.sub(rb"(?m)^(" + start.encode() + rb".*)$", rb"\1\r", before, count=1)
        assert after != before
        (folder / file).write_bytes(after)

    return spoil


def other_mode(folder: Path) -> None:
    for key in ("requested_test_mode", "effective_test_mode"):
        put(folder, key, '"AccuracyOnly"')
    say(folder, "Mode", "AccuracyOnly")


def larger_data_set(folder: Path) -> None:
    """The size of the real data set, wherever the library says its own."""
    for key in ("qsl_reported_total_count", "qsl_reported_performance_count"):
        put(folder, key, "24576")


def day_before(folder: Path) -> None:
    for key in ("power_begin", "power_end"):
        put(folder, key, re.sub(r'^"\d\d-\d\d-\d{4}', '"01-02-2027', value(folder, key)))


def configured(old: str, new: str) -> Spoil:
    return lambda folder: edit(folder, "user.conf", lambda text: text.replace(old, new))


TRACES = [
    # the detail log
    Tampering(
        "a line of another thread",
        change_line("result_max_latency_ns", lambda line: re.sub(r'"tid": \d+', '"tid": 4242', line)),
        "log.one_process",
    ),
    Tampering(
        "another kind of event",
        change_line("result_max_latency_ns", lambda line: line.replace("POINT_IN_TIME", "INTERVAL_END")),
        "log.spelling",
    ),
    Tampering("one line in CR LF", crlf(DETAIL, '.*"result_samples_per_second"'), "log.line_ends"),
    Tampering(
        "how the run ended taken out",
        lines(lambda log: [line for line in log if "Ending naturally" not in line]),
        "log.messages",
        STREAM,
    ),
    Tampering(
        "how the run began changed",
        lambda f: renamed(f, "Starting performance mode", "Starting accuracy mode"),
        "log.messages",
    ),
    Tampering("the mode changed in both", other_mode, "log.extra_lines"),
    Tampering("the size of the data set", larger_data_set, "settings.effective"),
    Tampering("power window of another day", day_before, "result.clock"),
    # which LoadGen
    Tampering(
        "another release of the same commit",
        lambda f: edit(f, DETAIL, lambda log: re.sub(r'("loadgen_version", "value": ")[\d.]+', r"\g<1>5.1.0", log)),
        "build.commit",
    ),
    Tampering(
        "another date of the commit", in_detail("loadgen_git_commit_date", lambda t: '"2024' + t[5:]), "build.commit"
    ),
    Tampering("built at two moments", in_detail("loadgen_build_date_local", lambda t: '"2025' + t[5:]), "build.dates"),
    # the summary
    Tampering("a parameter moved", moved("target_qps", "samples_per_query"), "summary.lines"),
    Tampering("the result moved to the statistics", moved("Tokens per second", "Mean latency"), "summary.lines"),
    Tampering(
        "rulers taken out",
        lines(lambda log: [line for line in log if not line.startswith("====")], SUMMARY),
        "summary.lines",
    ),
    Tampering("one line of the summary in CR LF", crlf(SUMMARY, "Tokens per second"), "summary.lines"),
    Tampering(
        "a text of early stopping taken out",
        lambda f: edit(
            f, SUMMARY, lambda log: re.sub(r"TPOT Early Stopping Result:\n.*?\n\n", "\n", log, flags=re.DOTALL)
        ),
        "summary.early_stopping",
        SERVER,
    ),
    Tampering(
        "another recommendation",
        lambda f: edit(
            f, SUMMARY, lambda log: log.replace("Recommendations:\n", "Recommendations:\n * All is well.\n")
        ),
        "summary.reason",
        SHORT,
    ),
    Tampering(
        "SingleStream: token rate without overhead",
        lambda f: say(f, "TPS w/o loadgen overhead", "999999.99"),
        "summary.fields",
        STREAM,
    ),
    # figures changed together
    Tampering(
        "SingleStream: rates with overhead doubled in both",
        do(
            both("result_qps_with_loadgen_overhead", "QPS w/ loadgen overhead", 2, True),
            both("result_token_throughput_with_loadgen_overhead", "TPS w/ loadgen overhead", 2, True),
        ),
        "result.rate",
        STREAM,
    ),
    Tampering(
        "SingleStream: rates with overhead halved in both",
        do(
            both("result_qps_with_loadgen_overhead", "QPS w/ loadgen overhead", 0.5, True),
            both("result_token_throughput_with_loadgen_overhead", "TPS w/ loadgen overhead", 0.5, True),
        ),
        "result.rate",
        STREAM,
    ),
    Tampering(
        "Server: every TTFT cut to a tenth in both",
        all_of(
            "result_first_token_{}_latency_ns",
            "first token latency",
            "result_first_token_{}_latency_ns",
            "First Token latency",
            0.1,
        ),
        "result.first_tokens",
        SERVER,
    ),
    Tampering(
        "Server: every TPOT cut to a tenth in both",
        all_of(
            "result_time_per_output_token_{}_ns",
            "time to output token",
            "result_time_to_output_token_{}",
            "Time per Output Token",
            0.1,
        ),
        "result.first_tokens",
        SERVER,
    ),
    Tampering(
        "Server: queries over the limit",
        in_detail("result_overlatency_query_count", lambda _: "3"),
        "result.early_stopping",
        SERVER,
    ),
    Tampering(
        "Server without tokens: queries over the limit",
        in_detail("result_overlatency_query_count", lambda t: str(int(t) + 3)),
        "result.early_stopping",
        ("Server", "PerformanceOnly", "bert"),
    ),
    Tampering(
        "more queries in the words of early stopping",
        in_both("Processed 64 ", "Processed 640 "),
        "result.early_stopping",
        SHORT,
    ),
    Tampering(
        "fewer queries needed in both", in_both("at least 395 more", "at least 3 more"), "result.early_stopping", SHORT
    ),
    Tampering(
        "SingleStream: an estimate in both",
        in_both(r"(90\.0th percentile estimate: )\d+", r"\g<1>1111"),
        "result.early_stopping",
        STREAM,
    ),
    Tampering(
        "SingleStream: the estimate that is reported",
        in_detail("early_stopping_latency_ss", lambda t: str(int(t) // 2)),
        "result.early_stopping",
        STREAM,
    ),
    Tampering(
        "MultiStream: the estimate that is reported",
        in_detail("early_stopping_latency_ms", lambda t: str(int(t) // 2)),
        "result.early_stopping",
        ("MultiStream",),
    ),
    Tampering(
        "a reason for a run that met everything",
        do(
            in_detail("result_invalid_reason", lambda _: '"Increase expected QPS so the loadgen pre-generates more."'),
            lambda f: edit(
                f,
                SUMMARY,
                lambda log: log.replace(
                    "Recommendations:\n",
                    "Recommendations:\n * Increase expected QPS so the loadgen pre-generates more.\n",
                ),
            ),
        ),
        "result.validity",
        SHORT,
    ),
    # what was configured
    Tampering(
        "a longer duration configured",
        configured("min_duration = 200", "min_duration = 600000"),
        "configuration.user_conf",
    ),
    Tampering(
        "another rate configured",
        configured("Offline.target_qps = 4000", "Offline.target_qps = 9000"),
        "configuration.user_conf",
    ),
    Tampering(
        "more samples configured",
        configured("min_query_count = 700", "min_query_count = 24576"),
        "configuration.user_conf",
    ),
    # accuracy
    Tampering(
        "the token count of one answer taken out",
        records(lambda items: [re.sub(r', "token_count" : \d+', "", items[0]), *items[1:]]),
        "accuracy.fields",
        ("Offline", "AccuracyOnly"),
    ),
    Tampering(
        "the first token of one answer taken out",
        records(lambda items: [re.sub(r', "token_data" : "[0-9A-F]*"', "", items[0]), *items[1:]]),
        "accuracy.fields",
        ("Server", "AccuracyOnly"),
    ),
    Tampering(
        "an answer in small letters",
        lambda f: edit(f, ACCURACY, lambda log: re.sub(r'"data" : "0[0-9A-F]+', lambda m: m[0].replace("A", "a"), log)),
        "accuracy.log_readable",
        ("Offline", "AccuracyOnly"),
    ),
    Tampering(
        "a sequence number twice",
        records(lambda items: [re.sub(r'"seq_id" : \d+', '"seq_id" : 1', items[0]), *items[1:]]),
        "accuracy.order",
        ("Offline", "AccuracyOnly"),
    ),
]
