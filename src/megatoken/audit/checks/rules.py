"""The rules of MLPerf's closed division that one log can meet or break. They weigh only where they are claimed."""

from __future__ import annotations

from collections.abc import Iterator

from megatoken.audit.checks.stopping import SUCCESS, TEXTS
from megatoken.audit.evidence import Role
from megatoken.audit.finding import Observation, Severity, shown
from megatoken.audit.view import RunView, observe
from megatoken.mlperf.benchmarks import benchmarks
from megatoken.mlperf.detail_log import DetailLog
from megatoken.mlperf.rounds import round_seeds, ruled_rounds, rules
from megatoken.mlperf.run_figures import whole
from megatoken.text import count_of

_SERVER_RATES = ("completed_tokens_per_second", "completed_samples_per_sec")
# What LoadGen asks of a run beside its latencies, in the words of its summary.
_CONSTRAINTS = {
    "result_perf_constraints_met": "performance constraints not met",
    "result_min_duration_met": "minimum duration not reached",
    "result_min_queries_met": "fewer queries than the minimum",
}


def check_rules(run: RunView) -> Iterator[Observation]:
    """Rules for performance and accuracy logs; compliance runs have settings of their own."""
    if run.files.role is Role.COMPLIANCE or run.figures.scenario is None:
        return
    yield from _any_run(run)
    if run.is_performance:
        yield from _performance(run)
        yield from _scenario(run)
        yield from _token_window(run)
        yield from _limits(run)


def _any_run(run: RunView) -> Iterator[Observation]:
    log = run.detail
    first = log.errors[0] if log.errors else None
    yield observe(
        "rules.no_errors",
        log.error_count == 0,
        "no line marked as an error",
        f"{count_of(log.error_count, 'error')}, the first: {shown(first.value)}" if first else "none",
        run.at(first.key) if first else run.at("num_errors"),
        # LoadGen prints VALID whatever errors it logged.
        run.unmet if run.rules_claimed or log.get("result_validity") == "INVALID" else Severity.WARN,
    )
    if run.rules_claimed and run.files.role in (Role.PERFORMANCE, Role.ACCURACY):
        wanted = "AccuracyOnly" if run.files.folder.endswith("/accuracy") else "PerformanceOnly"
        if run.files.folder.endswith(("/accuracy", "/run_1")):
            mode = run.figures.mode
            yield observe("rules.mode", mode == wanted, wanted, shown(mode), run.at("effective_test_mode"), run.unmet)
    if run.rules_claimed:
        yield _benchmark(run)
    total = whole(log, "qsl_reported_total_count")
    if run.benchmark is not None:
        rows = run.benchmark.accuracy_rows if run.is_accuracy else run.benchmark.rows
        found = whole(log, "effective_accuracy_sample_count") if run.is_accuracy else total
        found = total if found is None else found
        yield observe(
            "rules.data_set",
            found == rows,
            f"{rows:,} rows, the data set of {run.benchmark.name}",
            count_of(found, "row") if found is not None else "not said",
            run.at("qsl_reported_total_count"),
            run.unmet,
        )
    yield _seeds(run)
    name = log.text("sut_name") or ""
    if run.files.division == "network":
        yield observe(
            "rules.network", "Network SUT" in name, "a SUT name with 'Network SUT'", shown(name), run.at("sut_name")
        )


def _benchmark(run: RunView) -> Observation:
    """The round has the benchmark; unknown where the numbers of one of them are not."""
    round_ = run.round or run.figures.round
    named = run.files.benchmark or (run.benchmark.name if run.benchmark else None)
    mine = [name for name, entry in benchmarks().items() if round_ in entry.rounds]
    found = shown(named or "no benchmark named")
    known = run.benchmark is not None and round_ in ruled_rounds()
    if not known:
        found += f": its rules in {round_ or 'this round'} are not known here, and not all were applied"
    return observe(
        "rules.benchmark",
        run.benchmark is not None and run.benchmark.name in mine if known else None,
        f"a benchmark of {round_}: {', '.join(mine)}" if mine else "a benchmark of a known round",
        found,
        run.at("qsl_reported_total_count"),
        run.unmet,
    )


