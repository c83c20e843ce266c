"""A workspace: the other commands accept every file of it, and no file of the user is replaced."""

import json
import re
from pathlib import Path

import pytest

from cli_support import call_here
from megatoken.config import RunConfig, load_run_config
from megatoken.runs.run import read_run


def test_from_an_empty_folder_to_a_dossier(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    code, out, _ = call_here("init", "work")
    assert code == 0 and out.count("made  work/") == 5
    monkeypatch.chdir(tmp_path / "work")
    fast = ("--samples", 24, "--warm-up", 0.1, "--engine.threads", 1)
    code, out, err = call_here("run", "run.yaml", "--slo", "limits.yaml", *fast)
    assert code in (0, 3), err
    (run,) = Path("runs").iterdir()
    changed = {one["setting"]: one["value"] for one in read_run(run).result["changed_settings"]}
    assert changed.items() >= {"prompts": "prompts.jsonl", "samples": 24, "engine.threads": 1}.items()
    assert {key for key in changed if not key.startswith("limits.")} == {
        *("prompts", "samples", "warm_up_seconds", "engine.threads"),
    }
    assert "Settings that differ from the defaults" in (run / "report.html").read_text()
    assert call_here("check", run, "--slo", "limits.yaml")[0] in (0, 3, 4)
    assert call_here("audit", run, "--claims", "claims.yaml", "--out", "audit")[0] in (0, 3)
    files = ("--audit", "audit", "--run", run, "--slo", "limits.yaml", "--form", "form.yaml")
    code, out, err = call_here("dossier", *files, "--json")
    assert (code, err) == (0, "")
    document = json.loads(out)
    assert [claim["answer"] for claim in document["claims"]] == ["holds", "cannot be determined"]
    assert len(document["limits"][0]["limits"]) == 3
    assert len(document["measured"]) == len(document["replays"]) == 1  # the audit is of the same run
    (identity,) = document["identities"]
    assert re.fullmatch("[0-9a-f]{64}", identity["weights_sha256"])


def test_every_commented_setting_is_its_default(tmp_path: Path) -> None:
    assert call_here("init", tmp_path)[0] == 0
    config = tmp_path / "run.yaml"
    assert load_run_config(config, {}) == RunConfig(prompts="prompts.jsonl")
    lines = config.read_text().splitlines()[2:]
    config.write_text("\n".join(line.removeprefix("# ") for line in lines) + "\n")
    assert load_run_config(config, {}) == RunConfig(prompts="prompts.jsonl")


def test_files_that_are_there_stay_and_missing_ones_come_back(tmp_path: Path) -> None:
    assert call_here("init", tmp_path)[0] == 0
    (tmp_path / "limits.yaml").write_text("samples_per_second: 3\n")
    (tmp_path / "form.yaml").unlink()
    code, out, _ = call_here("init", tmp_path)
    assert code == 0 and re.findall("made  .*/(.*)", out) == ["form.yaml"]
    assert (tmp_path / "limits.yaml").read_text() == "samples_per_second: 3\n"
    code, _, err = call_here("init", tmp_path / "run.yaml")
    assert (code, err.count("\n")) == (2, 1)


def test_an_empty_name_is_not_the_working_directory(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    code, _, err = call_here("init", "")
    assert code == 2 and "the name of the folder is empty" in err and not list(tmp_path.iterdir())
