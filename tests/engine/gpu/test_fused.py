"""The fused kernels against their torch definitions: interpreted on the CPU, compiled and at full size on a GPU."""

from __future__ import annotations

import pytest
import torch
from gpu_kernels import DEVICE, E4M3, MARKS, ON_GPU, assert_same_bits, full_size, needs_gpu, normal
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from examples import examples
from megatoken.engine.config import RopeConfig
from megatoken.engine.model import rotary_tables
from megatoken.engine.ops import fused, reference, tokens
from megatoken.engine.ops.gated_product import ORDER, interleaved
from megatoken.engine.schemes.fp8_weight import E4M3_MAX

pytestmark = MARKS
EPSILON = 1e-5


def silu_mul_reference(gate_up_T2F: Tensor) -> Tensor:
    """fp32 [T, F] before rounding."""
    gate, up = gate_up_T2F.float().chunk(2, dim=-1)
    return torch.nn.functional.silu(gate) * up


def rotate_reference(
    qkv_TN: Tensor,
    cos_LE: Tensor,
    sin_LE: Tensor,
    positions_T: Tensor,
    kv_heads: int,
    q_norm_E: Tensor | None = None,
    k_norm_E: Tensor | None = None,
    epsilon: float = 0.0,
) -> tuple[Tensor, Tensor, Tensor]:
    """Queries [T, H, E], keys and values [T, K, E] before rounding, all fp32."""
    head_dim = cos_LE.shape[1]
    qkv = qkv_TN.float().view(len(qkv_TN), -1, head_dim)
    q, k, v = qkv.split([qkv.shape[1] - 2 * kv_heads, kv_heads, kv_heads], dim=1)
    if q_norm_E is not None:
        q = reference.rms_norm(q, q_norm_E.float(), epsilon)
    if k_norm_E is not None:
        k = reference.rms_norm(k, k_norm_E.float(), epsilon)
    cos_TE, sin_TE = (table[positions_T.long()].float() for table in (cos_LE, sin_LE))
    return reference.rotate(q, cos_TE, sin_TE), reference.rotate(k, cos_TE, sin_TE), v


def gather_tokens_reference(host_ids_T: Tensor, table_slots_T: Tensor, last_tokens: Tensor) -> Tensor:
    """``tokens.gather_tokens`` in torch."""
    return torch.where(table_slots_T >= 0, last_tokens[table_slots_T.clamp_min(0).long()], host_ids_T)


def scalar(value: float) -> Tensor:
    return torch.tensor([value], dtype=torch.float32, device=DEVICE)


def assert_rounded(actual: Tensor, exact: Tensor) -> None:
    """``actual`` is ``exact`` (fp32) rounded to its dtype, but for sums taken in another order: a few neighbours."""
    expected = exact.to(actual.dtype)
    step = {torch.bfloat16: 2.0**-7, E4M3: 2.0**-3}[actual.dtype]
    smallest = {torch.bfloat16: 1e-30, E4M3: 2.0**-9}[actual.dtype]
    difference = (actual.float() - expected.float()).abs()
    assert torch.isfinite(actual.float()).all()
    assert (difference <= expected.float().abs() * step + smallest).all(), "more than one step apart"
    assert (difference != 0).float().mean() < 0.01, "too many neighbours"


def assert_rounded_sums(actual: Tensor, exact: Tensor) -> None:
    """As ``assert_rounded``, for ``a cos + b sin``: where the terms cancel, their rounding is all that is left."""
    expected = exact.to(actual.dtype).float()
    step = {torch.bfloat16: 2.0**-7, E4M3: 2.0**-3}[actual.dtype]
    noise = exact.abs().max() * 2.0**-20
    smallest = noise + (2.0**-9 if actual.dtype == E4M3 else 0.0)
    difference = (actual.float() - expected).abs()
    assert torch.isfinite(actual.float()).all()
    assert (difference <= expected.abs() * step + smallest).all(), "more than one step apart"
    assert (difference > noise).float().mean() < 0.01, "too many neighbours"


