"""How src/megatoken/data/loadgen_builds.json was made; run by hand when LoadGen is released, not by the tests.

    for v in 4.1.22 ... 6.0.17; do pip install --no-deps --only-binary :all: --target W/$v mlcommons-loadgen==$v; done
    python tests/audit/make_loadgen_builds.py W src/megatoken/data/loadgen_builds.json

Each wheel runs every scenario and mode, with and without token latencies, and its own log says the commit it was built
from, the SHA-1 of each source file, and the source line that wrote each entry. For two versions the SHA-1s were also
computed from the source distributions: 33 of the 41 files are in those of 5.1.2 and 6.0.17, and all 66 agree.
"""

import json
import os
import subprocess
import sys
import tempfile
from collections import defaultdict
from pathlib import Path
from typing import Any

from genuine import CONFIGURATION

# From the published logs of the Azure ND GB300 v6 runs; compared with that commit of mlcommons/inference.
AZURE_COMMIT = {"version": "5.1.0", "commit": "47b91b979c", "commit_date": "2025-07-31", "seeds": "1780908523862526354"}


def log_entries(wheel: Path, scenario: str, mode: str, model: str) -> list[dict[str, Any]]:
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, str(Path(__file__).with_name("genuine.py")), folder, scenario, mode, model, "64"]
        environment = {**os.environ, "PYTHONPATH": str(wheel)}
        subprocess.run([*command, CONFIGURATION], check=True, env=environment, timeout=120)
        lines = (Path(folder) / "mlperf_log_detail.txt").read_text().splitlines()
        return [json.loads(line.removeprefix(":::MLLOG ")) for line in lines]


def value(entries: list[dict[str, Any]], key: str) -> Any:
    return next(entry["value"] for entry in entries if entry["key"] == key)


def number(version: str) -> list[int]:
    return [int(part) for part in version.split(".")]


def main(wheels: Path, out: Path) -> None:
    builds: list[dict[str, Any]] = []
    files: dict[str, dict[str, str]] = {}
    source_lines: dict[str, dict[str, set[int]]] = defaultdict(lambda: defaultdict(set))
    done: set[tuple[str, ...]] = set()
    for wheel in sorted((path for path in wheels.iterdir() if path.is_dir()), key=lambda path: number(path.name)):
        entries = log_entries(wheel, "Offline", "PerformanceOnly", "llama2-70b")
        version, commit = value(entries, "loadgen_version").split(" @ ")
        hashes = value(entries, "loadgen_file_sha1")
        builds.append(
            {
                "version": version,
                "commit": commit,
                "commit_date": value(entries, "loadgen_git_commit_date"),
                "seeds": str(value(entries, "effective_qsl_rng_seed")),
            }
        )
        files[commit] = hashes
        sources = tuple(hashes[name] for name in sorted(hashes) if name.endswith((".cc", ".h")) and "conf" not in name)
        if sources in done:
            continue
        done.add(sources)
        for scenario in ("Offline", "Server", "SingleStream", "MultiStream"):
            for mode in ("PerformanceOnly", "AccuracyOnly"):
                for model in ("llama2-70b", "bert"):
                    for entry in log_entries(wheel, scenario, mode, model):
                        name = entry["metadata"]["file"]
                        if not entry["key"].startswith(("error_", "warning_")):
                            source_lines[f"{name} {hashes['/' + name]}"][entry["key"]].add(entry["metadata"]["line_no"])
    base = next(build["commit"] for build in builds if build["version"] == "5.1.0")
    for build in builds:
        mine = files[build["commit"]]
        build["differs"] = {
            name: mine.get(name) for name in sorted(mine | files[base]) if mine.get(name) != files[base].get(name)
        }
    azure = {
        "/mlperf.conf": files["1bc3e998cb"]["/mlperf.conf"],
        "/mlperf_conf.h": files["1bc3e998cb"]["/mlperf_conf.h"],
    }
    builds.append({**AZURE_COMMIT, "differs": azure})
    lines = {name: {key: sorted(lines[key]) for key in sorted(lines)} for name, lines in sorted(source_lines.items())}
    document = {
        "source": ["logs of the wheels of mlcommons-loadgen on PyPI; see tests/audit/make_loadgen_builds.py"],
        "base": files[base],
        "builds": builds,
        "source_lines": lines,
    }
    out.write_text("{\n" + ",\n".join(f"{json.dumps(key)}: {rows(value)}" for key, value in document.items()) + "\n}\n")


def rows(value: Any) -> str:
    """JSON with one line for each item."""
    if isinstance(value, list):
        return "[\n" + ",\n".join(json.dumps(item) for item in value) + "\n]"
    return "{\n" + ",\n".join(f"{json.dumps(key)}: {json.dumps(item)}" for key, item in value.items()) + "\n}"


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
