"""Formulas of claims: arithmetic over named facts, parsed as Python and evaluated here, and what they may name."""

from __future__ import annotations

import ast
import math
import operator
import re
import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import TypeVar

from megatoken.analysis.comparison import BASES, Entry
from megatoken.analysis.entries import published_entry
from megatoken.analysis.published import (
    ACCELERATORS,
    MODELS,
    PublishedResult,
    accelerator_table,
    has_accelerator,
    model_architectures,
    model_of,
    published_result,
    published_results,
)
from megatoken.audit.evidence import Where
from megatoken.claims.facts import Facts, FormulaError, NoResultError, UnknownFactError, Value
from megatoken.claims.schema import Claim, Input
from megatoken.claims.units import SECOND, WATT, Unit, named, of_formula, parse
from megatoken.errors import UsageError
from megatoken.text import count_of, exact, precise, suggestion

LONGEST_FORMULA = 500

OPERATORS: dict[type[ast.AST], Callable[[float, float], float]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.Pow: operator.pow,
}
OF_LISTS: dict[str, Callable[[Sequence[float]], float]] = {
    "sum": math.fsum,
    "max": max,
    "min": min,
    "mean": statistics.fmean,
    "median": statistics.median,
    "stdev": statistics.stdev,
    "count": lambda values: float(len(values)),
}
OF_NUMBERS: dict[str, Callable[[float], float]] = {
    "ceil": math.ceil,
    "floor": math.floor,
    "abs": abs,
    "sqrt": math.sqrt,
}


COMPUTING = ("sum", "mean", "median", "stdev")  # max, min and count choose or count what the evidence states
T = TypeVar("T")
FILTERS: dict[str, Callable[[PublishedResult, str], bool]] = {
    "round": lambda row, text: text in (row.round, row.round[1:]),
    "benchmark": lambda row, text: text in (row.benchmark, model_of(row.benchmark)),
    "scenario": lambda row, text: row.scenario.lower() == text.lower(),
    "division": lambda row, text: row.division == text,
    "submitter": lambda row, text: row.submitter.lower() == text.lower(),
    "accelerator": has_accelerator,
    "accelerators": lambda row, text: str(row.accelerators) == text,
}
LOOKUPS = {
    "published": "published(id, benchmark, scenario) or published(id, benchmark, scenario, what)",
    "accelerator": "accelerator(name, column)",
    "model": "model(name)",
    "claim": "claim(id)",
    "best_result": f"best_result(what, filters), with filters such as round=... ({', '.join(FILTERS)})",
    "count_results": "count_results(filters), with filters such as round='v6.0'",
    "count_submitters": "count_submitters(filters), with filters such as round='v6.0'",
}
SETS = ("best_result", "count_results", "count_submitters")  # look-ups over sets of rows
PART = "part of a published result"


def computes(formula: str) -> bool:
    """Whether the formula calculates, rather than looks a fact up."""
    return any(
        isinstance(node, ast.BinOp)
        or (isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in COMPUTING)
        for node in ast.walk(_parse(formula))
    )


def evaluate(formula: str, names: Lookups) -> Value:
    """The value of ``formula``.

    Arithmetic is + - * / ** on numbers; functions are those of ``OF_LISTS`` on a list of facts, those of
    ``OF_NUMBERS``, ``number(text)`` or ``number(text, unit)`` for the first number in a text, and ``names``.
    Raises FormulaError: not a formula of this form; NoResultError: no result for these facts.
    """
    if len(formula) > LONGEST_FORMULA:
        raise FormulaError(f"formula longer than {LONGEST_FORMULA} characters")
    try:
        return _value(_parse(formula), names)
    except FormulaError as error:
        raise type(error)(f"formula {formula!r}: {error}") from error
    except (ArithmeticError, ValueError) as error:
        raise NoResultError(f"formula {formula!r} has no result: {error.args[-1]}") from error


def unit_of(formula: str, names: Lookups) -> Unit | None:
    """The unit of the value of ``formula``; None if it is unknown. Raises UnitsError: it adds what does not fit."""
    return of_formula(_parse(formula), names.unit)


def claims_named(formula: str) -> set[str]:
    """The ids of the claims that ``formula`` uses with ``claim(...)``. Raises FormulaError."""
    found = set()
    for node in ast.walk(_parse(formula)):
        match node:
            case ast.Call(func=ast.Name(id="claim"), args=[ast.Constant(value=str() as name)]):
                found.add(name)
    return found


