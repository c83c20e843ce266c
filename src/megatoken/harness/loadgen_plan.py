"""What to ask of LoadGen: samples, duration and rate, from what the user, the rules and a warm-up say."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from megatoken.config import RunConfig
from megatoken.harness.loadgen import LOADGEN_SCENARIOS, TestSettings
from megatoken.harness.sizing import OwnLoad
from megatoken.mlperf.benchmarks import Benchmark, LatencyLimits, benchmark, benchmark_of_model
from megatoken.mlperf.compliance import TEST06_RECORDS
from megatoken.mlperf.draws import PoissonSchedule
from megatoken.mlperf.rounds import DEFAULT_ROUND, round_seeds
from megatoken.mlperf.rules import Round, round_of

DEFAULT_DURATION_SECONDS = 15.0
MLPERF_SECONDS = 600.0  # LoadGen's default
DURATION_MARGIN = 1.2  # a run that is shorter than asked for is lost; a longer one only takes longer
LOADGEN_MARGIN = 1.1  # LoadGen's own, in addition
TARGET_STEP_SHARE = 0.95  # of the limit on the time per output token
OFFERED_SHARES = {"server": 0.7, "interactive": 0.3}  # of the rate of a full target, if the user gives no rate


def run_benchmark(config: RunConfig) -> Benchmark:
    """The benchmark whose rules and limits apply to a run."""
    if config.benchmark is not None:
        return benchmark(config.benchmark)
    return benchmark_of_model(config.model, config.scenario)


def run_round(config: RunConfig) -> Round:
    """The numbers of the round whose rules apply to a run."""
    return round_of(config.rules or DEFAULT_ROUND, run_benchmark(config))


def run_limits(config: RunConfig) -> LatencyLimits | None:
    """The latency limits that LoadGen is given: the user's, else the benchmark's; None if the scenario has none."""
    limits = run_benchmark(config).limits_of(config.scenario)
    if limits is None:
        return None
    ttft, tpot = _own_limit(config, "ttft"), _own_limit(config, "tpot")
    return LatencyLimits(limits.ttft_seconds if ttft is None else ttft, limits.tpot_seconds if tpot is None else tpot)


def _own_limit(config: RunConfig, name: Literal["ttft", "tpot"]) -> float | None:
    """The user's limit on a p99, in whole milliseconds as LoadGen takes it; None: the benchmark's, as rules ask for."""
    given: float | None = getattr(config, f"{name}_limit_seconds")
    p99: float | None = getattr(config.limits, f"{name}_seconds").p99
    if given is not None or p99 is None or config.rules is not None:
        return given
    return max(1, round(1000 * p99)) / 1000


def with_target_step(config: RunConfig) -> RunConfig:
    """``config`` with a target step time in place of null, if the scenario limits our engine's time per output token.

    Each step makes one token of a sample, so the mean step time of a sample is its time per output token.
    """
    limits = run_limits(config)
    if limits is None or config.engine.target_step_seconds is not None or config.endpoint.urls is not None:
        return config
    engine = config.engine.model_copy(update={"target_step_seconds": TARGET_STEP_SHARE * limits.tpot_seconds})
    return config.model_copy(update={"engine": engine})


def seconds_to_fill(config: RunConfig, rows: int) -> float:
    """How long the samples of an Offline run must last; 0 if their number does not follow from a duration."""
    if config.compliance is not None or config.mode == "accuracy":
        return 0.0
    if config.samples is not None and not _counted_by_loadgen(config, rows):
        return 0.0
    return _duration_seconds(config)


def learning_seconds(config: RunConfig, rows: int) -> float:
    """How long a warm-up may observe answers that end early: as long as the run that is sized from them."""
    if config.scenario == "offline":
        return seconds_to_fill(config, rows)
    return _duration_seconds(config) if config.scenario != "singlestream" and config.rate is None else 0.0


def own_load(config: RunConfig, rows: int) -> OwnLoad:
    """What is known before the warm-up of the load that a run of ``config`` will be."""
    rate = config.rate if config.rate is not None and config.scenario in OFFERED_SHARES else math.inf
    if seconds := seconds_to_fill(config, rows):
        return OwnLoad(samples=max(1, math.ceil(rate * seconds)) if rate < math.inf else math.inf, rate=rate)
    return OwnLoad(samples=TEST06_RECORDS if config.compliance is not None else config.samples or rows, rate=rate)


def plan_test(config: RunConfig, rows: int, rate: float) -> TestSettings:
    """What to ask of LoadGen for ``config`` on a data set of ``rows`` rows.

    A compliance test defines its own number of samples. Under claimed rules, unless ``samples`` cuts them short,
    LoadGen decides on count and duration, in whole passes over the data set. All other tests issue an exact number of
    samples, each row of the library once; ``library_to_data_set`` maps the rows.

    ``rate``: samples per second: expected (Offline), to be offered (Server, Interactive), one at a time (SingleStream).
    """
    if config.compliance is not None:
        return _settings(config, rows, None, None, rate)
    if _counted_by_loadgen(config, rows):
        rate = {"offline": DURATION_MARGIN, "singlestream": DURATION_MARGIN / 2}.get(config.scenario, 1.0) * rate
        return _settings(config, rows, config.samples, config.min_duration_seconds, rate)
    if config.mode == "accuracy":
        library_rows = config.samples or rows
        return _settings(config, library_rows, library_rows, 0.0, rate)
    return {"offline": _plan_offline, "singlestream": _plan_single_stream}.get(config.scenario, _plan_server)(
        config, rows, rate
    )


def full_length(settings: TestSettings) -> tuple[int, float]:
    """Samples that LoadGen's Server scenario will issue, and when the last is due, in seconds."""
    schedule = PoissonSchedule(settings.seeds.schedule, settings.offered_rate)
    seconds = MLPERF_SECONDS if settings.min_duration_seconds is None else settings.min_duration_seconds
    passes = -(-max(settings.samples or 1, schedule.queries_until(seconds)) // settings.library_rows)
    samples = passes * settings.library_rows
    return samples, schedule.due_ns(samples - 1) / 1e9


def samples_drawn(settings: TestSettings) -> int:
    """Samples that LoadGen draws for a test; for Offline one pass, since the query itself has its length.

    SingleStream: twice as many as fill the duration at the expected latency in whole milliseconds, rounded up to whole
    passes, with one pass more where the number is a whole pass already (6.0.17).
    """
    if settings.compliance is not None:
        return TEST06_RECORDS
    if settings.mode == "performance" and LOADGEN_SCENARIOS[settings.scenario] == "Server":
        return full_length(settings)[0]
    if settings.mode == "performance" and settings.scenario == "singlestream":
        seconds = MLPERF_SECONDS if settings.min_duration_seconds is None else settings.min_duration_seconds
        drawn = max(settings.samples or 1, math.floor(2000 * seconds / math.ceil(1000 / settings.rate)))
        return (drawn // settings.library_rows + 1) * settings.library_rows
    return settings.library_rows


def resolve_test(config: RunConfig, settings: TestSettings) -> RunConfig:
    """``config`` with what LoadGen was asked for in place of null; running it again asks for the same.

    ``samples`` stays null if LoadGen counts them, and if they are as many as end within the duration (SingleStream).
    """
    changes: dict[str, object] = {}
    if config.scenario in OFFERED_SHARES:
        changes["rate"] = settings.offered_rate
    if config.compliance is None:
        seconds = settings.min_duration_seconds
        changes["min_duration_seconds"] = run_round(config).min_duration_seconds if seconds is None else seconds
        exact = settings.samples is not None and not (config.scenario == "singlestream" and seconds)
        if exact and not config.find_rate:
            changes["samples"] = settings.library_rows if config.samples is None else config.samples
    return config.model_copy(update=changes)


def library_to_data_set(mode: str, library_rows: int, rows: int) -> NDArray[np.int64]:
    """The data set row behind each row of LoadGen's library [library_rows].

    A smaller library is spread evenly over the data set, which may be sorted by origin; in accuracy mode it is the
    first rows, so that LoadGen's indices are those of the data set. A larger one repeats the data set.
    """
    index = np.arange(library_rows)
    return index * rows // library_rows if library_rows < rows and mode == "performance" else index % rows


def _plan_offline(config: RunConfig, rows: int, rate: float) -> TestSettings:
    seconds = config.min_duration_seconds
    if seconds is None:
        seconds = run_round(config).min_duration_seconds if config.rules else 0.0
    samples = config.samples or rows
    if to_fill := seconds_to_fill(config, rows):
        margin = DURATION_MARGIN if seconds else 1.0
        samples = max(1, math.floor(LOADGEN_MARGIN * margin * to_fill * rate))
    # The rate is so low that duration x rate asks for no more samples.
    return _settings(config, samples, samples, seconds, 0.9 * samples / max(seconds, 1.0))


def _plan_server(config: RunConfig, rows: int, rate: float) -> TestSettings:
    """One pass over a library with as many rows as come due, so that the last one is due at the end of the duration."""
    if config.samples is not None:
        settings = _settings(config, config.samples, config.samples, config.min_duration_seconds or 0.0, rate)
        arrivals = PoissonSchedule(settings.seeds.schedule, settings.offered_rate)
        filled = arrivals.due_ns(config.samples - 1) >= (settings.min_duration_seconds or 0.0) * 1e9
        return settings if filled else replace(settings, min_duration_seconds=0.0)  # else LoadGen would issue more
    seconds = _duration_seconds(config)
    settings = _settings(config, rows, rows, seconds, rate)
    if not seconds:
        return settings
    samples = PoissonSchedule(settings.seeds.schedule, settings.offered_rate).queries_until(seconds)
    return _settings(config, samples, samples, seconds, rate)


def _plan_single_stream(config: RunConfig, rows: int, rate: float) -> TestSettings:
    """LoadGen issues at least 2 x duration x rate samples and rounds up to whole passes over the library.

    So the library has as many rows as samples are wanted, and both numbers stay below that.
    """
    seconds = _duration_seconds(config)
    if config.samples is not None or not seconds:
        samples = config.samples or rows
        return _settings(config, samples, samples - 1, 0.0, rate)
    expected = seconds * rate
    samples = max(2, math.ceil(DURATION_MARGIN * expected + 2 * math.sqrt(expected)))  # answers differ in length
    return _settings(config, samples, samples - 1, seconds, 0.9 * (samples - 1) / (2 * max(seconds, 1.0)))


def _settings(
    config: RunConfig, library_rows: int, samples: int | None, min_duration_seconds: float | None, rate: float
) -> TestSettings:
    has_limits = run_limits(config) is not None
    return TestSettings(
        scenario=config.scenario,
        mode=config.mode,
        model=run_benchmark(config).loadgen_model(config.scenario),
        library_rows=library_rows,
        samples=samples,
        min_duration_seconds=min_duration_seconds,
        rate=rate,
        seeds=round_seeds()[config.rules or DEFAULT_ROUND],
        ttft_limit_seconds=_own_limit(config, "ttft") if has_limits else None,
        tpot_limit_seconds=_own_limit(config, "tpot") if has_limits else None,
        compliance=config.compliance,
    )


def _duration_seconds(config: RunConfig) -> float:
    if config.min_duration_seconds is not None:
        return config.min_duration_seconds
    return run_round(config).min_duration_seconds if config.rules or config.find_rate else DEFAULT_DURATION_SECONDS


def _counted_by_loadgen(config: RunConfig, rows: int) -> bool:
    """Whether the run claims performance rules and ``samples`` does not cut it short."""
    if config.rules is None or config.mode == "accuracy":
        return False
    return config.samples is None or config.samples >= max(rows, run_benchmark(config).rows)
