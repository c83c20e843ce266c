"""Whole steps of the engine: decodes alone, and decodes together with a prompt."""

from __future__ import annotations

import time

import numpy as np

from megatoken.engine import Engine, EngineConfig, Request
from megatoken.engine.config import Precision
from megatoken.hardware.qualify.processor import engine_precision, note_on_kernels
from megatoken.hardware.qualify.shapes import CPU_LOAD, GPU_LOAD, SMALL_LOAD, WARM_UP_STEPS, Load, fastest_products
from megatoken.hardware.qualify.values import Bound, Outcomes, Setting, Value

MOST_STEPS = 200
SECONDS_FACTOR = 5
"""Steps are few and long: a value may take so many times the setting's seconds, and has no fewer than three steps."""


def on_cpu(setting: Setting) -> Outcomes:
    """Weights in the engine's fastest format for this processor."""
    precision = engine_precision(setting)
    item = 2 if precision == "bf16" else 4
    rates = _rates(setting, "memory_read", precision, 1e9)
    for load in (SMALL_LOAD, CPU_LOAD):
        yield from _steps(load, precision, item, rates, setting)


def on_gpu(setting: Setting) -> Outcomes:
    """fp8 weights and cache."""
    yield from _steps(GPU_LOAD, "fp8", 1, _rates(setting, "hbm_read", "fp8", 1e12), setting)


def _rates(setting: Setting, read: str, precision: Precision, unit: float) -> tuple[float, float] | None:
    """Measured bytes/s of memory and operations/s of the fastest products; None if one is missing."""
    gigabytes, products = setting.measured.get(read), fastest_products(setting.measured, precision)
    return None if gigabytes is None or products is None else (1e9 * gigabytes, unit * products)


def _steps(
    load: Load, precision: Precision, weight_bytes: int, rates: tuple[float, float] | None, setting: Setting
) -> Outcomes:
    """Random weights and prompts; ``weight_bytes`` of one weight inside the layers.

    The bound is what the fastest products, or else the reading of weights, and that of head and cache take at the
    measured ``rates``, see ``_rates``.
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

        def bound(tokens: int, steps_before: float) -> Bound | None:
            """Of a step that computes so many tokens after so many steps of decodes."""
            if rates is None:
                return None
            bytes_rate, operations_rate = rates
            weights = weight_bytes * model.linear_parameters
            head = max(2, weight_bytes) * model.hidden_size * model.vocabulary_size
            cached = load.sequences * (load.prompt_tokens + steps_before) * plan.cache_bytes / plan.cache_tokens
            read, computed = weights / bytes_rate, 2 * model.linear_parameters * tokens / operations_rate
            what = f"products of {tokens} tokens" if computed > read else f"weights of {weights / 1e9:.2f} GB"
            formula = f"{what}, head of {head / 1e9:.2f} GB and cache of {cached / 1e9:.2f} GB at measured rates"
            return Bound(1e3 * (max(read, computed) + (head + cached) / bytes_rate), formula, certain=False)

        note = note_on_kernels(engine.describe())
        decodes = milliseconds(with_prompt=False)
        steps = WARM_UP_STEPS + len(decodes)
        decode_bound = bound(load.sequences, WARM_UP_STEPS + len(decodes) / 2)
        title = f"Decode step of {load.shape} {precision}, {load.sequences} sequences"
        name = f"decode_step{load.suffix}"
        yield Value(name, title, "ms", decodes, "lower", decode_bound, note=note, precision=precision)
        title = f"Step of {load.shape} {precision}, {load.sequences} sequences and a prompt of {load.prompt_tokens}"
        mixed = milliseconds(with_prompt=True)
        mixed_bound = bound(load.sequences + load.prompt_tokens, steps + len(mixed) / 2)
        name = f"mixed_step{load.suffix}"
        yield Value(name, title, "ms", mixed, "lower", mixed_bound, note=note, precision=precision)
