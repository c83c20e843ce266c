"""Units of claims: a claim holds only in its own unit."""

import ast
import json
import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from test_claims import answer_of, write

from claims_support import azure_evidence
from examples import examples
from megatoken.claims.judge import judge
from megatoken.claims.schema import Claim, ClaimsFile, load_claims
from megatoken.claims.units import UnitsError, convert, named, of_formula, parse
from megatoken.errors import UsageError

HOLDS, FAILS, UNKNOWN = "holds", "does not hold", "cannot be determined"
RATE = "sum(tokens_per_second)"
RACK_TDP = "72 * accelerator('GB300', 'tdp_w')"
POWER = "inputs: {power: {value: 100800, unit: W}}"
SHARES = "inputs: {a: {value: 125}, b: {value: 100}}"


@pytest.mark.parametrize(
    ("value", "unit", "formula", "more", "answer", "recomputed"),
    [
        (1100948.3, "W", RATE, "", UNKNOWN, None),
        (1100948.3, "tokens/s", RATE, "", HOLDS, 1100948.3),
        (1.1, "M tokens/s", RATE, "", HOLDS, 1.1009483),
        (1.1, "million output tokens per second", RATE, "", HOLDS, 1.1009483),
        (1100.9, "ktok/s", RATE, "", HOLDS, 1100.9483),
        (1100.9, "k tokens/s", f"{RATE} / 1000", "", HOLDS, 1100.9483),
        (66.06, "M tokens/min", RATE, "", HOLDS, 66.056898),
        (1.1, "k tokens/s", RATE, "", FAILS, 1100.9483),
        (2288.4, "ms", "median(latency_p50_seconds)", "", FAILS, 2288413.4),
        (38.1, "minutes", "median(latency_p50_seconds)", "", HOLDS, 38.14),
        (38.1, "minutes", "median(latency_p50_seconds) / 60", "", HOLDS, 38.14),
        (100800, "kW", RACK_TDP, "presented_as: nameplate", FAILS, 100.8),
        (100.8, "kW", RACK_TDP, "presented_as: nameplate", HOLDS, 100.8),
        (100.8, "kW", f"{RACK_TDP} / 1000", "presented_as: nameplate", HOLDS, 100.8),
        (140, "kW", "100 * accelerator('GB300', 'tdp_w') / 1000", "presented_as: nameplate", HOLDS, 140),
        (0.1008, "MW", f"{RACK_TDP} / 1000", "presented_as: nameplate", UNKNOWN, None),
        (100.8, "kW", "power", POWER, HOLDS, 100.8),
        (100800, "kW", "power", POWER, FAILS, 100.8),
        (10.92, "tokens/J", f"{RATE} / power", POWER, HOLDS, 10.922),
        (10.92, "W", f"{RATE} / power", POWER, UNKNOWN, None),
        (288, "TB", "accelerator('GB300', 'hbm_gb')", "", FAILS, 0.288),
        (288, "tb", "accelerator('GB300', 'hbm_gb')", "", FAILS, 0.288),
        (15000, "TFLOPs", "accelerator('GB300', 'fp4_dense_tflops')", "", UNKNOWN, None),
        (1.08, "EFLOPS", "72 * accelerator('GB300', 'fp4_dense_tflops')", "", HOLDS, 1.08),
        (268.2, "GiB", "accelerator('GB300', 'hbm_gb')", "", HOLDS, 268.22),
        (2, "TB", "number(system.host_storage_capacity, 'TB')", "", HOLDS, 2),
        (72, "tokens/s", "accelerators", "", UNKNOWN, None),
        (25, "%", "a / b - 1", SHARES, HOLDS, 25),
        (25, "% more", "100 * (a / b - 1)", SHARES, HOLDS, 25),
        (0.25, "%", "a / b - 1", SHARES, FAILS, 25),
        (27.2, "%", f"{RATE} / 865584 - 1", "", HOLDS, 27.19),
        (94.2, "%", "min(tokens_per_second) / mean(tokens_per_second)", "", HOLDS, 94.17),
        (5, "W", "mean(tokens_per_second) + mean(duration_seconds)", "", UNKNOWN, None),
        (5, "GB", "accelerator('GB300', 'hbm_gb') + accelerator('GB300', 'driver_memory_mib')", "", UNKNOWN, None),
        (25, "pct", "a / b - 1", SHARES, HOLDS, 25),
        (25, "% uplift", "a / b - 1", SHARES, HOLDS, 25),
        (2288.4, "milliseconds", "median(latency_p50_seconds)", "", FAILS, 2288413.4),
        (2288413400.8, "μs", "median(latency_p50_seconds)", "", HOLDS, 2288413400.8),
        (100.8, "kilowatts", RACK_TDP, "presented_as: nameplate", HOLDS, 100.8),
        (34.7, "Trillion tokens per year", RATE, "", HOLDS, 34.72),
        # The unit of the claim is not known, or of a part of what the formula gives.
        (1100948.3, "widgets", RATE, "", UNKNOWN, None),
        (1100948.3, "tokens/month", RATE, "", UNKNOWN, None),
        (1100948.3, "tokens/s per 72 GPUs", RATE, "", UNKNOWN, None),
        # A number of the formula may be tokens, or have the unit of the formula, but is no bridge to any unit.
        (100800, "tokens/s", RACK_TDP, "presented_as: nameplate", UNKNOWN, None),
        (2419200, "kWh", f"{RACK_TDP} * 24", "presented_as: nameplate", UNKNOWN, None),
        (1100948.3, "W", f"{RATE} ** 1", "", UNKNOWN, None),
        (1.2719, "%", f"{RATE} / 865584", "", FAILS, 127.19),
        (127.19, "%", f"{RATE} / 865584", "", HOLDS, 127.19),
        # Where the formula converts to a third unit, the right value is the converted one.
        (5, "MW", f"{RACK_TDP} / 1000", "presented_as: nameplate", FAILS, 0.1008),
        # Unknown units of an input and of a number of the formula, as before.
        (125, "W", "a", SHARES, HOLDS, 125),
        (1693.8, "interactions/s", f"{RATE} / 650", "", HOLDS, 1693.8),
        (1100.9, "queries/s", f"{RATE} / 1000", "", HOLDS, 1100.9),
    ],
)
def test_a_claim_is_judged_in_its_unit(tmp_path, value, unit, formula, more, answer, recomputed):
    text = f'- {{id: a, text: t, value: {value}, unit: "{unit}", formula: "{formula}"{more and ", "}{more}}}'
    found = answer_of(tmp_path, text, azure_evidence())
    assert found.answer == answer, found.why
    assert (found.recomputed and found.recomputed.value) == (recomputed and pytest.approx(recomputed, rel=1e-3))
    assert bool(found.evidence_that_would_settle) is (answer == UNKNOWN)


