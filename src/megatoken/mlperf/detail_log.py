"""mlperf_log_detail.txt, read as a stream: the first entry of every key, and every line that LoadGen does not write.

Memory does not grow with the file: repeated keys are counted, defects are listed up to a limit and then counted.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megatoken.errors import StorageError
from megatoken.files import Damage, UnreadableError, encoding_problem, numbered_lines, open_regular, parse_json
from megatoken.mlperf.rounds import Seeds

DETAIL_LOG = "mlperf_log_detail.txt"
ABANDONED = "ABANDONED.txt"  # next to the logs of a run of megatoken that was interrupted
PREFIX = b":::MLLOG "
MOST_LINE_BYTES = 16 * 2**20  # a library set of two million rows
MOST_VALUE_BYTES = 2**20  # any other value
MOST_KEPT_BYTES = 32 * 2**20
MOST_LISTED = 20
MOST_KEYS = 5_000
MOST_BULKS = 1_000
MOST_DAMAGES = 2_000_000  # a file with more is not a log, and lines of one byte would take hours
MOST_RESTYLED = 1_000  # lines in another spelling that are parsed; a log with more is no longer LoadGen's
_KEY_BYTES = 30
LIBRARY_SET = "loaded_qsl_set"
SEED_KEYS = tuple(f"effective_{name}_rng_seed" for name in Seeds._fields)
COMMON_SETTINGS = (
    *("qsl_rng_seed", "sample_index_rng_seed", "schedule_rng_seed", "accuracy_log_rng_seed"),
    *("accuracy_log_probability", "accuracy_log_sampling_target", "print_timestamps", "performance_issue_unique"),
    *("performance_issue_same", "performance_issue_same_index"),
)
"""Settings that LoadGen logs in this order in every scenario: as requested, as effective, and in the summary."""

# LoadGen's own spelling of a line (logging.h); anything else was written by something else.
_LINE = re.compile(
    rb':::MLLOG \{"key": "([^"\\]{1,200})", "value": (.*), "time_ms": (\d+\.\d{6}), "namespace": "mlperf::logging", '
    rb'"event_type": "POINT_IN_TIME", "metadata": \{"is_error": (true|false), '
    rb'"is_warning": (true|false), "file": "([^"\\]{1,200})", "line_no": (\d{1,9}), "pid": (\d{1,20}), '
    rb'"tid": (\d{1,20})\}\}\r?\n?',
    re.DOTALL,
)
_TIME, _THREAD, _END = b', "time_ms": ', b', "tid": ', b"}}\n"
_KEY = re.compile(r'"key"\s*:\s*"([^"\\]{1,200})"')
_ERROR = re.compile(r'"is_error"\s*:\s*true')
_WARNING = re.compile(r'"is_warning"\s*:\s*true')
_ROWS = re.compile(rb"\[\d{1,15}(?:,\d{1,15})*\]")
_NOT_A_NUMBER = {b"nan": "nan", b"-nan": "nan", b"inf": "inf", b"-inf": "-inf"}  # how C++ prints them


@dataclass(frozen=True, slots=True)
class Entry:
    """One line. ``text`` is its value as written (cut at 1,000 characters), ``source`` the place in LoadGen's code."""

    key: str
    value: Any  # of a library set: NDArray[int64]
    text: str
    time_ms: float
    line: int
    is_error: bool
    is_warning: bool
    source: str
    source_line: int
    process_id: int
    thread_id: int


