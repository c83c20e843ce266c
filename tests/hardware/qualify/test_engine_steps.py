"""What a step of the engine is held against."""

from __future__ import annotations

from dataclasses import replace

import pytest

from megatoken.analysis.qualified import TOKEN_STEP
from megatoken.engine.config import SHAPES
from megatoken.hardware.qualify import engine_steps
from megatoken.hardware.qualify.shapes import SMALL_LOAD, Load
from megatoken.hardware.qualify.values import Setting, Value


def test_the_small_model_has_a_step_with_a_prompt_which_a_prediction_uses(tiny: Setting) -> None:
    values = engine_steps._steps(SMALL_LOAD, "fp32", 4, None, replace(tiny, seconds=0.001))
    assert [value.name for value in values] == ["decode_step_tiny", TOKEN_STEP]


def test_the_bound_of_a_step_is_its_products_or_weights_and_then_head_and_cache(tiny: Setting) -> None:
    load, model = Load("tiny", 4, 48, "_small"), SHAPES["tiny"]
    bounds = {}
    for rate in (1e9, 1e15):
        values = engine_steps._steps(load, "fp32", 4, (1e10, rate), replace(tiny, seconds=0.001))
        for value in values:
            assert isinstance(value, Value) and value.bound is not None and not value.bound.certain
            bounds[value.name, rate] = value.bound
    decode, mixed = bounds["decode_step_small", 1e9], bounds["mixed_step_small", 1e9]
    # Products of 48 more tokens at 1 GFLOP/s, next to which the cache of some steps more is nothing.
    assert mixed.value - decode.value == pytest.approx(2 * model.linear_parameters * 48 / 1e9 * 1e3, rel=0.01)
    assert decode.formula.startswith("products of 4 tokens, head of ")
    read = bounds["decode_step_small", 1e15]
    assert read.formula.startswith("weights of ") and read.formula.endswith(" GB at measured rates")
    numbers = 4 * (model.linear_parameters + model.hidden_size * model.vocabulary_size)
    assert read.value == pytest.approx(1e3 * numbers / 1e10, rel=0.1)  # and a small cache
    assert engine_steps._rates(replace(tiny, measured={"memory_read": 9.0}), "memory_read", "fp32", 1e9) is None
    measured = {"memory_read": 9.0, "layer_products_fp32_256": 90.0, "gemm_fp32_1024_one_core": 99.0}
    assert engine_steps._rates(replace(tiny, measured=measured), "memory_read", "fp32", 1e9) == (9e9, 90e9)
