"""The metrics of a run with their labels and units: the rows that console and page share."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from megatoken.analysis.machine import is_of_server, simulated_gpu
from megatoken.analysis.qualified import agreement
from megatoken.analysis.statistics import ARRIVING, SOAK, STAGES, Samples, leading_rates, leads_with_drain, steady_span
from megatoken.report.blocks import Badge
from megatoken.runs.reasons import CAUSES
from megatoken.runs.run import Run, Verdict
from megatoken.text import ABSENT, is_number, number, precise

MORE_THAN_MISSING = 1.25  # factor on the seconds that a steady window misses
PERCENTILES = ("p50", "p90", "p95", "p99")
SCORES = {"exact_match": "Exact match", "rouge1": "ROUGE-1", "rouge2": "ROUGE-2", "rougeL": "ROUGE-L"}
UNRELIABLE_NOTE = "* too few samples to state this percentile with 99 % confidence"
NOT_VERIFIED = "Result not verified by MLCommons Association."
TRADEMARK = (  # as MLCommons' guidelines for results messaging ask for
    "The MLPerf name and logo are registered and unregistered trademarks of MLCommons Association in the United States"
    " and other countries. All rights reserved. Unauthorized use strictly prohibited. See www.mlcommons.org for more"
    " information."
)
ROUGE_2_NOTE = "ROUGE-2 counts pairs of words, so an answer of one word scores 0, right or wrong"
TONES: dict[str, str] = {Verdict.VALID: "good", Verdict.INVALID: "bad", Verdict.MEASURED: "plain"}
MEANING = {
    Verdict.MEASURED: "run completed; no MLPerf compliance claimed",
    Verdict.VALID: "meets the MLPerf rules that it claims",
    Verdict.INVALID: "a required condition was not met",
    Verdict.DEGRADED: "replicas, endpoints or client hosts were lost during the run, even if others replaced them",
    Verdict.INTERRUPTED: "ended early; the numbers cover the work done until then",
}


SHORTFALLS = {
    "FAILED_SAMPLES": "samples failed",
    "NO_OUTPUT": "the answers are empty",
    "ACCURACY": "the answers are not accurate enough",
    "COMPLIANCE": "the compliance test did not pass",
    "CLIENT_SATURATED": "the client was the limit, not the server",
    "NO_VALID_RATE": "the search found no valid rate",
}


ISSUED_LATE, WRITTEN_LATE = "Issued late by", "First byte sent late by"
CLIENT_MEMORY = "Peak memory of the client"  # a server's own is not known
LATE_NOTES = {
    ISSUED_LATE: f"{ISSUED_LATE}: from a sample's scheduled time until the load generator issued it.",
    WRITTEN_LATE: f"{WRITTEN_LATE}: from the scheduled time until the client sent the request's first byte, which "
    "includes the time above; a sample whose request was never sent is not counted.",
}
"""What the rows on lateness mean, by label."""


@dataclass(frozen=True, slots=True)
class MetricRow:
    """One line of the table: either ``value`` or the four ``percentiles`` are set, all formatted in ``unit``."""

    label: str
    unit: str
    value: str = ""
    percentiles: tuple[str, ...] = ()


def meaning(run: Run) -> str:
    """What the verdict means for this run; a simulated run says so first."""
    words = MEANING[run.verdict]
    if run.verdict is Verdict.INVALID and run.reasons:
        other = "the rate is not shown to be steady" if "soak" in run.result else "a claimed MLPerf rule is not met"
        words = "; ".join(dict.fromkeys(SHORTFALLS.get(reason["code"], other) for reason in run.reasons))
    return f"{of_simulated(gpu)}; {words}" if (gpu := simulated_gpu(run)) else words


def of_simulated(gpu: str) -> str:
    """What comes first on a run that computed nothing."""
    return f"simulated {gpu}: rates and times come from a cost model"


def causes(run: Run) -> list[Mapping[str, Any]]:
    """The notes that say why the verdict is bad; they stand next to its reasons."""
    return [note for note in run.result.get("notes") or () if note["code"] in CAUSES]


def other_notes(run: Run) -> list[Mapping[str, Any]]:
    """All notes but ``causes``."""
    return [note for note in run.result.get("notes") or () if note["code"] not in CAUSES]


def names_mlperf(run: Run) -> bool:
    """Whether the report on a run uses MLPerf's name, so that it must say who has not verified the result."""
    return bool(run.result.get("rules") or run.rules_unmet)


def loadgen_result(run: Run) -> str:
    """LoadGen's own verdict, with why it can be VALID of a run with failed samples; empty without one."""
    verdict = run.result.get("loadgen_validity")
    why = " (LoadGen counts a failed sample as answered)" if run.result.get("samples_failed") else ""
    return f"LoadGen result: {verdict}{why if verdict == 'VALID' else ''}" if verdict in ("VALID", "INVALID") else ""


