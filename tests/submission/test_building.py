"""What a build takes from run folders, what it leaves to a person, and what it refuses."""

import json
import resource
import shutil
from collections.abc import Callable
from hashlib import sha256
from pathlib import Path

import making
import pytest
import yaml
from submission_trees import SEEDS, Make, all_runs, evaluate, fill, verify

from megatoken.audit import audit
from megatoken.audit.evidence import Role
from megatoken.engine.schemes import find_scheme
from megatoken.errors import StorageError, UsageError
from megatoken.mlperf.benchmarks import benchmarks
from megatoken.mlperf.detail_log import read_detail_log
from megatoken.mlperf.rounds import rules
from megatoken.runs.reasons import reason
from megatoken.runs.run import read_run
from megatoken.submission import RefusedRunsError, build, check
from megatoken.submission.description import system_description, system_name
from megatoken.submission.runs import SubmittedRun, missing_runs

H200 = {
    "operating_system": "Ubuntu 24.04.2 LTS",
    "kernel": "Linux 6.8.0",
    "python": "CPython 3.12.3",
    "cpu": {
        "model": "INTEL(R) XEON(R) PLATINUM 8568Y+",
        "physical_cores": 96,
        "logical_cores": 192,
        "usable_cores": 16,
    },
    "memory": {"total_bytes": 2_164_012_744_704},
    "gpus": [
        {
            "name": "NVIDIA H200",
            "memory_bytes": 150_754_820_096,
            "driver_version": "570.86.15",
            "power_limit_watts": 700.0,
            "max_clock_mhz": 1980,
        }
    ],
    "packages": {"megatoken": "0.1.0", "torch": "2.11.0", "triton": None},
    "source": {"revision": "abc123", "modified": False},
}


def built(runs: list[Path], out: Path, **options: str) -> Path:
    given = {"submitter": "Vendor", "division": "closed", "round_": "v5.1", "system": "sys", **options}
    return build(runs, out=out, **given).path


def refusals(runs: list[Path], out: Path, **options: str) -> tuple[str, ...]:
    """The lines of a build that is refused; nothing may be left of it."""
    before = sorted(out.parent.iterdir())
    with pytest.raises(RefusedRunsError) as caught:
        built(runs, out, **options)
    assert sorted(out.parent.iterdir()) == before
    assert all("\n" not in line for line in caught.value.lines)
    return caught.value.lines


def rewrite(run: Path, **values: object) -> Path:
    """Says it in the result, with the notes that such a run has, as a run without hashes of its plan."""
    result = {**json.loads((run / "result.json").read_text()), **values}
    result.pop("plan_sha256", None)
    notes = [note for note in result["notes"] if note["code"] != "RANDOM_WEIGHTS"]
    if result["weights"].startswith("random"):
        notes.append(reason("RANDOM_WEIGHTS"))
    (run / "result.json").write_text(json.dumps({**result, "notes": notes}))
    return run


def files_of(root: Path) -> set[str]:
    return {str(path.relative_to(root)) for path in root.rglob("*") if path.is_file()}


LOGS = ("mlperf_log_accuracy.json", "mlperf_log_detail.txt", "mlperf_log_summary.txt")


def test_the_layout_of_v5(originals: Make, tmp_path: Path) -> None:
    root = built(all_runs(originals, ("offline",)), tmp_path / "tree")
    key = "sys/llama2-70b-99.9/Offline"
    assert files_of(root / "closed/Vendor") == {
        *(f"results/{key}/performance/run_1/{name}" for name in LOGS),
        *(f"results/{key}/accuracy/{name}" for name in (*LOGS, "accuracy.txt")),
        *(f"measurements/{key}/{name}" for name in ("sys_megatoken_Offline.json", "user.conf", "README.md")),
        *(f"compliance/{key}/TEST06/{name}" for name in ("verify_accuracy.txt", "accuracy/mlperf_log_accuracy.json")),
        "systems/sys.json",
        "code/llama2-70b-99.9/README.md",
        "documentation/calibration.md",
    }


