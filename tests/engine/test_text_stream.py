"""Text of streams: whole characters, equal to the tokenizer's decoding, cut at stop strings; for real tokenizers."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import hypothesis.strategies as st
import pytest
from hypothesis import example, given, settings
from tokenizer_kinds import KINDS, LOSSLESS, SPECIAL, byte_level
from tokenizers import AddedToken

import megatoken
from examples import examples
from megatoken.engine.text_stream import TextStream
from megatoken.engine.tokenizer import Tokenizer

REFERENCE_MODEL = Path(megatoken.__file__).parent / "data/reference_model"


@pytest.fixture(scope="module")
def reference() -> Tokenizer:
    """The reference model's own."""
    return Tokenizer(REFERENCE_MODEL / "tokenizer.json")


def streamed(tokenizer: Tokenizer, token_ids: list[int]) -> list[str]:
    stream = TextStream(tokenizer)
    return [*(stream.add([token]) for token in token_ids), stream.flush()]


# Emoji with joiners, flags, combining marks, other scripts, spaces of all sorts and the replacement character itself.
WILD = st.lists(
    st.one_of(
        st.text(max_size=12),
        st.sampled_from(
            ["👩‍👩‍👧", "🇩🇪", "é", "e\u0301", "a\u0308\u0323", "東京", "  ", "\n\t", "�", "ﷺ", " the", "doesn't", " ."]
        ),
    ),
    max_size=30,
).map("".join)


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=examples(150))
@given(text=WILD)
@example("€" * 60)
@example("a€" * 40 + "😀" * 30)
@example("��� a � b")
@example("one two three four five six seven eight nine ten eleven twelve ." * 3)
def test_pieces_add_up_to_the_text(tokenizers: dict[str, Tokenizer], kind: str, text: str) -> None:
    tokenizer = tokenizers[kind]
    token_ids = tokenizer.encode(text)
    pieces = streamed(tokenizer, token_ids)
    assert "".join(pieces) == tokenizer.decode(token_ids)
    if kind in LOSSLESS:
        assert tokenizer.decode(token_ids) == text


@settings(max_examples=examples(200), deadline=None, derandomize=True)
@given(token_ids=st.lists(st.integers(0, 399), max_size=60))
def test_pieces_add_up_for_any_bytes(tokenizers: dict[str, Tokenizer], token_ids: list[int]) -> None:
    """A model with random weights says anything, halves of characters included."""
    tokenizer = tokenizers["byte_level"]
    assert "".join(streamed(tokenizer, token_ids)) == tokenizer.decode(token_ids)


@pytest.mark.parametrize("kind", LOSSLESS)
def test_half_a_character_is_held_back(tokenizers: dict[str, Tokenizer], kind: str) -> None:
    pieces = streamed(tokenizers[kind], tokenizers[kind].encode("龍🧨"))
    assert len(pieces) >= 7
    assert [piece for piece in pieces if piece] == ["龍", "🧨"]


def test_a_stream_goes_on_after_bytes_that_are_no_character(tokenizers: dict[str, Tokenizer]) -> None:
    """In a row of byte tokens one bad byte spoils the row's characters, shown ones too; what follows must come."""
    tokenizer = tokenizers["byte_fallback"]
    euro, words = tokenizer.encode("€")[1:], tokenizer.encode("the lazy dog")
    text = "".join(streamed(tokenizer, [*euro, euro[0], *words, *words]))
    assert text.startswith("€")
    assert text.endswith("the lazy dog the lazy dog")
    assert "".join(streamed(tokenizer, [*words, euro[0]])) == "the lazy dog�"


@pytest.mark.parametrize("kind", KINDS)
def test_words_appear_token_by_token(tokenizers: dict[str, Tokenizer], kind: str) -> None:
    """Nothing is held back without need, and a long stream decodes only a short window at each token, or nothing."""
    tokenizer = tokenizers[kind]
    token_ids = tokenizer.encode("the quick brown fox jumps over the lazy dog " * 20)
    stream = TextStream(tokenizer)
    decoded: list[int] = []
    decode = tokenizer.decode
    tokenizer.decode = lambda ids, **kwargs: decoded.append(len(ids)) or decode(ids, **kwargs)
    try:
        pieces = [stream.add([token]) for token in token_ids]
    finally:
        del tokenizer.decode
    assert sum(not piece for piece in pieces) <= len(pieces) * (0.4 if kind == "unigram" else 0.01) + 1
    assert max(decoded, default=0) <= (0 if kind in LOSSLESS else 12)


