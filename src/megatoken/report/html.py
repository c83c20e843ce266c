"""A run as one HTML page that needs nothing but itself: no script, no font, no image, no request."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

import numpy as np

from megatoken.report.charts import Floats, Mark, distribution, level, line_chart, rate
from megatoken.report.metrics import (
    ABSENT,
    MEANING,
    PERCENTILES,
    UNRELIABLE_NOTE,
    MetricRow,
    has_unreliable,
    metric_rows,
    number,
)
from megatoken.report.style import STYLE
from megatoken.results import Reason, Run, read_run, save_report
from megatoken.results.statistics import (
    PERCENTILE_METHOD,
    SHORTEST_STEADY_SECONDS,
    STEADY_SHARE,
    Samples,
    totals_over_time,
)

POLICY = "default-src 'none'; style-src 'unsafe-inline'; img-src data:"
DEFINITIONS = {
    "Output tokens per second": "Output tokens of the completed samples over the time from the start of the run to the"
    " last completion. Samples that failed or were cancelled count nothing.",
    "Steady window": f"From the first to the last moment at which at least {STEADY_SHARE * 100:g} % of the peak"
    " number of samples were generating; a sample generates from its first token to its last. Ramp and tail are"
    f" left out. Not stated when shorter than {SHORTEST_STEADY_SECONDS:g} s or when the run was interrupted.",
    "Time per output token": "(last token − first token) / (output tokens − 1) of each sample with two tokens or more;"
    " one value per sample.",
    "Percentiles": f"{PERCENTILE_METHOD[0].upper()}{PERCENTILE_METHOD[1:]}. A star marks those that too few samples"
    " support with 99 % confidence.",
}
FILES = {
    "result.json": "verdict, reasons and every metric, its unit in its name",
    "requests.parquet": "one row per sample: times, token counts, how it ended",
    "series.parquet": "one row per second and replica",
    "environment.json": "machine, versions, source revision",
    "config.yaml": "the resolved configuration",
    "mlperf/": "LoadGen's own logs, untouched; no result where ABANDONED.txt stands beside them",
}


def write_report(path: Path) -> Path:
    """Make ``report.html`` of the run folder ``path`` anew and return where it is.

    Raises:
        UsageError: the folder cannot be read.
        StorageError: the page cannot be written.
    """
    return save_report(path, page(read_run(path)))


def page(run: Run) -> str:
    """The whole page as text. It is well-formed XML after its first line."""
    name = escape(run.path.name)
    return (
        "<!DOCTYPE html>\n"
        f'<html lang="en"><head><meta charset="utf-8"/><title>{name} · {run.verdict} · megatoken</title>'
        '<meta name="viewport" content="width=device-width, initial-scale=1"/>'
        f'<meta http-equiv="Content-Security-Policy" content="{POLICY}"/>'
        f'<link rel="icon" href="data:,"/><style>{STYLE}</style></head>\n<body>\n'
        f"{''.join(_sections(run))}</body></html>\n"
    )


def _sections(run: Run) -> Iterator[str]:
    yield f"<header>{_header(run)}</header>\n<main>\n"
    yield f"<section>{_metrics(run)}</section>\n"
    yield f"<section><h2>What ran, and on what</h2>{_facts_table(_subject(run))}</section>\n"
    charts = "".join(_charts(run))
    if charts:
        yield f'<section><h2>Over time, and over samples</h2><div class="charts">{charts}</div></section>\n'
    definitions = DEFINITIONS | {
        "First and last token": f"Counted from: {run.result.get('latency_origin', 'unknown')}."
    }
    terms = "".join(f"<dt>{escape(term)}</dt><dd>{escape(meaning)}</dd>" for term, meaning in definitions.items())
    yield f"<section><h2>What the words mean</h2><dl>{terms}</dl></section>\n"
    yield f"<section><h2>Evidence</h2>{_facts('Machine and versions', run.environment)}"
    yield f"{_facts('Configuration', run.config)}{_facts('Files beside this page', FILES)}</section>\n</main>\n"
    yield "<footer>Made by megatoken from the files beside this page; the page can be made anew from them.</footer>\n"


def _header(run: Run) -> str:
    result = run.result
    seconds = number(result.get("duration_seconds"))
    subject = (result.get("model"), result.get("precision"), result.get("scenario"))
    facts = [
        *(str(part) for part in subject if part),
        f"{number(result.get('samples_completed'))} samples in {seconds} s",
        str(run.environment.get("hostname", "")),
        str(result.get("created_at", "")).replace("T", " ").replace("Z", " UTC"),
    ]
    return (
        f"<h1>{escape(run.path.name)}</h1>"
        f'<p class="headline">{number(result.get("output_tokens_per_second"))}'
        ' <span class="unit">output tokens/s</span></p>'
        f'<p class="quiet">{escape(" · ".join(fact for fact in facts if fact))}</p>'
        f'<div class="verdict"><span class="badge {run.verdict}">{run.verdict}</span>'
        f"<span>{escape(MEANING[run.verdict])}</span></div>"
        f"{_findings(run.reasons)}"
        + (f"<p>MLPerf rules not met:</p>{_findings(run.rules_unmet)}" if run.rules_unmet else "")
        + "".join(f'<p class="quiet">Note: {escape(note)}</p>' for note in result.get("notes") or ())
    )


def _subject(run: Run) -> dict[str, Any]:
    """What a reader must know to hold the number against another; what the folder does not tell is left out."""
    result, environment = run.result, run.environment
    packages = environment.get("packages") or {}
    gpus = Counter(gpu["name"] for gpu in environment.get("gpus") or ())
    rows = result.get("data_set_rows")
    facts = {
        "Model": result.get("model"),
        "Weights": result.get("weights"),
        "Data set": " · ".join(filter(None, (result.get("data_set"), rows and f"{rows:,} rows"))),
        "CPU": _cpu(environment.get("cpu") or {}),
        "GPU": ", ".join(f"{count} × {name}" for name, count in gpus.items()),
        **{name.replace("_", " ").capitalize(): value for name, value in (result.get("target") or {}).items()},
        "LoadGen": result.get("loadgen_version") or packages.get("mlcommons-loadgen"),
        "megatoken": packages.get("megatoken"),
    }
    return {name: value for name, value in facts.items() if value}


def _cpu(cpu: Mapping[str, Any]) -> str:
    cores = f"{cpu.get('usable_cores')} of {cpu.get('logical_cores')} logical cores usable" if cpu else ""
    return " · ".join(filter(None, (cpu.get("model"), cores)))


def _findings(findings: list[Reason]) -> str:
    items = "".join(f"<li><code>{escape(f['code'])}</code> {escape(f['message'])}</li>" for f in findings)
    return f'<ul class="findings">{items}</ul>' if items else ""


def _metrics(run: Run) -> str:
    rows = metric_rows(run)
    values = [(row, [row.value]) for row in rows if not row.percentiles]
    latencies = [(row, list(row.percentiles)) for row in rows if row.percentiles]
    note = f'<p class="quiet">{UNRELIABLE_NOTE}</p>' if has_unreliable(rows) else ""
    return (
        f'<h2>Numbers</h2><div class="tables"><div>{_table(["Value"], values)}</div>'
        f"<div>{_table(PERCENTILES, latencies)}{note}</div></div>"
    )


def _table(columns: Sequence[str], rows: Sequence[tuple[MetricRow, Sequence[str]]]) -> str:
    heads = "".join(f'<th scope="col" class="number">{column}</th>' for column in columns)
    body = "".join(
        f'<tr><th scope="row">{escape(row.label)} <span class="unit">{row.unit}</span></th>'
        + "".join(f'<td class="number">{cell}</td>' for cell in cells)
        + "</tr>"
        for row, cells in rows
    )
    return f'<table><thead><tr><th scope="col">Metric</th>{heads}</tr></thead><tbody>{body}</tbody></table>'


def _charts(run: Run) -> Iterator[str]:
    if len(run.series) > 1:
        yield from _charts_over_time(run)
    samples = Samples.of(run.requests)
    done = samples.only(samples.completed & np.isfinite(samples.first))
    if len(done) > 1:
        yield from _charts_over_samples(done, offline=run.result.get("scenario") == "offline")


def _charts_over_time(run: Run) -> Iterator[str]:
    columns = ["output_tokens", "in_flight", "waiting", "rows", "row_budget", "pages_free", "pages"]
    times, tokens, in_flight, waiting, rows, row_budget, pages_free, pages = totals_over_time(run.series, columns)
    average = run.result.get("output_tokens_per_second")
    window = run.result.get("steady_window_seconds")
    x_label = "seconds since the start"
    yield line_chart(
        "Output tokens over time",
        [rate("each second", times, tokens)],
        x_label=x_label,
        y_label="tokens/s",
        band=(window[0], window[1]) if window else None,
        mark=Mark(f"completed samples, average {number(average)}", average) if average else None,
        identifier="output",
    )
    yield line_chart(
        "Samples being computed",
        [level("samples", times, in_flight - waiting)],
        x_label=x_label,
        y_label="samples",
        identifier="samples",
    )
    yield line_chart(
        "Use of the engine",
        [
            level("rows of a step", times, _percent(rows, row_budget)),
            level("cache pages", times, _percent(pages - pages_free, pages)),
        ],
        x_label=x_label,
        y_label="% of what there is",
        y_max=100,
        identifier="use",
    )


def _charts_over_samples(done: Samples, *, offline: bool) -> Iterator[str]:
    several = done.only(done.output_tokens >= 2)
    y_label = "% of samples at or below"
    origin = "the query's start" if offline else "the scheduled time"
    yield line_chart(
        "First and last token",
        [
            distribution("first token", done.first - done.scheduled),
            distribution("last token", done.last - done.scheduled),
        ],
        x_label=f"seconds since {origin}",
        y_label=y_label,
        y_max=100,
        identifier="latency",
    )
    if len(several) > 1:
        milliseconds = 1000 * (several.last - several.first) / (several.output_tokens - 1)
        yield line_chart(
            "Time per output token",
            [distribution("samples", milliseconds)],
            x_label="milliseconds",
            y_label=y_label,
            x_from_zero=False,
            y_max=100,
            identifier="tpot",
        )
    yield line_chart(
        "Lengths of the samples",
        [distribution("input", done.input_tokens), distribution("output", done.output_tokens)],
        x_label="tokens",
        y_label=y_label,
        y_max=100,
        identifier="lengths",
    )


def _percent(part: Floats, whole: Floats) -> Floats:
    share = np.zeros_like(part)
    np.divide(100 * part, whole, out=share, where=whole > 0)
    return share


def _facts(title: str, facts: Mapping[str, Any]) -> str:
    return f"<details><summary>{title}</summary>{_facts_table(facts)}</details>"


def _facts_table(facts: Mapping[str, Any]) -> str:
    rows = "".join(
        f'<tr><th scope="row">{escape(name)}</th><td>{escape(value)}</td></tr>' for name, value in _flat(facts)
    )
    return f'<table class="facts"><tbody>{rows}</tbody></table>'


def _flat(value: Any, name: str = "") -> Iterator[tuple[str, str]]:
    """Nested mappings and lists of them as dotted names."""
    if isinstance(value, Mapping) and value:
        for key, item in value.items():
            yield from _flat(item, f"{name}.{key}" if name else str(key))
    elif isinstance(value, list) and any(isinstance(item, Mapping) for item in value):
        for index, item in enumerate(value):
            yield from _flat(item, f"{name}.{index}")
    elif isinstance(value, list):
        yield name, ", ".join(map(str, value)) or ABSENT
    else:
        yield name, ABSENT if value is None or value == {} else str(value)
