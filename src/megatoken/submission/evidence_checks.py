"""Check figures, scores and compliance tests as MLCommons' checker reads them."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from megatoken.audit.checks.submission import Submission
from megatoken.audit.discovery import Tree, below
from megatoken.audit.evidence import Where, places
from megatoken.audit.finding import Observation, shown
from megatoken.files import UnreadableError, display, read_text
from megatoken.mlperf.accuracy_log import read_accuracy_scores
from megatoken.mlperf.benchmarks import Benchmark
from megatoken.mlperf.compliance import compliance_file, missing_lines, passed_lines
from megatoken.mlperf.detail_log import read_detail_log
from megatoken.mlperf.submission_layout import Key, Layout
from megatoken.submission.judge import observe

HIGHEST_SCORE = 100  # every score of language models is a percentage
_SPELLING = {"rougel": "rougeL", "rougelsum": "rougeLsum"}
_TOKENS = {"Offline": "result_tokens_per_second", "Server": "result_completed_tokens_per_second"}
_STREAM = "result_90.00_percentile_latency_ns"


@dataclass(frozen=True, slots=True)
class Published:
    """The figure that a result publishes: tokens/s, or the latency in ms for SingleStream."""

    key: Key
    value: float
    unit: str

    def to_document(self) -> dict[str, Any]:
        """Plain JSON."""
        return {**self.key._asdict(), "value": self.value, "unit": self.unit}


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
    name, stream = _TOKENS.get(scenario, ""), scenario == "SingleStream"
    if stream:
        name = _STREAM if benchmark and benchmark.name.endswith("-edge") else "early_stopping_latency_ss"
    value = log.number(name)
    observations = []

    def add(id_: str, holds: bool, expected: str, found: str, line_of: str) -> None:
        line = log.first[line_of].line if line_of in log.first else None
        observations.append(observe(id_, holds, expected, found, (Where(place, line),)))

    expected = f"a number under {name}" if name else "a scenario of language models"
    add("check.metric", value is not None, expected, shown(f"{scenario}: {log.get(name)}" if name else scenario), name)
    if networked:
        named = log.text("sut_name") or ""
        add("rules.network", "Network SUT" in named, "a name with 'Network SUT'", named, "sut_name")
    if stream:
        met = log.get("early_stopping_met")
        add("rules.early_stopping", met is True, "early stopping met", shown(met), "early_stopping_met")
    if value is None:
        return None, observations
    return Published(key, value / 1e6 if stream else value, "ms" if stream else "tokens/s"), observations


def check_scores(tree: Tree, folder: str, benchmark: Benchmark | None) -> Iterator[Observation]:
    """accuracy.txt: every score as ``'name': number`` and high enough, and a separate line ``hash=...``.

    Stops once all are found, as MLCommons' checker does: later lines do not count.
    """
    path = f"{folder}/accuracy/accuracy.txt"
    if path not in tree.files or benchmark is None:
        return
    place = places(path)
    try:
        text, _ = read_text(tree.path(path))
        others = read_accuracy_scores(tree.path(path))
    except UnreadableError as error:
        yield observe("check.scores", False, "text", str(error), place)
        return
    windows = {"tokens_per_sample": benchmark.tokens_per_sample, "gen_len": benchmark.gen_len}
    least = dict(benchmark.accuracy) | {name: window[0] for name, window in windows.items() if window}
    most = {name: window[1] for name, window in windows.items() if window}
    needed = {name for name, target in least.items() if target > 0}
    seen: dict[str, float] = {}
    written = False
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
            written |= name in needed
            if value < target:
                low.append(f"{name} {value:g} below {target:g}")
            elif value > most.get(name, value):
                low.append(f"{name} {value:g} above {most[name]:g}")
            if name in benchmark.accuracy and value > HIGHEST_SCORE:
                beyond.append(f"{name} {value:g}")
            if value >= target:
                seen[name] = value
        if digest and needed <= seen.keys():
            break
    for name in needed - seen.keys():
        if not any(text.startswith(f"{name} ") for text in low):
            elsewhere = others.scores.get(name)
            low.append(f"no {name}" if elsewhere is None else f"{name} {elsewhere:g}, not written as {_example(name)}")
    targets = [f"{_example(name, target)} or more" for name, target in least.items() if target > 0]
    expected = f"{benchmark.name}: {', '.join(targets)}"
    scores = shown("; ".join(sorted(low))) or ", ".join(f"{name} {value:g}" for name, value in seen.items())
    where = tuple(Where(display(path), line) for line in sorted(set(others.lines.values())))
    yield observe("check.scores" if written else "check.no_score", not low, expected, scores, where or place)
    scores = shown("; ".join(beyond)) or "all in range"
    yield observe("check.score_range", not beyond, f"scores from 0 to {HIGHEST_SCORE}", scores, place)
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
        folder = below(one.path, f"{layout.compliance(key)}/{test}")
        path = f"{folder}/{compliance_file(test)}"
        where = places(path)
        if path not in tree.files:
            found = "no such file" if folder in tree.folders else f"no folder {test}"
            yield observe("check.compliance", False, f"{test} with {path.rpartition('/')[2]}", found, where)
        elif test == "TEST06":
            try:
                text, _ = read_text(tree.path(path))
            except UnreadableError as error:
                text = str(error)
            missing = missing_lines(test, text)
            expected = f"the lines: {'; '.join(map(' or '.join, passed_lines(test)))}"
            found = shown(f"no line {'; '.join(missing)}") if missing else "passed"
            yield observe("check.compliance", not missing, expected, found, where)
