"""A submission tree: whole in both layouts, then with one part after the other missing or wrong."""

import json
import os
import re
import shutil
from pathlib import Path

import pytest
from power_session import write_session

from megatoken.audit import Severity, audit
from megatoken.audit.checks.submission import Submission, network
from megatoken.audit.evidence import System
from megatoken.mlperf.draws import Load, issued_rows, library_order
from megatoken.mlperf.rounds import round_seeds, rules

LOGS = ("mlperf_log_detail.txt", "mlperf_log_summary.txt", "mlperf_log_accuracy.json")
KEY = "sys/llama2-70b-99.9/Offline"
SCORES = (
    "{'rouge1': 44.5, 'rouge2': np.float64(22.1), 'rougeL': 28.7, 'rougeLsum': 41.9, 'gen_len': 28000000, "
    "'gen_num': 24576, 'tokens_per_sample': 293.3}\nhash=0123abc\n"
)
SYSTEM = {
    **dict.fromkeys(rules()["system_keys"], "x"),
    "division": "closed",
    "submitter": "Vendor",
    "status": "available",
    "system_type": "datacenter",
    "number_of_nodes": 1,
    "accelerators_per_node": 8,
    "accelerator_model_name": "NVIDIA H200-SXM-141GB",
    "accelerator_memory_capacity": "141 GB",
    "hw_notes": "H200 TGP 700W",
    "framework": "TensorRT 10.10, CUDA 12.9",
    "other_software_stack": "TensorRT 10.10, CUDA 12.9, cuDNN 9.8, Driver 575.57",
}
# As audit.config of MLPerf sets TEST06.
TEST06 = """*.*.min_duration = 0
*.*.min_query_count = 100
*.*.accuracy_log_sampling_target = 100
*.*.sample_concatenate_permutation = 0
*.*.performance_sample_count_override = 24576
"""
# What runs of a fifth of a second over 64 rows cannot meet.
TOO_SMALL = {
    "rules.data_set", "rules.min_duration", "rules.ran_long_enough", "rules.sample_count", "rules.offline_samples",
    "rules.whole_passes", "rules.tokens_per_sample", "accuracy.tokens_agree",
}  # fmt: skip


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def truncate(path: Path, head: int = 4096) -> None:
    """As MLPerf's tool leaves an accuracy log: its first and last 4,096 bytes."""
    text = path.read_text()
    path.write_text(f"{text[:head]}\n\n...\n\n{text[-4096:]}")


@pytest.fixture(params=["v5", "v6"])
def tree(request, originals, tmp_path) -> tuple[Path, str]:
    """Root of a submission with one system, and its layout."""
    layout, vendor = request.param, tmp_path / "closed" / "Vendor"
    for scenario in ("Offline", "Server"):
        key = f"sys/llama2-70b-99.9/{scenario}"
        results = vendor / "results" / key
        for part, mode in (("performance/run_1", "PerformanceOnly"), ("accuracy", "AccuracyOnly")):
            (results / part).mkdir(parents=True)
            for name in LOGS:
                shutil.copy(originals(scenario, mode) / name, results / part / name)
        truncate(results / "accuracy/mlperf_log_accuracy.json")
        write(results / "accuracy/accuracy.txt", SCORES)
        described = vendor / "measurements" / key if layout == "v5" else results
        write(
            described / ("sys_d.json" if layout == "v5" else "measurements.json"),
            json.dumps(dict.fromkeys(rules()["measurement_keys"], "x")),
        )
        write(described / "user.conf", "*.Offline.target_qps = 4000\n")
        write(described / "README.md", "how\n")
        test = (vendor / "compliance" / key if layout == "v5" else results) / "TEST06"
        write(
            test / "verify_accuracy.txt",
            "First token check pass: Skipped\nEOS check pass: True\nSample length check pass: True\n",
        )
        (test / "accuracy").mkdir()
        logged = originals(scenario, "PerformanceOnly", "llama2-70b", TEST06, 24_576)
        shutil.copy(logged / "mlperf_log_accuracy.json", test / "accuracy")
    write(vendor / "systems/sys.json", json.dumps(SYSTEM, indent=1))
    write(vendor / ("code" if layout == "v5" else "src") / "run.py", "\n")
    write(vendor / "calibration.md", "512 samples\n")
    return tmp_path, layout


