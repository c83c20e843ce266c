"""The answer of a qualification in three sentences: is the machine healthy, how fast, and are the values steady."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from megatoken.hardware.qualify.judge import CONTENTION, Verdict
from megatoken.text import count_of, number

HEADLINES = (
    ("multiplies matrices in fp8 at", ("gemm_fp8_8192", "gemm_fp8_4096")),
    ("in bf16 at", ("gemm_bf16_8192", "gemm_bf16_1024_all_cores", "gemm_bf16_2048_all_cores")),
    ("in fp32 at", ("gemm_fp32_1024_all_cores", "gemm_fp32_2048_all_cores")),
    ("reads memory at", ("hbm_read", "memory_read")),
)
"""What the second sentence says, from the first of the values that was measured."""
MOST_NAMED = 3


def answer(document: Mapping[str, Any]) -> list[str]:
    """Three sentences on a document of qualify."""
    values = [value for test in document["tests"] for value in test["values"]]
    return [
        health(document["tests"], values),
        _speed({value["name"]: value for value in values}),
        _trust(values),
    ]


def health(tests: Sequence[Mapping[str, Any]], values: Sequence[Mapping[str, Any]]) -> str:
    """What failed, or that nothing did, and how many values had a reference."""
    failed = [f"{test['title']} ({test['fault']})" for test in tests if test["fault"]]
    failed += [f"{value['title']} ({value['reason']})" for value in values if value["verdict"] == Verdict.FAIL]
    count = {verdict: sum(value["verdict"] == verdict for value in values) for verdict in Verdict}
    rest = f"{count_of(count[Verdict.PASS], 'value')} pass, {count[Verdict.MARGINAL]} are marginal, "
    rest += f"{count[Verdict.NO_REFERENCE]} have no reference and {count[Verdict.NOT_RUN]} did not run"
    if not failed:
        return f"No fault was found: {rest}."
    more = f" and {len(failed) - MOST_NAMED} more" if len(failed) > MOST_NAMED else ""
    return f"{count_of(len(failed), 'fault')} found: {'; '.join(failed[:MOST_NAMED])}{more}; {rest}."


def _speed(values: Mapping[str, Mapping[str, Any]]) -> str:
    parts = list(_headlines(values))
    if not parts:
        return "No matrix product and no memory was measured."
    *first, last = parts
    return f"The machine {', '.join(first)}{' and ' if first else ''}{last}."


def _headlines(values: Mapping[str, Mapping[str, Any]]) -> Iterator[str]:
    begun = False
    for words, names in HEADLINES:
        if found := next((values[name] for name in names if values.get(name, {}).get("median")), None):
            verb = "multiplies matrices " if words.startswith("in ") and not begun else ""
            begun = True
            yield f"{verb}{words} {number(found['median'])} {found['unit']}"


def _trust(values: Sequence[Mapping[str, Any]]) -> str:
    measured = [value for value in values if value.get("windows") and value["better"] != "zero"]
    noisy = [value for value in measured if value["noisy"]]
    if not noisy:
        return f"All {len(measured)} measured values were steady within 5 %, so later qualifications can be compared."
    waits = [wait for value in noisy if (wait := value["core_wait_share"] or 0.0) > CONTENTION]
    cause = ""
    if waits:
        cause = f"; {len(waits)} waited for a core, up to {max(waits):.0%} of their time: stop other work and repeat"
    return f"{len(noisy)} of {len(measured)} measured values are noisy and may differ by over 5 % next time{cause}."
