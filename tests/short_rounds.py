"""MLPerf's rules with a smaller data set and a shorter duration, so that a test's run can be VALID."""

from dataclasses import replace

import pytest

from megatoken.mlperf.benchmarks import benchmarks
from megatoken.mlperf.rounds import rules


def shorten_rounds(patch: pytest.MonkeyPatch, rows: int, seconds: float) -> None:
    """Until ``patch`` is undone, every round asks for ``seconds`` and every benchmark has ``rows`` rows."""
    patch.setitem(rules(), "min_duration_ms", round(seconds * 1000))
    for name, benchmark in benchmarks().items():
        patch.setitem(benchmarks(), name, replace(benchmark, rows=rows))
