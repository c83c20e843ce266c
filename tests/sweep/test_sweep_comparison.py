"""Sweeps side by side: each setting that differs in words, and none as Python writes it."""

from typing import Any

from megatoken.analysis.sweep import COMPARED, SHOWN, compare_sweeps


def sweep(name: str, **changed: Any) -> dict[str, Any]:
    """The document of a sweep without points."""
    load = {"arrivals": "poisson", "burstiness": None, "seed": 0, "source": None, "of": None, "stages": None}
    document: dict[str, Any] = dict.fromkeys((*SHOWN, *COMPARED))
    document |= {"name": name, "load_kind": "rate", "model": "tiny", "inputs": [name], "points": []}
    of_load = {key: changed.pop(key) for key in list(changed) if key in load}
    return {**document, **changed, "load": {**load, **of_load}}


def test_each_setting_that_differs_is_named_and_unknown_ones_are_not_stated():
    notes = compare_sweeps([sweep("a"), sweep("b", ttft_limit_seconds=2.0, burstiness=0.5)])["notes"]
    assert notes == [
        "not like for like: ttft limit seconds differs (a: not stated; b: 2.0)",
        "not like for like: burstiness differs (a: not stated; b: 0.5)",
    ]
    assert compare_sweeps([sweep("a"), sweep("b")])["notes"] == []
    same_name = compare_sweeps([sweep("a"), sweep("a", model="small")])["notes"]
    assert same_name == ["not like for like: model differs (a (1): tiny; a (2): small)"]
