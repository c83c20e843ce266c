"""The measurement loop of every scenario: takes samples from a load, feeds the target, reports to load and record.

The load is LoadGen; in a soak, the harness's own.

All times are ``time.monotonic_ns()``. LoadGen itself uses the wall clock, so steps of the wall clock are detected.
"""

from __future__ import annotations

import math
import socket
import time
from array import array
from collections import deque
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime

import numpy as np
from numpy.typing import NDArray

from megatoken.analysis.machine import utc_text
from megatoken.datasets.requests import Dataset
from megatoken.engine.state import TOTALS, ReplicaState
from megatoken.errors import CapacityError, RequestError
from megatoken.hardware.core_wait import CoreWait
from megatoken.hardware.host_sensors import PowerMeter
from megatoken.hardware.inventory import peak_memory_bytes
from megatoken.harness.clock import WallClockSteps
from megatoken.harness.loadgen import LOADGEN_SCENARIOS, TestSettings
from megatoken.harness.loadgen_plan import samples_drawn
from megatoken.harness.loadgen_wire import Issued
from megatoken.harness.progress import ExpectedWork, Progress, seconds_left
from megatoken.harness.protocols import Answers, Load, Record
from megatoken.harness.text_stages import TextStages
from megatoken.mlperf.draws import PoissonSchedule
from megatoken.runs.reasons import Reason
from megatoken.runs.tables import SampleRow, SeriesRow
from megatoken.targets import HasFileno, RemoteTarget, ReplicaReading, SampleEvent, Target

SERIES_PERIOD_NS = 1_000_000_000
QUEUED_SAMPLES = 1024  # that wait in the target, so that a million samples need not be built before the first step
QUEUED_PER_REPLICA = 128  # the same if many replicas pull: all of them get samples before the next step of this loop
OFFLINE_POLL_SECONDS = 0.1
NO_TOKEN = 0  # given to LoadGen as the first token of an answer in text; LoadGen only times it
PROMPT_POLL_SECONDS = 0.001  # longest that a due sample waits for a target without events


@dataclass(slots=True)
class _Sample:
    """A sample between its issue and its end; times in ns."""

    row: int
    input_tokens: int | None
    due_ns: int
    issued_ns: int
    submitted_ns: int | None = None
    started_ns: int | None = None
    first_ns: int | None = None
    tokenise_ns: int | None = None
    sent_ns: int | None = None  # over a network
    output_tokens: int = 0
    first_tokens: int | None = None
    token_ids: list[int] = field(default_factory=list)
    token_times: array[int] = field(default_factory=lambda: array("q"))


@dataclass(slots=True)
class _Query:
    """Samples issued in one call that the target has not got yet."""

    numbers: range
    rows: NDArray[np.int64]  # of the data set; of all samples of the call
    issued_ns: int
    due_ns: int | None  # as the load says; None: at issue, or by LoadGen's schedule


@dataclass(slots=True)
class _Spent:
    """Nanoseconds of the loop by activity; the rest of the elapsed time is the harness's own."""

    wait: int = 0
    target: int = 0
    tokenise: int = 0
    detokenise: int = 0


