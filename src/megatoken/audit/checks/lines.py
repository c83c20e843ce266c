"""Whether a detail log is as LoadGen writes it: complete, with every line, in order, in LoadGen's spelling."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator, Sequence

from megatoken.audit.evidence import Where
from megatoken.audit.finding import Outcome, Severity, check, outcome, shown
from megatoken.audit.view import RunView
from megatoken.mlperf.detail_log import LIBRARY_SET, DetailLog, Entry
from megatoken.mlperf.loadgen_builds import is_known_version, log_keys, optional_keys, source_lines
from megatoken.text import count_of

_MANY = ("generic_message", LIBRARY_SET)  # keys that LoadGen logs several times
_STARTS = {"PerformanceOnly": "Starting performance mode", "AccuracyOnly": "Starting accuracy mode"}
_ENDED = "Ending naturally: Minimum query count and test duration met."
_NOT_FINITE = ("nan", "-nan", "inf", "-inf")
# Numbers that C++ prints from a double, with at most six significant digits, and whole numbers.
_DOUBLES = re.compile(
    r"(?:requested|effective)_(?:\w*_qps|\w*_percentile|accuracy_log_probability)|result_\w*(?:per_sec|per_second)|"
    r"result_token_throughput\w*|result_qps_\w+"
)
_WHOLE = re.compile(
    r"result_\w*(?:_ns|_count)|result_[\d.]+_percentile\w*|generated_\w+|\w+_rng_seed|\w+_count|\w+_ms|num_errors"
)
# Prefixes of the keys that LoadGen writes at once, and stamps with one time.
_WRITTEN_TOGETHER = (
    *(("loadgen_",), ("requested_",), ("effective_",), ("generated_",), ("logger_",), ("power_",)),
    *(("sut_", "qsl_", "get_sut_", "test_datetime"), ("result_", "early_stopping_", "num_errors")),
)


def _is_torn(log: DetailLog) -> bool:
    """Whether the log is damaged only where it was cut off, in its last line."""
    return log.cut_off and [damage.line for damage in log.damages] == [log.lines]


@check("log.readable", "LoadGen's files can be read", "Lines that LoadGen cannot have written were added or damaged.")
def readable(run: RunView) -> Outcome:
    log, found = run.detail, ""
    if log.damage_count:
        first, verb = log.damages[0], "is" if log.damage_count == 1 else "are"
        found = shown(f"{count_of(log.damage_count, 'line')} that {verb} not: line {first.line} {first.what}")
    otherwise = run.absent if _is_torn(log) else Severity.FAIL
    if not log.first:
        otherwise = otherwise if log.size_bytes else run.absent
        return outcome(False, "LoadGen's entries", found or "no entry at all", run.at(), otherwise)
    found = found or count_of(log.lines, "line")
    where = run.lines(damage.line for damage in log.damages)
    return outcome(not log.damage_count, "nothing but LoadGen's entries", found, where, otherwise)


@check("log.whole", "The log is complete", "A log that was cut off is no evidence of a completed run.")
def complete(run: RunView) -> Outcome | None:
    log, keys, optional = run.detail, log_keys(run.detail), optional_keys(run.detail)
    where, last = run.lines([log.lines]), log.order[-1].key if log.order else ""
    if not keys:
        if None not in (log.get("effective_scenario"), log.get("effective_test_mode")):
            return None
        found = f"no scenario or no mode; the last line is {shown(last)}"
        return outcome(False, "a log that runs to its last line, num_errors", found, where, run.absent)
    holds = not log.cut_off and (_end(keys, optional) in log.first or last == keys[-1])
    found = f"the last line{' has no end and' if log.cut_off else ''} is {shown(last)}"
    return outcome(holds, f"a log that runs to its last line, {keys[-1]}", found, where, run.absent)


def _end(keys: Sequence[str], optional: set[str]) -> str:
    return keys[-1] if keys[-1] not in optional else keys[-2]


@check("log.lines", "Every kind of line is there", "LoadGen always writes them; missing ones were removed.")
def lines(run: RunView) -> Outcome:
    log, keys, optional = run.detail, log_keys(run.detail), optional_keys(run.detail)
    if not keys:
        found = f"scenario {shown(log.get('effective_scenario'))}, mode {shown(log.get('effective_test_mode'))}"
        return outcome(None, "a performance or an accuracy run", found, run.at("effective_test_mode"))
    missing = [key for key in keys if key not in log.first and key not in optional]
    if _end(keys, optional) not in log.first:  # what follows a cut is missing too; log.whole reports that
        last = max((place for place, key in enumerate(keys) if key in log.first), default=0)
        missing = [key for key in missing if keys.index(key) < last]
    version = log.text("loadgen_version")
    found = f"{count_of(len(missing), 'kind')} missing: {', '.join(missing)}" if missing else f"all {len(keys)} kinds"
    expected = f"every kind of line that LoadGen {shown(version or '?')} writes"
    return outcome(not missing if is_known_version(version) or not missing else None, expected, found, run.at())


@check("log.extra_lines", "No foreign line", "A line that this LoadGen never writes was added after the run.")
def extra_lines(run: RunView) -> Outcome | None:
    log, keys = run.detail, log_keys(run.detail)
    if not keys:
        return None
    known = {*keys, *optional_keys(log)}
    extra = [entry.key for entry in log.order if entry.key not in known]
    extra = [key for key in extra if not key.startswith("result_inferred_")]
    holds, found = not extra, shown(", ".join(extra[:20])) or "none"
    expected = "no kind of line that this LoadGen never writes"
    return outcome(
        holds if is_known_version(log.text("loadgen_version")) else holds or None, expected, found, run.at(*extra[:20])
    )


@check("log.order", "Lines are in LoadGen's order", "LoadGen writes them in one order; moved lines were edited.")
def order(run: RunView) -> Outcome | None:
    keys = [key for key in log_keys(run.detail) if key in run.detail.first]
    if not keys:
        return None
    present = [entry.key for entry in run.detail.order if entry.key in set(keys)]
    swapped = next(((a, b) for a, b in zip(present, keys, strict=False) if a != b), ())
    found = f"{swapped[0]} stands where {swapped[1]} belongs" if swapped else "that order"
    return outcome(not swapped, "lines in the order in which LoadGen writes them", found, run.at(*swapped))


@check("log.repeats", "No line is repeated", "Some tools take the first of two lines and some the last.")
def repeats(run: RunView) -> Outcome:
    log = run.detail
    parts = ("generated_", "logger_", "power_") if log.counts.get(LIBRARY_SET, 0) > 1 else ()
    again = [entry for entry in log.repeats if entry.key not in _MANY and not entry.key.startswith(parts)]
    found = f"{shown(again[0].key)} occurs {count_of(log.counts[again[0].key], 'time')}" if again else "one"
    return outcome(not again, "one line of each kind", found, run.lines(again))


@check("log.spelling", "LoadGen's spelling", "Another spelling shows that another program wrote the line.")
def spelling(run: RunView) -> Outcome:
    count = run.detail.restyled_count
    found = f"{count_of(count, 'line')} in another spelling" if count else "every line"
    return outcome(not count, "the spelling of LoadGen's own writer", found, run.lines(run.detail.restyled))


@check("log.line_ends", "Line ends", "Converting all is harmless; single other ones belong to added lines.")
def line_ends(run: RunView) -> Outcome | None:
    log = run.detail
    if not log.carriage_returns:
        return None
    converted = log.carriage_returns >= log.lines - log.cut_off
    found = f"{log.carriage_returns:,} of {count_of(log.lines, 'line')} end in CR LF: "
    found += "the file went through a text conversion" if converted else "another program wrote those or the others"
    where = tuple(Where(run.detail_path, line) for line in log.carriage_return_lines)
    return outcome(False, "LF", found, where, Severity.NOTE if converted else Severity.FAIL)


@check("log.messages", "LoadGen's messages fit the run", "LoadGen logs how a test starts and ends.")
def messages(run: RunView) -> Outcome | None:
    """The start and, where one thread issues the queries, the natural end; else an error says why."""
    log, scenario, mode = run.detail, run.detail.text("effective_scenario"), run.detail.text("effective_test_mode")
    ended = "result_validity" in log.first or "power_end" in log.first
    if mode not in _STARTS or not ended or not is_known_version(log.text("loadgen_version")):
        return None
    expected = [_STARTS[mode]]
    if mode == "PerformanceOnly" and scenario in ("Offline", "SingleStream") and not log.error_count:
        expected.append(_ENDED)
    starts = log.messages[:1] == expected
    holds = log.messages == expected or (starts and (log.error_count > 0 or scenario == "MultiStream"))
    found = shown("; ".join(log.messages)) or "none"
    return outcome(holds, shown("; ".join(expected)), found, run.at("generic_message"))


@check("log.numbers", "Numbers are printed as C++ prints them", "Others were typed or computed later.")
def numbers(run: RunView) -> Outcome:
    strange = [entry for entry in run.detail.order if entry.text not in _NOT_FINITE and not _printed_by_cpp(entry)]
    found = shown(f"{strange[0].key}: {strange[0].text}") if strange else "such numbers"
    expected = "rates with at most six digits, as C++ prints them, and whole nanoseconds and counts"
    return outcome(not strange, expected, found, run.lines(strange))


def _printed_by_cpp(entry: Entry) -> bool:
    if _DOUBLES.fullmatch(entry.key):
        try:
            return f"{float(entry.text):g}" == entry.text
        except ValueError:
            return False
    return not _WHOLE.fullmatch(entry.key) or re.fullmatch(r"-?\d+", entry.text) is not None


@check("log.times", "Time stamps fit together", "LoadGen writes some lines at once, with one time.")
def times(run: RunView) -> Outcome:
    drops = run.detail.time_drops
    torn = [entry for group in _written_together(run.detail) for pair in group for entry in pair]
    found = "such times"
    if drops:
        found = f"{shown(drops[0].key)} at {drops[0].time_ms:f} ms comes after a later line"
    elif torn:
        found = ", ".join(f"{entry.key} at {entry.time_ms:f} ms" for entry in torn[:2])
    expected = "times that never decrease, and one time for lines that LoadGen writes at once"
    return outcome(not drops and not torn, expected, found, run.lines(drops or torn))


def _written_together(log: DetailLog) -> Iterator[list[tuple[Entry, Entry]]]:
    """Neighbours that LoadGen writes at once, but that differ in their time."""
    for prefixes in _WRITTEN_TOGETHER if log.counts.get(LIBRARY_SET, 0) <= 1 else ():
        group = [entry for entry in log.order if entry.key.startswith(prefixes)]
        yield [(a, b) for a, b in itertools.pairwise(group) if a.time_ms != b.time_ms]


@check("log.one_process", "One process and one thread", "Lines of another process belong to another run.")
def one_process(run: RunView) -> Outcome:
    """The thread that began the test writes all lines but errors, warnings and messages."""
    processes = run.detail.process_ids
    threads = {entry.thread_id: entry.line for entry in reversed(run.detail.order) if entry.key != "generic_message"}
    lines = sorted({*list(processes.values())[:20], *list(threads.values())[:20]})
    found = f"process {', '.join(map(str, processes))}; thread {', '.join(map(str, list(threads)[:20]))}"
    holds = len(processes) == 1 and len(threads) <= 1
    return outcome(holds, "one process, and one of its threads", found, run.lines(lines))


@check("log.source_lines", "Each line names its place in LoadGen's code", "Another place is another LoadGen.")
def source_positions(run: RunView) -> Outcome | None:
    sources = run.detail.get("loadgen_file_sha1")
    if not isinstance(sources, dict):
        return None
    names = {entry.source for entry in run.detail.order}
    known = {name: source_lines(name, sha1) for name in names if isinstance(sha1 := sources.get(f"/{name}"), str)}
    places = {
        entry.key: lines
        for entry in run.detail.order
        if entry.key != "generic_message" and (lines := (known.get(entry.source) or {}).get(entry.key))
    }
    checked = [entry for entry in run.detail.order if entry.key in places]
    # Where a call spans several source lines, compilers differ in which one they report.
    wrong = [entry for entry in checked if not any(0 <= entry.source_line - line <= 3 for line in places[entry.key])]
    found = f"{count_of(len(checked), 'line')} agree"
    if wrong:
        found = shown(f"{wrong[0].key} from {wrong[0].source}:{wrong[0].source_line}")
    expected = "the places in LoadGen's code that write these lines in the release that the log names"
    return outcome(not wrong if checked else None, expected, found, run.lines(wrong))
