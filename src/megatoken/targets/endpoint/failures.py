"""Requests that failed in a test: when the first one did, after how many answers, and what each said."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

MOST_MESSAGES = 3  # the most frequent ones


@dataclass(frozen=True, slots=True)
class ServerEnd:
    """How a server that the run had started ended: its exit status, negative for a signal, and its last words."""

    exit_status: int
    last_lines: str
    log: str


class Failures:
    """Collects the failures of one test."""

    def __init__(self, server_end: Callable[[], ServerEnd | None]) -> None:
        """``server_end`` says how the started server ended; None while it runs, or if the run started none."""
        self._server_end = server_end
        self._end: ServerEnd | None = None  # asked for about once a second, and its log may be long
        self.begin()

    def begin(self) -> None:
        """A test begins."""
        self._answers, self._first_ns = 0, 0
        self._answers_before = 0
        self._messages: Counter[str] = Counter()
        self._answered = True

    def answered(self) -> None:
        """Counts a whole answer."""
        self._answers += 1

    def failed(self, message: str, *, answered: bool) -> None:
        """Counts a sample that gets no answer.

        ``answered``: the server is not gone: its answer says no or cannot be read, or the client could not ask.
        """
        if not self._messages:
            self._first_ns, self._answers_before = time.monotonic_ns(), self._answers
        self._messages[message] += 1
        self._answered &= answered

    def to_document(self, since_ns: int) -> dict[str, Any] | None:
        """All of it for ``result.json``, times from ``since_ns`` on; None if nothing failed."""
        if not self._messages:
            return None
        end = self._end = self._end or self._server_end()
        return {
            "at_seconds": (self._first_ns - since_ns) / 1e9,
            "answers_before": self._answers_before,
            "answered": self._answered,
            "messages": [
                {"message": message, "samples": count} for message, count in self._messages.most_common(MOST_MESSAGES)
            ],
            "server": None if end is None else asdict(end),
        }
