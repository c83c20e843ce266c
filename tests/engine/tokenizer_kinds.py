"""Real tokenizers of the kinds that checkpoints bring, small ones."""

from __future__ import annotations

import json
from collections.abc import Callable

from tokenizers import Tokenizer as FastTokenizer
from tokenizers import decoders, models, normalizers, pre_tokenizers, trainers

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
