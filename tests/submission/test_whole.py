"""Trees built from real runs are accepted, by the check and by the audit, in both layouts and divisions."""

import json
import shutil
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

import pytest

from megatoken.audit import Severity, audit
from megatoken.submission import check

ROUNDS = ("v5.1", "v6.1")


@pytest.mark.parametrize("division", ["closed", "open"])
@pytest.mark.parametrize("round_", ROUNDS)
def test_a_tree_of_real_runs_is_accepted(built: Callable[[str, str], Path], round_: str, division: str) -> None:
    root = built(round_, division)
    for given in (None, round_):
        result = check(root, round=given)
        assert [problem.to_document() for problem in result.problems] == []
        assert (result.exit_code, result.round, result.mlcommons_refuses) == (0, round_, False)
    found = {(figure.key.scenario, figure.unit) for _, _, figure in result.results}
    assert found == {("Offline", "tokens/s"), ("Server", "tokens/s")}
    failed = [asdict(item) for item in audit(root, round=round_).findings if item.severity is Severity.FAIL]
    assert failed == []


def test_a_part_of_a_tree_is_accepted(built: Callable[[str, str], Path]) -> None:
    root = built("v5.1", "closed")
    for part in ("closed", "closed/Vendor"):
        assert check(root / part).refusals == ()


def test_the_figure_is_that_of_the_log(built: Callable[[str, str], Path]) -> None:
    root = built("v5.1", "closed")
    document = json.loads(json.dumps(check(root).to_document()))
    assert (document["decision"], document["mlcommons_checker"]) == ("accepted", "accepts")
    for result in document["results"]:
        log = root / "closed/Vendor/results/sys" / result["benchmark"] / result["scenario"] / "performance/run_1"
        key = {"Offline": "result_tokens_per_second", "Server": "result_completed_tokens_per_second"}
        line = f'"key": "{key[result["scenario"]]}", "value": {result["value"]:g},'
        assert line in (log / "mlperf_log_detail.txt").read_text()


def test_results_of_endpoints_are_not_decided(built: Callable[[str, str], Path], tmp_path: Path) -> None:
    root = Path(shutil.copytree(built("v6.1", "closed"), tmp_path / "tree"))
    folders = [root / "closed/Vendor/results/sys/gpt-oss-120b" / scenario for scenario in ("Offline", "Server")]
    for folder in folders:
        for name in (
            "config.yaml",
            "measurements.json",
            "performance/result_summary.json",
            "accuracy/accuracy_results.json",
        ):
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_text("{}")
    result = check(root)
    places = [str(folder.relative_to(root)) for folder in folders]
    assert (result.refusals, result.endpoints) == ((), tuple(places))
    assert any(line.startswith(f"not decided: {places[0]}") for line in result.describe())
    shutil.rmtree(folders[1])
    (refused,) = check(root).refusals
    assert refused.check == "submission.required_scenarios"


@pytest.mark.parametrize("round_", ROUNDS)
def test_other_benchmarks_of_the_round_are_not_decided(
    built: Callable[[str, str], Path], tmp_path: Path, round_: str
) -> None:
    """Results without a language model, also of a system that has no others; a model of no round is refused."""
    root = Path(shutil.copytree(built(round_, "closed"), tmp_path / "tree"))
    vendor = root / "closed/Vendor"
    shutil.copy(vendor / "systems/sys.json", vendor / "systems/edge.json")
    folders = [vendor / f"results/{name}" for name in ("edge/bert-99/SingleStream", "sys/resnet50/Offline")]
    for folder in folders:
        (folder / "performance/run_1").mkdir(parents=True)
        (folder / "performance/run_1/mlperf_log_detail.txt").write_text("not read")
        (folder / "performance/run_1/images.npz").write_text("")
    result = check(root)
    places = tuple(str(folder.relative_to(root)) for folder in folders)
    assert (result.refusals, result.warnings, result.others) == ((), (), places)
    assert result.to_document()["undecided"] == list(places)
    shown = list(result.describe())
    assert "not decided: 2 results without a language model (bert-99, resnet50)" in shown
    assert shown[-1].startswith(f"Accepted by the rules of {round_}") and "but for what is not decided" in shown[-1]
    folders[1].parent.rename(folders[1].parent.with_name("resnet18"))
    assert "check.benchmark" in {problem.check for problem in check(root).refusals}


@pytest.mark.parametrize("round_", ROUNDS)
def test_contradictions_that_an_audit_finds_are_warnings(
    built: Callable[[str, str], Path], tmp_path: Path, round_: str
) -> None:
    """One run for two systems, and a user.conf of another rate, which speaks for the performance run alone."""
    root = Path(shutil.copytree(built(round_, "closed"), tmp_path / "tree"))
    vendor = root / "closed/Vendor"
    for folder in [path for path in vendor.rglob("sys") if path.is_dir()]:
        shutil.copytree(folder, folder.with_name("twin"))
    shutil.copyfile(vendor / "systems/sys.json", vendor / "systems/twin.json")
    for described in vendor.rglob("twin/**/sys_megatoken_*.json"):
        described.rename(described.with_name(described.name.replace("sys", "twin", 1)))
    configured = next(vendor.rglob("sys/*/Offline/user.conf"))
    configured.write_text("*.Offline.target_qps = 12345\n")
    result = check(root)
    against = (Severity.FAIL, Severity.WARN)
    found = {finding.id for finding in audit(root, round=round_).findings if finding.severity in against}
    warnings = {problem.check: problem for problem in result.warnings}
    assert found == warnings.keys() == {"submission.copies", "configuration.user_conf"}
    assert result.refusals == ()
    places = [str(Path(place.file).parent) for place in warnings["configuration.user_conf"].where]
    run = vendor / "results/sys" / configured.parent.parent.name / "Offline/performance/run_1"
    assert places == [str(folder.relative_to(root)) for folder in (configured.parent, run)]
