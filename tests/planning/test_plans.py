"""Plans as documents: plain JSON, every figure with unit and state, and no number that breaks one."""

import json
import math

import pytest
from hypothesis import event, given, settings
from hypothesis import strategies as st

from megatoken.errors import MegatokenError
from megatoken.planning.assumptions import load_assumptions
from megatoken.planning.capacity import plan_capacity
from megatoken.planning.cost import System, plan_cost
from megatoken.planning.energy import plan_energy, power_of
from megatoken.planning.figures import STATES, weakest
from megatoken.planning.fleet_plan import Supply, load_demand, plan_fleet, plan_replacement
from megatoken.planning.throughput import from_number
from megatoken.planning.workloads import load_profiles

PROFILES = load_profiles()


def all_plans(throughput, assumptions):
    power = power_of(throughput)
    supply = Supply.of(System(throughput, power), 4, 18)
    demand = load_demand("users", 100_000, "office_day")
    return [
        plan_capacity(throughput, PROFILES, assumptions),
        plan_fleet(supply, demand, assumptions, profile=PROFILES[0], burst=supply),
        plan_replacement(12, 48_088.0, supply),
        plan_energy(throughput, power, assumptions, profiles=PROFILES),
        plan_cost(System(throughput, power), PROFILES, assumptions),
        plan_cost(System(throughput, None, 2.5), PROFILES, assumptions),
    ]


def numbers(value):
    if isinstance(value, dict):
        for item in value.values():
            yield from numbers(item)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from numbers(item)
    elif isinstance(value, int | float) and not isinstance(value, bool):
        yield value


def test_documents_are_plain_json_in_the_agreed_form(rack, assumptions):
    for plan in all_plans(rack, assumptions):
        document = plan.to_document()
        assert json.loads(json.dumps(document, allow_nan=False)) == document
        assert document["kind"] in ("plan_capacity", "plan_fleet", "plan_energy", "plan_cost")
        assert document["schema_version"] == 1 and document["title"]
        assert document["created_at"].endswith("Z")
        for one in document["inputs"]:
            assert one["state"] in STATES and one["source"] and one["unit"], one
        for one in document["results"]:
            assert one["state"] in STATES and one["unit"] and one["formula"], one
        for table in document["tables"]:
            assert table["title"] and table["rows"]
            assert len({tuple(row) for row in table["rows"]}) == 1, table["name"]  # one shape
        assert len({one["name"] for one in document["results"]}) == len(document["results"])


def test_no_result_is_surer_than_its_inputs(rack, assumptions):
    assert weakest(["verified", "assumed", "measured"]) == "assumed"
    for plan in all_plans(rack, assumptions):
        given_states = [one.state for one in plan.inputs]
        assert all(STATES.index(one.state) >= STATES.index(weakest(given_states)) for one in plan.results)
        assert not any(one.state in ("verified", "measured") for one in plan.results)


SETTABLE = st.sampled_from(sorted(load_assumptions().entries))


@settings(max_examples=60, deadline=None)
@given(
    st.floats(allow_nan=True, allow_infinity=True) | st.floats(1e-9, 1e12),
    st.integers(-1, 10**7) | st.none(),
    st.floats(0, 1e6),
    st.dictionaries(SETTABLE, st.floats(0, 1e15), max_size=3),
)
def test_any_numbers_give_finite_plans_or_one_line(rate, accelerators, mix, changes):
    try:
        assumptions = load_assumptions(settings=[f"{name}={value!r}" for name, value in changes.items()])
        throughput = from_number(
            rate, scope="rack", accelerators=accelerators, accelerator="GB300", input_tokens_per_output_token=mix,
            assumptions=assumptions,
        )  # fmt: skip
        plans = all_plans(throughput, assumptions)
    except MegatokenError as error:
        message, plans = str(error), []
        event("refused")
    else:
        message = ""
        event("planned")
    assert "\n" not in message
    for plan in plans:
        document = plan.to_document()
        assert all(math.isfinite(number) for number in numbers(document))
        json.dumps(document, allow_nan=False)


def test_unknown_results_and_tables_are_key_errors(rack, assumptions):
    plan = plan_capacity(rack, PROFILES, assumptions)
    with pytest.raises(KeyError):
        plan.result("no such")
    with pytest.raises(KeyError):
        plan.table("no such")
