"""Ways to call the command, and a checkpoint for it, shared by the tests of the command line."""

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, redirect_stderr, redirect_stdout
from functools import partial
from io import StringIO
from pathlib import Path

import psutil
import pytest

from forks import Process, forked
from megatoken import cli

ENVIRONMENT = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "OMP_NUM_THREADS": "1"}
TIMEOUT_SECONDS = 200  # only a hang takes this long, however busy the machine
BUSY_SECONDS = 1.5  # of a processor: imports are done, and the start takes less
COMMAND = [sys.executable, "-m", "megatoken"]


def started(*arguments: object, before: Callable[[], object] | None = None) -> AbstractContextManager[Process]:
    """The command in a process of its own, which does not outlive the block; see ``forks.forked``."""
    return forked("-m", "megatoken", *arguments, environment=ENVIRONMENT, before=before)


def wait_until_busy(process: Process) -> None:
    """From then on the command is past its own start and busy with the model."""
    while sum(psutil.Process(process.pid).cpu_times()[:2]) < BUSY_SECONDS:
        assert process.poll() is None, process.communicate()
        time.sleep(0.05)


def call(*arguments: object, before: Callable[[], object] | None = None) -> tuple[int, str, str]:
    """Runs the command in a process of its own: exit code, standard output, standard error."""
    with started(*arguments, before=before) as process:
        out, err = process.communicate(timeout=TIMEOUT_SECONDS)
        return process.returncode, out, err


def redirected(redirection: str, *arguments: object) -> tuple[int, str, str]:
    """The same with a redirection of the shell, such as ``>&-``."""
    if redirection.endswith("/dev/full"):  # closed streams are another matter: Python sees them when it starts
        return call(*arguments, before=partial(_fill, 2 if redirection.startswith("2") else 1))
    shell = ["sh", "-c", f'exec "$@" {redirection}', "sh", *COMMAND, *map(str, arguments)]
    done = subprocess.run(shell, capture_output=True, text=True, env=ENVIRONMENT, timeout=TIMEOUT_SECONDS, check=False)
    return done.returncode, done.stdout, done.stderr


def _fill(descriptor: int) -> None:
    full = os.open("/dev/full", os.O_WRONLY)
    os.dup2(full, descriptor)
    os.close(full)


def call_here(*arguments: object) -> tuple[int, str, str]:
    """Runs the command in this process, which has imported already what a process of its own takes seconds for.

    Not for signals, closed streams and full disks, which the process would meet with the tests in it.
    """
    with pytest.MonkeyPatch.context() as patch, redirect_stdout(StringIO()) as out, redirect_stderr(StringIO()) as err:
        patch.setattr(sys, "argv", ["megatoken", *map(str, arguments)])
        patch.setattr("signal.signal", lambda number, handler: None)
        with pytest.raises(SystemExit) as caught:
            cli.main()
    return int(caught.value.code or 0), out.getvalue(), err.getvalue()


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


def make_overflowing_checkpoint(folder: Path, letter: str) -> Path:
    """One of ``make_checkpoint`` that computes no numbers after ``letter``, and numbers after every other."""
    import torch
    from safetensors.torch import load_file, save_file
    from tokenizers import Tokenizer

    file = make_checkpoint(folder) / "model.safetensors"
    (token,) = Tokenizer.from_file(str(folder / "tokenizer.json")).encode(letter).ids
    tensors = load_file(file)
    embedding = tensors["model.embed_tokens.weight"]
    embedding[:, 0] = 0  # the one feature that the feed-forward makes too much of
    embedding[token] = torch.eye(len(embedding[0]))[0]
    for name in ("gate_proj", "up_proj"):
        tensors[f"model.layers.0.mlp.{name}.weight"][0, 0] = 1e19
    save_file(tensors, file, {"format": "pt"})
    return folder


def write_lines(path: Path, *lines: object) -> Path:
    path.write_text("".join(f"{line if isinstance(line, str) else json.dumps(line)}\n" for line in lines))
    return path
