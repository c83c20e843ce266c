"""Tensor parallelism over processes of this machine: the tokens of one rank, ends of ranks, what cannot be cut."""

import gc
import os
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import psutil
import pytest
import torch
from checkpoints import MIXTURES, make_checkpoint
from engines import answer_and_logits, assert_idle, drain, make_engine, request
from over_admission import expect_short_answers
from quantized_checkpoints import LAYOUTS, quantize

from examples import every
from megatoken.engine import EngineConfig, Sampling
from megatoken.engine.checkpoint import open_model
from megatoken.engine.config import SHAPES
from megatoken.engine.device import plan_memory
from megatoken.engine.parallel import Order, RankGroup, RankWeights, TPWorkers
from megatoken.engine.schemes import find_scheme
from megatoken.errors import CapacityError, ConfigError, MegatokenError

CPU, FP8 = torch.device("cpu"), find_scheme("fp8")
CUT_VOCABULARY, WHOLE_VOCABULARY = 304, 301  # by two ranks or four
FAMILIES = {
    "Llama": {"attention_bias": True, "mlp_bias": True},
    "Qwen2": {"tie_word_embeddings": True},
    "Qwen3": {},
}


def wide_checkpoint(
    directory: Path, architecture: str = "Llama", vocabulary_size: int = CUT_VOCABULARY, **changes: object
) -> Path:
    make_checkpoint(
        directory,
        architecture,
        num_attention_heads=8,
        num_key_value_heads=4,
        vocab_size=vocabulary_size,
        **changes,
    )
    return directory


def workers() -> list[psutil.Process]:
    return [one for one in psutil.Process().children() if "megatoken.engine.tensor_parallel_worker" in one.cmdline()]


