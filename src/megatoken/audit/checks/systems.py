"""System descriptions and configurations: complete, without contradiction, and true to what is known of the parts."""

from __future__ import annotations

import csv
import re
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from importlib.resources import files

from megatoken.audit.evidence import Configuration, Run, System, Where
from megatoken.audit.finding import Observation, Severity, shown
from megatoken.audit.view import observe
from megatoken.mlperf.rounds import rules

GB_PER_UNIT = {"TB": 1000.0, "TIB": 1099.511627776, "GB": 1.0, "GIB": 1.073741824, "MB": 1e-3, "MIB": 1.048576e-3}
MEMORY_TOLERANCE = 0.075  # 80 GB is sold for 80 GiB and the other way round
_SIZE = re.compile(r"(\d[\d,]{0,12}(?:\.\d{1,9})?)\s{0,3}(TiB|GiB|MiB|TB|GB|MB)\b", re.IGNORECASE)
_WATTS = re.compile(r"\b(?:TGP|TDP)\D{0,20}?(\d{3,4})\s{0,3}W\b|\b(\d{3,4})\s{0,3}W\s{0,3}(?:TGP|TDP)\b", re.IGNORECASE)
_SOFTWARE = re.compile(
    r"\b(TensorRT[ -]?LLM|TensorRT|CUDA|cuDNN|driver|vLLM|PyTorch|ROCm|NCCL)[ :=v]{1,3}"
    r"(\d+(?:\.\d+)+(?:[.]?(?:rc|dev|post)\d*)?)",
    re.IGNORECASE,
)


def check_system(system: System, submission: bool) -> Iterator[Observation]:
    """One description; what only a submission must have weighs only in one."""
    unmet = Severity.FAIL if submission else Severity.NOTE
    missing = [key for key in rules()["system_keys"] if key not in system.values]
    empty = [key for key in rules()["system_keys_not_empty"] if key in system.values and not _filled(system, key)]
    yield observe(
        "system.keys",
        not missing and not empty,
        "every key that MLPerf asks for, and a value where it asks for one",
        shown("; ".join(filter(None, (_list("missing", missing), _list("empty", empty))))) or "all keys",
        (system.where(), *(system.where(key) for key in empty)),
        unmet,
    )
    for key, allowed in (("status", rules()["system_status"]), ("system_type", rules()["system_types"])):
        if _filled(system, key):
            value = system.values[key]
            yield observe(
                "system.values",
                (str(value).lower() if key == "status" else value) in allowed,  # MLCommons' checker lowers the one
                f"{key}: one of {', '.join(allowed)}",
                shown(value),
                (system.where(key),),
                unmet,
            )
    name = system.values.get("system_name")
    if isinstance(name, str) and name != name.strip():
        found = f"system_name {shown(repr(name))}"
        yield observe(
            "system.name",
            False,
            "a name without blanks around it",
            found,
            (system.where("system_name"),),
            Severity.NOTE,
        )
    yield from _part(system)
    yield from _memory(system)
    yield from _software(system)


def check_configurations(configurations: Sequence[Configuration], runs: Sequence[Run]) -> Iterator[Observation]:
    """What a published configuration says against what the logs say, and how the model was spread over GPUs."""
    for configuration in configurations:
        yield from _sizing(configuration, runs)
        tensor = configuration.values.get("tensor_parallelism")
        pipeline = configuration.values.get("pipeline_parallelism", 1)
        if isinstance(tensor, int) and isinstance(pipeline, int):
            size = tensor * pipeline
            found = f"tensor parallelism {tensor}, pipeline parallelism {pipeline}: "
            found += (
                "one GPU per copy of the model, no traffic between GPUs"
                if size == 1
                else f"{size} GPUs per copy of the model"
            )
            where = (configuration.where("tensor_parallelism"), configuration.where("pipeline_parallelism"))
            yield Observation(
                "configuration.parallelism", Severity.NOTE, "how many GPUs hold one copy of the model", found, where
            )


def _sizing(configuration: Configuration, runs: Sequence[Run]) -> Iterator[Observation]:
    if configuration.path.rpartition("/")[2] == "user.conf":
        return  # held against the log of each run, with its other settings
    for key, scenario in (("offline_expected_qps", "Offline"), ("server_target_qps", "Server")):
        wanted = configuration.values.get(key)
        mine = [run for run in runs if run.figures.scenario == scenario and _beside(configuration, run)]
        rates = sorted({run.figures.target_qps for run in mine if run.figures.target_qps is not None})
        if isinstance(wanted, bool) or not isinstance(wanted, int | float) or not rates:
            continue
        differing = [run for run in mine if abs((run.figures.target_qps or 0) - wanted) > 1e-5 * abs(wanted)]
        yield observe(
            "configuration.rate",
            not differing,
            f"{key} {wanted:g} samples/s as configured",
            f"runs with {', '.join(f'{rate:g}' for rate in rates[:10])} samples/s",
            (configuration.where(key), *(run.where("effective_target_qps") for run in differing[:20])),
            Severity.WARN,
        )


def _beside(configuration: Configuration, run: Run) -> bool:
    """A file below configs speaks for all runs of what holds that folder."""
    folder = configuration.path.rpartition("/")[0].partition("configs")[0].rstrip("/")
    return not folder or run.path == folder or run.path.startswith(f"{folder}/")


@cache
def parts() -> tuple[Mapping[str, str], ...]:
    """``gpu_specs.csv``: one row a GPU."""
    text = files("megatoken").joinpath("data", "gpu_specs.csv").read_text(encoding="utf-8")
    lines = [line for line in text.splitlines() if not line.startswith("#")]
    return tuple(csv.DictReader(lines))


