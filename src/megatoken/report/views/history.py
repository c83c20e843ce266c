"""Many runs on one page: each group's history with its regression check, and every run in a table to sort."""

from __future__ import annotations

import csv
import io
import os
import statistics
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from urllib.parse import quote

from megatoken.analysis.history import BETTER, WORSE, Check, Entry, Group, History
from megatoken.report.blocks import Badge, Cell, Column, Download, Link, Points, Spark, Table, View, Words, section
from megatoken.report.metrics import verdict_badge
from megatoken.report.words import aligned
from megatoken.runs.run import REPORT
from megatoken.text import ABSENT, count_of, precise

FIELDS = (
    *("run", "verdict", "model", "precision", "scenario", "machine", "created_at"),
    *("output_tokens_per_second", "ttft_p99_seconds", "tpot_p99_seconds", "latency_p99_seconds", "power_watts"),
)
NUMBERS = {
    "output_tokens_per_second": ("Rate", "tokens/s", 1.0),
    "ttft_p99_seconds": ("TTFT p99", "s", 1.0),
    "tpot_p99_seconds": ("TPOT p99", "ms", 1000.0),
    "latency_p99_seconds": ("Latency p99", "s", 1.0),
    "power_watts": ("Power", "W", 1.0),
}
TONES = {BETTER: "good", WORSE: "bad"}
CHECK_NOTE = (
    "The check compares the latest run with the earlier ones of equal settings (data set, offered rate, limits, threads"
    " and all that repeats share; the code may differ). Only a value outside the range in which one more run lies"
    " with a confidence of 95 % is called better or a regression: exp(m ± t(0.975; n - 1) · s · √(1 + 1/n)), m and s"
    " the mean and the standard deviation of the logarithms of the n earlier values. Interrupted runs are left out."
)
BASELINE_NOTE = (
    "The check compares the latest run with the chosen baseline, which must have equal settings. Only a value outside"
    " the range in which one more run lies with a confidence of 95 % is called better or a regression. Of a baseline of"
    " several runs the range is exp(m ± t(0.975; n - 1) · s · √(1 + 1/n)), m and s the mean and the standard deviation"
    " of their n logarithms; of one run, m is its own logarithm, s that of all earlier runs of equal settings, and the"
    " root is √2."
)
MINUTES = len("2026-11-20 09:00")  # of a date
SPARK_WIDTH, SPARK_HEIGHT, SPARK_MARGIN = 120, 24, 3
FOOTER = "Made by megatoken from the run folders; megatoken report rebuilds the page from them."


def history_view(history: History, folder: Path) -> View:
    """The report on many runs, for a page in ``folder``, from which its links lead to the page of each run."""
    verdicts = Counter(str(entry.verdict) for entry in history.entries)
    counted = ", ".join(f"{count:,} {verdict}" for verdict, count in verdicts.most_common())
    checks = [check for group in history.groups for check in group.checks]
    worse = sum(check.outcome == WORSE for check in checks)
    checked = sum(bool(group.checks) for group in history.groups)
    groups = count_of(len(history.groups), "group")
    against = f" against the baseline {history.baseline}" if history.baseline else ""
    found = f"{count_of(worse, 'regression')}{against} in the {checked:,} of {groups} that can be checked"
    why = "each says why" if history.baseline else "no group has three runs of equal settings"
    none = f"None of {groups} can be checked for regressions{against}: {why}"
    return View(
        f"{count_of(len(history.entries), 'run')} in {history.name}",
        "runs",
        (Points("", (("", counted), ("", found if checked else none))),),
        (
            section("History", _groups(history)),
            section("Runs", _runs(history.entries, folder), Download("runs.csv", history_csv(history.entries))),
        ),
        FOOTER,
    )


