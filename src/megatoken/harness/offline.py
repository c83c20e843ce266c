"""The Offline scenario: LoadGen hands over one query, a target works through it, the run folder keeps the evidence."""

from __future__ import annotations

import gc
import math
import socket
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megatoken.config import RunConfig
from megatoken.errors import CapacityError, RequestError
from megatoken.hardware.inventory import peak_memory_bytes, take_inventory
from megatoken.harness.datasets import Dataset
from megatoken.harness.loadgen import LoadGenLog, OfflineTest
from megatoken.harness.progress import Progress
from megatoken.harness.rules import DEFAULT_ROUND, ROUNDS, judge, unmet_rules
from megatoken.harness.sizing import estimate_rate, library_to_data_set, plan_offline, seconds_to_fill
from megatoken.harness.stop import StopSignals
from megatoken.results import RunFolder, SampleRow, SeriesRow, run_name
from megatoken.targets import SampleEvent, Target

SERIES_PERIOD_NS = 1_000_000_000
PACE_SHARE = 0.3  # weight of the last second in what the time left is reckoned with
QUEUED_SAMPLES = 1024  # kept waiting in the target, so that a million samples need not be built before the first step


def run_offline(
    config: RunConfig, data_set: Dataset, target: Target, facts: Mapping[str, Any], progress: Progress
) -> Path:
    """Warms up, measures and judges one run; returns its folder, which holds the verdict.

    Args:
        config: what to run.
        data_set: its requests; every one can be served.
        target: what serves them; nobody else may use it meanwhile.
        facts: what is known of model and data set, for ``result.json``; the target adds its own.
        progress: where to say how far it is.

    Raises:
        StorageError: the run folder cannot be written; what is there says INTERRUPTED.
    """
    rows = len(data_set.requests)
    learning_seconds = seconds_to_fill(config, rows)
    at_least = "at least " if learning_seconds and not data_set.fills_limit.all() else ""
    gc.collect()
    gc.freeze()  # a collection during the run walks what the run has made, not every module
    progress.stage(f"warming up for {at_least}{config.warm_up_seconds:g} s")
    rate = estimate_rate(target, data_set, config.warm_up_seconds, learning_seconds)
    settings = plan_offline(config, rows, rate)
    folder = RunFolder.create(
        config.out,
        run_name(datetime.now(UTC), config.scenario, config.model),
        config.model_dump(mode="json"),
        take_inventory(),
        scenario=config.scenario,
        facts={
            **facts,
            **target.facts(),
            "mode": config.mode,
            "rules": config.rules,
            "estimated_samples_per_second": rate,
        },
    )
    test = OfflineTest(settings, folder.mlperf_directory)
    with StopSignals(f"megatoken: stopped at once; {folder.path} says INTERRUPTED and keeps what was done") as stop:
        try:
            library = library_to_data_set(config.mode, settings.library_rows, rows)
            measurement = _Measurement(test, library, data_set, target, folder, progress, config.mode == "accuracy")
            while test.outstanding and not stop.received:
                measurement.step()
            measurement.note_state()
            if stop.received:
                reason = f"{stop.received} after {measurement.ended:,} of {measurement.samples:,} samples"
                target.cancel_all()
                _interrupt(test, folder, reason)
            else:
                _conclude(config, folder, measurement, test.finish(), rows)
        except BaseException as error:
            _interrupt(test, folder, f"{type(error).__name__}: {error}")
            raise
        finally:
            progress.clear()
    return folder.path


def _interrupt(test: OfflineTest, folder: RunFolder, reason: str) -> None:
    folder.add_facts({"peak_memory_bytes": peak_memory_bytes()})
    folder.interrupt(reason)  # first: LoadGen may take its time over the empty answers
    test.abandon()


def _conclude(config: RunConfig, folder: RunFolder, measurement: _Measurement, log: LoadGenLog, rows: int) -> None:
    unmet = unmet_rules(ROUNDS[config.rules or DEFAULT_ROUND], config.mode, log, rows)
    verdict, reasons = judge(config.rules is not None, unmet, measurement.failed, measurement.samples)
    folder.finish(
        {
            "verdict": verdict,
            "reasons": reasons,
            "rules_unmet": [] if config.rules else unmet,
            "ended_at": datetime.now(UTC).isoformat(),
            "loadgen_version": log.values["loadgen_version"],
            "loadgen_output_tokens_per_second": log.values.get("result_tokens_per_second"),
            "loadgen_samples_per_second": log.values.get("result_samples_per_second"),
        }
    )


@dataclass(slots=True)
class _Sample:
    """A sample between submission and its end."""

    row: int
    input_tokens: int
    first_ns: int | None = None
    output_tokens: int = 0
    token_ids: list[int] = field(default_factory=list)


