"""Evidence as an audit of the 18 published nodes reads it: their figures, system description and configuration."""

import csv
from dataclasses import replace
from pathlib import Path
from typing import Any

from megatoken.audit.evidence import Configuration, Evidence, Role, Run, System
from megatoken.mlperf.run_figures import RunFigures

TABLE = Path(__file__).parent / "data" / "azure_gb300_nodes.csv"
EXAMPLES = Path(__file__).parents[1] / "examples" / "claims"
SYSTEM = {
    "accelerator_memory_capacity": "288 GB",
    "accelerator_model_name": "NVIDIA GB300",
    "accelerators_per_node": 4,
    "division": "closed",
    "framework": "TensorRT 1.2.0rc1, CUDA 13.0",
    "host_memory_capacity": "960 GB",
    "host_storage_capacity": "for each 4-GPU node: 2 TB SSD, 5 TB CIFS",
    "hw_notes": "GB300 TGP 1400W",
    "number_of_nodes": 18,
    "sw_notes": "Unofficial Submission",
}
CONFIGURATION = {
    "precision": "fp4",
    "kv_cache_dtype": "fp8",
    "tensor_parallelism": 1,
    "pipeline_parallelism": 1,
    "offline_expected_qps": 400,
}


def lines(values: dict[str, Any]) -> dict[str, int]:
    return {key: number for number, key in enumerate(values, 2)}


def azure_run(row: dict[str, str], **figures: Any) -> Run:
    folder = f"results/ND_GB300_v6_{row['node']}/llama2-70b-99/Offline"
    latencies = {name: float(row[name]) for name in ("min", "mean", "p50", "p90", "p99", "p99.9")}
    latencies |= {"p95": float(row["p90"]) * 0.6 + float(row["p99"]) * 0.4, "max": float(row["duration_seconds"])}
    latencies["p97"] = (latencies["p95"] + latencies["p99"]) / 2
    return Run(
        path=folder,
        role=Role.PERFORMANCE,
        node=f"ND_GB300_v6_{row['node']}",
        benchmark="llama2-70b-99",
        folder_scenario="Offline",
        division=None,
        submitter=None,
        system="systems/ND_GB300_v6.json",
        figures=replace(
            RunFigures(
                scenario="Offline",
                mode="PerformanceOnly",
                validity="VALID",
                round="v5.1",
                output_tokens_per_second=float(row["tokens_per_second"]),
                samples_per_second=float(row["samples_per_second"]),
                tokens_per_sample=float(row["tokens_per_sample"]),
                samples_issued=int(row["samples"]),
                samples_requested=int(row["samples_requested"]),
                data_set_rows=24576,
                target_qps=float(row["target_qps"]),
                min_duration_seconds=2400.0,
                duration_seconds=float(row["duration_seconds"]),
                latency_seconds=latencies,
                errors=0,
            ),
            **figures,
        ),
        detail=f"{folder}/mlperf_log_detail.txt",
        summary=f"{folder}/mlperf_log_summary.txt",
        accuracy=f"{folder}/mlperf_log_accuracy.json",
        accuracy_records=0,
        source_lines={"result_tokens_per_second": 80, "effective_target_qps": 43},
    )


def azure_evidence(nodes: int = 18, **figures: Any) -> Evidence:
    with TABLE.open() as file:
        rows = list(csv.DictReader(line for line in file if not line.startswith("#")))
    return Evidence(
        root="azure",
        kind="nodes" if nodes > 1 else "run",
        round="v5.1",
        runs=tuple(azure_run(row, **figures) for row in rows[:nodes]),
        systems=(System("systems/ND_GB300_v6.json", SYSTEM, lines(SYSTEM)),),
        configurations=(Configuration("configs/llama2-70b-offline.json", CONFIGURATION, lines(CONFIGURATION)),),
    )
