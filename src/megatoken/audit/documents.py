"""Files next to the logs: systems, configurations, accuracy scores. Read as data; nothing is imported or run."""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import yaml

from megatoken.audit.discovery import Tree, below, last_of
from megatoken.audit.evidence import AccuracyResult, Configuration, Document, System, places
from megatoken.audit.finding import Outcome, check, outcome
from megatoken.files import Damage, UnreadableError, display, key_lines, read_json_object, read_text
from megatoken.mlperf.accuracy_log import read_accuracy_scores
from megatoken.mlperf.effective_settings import user_conf_entries
from megatoken.text import natural

USER_CONF, USER_CONF_ABOVE = "user.conf", 2
MOST_CONFIGURATIONS = 2_000
MOST_CONFIGURATION_BYTES = 2**20
MOST_YAML_BYTES = 2**16  # its parser is slow
MOST_BYTES_IN_ALL = 64 * 2**20
_NAMES = {
    "tensor_parallelism": ["tensor_parallelism", "tensor_parallel", "tensor_parallel_size", "tp_size", "tp"],
    "pipeline_parallelism": ["pipeline_parallelism", "pipeline_parallel", "pipeline_parallel_size", "pp_size", "pp"],
    "precision": ["precision", "quantization", "quant_algo", "weight_data_types"],
    "kv_cache_dtype": ["kv_cache_dtype", "kv_cache_precision", "kv_dtype"],
    "gpu_batch_size": ["gpu_batch_size", "max_batch_size", "max_num_seqs"],
    "offline_expected_qps": ["offline_expected_qps"],
    "server_target_qps": ["server_target_qps"],
    "min_duration_ms": ["min_duration_ms", "min_duration"],
}
_USUAL = {spelling: name for name, spellings in _NAMES.items() for spelling in spellings}
COMPLIANCE_TEST = re.compile(r"(?:^|/)TEST\d\d/")
_SYSTEM = re.compile(r"(?:^|/)systems/[^/]*\.json\Z")
_LITERAL = r"""('[^'\n]{0,200}'|"[^"\n]{0,200}"|-?\d+(?:_\d+)*(?:\.\d+)?(?:e-?\d+)?|True|False|None)"""
_ASSIGNMENT = re.compile(rf"""['"]?([A-Za-z_][\w.-]{{0,80}})['"]?\s*[:=]\s*{_LITERAL}\s*(?=[,}})#\n]|$)""")


def _readable(path: str, damage: Damage) -> Outcome:
    return outcome(False, "a JSON object with each key once", damage.what, places(path, line=damage.line))


READABLE = {
    family: check(f"{family}.readable", f"{what} can be read", why)(_readable)
    for family, what, why in (
        ("system", "System descriptions", "They say what was measured."),
        ("endpoint", "Results of MLPerf Endpoints", "There is no log as further evidence."),
        ("tool", "Results of load tools", "What cannot be read is no evidence."),
    )
}
"""Of what is wrong with JSON files, by their kind."""


def json_document(tree: Tree, path: str) -> Document:
    """A file with one JSON object. Raises UnreadableError."""
    values, lines, damages = read_json_object(tree.path(path))
    return Document(display(path), values, lines, tuple(damages))


def json_values(tree: Tree, path: str) -> Mapping[str, Any] | None:
    """The same without lines: None if there is no such file, empty if it cannot be read."""
    try:
        return json_document(tree, path).values if path in tree.files else None
    except UnreadableError:
        return {}


def json_documents(tree: Tree, paths: Iterable[str]) -> tuple[dict[str, Document], list[tuple[str, Damage]]]:
    """The documents that can be read, in natural order, and what is wrong with these and the others."""
    found, damages = {}, []
    for path in sorted(paths, key=natural):
        try:
            found[path] = json_document(tree, path)
            damages += [(path, damage) for damage in found[path].damages]
        except UnreadableError as error:
            damages.append((path, Damage(None, str(error))))
    return found, damages


def systems_in(tree: Tree, folders: Collection[str]) -> tuple[list[System], list[tuple[str, Damage]]]:
    """Every ``systems/<name>.json``, of submissions only those in their ``folders``, and the defects of those files."""
    paths = [path for path in tree.files if _SYSTEM.search(path)]
    mine = [path for path in paths if path.rpartition("/")[0] in folders] if folders else paths
    documents, damages = json_documents(tree, mine)
    return [System(one.path, one.values, one.source_lines) for one in documents.values()], damages


def named_system(name: str, systems: Sequence[System]) -> System | None:
    """The description named like the system folder ``name``, else the longest name that ``name`` begins with."""
    begun = [one for one in systems if name and re.match(rf"{re.escape(one.name)}(?![A-Za-z0-9])", name)]
    return max(begun, key=lambda system: len(system.name), default=None)