def _parse(formula: str) -> ast.expr:
    try:
        return ast.parse(formula.strip(), mode="eval").body
    except (SyntaxError, ValueError, MemoryError, RecursionError) as error:
        raise FormulaError(getattr(error, "msg", None) or str(error)) from error


def _value(node: ast.expr, names: Lookups) -> Value:
    match node:
        case ast.Constant(value=bool()):
            raise FormulaError("true and false are not numbers")
        case ast.Constant(value=int() | float() as number):
            if not math.isfinite(number):
                raise FormulaError("a number is too large for a float")
            return float(number)
        case ast.Constant(value=str() as text):
            return text
        case ast.Name(id=name):
            return names.value(name)
        case ast.Attribute(value=ast.Name(id=group), attr=name):
            return names.value(f"{group}.{name}")
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            return -_number(operand, names)
        case ast.BinOp(left=left, op=symbol, right=right) if type(symbol) in OPERATORS:
            result = OPERATORS[type(symbol)](_number(left, names), _number(right, names))
            if isinstance(result, complex) or not math.isfinite(result):
                raise NoResultError("the result is not finite")
            return result
        case ast.Call(func=ast.Name(id="claim" | "model" as function), args=[ast.Name(id=name)]):
            raise FormulaError(f"{function}({name}) lacks quotes; write {function}('{name}')")
        case ast.Call(func=ast.Name(id="claim"), args=[argument]) if not isinstance(argument, ast.Constant):
            raise FormulaError(f"claim({ast.unparse(argument)}) needs a claim id in quotes")
        case ast.Call(func=ast.Name(id=function), args=arguments, keywords=keywords):
            filters = {keyword.arg or "**": _value(keyword.value, names) for keyword in keywords}
            return _call(function, [_value(argument, names) for argument in arguments], filters, names)
    raise FormulaError(f"{ast.unparse(node)!r} is not arithmetic over facts")


def _call(function: str, arguments: list[Value], filters: Mapping[str, Value], names: Lookups) -> Value:
    if filters and function in (*OF_LISTS, *OF_NUMBERS, "number"):
        raise FormulaError(f"{function}() takes no names with =")
    if function in OF_LISTS:
        values = arguments[0] if len(arguments) == 1 and isinstance(arguments[0], tuple) else tuple(arguments)
        if not values or not all(isinstance(value, float) for value in values):
            raise FormulaError(f"{function}() takes a list of facts, or numbers")
        return float(OF_LISTS[function](values))  # type: ignore[arg-type] # checked above
    if function in OF_NUMBERS:
        if len(arguments) != 1 or not isinstance(arguments[0], float):
            raise FormulaError(f"{function}() takes one number")
        return float(OF_NUMBERS[function](arguments[0]))
    if function == "number":
        return first_number(*arguments)
    return names.call(function, arguments, filters)


def first_number(*arguments: Value) -> float:
    """The first number in a text, or the first before a unit: 2 for ``4-GPU node: 2 TB SSD`` and ``TB``.

    Raises NoResultError: the text has no such number.
    """
    match arguments:
        case [str(text)]:
            found = re.search(r"(\d[\d,]*(?:\.\d+)?)", text)
        case [str(text), str(unit)]:
            found = re.search(rf"(\d[\d,]*(?:\.\d+)?)\s*{re.escape(unit)}(?!\w)", text)
        case _:
            raise FormulaError("number() takes a text and, optionally, the unit after the number")
    if not found:
        raise NoResultError(f"number() found no number in {' and '.join(map(repr, arguments))}")
    return float(found.group(1).replace(",", ""))


def _number(node: ast.expr, names: Lookups) -> float:
    value = _value(node, names)
    if isinstance(value, float):
        return value
    what = f"a list of {len(value)}" if isinstance(value, tuple) else f"the text {value!r}"
    hint = "use sum, max, min, mean or median" if isinstance(value, tuple) else "use number(...)"
    raise FormulaError(f"{ast.unparse(node)} is {what}; {hint}")


def recomputed_text(value: float | str, claimed: object) -> str:
    """A recomputed value as text, with at least as many decimals as the claimed number."""
    if isinstance(value, str):
        return value
    text = precise(value)
    if not isinstance(claimed, float) or "e" in text:
        return text
    decimals = len(exact(claimed).partition(".")[2])
    return text if len(text.partition(".")[2]) >= decimals else f"{value:,.{decimals}f}"


