"""Anatomy of the engine's mixed step on one GPU, in the steady state of real lengths under the real scheduler.

Unofficial: random weights, no LoadGen, no accuracy, forced output lengths. Rates are taken over the second half of
``--seconds``, by events on the device; then a few more steps are traced kernel by kernel. The bound of the layers'
products is their own rate, back to back, measured before in the same process; that of the head and of chunk attention
is a large bf16 product, that of everything else a large copy.
"""

from __future__ import annotations

import argparse
import re
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import count, pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import torch
from torch import Tensor

from gpu_measuring import (
    bf16_teraflops,
    copy_gigabytes_per_second,
    gemm_bound_teraflops,
    operations_per_row,
    report,
    require_gpu,
    write_report,
)
from gpu_trace import traced
from megatoken.datasets.lengths import load_lengths
from megatoken.engine import Engine, EngineConfig, Request
from megatoken.engine.config import SHAPES, Precision
from megatoken.engine.runner import ModelRunner
from megatoken.engine.runner_protocol import LaunchedStep
from megatoken.engine.step_plan import StepPlan
from megatoken.errors import CapacityError, MegatokenError
from megatoken.hardware.power import PowerSampler
from megatoken.hardware.qualify.gpu_timing import device_uuid, timing_event
from step_anatomy import Ceilings, PartOfStep, anatomy, costliest, split_steps

NOTE = "unofficial: engine steps without LoadGen, random weights, forced output lengths"
WAITING_REQUESTS = 128
"""Kept in the queue: more than one step can admit."""
DISTINCT_PROMPTS = 4096
HOST_STEPS = 7


@dataclass(frozen=True, slots=True)
class Options:
    """What runs and for how long; sizes that are None are the engine's own choice."""

    shape: str
    precision: Precision
    lengths: str
    seconds: float
    bound_seconds: float
    traced_steps: int
    max_batched_tokens: int | None
    max_sequences: int | None
    cache_tokens: int | None
    out: Path


@dataclass(frozen=True, slots=True)
class Launched:
    """One step: its plan, when the host had queued it (``time.monotonic()``), its model's first and last work."""

    plan: StepPlan
    seconds: float
    begin: torch.cuda.Event
    end: torch.cuda.Event

    @property
    def rows(self) -> int:
        """Tokens in the step."""
        return int(self.plan.count.sum())


class Recorder:
    """Marks every step of an engine on the device, from after its input has arrived until its ids are on their way.

    The operations that the engine calls are its own but for these marks.
    """

    def __init__(self, engine: Engine) -> None:
        self.steps: list[Launched] = []
        self.check_logits = False
        self.logits_finite: list[Tensor] = []
        runner = cast(ModelRunner, engine._runner)
        self._ops, self._launch = runner._ops, runner.launch
        marked = SimpleNamespace(**{**vars(self._ops), "prepare": self._prepare, "greedy": self._greedy})
        runner._ops = cast(Any, marked)
        runner.launch = cast(Any, self._marked_launch)  # type: ignore[method-assign]

    def _prepare(self, *arguments: Any) -> Any:
        batch = self._ops.prepare(*arguments)
        self._begin = timing_event()
        self._begin.record()
        return batch

    def _greedy(self, logits_SV: Tensor) -> Tensor:
        if self.check_logits:
            self.logits_finite.append(torch.isfinite(logits_SV).all())
        return self._ops.greedy(logits_SV)

    def _marked_launch(self, plan: StepPlan, *arguments: Any, **options: Any) -> LaunchedStep:
        step = self._launch(plan, *arguments, **options)
        end = timing_event()
        end.record()
        self.steps.append(Launched(plan, time.monotonic(), self._begin, end))
        return step


def parse(arguments: Sequence[str]) -> Options:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shape", choices=list(SHAPES), default="llama2-70b")
    parser.add_argument("--precision", choices=["fp8", "bf16"], default="fp8")
    parser.add_argument("--lengths", default="csv", help="IN/OUT tokens of every request; default: the shipped lengths")
    parser.add_argument("--seconds", type=float, default=75.0, help="of which the second half counts (default: 75)")
    parser.add_argument("--bound-seconds", type=float, default=6.0, help="of products back to back (default: 6)")
    parser.add_argument("--traced-steps", type=int, default=8, help="(default: 8)")
    parser.add_argument("--max-batched-tokens", type=int, help="tokens in a step; default: the engine's choice")
    parser.add_argument("--max-sequences", type=int)
    parser.add_argument("--cache-tokens", type=int)
    parser.add_argument("--out", type=Path, required=True, help="JSON file to write")
    options = Options(**vars(parser.parse_args(arguments)))
    if options.lengths != "csv" and not re.fullmatch(r"[1-9]\d*/[1-9]\d*", options.lengths):
        parser.error(f"--lengths {options.lengths}: give IN/OUT, such as 128/2048")
    for name in ("seconds", "bound_seconds", "traced_steps"):
        if getattr(options, name) <= 0:
            parser.error(f"--{name.replace('_', '-')} {getattr(options, name)}: must be above 0")
    return options


