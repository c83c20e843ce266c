"""A qualification: the answer, then every value with its bound, reference and verdict."""

from __future__ import annotations

import math
import shlex
from collections.abc import Iterator

from megatoken.engine.config import SHAPES, Precision
from megatoken.engine.gpus import gpus
from megatoken.engine.measured_costs import ModelWork, keys_seen
from megatoken.engine.schemes import find_scheme
from megatoken.hardware.qualify.judge import MOST_NAMED
from megatoken.hardware.qualify.shapes import (
    CPU_LOAD,
    CPU_TOKENS,
    GPU_ATTENTION,
    GPU_LAYERS,
    GPU_LOAD,
    SMALL_LOAD,
    fastest_products,
    products_of,
)
from megatoken.hardware.qualify.values import COUNTS, SPEEDS
from megatoken.report.bars import Bar, bar_chart
from megatoken.report.blocks import Badge, Facts, Figure, Points, Table, Terms, Verdict, View, section
from megatoken.report.documents import Document
from megatoken.report.roofline import Banded, Point, band_chart, roofline_chart
from megatoken.report.views.common import Field, table_of, view, word
from megatoken.text import count_of, number, precise

TONES = {"PASS": "good", "MARGINAL": "warn", "FAIL": "bad", "NO REFERENCE": "plain", "NOT RUN": "quiet"}
MEANING = {
    "PASS": "no value failed",
    "MARGINAL": "worse than a reference, but not certainly a fault",
    "FAIL": "a fault was found",
    "NO REFERENCE": "no speed could be judged; keep a complete file of the idle machine as a --baseline",
    "NOT RUN": "a test did not run, or not to its end",
}
PRECISIONS: tuple[Precision, ...] = ("fp32", "bf16", "fp8")
LEAST_SHARE_DRAWN = 0.001
MOST_WITHOUT = 5  # rows of a published table without a value of ours that a terminal shows


def qualify_view(document: Document) -> View:
    """The report on ``megatoken qualify``."""
    verdict, seconds = document.text("verdict"), document.number("seconds") or 0.0
    tests = document.parts("tests")
    unfinished = "" if document.flag("complete") else "interrupted; "
    meaning = f"{unfinished}{document.text('set')} set, {count_of(len(tests), 'test')} in {number(seconds)} s: "
    explained = MEANING.get(verdict, "nothing known here") + (f": {worse}" if (worse := _worse(tests)) else "")
    summary = (
        Verdict((_badge(verdict),), f"{meaning}{explained} ({_judged(tests)})"),
        Points("", tuple(("", sentence) for sentence in document.texts("answer"))),
    )
    sections = (
        section("Values", _values(tests)),
        section("Against the baseline", *_against_baseline(tests)),
        section("Reasons and notes", *_reasons(tests)),
        section("Roofline", *_roofline(tests)),
        section("Against published values", *_bands(tests)),
        section("Compared with a published table", *_comparison(document.part("comparison"))),
        section("Share of the bound", *_shares(tests)),
        section("Bounds and sources", _bounds(tests)),
        section("Tests", _tests(tests)),
        section("Machine", Facts("Hardware and software", document.part("machine").values)),
        section("Next", *_next_command(document, tests)),
    )
    return view(document, verdict, summary, sections, derived=("device", "parts"))


def _judged(tests: list[Document]) -> str:
    """How much the verdict rests on."""
    values = [value for test in tests for value in test.parts("values")]
    counts = sum(value.text("better") in COUNTS for value in values)
    speeds = [value for value in values if value.text("better") in SPEEDS]
    judged = sum(value.text("verdict") != "NO REFERENCE" for value in speeds)
    recorded = sum("median" in value for value in values) - counts - len(speeds)
    rest = f"; {count_of(recorded, 'rate')} only recorded" if recorded else ""
    if not counts and not judged:
        return f"judged: nothing; {count_of(len(speeds), 'speed')} without a reference{rest}"
    return f"judged: {count_of(counts, 'error count')} and {judged} of {count_of(len(speeds), 'speed')}{rest}"


