"""Whether settings and queries of a log follow from the requested ones, as LoadGen computes them; and user.conf."""

from __future__ import annotations

import math

from megatoken.audit.evidence import Role, Where
from megatoken.audit.finding import Outcome, Severity, check, listed, outcome, shown
from megatoken.audit.view import RunView
from megatoken.mlperf.constraints import SIX_DIGITS
from megatoken.mlperf.detail_log import LIBRARY_SET
from megatoken.mlperf.draws import MOST_ROWS, library_order
from megatoken.mlperf.effective_settings import (
    effective_settings,
    offline_query_samples,
    queries_due_ns,
    samples_per_query,
    user_conf_settings,
)
from megatoken.mlperf.loadgen_builds import version_number
from megatoken.mlperf.run_figures import whole
from megatoken.text import count_of, is_number

EVERY_ROW_A_QUERY = (5, 0, 6)  # earlier releases may generate an Offline query for each row; they issue one


@check("settings.effective", "Effective settings follow from requested ones", "LoadGen computes them.")
def effective(run: RunView) -> Outcome | None:
    log = run.detail
    if run.figures.scenario is None:
        return None
    compared = {
        name: expected
        for name, expected in effective_settings(log).items()
        if expected is not None and log.get(f"effective_{name}") is not None
        if not (is_number(expected) and expected < 0)  # LoadGen logs an error and takes its default
    }
    wrong = [name for name, expected in compared.items() if not _same(log.get(f"effective_{name}"), expected)]
    keys = [f"effective_{name}" for name in wrong]
    expected = shown(", ".join(f"effective_{name} {compared[name]!r}" for name in wrong))
    found = shown(run.text(*keys)) or f"{len(compared)} settings compared, all do"
    where, follow = run.at(*keys, *(f"requested_{name}" for name in wrong)), "settings that follow from requested ones"
    return outcome(not wrong if compared else None, expected or follow, found, where)


def _same(found: object, expected: object) -> bool:
    if is_number(found) and is_number(expected) and (isinstance(found, float) or isinstance(expected, float)):
        return math.isclose(found, expected, rel_tol=SIX_DIGITS)
    return found == expected


@check("settings.library_order", "The data set was loaded in the seed's order", "Seed and order cannot disagree.")
def library(run: RunView) -> Outcome | None:
    log = run.detail
    loaded = log.library_set()
    seed, total = whole(log, "effective_qsl_rng_seed"), whole(log, "qsl_reported_total_count")
    expected = "the order that the seed gives"
    if run.figures.scenario is None or not (run.is_performance or run.is_accuracy):
        return None
    if loaded is None or seed is None or total is None or not 0 < total <= MOST_ROWS:
        found = "no library set" if loaded is None else "no seed, no size, or a data set too large to shuffle"
        return outcome(None, expected, found, run.at(LIBRARY_SET))
    rows = total
    wanted = whole(log, "effective_accuracy_sample_count" if run.is_accuracy else "effective_performance_sample_count")
    if whole(log, "effective_accuracy_sample_count") is not None and wanted:
        rows = min(wanted, total)  # LoadGen 6.0.6 and later shuffle only so many
    set_size = whole(log, "effective_performance_sample_count") or rows
    padding = (whole(log, "effective_samples_per_query") or 1) - 1 if run.figures.scenario == "MultiStream" else 0
    mine, best = loaded.tolist(), 0
    for before_gcc_11 in (False, True):
        order = list(library_order(seed, rows, before_gcc_11)[:set_size])
        order += order[:padding]
        if mine == order:
            return outcome(True, expected, f"{count_of(len(mine), 'row')} in that order", run.at(LIBRARY_SET))
        best = max(best, sum(a == b for a, b in zip(mine, order, strict=False)))
    found = f"{count_of(len(mine), 'row')}, {best:,} of them where the seed puts them"
    if len(set(mine)) == len(mine) == min(set_size, rows) and max(mine) < total and best < len(mine) // 2:
        found += "; each row once, so another C++ library's shuffle is possible"
        return outcome(False, expected, found, run.at(LIBRARY_SET), Severity.WARN)
    return outcome(False, expected, found, run.at(LIBRARY_SET, "effective_qsl_rng_seed"))