@dataclass
class DetailLog:
    """What one detail log holds. Lists are cut at ``MOST_LISTED``; the counts are whole."""

    first: dict[str, Entry] = field(default_factory=dict)
    order: list[Entry] = field(default_factory=list)  # the first entry of each key but errors and warnings
    counts: dict[str, int] = field(default_factory=dict)
    repeats: list[Entry] = field(default_factory=list)  # later entries of a key whose value differs
    messages: list[str] = field(default_factory=list)  # of generic_message
    errors: list[Entry] = field(default_factory=list)
    error_count: int = 0
    warning_count: int = 0
    process_ids: dict[int, int] = field(default_factory=dict)  # and the first line of each
    time_drops: list[Entry] = field(default_factory=list)  # entries earlier than the one before, same thread
    restyled: list[int] = field(default_factory=list)  # lines in another spelling than LoadGen's
    restyled_count: int = 0
    damages: list[Damage] = field(default_factory=list)
    damage_count: int = 0
    lines: int = 0
    size_bytes: int = 0
    kept_bytes: int = 0
    carriage_returns: int = 0  # lines that end in CR LF
    carriage_return_lines: list[int] = field(default_factory=list)
    cut_off: bool = False  # the last line has no end

    def get(self, key: str) -> Any:
        """The value of ``key``, None if it is absent."""
        entry = self.first.get(key)
        return entry.value if entry else None

    def number(self, key: str) -> float | None:
        """The value of ``key`` if it is a finite number below 1e30 in size, else None."""
        value = self.get(key)
        if isinstance(value, bool) or not isinstance(value, int | float):
            return None
        return value if abs(value) < 1e30 else None

    def text(self, key: str) -> str | None:
        """The value of ``key`` if it is text, else None."""
        value = self.get(key)
        return value if isinstance(value, str) else None

    @property
    def seeds(self) -> Seeds:
        """The seeds that the run used; None for each that the log does not say."""
        return Seeds(*map(self.get, SEED_KEYS))

    def library_set(self) -> NDArray[np.int64] | None:
        """``loaded_qsl_set`` [rows]: rows of the data set in the order in which LoadGen drew them."""
        value = self.get(LIBRARY_SET)
        return value if isinstance(value, np.ndarray) else None


def read_detail_log(path: Path) -> DetailLog:
    """Reads a detail log of any size. Raises UnreadableError if there is nothing to read."""
    log = DetailLog()
    state = _State()
    try:
        with open_regular(path) as file:
            head = file.peek(4096) if hasattr(file, "peek") else b""
            if problem := encoding_problem(head):
                raise UnreadableError(problem)
            number, line = 0, None
            for number, line in numbered_lines(file, MOST_LINE_BYTES):
                if log.damage_count > MOST_DAMAGES:
                    log.damages.insert(0, Damage(number, "too many damaged lines; the rest was not read"))
                    break
                if line is None:
                    _damage(log, number, f"a line of more than {MOST_LINE_BYTES // 2**20} MiB")
                    continue
                bulk = state.bulks.get(line[:_KEY_BYTES])
                if bulk is not None and bulk.is_like(line):
                    _count(log, bulk.key, bulk.is_error, bulk.is_warning)
                else:
                    _take(log, number, line, state)
            log.cut_off = line is not None and not line.endswith(b"\n")
            log.lines, log.size_bytes = number, file.tell()
    except OSError as error:
        raise UnreadableError(f"cannot be read: {error.strerror or error}") from None
    return log


def read_finished_log(folder: Path, last_key: str) -> DetailLog:
    """Reads the detail log of a LoadGen that has just ended.

    Args:
        folder: LoadGen's output folder.
        last_key: The key that a complete log of this mode ends with.

    Raises:
        StorageError: A log is missing, damaged or cut off.
    """
    path = folder / DETAIL_LOG
    try:
        log = read_detail_log(path)
        accuracy_end = (folder / "mlperf_log_accuracy.json").read_bytes()[-2:]
    except (UnreadableError, OSError) as error:
        raise StorageError(f"{path}: LoadGen's log cannot be read back ({error}); is the disk full?") from None
    if log.damages:
        raise StorageError(f"{path}:{log.damages[0].line}: LoadGen's log {log.damages[0].what}; is the disk full?")
    if last_key not in log.counts or log.cut_off or not accuracy_end.endswith(b"]\n"):
        raise StorageError(f"{folder}: a log of LoadGen has no end; is the disk full?")
    return log


@dataclass(frozen=True, slots=True)
class _Bulk:
    """A kind of line of which enough were listed: the bytes before its value, and between its time and its thread."""

    before: bytes
    after: bytes
    key: str
    is_error: bool
    is_warning: bool

    def is_like(self, line: bytes) -> bool:
        """Whether ``line`` differs in value, time and thread only; far cheaper than parsing it."""
        rest, found, thread = line.rpartition(_THREAD)
        if not (found and thread.endswith(_END) and thread[: -len(_END)].isdigit()):
            return False
        if not rest.startswith(self.before) or not rest.endswith(self.after):
            return False
        _, found, time = rest[len(self.before) : -len(self.after)].rpartition(_TIME)
        return bool(found) and time.replace(b".", b"", 1).isdigit()


