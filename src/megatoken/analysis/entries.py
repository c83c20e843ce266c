"""Entries to compare: own runs with their repeats, aggregated nodes, rows of the published tables."""

from __future__ import annotations

import statistics
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from megatoken.analysis.comparison import FILES, HASH, MADE_UP_TOKENS, OF_A_MODEL, Entry
from megatoken.analysis.contradictions import check_rates
from megatoken.analysis.machine import Occupation, accelerator_name, made_up, rate_state, run_accelerators
from megatoken.analysis.published import (
    RESULTS,
    PublishedResult,
    accelerator_table,
    has_accelerator,
    mlperf_data_set,
    model_of,
    published_results,
    results_of,
    split_benchmark,
)
from megatoken.analysis.repeats import check_repeats, whole_runs, worst_verdict
from megatoken.analysis.standing import answer_length
from megatoken.analysis.statistics import leading_rates
from megatoken.errors import UsageError
from megatoken.runs.plan_hash import flat
from megatoken.text import is_number, precise, suggestion

if TYPE_CHECKING:
    from megatoken.analysis.aggregation import Aggregate
    from megatoken.runs.run import Run

CPU_WAITS = ("CORE_WAIT", "DRIVER_CORE_WAIT")
# Fields of an entry that a published row and the result of a run have under the same name.
_OF_ROW = (
    *("name", "source", "output_tokens_per_second", "round", "division", "scenario", "precision", "accelerator"),
    *("accelerators", "nodes", "output_tokens_per_sample", "measured_watts"),
)
_OF_RESULT = (
    *("scenario", "model", "precision", "mode", "data_set", "data_set_sha256"),
    *("ttft_limit_seconds", "tpot_limit_seconds"),
)
LOCAL_KEYS = {"out"}  # of a configuration: places, not settings


def published_entry(row: PublishedResult, note: str | None = None) -> Entry:
    """One row of the published tables. The model is the one that ran, which open submissions may choose."""
    model, accuracy_target = split_benchmark(row.used_model)
    availability = "" if row.availability in ("available", "") else f"availability {row.availability}"
    length = answer_length(row.benchmark, row.output_tokens_per_sample)
    return Entry(
        **{name: getattr(row, name) for name in _OF_ROW},
        state="verified",
        model=model,
        accuracy_target=accuracy_target or split_benchmark(row.benchmark)[1],
        verdict="VALID",  # only valid results are published
        mode="performance",
        data_set=mlperf_data_set(row.benchmark),
        software=dict(_versions(row.software)),
        note="; ".join(filter(None, (note, availability, length))) or None,
    )


def accelerator_entry(reference: str, benchmark: str, scenario: str) -> Entry:
    """The published system with the highest rate per accelerator; without any, an entry that says "no data".

    ``reference`` is the accelerator in any round, ``GB200``, or in one, ``GB200@v5.1``.

    Raises:
        UsageError: no row of any benchmark has an accelerator of that name, no row is of that benchmark or scenario, or
            the results of that round are not shipped.
    """
    accelerator, at, round = reference.partition("@")
    if at and round not in RESULTS:
        raise UsageError(f"{reference}: the shipped results are of {', '.join(RESULTS)}; write {accelerator}@v5.1")
    benchmarks = {name for row in published_results() for name in (row.benchmark, model_of(row.benchmark))}
    _check_published("--benchmark", benchmark, benchmarks)
    _check_published("--scenario", scenario, {row.scenario for row in published_results()})
    rows = results_of(accelerator, benchmark, scenario, round or None)
    if rows:
        same = [row for row in rows if row.division == rows[0].division]
        low, high = (row.tokens_per_second_per_accelerator or 0.0 for row in (same[-1], same[0]))
        note = (
            f"fastest per accelerator of {len(same)} {same[0].division} rows with {reference};"
            f" they range from {precise(low)} to {precise(high)} tokens/s per accelerator"
        )
        return published_entry(rows[0], note if len(same) > 1 else None)
    if not _is_published(accelerator):
        known = ", ".join(filter(_is_published, accelerator_table()))
        raise UsageError(
            f"{accelerator}: not a folder, a published id or an accelerator; published are, among others, {known}"
        )
    return Entry(
        name=f"{reference}:{benchmark}:{scenario}",
        source=f"MLPerf Inference {round or ', '.join(RESULTS)}",
        state="no data",
        output_tokens_per_second=None,
        round=round or None,
        scenario=scenario,
        model=model_of(benchmark),
        note=f"no published {benchmark} {scenario} result of {reference}: no data does not mean slower"
        + _others(accelerator, scenario, round or None),
    )


def _others(accelerator: str, scenario: str, round_: str | None) -> str:
    """The benchmarks of which the accelerator has results in that scenario."""
    rows = (row for row in published_results() if has_accelerator(row, accelerator) and round_ in (None, row.round))
    names = dict.fromkeys(
        row.benchmark for row in rows if row.is_of(row.benchmark, scenario) and row.output_tokens_per_second
    )
    return f"; published are {', '.join(names)} (--benchmark)" if names else ""


def _is_published(accelerator: str) -> bool:
    return any(has_accelerator(row, accelerator) for row in published_results())


def _check_published(flag: str, name: str, known: Collection[str]) -> None:
    if name.lower() not in {one.lower() for one in known}:
        fix = suggestion(name, known, f"published are {', '.join(sorted(known))}")
        raise UsageError(f"{flag} {name}: no published result has it; {fix}")


