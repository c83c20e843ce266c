"""The kernel benchmarks: what they compare with, their cases, and one case of each through Triton's interpreter."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed")

import attention
import experts
import fused
from megatoken.engine.config import ExpertsConfig
from megatoken.engine.ops.paged_attention import DecodeConfig
from megatoken.engine.ops.prompt_attention import ChunkConfig
from megatoken.hardware.qualify import gpu_timing

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="the benchmarks themselves run on a GPU")
CPU = torch.device("cpu")


def once(launch: Callable[[int], Any], sets: int, launches: int = 16) -> float:
    """Runs every set; a graph's time is the GPU's business."""
    begin = time.perf_counter()
    for number in range(sets):
        launch(number)
    return (time.perf_counter() - begin) / sets * 1e6


@pytest.fixture(autouse=True)
def _on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (gpu_timing, attention, experts, fused):
        monkeypatch.setattr(module, "DEVICE", CPU)
    for module in (attention, experts, fused):
        monkeypatch.setattr(module, "graph_microseconds", once)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    torch.manual_seed(0)


def test_an_output_file_is_asked_for() -> None:
    for module in (attention, fused):
        assert str(module.parse(["--out", "x.json"])) == "x.json"
        with pytest.raises(SystemExit):
            module.parse([])


def test_running_sequences_are_longer_than_the_mean_request() -> None:
    lengths = attention.running_lengths(900)
    assert len(lengths) == 900 and lengths.dtype == np.int32
    assert lengths.min() > 1 and lengths.max() < 2048
    assert 400 < lengths.mean() < 480  # a prompt's 222, and half of an answer weighted by its length
    assert (lengths == attention.running_lengths(900)).all()


def test_exact_rows_are_causal_attention(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention, "KV_HEADS", 2)
    monkeypatch.setattr(attention, "HEAD_DIM", 16)
    monkeypatch.setattr(attention, "SCALE", 16**-0.5)
    caches = torch.randn(5, 2, 16, 16), torch.randn(5, 2, 16, 16)
    q_THE, pages = torch.randn(3, 4, 16), torch.tensor([4, 1])
    out = attention.exact_rows(q_THE, caches, pages, length=20)
    k, v = (side[pages].transpose(1, 2).reshape(32, 2, 16)[:20].repeat_interleave(2, 1) for side in caches)
    for row in range(3):
        seen = 18 + row
        scores = torch.einsum("he,lhe->hl", q_THE[row], k[:seen]) / 4
        expected = torch.einsum("hl,lhe->he", scores.softmax(-1), v[:seen])
        torch.testing.assert_close(out[row], expected)
    deviation = attention.errors(out * 1.01, out, None)
    assert deviation["largest_head_error"] == pytest.approx(0.01, rel=1e-3)


def test_attention_cases_run_and_are_right(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {
        "KV_HEADS": 2,
        "HEAD_DIM": 32,
        "HEADS": {"70b": 8},
        "SCALE": 32**-0.5,
        "POOL_TOKENS": 1024,
    }.items():
        monkeypatch.setattr(attention, name, value)
    monkeypatch.setattr(attention, "copy_gigabytes_per_second", lambda: 4000.0)
    bench = attention.Bench()
    batch = attention.make_batch("few", "70b", 32, np.array([40, 1, 33], dtype=np.int32))
    assert batch.tokens == 74 and len(batch.tables) == 31 // 5
    assert not {0} & set(torch.stack(batch.tables)[:, 0].flatten().tolist())  # no sequence on the dump page
    bench.decode_all(batch, attention.E4M3, [DecodeConfig(32, 4, 1)])
    bench.chunks([(5, 37)] * 2, attention.E4M3, ChunkConfig(64, 32, 4, 1))
    decode, chunk = bench.results
    assert chunk.work == "2 x 5 rows after 32"
    assert bench.skipped == []
    assert decode.kv_gigabytes_per_second == pytest.approx(74 * 2 * 2 * 32 / decode.microseconds / 1e3)
    assert decode.copy_share == pytest.approx(decode.kv_gigabytes_per_second / 4000)
    pairs = 2 * (5 * 32 + 15)
    assert chunk.teraflops_per_second == pytest.approx(4 * 8 * 32 * pairs / chunk.microseconds / 1e6)
    assert chunk.largest_head_error is not None and chunk.largest_head_error < 0.03
    assert decode.largest_head_error is not None and decode.largest_head_error < 0.03


def test_fused_cases_move_what_they_claim(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"POOL_ROWS": 8, "ROWS": (4,), "FEW_ROWS": (4,), "COPY_WORDS": 4096}.items():
        monkeypatch.setattr(fused, name, value)
    shape = fused.Shape("small", 2048, 256, 4, 2, 300, E=32)
    cases = [next(fused.norm_cases(shape)), next(fused.silu_cases(shape))]
    assert [case.moved_bytes for case in cases] == [4 * 2048 * 7 + 2 * 2048, 4 * 256 * 5]
    assert [case.sets for case in cases] == [2, 2]
    results = [fused.measure_case(case, fused.CopyClock(), 4000.0) for case in cases]
    for case, result in zip(cases, results, strict=True):
        assert result.gigabytes_per_second == pytest.approx(case.moved_bytes / result.microseconds / 1e3)
        assert result.copy_share == pytest.approx(result.gigabytes_per_second / 4000)
    assert fused.best([*results, results[0]]) == results


def test_copy_clock_moves_as_many_bytes_as_asked_and_knows_them_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fused, "COPY_WORDS", 4096)
    clock = fused.CopyClock()
    clock.microseconds(3000)
    assert list(clock.known) == [384]  # half of the bytes, in whole units of 512
    assert bool((clock.target[:3840] == ~clock.source[:3840]).all())
    assert clock.microseconds(3000) == clock.known[384]
    clock.microseconds(10**9)
    assert list(clock.known) == [384, 4096]


@pytest.mark.parametrize("precision", experts.PRECISIONS)
def test_both_products_of_experts_are_timed(precision: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(experts, "peak_teraflops", lambda _: 1979.0)
    monkeypatch.setattr(experts, "PAUSE_SECONDS", 0.0)
    shape = experts.Shape("small", 64, ExpertsConfig(4, 2, 32, normalized=True, layers=(0,)))
    layers = experts.weights_of(shape, precision)
    gate_up, down = experts.bursts(shape, precision, layers, 6, 4000.0, tune=False)
    assert (gate_up.product, down.product) == ("gate_up", "down")
    assert 6 <= gate_up.largest_expert_rows <= 12
    operations = {"gate_up": 2 * 24 * 64 * 64, "down": 2 * 24 * 64 * 32}
    for burst in (gate_up, down):
        assert burst.chosen
        assert burst.teraflops == pytest.approx(operations[burst.product] / burst.microseconds / 1e6)
        assert 0 < burst.bound_share < 1