def _next_command(document: Document, tests: list[Document]) -> Iterator[Points]:
    """The command that predicts a rate from this file, if its tests suffice."""
    values = {value.text("name"): value for test in tests for value in test.parts("values") if "median" in value}
    if document.text("device") in gpus():
        model, needed = "llama3.1-8b", ["hbm_copy", "decode_attention"]
        needed += [f"layer_products_fp8_{model}_{tokens}" for tokens in GPU_LAYERS.tokens]
    else:
        model = CPU_LOAD.shape
        precision = values["decode_step"].text("precision") if "decode_step" in values else ""
        needed = ["decode_attention", "prompt_attention", "rms_norm", f"decode_step{SMALL_LOAD.suffix}"]
        needed += [f"layer_products_{precision}_{tokens}" for tokens in CPU_TOKENS]
    if all(name in values for name in needed):
        file = shlex.quote(document.where if document.where.endswith(".json") else "qualify.json")
        command = f"megatoken plan throughput --machine {file} --model {model}"
        yield Points("", (("", f"What should this machine serve? {command}"),))


def _worse(tests: list[Document]) -> str:
    """The values that failed, else the marginal ones, the largest differences first; the others as a count."""
    values = [value for test in tests for value in test.parts("values")]
    crashed = [f"{test.text('title')} {test.text('fault')}" for test in tests if "fault" in test]
    failed, marginal = ([value for value in values if value.text("verdict") == one] for one in ("FAIL", "MARGINAL"))
    found = sorted((*_by_how_much(value), _title(value)) for value in failed or (() if crashed else marginal))
    named = crashed + [f"{title} {words}" for _, words, title in found]
    if len(named) > MOST_NAMED:
        named[MOST_NAMED:] = [f"and {len(named) - MOST_NAMED} more"]
    if marginal and (failed or crashed):
        named.append(f"and {count_of(len(marginal), 'value')} MARGINAL")
    return "; ".join(named)


def _by_how_much(value: Document) -> tuple[float, str]:
    """What a value differs from the reference that it is further behind, as a sort key and in words."""
    median, lower = value.number("median"), value.text("better") == "lower"
    limit = value.part("band").number("highest" if lower else "lowest")
    sign = -1 if lower else 1
    behind = [
        (sign * share, of)
        for share, of in (
            (value.number("difference"), "the baseline"),
            (median / limit - 1 if median is not None and limit else None, "published values"),
        )
        if share is not None and sign * share < 0
    ]
    if not behind:  # a wrong result, or a measurement error
        return -math.inf, f"({value.text('reason')})"
    share, of = min(behind)
    return share, f"{abs(share):.1%} {'above' if lower else 'below'} {of}"


def _title(value: Document) -> str:
    """With the GPU or node that a value is of, if it is of one among several."""
    part = value.text("part")
    return value.text("title") + (f" ({part})" if part else "")


def _badge(verdict: str) -> Badge:
    return Badge(verdict, TONES.get(verdict, "quiet"))


def _values(tests: list[Document]) -> Table:
    values = [value for test in tests for value in test.parts("values")]
    fields = [
        Field("Value", _title),
        Field("Median", _median, numeric=True),
        Field("Spread", _spread, "%", numeric=True),
        Field("Bound", _share, "%", numeric=True),
        Field("Verdict", lambda value: _badge(value.text("verdict"))),
    ]
    note = "!: noisy, may differ by over 5 % next time. Bound: share of it."
    if any(_is_shared(value) for value in values):
        note += " ~: steady, but other virtual machines of the host may slow it next time."
    if any(_above_measured(value) for value in values):
        note += " *: above its bound, which was measured itself, at another moment."
    if any(value.part("band").values for value in values):
        fields.insert(-1, Field("Normal", _normal, numeric=True))
        note += " Normal: published."
    return table_of("Values", values, fields, note=note)


def _against_baseline(tests: list[Document]) -> Iterator[Table]:
    """Each value that an earlier qualification has too: by how much it differs, and by how much it may."""
    compared = [
        value
        for test in tests
        for value in test.parts("values")
        if "baseline" in value and value.text("better") in SPEEDS
    ]
    fields = (
        Field("Value", _title),
        Field("Median", _median, numeric=True),
        Field("Baseline", _baseline, numeric=True),
        Field("Differs", lambda value: _percent(value.number("difference"), "+.1f"), "%", numeric=True),
        Field("Allowed", _allowed, "%", numeric=True),
        Field("Verdict", lambda value: _badge(value.text("verdict"))),
    )
    note = "Allowed: a value passes if it differs by no more, see docs/qualify.md."
    if noisy := sum(value.flag("baseline_noisy") is True for value in compared):
        note += f" !: the baseline's value is noisy, {noisy} of {len(compared)}; repeat it on a quiet machine."
    if compared:
        yield table_of("Against the baseline", compared, fields, note=note)


