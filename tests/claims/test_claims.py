"""The claims of the five source documents answered from the published artefacts: right answer, right value."""

import json
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from claims_support import EXAMPLES, SYSTEM, azure_evidence, lines
from megatoken.analysis.aggregation import aggregate
from megatoken.audit.evidence import AccuracyResult, Evidence, Power, System, node_rows
from megatoken.claims.facts import gather
from megatoken.claims.judge import judge
from megatoken.claims.schema import load_claims
from megatoken.errors import UsageError

HOLDS, FAILS, UNKNOWN = "holds", "does not hold", "cannot be determined"
NAMEPLATE, PROJECTION = "nameplate sold as measured", "projection sold as measurement"

# file, claim: answer, recomputed value as rounded, kinds of error
EXPECTED = {
    ("vendor-blog", "system"): (HOLDS, 72, ()),
    ("vendor-blog", "memory"): (FAILS, 284_208, ("fact",)),
    ("vendor-blog", "power-limit"): (HOLDS, 1400, ()),
    ("vendor-blog", "storage"): (FAILS, 2, ("fact",)),
    ("vendor-blog", "scenario"): (HOLDS, "Offline", ()),
    ("vendor-blog", "round"): (HOLDS, "v5.1", ()),
    ("vendor-blog", "precision"): (HOLDS, "fp4", ()),
    ("vendor-blog", "total"): (HOLDS, 1_100_948.3, ()),
    ("vendor-blog", "maximum"): (HOLDS, 62_803.9, ()),
    ("vendor-blog", "minimum"): (HOLDS, 57_599.1, ()),
    ("vendor-blog", "mean"): (HOLDS, 61_163.8, ()),
    ("vendor-blog", "median"): (FAILS, 62_111.7, ("arithmetic",)),
    ("vendor-blog", "unverified"): (HOLDS, "Unofficial Submission", ()),
    ("vendor-blog", "h100-per-gpu"): (HOLDS, 3065.6, ()),
    ("vendor-blog", "five-times-h100"): (HOLDS, 4.99, ()),
    ("vendor-blog", "over-gb200"): (HOLDS, 27.19, ()),
    ("vendor-blog", "gemm"): (HOLDS, 2.55, ()),
    ("vendor-blog", "memory-bandwidth"): (HOLDS, 92.1, ()),
    ("vendor-blog", "cpu-to-gpu"): (HOLDS, 4.1, ()),
    ("vendor-blog", "accurate"): (UNKNOWN, None, ()),
    ("news-item", "single-run"): (FAILS, 1_100_948.3, ("scope",)),
    ("news-item", "one-run"): (FAILS, 18, ("fact",)),
    ("news-item", "single-vm"): (FAILS, 61_163.8, ("scope",)),
    ("news-item", "per-gpu"): (HOLDS, 15_290.9, ()),
    ("news-item", "memory"): (HOLDS, 50, ()),
    ("news-item", "thermal-design-power"): (FAILS, 16.7, ("arithmetic",)),
    ("news-item", "one-domain"): (FAILS, 1, ("arithmetic",)),
    ("news-item", "previous-record"): (UNKNOWN, None, ()),
    ("news-item", "accuracy"): (UNKNOWN, None, ()),
    ("news-item", "latency"): (UNKNOWN, None, ()),
    ("forum-analysis", "nvlink"): (HOLDS, 129.6, ()),
    ("forum-analysis", "fp4-low"): (HOLDS, 1080, ()),
    ("forum-analysis", "fp4-high"): (HOLDS, 1440, ()),
    ("forum-analysis", "pooled-memory"): (FAILS, 1, ("arithmetic",)),
    ("forum-analysis", "copies"): (FAILS, 72, ("arithmetic",)),
    ("forum-analysis", "per-gpu"): (HOLDS, 15_290.9, ()),
    ("forum-analysis", "uplift"): (HOLDS, 27.3, ()),
    ("forum-analysis", "validated"): (FAILS, "Unofficial Submission", ("fact",)),
    ("forum-analysis", "fast-memory-low"): (HOLDS, 38.02, ()),
    ("forum-analysis", "fast-memory-high"): (HOLDS, 38.02, ()),
    ("forum-analysis", "production-cluster"): (UNKNOWN, None, ()),
    ("forum-analysis", "fewer-racks"): (UNKNOWN, None, ()),
    ("analyst-gb300", "total"): (HOLDS, 1_100_948.3, ()),
    ("analyst-gb300", "rack-at-once"): (FAILS, 1_030_088, ("fact",)),
    ("analyst-gb300", "parallel"): (UNKNOWN, None, ()),
    ("analyst-gb300", "fault-domain"): (HOLDS, 68, ()),
    ("analyst-gb300", "duration"): (HOLDS, 78.1, ()),
    ("analyst-gb300", "samples"): (FAILS, 1_029_600, ("arithmetic",)),
    ("analyst-gb300", "stable"): (UNKNOWN, None, ()),
    ("analyst-gb300", "spread"): (FAILS, 9.04, ("arithmetic",)),
    ("analyst-gb300", "production-spread"): (UNKNOWN, None, ()),
    ("analyst-gb300", "within-three"): (FAILS, 3.05, ("arithmetic",)),
    ("analyst-gb300", "close-median"): (UNKNOWN, None, ()),
    ("analyst-gb300", "median-latency"): (FAILS, 2288.4, ("arithmetic",)),
    ("analyst-gb300", "tokens-per-sample"): (HOLDS, 272.73, ()),
    ("analyst-gb300", "rag-context"): (FAILS, 1152, ("arithmetic",)),
    ("analyst-gb300", "capacity-chat"): (HOLDS, 1693.8, ()),
    ("analyst-gb300", "capacity-rag"): (HOLDS, 440.4, ()),
    ("analyst-gb300", "capacity-summary"): (HOLDS, 440.4, ()),
    ("analyst-gb300", "capacity-agent"): (HOLDS, 110.1, ()),
    ("analyst-gb300", "users"): (FAILS, 1693.8, ("rate sold as concurrency",)),
    ("analyst-gb300", "efficiency-h100"): (FAILS, 4.375, ("arithmetic", NAMEPLATE, "estimate sold as measurement")),
    ("analyst-gb300", "efficiency-gb200"): (FAILS, 10.01, (NAMEPLATE,)),
    ("analyst-gb300", "efficiency-gb300"): (FAILS, 10.92, (NAMEPLATE,)),
    ("analyst-gb300", "efficiency-over-gb200"): (HOLDS, 9.1, ()),
    ("analyst-gb300", "efficiency-uplift"): (FAILS, 95.9, ("arithmetic",)),
    ("analyst-gb300", "twice-per-watt"): (HOLDS, 1.96, ()),
    ("analyst-gb300", "nearly-two-and-a-half"): (HOLDS, 2.496, ()),
    ("analyst-gb300", "performance-per-power"): (HOLDS, 9.0, ()),
    ("analyst-gb300", "ten-times-h100"): (FAILS, 4.99, ("like for like", "estimate sold as measurement", "arithmetic")),
    ("analyst-gb300", "ten-times-b200"): (FAILS, 1.20, ("like for like", "arithmetic")),
    ("analyst-gb300", "software"): (FAILS, "TensorRT 1.2.0rc1, CUDA 13.0", ("fact",)),
    ("analyst-gb300", "rules"): (UNKNOWN, None, ()),
    ("analyst-gb300", "submitted"): (FAILS, "Unofficial Submission", ("fact",)),
    ("analyst-gb300", "target"): (FAILS, 395, ("fact",)),
    ("analyst-gb300", "general-availability"): (UNKNOWN, None, ()),
    ("analyst-gb200", "per-vm"): (HOLDS, 52_061.6, ()),
    ("analyst-gb200", "per-gpu"): (HOLDS, 13_015.4, ()),
    ("analyst-gb200", "per-rack"): (FAILS, 937_109, (PROJECTION,)),
    ("analyst-gb200", "uplift"): (HOLDS, 8.26, ()),
    ("analyst-gb200", "large-model-vm"): (HOLDS, 847.23, ()),
    ("analyst-gb200", "large-model"): (FAILS, 847.23, ("scope",)),
    ("analyst-gb200", "architecture"): (FAILS, "dense", ("fact",)),
    ("analyst-gb200", "leader"): (HOLDS, 13_015.4, ()),
    ("analyst-gb200", "two-clouds"): (FAILS, 6, ("fact",)),
    ("analyst-gb200", "server"): (HOLDS, 0.884, ()),
    ("analyst-gb200", "fewer-vms"): (FAILS, 12, ("arithmetic",)),
    ("analyst-gb200", "more-per-rack"): (UNKNOWN, None, ()),
    ("analyst-gb200", "predictable"): (UNKNOWN, None, ()),
    ("newer-rounds", "still-highest"): (FAILS, 1_136_100, ("fact",)),
    ("newer-rounds", "still-highest-per-gpu"): (FAILS, 16_531.6, ("fact",)),
    ("newer-rounds", "successor"): (HOLDS, 1_126_850, ()),
    ("newer-rounds", "successor-of-the-successor"): (HOLDS, 1_136_100, ()),
    ("newer-rounds", "shorter-answers"): (HOLDS, 7.62, ()),
    ("newer-rounds", "any-model"): (HOLDS, 1_197_710, ()),
    ("newer-rounds", "submitters"): (FAILS, 5, ("fact",)),
}


