"""The figures of a run, from its detail log."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta

from megatoken.analysis.statistics import leading_rates, leads_with_drain
from megatoken.mlperf.detail_log import DetailLog
from megatoken.mlperf.loadgen_builds import version_number
from megatoken.mlperf.rounds import round_of_seeds
from megatoken.text import exact, is_number

LOGS_PADDING = (5, 0, 11)  # releases before it log the number of Offline samples before padding to whole passes
PERCENTILES = ("50.00", "90.00", "95.00", "97.00", "99.00", "99.90")
QUARTER_SECONDS, WIDEST_ZONE_SECONDS = 900, 14 * 3600


@dataclass(frozen=True, slots=True)
class RunFigures:
    """What one detail log states about its run.

    Tokens are output tokens. ``samples_issued`` is ``generated_samples_per_query`` times ``result_query_count``;
    ``samples_requested`` is ``effective_samples_per_query`` (Offline). ``duration_seconds`` is the largest sample
    latency (Offline performance) or power_end minus power_begin (others). Wall-clock times are the host's, in UTC.
    """

    scenario: str | None = None  # Offline, Server, SingleStream, MultiStream
    mode: str | None = None  # PerformanceOnly, AccuracyOnly, SubmissionRun, FindPeakPerformance
    validity: str | None = None  # VALID, INVALID
    loadgen_version: str | None = None
    round: str | None = None  # the round whose three seeds these are: v5.0, v5.1, v6.0, v6.1
    output_tokens_per_second: float | None = None
    samples_per_second: float | None = None
    tokens_per_sample: float | None = None
    output_tokens: float | None = None  # tokens per sample x samples issued; 6 digits, as LoadGen prints rates
    samples_issued: int | None = None
    samples_requested: int | None = None
    data_set_rows: int | None = None
    target_qps: float | None = None
    min_duration_seconds: float | None = None
    duration_seconds: float | None = None
    latency_seconds: Mapping[str, float] = field(default_factory=dict)  # min, mean, max, p50, p90, p95, p97, p99, p99.9
    ttft_seconds: Mapping[str, float] = field(default_factory=dict)  # same keys
    tpot_seconds: Mapping[str, float] = field(default_factory=dict)  # same keys
    errors: int | None = None
    process_id: int | None = None
    began_at: datetime | None = None  # power_begin, else test_datetime plus the time of its line
    ended_at: datetime | None = None  # power_end
    rates_of: str | None = None  # the rates, where they are not those that LoadGen logged


def run_figures(log: DetailLog) -> RunFigures:
    """The figures of a log; None for those that it does not state."""
    scenario = log.text("effective_scenario")
    offline = scenario == "Offline"
    samples = _samples_issued(log)
    began, ended = power_times(log)
    started = began or logged_start(log)
    max_latency = log.number("result_max_latency_ns")
    duration = elapsed(began, ended) if began and ended else None
    if offline:
        duration = max_latency / 1e9 if max_latency is not None else duration
        samples_rate = log.number("result_samples_per_second")
        tokens_rate = log.number("result_tokens_per_second")
    else:
        samples_rate = log.number("result_completed_samples_per_sec")
        if samples_rate is None:
            samples_rate = log.number("result_qps_with_loadgen_overhead")
        tokens_rate = log.number("result_completed_tokens_per_second")
    tokens = _tokens(log, offline, samples, max_latency)
    return RunFigures(
        scenario=scenario,
        mode=log.text("effective_test_mode"),
        validity=log.text("result_validity"),
        loadgen_version=log.text("loadgen_version"),
        round=round_of_seeds(log.seeds),
        output_tokens_per_second=tokens_rate,
        samples_per_second=samples_rate,
        tokens_per_sample=tokens / samples if tokens and samples else None,
        output_tokens=tokens,
        samples_issued=samples,
        samples_requested=whole(log, "effective_samples_per_query") if offline else None,
        data_set_rows=whole(log, "qsl_reported_total_count"),
        target_qps=log.number("effective_target_qps"),
        min_duration_seconds=in_seconds(log.number("effective_min_duration_ms"), 1e3),
        duration_seconds=duration,
        latency_seconds=_latencies(log, "result_{}_latency_ns", "result_{}_percentile_latency_ns"),
        ttft_seconds=_latencies(log, "result_first_token_{}_latency_ns", "result_first_token_{}_percentile_latency_ns"),
        tpot_seconds=_latencies(log, "result_time_to_output_token_{}", "result_time_per_output_token_{}_percentile_ns"),
        errors=log.error_count,
        process_id=next(iter(log.process_ids), None),
        began_at=started,
        ended_at=ended,
    )


def with_leading_rates(figures: RunFigures, result: Mapping[str, object]) -> RunFigures:
    """``figures`` with the rates that lead the page of a run folder with this ``result``, where those are others."""
    leading, logged = leading_rates(result), figures.output_tokens_per_second
    rate = leading["output_tokens_per_second"]
    if not leads_with_drain(result) or not is_number(rate) or logged is None:
        return figures
    return replace(
        figures,
        output_tokens_per_second=rate,
        samples_per_second=leading["samples_per_second"],
        rates_of=f"rates over the whole time, drain included, as on the run's page; LoadGen: {exact(logged)} tokens/s",
    )


def power_times(log: DetailLog) -> tuple[datetime | None, datetime | None]:
    """``power_begin`` and ``power_end``, which LoadGen writes in UTC with milliseconds."""
    begin, end = log.text("power_begin"), log.text("power_end")
    return _time(begin, "%m-%d-%Y %H:%M:%S.%f"), _time(end, "%m-%d-%Y %H:%M:%S.%f")


def logged_start(log: DetailLog) -> datetime | None:
    """``test_datetime``, which LoadGen marks as UTC although it is the machine's local time."""
    return _time(log.text("test_datetime"), "%Y-%m-%dT%H:%M:%SZ")