def endless_requests(lengths: str, vocabulary_size: int, max_length: int) -> Iterator[Request]:
    """Prompts of random ids whose answers run to their full length: the shipped lengths, or ``IN/OUT``, over again."""
    if lengths == "csv":
        dataset = load_lengths(None, vocabulary_size=vocabulary_size, max_length=max_length)
    else:
        rows = [lengths.replace("/", ",")] * DISTINCT_PROMPTS
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "lengths.csv"
            path.write_text("\n".join(["input_tokens,output_tokens", *rows]))
            dataset = load_lengths(path, vocabulary_size=vocabulary_size, max_length=max_length)
    if dataset.notes:
        raise CapacityError(f"{dataset.notes[0]}: lower --lengths, or take a shape with a longer context")
    return (dataset.requests[number % len(dataset.requests)] for number in count())


class Load:
    """An engine that always has requests waiting."""

    def __init__(self, engine: Engine, requests: Iterator[Request]) -> None:
        self.engine, self.requests = engine, requests

    def fill(self) -> None:
        """Submit what the queue lacks."""
        for _ in range(WAITING_REQUESTS - self.engine.state().waiting):
            self.engine.submit(next(self.requests))

    def steps(self, number: int) -> None:
        """So many, with a full queue before each."""
        for _ in range(number):
            self.fill()
            self.engine.step()

    def run(self, seconds: float) -> None:
        """Steps until the time is over and the last has ended."""
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            self.steps(1)
        torch.cuda.synchronize()

    def host_milliseconds(self) -> float:
        """What a step costs the host, which waits for nothing: each starts with an idle device."""
        milliseconds = []
        for _ in range(HOST_STEPS):
            self.fill()
            torch.cuda.synchronize()
            begin = time.perf_counter()
            self.engine.step()
            milliseconds.append((time.perf_counter() - begin) * 1e3)
        return statistics.median(milliseconds)


def rates(steps: Sequence[Launched]) -> dict[str, float]:
    """Rates and means over consecutive steps that have ended.

    Raises:
        CapacityError: fewer than two.
    """
    if len(steps) < 2:
        raise CapacityError("fewer than two steps in the second half of --seconds; raise it")
    seconds = steps[0].end.elapsed_time(steps[-1].end) / 1e3
    device = [step.begin.elapsed_time(step.end) for step in steps]
    idle = [step.end.elapsed_time(after.begin) for step, after in pairwise(steps)]
    return {
        "steady_output_tokens_per_second": sum(int(step.plan.sample.sum()) for step in steps[1:]) / seconds,
        "processed_tokens_per_second": sum(step.rows for step in steps[1:]) / seconds,
        "steady_steps": len(steps),
        "mean_rows": statistics.mean(step.rows for step in steps),
        "mean_decodes": statistics.mean(step.plan.decodes for step in steps),
        "mean_sequences": statistics.mean(len(step.plan.slot) for step in steps),
        "step_ms": statistics.mean(device),
        "step_ms_median": statistics.median(device),
        "gpu_idle_ms": statistics.mean(idle),
        "gpu_idle_ms_largest": max(idle),
        "gpu_idle_share": sum(idle) / seconds / 1e3,
    }


