"""Scores in fp32 on the CPU, which other formats are held against: ``python -m reference_model.baseline FOLDER``."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from reference_model import export

BASELINE = "baseline.json"
KEPT = ("kind", "schema_version", "metrics", "by_task", "gen_num", "gen_tok_len", "tokens_per_sample")


def measure(folder: Path) -> dict[str, Any]:
    """Answers the held-out set through ``megatoken run``; scores, and how and on what they were measured."""
    options = ("--mode", "accuracy", "--precision", "fp32", "--engine.device", "cpu")
    with tempfile.TemporaryDirectory() as out:
        prompts = folder / export.HELD_OUT
        run = _megatoken("run", "--model", str(folder), "--prompts", str(prompts), *options, "--out", out)
        scores = _megatoken("accuracy", run["run_folder"])
        environment = json.loads((Path(run["run_folder"]) / "environment.json").read_text())
    name = folder.resolve().name
    command = " ".join(("megatoken run --model", name, "--prompts", f"{name}/{export.HELD_OUT}", *options))
    return {
        **{key: scores[key] for key in KEPT},
        "references": export.HELD_OUT,
        "references_sha256": scores["references_sha256"],
        "weights": run["weights"],
        "precision": run["precision"],
        "command": f"{command}; megatoken accuracy RUN",
        "answered_at": run["ended_at"],
        "target": run["target"],
        "cpu": environment["cpu"],
        "packages": environment["packages"],
        "source": environment["source"],
    }


def _megatoken(*arguments: str) -> Any:
    command = [sys.executable, "-m", "megatoken", *arguments, "--json"]
    return json.loads(subprocess.run(command, stdout=subprocess.PIPE, check=True).stdout)


if __name__ == "__main__":
    given = Path(sys.argv[1])
    (given / BASELINE).write_text(json.dumps(measure(given), indent=1) + "\n")