@pytest.fixture(scope="module")
def answers():
    return {
        (file.stem, answer.claim.id): answer
        for file in sorted(EXAMPLES.glob("*.yaml"))
        for answer in judge(load_claims(file), azure_evidence())
    }


def test_every_shipped_claim_has_its_expected_answer(answers):
    assert len(list(EXAMPLES.glob("*.yaml"))) == 6
    assert set(answers) == set(EXPECTED)


@pytest.mark.parametrize("key", EXPECTED, ids="/".join)
def test_the_answer(answers, key):
    answer, (expected, value, errors) = answers[key], EXPECTED[key]
    assert (answer.answer, answer.errors) == (expected, errors), answer.why
    if isinstance(value, int | float):
        decimals = len(repr(value).partition(".")[2])
        assert answer.recomputed.value == pytest.approx(value, abs=0.5 * 10.0**-decimals + 0.06 * (decimals == 1))
    else:
        assert (answer.recomputed.value if answer.recomputed else None) == value
    assert bool(answer.evidence_that_would_settle) >= (expected == UNKNOWN)


@pytest.mark.parametrize(
    ("key", "words"),
    [
        (("vendor-blog", "memory"), "that is the figure of GB200"),
        (("news-item", "single-run"), "the sum of 18 runs, each with its own LoadGen; the largest single run has"),
        (("vendor-blog", "total"), "sum of 18 node rates, not shown to be simultaneous"),
        (("vendor-blog", "over-gb200"), "against 18 times the verified GB200 VM 5.1-0008 (verified) it is 17.48 %"),
        (("vendor-blog", "gemm"), "FP8, size 16384: 2.402 times; FP4 over FP8, size 16384: 6.273"),
        (("vendor-blog", "cpu-to-gpu"), "device to host: 3.712"),
        (("vendor-blog", "five-times-h100"), "precision fp4 vs fp8"),
        (
            ("news-item", "single-vm"),
            "is the rate of the rack in the artefacts, not of one node, which has 57,599.1 to 62,803.9",
        ),
        (("analyst-gb300", "rack-at-once"), "if all nodes had started together"),
        (("analyst-gb300", "spread"), "of the fastest: 8.287 %; of the mean: 8.51 %; of the median: 8.38 %"),
        (("analyst-gb300", "samples"), "issued, fewest: 1,032,192 samples; issued, most: 1,056,768"),
        (("analyst-gb300", "samples"), "requested, most: 1,042,800"),
        (("analyst-gb300", "median-latency"), "mean of the node medians: 2,301.8 s"),
        (("analyst-gb300", "duration"), "longest: 83.4 minutes; shortest: 74.84 minutes"),
        (("analyst-gb300", "target"), "lowest of the logs: 390"),
        (("analyst-gb300", "efficiency-gb300"), "100,800 W, is 72 x 1,400 W TDP of GB300: the accelerators only"),
        (("analyst-gb300", "efficiency-h100"), "with the verified 5.1-0016: 5.575"),
        (("analyst-gb300", "efficiency-over-gb200"), "with 18 times the verified 5.1-0008: 0.7002 %"),
        (("analyst-gb300", "ten-times-h100"), "not 10 times: 11.23 times in total"),
        (("analyst-gb300", "ten-times-h100"), "accelerators 72 vs 32; an estimate: 32 H100; per GPU it is 4.993"),
        (("analyst-gb300", "ten-times-b200"), "not 10 times: 10.84 times in total"),
        (("analyst-gb300", "users"), "Little's law"),
        (("analyst-gb200", "per-rack"), "5.1-0008:llama2-70b-99:Offline measured 4 accelerators, not a rack"),
        (("analyst-gb200", "large-model"), "is the rate of one GPU in 5.1-0008:llama3.1-405b:Offline, not of one node"),
        (("analyst-gb200", "leader"), "best of 94 rows: 5.1-0008:llama2-70b-99:Offline"),
        (("analyst-gb200", "two-clouds"), "submitters: Azure, Google, Lambda, Nebius, Oracle, Vultr"),
        (("analyst-gb300", "twice-per-watt"), "others give as in table 3: 2.496 times"),
        (("analyst-gb200", "uplift"), "rack projection vs whole rack"),
    ],
)
def test_why(answers, key, words):
    assert words in answers[key].why


