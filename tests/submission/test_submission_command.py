"""``megatoken submission build`` and ``check``: what they print, and with which exit code they end."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from submission_trees import Make, all_runs, fill

from cli_support import call, call_here


@pytest.fixture
def command() -> Callable[..., tuple[int, str, str]]:
    return lambda *arguments: call_here("submission", *arguments)


def test_build_fill_check(originals: Make, command: Callable[..., tuple[int, str, str]], tmp_path: Path) -> None:
    tree = tmp_path / "tree"
    given = ("--submitter", "Vendor", "--division", "closed", "--round", "v5.1", "--out", tree, "--system", "sys")
    code, out, err = command("build", *all_runs(originals), *given)
    assert (code, err) == (0, "")
    *fields, count, last = out.splitlines()
    system = tree / "closed/Vendor/systems/sys.json"
    assert f'{system}:31: "cooling": "TO FILL: such as air, liquid"' in fields
    assert count == f"{len(fields)} fields to fill in; megatoken submission check refuses the tree until that is done"
    assert last == f"Submission of llama2-70b-99.9, Offline, Server, system sys: {tree}"

    code, out, err = command("check", tree)
    assert (code, err) == (3, "")
    assert "refused FILL Fields to fill in: closed/Vendor/systems/sys.json:4 and 9 more\n" in out
    assert "  found     10 left: status, host_processors_per_node, " in out
    assert "  fix       replace each by the value of your system or model\n" in out
    reasons = sum(line.startswith("refused ") for line in out.splitlines())
    assert reasons >= 4  # one more where the code has changes that no commit holds
    assert f"Refused by the rules of v5.1, the round of the seeds (change it with --round): {reasons} reasons\n" in out

    code, out, err = command("check", fill(tree), "--round", "v5.1")
    assert (code, err) == (0, "")
    assert out.splitlines()[-1] == "Accepted by the rules of v5.1"
    assert out.startswith("closed/Vendor sys/llama2-70b-99.9/Offline: ")


def test_documents(originals: Make, command: Callable[..., tuple[int, str, str]], tmp_path: Path) -> None:
    tree = tmp_path / "tree"
    given = ("--submitter", "Vendor", "--division", "open", "--round", "5.1", "--out", tree, "--system", "sys")
    code, out, _ = command("build", *all_runs(originals), *given, "--json")
    built = json.loads(out)
    assert (code, built["kind"], built["benchmark"], built["scenarios"]) == (
        *(0, "submission_build", "llama2-70b-99.9"),
        ["Offline", "Server"],
    )
    assert {"file", "line", "text"} == built["to_fill"][0].keys()
    code, out, _ = command("check", tree, "--json")
    document = json.loads(out)
    assert (code, document["kind"], document["round"], document["decision"]) == (
        3,
        "submission_check",
        "v5.1",
        "refused",
    )
    assert document["mlcommons_checker"] == "refuses"  # no status
    [status] = [item for item in document["refusals"] if item["check"] == "system.values"]
    assert status["where"] == [{"file": "open/Vendor/systems/sys.json", "line": 4}]
    assert (status["rule"], status["refused_by_mlcommons_checker"]) == ("S1", True)
    assert "check_system_desc_id" in status["source"] and status["fix"]


def test_each_refused_run_has_its_line(
    originals: Make, copies: Make, command: Callable[..., tuple[int, str, str]], tmp_path: Path
) -> None:
    first, second = copies("offline"), copies("offline", "accuracy")
    for run, verdict in ((first, "DEGRADED"), (second, "INTERRUPTED")):
        result = json.loads((run / "result.json").read_text())
        (run / "result.json").write_text(json.dumps({**result, "verdict": verdict}))
    given = ("--submitter", "V", "--division", "closed", "--round", "v5.1", "--out", tmp_path / "tree")
    code, out, err = command("build", first, second, originals("offline", "compliance"), *given)
    assert (code, out) == (2, "")
    lines = err.splitlines()
    assert [line.split(": ")[1] for line in lines] == [str(first), str(second)]
    assert "DEGRADED" in lines[0] and "INTERRUPTED" in lines[1]
    assert not (tmp_path / "tree").exists()


def test_what_is_no_submission(built: Callable[[str, str], Path], tmp_path: Path) -> None:
    for arguments, words in (
        (("check", tmp_path / "nothing"), "no such folder"),
        (("check", tmp_path), "no submission below it; expected closed/SUBMITTER/results/SYSTEM"),
        (("check", tmp_path, "--round", "v1.0"), "no submission below it"),
        (("check", built("v5.1", "closed"), "--round", "v1.0"), "--round v1.0: not a known MLPerf Inference round"),
        (("check", built("v5.1", "closed"), "--round", "v9"), "Inference round; known: v5.1, v6.0, v6.1\n"),
        (("check", tmp_path, "--rund", "v5.1"), "--rund: unknown flag; did you mean --round?"),
        (("build", tmp_path, "--submitter", "V"), "Missing option '--division'"),
    ):
        code, out, err = call_here("submission", *arguments)
        assert (code, out, err.count("\n")) == (2, "", 1)
        assert words in err


def test_a_real_round_refuses_what_was_cut_short(built: Callable[[str, str], Path], tmp_path: Path) -> None:
    """The same tree by the rules as they are, in a process that nothing was cut down in."""
    tree = shutil.copytree(built("v5.1", "closed"), tmp_path / "tree")
    code, out, err = call("submission", "check", tree, "--json")
    assert (code, err) == (3, "")
    refused = {item["rule"] for item in json.loads(out)["refusals"]}
    assert refused == {"P5", "P7", "P8 P9", "A2", "A6"}
