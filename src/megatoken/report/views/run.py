"""The report on a run: its rate with its verdict, every metric, model and environment, and charts."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from megatoken.analysis.limits import answer_for, limit_documents
from megatoken.analysis.statistics import (
    PERCENTILE_METHOD,
    SHORTEST_STEADY_LIVES,
    SHORTEST_STEADY_SECONDS,
    SOAK,
    STEADY_SHARE,
    Samples,
    latency_origin,
    leading_rates,
    leads_with_drain,
)
from megatoken.planning.run_price import judge_run, request_price
from megatoken.report.bars import Dot, dot_chart
from megatoken.report.blocks import Block, Cards, Column, Facts, Figure, Headline, Points, Table, Terms, View, section
from megatoken.report.blocks import Verdict as VerdictBlock
from megatoken.report.curves import histogram_chart
from megatoken.report.metrics import (
    LATE_NOTES,
    NOT_VERIFIED,
    PERCENTILES,
    ROUGE_2_NOTE,
    TRADEMARK,
    UNRELIABLE_NOTE,
    causes,
    has_rouge_2,
    has_unreliable,
    loadgen_result,
    meaning,
    metric_rows,
    names_mlperf,
    on_prediction,
    other_notes,
    verdict_badge,
    why_no_steady_rate,
)
from megatoken.report.plots import Mark
from megatoken.report.views.aggregate import MANY_NODES
from megatoken.report.views.common import records_table
from megatoken.report.views.goodput import goodput_blocks, limits_of
from megatoken.report.views.limits import answer_badge, limits_table
from megatoken.report.views.over_time import time_figures
from megatoken.report.views.rate_search import search_answer, search_blocks
from megatoken.report.words import plain_text, sentence
from megatoken.runs.run import Run
from megatoken.text import count_of, is_number, natural, number, precise

DEFINITIONS = {
    "Output rate": "Output tokens of the completed samples over the time from the start of the run to the"
    " last completion, drain included. LoadGen, and so MLPerf, rates Server and Interactive to the completion of the"
    " sample issued last: that rate stands first where MLPerf's rules are claimed, and can be above the rate offered."
    " In a soak, under load: the output tokens of its time series until the load ends, over that time. With drain:"
    " those of completed samples, to the last completion. Failed and cancelled samples do not count."
    " Interrupted, the output tokens of its time series over the time until then.",
    "Sample rate": "Completed samples over the time of the output rate that stands first. samples_per_second in"
    " result.json is LoadGen's: in Server and Interactive it counts one sample less, to the completion of the one"
    " issued last.",
    "Steady window": f"From the first to the last moment at which at least {STEADY_SHARE * 100:g} % of the peak"
    " number of samples were generating; a sample generates from its first token to its last. It ends at the latest"
    " when the queue is empty. It leaves out ramp and tail. Not stated when shorter than"
    f" {SHORTEST_STEADY_SECONDS:g} s, when shorter than {SHORTEST_STEADY_LIVES:g} times as long as the median sample"
    " generates, or when the run was interrupted.",
    "Time per output token": "(last token − first token) / (output tokens − 1) of each sample with two tokens or more;"
    " one value per sample. Answers in one piece are left out; see the note.",
    "Percentiles": f"{PERCENTILE_METHOD[0].upper()}{PERCENTILE_METHOD[1:]}. A star marks a percentile that has too few"
    " samples for 99 % confidence.",
    "Goodput": "Good: the share of the judged samples that met the limits. Judged: all samples that were due, failed"
    " ones included, except answers that were within the limits when they were cut off. Output: tokens of the samples"
    " that met the limits, so far as they were seen. Of all of the run, or of the window of its load if it has one; of"
    " an interrupted run, until the last row of its time series.",
}
FILES = {
    "result.json": "verdict, reasons and every metric, its unit in its name",
    "requests.parquet": "one row per sample: times, token counts, how it ended",
    "series.parquet": "one row per second and replica",
    "environment.json": "machine, versions, source revision",
    "config.yaml": "the resolved configuration",
    "mlperf/": "LoadGen's own logs, unchanged; they are not a result if the folder has ABANDONED.txt",
}
FOOTER = "Made by megatoken from the files in this folder; megatoken report rebuilds the page from them."


def run_view(run: Run) -> View:
    """The report on a run folder."""
    samples, subject = Samples.of(run.requests), _subject(run)
    terms = DEFINITIONS | {"First and last token": f"Counted from: {latency_origin(str(run.result.get('scenario')))}."}
    figures = list(time_figures(run, samples, limits_of(run)))
    sections = (
        section("Rate search", *search_blocks(run.result, limits_of(run))),
        section("Over time", *figures[:1], *_notes(run), *figures[1:]),
        section("Over samples", *_sample_figures(run, samples)),
        section("Numbers", *_metrics(run)),
        section("Goodput", *goodput_blocks(run, samples)),
        section("Nodes", *_nodes(run)),
        section(
            "Model and environment",
            Facts("Model and environment", subject, folded=False) if subject else None,
            _changed_settings(run),
        ),
        section("Definitions", Terms(terms)),
        section(
            "Evidence",
            Facts("MLPerf rules not met", {unmet["code"]: unmet["message"] for unmet in run.rules_unmet})
            if run.rules_unmet
            else None,
            Facts("Machine and versions", run.environment),
            Facts("Configuration", run.config),
            Facts("Files in this folder", {name: text for name, text in FILES.items() if name not in _absent(run)}),
        ),
    )
    footer = f"{FOOTER} {NOT_VERIFIED} {TRADEMARK}" if names_mlperf(run) else FOOTER
    return View(_title(run), str(run.verdict), tuple(_summary(run)), sections, footer)


def _title(run: Run) -> str:
    """Model, precision, scenario and machine."""
    ran = [str(run.result[key]) for key in ("model", "precision", "scenario") if run.result.get(key)]
    machine = _gpus(run) or str(run.environment.get("hostname") or "")
    return " ".join([*ran, *(["on", machine] if machine else [])]) or run.path.name


def _gpus(run: Run) -> str:
    gpus = Counter(gpu["name"] for gpu in run.environment.get("gpus") or ())
    return ", ".join(f"{count} × {name}" for name, count in gpus.items())


def _summary(run: Run) -> Iterator[Block]:
    result = run.result
    completed = result.get("samples_completed")
    facts = [
        f"{number(completed)} sample{'s' * (completed != 1)} in {number(result.get('duration_seconds'))} s",
        f"rated over {number(result.get('rated_seconds'))} s under load" if result.get("scenario") == SOAK else "",
        "drain included" if leads_with_drain(result) else "",
        str(run.environment.get("hostname", "")),
        str(result.get("created_at", "")).replace("T", " ").replace("Z", " UTC"),
        run.path.name,
    ]
    rate = number(leading_rates(result)["output_tokens_per_second"])
    yield Headline(rate, "output tokens/s", " · ".join(fact for fact in facts if fact))
    yield VerdictBlock((verdict_badge(run.verdict),), meaning(run))
    if answer := search_answer(result):
        yield Points("", (("", f"Rate search: {answer}"),))
    if verdict := loadgen_result(run):
        yield Points("", (("", verdict),))
    yield from _at_a_glance(run)
    if answers := judge_run(run):
        yield VerdictBlock((answer_badge(str(answer_for(run.verdict, answers))),), "by your limits")
        yield limits_table(limit_documents(answers))
    if explained := [*run.reasons, *causes(run)]:
        yield _points("", explained)
    if run.rules_unmet:
        codes = ", ".join(dict.fromkeys(unmet["code"] for unmet in run.rules_unmet))
        yield Points("", (("", f"MLPerf rules not met (none claimed): {codes}"),))
    for why in filter(None, (why_no_steady_rate(run), on_prediction(run))):
        yield Points("", (("", why),))
    if run.doubts:
        yield _points("Doubts about the measurement:", run.doubts)


def _notes(run: Run) -> Iterator[Points]:
    """What to know about the run, below its first picture."""
    if notes := other_notes(run):
        yield Points("Notes:", tuple(("", note["message"]) for note in notes))


def _at_a_glance(run: Run) -> Iterator[Cards]:
    """What a buyer asks of these prompts on this machine: slowest answers, price; each with its arithmetic."""
    result, rates = run.result, leading_rates(run.result)
    if not rates["output_tokens_per_second"]:
        return
    cards = []
    for label, name, unit in (
        ("Time to first token", "ttft_seconds", "s"),
        ("Time per output token", "tpot_seconds", "ms"),
    ):
        row = result.get(name) or {}
        if is_number(row.get("p99")) and not (name == "ttft_seconds" and result.get("scenario") == "offline"):
            few = "; too few for 99 % confidence" if "p99" in row.get("unreliable", ()) else ""
            value = f"{number(row['p99'] * (1000 if unit == 'ms' else 1))} {unit}"
            cards.append((f"{label}, p99", value, f"of {number(row.get('samples'))} values{few}"))
    if price := request_price(run):
        cards.append(("Price of a request", f"${precise(price.dollars)}", price.formula))
    else:
        cards.append(("Price of a request", "unknown", "--dollars-per-hour gives the price of the machine"))
    if is_number(rate := rates["samples_per_second"]):
        tokens = f"{number(result.get('output_tokens'))} output tokens in {number(rates['rated_seconds'])} s"
        cards.append(("Requests", f"{number(rate)}/s", "" if result.get("scenario") == SOAK else tokens))
    yield Cards(tuple(cards))


def _points(title: str, reasons: Sequence[Mapping[str, Any]]) -> Points:
    return Points(title, tuple((reason["code"], reason["message"]) for reason in reasons))


def _subject(run: Run) -> dict[str, Any]:
    """Facts that a reader needs to compare the result; unknown ones are left out."""
    result, environment = run.result, run.environment
    packages = environment.get("packages") or {}
    rows = result.get("data_set_rows")
    facts = {
        "Model": result.get("model"),
        "Weights": result.get("weights"),
        "Data set": " · ".join(filter(None, (result.get("data_set"), rows and count_of(rows, "row")))),
        "CPU": _cpu(environment.get("cpu") or {}),
        "GPU": _gpus(run),
        **dict(_named(result.get("target") or {})),
        "LoadGen": None if _absent(run) else result.get("loadgen_version") or packages.get("mlcommons-loadgen"),
        "megatoken": packages.get("megatoken"),
    }
    return {name: value for name, value in facts.items() if value}


def _named(values: Mapping[str, Any], of: str = "") -> Iterator[tuple[str, Any]]:
    """Values by their names in words; those of a nested mapping one by one."""
    for key, value in values.items():
        name = f"{of} of {key.replace('_', ' ')}" if of else sentence(key)
        if isinstance(value, Mapping):
            yield from _named(value, name)
        elif value:
            yield name, plain_text(value) if isinstance(value, bool) else value


def _changed_settings(run: Run) -> Block | None:
    """Settings that were given and differ from their defaults; None of an older run, which does not say."""
    changed = run.result.get("changed_settings")
    if changed is None:
        return None
    if not changed:
        return Points("", (("", "All settings have their defaults."),))
    rows = tuple((one["setting"], plain_text(one.get("value")), plain_text(one.get("default"))) for one in changed)
    columns = (Column("Setting"), Column("Value"), Column("Default"))
    return Table("Settings that differ from the defaults", columns, rows, narrow=True)


def _absent(run: Run) -> set[str]:
    """Of ``FILES``, those that a run of its kind does not have: a soak does not use LoadGen."""
    return {"mlperf/"} if run.result.get("scenario") == SOAK else set()


def _cpu(cpu: Mapping[str, Any]) -> str:
    cores = f"{cpu.get('usable_cores')} of {cpu.get('logical_cores')} logical cores usable" if cpu else ""
    return " · ".join(filter(None, (cpu.get("model"), cores)))


def _metrics(run: Run) -> Iterator[Table]:
    rows = metric_rows(run)
    values = tuple((row.label, row.unit, row.value) for row in rows if not row.percentiles)
    heads = (Column("Metric"), Column("Unit"), Column("Value", numeric=True))
    yield Table("Rates and counts", heads, values, narrow=True, note=ROUGE_2_NOTE if has_rouge_2(rows) else "")
    latencies = tuple((row.label, row.unit, *row.percentiles) for row in rows if row.percentiles)
    columns = (Column("Latency"), Column("Unit"), *(Column(name, numeric=True) for name in PERCENTILES))
    notes = [UNRELIABLE_NOTE] if has_unreliable(rows) else []
    notes += [LATE_NOTES[row.label] for row in rows if row.label in LATE_NOTES]
    yield Table("Percentiles", columns, latencies, stacked=True, note=" ".join(notes))


def _sample_figures(run: Run, samples: Samples) -> Iterator[Figure]:
    done = samples.only(samples.completed & np.isfinite(samples.first))
    if len(done) < 2:
        return
    offline = run.result.get("scenario") == "offline"
    since = f"seconds since the {'start of the query' if offline else 'scheduled time'}"
    known = limits_of(run)
    ttft = [
        Mark(f"{one.name}, {one.ttft_seconds:g} s", one.ttft_seconds, upright=True)
        for one in known
        if one.ttft_seconds is not None and not offline
    ]
    yield histogram_chart("First token", "s", [("samples", done.ttft)], x_label=since, limits=ttft)
    yield histogram_chart("Last token", "s", [("samples", done.last - done.scheduled)], x_label=since)
    tpot = done.known_tpot
    tpot = tpot[np.isfinite(tpot)]
    if len(tpot) > 1:
        milliseconds = [(one.name, 1000 * one.tpot_seconds) for one in known if one.tpot_seconds is not None]
        yield histogram_chart(
            "Time per output token",
            "ms",
            [("samples", 1000 * tpot)],
            x_label="milliseconds",
            from_zero=False,
            limits=[Mark(f"{name}, {limit:g} ms", limit, upright=True) for name, limit in milliseconds],
        )
    read = done.input_tokens[np.isfinite(done.input_tokens)]  # a server may not say how many it read
    lengths = [*([("input", read)] if len(read) else []), ("output", done.output_tokens)]
    yield histogram_chart("Lengths of the samples", "tokens", lengths, x_label="tokens")


def _nodes(run: Run) -> Iterator[Block]:
    nodes = sorted(run.result.get("nodes") or [], key=lambda node: natural(str(node.get("node"))))
    if len(nodes) < 2:
        return
    rated = [(str(node.get("node")), node.get("output_tokens_per_second")) for node in nodes]
    dots = [Dot(name, rate) for name, rate in rated if isinstance(rate, int | float)]
    if 1 < len(dots) <= MANY_NODES:
        mean = sum(dot.value for dot in dots) / len(dots)
        yield dot_chart("Rate of each node", "output tokens/s", dots, [("mean", mean)])
    yield records_table("Nodes", nodes)
    rack = run.result.get("rack")
    if isinstance(rack, Mapping):
        for caption, name in (
            ("Replicas lost", "lost"),
            ("Replicas that joined", "joined"),
            ("Offsets of the nodes' clocks from the driver's", "clock_offsets"),
        ):
            if records := rack.get(name):
                yield records_table(caption, records)
