"""Units of claims: read from texts and from the names of facts, derived through formulas, and converted.

Dimensions are tokens, time, energy, bytes, floating-point operations and money. What else one counts (accelerators,
nodes, samples, queries) is a plain number, so that tokens/s per GPU are tokens/s.
"""

from __future__ import annotations

import ast
import math
import re
import unicodedata
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache, reduce

Dimensions = tuple[tuple[str, int], ...]  # names and powers, sorted, without zero powers

PLAIN: Dimensions = ()
SECOND: Dimensions = (("second", 1),)
WATT: Dimensions = (("joule", 1), ("second", -1))
RATE: Dimensions = (("second", -1), ("token", 1))
_COUNTED = ("gpu", "accelerator", "node", "vm", "rack")
_UNITS: dict[str, tuple[float, Dimensions]] = {
    **dict.fromkeys(("token", "tok"), (1, (("token", 1),))),
    **dict.fromkeys(("s", "sec", "second"), (1, SECOND)),
    **dict.fromkeys(("min", "minute"), (60, SECOND)),
    **dict.fromkeys(("h", "hr", "hour"), (3600, SECOND)),
    **{"day": (86_400, SECOND), "week": (604_800, SECOND), "year": (31_536_000, SECOND)},
    **dict.fromkeys(("W", "watt"), (1, WATT)),
    **dict.fromkeys(("J", "joule"), (1, (("joule", 1),))),
    "Wh": (3600, (("joule", 1),)),
    **dict.fromkeys(("B", "byte"), (1, (("byte", 1),))),
    "bit": (1 / 8, (("byte", 1),)),
    **{"kw": (1e3, WATT), "kwh": (3.6e6, (("joule", 1),)), "gb": (1e9, (("byte", 1),)), "tb": (1e12, (("byte", 1),))},
    "FLOP": (1, (("FLOP", 1),)),
    "FLOPS": (1, (("FLOP", 1), ("second", -1))),
    **dict.fromkeys(("$", "USD", "dollar"), (1, (("dollar", 1),))),
    "cent": (0.01, (("dollar", 1),)),
    **dict.fromkeys(("€", "EUR", "euro"), (1, (("euro", 1),))),
    **dict.fromkeys(("%", "percent", "pct"), (0.01, PLAIN)),
    **dict.fromkeys(("times", "x", *_COUNTED), (1, PLAIN)),
    **dict.fromkeys(("sample", "query", "querie", "request"), (1, PLAIN)),
}
_AS_WRITTEN = ("kw", "kwh", "gb", "tb", "FLOP")  # Gb may be bits, and FLOPs may be FLOPS
_SMALL = {"n": 1e-9, "u": 1e-6, "μ": 1e-6, "m": 1e-3}  # of symbols only: m tokens may be millions
_LARGE = {"k": 1e3, "K": 1e3, "M": 1e6, "G": 1e9, "T": 1e12, "P": 1e15, "E": 1e18}
_LARGE |= {"Ki": 2.0**10, "Mi": 2.0**20, "Gi": 2.0**30, "Ti": 2.0**40}
_SPELLED = {"kilo": 1e3, "mega": 1e6, "giga": 1e9, "tera": 1e12, "milli": 1e-3, "micro": 1e-6, "nano": 1e-9}
_WORDS = {"thousand": 1e3, "million": 1e6, "billion": 1e9, "trillion": 1e12}  # before a unit: million tokens/s
_WORDS |= {"": 1.0, "k": 1e3, "K": 1e3, "M": 1e6, "B": 1e9, "T": 1e12}
_UNSAID = ("output", "generated")  # the tokens of facts are output tokens
_CHANGE = re.compile(r"(%|percent|pct) (?!(?:per|an?)\b)[a-z][^/]*")  # % more, % of the price
_NAMES = {  # how the names of facts and columns end -> unit
    **{"tokens": "tokens", "samples": "samples", "qps": "queries/s", "percent": "%", "dollars": "$", "euros": "€"},
    **{"seconds": "s", "minutes": "min", "hours": "h", "ms": "ms", "ns": "ns"},
    **{"watts": "W", "tdp_w": "W", "kw": "kW", "joules": "J", "kwh": "kWh", "tflops": "TFLOPS"},
    **{"bytes": "B", "gb": "GB", "gib": "GiB", "mib": "MiB", "tb": "TB", "gb_s": "GB/s", "tb_s": "TB/s"},
}
_NAME = re.compile(rf"(?:.*[_.])?({'|'.join(sorted(_NAMES, key=len, reverse=True))})(?:_per_([a-z]+))?(?:_both_\w+)?")
_COUNTS = ("nodes", "accelerators", "accelerators_per_node", "samples_issued", "samples_requested", "errors")
_MOST_SCALES = 256
_STATED = ({"token": 1}, {"token": 1, "second": 1}, {"byte": 1}, {"FLOP": 1}, {"dollar": 1}, {"euro": 1})
"""Not time, of which hours and seconds differ."""


