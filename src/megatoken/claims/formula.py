"""Formulas of claims: arithmetic over named facts, and nothing else of Python."""

from __future__ import annotations

import ast
import math
import operator
import re
import statistics
from collections.abc import Callable, Sequence
from decimal import Decimal
from typing import Protocol

from megatoken.errors import UsageError

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


class FormulaError(UsageError):
    """The formula itself is wrong, whatever the evidence."""


class NoResultError(FormulaError):
    """The formula is right, but these facts give it no result: a division by zero, the deviation of one value."""


class Names(Protocol):
    """What a formula may ask for. Both raise FormulaError for what does not exist at all."""

    def value(self, name: str) -> Value:
        """The fact called ``name``, such as ``nodes`` or ``config.precision``."""

    def call(self, function: str, arguments: Sequence[Value]) -> Value:
        """A look-up such as ``published("5.1-0008", "llama2-70b-99", "Offline")``."""


def evaluate(formula: str, names: Names) -> Value:
    """The value of ``formula``.

    Arithmetic is + - * / ** on numbers; functions are those of ``OF_LISTS`` on a list of facts, those of
    ``OF_NUMBERS``, ``number(text)`` or ``number(text, unit)`` for the first number in a text, and ``names``.

    Raises:
        FormulaError: not such a formula.
        NoResultError: one that these facts give no result.
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
    """The claims that ``formula`` rests on: ids that stand in ``claim(...)``. Raises FormulaError."""
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
            raise FormulaError("true and false are no numbers")
        case ast.Constant(value=int() | float() as number):
            if not math.isfinite(number):
                raise FormulaError("holds a number beyond what a float can be")
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
                raise NoResultError("a number that is not finite")
            return result
        case ast.Call(func=ast.Name(id="claim" | "model" as function), args=[ast.Name(id=name)]):
            raise FormulaError(f"{function}({name}) lacks quotes; write {function}('{name}')")
        case ast.Call(func=ast.Name(id="claim"), args=[argument]) if not isinstance(argument, ast.Constant):
            raise FormulaError(f"claim({ast.unparse(argument)}) names no claim; write its id in quotes")
        case ast.Call(func=ast.Name(id=function), args=arguments, keywords=[]):
            return _call(function, [_value(argument, names) for argument in arguments], names)
    raise FormulaError(f"{ast.unparse(node)!r} is not arithmetic over facts")


def _call(function: str, arguments: list[Value], names: Names) -> Value:
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
    return names.call(function, arguments)


def first_number(*arguments: Value) -> float:
    """The first number in a text, or the first before a unit: 2, given ``4-GPU node: 2 TB SSD`` and ``TB``.

    Raises:
        NoResultError: there is none.
    """
    match arguments:
        case [str(text)]:
            found = re.search(r"(\d[\d,]*(?:\.\d+)?)", text)
        case [str(text), str(unit)]:
            found = re.search(rf"(\d[\d,]*(?:\.\d+)?)\s*{re.escape(unit)}(?!\w)", text)
        case _:
            raise FormulaError("number() takes a text, and perhaps the unit behind the number")
    if not found:
        raise NoResultError(f"number() found none in {' and '.join(map(repr, arguments))}")
    return float(found.group(1).replace(",", ""))


def _number(node: ast.expr, names: Names) -> float:
    value = _value(node, names)
    if isinstance(value, float):
        return value
    what = f"a list of {len(value)}" if isinstance(value, tuple) else f"the text {value!r}"
    hint = "sum, max, min, mean or median makes one number of it" if isinstance(value, tuple) else "try number(...)"
    raise FormulaError(f"{ast.unparse(node)} is {what}; {hint}")


def exact(value: float) -> str:
    """A number with all its digits, as somebody wrote it."""
    if not 1e-6 <= abs(value) < 1e15:
        return f"{value:g}"
    text = f"{Decimal(repr(value)):,f}"
    return text.rstrip("0").rstrip(".") if "." in text else text


def beside(value: float | str, written: object) -> str:
    """A recomputed number: as ``shown``, with no fewer decimals than the ``written`` one it stands beside."""
    text = shown(value)
    if isinstance(value, str) or not isinstance(written, float) or "e" in text:
        return text
    decimals = len(exact(written).partition(".")[2])
    return text if len(text.partition(".")[2]) >= decimals else f"{value:,.{decimals}f}"


def shown(value: float | str) -> str:
    """A number with four significant digits, or one decimal from 1,000 on."""
    if isinstance(value, str):
        return value
    return f"{value:,.1f}".removesuffix(".0") if abs(value) >= 1000 else f"{value:.4g}"
