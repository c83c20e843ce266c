"""Recompute claims from evidence: each holds, does not hold (with the right value), or cannot be determined (and why).

Finds wrong arithmetic, and also rates claimed for the wrong scope, ratios that are not like for like, and nameplate
power, projections, estimates and forecasts presented as measurements.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from graphlib import CycleError, TopologicalSorter
from itertools import product
from pathlib import Path
from typing import Any

from megatoken.analysis.comparison import Entry
from megatoken.analysis.published import accelerator_table
from megatoken.audit.evidence import Evidence, Where
from megatoken.claims.facts import POWER, Facts, FormulaError, NoResultError, UnknownFactError, Value, gather
from megatoken.claims.formula import Lookups, claims_named, computes, evaluate, recomputed_text, unit_of
from megatoken.claims.ratio import ESTIMATE, NAMEPLATE, PROJECTION, Objection, judge_ratio
from megatoken.claims.schema import BASIS_OF, Answered, Claim, ClaimsFile
from megatoken.claims.units import PLAIN, Unit, UnitsError, convert, named, parse, unchecked
from megatoken.errors import UsageError
from megatoken.text import exact

# Except "as expected" and "than projected", which describe a result.
FORECAST_WORDS = re.compile(
    r"(?<!\bas )(?<!\bthan )"
    r"\b(will|would|expect(s|ed)?|project(s|ed|ion)?|forecasts?|anticipat(es?|ed)|predict(s|ed)?|potentially)\b",
    re.I,
)
DEFAULT_FORMULAS = {
    "rack": "sum(tokens_per_second)",
    "node": "sum(tokens_per_second) / nodes",
    "gpu": "sum(tokens_per_second) / accelerators",
}
MOST_PLACES = 20
PRESENTED = {NAMEPLATE, PROJECTION, ESTIMATE}
"""Errors of which the value itself is right."""
UNCHECKED = "unit not checked: numbers in the formula have none; give them as inputs with units"
OWN_NUMBERS = "computed only from numbers of the claims file, without artefacts or published results"


@dataclass(frozen=True, slots=True)
class Recomputed:
    """The value that the evidence gives, in the unit of the claim."""

    value: float | str
    unit: str
    formula: str


@dataclass(frozen=True, slots=True)
class ClaimAnswer:
    """The answer to one claim; ``errors`` are the kinds of error found (docs/claims.md)."""

    claim: Claim
    source: str
    answer: Answered
    recomputed: Recomputed | None
    why: str
    errors: tuple[str, ...] = ()
    others: tuple[Recomputed, ...] = ()  # by other definitions, or against other baselines
    evidence_that_would_settle: tuple[str, ...] = ()
    where: tuple[Where, ...] = ()
    reason: str = ""  # the first of ``why`` against a claim that does not hold

    def to_document(self) -> dict[str, Any]:
        """Plain JSON."""
        claimed = ("value", "unit", "scope", "relation", "presented_as")
        return {
            "id": self.claim.id,
            "text": self.claim.text,
            "source": self.source,
            "answer": self.answer,
            "claimed": {name: getattr(self.claim, name) for name in claimed},
            "recomputed": asdict(self.recomputed) if self.recomputed else None,
            "others": list(map(asdict, self.others)),
            "errors": list(self.errors),
            "why": self.why,
            "reason": self.reason,
            "evidence_that_would_settle": list(self.evidence_that_would_settle),
            "where": list(map(asdict, self.where[:MOST_PLACES])),
        }


def judge_files(files: Mapping[Path, ClaimsFile], evidence: Evidence | None) -> list[ClaimAnswer]:
    """Answer the claims of several files. Raises as ``judge``, with the name of the file."""
    answers = []
    for file, claims in files.items():
        try:
            answers += judge(claims, evidence)
        except UsageError as error:
            raise UsageError(f"{file}: {error}") from error
    return answers


def judge(claims: ClaimsFile, evidence: Evidence | None) -> list[ClaimAnswer]:
    """Answer every claim, in the order of the file; without evidence from published results and the file alone.

    Raises UsageError: a formula or ratio is malformed, claims use each other in a circle, or ``runs`` matches nothing.
    """
    facts = gather(evidence, claims.runs)
    by_id = {claim.id: claim for claim in claims.claims}
    answers: dict[str, ClaimAnswer] = {}
    for name in _in_order(by_id):
        claim = by_id[name]
        source = "; ".join(filter(None, (claims.source, claim.source)))
        with _named(claim):
            answers[name] = _answer(claim, source, facts, by_id, answers)
    return [answers[name] for name in by_id]


def _in_order(claims: Mapping[str, Claim]) -> list[str]:
    """The ids, those that a formula uses before the claims that use them. Raises UsageError."""
    used: dict[str, set[str]] = {}
    for name, claim in claims.items():
        with _named(claim):
            used[name] = set().union(*map(claims_named, _formulas(claim).values())) & claims.keys()
    try:
        return list(TopologicalSorter(used).static_order())
    except CycleError as error:
        circle = " -> ".join(reversed(error.args[1]))
        raise UsageError(
            f"claim {error.args[1][0]} is computed from itself ({circle}); give it another formula"
        ) from None


@contextmanager
def _named(claim: Claim) -> Iterator[None]:
    try:
        yield
    except UsageError as error:
        raise UsageError(f"claim {claim.id}: {error}") from error


def _formulas(claim: Claim) -> dict[str, str]:
    """Formulas by name of the definition; a single formula has the name ''."""
    formula = claim.formula
    if formula is None:
        formula = DEFAULT_FORMULAS[str(claim.scope)] if claim.is_plain_rate else {}
    return formula if isinstance(formula, dict) else {"": formula}


def _answer(
    claim: Claim, source: str, facts: Facts, claims: Mapping[str, Claim], answers: Mapping[str, ClaimAnswer]
) -> ClaimAnswer:
    """``answers``: of the claims that its formula uses."""
    try:
        if claim.presented_as == "forecast":
            settle = claim.settle or ["a measurement, when one exists"]
            return _unknown(claim, source, "a forecast, not a measurement", settle)
        if claim.ratio is not None:
            return _ratio(claim, source, facts)
        if claim.formula is None and not claim.is_plain_rate:
            return _unknown(claim, source, "the artefacts contain nothing about it", claim.settle)
        return _recomputed(claim, source, facts, claims, answers)
    except UnknownFactError as error:
        return _unknown(claim, source, f"not shown: {error.name}", (error.settle, *claim.settle))
    except NoResultError as error:
        return _unknown(claim, source, str(error), ("artefacts for which the formula has a result", *claim.settle))
    except UnitsError as error:
        claimed = f", and the claim is in {claim.unit}" if claim.unit else ""
        wanted = f"a formula that gives {claim.unit}" if claim.unit else "a formula whose units fit"
        return _unknown(claim, source, f"{error}{claimed}; correct the unit or the formula", (wanted, *claim.settle))


def _recomputed(
    claim: Claim, source: str, facts: Facts, claims: Mapping[str, Claim], answers: Mapping[str, ClaimAnswer]
) -> ClaimAnswer:
    results: dict[str, tuple[Recomputed, Lookups]] = {}
    unknown: list[UnknownFactError | NoResultError | UnitsError] = []
    for name, formula in _formulas(claim).items():
        lookups = Lookups(claim, facts, claims)
        try:
            value = _in_its_unit(claim, _single(evaluate(formula, lookups)), unit_of(formula, lookups), lookups)
            _inherit(lookups, [answers[used] for used in sorted(claims_named(formula))])
        except (UnknownFactError, NoResultError, UnitsError) as error:
            if isinstance(error, NoResultError) and not lookups.uses_evidence:
                raise FormulaError(f"{error}; correct the formula") from error
            unknown.append(error)
            continue
        results[name] = (Recomputed(value, claim.unit, f"{name}: {formula}" if name else formula), lookups)
    agreeing = [name for name, (result, _) in results.items() if agrees(claim, result.value)]
    if unknown and not agreeing:
        raise unknown[0]
    chosen = agreeing[0] if agreeing else next(iter(results))
    best, lookups = results[chosen]
    others = {name: result for name, (result, _) in results.items() if name != chosen}
    objections = list(_presentation(claim, lookups))
    wrong_scope = scope_error(claim, facts, lookups)
    if wrong_scope:
        objections.insert(0, ("scope", wrong_scope))
    elif not agreeing:
        by_any = " by any definition" if others else ""
        kind = "arithmetic" if any(map(computes, _formulas(claim).values())) else "fact"
        what = f"not {_claimed(claim)}{by_any}: recomputed {_amount(best, claim)}{_figure_of_another(claim, lookups)}"
        objections.insert(0, (kind, what))
    largest = max((row.output_tokens_per_second for row in facts.nodes), default=0.0)
    if claim.one_run and lookups.uses_rates and not agrees(claim, largest / (claim.tokens_per_second or 1)):
        runs = f"the sum of {len(facts.nodes)} runs, each with its own LoadGen"
        objections.insert(0, ("scope", f"{runs}; the largest single run has {exact(largest)} tokens/s"))
    remarks = []
    if others:
        alternatives = "; ".join(f"{name}: {_amount(result, claim)}" for name, result in others.items())
        remarks.append(f"that is by the definition {chosen!r}; others give {alternatives}")
    if not lookups.uses_evidence:
        remarks.append(OWN_NUMBERS)
    if lookups.uses_rates and claim.scope == "rack" and facts.sum_label:
        remarks.append(facts.sum_label)
    where = tuple(dict.fromkeys(place for _, one in results.values() for place in one.where))
    settle = (POWER,) if lookups.nameplate and claim.presented_as == "measurement" else ()
    why = "; ".join([*remarks, *lookups.conditions])
    answer = ClaimAnswer(claim, source, "holds", best, why, (), tuple(others.values()), settle, where)
    return _objected(answer, _amount(best, claim), objections)


def _inherit(lookups: Lookups, used: Sequence[ClaimAnswer]) -> None:
    """A claim that uses others is no better than they are. Raises UnknownFactError: one of them is wrong or unknown."""
    for one in used:
        name = f"claim {one.claim.id}"
        if set(one.errors) - PRESENTED or one.answer == "cannot be determined":
            raise UnknownFactError(f"{name}, which {one.answer}", f"a value for {name} that holds")
        if one.claim.presented_as == "nameplate" or NAMEPLATE in one.errors:
            lookups.nameplate.setdefault(f"{name} is nameplate")
        if one.claim.presented_as == "estimate" or ESTIMATE in one.errors:
            lookups.estimates.append(f"{name} is an estimate")
        if PROJECTION in one.errors:
            lookups.projections.append(f"{name} is a projection")


def _in_its_unit(claim: Claim, value: float | str, unit: Unit | None, lookups: Lookups) -> float | str:
    """A result, which is in ``unit``, in the unit of its claim. Raises UnitsError: the units do not fit."""
    if isinstance(value, float) and isinstance(claim.value, str):
        what = "is text, and the formula gives a number"
        raise FormulaError(f"value {claim.value!r} {what}; write a number, and what it counts as unit")
    if isinstance(value, str) or not claim.is_number:
        return value
    claimed = parse(claim.unit)
    if claim.unit and claimed is None and unit and unit.dimensions != PLAIN and not unit.open:
        raise UnitsError(f"the unit is not known; the formula gives {unit}")
    values = convert(value, unit, claimed)
    if len({agrees(claim, one) for one in values}) > 1:
        raise UnitsError(f"the formula gives {unit}, or what its own numbers convert them to")
    if claim.unit and unchecked(unit, claimed):
        lookups.conditions.setdefault(UNCHECKED)
    return values[-1]


def _figure_of_another(claim: Claim, lookups: Lookups) -> str:
    """The accelerators whose figure the claimed one is."""
    names: dict[str, None] = {}
    for column, (name, facts) in product(lookups.columns, accelerator_table().items()):
        with suppress(KeyError, UnitsError):  # of a column without the figure, or that only enters the calculation
            if agrees(claim, convert(facts.values[column], named(column), parse(claim.unit))[0]):
                names.setdefault(name)
    return f"; that is the figure of {', '.join(names)}" if names else ""


def _objected(answer: ClaimAnswer, amount: str, objections: Sequence[Objection]) -> ClaimAnswer:
    """The answer with the objections to it: a claim does not hold if one of them names an error."""
    errors = tuple(error for error, _ in objections if error)
    against = [reason for _, reason in objections if reason]
    why = "; ".join(filter(None, ("" if errors else f"recomputed {amount}", *against, answer.why)))
    holds: Answered = "does not hold" if errors else "holds"
    return replace(answer, answer=holds, why=why, errors=errors, reason=against[0] if errors else "")


def _presentation(claim: Claim, lookups: Lookups) -> Iterator[Objection]:
    """Values presented as what they are not."""
    if claim.presented_as == "measurement":
        if lookups.nameplate:
            names = "; ".join(lookups.nameplate)
            yield NAMEPLATE, f"uses nameplate power, not measured power: {names}"
        if lookups.projections:
            yield PROJECTION, "; ".join(lookups.projections)
        if lookups.estimates:
            yield ESTIMATE, "; ".join(lookups.estimates)
    yield from _forecast(claim)
    if claim.counts_users and not lookups.uses_time:
        why = "a rate does not give the number of users at one time without the time of each (Little's law)"
        yield "rate sold as concurrency", why


def _ratio(claim: Claim, source: str, facts: Facts) -> ClaimAnswer:
    judged = judge_ratio(claim, facts)
    others = tuple(Recomputed(value, claim.unit, formula) for formula, value in judged.others)
    best = Recomputed(judged.value, claim.unit, judged.formula)
    objections = [*judged.objections, *_forecast(claim)]
    found = " ".join(filter(None, (recomputed_text(judged.stated_value, claim.value), claim.unit, judged.stated_basis)))
    if not agrees(claim, judged.stated_value):
        objections = [("", f"not {_claimed(claim)}: {found}"), *objections, ("arithmetic", "")]
    remarks = [] if judged.where else [OWN_NUMBERS]
    if claim.ratio and claim.ratio.of.evidence and facts.sum_label:
        remarks.append(f"{claim.ratio.of.name}: {facts.sum_label}")
    why = "; ".join([*remarks, *judged.remarks])
    answer = ClaimAnswer(claim, source, "holds", best, why, (), others, where=judged.where)
    return _objected(answer, found, objections)


def _forecast(claim: Claim) -> Iterator[Objection]:
    """Words about the future; an error only if the file presents the claim as a measurement."""
    if claim.presented_as != "measurement" or not FORECAST_WORDS.search(claim.text):
        return
    called = "presented_as" in claim.model_fields_set
    unsaid = "" if called else ", and the claims file does not say presented_as: measurement or forecast"
    yield "forecast sold as measurement" if called else "", f"the text is about the future{unsaid}"


def _unknown(claim: Claim, source: str, why: str, settle: Sequence[str]) -> ClaimAnswer:
    return ClaimAnswer(claim, source, "cannot be determined", None, why, evidence_that_would_settle=tuple(settle))


def agrees(claim: Claim, value: float | str) -> bool:
    """Whether ``value`` agrees with the claim: within half a step of its last digit, its bound, or equal text."""
    claimed = _text(claim.value) if isinstance(claim.value, bool) else claim.value
    if isinstance(claimed, str) or isinstance(value, str):
        return str(claimed).casefold() == str(value).casefold()
    margin = abs(claimed) * 1e-12
    if claim.relation == "equal" or claim.rounded_to is not None:
        margin += claim.tolerance * (1 + 1e-9)
    if claim.relation == "at least":
        return value >= claimed - margin
    if claim.relation == "at most":
        return value <= claimed + margin
    return abs(value - claimed) <= margin


def _amount(result: Recomputed, claim: Claim) -> str:
    return f"{recomputed_text(result.value, claim.value)} {result.unit}".rstrip()


def _claimed(claim: Claim) -> str:
    relation = "" if claim.relation == "equal" else f"{claim.relation} "
    value = exact(claim.value) if isinstance(claim.value, float) else _text(claim.value)
    return f"{relation}{value} {claim.unit}".rstrip()


def _text(value: bool | str) -> str:
    return value if isinstance(value, str) else "yes" if value else "no"


def _single(value: Value) -> float | str:
    if isinstance(value, tuple):
        if len(set(value)) > 1:
            raise FormulaError("the result is a list of different values; use sum, max, min, mean or median")
        return value[0]
    return value


NAMES = {"gpu": "one GPU", "node": "one node", "rack": "the rack"}
CLOSE_BELOW = 0.9

Ranges = dict[str, tuple[float, float]]


def scope_error(claim: Claim, facts: Facts, lookups: Lookups) -> str | None:
    """A sentence that names the scope whose rate is claimed; None if the rate fits its own scope, or no scope."""
    unit = claim.tokens_per_second
    if unit is None or claim.scope is None or not isinstance(claim.value, float):
        return None
    for origin, ranges in [
        ("the artefacts", _of_artefacts(facts)),
        *((entry.name, _of_entry(entry)) for entry in lookups.published),
    ]:
        own = ranges.get(claim.scope)
        if own is None or _fits(claim, own, unit):
            continue
        for scope, other in ranges.items():
            if scope != claim.scope and _fits(claim, other, unit):
                did = f"{exact(claim.value)} {claim.unit} is the rate of {NAMES[scope]} in {origin}"
                return f"{did}, not of {NAMES[claim.scope]}, which has {_range(own)}"
    return None


def _of_artefacts(facts: Facts) -> Ranges:
    rates = [row.output_tokens_per_second for row in facts.nodes]
    if not rates:
        return {}
    total = math.fsum(rates)
    nodes = facts.node_count or len(rates)
    each = rates if len(rates) > 1 else [total / nodes]  # a single run may cover several nodes
    ranges = {"rack": (total, total), "node": (min(each), max(each))}
    accelerators = sum(row.accelerators or 0 for row in facts.nodes)
    if accelerators:
        ranges["gpu"] = (min(each) * nodes / accelerators, max(each) * nodes / accelerators)
    return ranges


def _of_entry(entry: Entry) -> Ranges:
    rates = {scope: entry.rate(basis) for scope, basis in BASIS_OF.items()}
    return {scope: (rate, rate) for scope, rate in rates.items() if rate is not None}


def _fits(claim: Claim, bounds: tuple[float, float], unit: float) -> bool:
    low, high = (rate / unit for rate in bounds)
    value = claim.value
    assert isinstance(value, float)
    margin = max(claim.tolerance, 1e-9 * abs(value))
    if claim.relation == "equal":
        return low - margin <= value <= high + margin
    if claim.relation == "at least":
        return high * CLOSE_BELOW <= value <= high + margin
    return low - margin <= value <= low / CLOSE_BELOW


def _range(bounds: tuple[float, float]) -> str:
    low, high = bounds
    return f"{low:,.1f} tokens/s" if high - low < 0.05 else f"{low:,.1f} to {high:,.1f} tokens/s"
