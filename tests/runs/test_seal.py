"""A sealed folder: whatever changes, comes or goes is found, and the audit names it."""

import json
import random
import subprocess
from pathlib import Path

import pytest

from cli_support import call_here
from megatoken.runs.seal import seal, seal_state, sealed_folder
from run_folders import run_folder


def sealed_findings(path: Path) -> list[dict]:
    document = json.loads(call_here("audit", path, "--json")[1])
    return [one for one in document["findings"] if one["id"] == "run_folder.sealed"]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    path = run_folder(tmp_path, "run", "host", "2026-01-01T00:00:00Z").path
    (path / "mlperf" / "mlperf_log_detail.txt").write_text(":::MLLOG {}\n")
    return path


def test_a_change_of_any_file_a_new_one_and_a_lost_one_are_named(folder):
    seal(folder)
    names = [path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()]
    draw = random.Random(4)
    for name in names:
        if name == "seal.json":
            continue
        path = folder / name
        content = path.read_bytes()
        changed = bytearray(content)
        changed[draw.randrange(len(changed))] ^= 1
        path.write_bytes(changed)
        assert (seal_state(folder).changed, seal_state(folder).whole) == ((name,), False)
        path.unlink()
        assert seal_state(folder).removed == (name,)
        path.write_bytes(content)
        assert seal_state(folder).whole
    (folder / "note.txt").write_text("new")
    (folder / "link").symlink_to("note.txt")
    assert seal_state(folder).added == ("link", "note.txt")


def test_the_audit_names_the_file_and_ends_with_3(folder):
    assert call_here("seal", folder)[0] == 0
    (finding,) = sealed_findings(folder)
    assert finding["severity"] == "pass" and "not signed" in finding["found"]
    (folder / "config.yaml").write_text((folder / "config.yaml").read_text() + "# longer\n")
    (folder / "more.txt").write_text("new")
    (finding,) = sealed_findings(folder)
    assert finding["severity"] == "fail" and "changed: config.yaml; added: more.txt" in finding["found"]
    assert call_here("audit", folder)[0] == 3


@pytest.mark.parametrize(
    "command",
    [
        ("report", "RUN"),
        ("report", "RUN", "--out", "RUN/mine.html"),
        ("compare", "RUN", "RUN", "--out", "RUN/comparison"),
        ("audit", "RUN", "--out", "RUN"),
        ("run", "--out", "RUN"),
        ("init", "RUN/workspace"),
        ("quantize", "reference", "--to", "fp8", "--out", "RUN/quantized"),
        ("dataset", "convert", "rag", "--out", "RUN/lengths.csv"),
        ("dataset", "convert", "RUN/config.yaml", "--out", "RUN/data.parquet"),
        (
            "submission",
            "build",
            "RUN",
            "--submitter",
            "Us",
            "--division",
            "open",
            "--round",
            "v5.1",
            "--out",
            "RUN/tree",
        ),
    ],
)
def test_no_command_writes_into_a_sealed_folder(folder, command):
    seal(folder)
    code, _, err = call_here(*(word.replace("RUN", str(folder)) for word in command))
    assert code == 2 and err.count("\n") == 1 and f"breaks the seal of {folder.resolve()}" in err
    assert seal_state(folder).whole and not seal_state(folder).added


def test_a_seal_that_says_more_is_not_replaced(folder):
    first = seal(folder)
    (folder / "note.txt").write_text("new")
    second = seal(folder)  # which also covers what was added
    assert second["files"].keys() - first["files"].keys() == {"note.txt"}
    (folder / "note.txt").write_text("newer")
    code, _, err = call_here("seal", folder)
    assert code == 2 and "has changed since: note.txt; remove seal.json" in err
    assert json.loads((folder / "seal.json").read_text()) == second
    (folder / "seal.json").write_text("damaged")
    assert seal(folder)["files"]["note.txt"] != second["files"]["note.txt"]


