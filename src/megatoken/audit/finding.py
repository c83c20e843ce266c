"""Checks with their ids, titles and reasons; the outcomes of checks; and findings, which merge equal outcomes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Generic, ParamSpec

from megatoken.audit.evidence import Where
from megatoken.text import printable

MOST_PLACES = 50
MOST_TEXTS = 5
MOST_DISTINCT = 200
LONGEST_TEXT = 300
# Findings of one severity are listed by family, the part of an id before the point, in this order.
# Within a family they follow the order in which the checks are defined.
FAMILIES = (
    *("log", "build", "settings", "result", "summary", "rules", "accuracy", "compliance", "nodes"),
    *("configuration", "system", "endpoint", "tool", "submission", "power", "run_folder", "tree"),
)
FIRST = ("run_folder.interrupted", "run_folder.simulated")  # before all others of their severity


class Severity(StrEnum):
    """How much a finding weighs, gravest first."""

    FAIL = "fail"  # a rule is broken, or the artefacts contradict themselves or LoadGen
    WARN = "warn"  # likely wrong, but an honest explanation is possible
    UNKNOWN = "unknown"  # the artefacts do not say
    NOTE = "note"  # worth knowing; nothing is wrong
    PASS = "pass"


@dataclass(frozen=True, slots=True)
class Reported:
    """What a run, or LoadGen, reports of the run itself."""

    verdict: str
    reasons: tuple[str, ...]  # the most important one first
    stability: str = ""  # of a soak: a verdict of its own

    @property
    def text(self) -> str:
        """One short printable line."""
        verdict = f"{self.verdict}, {self.stability}" if self.stability else self.verdict
        return shown(f"{verdict}: {'; '.join(self.reasons) or 'no reason given'}")


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a check found in one place."""

    severity: Severity
    expected: str
    found: str
    where: tuple[Where, ...] = ()
    fields: Mapping[str, Any] = field(default_factory=dict)  # what ``found`` says, for programs
    reported: Reported | None = None  # the same, where ``found`` is what a run or LoadGen reports


@dataclass(frozen=True, slots=True)
class Observation(Outcome):
    """An outcome with the id of its check."""

    id: str = ""


def outcome(
    holds: bool | None,
    expected: str,
    found: str,
    where: tuple[Where, ...] = (),
    otherwise: Severity = Severity.FAIL,
) -> Outcome:
    """PASS if ``holds``, ``otherwise`` if not, UNKNOWN for None."""
    severity = Severity.UNKNOWN if holds is None else Severity.PASS if holds else otherwise
    return Outcome(severity, expected, found, where)


def free_of(
    problems: Iterable[str],
    expected: str,
    otherwise: str,
    where: tuple[Where, ...] = (),
    severity: Severity = Severity.FAIL,
) -> Outcome:
    """PASS, with ``otherwise`` as what was found, unless there are problems, which are then what was found."""
    texts = list(problems)
    return outcome(not texts, expected, listed(texts, otherwise), where, severity)


Outcomes = Outcome | Iterable[Outcome] | None
Args = ParamSpec("Args")


@dataclass(frozen=True)
class Check(Generic[Args]):
    """One check. A call returns what its function found, as observations under the check's id."""

    id: str
    title: str
    why: str
    function: Callable[Args, Outcomes]
    applies: Callable[..., bool]

    def __call__(self, *args: Args.args, **kwargs: Args.kwargs) -> list[Observation]:
        """The observations of this check."""
        return self.observations(self.function(*args, **kwargs) if self.applies(*args, **kwargs) else None)

    def observations(self, outcomes: Outcomes) -> list[Observation]:
        """Outcomes that were found elsewhere, under this check's id."""
        found = () if outcomes is None else (outcomes,) if isinstance(outcomes, Outcome) else outcomes
        return [
            Observation(one.severity, one.expected, one.found, one.where, one.fields, one.reported, self.id)
            for one in found
        ]


CHECKS: dict[str, Check[...]] = {}


def check(
    id: str, title: str, why: str, when: Callable[..., bool] = lambda *_, **__: True
) -> Callable[[Callable[Args, Outcomes]], Check[Args]]:
    """Decorator: registers a function that returns one outcome, several or None.

    ``id`` is the stable name of its findings, family and name; ``why`` says why a reader should care; where ``when``
    says no, the check does not apply and finds nothing.
    """

    def register(function: Callable[Args, Outcomes]) -> Check[Args]:
        if id in CHECKS or id.partition(".")[0] not in FAMILIES:
            raise ValueError(f"check {id}: defined twice, or in no family of FAMILIES")
        CHECKS[id] = made = Check(id, title, why, function, when)
        return made

    return register


