"""The reference model in accuracy mode, through command and LoadGen: sound weights pass, a broken scale does not."""

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from cli_support import ENVIRONMENT, TIMEOUT_SECONDS, call_here, write_lines
from examples import every
from megatoken.accuracy.gate import BASELINE, SHARE, reference_gate
from megatoken.datasets.references import HELD_OUT, load_references
from megatoken.engine.config import REFERENCE, model_folder
from megatoken.errors import UsageError
from megatoken.runs.run import Verdict, read_run
from stated_fields import unstated_fields

ROWS = 64  # of 2,048, which take minutes on a busy core
LETTERS = 60  # of the longest answer among them
FEW_ROWS = 8  # show an error that every answer suffers from
QUICK = ("--mode", "accuracy", "--warm-up", 0.1, "--engine.threads", 1, "--engine.device", "cpu")
PROGRAM = """
import sys
from pathlib import Path
from megatoken.engine import config
config._REFERENCE_FOLDER = Path(sys.argv.pop(1))
from megatoken.cli import main
main()
"""


def run_as_reference(folder: Path, *arguments: object) -> tuple[int, str, str]:
    """The command, where ``folder`` is what ships."""
    command = [sys.executable, "-c", PROGRAM, str(folder), *map(str, arguments)]
    done = subprocess.run(
        command, capture_output=True, text=True, env=ENVIRONMENT, timeout=TIMEOUT_SECONDS, check=False
    )
    return done.returncode, done.stdout, done.stderr


def make_reference(folder: Path, rows: int) -> Path:
    """What ships, with the first rows of the held-out set that end soon, and what they score in fp32."""
    shutil.copytree(model_folder(REFERENCE), folder)
    short = [line for line in HELD_OUT.read_text().splitlines() if len(json.loads(line)["reference"]) <= LETTERS]
    prompts = write_lines(folder / HELD_OUT.name, *short[:rows])
    out = folder.parent / "fp32"
    options = ("--model", folder, "--prompts", prompts, "--precision", "fp32", *QUICK)
    code, stdout, err = call_here("run", *options, "--out", out, "--json")
    assert code == 0, err
    assert "accuracy" not in json.loads(stdout)  # a model of another name is held against nothing
    code, _, err = call_here("accuracy", json.loads(stdout)["run_folder"])
    assert code == 0, err
    shutil.copy(next(out.iterdir()) / "accuracy" / "accuracy.json", folder / BASELINE.name)
    return folder