def test_what_would_settle(answers):
    assert "power_begin" in answers["analyst-gb300", "parallel"].evidence_that_would_settle[0]
    assert "accuracy.txt" in answers["news-item", "accuracy"].evidence_that_would_settle[0]
    assert "once a second" in answers["analyst-gb300", "stable"].evidence_that_would_settle[0]
    assert "wall power" in answers["analyst-gb300", "efficiency-gb300"].evidence_that_would_settle[0]
    assert "has 512" in answers["forum-analysis", "production-cluster"].evidence_that_would_settle[0]


def test_answers_name_their_places(answers):
    places = answers["vendor-blog", "total"].where
    assert len(places) == 18
    assert places[0].file.endswith("ND_GB300_v6_1/llama2-70b-99/Offline/mlperf_log_detail.txt")
    assert places[0].line == 80
    (place,) = answers["vendor-blog", "storage"].where
    assert (place.file, place.line) == ("systems/ND_GB300_v6.json", lines(SYSTEM)["host_storage_capacity"])
    (place,) = answers["analyst-gb200", "per-vm"].where
    assert place.file == "megatoken/data/mlperf_v5.1_llm_results.csv"


def test_the_document_is_plain_json(answers):
    for answer in answers.values():
        document = json.loads(json.dumps(answer.to_document(), allow_nan=False))
        assert document["answer"] in (HOLDS, FAILS, UNKNOWN)
        assert set(document["claimed"]) == {"value", "unit", "scope", "relation", "presented_as"}