@settings(max_examples=examples(150))
@given(token_ids=st.lists(st.integers(0, 3071), max_size=60), sizes=st.lists(st.integers(0, 5), max_size=60))
def test_tokens_may_come_in_groups(reference: Tokenizer, token_ids: list[int], sizes: list[int]) -> None:
    """Any ids, as many in a step as the engine likes."""
    stream = TextStream(reference)
    ends = [min(sum(sizes[:count]), len(token_ids)) for count in range(len(sizes) + 1)] + [len(token_ids)]
    pieces = [stream.add(token_ids[start:end]) for start, end in pairwise(ends)]
    assert "".join([*pieces, stream.flush()]) == reference.decode(token_ids)


def test_special_and_added_tokens(tmp_path: Path) -> None:
    fast = byte_level()
    added = ["<tool_call>", "two words", "<｜tool▁begin｜>", "né"]
    fast.add_tokens([AddedToken(one, normalized=False) for one in added])
    fast.add_special_tokens(["<|eot|>"])
    fast.save(str(tmp_path / "tokenizer.json"))
    tokenizer = Tokenizer(tmp_path / "tokenizer.json")
    token_ids = [1, *tokenizer.encode(f"the dog{''.join(added)}<|eot|>"), 2, 10_000]
    assert set(map(fast.token_to_id, [*added, "<|eot|>"])) <= set(token_ids)
    assert "".join(streamed(tokenizer, token_ids)) == tokenizer.decode(token_ids)
    stream = TextStream(tokenizer, keep_special=True)
    kept = "".join(stream.add([token]) for token in token_ids) + stream.flush()
    assert kept == tokenizer.decode(token_ids, keep_special=True)
    assert kept.startswith(SPECIAL[1]) and kept.endswith(f"<|eot|>{SPECIAL[2]}")


# Stop strings


def first_stop(text: str, stops: list[str]) -> tuple[int, str] | None:
    """Where the text is cut and by which: the stop string that is complete first, character by character."""
    for end in range(1, len(text) + 1):
        complete = [stop for stop in stops if text[:end].endswith(stop)]
        if complete:
            stop = max(complete, key=len)
            return end - len(stop), stop
    return None


STOPS = st.lists(st.text("ab 🧨é\n", min_size=1, max_size=4), min_size=1, max_size=4)


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=examples(150))
@given(text=st.text("ab 🧨é\n", max_size=40), stops=STOPS, include=st.booleans())
@example(text="abab abab", stops=["abab "], include=False)
@example(text="aab", stops=["ab", "aab"], include=True)
def test_a_stop_string_cuts_exactly(
    tokenizers: dict[str, Tokenizer], kind: str, text: str, stops: list[str], include: bool
) -> None:
    tokenizer = tokenizers[kind]
    token_ids = tokenizer.encode(text)
    whole = tokenizer.decode(token_ids)
    expected = first_stop(whole, stops)
    stream = TextStream(tokenizer, stops, include)
    shown = ""
    for token_id in token_ids:
        shown += stream.add([token_id])
        if expected is not None and stream.stopped is None:
            assert len(shown) <= expected[0]
    shown += stream.flush()
    if expected is None:
        assert (shown, stream.stopped) == (whole, None)
    else:
        start, stop = expected
        assert (shown, stream.stopped) == (whole[: start + len(stop) * include], stop)


def test_text_that_can_begin_no_stop_string_is_not_held_back(reference: Tokenizer) -> None:
    token_ids = reference.encode("Answer: red, blue.\nNext", add_special=False)
    stream = TextStream(reference, ["\n\n", "END"])
    pieces = [stream.add([token]) for token in token_ids]
    plain = streamed(reference, token_ids)[:-1]
    held = [piece for piece, certain in zip(plain, pieces, strict=True) if piece != certain]
    assert held[0].endswith("\n") and len(held) <= 2
    assert "".join(pieces) + stream.flush() == "Answer: red, blue.\nNext"


def test_stop_strings_wait_for_min_tokens(reference: Tokenizer) -> None:
    token_ids = reference.encode("1,2,3,4", add_special=False)
    assert len(token_ids) == 7
    for group in (1, 2, 7):
        stream = TextStream(reference, [","], min_tokens=3)
        shown = "".join(stream.add(token_ids[start : start + group]) for start in range(0, 7, group))
        assert (shown + stream.flush(), stream.stopped) == ("1,2", ",")