@dataclass(slots=True)
class _State:
    last_time: dict[int, float] = field(default_factory=dict)  # of each thread
    bulks: dict[bytes, _Bulk] = field(default_factory=dict)  # by the start of the line, where the key stands


def _take(log: DetailLog, number: int, line: bytes, state: _State) -> None:
    found = _LINE.fullmatch(line)
    if found is None:
        _take_other(log, number, line)
        return
    key, value, time, error, warning, source, source_line, process, thread = found.groups()
    name = key.decode("utf-8", "backslashreplace")
    is_error, is_warning = error == b"true", warning == b"true"
    if line.endswith(b"\r\n"):
        log.carriage_returns += 1
        if len(log.carriage_return_lines) < MOST_LISTED:
            log.carriage_return_lines.append(number)
    if _counts_only(log, name, is_error, is_warning):
        if len(state.bulks) < MOST_BULKS:
            after = line[found.end(3) : found.start(9) - len(_THREAD)]
            state.bulks[line[:_KEY_BYTES]] = _Bulk(line[: found.start(2)], after, name, is_error, is_warning)
        _count(log, name, is_error, is_warning)
        _note_process(log, process, number)
        return
    if _too_many_keys(log, name, number):
        log.error_count += is_error
        log.warning_count += is_warning
        return
    try:
        parsed = _value(name, value)
    except UnreadableError as problem:
        # A key may be hidden in the value of another key, so parse the whole line.
        _take_other(log, number, line, restyled=False, problem=str(problem))
        return
    entry = Entry(
        key=name,
        value=parsed,
        text=value[:1000].decode("utf-8", "backslashreplace"),
        time_ms=float(time),
        line=number,
        is_error=is_error,
        is_warning=is_warning,
        source=source.decode("utf-8", "backslashreplace"),
        source_line=int(source_line),
        process_id=int(process),
        thread_id=int(thread),
    )
    _add(log, entry)
    if not is_error and not is_warning:
        if entry.time_ms < state.last_time.get(entry.thread_id, 0.0) and len(log.time_drops) < MOST_LISTED:
            log.time_drops.append(entry)
        if len(state.last_time) < MOST_KEYS or entry.thread_id in state.last_time:
            state.last_time[entry.thread_id] = entry.time_ms


def _take_other(
    log: DetailLog, number: int, line: bytes, restyled: bool = True, problem: str = "is not a line of LoadGen's"
) -> None:
    """A line in another spelling than LoadGen's: an entry if it is JSON with the same fields, damage otherwise."""
    text = line.decode("utf-8", "backslashreplace").strip()
    if not text:
        _damage(log, number, "an empty line")
        return
    if len(line) > MOST_VALUE_BYTES or not text.startswith(PREFIX.decode()):
        _damage(log, number, "is not a line of LoadGen's")
        return
    if restyled and log.restyled_count >= MOST_RESTYLED and _count_other(log, text):
        return
    try:
        value, twice = parse_json(text.removeprefix(PREFIX.decode()))
        entry = _entry_of(value, number)
    except UnreadableError as error:
        _damage(log, number, str(error) if restyled else problem)
        return
    for key in twice:
        _damage(log, number, f"key {key[:100]!r} occurs twice in one line")
    if restyled:
        log.restyled_count += 1
        if len(log.restyled) < MOST_LISTED:
            log.restyled.append(number)
    _add(log, entry)


def _entry_of(value: Any, number: int) -> Entry:
    try:
        metadata = value["metadata"]
        key, content = value["key"], value["value"]
        if not isinstance(key, str):
            raise UnreadableError("has a key that is not text")
        if key == LIBRARY_SET:
            content = np.asarray(content, dtype=np.int64)
            if content.ndim != 1:
                raise UnreadableError("has a library set that is not a list of rows")
        return Entry(
            key=key[:200],
            value=_countable(content),
            text=str(content)[:1000],
            time_ms=float(value["time_ms"]),
            line=number,
            is_error=metadata["is_error"] is True,
            is_warning=metadata["is_warning"] is True,
            source=str(metadata["file"])[:200],
            source_line=int(metadata["line_no"]),
            process_id=int(metadata["pid"]),
            thread_id=int(metadata["tid"]),
        )
    except (KeyError, TypeError, ValueError, OverflowError) as error:
        raise UnreadableError(
            f"lacks a field that every line has ({type(error).__name__}: {str(error)[:100]})"
        ) from None