def on_prediction(run: Run) -> str:
    """Of a run that qualified its machine first: whether its rate is the predicted one, or why none is predicted."""
    prediction = run.result.get("prediction") or {}
    rate, predicted = run.result.get("output_tokens_per_second"), prediction.get("output_tokens_per_second")
    if is_number(rate) and is_number(predicted) and predicted > 0:
        return agreement(rate, predicted)
    return f"No rate predicted by qualify: {why}" if (why := prediction.get("why")) else ""


def why_no_steady_rate(run: Run) -> str:
    """Why a finished Offline run has no steady rate, and what would show one; empty for all others."""
    result = run.result
    steady = result.get("steady_output_tokens_per_second")
    if steady is not None or run.verdict is Verdict.INTERRUPTED or result.get("scenario") != "offline":
        return ""
    samples = Samples.of(run.requests)
    done = samples.only(samples.completed)
    span, duration = steady_span(done.first, done.last, run.series), result.get("duration_seconds")
    if span is None or not is_number(duration):
        return ""
    if not span.waited:
        return (
            "No steady rate: no sample was waiting at any full second of the run; more --samples keep the target full"
        )
    found = max(0.0, span.end - span.start)
    longer = math.ceil(duration + MORE_THAN_MISSING * (span.required_seconds - found))
    return (
        f"No steady rate: the target was full for {number(found)} s, and {number(span.required_seconds)} s are needed;"
        f" --min-duration {longer} is likely to show one"
    )


def verdict_badge(verdict: str) -> Badge:
    """A verdict's badge; any that is not good, bad or usual is a warning."""
    return Badge(verdict, TONES.get(verdict, "warn"))


def metric_rows(run: Run) -> list[MetricRow]:
    """Every metric to show, headline first; unremarkable ones that are zero or unknown are left out."""
    result = run.result
    offline = result.get("scenario") == "offline"
    arrives, soak = result.get("scenario") in ARRIVING, result.get("scenario") == SOAK
    leading = leading_rates(result)
    of_server = is_of_server(result)
    rates = [
        _single(result, "Output rate under load" if soak else "Output rate", "tokens/s", "output_tokens_per_second"),
        _single(result, "Output rate with drain", "tokens/s", "whole_run_output_tokens_per_second"),
    ]
    if leads_with_drain(result):
        rates = [rates[1], replace(rates[0], label="Output rate by LoadGen")]
    rows = [
        *rates[: 1 + (soak or (arrives and run.verdict is not Verdict.INTERRUPTED))],
        _single(result, "Output rate when steady", "tokens/s", "steady_output_tokens_per_second"),
        *_together(result.get("aggregate")),
        _single(leading, "Input + output rate", "tokens/s", "processed_tokens_per_second"),
        _single(leading, "Sample rate", "samples/s", "samples_per_second"),
        _latency(result, "Time per output token", "tpot_seconds"),
        _latency(result, "First token since query" if offline else "Time to first token", "ttft_seconds"),
        _latency(result, "Last token since query" if offline else "Latency", "latency_seconds"),
        *_stages(result.get("stages")),
        *([_latency(result, ISSUED_LATE, "send_lag_seconds")] if arrives else []),
        *([_latency(result, WRITTEN_LATE, "request_lag_seconds")] if "request_lag_seconds" in result else []),
        _single(result, "Offered", "samples/s", "offered_samples_per_second"),
        *([_single(result, "Time under load", "s", "rated_seconds")] if soak else []),
        _single(result, "Duration with drain" if soak else "Duration", "s", "duration_seconds"),
        _single(result, "Samples completed", "samples", "samples_completed"),
        _single(result, "Samples failed", "samples", "samples_failed"),
        _single(result, "Samples cancelled", "samples", "samples_cancelled"),
        _single(result, "Input tokens", "tokens", "input_tokens"),
        _single(result, "Output tokens", "tokens", "output_tokens"),
        _single(result, "Preemptions", "times", "preemptions"),
        _single(result, CLIENT_MEMORY if of_server else "Peak memory", "MiB", "peak_memory_bytes", 2**-20),
        _single(result.get("prediction") or {}, "Predicted by qualify", "tokens/s", "output_tokens_per_second"),
        _single(result, "MFU, model operations", "%", "mfu_share", 100),
        _single(result, "MBU, memory bandwidth", "%", "mbu_share", 100),
        _single(result, "Energy, GPU only", "J/output token", "energy_joules_per_output_token"),
        _single(result, "Energy, whole system", "J/output token", "system_energy_joules_per_output_token"),
    ]
    rows += _accuracy(result.get("accuracy") or {})
    rows += _compliance(result.get("compliance") or {})
    rows += _stability(result.get("stability") or {}, result.get("soak") or {})
    unremarkable = {
        "Predicted by qualify",
        "MFU, model operations",
        "MBU, memory bandwidth",
        "Samples failed",
        "Samples cancelled",
        "Preemptions",
        "Peak memory",
        CLIENT_MEMORY,
        "Energy, GPU only",
        "Energy, whole system",
        "Offered",
    }
    return [row for row in rows if not (row.label in unremarkable and row.value in ("0", ABSENT))]