def grave(root: Path, round_: str | None = None) -> set[str]:
    found = audit(root, round=round_).findings
    return {item.id for item in found if item.severity in (Severity.FAIL, Severity.WARN)} - TOO_SMALL


def place(tree: tuple[Path, str], path: str) -> Path:
    """A path of the v5 layout in the tree's own."""
    root, layout = tree
    if layout == "v6":
        path = (
            path.replace("measurements/", "results/")
            .replace("compliance/", "results/")
            .replace("sys_d.json", "measurements.json")
        )
        path = path.replace("code/", "src/")
    return root / "closed/Vendor" / path


def test_whole_submission(tree):
    root, _ = tree
    result = audit(root)
    assert grave(root) == set()
    assert result.evidence.kind == "submission"
    roles = sorted(str(run.role) for run in result.evidence.runs)
    assert roles == ["accuracy"] * 2 + ["compliance"] * 2 + ["performance"] * 2
    run = result.evidence.performance_runs[0]
    assert (run.division, run.submitter, run.benchmark, run.folder_scenario) == (
        "closed",
        "Vendor",
        "llama2-70b-99.9",
        "Offline",
    )
    assert result.evidence.system_of(run).accelerators_per_node == 8
    assert result.evidence.accuracy_results[0].scores["rouge2"] == 22.1
    for inside in ("closed", "closed/Vendor"):
        assert grave(root / inside) == set(), inside


def test_small_runs_do_not_meet_the_rules(tree):
    failed = {item.id for item in audit(tree[0]).findings if item.severity is Severity.FAIL}
    assert {"rules.data_set", "rules.min_duration"} <= failed


BREAKS = {
    f"results/{KEY}/performance/run_1/mlperf_log_detail.txt": "submission.performance",
    f"results/{KEY}/performance/run_1/mlperf_log_summary.txt": "submission.performance",
    f"results/{KEY}/accuracy/accuracy.txt": "submission.accuracy",
    f"results/{KEY}/accuracy/mlperf_log_accuracy.json": "submission.accuracy",
    f"results/{KEY}/accuracy": "accuracy.evidence",
    f"results/{KEY}": "submission.required_scenarios",
    f"measurements/{KEY}/user.conf": "submission.measurements",
    f"measurements/{KEY}/README.md": "submission.measurements",
    f"measurements/{KEY}/sys_d.json": "submission.measurements",
    f"compliance/{KEY}/TEST06/verify_accuracy.txt": "submission.compliance",
    "systems/sys.json": "submission.systems",
    "code/run.py": "submission.names",
    "code": "submission.code",
}


@pytest.mark.parametrize("path", BREAKS)
def test_missing_part(tree, path):
    target = place(tree, path if path != "code" or tree[1] == "v5" else "src")
    shutil.rmtree(target) if target.is_dir() else target.unlink()
    assert BREAKS[path] in grave(tree[0])


def test_models_mapped_to_one_benchmark_answer_each_for_itself(tree):
    root, _ = tree
    vendor = shutil.move(root / "closed", root / "open") / "Vendor"
    for part in ("results", "measurements", "compliance"):
        if (vendor / part).is_dir():
            shutil.copytree(vendor / part / "sys/llama2-70b-99.9", vendor / part / "sys/large")
            shutil.move(vendor / part / "sys/llama2-70b-99.9", vendor / part / "sys/small")
    write(vendor / "model_mapping.json", json.dumps(dict.fromkeys(("large", "small"), "llama2-70b-99.9")))
    assert {run.benchmark for run in audit(root).evidence.runs} == {"llama2-70b-99.9"}
    assert "accuracy.evidence" not in grave(root)
    shutil.rmtree(vendor / "results/sys/small/Server/accuracy")
    (missed,) = (item for item in audit(root).findings if item.id == "accuracy.evidence")
    assert missed.severity is Severity.FAIL
    assert missed.found.startswith("no accuracy run for 1 of 4 performance runs (sys/small/Server); next to them ")
    assert [where.file.split("/results/")[1].split("/")[1] for where in missed.where] == ["small"]