def test_a_unit_that_does_not_fit_is_named_with_the_fix(tmp_path):
    claim = '- {id: a, text: t, value: 1100948.3, unit: W, formula: "sum(tokens_per_second)"}'
    why = answer_of(tmp_path, claim, azure_evidence()).why
    assert why == "the formula gives tokens/s, and the claim is in W; correct the unit or the formula"
    ratio = "ratio: {of: {name: x, value: 2}, to: {name: y, value: 1}}"
    answer = answer_of(tmp_path, f"- {{id: a, text: t, value: 2, unit: tokens/s, {ratio}}}", None)
    assert (answer.answer, answer.why.partition(",")[0]) == (UNKNOWN, "a ratio gives times or %")


@pytest.mark.parametrize(
    ("of", "to", "value", "unit", "answer"),
    [
        (5, 4, 1.25, "times", HOLDS),
        (5, 4, 1.25, "", HOLDS),
        (5, 4, 25, "% more", HOLDS),
        (5, 4, 25, "pct", HOLDS),
        (5, 4, 25, "per cent", HOLDS),
        (5, 4, 125, "% of the other", HOLDS),
        (5, 4, 25, "% of the other", FAILS),
        (5, 4, 25, "% slower", FAILS),
        (5, 4, 1.25, "x slower", FAILS),
        (4, 5, 20, "% slower", HOLDS),
        (4, 5, 1.25, "times slower", HOLDS),
        (5, 4, 1.25, "thousand times", UNKNOWN),
        (5, 4, 1.25, "GPUs", UNKNOWN),
    ],
)
def test_a_ratio_is_judged_in_its_unit(tmp_path, of, to, value, unit, answer):
    ratio = f"ratio: {{of: {{name: x, value: {of}}}, to: {{name: y, value: {to}}}}}"
    claim = f'- {{id: a, text: t, value: {value}, unit: "{unit}", {ratio}}}'
    assert answer_of(tmp_path, claim, None).answer == answer


