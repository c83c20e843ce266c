"""docs/: every flag that a command has, and every field that a run writes, is documented."""

import json
import re
import shlex
import sys
from collections.abc import Iterator
from pathlib import Path
from string import Formatter
from typing import Any

import pytest
from typer.main import get_command

from cli_support import call_here, make_checkpoint
from megatoken.audit import audit as _audit  # noqa: F401 # defines all checks
from megatoken.audit.finding import CHECKS, FAMILIES
from megatoken.cli.application import app
from megatoken.config import FLAG_ALIASES, KEYS
from megatoken.runs.reasons import REASONS, TEMPLATES
from megatoken.serve.options import KEYS as SERVE_KEYS
from stated_fields import fields, unstated_fields

DOCS = Path(__file__).parents[1] / "docs"
sys.path.insert(0, str(Path(__file__).parent / "harness"))
SHARED = {
    "check",
    "audit",
    "aggregate",
    "compare",
    "plan",
}  # result documents, whose two flags have a section of their own


def commands() -> dict[str, set[str]]:
    """Flags of every command, by its first word; those that every one has are left out."""
    found: dict[str, set[str]] = {}

    def walk(command: Any, words: tuple[str, ...]) -> None:
        for name, inner in getattr(command, "commands", {}).items():
            walk(inner, (*words, name))
        if words:
            flags = {flag for option in command.params for flag in option.opts if flag.startswith("--")}
            flags |= {f"--{key}" for key in getattr(command, "first", ())}
            found.setdefault(words[0], set()).update(flags - {"--help"})

    walk(get_command(app), ())
    return found


def test_a_short_flag_shows_the_help_of_every_command_and_no_summary_is_cut() -> None:
    def walk(command: Any, words: tuple[str, ...]) -> None:
        code, out, err = call_here(*words, "-h")
        assert (code, err) == (0, "") and out.startswith(f"Usage: megatoken {' '.join(words)}".rstrip()), words
        inner = getattr(command, "commands", {})
        if inner:
            assert "..." not in out.partition("Commands:")[2], words
        for name in inner:
            walk(inner[name], (*words, name))

    walk(get_command(app), ())


def section(command: str) -> str:
    text = (DOCS / "commands.md").read_text()
    return re.split(r"^## ", text.partition(f"\n## `megatoken {command}`\n")[2], maxsplit=1, flags=re.MULTILINE)[0]


@pytest.mark.parametrize("command", commands())
def test_every_flag_of_a_command_is_in_its_section(command: str) -> None:
    documented = section(command)
    assert documented
    if command in SHARED:
        documented += (DOCS / "commands.md").read_text().partition("\n## Result documents\n")[2].partition("\n## ")[0]
    assert {flag for flag in commands()[command] if not re.search(rf"{re.escape(flag)}\b", documented)} == set()


def test_every_key_of_the_configuration_is_told() -> None:
    documented = section("run")
    assert {key for key in KEYS if f"`{key}`" not in documented} == set()
    assert {alias for alias in FLAG_ALIASES if f"`--{alias.replace('_', '-')}`" not in documented} == set()


def test_every_key_of_the_server_is_in_its_section() -> None:
    stated = section("serve")
    assert {key for key in SERVE_KEYS if f"`{key}`" not in stated and not key.startswith("engine.")} - {
        key for key in ("model", "random_weights", "precision") if f"`--{key.replace('_', '-')}" in stated
    } == set()


def tables(text: str) -> Iterator[list[list[str]]]:
    """Cells of every table, the head first."""
    for table in re.findall(r"(?:^\|.*\|\n)+", text, flags=re.MULTILINE):
        yield [[cell.strip() for cell in line.strip("|").split(" | ")] for line in table.splitlines()]


def test_every_reason_code_is_told_with_what_to_do() -> None:
    documented = set()
    for page in ("commands.md", "scenarios.md"):
        for head, _, *rows in tables((DOCS / page).read_text()):
            if head[0] == "code" and head[-1].rstrip(" |") == "what to do":
                documented |= {
                    code for row in rows if row[-1].rstrip(" |") for code in re.findall("`([A-Z_]+)`", row[0])
                }
    assert documented == set(REASONS)