def test_answers_of_the_compliance_test(tree):
    """Its log stands without a detail log; the rows that it answers follow from the seeds all the same."""
    root, _ = tree
    passed = {item.id: item for item in audit(root).findings if item.severity is Severity.PASS}
    assert passed["compliance.records"].count == passed["compliance.order"].count == 2
    assert "100 of 100 records" in passed["compliance.order"].found
    log = place(tree, f"compliance/{KEY}/TEST06/accuracy/mlperf_log_accuracy.json")
    lines = log.read_text().splitlines(True)
    for spoiled, expected in (
        ([*lines[:50], *lines[51:]], "compliance.records"),
        ([line.replace('"qsl_idx" : ', '"qsl_idx" : 1') for line in lines], "compliance.order"),
        ([line.replace('"token_count" : ', '"token_count" : 9') for line in lines], "accuracy.token_counts"),
    ):
        log.write_text("".join(spoiled))
        assert expected in grave(root)


def test_a_longer_compliance_test(tree, originals):
    """LoadGen logs each of its answers with a probability, about 100 in all, which breaks nothing."""
    root, _ = tree
    longer = originals("Server", "PerformanceOnly", "llama2-70b", f"{TEST06}*.*.min_query_count = 3000\n", 24_576)
    shutil.copy(longer / LOGS[2], place(tree, "compliance/sys/llama2-70b-99.9/Server/TEST06/accuracy"))
    notes = {item.id: item.found for item in audit(root).findings if item.severity is Severity.NOTE}
    assert grave(root) == set() and "of a run of" in notes["compliance.records"]


def test_a_compliance_test_without_seeds(tree):
    """The rows that LoadGen draws where no round's seeds were set are called that."""
    root, _ = tree
    log = place(tree, "compliance/sys/llama2-70b-99.9/Server/TEST06/accuracy/mlperf_log_accuracy.json")
    rows = issued_rows(0, library_order(0, 24_576), Load("Server", False, False, 100), 100)
    row = re.compile(r'("seq_id" : (\d+), "qsl_idx" : )\d+')
    log.write_text(row.sub(lambda found: f"{found[1]}{rows[int(found[2])]}", log.read_text()))
    found = {item.id: item.found for item in audit(root).findings if item.severity is Severity.WARN}
    assert found["compliance.order"] == "0 of 100 records: the rows of LoadGen's own seeds, 0"


def test_an_accuracy_run_in_place_of_the_compliance_test(tree, originals):
    """Not one record of it is a row that TEST06 asks for, and the finding says whose rows they are."""
    root, _ = tree
    log = place(tree, f"compliance/{KEY}/TEST06/accuracy/mlperf_log_accuracy.json")
    whole = "*.*.performance_sample_count_override = 24576\n"
    shutil.copy(originals("Offline", "AccuracyOnly", "llama2-70b", whole, 24_576) / LOGS[2], log)
    truncate(log)
    found = {item.id: item.found for item in audit(root).findings if item.severity is Severity.WARN}
    assert ": the rows of an accuracy run of v" in found["compliance.order"]


def test_answers_of_other_models_are_no_tokens(tree):
    """Whisper's answers are characters, and its token counts do not count them."""
    root, _ = tree
    for log in root.glob("closed/Vendor/results/sys/*/*/accuracy/mlperf_log_accuracy.json"):
        log.write_text(log.read_text().replace('"token_count" : ', '"token_count" : 9'))
    assert "accuracy.token_counts" in grave(root)
    (root / "closed/Vendor/results/sys/llama2-70b-99.9").rename(root / "closed/Vendor/results/sys/whisper")
    assert "accuracy.token_counts" not in grave(root)