# Residual add, RMSNorm, quantise

NORM_SHAPES = [(1, 64), (3, 100), (2, 256), full_size(1, 8192), full_size(1537, 8192), full_size(333, 4096)] + [
    full_size(rows, hidden) for rows, hidden in ((65, 5120), (7, 3584), (129, 16384), (4096, 8192))
]


def norm_inputs(rows: int, hidden: int) -> tuple[Tensor, Tensor, Tensor]:
    residual = normal(rows, hidden, seed=2, spread=3.0)
    return normal(rows, hidden, seed=1), residual, normal(hidden, seed=3, spread=0.3) + 1


def norm_exact(x: Tensor, weight: Tensor) -> Tensor:
    return reference.rms_norm(x.float(), weight.float(), EPSILON)


@pytest.mark.parametrize(("rows", "hidden"), NORM_SHAPES)
@pytest.mark.parametrize("with_delta", [True, False])
@pytest.mark.parametrize("scale", [None, 0.01])
def test_add_rms_norm(rows: int, hidden: int, with_delta: bool, scale: float | None) -> None:
    delta, residual, weight = norm_inputs(rows, hidden)
    summed = residual + delta if with_delta else residual.clone()
    exact = norm_exact(summed, weight)
    out = fused.add_rms_norm(
        delta if with_delta else None, residual, weight, EPSILON, None if scale is None else scalar(scale)
    )
    assert torch.equal(residual, summed)
    assert out.dtype == (torch.bfloat16 if scale is None else E4M3)
    assert_rounded(out, exact if scale is None else (exact / scale).clamp(-E4M3_MAX, E4M3_MAX))


@pytest.mark.parametrize(("rows", "hidden"), NORM_SHAPES)
def test_add_rms_norm_rows(rows: int, hidden: int) -> None:
    delta, residual, weight = norm_inputs(rows, hidden)
    exact = norm_exact(residual + delta, weight)
    values, scale_T1 = fused.add_rms_norm_rows(delta, residual, weight, EPSILON)
    torch.testing.assert_close(scale_T1, exact.abs().amax(-1, keepdim=True) / E4M3_MAX, rtol=1e-5, atol=0)
    assert_rounded(values, exact / scale_T1)


@pytest.mark.parametrize("warps", [1, 2, 4, 8, 16])
def test_add_rms_norm_is_the_same_for_every_number_of_warps(warps: int) -> None:
    delta, residual, weight = norm_inputs(2, 1024)
    out = fused.add_rms_norm(delta, residual.clone(), weight, EPSILON, scalar(0.01), warps=warps)
    assert_rounded(out, (norm_exact(residual + delta, weight) / 0.01).clamp(-E4M3_MAX, E4M3_MAX))


def test_static_scale_saturates_and_keeps_nan() -> None:
    residual = torch.ones(2, 64, dtype=torch.bfloat16, device=DEVICE)
    residual[0, 0] = 50.0
    residual[1, 5] = float("nan")
    weight = torch.ones(64, dtype=torch.bfloat16, device=DEVICE)
    out = fused.add_rms_norm(None, residual, weight, EPSILON, scalar(1e-4)).float()
    assert (out[0] == E4M3_MAX).all()
    assert out[1].isnan().all()


def test_row_scale_of_a_row_of_zeros() -> None:
    zeros = torch.zeros(2, 64, dtype=torch.bfloat16, device=DEVICE)
    values, scale_T1 = fused.add_rms_norm_rows(zeros, zeros.clone(), zeros[0], EPSILON)
    assert (values.float() == 0).all() and (scale_T1 == 1e-12).all()
    values, scale_T1 = fused.silu_mul_rows(zeros)
    assert (values.float() == 0).all() and (scale_T1 == 1e-12).all()


