"""The JSON file of a benchmark on a CPU."""

from __future__ import annotations

import json
import shlex
import sys
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from megatoken.hardware.inventory import take_inventory


def write_cpu_report(path: Path, script: str, fields: Mapping[str, Any]) -> None:
    """Write ``fields`` with date, command, machine and source revision."""
    inventory = take_inventory()
    document = {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": shlex.join([f"benchmarks/{script}", *sys.argv[1:]]),
        **fields,
        "machine": {key: inventory[key] for key in ("cpu", "memory", "kernel")},
        "source": inventory["source"],
    }
    path.write_text(json.dumps(document, indent=1) + "\n")
