"""System descriptions and configurations: complete, without contradiction, and consistent with the known parts."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial

from megatoken.analysis.published import accelerator_facts, accelerator_table
from megatoken.audit.documents import USER_CONF
from megatoken.audit.evidence import Configuration, Run, System, Where
from megatoken.audit.finding import Observation, Outcome, Severity, check, outcome, parts, shown
from megatoken.mlperf.rounds import rules
from megatoken.text import is_number

GB_PER_UNIT = {"TB": 1000.0, "TIB": 1099.511627776, "GB": 1.0, "GIB": 1.073741824, "MB": 1e-3, "MIB": 1.048576e-3}
MEMORY_TOLERANCE = 0.075  # 80 GB and 80 GiB are used for each other
_SIZE = re.compile(r"(\d[\d,]{0,12}(?:\.\d{1,9})?)\s{0,3}(TiB|GiB|MiB|TB|GB|MB)\b", re.IGNORECASE)
_PART_WORD = re.compile(r"\b[A-Za-z]{1,4}\d{2,4}[A-Za-z]*\b")  # such as MI350X
_NO_PART = ("N/A", "NA", "NONE", "-")
_WATTS = re.compile(r"\b(?:TGP|TDP)\D{0,20}?(\d{3,4})\s{0,3}W\b|\b(\d{3,4})\s{0,3}W\s{0,3}(?:TGP|TDP)\b", re.IGNORECASE)
# Words that make a size that of one module, and not of the host; modules are counted per socket, per node or in all.
_COUNTED = re.compile(
    r"[\dB]\s*[x×*]\s*\d|(?<!for )\beach\b|\b(?:per|slots?|DIMMs?|RDIMMs?|modules?|channels?)\b", re.IGNORECASE
)
_SOFTWARE = re.compile(
    r"\b(TensorRT[ -]?LLM|TensorRT|CUDA|cuDNN|driver|vLLM|PyTorch|ROCm|NCCL)[ :=v]{1,3}"
    r"(\d+(?:\.\d+)+(?:[.]?(?:rc|dev|post)\d*)?)",
    re.IGNORECASE,
)
_SOFTWARE_KEYS = ("framework", "other_software_stack", "sw_notes", "operating_system")
_POWER_KEYS = ("hw_notes", "accelerator_model_name", "accelerator_frequency", "power_management")
_RATES = {"offline_expected_qps": "Offline", "server_target_qps": "Server"}
_near = partial(math.isclose, rel_tol=MEMORY_TOLERANCE)


def check_system(system: System, submission: bool) -> Iterator[Observation]:
    """One description; what only a submission must have is a note elsewhere."""
    unmet = Severity.FAIL if submission else Severity.NOTE
    yield from keys(system, unmet)
    yield from values(system, unmet)
    for one in (name, part_named_alike, accelerator_count, part_memory, part_power, host_memory, software):
        yield from one(system)


@check("system.keys", "The system description is complete", "MLPerf asks for these facts.")
def keys(system: System, unmet: Severity) -> Iterator[Outcome]:
    missing = [key for key in rules()["system_keys"] if key not in system.values]
    empty = [key for key in rules()["system_keys_not_empty"] if not system.values.get(key, True)]
    found = shown(parts(missing=missing, empty=empty)) or "all keys"
    where = (system.where(), *(system.where(key) for key in empty))
    expected = "every key that MLPerf asks for, and a value where it asks for one"
    yield outcome(not missing and not empty, expected, found, where, unmet)
    blank = [key for key in rules()["system_keys_not_empty"] if str(system.values.get(key, "x")).isspace()]
    if blank:  # MLCommons' checker takes a blank for a value
        yield Outcome(Severity.NOTE, expected, shown(f"blank: {', '.join(blank)}"), tuple(map(system.where, blank)))


@check("system.values", "Status and type are allowed ones", "MLPerf allows no others.")
def values(system: System, unmet: Severity) -> Iterator[Outcome]:
    for key, allowed in (("status", rules()["system_status"]), ("system_type", rules()["system_types"])):
        if _filled(system, key):
            value = system.values[key]
            holds = (str(value).lower() if key == "status" else value) in allowed  # MLCommons' checker lowers status
            found = outcome(holds, f"{key}: one of {', '.join(allowed)}", shown(value), (system.where(key),), unmet)
            yield replace(found, fields={key: value})


@check("system.name", "The system's name", "Blanks around a name break look-ups.")
def name(system: System) -> Outcome | None:
    name, where = system.values.get("system_name"), (system.where("system_name"),)
    if not isinstance(name, str) or name == name.strip():
        return None
    return outcome(False, "a name without blanks around it", f"system_name {shown(repr(name))}", where, Severity.NOTE)


@check("system.part_name", "Accelerator and the system's name", "Another part was measured than is described.")
def part_named_alike(system: System) -> Outcome | None:
    """The parts that the name of the file names, by which results refer to the system."""
    texts = (system.accelerator or "", system.name)
    mine, named = ({name for name in accelerator_table() if _in_name(name).search(text)} for text in texts)
    if not mine or not named:
        return None
    where = (system.where(), system.where("accelerator_model_name"))
    expected = f"{' or '.join(sorted(named))}, as the system {shown(system.name)} is named"
    holds = any(one.startswith(other) or other.startswith(one) for one in mine for other in named)
    return outcome(holds, expected, shown(system.accelerator), where, Severity.WARN)


@check("system.accelerator_count", "Accelerators and the system's name", "Rates per accelerator are divided by it.")
def accelerator_count(system: System) -> Outcome | None:
    """Numbers such as 8x in front of the part's name, or x8 behind it, count those of a node or of all nodes.

    Parts are those of the shipped table, and the words with letters and digits that the description calls its own.
    """
    names = {*accelerator_table(), *_PART_WORD.findall(system.accelerator or "")}
    matches = (_in_name(name).search(system.name) for name in names)
    counts = [int(match.group(1) or match.group(2)) for match in matches if match and any(match.groups())]
    per_node, nodes = system.accelerators_per_node, system.nodes or 1
    if not counts or not per_node:
        return None
    where = (system.where("accelerators_per_node"), system.where("number_of_nodes"))
    total = per_node * nodes
    expected = f"{sum(counts)} accelerators, as the system {shown(system.name)} is named"
    holds = per_node in counts or total - per_node < sum(counts) <= total  # not every node needs to have all
    return outcome(holds, expected, f"{per_node} a node, {total} in all", where, Severity.WARN)


def _in_name(gpu: str) -> re.Pattern[str]:
    """A part in the name of a system, with the count in front of it or behind it."""
    before = r"(?:(?<![0-9A-Za-z])(\d{1,5})x[-_]?|(?<![0-9A-Za-z]))"
    after = r"(?:[-_A-Za-z0-9]*?GB)?x(\d{1,5})(?![0-9A-Za-z])"
    return re.compile(rf"{before}{re.escape(gpu)}(?![0-9])(?:{after})?")


@check("system.part_memory", "Memory of the accelerator", "Another memory is another part.")
def part_memory(system: System) -> Outcome | None:
    if system.accelerators_per_node == 0 or (system.accelerator or "N/A").strip().upper() in _NO_PART:
        return None
    part = accelerator_facts(system.accelerator)
    if part is None:
        found = f"{shown(system.accelerator or 'no accelerator')}: this part is not in the shipped table"
        return outcome(None, "the part's memory", found, (system.where("accelerator_model_name"),))
    key, expected_gb = "accelerator_memory_capacity", part.values["hbm_gb"]
    memory, found = _first_gb(system, key), shown(system.values.get(key))
    fits = None
    if memory is not None:
        fits = _near(memory, expected_gb) or f"{memory:g}GB" in (system.accelerator or "")
        alike = [name for name, one in accelerator_table().items() if _near(memory, one.values["hbm_gb"])]
        found += f", which {' or '.join(alike)} has" if alike and not fits else ""
    where = (system.where(key), system.where("accelerator_model_name"))
    return outcome(fits, f"{part.name}: {expected_gb:g} GB", found, where, Severity.WARN)


@check("system.part_power", "Power of the accelerator", "A power limit decides the clocks.")
def part_power(system: System) -> Iterator[Outcome]:
    """A limit below the part's is a setting, not an error."""
    part = accelerator_facts(system.accelerator)
    for key in _POWER_KEYS:
        if part is not None and part.tdp_watts and (match := _WATTS.search(str(system.values.get(key, "")))):
            watts = float(match.group(1) or match.group(2))
            holds, expected = abs(watts - part.tdp_watts) < 1, f"{part.name}: {part.tdp_watts:g} W"
            yield outcome(holds, expected, f"{watts:g} W", (system.where(key),), Severity.NOTE)