def test_a_duration_that_follows_from_six_digits(tree):
    """600 s that a rounded rate makes 599.998 s are long enough; 599 s are not."""
    log = place(tree, "results/sys/llama2-70b-99.9/Server/performance/run_1/mlperf_log_detail.txt")
    text = log.read_text()
    queries = int(re.search(r'"result_query_count", "value": (\d+)', text)[1])
    for seconds, short in ((599.998, False), (599, True)):
        rate = rf"\g<1>{(queries - 1) / seconds}"
        log.write_text(re.sub(r'("result_scheduled_samples_per_sec", "value": )[\d.]+', rate, text))
        found = [item for item in audit(tree[0]).findings if item.id == "rules.ran_long_enough"]
        failed = [where.file for item in found if item.severity is Severity.FAIL for where in item.where]
        assert any("/Server/" in file for file in failed) is short


def test_calibration_is_for_v5(tree):
    place(tree, "calibration.md").unlink()
    assert ("submission.calibration" in grave(tree[0], "v5.1" if tree[1] == "v5" else None)) == (tree[1] == "v5")


@pytest.mark.parametrize(
    ("path", "old", "new", "expected"),
    [
        ("systems/sys.json", '"Vendor"', '"Rival"', "submission.owner"),
        ("systems/sys.json", '"closed"', '"open"', "submission.owner"),
        ("systems/sys.json", '"available"', '"soon"', "system.values"),
        ("systems/sys.json", '"number_of_nodes": 1', '"number_of_nodes": 0', "system.keys"),
        ("systems/sys.json", '"hw_notes"', '"is_network": true, "hw_notes"', "submission.network"),
        ("systems/sys.json", '"cooling": "x"', '"cooling": ""', "system.keys"),
        ("systems/sys.json", '"cooling"', '"cooling_"', "system.keys"),
        ("systems/sys.json", '"141 GB"', '"80 GB"', "system.part_memory"),
        ("systems/sys.json", "TensorRT 10.10, CUDA 12.9,", "TensorRT 9.1, CUDA 12.9,", "system.software"),
        (f"measurements/{KEY}/sys_d.json", '"retraining": "x"', '"retraining": ""', "submission.measurement_keys"),
        (f"compliance/{KEY}/TEST06/verify_accuracy.txt", "EOS check pass: True", "EOS check:", "submission.compliance"),
        (f"compliance/{KEY}/TEST06/verify_accuracy.txt", ": Skipped", ": Skipped.", "submission.compliance"),
        (f"results/{KEY}/accuracy/accuracy.txt", "44.5", "43.5", "accuracy.scores"),
        (f"results/{KEY}/accuracy/accuracy.txt", "293.3", "200.3", "accuracy.scores"),
        (f"results/{KEY}/accuracy/accuracy.txt", "hash=", "", "accuracy.hash"),
    ],
)  # fmt: skip
def test_wrong_part(tree, path, old, new, expected):
    target = place(tree, path)
    text = target.read_text()
    assert old in text
    target.write_text(text.replace(old, new))
    assert expected in grave(tree[0])


def test_wrong_places(tree, originals):
    root, _ = tree
    results = place(tree, "results/sys/llama2-70b-99.9")
    shutil.copytree(results / "Server", results / "Interactive")
    found = {item.id: item for item in audit(root).findings if item.severity is Severity.FAIL}
    assert "LoadGen given the limits 450000000" in found["rules.limits_asked"].expected
    (results / "Interactive").rename(results / "Batch")
    assert "submission.scenario_name" in grave(root)
    shutil.rmtree(results / "Server")
    (results / "Batch").rename(results / "SingleStream")
    assert {"rules.scenario", "submission.required_scenarios"} <= grave(root)
    (results / "Offline/performance/run_1" / "a b.txt").write_text("x")
    assert "submission.names" in grave(root)


