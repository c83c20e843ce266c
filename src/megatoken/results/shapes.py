"""Whether result.json and environment.json are what their readers take them for; a folder may come from anybody."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from megatoken.results.numerals import is_number

TEXTS = (
    *("scenario", "mode", "model", "weights", "precision", "data_set", "data_set_sha256", "rules", "benchmark"),
    *("created_at", "started_at", "loadgen_version", "loadgen_validity", "latency_origin"),
)
MAPPINGS = (
    *("ttft_seconds", "tpot_seconds", "latency_seconds", "send_lag_seconds", "handover_seconds", "stages"),
    *("target", "seeds", "rack", "aggregate", "rate_search"),
)
LISTS = ("notes", "nodes", "steady_window_seconds")
NUMBERS = (  # how their names end
    *("_per_second", "_per_output_token", "_tokens", "_joules", "_watts", "_bytes", "_rows"),
    *("samples_completed", "samples_failed", "samples_cancelled", "preemptions"),
    *("duration_seconds", "rated_seconds", "limit_seconds", "step_seconds", "p90_seconds", "p99_seconds"),
)
BESIDE_A_RATE = ("samples_completed", "input_tokens", "output_tokens", "duration_seconds")
OF_A_NODE = ("samples_completed", "output_tokens", "duration_seconds", "output_tokens_per_second")


def check_result(result: Mapping[str, Any]) -> None:
    """Refuses fields of another kind than their name promises. Absent and null ones are left to who needs them.

    Raises:
        ValueError, TypeError: names the field.
    """
    for name, value in result.items():
        _check(name, value)
    for name in MAPPINGS:
        for key, value in (result.get(name) or {}).items():
            if name.endswith("_seconds") and key.startswith("p") and value is not None and not is_number(value):
                raise ValueError(f"{name}.{key} is no number")
    for stage in (result.get("stages") or {}).values():
        if stage is not None and not (isinstance(stage, dict) and all(map(_number_or_none, stage.values()))):
            raise ValueError("stages holds what is no number")
    if not all(isinstance(note, str) for note in result.get("notes") or ()):
        raise ValueError("notes holds what is no text")
    window = result.get("steady_window_seconds")
    if window is not None and not (len(window) == 2 and all(map(is_number, window))):
        raise ValueError("steady_window_seconds is no pair of numbers")
    for node in result.get("nodes", ()):
        if not isinstance(node, dict) or not isinstance(node.get("node"), str):
            raise TypeError("nodes holds what is no node")
        for name in OF_A_NODE:
            if name not in node or not _number_or_none(node[name]):
                raise ValueError(f"{name} of node {node['node'][:50]} is no number")
    if result.get("output_tokens_per_second"):
        for name in ("output_tokens_per_second", *BESIDE_A_RATE):
            if not (is_number(result.get(name)) and result[name] > 0):
                raise ValueError(f"{name} of a run with a rate is not above zero")


def check_environment(environment: Mapping[str, Any]) -> None:
    """The same for the parts of environment.json that are read.

    Raises:
        TypeError: names the field.
    """
    for name in ("cpu", "packages"):
        if not isinstance(environment.get(name) or {}, dict):
            raise TypeError(f"{name} is no mapping")
    gpus = environment.get("gpus") or []
    if not isinstance(gpus, list) or not all(
        isinstance(gpu, dict) and isinstance(gpu.get("name"), str) for gpu in gpus
    ):
        raise TypeError("gpus is no list of GPUs with their names")


def _check(name: str, value: Any) -> None:
    if value is None and name != "nodes":
        return
    for names, kind, called in ((TEXTS, str, "text"), (MAPPINGS, dict, "mapping"), (LISTS, list, "list")):
        if name in names:
            if not isinstance(value, kind):
                raise ValueError(f"{name} is no {called}")
            return
    if name.endswith(NUMBERS) and not is_number(value):
        raise ValueError(f"{name} is no number")


def _number_or_none(value: Any) -> bool:
    return value is None or is_number(value)