def measure(options: Options) -> dict[str, Any]:
    copy_rate, bf16_rate = copy_gigabytes_per_second(), bf16_teraflops()
    torch.cuda.empty_cache()  # the engine takes what is free
    config = EngineConfig(
        precision=options.precision,
        device="cuda",
        max_batched_tokens=options.max_batched_tokens,
        max_sequences=options.max_sequences,
        cache_tokens=options.cache_tokens,
    )
    begin = time.monotonic()
    engine = Engine(options.shape, config)
    load_seconds = time.monotonic() - begin
    model, memory = engine.model_config, engine.memory_plan
    print(f"{options.shape} {options.precision} ready after {load_seconds:.1f} s", flush=True)
    load = Load(engine, endless_requests(options.lengths, model.vocabulary_size, memory.max_length))
    with PowerSampler(device_uuid()) as power:
        begin = time.monotonic()
        bound = gemm_bound_teraflops(engine, memory.max_batched_tokens, options.bound_seconds)
        bound_power = power.between(begin, time.monotonic())
        print(f"products alone: {bound:,.0f} TFLOP/s at {bound_power.watts:.0f} W", flush=True)
        recorder = Recorder(engine)
        begin = time.monotonic()
        load.run(options.seconds)
        steady = [step for step in recorder.steps if step.seconds > begin + options.seconds / 2]
        result = rates(steady)
        run_power = power.between(steady[0].seconds, time.monotonic())
    host_ms = load.host_milliseconds()
    runner = cast(ModelRunner, engine._runner)
    screened, runner._screened = runner._screened, None  # it makes no whole logits
    recorder.check_logits = True
    load.steps(1)
    recorder.check_logits, runner._screened = False, screened
    finite = bool(recorder.logits_finite) and all(bool(one) for one in recorder.logits_finite)
    parts, kernels = trace_steps(options, load, recorder, Ceilings(bound, bf16_rate, copy_rate))
    state = engine.state()
    teraflops = result["processed_tokens_per_second"] * operations_per_row(engine) / 1e12
    return {
        **result,
        "host_ms": host_ms,
        "gemm_bound_teraflops_per_second": bound,
        "model_teraflops_per_second": teraflops,
        "gemm_bound_share": teraflops / bound,
        "power_watts": run_power.watts,
        "clock_mhz": run_power.clock_mhz,
        "temperature_celsius": run_power.temperature_celsius,
        "energy_joules_per_output_token": run_power.watts / result["steady_output_tokens_per_second"],
        "energy_joules_per_processed_token": run_power.watts / result["processed_tokens_per_second"],
        "bound_power": asdict(bound_power),
        "copy_gigabytes_per_second": copy_rate,
        "bf16_teraflops_per_second": bf16_rate,
        "resident": state.running,
        "preemptions": state.preemptions,
        "recomputed_tokens": state.recomputed_tokens,
        "logits_finite": finite,
        "load_seconds": load_seconds,
        "engine": engine.describe() | {"memory_plan": asdict(memory)},
        "step": [asdict(part) for part in parts],
        "kernels": kernels,
    }


def trace_steps(
    options: Options, load: Load, recorder: Recorder, ceilings: Ceilings
) -> tuple[list[PartOfStep], list[dict[str, float | str]]]:
    """Parts and kernels of the mean traced step. The first step found an idle device and does not count.

    Raises:
        MegatokenError: the trace does not show the steps that were launched.
    """
    before, steps = len(recorder.steps), options.traced_steps + 2
    kernels = traced(lambda: load.steps(steps))
    seen, plans = split_steps(kernels), [step.plan for step in recorder.steps[before:]]
    if len(seen) + 1 != len(plans):
        raise MegatokenError(f"{len(plans)} steps were launched, the trace shows {len(seen) + 1}")
    seen, plans = seen[1:], plans[1:-1]
    parts = anatomy(seen, plans, load.engine.model_config, options.precision == "fp8", ceilings)
    return parts, costliest(seen)


def show(result: dict[str, Any]) -> None:
    """For a person."""
    print(f"{'mean step':17}{'time':>12}{'share':>7}{'runs':>8}{'achieved of bound':>20}{'share':>15}")
    for part in result["step"]:
        print(PartOfStep(**part).line())
    print(
        f"step {result['step_ms']:.2f} ms on the device, idle {result['gpu_idle_ms']:.3f} ms between steps "
        f"({result['gpu_idle_share']:.2%}), host {result['host_ms']:.1f} ms; "
        f"{result['mean_rows']:.0f} rows, {result['mean_decodes']:.0f} of them decodes\n"
        f"{result['steady_output_tokens_per_second']:,.0f} output tokens/s, "
        f"{result['processed_tokens_per_second']:,.0f} processed tokens/s, "
        f"{result['model_teraflops_per_second']:,.0f} of {result['gemm_bound_teraflops_per_second']:,.0f} TFLOP/s "
        f"({result['gemm_bound_share']:.1%}), {result['power_watts']:.0f} W, "
        f"{result['energy_joules_per_output_token']:.4f} J per output token"
    )


def main() -> None:
    options = parse(sys.argv[1:])
    try:
        require_gpu()
        result = measure(options)
        fields = {"note": NOTE, "options": asdict(options) | {"out": options.out.name}, "result": result}
        write_report(options.out, report("step.py", fields))
    except MegatokenError as error:
        raise SystemExit(f"error: {error}") from error
    show(result)
    if not result["logits_finite"]:
        raise SystemExit("logits are not finite: the figures are of a model that computes nothing")


if __name__ == "__main__":
    main()
