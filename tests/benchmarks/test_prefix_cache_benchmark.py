"""The prefix cache's benchmark on the real engine, small: equal answers, and the tokens that the engine computed."""

from __future__ import annotations

import pytest

import prefix_cache

SMALL = ["--users", "3", "--turns", "2", "--system-tokens", "70", "--repeats", "1", "--out", "x.json"]


def test_it_counts_what_was_computed_and_compares_the_answers() -> None:
    options = prefix_cache.parse([*SMALL, "--device", "cpu"])
    off, on = (prefix_cache.measure(options, prefix_cache=one) for one in (False, True))
    told = prefix_cache.compare(off, on)
    # Two questions of 4 tokens, an answer of 2 between them; pages of 32 tokens, of which a prompt begins with two.
    assert told["off"]["prompt_tokens"] == 3 * (74 + 80)
    assert told["off"]["computed_prompt_tokens"] == [3 * (74 + 80)]
    assert told["on"]["computed_prompt_tokens"] == [74 + 2 * (74 - 64) + 3 * (80 - 64)]
    assert told["equal_answers_share"] == 1.0
    assert told["prompt_tokens_saved_share"] == pytest.approx(1 - 142 / 462)
    assert len(told["on"]["ttft_p50_seconds_by_turn"]) == 2
    assert 0 < told["on"]["ttft_p50_seconds"] <= told["on"]["ttft_p99_seconds"]


@pytest.mark.parametrize("wrong", [["--users", "0"], ["--repeats", "0"], ["--precision", "fp4"]])
def test_options_are_checked(wrong: list[str]) -> None:
    with pytest.raises(SystemExit) as refusal:
        prefix_cache.parse([*SMALL, *wrong])
    assert refusal.value.code == 2
