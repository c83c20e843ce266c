"""spl.txt: the readings of SPEC PTDaemon next to LoadGen's logs (tools/submission/power of mlcommons/inference)."""

from __future__ import annotations

import math
from datetime import UTC, datetime
from pathlib import Path

from megatoken.files import UnreadableError, open_regular

READINGS = "spl.txt"
LONGEST_LINE = 4096
MOST_LINES = 1_000_000  # a reading a second for eleven days


def mean_watts(path: Path, begin: datetime, end: datetime) -> tuple[float, int]:
    """The mean of the positive readings between two moments, 0 without any, and how many there are.

    Raises UnreadableError: The readings cannot be read.
    """
    total, count = 0.0, 0
    try:
        with open_regular(path) as file:
            for _ in range(MOST_LINES):
                line = file.readline(LONGEST_LINE)
                if not line:
                    break
                fields = line.decode("utf-8", "replace").split(",")
                if len(fields) < 4 or fields[0] != "Time" or fields[2] != "Watts":
                    continue
                try:
                    time = datetime.strptime(fields[1].strip(), "%m-%d-%Y %H:%M:%S.%f").replace(tzinfo=UTC)
                    watts = float(fields[3])
                except ValueError:
                    continue
                if begin < time < end and 0 < watts < math.inf:
                    total += watts
                    count += 1
    except OSError as error:
        raise UnreadableError(f"cannot be read: {error.strerror}") from None
    return total / count if count else 0.0, count