def beyond_time_zone(seconds: float) -> float:
    """What no time zone explains of the difference of two clocks: zones are quarters of an hour, up to 14 hours."""
    zone = round(seconds / QUARTER_SECONDS) * QUARTER_SECONDS
    return seconds - max(-WIDEST_ZONE_SECONDS, min(zone, WIDEST_ZONE_SECONDS))


def whole(log: DetailLog, key: str) -> int | None:
    """The value of ``key`` if it is a whole number, else None."""
    value = log.get(key)
    return value if isinstance(value, int) and not isinstance(value, bool) and abs(value) < 2**64 else None


def completion_seconds(log: DetailLog) -> float | None:
    """Server: when the last issued query completed, from the completed rate; 6 digits."""
    queries, rate = whole(log, "result_query_count"), log.number("result_completed_samples_per_sec")
    return (queries - 1) / rate if queries and rate and rate > 0 else None


def _samples_issued(log: DetailLog) -> int | None:
    queries = whole(log, "result_query_count")  # issued; releases before 5.0.6 generate more of them for Offline
    if queries is None:
        queries = whole(log, "generated_query_count")
    each = whole(log, "generated_samples_per_query")
    if queries is None or each is None:
        return None
    timed_offline = log.text("effective_scenario") == "Offline" and log.text("effective_test_mode") != "AccuracyOnly"
    rows = log.library_set()
    if timed_offline and rows is not None and len(rows) and version_number(log.text("loadgen_version")) < LOGS_PADDING:
        padded = -(-each // len(rows)) * len(rows)
        each = padded if _was_padded(log, each, padded) else each
    return queries * each


def _was_padded(log: DetailLog, samples: int, padded: int) -> bool:
    """Whether the query was padded to whole passes; where the log does not say, by the rate that LoadGen computed."""
    permuted = log.get("effective_sample_concatenate_permutation")
    rate, latency_ns = log.number("result_samples_per_second"), log.number("result_max_latency_ns")
    if permuted is None and rate and latency_ns:
        return abs(rate * latency_ns / 1e9 - padded) < abs(rate * latency_ns / 1e9 - samples)
    return permuted is True


def _tokens(log: DetailLog, offline: bool, samples: int | None, max_latency_ns: float | None) -> float | None:
    """Output tokens of the run: rate times the time it was divided by, or from LoadGen's mean rate."""
    if offline:
        rate = log.number("result_tokens_per_second")
        return rate * max_latency_ns / 1e9 if rate is not None and max_latency_ns else None
    rate, mean = log.number("result_token_throughput"), log.number("result_mean_latency_ns")
    if rate and mean and samples:
        return rate * mean * samples  # LoadGen: tokens per nanosecond of all latencies together
    rate, seconds = log.number("result_completed_tokens_per_second"), completion_seconds(log)
    return rate * seconds if rate is not None and seconds is not None else None


def samples_answers(log: DetailLog) -> bool:
    """Whether a performance run logged answers, as a compliance test does."""
    return bool(
        whole(log, "effective_accuracy_log_sampling_target") or log.number("effective_accuracy_log_probability")
    )


def _latencies(log: DetailLog, ends: str, percentile: str) -> Mapping[str, float]:
    values: dict[str, float] = {}
    for name in ("min", "mean", "max"):
        if (value := log.number(ends.format(name))) is not None:
            values[name] = value / 1e9
    for percent in PERCENTILES:
        if (value := log.number(percentile.format(percent))) is not None:
            values[f"p{float(percent):g}"] = value / 1e9
    return values


def in_seconds(value: float | None, per_second: float) -> float | None:
    """``value`` divided by ``per_second``, the units in a second; None stays None."""
    return None if value is None else value / per_second


def _time(text: str | None, form: str) -> datetime | None:
    if text is None or len(text) > 40:
        return None
    try:
        return datetime.strptime(text, form).replace(tzinfo=UTC)
    except ValueError:
        return None


def elapsed(begin: datetime, end: datetime) -> float:
    """Seconds from ``begin`` to ``end``."""
    return (end - begin) / timedelta(seconds=1)
