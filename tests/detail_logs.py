"""Detail logs made of a few values, for the code that judges what a log says."""

from collections.abc import Mapping, Sequence
from typing import Any

from megatoken.mlperf.detail_log import DetailLog, Entry


def detail_log_of(values: Mapping[str, Any], errors: Sequence[str] = ()) -> DetailLog:
    """A log that states these values and has these errors."""

    def entry(key: str, value: Any, is_error: bool) -> Entry:
        return Entry(key, value, str(value), 0.0, 1, is_error, False, "loadgen.cc", 1, 1, 1)

    return DetailLog(
        first={key: entry(key, value, is_error=False) for key, value in values.items()},
        errors=[entry("error_runtime", text, is_error=True) for text in errors],
        error_count=len(errors),
    )