@pytest.mark.parametrize(("rows", "hidden"), [(3, 128), full_size(1536, 8192)])
def test_add_rms_norm_repeats(rows: int, hidden: int) -> None:
    delta, residual, weight = norm_inputs(rows, hidden)

    def run() -> list[Tensor]:
        changed = residual.clone()
        static = fused.add_rms_norm(delta, changed, weight, EPSILON, scalar(0.01))
        return [changed, static, *fused.add_rms_norm_rows(delta, residual.clone(), weight, EPSILON)]

    assert_same_bits(run)


def test_refuses_views_with_gaps() -> None:
    with pytest.raises(ValueError, match="expected contiguous tensors"):
        fused.silu_mul(normal(4, 64, seed=1)[:, :32])


def test_no_rows() -> None:
    assert fused.add_rms_norm(None, normal(0, 64, seed=1), normal(64, seed=2), EPSILON).shape == (0, 64)
    assert fused.silu_mul(normal(0, 64, seed=1)).shape == (0, 32)
    assert tokens.argmax_rows(normal(0, 64, seed=1)).shape == (0,)


# SiLU, product, quantise

SILU_SHAPES = [(1, 32), (3, 100), (2, 2050), full_size(1, 28672), full_size(1537, 28672), full_size(333, 14336)] + [
    full_size(rows, ffn) for rows, ffn in ((5, 53248), (17, 18944), (4096, 28672))
]


@pytest.mark.parametrize(("rows", "ffn"), SILU_SHAPES)
@pytest.mark.parametrize("scale", [None, 0.05])
def test_silu_mul(rows: int, ffn: int, scale: float | None) -> None:
    gate_up = normal(rows, 2 * ffn, seed=4, spread=4.0)
    exact = silu_mul_reference(gate_up)
    out = fused.silu_mul(gate_up, None if scale is None else scalar(scale))
    assert_rounded(out, exact if scale is None else (exact / scale).clamp(-E4M3_MAX, E4M3_MAX))


@pytest.mark.parametrize(("rows", "ffn"), [(3, 128), (2, 2176), (5, 2048), full_size(256, 28672)])
@pytest.mark.parametrize("scale", [None, 0.05])
def test_silu_mul_interleaved(rows: int, ffn: int, scale: float | None) -> None:
    gate_up = normal(rows, 2 * ffn, seed=4, spread=4.0)
    mixed = interleaved(gate_up.t()).t().contiguous()
    scales = None if scale is None else scalar(scale)
    out = fused.silu_mul(mixed, scales, interleaved=ORDER)
    assert (out.float() == fused.silu_mul(gate_up, scales).float()).all()


@pytest.mark.parametrize(("rows", "ffn"), SILU_SHAPES)
def test_silu_mul_rows(rows: int, ffn: int) -> None:
    gate_up = normal(rows, 2 * ffn, seed=5, spread=4.0)
    exact = silu_mul_reference(gate_up)
    values, scale_T1 = fused.silu_mul_rows(gate_up)
    torch.testing.assert_close(scale_T1, exact.abs().amax(-1, keepdim=True) / E4M3_MAX, rtol=1e-5, atol=0)
    assert_rounded(values, exact / scale_T1)


@pytest.mark.filterwarnings("ignore:overflow encountered")
def test_silu_of_extremes() -> None:
    gate_up = torch.tensor([[-3e38, -200.0, -90.0, 0.0, 90.0, 1.0] + [1.0] * 6], dtype=torch.bfloat16, device=DEVICE)
    out = fused.silu_mul(gate_up).float()
    assert torch.equal(out, torch.tensor([[0.0, 0.0, 0.0, 0.0, 90.0, 0.73046875]], device=DEVICE))


@pytest.mark.parametrize(("rows", "ffn"), [(2, 96), full_size(1536, 28672)])
def test_silu_mul_repeats(rows: int, ffn: int) -> None:
    gate_up = normal(rows, 2 * ffn, seed=6)
    assert_same_bits(lambda: [fused.silu_mul(gate_up, scalar(0.01)), *fused.silu_mul_rows(gate_up)])