class Lookups:
    """Names for ``evaluate``; afterwards the attributes state what the formula used."""

    def __init__(self, claim: Claim, facts: Facts, claims: Mapping[str, Claim]) -> None:
        self._claim, self._facts, self._claims = claim, facts, claims
        self.where: dict[Where, None] = {}
        self.nameplate: dict[str, None] = {}
        self.projections: list[str] = []
        self.estimates: list[str] = []
        self.conditions: dict[str, None] = {}
        self.published: list[Entry] = []
        self.columns: list[str] = []  # of the table of accelerators
        self.uses_time = self.uses_rates = False
        self.uses_evidence = False  # anything from outside the claims file

    def value(self, name: str) -> Value:
        """An input of the claim or a fact of the artefacts."""
        if name in self._claim.inputs:
            return self._input(name, self._claim.inputs[name])
        fact = self._facts.find(name)
        self.uses_evidence = True
        self.where |= dict.fromkeys(fact.where)
        self.uses_time |= name.endswith("_seconds")
        self.uses_rates |= name == "tokens_per_second"
        if fact.condition:
            self.conditions.setdefault(fact.condition)
        return fact.value

    def unit(self, name: str, texts: Sequence[str]) -> Unit | None:
        """The unit of an input or a fact or, with texts, of a look-up; None if it is unknown."""
        match name, texts:
            case "claim", [other] if other in self._claims:
                return parse(self._claims[other].unit)
            case "published", [_, _, _, *what]:
                return _unit_of_part(*what)
            case "best_result", [what]:
                return _unit_of_part(what)
            case "accelerator", [_, column]:
                return named(column)
            case "count_results" | "count_submitters", []:
                return Unit()
            case _, []:
                return parse(self._claim.inputs[name].unit) if name in self._claim.inputs else named(name)
        return None

    def call(self, function: str, arguments: Sequence[Value], filters: Mapping[str, Value]) -> Value:
        """One of ``LOOKUPS``."""
        _known(dict.fromkeys((*OF_LISTS, *OF_NUMBERS, "number", *LOOKUPS)), function, "function")
        texts = [argument for argument in arguments if isinstance(argument, str)]
        if len(texts) < len(arguments):
            raise FormulaError(f"{function}() takes texts in quotes")
        if function in SETS:
            return self._set(function, texts, filters)
        match function, texts:
            case _ if filters:
                pass
            case "published", [submission, benchmark, scenario, *what] if len(what) < 2:
                return self._published(submission, benchmark, scenario, *(what or ["total"]))
            case "accelerator", [name, column]:
                return self._accelerator(name, column)
            case "model", [name]:
                self._place(MODELS, None)
                return _known(model_architectures(), name, "model")
            case "claim", [name]:
                value = _known(self._claims, name, "claim").value
                return value if isinstance(value, str) else float(value)
        given = len(arguments) + len(filters)
        raise FormulaError(f"{function}() with {count_of(given, 'argument')}; write {LOOKUPS[function]}")

    def _input(self, name: str, given: Input) -> float:
        unit = parse(given.unit)
        self.uses_time |= unit is not None and unit.dimensions == SECOND
        if given.state in ("estimate", "assumed"):
            self.estimates.append(f"{name} is {'an estimate' if given.state == 'estimate' else 'assumed'}")
        if given.state == "nameplate":
            self.nameplate.setdefault(f"{name} is nameplate")
        elif unit and unit.dimensions == WATT and given.accelerator and given.accelerators:
            watts = _known(accelerator_table(), given.accelerator, "accelerator").tdp_watts
            nameplate = (watts or 0.0) * given.accelerators
            if nameplate and abs(given.value * unit.scale - nameplate) <= 0.005 * nameplate:
                product = f"{given.accelerators} x {watts:,g} W TDP of {given.accelerator}"
                self.nameplate.setdefault(f"{name}, {given.value:,g} {given.unit}, is {product}: the accelerators only")
        return given.value

    def _published(self, submission: str, benchmark: str, scenario: str, what: str) -> Value:
        try:
            row = published_result(submission, benchmark, scenario)
        except UsageError as error:
            asked = f"a published result {submission} {benchmark} {scenario}"
            raise UnknownFactError(asked, f"the results of that round of MLPerf Inference: {error}") from error
        return self._part(row, what)

    def _set(self, function: str, texts: Sequence[str], filters: Mapping[str, Value]) -> float:
        rows = filtered_rows(filters)
        self.uses_evidence = True
        match function, texts:
            case "best_result", [what]:
                rated = [(rate, row) for row in rows if (rate := _known(_parts(row), what, PART))]
                if not rated:
                    raise UnknownFactError(f"a published result with {what}", f"a result that states {what}")
                best = max(rated, key=lambda pair: pair[0])[1]
                self.conditions.setdefault(f"best of {count_of(len(rated), 'row')}: {best.name}")
                return self._part(best, what)
            case "count_results" | "count_submitters", []:
                for table in dict.fromkeys(row.table for row in rows):
                    self._place(table, None)
                if function == "count_results":
                    return float(len(rows))
                names = {row.submitter.lower(): row.submitter for row in rows}  # v6.0 has ORACLE
                self.conditions.setdefault(f"submitters: {', '.join(sorted(names.values())) or 'none'}")
                return float(len(names))
        raise FormulaError(f"{function}() with {count_of(len(texts), 'argument')}; write {LOOKUPS[function]}")

    def _part(self, row: PublishedResult, what: str) -> float:
        """One of ``_parts`` of a row; its place and what it is presented as are recorded."""
        value = _known(_parts(row), what, PART)
        self._place(row.table, row.line)
        if value is None:
            raise UnknownFactError(f"{what} of {row.name}", f"a result of {row.system} that states {what}")
        if what in BASES:
            entry = published_entry(row)
            self.published.append(entry)
            self._note_projection(entry, what)
        return value

    def _note_projection(self, entry: Entry, basis: str) -> None:
        covered, measured = self._claim.accelerators, entry.accelerators or 0
        rack = basis == "per_rack" or self._claim.scope == "rack"
        if (covered is not None and covered > measured) or (covered is None and rack and not entry.rack_is_measured):
            what = f"{entry.name} measured {measured} accelerators, not {covered or 'a rack'}"
            self.projections.append(f"a projection: {what}")

    def _accelerator(self, name: str, column: str) -> float:
        facts = _known(accelerator_table(), name, "accelerator")
        columns = {key for other in accelerator_table().values() for key in other.values}
        if column not in columns:
            _known(dict.fromkeys(columns), column, "column")
        if column not in facts.values:
            raise UnknownFactError(f"{column} of {name}", f"a data sheet of {name} with {column}")
        self._place(ACCELERATORS, facts.line)
        self.columns.append(column)
        if column == "tdp_w":
            self.nameplate.setdefault(f"TDP of {name}")
        return facts.values[column]

    def _place(self, table: str, line: int | None) -> None:
        self.uses_evidence = True
        self.where.setdefault(Where(f"megatoken/data/{table}", line))


