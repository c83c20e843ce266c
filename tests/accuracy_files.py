"""Accuracy logs in LoadGen's own spelling, a tokenizer of bytes, and data sets with answers expected."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

END = 256  # the id of the tokenizer's end token


def make_tokenizer(folder: Path, clean_up: bool = False) -> Tokenizer:
    """Every byte is a token; 256 is an end token, left out on decoding."""
    folder.mkdir(parents=True, exist_ok=True)
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({letter: index for index, letter in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken("<end>", special=True)])
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"clean_up_tokenization_spaces": clean_up}))
    return tokenizer


def write_log(
    path: Path,
    answers: Sequence[Sequence[int]],
    rows: Sequence[int] | None = None,
    counts: Sequence[int | None] | None = None,
    first_tokens: Sequence[Sequence[int]] | None = None,
    dtype: str = "<i4",
) -> Path:
    """One record a line, as LoadGen writes it; test_real_run.py reads what LoadGen itself wrote."""
    lines = []
    for sequence, answer in enumerate(answers):
        parts = [
            f'"seq_id" : {sequence}',
            f'"qsl_idx" : {sequence if rows is None else rows[sequence]}',
            f'"data" : "{_hexadecimal(answer, dtype)}"',
        ]
        if first_tokens is not None:
            parts.append(f'"token_data" : "{_hexadecimal(first_tokens[sequence], dtype)}"')
        count = len(answer) if counts is None else counts[sequence]
        if count is not None:
            parts.append(f'"token_count" : {count}')
        lines.append(f"{{ {', '.join(parts)} }}")
    path.write_text("[\n" + ",\n".join(lines) + "\n]\n")
    return path


def _hexadecimal(ids: Sequence[int], dtype: str) -> str:
    return np.array(ids, dtype).tobytes().hex().upper()


def write_lines(path: Path, rows: Sequence[Mapping[str, Any]]) -> Path:
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    return path


def write_openorca(path: Path, references: Sequence[str]) -> Path:
    pd.DataFrame({"tok_input": [[1, 2]] * len(references), "output": list(references)}).to_pickle(path)
    return path


def write_405b(path: Path, references: Sequence[str], metrics: Sequence[str]) -> Path:
    columns = {"tok_input": [[1, 2]] * len(references), "tok_input_len": [2] * len(references)}
    pd.DataFrame({**columns, "gt_output": list(references), "metric": list(metrics)}).to_pickle(path)
    return path
