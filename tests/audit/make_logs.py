"""How tests/audit/logs/genuine.tar.xz was made; run by hand, see the README beside it."""

import os
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

from genuine import CONFIGURATION

FILES = ("mlperf_log_detail.txt", "mlperf_log_summary.txt", "mlperf_log_accuracy.json", "user.conf")


def main(wheels: Path, out: Path) -> None:
    with tempfile.TemporaryDirectory() as scratch, tarfile.open(out, "w:xz") as archive:
        for wheel in sorted(wheels.iterdir()):
            for scenario in ("Offline", "Server", "SingleStream"):
                for mode in ("PerformanceOnly", "AccuracyOnly"):
                    for model in ("llama2-70b", "bert"):
                        name = f"{wheel.name}/{scenario}-{mode}-{model}"
                        folder = Path(scratch, name)
                        script = str(Path(__file__).with_name("genuine.py"))
                        command = [sys.executable, script, str(folder), scenario, mode, model, "64", CONFIGURATION]
                        subprocess.run(command, check=True, env={**os.environ, "PYTHONPATH": str(wheel)}, timeout=120)
                        for file in FILES:
                            archive.add(folder / file, f"{name}/{file}")


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
