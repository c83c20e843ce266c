"""Plain English: words that a reader of English as a second language would stumble over stay out of code and docs."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
# Each word with what to write instead.
UNUSUAL = {
    "told": "reported",
    "tell": "report",
    "tells": "reports",
    "tell of": "report",
    "mend": "fix",
    "mends": "fixes",
    "mended": "fixed",
    "nobody": "no user, no process, ...: name the actor",
    "whoever": "the caller, the reader, ...: name the actor",
    "somebody": "a user, a third party, ...: name the actor",
    "anew": "again, rebuild, recompute",
    "likewise": "also, or say it again",
    "beside": "next to, with, in addition to",
}
# CANNOT TELL is the answer to a limit that a run does not decide.
WORD = re.compile(rf"(?<![.\w-])(?<!CANNOT )({'|'.join(UNUSUAL)})(?![\w-])", re.IGNORECASE)
CODE = {".py", ".cpp", ".h", ".cu", ".cuh", ".css", ".js", ".html", ".json", ".md", ".yaml"}


def texts() -> list[Path]:
    sources = [path for path in (ROOT / "src/megatoken").rglob("*") if path.suffix in CODE]
    return [*sources, *(ROOT / "docs").glob("*.md"), ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "dev"]


def unusual_words(text: str) -> list[str]:
    return [
        f"{number}: '{found.group(1)}': write {UNUSUAL[found.group(1).lower()]}"
        for number, line in enumerate(text.splitlines(), 1)
        for found in WORD.finditer(line)
    ]


@pytest.mark.parametrize("path", texts(), ids=lambda path: str(path.relative_to(ROOT)))
def test_words_are_plain(path: Path) -> None:
    assert not unusual_words(path.read_text(encoding="utf-8"))


def test_an_unusual_word_is_found_and_explained() -> None:
    assert unusual_words("x = file.tell()\n# Nobody reads this") == [
        "2: 'Nobody': write no user, no process, ...: name the actor"
    ]
