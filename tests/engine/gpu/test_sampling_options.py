"""Sampling options, logprobs and grammars on a GPU: as on the CPU, with and without graphs, and without a wait."""

from __future__ import annotations

import random
import re
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

pytest.importorskip("triton")

from gpu_engines import MARKS, bf16_checkpoint, some_prompts

from megatoken.engine import Engine, EngineConfig, FinishReason, Grammar, GrammarKind, Request, Sampling
from megatoken.engine.active_request import ActiveRequest, activate
from megatoken.engine.config import find_shape
from megatoken.engine.logprobs import best_logprobs
from megatoken.engine.memory import BLOCK_SAMPLES
from megatoken.engine.sampling import sample

pytestmark = MARKS
VOCABULARY = 128_256
SHAPE = replace(find_shape("tiny"), vocabulary_size=VOCABULARY, end_token_ids=(2, 3))
OPTIONS = [
    {"sampling": Sampling(repetition_penalty=1.4)},
    {"sampling": Sampling(1.2, seed=1, presence_penalty=0.8, frequency_penalty=-0.5)},
    {"sampling": Sampling(logit_bias={5: 3.0, 9: -100.0, 250: 1.0})},
    {"sampling": Sampling(1.5, seed=2, min_p=0.1, repetition_penalty=0.8), "min_tokens": 9, "stop_token_ids": (7, 8)},
    {"sampling": Sampling(0.9, seed=3, top_k=50, top_p=0.9)},
    {},
]


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("llama")
    bf16_checkpoint(directory)
    return directory


def some_rows(rows: int) -> tuple[torch.Tensor, list[ActiveRequest], np.ndarray, torch.Tensor]:
    """Logits, requests with long answers, positions, and the last token of each; half have one on the device alone."""
    draws = random.Random(0)
    logits = torch.randn(rows, VOCABULARY, generator=torch.Generator().manual_seed(0)) * 3
    requests, positions, last = [], [], []
    for row in range(rows):
        prompt, answer = ([draws.randrange(VOCABULARY) for _ in range(count)] for count in (40, 200))
        requests.append(activate(Request(prompt, 900, **OPTIONS[row % len(OPTIONS)]), prompt, SHAPE))
        requests[-1].generated.extend(answer[: len(answer) - row % 2])
        positions.append(len(prompt) + len(answer))
        last.append(answer[-1])
    return logits.bfloat16(), requests, np.array(positions), torch.tensor(last)


def chosen_by(device: str, rows: int) -> torch.Tensor:
    logits, requests, positions, last = some_rows(rows)
    chosen = logits.float().argmax(-1).to(device)
    logits, last = logits.to(device), last.to(device)
    with without_waiting(device):
        sample(logits, requests, positions, np.arange(rows, dtype=np.int32), last, chosen, failed := {})
    assert not failed
    return chosen.cpu()


@contextmanager
def without_waiting(device: str) -> Iterator[None]:
    """An error at any call that waits for the GPU."""
    if device == "cpu":
        yield
        return
    torch.cuda.synchronize()
    with warnings.catch_warnings():  # PyTorch says that the mode is a prototype
        warnings.simplefilter("ignore")
        torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_rows_are_chosen_as_on_the_cpu_without_a_wait() -> None:
    rows = 40
    assert torch.equal(chosen_by("cuda", rows), chosen_by("cpu", rows))


def test_logprobs_are_those_of_the_cpu_without_a_wait() -> None:
    logits, *_ = some_rows(40)
    chosen = torch.arange(40)
    wanted = list(range(0, 40, 3))
    expected = best_logprobs(logits, chosen, wanted, 20)
    on_gpu, chosen_on_gpu = logits.cuda(), chosen.cuda()
    with without_waiting("cuda"):
        found = best_logprobs(on_gpu, chosen_on_gpu, wanted, 20)
    assert torch.equal(found[:, 21:].cpu(), expected[:, 21:])
    torch.testing.assert_close(found[:, :21].cpu(), expected[:, :21], rtol=1e-5, atol=1e-5)


def test_memory_of_a_block_is_what_the_plan_reserves() -> None:
    logits, requests, positions, last = some_rows(4 * BLOCK_SAMPLES)
    logits, last = logits.cuda(), last.cuda()
    chosen = logits.float().argmax(-1)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    sample(logits, requests, positions, np.arange(len(requests), dtype=np.int32), last, chosen, {})
    best_logprobs(logits, chosen, range(len(requests)), 20)
    assert torch.cuda.max_memory_allocated() - before <= BLOCK_SAMPLES * VOCABULARY * 96


@pytest.mark.parametrize("overlap", [False, True])
def test_graphs_and_neighbours_change_nothing(llama: Path, overlap: bool) -> None:
    """Short sequences, whose attention is never cut: not a bit differs."""
    config = EngineConfig(max_batched_tokens=96, max_sequences=48, max_length=128, overlap=overlap)
    asked = [
        Request(prompt, 12 + number % 5, ignore_end_token=True, logprobs=number % 3, **OPTIONS[number % len(OPTIONS)])
        for number, prompt in enumerate(some_prompts([10 + number % 7 for number in range(36)]))
    ]
    eager, graphs = (Engine(llama, replace(config, cuda_graphs=on)).generate(asked) for on in (False, True))
    assert [one.token_ids for one in eager] == [one.token_ids for one in graphs]
    assert all(len(one.logprobs) == len(one.token_ids) for one in graphs)
    plain = asked[5::6]
    alone = Engine(llama, config).generate(plain)
    assert [one.token_ids for one in alone] == [one.token_ids for one in graphs[5::6]]


def test_grammars_hold_while_steps_overlap() -> None:
    pytest.importorskip("llguidance")
    engine = Engine("reference", EngineConfig(precision="bf16", device="cuda"))
    pattern = r"[1-9][0-9]{2}-[a-f]{3,6}!"
    asked = [
        Request(f"Write {seed}.", 40, Sampling(seed % 3, seed=seed), grammar=Grammar(GrammarKind.REGEX, pattern))
        for seed in range(12)
    ]
    others = [Request("Tell me about water.", 40) for _ in range(4)]
    expected = engine.generate(others)
    completions = engine.generate([*asked, *others])
    assert [one.text for one in completions[12:]] == [one.text for one in expected]
    for completion in completions[:12]:
        assert completion.finish_reason is FinishReason.STOP and re.fullmatch(pattern, completion.text)
