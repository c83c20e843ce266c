"""``megatoken run --find-rate``: probes with LoadGen, each with a run folder inside the search's own."""

from __future__ import annotations

import math
from collections import Counter
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from megatoken.analysis.machine import utc_text
from megatoken.analysis.statistics import Samples
from megatoken.errors import UsageError
from megatoken.harness.loadgen_plan import MLPERF_SECONDS, full_length, plan_test, run_limits
from megatoken.harness.progress import duration
from megatoken.harness.rate_finder import (
    OF_MEASUREMENT,
    PROBE_SAMPLES,
    SHORTEST_PROBE_SECONDS,
    Goal,
    Outcome,
    Probe,
    RateFinder,
    too_few,
)
from megatoken.harness.rate_search import Try
from megatoken.harness.recording import interrupted_by_errors
from megatoken.harness.result import end_notes, saturated_client
from megatoken.harness.session import TestSession
from megatoken.harness.stop import StopSignals
from megatoken.runs.reasons import reason
from megatoken.runs.run import Run, Verdict, read_run
from megatoken.runs.writer import RunFolder
from megatoken.text import count_of, precise

PROBES = "probes"
# What searches over simulated targets took (docs/scenarios.md): all runs of full length, in full lengths; probes.
FULL_LENGTHS = (1.5, 7.7)
PROBES_BEFORE = (3, 11)
QUICK_SECONDS = 60
FAILURE_CODES = {"LOADGEN_ERRORS", "FAILED_SAMPLES", "NO_OUTPUT", *OF_MEASUREMENT}


def find_rate(session: TestSession, first_rate: float) -> Path:
    """Searches from ``first_rate``; every probe and every confirmation is a run folder below ``probes``.

    Returns:
        The run folder, with the contents of the last confirmation's.

    Raises:
        UsageError: a run of that length has too few samples to show a 99th percentile.
    """
    config = session.config
    limits = run_limits(config)
    assert limits is not None
    settings = plan_test(config, len(session.data_set.requests), first_rate)
    if (why := too_few(first_rate, *full_length(settings))) is not None:
        if session.silences and config.rate is None:  # a longer run would not show it
            why = f"{'; '.join(session.silences)}, so its rate is not known; check the server, or give --rate"
        raise UsageError(why)
    with StopSignals() as stop:
        folder = session.create_folder(config, settings, config.out, stop=stop)
        with interrupted_by_errors(folder, session.progress):
            session.progress.note(_estimate(first_rate, *full_length(settings), config.probe_seconds))
            prober = _Prober(session, folder, stop)
            goal = Goal(limits, prober.full_length, settings.seeds.schedule, config.probe_seconds)

            def note(line: str) -> None:
                session.progress.note(line)
                folder.add_facts({"rate_search": finder.facts()})

            finder = RateFinder(goal, first_rate, prober.measure, note)
            confirmed = None if stop.received else finder.run()
            _finish(folder, finder, confirmed, stop, prober.core_wait_share)
    return folder.path


def _estimate(rate: float, samples: int, seconds: float, probe_seconds: float | None) -> str:
    """How long the search is likely to take, before it starts."""
    probe = min(seconds, probe_seconds or max(SHORTEST_PROBE_SECONDS, PROBE_SAMPLES / rate))
    least, most = (
        duration(seconds * lengths + probe * probes)
        for lengths, probes in zip(FULL_LENGTHS, PROBES_BEFORE, strict=True)
    )
    quick = seconds > 2 * QUICK_SECONDS and too_few(rate, math.floor(rate * QUICK_SECONDS), QUICK_SECONDS) is None
    hint = f"; for a first look give --min-duration {QUICK_SECONDS}" if quick else ""
    return (
        f"the search is likely to take {least} to {most}: probes of about {probe:.0f} s, then runs of {seconds:.0f} s,"
        f" {count_of(samples, 'sample')} at {precise(rate)} samples/s{hint}"
    )


def _finish(
    folder: RunFolder, finder: RateFinder, confirmed: str | None, stop: StopSignals, core_wait_share: float | None
) -> None:
    facts: dict[str, Any] = {"rate_search": finder.facts()}
    if confirmed is not None:
        if finder.limited_by_client:
            rates = {"found": finder.found, "too_high": facts["rate_search"]["too_high_samples_per_second"]}
            notes = read_run(folder.path / confirmed).result["notes"]
            facts["notes"] = [*notes, reason("SEARCH_LIMITED_BY_CLIENT", **rates)]
        folder.finish_as(folder.path / confirmed, facts)
        return
    folder.add_facts({**facts, "core_wait_share": core_wait_share})
    folder.add_facts({"notes": end_notes(folder.facts)})
    if stop.received:
        folder.interrupt(reason("INTERRUPTED", signal=stop.received, probes=len(finder.probes)))
        return
    folder.finish(
        {
            "verdict": Verdict.INVALID,
            "reasons": [reason("NO_VALID_RATE", outcome=finder.outcome)],
            "ended_at": utc_text(datetime.now(UTC)),
        }
    )


