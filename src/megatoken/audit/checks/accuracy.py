"""Accuracy: what evidence there is, and whether the log of answers fits the run it claims to be of."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from megatoken.audit.evidence import Role, Where
from megatoken.audit.finding import Observation, Severity, shown
from megatoken.audit.view import RunView, observe
from megatoken.mlperf.accuracy_log import TRUNCATED_BYTES, AccuracyLog
from megatoken.mlperf.benchmarks import Benchmark
from megatoken.mlperf.detail_log import LIBRARY_SET
from megatoken.mlperf.draws import MOST_ROWS, Load, issued_rows, library_order
from megatoken.mlperf.rounds import round_seeds
from megatoken.mlperf.run_figures import whole
from megatoken.text import count_of

ID_BYTES = (4, 8)  # a token id in ``data``: int32, or int64 in a few submissions
TEST06_SAMPLES = 100


def check_accuracy(run: RunView) -> Iterator[Observation]:
    """The accuracy log beside a detail log."""
    log = run.accuracy
    if log is None or run.files.accuracy is None:
        return
    where = (Where(run.files.accuracy),)
    bad = tuple(Where(run.files.accuracy, damage.line) for damage in log.damages)
    cut = log.truncated
    spoiled = max(0, log.damage_count - 2) if cut else log.damage_count  # a cut goes through two records
    yield observe(
        "accuracy.log_readable",
        spoiled == 0 and (log.complete or cut),
        "a JSON list of LoadGen's records",
        shown(f"{count_of(spoiled, 'line')} that {'is' if spoiled == 1 else 'are'} none: {log.damages[0].what}")
        if spoiled
        else ("no end" if not log.complete and not cut else count_of(log.records, "record")),
        bad or where,
        run.absent if not spoiled or [damage.line for damage in log.damages] == [log.lines] else Severity.FAIL,
    )
    if run.is_performance and run.files.role is not Role.COMPLIANCE:
        expected_records = run.detail.number("effective_accuracy_log_sampling_target") or run.detail.number(
            "effective_accuracy_log_probability"
        )
        found = f"{count_of(log.records, 'record')}" if log.records else "an empty list, as LoadGen writes in this mode"
        yield observe(
            "accuracy.performance_log",
            log.records == 0 or bool(expected_records),
            "an empty list beside a performance run: it proves nothing about accuracy either way",
            found,
            where,
        )
    if run.is_accuracy:
        yield from _accuracy_run(run, log, where)
    yield from _order(run, log, where)
    yield from _tokens(log, where)


def check_test06(
    log: AccuracyLog, path: str, scenario: str | None, benchmark: Benchmark | None, round_: str | None
) -> Iterator[Observation]:
    """The answers that TEST06 logged, which a submission holds without a detail log.

    Args:
        log: the answers.
        path: where they stand.
        scenario: by the folder.
        benchmark: by the folder.
        round_: whose seeds are claimed; None: those of any round.
    """
    where = (Where(path),)
    yield from _tokens(log, where)
    if not log.truncated:
        yield observe(
            "compliance.records",
            log.records == TEST06_SAMPLES,
            f"{TEST06_SAMPLES} records: TEST06 issues so many samples and logs them all",
            count_of(log.records, "record"),
            where,
        )
    if benchmark is None or scenario is None or not len(log.rows):
        return
    agreeing, by = -1, ""
    for name in (round_,) if round_ else dict.fromkeys((*benchmark.rounds, *round_seeds())):
        found = _rows_of_seeds(log, scenario, benchmark.rows, name)
        agreeing, by = max((agreeing, by), (found, name))
        if agreeing == len(log.rows):
            break
    yield observe(
        "compliance.order",
        agreeing == len(log.rows),
        f"the rows that the seeds of {round_ or 'a round'} ask for",
        f"{agreeing:,} of {count_of(len(log.rows), 'record')}, by the seeds of {by}",
        where,
        Severity.WARN,  # another C++ library may shuffle otherwise
    )


def _rows_of_seeds(log: AccuracyLog, scenario: str, rows: int, round_: str) -> int:
    """How many records answer the row that a round's seeds ask for in TEST06, which issues no row equally often."""
    library_seed, sample_seed, _ = round_seeds()[round_]
    load = Load("Server" if scenario == "Interactive" else scenario, False, False, TEST06_SAMPLES)
    best = 0
    for before_gcc_11 in (False, True):
        library = library_order(library_seed, rows, before_gcc_11)
        try:
            order = np.array(issued_rows(sample_seed, library, load, TEST06_SAMPLES, before_gcc_11))
        except ValueError:
            return 0
        inside = (log.sequence_ids >= 0) & (log.sequence_ids < TEST06_SAMPLES)
        best = max(best, int((order[log.sequence_ids[inside]] == log.rows[inside]).sum()))
    return best


