"""mlperf_log_summary.txt: the labels and values that LoadGen prints for people, with their lines."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from pathlib import Path

from megatoken.files import Damage, read_text

MOST_SUMMARY_BYTES = 2**20
RECOMMENDATIONS = "Recommendations"
RULER = "=" * 48
HEADINGS = ("MLPerf Results Summary", "Additional Stats", "Test Parameters Used")
PERMUTATION_WARNING = (
    "WARNING: sample_concatenate_permutation was set to true.",
    "Generated samples per query might be different as the one in the setting.",
    "Check the generated_samples_per_query line in the detailed log for the real",
    "samples_per_query value",
)
LONGEST_LINE = 2_000
LONGEST_LABEL = 80
MOST_FIELDS = 500
MOST_STRANGE = 20
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
    """What one summary holds."""

    fields: list[SummaryField] = field(default_factory=list)
    early_stopping: dict[str, tuple[str, int]] = field(default_factory=dict)  # "", TTFT, TPOT: text on one line, line
    headings: list[str] = field(default_factory=list)
    rulers: int = 0
    recommendations: tuple[str, int] | None = None  # text on one line, line
    carriage_returns: int = 0  # lines that end in CR LF
    warns_of_permutation: bool = False
    warnings: tuple[int, int] | None = None  # the number it states, and the line that states it
    errors: tuple[int, int] | None = None  # as warnings
    strange: list[Damage] = field(default_factory=list)  # lines that LoadGen does not print
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
    for number, line in enumerate(text.split("\n"), 1):
        stripped = line.strip()
        if stripped:
            log.lines = number
        log.carriage_returns += line.endswith("\r")
        log.rulers += stripped == RULER
        if len(line) > LONGEST_LINE:
            _strange(log, number, stripped)
        elif not stripped or stripped == RULER:
            block = None
        elif block is not None and re.match(r" +(\*|\S)", line) and not _is_field(line):
            _extend(log, block, stripped, number)
        elif stripped in HEADINGS:
            log.headings.append(stripped)
        elif found := _RESULT_OF_EARLY_STOPPING.fullmatch(stripped):
            block = found.group(1) or ""
            log.early_stopping[block] = ("", number)
        elif stripped == f"{RECOMMENDATIONS}:":
            block = RECOMMENDATIONS
            log.recommendations = log.recommendations or ("", number)
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
        elif 0 < stripped.find(":") <= LONGEST_LABEL and len(log.fields) < MOST_FIELDS:
            block = None
            label, _, value_text = stripped.partition(":")
            log.fields.append(SummaryField(" ".join(label.split()), value_text.strip(), number))
        else:
            _strange(log, number, stripped)
    return log


def _strange(log: SummaryLog, line: int, text: str) -> None:
    if len(log.strange) < MOST_STRANGE:
        log.strange.append(Damage(line, text[:200]))


def _is_field(line: str) -> bool:
    return line.lstrip().startswith(
        ("Performance constraints", "Min duration", "Min queries", "Early stopping satisfied")
    )


def _extend(log: SummaryLog, block: str, text: str, line: int) -> None:
    """Adds a line to a block."""
    before, first_line = (log.recommendations or ("", line)) if block == RECOMMENDATIONS else log.early_stopping[block]
    if len(before) < LONGEST_LINE:
        extended = (f"{before} {text}".strip(), first_line if before else line)
        if block == RECOMMENDATIONS:
            log.recommendations = extended
        else:
            log.early_stopping[block] = extended