def test_what_belongs_to_nothing(tree):
    root, layout = tree
    write(root / "README.md", "fine\n")
    assert grave(root) == set()
    write(root / "paper.pdf", "x")
    assert grave(root) == set()
    write(root / "closed/notes.txt", "x")
    found = next(item for item in audit(root).findings if item.id == "submission.names")
    assert (found.severity, found.found) == (Severity.WARN, "a stray file: 1")
    (root / "closed/notes.txt").unlink()
    performance = place(tree, f"results/{KEY}/performance")
    shutil.copytree(performance / "run_1", performance / "run_2")
    assert "submission.performance" in grave(root)
    shutil.rmtree(performance / "run_2")
    if layout == "v5":
        write(root / "closed/Vendor/measurements/sys/llama2-70b-99.9/Interactive/README.md", "withdrawn\n")
        assert grave(root) == set()
        write(root / "closed/Vendor/measurements/other/llama2-70b-99.9/Offline/README.md", "planned\n")
        assert grave(root) == {"submission.measurements"}


def test_one_round(tree, tmp_path):
    import tarfile

    with tarfile.open(Path(__file__).with_name("logs") / "genuine.tar.xz") as archive:
        archive.extractall(tmp_path / "old", filter="data")
    old = tmp_path / "old/6.0.6/Server-PerformanceOnly-llama2-70b"
    target = place(tree, "results/sys/llama2-70b-99.9/Server/performance/run_1")
    for name in LOGS[:2]:
        shutil.copy(old / name, target / name)
    shutil.rmtree(tmp_path / "old")
    assert "rules.one_round" in grave(tree[0])


def test_accuracy_log_not_truncated(tree, originals):
    path = place(tree, f"results/{KEY}/accuracy/mlperf_log_accuracy.json")
    shutil.copy(originals("Offline", "AccuracyOnly") / path.name, path)
    assert grave(tree[0]) == {"submission.accuracy", "accuracy.scored_log"}  # SCORES are of no such log
    truncate(path, head=9000)
    assert {"accuracy.truncated", "submission.accuracy"} == grave(tree[0])


def test_a_performance_run_in_the_accuracy_folder(tree, originals):
    for name in LOGS[:2]:
        shutil.copy(originals() / name, place(tree, f"results/{KEY}/accuracy/{name}"))
    assert "rules.mode" in grave(tree[0])


def readings(begin, end, watts: float) -> str:
    """One second's readings of a meter between two moments, and one long before."""
    middle = begin + (end - begin) / 2

    def reading(time, watts):
        return (
            f"Time,{time:%m-%d-%Y %H:%M:%S}.{time.microsecond // 1000:03},Watts,{watts},Volts,230,Amps,1,PF,1,Mark,x\n"
        )

    before = begin.replace(year=begin.year - 1)
    lines = [reading(before, 1e6), reading(middle, watts - 500), reading(middle, watts + 500), reading(middle, -1)]
    return "".join([*lines, "junk\n"])


@pytest.fixture
def metered(tree) -> tuple[Path, Path]:
    """Root of a submission, and the folder of its performance run that was measured at 10,500 W."""
    root, _ = tree
    performance = place(tree, f"results/{KEY}/performance")
    figures = audit(root).evidence.performance_runs[0].figures
    write(performance / "run_1/spl.txt", readings(figures.began_at, figures.ended_at, 10_500))
    shutil.copytree(performance / "run_1", performance / "ranging")
    begin, end = figures.began_at.timestamp(), figures.ended_at.timestamp()
    phases = [[begin - 2, 1.0], [begin - 1, 2.0], [end + 1, 3.0], [end + 2, 4.0]]
    write_session(performance, {"ranging": phases, "testing": phases})
    return root, performance


def test_power(metered):
    root, performance = metered
    result = audit(root)
    assert [(power.mean_watts, power.readings) for power in result.evidence.power] == [(10_500, 2)]
    assert grave(root) == set()
    assert {item.id for item in result.findings if item.severity is Severity.PASS} >= {
        "power.readings", "power.ranging", "power.files", "power.session", "power.phases", "power.hashes",
        "power.sources",
    }  # fmt: skip
    for inside in (performance, performance / "run_1"):  # what lies above is not missed
        assert {name for name in grave(inside) if name.startswith("power.")} == set()


def edit_end(performance: Path, end: str, **changes) -> None:
    path = performance / "power" / f"{end}.json"
    write(path, json.dumps(json.loads(path.read_text()) | changes))


LATE = [[1.0, 0.0], [2.0, 0.0], [3.0, 0.0]]


