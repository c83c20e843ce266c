"""Claims files: every mistake is one line that names the line, the key and how to fix it; never a traceback."""

import math
import os

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st
from test_claims import write

from claims_support import azure_evidence
from examples import examples
from megatoken.claims.facts import Facts, FormulaError
from megatoken.claims.formula import Lookups, evaluate, first_number
from megatoken.claims.judge import judge
from megatoken.claims.schema import Claim, load_claims
from megatoken.errors import UsageError

GOOD = "- {id: a, text: t, value: 1.5, unit: x, formula: 3 / 2}"


@pytest.mark.parametrize(
    ("claims", "message"),
    [
        (GOOD.replace("formula", "formlua"), "claims.yaml:5: unknown key 'claims.a.formlua'; did you mean formula?"),
        (GOOD.replace("unit: x", "zzz: 1"), "claims.yaml:5: unknown key 'claims.a.zzz'; known are id, text"),
        (
            GOOD.replace("unit: x", "inputs: {v: {vlaue: 1}}"),
            "unknown key 'claims.a.inputs.v.vlaue'; did you mean value?",
        ),
        (
            "- {id: a, text: t, value: 1, ratio: {of: {name: x, valu: 1}, to: {name: y, value: 1}}}",
            "unknown key 'claims.a.ratio.of.valu'; did you mean value?",
        ),
        (GOOD.replace("id: a, ", ""), "claims.yaml:5: key 'claims.0.id' is missing; add it"),
        (GOOD.replace("value: 1.5", "value: '1,100,948.3'"), "is text; write the number without quotes, commas"),
        (
            GOOD.replace("value: 1.5", "value: .nan"),
            "'claims.a.value': must be true or false or a finite number or text, got nan",
        ),
        (GOOD.replace("value: 1.5", "value: [1]"), "'claims.a.value': must be true or false or a number or text"),
        (GOOD.replace("unit: x", "scope: galaxy"), "'claims.a.scope': must be 'gpu', 'node' or 'rack'"),
        (GOOD.replace("unit: x", "accelerators: 1.5"), "'claims.a.accelerators': must be a whole number, got 1.5"),
        (GOOD.replace("unit: x", "settle: x"), "'claims.a.settle': must be a list; begin each entry with a dash"),
        (GOOD.replace("unit: x", "inputs: {v: {value: y}}"), "'claims.a.inputs.v.value': must be a number, got 'y'"),
        (GOOD.replace("unit: x", "inputs: {V: {value: 1}}"), "'claims.a.inputs.V': must be a small letter"),
        (GOOD.replace("3 / 2", "3"), "'claims.a.formula': must be text or a mapping of keys to values"),
        (GOOD.replace("3 / 2", "{x: 3}"), "'claims.a.formula.x': must be text, got 3"),
        (GOOD.replace("formula: 3 / 2", ""), "nothing to recompute"),
        (GOOD.replace("formula: 3 / 2", "formula: {}"), "formula is empty"),
        (GOOD.replace("formula: 3 / 2", "formula: ''"), "formula is empty"),
        (GOOD.replace("unit: x", "rounded_to: 0"), "'claims.a.rounded_to': must be more than 0, got 0"),
        (GOOD + "\n" + GOOD, "several claims have the id a"),
        (
            "- {id: a, text: t, value: 1, ratio: {of: {name: x}, to: {name: y, value: 1}}}",
            "exactly one of value, published",
        ),
        (
            "- {id: a, text: t, value: 1, ratio: {of: {name: x, published: nope}, to: {name: y, value: 1}}}",
            "'claims.a.ratio.of.published': must be like",
        ),
        ("- 3", "'claims.0': must be a mapping of keys to values"),
        ("  []", "'claims': must have at least 1"),
        ("  3", "'claims': must be a list"),
        ("- {id: a, 7: t}", "claims.yaml:5: unknown key 'claims.a.7'"),
        ("- {id: a, [t]: u}", "claims.yaml:5: unknown key 'claims.a.?'"),
        ("- {id: a, text: t, text: u}", "claims.yaml:5: key 'text' is given twice; keep one"),
        ("- &x {id: a}\n- *x", "claims.yaml:5: aliases (*name) are not supported; write the value out"),
        (
            "- [",
            "claims.yaml:6: not YAML: expected the node content, but found '<stream end>'; correct it there or just",
        ),
        ("- !!python/object:os.system {}", "claims.yaml:5: key 'claims.0.id' is missing"),
    ],
)
def test_one_line_says_what_is_wrong(tmp_path, claims, message):
    with pytest.raises(UsageError) as error:
        load_claims(write(tmp_path, claims))
    assert message in str(error.value)
    assert "\n" not in str(error.value)