class Measurement:
    """One running test; call ``step`` until ``over``."""

    def __init__(
        self,
        test: Load,  # the load
        # what LoadGen was asked for; None: a load that says itself when its samples are due
        settings: TestSettings | None,
        rows: NDArray[np.int64],  # data set row of each row of LoadGen's library [library_rows]
        data_set: Dataset,  # the requests
        target: Target,  # what serves them
        record: Record,  # stores the rows
        progress: Progress,  # where to report how far it is
        text: TextStages | None = None,  # where prompts and answers are text within the measured time
        planned_seconds: float | None = None,  # when the load ends, if it ends by time and not by samples
        *,
        keeps_token_times: bool = False,  # whether to record when each token was seen
        power_meter: PowerMeter | None = None,  # reads the power of the whole system
        answers: Answers | None = None,  # reads every whole answer
    ) -> None:
        """Waits for the first sample; the test has been started."""
        self._test = test
        self._library = rows
        self._data_set = data_set
        self._target = target
        self._remote = target if isinstance(target, RemoteTarget) else None
        self._record = record
        self._progress = progress
        self._text = text
        self._answers = answers
        keeps = settings is not None and settings.keeps_token_ids
        self._keep_ids = keeps or text is not None or answers is not None
        self._keeps_token_times = keeps_token_times
        self._power_meter = power_meter
        self._offline = settings is not None and settings.scenario == "offline"
        self._streams = not self._offline  # LoadGen asks for first tokens
        self._needs_first_tokens = settings is not None and settings.scenario == "singlestream"
        self._schedule = None
        if settings is not None and LOADGEN_SCENARIOS[settings.scenario] == "Server":
            self._schedule = PoissonSchedule(settings.seeds.schedule, settings.offered_rate)
        self._planned_seconds = planned_seconds
        self._planned = samples_drawn(settings) if settings is not None else 0
        self._open: dict[int, _Sample] = {}
        self._queue: deque[_Query] = deque()  # issued, not yet given to the target
        self._spent = _Spent()
        self._work = ExpectedWork()
        self._input_tokens = self._output_tokens = 0
        self._noted_output_tokens = 0
        self._answered_ns = 0  # when a token or an error came last, or the first request after a time without any
        self.failed = 0  # samples that ended with an error
        if self._remote is not None:
            self._remote.begin()
            if isinstance(test, HasFileno):
                self._remote.wake_on(test)
        # This also reads power for the first time: each later reading is the mean since the one before.
        self._before = {(one.node, one.replica): one for one in target.replicas()}
        names = {node for node, _ in self._before if node}
        # Where a sample counts that ends before an event named its node, as one that is cancelled.
        self._node = names.pop() if len(names) == 1 else socket.gethostname()
        self.wall_clock = WallClockSteps()  # how far the wall clock was set during the test
        self.core_wait = CoreWait()  # how long this process waited for a core during the test
        issued: list[Issued] = []
        while not issued:
            issued = test.take_issued(timeout_seconds=0.1)
        first = issued[0]
        self._start_ns = self._noted_ns = first.issued_ns if first.due_ns is None else first.due_ns
        record.add_facts({"started_at": utc_text(datetime.now(UTC)), "peak_memory_bytes": peak_memory_bytes()})
        self._accept(issued)

    @property
    def over(self) -> bool:
        """Whether all samples were issued and have ended."""
        return self._test.all_issued and not self._test.outstanding

    @property
    def issued(self) -> int:
        """Samples that the load has issued."""
        return self._test.issued

    @property
    def ended(self) -> int:
        """Samples completed or failed."""
        return self._test.issued - self._test.outstanding

    @property
    def start_ns(self) -> int:
        """When the first sample was due."""
        return self._start_ns

    def elapsed_seconds(self) -> float:
        """Seconds since the start of the test."""
        return self._seconds(time.monotonic_ns())

    def unended(self) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """For every sample issued and not ended: when it was due, and its first token (NaN: none yet), in seconds."""
        samples = self._open.values()
        due = [self._seconds(sample.due_ns) for sample in samples]
        first = [math.nan if sample.first_ns is None else self._seconds(sample.first_ns) for sample in samples]
        queued = [self._seconds(self._due_ns(number, query)) for query in self._queue for number in query.numbers]
        return np.array(due + queued, np.float64), np.array(first + [math.nan] * len(queued), np.float64)

    def step(self) -> None:
        """Takes issued samples, fills the target's queue, polls the target once and passes on its events."""
        self._wait_for_issue()
        ended = self._feed()
        began_ns = time.monotonic_ns()
        longest = OFFLINE_POLL_SECONDS if self._offline else PROMPT_POLL_SECONDS
        events = self._target.poll(self._test.patience_seconds(longest))
        polled_ns = time.monotonic_ns()
        self._spent.target += polled_ns - began_ns
        if events:
            self._answered_ns = polled_ns
        ended += [row for event in events if (row := self._take(event)) is not None]
        self._test.flush()
        if ended:
            self._record.add_samples(ended)
        if time.monotonic_ns() - self._noted_ns >= SERIES_PERIOD_NS:
            self.note_state()

    def withdraw(self) -> list[int]:
        """Takes back the samples that the target has not begun; returns their numbers. They get no row.

        For a load that ends by time.
        """
        numbers = [number for query in self._queue for number in query.numbers]
        self._queue.clear()
        for number in self._target.withdraw():
            del self._open[number]
            numbers.append(number)
        return numbers

    def abandon(self) -> None:
        """Ends every sample that has not ended as cancelled, here and in the target; each has its row."""
        for query in self._queue:
            for number in query.numbers:
                self._open_sample(number, query)
        self._queue.clear()
        self._cut_off(self._target.cancel_all(), begun_only=False)

    def interrupt(self) -> None:
        """Ends every answer that has begun as cancelled; each has its row.

        Only a remote target is asked for what was not reported yet: one in this process may hang.
        """
        self._cut_off(self._target.cancel_all() if self._remote is not None else [], begun_only=True)

    def _cut_off(self, events: Sequence[SampleEvent], *, begun_only: bool) -> None:
        rows = [row for event in events if (row := self._take(event)) is not None]
        cut = [number for number, sample in self._open.items() if sample.first_ns is not None or not begun_only]
        rows += [self._end(number, "cancelled", last_ns=None) for number in cut]
        if rows:
            self._record.add_samples(rows)

    def findings(self) -> list[Reason]:
        """What the answers have shown of a server; empty of other targets."""
        return [] if self._remote is None else self._remote.findings(self.start_ns)

    def note_state(self) -> None:
        """Adds a row to the time series, notes the memory and refreshes the live line."""
        state, replicas, now_ns = self._target.state(), self._target.replicas(), time.monotonic_ns()
        rows = [self._series_row(replica, now_ns) for replica in replicas] or [self._outer_row(state, now_ns)]
        if self._power_meter is not None:
            rows[0] = rows[0]._replace(system_power_watts=self._power_meter.watts)
        for row in rows:
            self._record.add_series(row)
        # Replicas count tokens before a target that reports samples at their end has events of them.
        output_tokens = sum(row.output_tokens for row in rows)
        since_seconds = (now_ns - self._noted_ns) / 1e9
        # The tokens of unfinished answers of a lost replica are subtracted, because those answers start over.
        rate = max(0, output_tokens - self._noted_output_tokens) / since_seconds
        self._noted_ns, self._noted_output_tokens = now_ns, output_tokens
        if rate or not state.in_flight:
            self._answered_ns = now_ns
        self.wall_clock.look()
        happened = self._target.outcome(self._start_ns)
        own = {
            "peak_memory_bytes": peak_memory_bytes(),
            "loop_seconds": self._loop_seconds(now_ns),
            "core_wait_share": self.core_wait.share(),
        }
        self._record.add_facts({**own, **happened})
        left_seconds, share = self._left(now_ns)
        silent_seconds = (now_ns - self._answered_ns) / 1e9
        self._progress.running(self._seconds(now_ns), left_seconds, share, rate, state, silent_seconds)

    def _series_row(self, replica: ReplicaReading, now_ns: int) -> SeriesRow:
        before = self._before.get((replica.node, replica.replica))
        state, errors_before = asdict(replica.state), before.telemetry if before else None
        if before is not None:
            state |= {name: state[name] - getattr(before.state, name) for name in TOTALS}
        if replica.known is not None:
            state = {name: value if name in replica.known else None for name, value in state.items()}
        del state["replicas"]  # it is one
        return SeriesRow(
            elapsed_seconds=self._seconds(now_ns),
            node=replica.node or self._node,
            replica=replica.replica,
            **state,
            **asdict(replica.telemetry.since(errors_before)),
        )

    def _outer_row(self, state: ReplicaState, now_ns: int) -> SeriesRow:
        """The row of a target that shows nothing of its replicas: what was sent to it and what came back."""
        return SeriesRow(
            elapsed_seconds=self._seconds(now_ns),
            node=self._node,
            replica=0,
            output_tokens=self._output_tokens,
            processed_tokens=self._input_tokens + self._output_tokens,
            batched_tokens=None,
            max_batched_tokens=None,
            pages_free=None,
            pages=None,
            in_flight=state.in_flight,
            waiting=state.waiting,
            preemptions=None,
        )

    def _left(self, now_ns: int) -> tuple[float | None, float]:
        """Seconds left (None once a load that ends by time is over) and the share that is done."""
        if self._planned_seconds is not None:
            left_seconds = self._planned_seconds - self._seconds(now_ns)
            return (left_seconds, 1 - left_seconds / self._planned_seconds) if left_seconds > 0 else (None, 1.0)
        ended = min(1.0, self.ended / max(self._planned, self.issued))
        share = self._work.share(self._input_tokens + self._output_tokens) if self._offline else ended
        return seconds_left(self._seconds(now_ns), share, ended), share

    def _loop_seconds(self, now_ns: int) -> dict[str, float | None]:
        spent = self._spent
        harness = now_ns - self._start_ns - spent.wait - spent.target - spent.tokenise - spent.detokenise
        return {
            "wait": spent.wait / 1e9,
            "target": spent.target / 1e9,
            "tokenise": spent.tokenise / 1e9 if self._text else None,
            "detokenise": spent.detokenise / 1e9 if self._text else None,
            "harness": harness / 1e9,
        }

    def _wait_for_issue(self) -> None:
        """Takes issued samples; with nothing else to do, waits for them until the next row of the series is due."""
        if self._test.all_issued:
            return
        if self._open or self._queue:
            self._accept(self._test.take_issued(timeout_seconds=0.0))
            return
        began_ns = time.monotonic_ns()
        until_note_ns = self._noted_ns + SERIES_PERIOD_NS - began_ns
        self._accept(self._test.take_issued(timeout_seconds=max(0, until_note_ns) / 1e9))
        self._spent.wait += time.monotonic_ns() - began_ns

    def _accept(self, issued: Sequence[Issued]) -> None:
        if not self._open and not self._queue:
            self._answered_ns = time.monotonic_ns()
        number = self._test.issued - sum(len(query.rows) for query in issued)
        for query in issued:
            rows = self._library[query.rows]
            self._work.prompt_tokens += int(self._data_set.input_tokens[rows].sum())
            self._work.open_limits += int(self._data_set.output_limits[rows].sum())
            self._queue.append(_Query(range(number, number + len(rows)), rows, query.issued_ns, query.due_ns))
            if self._schedule is not None:  # the query issued with the least delay shows when LoadGen started
                self._start_ns = min(self._start_ns, query.issued_ns - self._schedule.due_ns(number))
            number += len(rows)

    def _due_ns(self, number: int, query: _Query) -> int:
        if self._schedule is not None:
            return self._start_ns + self._schedule.due_ns(number)
        return query.issued_ns if query.due_ns is None else query.due_ns

    def _feed(self) -> list[SampleRow]:
        refused: list[SampleRow] = []
        if not self._queue:
            return refused
        state = self._target.state()
        room = max(QUEUED_SAMPLES, QUEUED_PER_REPLICA * state.replicas) - state.waiting
        while self._queue and room > 0:
            query = self._queue[0]
            numbers, query.numbers = query.numbers[:room], query.numbers[room:]
            room -= len(numbers)
            for number in numbers:
                refused += self._submit(number, query)
            if not query.numbers:
                self._queue.popleft()
        return refused

    def _open_sample(self, number: int, query: _Query) -> _Sample:
        row = int(query.rows[number - query.numbers.stop])
        counted = self._data_set.prompts_counted
        input_tokens = int(self._data_set.input_tokens[row]) if counted else None
        self._open[number] = _Sample(row, input_tokens, self._due_ns(number, query), query.issued_ns)
        return self._open[number]

    def _submit(self, number: int, query: _Query) -> list[SampleRow]:
        """Gives a sample to the target; returns its row if it is refused."""
        sample = self._open_sample(number, query)
        row = sample.row
        if self._text:
            sample.tokenise_ns = self._text.tokenise(row)
            self._spent.tokenise += sample.tokenise_ns
        sample.submitted_ns = max(time.monotonic_ns(), sample.issued_ns)
        try:
            if self._remote is not None and query.due_ns is not None:
                self._remote.submit(number, self._data_set.requests[row], query.due_ns)
            else:
                self._target.submit(number, self._data_set.requests[row])
        except (RequestError, CapacityError) as error:
            self.failed += 1
            return [self._end(number, finish_reason=None, last_ns=None, error=str(error))]
        return []

    def _take(self, event: SampleEvent) -> SampleRow | None:
        sample = self._open[event.sample_id]
        if event.error is not None:
            self.failed += 1
            place = (event.node, event.replica)
            return self._end(event.sample_id, finish_reason=None, last_ns=None, error=event.error, place=place)
        one_by_one = event.output_tokens is None  # else the ids are those of a whole answer, which came at once
        first_ns = event.first_ns or (event.time_ns if event.token_ids and one_by_one else None)
        if event.input_tokens is not None:
            sample.input_tokens = event.input_tokens
        if sample.first_ns is None and first_ns is not None:
            sample.first_ns, sample.started_ns = first_ns, event.started_ns
            self._input_tokens += sample.input_tokens or 0
            if self._streams:
                self._test.first_token(event.sample_id, event.token_ids[0] if event.token_ids else NO_TOKEN)
        new_tokens = len(event.token_ids) if event.output_tokens is None else event.output_tokens - sample.output_tokens
        sample.output_tokens += new_tokens
        self._output_tokens += new_tokens
        if event.sent_ns is not None:
            sample.sent_ns = event.sent_ns
        if event.token_times_ns is not None:
            self._record.add_token_times(event.sample_id, event.token_times_ns - self._start_ns)
        elif self._keeps_token_times and event.output_tokens is None:
            sample.token_times.extend([event.time_ns] * len(event.token_ids))
        if self._keep_ids:
            if event.output_tokens is not None:
                sample.token_ids.clear()
            sample.token_ids.extend(event.token_ids)
        if event.finish_reason is None:
            return None
        if self._answers is not None:
            self._read(event, sample, self._answers)
        return self._end(event.sample_id, event.finish_reason, event.time_ns, place=(event.node, event.replica))

    def _read(self, event: SampleEvent, sample: _Sample, answers: Answers) -> None:
        counted = answers.take(event.sample_id, sample.token_ids, event.text, event.first_characters)
        if counted is not None:
            self._output_tokens += counted.tokens - sample.output_tokens
            sample.output_tokens, sample.first_tokens = counted

    def _end(
        self,
        number: int,
        finish_reason: str | None,
        last_ns: int | None,
        error: str | None = None,
        place: tuple[str | None, int] = (None, 0),
    ) -> SampleRow:
        sample = self._open.pop(number)
        detokenise_ns = None
        if self._text and error is None:
            detokenise_ns = self._text.detokenise(sample.token_ids)
            self._spent.detokenise += detokenise_ns
        if finish_reason != "cancelled":
            if self._needs_first_tokens and sample.first_ns is None:  # without any, LoadGen's process crashes
                self._test.first_token(number, NO_TOKEN)
            self._test.complete(number, sample.output_tokens, sample.token_ids)
        self._work.end(int(self._data_set.output_limits[sample.row]), sample.output_tokens)
        if sample.token_times:
            self._record.add_token_times(number, np.array(sample.token_times) - self._start_ns)
        return SampleRow(
            sample_id=number,
            sample_index=sample.row,
            scheduled_seconds=self._seconds(sample.due_ns),
            sent_seconds=self._seconds(sample.issued_ns),
            first_token_seconds=self._optional_seconds(sample.first_ns),
            last_token_seconds=self._optional_seconds(last_ns),
            input_tokens=sample.input_tokens,
            output_tokens=sample.output_tokens,
            finish_reason=finish_reason,
            node=place[0] or self._node,
            replica=place[1],
            error=error,
            submitted_seconds=self._optional_seconds(sample.submitted_ns),
            started_seconds=self._optional_seconds(sample.started_ns),
            tokenise_seconds=None if sample.tokenise_ns is None else sample.tokenise_ns / 1e9,
            detokenise_seconds=None if detokenise_ns is None else detokenise_ns / 1e9,
            request_sent_seconds=self._optional_seconds(sample.sent_ns),
            first_tokens=sample.first_tokens,
        )

    def _seconds(self, moment_ns: int) -> float:
        return (moment_ns - self._start_ns) / 1e9

    def _optional_seconds(self, moment_ns: int | None) -> float | None:
        return None if moment_ns is None else self._seconds(moment_ns)
