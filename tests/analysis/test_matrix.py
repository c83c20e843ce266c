"""What ran where: the fastest finished run of each model on each target, and what was never run."""

import json
from pathlib import Path

from cli_support import call_here
from megatoken.analysis.history import matrix
from megatoken.runs.run import read_run
from run_folders import run_folder

WHEN = "2026-01-01T00:00:00Z"


def test_the_best_finished_run_of_each_model_on_each_target(tmp_path: Path) -> None:
    runs = [
        run_folder(tmp_path, name, host, WHEN, seconds=seconds, model=model)
        for name, host, seconds, model in (
            ("a1", "alpha", 20.0, "tiny"),
            ("a2", "alpha", 10.0, "tiny"),
            ("a3", "alpha", 5.0, "tiny"),
            ("b1", "beta", 40.0, "large"),
        )
    ]
    fastest = runs[2].path / "result.json"
    fastest.write_text(json.dumps(json.loads(fastest.read_text()) | {"verdict": "INTERRUPTED"}))
    found = matrix([read_run(run.path) for run in runs])
    tiny, large = ("tiny", "bf16", "offline"), ("large", "bf16", "offline")
    alpha, beta = "engine on the CPU of alpha", "engine on the CPU of beta"
    assert (found.works, found.targets) == ((large, tiny), (alpha, beta))
    assert {place: (cell.best.path.name, cell.runs) for place, cell in found.cells.items()} == {
        (tiny, alpha): ("a2", 3),
        (large, beta): ("b1", 1),
    }
    code, out, err = call_here("report", tmp_path, "--matrix", "--out", tmp_path / "matrix.html")
    assert (code, err) == (0, "") and out.count("not run") == 2 and "11 tokens/s" in out
    assert (tmp_path / "matrix.html").read_text().count("not run") == 2
    assert call_here("report", tmp_path, "--matrix", "--csv")[0] == 2
