"""Whether the summary agrees with the detail log: LoadGen prints both from the same variables."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence

from megatoken.audit.evidence import Where
from megatoken.audit.finding import Outcome, Severity, check, free_of, listed, outcome, shown
from megatoken.audit.view import MEANINGLESS, RunView, has_result
from megatoken.files import Damage
from megatoken.mlperf.detail_log import DetailLog
from megatoken.mlperf.loadgen_builds import key_of_label, summary_rows, usual_label, version_number
from megatoken.mlperf.run_figures import LOGS_PADDING
from megatoken.mlperf.summary_log import HEADINGS, SummaryField, SummaryLog
from megatoken.text import count_of

_PER_NANOSECOND = "TPS w/o loadgen overhead"  # of which the detail log has the value per ns
_SEE_DETAIL = "See the detailed log for why this may have occurred."
_TOKEN_TIMES = ("result_first_token_", "result_time_", "result_perf_constraints_met")
"""How the keys of TTFT and TPOT begin, and of what LoadGen works out from them, once for each log."""
_RULERS = 2 * len(HEADINGS)


@check("summary.readable", "The summary is plain text", "LoadGen writes plain ASCII.")
def readable(run: RunView) -> Iterator[Outcome]:
    for damage in run.summary.damages if run.summary else ():
        yield outcome(False, "plain text", damage.what, (Where(_path(run), damage.line),), Severity.WARN)


def _path(run: RunView) -> str:
    return run.files.summary or ""


@check("summary.fields", "Summary and detail log agree", "LoadGen prints both from the same variables.", has_result)
def fields(run: RunView) -> Outcome | None:
    log, detail = run.summary, run.detail
    if log is None:
        return None
    keyed = [
        (item, key)
        for item in log.fields
        if (key := key_of_label(item.label, run.figures.scenario)) in detail.first and key is not None
    ]
    differ = [(item, key) for item, key in keyed if not _agrees(item, detail, key)]
    wrong = [(item, key) for item, key in differ if not (run.samples_failed and key.startswith(_TOKEN_TIMES))]
    if differ and not wrong:
        return outcome(None, "the values of the detail log", MEANINGLESS, (Where(_path(run)),))
    where = (*(Where(_path(run), item.line) for item, _ in wrong), *run.at(*(key for _, key in wrong)))
    printed = (f"{item.label}: {_as_printed(detail, key)}" for item, key in wrong)
    expected = listed(printed, "the values of the detail log")
    found = listed((f"{item.label}: {item.value}" for item, _ in wrong), f"{len(keyed)} fields agree")
    return outcome(not wrong if keyed else None, expected, found, where if wrong else (Where(_path(run)),))


def _agrees(item: SummaryField, detail: DetailLog, key: str) -> bool:
    """Whether a field shows the value of ``key``: some rates with two decimals, flags as words."""
    entry, printed = detail.first[key], item.value.strip()
    scale = 1e9 if item.label == _PER_NANOSECOND else 1.0
    value = entry.value
    if isinstance(value, bool):
        return printed == (_as_printed(detail, key) if key.endswith("_met") else str(int(value)))
    if isinstance(value, str):
        return printed == value.strip()
    if printed == entry.text and scale == 1.0:
        return True
    if not isinstance(value, int | float) or not re.fullmatch(r"-?\d{1,40}\.\d\d", printed):
        return False
    return abs(float(printed) - value * scale) <= 0.00501 + 6e-6 * abs(value * scale)


def _as_printed(detail: DetailLog, key: str) -> str:
    entry = detail.first[key]
    if isinstance(entry.value, bool) and key.endswith("_met"):
        return "Yes" if entry.value else "NO"
    return entry.text[:80]


@check("summary.early_stopping", "Both logs agree on early stopping", "LoadGen prints one text twice.", has_result)
def early_stopping(run: RunView) -> Iterator[Outcome]:
    log = run.summary
    if log is None or run.figures.scenario == "Offline":  # Offline prints no such text
        return
    for name in ("", "TTFT", "TPOT"):
        key = f"early_stopping_{name.lower()}_result" if name else "early_stopping_result"
        logged = run.detail.text(key)
        if logged is not None:
            text, line = log.early_stopping.get(name, ("no such text", log.lines))
            expected = shown(" ".join(logged.split())) or "no text"
            where = (Where(_path(run), line), *run.at(key))
            yield outcome(text.split() == logged.split(), expected, shown(text) or "no text", where)


@check("summary.reason", "Both logs agree on why the run is INVALID", "LoadGen prints one text twice.", has_result)
def reason(run: RunView) -> Outcome | None:
    """Neither log gives a reason where only early stopping failed."""
    log, logged = run.summary, run.detail.text("result_invalid_reason")
    if log is None or (logged is None and log.recommendations is None):
        return None
    text, line = log.recommendations or ("", log.lines)
    printed, expected = (
        "".join(words.replace(_SEE_DETAIL, "").replace("*", "").split()) for words in (text, logged or "")
    )
    holds = printed == expected and (logged is None) is (log.recommendations is None)
    recommended = shown(" ".join((logged or "").split())) or "no recommendation"
    where = (Where(_path(run), line), *run.at("result_invalid_reason"))
    if run.samples_failed and not holds:
        return outcome(None, recommended, MEANINGLESS, where)
    return outcome(holds, recommended, shown(text) or "none", where)


@check("summary.lines", "The summary has LoadGen's lines", "Lines were removed, added, moved or repeated.", has_result)
def lines(run: RunView) -> Outcome | None:
    log = run.summary
    if log is None:
        return None
    rows, scenario = summary_rows(run.figures.scenario), run.figures.scenario
    foreign = [Damage(item.line, item.label) for item in log.fields if not key_of_label(item.label, scenario)]
    strange = [*log.strange, *foreign]
    labels = [usual_label(item.label) for item in log.fields]
    allowed = [row["label"] for row in rows]
    often = {label for label in labels if labels.count(label) > max(1, allowed.count(label))}
    doubled = sorted({item.label for item, label in zip(log.fields, labels, strict=True) if label in often})
    moved = _moved(log, labels, allowed) if scenario != "MultiStream" else None  # it prints some latencies twice
    missing = _missing(run, log, rows, labels)
    problems = []
    if 0 < log.carriage_returns < log.lines:
        ends = f"{log.carriage_returns:,} of {count_of(log.lines, 'line')} end in CR LF"
        problems.append(f"{ends}, the others in LF")
    problems += [f"{moved.label} where it does not belong"] if moved else []
    problems += [f"LoadGen does not print: {strange[0].what}"] if strange else []
    problems += [f"more than once: {', '.join(doubled)}"] if doubled else []
    severity = Severity.FAIL if problems else run.absent
    problems += [f"missing: {', '.join(missing)}"] if missing else []
    where = [Where(_path(run), damage.line) for damage in strange[:20]]
    where += [Where(_path(run), item.line) for item in log.fields if item.label in doubled or item is moved]
    expected = "every line that LoadGen prints, once, in its order, and no other"
    return free_of(problems, expected, f"{log.lines} lines", tuple(where) or (Where(_path(run)),), severity)


def _moved(log: SummaryLog, labels: list[str], order: list[str]) -> SummaryField | None:
    """The first field that stands after one that LoadGen prints later."""
    rank = 0
    for item, label in zip(log.fields, labels, strict=True):
        places = [place for place, allowed in enumerate(order) if allowed == label]
        later = [place for place in places if place >= rank]
        if places and not later:
            return item
        rank = min(later, default=rank)
    return None


def _missing(run: RunView, log: SummaryLog, rows: Sequence[Mapping[str, str]], labels: list[str]) -> list[str]:
    """Headings, rulers, labels and the warning that every summary of this run has."""
    detail = run.detail
    tokens = "with tokens" if detail.get("requested_use_token_latencies") is True else "without tokens"
    missing = [heading for heading in HEADINGS if heading not in log.headings]
    missing += ["rulers"] * (log.rulers < _RULERS)
    required = [
        row["label"]
        for row in rows
        if row["required"] in ("always", tokens) or (not row["required"] and row["key"] in detail.first)
    ]
    missing += [label for label in dict.fromkeys(required) if label not in labels]
    warns = version_number(detail.text("loadgen_version")) >= LOGS_PADDING
    if warns and detail.get("effective_sample_concatenate_permutation") is True and not log.warns_of_permutation:
        missing.append("the warning that sample_concatenate_permutation was set")
    return missing


@check("summary.counts", "Warnings and errors as counted", "Errors do not make a result INVALID.")
def counts(run: RunView) -> Outcome | None:
    log, detail = run.summary, run.detail
    if log is None:
        return None
    problems, where = [], []
    counted = {"warnings": (log.warnings, detail.warning_count), "errors": (log.errors, detail.error_count)}
    for name, (printed, count) in counted.items():
        if printed is None:
            problems.append(f"does not say how many {name} there were")
        elif printed[0] != count:
            problems.append(f"says {printed[0]:,} {name}")
            where.append(Where(_path(run), printed[1]))
    found = f"{count_of(detail.warning_count, 'warning')} and {count_of(detail.error_count, 'error')}"
    severity = Severity.FAIL if where else run.absent
    places = tuple(where) or (Where(_path(run), log.lines or None),)
    return free_of(problems, f"{found}, as in the detail log", "the same", places, severity)