def test_a_number_whose_unit_is_not_stated_is_named(tmp_path):
    claim = '- {{id: a, text: t, value: 1693.8, unit: queries/s, formula: "sum(tokens_per_second) / {0}"{1}}}'
    number = answer_of(tmp_path, claim.format("650", ""), azure_evidence())
    stated = ", inputs: {each: {value: 650, unit: tokens}}"
    known = answer_of(tmp_path, claim.format("each", stated), azure_evidence())
    assert (number.answer, known.answer) == (HOLDS, HOLDS)
    assert "unit not checked" in number.why and "unit not checked" not in known.why


def test_numbers_that_may_convert_and_did_not_are_named(tmp_path):
    claim = '- {id: a, text: t, value: 66056898, unit: tokens/s, formula: "sum(tokens_per_second) * 60"}'
    answer = answer_of(tmp_path, claim, azure_evidence())
    assert answer.answer == HOLDS and "unit not checked" in answer.why


def test_a_unit_of_another_part_than_the_scope_is_refused():
    with pytest.raises(ValueError, match=r"unit tokens/s/GPU is of a GPU, and scope is rack"):
        Claim(id="a", text="t", value=1.0, unit="tokens/s/GPU", scope="rack")
    assert Claim(id="a", text="t", value=1.0, unit="tokens/s per accelerator", scope="gpu").is_plain_rate


def test_a_text_is_no_value_of_a_number(tmp_path):
    claim = "- {id: a, text: t, value: 1.1M, unit: tokens/s, formula: sum(tokens_per_second)}"
    with pytest.raises(UsageError, match=r"'1\.1M' is text, and the formula gives a number; write a number"):
        answer_of(tmp_path, claim, azure_evidence())


@pytest.mark.parametrize(
    ("used", "unit", "formula", "answer", "reason"),
    [
        ("value: 1e7, unit: tokens/s, scope: rack", "tokens/s", "claim('p') / 72", UNKNOWN, "which does not hold"),
        ("value: 3, unit: W, settle: [a meter]", "W", "claim('p')", UNKNOWN, "which cannot be determined"),
        ("value: 100800, unit: W, presented_as: nameplate, formula: RACK", "W", "claim('p')", FAILS, "p is nameplate"),
        ("value: 100800, unit: W, presented_as: estimate, formula: RACK", "W", "claim('p')", FAILS, "p is an estimate"),
        ("value: 3, unit: W, presented_as: estimate, formula: '3'", "W", "claim('p')", FAILS, "p is an estimate"),
    ],
)
def test_a_claim_is_no_better_than_those_it_uses(tmp_path, used, unit, formula, answer, reason):
    value = {"claim('p') / 72": 138888.9}.get(formula, 100800 if "RACK" in used else 3)
    claims = f"""- {{id: a, text: t, value: {value}, unit: {unit}, formula: "{formula}"}}
- {{id: p, text: t, {used.replace("RACK", f'"{RACK_TDP}"')}}}
"""
    first = judge(load_claims(write(tmp_path, claims)), azure_evidence())[0]
    assert (first.claim.id, first.answer) == ("a", answer) and reason in first.why


@pytest.mark.parametrize(("scope", "answer"), [("rack", HOLDS), ("node", FAILS)])
def test_a_rate_in_millions_has_the_scopes_of_a_rate(tmp_path, scope, answer):
    claim = f"- {{id: a, text: t, value: 1.1, unit: M tokens/s, scope: {scope}}}"
    found = answer_of(tmp_path, claim, azure_evidence())
    assert (found.answer, found.errors) == (answer, () if answer == HOLDS else ("scope",))


@pytest.mark.parametrize("unit", ["people", "concurrent chats", "customers per rack", "employees"])
def test_people_at_one_time_are_concurrency(tmp_path, unit):
    claim = f"- {{id: a, text: t, value: 1693.8, unit: {unit}, formula: sum(tokens_per_second) / 650}}"
    assert answer_of(tmp_path, claim, azure_evidence()).errors == ("rate sold as concurrency",)


@pytest.mark.parametrize("unit", ["people/s", "chats per second", "customers an hour"])
def test_people_over_time_are_a_rate(tmp_path, unit):
    claim = f"- {{id: a, text: t, value: 1693.8, unit: {unit}, formula: sum(tokens_per_second) / 650}}"
    assert answer_of(tmp_path, claim, azure_evidence()).answer == HOLDS


@pytest.mark.parametrize(
    ("value", "rounded_to", "fits"), [(288, 1000, False), (0, 2, False), (0, 0.1, True), (-1, 1, True)]
)
def test_no_claim_is_rounded_to_more_than_itself(value, rounded_to, fits):
    def claim():
        return Claim(id="a", text="t", value=float(value), rounded_to=rounded_to, formula="1")

    if fits:
        assert claim().tolerance == rounded_to / 2
    else:
        with pytest.raises(ValueError, match="any number would agree; give the step"):
            claim()