def system_next_to(folder: Path) -> System | None:
    """The description in ``systems`` next to the last ``results`` that ``folder`` lies in; None if none fits.

    Of a folder whose name only begins with the system's, which is that of one node, it describes that node.
    """
    parts = folder.resolve().parts
    if "results" not in parts[:-1]:
        return None
    level = last_of(parts[:-1], "results") + 1
    systems = []
    for file in sorted(Path(*parts[: level - 1], "systems").glob("*.json")):
        with suppress(UnreadableError):
            values, lines, _ = read_json_object(file)
            systems.append(System(display(str(file)), values, lines))
    system = named_system(parts[level], systems)
    one_node = system is not None and system.name != parts[level]
    return replace(system, values={**system.values, "number_of_nodes": 1}) if system and one_node else system


def configurations_in(tree: Tree) -> list[Configuration]:
    """JSON, YAML and Python files below a folder named configs, and every user.conf. Unreadable ones are left out."""
    found: list[Configuration] = []
    taken = 0
    for path in sorted(tree.files, key=natural):
        parts = path.split("/")
        name = parts[-1]
        configured = "configs" in parts[:-1] and name.endswith((".json", ".yaml", ".yml", ".py"))
        most = MOST_YAML_BYTES if name.endswith((".yaml", ".yml")) else MOST_CONFIGURATION_BYTES
        if not (configured or name == USER_CONF) or tree.files[path] > most:
            continue
        taken += tree.files[path]
        if taken > MOST_BYTES_IN_ALL:
            break
        try:
            text, _ = read_text(tree.path(path), MOST_CONFIGURATION_BYTES)
            found.append(_configuration(display(path), name, text))
        except UnreadableError:
            continue
        if len(found) >= MOST_CONFIGURATIONS:
            break
    return [configuration for configuration in found if configuration.values]


def user_conf_of(tree: Tree, folder: str) -> str | None:
    """The user.conf next to the logs in ``folder``, above them in their scenario's folder, or in the measurements."""
    above = folder.split("/")
    places = ["/".join(above[: len(above) - up]) for up in range(min(USER_CONF_ABOVE, len(above)) + 1)]
    if "results" in above:
        at = last_of(above, "results")
        places.append("/".join([*above[:at], "measurements", *above[at + 1 : at + 4]]))
    return next((path for place in places if (path := below(place, USER_CONF)) in tree.files), None)


def accuracy_results_in(tree: Tree) -> list[AccuracyResult]:
    """Every accuracy.txt that can be read, except of compliance tests, which keep other contents in it."""
    results = []
    for path in (below(folder, "accuracy.txt") for folder in tree.holding("accuracy.txt")):
        if COMPLIANCE_TEST.search(path):
            continue
        with suppress(UnreadableError):
            read, parts = read_accuracy_scores(tree.path(path)), path.split("/")
            results.append(AccuracyResult(display(path), parts[-4] if len(parts) > 3 else None, read.scores, read.hash))
    return results


def _configuration(path: str, name: str, text: str) -> Configuration:
    pairs: list[tuple[str, Any, int]] = []
    if name == USER_CONF:
        pairs = list(_user_conf(text))
    elif name.endswith(".py"):
        pairs = list(_assignments(text))
    else:
        lines = key_lines(text) if name.endswith(".json") else _yaml_lines(text)
        pairs = [(key, value, lines.get(key, 1)) for key, value in _scalars(structured(name, text))]
    first = {_USUAL.get(key.lower(), key): (value, line) for key, value, line in reversed(pairs)}
    values, lines = ({key: found[part] for key, found in first.items()} for part in (0, 1))
    return Configuration(path, values, lines)


def structured(name: str, text: str) -> Any:
    """The contents of a JSON or YAML text; None if it cannot be parsed, or has anchors."""
    try:
        if name.endswith(".json"):
            return json.loads(text)
        if re.search(r"(?<![\w'\"])[&*][A-Za-z]", text):
            return None  # anchors can blow a small file up
        return yaml.safe_load(text)
    except (ValueError, RecursionError, yaml.YAMLError):
        return None


def _scalars(value: Any, depth: int = 0) -> Iterator[tuple[str, Any]]:
    if depth >= 20:
        return
    items = (
        value.items() if isinstance(value, dict) else [(None, one) for one in value] if isinstance(value, list) else ()
    )
    for key, item in items:
        if isinstance(item, dict | list):
            yield from _scalars(item, depth + 1)
        elif key is not None and isinstance(item, str | int | float | bool):
            yield str(key), item


def _yaml_lines(text: str) -> dict[str, int]:
    lines: dict[str, int] = {}
    for number, line in enumerate(text.split("\n"), 1):
        if found := re.match(r"\s*(?:- )?([\w.-]{1,100})\s*:", line):
            lines.setdefault(found.group(1), number)
    return lines


def _assignments(text: str) -> Iterator[tuple[str, Any, int]]:
    for number, line in enumerate(text.split("\n"), 1):
        if line.lstrip().startswith("#") or len(line) > 5_000:
            continue
        for key, literal in _ASSIGNMENT.findall(line):
            try:
                yield key, ast.literal_eval(literal), number
            except (ValueError, SyntaxError):
                continue


def _user_conf(text: str) -> Iterator[tuple[str, Any, int]]:
    for (_, scenario, key), (value, number) in user_conf_entries(text).items():
        if key == "target_qps":
            key = {"Offline": "offline_expected_qps", "Server": "server_target_qps"}.get(scenario, key)
        yield key, float(value) if "." in value else int(value), number
