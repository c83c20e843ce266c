"""The highest rate that keeps the limits: short probes narrow it down, a run of full length confirms it."""

from __future__ import annotations

import math
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from megatoken.config import RunConfig
from megatoken.errors import UsageError
from megatoken.harness.bench import Bench
from megatoken.harness.benchmarks import PERCENTILE, LatencyLimits
from megatoken.harness.loadgen import TestSettings
from megatoken.harness.loadgen_plan import plan_test, run_limits
from megatoken.harness.rate_search import RESOLUTION, RateSearch, Try
from megatoken.harness.saturation import ProbeResult, Saturation, SaturationWatch
from megatoken.harness.schedule import PoissonSchedule
from megatoken.harness.stop import StopSignals
from megatoken.results import Run, RunFolder, Verdict, read_run
from megatoken.results.early_stopping import queries_needed

PROBES = "probes"
MLPERF_SECONDS = 600.0  # what LoadGen takes where it is not told
PROBE_SAMPLES = 1000  # chance leaves a 99th percentile of fewer wide
SHORTEST_PROBE_SECONDS = 5.0
LIVES_OF_A_PROBE = 3.0  # of the median sample: the load is at its height only after one
FAILURE_CODES = {"LOADGEN_INVALID", "LOADGEN_ERRORS", "FAILED_SAMPLES"}
CLIENT_CODES = {"SEND_LAG", "CLIENT_LIMIT", "WALL_CLOCK", "LOADGEN_DISAGREES"}


def find_rate(bench: Bench, first_rate: float) -> Path:
    """Searches from ``first_rate`` on; every probe and every confirmation is a run folder below ``probes``.

    Returns:
        The run folder, with everything that the last confirmation's has.
    """
    config = bench.config
    settings = plan_test(config, len(bench.data_set.requests), first_rate)
    samples, seconds = full_length(settings)
    if samples < (needed := queries_needed(0, PERCENTILE)):
        raise UsageError(
            f"{samples:,} samples come due in {seconds:.0f} s at {first_rate:.3g} samples/s, but only {needed} or more "
            f"show a p99; give --min-duration {math.ceil(1.5 * seconds * needed / samples)} or a faster target"
        )
    folder = bench.create_folder(config, settings, config.out)
    words = f"megatoken: stopped at once; {folder.path} says INTERRUPTED and keeps what was done"
    with StopSignals(words) as stop:
        try:
            _Search(bench, folder, stop, first_rate).run()
        except BaseException as error:
            folder.interrupt(f"{type(error).__name__}: {error}")
            raise
        finally:
            bench.progress.clear()
    return folder.path


