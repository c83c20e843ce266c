"""The stream of training steps: shards drawn by worker processes, in order, as tensors on the training device."""

from __future__ import annotations

import multiprocessing
import os
import time
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from types import TracebackType

import torch
from torch import Tensor

from reference_model.data import Group, ShardPlan, make_shard, start_worker


class Shards:
    """Endless steps, the same ones whatever the number of workers. A context manager that owns the workers.

    Args:
        plan: What a shard holds.
        workers: Processes.
        first_shard: Index of the first shard; a training that goes on after another starts where that ended.
        device: Where the tensors go.

    Attributes:
        next_shard: Index of the first shard not yet used.
        wait_seconds: Time that training waited for the workers.
        tokens: Tokens of the rows given out, without padding.
        answer_tokens: Those that training learns from.
        rows: Rows given out.
    """

    def __init__(self, plan: ShardPlan, workers: int, first_shard: int, device: torch.device) -> None:
        self._plan = plan
        self._device = device
        self._ahead: deque[Future[list[Group]]] = deque()
        # Workers inherit it at birth: each is one of many, so its tokenizer must not start threads of its own.
        os.environ["TOKENIZERS_PARALLELISM"] = "false"
        self._pool = ProcessPoolExecutor(workers, multiprocessing.get_context("spawn"), start_worker, (plan,))
        self.next_shard = first_shard
        for index in range(first_shard, first_shard + 3 * workers):
            self._ahead.append(self._pool.submit(make_shard, index))
        self.wait_seconds = 0.0
        self.rows = self.tokens = self.answer_tokens = 0

    def __enter__(self) -> Shards:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._pool.shutdown(wait=True, cancel_futures=True)

    def steps(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Token ids and labels of a step, int64 [T] each; a label is -100 where nothing is to be learnt."""
        while True:
            start = time.monotonic()
            groups = self._ahead.popleft().result()
            self.wait_seconds += time.monotonic() - start
            self._ahead.append(self._pool.submit(make_shard, self.next_shard + len(self._ahead) + 1))
            self.next_shard += 1
            parts = [labelled(group, self._device) for group in groups]
            for step in range(self._plan.steps):
                token_ids, labels = (
                    torch.cat([part[which].view(self._plan.steps, -1)[step] for part in parts]) for which in (0, 1)
                )
                for group in groups:
                    lengths_R, starts_R = (
                        rows.reshape(self._plan.steps, -1)[step] for rows in (group.lengths_R, group.answer_starts_R)
                    )
                    self.rows += len(lengths_R)
                    self.tokens += int(lengths_R.sum())
                    self.answer_tokens += int((lengths_R - starts_R).sum())
                yield token_ids, labels


def labelled(group: Group, device: torch.device) -> tuple[Tensor, Tensor]:
    """Token ids and labels of rows, int64 [R, S] each: the label of a position is the answer's token after it."""

    def moved(array: torch.Tensor) -> Tensor:
        # From pinned memory a copy does not wait for the steps that are still running.
        return (array.pin_memory() if device.type == "cuda" else array).to(device, non_blocking=True).long()

    token_ids_RS = moved(torch.from_numpy(group.token_ids_RS.astype("int32")))
    starts_R1 = moved(torch.from_numpy(group.answer_starts_R))[:, None]
    lengths_R1 = moved(torch.from_numpy(group.lengths_R))[:, None]
    positions_S = torch.arange(token_ids_RS.shape[1], device=device)
    answers_RS = (positions_S >= starts_R1 - 1) & (positions_S < lengths_R1 - 1)
    return token_ids_RS, token_ids_RS.roll(-1, dims=1).masked_fill(~answers_RS, -100)
