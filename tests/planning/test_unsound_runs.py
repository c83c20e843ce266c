"""Plans from runs that prove nothing: the label next to each number says so, not only a note at the end."""

import json
from pathlib import Path

import pytest

from cli_support import call_here
from run_folders import run_folder


def ended(out: Path, name: str, verdict: str) -> Path:
    """A run folder that ended so."""
    folder = run_folder(out, name, "host", "2026-11-20T10:00:00+00:00").path
    result = json.loads((folder / "result.json").read_text())
    (folder / "result.json").write_text(json.dumps({**result, "verdict": verdict}))
    return folder


PLANS = (
    ("capacity",),
    ("cost", "--watts", 100, "--accelerators", 1),
    ("energy", "--watts", 100, "--accelerators", 1),
    ("fleet", "--demand", 1, "--profile", "rag", "--accelerators", 1),
    (
        "buy",
        "--seats",
        10,
        "--profile",
        "rag",
        "--accelerators",
        1,
        "--accelerator",
        "GB300",
        "--accelerators-per-node",
        1,
    ),
)


@pytest.mark.parametrize(("verdict", "label"), [("INVALID", "invalid run"), ("INTERRUPTED", "interrupted run")])
@pytest.mark.parametrize("plan", PLANS, ids=lambda plan: plan[0])
def test_every_number_of_an_unsound_run_is_labelled_with_it(tmp_path, plan, verdict, label):
    name, *flags = plan
    code, out, _ = call_here("plan", name, ended(tmp_path, "bad", verdict), *flags)
    first_screen = out.split("Results")[0]
    assert code == 0 and label in first_screen and "measured" not in first_screen
    code, out, _ = call_here("plan", name, ended(tmp_path, "good", "MEASURED"), *flags)
    assert code == 0 and label not in out


def test_one_invalid_repeat_is_enough_and_no_user_can_give_that_state(tmp_path):
    ended(tmp_path / "runs", "000", "MEASURED"), ended(tmp_path / "runs", "001", "INVALID")
    _, out, _ = call_here("plan", "capacity", tmp_path / "runs", "--json")
    rate = next(one for one in json.loads(out)["inputs"] if one["name"] == "rate")
    assert rate["state"] == "invalid run"
    number = ("--tokens-per-second", 100, "--per", "node", "--state", "invalid run")
    code, _, err = call_here("plan", "capacity", *number)
    assert code == 2 and "expected one of assumed, nameplate" in err
