"""The rounds whose rules a run may claim: those whose seeds and numbers are known, each as the tables have it."""

from importlib.metadata import version
from pathlib import Path
from typing import get_args

import pytest

from megatoken.analysis.published import published_results
from megatoken.config import RoundName, RunConfig
from megatoken.errors import UsageError
from megatoken.harness import prepare as preparing
from megatoken.harness.loadgen_plan import plan_test, run_round
from megatoken.harness.prepare import Prepared
from megatoken.harness.progress import Progress
from megatoken.mlperf.benchmarks import BENCHMARKS, benchmark_of, benchmarks
from megatoken.mlperf.loadgen_builds import round_of_build
from megatoken.mlperf.rounds import round_seeds, rules
from megatoken.targets.in_process import InProcessBackend


def prepare(config: RunConfig) -> Prepared:
    return preparing.prepare(config, InProcessBackend(config, Progress(quiet=True)))


@pytest.mark.parametrize(
    ("benchmark", "rounds"),
    [
        ("llama2-70b-99", "v5.0 v5.1 v6.0"),
        ("llama2-70b-99.9", "v5.0 v5.1 v6.0 v6.1"),
        ("llama3.1-405b", "v5.0 v5.1 v6.0"),
        ("llama3.1-8b", "v5.1 v6.0 v6.1"),
        ("mixtral-8x7b", "v5.0 v5.1 v6.0"),
        ("deepseek-r1", "v5.1 v6.0 v6.1"),
        ("gpt-oss-120b", "v6.0 v6.1"),
    ],
)
def test_published_rows_are_of_benchmarks_of_their_round(benchmark: str, rounds: str) -> None:
    """The results of a round name the benchmarks and scenarios that the rules know, and the rules no other round."""
    entry = benchmarks()[benchmark]
    assert list(entry.rounds) == rounds.split()
    rows = [row for row in published_results() if row.benchmark == benchmark and row.division == "closed"]
    assert {row.round for row in rows} - {"v4.1"} <= set(entry.rounds)
    for row in rows:
        if row.round in entry.rounds:
            then = entry.in_round(row.round)
            assert then.has(row.scenario) or (row.round, row.scenario) == ("v5.0", "Interactive"), row.name
        if entry.tokens_per_sample and row.output_tokens_per_sample:
            low, high = entry.tokens_per_sample
            assert low <= row.output_tokens_per_sample <= high, row.name


def test_what_a_submission_must_show() -> None:
    mixtral = benchmarks()["mixtral-8x7b"]
    assert mixtral.required == {"datacenter": ("Offline", "Server")}
    assert (mixtral.accuracy["gsm8k"], mixtral.accuracy["mbxp"]) == (72.9234, 59.5584)
    deepseek = benchmarks()["deepseek-r1"]
    assert deepseek.required["datacenter"] == ("Offline", "Server|Interactive")
    assert deepseek.in_round("v5.1").required["datacenter"] == ("Offline", "Server")
    assert benchmarks()["gpt-oss-120b"].compliance == ("TEST07", "TEST09")


@pytest.mark.parametrize("name", get_args(RoundName))
@pytest.mark.parametrize("benchmark", BENCHMARKS)
def test_a_round_has_its_seeds_and_the_benchmarks_numbers(tmp_path: Path, name: str, benchmark: str) -> None:
    config = RunConfig(model="tiny", rules=name, benchmark=benchmark, out=tmp_path)
    variants = [one for one in benchmarks().values() if one.name.removesuffix("-99.9").removesuffix("-99") == benchmark]
    if not any(name in variant.rounds for variant in variants):
        with pytest.raises(UsageError, match=f"--rules {name}: that round has no {benchmark}; rounds that have it: v"):
            prepare(config)
        return
    round_ = run_round(config)
    assert (round_.name, round_.benchmark.rows) == (name, variants[0].rows)
    assert round_.min_duration_seconds == rules()["min_duration_ms"] / 1000
    seeds = plan_test(config, 10, 1.0).seeds
    assert (seeds.qsl, seeds.sample_index, seeds.schedule) == round_seeds()[name]


def test_rounds_of_which_something_is_not_known_are_not_offered() -> None:
    assert set(get_args(RoundName)) <= set(round_seeds())
    assert not {"v4.1", "v5.0"} & set(get_args(RoundName))  # seeds are known, limits are not


def test_a_scenario_that_the_benchmark_has_not_is_told_before_the_run(tmp_path: Path) -> None:
    def warnings(benchmark: str | None) -> tuple[str, ...]:
        config = RunConfig(model="tiny", rules="v5.1", scenario="singlestream", benchmark=benchmark, out=tmp_path)
        return tuple(warning for warning in prepare(config).warnings if "scenario" in warning)

    expected = "cannot be VALID: llama2-70b has no scenario singlestream, only offline, server and interactive"
    assert warnings(None) == (expected,)
    assert warnings("llama3.1-8b-edge") == ()


def test_a_scenario_that_came_later_is_refused_under_the_rules_before_it(tmp_path: Path) -> None:
    """deepseek-r1's Interactive is in no mlperf.conf of v5.1."""
    config = RunConfig(model="tiny", rules="v5.1", scenario="interactive", benchmark="deepseek-r1", out=tmp_path)
    with pytest.raises(UsageError) as caught:
        prepare(config)
    message = "deepseek-r1 has no scenario interactive in that round; rounds that have it: v6.0, v6.1"
    assert str(caught.value) == f"--rules v5.1: {message}"
    assert run_round(config).benchmark.scenarios == ("Offline", "Server")
    later = config.model_copy(update={"rules": "v6.0"})
    assert prepare(later).warnings == prepare(later.model_copy(update={"scenario": "server"})).warnings
    limits = run_round(later).benchmark.limits["Interactive"]
    assert (limits.ttft_seconds, limits.tpot_seconds) == (1.5, 0.015)


@pytest.mark.parametrize(
    ("benchmark", "with_it", "without_it"),
    [("deepseek-r1", {"v6.0", "v6.1"}, {"v5.1"}), ("llama3.1-405b", {"v5.1", "v6.0"}, {"v5.0"})],
)
def test_an_audit_knows_which_rounds_had_interactive(benchmark: str, with_it: set[str], without_it: set[str]) -> None:
    assert set(benchmarks()[benchmark].rounds) == with_it | without_it
    for name in with_it | without_it:
        then = benchmark_of(benchmark, None, name)
        assert then is not None
        assert then.has("Interactive") is ("Interactive" in then.limits) is (name in with_it)
        assert then.has("Server") and "Server" in then.limits


def test_a_loadgen_of_another_round_is_noted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def noted(name: str) -> list[dict[str, object]]:
        notes = prepare(RunConfig(model="tiny", rules=name, out=tmp_path)).notes
        return [dict(note) for note in notes if note["code"] == "OTHER_SEEDS"]

    installed = version("mlcommons-loadgen")
    own = round_of_build(installed)
    assert own in get_args(RoundName)
    for name in get_args(RoundName):
        assert [(note["brings"], note["round"]) for note in noted(name)] == [(own, name)] * (name != own)
    monkeypatch.setattr(preparing, "version", lambda package: "99.0")
    (note,) = noted("v6.1")
    assert note["message"] == "LoadGen 99.0 brings unknown seeds; it was given those of v6.1 instead"
