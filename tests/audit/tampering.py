"""Ways to spoil genuine logs, and what names each. Every function changes the files of one folder."""

import json
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

DETAIL, SUMMARY, ACCURACY = "mlperf_log_detail.txt", "mlperf_log_summary.txt", "mlperf_log_accuracy.json"

Spoil = Callable[[Path], None]


@dataclass(frozen=True)
class Tampering:
    name: str
    spoil: Spoil
    found_by: str
    kind: tuple[str, ...] = ("Offline",)


def edit(folder: Path, file: str, change: Callable[[str], str]) -> None:
    path = folder / file
    before = path.read_text()
    after = change(before)
    assert after != before, "this tampering changed nothing"
    path.write_text(after)


def value(folder: Path, key: str) -> str:
    found = re.search(rf'"key": "{re.escape(key)}", "value": (.*?), "time_ms"', (folder / DETAIL).read_text())
    assert found, key
    return found.group(1)


def number(folder: Path, key: str) -> float:
    return float(value(folder, key))


def put(folder: Path, key: str, text: str) -> None:
    """Another value in the detail log."""
    pattern = rf'("key": "{re.escape(key)}", "value": ).*?(, "time_ms")'
    edit(folder, DETAIL, lambda log: re.sub(pattern, lambda found: found[1] + text + found[2], log))


def say(folder: Path, label: str, text: str) -> None:
    """Another value in the summary."""
    pattern = rf"(?m)^({re.escape(label)}\s*: ).*$"
    edit(folder, SUMMARY, lambda log: re.sub(pattern, lambda found: found[1] + text, log))


def drop(folder: Path, *keys: str) -> None:
    wanted = [f'"key": "{key}"' for key in keys]
    edit(
        folder, DETAIL, lambda log: "".join(line for line in log.splitlines(True) if not any(w in line for w in wanted))
    )


def both(key: str, label: str, factor: float, decimals: bool = False) -> Spoil:
    """A rate multiplied in both logs, printed as LoadGen prints it."""

    def spoil(folder: Path) -> None:
        changed = number(folder, key) * factor
        put(folder, key, f"{changed:g}")
        say(folder, label, f"{changed:.2f}" if decimals else f"{changed:g}")

    return spoil


def whole(key: str, label: str, factor: float) -> Spoil:
    """Nanoseconds multiplied in both logs."""

    def spoil(folder: Path) -> None:
        changed = int(number(folder, key) * factor)
        put(folder, key, str(changed))
        say(folder, label, str(changed))

    return spoil


def do(*steps: Callable[[Path], None]) -> Spoil:
    def spoil(folder: Path) -> None:
        for step in steps:
            step(folder)

    return spoil


def in_detail(key: str, change: Callable[[str], str]) -> Spoil:
    return lambda folder: put(folder, key, change(value(folder, key)))


def lines(change: Callable[[list[str]], Iterable[str]], file: str = DETAIL) -> Spoil:
    return lambda folder: edit(folder, file, lambda log: "".join(change(log.splitlines(True))))


def line_of(log: list[str], key: str) -> int:
    return next(place for place, line in enumerate(log) if f'"key": "{key}"' in line)


def change_line(key: str, change: Callable[[str], str]) -> Spoil:
    def changed(log: list[str]) -> list[str]:
        place = line_of(log, key)
        return [*log[:place], change(log[place]), *log[place + 1 :]]

    return lines(changed)


def shorter(folder: Path) -> None:
    """A run 10 % shorter in every figure that states its length but the log's time stamps and its power window."""
    for name, label in (("max", "Max latency (ns)"), ("99.90_percentile", "99.90 percentile latency (ns)")):
        whole(f"result_{name}_latency_ns", label, 0.9)(folder)
    for name in ("50.00", "90.00", "95.00", "97.00", "99.00"):
        whole(f"result_{name}_percentile_latency_ns", f"{name} percentile latency (ns)", 0.9)(folder)
    whole("result_mean_latency_ns", "Mean latency (ns)", 0.9)(folder)
    rate = number(folder, "generated_samples_per_query") / (number(folder, "result_max_latency_ns") / 1e9)
    put(folder, "result_samples_per_second", f"{rate:g}")
    say(folder, "Samples per second", f"{rate:g}")
    both("result_tokens_per_second", "Tokens per second", 1 / 0.9)(folder)


