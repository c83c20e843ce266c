"""A real run in accuracy mode, through LoadGen, scored by the command; every test reads the same run."""

import json
import re
import shutil
from pathlib import Path

import pytest

from accuracy_files import END, make_tokenizer, write_lines
from cli_support import call_here
from megatoken.audit import Severity, audit
from megatoken.runs.run import read_run

ROWS = 12
MEANT = ("--references", "{run}/../../prompts.jsonl", "--model", "{run}/../../model")


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of random weights that answers its 12 prompts; their references are its own answers, but for three."""
    import torch
    import transformers

    folder = tmp_path_factory.mktemp("accuracy")
    model = folder / "model"
    tokenizer = make_tokenizer(model)
    config = transformers.LlamaConfig(
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=END + 1,
        max_position_embeddings=64,
        bos_token_id=None,
        eos_token_id=END,
    )
    torch.manual_seed(0)
    transformers.LlamaForCausalLM(config).save_pretrained(model)
    prompts = [{"prompt": f"what is {row}", "max_tokens": 6, "reference": "?"} for row in range(ROWS)]
    path = write_lines(folder / "prompts.jsonl", prompts)
    first = _run(folder, path)
    answers = {}
    for line in (first / "mlperf" / "mlperf_log_accuracy.json").read_text().splitlines()[1:-1]:
        record = json.loads(line.rstrip(","))
        ids = [int.from_bytes(bytes.fromhex(record["data"])[at : at + 4], "little") for at in range(0, 24, 4)]
        answers[record["qsl_idx"]] = tokenizer.decode(ids, skip_special_tokens=True)
    for row, prompt in enumerate(prompts):
        prompt["reference"] = "none of this" if row < 3 else answers[row]
        prompt["task"] = "lost" if row < 3 else "found"
    write_lines(path, prompts)
    shutil.rmtree(first)
    return _run(folder, path)


def _run(folder: Path, prompts: Path) -> Path:
    out = folder / "runs"
    options = ("--engine.threads", 1, "--warm-up", 0.1, "--precision", "fp32")
    code, stdout, err = call_here(
        "run", "--model", folder / "model", "--prompts", prompts, "--mode", "accuracy", "--out", out, "--json", *options
    )
    assert code == 0, err
    return Path(json.loads(stdout)["run_folder"])


def test_the_run_needs_nothing_but_its_folder(run: Path) -> None:
    code, out, err = call_here("accuracy", run, "--json")
    assert (code, err) == (0, "")
    document = json.loads(out)
    assert document == json.loads((run / "accuracy" / "accuracy.json").read_text())
    assert document["verdict"] == "MEASURED"
    assert document["metrics"]["exact_match"]["value"] == 75.0
    assert document["by_task"]["lost"]["exact_match"]["value"] == 0.0
    assert document["by_task"]["found"]["exact_match"]["value"] == 100.0
    assert document["gen_num"] == ROWS
    assert document["gen_tok_len"] == 6 * ROWS == read_run(run).result["output_tokens"]
    assert document["references_sha256"] == read_run(run).result["data_set_sha256"]
    assert (run / "accuracy" / "accuracy.txt").read_text().splitlines()[-1] == f"hash={document['log_sha256']}"


def test_an_audit_scores_the_run_again(run: Path, tmp_path: Path) -> None:
    assert call_here("accuracy", run)[0] == 0
    (found,) = [item for item in audit(run).findings if item.id == "accuracy.recomputed"]
    assert (found.severity, found.found) == (Severity.PASS, "12 answers, nothing differs")
    edited = shutil.copytree(run, tmp_path / "edited")
    text = edited / "accuracy" / "accuracy.txt"
    text.write_text(text.read_text().replace("'exact_match': 75.0", "'exact_match': 95.0"))
    (found,) = [item for item in audit(edited).findings if item.id == "accuracy.recomputed"]
    assert (found.severity, found.found) == (
        Severity.FAIL,
        "accuracy/accuracy.txt exact_match 95.0, recomputed 75.0",
    )
    changed, scores = re.subn(r"'(rouge1|rouge2|rougeL|exact_match)': [0-9.]+", r"'\1': 9.5", text.read_text())
    assert scores == 4
    text.write_text(changed)
    (found,) = [item for item in audit(edited).findings if item.id == "accuracy.recomputed"]
    for name in ("rouge1", "rouge2", "rougel", "exact_match"):
        assert f"accuracy/accuracy.txt {name} 9.5, recomputed " in found.found


def test_a_person_reads_a_table_and_a_verdict(run: Path, tmp_path: Path) -> None:
    assert call_here("accuracy", run)[0] == 0
    before = shutil.copytree(run, tmp_path / "before")
    log = run / "mlperf" / "mlperf_log_accuracy.json"
    written = log.read_bytes()
    log.write_bytes(b"\n" + written)  # another log, of the same answers
    try:
        code, out, _ = call_here("accuracy", run, "--baseline", before)
    finally:
        log.write_bytes(written)
    assert code == 0
    assert "75.0000 ± 13.06" in out
    assert "VALID: all targets reached (0.99 of " in out
    assert f"Written: {run}/accuracy/accuracy.txt" in out


def test_a_worse_run_is_invalid(run: Path, tmp_path: Path) -> None:
    call_here("accuracy", run)
    worse = shutil.copytree(run, tmp_path / "worse")
    log = worse / "mlperf" / "mlperf_log_accuracy.json"
    lines = log.read_text().splitlines(keepends=True)
    line = next(number for number, line in enumerate(lines) if '"qsl_idx" : 7,' in line)
    lines[line] = lines[line].replace('"data" : "', '"data" : "41000000')
    log.write_text("".join(lines))
    code, out, _ = call_here("accuracy", worse, "--baseline", run)
    assert code == 3
    assert "INVALID: some targets missed" in out
    assert "ACCURACY exact_match is 66.66667; 0.99 of " in out


def test_prompts_that_changed_since_the_run(run: Path) -> None:
    prompts = Path(read_run(run).config["prompts"])
    before = prompts.read_bytes()
    try:
        prompts.write_bytes(before.replace(b"none of this", b"none of that"))
        code, out, err = call_here("accuracy", run)
    finally:
        prompts.write_bytes(before)
    assert (code, out) == (2, "")
    assert f"megatoken: {prompts}: changed since the run: expected SHA-256 " in err


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (lambda lines: [*lines[:3], *lines[4:]], "1 of 12 rows have no answer, the first is qsl_idx "),
        (lambda lines: [*lines[:3], *lines[2:]], "was already answered on line 3"),
        (lambda lines: [line.replace('"qsl_idx" : 5,', '"qsl_idx" : 50,') for line in lines], "qsl_idx 50 is outside"),
        (
            lambda lines: [line.replace('"data" : "', '"data" : "FF030000') for line in lines],
            "token id 1023 is outside",
        ),
        (lambda lines: lines[:-1], "not a whole list of answers"),
    ],
)
def test_a_log_that_does_not_fit_is_refused_in_one_line_and_nothing_is_written(
    change, problem: str, run: Path, tmp_path: Path
) -> None:
    other = shutil.copytree(run, tmp_path / "other", ignore=shutil.ignore_patterns("accuracy", "compliance"))
    log = other / "mlperf" / "mlperf_log_accuracy.json"
    log.write_text("".join(change(log.read_text().splitlines(keepends=True))))
    code, out, err = call_here("accuracy", other)
    assert (code, out) == (2, "")
    assert err.count("\n") == 1
    assert problem in err
    assert not (other / "accuracy").exists()


def test_part_of_a_run_is_scored_where_asked_for(run: Path, tmp_path: Path) -> None:
    other = shutil.copytree(run, tmp_path / "other")
    log = other / "mlperf" / "mlperf_log_accuracy.json"
    lines = log.read_text().splitlines(keepends=True)
    log.write_text("".join([*lines[:3], *lines[4:]]))
    code, out, _ = call_here("accuracy", other, "--partial", "--json")
    assert code == 0
    assert "PARTIAL_ANSWERS" in [note["code"] for note in json.loads(out)["notes"]]


def test_compliance_of_a_run_goes_beside_it(run: Path) -> None:
    """All its answers were cut, so none ends, and the test proves nothing; MLPerf's own would pass."""
    code, out, err = call_here("verify", "TEST06", run)
    assert (code, err) == (3, "")
    assert "EOS check pass: True" in out
    assert f"no answer has an end token of the model ({END}), so the EOS check proves nothing" in out
    written = (run / "compliance" / "TEST06" / "verify_accuracy.txt").read_text()
    assert written.splitlines()[0] == "First token check pass: Skipped"
    code, out, _ = call_here("verify", "TEST09", run, "--json")
    assert code == 3
    assert json.loads(out)["file"] == str(run / "compliance" / "TEST09" / "verify_output_len.txt")
    call_here("accuracy", run)
    for path in (run, run / "mlperf", run / "mlperf" / "mlperf_log_accuracy.json"):
        code, out, _ = call_here("verify", "TEST07", path)
        assert code == 3
        assert "Accuracy score: 75.000000" in out
        assert f"Written: {run / 'compliance' / 'TEST07'}" in out
    (run / "accuracy" / "accuracy.json").unlink()
    code, _, err = call_here("verify", "TEST07", run / "mlperf")
    assert (code, f"create it with: megatoken accuracy {run}\n" in err) == (2, True)
    call_here("accuracy", run)
    scores = json.loads((run / "accuracy" / "accuracy.json").read_text())
    del scores["metrics"]["exact_match"]
    (run / "accuracy" / "accuracy.json").write_text(json.dumps(scores))
    code, _, err = call_here("verify", "TEST07", run)
    assert (code, f"run megatoken accuracy {run} --references FILE" in err) == (2, True)
    call_here("accuracy", run)


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (("verify", "TEST06", "{run}", "--end-tokens", "2,x"), "--end-tokens 2,x: expected comma-separated token ids"),
        (("verify", "TEST06", "{tmp}"), "no mlperf_log_accuracy.json there"),
        (("verify", "TEST06", "{tmp}/logs", "--end-tokens", "2"), "it states the scenario"),
        (("verify", "TEST06", "{tmp}/logs/mlperf_log_accuracy.json"), "it states the scenario"),
        (("verify", "TEST07", "{tmp}/logs"), "no accuracy.json there; create it with: megatoken accuracy {tmp}/logs"),
        (("verify", "TEST07", "{tmp}/timed"), "holds no answers; megatoken run --mode accuracy logs them"),
        (("verify", "TEST06", "{tmp}/timed", "--end-tokens", "2"), "no answers; megatoken run --compliance TEST06"),
        (("accuracy", "{tmp}/timed", *MEANT), "holds no answers; megatoken run --mode accuracy logs them"),
        (("verify", "TEST07", "{tmp}/accuracy.json"), "accuracy.json: has scores, not answers; give the run folder"),
        (("verify", "TEST05", "{run}"), "TEST05"),
        (("accuracy", "{tmp}/absent"), "no mlperf_log_accuracy.json there"),
        (("accuracy", "{run}", "--model", "{tmp}"), "no tokenizer.json"),
        (("accuracy", "{run}", "--references", "{tmp}/absent.jsonl"), "cannot be read: No such file"),
        (("accuracy", "{run}", "--benchmark", "llama2"), "cannot be scored"),
        (("accuracy", "{run}", "--share", "1.1"), "--share"),
    ],
)
def test_wrong_use_is_answered_in_one_line(
    arguments: tuple[str, ...],
    problem: str,
    run: Path,
    tmp_path: Path,
) -> None:
    (tmp_path / "logs").mkdir()
    shutil.copy(run / "mlperf" / "mlperf_log_accuracy.json", tmp_path / "logs")
    (tmp_path / "timed").mkdir()
    (tmp_path / "timed" / "mlperf_log_accuracy.json").write_text("[]\n")
    (tmp_path / "accuracy.json").write_text("{}\n")
    code, out, err = call_here(*(one.format(run=run, tmp=tmp_path) for one in arguments))
    assert (code, out) == (2, "")
    assert err.count("\n") == 1
    assert problem.format(run=run, tmp=tmp_path) in err
