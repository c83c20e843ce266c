"""What may be given where a file is asked for, and what is refused instead of waited for."""

import os
import pty
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from cli_support import ENVIRONMENT, TIMEOUT_SECONDS
from megatoken.config import load_run_config
from megatoken.datasets.lengths import load_lengths
from megatoken.datasets.prompts import load_prompts
from megatoken.datasets.requests import Dataset
from megatoken.datasets.tables import read_table
from megatoken.errors import ConfigError, DatasetError
from megatoken.files import open_input

LINES = b'{"prompt_token_ids": [1, 2]}\n{"prompt_token_ids": [3]}\n'


def load(path: Path) -> Dataset:
    return load_prompts(path, encode=None, vocabulary_size=10, max_length=20)


@pytest.fixture
def pipe(tmp_path: Path) -> Path:
    path = tmp_path / "pipe"
    os.mkfifo(path)
    return path


def test_a_pipe_without_a_writer_is_refused_not_waited_for(pipe: Path) -> None:
    for read in (load, lambda path: load_lengths(path, vocabulary_size=10, max_length=20)):
        with pytest.raises(DatasetError, match="pipe: cannot be read: no process writes into this pipe; give the path"):
            read(pipe)
    for suffix, words in (
        (".pkl", "no process writes"),
        (".json", "no process writes"),
        (".parquet", "cannot be read as parquet"),
    ):
        with pytest.raises(DatasetError, match=words):
            read_table(pipe.rename(pipe.with_suffix(suffix)), ["tokens"])
        pipe.with_suffix(suffix).rename(pipe)
    with pytest.raises(ConfigError, match="pipe: cannot be read: no process writes into this pipe; give a"):
        load_run_config(pipe, {})


def test_a_pipe_whose_writer_waits_is_read_to_its_end(tmp_path: Path, pipe: Path) -> None:
    source = tmp_path / "in.jsonl"
    source.write_bytes(LINES * 10_000)  # more than a pipe holds
    with subprocess.Popen(["cp", source, pipe]) as writer:
        while Path(f"/proc/{writer.pid}/stat").read_text().rpartition(")")[2].split()[0] != "S":  # in open(2)
            time.sleep(0.05)
        assert len(load(pipe).requests) == 20_000
        assert writer.wait() == 0


def test_the_pipes_of_a_shell(tmp_path: Path) -> None:
    """Process substitution and standard input, read after their writer has left, and a slow one."""
    program = (
        "import sys; from pathlib import Path; from megatoken.datasets.prompts import load_prompts; "
        "print(len(load_prompts(Path(sys.argv[1]), encode=None, vocabulary_size=10, max_length=20).requests))"
    )
    source = tmp_path / "in.jsonl"
    source.write_bytes(LINES)
    for words in (
        '"$@" <(cat "$0")',
        'cat "$0" | "$@" /dev/stdin',
        '"$@" /dev/stdin <"$0"',
        '"$@" <(sleep 1; cat "$0")',
    ):
        done = subprocess.run(
            ["bash", "-c", words, str(source), sys.executable, "-c", program],
            capture_output=True,
            text=True,
            env=ENVIRONMENT,
            timeout=TIMEOUT_SECONDS,
            check=False,
        )
        assert (done.stdout, done.stderr) == ("2\n", ""), words


def test_what_is_no_file_is_called_by_its_name(tmp_path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(tmp_path / "socket"))
        for path, kind in (
            (tmp_path, "a directory"),
            (tmp_path / "socket", "a socket"),
            (Path("/dev/zero"), "a device"),
        ):
            with pytest.raises(DatasetError, match=f"{path}: cannot be read: it is {kind}, not a file; give the path"):
                load(path)
            with pytest.raises(ConfigError, match=f"{path}: cannot be read: it is {kind}, not a file"):
                load_run_config(path, {})


def test_a_terminal_is_read_only_as_standard_input() -> None:
    controller, terminal = pty.openpty()
    name = Path(os.ttyname(terminal))
    with pytest.raises(OSError, match="it is a device, not a file"):
        open_input(name)
    kept = os.dup(0)
    try:
        os.dup2(terminal, 0)
        os.write(controller, LINES + b"\x04")  # end of file, as typed
        assert len(load(Path("/dev/stdin")).requests) == 2
    finally:
        os.dup2(kept, 0)
        for descriptor in (kept, controller, terminal):
            os.close(descriptor)
