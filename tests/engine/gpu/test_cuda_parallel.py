"""GPUs that share a model against one: answers, the end of a rank."""

import random
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from engines import drain
from gpu_engines import SIZES, bf16_checkpoint

from megatoken.engine import Completion, Engine, EngineConfig, Request
from megatoken.errors import MegatokenError

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices"),
]


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("llama")
    bf16_checkpoint(directory, vocab_size=1024, num_key_value_heads=4)
    return directory


def requests() -> list[Request]:
    draw = random.Random(0)
    return [
        Request([draw.randrange(1024) for _ in range(prompt)], 1 + prompt % 7, ignore_end_token=True)
        for prompt in range(1, 90, 3)
    ]


FEWER_THAN_FOUR = pytest.mark.skipif(torch.cuda.device_count() < 4, reason="needs four CUDA devices")
RANKS = pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=FEWER_THAN_FOUR)], ids=["two", "four"])
LEAST_AGREEMENT = {"bf16": 0.9, "fp8": 0.7}


def agreement(one: list[Completion], several: list[Completion]) -> float:
    """Share of first tokens: an answer that once takes the other of two close logits goes its own way."""
    assert [len(answer.token_ids) for answer in one] == [len(answer.token_ids) for answer in several]
    return sum(left.token_ids[0] == right.token_ids[0] for left, right in zip(one, several, strict=True)) / len(one)


@RANKS
@pytest.mark.parametrize(("precision", "fp8_scales"), [("bf16", "tensor"), ("fp8", "tensor"), ("fp8", "row")])
def test_several_gpus_answer_as_one(llama: Path, precision: str, fp8_scales: str, ranks: int) -> None:
    config = {"precision": precision, "fp8_scales": fp8_scales, **SIZES}
    engines = [Engine(llama, EngineConfig(tensor_parallel=number, **config)) for number in (1, ranks)]
    assert (engines[1]._runner._group.shared is not None) == (fp8_scales == "tensor")
    assert agreement(*(engine.generate(requests()) for engine in engines)) >= LEAST_AGREEMENT[precision]


@RANKS
@pytest.mark.parametrize("change", [{"vocab_size": 1025}, {"num_hidden_layers": 1}, {"tie_word_embeddings": True}])
@pytest.mark.parametrize("precision", ["bf16", "fp8"])
def test_other_shapes_answer_as_one(tmp_path: Path, precision: str, change: dict[str, object], ranks: int) -> None:
    """A vocabulary that is on every rank, a first layer that is the last, an embedding that is the head."""
    bf16_checkpoint(tmp_path, **{"vocab_size": 1024, "num_key_value_heads": 4, **change})
    config = {"precision": precision, **SIZES}
    one, several = (
        Engine(tmp_path, EngineConfig(tensor_parallel=number, **config)).generate(requests()) for number in (1, ranks)
    )
    assert agreement(one, several) >= LEAST_AGREEMENT[precision]


@RANKS
@pytest.mark.parametrize(("precision", "fp8_scales"), [("bf16", "tensor"), ("fp8", "tensor"), ("fp8", "row")])
def test_large_steps_answer_as_one(precision: str, fp8_scales: str, tmp_path: Path, ranks: int) -> None:
    rows = 4096
    bf16_checkpoint(tmp_path, vocab_size=1024, hidden_size=4096, num_key_value_heads=4)
    draw = random.Random(1)
    asked = [
        Request([draw.randrange(1024) for _ in range(500 + 10 * number)], 1 + number % 3, ignore_end_token=True)
        for number in range(40)
    ]
    config = {"precision": precision, "fp8_scales": fp8_scales, "max_batched_tokens": rows, "cache_tokens": 65536}
    one, several = (
        Engine(tmp_path, EngineConfig(tensor_parallel=number, **config)).generate(asked) for number in (1, ranks)
    )
    assert agreement(one, several) >= LEAST_AGREEMENT[precision]