def part_named(name: str) -> Mapping[str, str] | None:
    """The GPU that a free text names: the longest model name that stands in it as a word."""
    found = [row for row in parts() if re.search(rf"(?<![A-Za-z0-9]){re.escape(row['gpu'])}(?![0-9])", name)]
    return max(found, key=lambda row: len(row["gpu"]), default=None)


def _part(system: System) -> Iterator[Observation]:
    part = part_named(system.accelerator or "")
    if part is None:
        found = f"{shown(system.accelerator or 'no accelerator')}: no facts of this part are shipped"
        yield observe("system.part_memory", None, "the part's memory", found, (system.where("accelerator_model_name"),))
        return
    memory = _first_gb(system.values.get("accelerator_memory_capacity"))
    expected_gb = float(part["hbm_gb"])
    where = (system.where("accelerator_memory_capacity"), system.where("accelerator_model_name"))
    found = shown(system.values.get("accelerator_memory_capacity"))
    fits = memory is not None and (_near(memory, expected_gb) or f"{memory:g}GB" in (system.accelerator or ""))
    if memory is not None and not fits:
        alike = [row["gpu"] for row in parts() if _near(memory, float(row["hbm_gb"]))]
        found += f", which {' or '.join(alike)} has" if alike else ""
    yield observe(
        "system.part_memory",
        fits if memory is not None else None,
        f"{part['gpu']}: {expected_gb:g} GB",
        found,
        where,
        Severity.WARN,
    )
    for key in ("hw_notes", "accelerator_model_name", "accelerator_frequency", "power_management"):
        match = _WATTS.search(str(system.values.get(key, "")))
        if match:
            watts = float(match.group(1) or match.group(2))
            yield observe(
                "system.part_power",
                abs(watts - float(part["tdp_w"])) < 1,
                f"{part['gpu']}: {part['tdp_w']} W",
                f"{watts:g} W",
                (system.where(key),),
                Severity.NOTE,  # a power limit below the part's is a setting, not an error
            )


def _memory(system: System) -> Iterator[Observation]:
    """Host memory stands in two fields; both should mean the same amount."""
    keys = ("host_memory_capacity", "host_memory_configuration")
    one, other = (_first_gb(system.values.get(key)) for key in keys)
    multiple = re.match(r"\s*(\d{1,3})\s*[x×]", str(system.values.get(keys[1], "")))
    if one is None or other is None:
        return
    total = other * (int(multiple.group(1)) if multiple else 1)
    yield observe(
        "system.host_memory",
        _near(one, total) or _near(one, other),
        "one amount of host memory",
        shown("; ".join(f"{key}: {system.values[key]}" for key in keys)),
        tuple(system.where(key) for key in keys),
        Severity.WARN if not multiple else Severity.NOTE,
    )


def versions_in(text: str) -> Iterator[tuple[str, str, int]]:
    """Software named with a version: name in lower case, version, position."""
    for found in _SOFTWARE.finditer(text):
        yield re.sub(r"[ -]", "-", found.group(1).lower()), found.group(2), found.start()


def _software(system: System) -> Iterator[Observation]:
    """One description names each version once, or alike."""
    said: dict[str, dict[str, str]] = {}
    for key in ("framework", "other_software_stack", "sw_notes", "operating_system"):
        for name, version, _ in versions_in(str(system.values.get(key, ""))):
            said.setdefault(name, {}).setdefault(version, key)
    for name, versions in said.items():
        distinct = [a for a in versions if not any(b != a and b.startswith(f"{a}.") for b in versions)]
        if len(distinct) > 1:
            yield observe(
                "system.software",
                False,
                f"one version of {name}",
                shown(", ".join(f"{version} ({key})" for version, key in versions.items())),
                tuple(system.where(key) for key in versions.values()),
                Severity.WARN,
            )
    if said and all(len(versions) == 1 for versions in said.values()):
        found = ", ".join(f"{name} {next(iter(versions))}" for name, versions in said.items())
        yield observe("system.software", True, "no version that contradicts another", shown(found), (system.where(),))


def check_versions_elsewhere(systems: Sequence[System], texts: Mapping[str, str]) -> Iterator[Observation]:
    """README files and notes against the system descriptions: the same software in one version.

    Args:
        systems: the descriptions.
        texts: contents by path.
    """
    for system in systems:
        mine: dict[str, str] = {}
        for key in ("framework", "other_software_stack"):
            for name, version, _ in versions_in(str(system.values.get(key, ""))):
                mine.setdefault(name, version)
        for path, text in texts.items():
            for name, version, position in versions_in(text):
                # TensorRT-LLM is often called TensorRT for short.
                other = mine.get(name) or mine.get(name.replace("tensorrt-llm", "tensorrt"))
                if other and not (other.startswith(version) or version.startswith(other)):
                    line = text.count("\n", 0, position) + 1
                    yield observe(
                        "system.software",
                        False,
                        f"{name} {other}, as {system.path} says",
                        f"{name} {version}",
                        (Where(path, line), system.where("framework")),
                        Severity.WARN,
                    )


def _filled(system: System, key: str) -> bool:
    """MLCommons' checker takes what Python takes for false, 0 among it, for no value."""
    value = system.values.get(key)
    return bool(value) and str(value).strip() != ""


def _first_gb(value: object) -> float | None:
    found = _SIZE.search(str(value)) if value is not None else None
    return float(found.group(1).replace(",", "")) * GB_PER_UNIT[found.group(2).upper()] if found else None


def _near(a: float, b: float) -> bool:
    return abs(a - b) <= MEMORY_TOLERANCE * max(a, b)


def _list(what: str, names: Sequence[str]) -> str:
    return f"{what}: {', '.join(names)}" if names else ""