def _accuracy_run(run: RunView, log: AccuracyLog, where: tuple[Where, ...]) -> Iterator[Observation]:
    detail = run.detail
    asked = whole(detail, "effective_accuracy_sample_count") or whole(detail, "qsl_reported_total_count")
    if log.truncated:
        yield observe(
            "accuracy.truncated",
            log.size_bytes <= TRUNCATED_BYTES,
            f"at most {TRUNCATED_BYTES:,} bytes",
            f"{log.size_bytes:,} bytes",
            where,
        )
    elif asked is not None:
        rows = log.rows
        distinct = len(np.unique(rows))
        whole_set = log.records == asked and distinct == log.records
        in_range = not len(rows) or (int(rows.max()) < max(asked, whole(detail, "qsl_reported_total_count") or 0))
        yield observe(
            "accuracy.records",
            whole_set and in_range,
            f"{count_of(asked, 'record')}, one for each row",
            f"{count_of(log.records, 'record')} of {count_of(distinct, 'row')}"
            + ("" if in_range else ", some beyond the data set"),
            where,
            run.absent if distinct == log.records < asked and in_range else Severity.FAIL,
        )


def _order(run: RunView, log: AccuracyLog, where: tuple[Where, ...]) -> Iterator[Observation]:
    """Which row each sequence id asks for follows from the seeds: in accuracy runs, and where a test logs samples."""
    detail = run.detail
    library, seed = detail.library_set(), whole(detail, "effective_sample_index_rng_seed")
    least = whole(detail, "effective_min_query_count")
    if library is None or seed is None or least is None or not len(library) or not len(log.rows):
        return
    if detail.counts.get(LIBRARY_SET) != 1 or detail.get("effective_performance_issue_same") is True:
        return
    if detail.get("effective_performance_issue_unique") is True or len(library) > MOST_ROWS:
        return
    permuted = detail.get("effective_sample_concatenate_permutation") is True
    load = Load(run.figures.scenario or "", run.is_accuracy, permuted, least)
    count = int(log.sequence_ids.max()) + 1
    agreeing = 0
    for before_gcc_11 in (False, True):
        try:
            order = np.array(issued_rows(seed, tuple(library.tolist()), load, count, before_gcc_11))
        except ValueError:
            return
        inside = log.sequence_ids < len(order)
        agreeing = max(agreeing, int((order[log.sequence_ids[inside]] == log.rows[inside]).sum()))
        if agreeing == len(log.rows):
            break
    yield observe(
        "accuracy.order",
        agreeing == len(log.rows),
        "rows in the order that the sample index seed gives",
        f"{agreeing:,} of {count_of(len(log.rows), 'record')}",
        (*where, *run.at("effective_sample_index_rng_seed")),
    )


def _tokens(log: AccuracyLog, where: tuple[Where, ...]) -> Iterator[Observation]:
    """token_count is the number of ids in data; the first token, where logged, is how data begins."""
    counted = log.token_counts >= 0
    partly = [
        f"{name} in {count:,}"
        for name, count in (("token_count", int(counted.sum())), ("token_data", log.first_tokens))
        if 0 < count < log.records and log.records == len(counted)
    ]
    if log.records:
        yield observe(
            "accuracy.fields",
            not partly,
            "the same fields in every record",
            f"{', '.join(partly)} of {count_of(log.records, 'record')}" if partly else count_of(log.records, "record"),
            where,
        )
    if counted.any():
        sizes, counts = log.data_bytes[counted], log.token_counts[counted]
        wrong = min(int((sizes != counts * size).sum()) for size in ID_BYTES)
        yield observe(
            "accuracy.token_counts",
            wrong == 0,
            "as many token ids in data as token_count says",
            f"{wrong:,} of {count_of(len(counts), 'record')} differ" if wrong else count_of(int(counts.sum()), "token"),
            where,
            Severity.WARN,  # some systems leave the first token out of data
        )
    if log.first_token_differs:
        yield observe(
            "accuracy.first_token",
            False,
            "data that begins with the first token reported",
            f"{count_of(len(log.first_token_differs), 'record')} or more begin otherwise",
            tuple(Where(place.file, line) for place in where for line in log.first_token_differs),
            Severity.WARN,  # reference systems differ in whether data holds the first token
        )
