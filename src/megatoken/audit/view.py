"""One run's files, parsed, as the checks see them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, fields, replace
from typing import Any

from megatoken.audit.evidence import Role, Run, Where
from megatoken.audit.finding import Outcome, Severity, listed, outcome, shown
from megatoken.files import display
from megatoken.mlperf.accuracy_log import AccuracyLog
from megatoken.mlperf.benchmarks import Benchmark
from megatoken.mlperf.constraints import ran_seconds
from megatoken.mlperf.detail_log import DetailLog, Entry
from megatoken.mlperf.run_figures import RunFigures
from megatoken.mlperf.summary_log import SummaryLog

MOST_LINES = 20
MEANINGLESS = "samples failed, so LoadGen's times to first token and per output token mean nothing"


@dataclass(frozen=True, slots=True)
class Place:
    """What the names of the folders above a log say; ``scenario`` is spelled as in submissions."""

    role: Role
    node: str | None
    benchmark: str | None
    scenario: str | None
    system: str | None
    submitter: str | None
    division: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class RunFiles(Place):
    """The logs of one run. Paths are relative to the audited folder."""

    node: str
    folder: str
    detail: str | None
    summary: str | None
    accuracy: str | None
    others: tuple[str, ...]  # names of the folder's other files
    size_bytes: int

    def printable(self) -> RunFiles:
        """The same with printable names."""
        texts = {item.name: getattr(self, item.name) for item in fields(self)}
        printable: dict[str, Any] = {name: display(text) for name, text in texts.items() if type(text) is str}
        return replace(self, **printable)


@dataclass(frozen=True, slots=True)
class RunView:
    """One run. ``summary`` and ``accuracy`` are None where the file is missing or unreadable."""

    files: RunFiles
    detail: DetailLog
    summary: SummaryLog | None
    accuracy: AccuracyLog | None
    figures: RunFigures
    benchmark: Benchmark | None
    round: str | None  # whose rules are applied
    rules_claimed: bool  # a submission, or --round
    user_conf: tuple[str, str] | None  # its path and text
    interrupted: bool  # the run folder says that the run did not come to its end
    samples_failed: bool  # and that samples ended with an error: LoadGen never sets their first tokens

    @property
    def detail_path(self) -> str:
        """Path of the detail log."""
        return self.files.detail or self.files.folder

    def at(self, *keys: str) -> tuple[Where, ...]:
        """The lines of ``keys`` in the detail log; the log itself if it has none of them."""
        return self.lines(sorted({self.detail.first[key].line for key in keys if key in self.detail.first}))

    def lines(self, lines: Iterable[Entry | int | None]) -> tuple[Where, ...]:
        """The first of these lines or entries of the detail log; the log itself if there are none."""
        numbers = [line.line if isinstance(line, Entry) else line for line in lines]
        return tuple(Where(self.detail_path, number) for number in numbers[:MOST_LINES]) or (Where(self.detail_path),)

    def text(self, *keys: str) -> str:
        """``key: value`` of each key as the detail log has it."""
        first = self.detail.first
        return "; ".join(f"{key}: {first[key].text[:120]}" if key in first else f"no {key}" for key in keys)

    @property
    def scenario(self) -> str | None:
        """The scenario of the log."""
        return self.figures.scenario

    @property
    def is_accuracy(self) -> bool:
        """Whether the run measured the accuracy of its answers."""
        return self.figures.mode == "AccuracyOnly"

    @property
    def is_performance(self) -> bool:
        """Whether the run measured performance."""
        return self.figures.mode == "PerformanceOnly"

    @property
    def absent(self) -> Severity:
        """Severity of missing lines that LoadGen writes at the end."""
        return Severity.UNKNOWN if self.interrupted else Severity.FAIL

    @property
    def unmet(self) -> Severity:
        """Severity of a rule that is not met."""
        return unmet(self.rules_claimed, self.files.division)

    @property
    def seeds(self) -> tuple[object, ...]:
        """The three seeds that the run used."""
        return self.detail.seeds

    @property
    def ran_seconds(self) -> float | None:
        """How long the run took, as LoadGen compares it with the minimum duration."""
        return ran_seconds(self.detail)

    @property
    def p99_seconds(self) -> tuple[float | None, float | None]:
        """99th percentiles of TTFT and TPOT."""
        return self.figures.ttft_seconds.get("p99"), self.figures.tpot_seconds.get("p99")

    def computed(self, problems: Iterable[str], follows: str, *keys: str) -> Outcome:
        """The lines of ``keys``, recomputed; ``problems`` are values as they should be, if others stand there."""
        texts = list(problems)
        return outcome(not texts, listed(texts, follows), shown(self.text(*keys)), self.at(*keys))


def run_of(files: RunFiles, figures: RunFigures, system: str | None = None, **more: Any) -> Run:
    """The run of these files, with printable names; ``more`` are fields of ``Run`` that need its logs."""
    files = files.printable()
    names = ("role", "node", "benchmark", "division", "submitter", "detail", "summary", "accuracy")
    same = {name: getattr(files, name) for name in names}
    return Run(path=files.folder, folder_scenario=files.scenario, system=system, figures=figures, **same, **more)


def has_result(run: RunView) -> bool:
    """Whether the log holds the result of a performance run."""
    return run.is_performance and "result_validity" in run.detail.first


def unmet(rules_claimed: bool, division: str | None) -> Severity:
    """Severity of a rule that is not met: a note where no rules are claimed, a warning in the open division."""
    if not rules_claimed:
        return Severity.NOTE
    return Severity.WARN if division == "open" else Severity.FAIL