def _seeds(run: RunView) -> Observation:
    """The three seeds of one round; that of the claimed round where one is claimed."""
    keys = tuple(f"effective_{name}_rng_seed" for name in ("qsl", "sample_index", "schedule"))
    found = tuple(run.detail.get(key) for key in keys)
    mine = run.figures.round
    wanted = run.round
    if wanted is None:
        return observe(
            "rules.seeds",
            mine is not None,
            "the seeds of a round",
            f"those of {mine}" if mine else "of none",
            run.at(*keys),
            run.unmet,
        )
    return observe(
        "rules.seeds",
        mine == wanted,
        f"the seeds of {wanted}: {', '.join(str(seed) for seed in round_seeds()[wanted])}",
        f"those of {mine}" if mine else shown(", ".join(str(seed) for seed in found)),
        run.at(*keys),
        run.unmet,
    )


def loadgens_reasons(log: DetailLog) -> Iterator[str]:
    """Why LoadGen calls a run INVALID: constraints, its own reason, and early stopping, which leaves that empty."""
    if reason := _one_line(log.text("result_invalid_reason")):
        yield reason
    else:
        yield from (words for key, words in _CONSTRAINTS.items() if log.get(key) is False)
    if log.get("early_stopping_met") is False:
        texts = [text for key in TEXTS if (text := _one_line(log.text(key))) and text != SUCCESS]
        yield f"early stopping not satisfied{': ' if texts else ''}{' '.join(texts)}"


def _one_line(text: str | None) -> str:
    return " ".join((text or "").replace("*", " ").split())


def _performance(run: RunView) -> Iterator[Observation]:
    log = run.detail
    validity = log.get("result_validity")
    yield observe(
        "rules.valid",
        validity == "VALID" if validity is not None else None,
        "VALID",
        shown(f"{validity}: {'; '.join(loadgens_reasons(log)) or 'no reason given'}")
        if validity not in ("VALID", None)
        else shown(validity or "no verdict"),
        run.at("result_validity", "result_invalid_reason", "early_stopping_met"),
        run.unmet,
    )
    equal = log.get("effective_sample_concatenate_permutation")
    llm = run.benchmark is not None
    if llm:
        yield observe(
            "rules.equal_issue",
            equal is True,
            "every row issued equally often: effective_sample_concatenate_permutation true",
            shown(equal),
            run.at("effective_sample_concatenate_permutation"),
            run.unmet,
        )
        yield observe(
            "rules.token_latencies",
            log.get("requested_use_token_latencies") is True,
            "token latencies switched on",
            run.text("requested_use_token_latencies"),
            run.at("requested_use_token_latencies"),
            run.unmet,
        )
    least_ms, asked_ms = rules()["min_duration_ms"], log.number("effective_min_duration_ms")
    if run.figures.scenario != "MultiStream":
        yield observe(
            "rules.min_duration",
            asked_ms is not None and asked_ms >= least_ms,
            f"effective_min_duration_ms of at least {least_ms:,}",
            run.text("effective_min_duration_ms"),
            run.at("effective_min_duration_ms"),
            run.unmet,
        )
        ran = _ran_seconds(run)
        yield observe(
            "rules.ran_long_enough",
            None if ran is None else ran >= least_ms / 1e3,
            f"a run of at least {least_ms / 1e3:g} s",
            "not known" if ran is None else f"{ran:.1f} s",
            run.at("result_max_latency_ns" if run.figures.scenario == "Offline" else "power_end"),
            run.unmet,
        )
    if run.benchmark is not None:
        rows = run.benchmark.rows
        count = whole(log, "effective_performance_sample_count")
        yield observe(
            "rules.sample_count",
            count is not None and count >= rows,
            f"effective_performance_sample_count of at least {rows:,}",
            run.text("effective_performance_sample_count"),
            run.at("effective_performance_sample_count"),
            run.unmet,
        )
        if run.figures.scenario == "Offline":
            yield from _offline(run, rows)


def _offline(run: RunView, rows: int) -> Iterator[Observation]:
    log = run.detail
    samples = whole(log, "effective_samples_per_query")
    yield observe(
        "rules.offline_samples",
        samples is not None and samples >= rows and (whole(log, "effective_min_query_count") or 0) >= 1,
        f"one query of at least {rows:,} samples",
        run.text("effective_samples_per_query"),
        run.at("effective_samples_per_query", "effective_min_query_count"),
        run.unmet,
    )
    issued = run.figures.samples_issued
    yield observe(
        "rules.whole_passes",
        None if issued is None else issued % rows == 0,
        f"whole passes over {rows:,} rows",
        "not known" if issued is None else f"{count_of(issued, 'sample')}, {issued / rows:g} passes",
        run.at("generated_samples_per_query"),
        run.unmet,
    )