def longer_clock(folder: Path) -> None:
    """A run ten times as long in every figure but its time stamps."""
    for name in ("50.00", "90.00", "95.00", "97.00", "99.00", "99.90"):
        whole(f"result_{name}_percentile_latency_ns", f"{name} percentile latency (ns)", 10)(folder)
    for name in ("max", "mean"):
        whole(f"result_{name}_latency_ns", f"{name.title()} latency (ns)", 10)(folder)
    both("result_samples_per_second", "Samples per second", 0.1)(folder)
    both("result_tokens_per_second", "Tokens per second", 0.1)(folder)


def swap_rows(text: str) -> str:
    rows = json.loads(text)
    rows[3], rows[40] = rows[40], rows[3]
    return json.dumps(rows, separators=(",", ":"))


def other_seeds(folder: Path) -> None:
    """The seeds of another round, everywhere they are printed."""
    seeds = {"qsl": 6023615788873153749, "sample_index": 15036839855038426416, "schedule": 9933818062894767841}
    for name, seed in seeds.items():
        for prefix in ("requested", "effective"):
            put(folder, f"{prefix}_{name}_rng_seed", str(seed))
        say(folder, f"{name}_rng_seed", str(seed))


def target(text: str) -> Spoil:
    """Another target rate, everywhere it is printed."""
    return do(
        lambda folder: put(folder, "requested_offline_expected_qps", text),
        lambda folder: put(folder, "effective_target_qps", text),
        lambda folder: say(folder, "target_qps", text),
    )


def add_error(folder: Path) -> None:
    """An error line of the same thread and time as the message before it, counted nowhere."""
    log = (folder / DETAIL).read_text().splitlines(True)
    place = line_of(log, "loaded_qsl_set")
    line = (
        log[place - 1].replace('"generic_message"', '"error_runtime"').replace('"is_error": false', '"is_error": true')
    )
    (folder / DETAIL).write_text("".join([*log[:place], line, *log[place:]]))


def counted_error(folder: Path) -> None:
    """An error as LoadGen would log and count it."""
    add_error(folder)
    put(folder, "num_errors", "1")
    edit(
        folder,
        SUMMARY,
        lambda log: log.replace("No errors encountered during test.", "1 ERROR encountered. See detailed log."),
    )


def hide_error(folder: Path) -> None:
    """The error line and its count taken out of the detail log; the summary still counts it."""
    counted_error(folder)
    drop(folder, "error_runtime")
    put(folder, "num_errors", "0")


def valid_by_word(folder: Path) -> None:
    """A run that LoadGen found INVALID, declared VALID."""
    put(folder, "result_validity", '"VALID"')
    say(folder, "Result is", "VALID")


def stopped_by_word(folder: Path) -> None:
    """Too few queries for early stopping, declared enough."""
    put(folder, "early_stopping_met", "true")
    say(folder, "  Early stopping satisfied", "Yes")


def asked_longer(folder: Path) -> None:
    """A minimum duration of ten minutes, everywhere it is printed, for a run of a fifth of a second."""
    for key in ("requested_min_duration_ms", "effective_min_duration_ms"):
        put(folder, key, "600000")
    say(folder, "min_duration (ms)", "600000")


def spelled_again(log: list[str]) -> list[str]:
    prefix = ":::MLLOG "
    return [prefix + json.dumps(json.loads(line.removeprefix(prefix)), separators=(",", ":")) + "\n" for line in log]


def records(change: Callable[[list[str]], list[str]]) -> Spoil:
    """Changes the records of an accuracy log, and writes it as LoadGen would."""

    def changed(log: list[str]) -> list[str]:
        items = change([line.rstrip().rstrip(",") for line in log[1:-1]])
        return ["[\n", ",\n".join(items), "\n]\n"]

    return lines(changed, ACCURACY)