class _Measurement:
    """Feeds the query to the target, tells LoadGen and the run folder what comes out."""

    def __init__(
        self,
        test: OfflineTest,
        rows: NDArray[np.int64],
        data_set: Dataset,
        target: Target,
        folder: RunFolder,
        progress: Progress,
        keep_ids: bool,
    ) -> None:
        self._test = test
        self._data_set = data_set
        self._target = target
        self._folder = folder
        self._progress = progress
        self._keep_ids = keep_ids
        self._node = socket.gethostname()
        self._before = target.counters()
        target.telemetry()  # power is a mean since the reading before
        query, self._issued_ns = test.start()
        folder.add_facts({"started_at": datetime.now(UTC).isoformat(), "peak_memory_bytes": peak_memory_bytes()})
        self._rows = rows[query]
        self._all_tokens = int((data_set.input_tokens + data_set.output_limits)[self._rows].sum())
        self._next = 0
        self._open: dict[int, _Sample] = {}
        self._input_tokens = self._output_tokens = 0
        self._noted_ns = self._issued_ns
        self._noted_output_tokens = self._noted_done_tokens = 0
        self._pace = 0.0  # tokens a second of prompts and answers, lately
        self.failed = 0

    @property
    def samples(self) -> int:
        """Samples in the query."""
        return len(self._rows)

    @property
    def ended(self) -> int:
        """Samples done or failed."""
        return self.samples - self._test.outstanding

    def step(self) -> None:
        """Tops up the target's queue, polls it once and passes on what ended."""
        ended = self._feed()
        ended += [row for event in self._target.poll(timeout_seconds=0.1) if (row := self._take(event)) is not None]
        if ended:
            self._folder.add_samples(ended)
        if time.monotonic_ns() - self._noted_ns >= SERIES_PERIOD_NS:
            self.note_state()

    def note_state(self) -> None:
        """Adds a row to the time series, notes the memory and refreshes the live line."""
        counters, telemetry, now_ns = self._target.counters(), self._target.telemetry(), time.monotonic_ns()
        since_seconds = (now_ns - self._noted_ns) / 1e9
        output_tokens, done_tokens = self._output_tokens, self._input_tokens + self._output_tokens
        rate = (output_tokens - self._noted_output_tokens) / since_seconds
        pace = (done_tokens - self._noted_done_tokens) / since_seconds
        self._pace = PACE_SHARE * pace + (1 - PACE_SHARE) * self._pace if self._pace else pace
        self._noted_ns, self._noted_output_tokens, self._noted_done_tokens = now_ns, output_tokens, done_tokens
        self._folder.add_series(
            SeriesRow(
                elapsed_seconds=self._seconds(now_ns),
                node=self._node,
                replica=0,
                output_tokens=output_tokens,
                processed_tokens=counters.processed_tokens - self._before.processed_tokens,
                rows=counters.rows,
                row_budget=counters.row_budget,
                pages_free=counters.pages_free,
                pages=counters.pages,
                in_flight=counters.in_flight,
                waiting=counters.waiting,
                preemptions=counters.preemptions - self._before.preemptions,
                power_watts=telemetry.power_watts,
                clock_mhz=telemetry.clock_mhz,
                temperature_celsius=telemetry.temperature_celsius,
            )
        )
        self._folder.add_facts({"peak_memory_bytes": peak_memory_bytes()})
        left_seconds = (self._all_tokens - done_tokens) / self._pace if self._pace else math.inf
        self._progress.running(self._seconds(now_ns), left_seconds, done_tokens / self._all_tokens, rate, counters)

    def _feed(self) -> list[SampleRow]:
        refused = []
        room = max(0, QUEUED_SAMPLES - self._target.counters().waiting)
        for sample in range(self._next, min(self._next + room, self.samples)):
            row = int(self._rows[sample])
            self._open[sample] = _Sample(row, int(self._data_set.input_tokens[row]))
            try:
                self._target.submit(sample, self._data_set.requests[row])
            except (RequestError, CapacityError) as error:
                self.failed += 1
                refused.append(self._end(sample, finish_reason=None, last_ns=None, error=str(error)))
            self._next = sample + 1
        return refused

    def _take(self, event: SampleEvent) -> SampleRow | None:
        sample = self._open[event.sample_id]
        if sample.first_ns is None:
            sample.first_ns = event.time_ns
            self._input_tokens += sample.input_tokens
        sample.output_tokens += len(event.token_ids)
        self._output_tokens += len(event.token_ids)
        if self._keep_ids:
            sample.token_ids.extend(event.token_ids)
        if event.finish_reason is None:
            return None
        return self._end(event.sample_id, event.finish_reason, event.time_ns)

    def _end(
        self, sample_id: int, finish_reason: str | None, last_ns: int | None, error: str | None = None
    ) -> SampleRow:
        sample = self._open.pop(sample_id)
        self._test.complete(sample_id, sample.output_tokens, sample.token_ids)
        self._all_tokens -= int(self._data_set.output_limits[sample.row]) - sample.output_tokens
        return SampleRow(
            sample_id=sample_id,
            sample_index=sample.row,
            scheduled_seconds=0.0,
            sent_seconds=0.0,
            first_token_seconds=None if sample.first_ns is None else self._seconds(sample.first_ns),
            last_token_seconds=None if last_ns is None else self._seconds(last_ns),
            input_tokens=sample.input_tokens,
            output_tokens=sample.output_tokens,
            finish_reason=finish_reason,
            node=self._node,
            error=error,
        )

    def _seconds(self, moment_ns: int) -> float:
        return (moment_ns - self._issued_ns) / 1e9