def test_the_layout_of_v6(originals: Make, tmp_path: Path) -> None:
    root = built(all_runs(originals, ("offline",), seeds=SEEDS["v6.1"]), tmp_path / "tree", round_="v6.1")
    key = "results/sys/llama2-70b-99.9/Offline"
    assert files_of(root / "closed/Vendor") == {
        *(f"{key}/performance/run_1/{name}" for name in LOGS),
        *(f"{key}/accuracy/{name}" for name in (*LOGS, "accuracy.txt")),
        *(f"{key}/{name}" for name in ("measurements.json", "user.conf", "README.md")),
        *(f"{key}/TEST06/{name}" for name in ("verify_accuracy.txt", "accuracy/mlperf_log_accuracy.json")),
        "systems/sys.json",
        "src/README.md",
        "documentation/calibration.md",
    }


def test_logs_are_those_of_the_runs(originals: Make, tmp_path: Path) -> None:
    performance, accuracy, compliance = runs = all_runs(originals, ("offline",))
    results = built(runs, tmp_path / "tree") / "closed/Vendor/results/sys/llama2-70b-99.9/Offline"
    for name in LOGS:
        assert (results / "performance/run_1" / name).read_bytes() == (performance / "mlperf" / name).read_bytes()
    whole = (accuracy / "mlperf/mlperf_log_accuracy.json").read_bytes()
    cut = (results / "accuracy/mlperf_log_accuracy.json").read_bytes()
    assert len(whole) > 10_240 >= len(cut)
    assert cut == whole[:4096] + b"\n\n...\n\n" + whole[-4096:]
    assert (results / "accuracy/accuracy.txt").read_text().endswith(f"hash={sha256(whole).hexdigest()}\n")
    tested = results.parents[3] / "compliance/sys/llama2-70b-99.9/Offline/TEST06/accuracy/mlperf_log_accuracy.json"
    assert tested.read_bytes() == (compliance / "mlperf/mlperf_log_accuracy.json").read_bytes()


def test_what_is_not_known_is_listed_marked_and_refused(originals: Make, tmp_path: Path) -> None:
    made = build(
        all_runs(originals), submitter="Vendor", division="closed", round_="v5.1", out=tmp_path / "tree", system="sys"
    )
    system = "closed/Vendor/systems/sys.json"
    lines = (made.path / system).read_text().splitlines()
    assert all("TO FILL: " in text and text in lines[line - 1] for file, line, text in made.to_fill if file == system)
    keys = {text.split('"')[1] for file, _, text in made.to_fill if file == system}
    assert keys == {
        *("status", "host_processors_per_node", "host_processor_core_count", "host_memory_configuration"),
        *("host_storage_capacity", "host_storage_type", "host_networking", "host_networking_topology"),
        *("host_network_card_count", "cooling"),
    }
    result = check(made.path)
    assert {problem.rule.id for problem in result.refusals if problem.rule} == {"FILL", "S1"}  # no status
    places = {(place.file, place.line) for problem in result.refusals for place in problem.where}
    assert places == {(file, line) for file, line, _ in made.to_fill}
    assert check(fill(made.path)).refusals == ()


def test_a_description_says_what_the_inventory_says(originals: Make) -> None:
    run = read_run(originals("offline"))
    run.environment.clear()
    run.environment.update(H200)
    run.result["target"] = {"device": "NVIDIA H200"}
    description = system_description(run, submitter="Vendor", division="closed", benchmark="llama2-70b-99", name="one")
    assert list(description) == rules()["system_keys"]
    assert description["system_type"] == "datacenter"
    assert description["accelerators_per_node"] == "1"
    assert description["accelerator_model_name"] == "NVIDIA H200"
    assert description["accelerator_memory_capacity"] == "140.4 GiB"
    assert description["accelerator_frequency"] == "1980 MHz at most"
    assert description["host_memory_capacity"] == "2015.4 GiB"
    assert description["framework"] == "megatoken 0.1.0, PyTorch 2.11.0"
    assert (
        "driver 570.86.15" in description["other_software_stack"]
        and "triton" not in description["other_software_stack"]
    )
    assert (description["hw_notes"], description["sw_notes"]) == ("power limit 700 W", "megatoken revision abc123")
    assert description["accelerator_interconnect"].startswith("TO FILL: ")
    assert system_name(run) == "1xNVIDIA_H200"
    known = {key for key, value in description.items() if value and not value.startswith("TO FILL")}
    run.environment.clear()
    run.result["target"] = {}
    nothing = system_description(run, submitter="Vendor", division="closed", benchmark="llama2-70b-99", name="one")
    for key in rules()["system_keys_not_empty"]:
        assert nothing[key] and (key in known or nothing[key].startswith("TO FILL: "))
    run.environment.update({**H200, "gpus": H200["gpus"] * 8})
    run.result["target"] = {"device": "NVIDIA H200"}
    several = system_description(run, submitter="Vendor", division="closed", benchmark="llama2-70b-99", name="one")
    assert several["accelerators_per_node"].startswith("TO FILL: ")  # how many of the eight ran is not in a run folder


