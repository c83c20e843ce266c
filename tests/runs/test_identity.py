"""What ran: a changed byte of a model or a data set is another identity, however the file's times are set."""

import hashlib
import json
import os
import random
import shutil
import time
from pathlib import Path

import pytest

from cli_support import call_here, make_checkpoint
from megatoken.datasets.prompts import load_prompts
from megatoken.datasets.requests import rows_sha256
from megatoken.engine.tensor_files import weight_files
from megatoken.runs import identity
from megatoken.runs.identity import ModelFiles, file_hashes
from megatoken.runs.run import read_run

CHANGES = 50
KINDS = {  # file of a changed byte -> hashes that must change
    "model.safetensors": {"weights_sha256"},
    "tokenizer.json": {"tokenizer_sha256"},
    "chat_template.jinja": {"chat_template_sha256"},
}


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


def test_every_one_of_fifty_changed_bytes_is_noticed_with_the_times_set_back(model, monkeypatch):
    monkeypatch.setattr(identity, "SETTLED_SECONDS", 0.0)  # so that every hash is kept, the worst case
    draw = random.Random(23)
    before = identity_of(model)
    assert identity_of(model) == before
    noticed = 0
    for _ in range(CHANGES):
        name = draw.choice(list(KINDS))
        path, status = model / name, (model / name).stat()
        content = bytearray(path.read_bytes())
        place = draw.randrange(len(content))
        content[place] ^= 1 << draw.randrange(8)
        time.sleep(0.005)  # a tick of the clock that stamps files
        with path.open("r+b") as file:  # in place: the same inode and size
            file.seek(place)
            file.write(content[place : place + 1])
        os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))
        found = identity_of(model)
        changed = {key for key in before if key.endswith("sha256") and found[key] != before[key]}
        noticed += changed == KINDS[name]
        before = found
    assert noticed == CHANGES


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


def test_a_comparison_says_that_runs_of_changed_weights_are_not_like_for_like(model, tmp_path):
    def run(folder: Path) -> Path:
        out = folder.parent / "runs"
        flags = ("--model", folder, "--samples", 4, "--warm-up", 0.1, "--engine.threads", 1, "--precision", "fp32")
        assert call_here("run", *flags, "--prompts", prompts, "--out", out)[0] == 0
        return next(out.iterdir())

    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"prompt": "abc", "max_tokens": 4}\n' * 4)
    (tmp_path / "other").mkdir()
    other = shutil.copytree(model, tmp_path / "other" / "model")
    with (other / "model.safetensors").open("r+b") as file:
        file.seek(-1, os.SEEK_END)
        last = file.read(1)[0]
        file.seek(-1, os.SEEK_END)
        file.write(bytes([last ^ 1]))  # the lowest bit of one weight's exponent or sign would show in the answers
    one, changed = run(model), run(other)
    result = read_run(one).result
    assert result["target"]["formats"] == {"weights": "fp32", "activations": "fp32", "kv_cache": "fp32"}
    assert result["weights"] == result["identity"]["weights_sha256"] == identity_of(model)["weights_sha256"]
    code, out, _ = call_here("compare", one, changed, "--json")
    (total,) = [ratio for ratio in json.loads(out)["ratios"] if ratio["basis"] == "total"]
    assert code == 0 and not total["like_for_like"]
    assert "weights" in [difference["field"] for difference in total["differences"]]
