"""The table of reasons: every template can be filled, and fields stay next to the sentence made from them."""

import re
from string import Formatter

import pytest

from megatoken.runs.reasons import TEMPLATES, on_node, reason, shortfall

CHANGE = {"change_share": -0.031, "low_share": -0.05, "high_share": -0.01}


def example(spec: str) -> object:
    if spec == "change":
        return CHANGE
    if spec == "list":
        return ["1 on node0 (killed)", "2 on node1 (silent)"]
    return 3 if spec else "text"


@pytest.mark.parametrize(("code", "template"), [(code, one) for code, every in TEMPLATES.items() for one in every])
def test_every_template_makes_one_line(code: str, template: str) -> None:
    fields = {name: example(spec or "") for _, name, spec, _ in Formatter().parse(template) if name}
    made = reason(code, **fields)
    assert made["code"] == code
    assert {name: made[name] for name in fields} == fields  # type: ignore[literal-required]
    assert not re.search(r"[{}\n]", made["message"])


def test_templates_that_ask_for_more_come_first() -> None:
    for every in TEMPLATES.values():
        names = [{name for _, name, _, _ in Formatter().parse(one) if name} for one in every]
        assert not any(earlier < later for at, later in enumerate(names) for earlier in names[:at])


def test_numbers_read_as_people_write_them() -> None:
    assert shortfall("MIN_DURATION", 17.0812, 600.0)["message"] == "ran 17.08 s of 600 s"
    assert shortfall("TTFT_LIMIT", 2.5, 2.0)["message"] == "p99 TTFT is 2,500 ms, the limit 2,000 ms"
    assert shortfall("EARLY_STOPPING", 1, 64, percentile=90)["message"] == "1 query; a p90 needs 64"
    assert reason("CORE_WAIT", share=0.481)["message"].startswith("CPU contention: this process waited for a core 48 %")
    changed = "the rate changed by -3.1 % (-5.0 to -1.0 %) over the soak"
    assert shortfall("TREND", -0.031, 0.02, change=CHANGE)["message"] == changed


def test_a_field_that_is_not_known_chooses_the_shorter_sentence() -> None:
    counts = {"replicas": 4, "replicas_least": 3, "share_left": 0.75}
    assert reason("LOST_REPLICAS", **counts, losses=None)["message"] == "3 of 4 replicas left (75.0 %)"
    assert reason("LOST_REPLICAS", **counts, losses=["n1"])["message"] == "3 of 4 replicas left (75.0 %); lost: n1"


def test_a_reason_of_one_node_names_it() -> None:
    one = reason("RANDOM_PROMPTS")
    assert on_node(one, "n1") == reason("RANDOM_PROMPTS", node="n1")
    assert on_node(one, "n1")["message"] == f"n1: {one['message']}"


def test_an_unknown_code_or_a_missing_field_is_an_error_of_the_caller() -> None:
    with pytest.raises(KeyError, match="NEVER"):
        reason("NEVER")
    with pytest.raises(KeyError, match="SEEDS needs other fields than none"):
        reason("SEEDS")