@check("system.host_memory", "Memory of the host", "Two amounts in one description: one is wrong.")
def host_memory(system: System) -> Outcome | None:
    keys = ("host_memory_capacity", "host_memory_configuration")
    one, other = (_first_gb(system, key) for key in keys)
    if one is None or other is None:
        return None
    configured = str(system.values[keys[1]])
    first = re.match(r"\s*(\d{1,3})\s*[x×]", configured)
    counted = first is not None or _COUNTED.search(configured) is not None
    multiples = (1, int(first.group(1))) if first else (max(1, round(one / other)),) if counted else (1,)
    holds = any(_near(one, count * other) for count in multiples)
    otherwise = Severity.NOTE if counted else Severity.WARN
    found = shown("; ".join(f"{key}: {system.values[key]}" for key in keys))
    return outcome(holds, "one amount of host memory", found, tuple(map(system.where, keys)), otherwise)


def versions_in(text: str) -> Iterator[tuple[str, str, int]]:
    """Software named with a version: name in lower case, version, position."""
    for found in _SOFTWARE.finditer(text):
        yield re.sub(r"[ -]", "-", found.group(1).lower()), found.group(2), found.start()


@check("system.software", "Software versions agree", "The number can be repeated only with the software that made it.")
def software(system: System) -> Iterator[Outcome]:
    """Each version is named once, or alike."""
    said = _versions(system, _SOFTWARE_KEYS)
    for name, versions in said.items():
        distinct = [a for a in versions if not any(b != a and b.startswith(f"{a}.") for b in versions)]
        if len(distinct) > 1:
            found = shown(", ".join(f"{version} ({key})" for version, key in versions.items()))
            where = tuple(map(system.where, versions.values()))
            listed = len(set(versions.values())) == 1  # one field that lists several stacks does not contradict itself
            yield outcome(False, f"one version of {name}", found, where, Severity.NOTE if listed else Severity.WARN)
    if said and all(len(versions) == 1 for versions in said.values()):
        found = shown(", ".join(f"{name} {next(iter(versions))}" for name, versions in said.items()))
        yield outcome(True, "no version that contradicts another", found, (system.where(),))


