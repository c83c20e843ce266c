"""Keys and values as text: labels and units from key names, numbers, harmless characters."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from megatoken.text import ABSENT, is_number, number, precise, significant

LONGEST_TEXT = 2000
# States whose numbers have three significant digits.
WEAK = ("assumed", "nameplate", "estimate", "interrupted run", "invalid run")
ACRONYMS = {
    **{
        word: word.upper()
        for word in ("bf16", "cpu", "cv", "fp4", "fp8", "gpu", "hbm", "id", "json", "kv", "nic", "pue")
    },
    **{word: word.upper() for word in ("pp", "qps", "slo", "sut", "tdp", "tp", "tpot", "ttft", "url", "vm")},
    "co2": "CO₂",
    "gpus": "GPUs",
    "kwh": "kWh",
    "loadgen": "LoadGen",
    "mlperf": "MLPerf",
    "sha256": "SHA-256",
    "vms": "VMs",
}
UNITS = {
    "bytes": "bytes",
    "celsius": "°C",
    "dollars": "$",
    "gib": "GiB",
    "gigabytes": "GB",
    "grams": "g",
    "hours": "h",
    "joules": "J",
    "kilograms": "kg",
    "kilowatts": "kW",
    "kwh": "kWh",
    "megawatts": "MW",
    "mhz": "MHz",
    "mib": "MiB",
    "milliseconds": "ms",
    "minutes": "min",
    "percent": "%",
    "seconds": "s",
    "watthours": "Wh",
    "watts": "W",
}
PER_UNITS = UNITS | {noun: noun for noun in ("interactions", "queries", "requests", "samples", "tokens")}
DIVISORS = {"second": "s", "hour": "h", "watt": "W", "joule": "J", "kilowatt": "kW", "gpu": "GPU", "kwh": "kWh"}
NAMES = ("_id", "seed", "line", "port")  # numbers that are names, not amounts
COUNTS = ("_requests", "users")  # thousands of them have no decimals
SHARES = ("share", "coefficient_of_variation", "utilisation")

# Characters that control a terminal, that XML cannot hold, or that change the reading direction.
_HARMFUL = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069\ud800-\udfff\ufffe\uffff]")


def clean(text: str) -> str:
    """``text`` with control characters and lone surrogates replaced, and cut after ``LONGEST_TEXT`` characters."""
    shown = text if len(text) <= LONGEST_TEXT else f"{text[:LONGEST_TEXT]}… ({len(text):,} characters)"
    return _HARMFUL.sub("�", shown.replace("\r\n", "\n"))


def figure_text(value: object, state: str) -> str:
    """A number of a plan: three significant digits if its state is weak."""
    return (significant if state in WEAK else precise)(value)


def label(key: str) -> tuple[str, str]:
    """The label of a key, and its unit: ``duration_seconds`` is Duration in s."""
    head, *divisors = key.replace("watt_hours", "watthours").split("_per_")
    name, _, last = head.rpartition("_")
    units = PER_UNITS if divisors else UNITS
    if last not in units or not name:  # a name that is all unit says it already
        return sentence(key), ""
    unit = "/".join([units[last], *(DIVISORS.get(divisor, divisor.replace("_", " ")) for divisor in divisors)])
    return sentence(name), unit


def sentence(key: str) -> str:
    """A key as words: ``per_gpu`` is Per GPU."""
    words = " ".join(ACRONYMS.get(word, word) for word in clean(key).replace("_", " ").split())
    return words[:1].upper() + words[1:]


def as_sentence(words: str) -> str:
    """With a capital and a full stop."""
    return f"{words[:1].upper()}{words[1:]}."


def labelled(key: str, value: Any) -> tuple[str, str, str]:
    """Label, unit and value of one entry; shares become percent."""
    if key.endswith(SHARES) and is_number(value):
        return sentence(key.removesuffix("_share")), "%", precise(100 * value)
    name, unit = label(key)
    if key.endswith(COUNTS) and is_number(value) and abs(value) >= 1000:
        return name, unit, number(value)
    if key.endswith(NAMES) and isinstance(value, int):
        return name, unit, str(value)
    return name, unit, plain_text(value)


def aligned(texts: Sequence[Any]) -> list[Any]:
    """A column of ``precise`` texts in which either all thousands have their decimal or none has."""
    if not any("," in text and "." in text for text in texts):
        return list(texts)
    return [f"{text}.0" if "," in text and "." not in text else text for text in texts]


def plain_text(value: Any) -> str:
    """Any value that JSON can hold on one line."""
    if value is None or value in ("", [], {}):
        return ABSENT
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int | float):
        return precise(value)
    if isinstance(value, Mapping):
        return "; ".join(" ".join(filter(None, _named(str(key), item))) for key, item in value.items())
    if isinstance(value, list | tuple):
        return ", ".join(plain_text(item) for item in value)
    return clean(str(value))


def _named(key: str, value: Any) -> tuple[str, str, str]:
    name, unit, text = labelled(key, value)
    return f"{name}:", text, unit
