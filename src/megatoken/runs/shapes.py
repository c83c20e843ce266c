"""Checks that the fields of result.json and environment.json have the types that readers expect."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from megatoken.text import is_number

TEXTS = (
    *("scenario", "mode", "model", "weights", "precision", "data_set", "data_set_sha256", "rules", "benchmark"),
    *("created_at", "started_at", "loadgen_version", "loadgen_validity"),
)
MAPPINGS = (
    *("ttft_seconds", "tpot_seconds", "latency_seconds", "send_lag_seconds", "handover_seconds", "stages"),
    *("target", "seeds", "rack", "aggregate", "rate_search", "soak", "stability", "node_verdicts"),
)
LISTS = ("notes", "nodes", "rack_nodes", "steady_window_seconds")
NUMBERS = (  # how their names end
    *("_per_second", "_per_output_token", "_tokens", "_joules", "_watts", "_bytes", "_rows"),
    *("samples_completed", "samples_failed", "samples_cancelled", "preemptions"),
    *("duration_seconds", "rated_seconds", "limit_seconds", "step_seconds", "p90_seconds", "p99_seconds"),
)
WITH_A_RATE = ("samples_completed", "input_tokens", "output_tokens", "duration_seconds")
OF_A_STABILITY = ("trend", "drift", "worst_window", "throttling")
OF_A_NODE = ("samples_completed", "output_tokens", "duration_seconds", "output_tokens_per_second")


def check_result(result: Mapping[str, Any]) -> None:
    """Refuse fields whose type does not fit their name. Absent and null fields pass.

    Raises:
        ValueError, TypeError: the message names the field.
    """
    for name, value in result.items():
        _check(name, value)
    for name in MAPPINGS:
        for key, value in (result.get(name) or {}).items():
            if name.endswith("_seconds") and key.startswith("p") and value is not None and not is_number(value):
                raise ValueError(f"{name}.{key} is not a number")
    for stage in (result.get("stages") or {}).values():
        if stage is not None and not (isinstance(stage, dict) and all(map(_number_or_none, stage.values()))):
            raise ValueError("stages has a value that is not a number")
    if not all(_is_reason(note) for note in result.get("notes") or ()):
        raise ValueError("notes is not a list of notes with code and message")
    window = result.get("steady_window_seconds")
    if window is not None and not (len(window) == 2 and all(map(is_number, window))):
        raise ValueError("steady_window_seconds is not a pair of numbers")
    if (soak := result.get("soak")) is not None:
        _check_soak(soak)
    for name in OF_A_STABILITY:
        if not isinstance((result.get("stability") or {}).get(name) or {}, dict):
            raise TypeError(f"stability.{name} is not a mapping")
    if (rack := result.get("rack")) is not None:
        _check_rack(rack)
    if "node_verdicts" in result and not is_number((rack or {}).get("start_spread_seconds")):
        raise ValueError("rack.start_spread_seconds is not a number")
    for node in result.get("rack_nodes") or ():
        if not _is_of_node(node, "replicas", "gpus"):
            raise ValueError("rack_nodes has an entry that is not a node with its replicas and GPUs")
        if not isinstance(node.get("machine"), dict):
            raise TypeError(f"machine of node {node['node'][:50]} is not a mapping")
        check_environment(node["machine"])
    for node in result.get("nodes", ()):
        if not isinstance(node, dict) or not isinstance(node.get("node"), str):
            raise TypeError("nodes has an entry that is not a node")
        for name in OF_A_NODE:
            if name not in node or not _number_or_none(node[name]):
                raise ValueError(f"{name} of node {node['node'][:50]} is not a number")
    if result.get("output_tokens_per_second"):
        for name in ("output_tokens_per_second", *WITH_A_RATE):
            if not (is_number(result.get(name)) and result[name] > 0):
                raise ValueError(f"{name} of a run with a rate is not above zero")


def check_environment(environment: Mapping[str, Any]) -> None:
    """The same for environment.json.

    Raises:
        TypeError: the message names the field.
    """
    for name in ("cpu", "packages"):
        if not isinstance(environment.get(name) or {}, dict):
            raise TypeError(f"{name} is not a mapping")
    gpus = environment.get("gpus") or []
    if not isinstance(gpus, list) or not all(
        isinstance(gpu, dict) and isinstance(gpu.get("name"), str) for gpu in gpus
    ):
        raise TypeError("gpus is not a list of GPUs with their names")


def _check(name: str, value: Any) -> None:
    if value is None and name != "nodes":
        return
    for names, kind, called in ((TEXTS, str, "text"), (MAPPINGS, dict, "mapping"), (LISTS, list, "list")):
        if name in names:
            if not isinstance(value, kind):
                raise ValueError(f"{name} is not a {called}")
            return
    if name.endswith(NUMBERS) and not is_number(value):
        raise ValueError(f"{name} is not a number")


def _check_rack(rack: Mapping[str, Any]) -> None:
    for name in ("replicas", "replicas_least", "replicas_at_end", "share_left"):
        if not is_number(rack.get(name)):
            raise ValueError(f"rack.{name} is not a number")
    for name, numbers in (
        ("lost", ()),
        ("joined", ("at_seconds",)),
        ("clock_offsets", ("wall_seconds", "uncertainty_seconds")),
    ):
        entries = rack.get(name)
        if not isinstance(entries, list) or not all(_is_of_node(entry, *numbers) for entry in entries):
            raise ValueError(f"rack.{name} is not a list of nodes with {' and '.join(('their names', *numbers))}")
    for loss in rack["lost"]:
        if not _number_or_none(loss.get("replica", ...)) or not isinstance(loss.get("cause"), str):
            raise ValueError("rack.lost has a loss without its replica or cause")


def _is_reason(value: Any) -> bool:
    return isinstance(value, dict) and all(isinstance(value.get(name), str) for name in ("code", "message"))


def _is_of_node(entry: Any, *numbers: str) -> bool:
    named = isinstance(entry, dict) and isinstance(entry.get("node"), str)
    return named and all(is_number(entry.get(name)) for name in numbers)


def _check_soak(soak: Mapping[str, Any]) -> None:
    if not is_number(soak.get("duration_seconds")):
        raise ValueError("soak.duration_seconds is not a number")
    if "settings" in soak and not isinstance(soak["settings"], Mapping):
        raise ValueError("soak.settings is not a mapping")
    for name, moment in (("segments", "begins_seconds"), ("interruptions", "at_seconds")):
        parts = soak.get(name)
        if not isinstance(parts, list) or not all(_has_moment(one, moment) for one in parts):
            raise ValueError(f"soak.{name} is not a list of mappings with {moment}")
    if not soak["segments"] or not all(isinstance(one.get("started_at"), str) for one in soak["segments"]):
        raise ValueError("soak.segments has no started_at")


def _has_moment(part: Any, moment: str) -> bool:
    return isinstance(part, dict) and is_number(part.get(moment))


def _number_or_none(value: Any) -> bool:
    return value is None or is_number(value)
