"""Check figures, scores and compliance tests as MLCommons' checker reads them."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

from megatoken.audit.checks.submission import Submission
from megatoken.audit.discovery import Tree
from megatoken.audit.evidence import Where
from megatoken.audit.finding import Observation, shown
from megatoken.audit.view import observe
from megatoken.files import UnreadableError, display, read_text
from megatoken.mlperf.accuracy_log import read_accuracy_scores
from megatoken.mlperf.benchmarks import Benchmark
from megatoken.mlperf.detail_log import DetailLog, read_detail_log
from megatoken.submission.layout import Key, Layout
from megatoken.submission.tree_checks import at

TEST06_LINES = (
    ("First token check pass: True", "First token check pass: Skipped"),
    ("EOS check pass: True",),
    ("Sample length check pass: True",),
)
HIGHEST_SCORE = 100  # every score of language models is a percentage
COMPLIANCE_FILES = {"TEST09": "verify_output_len.txt"}
_SPELLING = {"rougel": "rougeL", "rougelsum": "rougeLsum"}
_TOKENS = {"Offline": "result_tokens_per_second", "Server": "result_completed_tokens_per_second"}
_STREAM = "result_90.00_percentile_latency_ns"


@dataclass(frozen=True, slots=True)
class Published:
    """The figure that a result publishes: tokens/s, or the latency in ms for SingleStream."""

    key: Key
    value: float
    unit: str


def published(
    tree: Tree, key: Key, folder: str, benchmark: Benchmark | None, networked: bool
) -> tuple[Published | None, list[Observation]]:
    """The figure of a performance run, and the observations on it; for a ``networked`` run also on the SUT name."""
    path = f"{folder}/performance/run_1/mlperf_log_detail.txt"
    if path not in tree.files:
        return None, []  # reported by the check of the files
    place = display(path)
    try:
        log = read_detail_log(tree.path(path))
    except UnreadableError as error:
        return None, [observe("check.metric", False, "a detail log of LoadGen", str(error), (Where(place),))]
    scenario = log.text("effective_scenario") or "no scenario"
    name = _TOKENS.get(scenario)
    if scenario == "SingleStream":
        name = _STREAM if benchmark and benchmark.name.endswith("-edge") else "early_stopping_latency_ss"
    value = log.number(name) if name else None
    expected = f"a number under {name}" if name else "a scenario of language models"
    observations = [
        observe(
            "check.metric",
            value is not None,
            expected,
            shown(f"{scenario}: {log.get(name)}" if name else scenario),
            _line(log, place, name),
        )
    ]
    if networked:
        named = log.text("sut_name") or ""
        where = _line(log, place, "sut_name")
        observations.append(observe("rules.network", "Network SUT" in named, "a name with 'Network SUT'", named, where))
    if scenario == "SingleStream":
        met = log.get("early_stopping_met")
        where = _line(log, place, "early_stopping_met")
        observations.append(observe("rules.early_stopping", met is True, "early stopping met", shown(met), where))
    if value is None:
        return None, observations
    if scenario == "SingleStream":
        return Published(key, value / 1e6, "ms"), observations
    return Published(key, value, "tokens/s"), observations


def _line(log: DetailLog, place: str, key: str | None) -> tuple[Where, ...]:
    entry = log.first.get(key) if key else None
    return (Where(place, entry.line if entry else None),)


def check_scores(tree: Tree, folder: str, benchmark: Benchmark | None) -> Iterator[Observation]:
    """accuracy.txt: every score as ``'name': number`` and high enough, and a separate line ``hash=...``.

    Stops once all are found, as MLCommons' checker does: later lines do not count.
    """
    path = f"{folder}/accuracy/accuracy.txt"
    if path not in tree.files or benchmark is None:
        return
    place = (Where(display(path)),)
    try:
        text, _ = read_text(tree.path(path))
        others = read_accuracy_scores(tree.path(path))
    except UnreadableError as error:
        yield observe("check.scores", False, "text", str(error), place)
        return
    windows = {"tokens_per_sample": benchmark.tokens_per_sample, "gen_len": benchmark.gen_len}
    least = dict(benchmark.accuracy) | {name: window[0] for name, window in windows.items() if window}
    most = {name: window[1] for name, window in windows.items() if window}
    seen: dict[str, float] = {}
    low: list[str] = []
    beyond: list[str] = []
    digest = None
    for line in text.splitlines():
        if found := re.fullmatch(r"hash=(\w+)", line):
            digest = found.group(1)
        for name, target in least.items():
            value = _score(line, name)
            if value is None:
                continue
            if value < target:
                low.append(f"{name} {value:g} below {target:g}")
            elif value > most.get(name, value):
                low.append(f"{name} {value:g} above {most[name]:g}")
            if name in benchmark.accuracy and value > HIGHEST_SCORE:
                beyond.append(f"{name} {value:g}")
            if value >= target:
                seen[name] = value
        if digest and len(seen) == len(least):
            break
    for name in least.keys() - seen.keys():
        if not any(text.startswith(f"{name} ") for text in low):
            elsewhere = others.scores.get(name)
            low.append(f"no {name}" if elsewhere is None else f"{name} {elsewhere:g}, not written as {_example(name)}")
    yield observe(
        "check.scores",
        not low,
        f"{benchmark.name}: " + ", ".join(f"{_example(name, target)} or more" for name, target in least.items()),
        shown("; ".join(sorted(low))) or ", ".join(f"{name} {value:g}" for name, value in seen.items()),
        tuple(Where(display(path), line) for line in sorted(set(others.lines.values()))) or place,
    )
    yield observe(
        "check.score_range",
        not beyond,
        f"scores from 0 to {HIGHEST_SCORE}",
        shown("; ".join(beyond)) or "all in range",
        place,
    )
    yield observe("check.hash", digest is not None, "a separate line hash=...", shown(digest or "none"), place)


def _score(line: str, name: str) -> float | None:
    """The score ``name`` on a line of accuracy.txt; the last one if there are several, as in MLCommons' checker."""
    blanks = r"\s+'?" if name.startswith("rouge") else r"\s"
    found = re.match(rf".*'{_SPELLING.get(name, name)}':{blanks}([\d.]+)", line)
    try:
        return float(found.group(1)) if found else None
    except ValueError:
        return None


def _example(name: str, value: float | None = None) -> str:
    return f"'{_SPELLING.get(name, name)}': {'NUMBER' if value is None else f'{value:g}'}"


def check_compliance(
    tree: Tree, one: Submission, key: Key, layout: Layout, benchmark: Benchmark | None
) -> Iterator[Observation]:
    """The compliance tests of the closed division, each with the lines that show that it passed."""
    for test in benchmark.compliance if benchmark else ():
        folder = at(one, f"{layout.compliance(key)}/{test}")
        path = f"{folder}/{COMPLIANCE_FILES.get(test, 'verify_accuracy.txt')}"
        where = (Where(display(path)),)
        if path not in tree.files:
            found = "no such file" if folder in tree.folders else f"no folder {test}"
            yield observe("check.compliance", False, f"{test} with {path.rpartition('/')[2]}", found, where)
        elif test == "TEST06":
            try:
                text, _ = read_text(tree.path(path))
            except UnreadableError as error:
                text = str(error)
            lines = {line.strip() for line in text.splitlines()}
            failed = [choices[0] for choices in TEST06_LINES if not lines & set(choices)]
            yield observe(
                "check.compliance",
                not failed,
                "the lines: " + "; ".join(" or ".join(choices) for choices in TEST06_LINES),
                shown(f"no line {'; '.join(failed)}") if failed else "passed",
                where,
            )