def test_files_that_are_none(tmp_path):
    missing, binary, listing, large, deep = (tmp_path / name for name in ("no", "binary", "list", "large", "deep"))
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    binary.write_bytes(b"\xff\xfe\x00")
    listing.write_text("- 1")
    large.write_text("# " + "x" * 2**20)
    deep.write_text("claims: " + "[" * 20_000)
    for path, words in [
        (missing, "No such file"),
        (tmp_path, "it is a directory"),
        (pipe, "writes into this pipe"),
        (binary, "not UTF-8"),
        (listing, "must be a mapping"),
        (large, "larger than"),
        (deep, "deep"),
    ]:
        with pytest.raises(UsageError, match=words):
            load_claims(path)


@pytest.mark.parametrize(
    ("value", "rounded_to", "tolerance"),
    [(865000.0, None, 0.5), (8.9, None, 0.05), (43.98689, None, 5e-6), (1e-7, None, 5e-8), (15200.0, 100, 50)],
)
def test_tolerance_is_half_of_the_last_digit(value, rounded_to, tolerance):
    claim = Claim(id="a", text="t", value=value, rounded_to=rounded_to, formula="1")
    assert claim.tolerance == pytest.approx(tolerance)


def lookups(**more) -> Lookups:
    return Lookups(Claim(id="a", text="t", value=1.0, formula="1", **more), Facts(), {})


@pytest.mark.parametrize(
    ("formula", "value"),
    [
        ("1 + 2 * 3 - -4 / 2", 9),
        ("ceil(11.08) + floor(2.9) + abs(-1) + sqrt(4)", 17),
        ("median(3, 1, 2) + max(1, 2) + count(1, 2, 3)", 7),
        ("number('host: 1,024.5 GB')", 1024.5),
        ("number('4-GPU node: 2 TB SSD', 'TB')", 2),
        ("accelerator('GB300', 'hbm_gb')", 288),
        ("published('4.1-0043', 'llama2-70b-99', 'Offline', 'per_gpu')", 3065.6125),
        ("published('5.0-NVIDIA/B200-SXM-180GBx8_TRT', 'llama2-70b-99.9', 'Interactive')", 59_409.3),
        ("published('6.0-0078', 'llama2-70b', 'Offline', 'tokens_per_sample')", 272.0),
        ("count_results(round='v5.1') + count_results(round='v5.1', division='open')", 373),
        ("count_results(round='v6.0', division='closed|open')", 399),
        ("count_results(round='6.1', division='closed|open')", 400),
        ("count_submitters(round='v6.0', submitter='oracle|ORACLE')", 1),
        (
            "best_result('per_gpu', round='v5.1', accelerator='GB200', scenario='offline', submitter='NVIDIA')",
            12_934.225,
        ),
        ("best_result('watts', round='v4.1')", 6280.214),
        ("best_result('total', accelerators=288, benchmark='deepseek-r1')", 2_705_130),
    ],
)
def test_formulas(formula, value):
    assert evaluate(formula, lookups()) == pytest.approx(value)