def _baseline(value: Document) -> str:
    return number(value.number("baseline")) + (" !" if value.flag("baseline_noisy") else "  ")


def _median(value: Document) -> str:
    median = value.number("median")
    if median is None:
        return ""
    return f"{number(median)} {value.text('unit')}" if value.text("better") != "same" else f"{int(median):08x}"


def _spread(value: Document) -> str:
    unknown = value.text("better") in (*COUNTS, "same") or len(value.values.get("windows") or ()) < 2
    text = "" if unknown else _percent(value.number("spread"), ".1f")
    return text + (" !" if value.flag("noisy") else " ~" if _is_shared(value) else "  ")


def _is_shared(value: Document) -> bool:
    return bool(value.text("better") in SPEEDS and not value.flag("noisy") and value.number("taken_share"))


def _share(value: Document) -> str:
    return _percent(value.number("share"), ".0f") + (" *" if _above_measured(value) else "  ")


def _above_measured(value: Document) -> bool:
    return (value.number("share") or 0.0) > 1 and not value.part("bound").flag("certain")


def _percent(share: float | None, form: str) -> str:
    return "" if share is None else f"{100 * share:{form}}"


def _normal(value: Document) -> str:
    """The limit of the published values."""
    band, lower = value.part("band"), value.text("better") == "lower"
    if not band.values or value.text("better") not in SPEEDS:
        return ""
    return f"≤ {number(band.number('highest'))}" if lower else f"≥ {number(band.number('lowest'))}"


def _allowed(value: Document) -> str:
    allowed = value.number("tolerance")
    return _percent(allowed if allowed is None or value.text("better") == "lower" else -allowed, "+.1f")


def _reasons(tests: list[Document]) -> Iterator[Points]:
    points = [
        *((test.text("verdict"), f"{test.text('title')}: {test.text('fault')}") for test in tests if "fault" in test),
        *(
            (value.text("verdict"), f"{value.text('title')}: {value.text('reason')}")
            for test in tests
            for value in test.parts("values")
            if value.text("reason")
        ),
        *(
            ("", f"{_title(value)}: {value.text('note')}")
            for test in tests
            for value in test.parts("values")
            if value.text("note")
        ),
    ]
    if points:
        yield Points("", tuple(points))


def _shares(tests: list[Document]) -> Iterator[Figure]:
    bars = [
        Bar(_title(value), 100 * share, "" if value.part("bound").flag("certain") else "measured")
        for test in tests
        for value in test.parts("values")
        if (share := value.number("share")) is not None and share >= LEAST_SHARE_DRAWN
    ]
    if bars:
        yield bar_chart("Share of the bound", "%", bars)


def _roofline(tests: list[Document]) -> Iterator[Figure]:
    """Layers, attention and steps of the engine under what memory and large products allow."""
    values = {value.text("name"): value for test in tests for value in test.parts("values")}
    medians = {name: median for name, value in values.items() if (median := value.number("median") or 0.0) > 0}
    on_gpu = "hbm_read" in medians
    read = medians.get("hbm_read") or medians.get("memory_read")
    unit, device = (1e12, "cuda") if on_gpu else (1e9, "cpu")
    roofs: dict[str, float] = {}
    for products in PRECISIONS:
        if rate := fastest_products(medians, products):
            roofs[products] = rate * unit
    points = [*_layer_points(medians, on_gpu=on_gpu), *_attention_points(medians, on_gpu=on_gpu)]
    for load in (GPU_LOAD,) if on_gpu else (SMALL_LOAD, CPU_LOAD):
        value = values.get(f"decode_step{load.suffix}")
        if value is None or not (milliseconds := value.number("median")):
            continue
        if (precision := value.text("precision")) not in PRECISIONS:
            continue
        work = ModelWork.of(SHAPES[load.shape], find_scheme(precision), device)
        keys = keys_seen(work.windows, load.sequences * load.prompt_tokens, load.sequences)
        operations = load.sequences * (work.token_operations + work.sample_operations) + keys * work.pair_operations
        moved = work.weights_bytes + keys * work.cached_token_bytes
        points.append(Point(_title(value), operations / moved, 1e3 * operations / milliseconds))
    if read and roofs and points:
        named = [(f"{precision} products", rate) for precision, rate in sorted(roofs.items())]
        yield roofline_chart("Roofline, measured", read * 1e9, named, points)