def write(tmp_path: Path, claims: str, more: str = "") -> Path:
    path = tmp_path / "claims.yaml"
    indented = "\n".join(f"  {line}" for line in claims.strip("\n").splitlines())
    path.write_text(f"title: t\nsource: s\n{more}\nclaims:\n{indented}\n", encoding="utf-8")
    return path


def answer_of(tmp_path: Path, claim: str, evidence: Evidence | None, more: str = ""):
    (answer,) = judge(load_claims(write(tmp_path, claim, more)), evidence)
    return answer


@pytest.mark.parametrize(
    ("claim", "errors"),
    [
        (
            "{id: a, text: t, value: 1100948.3, unit: tokens/s, scope: node, formula: sum(tokens_per_second)}",
            ("scope",),
        ),
        ("{id: a, text: t, value: 61163.8, unit: tokens/s, scope: gpu}", ("scope",)),
        ("{id: a, text: t, value: 15290.9, unit: tokens/s, scope: node}", ("scope",)),
        ("{id: a, text: t, value: 1200000, unit: tokens/s, scope: rack, relation: at least}", ("arithmetic",)),
        ("{id: a, text: t, value: 62803.9, unit: tokens/s, scope: node}", ("arithmetic",)),
        (
            "{id: a, text: racks will do it, value: 1100948.3, unit: tokens/s, scope: rack, presented_as: measurement}",
            ("forecast sold as measurement",),
        ),
        (
            "{id: a, text: t, value: 1694, unit: concurrent sessions, formula: sum(tokens_per_second) / 650}",
            ("rate sold as concurrency",),
        ),
        (
            "{id: a, text: t, value: 1400, unit: W, formula: \"accelerator('GB300', 'tdp_w')\"}",
            (NAMEPLATE,),
        ),
    ],
)
def test_errors_in_kind(tmp_path, claim, errors):
    assert answer_of(tmp_path, f"- {claim}", azure_evidence()).errors == errors


