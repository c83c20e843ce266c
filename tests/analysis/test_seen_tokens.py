"""Times of tokens against the rows of their requests."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pyarrow as pa

from megatoken.analysis.seen_tokens import SeenTokens


def seen(ids: list[int], times_of: dict[int, list[int]]) -> Any:
    """``ids``: of the rows of requests; ``times_of``: ns by the id of a request."""
    table = pa.table({"sample_id": [*times_of], "token_times_ns": pa.array([*times_of.values()], pa.list_(pa.int64()))})
    samples = SimpleNamespace(output_tokens=np.full(len(ids), 2), failed=np.zeros(len(ids), bool))
    return SeenTokens._recorded(table, pa.table({"sample_id": pa.array(ids, pa.int64())}), samples)  # type: ignore[arg-type]


def test_times_without_a_row_of_their_request_do_not_count() -> None:
    second = 10**9
    times = {7: [second, 2 * second], 3: [3 * second, 4 * second]}
    assert seen([3, 7], times).within(0, 10) == 4
    assert seen([3], times).within(0, 10) == 2 and seen([3], times).within(0, 2.5) == 0
    assert seen([], times).within(0, 10) == 0
