"""Drawing from all tokens in two passes against its definition in float64: interpreted on the CPU, or on a GPU."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from gpu_kernels import BF16, DEVICE, MARKS, assert_same_bits, full_size, normal
from torch import Tensor

from examples import every
from megatoken.engine.active_request import ActiveRequest, activate
from megatoken.engine.config import SHAPES
from megatoken.engine.ops import NO_TOKEN
from megatoken.engine.ops.tokens import CHUNK, draw_rows
from megatoken.engine.request import Request, Sampling
from megatoken.engine.sampling import sample

pytestmark = MARKS


def float64(values: object) -> Tensor:
    return torch.tensor(values, dtype=torch.float64, device=DEVICE)


def bounds(logits_V: Tensor, temperature: float, drawn: int) -> tuple[float, float]:
    """Numbers from the first to below the second draw this token."""
    weights = ((logits_V.double() - logits_V.double().max()) / temperature).exp()
    cumulative = weights.cumsum(0) / weights.sum()
    return float(cumulative[drawn - 1]) if drawn else 0.0, float(cumulative[drawn])


@pytest.mark.parametrize("rows", [3, full_size(1500)])
@pytest.mark.parametrize(
    ("width", "dtype"),
    [(5, BF16), (CHUNK, torch.float32), (3 * CHUNK + 17, BF16)]
    + [*every((5, torch.float32), (CHUNK, BF16), (3 * CHUNK + 17, torch.float32))]
    + [full_size(201_088, dtype) for dtype in (BF16, torch.float32)],
)
def test_a_number_draws_the_token_that_it_falls_on(width: int, rows: int, dtype: torch.dtype) -> None:
    """Up to the rounding of fp32; also from a subset of the rows, and with numbers at both ends."""
    logits_SV = normal(2 * rows, width, seed=1, spread=3.0, dtype=dtype)
    logits_SV[0, 1:-1] = -torch.inf
    picked = torch.arange(0, 2 * rows, 2, device=DEVICE)
    temperatures = float64([0.3 + 0.2 * (row % 7) for row in range(rows)])
    for seed in range(3):
        numbers = torch.rand(rows, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
        numbers[0] = (0.0, 0.5, 1 - 2.0**-53)[seed]
        ids = draw_rows(logits_SV, picked, temperatures, numbers.to(DEVICE)).tolist()
        for row in range(0, rows, 1 + rows // 50):
            low, high = bounds(logits_SV[2 * row], float(temperatures[row]), ids[row])
            assert low - 1e-6 <= numbers[row] <= high + 1e-6
            assert high > low
    assert_same_bits(lambda: [draw_rows(logits_SV, picked, temperatures, numbers.to(DEVICE))])


def test_the_lowest_temperature_takes_the_best_and_the_highest_draws_evenly() -> None:
    logits_SV = normal(2, CHUNK + 300, seed=2)
    logits_SV[0, 4100] = 30.0
    rows = torch.arange(2, device=DEVICE)
    assert draw_rows(logits_SV, rows, float64([1e-320, 1e300]), float64([0.9, 0.25])).tolist() == [4100, 1099]


def active(seed: int, **options: float) -> ActiveRequest:
    return activate(Request([0], 1, Sampling(seed=seed, **options)), [0] * 9, SHAPES["tiny"])


def test_a_step_draws_as_without_the_kernel() -> None:
    """Greedy rows, rows with options and rows without a finite logit stay as they are."""
    options = [{"temperature": 1.0}, {}, {"temperature": 0.7, "top_k": 5}, {"temperature": 1.3}, {"temperature": 1.0}]
    logits_SV = normal(5, 300, seed=3, spread=2.0, dtype=torch.float32)
    logits_SV[4, 7] = torch.nan
    positions = np.array([9, 9, 9, 12, 9])
    requests = [active(seed, **one) for seed, one in enumerate(options)]
    assert [request.draws_from_all for request in requests] == [True, False, False, True, True]
    answers = []
    for draw in (None, draw_rows):
        chosen = torch.tensor([1, 2, 3, 4, NO_TOKEN], device=DEVICE)
        last_tokens = torch.zeros(5, dtype=torch.int64, device=DEVICE)
        sample(logits_SV, requests, positions, np.arange(5, dtype=np.int32), last_tokens, chosen, {}, draw)
        answers.append(chosen.tolist())
    assert answers[0] == answers[1]
    assert answers[0][1] == 2 and answers[0][4] == NO_TOKEN