class _Prober:
    """Runs the probes of a finder."""

    def __init__(self, session: TestSession, folder: RunFolder, stop: StopSignals) -> None:
        self._session = session
        self._folder = folder
        self._stop = stop
        self._count = 0
        self.core_wait_share: float | None = None  # the largest of all probes

    def full_length(self, rate: float) -> tuple[int, float]:
        """Samples and seconds of a run of full length."""
        config = self._session.config.model_copy(update={"rate": rate})
        return full_length(plan_test(config, len(self._session.data_set.requests), rate))

    def measure(self, tried: Try, probe: Probe) -> Outcome | None:
        """Runs one probe; None after a signal."""
        self._count += 1
        changes: dict[str, object] = {"rate": probe.rate, "find_rate": False, "probe_seconds": None}
        if probe.seconds is not None:
            changes |= {"min_duration_seconds": probe.seconds, "rules": None}
        elif self._session.config.min_duration_seconds is None and self._session.config.rules is None:
            changes["min_duration_seconds"] = MLPERF_SECONDS
        config = self._session.config.model_copy(update=changes)
        settings = plan_test(config, len(self._session.data_set.requests), probe.rate)
        kind = "probe" if probe.seconds else "confirmation"
        name = f"{self._count:02}-{kind}-{tried.rate:.4g}"
        why = "; it failed before and is repeated" if tried.repeat else ""
        seconds = probe.seconds or self.full_length(tried.rate)[1]
        self._session.progress.note(f"{kind} at {precise(tried.rate)} samples/s, {seconds:.0f} s{why}")
        folder = self._session.create_folder(config, settings, self._folder.path / PROBES, name)
        saturation = self._session.run(config, settings, folder, self._stop, probe.watch)
        if self._stop.received:
            return None
        run = read_run(folder.path)
        waits = (self.core_wait_share, run.result.get("core_wait_share"))
        self.core_wait_share = max((wait for wait in waits if wait is not None), default=None)
        if saturation:  # a test that ended early was not judged
            client = saturated_client(run.result, Samples.of(run.requests), run_limits(config))
            broken = tuple(one["code"] for one in client)
        else:
            broken = _broken(run, probe.seconds is None)
        ttft, tpot = ((run.result.get(name) or {}).get("p99") for name in ("ttft_seconds", "tpot_seconds"))
        return Outcome(f"{PROBES}/{folder.path.name}", saturation, broken, ttft, tpot, *_failure(run))


def _failure(run: Run) -> tuple[str | None, bool, float]:
    """How samples of a probe failed or were empty (None if none did), whether any was served, and the failed share."""
    rows = run.requests.select(["error", "first_token_seconds", "last_token_seconds"]).to_pylist()
    errors = Counter(row["error"] for row in rows if row["error"] is not None)
    served = sum(row["error"] is None and row["first_token_seconds"] is not None for row in rows)
    without = (row["last_token_seconds"] for row in rows if row["error"] is None and row["first_token_seconds"] is None)
    if empty := sum(last is not None for last in without):
        if not errors and not served:
            return reason("NO_OUTPUT", answers=empty)["message"], False, 1.0
        errors["no output token"] = empty
    if not errors:
        return None, True, 0.0
    said = [f"{samples:,} x {error}" for error, samples in errors.most_common(3)]
    ends = [note["message"] for note in run.result["notes"] if note["code"] == "SERVER_FAILED"]
    if not served:
        return "; ".join(ends or said), False, 1.0
    counts = reason("FAILED_SAMPLES", failed=errors.total(), samples=len(rows))["message"]
    return f"{counts}: {'; '.join(said)}", True, errors.total() / (errors.total() + served)


def _broken(run: Run, full_length: bool) -> tuple[str, ...]:
    """Codes that invalidate a probe, whatever its watch found: client, failures, and at full length the limits."""
    codes = {reason["code"] for reason in (*run.reasons, *run.rules_unmet, *run.doubts)}
    wanted = FAILURE_CODES | {"LOADGEN_INVALID"} if full_length else FAILURE_CODES
    broken = sorted(codes & wanted)
    verdict = run.result.get("latency_verdict")  # none where no sample was completed
    if full_length and (verdict is None or not verdict["met"]):
        broken.append("LATENCIES")
    return tuple(broken)
