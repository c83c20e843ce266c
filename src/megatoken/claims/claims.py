"""Claims recomputed from evidence: each holds, does not hold (with the right value), or cannot be determined (and why).

Beside the arithmetic these errors are found: a number of one scope given to another, ratios that do not compare like
with like, nameplate power sold as measured, forecasts and projections sold as measurements, rates sold as users.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from graphlib import CycleError, TopologicalSorter
from typing import Any

from megatoken.audit.evidence import Evidence, Where
from megatoken.claims.facts import POWER, Facts, UnknownFactError, gather
from megatoken.claims.formula import FormulaError, NoResultError, Value, beside, claims_named, evaluate, exact
from megatoken.claims.lookups import Lookups
from megatoken.claims.ratio import judge_ratio
from megatoken.claims.schema import Answered, Claim, ClaimsFile, load_claims
from megatoken.claims.scope import scope_error
from megatoken.errors import UsageError

__all__ = ["ClaimAnswer", "Recomputed", "judge", "load_claims"]

# "As expected" and "than projected" speak of what was found.
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
OWN_NUMBERS = "from numbers of the claims file alone: no artefact or published result was asked"


@dataclass(frozen=True, slots=True)
class Recomputed:
    """What the evidence gives, in the unit of the claim."""

    value: float | str
    unit: str
    formula: str

    def to_document(self) -> dict[str, Any]:
        """Plain JSON."""
        return {"value": self.value, "unit": self.unit, "formula": self.formula}


@dataclass(frozen=True, slots=True)
class ClaimAnswer:
    """One claim and what the evidence says of it; ``errors`` are the kinds of error in it, in words."""

    claim: Claim
    source: str
    answer: Answered
    recomputed: Recomputed | None
    why: str
    errors: tuple[str, ...] = ()
    others: tuple[Recomputed, ...] = ()  # by other definitions or against other baselines
    evidence_that_would_settle: tuple[str, ...] = ()
    where: tuple[Where, ...] = ()

    def to_document(self) -> dict[str, Any]:
        """Plain JSON."""
        claim = self.claim
        return {
            "id": claim.id,
            "text": claim.text,
            "source": self.source,
            "answer": self.answer,
            "claimed": {
                "value": claim.value,
                "unit": claim.unit,
                "scope": claim.scope,
                "relation": claim.relation,
                "presented_as": claim.presented_as,
            },
            "recomputed": self.recomputed.to_document() if self.recomputed else None,
            "others": [other.to_document() for other in self.others],
            "errors": list(self.errors),
            "why": self.why,
            "evidence_that_would_settle": list(self.evidence_that_would_settle),
            "where": [where.to_document() for where in self.where[:MOST_PLACES]],
        }


def judge(claims: ClaimsFile, evidence: Evidence | None) -> list[ClaimAnswer]:
    """Answer every claim, in the order of the file.

    Args:
        claims: from ``load_claims``.
        evidence: what an audit read; None leaves the published table and what the claims state themselves.

    Raises:
        UsageError: a formula or ratio is wrong in itself, claims rest on each other, or ``runs`` matches nothing.
    """
    facts = gather(evidence, claims.runs)
    by_id = {claim.id: claim for claim in claims.claims}
    answers = []
    rests_on: dict[str, set[str]] = {}
    for claim in claims.claims:
        source = "; ".join(filter(None, (claims.source, claim.source)))
        try:
            answers.append(_answer(claim, source, facts, by_id))
            rests_on[claim.id] = set().union(*map(claims_named, _formulas(claim).values()))
        except UsageError as error:
            raise UsageError(f"claim {claim.id}: {error}") from error
    try:
        TopologicalSorter(rests_on).prepare()
    except CycleError as error:
        circle = " -> ".join(reversed(error.args[1]))
        raise UsageError(f"claim {error.args[1][0]} rests on itself ({circle}); give it a formula of its own") from None
    return answers


def _formulas(claim: Claim) -> dict[str, str]:
    """By definition; without a name where there is one alone."""
    formula = claim.formula
    if formula is None:
        formula = DEFAULT_FORMULAS[str(claim.scope)] if claim.is_plain_rate else {}
    return formula if isinstance(formula, dict) else {"": formula}


def _answer(claim: Claim, source: str, facts: Facts, claims: Mapping[str, Claim]) -> ClaimAnswer:
    try:
        if claim.presented_as == "forecast":
            settle = claim.settle or ["a measurement once there is something to measure"]
            return _undetermined(claim, source, "a forecast, not a measurement", settle)
        if claim.ratio is not None:
            return _ratio(claim, source, facts)
        if claim.formula is None and not claim.is_plain_rate:
            return _undetermined(claim, source, "nothing in the artefacts bears on it", claim.settle)
        return _recomputed(claim, source, facts, claims)
    except UnknownFactError as error:
        return _undetermined(claim, source, f"not shown: {error.name}", (error.settle, *claim.settle))
    except NoResultError as error:
        settle = ["artefacts whose figures give the formula a result", *claim.settle]
        return _undetermined(claim, source, str(error), settle)


def _recomputed(claim: Claim, source: str, facts: Facts, claims: Mapping[str, Claim]) -> ClaimAnswer:
    results: dict[str, tuple[Recomputed, Lookups]] = {}
    unknown: list[UnknownFactError | NoResultError] = []
    for name, formula in _formulas(claim).items():
        lookups = Lookups(claim, facts, claims)
        try:
            value = _single(evaluate(formula, lookups))
        except (UnknownFactError, NoResultError) as error:
            if isinstance(error, NoResultError) and not lookups.shown_elsewhere:
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
    errors, reasons = _sold_as_what_it_is_not(claim, lookups)
    wrong_scope = scope_error(claim, facts, lookups)
    if wrong_scope:
        errors.insert(0, "scope")
        reasons.insert(0, wrong_scope)
    elif not agreeing:
        errors.insert(0, "arithmetic" if claim.is_number and not isinstance(best.value, str) else "fact")
        by_any = " by any definition" if others else ""
        reasons.insert(0, f"not {_claimed(claim)}{by_any}: recomputed {_amount(best, claim)}")
    if not errors:
        reasons.insert(0, f"recomputed {_amount(best, claim)}")
    if others:
        alternatives = "; ".join(f"{name}: {_amount(result, claim)}" for name, result in others.items())
        reasons.append(f"that is by the definition {chosen!r}; others give {alternatives}")
    if not lookups.shown_elsewhere:
        reasons.append(OWN_NUMBERS)
    if lookups.uses_rates and claim.scope == "rack" and facts.sum_label:
        reasons.append(facts.sum_label)
    return ClaimAnswer(
        claim=claim,
        source=source,
        answer="does not hold" if errors else "holds",
        recomputed=best,
        why="; ".join([*reasons, *lookups.conditions]),
        errors=tuple(errors),
        others=tuple(others.values()),
        evidence_that_would_settle=(POWER,) if "nameplate sold as measured" in errors else (),
        where=tuple(dict.fromkeys(place for _, one in results.values() for place in one.where)),
    )


def _sold_as_what_it_is_not(claim: Claim, lookups: Lookups) -> tuple[list[str], list[str]]:
    errors, reasons = [], []
    if claim.presented_as == "measurement":
        if lookups.nameplate:
            errors.append("nameplate sold as measured")
            reasons.append(f"rests on nameplate power, not on measured power: {'; '.join(lookups.nameplate)}")
        if lookups.projections:
            errors.append("projection sold as measurement")
            reasons.append("; ".join(lookups.projections))
        if lookups.estimates:
            errors.append("estimate sold as measurement")
            reasons.append("; ".join(lookups.estimates))
    errors += _forecast(claim)
    reasons += _future_words(claim)
    if claim.counts_users and not lookups.uses_time:
        errors.append("rate sold as concurrency")
        reasons.append("a rate is not a number of users at once: that needs the time each one stays (Little's law)")
    return errors, reasons


def _ratio(claim: Claim, source: str, facts: Facts) -> ClaimAnswer:
    judged = judge_ratio(claim, facts)
    others = tuple(Recomputed(value, claim.unit, formula) for formula, value in judged.others)
    right = Recomputed(judged.value, claim.unit, judged.formula)
    errors = [*judged.errors, *_forecast(claim)]
    reasons = [*judged.reasons, *_future_words(claim)]
    found = " ".join(filter(None, (beside(judged.stated_value, claim.value), claim.unit, judged.stated_basis)))
    if not agrees(claim, judged.stated_value):
        errors.append("arithmetic")
        reasons.insert(0, f"not {_claimed(claim)}: {found}")
    if not errors:
        reasons.insert(0, f"recomputed {found}")
    answer: Answered = "does not hold" if errors else "holds"
    if not judged.where:
        reasons.append(OWN_NUMBERS)
    if claim.ratio and claim.ratio.of.evidence and facts.sum_label:
        reasons.append(f"{claim.ratio.of.name}: {facts.sum_label}")
    why = "; ".join([*reasons, *judged.remarks])
    return ClaimAnswer(claim, source, answer, right, why, tuple(errors), others, where=judged.where)


def _forecast(claim: Claim) -> list[str]:
    """The error of words about what is to come in a claim that its file itself calls a measurement."""
    called = claim.presented_as == "measurement" and "presented_as" in claim.model_fields_set
    return ["forecast sold as measurement"] if called and FORECAST_WORDS.search(claim.text) else []


def _future_words(claim: Claim) -> list[str]:
    """A remark on such words; where the file does not say what the claim is presented as, they decide nothing."""
    if claim.presented_as != "measurement" or not FORECAST_WORDS.search(claim.text):
        return []
    unsaid = "" if _forecast(claim) else ", and the claims file does not say presented_as: measurement or forecast"
    return [f"its words speak of what is to come{unsaid}"]


def _undetermined(claim: Claim, source: str, why: str, settle: Sequence[str]) -> ClaimAnswer:
    return ClaimAnswer(claim, source, "cannot be determined", None, why, evidence_that_would_settle=tuple(settle))


def agrees(claim: Claim, value: float | str) -> bool:
    """Whether ``value`` is what is claimed: within half a step of its last digit, beyond a bound, or the same text."""
    claimed = ("yes" if claim.value else "no") if isinstance(claim.value, bool) else claim.value
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
    return f"{beside(result.value, claim.value)} {result.unit}".rstrip()


def _claimed(claim: Claim) -> str:
    relation = "" if claim.relation == "equal" else f"{claim.relation} "
    yes_or_text = claim.value if isinstance(claim.value, str) else "yes" if claim.value else "no"
    value = exact(claim.value) if isinstance(claim.value, float) else yes_or_text
    return f"{relation}{value} {claim.unit}".rstrip()


def _single(value: Value) -> float | str:
    if isinstance(value, tuple):
        if len(set(value)) > 1:
            raise FormulaError("gives a list of different values; sum, max, min, mean or median makes one of it")
        return value[0]
    return value
