"""The files that client and server of mlcommons/power leave beside a run, for tests: true to the run they stand by."""

import hashlib
import json
from pathlib import Path
from typing import Any

from megatoken.audit.checks.power import HASHED
from megatoken.mlperf.rounds import rules


def write_session(performance: Path, phases: dict[str, list[list[float]]], **more: Any) -> None:
    """Fills ``performance``/power; the hashes are those of the files as they are now."""
    power = performance / "power"
    power.mkdir(exist_ok=True)
    for name in ("client.log", "server.log", "ptd_logs.txt"):
        (power / name).write_text(f"{name}\n")
    hashes = {name: hashlib.sha1((performance / name).read_bytes()).hexdigest() for name in HASHED}
    for end in ("client", "server"):
        session = {
            "version": 1,
            "timezone": 0,
            "modules": {},
            "sources": rules()["power_sources"][0],
            "messages": [],
            "uuid": {
                "client": "5a1b7d0e-0000-4000-8000-000000000001",
                "server": "5a1b7d0e-0000-4000-8000-000000000002",
            },
            "session_name": "20261120",
            "results": hashes,
            "phases": phases,
            **more,
        }
        (power / f"{end}.json").write_text(json.dumps(session, indent=1))