@pytest.mark.parametrize(
    ("architecture", "ranks", "vocabulary_size"),
    [
        ("Llama", 2, WHOLE_VOCABULARY),
        ("Qwen2", 4, CUT_VOCABULARY),
        *every(("Llama", 2, CUT_VOCABULARY), ("Llama", 4, WHOLE_VOCABULARY)),
        *every(("Qwen2", 2, WHOLE_VOCABULARY), ("Qwen3", 4, CUT_VOCABULARY)),
    ],
)
def test_ranks_together_answer_as_one_does(
    architecture: str, ranks: int, vocabulary_size: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Prompts in chunks, decodes, draws, preemptions, logits, and the end of the ranks with their engine.

    Sums over ranks are rounded otherwise, so ties might differ.
    """
    directory = wide_checkpoint(tmp_path / "model", architecture, vocabulary_size, **FAMILIES[architecture])
    requests = [request(seed, 4 + seed % 9, 3 + seed * 7 % 29) for seed in range(12)]
    requests += [request(seed, 6, 5, sampling=Sampling(0.9, top_k=20, seed=seed)) for seed in range(3)]
    penalised = Sampling(1.1, seed=2, repetition_penalty=1.3, frequency_penalty=0.5, logit_bias={7: 2.0})
    requests += [request(seed, 6, 5, sampling=penalised, min_tokens=3) for seed in range(3)]
    wanted = [request(seed, 3, 40, prompt_logprobs=seed) for seed in range(3)]
    one_rank, engine = make_engine(directory), make_engine(directory, tensor_parallel=ranks)
    alone = one_rank.generate([*requests, *wanted])
    expect_short_answers(engine._scheduler)
    together = engine.generate([*requests, *wanted])
    assert together[: len(requests)] == alone[: len(requests)]
    for one, other in zip(together[-3:], alone[-3:], strict=True):
        assert one.token_ids == other.token_ids
        found, expected = one.prompt_logprobs, other.prompt_logprobs
        assert [(each.token_id, each.rank) for each in found] == [(each.token_id, each.rank) for each in expected]
        assert [each.logprob for each in found] == pytest.approx([each.logprob for each in expected], abs=1e-4)
    assert engine.state().preemptions > 0
    assert engine.describe()["tensor_parallel"] == ranks
    assert_idle(engine)

    prompt = [number * 31 % vocabulary_size for number in range(20)]
    tokens_alone, logits_alone = answer_and_logits(one_rank, prompt, 6, monkeypatch)
    tokens, logits = answer_and_logits(engine, prompt, 6, monkeypatch)
    assert tokens == tokens_alone
    assert logits.shape == (6, vocabulary_size)
    torch.testing.assert_close(logits, logits_alone, rtol=1e-4, atol=1e-4)

    processes, folder = workers(), engine._runner._workers.folder
    assert len(processes) == ranks - 1 and folder.is_dir()
    del engine
    gc.collect()
    assert not any(process.is_running() for process in processes)
    assert not folder.exists()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("ranks", [2, 4])
def test_columns_of_all_ranks_stand_in_their_order(ranks: int, dtype: torch.dtype, tmp_path: Path) -> None:
    whole_TN = torch.arange(3 * 5 * ranks, dtype=dtype).view(3, -1)

    def gathered(rank: int) -> torch.Tensor:
        own_TN = whole_TN.chunk(ranks, dim=1)[rank].contiguous()
        return RankGroup(tmp_path, rank, ranks, CPU).all_columns(own_TN)

    with ThreadPoolExecutor(ranks) as threads:
        for result_TN in threads.map(gathered, range(ranks)):
            assert torch.equal(result_TN, whole_TN)
            assert result_TN.is_contiguous()


@pytest.mark.parametrize("vocabulary_size", [CUT_VOCABULARY, WHOLE_VOCABULARY])
@pytest.mark.parametrize("tied", [False, True])
def test_a_rank_holds_its_share_alone(tied: bool, vocabulary_size: int, tmp_path: Path) -> None:
    changes = {"attention_bias": True, "tie_word_embeddings": tied}
    source = open_model(wide_checkpoint(tmp_path / "model", vocabulary_size=vocabulary_size, **changes))
    shares = [RankWeights(source, rank, 4) for rank in range(4)]
    cut = vocabulary_size == CUT_VOCABULARY
    held = shares[0].config.tensor_shapes()
    assert ("lm_head.weight" in held) == (cut or not tied)
    for name, shape in held.items():
        parts = [share.read(name, torch.float32, CPU) for share in shares]
        whole = source.read("model.embed_tokens.weight" if tied and "head" in name else name, torch.float32)
        if name.endswith("o_proj.bias"):
            assert torch.equal(sum(parts[1:], parts[0]), whole)
        elif parts[0].shape == whole.shape:
            assert "norm" in name or (not cut and ("embed" in name or "head" in name))
            assert all(torch.equal(part, whole) for part in parts)
        else:
            assert all(part.shape == shape and part.is_contiguous() for part in parts)
            by_columns = any(linear in name for linear in ("o_proj", "down_proj", "embed_tokens"))
            assert torch.equal(torch.cat(parts, dim=int(by_columns)), whole)


def test_experts_are_cut_by_their_own_names(tmp_path: Path) -> None:
    """Mixtral's: w1 and w3 by rows, w2 by columns; every rank has the routers whole."""
    make_checkpoint(tmp_path, "Mixtral", **MIXTURES["Mixtral"])
    source = open_model(tmp_path)
    shares = [RankWeights(source, rank, 2) for rank in range(2)]
    names = [name for name in shares[0].config.tensor_shapes() if "block_sparse_moe" in name]
    assert len(names) == 2 * (1 + 3 * 4)
    for name in names:
        whole, parts = source.read(name, torch.float32), [share.read(name, torch.float32, CPU) for share in shares]
        if name.endswith("gate.weight"):
            assert all(torch.equal(part, whole) for part in parts)
        else:
            assert torch.equal(torch.cat(parts, dim=int("w2" in name)), whole)


@pytest.mark.parametrize("layout", ["modelopt cache", "compressed dynamic"])
def test_fp8_linears_are_cut_with_the_scales_of_their_rows(layout: str, tmp_path: Path) -> None:
    directory = tmp_path / "model"
    quantize(directory, LAYOUTS[layout], num_attention_heads=8, num_key_value_heads=4)
    source = open_model(directory)
    shares = [RankWeights(source, rank, 2).quantized for rank in range(2)]
    for name in source.config.linear_shapes:
        whole, parts = source.quantized.read(name, FP8, CPU), [share.read(name, FP8, CPU) for share in shares]
        values = [part.values_ND.float() * part.scale_N1 for part in parts]
        by_columns = "o_proj" in name or "down_proj" in name
        assert torch.equal(torch.cat(values, dim=int(by_columns)), whole.values_ND.float() * whole.scale_N1)
        assert {part.input_scale for part in parts} == {whole.input_scale}
    assert shares[0].cache_scales(1) == source.quantized.cache_scales(1)
    for ranks in (1, *every(2)):
        engine = make_engine(directory, precision="fp8", tensor_parallel=ranks)
        assert len(engine.generate([request(tokens=1)])[0].token_ids) == 1


def test_a_rank_that_dies_is_an_error_with_its_name(tmp_path: Path) -> None:
    engine = make_engine(wide_checkpoint(tmp_path / "model"), tensor_parallel=2)
    engine.submit(request(tokens=40))
    for _ in range(3):
        engine.step()
    (worker,) = workers()
    worker.kill()
    with pytest.raises(MegatokenError, match="rank 1 ended with SIGKILL: it said nothing"):
        drain(engine)
    assert workers() == []


def test_what_fails_because_a_rank_has_ended_is_said_of_the_rank() -> None:
    ranks = TPWorkers(2, b"")
    ranks._processes[0].kill()
    with pytest.raises(MegatokenError, match="rank 1 ended with SIGKILL"), ranks.blamed():
        raise MegatokenError("the ranks' GPUs cannot share memory")


def test_a_rank_that_ends_once_it_is_loaded_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("megatoken.engine.parallel._RENDEZVOUS_TIMEOUT", timedelta(seconds=1))
    ranks = TPWorkers(2, b'{"parent": 0}')  # of another process: it ends at once
    ranks._processes[0].wait()
    (ranks.folder / "rank1.loaded").touch()
    with pytest.raises(MegatokenError, match="rank 1 ended with code 0"), ranks.blamed():
        ranks.init_group(torch.device("cpu"))


def test_a_rank_that_ends_before_it_has_read_what_to_load_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("megatoken.engine.parallel.WORKER_MODULE", "megatoken.engine.absent")
    ranks = TPWorkers(2, bytes(2**20))  # more than a pipe holds
    ranks._processes[0].wait()
    with pytest.raises(MegatokenError, match=r"rank 1 ended with code 1: .*No module named"):
        ranks.check()
    assert not ranks.folder.exists()


def test_ranks_may_be_idle_for_longer_than_they_take_to_meet(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("megatoken.engine.parallel._RENDEZVOUS_TIMEOUT", timedelta(seconds=2))
    with ThreadPoolExecutor(2) as pool:
        first, second = pool.map(lambda rank: RankGroup(tmp_path, rank, 2, torch.device("cpu")), range(2))
        received = pool.submit(second.receive)
        time.sleep(2.5)
        first.send(Order.RECORD_NEXT)
        assert received.result()[:2] == (Order.RECORD_NEXT, None)


def test_a_rank_that_cannot_load_says_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    directory = wide_checkpoint(tmp_path / "model")
    monkeypatch.setattr("megatoken.engine.runner.worker_specification", lambda *_: b'{"parent": %d}' % os.getpid())
    with pytest.raises(MegatokenError, match=r"rank 1 ended with code 1: KeyError: 'threads'"):
        make_engine(directory, tensor_parallel=2)
    assert workers() == []


def test_ranks_end_with_a_process_that_is_killed(tmp_path: Path) -> None:
    script = """
import os, signal, sys
import psutil
from megatoken import Engine
from megatoken.engine import EngineConfig
engine = Engine(sys.argv[1], EngineConfig(precision="fp32", tensor_parallel=2, max_length=64))
print(*(child.pid for child in psutil.Process().children()), flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""
    directory = wide_checkpoint(tmp_path / "model")
    done = subprocess.run(
        [sys.executable, "-c", script, str(directory)], stdout=subprocess.PIPE, text=True, timeout=200
    )
    assert done.returncode == -signal.SIGKILL
    (pid,) = map(int, done.stdout.split())
    deadline = time.monotonic() + 60
    while psutil.pid_exists(pid):
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_what_cannot_be_cut_is_refused_with_the_numbers(tmp_path: Path) -> None:
    directory = wide_checkpoint(tmp_path / "model")
    for ranks, words in (
        (3, "3 does not divide the 8 heads of model; take a divisor of 4"),
        (8, "8 does .* 4 kv_heads"),
    ):
        with pytest.raises(CapacityError, match=f"tensor_parallel {words}"):
            make_engine(directory, tensor_parallel=ranks)
    with pytest.raises(ConfigError, match="tensor_parallel is 0; it must be at least 1"):
        make_engine(directory, tensor_parallel=0)


@pytest.mark.parametrize("vocabulary_size", [32_000, 32_001])
@pytest.mark.parametrize("tied", [False, True])
def test_each_rank_needs_its_share_of_the_memory(tied: bool, vocabulary_size: int) -> None:
    model = replace(SHAPES["1.1b"], tied_embeddings=tied, vocabulary_size=vocabulary_size)
    whole, half = (plan_memory(model, EngineConfig(tensor_parallel=ranks, max_length=64)) for ranks in (1, 2))
    shared = model.linear_parameters
    if vocabulary_size % 2 == 0:
        shared += 2 * vocabulary_size * model.hidden_size
    assert whole.weights_bytes - half.weights_bytes == shared // 2 * 2  # bf16
    assert half.available_bytes == pytest.approx(whole.available_bytes / 2, rel=0.05)
