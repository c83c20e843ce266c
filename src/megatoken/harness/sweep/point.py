"""One point of a sweep: warm-up, window, cool-down of a load, and an early end where the target cannot keep up.

The stated rule of the three phases. The warm-up ends when it has lasted its time and as many requests have ended as are
under way, so that every place has been through one answer; at the latest after ``LONGEST_WARM_UP`` times its time or
the window's, whichever is longer. The window lasts its time; the requests that are due within it are the ones that
count. In the cool-down the load goes on until all of those have ended, so that the last of them do not run in a
target that empties; at most for the window's length. Then no more requests come.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

from megatoken.analysis.sweep_point import backlog_grows
from megatoken.harness.loadgen_wire import Issued
from megatoken.harness.sweep.loads import Load
from megatoken.runs.reasons import Reason, reason

LONGEST_WARM_UP = 3.0
EARLY_NS = 30_000_000  # longer than a turn of the measurement loop
OVERLOAD_SHARE = 0.3  # of the window that must have passed before a growing queue ends it
FAILED_SHARE, FEWEST_FAILED = 0.5, 20  # requests that fail before a point ends


@dataclass(frozen=True, slots=True)
class Phases:
    """How long the phases of a point last, in seconds; ``window_seconds`` None: to the end of a load that ends.

    ``stops_overload``: whether an open loop ends when the requests under way grow.
    """

    warm_up_seconds: float
    window_seconds: float | None
    stops_overload: bool = True

    @property
    def longest_warm_up_seconds(self) -> float:
        """When the window begins at the latest."""
        return LONGEST_WARM_UP * max(self.warm_up_seconds, self.window_seconds or 0.0)


class PointLoad:
    """A load with its phases, as the measurement loop drives it."""

    def __init__(self, load: Load, phases: Phases, *, early: bool = False) -> None:
        """``early``: whether the target takes requests before they are due, where the load knows them."""
        self._load = load
        self._early_ns = EARLY_NS if early and not load.waits else 0
        self._after_given_ns = 0  # the first moment at which none of the requests given so far is due
        self._phases = phases
        self._due: dict[int, int] = {}  # of every request under way
        self._start_ns: int | None = None
        self._window_start_ns: int | None = None
        self._window_end_ns: int | None = None
        self._backlog_before = 0
        self._due_within = self._ended = self._failed = 0
        self._unended_within = 0
        self.issued = 0  # requests so far
        self.all_issued = False  # whether no more come
        self.ended_by: Reason | None = None  # why the point ended before its time, if it did

    @property
    def outstanding(self) -> int:
        """Requests without an end."""
        return len(self._due)

    def window_seconds(self, start_ns: int) -> tuple[float, float] | None:
        """Start and end of the window after ``start_ns``, as far as it came; None if it never began."""
        end_ns = self._window_end_ns or time.monotonic_ns()
        if self._window_start_ns is None or end_ns <= self._window_start_ns:
            return None
        return (self._window_start_ns - start_ns) / 1e9, (end_ns - start_ns) / 1e9

    def patience_seconds(self, longest: float) -> float:
        """How long the target may be polled before another request is due; at most ``longest``."""
        due_ns = None if self.all_issued else self._load.next_due_ns()
        if due_ns is None:
            return longest
        return min(longest, max(0.0, (due_ns - self._early_ns - time.monotonic_ns()) / 1e9))

    def take_issued(self, timeout_seconds: float) -> list[Issued]:
        """The requests that are due now, or soon; waits for the first at most about this long."""
        now_ns = time.monotonic_ns()
        if self._start_ns is None:
            self._start_ns = now_ns
            self._load.start(now_ns)
        arrivals = self._load.take_due(now_ns + self._early_ns)
        if not arrivals and timeout_seconds > 0 and not self._due:
            time.sleep(self.patience_seconds(timeout_seconds))
            now_ns = time.monotonic_ns()
            arrivals = self._load.take_due(now_ns + self._early_ns)
        self._advance(now_ns)
        if not arrivals and not self._due and self._load.next_due_ns() is None:
            self._end_window(now_ns)
            self.all_issued = True
        if self.all_issued:
            return []
        for number, arrival in enumerate(arrivals, self.issued):
            self._due[number] = arrival.due_ns
            if self._within(arrival.due_ns):
                self._due_within += 1
                self._unended_within += 1
            self._after_given_ns = arrival.due_ns + 1
        self.issued += len(arrivals)
        return [Issued(max(now_ns, arrival.due_ns), [arrival.row], arrival.due_ns) for arrival in arrivals]

    def first_token(self, sample: int, token_id: int) -> None:
        """Does nothing: no load depends on first tokens."""

    def complete(self, sample: int, output_tokens: int, token_ids: Sequence[int] = ()) -> None:
        """Notes the end of a request; one without tokens failed."""
        due_ns = self._due.pop(sample)
        self._ended += 1
        self._failed += not output_tokens
        self._unended_within -= self._within(due_ns)
        self._load.ended(sample, time.monotonic_ns())

    def flush(self) -> None:
        """Does nothing: every call has taken effect."""

    def _within(self, due_ns: int) -> bool:
        begun = self._window_start_ns is not None and due_ns >= self._window_start_ns
        return begun and (self._window_end_ns is None or due_ns < self._window_end_ns)

    def _advance(self, now_ns: int) -> None:
        """Moves from phase to phase."""
        assert self._start_ns is not None
        if self.all_issued:
            return
        if self._failed >= FEWEST_FAILED and self._failed >= FAILED_SHARE * self._ended:
            self._stop(now_ns, reason("FAILING", failed=self._failed, samples=self._ended))
        elif self._window_start_ns is None:
            elapsed = (now_ns - self._start_ns) / 1e9
            turned_over = elapsed >= self._phases.warm_up_seconds and self._ended >= len(self._due)
            if turned_over or elapsed >= self._phases.longest_warm_up_seconds:
                self._window_start_ns = max(now_ns, self._after_given_ns)
                self._backlog_before = len(self._due)
        elif self._window_end_ns is None:
            elapsed, length = (now_ns - self._window_start_ns) / 1e9, self._phases.window_seconds
            if length is not None and elapsed >= length:
                self._end_window(now_ns)
            elif length is not None and elapsed >= OVERLOAD_SHARE * length:
                self._look_for_overload(now_ns)
        elif not self._unended_within or now_ns - self._window_end_ns >= (self._phases.window_seconds or 0.0) * 1e9:
            self.all_issued = True

    def _look_for_overload(self, now_ns: int) -> None:
        before, after, due = self._backlog_before, len(self._due), self._due_within
        if self._phases.stops_overload and not self._load.waits and backlog_grows(before, after, due):
            self._stop(now_ns, reason("OVERLOAD", before=before, after=after, due=due))

    def _stop(self, now_ns: int, why: Reason) -> None:
        self.ended_by = why
        self._end_window(now_ns)
        self.all_issued = True

    def _end_window(self, now_ns: int) -> None:
        if self._window_start_ns is not None and self._window_end_ns is None:
            self._window_end_ns = max(now_ns, self._after_given_ns)
