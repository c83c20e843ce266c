"""One run's files, parsed, as the checks see them."""

from __future__ import annotations

from dataclasses import dataclass

from megatoken.audit.evidence import Role, Where
from megatoken.audit.finding import Observation, Severity
from megatoken.mlperf.accuracy_log import AccuracyLog
from megatoken.mlperf.benchmarks import Benchmark
from megatoken.mlperf.detail_log import DetailLog
from megatoken.mlperf.run_figures import RunFigures
from megatoken.mlperf.summary_log import SummaryLog


@dataclass(frozen=True, slots=True)
class RunFiles:
    """LoadGen's files in one folder, and what the folder's place says. Paths are relative to the audited one."""

    folder: str
    detail: str | None
    summary: str | None
    accuracy: str | None
    others: tuple[str, ...]  # names of the folder's other files
    size_bytes: int
    role: Role
    node: str
    benchmark: str | None
    scenario: str | None
    system: str | None
    submitter: str | None
    division: str | None


@dataclass(frozen=True, slots=True)
class RunView:
    """One run. A log is None where it is absent or unreadable."""

    files: RunFiles
    detail: DetailLog
    summary: SummaryLog | None
    accuracy: AccuracyLog | None
    figures: RunFigures
    benchmark: Benchmark | None
    round: str | None  # whose rules are to be applied
    rules_claimed: bool  # a submission, or a round was asked for: unmet rules weigh
    user_conf: tuple[str, str] | None  # its path and text
    interrupted: bool  # whoever made the run says that it did not come to its end

    @property
    def detail_path(self) -> str:
        """The detail log, which exists."""
        return self.files.detail or self.files.folder

    def at(self, *keys: str) -> tuple[Where, ...]:
        """The lines of ``keys`` in the detail log; the log where there is none."""
        lines = sorted({self.detail.first[key].line for key in keys if key in self.detail.first})
        return tuple(Where(self.detail_path, line) for line in lines) or (Where(self.detail_path),)

    def text(self, key: str) -> str:
        """``key: value`` as the detail log has it."""
        entry = self.detail.first.get(key)
        return f"{key}: {entry.text[:120]}" if entry else f"no {key}"

    @property
    def is_accuracy(self) -> bool:
        """Whether the run measured accuracy."""
        return self.figures.mode == "AccuracyOnly"

    @property
    def is_performance(self) -> bool:
        """Whether the run measured performance."""
        return self.figures.mode == "PerformanceOnly"

    @property
    def absent(self) -> Severity:
        """How much it weighs that what LoadGen writes at the end is not there: nothing in a run that had no end."""
        return Severity.UNKNOWN if self.interrupted else Severity.FAIL

    @property
    def unmet(self) -> Severity:
        """How much an unmet rule weighs: nothing is wrong with a run that claims none; the open division is free."""
        if not self.rules_claimed:
            return Severity.NOTE
        return Severity.WARN if self.files.division == "open" else Severity.FAIL


def observe(
    id_: str,
    holds: bool | None,
    expected: str,
    found: str,
    where: tuple[Where, ...] = (),
    otherwise: Severity = Severity.FAIL,
) -> Observation:
    """Pass if it holds, ``otherwise`` if not, unknown if that cannot be told."""
    severity = Severity.UNKNOWN if holds is None else Severity.PASS if holds else otherwise
    return Observation(id_, severity, expected, found, where)
