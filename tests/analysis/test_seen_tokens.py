"""Times of tokens against the rows of their requests."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pyarrow as pa

from megatoken.analysis.seen_tokens import SeenTokens
from megatoken.analysis.statistics import Samples


def seen(ids: list[int], times_of: dict[int, list[int]]) -> Any:
    """``ids``: of the rows of requests; ``times_of``: ns by the id of a request."""
    table = pa.table({"sample_id": [*times_of], "token_times_ns": pa.array([*times_of.values()], pa.list_(pa.int64()))})
    rows = len(ids)
    samples = SimpleNamespace(
        output_tokens=np.full(rows, 2), failed=np.zeros(rows, bool), completed=np.ones(rows, bool)
    )
    return SeenTokens._recorded(table, pa.table({"sample_id": pa.array(ids, pa.int64())}), samples)  # type: ignore[arg-type]


def test_times_without_a_row_of_their_request_do_not_count() -> None:
    second = 10**9
    times = {7: [second, 2 * second], 3: [3 * second, 4 * second]}
    assert seen([3, 7], times).within(0, 10) == 4
    assert seen([3], times).within(0, 10) == 2 and seen([3], times).within(0, 2.5) == 0
    assert seen([], times).within(0, 10) == 0


def samples_of(**columns: list[float]) -> Samples:
    """Of two answers, the second one cut off."""
    nothing = np.full(2, np.nan)
    known = {name: np.array(values) for name, values in columns.items()}
    flags = {"failed": [False, False], "cancelled": [False, True], "completed": [True, False]}
    names = ("scheduled", "sent", "submitted", "started", "first", "last", "tokenise", "detokenise", "request_sent")
    floats = {name: known.get(name, nothing) for name in (*names, "input_tokens", "output_tokens")}
    return Samples(**floats, **{name: np.array(values) for name, values in flags.items()})


def test_a_piece_of_an_answer_counts_as_its_share_of_the_tokens_also_where_it_was_cut_off() -> None:
    second = 10**9
    table = pa.table(
        {
            "sample_id": [0, 1],
            "token_times_ns": pa.array([[0, second], [0, second, 2 * second]], pa.list_(pa.int64())),
        }
    )
    samples = samples_of(output_tokens=[6, 9])
    tokens = SeenTokens._recorded(table, pa.table({"sample_id": [0, 1]}), samples)
    assert tokens.within(0, 10) == 6 + 3 * 3
    assert tokens.within(2, 10) == 3
    figures = tokens.gap_figures(np.ones(2, bool))
    assert figures["tokens_per_frame"] == 3.0  # not 1, the entries of a frame


def test_without_times_an_answer_that_was_cut_off_goes_on_at_the_pace_of_others(tmp_path: Path) -> None:
    samples = samples_of(first=[0.0, 1.0], last=[4.0, np.nan], output_tokens=[5, 1])
    tokens = SeenTokens.of(SimpleNamespace(path=tmp_path), samples)  # type: ignore[arg-type]
    assert tokens.within(0, 4.5) == 5 + 4  # at 1, 2, 3 and 4 s
    assert tokens.within(0, 2) == 2 + 1
    samples.output_tokens[1] = 7  # all that were seen
    tokens = SeenTokens.of(SimpleNamespace(path=tmp_path), samples)  # type: ignore[arg-type]
    assert tokens.within(0, 4.5) == 5 + 7
    samples.first[1] = 6.0  # after the last of those that ended
    tokens = SeenTokens.of(SimpleNamespace(path=tmp_path), samples)  # type: ignore[arg-type]
    assert (tokens.within(0, 4.5), tokens.within(6, 6.5)) == (5, 7)


def test_an_answer_that_was_cut_off_has_the_times_until_then() -> None:
    second = 10**9
    times = pa.array([[0, second], [2 * second, 3 * second, 5 * second]], pa.list_(pa.int64()))
    samples = samples_of(first=[0.0, 2.0], last=[1.0, np.nan], output_tokens=[2, 3])
    tokens = SeenTokens._recorded(
        pa.table({"sample_id": [0, 1], "token_times_ns": times}), pa.table({"sample_id": [0, 1]}), samples
    )
    until = tokens.until_cut(samples)
    assert until.last.tolist() == [1.0, 5.0] and until.output_tokens.tolist() == [2, 3]
    assert until.tpot.tolist() == [1.0, 1.5]
    assert tokens.within_each(0, 10, 3).tolist() == [2, 3, 0]
