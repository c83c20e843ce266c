"""``megatoken qualify`` as a user calls it."""

from __future__ import annotations

import json
import os
import signal
from contextlib import suppress
from pathlib import Path
from time import monotonic, sleep

import psutil
import pytest

from cli_support import TIMEOUT_SECONDS, call_here, started


def test_a_qualification_prints_the_answer_and_saves_document_and_page(tmp_path: Path) -> None:
    out_file = tmp_path / "new" / "mine.json"
    code, out, err = call_here("qualify", "--tests", "disk", "--disk", tmp_path, "--out", out_file)
    assert (code, err) in ((0, ""), (4, ""))  # 4: a file system without O_DIRECT
    document = json.loads(out_file.read_text())
    assert [test["name"] for test in document["tests"]] == ["facts", "disk"]
    assert document["answer"][0] in out
    assert document["complete"]
    assert "<html" in out_file.with_suffix(".html").read_text()
    assert not [path for path in tmp_path.iterdir() if path.name != "new"]  # the disk's file is gone

    again = ("--json", "--out", out_file.parent)
    code, out, err = call_here("qualify", "--tests", "facts", "--baseline", out_file, *again)
    assert code == 0
    values = [value for test in json.loads(out)["tests"] for value in test["values"]]
    # NO REFERENCE: the first one waited for a core, next to other tests.
    assert [value["verdict"] for value in values] in (["PASS"], ["MARGINAL"], ["NOT RUN"], ["NO REFERENCE"])
    assert (out_file.parent / "qualify.json").is_file() and (out_file.parent / "qualify.html").is_file()


def test_a_name_without_json_is_a_folder_as_for_other_commands(tmp_path: Path) -> None:
    code, out, _ = call_here("qualify", "--tests", "facts", "--out", tmp_path / "results")
    assert code == 0 and f"Saved: {tmp_path / 'results' / 'qualify.json'}" in out
    assert {path.name for path in (tmp_path / "results").iterdir()} == {"qualify.json", "qualify.html"}
    (tmp_path / "notes").write_text("mine")
    code, _, err = call_here("qualify", "--tests", "facts", "--out", tmp_path / "notes")
    assert code == 2 and "notes: a file that is no .json; give a folder" in err


@pytest.mark.parametrize(
    ("command", "name", "takes"),
    [
        (("qualify", "--tests", "facts"), "m.txt", "a folder, or a file that ends in .json; leave out .txt"),
        (("audit", "absent"), "audit.json", "a folder; leave out .json"),
        (("plan", "capacity"), "plan.HTML", "a folder; leave out .HTML"),
        (("aggregate", "absent"), "nodes.csv", "a folder; leave out .csv"),
    ],
)
def test_the_name_of_a_file_does_not_become_a_folder(
    command: tuple[str, ...], name: str, takes: str, tmp_path: Path
) -> None:
    code, out, err = call_here(*command, "--out", tmp_path / name)
    assert (code, out, len(err.splitlines())) == (2, "", 1)
    assert f"{name}: expected {takes}" in err
    assert not list(tmp_path.iterdir())


def test_spaces_around_the_names_of_tests_do_not_matter(tmp_path: Path) -> None:
    code, _, err = call_here("qualify", "--tests", " facts , noop", "--out", tmp_path / "qualify.json")
    assert code == 2 and "--tests noop: unknown test" in err
    assert call_here("qualify", "--tests", "facts, facts ", "--out", tmp_path / "qualify.json")[0] == 0