def has_unreliable(rows: list[MetricRow]) -> bool:
    """Whether a percentile in ``rows`` has the star that ``UNRELIABLE_NOTE`` explains."""
    return any(value.endswith("*") for row in rows for value in row.percentiles)


def has_rouge_2(rows: list[MetricRow]) -> bool:
    """Whether ``rows`` have the score that ``ROUGE_2_NOTE`` explains."""
    return any(row.label == SCORES["rouge2"] for row in rows)


def _single(result: dict[str, Any], label: str, unit: str, name: str, factor: float = 1) -> MetricRow:
    value = result.get(name)
    if factor != 1 and isinstance(value, int | float):
        value = value * factor
    return MetricRow(label, unit, number(value))


def _together(aggregate: Any) -> list[MetricRow]:
    """The other two rates of several nodes; the first covers the time from the first start to the last end."""
    if not isinstance(aggregate, Mapping):
        return []
    window = aggregate.get("common_window")
    rows = [_single(dict(aggregate), "Sum of node rates", "tokens/s", "sum_of_rates_tokens_per_second")]
    if isinstance(window, Mapping):
        rows.append(_single(dict(window), "While all nodes ran", "tokens/s", "output_tokens_per_second"))
    return rows


def _stages(stages: Any) -> list[MetricRow]:
    """What share of the samples' time each stage took; stages that the run does not have are left out."""
    shares = {
        name: stage.get("share")
        for name, stage in (stages if isinstance(stages, Mapping) else {}).items()
        if isinstance(stage, Mapping)
    }
    return [
        MetricRow(f"Time in {name}", "%", number(100 * share))
        for name, share in shares.items()
        if name in STAGES and is_number(share)
    ]


def _accuracy(accuracy: Mapping[str, Any]) -> list[MetricRow]:
    """Means over the answers; ROUGE is an F-measure."""
    metrics = accuracy.get("metrics") or {}
    return [
        MetricRow(label, "%", precise(metrics[name].get("value"))) for name, label in SCORES.items() if name in metrics
    ]


def _compliance(compliance: Mapping[str, Any]) -> list[MetricRow]:
    """MLPerf's test, and our own check of the same answers."""
    parts = {"passed": str(compliance.get("test")), "sound": "Our own check"}
    return [
        MetricRow(label, "", "passed" if compliance[key] is True else "not passed")
        for key, label in parts.items()
        if key in compliance
    ]


def _stability(stability: Mapping[str, Any], soak: Mapping[str, Any]) -> list[MetricRow]:
    """Whether a soak held its rate, with the figures; shares as percent."""
    if not stability:
        return []

    def percent(share: Any) -> str:
        return number(100 * share if is_number(share) else None)

    rows = [MetricRow("Stability", "", str(stability.get("verdict")))]
    for label, name in (("Trend over the soak", "trend"), ("First tenth to last", "drift")):
        if change := stability.get(name):
            rows.append(MetricRow(label, "%", percent(change.get("change_share"))))
            ends = (percent(change.get(end)) for end in ("low_share", "high_share"))
            rows.append(MetricRow("  its 99 % interval", "%", " .. ".join(ends)))
    if (variation := stability.get("coefficient_of_variation")) is not None:
        rows.append(MetricRow("Variation of windows", "%", percent(variation)))
    if worst := stability.get("worst_window"):
        label = f"Worst {number(stability.get('window_seconds'))} s"
        rows.append(_single(worst, label, "tokens/s", "output_tokens_per_second"))
    if interruptions := soak.get("interruptions"):
        pauses = [one.get("gap_seconds") for one in interruptions]
        rows.append(MetricRow("Interrupted", "times", number(len(pauses))))
        rows.append(MetricRow("Paused", "s", number(sum(pause for pause in pauses if is_number(pause)))))
    return rows


def _latency(result: dict[str, Any], label: str, name: str) -> MetricRow:
    """Seconds, or milliseconds when even p99 is under a second."""
    values = result.get(name) or {}
    p99 = values.get("p99")
    unit, factor = ("ms", 1000) if isinstance(p99, int | float) and p99 < 1 else ("s", 1)
    starred = values.get("unreliable", ())

    def text(percentile: str) -> str:
        value = values.get(percentile)
        shown = number(value * factor if isinstance(value, int | float) else None)
        return f"{shown}*" if percentile in starred and shown != ABSENT else shown

    return MetricRow(label, unit, percentiles=tuple(text(percentile) for percentile in PERCENTILES))
