"""Recompute claimed ratios on their basis, and find what is not like for like."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from typing import Any

from megatoken.analysis.comparison import Difference, Entry, differences
from megatoken.analysis.entries import published_entry
from megatoken.analysis.published import published_result
from megatoken.audit.evidence import Where
from megatoken.claims.facts import SYSTEM, Facts, FormulaError, UnknownFactError
from megatoken.claims.schema import BASIS_OF, Claim, Side
from megatoken.claims.units import UnitsError, plain_text
from megatoken.errors import UsageError
from megatoken.text import precise

BASIS_TEXT = {"total": "in total", "per_gpu": "per GPU", "per_node": "per node", "per_rack": "per rack"}
SIZES = ("accelerators", "accelerators per node")
SUBJECTS = ("division", "scenario", "model")
DESCRIBED = (*SUBJECTS, "precision", "accelerator", "accelerators", "nodes")  # of a side and of an entry
NOT_STATED = "not stated"
ARTEFACTS = "the artefacts"


Objection = tuple[str, str]  # the kind of error, empty if it is none; and the reason
NAMEPLATE = "nameplate sold as measured"
PROJECTION = "projection sold as measurement"
ESTIMATE = "estimate sold as measurement"


@dataclass(frozen=True, slots=True)
class JudgedRatio:
    """A ratio in the unit of its claim: on the stated basis, and like for like."""

    stated_value: float
    stated_basis: str
    value: float
    formula: str
    objections: tuple[Objection, ...]
    remarks: tuple[str, ...]
    others: tuple[tuple[str, float], ...]
    where: tuple[Where, ...]


_UNIT = re.compile(
    r"(?:(%|percent|pct)|(times|x))?(?: (?:(less|fewer|lower|slower|worse|smaller)|(of)|[a-z]+)\b.*)?", re.IGNORECASE
)


def judge_ratio(claim: Claim, facts: Facts) -> JudgedRatio:
    """Recompute the ratio of ``claim``.

    Raises UnknownFactError: the artefacts or the published results do not have a side; FormulaError: a side has no
    rate on the basis, because the file does not state its accelerators or nodes; UnitsError: the unit is no ratio's.
    """
    ratio = claim.ratio
    assert ratio is not None
    of, to = side_entry(ratio.of, facts), side_entry(ratio.to, facts)
    basis = ratio.basis or (BASIS_OF[claim.scope] if claim.scope else "total")
    stated = _in_unit(_rate(of, basis) / _rate(to, basis), claim.unit)
    unlike = differences(of, to, basis)
    known = [one for one in unlike if NOT_STATED not in (one.of, one.to)]
    sizes, subjects = ([one for one in known if one.field in fields] for fields in (SIZES, SUBJECTS))
    remarks = [one for one in unlike if one not in sizes and one not in subjects]
    objections: list[Objection] = []
    if sizes or subjects:
        objections.append(("like for like", "not like for like: " + _listed([*sizes, *subjects])))
    estimates = [entry.name for entry in (of, to) if entry.state == "estimate"]
    if estimates and claim.presented_as == "measurement":
        objections.append((ESTIMATE, f"an estimate: {', '.join(estimates)}"))
    if claim.presented_as == "measurement" and any(one.field == "rack" for one in unlike):
        objections.append((PROJECTION, "compares a measured rack with a projection"))
    mine, theirs = of.rate("per_gpu"), to.rate("per_gpu")
    value, right_basis = stated, basis
    if sizes and mine and theirs:
        value, right_basis = _in_unit(mine / theirs, claim.unit), "per_gpu"
        objections.append(("", f"per GPU it is {precise(value)} {claim.unit}".rstrip()))
    others = [(f"{of.name} over {to.name}, {BASIS_TEXT[basis]}", stated)] if right_basis != basis else []
    for side in ratio.other_baselines:
        try:
            other = side_entry(side, facts)
        except UnknownFactError as error:
            objections.append(("", f"not shown: {error.name}"))
            continue
        against = _in_unit(_rate(of, basis) / _rate(other, basis), claim.unit)
        others.append((f"{of.name} over {other.name}, {BASIS_TEXT[basis]}", against))
        objections.append(("", f"against {other.name} ({other.state}) it is {precise(against)} {claim.unit}".rstrip()))
    return JudgedRatio(
        stated_value=stated,
        stated_basis=BASIS_TEXT[basis],
        value=value,
        formula=f"{of.name} over {to.name}, {BASIS_TEXT[right_basis]}",
        objections=tuple(objections),
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
    stated: dict[str, Any] = {name: getattr(side, name) for name in DESCRIBED}
    if side.value is not None:
        return Entry(side.name, side.source or "as claimed", side.state, side.value, **stated)
    rates = facts.find("tokens_per_second").value
    found = {
        "division": facts.division,
        "scenario": facts.text("scenario"),
        "model": facts.nodes[0].model,
        "precision": facts.text("config.precision"),
        "accelerator": facts.accelerator,
        "accelerators": sum(row.accelerators or 0 for row in facts.nodes) or None,
        "nodes": facts.node_count,
    }
    known: dict[str, Any] = {name: value if stated[name] is None else stated[name] for name, value in found.items()}
    assert isinstance(rates, tuple)
    return Entry(side.name, ARTEFACTS, side.state, sum(rates), **known)


def _places(side: Side, facts: Facts) -> list[Where]:
    if side.published:
        row = published_result(*side.published.split(":"))
        return [Where(f"megatoken/data/{row.table}", row.line)]
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
    """The ratio itself or, for a unit of percent, by how many percent it exceeds one.

    Raises UnitsError: the unit is none of a ratio.
    """
    match = _UNIT.fullmatch(plain_text(unit))
    if match is None:
        raise UnitsError("a ratio gives times or %")
    percent, times, less, of = match.groups()
    if percent:
        return 100 * (ratio if of else 1 - ratio if less else ratio - 1)
    return 1 / ratio if times and less else ratio


def _listed(unlike: list[Difference]) -> str:
    return ", ".join(f"{one.field} {one.of} vs {one.to}" for one in unlike)