def full_length(settings: TestSettings) -> tuple[int, float]:
    """Samples that LoadGen's Server scenario will issue, and when the last is due, in seconds."""
    schedule = PoissonSchedule(settings.seeds.schedule, settings.offered_rate)
    seconds = MLPERF_SECONDS if settings.min_duration_seconds is None else settings.min_duration_seconds
    passes = -(-max(settings.samples or 1, schedule.queries_until(seconds)) // settings.library_rows)
    samples = passes * settings.library_rows
    return samples, schedule.due_ns(samples - 1) / 1e9


class _Search:
    """The probes of one search."""

    def __init__(self, bench: Bench, folder: RunFolder, stop: StopSignals, first_rate: float) -> None:
        self._bench = bench
        self._folder = folder
        self._stop = stop
        self._search = RateSearch(first_rate)
        limits = run_limits(bench.config)
        assert limits is not None
        self._limits: LatencyLimits = limits
        self._probes: list[dict[str, Any]] = []
        self._life_seconds = 0.0

    def run(self) -> None:
        last = None
        while not self._stop.received and (tried := self._search.next()) is not None:
            last = self._confirm(tried) if tried.full_length else self._probe(tried)
        if self._stop.received:
            self._folder.interrupt(f"{self._stop.received} after {len(self._probes)} probes")
        elif last is None or self._search.found is None:
            self._folder.finish(
                {
                    "verdict": Verdict.INVALID,
                    "reasons": [{"code": "NO_VALID_RATE", "message": "no rate that was tried keeps the limits"}],
                    "ended_at": datetime.now(UTC).isoformat(),
                    "rate_search": self._facts(),
                }
            )
        else:
            self._folder.finish_as(last, {"rate_search": self._facts()})

    def _facts(self) -> dict[str, Any]:
        valid, invalid = self._search.bracket
        return {
            "samples_per_second": self._search.found,
            "resolution": RESOLUTION,
            "highest_valid_samples_per_second": valid or None,
            "lowest_invalid_samples_per_second": invalid,
            "probes": self._probes,
        }

    def _probe(self, tried: Try) -> Path:
        """Probes a rate; again and longer, where the probe was too short for how long samples live."""
        while True:
            config, settings, watch = self._plan_probe(tried)
            path, saturation = self._measure(tried, config, settings, watch)
            result = None if saturation or self._stop.received else watch.result()
            if result is not None:
                self._life_seconds = result.life_seconds
                if (config.min_duration_seconds or 0.0) < self._seconds_of_probe(tried.rate):
                    self._note(tried, path, None, "too short for how long samples live")
                    continue
            break
        if not self._stop.received:
            self._judge_probe(tried, path, watch, saturation, result)
        return path

    def _judge_probe(
        self,
        tried: Try,
        path: Path,
        watch: SaturationWatch,
        saturation: Saturation | None,
        result: ProbeResult | None,
    ) -> None:
        broken = _codes(read_run(path)) & CLIENT_CODES
        valid = result is not None and result.valid and not broken
        if saturation is not None:
            why = saturation.message
        elif broken:
            why = f"the client is at its end: {', '.join(sorted(broken))}"
        else:
            assert result is not None
            why = f"{result.over:,} of {result.judged:,} samples over a limit, {result.allowed_share:.2%} may be"
        self._search.note(tried, valid, watch.capacity())
        self._note(tried, path, valid, why)

    def _confirm(self, tried: Try) -> Path:
        config = self._bench.config.model_copy(update={"rate": tried.rate})
        settings = self._settings(config)
        samples, seconds = self._full_length(tried.rate)
        watch = SaturationWatch(self._limits, samples, samples, seconds)
        path, saturation = self._measure(tried, config, settings, watch)
        if not self._stop.received:
            run = read_run(path)
            broken = sorted(_codes(run) & (FAILURE_CODES | CLIENT_CODES))
            valid = saturation is None and not broken and run.result["latency_verdict"]["met"]
            self._search.note(tried, valid)
            self._note(tried, path, valid, saturation.message if saturation else ", ".join(broken) or "kept its limits")
        return path

    def _measure(
        self, tried: Try, config: RunConfig, settings: TestSettings, watch: SaturationWatch
    ) -> tuple[Path, Saturation | None]:
        kind = "confirmation" if tried.full_length else "probe"
        self._bench.progress.stage(f"{kind} at {tried.rate:.4g} samples/s")
        name = f"{len(self._probes) + 1:02}-{kind}-{tried.rate:.4g}"
        folder = self._bench.create_folder(config, settings, self._folder.path / PROBES, name)
        return folder.path, self._bench.run(config, settings, folder, self._stop, watch)

    def _note(self, tried: Try, path: Path, valid: bool | None, why: str) -> None:
        self._probes.append(
            {
                "run_folder": f"{PROBES}/{path.name}",
                "samples_per_second": tried.rate,
                "full_length": tried.full_length,
                "valid": valid,
                "reason": why,
            }
        )
        self._folder.add_facts({"rate_search": self._facts()})
        word = {True: "valid", False: "too high", None: "undecided"}[valid]
        self._bench.progress.note(f"{tried.rate:.4g} samples/s {word}: {why}")

    def _plan_probe(self, tried: Try) -> tuple[RunConfig, TestSettings, SaturationWatch]:
        """A probe whose arrivals come, on average, as those of the full length will.

        Both are drawn from the same seed, and chance leaves the mean of few arrivals several percent beside the rate.
        """
        full_samples, full_seconds = self._full_length(tried.rate)
        seconds = min(self._seconds_of_probe(tried.rate), full_seconds)
        arrivals = PoissonSchedule(self._settings(self._bench.config).seeds.schedule, 1.0)
        samples = max(2, round(seconds * tried.rate))
        rate = tried.rate * arrivals.mean_rate(max(2, full_samples)) / arrivals.mean_rate(samples)
        changes = {"rate": rate, "min_duration_seconds": seconds, "samples": None, "rules": None, "find_rate": False}
        config = self._bench.config.model_copy(update=changes)
        settings = self._settings(config)
        return config, settings, SaturationWatch(self._limits, settings.library_rows, full_samples, full_seconds)

    def _seconds_of_probe(self, rate: float) -> float:
        if self._bench.config.probe_seconds is not None:
            return self._bench.config.probe_seconds
        return max(SHORTEST_PROBE_SECONDS, PROBE_SAMPLES / rate, LIVES_OF_A_PROBE * self._life_seconds)

    def _full_length(self, rate: float) -> tuple[int, float]:
        return full_length(self._settings(self._bench.config.model_copy(update={"rate": rate})))

    def _settings(self, config: RunConfig) -> TestSettings:
        return plan_test(config, len(self._bench.data_set.requests), config.rate or 1.0)


def _codes(run: Run) -> set[str]:
    return {reason["code"] for reason in (*run.reasons, *run.rules_unmet)}
