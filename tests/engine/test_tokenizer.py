"""Real tokenizers of the kinds that checkpoints bring: whole texts, streams, and files that cannot be used."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import hypothesis.strategies as st
import pytest
from checkpoints import make_checkpoint
from hypothesis import example, given, settings
from tokenizers import Tokenizer as FastTokenizer
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors, trainers

from megatoken.engine import Engine, EngineConfig, Request
from megatoken.engine.tokenizer import Tokenizer
from megatoken.errors import CheckpointError, RequestError

CORPUS = [
    "The quick brown fox jumps over the lazy dog, and the dog doesn't mind.",
    "Größe, naïveté, crème brûlée; 東京 と 大阪 は 日本 の 都市 です。 Привет, мир!",
    "def add(left, right):\n    return left + right  # 1 + 1 == 2\n" * 3,
    "😀 👩‍👩‍👧 🇩🇪 e\u0301 a\u0308 “quotes” — and dashes…",
]
SPECIAL = ["<unk>", "<s>", "</s>"]


def byte_level() -> FastTokenizer:
    """As Llama 3, Qwen and GPT: every byte is a token, so a character may be spread over several."""
    tokenizer = FastTokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=400, special_tokens=SPECIAL, initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    return tokenizer


def byte_fallback() -> FastTokenizer:
    """As Llama 2 and Mistral: a space is a mark before a word, and what is not in the vocabulary falls into bytes."""
    tokenizer = FastTokenizer(models.BPE(unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokens = [*SPECIAL, *(f"<0x{byte:02X}>" for byte in range(256))]
    trainer = trainers.BpeTrainer(vocab_size=420, special_tokens=tokens, show_progress=False, max_token_length=6)
    tokenizer.train_from_iterator((line.replace(" ", "▁") for line in CORPUS[:1]), trainer)
    saved = json.loads(tokenizer.to_str())  # bytes are ordinary tokens; only training needed them as special ones
    saved["added_tokens"] = [token for token in saved["added_tokens"] if token["content"] in SPECIAL]
    return FastTokenizer.from_str(json.dumps(saved))


def unigram() -> FastTokenizer:
    tokenizer = FastTokenizer(models.Unigram())
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    trainer = trainers.UnigramTrainer(vocab_size=120, special_tokens=SPECIAL, unk_token="<unk>", show_progress=False)
    tokenizer.train_from_iterator(CORPUS, trainer)
    return tokenizer


def word_piece() -> FastTokenizer:
    tokenizer = FastTokenizer(models.WordPiece(unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece()
    trainer = trainers.WordPieceTrainer(vocab_size=200, special_tokens=SPECIAL, show_progress=False)
    tokenizer.train_from_iterator(CORPUS, trainer)
    return tokenizer


KINDS: dict[str, Callable[[], FastTokenizer]] = {
    make.__name__: make for make in (byte_level, byte_fallback, unigram, word_piece)
}
LOSSLESS = ("byte_level", "byte_fallback")


@pytest.fixture(scope="module")
def tokenizers(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Tokenizer]:
    directory = tmp_path_factory.mktemp("tokenizers")
    loaded = {}
    for kind, make in KINDS.items():
        make().save(str(directory / f"{kind}.json"))
        loaded[kind] = Tokenizer(directory / f"{kind}.json")
    return loaded


def streamed(tokenizer: Tokenizer, token_ids: list[int]) -> list[str]:
    decoder = tokenizer.incremental()
    return [*(decoder.add(token) for token in token_ids), decoder.flush()]


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
@settings(max_examples=150, deadline=None, derandomize=True)
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


@settings(max_examples=200, deadline=None, derandomize=True)
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
    """Nothing is held back without need, and a long stream decodes only a short window at each token."""
    tokenizer = tokenizers[kind]
    token_ids = tokenizer.encode("the quick brown fox jumps over the lazy dog " * 20)
    decoder = tokenizer.incremental()
    decoded: list[int] = []
    decode = tokenizer.decode
    tokenizer.decode = lambda ids: decoded.append(len(ids)) or decode(ids)
    try:
        pieces = [decoder.add(token) for token in token_ids]
    finally:
        del tokenizer.decode
    assert sum(not piece for piece in pieces) <= len(pieces) * (0.4 if kind == "unigram" else 0.01) + 1
    assert max(decoded) <= 12


def test_special_tokens_are_added_on_encoding_and_left_out_on_decoding(tmp_path: Path) -> None:
    fast = byte_level()
    fast.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    fast.save(str(tmp_path / "tokenizer.json"))
    tokenizer = Tokenizer(tmp_path / "tokenizer.json")
    token_ids = tokenizer.encode("the dog")
    assert token_ids[0] == 1
    assert tokenizer.encode("the dog</s>") == [*token_ids, 2]
    assert tokenizer.decode([*token_ids, 2, 10_000]) == "the dog"
    assert "".join(streamed(tokenizer, [*token_ids, 2])) == "the dog"
    assert tokenizer.encode("") == [1]


def test_saved_truncation_and_padding_are_ignored(tmp_path: Path) -> None:
    fast = byte_level()
    expected = fast.encode("the quick brown fox").ids
    fast.enable_truncation(3)
    fast.enable_padding(length=64)
    fast.save(str(tmp_path / "tokenizer.json"))
    assert Tokenizer(tmp_path / "tokenizer.json").encode("the quick brown fox") == expected


def test_text_that_is_not_unicode_or_has_no_tokens(tokenizers: dict[str, Tokenizer], tmp_path: Path) -> None:
    for tokenizer in tokenizers.values():
        with pytest.raises(
            RequestError, match=r"not Unicode text: character 6 is half of a surrogate pair; remove it"
        ) as caught:
            tokenizer.encode("half \ud83d")
        assert "\n" not in str(caught.value)
    words = FastTokenizer(models.WordLevel({"one": 0, "two": 1}, unk_token="<unk>"))
    words.save(str(tmp_path / "tokenizer.json"))
    with pytest.raises(RequestError, match="cannot be encoded"):
        Tokenizer(tmp_path / "tokenizer.json").encode("three")


@pytest.mark.parametrize(
    "content", [b"", b"{", b"[]", b"null", b"\xff\xfe", b'{"version": "1.0"}', b'{"model": {"type": "Magic"}}']
)
def test_a_file_that_is_no_tokenizer(content: bytes, tmp_path: Path) -> None:
    path = tmp_path / "tokenizer.json"
    path.write_bytes(content)
    with pytest.raises(CheckpointError) as caught:
        Tokenizer(path)
    message = str(caught.value)
    assert message.startswith(f"{path}: not a tokenizer.json that can be read")
    assert message.endswith("; export it again")
    assert "\n" not in message


@pytest.mark.parametrize("damage", [0.1, 0.5, 0.99])
def test_a_truncated_file(damage: float, tmp_path: Path) -> None:
    text = byte_level().to_str()
    (tmp_path / "tokenizer.json").write_text(text[: int(len(text) * damage)])
    with pytest.raises(CheckpointError, match="not a tokenizer"):
        Tokenizer(tmp_path / "tokenizer.json")


# In the engine


def test_the_engine_reads_text_with_the_checkpoints_tokenizer(tmp_path: Path) -> None:
    make_checkpoint(tmp_path, vocab_size=400)
    byte_level().save(str(tmp_path / "tokenizer.json"))
    engine = Engine(tmp_path, EngineConfig(precision="fp32"))
    token_ids = engine.encode("the quick brown fox")
    as_text, as_ids = engine.generate(
        [Request("the quick brown fox", 9, ignore_end_token=True), Request(token_ids, 9, ignore_end_token=True)]
    )
    assert as_text == as_ids
    assert as_text.prompt_tokens == len(token_ids)
    with pytest.raises(RequestError, match="half of a surrogate pair"):
        engine.submit(Request("\ud800"))
    with pytest.raises(RequestError, match="the prompt is empty"):
        engine.submit(Request(""))


def test_a_tokenizer_with_more_tokens_than_the_model(tmp_path: Path) -> None:
    make_checkpoint(tmp_path, vocab_size=150)
    byte_level().save(str(tmp_path / "tokenizer.json"))
    engine = Engine(tmp_path, EngineConfig(precision="fp32"))
    with pytest.raises(RequestError, match="outside the vocabulary of 150"):
        engine.submit(Request("😀" * 5))
    assert not engine.busy


def test_a_damaged_tokenizer_stops_the_engine_from_opening(tmp_path: Path) -> None:
    make_checkpoint(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(CheckpointError, match=r"tokenizer\.json"):
        Engine(tmp_path)
