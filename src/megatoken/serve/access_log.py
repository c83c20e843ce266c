"""The access log: one line per request, never a word of prompts or answers."""

from __future__ import annotations

import json
import os
import threading
from datetime import UTC, datetime
from queue import SimpleQueue
from typing import Any

MOST_LINES_WAITING = 100_000
STANDARD_ERROR = 2  # its descriptor


class AccessLog:
    """Writes lines to standard error from a thread, so that a full pipe never stops the event loop.

    Lines are dropped, and counted, while more than ``MOST_LINES_WAITING`` wait.
    """

    def __init__(self, *, as_json: bool, quiet: bool) -> None:
        """Starts the thread.

        Args:
            as_json: JSON lines instead of text.
            quiet: leave out lines about requests that were answered without an error.
        """
        self._as_json = as_json
        self._quiet = quiet
        self._lines: SimpleQueue[bytes | None] = SimpleQueue()
        self._dropped = 0
        self._thread = threading.Thread(target=self._write, name="access-log", daemon=True)
        self._thread.start()

    def wants(self, status: int) -> bool:
        """Whether a request that ended with this status gets a line."""
        return not self._quiet or status >= 400

    def request(self, status: int, facts: dict[str, Any]) -> None:
        """Log a request that has ended, and whose status is wanted."""
        self._put("request", {"status": status, **facts})

    def note(self, message: str) -> None:
        """Log something that is not about one request."""
        self._put("note", {"message": message})

    def close(self) -> None:
        """Write what waits, for a second at most."""
        self._lines.put(None)
        self._thread.join(timeout=1.0)

    def _put(self, kind: str, facts: dict[str, Any]) -> None:
        if self._lines.qsize() > MOST_LINES_WAITING:
            self._dropped += 1
            return
        if self._dropped:
            facts = {**facts, "dropped_lines": self._dropped}
            self._dropped = 0
        time = f"{datetime.now(UTC):%Y-%m-%dT%H:%M:%S.%f}"[:-3] + "Z"
        if self._as_json:
            line = json.dumps({"time": time, "kind": kind, **facts})
        elif kind == "note":
            line = f"megatoken: {facts['message']}"
        else:
            line = f"{time} " + " ".join(f"{name}={_plain(value)}" for name, value in facts.items())
        self._lines.put(line.encode(errors="backslashreplace") + b"\n")

    def _write(self) -> None:
        while (line := self._lines.get()) is not None:
            try:
                os.write(STANDARD_ERROR, line)
            except OSError:  # closed, or the disk is full: serving goes on
                return


def _plain(value: object) -> str:
    """A value without spaces or control characters, so that no client can forge a line."""
    text = str(value)
    return text if text.isprintable() and " " not in text else json.dumps(text)
