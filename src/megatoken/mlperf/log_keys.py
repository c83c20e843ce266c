"""The lines of LoadGen's logs: keys of the detail log and labels of the summary, as each release prints them."""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import cache

from megatoken.mlperf.detail_log import DetailLog
from megatoken.mlperf.loadgen_builds import source_lines
from megatoken.mlperf.rounds import load_csv

MODES = ("PerformanceOnly", "AccuracyOnly")
_BY_RELEASE = ("requested_accuracy_sample_count_override", "effective_accuracy_sample_count", "num_errors")
# Of the one percentile that the scenario's target is about, such as "99th percentile first token latency (ns)".
_TARGET_PERCENTILE = re.compile(r"(\d+(?:\.\d)?)th (first token )?percentile latency \(ns\)")


@cache
def _keys(scenario: str, mode: str, token_latencies: str, validity: str) -> tuple[str, ...]:
    facts = {"scenarios": scenario, "mode": mode, "token_latencies": token_latencies, "validity": validity}
    rows = load_csv("loadgen_detail_keys.csv")
    return tuple(
        row["key"] for row in rows if all(not row[name] or fact in row[name].split() for name, fact in facts.items())
    )


def log_keys(log: DetailLog) -> list[str]:
    """The keys that this LoadGen writes for this scenario and mode, in order; empty for modes of several runs."""
    tokens = "yes" if log.get("requested_use_token_latencies") is True else "no"
    validity = "VALID" if log.get("result_validity") == "VALID" else "INVALID"
    scenario, mode = log.text("effective_scenario"), log.text("effective_test_mode")
    if scenario not in ("Offline", "Server", "SingleStream", "MultiStream") or mode not in MODES:
        return []
    return [key for key in _keys(scenario, mode, tokens, validity) if _written_by_release(log, key) is not False]


def optional_keys(log: DetailLog) -> set[str]:
    """Keys that only some releases write, if the release is not known."""
    return {key for key in _BY_RELEASE if _written_by_release(log, key) is None}


def _written_by_release(log: DetailLog, key: str) -> bool | None:
    """Whether the LoadGen of this log writes ``key``; None if its source files are not known."""
    if key not in _BY_RELEASE:
        return True
    sources = log.get("loadgen_file_sha1")
    name = "results.cc" if key == "num_errors" else "test_settings_internal.cc"
    sha1 = sources.get(f"/{name}") if isinstance(sources, dict) else None
    lines = source_lines(name, sha1) if isinstance(sha1, str) else None
    return None if lines is None else key in lines


def summary_rows(scenario: str | None) -> list[Mapping[str, str]]:
    """The labelled lines of the summary in this scenario, in order: label, key of the detail log, required."""
    rows = load_csv("loadgen_summary_labels.csv")
    return [row for row in rows if not row["scenarios"] or (scenario or "") in row["scenarios"].split()]


def usual_label(label: str) -> str:
    """Releases before 5.1.1 print "Min Time to Output Token"."""
    return label.replace("Time to Output Token", "Time per Output Token")


def key_of_label(label: str, scenario: str | None) -> str | None:
    """The key of the detail log whose value a label shows; None for a label that LoadGen does not print."""
    if found := _TARGET_PERCENTILE.fullmatch(label):
        first_token, percent = "first_token_" if found.group(2) else "", f"{float(found.group(1)):.2f}"
        per_query = "per_query_" if scenario == "MultiStream" and not first_token else ""
        return f"result_{first_token}{percent}_percentile_{per_query}latency_ns"
    return next((row["key"] for row in summary_rows(scenario) if row["label"] == usual_label(label)), None)
