"""``megatoken audit``."""

import json
import os
import pty
import shutil
import subprocess
from pathlib import Path

import pytest

from cli_results import REPOSITORY, document_of, hostile_paths, refused, two_runs
from cli_support import COMMAND, ENVIRONMENT, TIMEOUT_SECONDS, call, redirected
from published import published_logs

CLAIMS = REPOSITORY / "examples" / "claims"


def test_the_published_logs_and_the_claims_about_them(tmp_path: Path) -> None:
    logs = published_logs()
    files = [CLAIMS / "vendor-blog.yaml", CLAIMS / "news-item.yaml"]
    claims = ("--claims", files[0], "--claims", files[1])
    code, stdout, err = call("audit", logs, *claims, "--full", "--out", tmp_path / "audit")
    assert (code, err) == (3, "")
    for words in (
        "1,100,948.3",
        "62,803.9",
        "57,599.1",
        "cannot be determined",
        "does not hold",
        "62,111.7",
        "Saved: ",
    ):
        assert words in stdout
    saved = json.loads((tmp_path / "audit" / "audit.json").read_text())
    assert saved["counts"]["fail"] > 0
    assert {claim["source"].split(";")[0] for claim in saved["claims"]} == {
        line.removeprefix("source: ").strip('"')
        for file in files
        for line in file.read_text().splitlines()
        if line.startswith("source: ")
    }
    assert "1,100,948" in (tmp_path / "audit" / "audit.html").read_text()


def test_a_round_that_is_claimed_makes_failures_of_its_rules(tmp_path_factory: pytest.TempPathFactory) -> None:
    run = two_runs(tmp_path_factory)[0]
    honest = document_of("audit", run)
    assert (honest["kind"], honest["artefact_kind"], honest["counts"]["fail"]) == ("audit", "megatoken_run", 0)
    claimed = document_of("audit", run, "--round", "v5.1", code=3)
    assert any(note.endswith("rules that a run does not meet weigh as those of v5.1") for note in claimed["notes"])
    assert any(note.endswith("are notes unless a round is claimed") for note in honest["notes"])
    failed = {finding["id"] for finding in claimed["findings"] if finding["severity"] == "fail"}
    assert "rules.min_duration" in failed
    assert failed <= {finding["id"] for finding in honest["findings"] if finding["severity"] == "note"}


def test_a_forged_result_is_found(tmp_path_factory: pytest.TempPathFactory, tmp_path: Path) -> None:
    run = Path(shutil.copytree(two_runs(tmp_path_factory)[0], tmp_path / "run"))
    result = json.loads((run / "result.json").read_text())
    result["output_tokens_per_second"] *= 1.5
    (run / "result.json").write_text(json.dumps(result))
    assert document_of("audit", run, code=3)["counts"]["fail"] > 0


def test_what_cannot_be_audited(tmp_path: Path) -> None:
    paths = hostile_paths(tmp_path)
    for path in paths.values():
        assert str(path) in refused("audit", path)
    assert "--round v9: not a known" in refused("audit", paths["empty"], "--round", "v9")
    message = refused("audit", paths["empty"], "--round", "v4.1")  # its seeds are shipped, and no benchmark's rules
    assert (
        "only the seeds of this round are known" in message
        and "v4.1," not in message
        and "v5.0, v5.1, v6.0, v6.1" in message
    )
    missing = refused("audit", paths["empty"], "--claims", tmp_path / "absent.yaml")
    assert "absent.yaml: cannot be read: No such file" in missing
    (tmp_path / "claims.yaml").write_text("claims: [")
    assert "claims.yaml:1: not YAML" in refused("audit", paths["empty"], "--claims", tmp_path / "claims.yaml")
    assert "--clams: unknown flag; did you mean --claims?" in refused("audit", paths["empty"], "--clams", "x")
    assert "did you mean 'audit'?" in refused("aduit", tmp_path).lower()
    assert "Missing argument 'PATH'" in refused("audit")


def test_a_formula_that_is_wrong_is_named_with_its_file(
    tmp_path_factory: pytest.TempPathFactory, tmp_path: Path
) -> None:
    claims = tmp_path / "second.yaml"
    claims.write_text("title: t\nsource: s\nclaims: [{id: a, text: t, value: 1, formula: nodez}]\n")
    message = refused("audit", two_runs(tmp_path_factory)[0], "--claims", claims)
    assert f"{claims}: claim a: formula 'nodez': unknown fact nodez; did you mean nodes?" in message


def test_a_path_that_is_no_text(tmp_path_factory: pytest.TempPathFactory, tmp_path: Path) -> None:
    odd = tmp_path / os.fsdecode(b"nodes \xff")
    shutil.copytree(two_runs(tmp_path_factory)[0] / "mlperf", odd)
    assert call("audit", odd)[0] == 0
    assert document_of("audit", odd)["inputs"] == [f"{tmp_path}/nodes \\udcff"]
    assert call("audit", odd, "--out", odd / "out")[0] == 0
    saved = (odd / "out" / "audit.json").read_text(encoding="utf-8")
    assert json.loads(saved)["inputs"] == [f"{tmp_path}/nodes \\udcff"]


def test_an_output_that_cannot_be_written(tmp_path_factory: pytest.TempPathFactory, tmp_path: Path) -> None:
    run = two_runs(tmp_path_factory)[0]
    assert "cannot be written" in refused("audit", run, "--out", "/dev/null/out")
    code, stdout, err = redirected(">&-", "audit", run, "--out", tmp_path)
    assert (code, stdout) == (1, "")
    assert f"cannot write to standard output: Bad file descriptor; the result is in {tmp_path}" in err
    assert (tmp_path / "audit.json").exists()
    assert redirected("| head -c 1 >/dev/null; exit 0", "audit", run)[2] == ""


def test_a_bar_on_the_terminal(tmp_path_factory: pytest.TempPathFactory) -> None:
    run = two_runs(tmp_path_factory)[0]
    controller, terminal = pty.openpty()
    with subprocess.Popen(
        [*COMMAND, "audit", str(run), "--json"], stdout=subprocess.PIPE, stderr=terminal, env=ENVIRONMENT
    ) as process:
        os.close(terminal)
        stdout, _ = process.communicate(timeout=TIMEOUT_SECONDS)
    shown = os.read(controller, 65536).decode(errors="replace")  # the terminal may cut it anywhere
    os.close(controller)
    assert json.loads(stdout)["kind"] == "audit"
    assert "reading runs" in shown or "listing files" in shown