def test_every_code_is_listed_with_its_fields() -> None:
    listed = {}
    for head, _, *rows in tables((DOCS / "run-folder.md").read_text()):
        if [cell.rstrip(" |") for cell in head] == ["code", "fields"]:
            listed |= {row[0].strip("`"): set(re.findall("`([a-z_]+)`", row[-1])) for row in rows}
    formatter = Formatter()
    assert listed == {
        code: {name for template in templates for _, name, _, _ in formatter.parse(template) if name}
        for code, templates in TEMPLATES.items()
    }


def test_every_family_of_checks_and_every_check_of_a_run_folder_is_listed() -> None:
    listed: dict[str, set[str]] = {"ids": set(), "id": set()}
    for head, _, *rows in tables((DOCS / "audit.md").read_text()):
        if head[0] in listed:
            listed[head[0]] |= {name for row in rows for name in re.findall(r"`([a-z_.*]+)`", row[0])}
    of_run_folders = {"accuracy.recomputed", "compliance.recomputed", "compliance.end_tokens"}
    assert listed["ids"] == {f"{family}.*" for family in FAMILIES}
    assert listed["id"] == {id_ for id_ in CHECKS if id_.startswith("run_folder.")} | of_run_folders
    assert of_run_folders <= CHECKS.keys()


def shown(page: str, command: str) -> list[tuple[str, list[str]]]:
    """The commands of that name on a page, each with the lines of its output that the page shows."""
    text = (DOCS / page).read_text()
    blocks = "".join(re.findall(r"```console\n(.*?)```", text, flags=re.DOTALL))
    parts = [part.splitlines() for part in blocks.split("$ megatoken ")]
    return [(head, [line for line in lines if line != "..."]) for head, *lines in parts if head.startswith(command)]


@pytest.mark.parametrize("command", ["audit", "plan"])
def test_the_tutorial_shows_what_the_commands_print(command: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(DOCS.parent)
    examples = shown("tutorial.md", command)
    assert examples
    for typed, lines in examples:
        _, out, err = call_here(*shlex.split(typed))
        assert err == ""
        printed = iter([line.rstrip() for line in out.splitlines()])
        assert [line for line in lines if line not in printed] == [], typed  # in this order


def queueing_runs(folder: Path) -> Iterator[dict[str, Any]]:
    """Server and SingleStream against a queue."""
    from queueing import QueueingTarget

    from megatoken.config import RunConfig
    from megatoken.datasets.lengths import load_lengths
    from megatoken.harness.progress import Progress
    from megatoken.harness.run import run_scenario
    from megatoken.runs.run import read_run

    lengths = folder / "lengths.csv"
    lengths.write_text("input_tokens,output_tokens\n" + "".join(f"{20 + i},2\n" for i in range(40)))
    data_set = load_lengths(lengths, vocabulary_size=100, max_length=1000)
    for settings in (
        {"scenario": "server", "rate": 300.0, "samples": 460},
        {"scenario": "singlestream", "samples": 2},
    ):
        config = RunConfig(out=folder / "runs", warm_up_seconds=0.05, **settings)
        path = run_scenario(config, data_set, QueueingTarget(4, 0.02), {"model": "queue"}, Progress(quiet=True))
        yield read_run(path).result


def test_every_field_that_a_run_writes_is_told(tmp_path: Path) -> None:
    """Those of a search and of an accuracy run are looked up where one is made anyway."""
    model, prompts = make_checkpoint(tmp_path / "model"), tmp_path / "prompts.jsonl"
    prompts.write_text("".join(json.dumps({"prompt": "a" * (3 + i), "max_tokens": 4}) + "\n" for i in range(5)))
    written = [*queueing_runs(tmp_path)]
    shared = ("--warm-up", 0.1, "--engine.threads", 1, "--precision", "fp32", "--json", "--out", tmp_path / "runs")
    for flags in (
        ("--model", model, "--prompts", prompts, "--text", "--samples", 5),
        ("--model", model, "--prompts", prompts, "--compliance", "TEST06"),
    ):
        code, out, err = call_here("run", *flags, *shared)
        assert code in (0, 3), err
        written.append(json.loads(out))
    assert {"compliance", "latency_verdict", "output_characters"} <= set().union(*map(fields, written))
    assert [unstated_fields(result) for result in written] == [set()] * len(written)