@pytest.mark.parametrize(
    ("words", "more"),
    [("as expected, 1.1 M tokens/s", ", presented_as: measurement"), ("racks that will ship made it", "")],
)
def test_a_true_measurement_is_not_refuted_by_a_word(tmp_path, words, more):
    claim = f'{{id: a, text: "{words}", value: 1100948.3, unit: tokens/s, scope: rack{more}}}'
    answer = answer_of(tmp_path, f"- {claim}", azure_evidence())
    assert (answer.answer, answer.errors) == (HOLDS, ())
    assert ("does not say presented_as" in answer.why) is (not more)


def test_users_at_once_need_the_time_they_stay(tmp_path):
    claim = """
- id: users
  text: t
  value: 16938
  unit: users
  formula: sum(tokens_per_second) / 650 * stay
  inputs: {stay: {value: 10, unit: s, state: measured}}
"""
    assert answer_of(tmp_path, claim, azure_evidence()).answer == HOLDS


def test_a_division_or_model_that_differs_is_like_for_like_error(tmp_path):
    claim = """
- id: open-against-closed
  text: t
  value: 1
  rounded_to: 1
  unit: times
  scope: gpu
  ratio:
    of: {name: MI355X, published: "5.1-0098:llama2-70b-99:Offline"}
    to: {name: GB200, published: "5.1-0008:llama3.1-405b:Offline"}
"""
    answer = answer_of(tmp_path, claim, None)
    assert "like for like" in answer.errors
    assert "division open vs closed, model llama2-70b vs llama3.1-405b" in answer.why
    assert {place.line for place in answer.where} and len(answer.where) == 2


def test_measured_power_is_no_nameplate(tmp_path):
    claim = """
- id: efficiency
  text: t
  value: 9.89
  unit: tokens/J
  formula: 102909 / published("5.1-0061", "llama2-70b-99", "Offline", "watts")
- id: over-nameplate
  text: t
  value: 1.30
  rounded_to: 0.01
  presented_as: nameplate
  formula: published("5.1-0061", "llama2-70b-99", "Offline", "watts") / (8 * accelerator("B200", "tdp_w"))
- id: unmeasured
  text: t
  value: 5
  unit: tokens/J
  formula: 52061.6 / published("5.1-0008", "llama2-70b-99", "Offline", "watts")
"""
    measured, over, unmeasured = judge(load_claims(write(tmp_path, claim)), None)
    assert (measured.answer, over.answer, unmeasured.answer) == (HOLDS, HOLDS, UNKNOWN)


def timed(evidence: Evidence, seconds: float) -> Evidence:
    start = datetime(2025, 10, 16, 12, tzinfo=UTC)
    runs = [
        replace(run, figures=replace(run.figures, began_at=start + timedelta(seconds=index * seconds)))
        for index, run in enumerate(evidence.runs)
    ]
    return replace(evidence, runs=tuple(runs))


@pytest.mark.parametrize(("seconds", "nodes", "answer"), [(0.5, 3, HOLDS), (5000.0, 18, FAILS)])
def test_with_clocks_simultaneity_is_answered(tmp_path, seconds, nodes, answer):
    evidence = timed(azure_evidence(nodes), seconds)
    claim = "- {id: a, text: t, value: yes, formula: simultaneous}"
    assert answer_of(tmp_path, claim, evidence).answer == answer
    total = answer_of(tmp_path, "- {id: a, text: t, value: 1, unit: tokens/s, scope: rack}", evidence)
    assert ("shown not to be simultaneous" in total.why) == (answer == FAILS)


def test_accuracy_and_power_evidence_settle_their_claims(tmp_path):
    evidence = azure_evidence()
    scores = AccuracyResult("accuracy.txt", "llama2-70b-99", {"rouge1": 44.1}, "abc")
    power = tuple(Power(f"{run.path}/power", run.path, 6000.0, 100) for run in evidence.runs)
    evidence = replace(evidence, accuracy_results=(scores,), power=power)
    claim = """
- {id: accurate, text: t, value: 43.98689, relation: at least, formula: accuracy.rouge1}
- {id: watts, text: t, value: 108000, unit: W, formula: measured_watts}
"""
    assert [answer.answer for answer in judge(load_claims(write(tmp_path, claim)), evidence)] == [HOLDS, HOLDS]


