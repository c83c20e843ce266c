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
    *("target", "seeds", "rack", "aggregate", "rate_search", "soak", "stability", "node_verdicts", "load", "identity"),
    *("plan_sha256", "memory_plan", "loop_seconds"),
)
LISTS = ("notes", "nodes", "rack_nodes", "steady_window_seconds", "changed_settings")
NUMBERS = (  # how their names end
    *("_per_second", "_per_output_token", "_tokens", "_joules", "_watts", "_bytes", "_rows", "_share"),
    *("samples_completed", "samples_failed", "samples_cancelled", "preemptions"),
    *("duration_seconds", "rated_seconds", "limit_seconds", "step_seconds", "p90_seconds", "p99_seconds"),
)
WITH_A_RATE = ("samples_completed", "input_tokens", "output_tokens", "duration_seconds")
OF_A_STABILITY = ("trend", "drift", "worst_window", "throttling")
OF_A_NODE = ("samples_completed", "output_tokens", "duration_seconds", "output_tokens_per_second")


def check_result(result: Mapping[str, Any]) -> None:
    """Refuse fields whose type does not fit their name. Absent and null fields pass.

    Raises:
        ValueError: the message names the field.
    """
    for name, value in result.items():
        _check(name, value)
    for name in MAPPINGS:
        for key, value in (result.get(name) or {}).items():
            if name.endswith("_seconds") and key.startswith("p"):
                _require(_number_or_none(value), f"{name}.{key} is not a number")
    sequences = (result.get("memory_plan") or {}).get("max_sequences")
    _require(_number_or_none(sequences), "memory_plan.max_sequences is not a number")
    for stage in (result.get("stages") or {}).values():
        numbers = stage is None or (isinstance(stage, dict) and all(map(_number_or_none, stage.values())))
        _require(numbers, "stages has a value that is not a number")
    _require(all(map(_is_reason, result.get("notes") or ())), "notes is not a list of notes with code and message")
    settings = result.get("changed_settings") or ()
    named = all(isinstance(one, dict) and isinstance(one.get("setting"), str) for one in settings)
    _require(named, "changed_settings is not a list of settings with their names")
    window = result.get("steady_window_seconds")
    pair = window is None or (len(window) == 2 and all(map(is_number, window)))
    _require(pair, "steady_window_seconds is not a pair of numbers")
    if (soak := result.get("soak")) is not None:
        _check_soak(soak)
    for name in OF_A_STABILITY:
        part = (result.get("stability") or {}).get(name) or {}
        _require(isinstance(part, dict), f"stability.{name} is not a mapping")
    if (rack := result.get("rack")) is not None:
        _check_rack(rack)
    if "node_verdicts" in result:
        _require(is_number((rack or {}).get("start_spread_seconds")), "rack.start_spread_seconds is not a number")
    for node in result.get("rack_nodes") or ():
        whole = _is_of_node(node, "replicas", "gpus")
        _require(whole, "rack_nodes has an entry that is not a node with its replicas and GPUs")
        _require(isinstance(node.get("machine"), dict), f"machine of node {node['node'][:50]} is not a mapping")
        check_environment(node["machine"])
    for node in result.get("nodes", ()):
        _require(_is_of_node(node), "nodes has an entry that is not a node")
        for name in OF_A_NODE:
            _require(_number_or_none(node.get(name, "")), f"{name} of node {node['node'][:50]} is not a number")
    if result.get("output_tokens_per_second"):
        for name in ("output_tokens_per_second", *WITH_A_RATE):
            unknown = name == "input_tokens" and result.get(name, 0) is None  # a server may not say how many it read
            known = is_number(result.get(name)) and result[name] > 0
            _require(known or unknown, f"{name} of a run with a rate is not above zero")


def check_environment(environment: Mapping[str, Any]) -> None:
    """The same for environment.json. Raises ValueError: the message names the field."""
    for name in ("cpu", "packages"):
        _require(isinstance(environment.get(name) or {}, dict), f"{name} is not a mapping")
    gpus = environment.get("gpus") or []
    named = isinstance(gpus, list) and all(isinstance(gpu, dict) and isinstance(gpu.get("name"), str) for gpu in gpus)
    _require(named, "gpus is not a list of GPUs with their names")


def _check(name: str, value: Any) -> None:
    if value is None and name != "nodes":
        return
    for names, kind, called in ((TEXTS, str, "text"), (MAPPINGS, dict, "mapping"), (LISTS, list, "list")):
        if name in names:
            _require(isinstance(value, kind), f"{name} is not a {called}")
            return
    _require(not name.endswith(NUMBERS) or is_number(value), f"{name} is not a number")


def _check_rack(rack: Mapping[str, Any]) -> None:
    for name in ("replicas", "replicas_least", "replicas_at_end", "share_left"):
        _require(is_number(rack.get(name)), f"rack.{name} is not a number")
    for name, numbers in (
        ("lost", ()),
        ("joined", ("at_seconds",)),
        ("clock_offsets", ("wall_seconds", "uncertainty_seconds")),
    ):
        entries = rack.get(name)
        listed = isinstance(entries, list) and all(_is_of_node(entry, *numbers) for entry in entries)
        _require(listed, f"rack.{name} is not a list of nodes with {' and '.join(('their names', *numbers))}")
    for loss in rack["lost"]:
        known = _number_or_none(loss.get("replica", ...)) and isinstance(loss.get("cause"), str)
        _require(known, "rack.lost has a loss without its replica or cause")


def _is_reason(value: Any) -> bool:
    return isinstance(value, dict) and all(isinstance(value.get(name), str) for name in ("code", "message"))


def _is_of_node(entry: Any, *numbers: str) -> bool:
    named = isinstance(entry, dict) and isinstance(entry.get("node"), str)
    return named and all(is_number(entry.get(name)) for name in numbers)


def _check_soak(soak: Mapping[str, Any]) -> None:
    _require(is_number(soak.get("duration_seconds")), "soak.duration_seconds is not a number")
    _require(isinstance(soak.get("settings", {}), Mapping), "soak.settings is not a mapping")
    for name, moment in (("segments", "begins_seconds"), ("interruptions", "at_seconds")):
        parts = soak.get(name)
        timed = isinstance(parts, list) and all(isinstance(one, dict) and is_number(one.get(moment)) for one in parts)
        _require(timed, f"soak.{name} is not a list of mappings with {moment}")
    starts = [one.get("started_at") for one in soak["segments"]]
    _require(bool(starts) and all(isinstance(start, str) for start in starts), "soak.segments has no started_at")


def _require(holds: bool, problem: str) -> None:
    if not holds:
        raise ValueError(problem)


def _number_or_none(value: Any) -> bool:
    return value is None or is_number(value)