class UnitsError(Exception):
    """Units that do not fit: the claim cannot be judged."""


@dataclass(frozen=True, slots=True)
class Unit:
    """Dimensions, and how many of their base units one is.

    Numbers that a formula states have no unit. They may convert: the result of ``100 * a / b`` may be percent, so all
    ``scales`` are possible. Or they may have a unit that is not stated, as the 650 tokens in ``rate / 650``; then the
    dimensions are ``open``. A formula of such ``numbers`` alone has no unit.
    """

    dimensions: Dimensions = PLAIN
    scale: float = 1.0
    scales: tuple[float, ...] = (1.0,)
    open: bool = False
    numbers: bool = False

    def __str__(self) -> str:
        if self.dimensions == WATT:
            return "W"
        names = {name: {"second": "s", "joule": "J"}.get(name, name) for name, _ in self.dimensions}
        plural = {name: short if len(short) == 1 or name == "FLOP" else f"{short}s" for name, short in names.items()}
        over = "*".join(plural[name] for name, power in self.dimensions for _ in range(power))
        under = "".join(f"/{names[name]}" for name, power in self.dimensions for _ in range(-power))
        return (over or ("1" if under else "a plain number")) + under


def number(value: float) -> Unit:
    """The unit of a number that a formula states."""
    return Unit(scales=(1.0, 1 / value) if _converts(value) else (1.0,), open=value != 1, numbers=True)


def _converts(value: float) -> bool:
    if value in (8, 24, 60, 3600, 86_400):
        return True
    return value > 0 and value != 1 and any(value == base ** round(math.log(value, base)) for base in (10.0, 1024.0))


@cache
def parse(text: str) -> Unit | None:
    """The unit that ``text`` writes; None if this module does not know it."""
    parts = re.split(r"\s*/\s*|\s*\b(?:per|an?)\b\s*", _CHANGE.sub(r"\1", plain_text(text)))
    found: Unit | None = Unit()
    for at, part in enumerate(parts):
        for factor in _factors(part):
            found = _times(found, factor, divide=at > 0)
    return found if found and 0 < found.scale < math.inf else None


def plain_text(text: str) -> str:
    """A unit in the usual characters, with single spaces."""
    return " ".join(unicodedata.normalize("NFKC", text).replace("per cent", "percent").split())


def _factors(text: str) -> list[Unit | None]:
    """The units of a product such as ``M tokens``; [None] if one is unknown."""
    words = [word for word in re.split(r"[\s*·]+", text) if word not in _UNSAID]
    found: list[Unit | None] = []
    for at, word in enumerate(words):
        amount = re.fullmatch(r"(\d{0,9})([a-zA-Z]*)", word)
        name = amount[2].lower() if amount and len(amount[2]) > 1 else amount and amount[2]
        if amount and name in _WORDS and at + 1 < len(words):
            scale = float(amount[1] or 1) * _WORDS[name]
            counted = words[at + 1].lower().removesuffix("s") in _COUNTED  # so the unit is of a part of the whole
            found.append(None if counted else Unit(scale=scale, scales=(scale,)))
        else:
            found.append(_unit(word))
    return found or [None]


def _unit(word: str) -> Unit | None:
    for prefix, factor in {"": 1.0, **_SMALL, **_LARGE, **_SPELLED}.items():
        rest = word.removeprefix(prefix)
        for name in (rest, rest.removesuffix("s"), rest.lower(), rest.lower().removesuffix("s")):
            symbol = len(name) == 1 or name in _AS_WRITTEN or prefix in _SMALL  # s is seconds, S and Ws are nothing
            if word.startswith(prefix) and name in _UNITS and (name == rest or not symbol):
                scale = _UNITS[name][0] * factor
                return Unit(_UNITS[name][1], scale, (scale,))
    return None


def named(name: str) -> Unit | None:
    """The unit that the name of a fact or column ends with: seconds for ``latency_p50_seconds``."""
    if name in _COUNTS:
        return Unit()
    match = _NAME.fullmatch(name)
    return parse("/".join(filter(None, (_NAMES[match[1]], match[2])))) if match else None


def convert(value: float, unit: Unit | None, to: Unit | None) -> list[float]:
    """``value`` in the unit ``to``, unchanged if a unit is unknown or the numbers of the formula give ``to``.

    Several values if the formula converts to a third unit: ``watts / 1000`` in MW. The last is with that.

    Raises UnitsError: the units do not fit.
    """
    if unit is None or to is None or unit.numbers:
        return [value]
    if unit.dimensions != to.dimensions and not (unit.open and _may_be_stated(unit, to)):
        raise UnitsError(f"the formula gives {unit}")
    if _may_be(unit, to.scale):
        return [value]
    scales = [unit.scale, *(scale for scale in unit.scales if scale > unit.scale)]
    converted = [value * (scale / to.scale) for scale in scales]
    if not all(map(math.isfinite, converted)):
        raise UnitsError(f"the formula gives more {unit} than can be converted")
    return converted