def history_csv(entries: Iterable[Entry]) -> str:
    """A header and a line for each run; the unit of a number is in its name, and what a run does not state is empty."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(FIELDS)
    for entry in entries:
        writer.writerow(
            [os.fsencode(entry.path).decode(errors="replace"), *(getattr(entry, key) for key in FIELDS[1:])]
        )
    return text.getvalue()


def _runs(entries: Sequence[Entry], folder: Path) -> Table:
    heads = ("Model", "Precision", "Scenario", "Machine", "Date (UTC)")
    known = [key for key in NUMBERS if any(getattr(entry, key) is not None for entry in entries)]
    numbers = [aligned([_scaled(entry, key) for entry in entries]) for key in known]
    rows = tuple(
        (
            _link(entry, folder),
            verdict_badge(entry.verdict),
            *figures,
            *(text or ABSENT for text in entry.group),
            entry.created_at.replace("T", " ")[:MINUTES] or ABSENT,
        )
        for entry, figures in zip(entries, zip(*numbers, strict=True) if numbers else [()] * len(entries), strict=True)
    )
    figures = (Column(name, unit, numeric=True) for name, unit, _ in map(NUMBERS.__getitem__, known))
    columns = (Column("Run"), Column("Verdict"), *figures, *map(Column, heads))
    return Table("Runs", columns, rows, sortable=True)


def _scaled(entry: Entry, key: str) -> str:
    value = getattr(entry, key)
    return ABSENT if value is None else precise(value * NUMBERS[key][2])


def _link(entry: Entry, folder: Path) -> Cell:
    address = os.path.relpath(entry.path.absolute() / REPORT, folder.absolute())
    return (Link(entry.path.name, quote(os.fsencode(address))),)


def check_lines(history: History) -> Iterator[str]:
    """Each checked group as one line for a terminal: what it is, and each outcome with its figures."""
    for group in history.groups:
        name = " ".join(filter(None, group.entries[-1].group))
        if not group.checks:
            yield f"not checked: {name}: {group.why}"
        for check in group.checks:
            yield f"{check.outcome}: {name}: {_figures(check, history.baseline)}"


def _groups(history: History) -> Table:
    heads = ("Model", "Precision", "Scenario", "Machine")
    columns = (
        *map(Column, heads),
        Column("Runs", numeric=True),
        Column("Rates, oldest first"),
        Column("Latest", "tokens/s", numeric=True),
        Column("Verdict"),
        Column("Latest against the baseline" if history.baseline else "Latest against earlier runs"),
    )
    rows = tuple(
        (
            *(text or ABSENT for text in group.entries[-1].group),
            f"{len(group.entries):,}",
            _spark(group.entries),
            _scaled(group.entries[-1], "output_tokens_per_second"),
            verdict_badge(group.entries[-1].verdict),
            _outcome(group, history.baseline),
        )
        for group in history.groups
    )
    note = BASELINE_NOTE if history.baseline else CHECK_NOTE
    return Table("Groups", columns, rows, note=note, sortable=True, stacked=True)


def _outcome(group: Group, baseline: str) -> Cell:
    if not group.checks:
        return (Badge("not checked", "quiet"), Words(group.why, "quiet"))
    return tuple(
        part
        for check in group.checks
        for part in (Badge(check.outcome, TONES.get(check.outcome, "plain")), Words(_figures(check, baseline), "quiet"))
    )


def _figures(check: Check, baseline: str) -> str:
    name, unit, factor = NUMBERS[check.name]
    latest, low, high = (precise(factor * value) for value in (check.latest, check.low, check.high))
    by = f"{len(check.earlier):,} earlier runs put"
    if baseline:
        middle = precise(factor * statistics.geometric_mean(check.earlier))
        by = f"the baseline {baseline}, {middle}, puts"
    return f"{name} {latest} {unit}; {by} the next one between {low} and {high}"


def _spark(entries: Sequence[Entry]) -> Cell:
    rates = [rate for entry in entries if (rate := entry.output_tokens_per_second) is not None]
    if len(rates) < 2:
        return ABSENT
    low, high = min(rates), max(rates)
    step = (SPARK_WIDTH - 2 * SPARK_MARGIN) / (len(rates) - 1)
    scale = (SPARK_HEIGHT - 2 * SPARK_MARGIN) / ((high - low) or 1.0)
    places = [
        (SPARK_MARGIN + step * n, SPARK_HEIGHT - SPARK_MARGIN - scale * (rate - low)) for n, rate in enumerate(rates)
    ]
    line = " ".join(f"{x:.1f},{y:.1f}" for x, y in places)
    x, y = places[-1]
    drawing = (
        f'<polyline class="curve curve0" points="{line}"/><circle class="point0" cx="{x:.1f}" cy="{y:.1f}" r="2.6"/>'
    )
    return (
        Spark(
            drawing, f"{precise(rates[0])} to {precise(rates[-1])} tokens/s, least {precise(low)}, most {precise(high)}"
        ),
    )
