"""What an audit says: observations of checks on single runs, merged into findings over all of them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from megatoken.audit.catalog import CHECKS
from megatoken.audit.evidence import Where

MOST_PLACES = 50
MOST_TEXTS = 5
MOST_DISTINCT = 200
LONGEST_TEXT = 300


class Severity(StrEnum):
    """How much a finding weighs, gravest first."""

    FAIL = "fail"  # a rule is broken, or the artefacts contradict themselves or LoadGen
    WARN = "warn"  # likely wrong, with an honest explanation possible
    UNKNOWN = "unknown"  # cannot be determined from what is there
    NOTE = "note"  # worth knowing; nothing is wrong
    PASS = "pass"


@dataclass(frozen=True, slots=True)
class Observation:
    """One check of one thing."""

    id: str
    severity: Severity
    expected: str
    found: str
    where: tuple[Where, ...] = ()


@dataclass(frozen=True, slots=True)
class Finding:
    """All observations of one check that weigh the same."""

    id: str
    severity: Severity
    title: str
    expected: str
    found: str
    where: tuple[Where, ...]
    why: str
    count: int

    def to_document(self) -> dict[str, Any]:
        """Plain JSON."""
        return {
            "id": self.id,
            "severity": str(self.severity),
            "title": self.title,
            "expected": self.expected,
            "found": self.found,
            "where": [place.to_document() for place in self.where],
            "why": self.why,
            "count": self.count,
        }


@dataclass
class Ledger:
    """Collects observations and merges them; keeps few texts and places of each, and counts all."""

    _entries: dict[tuple[str, Severity], _Entry] = field(default_factory=dict)

    def add(self, observations: Iterable[Observation]) -> None:
        """Takes observations in; the order of the first of each check is kept."""
        for observation in observations:
            entry = self._entries.setdefault((observation.id, observation.severity), _Entry())
            entry.count += 1
            if len(entry.expected) < MOST_DISTINCT:
                entry.expected.setdefault(observation.expected)
            if observation.found in entry.found or len(entry.found) < MOST_DISTINCT:
                entry.found[observation.found] = entry.found.get(observation.found, 0) + 1
            entry.where.extend(observation.where[: max(0, MOST_PLACES - len(entry.where))])

    def findings(self) -> tuple[Finding, ...]:
        """Gravest first; within a severity in the order of the catalogue."""
        weight = {severity: rank for rank, severity in enumerate(Severity)}
        place = {id_: rank for rank, id_ in enumerate(CHECKS)}
        keys = sorted(self._entries, key=lambda key: (weight[key[1]], place[key[0]]))
        return tuple(self._finding(id_, severity, self._entries[id_, severity]) for id_, severity in keys)

    @staticmethod
    def _finding(id_: str, severity: Severity, entry: _Entry) -> Finding:
        check = CHECKS[id_]
        return Finding(
            id=id_,
            severity=severity,
            title=check.title,
            expected=_list(dict.fromkeys(entry.expected, 1), len(entry.expected)),
            found=_list(entry.found, entry.count),
            where=tuple(dict.fromkeys(entry.where)),
            why=check.why,
            count=entry.count,
        )


@dataclass
class _Entry:
    count: int = 0
    expected: dict[str, None] = field(default_factory=dict)
    found: dict[str, int] = field(default_factory=dict)
    where: list[Where] = field(default_factory=list)


def _list(texts: dict[str, int], count: int) -> str:
    """Distinct texts, most frequent first, each with how often it was said if that tells anything."""
    ordered = sorted(texts, key=lambda text: -texts[text])
    if len(ordered) == 1:
        return ordered[0] + (f" ({count} times)" if count > 1 else "")
    parts = [f"{text} ({texts[text]} times)" if texts[text] > 1 else text for text in ordered[:MOST_TEXTS]]
    if len(ordered) > MOST_TEXTS:
        parts.append(f"and {count - sum(texts[text] for text in ordered[:MOST_TEXTS])} more")
    return "; ".join(parts)


def shown(value: Any) -> str:
    """A value out of somebody's file as one short printable line."""
    text = value if isinstance(value, str) else repr(value)
    text = "".join(
        character if character.isprintable() else character.encode("unicode_escape", "backslashreplace").decode()
        for character in text[: LONGEST_TEXT + 1]
    )
    return text if len(text) <= LONGEST_TEXT else f"{text[:LONGEST_TEXT]}..."