def test_a_quantised_model_leaves_its_calibration_to_tell(originals: Make, tmp_path: Path) -> None:
    facts = {**making.MODEL, "precision": "fp8"}
    runs = [originals("server", role, facts=facts) for role in ("performance", "accuracy", "compliance")]
    root = built(runs, tmp_path / "tree") / "closed/Vendor"
    assert "TO FILL: how the scales of fp8" in (root / "documentation/calibration.md").read_text()
    [path] = root.glob("measurements/sys/*/Server/*.json")
    described = json.loads(path.read_text())
    assert described["weight_data_types"] == "fp8"
    assert {key for key, value in described.items() if value.startswith("TO FILL")} == {
        "retraining",
        "weight_transformations",
    }


def test_readme_repeats_the_configuration(originals: Make, tmp_path: Path) -> None:
    run = originals("offline")
    root = built(all_runs(originals, ("offline",)), tmp_path / "tree")
    text = (root / "closed/Vendor/measurements/sys/llama2-70b-99.9/Offline/README.md").read_text()
    assert yaml.safe_load(text.split("```yaml\n")[1].split("```")[0]) == read_run(run).config
    assert sha256(b"").hexdigest() not in text and making.MODEL["data_set_sha256"] in text


def test_the_benchmark_follows_from_model_and_scores(copies: Make, tmp_path: Path) -> None:
    runs = all_runs(copies, ("offline",))
    evaluate(runs[1], rouge1=44.0)
    made = build(runs, submitter="V", division="closed", round_="v5.1", out=tmp_path / "one")
    assert made.benchmark == "llama2-70b-99"
    evaluate(runs[1], rouge1=44.4)
    made = build(runs, submitter="V", division="closed", round_="v5.1", out=tmp_path / "two")
    assert made.benchmark == "llama2-70b-99.9"
    made = build(runs, submitter="V", division="closed", round_="v5.1", out=tmp_path / "3", benchmark="llama2-70b-99")
    assert made.benchmark == "llama2-70b-99"


def test_scores_of_another_data_set(copies: Make, tmp_path: Path) -> None:
    """They choose no benchmark, are noted in the open division and refused in the closed."""
    runs = all_runs(copies, ("offline",))
    accuracy = runs[1] / "accuracy/accuracy.json"
    scored = json.loads(accuracy.read_text())
    accuracy.write_text(json.dumps({**scored, "data_set": None, "references": "own.jsonl"}))
    made = build(runs, submitter="V", division="open", round_="v5.1", out=tmp_path / "open")
    assert made.benchmark == "llama2-70b-99"
    assert made.notes == ("scored against own.jsonl, which is not a data set of MLPerf: not scores of llama2-70b-99",)
    assert f"Note: {made.notes[0]}" in list(made.describe())
    assert refusals(runs, tmp_path / "closed") == (
        f"{runs[1]}: its answers were scored against own.jsonl, not a data set of MLPerf; the closed division needs "
        "one (--prompts, --references)",
    )
    accuracy.write_text(json.dumps({**scored, "data_set": "llama2-70b", "references": "own.jsonl"}))
    made = build(runs, submitter="V", division="closed", round_="v5.1", out=tmp_path / "closed")
    assert (made.benchmark, made.notes) == ("llama2-70b-99.9", ())