# Quantise


@pytest.mark.parametrize(("rows", "width"), NORM_SHAPES)
def test_quantise_rows(rows: int, width: int) -> None:
    x = normal(rows, width, seed=7) * normal(rows, 1, seed=8, spread=50.0)
    values, scale_T1 = fused.quantise_rows(x)
    torch.testing.assert_close(scale_T1, x.float().abs().amax(-1, keepdim=True) / E4M3_MAX, rtol=1e-6, atol=0)
    assert_rounded(values, x.float() / scale_T1)


def test_quantise_rows_of_zeros_and_of_no_numbers() -> None:
    x = torch.zeros(2, 64, dtype=torch.bfloat16, device=DEVICE)
    x[1, 5] = float("nan")
    values, scale_T1 = fused.quantise_rows(x)
    assert (values[0].float() == 0).all() and scale_T1[0].item() == pytest.approx(1e-12)
    assert values[1].float().isnan().any()


@pytest.mark.parametrize(("rows", "width"), [(3, 128), full_size(1537, 8192)])
def test_quantise_rows_repeats(rows: int, width: int) -> None:
    x = normal(rows, width, seed=9)
    assert_same_bits(lambda: list(fused.quantise_rows(x)))


# Rotary embedding and cache write

PAGES, LENGTH = 9, 64