def _value(key: str, text: bytes) -> Any:
    if text in _NOT_A_NUMBER:
        return float(_NOT_A_NUMBER[text])
    if key == LIBRARY_SET and _ROWS.fullmatch(text):
        return np.fromstring(text[1:-1].decode(), dtype=np.int64, sep=",")
    if len(text) > MOST_VALUE_BYTES:
        raise UnreadableError(f"has a value of more than {MOST_VALUE_BYTES // 2**20} MiB")
    value, twice = parse_json(text.decode("utf-8", "backslashreplace"))
    if twice:
        raise UnreadableError(f"key {twice[0][:100]!r} occurs twice in one value")
    return _countable(value)


def _countable(value: Any) -> Any:
    if isinstance(value, int) and not -(2**63) <= value < 2**64:
        raise UnreadableError("holds a number of more than 64 bits")
    return value


def _add(log: DetailLog, entry: Entry) -> None:
    if _too_many_keys(log, entry.key, entry.line):
        return
    count = log.counts.get(entry.key, 0)
    log.kept_bytes += 8 * len(entry.value) if isinstance(entry.value, np.ndarray) else len(entry.text)
    if log.kept_bytes > MOST_KEPT_BYTES:
        _damage(log, entry.line, f"more than {MOST_KEPT_BYTES // 2**20} MiB of different values")
        return
    log.counts[entry.key] = count + 1
    log.error_count += entry.is_error
    log.warning_count += entry.is_warning
    if entry.is_error and len(log.errors) < MOST_LISTED:
        log.errors.append(entry)
    if entry.key == "generic_message" and len(log.messages) < MOST_LISTED:
        log.messages.append(str(entry.value)[:1000])
    _note_process(log, entry.process_id, entry.line)
    if count == 0:
        log.first[entry.key] = entry
        if not entry.is_error and not entry.is_warning:
            log.order.append(entry)
    elif not entry.is_error and not entry.is_warning and len(log.repeats) < MOST_LISTED:
        log.repeats.append(entry)


def _too_many_keys(log: DetailLog, key: str, line: int) -> bool:
    """Whether ``key`` exceeds the number of keys that are kept, which is damage: LoadGen has a few hundred."""
    if key in log.counts or len(log.counts) < MOST_KEYS:
        return False
    _damage(log, line, f"more than {MOST_KEYS:,} different keys")
    return True


def _count_other(log: DetailLog, text: str) -> bool:
    """Counts a line in another spelling if it can only add to a count; returns whether it did."""
    found = _KEY.search(text)
    is_error, is_warning = _ERROR.search(text) is not None, _WARNING.search(text) is not None
    if found is None or not _counts_only(log, found.group(1), is_error, is_warning):
        return False
    log.restyled_count += 1
    _count(log, found.group(1), is_error, is_warning)
    return True


def _count(log: DetailLog, key: str, is_error: bool, is_warning: bool) -> None:
    log.counts[key] += 1
    log.error_count += is_error
    log.warning_count += is_warning


def _counts_only(log: DetailLog, key: str, is_error: bool, is_warning: bool) -> bool:
    """Whether enough lines like this one were listed, as in a huge log with one error per sample."""
    if key not in log.counts:
        return False
    if is_error or is_warning:
        return key == LIBRARY_SET or (log.error_count if is_error else log.warning_count) >= MOST_LISTED
    return key == LIBRARY_SET or len(log.repeats) >= MOST_LISTED


def _note_process(log: DetailLog, process_id: bytes | int, line: int) -> None:
    if len(log.process_ids) < MOST_LISTED:
        log.process_ids.setdefault(int(process_id), line)


def _damage(log: DetailLog, line: int | None, what: str) -> None:
    log.damage_count += 1
    if len(log.damages) < MOST_LISTED:
        log.damages.append(Damage(line, what))