def test_another_model_in_the_open_division(originals: Make, tmp_path: Path) -> None:
    """The shape tiny as it is: random weights, random prompts, held against llama2-70b as its runs say."""
    out = str(tmp_path)
    runs = [making.offline(out=out), evaluate(making.offline(out=out, mode="accuracy"))]
    root = fill(built(runs, tmp_path / "tree", division="open"))
    assert json.loads((root / "open/Vendor/model_mapping.json").read_text()) == {"tiny": "llama2-70b-99.9"}
    assert check(root).refusals == ()
    assert [figure.key.benchmark for _, _, figure in check(root).results] == ["tiny"]
    evidence = audit(root).evidence
    assert {run.benchmark for run in evidence.runs} == {"llama2-70b-99.9"}
    assert [result.benchmark for result in evidence.accuracy_results] == ["llama2-70b-99.9"]
    (root / "open/Vendor/model_mapping.json").unlink()
    assert {problem.rule.id for problem in check(root).refusals if problem.rule} == {"P17"}
    assert refusals(runs, tmp_path / "closed", benchmark="llama2-70b-99") == tuple(
        f"{run}: random weights are not allowed in the closed division; give --division open" for run in runs
    )
    for run in runs:
        rewrite(pretend(run, random_weights=False), weights="5f3c")
    assert refusals(runs, tmp_path / "closed", benchmark="llama2-70b-99") == tuple(
        f"{run}: its prompts are random tokens; the closed division needs MLPerf's data set (--prompts)" for run in runs
    )


def test_a_model_of_no_benchmark(originals: Make, tmp_path: Path) -> None:
    """The open division takes the benchmark that the runs claim, if the round has it."""
    facts = {**making.MODEL, "model": "mistral-7b"}
    runs = [originals("server", role, facts=facts) for role in ("performance", "accuracy", "compliance")]
    other = originals("server", model="llama3_1-405b", seeds=SEEDS["v6.1"], facts=facts)
    for given, division, round_, fix in (
        (runs, "closed", "v5.1", "give --division open and --benchmark"),
        ([other], "open", "v6.1", "give --benchmark"),
    ):
        with pytest.raises(UsageError) as caught:
            built(given, tmp_path / "tree", division=division, round_=round_)
        assert str(caught.value).startswith(
            f"{given[0]}: model mistral-7b belongs to no benchmark of {round_} (llama2-70b-99"
        )
        assert str(caught.value).endswith(f"); {fix}")
    root = built(runs, tmp_path / "claimed", division="open")
    assert json.loads((root / "open/Vendor/model_mapping.json").read_text()) == {"mistral-7b": "llama2-70b-99.9"}
    root = built(runs, tmp_path / "tree", division="open", benchmark="llama2-70b-99")
    assert json.loads((root / "open/Vendor/model_mapping.json").read_text()) == {"mistral-7b": "llama2-70b-99"}


def test_interactive_and_edge(originals: Make, tmp_path: Path) -> None:
    runs = [*all_runs(originals, ("offline",)), *all_runs(originals, ("interactive",))]
    root = fill(built(runs, tmp_path / "tree"))
    assert check(root).refusals == ()
    edge = {**making.MODEL, "model": "Llama-3.1-8B-Instruct"}
    scores = {"rouge1": 39.1, "rouge2": 16.2, "rougeL": 24.7, "rougeLsum": 36.2, "gen_len": 3_000_000}
    runs = []
    for scenario in ("offline", "singlestream"):
        made = {"scenario": scenario, "model": "llama3_1-8b-edge", "facts": edge, "out": str(tmp_path)}
        runs += [making.make(**made), evaluate(making.make(mode="accuracy", **made), **scores)]
    root = fill(built(runs, tmp_path / "edge", benchmark="llama3.1-8b-edge"))
    result = check(root)
    assert result.refusals == ()
    assert {(figure.key.scenario, figure.unit) for _, _, figure in result.results} == {
        ("Offline", "tokens/s"),
        ("SingleStream", "ms"),
    }
    log = root / "closed/Vendor/results/sys/llama3.1-8b-edge/SingleStream/performance/run_1/mlperf_log_detail.txt"
    log.write_text(
        log.read_text().replace('"early_stopping_met", "value": true', '"early_stopping_met", "value": false')
    )
    assert {problem.rule.id for problem in check(root).refusals if problem.rule} == {"P10"}