@dataclass(frozen=True, slots=True)
class Finding:
    """All observations of one check with one severity."""

    id: str
    severity: Severity
    title: str
    expected: str
    found: str
    where: tuple[Where, ...]
    why: str
    count: int
    reported: Reported | None  # of the text that ``found`` has first


@dataclass
class _Entry:
    count: int = 0
    expected: dict[str, None] = field(default_factory=dict)
    found: dict[str, int] = field(default_factory=dict)
    reported: dict[str, Reported | None] = field(default_factory=dict)  # by text of ``found``
    where: list[Where] = field(default_factory=list)


@dataclass
class Ledger:
    """Collects observations and merges them. It counts all of them and keeps a few texts and places of each check."""

    _entries: dict[tuple[str, Severity], _Entry] = field(default_factory=dict)

    def add(self, observations: Iterable[Observation]) -> None:
        """Adds observations."""
        for observation in observations:
            entry = self._entries.setdefault((observation.id, observation.severity), _Entry())
            entry.count += 1
            if len(entry.expected) < MOST_DISTINCT:
                entry.expected.setdefault(observation.expected)
            if observation.found in entry.found or len(entry.found) < MOST_DISTINCT:
                entry.found[observation.found] = entry.found.get(observation.found, 0) + 1
                entry.reported.setdefault(observation.found, observation.reported)
            entry.where.extend(observation.where[: max(0, MOST_PLACES - len(entry.where))])

    def findings(self) -> tuple[Finding, ...]:
        """Gravest first; within a severity in the order of ``FIRST``, ``FAMILIES`` and the definitions."""
        weight = {severity: rank for rank, severity in enumerate(Severity)}
        family = {name: rank for rank, name in enumerate(FAMILIES)}
        place = {id_: (id_ not in FIRST, family[id_.partition(".")[0]], rank) for rank, id_ in enumerate(CHECKS)}
        keys = sorted(self._entries, key=lambda key: (weight[key[1]], place[key[0]]))
        return tuple(self._finding(CHECKS[id_], severity, self._entries[id_, severity]) for id_, severity in keys)

    @staticmethod
    def _finding(check: Check[...], severity: Severity, entry: _Entry) -> Finding:
        expected, found = _list(dict.fromkeys(entry.expected, 1), len(entry.expected)), _list(entry.found, entry.count)
        where, reported = tuple(dict.fromkeys(entry.where)), entry.reported[_by_count(entry.found)[0]]
        return Finding(check.id, severity, check.title, expected, found, where, check.why, entry.count, reported)


def _by_count(texts: dict[str, int]) -> list[str]:
    """Most frequent first."""
    return sorted(texts, key=lambda text: -texts[text])


def _list(texts: dict[str, int], count: int) -> str:
    """Distinct texts, most frequent first, with how often each was found."""
    ordered = _by_count(texts)
    if len(ordered) == 1:
        return ordered[0] + (f" ({count} times)" if count > 1 else "")
    parts = [f"{text} ({texts[text]} times)" if texts[text] > 1 else text for text in ordered[:MOST_TEXTS]]
    if len(ordered) > MOST_TEXTS:
        parts.append(f"and {count - sum(texts[text] for text in ordered[:MOST_TEXTS])} more")
    return "; ".join(parts)


def shown(value: Any) -> str:
    """A value from an audited file as one short printable line."""
    text = value if isinstance(value, str) else repr(value)
    text = printable(text[: LONGEST_TEXT + 1])
    return text if len(text) <= LONGEST_TEXT else f"{text[:LONGEST_TEXT]}..."


def listed(problems: Iterable[str], otherwise: str) -> str:
    """All problems as one short printable line; ``otherwise`` if there are none."""
    return shown("; ".join(problems)) or otherwise


def parts(**names: Iterable[str]) -> str:
    """``missing: a, b; not allowed: c``: every group that has names, by its keyword; empty if none has."""
    return "; ".join(f"{what.replace('_', ' ')}: {', '.join(group)}" for what, group in names.items() if group)