def _versions(system: System, keys: Sequence[str]) -> dict[str, dict[str, str]]:
    """Each version of each software that a description names, with the first key that names it."""
    said: dict[str, dict[str, str]] = {}
    for key in keys:
        for name, version, _ in versions_in(str(system.values.get(key, ""))):
            said.setdefault(name, {}).setdefault(version, key)
    return said


def check_versions_elsewhere(systems: Sequence[System], texts: Mapping[str, str]) -> Iterator[Observation]:
    """README files, by path, compared with the system descriptions: the same software in one version."""
    for system in systems:
        mine = {name: next(iter(versions)) for name, versions in _versions(system, _SOFTWARE_KEYS[:2]).items()}
        for path, text in texts.items():
            for name, version, position in versions_in(text):
                # TensorRT-LLM is often called TensorRT for short.
                other = mine.get(name) or mine.get(name.replace("tensorrt-llm", "tensorrt"))
                if other and not (other.startswith(version) or version.startswith(other)):
                    where = (Where(path, text.count("\n", 0, position) + 1), system.where("framework"))
                    expected = f"{name} {other}, as in {system.path}"
                    found = outcome(False, expected, f"{name} {version}", where, Severity.WARN)
                    yield from software.observations(found)


def _filled(system: System, key: str) -> bool:
    """MLCommons' checker treats values that are false in Python, such as 0, as empty."""
    value = system.values.get(key)
    return bool(value) and str(value).strip() != ""


def _first_gb(system: System, key: str) -> float | None:
    found = _SIZE.search(str(system.values.get(key, "")))
    return float(found.group(1).replace(",", "")) * GB_PER_UNIT[found.group(2).upper()] if found else None


@check("configuration.rate", "The configured rate is the one that ran", "Another configuration made these logs.")
def configured_rate(configuration: Configuration, runs: Sequence[Run]) -> Iterator[Outcome]:
    if configuration.path.rpartition("/")[2] == USER_CONF:
        return  # compared with the log of each run, with its other settings
    for key, scenario in _RATES.items():
        wanted = configuration.values.get(key)
        mine = [run for run in runs if run.figures.scenario == scenario and _is_about(configuration, run)]
        rates = sorted({run.figures.target_qps for run in mine if run.figures.target_qps is not None})
        if not is_number(wanted) or not rates:
            continue
        differing = [run for run in mine if abs((run.figures.target_qps or 0) - wanted) > 1e-5 * abs(wanted)]
        found = f"runs with {', '.join(f'{rate:g}' for rate in rates[:10])} samples/s"
        where = (configuration.where(key), *(run.where("effective_target_qps") for run in differing[:20]))
        yield outcome(not differing, f"{key} {wanted:g} samples/s as configured", found, where, Severity.WARN)


def _is_about(configuration: Configuration, run: Run) -> bool:
    """A file below ``configs`` is about all runs of the folder that holds ``configs``."""
    folder = configuration.path.rpartition("/")[0].partition("configs")[0].rstrip("/")
    return not folder or run.path == folder or run.path.startswith(f"{folder}/")


@check(
    "configuration.parallelism", "How the model is spread over GPUs", "One GPU per copy needs no links between GPUs."
)
def parallelism(configuration: Configuration) -> Outcome | None:
    tensor = configuration.values.get("tensor_parallelism")
    pipeline = configuration.values.get("pipeline_parallelism", 1)
    if not isinstance(tensor, int) or not isinstance(pipeline, int):
        return None
    size = tensor * pipeline
    copies = "one GPU per copy of the model, no traffic between GPUs" if size == 1 else f"{size} GPUs per copy"
    found = f"tensor parallelism {tensor}, pipeline parallelism {pipeline}: {copies}"
    where = (configuration.where("tensor_parallelism"), configuration.where("pipeline_parallelism"))
    return Outcome(Severity.NOTE, "how many GPUs hold one copy of the model", found, where)