def pretend(run: Path, **changes: object) -> Path:
    """Says it in the configuration too."""
    configuration = run / "config.yaml"
    configuration.write_text(yaml.safe_dump(yaml.safe_load(configuration.read_text()) | changes))
    return rewrite(run, **changes)


def in_fp8(run: Path) -> Path:
    target = json.loads((run / "result.json").read_text())["target"]
    fp8 = find_scheme("fp8", "tensor")
    of_fp8 = {"fp8_scales": fp8.fp8_scales, "formats": fp8.formats()}
    return rewrite(pretend(run, precision="fp8"), target={**target, **of_fp8})


# What is done to the performance run of Offline, and what the refusal says.
SPOILED: dict[str, tuple[Callable[[Path], object], str]] = {
    "interrupted": (
        lambda run: rewrite(run, verdict="INTERRUPTED", reasons=[{"code": "NOT_FINISHED", "message": "killed"}]),
        "INTERRUPTED (NOT_FINISHED); repeat the run",
    ),
    "abandoned": (lambda run: (run / "mlperf/ABANDONED.txt").write_text("x"), "INTERRUPTED (ABANDONED.txt)"),
    "degraded": (lambda run: rewrite(run, verdict="DEGRADED"), "DEGRADED: replicas were lost"),
    "no rules claimed": (
        lambda run: rewrite(run, verdict="MEASURED"),
        "no rules claimed; repeat the run with --rules v5.1",
    ),
    "invalid": (
        lambda run: rewrite(run, verdict="INVALID", reasons=[{"code": "MIN_DURATION", "message": "short"}]),
        "INVALID (MIN_DURATION); repeat the run with --rules v5.1 without --samples and --min-duration",
    ),
    "few rows": (
        lambda run: rewrite(run, verdict="INVALID", reasons=[{"code": "DATA_SET_SIZE", "message": "few"}]),
        "INVALID (DATA_SET_SIZE); repeat the run with --rules v5.1 on MLPerf's whole data set (--prompts)",
    ),
    "too slow": (
        lambda run: rewrite(run, verdict="INVALID", reasons=[{"code": "TTFT_LIMIT", "message": "slow"}]),
        "INVALID (TTFT_LIMIT); repeat the run with --rules v5.1 at a lower rate",
    ),
    "failed samples": (lambda run: rewrite(run, samples_failed=3), "3 samples failed"),
    "other model": (lambda run: pretend(run, model="llama3.1-8b"), "model is llama3.1-8b, but "),
    "other weights": (lambda run: rewrite(run, weights="0000"), "weights is 0000, but 5f3c in "),
    "other precision": (in_fp8, "precision is fp8, but bf16 in "),
    "other data": (lambda run: rewrite(run, data_set_sha256="0000"), "data set is 0000, but ab12 in "),
    "random weights": (
        lambda run: rewrite(run, weights="random, seed 0"),
        "changed after the run, by run_folder.configuration",  # random_weights is false
    ),
    "other scenario": (lambda run: rewrite(run, scenario="server"), "says scenario server, LoadGen's log says Offline"),
    "unknown scenario": (lambda run: rewrite(run, scenario="batch"), "says scenario batch"),
    "other mode": (lambda run: rewrite(run, mode="accuracy"), "says mode accuracy, LoadGen's log says PerformanceOnly"),
    "better number": (
        lambda run: rewrite(run, output_tokens_per_second=1e6),
        "changed after the run, by run_folder.metrics",
    ),
    "no log": (lambda run: (run / "mlperf/mlperf_log_detail.txt").unlink(), "no mlperf/mlperf_log_detail.txt"),
    "no user.conf": (lambda run: (run / "mlperf/user.conf").unlink(), "no mlperf/user.conf"),
    "binary log": (lambda run: (run / "mlperf/mlperf_log_detail.txt").write_bytes(bytes(99)), "is binary"),
    "no result": (lambda run: (run / "result.json").unlink(), "result.json is missing"),
    "another machine": (
        lambda run: (rewrite(run) / "environment.json").write_text(json.dumps(H200)),
        "machine or LoadGen version differs from",
    ),
}


