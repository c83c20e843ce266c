"""Fields of ``result.json`` that follow from other fields, LoadGen's log and the tables of a run.

Pure functions: the harness calls them when a test ends, and an audit calls them again on the run folder's contents.
"""

from __future__ import annotations

import math
import signal
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import numpy as np

from megatoken.accuracy.gate import Judgement
from megatoken.analysis.stability import judge_soak
from megatoken.analysis.statistics import ARRIVING, Samples, lateness
from megatoken.config import RunConfig
from megatoken.engine.schemes import has_bf16_activations
from megatoken.harness.loadgen import TestSettings
from megatoken.harness.loadgen_plan import run_benchmark, run_limits
from megatoken.mlperf.benchmarks import LatencyLimits, benchmark
from megatoken.mlperf.detail_log import DetailLog
from megatoken.mlperf.endpoints import PointRules, judge_point
from megatoken.mlperf.latencies import Latencies, latencies, percentile
from megatoken.mlperf.rounds import DEFAULT_ROUND
from megatoken.mlperf.rules import (
    ClientCapacity,
    Observed,
    doubts,
    judge,
    round_of,
    send_lag_limit_seconds,
    unmet_rules,
)
from megatoken.mlperf.run_figures import in_seconds
from megatoken.runs.reasons import Reason, reason, shortfall
from megatoken.runs.run import Verdict

if TYPE_CHECKING:
    import pyarrow as pa

CORE_WAIT_SHARE = 0.05  # of the time; more is noted
NOTED_LATE_SECONDS = 0.005  # at p99; a process that sends and waits for a core, but is no later, is not noted
CLIENT_BUSY_SHARE = 0.9  # of a core, in the busiest second of a client process
CLIENT_LATE_SHARE = 0.05  # of the looks of a client process at its clock, which may be late by over 10 ms
SPARE = 2.0  # times the processes that a load would keep busy all the time
_OUTPUT_RATES = {"offline": "result_tokens_per_second"}
_SAMPLE_RATES = {"offline": "result_samples_per_second", "singlestream": "result_qps_with_loadgen_overhead"}


def asked_facts(config: RunConfig, settings: TestSettings) -> dict[str, Any]:
    """The benchmark, the limits and the rate of a test; known before it starts."""
    limits = run_limits(config)
    offers = config.scenario in ("server", "interactive")
    return {
        "benchmark": run_benchmark(config).name,
        "seeds": settings.seeds._asdict(),
        "offered_samples_per_second": settings.offered_rate if offers else None,
        "ttft_limit_seconds": limits.ttft_seconds if limits else None,
        "tpot_limit_seconds": limits.tpot_seconds if limits else None,
    }


def concluded(
    facts: Mapping[str, Any], log: DetailLog, requests: pa.Table, judged: Judgement, *, compliance: bool
) -> dict[str, Any]:
    """What the end of a test with LoadGen adds to ``result.json``: verdict, reasons, latencies, LoadGen's figures.

    ``facts``: fields of ``result.json`` that are known by then. ``requests``: table of ``SampleRow``; every sample has
    ended. ``compliance``: whether it is a compliance test, which measures no speed.
    """
    scenario, samples, claimed = facts["scenario"], Samples.of(requests), facts["rules"] is not None
    of = benchmark(facts["benchmark"])
    limits = own = None
    if facts["ttft_limit_seconds"] is not None:
        limits = LatencyLimits(facts["ttft_limit_seconds"], facts["tpot_limit_seconds"])
        own = latencies(samples, limits)
    client = facts["client_capacity"]
    observed = Observed(
        scenario=scenario,
        mode="compliance" if compliance else facts["mode"],
        data_set_rows=facts["data_set_rows"],
        last_due_seconds=float(samples.scheduled.max()),
        limits=of.limits_of(scenario),
        latencies=own,
        send_lag_p99_seconds=None if scenario == "offline" else percentile(samples.sent - samples.scheduled),
        client=ClientCapacity(**client) if client else None,
        samples_per_second=facts["offered_samples_per_second"],
        wall_clock_step_seconds=facts["wall_clock_step_seconds"],
        failed_samples=int(samples.failed.sum()),
    )
    unmet, doubtful = unmet_rules(round_of(facts["rules"] or DEFAULT_ROUND, of), log, observed), doubts(log, observed)
    verdict, reasons = judge(
        claimed, unmet, observed.failed_samples, len(samples), [*no_output(samples), *judged.reasons], doubtful
    )
    verdict, reasons = _without_replicas(verdict, reasons, lost_parts(facts))
    if saturated := saturated_client(facts, samples, limits):
        verdict, reasons = Verdict.INVALID, [*reasons, *saturated]
    return {
        "verdict": verdict,
        "reasons": reasons,
        "rules_unmet": [] if claimed else unmet,
        "doubts": [] if claimed else doubtful,
        "send_lag_limit_seconds": None if scenario == "offline" else send_lag_limit_seconds(limits),
        **loadgen_facts(scenario, log),
        **({"latency_verdict": latency_facts(own, limits, log)} if own and limits else {}),
        **judged.facts,
    }