@pytest.mark.parametrize(
    ("spoil", "expected"),
    [
        (lambda place: (place / "power/client.log").unlink(), "power.files"),
        (lambda place: (place / "power/client.json").unlink(), "power.files"),
        (lambda place: (place / "run_1/spl.txt").unlink(), "power.readings"),
        (lambda place: edit_end(place, "client", session_name="another"), "power.session"),
        (lambda place: edit_end(place, "client", uuid={"client": "x", "server": "y"}), "power.session"),
        (lambda place: edit_end(place, "server", debug=True), "power.session"),
        (lambda place: write(place / "power/server.json", "{"), "power.session"),
        (lambda place: write(place / "power/server.json", "{}"), "power.session"),
        (lambda place: edit_end(place, "server", phases={"ranging": LATE, "testing": LATE}), "power.phases"),
        (lambda place: edit_end(place, "server", phases={"testing": "soon"}), "power.phases"),
        (lambda place: edit_end(place, "server", phases=[1, None, [[]]]), "power.phases"),
        (lambda place: edit_end(place, "client", results={}), None),
        (lambda place: edit_end(place, "client", results={"run_1/spl.txt": 7}), "power.hashes"),
        (lambda place: write(place / "power/ptd_logs.txt", "ERROR: none\n"), "power.hashes"),
    ],
)  # fmt: skip
def test_power_that_was_spoiled(metered, spoil, expected):
    root, performance = metered
    spoil(performance)
    assert (expected in grave(root)) if expected else grave(root) == set()


def test_readings_that_were_raised_have_another_hash(metered):
    root, performance = metered
    path = performance / "run_1/spl.txt"
    write(path, path.read_text().replace("Watts,10000", "Watts,9500"))
    found = {item.id: item for item in audit(root).findings if item.severity is Severity.FAIL}
    assert found["power.hashes"].found == "other than recorded: run_1/spl.txt"
    assert found["power.hashes"].where[0].file.endswith("run_1/spl.txt")


def test_power_of_another_time_and_of_an_unknown_release(metered):
    root, performance = metered
    for end in ("client", "server"):
        edit_end(performance, end, phases={"ranging": LATE, "testing": LATE})
    edit_end(performance, "server", sources={"server.py": "changed"})
    found = {item.id: item for item in audit(root).findings}
    assert "outside of the phase" in found["power.phases"].found
    assert found["power.sources"].severity is Severity.UNKNOWN


def test_power_far_below_the_ranging_run_and_outside_of_the_run(metered):
    root, performance = metered
    figures = audit(root).evidence.performance_runs[0].figures
    write(performance / "ranging/spl.txt", readings(figures.began_at, figures.ended_at, 20_000))
    assert "power.ranging" in grave(root)
    early = figures.began_at.replace(year=2000), figures.ended_at.replace(year=2000)
    write(performance / "run_1/spl.txt", readings(*early, 10_500))
    assert "power.readings" in grave(root)


def test_many_files_in_parallel_with_progress(tree, tmp_path):
    """3,000 files here; what 50,000 take stands in docs/audit.md."""
    root, _ = tree
    vendor = root / "closed/Vendor"
    results = vendor / "results/sys"
    for number in range(40):
        shutil.copytree(results / "llama2-70b-99.9", results / f"resnet50-{number}", copy_function=os.link)
    for number in range(2_000):
        write(vendor / "code" / f"part_{number % 20}" / f"{number}.py", "\n")
    seen: list[tuple[int, int]] = []
    result = audit(root, progress=lambda done, total: seen.append((done, total)), workers=2)
    runs = len(result.evidence.runs)
    assert runs > 160
    assert [pair for pair in seen if pair[1]] == [(done, runs) for done in range(1, runs + 1)]
    assert any(total == 0 and done > 2_000 for done, total in seen)


def test_what_mlcommons_checker_lets_be(tree):
    """It lowers the status, and asks for is_network in the closed and the network division alone."""
    path = place(tree, "systems/sys.json")
    path.write_text(path.read_text().replace('"available"', '"Available"'))
    assert "system.values" not in grave(tree[0])
    for division, holds in (("open", True), ("closed", False)):
        one = Submission("", division, "Vendor")
        system = System("systems/sys.json", {"is_network": "true"}, {})
        (found,) = network(one, system)
        assert (found.severity is Severity.PASS) is holds