@pytest.mark.parametrize("name", SPOILED)
def test_a_run_that_is_not_what_it_claims_is_refused(copies: Make, originals: Make, tmp_path: Path, name: str) -> None:
    spoil, words = SPOILED[name]
    run = copies("offline")
    spoil(run)
    others = [originals("offline", role) for role in ("accuracy", "compliance")]
    lines = refusals([others[0], run, others[1]], tmp_path / "tree")
    assert len(lines) == 1 and lines[0].startswith(str(run)) and words in lines[0]


def test_a_folder_that_is_none(tmp_path: Path) -> None:
    assert refusals([tmp_path / "nothing"], tmp_path / "tree") == (
        f"{tmp_path / 'nothing'}: no such folder; give a run folder, such as runs/20261120T091233Z-offline-tiny",
    )


def test_a_compliance_test_that_failed_is_refused(copies: Make, tmp_path: Path) -> None:
    runs = all_runs(copies, ("offline",))
    failed = {"code": "COMPLIANCE", "message": "3 of 100 answers go on after an end token"}
    rewrite(runs[2], verdict="INVALID", reasons=[failed])
    [line] = refusals(runs, tmp_path / "tree")
    assert line.startswith(f"{runs[2]}: INVALID (COMPLIANCE); repeat the run with --rules v5.1 --compliance TEST06")


def test_a_compliance_test_that_was_verified_by_other_end_tokens(copies: Make) -> None:
    runs = all_runs(copies, ("server",))
    path = runs[2]
    for mine, refused in (([2], False), ([3, 2], True)):
        rewrite(path, compliance={"test": "TEST06", "end_token_ids": mine})
        log = read_detail_log(path / "mlperf/mlperf_log_detail.txt")
        submitted = SubmittedRun(read_run(path), Role.COMPLIANCE, "Server", log)
        lines = [
            line for line in missing_runs([submitted], benchmarks()["llama2-70b-99"], "closed") if "verify" in line
        ]
        file = path / "compliance/TEST06/verify_accuracy.txt"
        line = f"{file}: verified with end tokens 2, not those of the run; repeat megatoken verify TEST06 {path}"
        assert lines == ([line] if refused else [])


@pytest.mark.parametrize("role", ["performance", "accuracy", "compliance"])
def test_seeds_of_another_round(originals: Make, tmp_path: Path, role: str) -> None:
    run = originals("server", role, seeds=SEEDS["v6.0"])
    others = [originals("server", other) for other in ("performance", "accuracy", "compliance") if other != role]
    assert refusals([*others, run], tmp_path / "tree") == (
        f"{run}: LoadGen's seeds are those of v6.0, not those of v5.1; repeat the run with --rules v5.1",
    )


def test_errors_that_loadgen_overlooks(originals: Make, tmp_path: Path) -> None:
    run = originals("server", repeat_conf=True)
    [line] = refusals([run, originals("server", "accuracy"), originals("server", "compliance")], tmp_path / "tree")
    assert "LoadGen logged 1 error, the first: Multiple conf files are used" in line


def test_limits_of_another_scenario(copies: Make, originals: Make, tmp_path: Path) -> None:
    run = pretend(copies("server"), scenario="interactive")
    others = [originals("interactive", role) for role in ("accuracy", "compliance")]
    [line] = refusals([run, *others], tmp_path / "tree")
    assert line.startswith(f"{run}: changed after the run, by run_folder.verdict") and "LATENCY_LIMITS" in line