def _parts(row: PublishedResult) -> dict[str, float | None]:
    """What a formula may ask of a row."""
    entry = published_entry(row)
    return {
        **{basis: entry.rate(basis) for basis in BASES},
        "watts": row.measured_watts,
        "accelerators": row.accelerators,
        "nodes": float(row.nodes),
        "tokens_per_sample": row.output_tokens_per_sample,
    }


def _unit_of_part(what: str = "total") -> Unit | None:
    """The unit of one of ``_parts``."""
    return parse("tokens/s") if what in BASES else named(what)


def _known(table: Mapping[str, T], name: str, kind: str) -> T:
    if name in table:
        return table[name]
    raise FormulaError(f"unknown {kind} {name!r}; {suggestion(name, sorted(table))}")


def filtered_rows(filters: Mapping[str, Value]) -> list[PublishedResult]:
    """Published rows that pass all ``filters``, of the closed division unless they name another.

    A filter is one of ``FILTERS`` and a text or number; ``|`` separates alternatives: ``"Azure|Google"``.

    Raises:
        FormulaError: an unknown filter, or an alternative that no row of any round has.
    """
    rows = list(published_results())
    for name, value in ({"division": "closed"} | dict(filters)).items():
        if name not in FILTERS:
            raise FormulaError(f"unknown filter {name}; {suggestion(name, FILTERS)}")
        if isinstance(value, tuple):
            raise FormulaError(f"filter {name} takes one text or number, not a list")
        texts = value.split("|") if isinstance(value, str) else [exact(value).replace(",", "")]
        for text in texts:
            if not any(FILTERS[name](row, text) for row in published_results()):
                raise FormulaError(f"no published row has {name} {text!r}")
        rows = [row for row in rows if any(FILTERS[name](row, text) for text in texts)]
    return rows