def last_word_of(code: str, model: Path) -> bytes:
    """What a process of its own says last, which comes to its end without an error."""
    done = subprocess.run([sys.executable, "-c", code, str(model)], capture_output=True, timeout=90, check=True)
    assert b"Traceback" not in done.stderr
    return done.stdout.split()[-1]


@pytest.mark.parametrize("target_step_seconds", [None, 0.04])
def test_a_process_whose_sums_were_recorded_comes_to_its_end(llama: Path, target_step_seconds: float | None) -> None:
    """NCCL waits for every graph that it has a part in: for ever, where that is not taken away first."""
    code = (
        "import sys; from megatoken.engine import Engine, EngineConfig, Request\n"
        "sizes = {'max_batched_tokens': 64, 'cache_tokens': 4096}\n"
        f"config = EngineConfig(tensor_parallel=2, target_step_seconds={target_step_seconds}, **sizes)\n"
        "engine = Engine(sys.argv[1], config)\n"
        "print(len(engine.generate([Request([1, 2, 3], 40, ignore_end_token=True)])[0].token_ids))\n"
        "assert engine._runner._graphs.recorded"
    )
    assert last_word_of(code, llama) == b"40"


def test_an_engine_forgotten_at_work_lets_its_process_end(llama: Path) -> None:
    """Its sums are on the GPU then, and the ranks that they wait for end first."""
    code = (
        "import sys; from megatoken.engine import Engine, EngineConfig, Request\n"
        "engine = Engine(sys.argv[1], EngineConfig(tensor_parallel=2, max_batched_tokens=64, cache_tokens=4096))\n"
        "engine.submit(Request([1, 2, 3], 400, ignore_end_token=True))\n"
        "for _ in range(40):\n"
        "    engine.step()\n"
        "del engine\n"
        "import torch; torch.cuda.synchronize(); print('done')"
    )
    assert last_word_of(code, llama) == b"done"


@RANKS
@pytest.mark.parametrize("steps", [1, 40])
def test_a_rank_that_dies_is_noticed(llama: Path, steps: int, ranks: int) -> None:
    """Among the first steps, and where they are replayed as graphs."""
    engine = Engine(llama, EngineConfig(tensor_parallel=ranks, **SIZES))
    for number in range(16):
        engine.submit(Request([number], 200, ignore_end_token=True))
    for _ in range(steps):
        engine.step()
    for process in engine._runner._workers._processes:
        process.kill()
    with pytest.raises(MegatokenError, match=r"rank [123] ended with SIGKILL"):
        drain(engine)


@pytest.mark.parametrize("moment", ["fused_all_reduce.FusedAllReduce.rendezvous", "step_graphs.StepGraphs._record"])
def test_a_rank_that_dies_at_the_start_is_noticed(llama: Path, moment: str) -> None:
    """While ranks meet, and among the steps that are recorded ahead: within a process that could wait for ever."""
    code = (
        "import sys, psutil\n"
        "from megatoken.engine import Engine, EngineConfig\n"
        "from megatoken.engine.ops import fused_all_reduce, step_graphs\n"
        "from megatoken.errors import MegatokenError\n"
        f"then = {moment}\n"
        "def die(*arguments):\n"
        "    for process in psutil.Process().children():\n"
        "        if 'megatoken.engine.tensor_parallel_worker' in process.cmdline():\n"
        "            process.kill()\n"
        "    return then(*arguments)\n"
        f"{moment} = die\n"
        "config = EngineConfig(tensor_parallel=2, target_step_seconds=0.04, max_batched_tokens=64, cache_tokens=4096)\n"
        "try:\n"
        "    Engine(sys.argv[1], config)\n"
        "except MegatokenError as error:\n"
        "    print(str(error).replace(' ', '_'))"
    )
    assert last_word_of(code, llama) == b"rank_1_ended_with_SIGKILL:_it_said_nothing"