def test_a_folder_with_the_name_of_a_file_is_taken(tmp_path: Path) -> None:
    (tmp_path / "m.txt").mkdir()
    assert call_here("qualify", "--tests", "facts", "--out", tmp_path / "m.txt")[0] == 0
    assert (tmp_path / "m.txt" / "qualify.json").is_file()


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (("--quick", "--full"), "give one of them"),
        (("--tests", "gem"), "did you mean gemm"),
        (("--baseline", "none.json"), "cannot be read"),
        (("--bseline", "x"), "did you mean --baseline"),
        (("--gpus", "each"), "no GPU can be used here; leave out --gpus"),
        (("--of", "a.json", "--compare", "azure", "--tests", "gemm", "--full"), "leave out --full, --tests"),
        (("--of", "a.json", "--compare", "azure", "--baseline", "b.json", "--disk", "."), "out --baseline, --disk"),
        (
            ("--rack", "auto", "--baseline", "b.json", "--disk", "."),
            "each in a folder of its own; leave out --baseline",
        ),
    ],
)
def test_wrong_flags_are_refused_before_a_test_runs(
    flags: tuple[str, ...], words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    code, out, err = call_here("qualify", *flags, "--out", tmp_path / "qualify.json")
    assert (code, out) == (2, "")
    assert words in err
    assert not list(tmp_path.iterdir())


def test_a_baseline_is_not_overwritten(tmp_path: Path) -> None:
    file = tmp_path / "qualify.json"
    file.write_text("{}")
    code, _, err = call_here("qualify", "--tests", "facts", "--baseline", file, "--out", file)
    assert (code, file.read_text()) == (2, "{}")
    assert "the new result would replace it" in err


def test_a_baseline_without_a_value_of_the_tests_is_named(tmp_path: Path) -> None:
    file = tmp_path / "other.json"
    call_here("qualify", "--tests", "facts", "--out", file)
    earlier = json.loads(file.read_text())
    (value, *_) = earlier["tests"][0]["values"]
    other = {"name": "other", "median": 1.0, "spread": 0.0, "drift": 0.0, "windows": [1.0]}
    earlier["tests"][0]["values"] = [value | other]
    file.write_text(json.dumps(earlier))
    code, out, _ = call_here("qualify", "--tests", "facts", "--baseline", file, "--out", tmp_path / "qualify.json")
    assert code == 0
    assert f"No value is in the baseline {file} under the same name, title and unit." in " ".join(out.split())


def test_a_file_that_is_no_qualification_is_not_overwritten(tmp_path: Path) -> None:
    file = tmp_path / "precious.json"
    file.write_text("{}")
    code, _, err = call_here("qualify", "--tests", "facts", "--out", file)
    assert code == 2
    assert "not a megatoken document" in err
    assert file.read_text() == "{}"


def test_an_earlier_file_of_more_tests_is_kept_and_one_of_the_same_tests_replaced(tmp_path: Path) -> None:
    file, older = tmp_path / "qualify.json", tmp_path / "qualify-older.json"
    call_here("qualify", "--tests", "facts", "--out", tmp_path)
    assert call_here("qualify", "--tests", "facts", "--out", tmp_path)[2] == ""
    assert {path.name for path in tmp_path.iterdir()} == {"qualify.json", "qualify.html"}
    one = json.loads(file.read_text())
    more = one | {"tests": [*one["tests"], one["tests"][0] | {"name": "memory"}]}
    file.write_text(json.dumps(more))
    code, _, err = call_here("qualify", "--tests", "facts", "--out", tmp_path)
    assert (code, len(err.splitlines())) == (0, 1)
    assert err.startswith(f"{older}: the earlier qualify.json, 2 tests; kept")
    assert json.loads(older.read_text()) == more
    assert older.with_suffix(".html").is_file() and len(json.loads(file.read_text())["tests"]) == 1


def test_ctrl_c_while_the_tests_are_loaded_prints_one_line(tmp_path: Path) -> None:
    with started("qualify", "--tests", "facts", "--out", tmp_path / "q.json", before=os.setsid) as process:
        deadline = monotonic() + TIMEOUT_SECONDS
        while not _loads(process.pid) and monotonic() < deadline:
            sleep(0.01)
        sleep(0.3)
        os.killpg(process.pid, signal.SIGINT)
        _, err = process.communicate(timeout=TIMEOUT_SECONDS)
    assert process.returncode == 130
    assert [line for line in err.splitlines() if line.startswith("megatoken: interrupted")] == err.splitlines()[-1:]
    assert "Traceback" not in err


def _loads(pid: int) -> bool:
    """Whether the server that loads PyTorch for the tests has been started."""
    with suppress(psutil.Error):  # a child that ends meanwhile
        children = psutil.Process(pid).children()
        return any("forkserver" in word for child in children for word in child.cmdline())
    return False


def test_ctrl_c_keeps_the_tests_that_ended(tmp_path: Path) -> None:
    file, older = tmp_path / "qualify.json", tmp_path / "qualify-older.json"
    call_here("qualify", "--tests", "facts", "--out", file)
    before = file.read_text()
    with started("qualify", "--full", "--out", file) as process:
        deadline = monotonic() + TIMEOUT_SECONDS
        while not (older.exists() and file.with_suffix(".html").exists()) and monotonic() < deadline:
            sleep(0.05)
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=TIMEOUT_SECONDS)
    assert process.returncode == 130
    assert older.read_text() == before and f"{older}: the earlier qualify.json, 1 test; kept" in err
    assert err.splitlines()[-1] == f"megatoken: interrupted; the tests that ended are in {file}"
    document = json.loads(file.read_text())
    assert document["tests"][0]["name"] == "facts"
    assert not document["complete"]