@check("settings.samples", "Samples follow from rate and duration", "Another number contradicts the rate.")
def offline_samples(run: RunView) -> Outcome | None:
    log = run.detail
    keys = ("effective_samples_per_query", "requested_min_query_count", "effective_target_qps")
    samples, least = whole(log, keys[0]), whole(log, keys[1])
    rate, duration_ms = log.number(keys[2]), log.number("effective_min_duration_ms")
    if run.figures.scenario != "Offline":
        return None
    if samples is None or least is None or rate is None or duration_ms is None:
        return outcome(None, "1.1 x rate x duration samples", "figures missing", run.at(*keys))
    follow = offline_query_samples(log, least, rate, duration_ms)
    expected = f"{count_of(follow, 'sample')}: the larger of {least:,} and 1.1 x {rate:g}/s x {duration_ms / 1e3:g} s"
    where = run.at(*keys, "effective_min_duration_ms")
    return outcome(abs(samples - follow) <= 1 + SIX_DIGITS * follow, expected, f"{samples:,}", where)


@check("settings.generated", "The queries follow from the settings", "They are computed, not measured.")
def generated(run: RunView) -> Outcome | None:
    log, scenario = run.detail, run.figures.scenario
    keys = ("generated_query_count", "generated_samples_per_query", "generated_query_duration")
    count, each, duration_ns = (whole(log, key) for key in keys)
    loaded = log.library_set()
    rate, samples = log.number("effective_target_qps"), whole(log, "effective_samples_per_query")
    if scenario is None or not run.is_performance:
        return None
    if count is None or each is None or duration_ns is None or not rate or samples is None or loaded is None:
        return outcome(None, "queries that follow from the settings", "figures missing", run.at(*keys))
    rows, release = len(loaded), version_number(log.text("loadgen_version"))
    permuted = log.get("effective_sample_concatenate_permutation") is True and rows > 0
    problems = []
    expected = samples_per_query(log, samples, rows)
    if each != expected:
        passes = f"{count_of(expected // rows, 'pass', 'passes')} over {count_of(rows, 'row')}" if rows else ""
        passes = f" ({passes})" if expected != samples else ""
        problems.append(f"{count_of(expected, 'sample')} a query{passes}, not {each:,}")
    if scenario == "Offline" and count != 1 and release >= EVERY_ROW_A_QUERY:
        problems.append(f"one query, not {count:,}")
    if permuted and scenario != "Offline" and count % rows:
        problems.append(f"whole passes over {count_of(rows, 'row')}, not {count_of(count, 'query', 'queries')}")
    due_ns = queries_due_ns(log, rate, count)
    if due_ns is not None and abs(duration_ns - due_ns) > count + SIX_DIGITS * due_ns:
        problems.append(f"queries over {due_ns:.0f} ns, not {duration_ns}")
    return run.computed(problems, "queries that follow from the settings and seeds", *keys)


@check("configuration.user_conf", "LoadGen got what user.conf says", "Another configuration made this log.")
def check_user_conf(run: RunView) -> Outcome | None:
    """A file in another folder than the logs applies to performance runs only: others may have their own rate.

    Compliance tests are left out, since an audit.config configures them too.
    """
    scenario = run.figures.scenario
    if run.user_conf is None or run.files.role is Role.COMPLIANCE or scenario is None:
        return None
    path, text = run.user_conf
    if path.rpartition("/")[0] != run.files.folder and run.files.role is not Role.PERFORMANCE:
        return None
    compared = user_conf_settings(text, scenario, run.benchmark.name if run.benchmark else None)
    compared = [one for one in compared if one.log_key in run.detail.first]
    wrong = [
        (f"{one.key} = {one.asked[0][0]}", one.log_key, Where(path, one.asked[0][1]))
        for one in compared
        if not any(_same(logged := run.detail.get(one.log_key), one.as_logged(value, logged)) for value, _ in one.asked)
    ]
    if not compared:
        return None
    expected = listed((asked for asked, _, _ in wrong), "what user.conf asks for")
    found = listed((run.text(name) for _, name, _ in wrong), f"{len(compared)} settings agree")
    where = (*(place for _, _, place in wrong), *run.at(*(name for _, name, _ in wrong)))
    # A program may change settings after LoadGen has read the file.
    return outcome(not wrong, expected, found, where, Severity.WARN)
