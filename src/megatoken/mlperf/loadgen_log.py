"""What LoadGen wrote down: ``mlperf_log_detail.txt`` read back."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatoken.errors import StorageError

_LOG_PREFIX = ":::MLLOG "
_NO_NUMBER = re.compile(r'(?<="value": )-?(?:nan|inf)(?=, "time_ms": )')  # of one query: how C++ prints 0 / 0


@dataclass(frozen=True, slots=True)
class LoadGenLog:
    """mlperf_log_detail.txt: the first value of every key, None where it is no number, and the text of every error."""

    values: dict[str, Any]
    errors: list[str]

    @classmethod
    def read(cls, directory: Path, last_key: str) -> LoadGenLog:
        """Reads the detail log, which must get as far as ``last_key``. Raises StorageError if a log is cut off."""
        path = directory / "mlperf_log_detail.txt"
        values: dict[str, Any] = {}
        errors = []
        try:
            with path.open(encoding="utf-8") as lines:
                for line in lines:
                    entry = json.loads(_NO_NUMBER.sub("null", line.removeprefix(_LOG_PREFIX), count=1))
                    values.setdefault(entry["key"], entry["value"])
                    if entry["metadata"]["is_error"]:
                        errors.append(str(entry["value"]))
            accuracy = (directory / "mlperf_log_accuracy.json").read_bytes()[-2:]
        except (OSError, ValueError, KeyError) as error:
            raise StorageError(f"{path}: LoadGen's log cannot be read back ({error}); is the disk full?") from None
        if last_key not in values or not accuracy.endswith(b"]\n"):
            raise StorageError(f"{path.parent}: a log of LoadGen has no end; is the disk full?")
        return cls(values, errors)
