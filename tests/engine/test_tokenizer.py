"""Real tokenizers of the kinds that checkpoints bring: whole texts, and files that cannot be used."""

from __future__ import annotations

import base64
import json
import os
import threading
import time
from pathlib import Path

import pytest
from checkpoints import make_checkpoint
from tokenizer_kinds import byte_fallback, byte_level
from tokenizers import Tokenizer as FastTokenizer
from tokenizers import models, processors

from megatoken.engine import Engine, EngineConfig, Request
from megatoken.engine.tokenizer import LONG_TEXT, Tokenizer, growth
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


def saved_with(folder: Path, **parts: object) -> Path:
    """A byte-level tokenizer with other parts."""
    path = folder / "tokenizer.json"
    path.write_text(json.dumps({**json.loads(byte_level().to_str()), **parts}))
    return path


def use(path: Path) -> None:
    tokenizer = Tokenizer(path)
    tokenizer.encode("the dog")
    tokenizer.decode(range(tokenizer.largest_id))


PREFIXED = {**json.loads(byte_level().to_str())["model"], "continuing_subword_prefix": "é"}
TEMPLATE = {"type": "TemplateProcessing", "pair": [], "special_tokens": {}}
UNKNOWN_PART = {"SpecialToken": {"id": "X", "type_id": 0}}


@pytest.mark.parametrize(
    ("parts", "failing"),
    [
        ({"normalizer": {"type": "Precompiled", "precompiled_charsmap": "////f2FiYw=="}}, "not a tokenizer.json"),
        ({"model": PREFIXED}, "not a tokenizer.json"),
        ({"pre_tokenizer": {"type": "FixedLength", "length": 0}}, "cannot be encoded"),
        ({"normalizer": {"type": "Prepend", "prepend": ""}}, "cannot be encoded"),
        ({"post_processor": {**TEMPLATE, "single": [UNKNOWN_PART]}}, "cannot be encoded"),
        ({"decoder": {"type": "Strip", "content": "t", "start": 1, "stop": 1}}, "the decoder fails"),
    ],
)
def test_a_panic_of_the_library_is_one_line(parts: dict[str, object], failing: str, tmp_path: Path) -> None:
    """A panic is a BaseException, which only a traceback would show."""
    path = saved_with(tmp_path, **parts)
    with pytest.raises((CheckpointError, RequestError), match=failing) as caught:
        use(path)
    assert "\n" not in str(caught.value)


DOUBLE = {"type": "Replace", "pattern": {"String": "a"}, "content": "aa"}
BYTES = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}


@pytest.mark.parametrize(
    "parts",
    [
        {"normalizer": {"type": "Sequence", "normalizers": [DOUBLE] * 40}},
        {"normalizer": {"type": "Sequence", "normalizers": [{**DOUBLE, "pattern": {"Regex": ""}}] * 40}},
        {"normalizer": {"type": "Sequence", "normalizers": [{"type": "ByteLevel"}] * 40}},
        {"normalizer": {"type": "Sequence", "normalizers": [{"type": "Prepend", "prepend": "a" * 5000}, DOUBLE]}},
        {"pre_tokenizer": {"type": "Sequence", "pretokenizers": [BYTES] * 40}},
        {"decoder": {"type": "Sequence", "decoders": [DOUBLE] * 40}},
    ],
)
def test_a_tokenizer_that_makes_texts_longer_without_bound(parts: dict[str, object], tmp_path: Path) -> None:
    """Added tokens are normalized while the file is loaded, so that 40 doublings would end the process."""
    with pytest.raises(CheckpointError, match=r"can make a text more than 1,000 times as long\); export it again$"):
        Tokenizer(saved_with(tmp_path, **parts))


def test_how_much_longer_a_text_becomes() -> None:
    """Llama 2's: a mark of three bytes before the text, and one for each space."""
    llama2 = json.loads(byte_fallback().to_str())
    assert growth(llama2["normalizer"]) == 12
    assert growth(llama2["decoder"]) == growth(None) == 1
    table = base64.b64encode((4).to_bytes(4, "little") + b"trie" + b"ab\0abcdefg\0").decode()
    assert growth({"type": "Precompiled", "precompiled_charsmap": table}) == 7


def test_a_tokenizer_too_large_to_be_one(tmp_path: Path) -> None:
    path = saved_with(tmp_path)
    os.truncate(path, 20 * 10**9)
    with pytest.raises(CheckpointError, match=r"larger than 64 MiB, which no such file is"):
        Tokenizer(path)


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