def concluded_soak(
    facts: Mapping[str, Any], environment: Mapping[str, Any], requests: pa.Table, series: pa.Table
) -> dict[str, Any]:
    """What the end of a soak adds to ``result.json``; it has no log of LoadGen.

    ``facts``: fields of ``result.json`` that are known by then. ``requests`` and ``series``: tables of ``SampleRow``
    and ``SeriesRow``.
    """
    stability = judge_soak(facts, environment, requests, series)
    samples = Samples.of(requests)
    wrong = [*no_output(samples), *stability["reasons"]]
    verdict, reasons = judge(False, [], int(samples.failed.sum()), len(requests), wrong)
    before = [
        reason("LOST_REPLICAS", lost_replicas=one["lost_replicas"], at_seconds=one["at_seconds"])
        for one in facts["soak"]["interruptions"]
        if one["lost_replicas"]
    ]
    verdict, reasons = _without_replicas(verdict, reasons, [*before, *lost_replicas(facts)])
    return {"verdict": verdict, "reasons": reasons, "rules_unmet": [], "doubts": [], "stability": stability}


def concluded_point(facts: Mapping[str, Any], requests: pa.Table) -> dict[str, Any]:
    """What the end of a point of a sweep adds to ``result.json``; arguments as those of ``concluded_soak``."""
    rules, samples = facts["load"].get("rules"), Samples.of(requests)
    point = judge_point(PointRules(**rules), requests) if rules else None
    broken = point["broken"] if point else []
    verdict, reasons = judge(point is not None, broken, int(samples.failed.sum()), len(requests), no_output(samples))
    verdict, reasons = _without_replicas(verdict, reasons, lost_parts(facts))
    if saturated := saturated_client(facts, samples, None):
        verdict, reasons = Verdict.INVALID, [*reasons, *saturated]
    judged = {"ruled": point} if point else {}
    return {"verdict": verdict, "reasons": reasons, "rules_unmet": [], "doubts": [], **judged}


def no_output(samples: Samples) -> list[Reason]:
    """A reason if no answer has a token, so that nothing was measured but requests."""
    tokens = samples.output_tokens[samples.completed]
    return [reason("NO_OUTPUT", answers=len(tokens))] if len(tokens) and not tokens.any() else []


def lost_parts(facts: Mapping[str, Any]) -> list[Reason]:
    """What was lost of the target and of its client."""
    return [*lost_replicas(facts), *lost_endpoints(facts), *lost_hosts(facts)]


def lost_replicas(facts: Mapping[str, Any]) -> list[Reason]:
    """One reason if a rack lost replicas: how many and why."""
    rack = facts.get("rack")
    if not rack or rack["replicas_least"] >= rack["replicas"]:
        return []
    counts = Counter((loss["node"], loss["cause"]) for loss in rack["lost"])
    losses = [f"{count} on {node} ({cause})" for (node, cause), count in counts.items()]
    names = ("replicas_least", "replicas", "share_left", "replicas_at_end")
    return [reason("LOST_REPLICAS", **{name: rack[name] for name in names}, losses=losses or None)]


def lost_endpoints(facts: Mapping[str, Any]) -> list[Reason]:
    """One reason if endpoints were lost: how many and why."""
    endpoints = facts.get("endpoints")
    if not endpoints or not endpoints["lost"]:
        return []
    losses = [
        f"{one['endpoint']} at {one['at_seconds']:.0f} s ({one['cause']})"
        + (f", back at {one['back_at_seconds']:.0f} s" if one["back_at_seconds"] is not None else "")
        for one in endpoints["lost"]
    ]
    moved = sum(one["samples_moved"] for one in endpoints["lost"])
    return [
        reason("LOST_ENDPOINTS", lost=len(losses), endpoints=endpoints["count"], losses=losses, samples_moved=moved)
    ]


