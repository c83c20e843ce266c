"""Sweeps side by side: each setting that differs in words, and none as Python writes it."""

from typing import Any

import pytest

from megatoken.analysis.sweep import COMPARED, RATIOS, SHOWN, compare_sweeps
from megatoken.errors import UsageError
from megatoken.files import plain
from megatoken.report.console import show


def sweep(name: str, **changed: Any) -> dict[str, Any]:
    """The document of a sweep without points."""
    load = {"arrivals": "poisson", "burstiness": None, "seed": 0, "source": None, "of": None, "stages": None}
    document: dict[str, Any] = dict.fromkeys((*SHOWN, *COMPARED))
    document |= {"name": name, "load_kind": "rate", "model": "tiny", "inputs": [name], "points": [], "route": None}
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


def test_routes_that_differ_are_named() -> None:
    sweeps = [sweep("a", route="chat"), sweep("b", route="completions"), sweep("c")]
    notes = ["not like for like: route differs (a: chat; b: completions; c: without HTTP)"]
    assert compare_sweeps(sweeps)["notes"] == notes
    assert compare_sweeps(sweeps[:1] * 2)["notes"] == []


def staged(name: str, of: str, *stages: tuple[float, float, float]) -> dict[str, Any]:
    """The document of a sweep of stages, whose every figure is 2."""
    each = [dict(zip(("first", "last", "seconds"), stage, strict=True)) for stage in stages]
    latency = {"p50": 2.0, "p99": 2.0, "unreliable": ["p99"]}
    figures = {key: latency if percentile else 2.0 for key, percentile in RATIOS.values()}
    points = [{"value": float(number), "stage": stage, **figures} for number, stage in enumerate(each, 1)]
    return sweep(name, load_kind="stages", of=of, stages=each, points=points)


def test_stages_that_differ_are_named_as_they_are_given_and_have_no_ratio():
    document = compare_sweeps(
        [staged("a", "rate", (4, 4, 20), (4, 64, 60)), staged("b", "rate", (4, 4, 20), (4, 8, 60))]
    )
    assert document["notes"] == ["not like for like: stages differ (a: 4@20,4-64@60; b: 4@20,4-8@60)"]
    assert [(row["value"], row["output"]) for row in document["ratios"]] == [(1.0, 1.0)]


def test_stages_of_rates_are_not_compared_with_stages_of_requests_at_once():
    with pytest.raises(UsageError, match="b: a sweep by stages of concurrency, and a is one by stages of rate"):
        compare_sweeps([staged("a", "rate", (4, 4, 20)), staged("b", "concurrency", (4, 4, 20))])


def test_a_ratio_that_too_few_requests_show_is_marked_as_on_the_pages_of_the_sweeps(
    capsys: pytest.CaptureFixture[str],
) -> None:
    sweeps = [staged("a", "rate", (4, 4, 20)), staged("b", "rate", (4, 4, 20))]
    [row] = (document := compare_sweeps(sweeps))["ratios"]
    assert row["unreliable"] == ["ttft_p99", "tpot_p99"]
    show(plain(document))
    said = capsys.readouterr().out
    assert "1*" in said and "* too few samples" in said
    latency = {"p50": 2.0, "p99": 2.0, "unreliable": []}
    for point in sweeps[0]["points"] + sweeps[1]["points"]:
        point |= {key: latency for key, percentile in RATIOS.values() if percentile}
    assert compare_sweeps(sweeps)["ratios"][0]["unreliable"] == []
