"""What hashes of a model's files cost at the start of a run: runs with an empty and with a filled cache of hashes.

python benchmarks/start_hashing.py DIR [--turns 3] [--out FILE.json]
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from datetime import datetime
from pathlib import Path

from cpu_report import write_cpu_report
from megatoken.runs.identity import CACHE

KINDS = ("hashes read", "hashes known")


def main() -> int:
    """Run both kinds in turn; print the seconds from the start of the process to the start of the measurement."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", type=Path, help="checkpoint")
    parser.add_argument("--turns", type=int, default=3, help="runs of each kind")
    parser.add_argument("--out", type=Path, help="JSON file to write")
    options, flags = parser.parse_known_args()  # the others are flags of megatoken run
    caches = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "megatoken"
    seconds: dict[str, list[float]] = {kind: [] for kind in KINDS}
    cpu_seconds: dict[str, list[float]] = {kind: [] for kind in KINDS}
    with tempfile.TemporaryDirectory(prefix="start-hashing-") as name:
        folder = Path(name)
        (folder / "lengths.csv").write_text("input_tokens,output_tokens\n8,2\n")
        shutil.copytree(caches, folder / "cache" / "megatoken")  # the compiled kernels
        start(options.model, folder, flags)  # fills the cache of hashes, and the system's of files
        for turn in range(options.turns):
            for kind in KINDS if turn % 2 else reversed(KINDS):
                if kind == KINDS[0]:
                    (folder / "cache" / "megatoken" / CACHE).unlink()
                wall, cpu = start(options.model, folder, flags)
                seconds[kind].append(wall)
                cpu_seconds[kind].append(cpu)
                print(f"{kind}: {wall:.2f} s, {cpu:.2f} s of CPU time for the whole run", flush=True)
    read, known = (statistics.median(seconds[kind]) for kind in KINDS)
    print(f"median {read:.2f} s with hashes read, {known:.2f} s with hashes known: {100 * (read / known - 1):+.1f} %")
    if options.out:
        fields = {
            "bytes": sum(path.stat().st_size for path in options.model.iterdir()),
            "seconds": seconds,
            "cpu_seconds_of_the_whole_run": cpu_seconds,
            "added_share": read / known - 1,
        }
        write_cpu_report(options.out, "start_hashing.py", fields)
    return 0


def start(model: Path, folder: Path, flags: list[str]) -> tuple[float, float]:
    """Seconds from the start of the process to the start of the measurement, and CPU seconds of the whole run."""
    shutil.rmtree(folder / "runs", ignore_errors=True)
    work = ("--lengths", str(folder / "lengths.csv"), "--samples", "1", "--warm-up", "0", "--out", str(folder / "runs"))
    command = [sys.executable, "-m", "megatoken", "run", "--model", str(model), *work, "--json", *flags]
    environment = {**os.environ, "XDG_CACHE_HOME": str(folder / "cache")}
    began, before = time.time(), cpu_of_children()
    subprocess.run(command, check=True, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    (run,) = (folder / "runs").iterdir()
    started = json.loads((run / "result.json").read_text())["started_at"]
    return datetime.fromisoformat(started).timestamp() - began, cpu_of_children() - before


def cpu_of_children() -> float:
    """CPU seconds of the processes that have ended."""
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


if __name__ == "__main__":
    sys.exit(main())