def lost_hosts(facts: Mapping[str, Any]) -> list[Reason]:
    """One reason if hosts of the client were lost: which and why."""
    client = facts.get("client") or {}
    if not client.get("lost"):
        return []
    losses = [f"{one['host']} at {one['at_seconds']:.0f} s ({one['cause']})" for one in client["lost"]]
    moved = sum(one["samples_moved"] for one in client["lost"])
    hosts = len(client["hosts"])
    return [reason("LOST_HOSTS", lost=len(losses), hosts=hosts, losses=losses, samples_moved=moved)]


def _failure_notes(facts: Mapping[str, Any]) -> list[Reason]:
    """Why samples of a run against servers failed: when it began, what each said, and how a started server ended."""
    failed = (facts.get("endpoints") or {}).get("failed")
    if not failed:
        return []
    code = "REQUESTS_FAILED" if failed.get("answered") and failed["server"] is None else "SERVER_FAILED"
    said = [f"{one['samples']:,} x {one['message']}" for one in failed["messages"]]
    server, ended = failed["server"], {}
    if server is not None:
        status = server["exit_status"]
        how = f"was ended by {_signal_name(-status)}" if status < 0 else f"ended with exit status {status}"
        ended = {"how": how, "last_lines": server["last_lines"], "log": server["log"]}
    return [reason(code, at_seconds=failed["at_seconds"], answers=failed["answers_before"], said=said, **ended)]


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def saturated_client(facts: Mapping[str, Any], samples: Samples, limits: LatencyLimits | None) -> list[Reason]:
    """A reason if the client that sent the requests was the limit: it sent late, or had no processor time left.

    None in accuracy mode, whose answers are the same however late they come.
    """
    client = facts.get("client")
    if not client or facts.get("mode") == "accuracy":
        return []
    busy, processes, waited = client["busy_share"], client["processes"], client["core_wait_share"] or 0.0
    starved = waited > CORE_WAIT_SHARE and busy <= CLIENT_BUSY_SHARE  # others have the cores: more processes get none
    wanted = math.ceil(SPARE * max(processes * busy, _wanted_processes(facts, samples)))
    needed = max(processes if starved else processes + 1, wanted)
    more = {"processes": processes, "busy_share": busy, "core_wait_share": waited, "processes_needed": needed}
    cores = client.get("cores")  # an older run has not all fields
    if starved:
        more["free_cores"] = needed
    elif cores and needed > cores:
        hosts = len(client.get("hosts", ())) or 1
        more |= {"cores": cores, "hosts_needed": math.ceil(needed * hosts / cores)}
    if facts["scenario"] in ARRIVING and np.isfinite(samples.request_sent).any():
        lag, limit = percentile(samples.request_lag), send_lag_limit_seconds(limits)
        if lag > limit:
            return [shortfall("CLIENT_SATURATED", lag, limit, **more)]
    late = client.get("late_share", 0.0)
    if busy > CLIENT_BUSY_SHARE or late > CLIENT_LATE_SHARE:
        return [reason("CLIENT_SATURATED", late_share=late, **more)]
    return []


def _wanted_processes(facts: Mapping[str, Any], samples: Samples) -> float:
    """How many client processes, all of each busy, the load takes by the client's test of itself."""
    test, completed = facts["client"].get("self_test"), int(samples.completed.sum())
    if not test or not completed:
        return 0.0
    rate = facts.get("offered_samples_per_second") or completed / float(np.nanmax(samples.last))
    if not facts["target"]["stream"]:
        return float(rate / test["requests_per_second"])
    return float(rate * samples.output_tokens[samples.completed].mean() / test["frames_per_second"])


def _without_replicas(
    verdict: Verdict, reasons: Sequence[Reason], lost: Sequence[Reason]
) -> tuple[Verdict, list[Reason]]:
    """The verdict and its reasons with what was lost of a rack."""
    if lost and verdict is not Verdict.INVALID:
        verdict = Verdict.DEGRADED
    return verdict, [*reasons, *lost]


