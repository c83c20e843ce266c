"""Whether the log of answers fits the run that it claims to be of."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial

import numpy as np

from megatoken.audit.evidence import Role, Where
from megatoken.audit.finding import Observation, Outcome, Severity, check, outcome, shown
from megatoken.audit.view import RunView
from megatoken.mlperf.accuracy_log import TRUNCATED_BYTES, AccuracyLog
from megatoken.mlperf.benchmarks import Benchmark, is_other_benchmark
from megatoken.mlperf.compliance import TEST06_RECORDS
from megatoken.mlperf.detail_log import LIBRARY_SET
from megatoken.mlperf.draws import MOST_ROWS, Load, issued_rows, library_order
from megatoken.mlperf.loadgen_builds import is_older
from megatoken.mlperf.rounds import Seeds, round_seeds
from megatoken.mlperf.run_figures import samples_answers, whole
from megatoken.text import count_of

ID_BYTES = (4, 8)  # a token id in ``data``: int32, or int64 in a few submissions
MOST_DEVIATIONS = 5  # standard deviations of a random number of records from its mean
MOST_SAMPLES = 200_000  # of a TEST06 run whose rows are computed
UNSET = Seeds(0, 0, 0)  # of a LoadGen without mlperf.conf


def check_accuracy(run: RunView) -> Iterator[Observation]:
    """The accuracy log next to a detail log."""
    if run.accuracy is None or run.files.accuracy is None:
        return
    for one in (readable, performance_log, truncated, records, order):
        yield from one(run, run.accuracy, (Where(run.files.accuracy),))
    answers_tokens = not is_other_benchmark(run.files.benchmark or "")  # Whisper's answers are characters
    for tokens in (fields, token_counts, first_token) if answers_tokens else (fields,):
        yield from tokens(run.accuracy, (Where(run.files.accuracy),))


def check_test06(
    log: AccuracyLog, path: str, scenario: str | None, benchmark: Benchmark | None, round_: str | None
) -> Iterator[Observation]:
    """The answers that TEST06 logged, which a submission holds without a detail log; its folder says what they are of.

    ``round_`` is the one whose seeds are claimed, None for any.
    """
    where = (Where(path),)
    for tokens in (fields, token_counts, first_token, test06_records):
        yield from tokens(log, where)
    if benchmark is not None and scenario is not None and len(log.rows):
        yield from test06_order(log, where, scenario, benchmark, round_)


@check("accuracy.log_readable", "The accuracy log can be read", "Foreign lines in it were added or damaged.")
def readable(run: RunView, log: AccuracyLog, where: tuple[Where, ...]) -> Outcome:
    bad = max(0, log.damage_count - 2) if log.truncated else log.damage_count  # a cut goes through two records
    ended = log.complete or log.truncated
    found = count_of(log.records, "record") if ended else "no end"
    if bad:
        verb = "is" if bad == 1 else "are"
        found = shown(f"{count_of(bad, 'line')} that {verb} no record: {log.damages[0].what}")
    lines = [damage.line for damage in log.damages]
    places = tuple(Where(where[0].file, line) for line in lines) or where
    otherwise = run.absent if not bad or lines == [log.lines] else Severity.FAIL
    return outcome(not bad and ended, "a JSON list of LoadGen's records", found, places, otherwise)


@check("accuracy.performance_log", "Accuracy log of a performance run", "LoadGen leaves it empty.")
def performance_log(run: RunView, log: AccuracyLog, where: tuple[Where, ...]) -> Outcome | None:
    if not run.is_performance or run.files.role is Role.COMPLIANCE:
        return None
    found = count_of(log.records, "record") if log.records else "an empty list, as LoadGen writes in this mode"
    expected = "an empty list next to a performance run: it proves nothing about accuracy either way"
    return outcome(not log.records or samples_answers(run.detail), expected, found, where)


@check("accuracy.truncated", "The accuracy log is truncated", "A submission holds its ends only, with the hash of all.")
def truncated(run: RunView, log: AccuracyLog, where: tuple[Where, ...]) -> Outcome | None:
    if not run.is_accuracy or not log.truncated:
        return None
    holds = log.size_bytes <= TRUNCATED_BYTES
    return outcome(holds, f"at most {TRUNCATED_BYTES:,} bytes", f"{log.size_bytes:,} bytes", where)


@check("accuracy.records", "One answer for each row", "Missing or repeated answers change the score.")
def records(run: RunView, log: AccuracyLog, where: tuple[Where, ...]) -> Outcome | None:
    total = whole(run.detail, "qsl_reported_total_count")
    asked = whole(run.detail, "effective_accuracy_sample_count") or total
    if not run.is_accuracy or log.truncated or asked is None:
        return None
    distinct = len(np.unique(log.rows))
    in_range = not len(log.rows) or int(log.rows.max()) < max(asked, total or 0)
    found = f"{count_of(log.records, 'record')} of {count_of(distinct, 'row')}"
    found += "" if in_range else ", some beyond the data set"
    holds, otherwise = log.records == asked == distinct and in_range, Severity.FAIL
    if distinct == log.records < asked and in_range:
        otherwise = run.absent
    return outcome(holds, f"{count_of(asked, 'record')}, one for each row", found, where, otherwise)


@check("accuracy.order", "Answers follow the seed", "The seed determines the order; other rows were not asked for.")
def order(run: RunView, log: AccuracyLog, where: tuple[Where, ...]) -> Outcome | None:
    """Which row each sequence id asks for follows from the seeds: in accuracy runs, and where a test logs samples."""
    detail = run.detail
    if is_older(detail.text("loadgen_version")):
        return None  # it drew in another order
    library, seed = detail.library_set(), whole(detail, "effective_sample_index_rng_seed")
    least = whole(detail, "effective_min_query_count")
    if library is None or seed is None or least is None or not 0 < len(library) <= MOST_ROWS or not len(log.rows):
        return None
    flags = ("effective_performance_issue_same", "effective_performance_issue_unique")
    if detail.counts.get(LIBRARY_SET) != 1 or any(detail.get(flag) is True for flag in flags):
        return None
    permuted = detail.get("effective_sample_concatenate_permutation") is True
    load = Load(run.figures.scenario or "", run.is_accuracy, permuted, least)
    rows, count = tuple(library.tolist()), int(log.sequence_ids.max()) + 1
    agreeing = _agreeing(log, lambda before_gcc_11: issued_rows(seed, rows, load, count, before_gcc_11))
    if agreeing is None:
        return None
    found = f"{agreeing:,} of {count_of(len(log.rows), 'record')}"
    expected = "rows in the order of the sample index seed"
    return outcome(agreeing == len(log.rows), expected, found, (*where, *run.at("effective_sample_index_rng_seed")))


def _agreeing(log: AccuracyLog, issued: Callable[[bool], tuple[int, ...]]) -> int | None:
    """How many records answer the row that was issued, by the better of both C++ libraries; None: not computable."""
    best = 0
    for before_gcc_11 in (False, True):
        try:
            rows = np.array(issued(before_gcc_11))
        except ValueError:
            return None
        inside = (log.sequence_ids >= 0) & (log.sequence_ids < len(rows))
        best = max(best, int((rows[log.sequence_ids[inside]] == log.rows[inside]).sum()))
        if best == len(log.rows):
            break
    return best


@check("accuracy.fields", "All answers are logged alike", "LoadGen logs counts and first tokens of all or none.")
def fields(log: AccuracyLog, where: tuple[Where, ...]) -> Outcome | None:
    counted = int((log.token_counts >= 0).sum())
    partly = [
        f"{name} in {count:,}"
        for name, count in (("token_count", counted), ("token_data", log.first_tokens))
        if 0 < count < log.records == len(log.token_counts)
    ]
    found = count_of(log.records, "record")
    found = f"{', '.join(partly)} of {found}" if partly else found
    return outcome(not partly, "the same fields in every record", found, where) if log.records else None


@check("accuracy.token_counts", "Token counts match the answers", "The token rate is the sum of these counts.")
def token_counts(log: AccuracyLog, where: tuple[Where, ...]) -> Outcome | None:
    counted = log.token_counts >= 0
    sizes, counts = log.data_bytes[counted], log.token_counts[counted]
    if not len(counts):
        return None
    wrong = min(int((sizes != counts * size).sum()) for size in ID_BYTES)
    found = f"{wrong:,} of {count_of(len(counts), 'record')} differ" if wrong else count_of(int(counts.sum()), "token")
    # Some systems leave the first token out of data.
    return outcome(not wrong, "as many token ids in data as token_count says", found, where, Severity.WARN)


@check("accuracy.first_token", "The first token belongs to the answer", "TTFT of another token has no meaning.")
def first_token(log: AccuracyLog, where: tuple[Where, ...]) -> Outcome | None:
    lines = log.first_token_differs
    if not lines:
        return None
    found = f"{count_of(len(lines), 'record')} or more begin with another"
    places = tuple(Where(where[0].file, line) for line in lines)
    # Reference systems differ in whether data holds the first token.
    return outcome(False, "data that begins with the first token reported", found, places, Severity.WARN)


@check("compliance.records", "TEST06 logged its samples", "It issues 100 and logs all; others were left out or added.")
def test06_records(log: AccuracyLog, where: tuple[Where, ...]) -> Outcome | None:
    """Of a run that was longer than asked, LoadGen logs each sample with a probability, 100 on average."""
    if log.truncated:
        return None
    expected = f"{TEST06_RECORDS} records: TEST06 issues so many samples and logs them all"
    samples, found, otherwise = _test06_samples(log), count_of(log.records, "record"), Severity.FAIL
    if samples > TEST06_RECORDS and abs(log.records - TEST06_RECORDS) <= MOST_DEVIATIONS * math.sqrt(TEST06_RECORDS):
        found, otherwise = f"{found} of a run of {samples:,} samples or more, of which a part is logged", Severity.NOTE
    return outcome(log.records == TEST06_RECORDS, expected, found, where, otherwise)


def _test06_samples(log: AccuracyLog) -> int:
    """How many samples the run issued at least."""
    return max(TEST06_RECORDS, int(log.sequence_ids.max(initial=-1)) + 1)


@check("compliance.order", "TEST06 asked for the rows of its seeds", "Answers to other rows were selected.")
def test06_order(
    log: AccuracyLog, where: tuple[Where, ...], scenario: str, benchmark: Benchmark, round_: str | None
) -> Outcome | None:
    """Rows that follow from no round are compared with LoadGen's own seeds, and with those of an accuracy run."""
    load = Load("Server" if scenario == "Interactive" else scenario, False, False, TEST06_RECORDS)
    samples = _test06_samples(log)
    if samples > MOST_SAMPLES:
        return None

    def issued(seeds: Seeds, load: Load, before_gcc_11: bool) -> tuple[int, ...]:
        library = library_order(seeds.qsl, benchmark.rows, before_gcc_11)
        return issued_rows(seeds.sample_index, library, load, samples, before_gcc_11)

    best, by, rounds = 0, "", round_seeds()
    for name in (round_,) if round_ else dict.fromkeys((*benchmark.rounds, *rounds)):
        agreeing = _agreeing(log, partial(issued, rounds[name], load)) or 0
        if agreeing > best:
            best, by = agreeing, f", by the seeds of {name}"
        if best == len(log.rows):
            break
    else:
        of_accuracy = replace(load, accuracy=True, permuted=True)
        others = [(f"of LoadGen's own seeds, {UNSET.qsl}", UNSET, load)]
        others += [(f"of an accuracy run of {name}", seeds, of_accuracy) for name, seeds in rounds.items()]
        for what, seeds, other in others:
            if best == 0 and _agreeing(log, partial(issued, seeds, other)) == len(log.rows):
                by = f": the rows {what}"
                break
    expected = f"the rows that the seeds of {round_ or 'a round'} ask for"
    found = f"{best:,} of {count_of(len(log.rows), 'record')}{by}"
    # Another C++ library may shuffle in another order.
    return outcome(best == len(log.rows), expected, found, where, Severity.WARN)
