"""What ran, by the hashes of its files and rows; tests of changed bytes are in test_changed_bytes.py."""

import hashlib
import json
import os
import time
from pathlib import Path

import pytest

from cli_support import make_checkpoint
from megatoken.datasets.prompts import load_prompts
from megatoken.datasets.requests import rows_sha256
from megatoken.engine.tensor_files import weight_files
from megatoken.runs import identity
from megatoken.runs.identity import ModelFiles, file_hashes


@pytest.fixture
def model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    folder = make_checkpoint(tmp_path / "model")
    (folder / "chat_template.jinja").write_text("{% for message in messages %}{{ message.content }}{% endfor %}")
    settle(folder)
    return folder


def settle(folder: Path) -> None:
    """Make the files as old as those of a model that was fetched before."""
    for path in folder.iterdir():
        os.utime(path, (1e9, 1e9))
    time.sleep(0.01)


def identity_of(folder: Path) -> dict:
    return ModelFiles(folder, weight_files(folder)).identity()


def test_hashes_are_those_of_sha256sum_and_unchanged_files_are_read_once(model, monkeypatch):
    found = {one["name"]: one["sha256"] for one in identity_of(model)["files"]}
    assert found == {
        path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in model.iterdir() if path.name in found
    }
    assert {"config.json", "model.safetensors", "tokenizer.json", "chat_template.jinja"} <= found.keys()
    monkeypatch.setattr(identity, "SETTLED_SECONDS", 0.0)
    paths = weight_files(model)
    first = file_hashes(paths)
    monkeypatch.setattr(identity, "_hash", lambda *_: pytest.fail("read again"))
    assert file_hashes(paths) == first


def test_a_file_that_changed_a_moment_ago_is_read_again(model):
    (model / "config.json").touch()
    file_hashes([model / "config.json"])
    assert not (model.parent / "cache/megatoken" / identity.CACHE).exists()


def test_rows_differ_by_any_setting_of_an_answer_or_token_of_a_prompt(tmp_path):
    def rows(*lines: dict) -> str:
        file = tmp_path / "rows.jsonl"
        file.write_text("".join(json.dumps(line) + "\n" for line in lines))
        sizes = {"vocabulary_size": 100, "max_length": 64, "default_max_tokens": 8}
        return rows_sha256(load_prompts(file, encode=None, **sizes))

    one = {"prompt_token_ids": [1, 2, 3]}
    changes = (
        {"max_tokens": 9},
        {"temperature": 0.5},
        {"seed": 1},
        {"stop_token_ids": [4]},
        {"ignore_end_token": True},
    )
    hashes = [rows(one), rows({"prompt_token_ids": [1, 2, 4]}), rows(one, one), *(rows(one | more) for more in changes)]
    assert len(set(hashes)) == len(hashes)
    assert rows(one) == rows(one | {"max_tokens": 8})  # the default


def test_what_was_stopped_is_read_again_when_it_is_asked_for(model, monkeypatch):
    expected = identity_of(model)
    monkeypatch.setattr(identity, "BLOCK_BYTES", 1)  # so that the first reading does not end before it is stopped
    monkeypatch.setattr(identity, "CACHE", "none.json")
    files = ModelFiles(model, weight_files(model))
    files.start()
    files.stop()
    monkeypatch.setattr(identity, "BLOCK_BYTES", 1 << 22)
    assert files.identity() == expected
