"""Real run folders of a few samples, whose every number is known."""

from pathlib import Path
from typing import Any

from megatoken.analysis.summary import summarise_run
from megatoken.runs.run import Run, read_run
from megatoken.runs.tables import SampleRow
from megatoken.runs.writer import RunFolder


def run_folder(
    out: Path, name: str, host: str, started_at: str, tokens: int = 11, seconds: float = 10.0, **facts: Any
) -> Run:
    """A run of ten samples that all ended after so many seconds, with what ``result.json`` is to say besides."""
    folder = RunFolder.create(
        out,
        name,
        {"engine": {"device": "cpu"}},
        {"hostname": host},
        scenario="offline",
        summarise=summarise_run,
        facts={"model": "tiny", "precision": "bf16", "started_at": started_at, **facts},
    )
    folder.add_samples([SampleRow(i, i, 0.0, 0.0, 1.0, seconds, 5, tokens, "length", host) for i in range(10)])
    folder.finish({"verdict": "MEASURED", "reasons": []})
    return read_run(folder.path)