def test_a_place_outside_is_not_in_a_sealed_folder(folder, tmp_path, monkeypatch):
    seal(folder)
    assert sealed_folder(folder / "a" / "b.html") == folder.resolve()
    monkeypatch.chdir(folder)
    assert sealed_folder(Path("..") / "elsewhere.html") is None
    (tmp_path / "link").symlink_to(folder)
    assert sealed_folder(tmp_path / "link" / "page.html") == folder.resolve()
    other = tmp_path / "other"
    other.mkdir()
    for content in ("{}", "[1]", "not JSON", '{"files": {}}'):
        (other / "seal.json").write_text(content)
        assert sealed_folder(other / "page.html") is None


def test_pages_of_sealed_runs_stay_while_those_of_others_are_rebuilt(folder):
    seal(folder)
    other = run_folder(folder.parent, "other", "host", "2026-01-01T00:01:00Z").path
    assert call_here("report", folder.parent)[0] == 0
    assert (other / "report.html").is_file() and (folder.parent / "index.html").is_file()
    assert seal_state(folder).whole and not seal_state(folder).added


def test_a_file_that_the_seal_does_not_know_does_not_break_the_results(folder):
    assert call_here("seal", folder)[0] == 0
    (folder / ".DS_Store").write_bytes(b"Bud1")
    document = json.loads(call_here("audit", folder, "--json")[1])
    by_id = {one["id"]: one for one in document["findings"]}
    assert by_id["run_folder.sealed"]["severity"] == "pass"
    assert by_id["run_folder.unsealed"]["severity"] == "warn"
    assert "added later, so not sealed: .DS_Store" in by_id["run_folder.sealed"]["found"]
    assert "added, and not part of what was sealed: .DS_Store;" in by_id["run_folder.unsealed"]["found"]


def test_the_console_of_an_audit_says_who_signed(folder, tmp_path):
    pytest.importorskip("cryptography", reason="signatures need the extra seal")
    key = tmp_path / "key.pem"
    subprocess.run(["openssl", "genpkey", "-algorithm", "ed25519", "-out", key], check=True, capture_output=True)
    assert "Seal:" not in call_here("audit", folder)[1]
    document = seal(folder, key)
    shown = call_here("audit", folder)[1]
    assert f"Seal: no sealed file changed since {document['sealed_at']}; signed by {document['public_key']}." in shown
    (folder / "config.yaml").write_text("engine: {}\n")
    assert "Seal: changed: config.yaml." in call_here("audit", folder)[1]


def test_a_signature_holds_for_its_statement_and_key_alone(folder, tmp_path):
    pytest.importorskip("cryptography", reason="signatures need the extra seal")
    key = tmp_path / "key.pem"
    subprocess.run(["openssl", "genpkey", "-algorithm", "ed25519", "-out", key], check=True, capture_output=True)
    document = seal(folder, key)
    assert seal_state(folder).signature is True
    (folder / "config.yaml").write_text("engine: {}\n")
    (folder / "seal.json").unlink()
    forged = seal(folder)  # a new manifest under the old signature
    (folder / "seal.json").write_text(json.dumps({**document, "files": forged["files"]}))
    assert (seal_state(folder).signature, seal_state(folder).changed) == (False, ())


def test_a_seal_whose_signature_was_taken_out_says_so(folder):
    document = seal(folder)
    (folder / "seal.json").write_text(json.dumps({**document, "algorithm": "ed25519", "public_key": "ab"}))
    shown = call_here("audit", folder)[1]
    assert "Seal: the seal names a key, and its signature is missing." in shown


def test_a_folder_that_is_no_run_and_a_key_that_is_none_are_refused_in_one_line(folder, tmp_path):
    assert call_here("seal", tmp_path)[0] == 2
    (tmp_path / "key.pem").write_text("no key")
    code, _, err = call_here("seal", folder, "--key", tmp_path / "key.pem")
    assert code == 2 and err.count("\n") == 1 and not (folder / "seal.json").exists()


def test_a_damaged_run_folder_is_not_sealed(folder):
    (folder / "series.parquet").write_bytes(b"cut off")
    code, _, err = call_here("seal", folder)
    assert code == 2 and "series.parquet is damaged" in err and not (folder / "seal.json").exists()
