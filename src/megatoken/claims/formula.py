"""Formulas of claims: arithmetic over named facts, parsed as Python and evaluated here."""

from __future__ import annotations

import ast
import math
import operator
import re
import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

from megatoken.errors import UsageError
from megatoken.text import exact, precise

LONGEST_FORMULA = 500

Value = float | str | tuple[float, ...]

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


def computes(formula: str) -> bool:
    """Whether the formula calculates, rather than looks a fact up."""
    return any(
        isinstance(node, ast.BinOp)
        or (isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in COMPUTING)
        for node in ast.walk(ast.parse(formula.strip(), mode="eval"))
    )


class FormulaError(UsageError):
    """The formula is wrong, whatever the evidence."""


class NoResultError(FormulaError):
    """The formula has no result for these facts: a division by zero, the deviation of one value."""


class Names(Protocol):
    """What a formula may name. Both methods raise FormulaError for an unknown name."""

    def value(self, name: str) -> Value:
        """The fact called ``name``, such as ``nodes`` or ``config.precision``."""

    def call(self, function: str, arguments: Sequence[Value], filters: Mapping[str, Value]) -> Value:
        """A look-up: ``published("5.1-0008", "llama2-70b-99", "Offline")`` or ``count_results(round="v6.0")``."""


def evaluate(formula: str, names: Names) -> Value:
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


def _value(node: ast.expr, names: Names) -> Value:
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


def _call(function: str, arguments: list[Value], filters: Mapping[str, Value], names: Names) -> Value:
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


def _number(node: ast.expr, names: Names) -> float:
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