@pytest.mark.parametrize(
    ("formula", "message"),
    [
        ("__import__('os').system('true')", "is not arithmetic over facts"),
        ("[1 for _ in 'a']", "is not arithmetic over facts"),
        ("(1).__class__", "is not arithmetic over facts"),
        ("lambda: 1", "is not arithmetic over facts"),
        ("1 if 2 else 3", "is not arithmetic over facts"),
        ("True + 1", "true and false are not numbers"),
        ("1 / 0", "has no result"),
        ("9.0 ** 99999", "has no result"),
        ("(-8) ** 0.5", "not finite"),
        ("1e999", "too large for a float"),
        ("1 +", "invalid syntax"),
        ("1" * 501, "longer than"),
        ("(" * 400 + ")" * 400, "longer than"),
        ("(" * 240 + "1" + ")" * 240, "too many nested"),
        ("stdev(1)", "has no result"),
        ("sum()", "takes a list of facts"),
        ("sum('a')", "takes a list of facts"),
        ("sqrt(-1)", "has no result"),
        ("number('none')", "found no number"),
        ("number('2 GB', 'TB')", "found no number"),
        ("tokens_per_secnd", "did you mean tokens_per_second?"),
        ("sum(1, x=1)", "takes no names with ="),
        ("published('5.1-0008', 'llama2-70b-99', 'Offline', round='v5.1')", "published() with 4 arguments; write"),
        ("count_results(roud='v5.1')", "unknown filter roud; did you mean round?"),
        ("count_results(**1)", "unknown filter **"),
        ("count_results('v5.1')", "count_results() with 1 argument; write"),
        ("best_result('per_gpu', round='v5.2')", "no published row has round 'v5.2'"),
        ("best_result('per_gp', round='v5.1')", "did you mean per_gpu?"),
        ("nosuch('a')", "unknown function 'nosuch'; known are abs, accelerator"),
        ("medain(1)", "unknown function 'medain'; did you mean median?"),
        ("model('a', 'b')", "model() with 2 arguments; write model(name)"),
        ("claim(b)", "claim(b) lacks quotes; write claim('b')"),
        ("claim(system.framework)", "needs a claim id in quotes"),
        ("9 ** 9 ** 9 ** 9", "has no result: Numerical result out of range"),
        ("accelerator('GB30', 'tdp_w')", "unknown accelerator 'GB30'; did you mean GB300?"),
        ("accelerator('GB300', 'tdp')", "unknown column 'tdp'; did you mean tdp_w?"),
        ("model('llama3.1-405')", "did you mean llama3.1-405b?"),
        ("published('5.1-0008', 'llama2-70b-99', 'Offline', 'per_gp')", "did you mean per_gpu?"),
        ("claim('zz')", "unknown claim"),
        ("'text' + 1", "is the text 'text'"),
    ],
)
def test_formulas_that_are_none(formula, message):
    with pytest.raises(FormulaError) as error:
        evaluate(formula, lookups())
    assert message in str(error.value)


def test_lists_do_not_enter_arithmetic(tmp_path):
    claims = load_claims(write(tmp_path, "- {id: a, text: t, value: 1, formula: tokens_per_second / 2}"))
    with pytest.raises(UsageError, match=r"claim a: .*is a list of 18; use sum, max, min"):
        judge(claims, azure_evidence())
    claims = load_claims(write(tmp_path, "- {id: a, text: t, value: 1, formula: tokens_per_second}"))
    with pytest.raises(UsageError, match="list of different values"):
        judge(claims, azure_evidence())


def answers(tmp_path, *claims):
    return judge(load_claims(write(tmp_path, "\n".join(claims))), None)


@pytest.mark.parametrize("formula", ["1 / 0", "9 ** 9 ** 9 ** 9"])
def test_a_formula_of_constants_without_a_result_is_a_mistake(tmp_path, formula):
    with pytest.raises(UsageError, match=r"claim a: formula .* has no result: .*; correct the formula"):
        answers(tmp_path, f"- {{id: a, text: t, value: 1, formula: {formula}}}")