def _layer_points(medians: dict[str, float], *, on_gpu: bool) -> Iterator[Point]:
    """Products of layers: few tokens are limited by memory, many by operations."""
    shapes, tokens_of = (GPU_LAYERS.shapes, GPU_LAYERS.tokens) if on_gpu else ((CPU_LOAD.shape,), CPU_TOKENS)
    for precision in PRECISIONS:
        scheme = find_scheme(precision)
        item = scheme.weight_bytes if on_gpu else scheme.activation_bytes
        for shape in shapes:
            products = products_of(SHAPES[shape])
            for tokens in tokens_of:
                name = (
                    f"layer_products_{precision}_{shape}_{tokens}" if on_gpu else f"layer_products_{precision}_{tokens}"
                )
                if name not in medians:
                    continue
                operations = sum(one.operations(tokens) for one in products)
                intensity = operations / sum(one.moved_bytes(tokens, round(item)) for one in products)
                rate = medians[name] * (1e12 if on_gpu else 1e9)
                if tokens == 1 and not on_gpu:  # rated in bytes
                    rate *= intensity
                yield Point(f"Layers of {shape} {precision}, {count_of(tokens, 'token')}", intensity, rate)


def _attention_points(medians: dict[str, float], *, on_gpu: bool) -> Iterator[Point]:
    if "decode_attention" not in medians:
        return
    shape = SHAPES[GPU_ATTENTION.shape if on_gpu else CPU_LOAD.shape]
    item = 1 if on_gpu else 2 if any(name.startswith("layer_products_bf16") for name in medians) else 4
    intensity = 2 * (shape.heads / shape.kv_heads) / item
    yield Point("Decode attention", intensity, medians["decode_attention"] * 1e9 * intensity)


def _bands(tests: list[Document]) -> Iterator[Figure]:
    """Values with published ones, as dots over the shaded range."""
    found = [
        Banded(_title(value), value.text("unit"), median, lowest, highest)
        for test in tests
        for value in test.parts("values")
        if (median := value.number("median")) is not None
        and (lowest := value.part("band").number("lowest")) is not None
        and (highest := value.part("band").number("highest")) is not None
    ]
    if found:
        yield band_chart("Measured and published", found)


def _comparison(comparison: Document) -> Iterator[Table]:
    """The rows of a published table with a value of ours, in the row's unit, then those without and why."""
    if not comparison.values:
        return
    rows = comparison.parts("rows")
    ours, others = ([row for row in rows if ("ours" in row) is measured] for measured in (True, False))
    part, theirs, note = word("Part", "sku"), Field("Row", _row_name), word("Note", "note")
    fields = (
        part,
        theirs,
        word("Unit", "unit"),
        Field("Published", lambda row: number(row.number("theirs")), numeric=True),
        Field("Ours", lambda row: number(row.number("ours")), numeric=True),
        Field("Ours / published", lambda row: number(row.number("ratio")) if "ratio" in row else "", numeric=True),
        note,
    )
    table = comparison.text("table")
    yield table_of(f"{table}: {len(ours)} of {len(rows)} rows have a value of ours", ours, fields, most=len(ours))
    if others:
        yield table_of(f"{table}: {len(others)} rows have none", others, (part, theirs, note), most=MOST_WITHOUT)


def _row_name(row: Document) -> str:
    return f"{row.text('benchmark')} {row.text('parameter').replace(';', ' ')}"


def _bounds(tests: list[Document]) -> Terms:
    """Each bound with its formula, and the sources of each band."""
    terms = {}
    for test in tests:
        for value in test.parts("values"):
            bound, sources = value.part("bound"), value.part("band").texts("sources")
            words = []
            if bound.values:
                words.append(f"bound {precise(bound.number('value'))} {value.text('unit')}: {bound.text('formula')}")
            if sources:
                lowest, highest = (number(value.part("band").number(key)) for key in ("lowest", "highest"))
                words.append(f"normal {lowest} to {highest} {value.text('unit')}: {'; '.join(sources)}")
            if words:
                terms[_title(value)] = ". ".join(words)
    return Terms(terms)


def _tests(tests: list[Document]) -> Table:
    seconds = Field("Time", lambda test: number(test.number("seconds")), "s", numeric=True)
    return table_of(
        "Tests", tests, (word("Test", "title"), seconds, Field("Verdict", lambda test: _badge(test.text("verdict"))))
    )
