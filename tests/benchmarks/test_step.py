"""The step benchmark's load, marks and rates, on a real engine on the CPU: host times stand in for the device's."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest
import torch

import gpu_measuring
import step
from gpu_trace import Kernel
from megatoken.engine import Engine, EngineConfig
from megatoken.errors import CapacityError, MegatokenError
from step_anatomy import Ceilings


class HostEvent:
    """An event of a device that runs when it is told to, as the CPU does."""

    def record(self) -> None:
        self.seconds = time.perf_counter()

    def elapsed_time(self, end: HostEvent) -> float:
        return (end.seconds - self.seconds) * 1e3


@pytest.fixture
def load(monkeypatch: pytest.MonkeyPatch) -> step.Load:
    monkeypatch.setattr(step, "timing_event", HostEvent)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    engine = Engine("tiny", EngineConfig(device="cpu", max_batched_tokens=64, max_sequences=16, threads=1))
    return step.Load(engine, step.endless_requests("20/8", engine.model_config.vocabulary_size, 2048))


def test_options_are_checked() -> None:
    options = step.parse(["--lengths", "128/2048", "--max-batched-tokens", "2048", "--out", "x.json"])
    assert (options.lengths, options.max_batched_tokens, options.precision, options.shape) == (
        "128/2048",
        2048,
        "fp8",
        "llama2-70b",
    )
    for wrong in (["--lengths", "0/5"], ["--seconds", "0"], ["--traced-steps", "-1"], ["--precision", "fp32"]):
        with pytest.raises(SystemExit) as refusal:
            step.parse([*wrong, "--out", "x.json"])
        assert refusal.value.code == 2


def test_shipped_lengths_come_over_and_over_and_prompts_differ() -> None:
    requests = step.endless_requests("csv", 32_000, 4096)
    first = [next(requests) for _ in range(3)]
    assert [(len(one.prompt), one.max_tokens) for one in first] == [(134, 220), (278, 257), (548, 109)]
    same = step.endless_requests("5/7", 100, 64)
    drawn = [next(same) for _ in range(step.DISTINCT_PROMPTS + 1)]
    assert {(len(one.prompt), one.max_tokens, one.ignore_end_token) for one in drawn} == {(5, 7, True)}
    assert drawn[0].prompt == drawn[-1].prompt != drawn[1].prompt
    with pytest.raises(CapacityError, match="lower --lengths"):
        step.endless_requests("60/7", 100, 64)


@pytest.mark.timing
def test_rates_of_a_running_engine(load: step.Load) -> None:
    load.steps(3)
    recorder = step.Recorder(load.engine)
    before, begin = load.engine.state(), time.perf_counter()
    load.run(0.5)
    elapsed, state = time.perf_counter() - begin, load.engine.state()
    assert state.waiting >= step.WAITING_REQUESTS - 16
    assert len(recorder.steps) == state.steps - before.steps
    assert sum(one.rows for one in recorder.steps) == state.processed_tokens - before.processed_tokens
    steady = recorder.steps
    rates = step.rates(steady)
    assert rates["mean_rows"] == pytest.approx((state.processed_tokens - before.processed_tokens) / len(steady))
    assert 8 < rates["mean_sequences"] <= 16
    tokens = sum(int(one.plan.sample.sum()) for one in steady)
    assert rates["steady_output_tokens_per_second"] == pytest.approx(tokens / elapsed, rel=0.4)
    step_ms, idle_ms = rates["step_ms"], rates["gpu_idle_ms"]
    assert 0 < idle_ms < step_ms
    assert (step_ms + idle_ms) * len(steady) == pytest.approx(elapsed * 1e3, rel=0.4)
    assert rates["gpu_idle_share"] == pytest.approx(idle_ms / (step_ms + idle_ms), rel=0.5)  # of one step fewer
    with pytest.raises(CapacityError, match="raise it"):
        step.rates(recorder.steps[:1])


def test_marks_change_no_answer_and_logits_are_checked_on_demand(load: step.Load) -> None:
    requests = [next(load.requests) for _ in range(5)]
    expected = load.engine.generate(requests)
    recorder = step.Recorder(load.engine)
    assert load.engine.generate(requests) == expected
    assert recorder.logits_finite == []
    recorder.check_logits = True
    load.steps(1)
    assert [bool(one) for one in recorder.logits_finite] == [True]
    assert load.host_milliseconds() > 0


def test_traced_steps_are_those_that_were_launched(load: step.Load, monkeypatch: pytest.MonkeyPatch) -> None:
    recorder = step.Recorder(load.engine)
    load.steps(3)
    lost = 0

    def traced(run: object) -> list[Kernel]:
        before = len(recorder.steps)
        run()  # type: ignore[operator]
        names = ["_gather_tokens_kernel", "_add_rms_norm_kernel"] * (len(recorder.steps) - before - lost)
        return [Kernel(name, number * 10.0, number * 10.0 + 8) for number, name in enumerate(names)]

    monkeypatch.setattr(step, "traced", traced)
    options = step.parse(["--traced-steps", "4", "--out", "x.json"])
    parts, kernels = step.trace_steps(options, load, recorder, Ceilings(1.0, 1.0, 1.0))
    assert [part.milliseconds for part in parts if part.part == "gaps"] == [pytest.approx(0.004)]
    assert [one["launches"] for one in kernels] == [1, 1]
    lost = 1
    with pytest.raises(MegatokenError, match="6 steps were launched, the trace shows 5"):
        step.trace_steps(options, load, recorder, Ceilings(1.0, 1.0, 1.0))


def test_report_says_when_on_what_and_by_which_command(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    state = {"name": "NVIDIA H200", "driver_version": "580.159.04"}
    monkeypatch.setattr(gpu_measuring, "device_state", lambda: state)
    monkeypatch.setattr("sys.argv", ["/somewhere/step.py", "--shape", "llama2-70b", "--out", "with space.json"])
    path = tmp_path / "new" / "result.json"
    gpu_measuring.write_report(path, gpu_measuring.report("step.py", {"result": {"step_ms": 1.5}}))
    written = json.loads(path.read_text())
    assert written["command"] == "benchmarks/step.py --shape llama2-70b --out 'with space.json'"
    assert written["device"] == state and written["result"] == {"step_ms": 1.5}
    assert written["versions"]["torch"] == torch.__version__
    assert written["date"].endswith("+00:00")
