"""Ways to call the command, and a checkpoint for it, shared by the tests of the command line."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from megatoken import cli

ENVIRONMENT = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "OMP_NUM_THREADS": "1"}
COMMAND = [sys.executable, "-m", "megatoken"]


def start(
    *arguments: object, before: Callable[[], None] | None = None, folder: Path | None = None
) -> "subprocess.Popen[str]":
    return subprocess.Popen(
        [*COMMAND, *map(str, arguments)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=ENVIRONMENT,
        preexec_fn=before,
        cwd=folder,
    )


def call(*arguments: object, **options: Any) -> tuple[int, str, str]:
    """Runs the command in a process of its own: exit code, standard output, standard error."""
    process = start(*arguments, **options)
    out, err = process.communicate(timeout=120)
    return process.returncode, out, err


def call_here(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *arguments: object
) -> tuple[int, str, str]:
    """Runs the command in this process; not for anything that starts LoadGen."""
    monkeypatch.setattr(sys, "argv", ["megatoken", *map(str, arguments)])
    monkeypatch.setattr(cli.signal, "signal", lambda number, handler: None)
    with pytest.raises(SystemExit) as caught:
        cli.main()
    out, err = capsys.readouterr()
    return int(caught.value.code or 0), out, err


def make_checkpoint(folder: Path, tokenizer: bool = True) -> Path:
    """A Llama of a few thousand weights whose tokenizer knows every byte."""
    import torch
    import transformers
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    config = transformers.LlamaConfig(
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=len(alphabet),
        max_position_embeddings=64,
        bos_token_id=None,
        eos_token_id=None,
    )
    torch.manual_seed(0)
    transformers.LlamaForCausalLM(config).save_pretrained(folder)
    if tokenizer:
        bytes_only = Tokenizer(models.BPE({letter: index for index, letter in enumerate(alphabet)}, []))
        bytes_only.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        bytes_only.decoder = decoders.ByteLevel()
        bytes_only.save(str(folder / "tokenizer.json"))
    return folder


def write_lines(path: Path, *lines: object) -> Path:
    path.write_text("".join(f"{line if isinstance(line, str) else json.dumps(line)}\n" for line in lines))
    return path