def _ran_seconds(run: RunView) -> float | None:
    log = run.detail
    if run.figures.scenario == "Server":
        queries, rate = whole(log, "result_query_count"), log.number("result_scheduled_samples_per_sec")
        return (queries - 1) / rate if queries and rate else None
    return run.figures.duration_seconds


def _scenario(run: RunView) -> Iterator[Observation]:
    folder, logged = run.files.scenario, run.figures.scenario
    if folder is None:
        return
    wanted = "Server" if folder == "Interactive" else folder
    yield observe(
        "rules.scenario",
        logged == wanted,
        f"a {wanted} log in a folder named {folder}",
        f"a {logged} log",
        run.at("effective_scenario"),
        Severity.FAIL,
    )


def _limits(run: RunView) -> Iterator[Observation]:
    """TTFT and TPOT at the 99th percentile, by the limits of the folder's scenario."""
    log = run.detail
    if run.figures.scenario != "Server" or run.benchmark is None:
        return
    ttft_key = "result_first_token_99.00_percentile_latency_ns"
    tpot_key = "result_time_per_output_token_99.00_percentile_ns"
    ttft, tpot = log.number(ttft_key), log.number(tpot_key)
    scenario = run.files.scenario or _scenario_by_limits(run)
    limits = run.benchmark.limits.get(scenario or "Server")
    if limits is None or ttft is None or tpot is None:
        yield observe(
            "rules.latency_limits", None, "TTFT and TPOT below the limits", "limits or figures missing", run.at()
        )
        return
    yield observe(
        "rules.latency_limits",
        ttft < limits.ttft_ns and tpot < limits.tpot_ns,
        f"{scenario or 'Server'}: p99 TTFT < {limits.ttft_ns / 1e6:g} ms and p99 TPOT < {limits.tpot_ns / 1e6:g} ms",
        f"{ttft / 1e6:g} ms and {tpot / 1e6:g} ms",
        run.at(ttft_key, tpot_key),
        run.unmet,
    )
    asked = log.number("requested_server_ttft_latency"), log.number("requested_server_tpot_latency")
    yield observe(
        "rules.limits_asked",
        asked == (limits.ttft_ns, limits.tpot_ns),
        f"LoadGen told the limits {limits.ttft_ns} and {limits.tpot_ns} ns",
        f"{shown(asked[0])} and {shown(asked[1])} ns",
        run.at("requested_server_ttft_latency", "requested_server_tpot_latency"),
        run.unmet,
    )
    most = run.benchmark.max_target_latency_ns
    target = log.number("effective_target_latency_ns")
    if most is not None and target is not None:
        yield observe(
            "rules.target_latency",
            target <= most,
            f"effective_target_latency_ns of at most {most}",
            f"{target:.0f}",
            run.at("effective_target_latency_ns"),
            run.unmet,
        )
    met = log.get("early_stopping_met")
    yield observe(
        "rules.early_stopping", met is True, "early stopping met", shown(met), run.at("early_stopping_met"), run.unmet
    )


def _scenario_by_limits(run: RunView) -> str | None:
    """Without a scenario folder: the scenario whose limits LoadGen was told."""
    asked = (
        run.detail.number("requested_server_ttft_latency"),
        run.detail.number("requested_server_tpot_latency"),
    )
    table = run.benchmark.limits if run.benchmark else {}
    return next((name for name, limits in table.items() if (limits.ttft_ns, limits.tpot_ns) == asked), None)


def _token_window(run: RunView) -> Iterator[Observation]:
    window = run.benchmark.tokens_per_sample if run.benchmark else None
    if window is None or run.benchmark is None:
        return
    found = run.figures.tokens_per_sample
    yield observe(
        "rules.tokens_per_sample",
        None if found is None else window[0] <= found <= window[1],
        f"{window[0]:g} to {window[1]:g} tokens per sample, within 10 % of the reference of {run.benchmark.name}",
        "not known" if found is None else f"{found:.2f}",
        run.at(*(f"result_{name}" for name in ("tokens_per_second", "samples_per_second", *_SERVER_RATES))),
        Severity.WARN if run.rules_claimed else Severity.NOTE,
    )