def swap_indexes(items: list[str]) -> list[str]:
    first, second = (re.search(r'"qsl_idx" : (\d+)', items[place])[1] for place in (0, 1))
    one = items[0].replace(f'"qsl_idx" : {first}', f'"qsl_idx" : {second}')
    return [one, items[1].replace(f'"qsl_idx" : {second}', f'"qsl_idx" : {first}'), *items[2:]]


def shift_time(text: str, seconds: int) -> str:
    stamp = text.strip('"')
    hours, minutes, rest = stamp.split(" ")[1].split(":")
    moved = (int(hours) * 3600 + int(minutes) * 60 + float(rest) + seconds) % 86_400
    return f'"{stamp.split(" ")[0]} {int(moved // 3600):02}:{int(moved % 3600 // 60):02}:{moved % 60:06.3f}"'


def renamed(folder: Path, old: str, new: str) -> None:
    edit(folder, DETAIL, lambda log: log.replace(old, new))


SHORT = ("Server", "PerformanceOnly", "llama2-70b", "*.Server.min_query_count = 64\n*.Server.min_duration = 1\n")

TAMPERINGS = [
    # figures
    Tampering(
        "token rate raised in the detail log",
        in_detail("result_tokens_per_second", lambda t: f"{float(t) * 1.1:g}"),
        "summary.fields",
    ),
    Tampering("token rate raised in the summary", lambda f: say(f, "Tokens per second", "999999"), "summary.fields"),
    Tampering(
        "sample rate raised in both", both("result_samples_per_second", "Samples per second", 1.05), "result.rate"
    ),
    Tampering("target rate changed in the summary", lambda f: say(f, "target_qps", "400"), "summary.fields"),
    Tampering(
        "a latency changed in the summary", lambda f: say(f, "90.00 percentile latency (ns)", "5"), "summary.fields"
    ),
    Tampering("run shortened in every figure", shorter, "result.clock"),
    Tampering("run lengthened in every figure", longer_clock, "result.clock"),
    Tampering("power window shortened", in_detail("power_end", lambda t: shift_time(t, -3)), "result.clock"),
    Tampering("date of the test moved", in_detail("test_datetime", lambda t: f'"2020{t[5:]}'), "result.clock"),
    Tampering(
        "median above p90",
        whole("result_50.00_percentile_latency_ns", "50.00 percentile latency (ns)", 10),
        "result.latencies",
    ),
    Tampering(
        "mean below what percentiles allow",
        whole("result_mean_latency_ns", "Mean latency (ns)", 0.1),
        "result.latencies",
    ),
    # settings
    Tampering(
        "target rate changed where it was used",
        in_detail("effective_target_qps", lambda _: "5000"),
        "settings.effective",
    ),
    Tampering("target rate changed everywhere", target("5000"), "settings.samples"),
    Tampering("target rate changed a little everywhere", target("4400"), "settings.generated"),
    Tampering(
        "minimum duration changed where it was used",
        in_detail("effective_min_duration_ms", lambda _: "600000"),
        "settings.effective",
    ),
    Tampering("minimum duration changed everywhere", asked_longer, "result.validity"),
    Tampering("seeds of another round", other_seeds, "settings.library_order"),
    Tampering(
        "one seed changed where it was used",
        in_detail("effective_qsl_rng_seed", lambda _: "1780908523862526354"),
        "settings.effective",
    ),
    Tampering("two rows of the library swapped", in_detail("loaded_qsl_set", swap_rows), "settings.library_order"),
    Tampering(
        "a row of the library left out",
        in_detail("loaded_qsl_set", lambda t: "[" + t.split(",", 1)[1]),
        "settings.library_order",
    ),
    Tampering(
        "fewer samples generated",
        in_detail("generated_samples_per_query", lambda t: str(int(t) - 64)),
        "settings.generated",
    ),
    Tampering("query duration changed", in_detail("generated_query_duration", lambda _: "999"), "settings.generated"),
    # verdict and errors
    Tampering("INVALID turned into VALID", valid_by_word, "result.validity", SHORT),
    Tampering("INVALID and early stopping turned", do(valid_by_word, stopped_by_word), "result.early_stopping", SHORT),
    Tampering("an error not counted", add_error, "result.error_count"),
    Tampering("an error counted", counted_error, "rules.no_errors"),
    Tampering("an error hidden", hide_error, "summary.counts"),
    # lines
    Tampering(
        "dates taken out",
        lambda f: drop(f, "test_datetime", "loadgen_build_date_local", "loadgen_build_date_utc"),
        "log.lines",
    ),
    Tampering("power window taken out", lambda f: drop(f, "power_begin", "power_end"), "log.lines"),
    Tampering(
        "every line with 'date' taken out", lines(lambda log: [line for line in log if "date" not in line]), "log.lines"
    ),
    Tampering(
        "a foreign line",
        lines(lambda log: [*log[:-1], log[-1].replace("num_errors", "result_bonus"), log[-1]]),
        "log.extra_lines",
    ),
    Tampering(
        "a second result",
        lines(lambda log: [*log[:-1], re.sub(r'"value": [\d.e+]+', '"value": 99999', log[-2]), log[-1]]),
        "log.repeats",
    ),
    Tampering("a line moved", lines(lambda log: [log[1], log[0], *log[2:]]), "log.order"),
    Tampering("written again by another program", lines(spelled_again), "log.spelling"),
    Tampering(
        "a rate with nine digits", in_detail("result_samples_per_second", lambda t: f"{float(t):.6f}9"), "log.numbers"
    ),
    Tampering(
        "a time stamp changed",
        change_line("result_query_count", lambda line: re.sub(r'"time_ms": \d', '"time_ms": 9', line)),
        "log.times",
    ),
    Tampering(
        "a line of another process",
        change_line("result_max_latency_ns", lambda line: re.sub(r'"pid": \d+', '"pid": 4242', line)),
        "log.one_process",
    ),
    Tampering(
        "a line from another place in the code",
        change_line("result_max_latency_ns", lambda line: re.sub(r'"line_no": \d+', '"line_no": 1234', line)),
        "log.source_lines",
    ),
    Tampering("cut off", lines(lambda log: [*log[:-6], log[-6][:50]]), "log.whole"),
    Tampering("junk between the lines", lines(lambda log: [*log[:20], "tokens/s: a lot\n", *log[20:]]), "log.readable"),
    Tampering(
        "a key twice in one line",
        change_line("result_max_latency_ns", lambda line: line.replace('"value": ', '"value": 1, "value": ')),
        "log.readable",
    ),
    # which LoadGen
    Tampering(
        "a source file changed",
        lambda f: edit(f, DETAIL, lambda log: re.sub(r'("/results.cc":")\w{6}', r"\1c0ffee", log)),
        "build.sources",
    ),
    Tampering(
        "a source file left out",
        lambda f: edit(f, DETAIL, lambda log: re.sub(r'"/results.cc":"\w+",', "", log)),
        "build.sources",
    ),
    Tampering("another commit", in_detail("loadgen_git_log_message", lambda t: '"0123456789' + t[11:]), "build.commit"),
    Tampering(
        "uncommitted changes", in_detail("loadgen_git_status_message", lambda _: '" M results.cc"'), "build.clean"
    ),
    Tampering("built after the run", in_detail("loadgen_build_date_utc", lambda t: '"2999' + t[5:]), "build.dates"),
    # the summary
    Tampering(
        "a line added to the summary",
        lines(lambda log: [*log[:8], "Tokens per watt: 99\n", *log[8:]], SUMMARY),
        "summary.lines",
    ),
    Tampering(
        "a line taken out of the summary",
        lines(lambda log: [line for line in log if "Samples per second" not in line], SUMMARY),
        "summary.lines",
    ),
    Tampering(
        "a line of the summary said twice", lines(lambda log: [*log[:7], log[6], *log[7:]], SUMMARY), "summary.lines"
    ),
    Tampering("the end of the summary taken out", lines(lambda log: log[:-3], SUMMARY), "summary.counts"),
    # Server
    Tampering(
        "Server: token rate raised in both",
        both("result_completed_tokens_per_second", "Completed tokens per second", 1.1, True),
        "result.tokens",
        ("Server",),
    ),
    Tampering(
        "Server: scheduled rate raised in both",
        both("result_scheduled_samples_per_sec", "Scheduled samples per second", 1.1, True),
        "result.rate",
        ("Server",),
    ),
    Tampering(
        "Server: completed rate raised in both",
        both("result_completed_samples_per_sec", "Completed samples per second", 1.5, True),
        "result.rate",
        ("Server",),
    ),
    Tampering(
        "Server: p99 TTFT lowered in both",
        whole("result_first_token_99.00_percentile_latency_ns", "99.00 percentile first token latency (ns)", 0.01),
        "result.latencies",
        ("Server",),
    ),
    Tampering(
        "Server: mean TPOT lowered in both",
        whole("result_time_to_output_token_mean", "Mean Time per Output Token (ns)", 0.1),
        "result.latencies",
        ("Server",),
    ),
    Tampering("Server: arrivals of another seed", other_seeds, "settings.generated", ("Server",)),
    Tampering(
        "Server: more queries", in_detail("result_query_count", lambda t: str(int(t) * 2)), "result.tokens", ("Server",)
    ),
    Tampering(
        "Server: early stopping denied",
        in_detail("early_stopping_met", lambda _: "false"),
        "result.early_stopping",
        ("Server",),
    ),
    Tampering(
        "Server: early stopping text changed",
        in_detail("early_stopping_ttft_result", lambda _: '" * Run unsuccessful."'),
        "summary.early_stopping",
        ("Server",),
    ),
    Tampering(
        "Server: constraint denied",
        in_detail("result_perf_constraints_met", lambda _: "false"),
        "result.validity",
        ("Server",),
    ),
    # SingleStream
    Tampering(
        "SingleStream: rate raised in both",
        both("result_qps_without_loadgen_overhead", "QPS w/o loadgen overhead", 1.2, True),
        "result.rate",
        ("SingleStream",),
    ),
    Tampering(
        "SingleStream: token rate raised",
        in_detail("result_token_throughput", lambda t: f"{float(t) * 1.1:g}"),
        "result.tokens",
        ("SingleStream",),
    ),
    Tampering(
        "SingleStream: discarded queries changed",
        in_detail("early_stopping_ttft_result", lambda t: re.sub(r"discard \d+", "discard 3", t)),
        "result.early_stopping",
        ("SingleStream",),
    ),
    # accuracy
    Tampering("an answer left out", records(lambda items: items[:-1]), "accuracy.records", ("Offline", "AccuracyOnly")),
    Tampering(
        "an answer given twice",
        records(lambda items: [*items, items[0]]),
        "accuracy.records",
        ("Offline", "AccuracyOnly"),
    ),
    Tampering("answers of two rows swapped", records(swap_indexes), "accuracy.order", ("Server", "AccuracyOnly")),
    Tampering(
        "a token count raised",
        records(lambda items: [re.sub(r'"token_count" : \d+', '"token_count" : 99', items[0]), *items[1:]]),
        "accuracy.token_counts",
        ("Offline", "AccuracyOnly"),
    ),
    Tampering(
        "an answer lengthened",
        records(lambda items: [items[0].replace('"data" : "', '"data" : "00000000'), *items[1:]]),
        "accuracy.token_counts",
        ("Offline", "AccuracyOnly"),
    ),
    Tampering(
        "first token of another answer",
        records(lambda items: [items[0].replace('"token_data" : "00', '"token_data" : "FF'), *items[1:]]),
        "accuracy.first_token",
        ("Server", "AccuracyOnly"),
    ),
    Tampering(
        "accuracy log without its end",
        lines(lambda log: log[:-1], ACCURACY),
        "accuracy.log_readable",
        ("Offline", "AccuracyOnly"),
    ),
    Tampering(
        "answers beside a performance run",
        records(lambda _: ['{ "seq_id" : 0, "qsl_idx" : 0, "data" : "00", "token_count" : 1 }']),
        "accuracy.performance_log",
    ),
]
