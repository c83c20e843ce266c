"""Recompute claimed ratios on their basis, and find what is not like for like."""

from __future__ import annotations

from dataclasses import dataclass, replace

from megatoken.analysis.comparison import Difference, Entry, differences
from megatoken.analysis.entries import published_entry
from megatoken.analysis.published import RESULTS, published_result
from megatoken.audit.evidence import Where
from megatoken.claims.facts import SYSTEM, Facts, UnknownFactError
from megatoken.claims.formula import FormulaError
from megatoken.claims.schema import Claim, Side
from megatoken.errors import UsageError
from megatoken.text import precise

BASIS_OF = {"gpu": "per_gpu", "node": "per_node", "rack": "per_rack", None: "total"}
BASIS_TEXT = {"total": "in total", "per_gpu": "per GPU", "per_node": "per node", "per_rack": "per rack"}
SIZES = ("accelerators", "accelerators per node")
SUBJECTS = ("division", "scenario", "model")
NOT_STATED = "not stated"
ARTEFACTS = "the artefacts"


@dataclass(frozen=True, slots=True)
class JudgedRatio:
    """A ratio in the unit of its claim: on the stated basis, and like for like."""

    stated_value: float
    stated_basis: str
    value: float
    formula: str
    errors: tuple[str, ...]
    reasons: tuple[str, ...]
    remarks: tuple[str, ...]
    others: tuple[tuple[str, float], ...]
    where: tuple[Where, ...]


def judge_ratio(claim: Claim, facts: Facts) -> JudgedRatio:
    """Recompute the ratio of ``claim``.

    Raises:
        UnknownFactError: the artefacts or the published results do not have a side.
        FormulaError: a side has no rate on the basis, because the file does not state its accelerators or nodes.
    """
    ratio = claim.ratio
    assert ratio is not None
    of, to = side_entry(ratio.of, facts), side_entry(ratio.to, facts)
    basis = ratio.basis or BASIS_OF[claim.scope]
    stated = _in_unit(_rate(of, basis) / _rate(to, basis), claim.unit)
    unlike = differences(of, to, basis)
    sizes = [one for one in unlike if one.field in SIZES and NOT_STATED not in (one.of, one.to)]
    subjects = [one for one in unlike if one.field in SUBJECTS and NOT_STATED not in (one.of, one.to)]
    projected = [one for one in unlike if one.field == "rack"]
    remarks = [one for one in unlike if one not in sizes and one not in subjects]
    errors, reasons = [], []
    if sizes or subjects:
        errors.append("like for like")
        reasons.append("not like for like: " + _listed([*sizes, *subjects]))
    estimates = [entry.name for entry in (of, to) if entry.state == "estimate"]
    if estimates and claim.presented_as == "measurement":
        errors.append("estimate sold as measurement")
        reasons.append(f"an estimate: {', '.join(estimates)}")
    if projected and claim.presented_as == "measurement":
        errors.append("projection sold as measurement")
        reasons.append("compares a measured rack with a projection")
    per_gpu = of.rate("per_gpu"), to.rate("per_gpu")
    value, right_basis = stated, basis
    if sizes and per_gpu[0] and per_gpu[1]:
        value, right_basis = _in_unit(per_gpu[0] / per_gpu[1], claim.unit), "per_gpu"
        reasons.append(f"per GPU it is {precise(value)} {claim.unit}".rstrip())
    others = [(f"{of.name} over {to.name}, {BASIS_TEXT[basis]}", stated)] if right_basis != basis else []
    for side in ratio.other_baselines:
        try:
            other = side_entry(side, facts)
        except UnknownFactError as error:
            reasons.append(f"not shown: {error.name}")
            continue
        against = _in_unit(_rate(of, basis) / _rate(other, basis), claim.unit)
        others.append((f"{of.name} over {other.name}, {BASIS_TEXT[basis]}", against))
        reasons.append(f"against {other.name} ({other.state}) it is {precise(against)} {claim.unit}".rstrip())
    return JudgedRatio(
        stated_value=stated,
        stated_basis=BASIS_TEXT[basis],
        value=value,
        formula=f"{of.name} over {to.name}, {BASIS_TEXT[right_basis]}",
        errors=tuple(errors),
        reasons=tuple(reasons),
        remarks=(f"different on the two sides: {_listed(remarks)}",) if remarks else (),
        others=tuple(others),
        where=tuple(_places(ratio.of, facts) + _places(ratio.to, facts)),
    )


def side_entry(side: Side, facts: Facts) -> Entry:
    """One side as an entry to compare. Raises UnknownFactError if its artefacts or published row are missing."""
    if side.published:
        submission, benchmark, scenario = side.published.split(":")
        try:
            row = published_result(submission, benchmark, scenario)
        except UsageError as error:
            raise UnknownFactError(f"a published result {side.published}", str(error)) from error
        return replace(published_entry(row), name=side.name)
    stated = {
        "division": side.division,
        "scenario": side.scenario,
        "model": side.model,
        "precision": side.precision,
        "accelerator": side.accelerator,
        "accelerators": side.accelerators,
        "nodes": side.nodes,
    }
    if side.value is not None:
        return Entry(side.name, side.source or "as claimed", side.state, side.value, **stated)  # type: ignore[arg-type]
    rates = facts.find("tokens_per_second").value
    found = {
        "division": facts.division,
        "scenario": _text(facts, "scenario"),
        "model": facts.nodes[0].model,
        "precision": _text(facts, "config.precision"),
        "accelerator": facts.accelerator,
        "accelerators": sum(row.accelerators or 0 for row in facts.nodes) or None,
        "nodes": facts.node_count,
    }
    known = {name: value if stated[name] is None else stated[name] for name, value in found.items()}
    assert isinstance(rates, tuple)
    return Entry(side.name, ARTEFACTS, side.state, sum(rates), **known)  # type: ignore[arg-type]


def _places(side: Side, facts: Facts) -> list[Where]:
    if side.published:
        return [Where(f"megatoken/data/{RESULTS}", published_result(*side.published.split(":")).line)]
    return list(facts.find("tokens_per_second").where) if side.evidence else []


def _rate(entry: Entry, basis: str) -> float:
    rate = entry.rate(basis)
    if not rate and entry.source == ARTEFACTS:
        raise UnknownFactError(f"a rate {BASIS_TEXT[basis]} of {entry.name}", SYSTEM)
    if not rate:
        raise FormulaError(
            f"ratio: {entry.name} has no rate {BASIS_TEXT[basis]}; state accelerator, accelerators, nodes, or a basis"
        )
    return rate


def _in_unit(ratio: float, unit: str) -> float:
    """The ratio itself or, for a unit of percent, by how many percent it exceeds one."""
    return (ratio - 1) * 100 if unit.startswith(("%", "percent")) else ratio


def _text(facts: Facts, name: str) -> str | None:
    fact = facts.values.get(name)
    return fact.value if fact and isinstance(fact.value, str) else None


def _listed(unlike: list[Difference]) -> str:
    return ", ".join(f"{one.field} {one.of} vs {one.to}" for one in unlike)
