"""The comparison with other engines: its workload, its watching from outside, its figures, and one small real run."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

import cpu_offline
from cpu_offline import BENCHMARKS, Options
from megatoken.engine.config import ModelConfig
from peers.environments import ENVIRONMENTS, Environment, interpreter
from peers.monitor import ChildFailedError, Reading, run_watched, share_of_others
from peers.summary import OWN, Run, equal_tokens, memory_bound_bytes, report, summarise, wrong_lengths
from peers.workload import Workload, measured_workload, warm_up_workload


def run_of(engine: str, rate: float, *, memory: int = 400_000_000, others: float | None = 0.01) -> Run:
    return Run(engine, "1.0", {"threads": 2}, rate, 1000 / rate, 3.0, memory, others, [[1, 2, 3], [4, 5]])


def test_workload_is_the_same_for_every_engine_and_its_lengths_for_every_vocabulary() -> None:
    small, large = measured_workload(100), measured_workload(32_000)
    assert small == measured_workload(100)
    assert len(small.prompts) == len(small.output_lengths) == 64
    assert [len(prompt) for prompt in small.prompts] == [len(prompt) for prompt in large.prompts]
    assert small.output_lengths == large.output_lengths
    assert all(16 <= length <= 256 for length in [*map(len, small.prompts), *small.output_lengths])
    assert {id_ for prompt in small.prompts for id_ in prompt} == set(range(100))


def test_warm_up_shares_no_prompt_with_the_measured_requests() -> None:
    warm_up, measured = warm_up_workload(8192), measured_workload(8192)
    assert not {tuple(prompt[:16]) for prompt in warm_up.prompts} & {tuple(prompt[:16]) for prompt in measured.prompts}
    assert warm_up.output_tokens < measured.output_tokens / 10


def test_result_file_is_named_after_the_comparison() -> None:
    options = cpu_offline.parse(["--peer", "vllm-cpu", "--shape", "125m", "--precision", "fp32"])
    assert options.out == BENCHMARKS / "results" / "cpu-125m-fp32-vllm-cpu.json"
    assert cpu_offline.parse(["--out", "x.json"]).out == Path("x.json")


@pytest.mark.parametrize("arguments", [["--threads", "0"], ["--peer", "none"], ["--shape", "70b"]])
def test_unusable_arguments_are_refused(arguments: list[str]) -> None:
    with pytest.raises(SystemExit) as refusal:
        cpu_offline.parse(arguments)
    assert refusal.value.code == 2


def test_children_get_the_threads_and_only_ours_gets_our_import_path(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", "elsewhere")
    options = cpu_offline.parse(["--threads", "3"])
    own, peer = (cpu_offline.environment(options, engine) for engine in (OWN, "openvino"))
    assert own["OMP_NUM_THREADS"] == peer["OMP_NUM_THREADS"] == "3"
    assert (Path(own["PYTHONPATH"]) / "megatoken" / "engine").is_dir()
    assert "PYTHONPATH" not in peer


def test_every_peer_has_an_environment_and_a_runner() -> None:
    assert set(cpu_offline.MODULES) <= {OWN, *ENVIRONMENTS}
    for module in cpu_offline.MODULES.values():
        assert (BENCHMARKS / f"{module.replace('.', '/')}.py").is_file()


def test_an_environment_is_made_once_and_again_when_its_packages_change(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # pip is in every environment, so asking for it needs no network.
    monkeypatch.setitem(ENVIRONMENTS, "bare", Environment(("pip",), constraints=("torch==0",)))
    python = interpreter("bare", tmp_path)
    subprocess.run([python, "-c", "import pip"], check=True)
    stamp, constraints = tmp_path / "bare" / "complete.json", tmp_path / "bare" / "constraints.txt"
    assert constraints.read_text() == "torch==0\n"
    made = stamp.stat().st_mtime_ns
    assert interpreter("bare", tmp_path) == python
    assert stamp.stat().st_mtime_ns == made
    monkeypatch.setitem(ENVIRONMENTS, "bare", Environment(("pip",), constraints=("torch==1",), python="false"))
    with pytest.raises(subprocess.CalledProcessError, match="venv"):  # by a Python that makes none
        interpreter("bare", tmp_path)
    assert not stamp.exists()


def test_wrong_lengths_names_the_request() -> None:
    assert wrong_lengths([[1, 2], [3]], [2, 1]) is None
    assert wrong_lengths([[1, 2], [3]], [2, 2]) == "request 1 got 1 token instead of 2"
    assert wrong_lengths([[1, 2]], [2, 1]) == "1 answers to 2 requests"


@given(st.lists(st.lists(st.integers(0, 3), min_size=1), min_size=1))
def test_equal_tokens_of_a_run_with_itself_is_all(token_ids: list[list[int]]) -> None:
    assert equal_tokens(token_ids, token_ids) == (1.0, len(token_ids))


def test_equal_tokens_counts_positions_and_whole_requests() -> None:
    assert equal_tokens([[1, 2, 3], [4]], [[1, 9, 3], [4]]) == (0.75, 1)


def test_memory_bound() -> None:
    assert memory_bound_bytes(100_000_000, "bf16") == 600_000_000
    assert memory_bound_bytes(100_000_000, "fp32") == 900_000_000


def test_share_of_others_takes_only_what_lies_in_the_timed_part() -> None:
    # Two cores. Before 10 s others are busy; from 10 to 14 s the tree takes 6 of 8 core-seconds, others 1.
    readings = [
        Reading(8.0, 0, 0.0, 100.0),
        Reading(10.0, 0, 0.0, 104.0),
        Reading(12.0, 0, 3.0, 107.5),
        Reading(14.0, 0, 6.0, 111.0),
        Reading(15.0, 0, 6.0, 113.0),
    ]
    assert share_of_others(readings, 9.9, 14.1, cores=2) == pytest.approx(1 / 8)
    assert share_of_others(readings, 10.5, 12.5, cores=2) is None


def test_summary_compares_means_and_keeps_every_run() -> None:
    runs = [run_of(OWN, 100.0), run_of("openvino", 90.0), run_of("openvino", 70.0), run_of(OWN, 140.0)]
    figures = summarise(runs, "openvino", parameters=50_000_000, precision="bf16")
    assert figures["ratio"] == pytest.approx(120 / 80)
    assert figures["ratio_lowest"] == pytest.approx(100 / 90)
    assert figures["ratio_highest"] == pytest.approx(140 / 70)
    assert figures["engines"]["openvino"]["spread"] == pytest.approx(20 / 80)
    assert figures["within_memory_bound"]
    assert [run["output_tokens_per_second"] for run in figures["runs"]] == [100.0, 90.0, 70.0, 140.0]
    assert json.loads(json.dumps(figures)) == figures
    text = report("title", figures)
    assert "ratio megatoken / openvino: 1.50" in text
    assert "NOT COMPARABLE" not in text


def test_report_says_when_the_machine_was_busy_or_memory_too_much() -> None:
    runs = [run_of(OWN, 100.0, memory=500_000_000, others=0.4), run_of("openvino", 90.0, others=None)]
    text = report("title", summarise(runs, "openvino", parameters=50_000_000, precision="bf16"))
    assert "NOT COMPARABLE: others took up to 40%" in text
    assert "ABOVE" in text
    assert "unknown" in text


@pytest.mark.timing
def test_watching_sees_the_memory_and_the_processor_time_of_grandchildren(tmp_path: Path) -> None:
    grandchild = (
        "import time; block = bytearray(b'x' * 150_000_000); end = time.time() + 1.5\nwhile time.time() < end: pass"
    )
    program = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {grandchild!r}]); print('done')"
    run = run_watched([sys.executable, "-c", program], tmp_path, os.environ, tmp_path / "log")
    assert run.output == "done\n"
    assert 150_000_000 < run.peak_memory_bytes < 300_000_000
    assert max(reading.tree_processor_seconds for reading in run.readings) > 0.1
    assert run.started_seconds <= run.readings[0].time_seconds < time.monotonic()


def test_a_failing_child_is_named_with_its_last_line_and_leaves_no_process(tmp_path: Path) -> None:
    program = (
        "import subprocess, sys; child = subprocess.Popen(['sleep', '60']); print(child.pid, file=open('pid', 'w'));"
        "sys.exit('no such model')"
    )
    with pytest.raises(ChildFailedError, match=r"ended with status 1: no such model \(log: "):
        run_watched([sys.executable, "-c", program], tmp_path, os.environ, tmp_path / "log")
    pid = int((tmp_path / "pid").read_text())
    deadline = time.monotonic() + 60
    while Path(f"/proc/{pid}/stat").exists() and time.monotonic() < deadline:
        if Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z":
            break
        time.sleep(0.01)
    else:
        assert not Path(f"/proc/{pid}").exists()


def test_answer_is_alone_on_standard_output_whatever_the_engine_prints(tmp_path: Path) -> None:
    (tmp_path / "noisy.py").write_text(
        "import os\n"
        "from peers.protocol import LoadedEngine, serve\n"
        "def load(specification):\n"
        "    print('loading'); os.system('echo from a child process')\n"
        "    return LoadedEngine(lambda prompts, lengths: [p[:1] * n for p, n in zip(prompts, lengths)], '2', {})\n"
        "serve(load)\n"
    )
    specification = {"warm_up_prompts": [], "warm_up_output_lengths": [], "prompts": [[7, 8]], "output_lengths": [3]}
    (tmp_path / "specification.json").write_text(json.dumps(specification))
    log = tmp_path / "log"
    command = [sys.executable, "noisy.py", "specification.json"]
    run = run_watched(command, tmp_path, os.environ | {"PYTHONPATH": str(BENCHMARKS)}, log)
    answer = json.loads(run.output)
    assert answer["token_ids"] == [[7, 7, 7]]
    assert run.started_seconds < answer["ready_seconds"] <= answer["start_seconds"] <= answer["end_seconds"]
    assert "loading" in log.read_text() and "from a child process" in log.read_text()


@pytest.mark.slow
@pytest.mark.timing
def test_own_and_transformers_answer_the_same_on_a_checkpoint_made_here(tmp_path: Path) -> None:
    shape = ModelConfig(
        "mini", 32, 64, layers=1, heads=4, kv_heads=2, head_dim=8, vocabulary_size=96, max_positions=512
    )
    options = Options("transformers", "mini", "fp32", 1, tmp_path, tmp_path / "result.json")
    python = Path(sys.executable)
    checkpoint = cpu_offline.make_checkpoint(options, shape, python)
    full = measured_workload(shape.vocabulary_size)
    workload = Workload(full.prompts[:8], [16 + index for index in range(8)])
    own, peer = (
        cpu_offline.measure(options, engine, python, checkpoint, workload, Workload(full.prompts[8:10], [2, 3]))
        for engine in (OWN, "transformers")
    )
    figures = summarise([own, peer], "transformers", shape.parameters, "fp32")
    # Two engines whose roundings differ: a near-tie may part one pair of 8, not many.
    assert figures["equal_requests"] >= 7
    assert own.output_tokens_per_second == pytest.approx(workload.output_tokens / own.timed_seconds)
    assert 0.5 < own.startup_seconds < 60
    assert own.peak_memory_bytes > 50_000_000
