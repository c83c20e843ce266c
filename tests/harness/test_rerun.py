"""A re-run: equal on the same machine; another package, row, seed or byte is named."""

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from cli_support import call_here, make_checkpoint
from megatoken.audit import Severity, audit
from megatoken.config import RunConfig
from megatoken.harness.recording import record
from megatoken.harness.rerun import _rates
from megatoken.runs.plan_hash import changed_parts, plan_differences, plan_hash, plan_of_run
from megatoken.runs.reasons import reason
from megatoken.runs.run import read_run


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("rerun")
    model, prompts = make_checkpoint(folder / "model"), folder / "prompts.jsonl"
    prompts.write_text("".join(f'{{"prompt": "{"a" * (3 + i)}", "max_tokens": 20}}\n' for i in range(8)))
    flags = ("--model", model, "--prompts", prompts, "--samples", 40, "--warm-up", 0.1, "--engine.threads", 1)
    assert call_here("run", *flags, "--precision", "fp32", "--out", folder / "runs")[0] == 0
    return next((folder / "runs").iterdir())


def differences(*arguments: object) -> tuple[int, dict[str, tuple]]:
    code, out, _ = call_here("rerun", *arguments, "--json")
    document = json.loads(out)
    return code, {one["key"]: (one["then"], one["now"]) for one in document["differences"]}


def test_the_same_machine_would_run_the_same_and_does(original: Path, tmp_path: Path) -> None:
    assert differences(original, "--check") == (0, {})
    code, out, _ = call_here("rerun", original, "--out", tmp_path, "--json")
    document = json.loads(out)
    assert document["equal"] and document["plan_sha256"]["then"] == document["plan_sha256"]["now"]
    rates = document["rates"]
    assert code == (3 if rates["agree"] is False else 0)
    assert (rates["agree"] is None) is ("why_no_interval" in rates)
    (again,) = tmp_path.iterdir()
    assert plan_differences(plan_of_run(read_run(original)), plan_of_run(read_run(again))) == []


def test_a_run_that_is_too_short_for_an_interval_says_so(original: Path, tmp_path: Path) -> None:
    config = {**read_run(original).config, "samples": 1}
    (original.parent.parent / "short.yaml").write_text(json.dumps(config))
    short = tmp_path / "short"
    assert call_here("run", original.parent.parent / "short.yaml", "--out", short)[0] == 0
    _, out, _ = call_here("rerun", next(short.iterdir()), "--out", tmp_path / "again")
    assert "rates not judged" in out
    assert "too short: an interval needs 10 s, each with a row in its series.parquet, and its rate is over" in out
    assert "make the first run again with --min-duration 30" in out


def test_a_run_without_a_rate_is_not_called_too_short(original: Path) -> None:
    run = read_run(original)
    without = replace(run, result={**run.result, "rated_seconds": None})
    assert "too short" not in _rates(without, run)["why_no_interval"]
    silent = replace(run, result={**run.result, "rated_seconds": 1000.0})  # rows of its first seconds alone
    assert "in fewer than 2 of 10 equal spans" in _rates(silent, run)["why_no_interval"]