@pytest.mark.parametrize(
    ("formulas", "circle"),
    [(("claim('a')",), "a -> a"), (("claim('b') * 2", "claim('c')", "sum(claim('a'), 1)"), "a -> b -> c -> a")],
)
def test_no_claim_proves_itself(tmp_path, formulas, circle):
    claims = [
        f'- {{id: {name}, text: t, value: 5, formula: "{formula}"}}'
        for name, formula in zip("abc", formulas, strict=False)
    ]
    with pytest.raises(UsageError) as error:
        answers(tmp_path, *claims)
    assert f"({circle}); give it another formula" in str(error.value)


def test_what_rests_on_the_file_alone_says_so(tmp_path):
    alone, on_another, published = answers(
        tmp_path,
        "- {id: a, text: t, value: 3, formula: median(3)}",
        "- {id: b, text: t, value: 216, formula: \"claim('a') * 72\"}",
        "- {id: c, text: t, value: 288, formula: \"accelerator('GB300', 'hbm_gb')\"}",
    )
    assert [one.answer for one in (alone, on_another, published)] == ["holds"] * 3
    assert all("only from numbers of the claims file" in one.why for one in (alone, on_another))
    assert "claims file" not in published.why


def test_a_ratio_without_its_counts_is_a_mistake(tmp_path):
    claims = write(
        tmp_path, "- {id: a, text: t, value: 1, scope: gpu, ratio: {of: {name: x, value: 1}, to: {name: y, value: 1}}}"
    )
    with pytest.raises(UsageError, match="claim a: ratio: x has no rate per GPU; state accelerator"):
        judge(load_claims(claims), None)


def test_first_number():
    assert first_number("288 GB") == 288
    with pytest.raises(FormulaError):
        first_number(3.0)


WORDS = st.sampled_from(
    [
        "sum",
        "tokens_per_second",
        "(",
        ")",
        "+",
        "-",
        "*",
        "/",
        "**",
        "1",
        "9e99",
        ",",
        "'a'",
        "published",
        "claim",
        ".",
        "if",
        "config.precision",
        "number",
        "\x00",
        "é",
    ]
)


@settings(max_examples=examples(300), deadline=None)
@given(st.lists(WORDS, max_size=12).map(" ".join) | st.text(max_size=60))
def test_any_formula_gives_a_value_or_one_line(formula):
    from megatoken.claims.facts import UnknownFactError, gather

    names = Lookups(Claim(id="a", text="t", value=1.0, formula="1"), gather(azure_evidence(2)), {})
    try:
        value = evaluate(formula, names)
    except (FormulaError, UnknownFactError):
        pass
    else:
        assert isinstance(value, str | tuple) or math.isfinite(value)


KEYS = (
    st.sampled_from(
        [
            "title",
            "source",
            "claims",
            "id",
            "text",
            "value",
            "unit",
            "scope",
            "formula",
            "ratio",
            "of",
            "to",
            "name",
            "inputs",
            "runs",
            "zz",
        ]
    )
    | st.integers()
)
LEAVES = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(max_size=8)
    | st.dates()
    | st.sampled_from(["a", "tokens/s", "rack", "sum(tokens_per_second)"])
)
TREES = st.recursive(
    LEAVES, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(KEYS, inner, max_size=6), max_leaves=20
)


@settings(max_examples=examples(200), deadline=None)
@given(
    st.dictionaries(st.sampled_from(["title", "source", "claims", "runs", "x"]), TREES, max_size=4),
    st.binary(max_size=60),
)
def test_any_file_gives_answers_or_one_line(tmp_path_factory, tree, junk):
    path = tmp_path_factory.mktemp("claims") / "claims.yaml"
    for content in (yaml.safe_dump(tree, allow_unicode=True).encode("utf-8", "surrogatepass"), junk):
        path.write_bytes(content)
        try:
            judge(load_claims(path), azure_evidence(2))
        except UsageError as error:
            lines = str(error).splitlines()
        else:
            lines = [""]
        assert len(lines) == 1
