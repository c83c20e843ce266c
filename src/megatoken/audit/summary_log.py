"""mlperf_log_summary.txt: labels and values as LoadGen prints them for people, with their lines."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from pathlib import Path

from megatoken.audit.reading import Damage, read_text

MOST_SUMMARY_BYTES = 2**20
RULER = "=" * 48
HEADINGS = ("MLPerf Results Summary", "Additional Stats", "Test Parameters Used")
PERMUTATION_WARNING = (
    "WARNING: sample_concatenate_permutation was set to true.",
    "Generated samples per query might be different as the one in the setting.",
    "Check the generated_samples_per_query line in the detailed log for the real",
    "samples_per_query value",
)
_FIELD = re.compile(r"\s*([^:]{1,80}?)\s*:\s?(.*)")
_RESULT_OF_EARLY_STOPPING = re.compile(r"(?:(TTFT|TPOT) )?Early Stopping Result:")
_COUNT = re.compile(
    r"(No|\d+) (warnings?|errors?) encountered(?: during test)?\.(?: See detailed log\.)?", re.IGNORECASE
)


@dataclass(frozen=True, slots=True)
class SummaryField:
    """One ``label : value`` line; the label without the blanks that align it."""

    label: str
    value: str
    line: int


@dataclass
class SummaryLog:
    """What one summary says."""

    fields: list[SummaryField] = field(default_factory=list)
    early_stopping: dict[str, tuple[str, int]] = field(default_factory=dict)  # "", TTFT, TPOT: text on one line, line
    recommendations: list[str] = field(default_factory=list)
    headings: list[str] = field(default_factory=list)
    warns_of_permutation: bool = False
    warnings: tuple[int, int] | None = None  # how many it says there were, and the line that says so
    errors: tuple[int, int] | None = None
    strange: list[Damage] = field(default_factory=list)  # lines no LoadGen prints
    damages: list[Damage] = field(default_factory=list)
    lines: int = 0

    def labels(self) -> dict[str, SummaryField]:
        """The first field of each label."""
        found: dict[str, SummaryField] = {}
        for item in self.fields:
            found.setdefault(item.label, item)
        return found


def read_summary_log(path: Path) -> SummaryLog:
    """Reads a summary. Raises UnreadableError."""
    text, damages = read_text(path, MOST_SUMMARY_BYTES)
    return parse_summary(text, damages)


def parse_summary(text: str, damages: list[Damage]) -> SummaryLog:
    """The parts of a summary's text."""
    log = SummaryLog(damages=list(damages))
    block: str | None = None  # lines that begin with a blank and a star belong to what was named before
    for number, line in enumerate(text.splitlines(), 1):
        log.lines = number
        stripped = line.strip()
        if not stripped or stripped == RULER:
            block = None
        elif block is not None and re.match(r" +(\*|\S)", line) and not _is_field(line):
            _extend(log, block, stripped, number)
        elif stripped in HEADINGS:
            log.headings.append(stripped)
        elif found := _RESULT_OF_EARLY_STOPPING.fullmatch(stripped):
            block = found.group(1) or ""
            log.early_stopping[block] = ("", number)
        elif stripped == "Recommendations:":
            block = "Recommendations"
        elif stripped in PERMUTATION_WARNING:
            log.warns_of_permutation = True
        elif count := _COUNT.fullmatch(stripped):
            value = (0 if count.group(1).lower() == "no" else int(count.group(1)[:15]), number)
            if count.group(2).lower().startswith("warning"):
                log.warnings = value
            else:
                log.errors = value
        elif stripped == "Per-query latency:":
            pass
        elif item := _FIELD.fullmatch(line):
            block = None
            log.fields.append(SummaryField(" ".join(item.group(1).split()), item.group(2), number))
        elif len(log.strange) < 20:
            log.strange.append(Damage(number, stripped[:200]))
    return log


def _is_field(line: str) -> bool:
    return line.lstrip().startswith(
        ("Performance constraints", "Min duration", "Min queries", "Early stopping satisfied")
    )


def _extend(log: SummaryLog, block: str, text: str, line: int) -> None:
    if block == "Recommendations":
        log.recommendations.append(text)
        return
    before, first_line = log.early_stopping[block]
    log.early_stopping[block] = (f"{before} {text}".strip(), first_line if before else line)
