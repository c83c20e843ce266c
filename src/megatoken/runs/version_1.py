"""Run folders of schema version 1 in the form of version 2; no other code knows the older one.

Version 2 has notes as records with a code, typed fields next to the descriptions that version 1 packed into text, and
the engine's names of its sizes.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

COLUMNS = {"rows": "batched_tokens", "row_budget": "max_batched_tokens"}  # of series.parquet
_NODE = re.compile(r"(?:(?P<node>[\w.-]+): )?(?P<note>.*)", re.DOTALL)
_NOTES = {
    "SIMULATED_GPU": r"every GPU is a simulated (?P<gpu>[^:]+):",
    "RANDOM_WEIGHTS": "random weights:",
    "RANDOM_PROMPTS": "prompts are random tokens",
    "REFERENCE_MODEL": r"the reference model \(",
    "ACCURACY_GATE": r"every score of the answers must reach (?P<share>\d+) %",
    "ACCURACY_NOT_JUDGED": "accuracy is not judged",
    "RULES_SCOPE": "the verdict judges LoadGen's log",
    "COMPLIANCE_TEST": r"compliance test (?P<test>\w+):",
    "SOAK": "a soak issues its own samples",
    "NO_KERNELS": r"without compiled kernels, [^:]*: (?P<why>.*); on Linux",
    "BF16_WIDENED": "this processor has no AVX-512 BF16",
    "CORE_WAIT": r"a busy machine.*: (?P<share>\d+) % of the time",
    "DRIVER_CORE_WAIT": r"the driver's machine was busy.*: (?P<share>\d+) % of the time",
}
_SIMULATED, _NO_KERNELS, _WIDENED = "simulated ", "PyTorch only: ", ", bf16 widened"  # of ``target``


def upgrade_result(result: Mapping[str, Any]) -> dict[str, Any]:
    """``result.json`` in the form of version 2. Fields of other types than version 1 has stay as they are."""
    new = {name: value for name, value in result.items() if name != "latency_origin"}  # text that follows from scenario
    if isinstance(notes := result.get("notes"), list):
        new["notes"] = [_note(note) if isinstance(note, str) else note for note in notes]
    if "client_limit" in new:
        new["client_capacity"] = new.pop("client_limit")
    if isinstance(weights := result.get("weights"), str):
        new.setdefault("random_weights", weights.startswith("random"))
    if isinstance(target := result.get("target"), dict):
        new["target"] = _target(target)
    if isinstance(plan := result.get("memory_plan"), dict):
        new["memory_plan"] = _renamed(plan)
    return new


def upgrade_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """``config.yaml`` with the keys of version 2."""
    engine = config.get("engine")
    return {**config, "engine": _renamed(engine)} if isinstance(engine, dict) else dict(config)


def _renamed(sizes: Mapping[str, Any]) -> dict[str, Any]:
    return {"max_batched_tokens" if name == "max_rows" else name: value for name, value in sizes.items()}


def _target(target: Mapping[str, Any]) -> dict[str, Any]:
    new = dict(target)
    if isinstance(device := target.get("device"), str):
        simulated = device.removeprefix(_SIMULATED) if device.startswith(_SIMULATED) else None
        new.setdefault("simulated_gpu", simulated)
    if isinstance(kernels := target.get("kernels"), str):
        why = kernels.removeprefix(_NO_KERNELS) if kernels.startswith(_NO_KERNELS) else None
        new.setdefault("why_no_kernels", why)
        new.setdefault("bf16_widened", kernels.endswith(_WIDENED))
    return new


def _note(note: str) -> dict[str, Any]:
    whole = _NODE.fullmatch(note)
    for node, text in ((None, note), *([whole.group("node", "note")] if whole else ())):
        for code, pattern in _NOTES.items():
            if found := re.match(pattern, text, re.DOTALL):
                fields: dict[str, Any] = found.groupdict()
                if "share" in fields:
                    fields["share"] = int(fields["share"]) / 100
                return {"code": code, "message": note, **fields, **({"node": node} if node else {})}
    return {"code": "NOTE", "message": note, "text": note}