@pytest.fixture(scope="module")
def few_rows(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_reference(tmp_path_factory.mktemp("gate") / "reference_model", FEW_ROWS)


def test_sound_weights_pass_and_their_scores_stand_in_the_result(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reference = make_reference(tmp_path / "reference_model", ROWS)
    code, stdout, err = run_as_reference(reference, "run", *QUICK, "--out", tmp_path / "runs")
    assert (code, "judging the answers" in err) == (0, True)
    (path,) = (tmp_path / "runs").iterdir()
    run = read_run(path)
    assert (run.verdict, run.reasons) == (Verdict.MEASURED, [])
    assert (run.config["model"], run.config["prompts"], run.result["model"]) == ("reference", None, "reference")
    assert run.result["samples_completed"] == ROWS
    scores = run.result["accuracy"]
    assert set(scores["metrics"]) == {"exact_match", "rouge1", "rouge2", "rougeL"}
    assert unstated_fields(run.result) == set()
    assert scores["metrics"]["exact_match"]["value"] > 97
    assert scores["metrics"]["exact_match"]["answers"] == ROWS
    (shown,) = re.findall(r"^Exact match +% +([\d.]+) *$", stdout, re.MULTILINE)
    assert float(shown) == pytest.approx(scores["metrics"]["exact_match"]["value"], abs=0.01)
    fp32 = json.loads((reference / BASELINE.name).read_text())["metrics"]
    at_least = {target["name"]: target["at_least"] for target in scores["targets"]["targets"]}
    for name, metric in fp32.items():
        assert at_least[name] == pytest.approx(0.99 * metric["value"])
    # Answers end where the model ends them.
    reasons = run.requests["finish_reason"].to_pylist()
    assert reasons.count("stop") > 0.98 * ROWS
    for file in ("accuracy.txt", "accuracy.json"):
        assert (path / "accuracy" / file).is_file()
    document = json.loads((path / "accuracy" / "accuracy.json").read_text())
    assert (document["verdict"], document["metrics"]) == ("VALID", scores["metrics"])
    # The command finds what was expected by what the run says of itself.
    monkeypatch.setattr("megatoken.accuracy.judge.HELD_OUT", reference / HELD_OUT.name)
    code, stdout, _ = call_here("accuracy", path, "--json")
    assert (code, json.loads(stdout)["metrics"]) == (0, scores["metrics"])


@pytest.mark.parametrize("precision", ["fp8", *every("bf16")])
def test_a_scale_that_is_wrong_by_two_is_caught(few_rows: Path, tmp_path: Path, precision: str) -> None:
    from safetensors.torch import load_file, save_file

    broken = shutil.copytree(few_rows, tmp_path / "reference_model")
    weights = load_file(broken / "model.safetensors")
    weights["model.layers.0.self_attn.v_proj.weight"] *= 2
    save_file(weights, broken / "model.safetensors")
    options = (*QUICK, "--precision", precision, "--out", tmp_path / "runs")
    code, stdout, _ = run_as_reference(broken, "run", *options, "--json")
    document: dict[str, Any] = json.loads(stdout)
    assert (code, document["verdict"]) == (3, "INVALID")
    assert {reason["code"] for reason in document["reasons"]} == {"ACCURACY"}
    words = [reason["message"] for reason in document["reasons"]]
    assert any(word.startswith("exact_match is ") for word in words)
    assert all("; the reference model's gate (99 % of fp32) " in word for word in words)
    assert read_run(Path(document["run_folder"])).verdict is Verdict.INVALID


def test_the_baseline_that_ships_is_of_the_set_that_ships() -> None:
    references = load_references(HELD_OUT)
    gate = reference_gate(references.content_hash, len(references.texts))
    assert gate is not None and gate.targets is not None
    assert gate.targets.rows == len(references.texts) == 2048
    shipped = json.loads(BASELINE.read_text())["metrics"]
    found = {target.name: target.at_least for target in gate.targets.targets}
    assert {name: SHARE * metric["value"] for name, metric in shipped.items()}.items() <= found.items()
    assert min(found[name] for name in ("exact_match", "rouge1", "rougeL")) > 90


def test_too_few_rows_are_scored_but_not_judged_and_other_sets_are_neither() -> None:
    references = load_references(HELD_OUT)
    gate = reference_gate(references.content_hash, 100)
    assert gate is not None and gate.targets is None
    assert reference_gate(references.content_hash, 2049) is None
    assert reference_gate("0" * 64, 2048) is None


def test_without_what_scores_need_nothing_is_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("megatoken.accuracy.scores.find_spec", lambda name: None)
    with pytest.raises(UsageError, match=r"pip install .*\[accuracy\]'$"):
        reference_gate(load_references(HELD_OUT).content_hash, 2048)


@pytest.mark.parametrize(
    ("arguments", "present", "absent"),
    [
        (
            (),
            ("answers only short tasks that it was trained on", "2,048 rows", "held_out.jsonl"),
            ("random tokens", "random weights", "not judged"),
        ),
        (("--mode", "accuracy"), ("every score of the answers must reach 99 % of the model's own",), ("not judged",)),
        (("--mode", "accuracy", "--samples", 5), ("accuracy is not judged",), ()),
        (("--mode", "accuracy", "--rules", "v5.1"), ("model and data set are not part of it",), ()),
        (("--rules", "v5.1"), ("model, data set and accuracy are not part of it",), ()),
        (("--random-weights",), ("random weights", "24,576 rows"), ("answers only short tasks",)),
        (("--lengths", "{lengths}"), ("prompts are random tokens", "1 row,"), ("random weights",)),
    ],
)
def test_what_the_default_is_given(
    arguments: tuple[object, ...],
    present: tuple[str, ...],
    absent: tuple[str, ...],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "reference").mkdir()  # no folder stands in for what ships
    lengths = write_lines(tmp_path / "lengths.csv", "input_tokens,output_tokens", "9,4")
    given = (str(argument).format(lengths=lengths) for argument in arguments)
    code, stdout, err = call_here("run", "--dry-run", *given)
    assert (code, err) == (0, "")
    assert "model: reference\n" in stdout
    for words in present:
        assert words in stdout
    for words in absent:
        assert words not in stdout


def test_a_folder_of_that_name_needs_its_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "reference").mkdir()
    code, _, err = call_here("run", "--dry-run", "--model", "./reference")
    assert code == 2
    assert "reference/config.json: no such file" in err


def test_generate_answers_without_a_model_named(tmp_path: Path) -> None:
    prompt = "9, 0, 359, 45, 4\nSort the numbers, smallest first.\nAnswer:\n"
    code, stdout, err = call_here("generate", "--prompt", prompt)
    assert (code, stdout, err) == (0, "0, 4, 9, 45, 359\n", "")
    out = tmp_path / "out.jsonl"
    prompts = write_lines(tmp_path / "in.jsonl", {"prompt": prompt, "max_tokens": 300})
    code, _, err = call_here("generate", "--prompts", prompts, "--out", out)
    answer = json.loads(out.read_text())
    assert (answer["text"], answer["finish_reason"]) == ("0, 4, 9, 45, 359", "stop")