def rotate_inputs(rows: int, heads: int, kv_heads: int, head_dim: int, page_size: int, cache: torch.dtype) -> dict:
    generator = torch.Generator().manual_seed(rows)
    pages = max(PAGES, 2 + rows // page_size)
    slots = torch.randperm((pages - 1) * page_size, generator=generator)[:rows] + page_size
    slots[rows // 2 : rows // 2 + rows // 8] = 0  # padding goes to the dump page
    cos_LE, sin_LE = rotary_tables(RopeConfig(theta=10000.0), head_dim, LENGTH)
    shape = (pages, kv_heads, page_size, head_dim)
    return {
        "qkv_TN": normal(rows, (heads + 2 * kv_heads) * head_dim, seed=7, spread=2.0),
        "cos_LE": cos_LE.to(DEVICE),
        "sin_LE": sin_LE.to(DEVICE),
        "positions_T": torch.randint(LENGTH, (rows,), generator=generator, dtype=torch.int32).to(DEVICE),
        "cache_slots_T": slots.to(torch.int32).to(DEVICE),
        "k_cache": normal(*shape, seed=8, dtype=cache),
        "v_cache": normal(*shape, seed=9, dtype=cache),
    }


def written(cache: Tensor, values_TKE: Tensor, scale: float, slots_T: Tensor) -> Tensor:
    """fp32 copy of ``cache`` with unrounded ``values / scale`` in their places."""
    expected = cache.float()
    page_size = cache.shape[2]
    slots = slots_T.long()
    expected[slots // page_size, :, slots % page_size] = values_TKE / scale
    return expected.clamp(-E4M3_MAX, E4M3_MAX) if cache.dtype == E4M3 else expected


ROTATE_SHAPES = [(1, 4, 2, 16, 4), (5, 6, 1, 16, 2), (9, 3, 3, 24, 4), (11, 20, 4, 8, 2)] + [
    full_size(*shape)
    for shape in (
        (1, 64, 8, 128, 32),
        (1537, 64, 8, 128, 32),
        (333, 32, 8, 128, 16),
        (65, 28, 4, 128, 64),
        (77, 14, 2, 64, 32),
        (40, 32, 32, 96, 32),
        (4096, 64, 8, 128, 32),
    )
]


@pytest.mark.parametrize(("rows", "heads", "kv_heads", "head_dim", "page_size"), ROTATE_SHAPES)
@pytest.mark.parametrize(("cache", "with_norms"), [(E4M3, False), (E4M3, True), (torch.bfloat16, False)])
def test_rotate_and_write(
    rows: int, heads: int, kv_heads: int, head_dim: int, page_size: int, cache: torch.dtype, with_norms: bool
) -> None:
    inputs = rotate_inputs(rows, heads, kv_heads, head_dim, page_size, cache)
    norms: dict = {}
    if with_norms:
        q_norm, k_norm = (normal(head_dim, seed=seed, spread=0.3) + 1 for seed in (10, 11))
        norms = {"q_norm_E": q_norm, "k_norm_E": k_norm, "epsilon": EPSILON}
    k_scale, v_scale = 0.02, 0.004
    tables = {name: inputs[name] for name in ("qkv_TN", "cos_LE", "sin_LE", "positions_T")}
    q, k, v = rotate_reference(**tables, kv_heads=kv_heads, **norms)
    expected = [
        written(inputs[f"{side}_cache"], values, scale, inputs["cache_slots_T"])
        for side, values, scale in (("k", k, k_scale), ("v", v, v_scale))
    ]
    untouched = torch.ones(expected[0].shape[0] * page_size, dtype=torch.bool, device=DEVICE)
    untouched[inputs["cache_slots_T"].long()] = False
    before = {side: inputs[f"{side}_cache"].clone() for side in "kv"}

    q_out = fused.rotate_and_write(**inputs, k_scale=k_scale, v_scale=v_scale, **norms)
    assert q_out.shape == (rows, heads, head_dim)
    assert_rounded_sums(q_out, q)
    for side, exact in zip("kv", expected, strict=True):
        actual = inputs[f"{side}_cache"]
        assert_rounded_sums(actual[1:], exact[1:])
        by_slot = [x.view(torch.uint8).transpose(1, 2).flatten(0, 1)[untouched] for x in (before[side], actual)]
        assert torch.equal(*by_slot)


@pytest.mark.parametrize(("block_heads", "warps"), [(1, 1), (2, 4), (8, 2), (16, 4), (32, 4), (64, 8)])
def test_rotate_and_write_is_the_same_for_every_launch(block_heads: int, warps: int) -> None:
    inputs = rotate_inputs(3, 6, 2, 16, 4, torch.bfloat16)
    names = ("qkv_TN", "cos_LE", "sin_LE", "positions_T")
    q, k, _ = rotate_reference(**{name: inputs[name] for name in names}, kv_heads=2)
    expected = written(inputs["k_cache"], k, 1.0, inputs["cache_slots_T"])
    q_out = fused.rotate_and_write(**inputs, block_heads=block_heads, warps=warps)
    assert_rounded_sums(q_out, q)
    assert_rounded_sums(inputs["k_cache"][1:], expected[1:])


@pytest.mark.parametrize("shape", [(6, 4, 2, 16, 4), full_size((1536, 64, 8, 128, 32))])
def test_rotate_and_write_repeats(shape: tuple[int, int, int, int, int]) -> None:
    inputs = rotate_inputs(*shape, E4M3)

    def run() -> list[Tensor]:
        return [fused.rotate_and_write(**inputs), inputs["k_cache"][1:], inputs["v_cache"][1:]]

    assert_same_bits(run)


@pytest.mark.gpu
@needs_gpu
def test_slots_beyond_two_to_the_31_elements() -> None:
    page_size, pages = 32, 65_600  # 8 heads of 128: page 65,536 starts at element 2^31
    inputs = rotate_inputs(1, 64, 8, 128, page_size, E4M3)
    for side in "kv":
        inputs[f"{side}_cache"] = torch.zeros(pages, 8, page_size, 128, dtype=torch.uint8, device=DEVICE).view(E4M3)
    inputs["cache_slots_T"][0] = slot = 65_590 * page_size + 5
    fused.rotate_and_write(**inputs)
    _, _, v = inputs["qkv_TN"].view(1, -1, 128).split([64, 8, 8], dim=1)
    assert torch.equal(inputs["v_cache"][slot // page_size, :, 5].float(), v[0].to(E4M3).float())


# Tokens in, tokens out


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("rows", [1, 7, 300, full_size(4096)])
def test_gather_tokens(rows: int, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(rows)
    last_tokens = torch.randint(128_256, (50,), generator=generator).to(dtype).to(DEVICE)
    packed = torch.randint(-1, 50, (2 * rows + 1,), generator=generator, dtype=torch.int32).to(DEVICE)
    host_ids, slots = packed[1 : rows + 1], packed[rows + 1 :]
    out = tokens.gather_tokens(host_ids, slots, last_tokens)
    assert out.dtype == dtype
    assert torch.equal(out, gather_tokens_reference(host_ids, slots, last_tokens).to(dtype))


def test_gather_tokens_from_the_host_or_the_table_alone() -> None:
    last_tokens, host_ids = (torch.arange(first, first + 5, device=DEVICE, dtype=torch.int32) for first in (100, 200))
    nowhere = torch.full_like(host_ids, -1)
    assert torch.equal(tokens.gather_tokens(host_ids, nowhere, last_tokens), host_ids)
    assert torch.equal(tokens.gather_tokens(host_ids, host_ids - 200, last_tokens), last_tokens)


ARGMAX_SHAPES = [(1, 40), (3, 100), (2, 301)] + [
    full_size(rows, width) for width in (32_000, 128_256, 151_936) for rows in (1, 2, 63, 870, 1100)
]


@pytest.mark.parametrize(("rows", "width"), ARGMAX_SHAPES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_argmax_rows(rows: int, width: int, dtype: torch.dtype) -> None:
    logits = normal(rows, width, seed=12, dtype=dtype)
    block = {} if ON_GPU else {"block": 64}
    assert torch.equal(tokens.argmax_rows(logits, **block), first_of_highest(logits))


def first_of_highest(logits: Tensor) -> Tensor:
    """``reference.greedy`` with ties decided: torch's argmax may give any of the equals on a GPU."""
    columns = torch.arange(logits.shape[1], device=logits.device)
    highest = logits.amax(-1, keepdim=True)
    return torch.where(logits == highest, columns, logits.shape[1]).amin(-1)


@given(
    st.lists(st.lists(st.sampled_from([-float("inf"), -1.0, -0.0, 0.0, 2.0]), min_size=37, max_size=37), max_size=3),
    st.sampled_from([8, 16, 64]),
    st.sampled_from([1, 2, 7, 100]),
)
@settings(max_examples=25 if ON_GPU else examples(25))
def test_argmax_takes_the_lowest_of_equals_however_it_is_split(rows: list, block: int, programs: int) -> None:
    logits = torch.tensor(rows, dtype=torch.bfloat16, device=DEVICE).view(-1, 37)
    assert torch.equal(tokens.argmax_rows(logits, block=block, programs=programs), first_of_highest(logits))


@pytest.mark.parametrize("programs", [1, 100])
def test_argmax_of_nan_stays_in_the_vocabulary(programs: int) -> None:
    logits = normal(3, 100, seed=13)
    logits[0, 71] = float("nan")
    logits[1] = float("nan")
    logits[2] = float("-inf")
    assert tokens.argmax_rows(logits, block=16, programs=programs).tolist() == [71, 0, 0]


@pytest.mark.parametrize(("rows", "width"), [(2, 100), full_size(870, 32_000), full_size(5, 128_256)])
def test_tokens_repeat(rows: int, width: int) -> None:
    logits = normal(rows, width, seed=14)
    slots = torch.arange(-1, rows - 1, dtype=torch.int32, device=DEVICE)

    def run() -> list[Tensor]:
        ids = tokens.argmax_rows(logits)
        return [ids, tokens.gather_tokens(slots, slots, ids)]

    assert_same_bits(run)
