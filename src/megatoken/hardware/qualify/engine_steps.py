"""Whole steps of the engine: decodes alone, and decodes together with a prompt."""

from __future__ import annotations

import time

import numpy as np

from megatoken.engine import Engine, EngineConfig, Request
from megatoken.engine.config import Precision
from megatoken.hardware.qualify.processor import engine_precision
from megatoken.hardware.qualify.shapes import CPU_LOAD, GPU_LOAD, SMALL_LOAD, WARM_UP_STEPS, Load
from megatoken.hardware.qualify.values import Bound, Outcomes, Setting, Value

MOST_STEPS = 200
SECONDS_FACTOR = 5
"""Steps are few and long: a value may take so many times the setting's seconds, and has no fewer than three steps."""


def on_cpu(setting: Setting) -> Outcomes:
    """Weights in the engine's fastest format for this processor."""
    read = setting.measured.get("memory_read")
    precision = engine_precision(setting)
    item = 2 if precision == "bf16" else 4
    for load in (SMALL_LOAD, CPU_LOAD):
        yield from _steps(load, precision, item, read, setting)


def on_gpu(setting: Setting) -> Outcomes:
    """fp8 weights and cache."""
    read = setting.measured.get("hbm_read")
    yield from _steps(GPU_LOAD, "fp8", 1, read, setting)


def _steps(
    load: Load, precision: Precision, weight_bytes: int, read_gigabytes: float | None, setting: Setting
) -> Outcomes:
    """Random weights and prompts; ``weight_bytes`` of one weight inside the layers.

    The bound is the time to read weights and cache at the measured rate.
    """
    config = EngineConfig(
        precision=precision,
        max_sequences=load.sequences + 8,
        max_length=load.prompt_tokens + MOST_STEPS + 2,
        max_batched_tokens=load.sequences + load.prompt_tokens,
        cache_tokens=(load.sequences + 8) * (load.prompt_tokens + MOST_STEPS + 64),
    )
    random = np.random.default_rng(0)
    with Engine(load.shape, config) as engine:
        model, plan = engine.model_config, engine.memory_plan

        def submit(answer: int) -> None:
            engine.submit(Request(random.integers(0, model.vocabulary_size, load.prompt_tokens).tolist(), answer))

        def milliseconds(*, with_prompt: bool) -> list[float]:
            windows: list[float] = []
            began = time.perf_counter()
            while len(windows) < MOST_STEPS // 3 and (
                len(windows) < 3 or time.perf_counter() - began < SECONDS_FACTOR * setting.seconds
            ):
                if with_prompt:
                    submit(answer=1)
                before = time.perf_counter()
                engine.step()
                windows.append(1e3 * (time.perf_counter() - before))
            return windows

        for _ in range(load.sequences):
            submit(answer=MOST_STEPS)
        while engine.state().waiting or engine.state().batched_tokens > load.sequences:
            engine.step()
        for _ in range(WARM_UP_STEPS):
            engine.step()
        decodes = milliseconds(with_prompt=False)
        bound = None
        if read_gigabytes is not None:
            head_bytes = max(2, weight_bytes) * model.hidden_size * model.vocabulary_size
            weights = weight_bytes * model.linear_parameters + head_bytes
            tokens = load.sequences * (load.prompt_tokens + WARM_UP_STEPS + len(decodes) / 2)
            cached = tokens * plan.cache_bytes / plan.cache_tokens
            formula = f"weights of {weights / 1e9:.2f} GB and cache of {cached / 1e9:.2f} GB at the measured rate"
            bound = Bound((weights + cached) / read_gigabytes / 1e6, formula, certain=False)
        title = f"Decode step of {load.shape} {precision}, {load.sequences} sequences"
        yield Value(f"decode_step{load.suffix}", title, "ms", decodes, "lower", bound, precision=precision)
        if load is SMALL_LOAD:  # its decodes show what a step costs beyond its kernels
            return
        title = f"Step of {load.shape} {precision}, {load.sequences} sequences and a prompt of {load.prompt_tokens}"
        yield Value(
            f"mixed_step{load.suffix}", title, "ms", milliseconds(with_prompt=True), "lower", precision=precision
        )