def test_runs_that_are_missing_or_not_evaluated(copies: Make, tmp_path: Path) -> None:
    performance, accuracy, compliance = runs = all_runs(copies, ("offline",))
    assert refusals(runs[:1], tmp_path / "tree") == (
        "Offline: no accuracy run among the run folders; add one (megatoken run --mode accuracy)",
        "Offline: no TEST06 run among the run folders; add one (megatoken run --compliance TEST06)",
    )
    assert refusals(runs[1:], tmp_path / "tree")[0].startswith("Offline: no performance run")
    [line] = refusals([performance, *runs], tmp_path / "tree")
    assert line == f"Offline: 2 performance runs ({performance}, {performance}); give one"
    (accuracy / "accuracy/accuracy.txt").unlink()
    (compliance / "compliance/TEST06/verify_accuracy.txt").unlink()
    assert refusals(runs, tmp_path / "tree") == (
        f"{accuracy}: no accuracy/accuracy.txt; create it: megatoken accuracy {accuracy}",
        f"{compliance}: no compliance/TEST06/verify_accuracy.txt; create it: megatoken verify TEST06 {compliance}",
    )
    verify(compliance)
    report = compliance / "compliance/TEST06/verify_accuracy.txt"
    report.write_text(report.read_text().replace("verification complete", "verification failed"))
    evaluate(accuracy)
    [line] = refusals(runs, tmp_path / "tree")
    assert line.startswith(f"{compliance}: changed after the run, by compliance.recomputed: ")
    assert str(report.relative_to(compliance)) in line
    verify(compliance)
    log = accuracy / "mlperf/mlperf_log_accuracy.json"
    log.write_text(log.read_text().replace("0000", "0001", 1))
    [line] = refusals(runs, tmp_path / "tree")
    assert "not the hash of mlperf_log_accuracy.json" in line and f"megatoken accuracy {accuracy}" in line


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"division": "network"}, "--division network: must be closed or open"),
        ({"round_": "v9.9"}, "--round v9.9: not a known MLPerf Inference round"),
        ({"round_": "v5.0"}, "--round v5.0: supported rounds are v5.1, v6.0, v6.1"),
        ({"submitter": "a b"}, "--submitter 'a b': must be a folder name of letters, digits"),
        ({"submitter": "../up"}, "--submitter '../up': must be a folder name of letters, digits"),
        ({"system": ".hidden"}, "--system '.hidden': must be a folder name of letters, digits"),
        ({"benchmark": "bert-99"}, "--benchmark bert-99: v5.1 has llama2-70b-99"),
        ({"benchmark": "llama3.1-8b"}, "model llama2-70b is not the model of llama3.1-8b"),
        (
            {"benchmark": "llama3.1-405b", "division": "open"},
            "claims the rules of llama2-70b, not of llama3.1-405b; use llama2-70b-99 or llama2-70b-99.9",
        ),
    ],
)
def test_words_that_cannot_be_used(originals: Make, tmp_path: Path, options: dict[str, str], words: str) -> None:
    with pytest.raises(UsageError) as caught:
        built(all_runs(originals, ("offline",)), tmp_path / "tree", **options)
    assert words in str(caught.value)
    assert list(tmp_path.iterdir()) == []


def test_a_folder_in_use_is_left_alone(originals: Make, tmp_path: Path) -> None:
    runs = all_runs(originals, ("offline",))
    kept = tmp_path / "kept.txt"
    kept.write_text("x")
    for out in (tmp_path, kept):
        with pytest.raises(UsageError, match="already exists"):
            built(runs, out)
    (tmp_path / "empty").mkdir()
    assert (built(runs, tmp_path / "empty") / "closed").is_dir()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["empty", "kept.txt"]


def test_nothing_is_left_where_it_cannot_be_written(originals: Make, tmp_path: Path) -> None:
    """Files of more than 8 KiB are refused by the system in the middle of the build."""
    runs = all_runs(originals, ("offline",))
    largest, most = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (8192, most))
    try:
        with pytest.raises(StorageError) as caught:
            built(runs, tmp_path / "tree")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (largest, most))
    assert str(caught.value).startswith(f"{tmp_path / 'tree'}: cannot be written (File too large)")
    assert list(tmp_path.iterdir()) == []


def test_a_tree_is_checked_after_it_was_moved(originals: Make, tmp_path: Path) -> None:
    root = fill(built(all_runs(originals), tmp_path / "tree"))
    moved = shutil.move(root, tmp_path / "elsewhere")
    assert check(Path(moved)).refusals == ()
