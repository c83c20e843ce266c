"""Files in the layouts of MLPerf's data sets, with invented content."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pandas as pd
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

INSTRUCTION = "In very brief sentences, summarize the following news article. Article: {} Summary: "
TEXTS = [
    "The blue cup stands on the shelf beside the old clock.",
    "Nobody knew why the river had turned green that summer, not even the miller.",
    "Two plus two is four, and four plus four is eight, said the teacher twice.",
]
OUTPUTS = ["On the shelf.", "Nobody knew.", "Sums."]


def make_tokenizer(folder: Path, shift: int = 0) -> Tokenizer:
    """Every byte is a token; ``shift`` gives each another id, as another model's tokenizer would."""
    folder.mkdir(parents=True, exist_ok=True)
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    ids = {letter: (index + shift) % len(alphabet) for index, letter in enumerate(alphabet)}
    tokenizer = Tokenizer(models.BPE(ids, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.save(str(folder / "tokenizer.json"))
    return tokenizer


def write_openorca(path: Path, tokenizer: Tokenizer, texts: Sequence[str] = TEXTS, **columns: Any) -> Path:
    """Every prompt has one token more than its text, as MLPerf's has."""
    tokens = [[*tokenizer.encode(text).ids, 7] for text in texts]
    frame = {
        "id": [f"cot.{row}" for row in range(len(texts))],
        "input": list(texts),
        "output": [OUTPUTS[row % len(OUTPUTS)] for row in range(len(texts))],
        "tok_input": tokens,
        "tok_input_length": [len(ids) for ids in tokens],
        **columns,
    }
    pd.DataFrame({name: cells for name, cells in frame.items() if cells is not None}).to_pickle(path)
    return path


def write_405b(path: Path, tokenizer: Tokenizer, texts: Sequence[str] = TEXTS, **columns: Any) -> Path:
    tokens = [tokenizer.encode(text).ids for text in texts]
    frame = {
        "input": list(texts),
        "tok_input": tokens,
        "tok_input_len": [len(ids) for ids in tokens],
        "gt_output": [OUTPUTS[row % len(OUTPUTS)] for row in range(len(texts))],
        "metric": [("rouge", "niah_em", "qa_em")[row % 3] for row in range(len(texts))],
        **columns,
    }
    pd.DataFrame(frame).to_pickle(path)
    return path


def write_cnn(path: Path, tokenizer: Tokenizer, texts: Sequence[str] = TEXTS) -> Path:
    """As download_cnndm.py of mlcommons/inference writes it: the instruction is in the ids and not in the text."""
    records = [
        {
            "instruction": {"llama": INSTRUCTION},
            "input": text,
            "tok_input": tokenizer.encode(INSTRUCTION.format(text)).ids,
            "output": OUTPUTS[row % len(OUTPUTS)],
        }
        for row, text in enumerate(texts)
    ]
    path.write_text(json.dumps(records, indent=4, ensure_ascii=False))
    return path