def run_entry(runs: Sequence[Run], name: str) -> Entry:
    """Run folders of one setting as one entry: the geometric mean of their rates, and each rate as a repeat.

    Interrupted runs are left out of the mean if others finished.

    Raises:
        UsageError: no run, a run without a rate or with a contradictory one, or runs that are not repeats of each
            other.
    """
    if not runs:
        raise UsageError(f"{name}: no run folder in it")
    check_repeats(runs, name)
    whole = whole_runs(runs)
    for run in whole:
        check_rates(run)
        if not run.result.get("output_tokens_per_second"):
            raise UsageError(f"{run.path}: {run.verdict}, without a rate to compare")
    first, result = whole[0], whole[0].result
    rates = [float(leading_rates(run.result)["output_tokens_per_second"]) for run in whole]
    accelerators, nodes = run_accelerators(first), len(result.get("nodes", [])) or 1
    samples = sum(run.result["samples_completed"] for run in whole)
    read = [run.result["input_tokens"] for run in whole]
    return Entry(
        name=name,
        source=str(first.path) if len(runs) == 1 else f"{len(whole)} runs: {', '.join(run.path.name for run in whole)}",
        state=rate_state(first),
        tokens=MADE_UP_TOKENS if made_up(first) else OF_A_MODEL,
        output_tokens_per_second=rates[0] if len(rates) == 1 else statistics.geometric_mean(rates),
        accelerator=accelerator_name(first) if accelerators else None,
        accelerators=accelerators,
        nodes=nodes,
        verdict=worst_verdict(whole),
        weights=weights_of(result),
        **{name: result.get(name) for name in _OF_RESULT},
        **{name: (result.get("identity") or {}).get(name) for name in (*FILES[1:], "rows_sha256")},
        formats=formats_of(result),
        input_tokens_per_sample=None if None in read else sum(read) / samples,
        output_tokens_per_sample=sum(run.result["output_tokens"] for run in whole) / samples,
        duration_seconds=statistics.fmean(run.result["duration_seconds"] for run in whole),
        offered_samples_per_second=None if "rate_search" in result else result.get("offered_samples_per_second"),
        cpu_wait_share=max(map(_cpu_wait, whole)),
        occupations=tuple(found for run in whole if (found := Occupation.of(run))),
        paths=tuple(str(run.path) for run in whole),
        repeats=tuple(rates) if len(rates) > 1 else (),
        software=run_software(first),
        note="; ".join(_run_notes(runs, whole)) or None,
    )


def weights_of(result: Mapping[str, Any]) -> str | None:
    """What identifies the weights of a run: a hash of their content, in older folders of their headers, or a seed."""
    weights = result.get("weights")
    if weights is None or "identity" in result or not HASH.fullmatch(weights):
        return weights
    return f"headers {weights}"


def formats_of(result: Mapping[str, Any]) -> str | None:
    """Number formats of weights, activations and KV cache as text; None where the target does not report them."""
    formats = (result.get("target") or {}).get("formats")
    if not isinstance(formats, Mapping):
        return None
    return ", ".join(f"{name.replace('_', ' ')} {value}" for name, value in formats.items())


def _cpu_wait(run: Run) -> float:
    """The share of the time that the run waited for a core; 0 if its notes have none."""
    notes = [note for note in run.result.get("notes") or () if note.get("code") in CPU_WAITS]
    return max((float(note["share"]) for note in notes if is_number(note.get("share"))), default=0.0)


def _run_notes(runs: Sequence[Run], whole: Sequence[Run]) -> Iterator[str]:
    left_out = [run.path.name for run in runs if run not in whole]
    if left_out:
        yield f"without {', '.join(left_out)}, which did not finish"
    result = whole[0].result
    if note := made_up(whole[0]):
        yield note["message"]
    if result.get("scenario") in ("server", "interactive") and "rate_search" not in result:
        yield (
            f"the rate of a {result['scenario']} run is the offered load while it keeps up; --find-rate finds the"
            " highest load that it can serve"
        )


def aggregate_entry(result: Aggregate, name: str, *, state: str, accelerator: str | None) -> Entry:
    """Aggregated nodes as one entry: the sum of their rates, the verdict that all share, or INVALID if one is."""
    verdicts = {node["verdict"] for node in result.nodes}
    counts = [node["samples"] for node in result.nodes]
    return Entry(
        name=name,
        source=", ".join(result.inputs),
        state=state,
        output_tokens_per_second=result.sum_of_rates_tokens_per_second,
        scenario=result.workload["scenario"],
        model=result.workload["model"],
        precision=result.workload["precision"],
        verdict="INVALID" if "INVALID" in verdicts else verdicts.pop() if len(verdicts) == 1 else None,
        mode="performance",
        output_tokens_per_sample=None if None in counts or not sum(counts) else result.output_tokens / sum(counts),
        duration_seconds=result.makespan.seconds,
        paths=result.inputs,
        accelerator=accelerator,
        accelerators=result.accelerators,
        nodes=len(result.nodes),
        note=result.sum_label if len(result.nodes) > 1 else None,
    )


def run_software(run: Run) -> dict[str, str]:
    """Versions and settings of a run, by dotted name: anything that may explain a difference on the same hardware."""
    environment = run.environment
    gpus = environment.get("gpus") or [{}]
    facts: dict[str, Any] = {
        **{key: environment.get(key) for key in ("operating_system", "kernel", "python")},
        "target": run.result.get("target"),
        "driver": gpus[0].get("driver_version"),
        "packages": environment.get("packages"),
        "source": environment.get("source"),
        "variables": environment.get("variables"),
        "config": {key: value for key, value in run.config.items() if key not in LOCAL_KEYS},
    }
    return dict(flat("", facts))


def _versions(text: str) -> Iterator[tuple[str, str]]:
    """``TensorRT 10.11, CUDA 12.9`` as pairs of name and version."""
    for part in text.split(","):
        name, _, version = part.strip().rpartition(" ")
        yield (name, version) if name else (version, "")