def _may_be_stated(unit: Unit, to: Unit) -> bool:
    """Whether numbers of a formula may have what is missing: its own unit as in ``rate / 865584``, tokens, a rate."""
    missing = _times(to, unit, divide=True)
    powers = {name: abs(power) for name, power in missing.dimensions} if missing else {}
    return to.dimensions == PLAIN or powers in _STATED


def unchecked(unit: Unit | None, to: Unit | None) -> bool:
    """Whether ``convert`` takes the formula's word for it, because its numbers may have units or convert them."""
    if unit is None:
        return to is not None and to.dimensions != PLAIN
    if to is None:
        return unit.dimensions != PLAIN
    if unit.numbers:
        return False
    return unit.dimensions != to.dimensions or (len(unit.scales) > 1 and to.scale == unit.scale)


def _times(one: Unit | None, other: Unit | None, *, divide: bool = False) -> Unit | None:
    if one is None or other is None:
        return None
    powers = dict(one.dimensions)
    for name, power in other.dimensions:
        powers[name] = powers.get(name, 0) + (-power if divide else power)

    def scaled(left: float, right: float) -> float:
        return left / (right or math.inf) if divide else left * right

    scales = dict.fromkeys(scaled(left, right) for left in one.scales for right in other.scales)
    unit = Unit(
        dimensions=tuple(sorted((name, power) for name, power in powers.items() if power)),
        scale=scaled(one.scale, other.scale),
        scales=tuple(scales),
        open=one.open or other.open,
        numbers=one.numbers and other.numbers,
    )
    return unit if len(scales) <= _MOST_SCALES and 0 < unit.scale < math.inf else None


def _plus(units: Sequence[Unit | None]) -> Unit | None:
    """The unit of a sum, in which a number has the unit of the others. Raises UnitsError: the units do not fit."""
    known = [unit for unit in units if unit is not None and not unit.numbers]
    if None in units or not known:
        return None if None in units else Unit(open=True, numbers=True)
    first = known[0]
    others = [unit for unit in known if unit.dimensions != first.dimensions]
    common = [scale for scale in first.scales if all(_may_be(unit, scale) for unit in known)]
    if common and not others:
        scale = first.scale if first.scale in common else common[0]
        return replace(first, scale=scale, scales=tuple(common), open=any(unit.open for unit in known))
    if any(unit.open for unit in known):
        return None
    raise UnitsError(f"the formula adds {first} and {others[0] if others else 'another unit of them'}")


def _may_be(unit: Unit, scale: float) -> bool:
    return any(math.isclose(one, scale) for one in unit.scales)


def of_formula(node: ast.AST, unit_of: Callable[[str, list[str]], Unit | None]) -> Unit | None:
    """The unit of the result of a formula that has a value; None if it is unknown.

    Args:
        node: the syntax tree of the formula.
        unit_of: the unit of a fact or an input, without texts; or of a look-up and the texts that it is given.

    Raises UnitsError: it adds what does not fit, such as seconds and watts.
    """
    match node:
        case ast.Constant(value=int() | float() as stated):
            return number(stated)
        case ast.Name(id=name):
            return unit_of(name, [])
        case ast.Attribute(value=ast.Name(id=group), attr=name):
            return unit_of(f"{group}.{name}", [])
        case ast.UnaryOp(operand=operand):
            return of_formula(operand, unit_of)
        case ast.BinOp(left=left, op=ast.Add() | ast.Sub(), right=right):
            units = [of_formula(left, unit_of), of_formula(right, unit_of)]
            for side, unit, other in ((left, units[0], right), (right, units[1], left)):
                share = isinstance(side, ast.BinOp) and isinstance(side.op, ast.Div)
                one = isinstance(other, ast.Constant) and other.value == 1
                if share and one and (unit is None or unit.open):
                    return Unit()  # a / b - 1: how much more a is, whatever their unit
            return _plus(units)
        case ast.BinOp(left=left, op=ast.Mult() | ast.Div() as sign, right=right):
            divide = isinstance(sign, ast.Div)
            return _times(of_formula(left, unit_of), of_formula(right, unit_of), divide=divide)
        case ast.BinOp(left=left, op=ast.Pow(), right=ast.Constant(value=int() as power)) if 1 <= power <= 3:
            return reduce(_times, [of_formula(left, unit_of)] * power)
        case ast.Call(func=ast.Name(id="count")):
            return Unit()
        case ast.Call(func=ast.Name(id="number"), args=[_, ast.Constant(value=str() as text)]):
            return parse(text)
        case ast.Call(func=ast.Name(id="sum" | "max" | "min" | "mean" | "median" | "stdev" | "abs"), args=arguments):
            return _plus([of_formula(argument, unit_of) for argument in arguments])
        case ast.Call(func=ast.Name(id="ceil" | "floor"), args=[argument]):
            return of_formula(argument, unit_of)
        case ast.Call(func=ast.Name(id=function), args=arguments):
            return unit_of(function, [str(one.value) for one in arguments if isinstance(one, ast.Constant)])
    return None