def loadgen_facts(scenario: str, log: DetailLog) -> dict[str, Any]:
    """What LoadGen's log says; latencies in seconds, None where the scenario has none."""

    def seconds(key: str) -> float | None:
        return in_seconds(log.number(key), 1e9) if scenario != "offline" else None

    return {
        "loadgen_version": log.text("loadgen_version"),
        "loadgen_validity": log.get("result_validity"),
        "loadgen_output_tokens_per_second": log.number(
            _OUTPUT_RATES.get(scenario, "result_completed_tokens_per_second")
        ),
        "loadgen_samples_per_second": log.number(_SAMPLE_RATES.get(scenario, "result_completed_samples_per_sec")),
        "loadgen_scheduled_samples_per_second": log.number("result_scheduled_samples_per_sec"),
        "loadgen_ttft_p99_seconds": seconds("result_first_token_99.00_percentile_latency_ns"),
        "loadgen_tpot_p99_seconds": seconds("result_time_per_output_token_99.00_percentile_ns"),
        "loadgen_latency_p90_seconds": seconds("result_90.00_percentile_latency_ns"),
        "loadgen_latency_p99_seconds": seconds("result_99.00_percentile_latency_ns"),
        "loadgen_early_stopping_met": log.get("early_stopping_met") if scenario != "offline" else None,
    }


def latency_facts(own: Latencies, limits: LatencyLimits, log: DetailLog) -> dict[str, Any]:
    """Our own check of the latencies and LoadGen's, both with the same limits, which may be the user's."""
    return {
        **asdict(own),
        "met": own.met(limits),
        "loadgen_met": bool(log.get("result_perf_constraints_met") and log.get("early_stopping_met")),
    }


def run_notes(facts: Mapping[str, Any]) -> list[Reason]:
    """What a reader of the numbers must know: the notes among ``facts``, and those that follow from its ``target``."""
    return [*facts.get("notes", ()), *engine_notes(facts.get("target", {}), facts.get("precision"))]


def engine_notes(engine: Mapping[str, Any], precision: str | None) -> list[Reason]:
    """What makes an engine, as it describes itself, slower than the machine could be, or may do so."""
    notes = []
    if engine.get("why_no_kernels"):
        notes.append(reason("NO_KERNELS", why=engine["why_no_kernels"]))
    if has_bf16_activations(precision) and engine.get("bf16_widened"):
        notes.append(reason("BF16_WIDENED"))
    if engine.get("device") == "cpu" and engine.get("why_no_gpu"):
        notes.append(reason("NO_GPU", why=engine["why_no_gpu"]))
    if (expanded := engine.get("expanded_linears")) is not None:
        notes.append(reason("EXPANDED_WEIGHTS", linears=expanded["count"], exact=expanded["exact"]))
    return notes


def core_wait_notes(
    share: float | None, facts: Mapping[str, Any], noted_late_seconds: float = NOTED_LATE_SECONDS
) -> list[Reason]:
    """The note on a run with these facts whose process waited for a core for ``share`` of the time it wanted one.

    A process that only sends is noted if it was later than ``noted_late_seconds`` at p99.
    """
    if share is None or share <= CORE_WAIT_SHARE:
        return []
    # Neither the replicas of a rack nor a server are part of this process.
    if "rack_nodes" not in facts and (facts.get("target") or {}).get("kind") != "endpoint":
        return [reason("CORE_WAIT", share=share)]
    parts = [facts.get(name) or {} for name in ("send_lag_seconds", "request_lag_seconds")]
    late = [part["p99"] for part in parts if part.get("p99") is not None]
    if facts.get("scenario") == "offline" or not late:  # all are due at once
        return [reason("DRIVER_CORE_WAIT", share=share)]
    return [reason("DRIVER_CORE_WAIT", share=share, late_seconds=max(late))] if max(late) > noted_late_seconds else []


def end_notes(facts: Mapping[str, Any], requests: pa.Table | None = None) -> list[Reason]:
    """The notes of ``facts``, with those that are known when a run ends: on waits for a core, and on failures.

    Without its ``requests`` it is not known how late they were.
    """
    samples = None if requests is None else Samples.of(requests)
    late = {} if samples is None else lateness(samples)
    waits = core_wait_notes(facts.get("core_wait_share"), {**facts, **late})
    whole = [] if samples is None else _one_piece_notes(samples)
    return [*facts["notes"], *waits, *_failure_notes(facts), *whole]


def _one_piece_notes(samples: Samples) -> list[Reason]:
    answers, of = int(samples.in_one_piece.sum()), int(samples.of_several_tokens.sum())
    return [reason("IN_ONE_PIECE", answers=answers, of=of, share=answers / of)] if answers else []