def test_only_results_are_audited_as_results(tree, originals):
    """Code, documents and compliance tests may hold logs, scores and descriptions of anything."""
    root, layout = tree
    vendor = root / "closed/Vendor"
    code = vendor / ("code" if layout == "v5" else "src")
    shutil.copytree(originals("Offline", "PerformanceOnly"), code / "warm_up/run")
    write(code / "common/systems/custom_list.json", "{}")
    write(code / "old/measurements/notes.md", "a folder that is named so says nothing of the layout\n")
    write(place(tree, f"compliance/{KEY}/TEST06/accuracy/accuracy.txt"), "hash=0123abc\n")
    shutil.copy(originals("Offline", "PerformanceOnly") / LOGS[2], vendor / "mlperf_log_accuracy_baseline.json")
    if layout == "v5":
        write(vendor / f"measurements/{KEY}/cpu_info.json", "{}")
    assert grave(root) == set()
    assert any("2 sets of logs outside results" in note for note in audit(root).notes)


def test_a_linked_folder_of_code(tree):
    root, layout = tree
    code = root / "closed/Vendor" / ("code" if layout == "v5" else "src")
    code.rename(root / "closed/Vendor/implementation")
    assert grave(root) == {"submission.code"}
    code.symlink_to("implementation")
    assert grave(root) == set()


def test_a_ranging_run_breaks_no_rules(tree, originals):
    root, _ = tree
    performance = place(tree, f"results/{KEY}/performance")
    shutil.copytree(performance / "run_1", performance / "ranging")
    log = performance / "ranging" / LOGS[0]
    log.write_text(
        log.read_text().replace('"result_validity", "value": "VALID"', '"result_validity", "value": "INVALID"')
    )
    assert not {one for one in grave(root) if one.startswith("rules.")}


def test_copies_of_another_submitter(tree):
    """An accuracy folder as it is, and a performance run under other process and thread ids."""
    root, _ = tree
    shutil.copytree(root / "closed/Vendor", root / "closed/Copyist")
    described = root / "closed/Copyist/systems/sys.json"
    described.write_text(json.dumps({**SYSTEM, "submitter": "Copyist"}))
    results = root / "closed/Copyist/results" / KEY.rpartition("/")[0]
    for log in results.glob("*/performance/run_1/mlperf_log_detail.txt"):
        log.write_text(re.sub(r'("pid": )\d+|("tid": )\d+', lambda found: f"{found[1] or found[2]}7", log.read_text()))

    def copied() -> list[str]:
        findings = [item for item in audit(root).findings if item.id == "submission.copies"]
        return [where.file for item in findings for where in item.where]

    assert {file.split("/")[-2] for file in copied()} == {"run_1", "accuracy"}
    for folder in results.glob("*/performance"):
        shutil.rmtree(folder)
    assert {file.split("/")[-2] for file in copied()} == {"accuracy"}


def test_the_seeds_of_v4_1_bring_no_rules_of_later_rounds(tree):
    """Only the seeds of that round are known, and the audit says so."""
    root, _ = tree
    if tree[1] == "v6":
        pytest.skip("v4.1 has the layout of v5")
    for log in root.rglob("mlperf_log_detail.txt"):
        text = log.read_text()
        for name, value in round_seeds()["v4.1"]._asdict().items():
            text = re.sub(rf'(_{name}_rng_seed", "value": )\d+', rf"\g<1>{value}", text)
        log.write_text(text)
    found = {item.id: item for item in audit(root).findings if item.severity is not Severity.PASS}
    assert found["rules.benchmark"].severity is Severity.UNKNOWN and "v4.1" in found["rules.benchmark"].found
    applied = {"rules.data_set", "rules.sample_count", "rules.offline_samples", "rules.tokens_per_sample"}
    assert not applied & found.keys() and "submission.required_scenarios" not in found
