"""Real tokenizers of the kinds that checkpoints bring: whole texts, and files that cannot be used."""

from __future__ import annotations

import threading
import time
from pathlib import Path

import pytest
from checkpoints import make_checkpoint
from tokenizer_kinds import byte_level
from tokenizers import Tokenizer as FastTokenizer
from tokenizers import models, processors

from megatoken.engine import Engine, EngineConfig, Request
from megatoken.engine.tokenizer import LONG_TEXT, Tokenizer
from megatoken.errors import CheckpointError, RequestError


def test_special_tokens_are_added_on_encoding_and_left_out_on_decoding(tmp_path: Path) -> None:
    fast = byte_level()
    fast.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    fast.save(str(tmp_path / "tokenizer.json"))
    tokenizer = Tokenizer(tmp_path / "tokenizer.json")
    token_ids = tokenizer.encode("the dog")
    assert token_ids[0] == 1
    assert tokenizer.encode("the dog</s>") == [*token_ids, 2]
    assert tokenizer.decode([*token_ids, 2, 10_000]) == "the dog"
    assert tokenizer.encode("the dog", add_special=False) == token_ids[1:]
    assert tokenizer.decode([*token_ids, 2], keep_special=True) == "<s>the dog</s>"
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
    with pytest.raises(RequestError, match="cannot be encoded"):
        Tokenizer(tmp_path / "tokenizer.json").encode("three" * LONG_TEXT)


def test_other_threads_run_while_a_long_text_is_encoded() -> None:
    tokenizer = Tokenizer(Path(__file__).parents[2] / "src/megatoken/data/reference_model/tokenizer.json")
    encoding = threading.Thread(target=tokenizer.encode, args=("a word, and 123 more\n" * 20_000,))
    turns = 0
    encoding.start()
    while encoding.is_alive():
        time.sleep(0.001)
        turns += 1
    assert turns > 20  # with the interpreter's lock held it is one or two


def test_long_texts_have_the_same_ids(tokenizers: dict[str, Tokenizer]) -> None:
    text = "the dog é 12\n" * (LONG_TEXT // 8)
    for tokenizer in tokenizers.values():
        expected = FastTokenizer.from_file(str(tokenizer.file)).encode(text).ids
        assert tokenizer.encode(text) == expected


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
