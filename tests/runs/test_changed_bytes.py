"""One changed bit of a weight, tokenizer, chat template or prompt is noticed by all that compare runs."""

import os
import random
import time
from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest

from cli_support import call_here, make_checkpoint
from megatoken.analysis.comparison import compare
from megatoken.analysis.entries import run_entry
from megatoken.audit.evidence import Role
from megatoken.engine.tensor_files import weight_files
from megatoken.errors import UsageError
from megatoken.harness import rerun
from megatoken.harness.progress import Progress
from megatoken.mlperf.detail_log import DETAIL_LOG, read_detail_log
from megatoken.runs import identity
from megatoken.runs.identity import ModelFiles
from megatoken.runs.plan_hash import IDENTITY
from megatoken.runs.run import MLPERF, Run, read_run
from megatoken.submission.runs import SubmittedRun, _unlike

CHANGES = 50
KINDS = {  # file of a changed bit -> the hash that must change
    "model/model.safetensors": "weights_sha256",
    "model/tokenizer.json": "tokenizer_sha256",
    "model/chat_template.jinja": "chat_template_sha256",
    "prompts.jsonl": "data_set_sha256",
}


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    """A run of a model whose files are old, every hash of which is kept: the worst case."""
    monkeypatch.setattr(identity, "SETTLED_SECONDS", 0.0)
    monkeypatch.setattr(rerun, "take_inventory", cache(rerun.take_inventory))  # the machine stays the same
    model, prompts = make_checkpoint(tmp_path / "model"), tmp_path / "prompts.jsonl"
    (model / "chat_template.jinja").write_text("{% for message in messages %}{{ message.content }}{% endfor %}")
    prompts.write_text("".join(f'{{"prompt": "{"abc" * (9 + i)}", "max_tokens": 4}}\n' for i in range(4)))
    for path in (prompts, *model.iterdir()):
        os.utime(path, (1e9, 1e9))
    flags = ("--samples", 4, "--warm-up", 0.1, "--engine.threads", 1, "--precision", "fp32")
    assert call_here("run", "--model", model, "--prompts", prompts, *flags, "--out", tmp_path / "runs")[0] == 0
    monkeypatch.setenv(
        "XDG_CACHE_HOME", str(tmp_path / "cache")
    )  # after the run, whose compiled kernels are in the other
    return read_run(next((tmp_path / "runs").iterdir()))


def write_in_place(path: Path, content: bytes) -> None:
    """The same inode and size, and the older time set back."""
    status = path.stat()
    time.sleep(0.005)  # a tick of the clock that stamps files
    with path.open("r+b") as file:
        file.write(content)
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))


def of_changed_files(run: Run, differences: Mapping[str, str]) -> Run:
    """The run as it is recorded with these hashes."""
    changed = {key.removeprefix("identity."): value for key, value in differences.items()}
    hashes = {**run.result["identity"], **{name: changed[name] for name in IDENTITY if name in changed}}
    others = {name: value for name, value in changed.items() if name not in IDENTITY}
    return replace(run, result={**run.result, **others, "identity": hashes})


def compared(run: Run, other: Run) -> set[str]:
    """Why two runs are not like for like."""
    document = compare([run_entry([run], "one"), run_entry([other], "other")]).to_document()
    (total,) = [ratio for ratio in document["ratios"] if ratio["basis"] == "total"]
    assert total["like_for_like"] is (not total["differences"])
    return {difference["field"] for difference in total["differences"]}


def submitted(run: Run) -> SubmittedRun:
    return SubmittedRun(run, Role.PERFORMANCE, "Offline", read_detail_log(run.path / MLPERF / DETAIL_LOG))


def test_hash_comparison_submission_and_rerun_notice_50_of_50_changed_bits(run: Run, tmp_path: Path) -> None:
    assert run.result["target"]["formats"] == {"weights": "fp32", "activations": "fp32", "kv_cache": "fp32"}
    assert run.result["weights"] == run.result["identity"]["weights_sha256"]
    assert rerun.check_plan(run.path, Progress(quiet=True))["equal"]
    unchanged = compared(run, run)
    assert list(_unlike(submitted(run), submitted(run), "open")) == []
    model, draw = tmp_path / "model", random.Random(23)
    before = ModelFiles(model, weight_files(model)).identity()
    noticed = refused = 0
    for number in range(CHANGES):
        name, key = list(KINDS.items())[number % len(KINDS)]
        content = (tmp_path / name).read_bytes()
        place = draw.randrange(len(content))
        flipped = bytes([content[place] ^ 1 << draw.randrange(8)])
        write_in_place(tmp_path / name, content[:place] + flipped + content[place + 1 :])
        try:
            document = rerun.check_plan(run.path, Progress(quiet=True))
        except UsageError:  # the file cannot be read any more, so there is no such run
            refused += 1
            found = ModelFiles(model, weight_files(model)).identity() if name.startswith("model/") else {}
            noticed += key not in before or found[key] != before[key]
        else:
            differences = {one["key"]: one["now"] for one in document["differences"]}
            other = of_changed_files(run, differences)
            noticed += (
                f"identity.{key}" in differences
                and not document["equal"]
                and bool(compared(run, other) - unchanged)
                and bool(list(_unlike(submitted(other), submitted(run), "open")))
            )
        write_in_place(tmp_path / name, content)
    assert (noticed, refused < CHANGES / 2) == (CHANGES, True)
    assert rerun.check_plan(run.path, Progress(quiet=True))["equal"]
