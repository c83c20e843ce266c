"""Descriptions of system, model and code, from the run folder; unknown values are marked to be filled in.

Keys: SYSTEM_DESC_REQUIRED_FIELDS and SYSTEM_IMP_REQUIRED_FILES of mlcommons/inference, tools/submission.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import yaml

from megatoken.engine.schemes import find_scheme
from megatoken.files import mapping
from megatoken.mlperf.benchmarks import benchmarks
from megatoken.mlperf.rounds import rules
from megatoken.mlperf.submission_layout import IMPLEMENTATION, TO_FILL
from megatoken.runs.run import Run

NONE = "N/A"  # for accelerators, on a CPU
_OF_ACCELERATORS = (
    *("accelerator_model_name", "accelerator_memory_capacity", "accelerator_memory_configuration"),
    *("accelerator_host_interconnect", "accelerator_interconnect"),
)


def to_fill(hint: str) -> str:
    """The placeholder of an unknown value."""
    return f"{TO_FILL}: {hint}"


def system_name(run: Run) -> str:
    """A folder name for the machine of a run: its accelerators, or processor and cores."""
    environment = run.environment
    accelerators = _accelerators(run)
    if accelerators:
        name = f"{len(accelerators)}x{accelerators[0].get('name') or 'GPU'}"
    else:
        cpu = environment.get("cpu") or {}
        name = f"{cpu.get('model') or environment.get('machine') or 'CPU'}-{cpu.get('usable_cores') or 'all'}cores"
    words = "".join(letter if letter.isalnum() or letter in ".-" else "_" for letter in name)
    return "_".join(filter(None, words.split("_")))


def same_system(one: Run, other: Run) -> bool:
    """Whether two runs have the same hardware and LoadGen version."""
    return _system(one) == _system(other)


def _system(run: Run) -> tuple[Any, ...]:
    cpu, memory = mapping(run.environment.get("cpu")), mapping(run.environment.get("memory"))
    gpus = [(gpu.get("name"), gpu.get("memory_bytes")) for gpu in run.environment.get("gpus") or []]
    total = round((memory.get("total_bytes") or 0) / 2**30)
    return cpu.get("model"), cpu.get("logical_cores"), total, gpus, run.result.get("loadgen_version")


def system_description(run: Run, *, submitter: str, division: str, benchmark: str, name: str) -> dict[str, Any]:
    """systems/<name>.json with every key that MLPerf requires.

    Unknown values are empty if the rules allow it, otherwise a placeholder that begins with TO_FILL.
    """
    kinds = benchmarks()[benchmark].required
    known = {
        "division": division,
        "submitter": submitter,
        "system_name": name,
        "number_of_nodes": str(len(run.result.get("nodes") or []) or 1),
        "system_type": next(iter(kinds)) if len(kinds) == 1 else None,
        **_host(run.environment),
        **_used_accelerators(run),
        **_software(run),
    }
    needed, hints = rules()["system_keys_not_empty"], rules()["system_hints"]
    keys: Sequence[str] = rules()["system_keys"]
    return {key: known.get(key) or (to_fill(hints.get(key, key)) if key in needed else "") for key in keys}


def model_description(run: Run) -> dict[str, Any]:
    """The JSON of the measurements: how the model was prepared."""
    random = is_random(run)
    precision = str(run.result.get("precision"))
    return {
        "input_data_types": "int32",  # token ids, as LoadGen and the engine count them
        "retraining": "no" if random else to_fill("yes or no: were the reference's weights trained further"),
        "starting_weights_filename": f"{run.result.get('model')}, {run.result.get('weights')}",
        "weight_data_types": precision,
        "weight_transformations": f"none: drawn at random in {precision}"
        if random
        else to_fill(f"how the reference's weights became {precision}, such as none, or scaled per tensor"),
    }


def is_random(run: Run) -> bool:
    """Whether the weights are random."""
    return run.result.get("random_weights") is True


def readme(run: Run, benchmark: str, scenario: str) -> str:
    """README.md of the measurements: how to repeat the run."""
    lines = [
        f"# {benchmark}, {scenario}",
        "",
        f"Run with {_version(run)} and MLPerf LoadGen {run.result.get('loadgen_version')}.",
        f"Model {run.result.get('model')}, weights {run.result.get('weights')}, {run.result.get('precision')}.",
        f"Data set {run.result.get('data_set')}, {run.result.get('data_set_rows')} rows, "
        f"SHA-256 {run.result.get('data_set_sha256')}.",
        "",
        *(f"- {note['message']}" for note in run.result.get("notes") or []),
        "",
        "To repeat it, write the following to config.yaml and run `megatoken run config.yaml`:",
        "",
        "```yaml",
        yaml.safe_dump(run.config, sort_keys=False).rstrip(),
        "```",
        "",
    ]
    return "\n".join(lines)


def code_readme(run: Run) -> str:
    """README.md in place of the code: where the code is."""
    source = run.environment.get("source") or {}
    revision = source.get("revision")
    lines = ["# Code", "", f"The system under test is {_version(run)}, https://github.com/megatoken/megatoken.", ""]
    if revision:
        lines.append(f"Revision {revision}.")
    if source.get("modified"):
        lines += ["", f"- {to_fill('the checkout was modified: publish the change and name it here')}"]
    return "\n".join(lines) + "\n"


def calibration(run: Run) -> str:
    """documentation/calibration.md: how the quantization was calibrated."""
    precision = str(run.result.get("precision"))
    scheme = find_scheme(precision)
    if scheme.weight_bytes == scheme.activation_bytes:
        text = f"No quantization: weights, activations and KV cache are {precision}, so nothing was calibrated."
    else:
        text = f"- {to_fill(f'how the scales of {precision} were found, and on which samples')}"
    return f"# Calibration\n\n{text}\n"


def _host(environment: Mapping[str, Any]) -> dict[str, Any]:
    cpu, total = mapping(environment.get("cpu")), mapping(environment.get("memory")).get("total_bytes")
    return {
        "host_processor_model_name": cpu.get("model"),
        "host_memory_capacity": f"{total / 2**30:.1f} GiB" if total else None,
        "operating_system": environment.get("operating_system"),
    }


def _accelerators(run: Run) -> list[Mapping[str, Any]]:
    """The GPUs of the machine, if the run used GPUs."""
    device = (run.result.get("target") or {}).get("device")
    return [] if device == "cpu" else list(run.environment.get("gpus") or [])


def _used_accelerators(run: Run) -> dict[str, Any]:
    """The GPUs of the run; their number is known only if the machine has one."""
    gpus = _accelerators(run)
    if not gpus:
        on_cpu = (run.result.get("target") or {}).get("device") == "cpu"
        return {"accelerators_per_node": "0", **dict.fromkeys(_OF_ACCELERATORS, NONE)} if on_cpu else {}
    first = gpus[0]
    memory, clock = first.get("memory_bytes"), first.get("max_clock_mhz")
    return {
        "accelerators_per_node": "1" if len(gpus) == 1 else None,
        "accelerator_model_name": first.get("name"),
        "accelerator_memory_capacity": f"{memory / 2**30:.1f} GiB" if memory else None,
        "accelerator_frequency": f"{clock} MHz at most" if clock else None,
        "hw_notes": f"power limit {first['power_limit_watts']:g} W" if first.get("power_limit_watts") else None,
    }


def _software(run: Run) -> dict[str, Any]:
    environment = run.environment
    packages = {name: version for name, version in (environment.get("packages") or {}).items() if version}
    drivers = {str(gpu["driver_version"]) for gpu in _accelerators(run) if gpu.get("driver_version")}
    parts = [environment.get("python"), *(f"{name} {version}" for name, version in packages.items())]
    parts += [f"driver {driver}" for driver in sorted(drivers)]
    torch = packages.get("torch")
    revision = (environment.get("source") or {}).get("revision")
    return {
        "framework": ", ".join(filter(None, (_version(run), f"PyTorch {torch}" if torch else None))),
        "other_software_stack": ", ".join([*filter(None, parts), environment.get("kernel") or ""]).strip(", "),
        "sw_notes": f"{IMPLEMENTATION} revision {revision}" if revision else None,
    }


def _version(run: Run) -> str:
    version = (run.environment.get("packages") or {}).get("megatoken")
    return f"{IMPLEMENTATION} {version}" if version else IMPLEMENTATION