def test_rows_for_the_aggregation_from_percentiles_of_completions():
    result = aggregate(node_rows(azure_evidence()))
    assert result.accelerators == 72
    assert result.stragglers.nodes == tuple(f"ND_GB300_v6_{number}" for number in (4, 8, 13, 14, 16))
    assert result.common_window.conditional
    assert 1_100_948 < result.common_window.output_tokens_per_second < 1_130_000  # the nodes' tails lie outside


def test_a_single_run_is_the_whole_system():
    facts = gather(azure_evidence(1))
    assert facts.values["accelerators"].value == 72
    assert facts.values["nodes"].value == 18


def test_several_results_need_a_choice(tmp_path):
    evidence = azure_evidence()
    runs = tuple(replace(run, benchmark="llama3.1-8b") if index % 2 else run for index, run in enumerate(evidence.runs))
    evidence = replace(evidence, kind="submission", runs=runs)
    claim = "- {id: a, text: t, value: 62690.8, unit: tokens/s, formula: sum(tokens_per_second)}"
    assert "choose one with the key runs" in answer_of(tmp_path, claim, evidence).evidence_that_would_settle[0]
    assert answer_of(tmp_path, claim, evidence, 'runs: "results/ND_GB300_v6_1/*"').answer == HOLDS
    with pytest.raises(UsageError, match="matches nothing/"):
        answer_of(tmp_path, claim, evidence, 'runs: "nothing/*"')


def test_contradictory_systems_are_no_fact(tmp_path):
    other = System("systems/b.json", SYSTEM | {"framework": "vLLM"}, {})
    evidence = azure_evidence()
    runs = (*evidence.runs[:9], *(replace(run, system="systems/b.json") for run in evidence.runs[9:]))
    evidence = replace(evidence, systems=(*evidence.systems, other), runs=runs)
    claim = "- {id: a, text: t, value: vLLM, formula: system.framework}"
    assert answer_of(tmp_path, claim, evidence).answer == UNKNOWN


def test_a_missing_definition_does_not_hide_one_that_agrees(tmp_path):
    claim = """
- id: a
  text: t
  value: 72
  formula: {by counting: accelerators, by power: measured_watts / 1400}
"""
    answer = answer_of(tmp_path, claim, azure_evidence())
    assert answer.answer == HOLDS
    assert answer_of(tmp_path, claim.replace("72", "71"), azure_evidence()).answer == UNKNOWN


def test_what_these_artefacts_cannot_give_is_no_mistake_of_the_claims():
    for file in EXAMPLES.glob("*.yaml"):
        alone = replace(azure_evidence(1), systems=(), configurations=())
        answers = judge(load_claims(file), alone)
        assert all(answer.why for answer in answers)
        assert judge(load_claims(file), Evidence("empty", "nodes", None, ()))


def test_the_deviation_of_one_node_cannot_be_determined(tmp_path):
    answer = answer_of(tmp_path, "- {id: a, text: t, value: 3, formula: stdev(tokens_per_second)}", azure_evidence(1))
    assert answer.answer == UNKNOWN
    assert "has no result" in answer.why


def test_samples_follow_from_the_rate_of_the_logs_and_medians_are_half_of_the_duration():
    values = gather(azure_evidence()).values
    rates, requested = values["target_qps"].value, values["samples_requested"].value
    assert set(rates) == {390, 395}
    assert [round(1.1 * rate * 2400) for rate in rates] == list(requested)
    assert {(rate, count) for rate, count in zip(rates, requested, strict=True)} == {(390, 1_029_600), (395, 1_042_800)}
    shares = [
        median / whole
        for median, whole in zip(
            *(values[name].value for name in ("latency_p50_seconds", "duration_seconds")), strict=True
        )
    ]
    assert (round(min(shares), 2), round(max(shares), 2)) == (0.47, 0.5)


def test_a_node_of_a_rack_measured_as_one_run(tmp_path):
    rack = azure_evidence(1)
    claim = "- {id: a, text: t, value: %s, unit: tokens/s, scope: %s}"
    assert answer_of(tmp_path, claim % (62690.8, "rack"), rack).answer == HOLDS
    assert answer_of(tmp_path, claim % (62690.8, "node"), rack).errors == ("scope",)
    assert answer_of(tmp_path, claim % (3482.8, "node"), rack).answer == HOLDS
    assert answer_of(tmp_path, claim % (870.7, "gpu"), rack).answer == HOLDS