@pytest.mark.parametrize(
    ("name", "unit"),
    [
        ("latency_p50_seconds", "s"),
        ("makespan_tokens_per_second", "tokens/s"),
        ("target_qps", "queries/s"),
        ("measured_watts", "W"),
        ("tdp_w", "W"),
        ("scale_up_gb_s_per_gpu_both_directions", "GB/s"),
        ("driver_memory_mib", "MiB"),
        ("fp4_dense_tflops", "TFLOPS"),
        ("config.server_target_latency_ms", "ms"),
        ("config.tensor_parallelism", None),
        ("system.region_us", None),
    ],
)
def test_names_carry_their_unit(name, unit):
    assert named(name) == (unit and parse(unit))


@pytest.mark.parametrize(
    ("one", "same", "times"),
    [
        ("kWh", "MJ", 3.6),
        ("kw", "W", 1000),
        ("KiB", "bytes", 1024),
        ("TB", "GB", 1000),
        ("GiB", "MiB", 1024),
        ("Gbit/s", "MB/s", 125),
        ("PFLOPS", "TFLOP/s", 1000),
        ("tok/s", "tokens per second", 1),
        ("tokens/s/W", "tokens/J", 1),
        ("$ per 1M tokens", "$/token", 1e-6),
        ("USD/hour", "$/h", 1),
        ("percent", "times", 0.01),
        ("days", "hours", 24),
        ("W/GPU", "Watts", 1),
    ],
)
def test_spellings_and_prefixes(one, same, times):
    assert convert(1.0, parse(one), parse(same)) == [pytest.approx(times)]


@pytest.mark.parametrize("text", ["", "users", "Gb", "m tokens", "% an", "/s", "of Offline", "ROUGE-1", "S", "MS"])
def test_what_is_no_known_unit(text):
    assert parse(text) is None


SYMBOLS = st.sampled_from(["s", "W", "J", "B", "Wh", "tokens", "FLOPS", "$"])
PREFIXES = st.sampled_from(["", "k", "M", "G", "T", "P"])


@settings(max_examples=examples(200), deadline=None)
@given(SYMBOLS, SYMBOLS, *[PREFIXES] * 4, st.floats(1e-6, 1e12))
def test_a_value_comes_back_from_any_unit_of_its_dimensions(over, under, a, b, c, d, value):
    one, other = parse(f"{a}{over}/{b}{under}"), parse(f"{c}{over}/{d}{under}")
    (there,) = convert(value, one, other)
    (back,) = convert(there, other, one)
    assert math.isclose(back, value)
    assert convert(value, one, one) == [value]


@settings(max_examples=examples(100), deadline=None)
@given(SYMBOLS, SYMBOLS)
def test_other_dimensions_never_fit(one, other):
    first, second = parse(one), parse(other)
    if first.dimensions != second.dimensions:
        with pytest.raises(UnitsError, match="the formula gives"):
            convert(1.0, first, second)


WORDS = ("tokens", "s", "W", "%", "M", "GB", "/", "per", "a", "1000", "k", "$", "x", "0", "(", ")", "·", "²")
TEXTS = st.lists(st.sampled_from(WORDS), max_size=6).map(" ".join)
FORMULAS = st.recursive(
    st.sampled_from(["sum(tokens_per_second)", "nodes", "power", "1", "1000", "0.01", "1e308", "650"]),
    lambda inner: st.tuples(inner, st.sampled_from("+-*/"), inner).map(lambda parts: f"({''.join(parts)})"),
    max_leaves=8,
)


@settings(max_examples=examples(300), deadline=None)
@given(TEXTS | st.text(max_size=12), FORMULAS, TEXTS)
def test_any_unit_and_formula_have_an_answer(unit, formula, of_input):
    claim = Claim(
        id="a", text="t", value=1.0, unit=unit, formula=formula, inputs={"power": {"value": 9, "unit": of_input}}
    )
    try:
        (answer,) = judge(ClaimsFile(title="t", source="s", claims=[claim]), azure_evidence(2))
    except UsageError:
        return
    json.dumps(answer.to_document(), allow_nan=False)


@settings(max_examples=examples(200), deadline=None)
@given(FORMULAS)
def test_a_formula_of_unknown_facts_has_no_unit_or_a_plain_one(formula):
    unit = of_formula(ast.parse(formula, mode="eval").body, lambda *_: None)
    assert unit is None or unit.dimensions == ()
