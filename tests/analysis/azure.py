"""The 18 published nodes behind 1,100,948.3 tokens/s, as node rows."""

import csv
from pathlib import Path

from megatoken.analysis.nodes import NodeRow

TABLE = Path(__file__).parents[1] / "data" / "azure_gb300_nodes.csv"


def azure_rows() -> list[NodeRow]:
    with TABLE.open() as file:
        rows = csv.DictReader(line for line in file if not line.startswith("#"))
        return [
            NodeRow(
                node=row["node"],
                output_tokens_per_second=float(row["tokens_per_second"]),
                duration_seconds=float(row["duration_seconds"]),
                samples=int(row["samples"]),
                accelerators=4,
                scenario="Offline",
                model="llama2-70b",
                verdict="VALID",
            )
            for row in rows
        ]