def test_prompts_by_a_relative_path_are_not_looked_for_elsewhere_in_silence(
    original: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    copy = shutil.copytree(original, tmp_path / "copy")
    prompts = str(read_run(original).config["prompts"])
    (copy / "config.yaml").write_text((copy / "config.yaml").read_text().replace(prompts, "prompts.jsonl"))
    monkeypatch.chdir(tmp_path)
    code, _, err = call_here("rerun", copy, "--check")
    said = (
        "there is no prompts.jsonl here, its prompts: the path is relative to where the run was started; re-run there"
    )
    assert code == 2 and err.endswith(f"{said}\n")


def test_hashes_of_another_version_accuse_no_run(original: Path) -> None:
    run = read_run(original)
    stored = run.result["plan_sha256"]
    assert stored["version"] == "1"

    def changed(**hashes: str) -> list:
        return [one["key"] for one in changed_parts(replace(run, result={**run.result, "plan_sha256": hashes}))]

    first = {key: value for key, value in stored.items() if key != "version"}
    assert changed(**first) == []  # the first hashes stated no version
    assert changed(**{**first, "config": "0"}) == ["config"]
    assert changed(**{**stored, "version": "2", "config": "0"}) == []


@pytest.mark.parametrize(
    ("hashes", "why"), [(None, "it has no hashes"), ({"version": "9", "config": "0"}, "have version 9, not 1")]
)
def test_a_run_without_hashes_is_not_called_as_it_was(
    original: Path, tmp_path: Path, hashes: dict[str, str] | None, why: str
) -> None:
    copy = shutil.copytree(original, tmp_path / "copy")
    result = json.loads((copy / "result.json").read_text())
    (copy / "result.json").write_text(json.dumps({**result, "plan_sha256": hashes}))
    code, out, _ = call_here("rerun", copy, "--check")
    assert code == 0 and "as it was" not in out
    assert "whether that was edited is unknown" in out.replace("\n", " ") and why in out.replace("\n", " ")
    assert "as it was" in call_here("rerun", original, "--check")[1]
    (found,) = [one for one in audit(copy).findings if one.id == "run_folder.plan"]
    assert found.severity is Severity.UNKNOWN and why in found.found


def test_another_package_seed_and_machine_are_named(original: Path, tmp_path: Path) -> None:
    copy = shutil.copytree(original, tmp_path / "copy")
    environment = json.loads((copy / "environment.json").read_text())
    assert len(environment["all_packages"]) > 20
    environment["all_packages"]["numpy"] = "0.9"
    environment["cpu"]["model"] = "another"
    (copy / "environment.json").write_text(json.dumps(environment))
    config = (copy / "config.yaml").read_text()
    (copy / "config.yaml").write_text(config.replace("\nseed: 0\n", "\nseed: 5\n"))
    then, now = plan_of_run(read_run(original)), plan_of_run(read_run(copy))
    assert plan_hash(then) != plan_hash(now)
    assert {one["key"] for one in plan_differences(then, now)} == {"packages.numpy", "machine.cpu", "config.seed"}
    code, found = differences(copy, "--check")  # the seed is then that of the folder
    edited = {f"{part} (edited after the run)" for part in ("config.seed", "machine", "packages")}
    assert code == 3 and set(found) == {"packages.numpy", "machine.cpu", *edited}
    assert found["packages.numpy"][0] == "0.9" and found["config.seed (edited after the run)"] == ("0", "5")


def test_another_row_and_another_byte_of_a_weight_are_named(original: Path) -> None:
    config = read_run(original).config
    prompts, weights = Path(config["prompts"]), Path(config["model"]) / "model.safetensors"
    text, content = prompts.read_text(), weights.read_bytes()
    prompts.write_text(text.replace("aaaa", "aaba", 1))
    weights.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    try:
        code, found = differences(original, "--check")
    finally:
        prompts.write_text(text)
        weights.write_bytes(content)
    assert code == 3
    assert set(found) == {
        *("identity.weights", "identity.weights_sha256", "identity.data_set_sha256", "identity.rows_sha256"),
    }


def test_a_hidden_key_is_no_change(original: Path, tmp_path: Path) -> None:
    endpoint = {"urls": "http://127.0.0.1:9/v1", "start_server": "vllm serve m --api-key sk-123"}
    folder = record(RunConfig(endpoint=endpoint), read_run(original).result, tmp_path)
    folder.interrupt(reason("INTERRUPTED", error="KeyboardInterrupt", cause=""))
    run = read_run(folder.path)
    assert "sk-123" not in (folder.path / "config.yaml").read_text() and run.result["plan_sha256"]
    assert changed_parts(run) == []


def test_a_model_that_only_its_server_knows_is_asked_for_by_the_same_name(original: Path, tmp_path: Path) -> None:
    """It is no folder here, and none is looked for; the server, which is gone, is."""
    config = RunConfig(model="some/model", endpoint={"urls": "http://127.0.0.1:9/v1"})
    for served, said in (("some/model", "127.0.0.1:9"), ("other", "there is no some/model here, its model")):
        facts = {**read_run(original).result, "target": {"kind": "endpoint", "served_model": served}}
        folder = record(config, facts, tmp_path / served)
        folder.interrupt(reason("INTERRUPTED", error="KeyboardInterrupt", cause=""))
        code, _, err = call_here("rerun", folder.path, "--check")
        assert code != 0 and said in err
        assert ("there is no" in err) is (served == "other")


def test_what_is_no_single_run_is_refused(tmp_path: Path) -> None:
    assert call_here("rerun", tmp_path, "--check")[0] == 2
